"""What an outer step, a codec or a merge rule must keep to: one suite for each, for our own and for everybody's.

    flaw_of_step(Lion)  flaw_of_codec(Ternary)  flaw_of_rule(median)        the first flaw in words; empty if none

Run in tests by whoever writes one, and by every peer before it uses one of an installed package (extensions.py).
All peers, whoever takes over from one that died, auditors and replays must end with the same bits (P1).  So each is a
function of its arguments, value by value: it remembers nothing, changes nothing else, and a part of a vector gives that
part of the result.  That it ends with the same bits on other machines can't be seen on one: docs/extend.md says which
operations do.
Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MOMENTS = (1, 2)
_LENGTHS = (1, 7, 256, 4099)
_HOSTILE_BODIES = 64
_LONGEST, _BLOCK = 8, 1024  # bytes that a codec may take: for a value, and once more


def _vectors() -> Iterator[tuple[str, Floats]]:
    """Of the lengths that chunks and their ends have: as in training, of all sizes, and zeros."""
    chance = np.random.default_rng(1)
    for count in _LENGTHS:
        usual = chance.standard_normal(count).astype(np.float32) * np.float32(1e-3)
        yield f"{count} usual values", usual
        sizes = np.exp2(chance.uniform(-60, 60, count)) * np.sign(chance.standard_normal(count))
        yield f"{count} values of all sizes", sizes.astype(np.float32)
        yield f"{count} of the largest values", np.float32(3e38) * np.sign(usual)
        yield f"{count} zeros", np.zeros(count, np.float32)


def _is_vector(found: object, count: int) -> bool:
    return isinstance(found, np.ndarray) and found.dtype == np.float32 and found.shape == (count,)


def _in_words(suite: Callable[[Any], str]) -> Callable[[Any], str]:
    """Whatever a stranger's code raises is its flaw, and what it makes of hostile values is no news."""

    @functools.wraps(suite)
    def look(made: Any) -> str:
        try:
            with np.errstate(all="ignore"):
                return suite(made)
        except Exception as error:  # outermost of the stranger's code
            return f"it fails: {type(error).__name__}: {error}"

    return look


# ---- outer steps -------------------------------------------------------------------------------------------


@_in_words
def flaw_of_step(make: Callable[..., Any]) -> str:
    """`make()`, or with `lr` or `momentum`, gives `step(theta, moments, d, version)`; `make.moments` is 1 or 2."""
    moments = getattr(make, "moments", None)
    if moments not in MOMENTS:
        return (
            f"its `moments` are {moments!r}: expected 1 or 2, the vectors that are kept beside the parameters"
        )
    for told, d_n in _vectors():
        if flaw := _flaw_of_taken(make, moments, d_n):
            return f"{flaw}, with {told}"
    return ""


def _flaw_of_taken(make: Callable[..., Any], moments: int, d_n: Floats) -> str:
    count = len(d_n)
    theta_n = np.linspace(-1, 1, count, dtype=np.float32)
    begin = [theta_n, *(np.zeros(count, np.float32) for _ in range(moments))]
    given, here = d_n.copy(), slice(count // 3, None)
    whole, again, part = ([each.copy() for each in begin] for _ in range(3))
    step, other, third = make(), make(), make()
    for version in (1, 2, 3):
        step.step(whole[0], tuple(whole[1:]), d_n, version)
        if d_n.tobytes() != given.tobytes():
            return "it changes the result that it is given"
        # The next two are steps of objects that did not see the versions before, as a peer that joined has them.
        if version == 3:
            other = make()
        other.step(again[0], tuple(again[1:]), d_n, version)
        third.step(part[0][here], tuple(each[here] for each in part[1:]), d_n[here], version)
    if any(a.tobytes() != b.tobytes() for a, b in zip(whole, again, strict=True)):
        return "it does not end with the same bits twice"
    if any(a[here].tobytes() != b[here].tobytes() for a, b in zip(whole, part, strict=True)):
        return "a part of a chunk does not end as it does within the whole"
    if not all(np.isfinite(each).all() for each in whole) and np.abs(d_n).max() < 1:
        return "a value is not finite"
    return ""


# ---- codecs ------------------------------------------------------------------------------------------------


@_in_words
def flaw_of_codec(codec: Any) -> str:
    """`body_bytes(count)`, `encode(values)`, `decode(body, count)`, and `memory` for what is lost: a share or None."""
    memory = getattr(codec, "memory", 0.0)
    if memory is not None and not (isinstance(memory, float) and 0.0 < memory <= 1.0):
        return (
            f"its `memory` is {memory!r}: expected None, or how much of what was lost is sent later (0 to 1)"
        )
    for told, values_n in _vectors():
        if flaw := _flaw_of_coded(codec, values_n):
            return f"{flaw}, with {told}"
    return _flaw_of_hostile(codec)


def _flaw_of_coded(codec: Any, values_n: Floats) -> str:
    count, given = len(values_n), values_n.copy()
    length = codec.body_bytes(count)
    if not isinstance(length, int) or not 0 <= length <= _LONGEST * count + _BLOCK:
        return f"body_bytes({count}) is {length!r}: expected at most {_LONGEST} a value and {_BLOCK} more"
    body = codec.encode(values_n)
    if not isinstance(body, bytes) or len(body) != length:
        return (
            f"encode gives {type(body).__name__} of {len(body)}, not bytes of body_bytes({count}) = {length}"
        )
    if values_n.tobytes() != given.tobytes():
        return "encode changes its values"
    if codec.encode(values_n.copy()) != body:
        return "encode does not give the same bytes twice"
    decoded_n = codec.decode(memoryview(body), count)
    if not _is_vector(decoded_n, count) or not np.isfinite(decoded_n).all():
        return f"decode does not give {count} finite fp32 values"
    if codec.decode(memoryview(body), count).tobytes() != decoded_n.tobytes():
        return "decode does not give the same values twice"
    if codec.memory is None or np.abs(values_n).max() >= 1:
        return ""
    lost = np.linalg.norm(decoded_n.astype(np.float64) - values_n)
    if lost > np.linalg.norm(values_n.astype(np.float64)):
        return "what is lost is longer than what was given: kept for later, it would grow for ever"
    return ""


def _flaw_of_hostile(codec: Any) -> str:
    """Whoever is in a run can send a body of any bytes: what is none is a ValueError, and no other one."""
    chance = np.random.default_rng(2)
    for count in (1, 256, 4099):
        length = codec.body_bytes(count)
        bodies = [bytes(length), b"\xff" * length, *(chance.bytes(length) for _ in range(_HOSTILE_BODIES))]
        for body in bodies:
            try:
                decoded_n = codec.decode(memoryview(body), count)
            except ValueError:
                continue
            if not _is_vector(decoded_n, count):
                return f"decode of arbitrary bytes gives neither {count} fp32 values nor a ValueError"
    return ""


# ---- merge rules -------------------------------------------------------------------------------------------


@_in_words
def flaw_of_rule(rule: Callable[..., Any]) -> str:
    """`rule(values, weights)`: fp32 [members, count] and [members], whose sum is 1, to fp32 [count]."""
    for told, values_n in _vectors():
        for members in (1, 2, 5, 16):
            if flaw := _flaw_of_merged(rule, values_n, members):
                return f"{flaw}, with {told} of {members} members"
    return ""


def _flaw_of_merged(rule: Callable[..., Any], values_n: Floats, members: int) -> str:
    count, here = len(values_n), slice(len(values_n) // 3, None)
    values_mn = np.stack([np.roll(values_n, at) for at in range(members)])
    weights_m = np.full(members, 1 / members, np.float32)
    given = values_mn.copy()
    merged_n = rule(values_mn, weights_m)
    if not _is_vector(merged_n, count):
        return f"it does not give {count} fp32 values"
    if values_mn.tobytes() != given.tobytes():
        return "it changes the contributions"
    if rule(values_mn, weights_m).tobytes() != merged_n.tobytes():
        return "it does not end with the same bits twice"
    if rule(np.ascontiguousarray(values_mn[:, here]), weights_m).tobytes() != merged_n[here].tobytes():
        return "a part of a chunk does not end as it does within the whole"
    return "a value is not finite" if np.abs(values_n).max() < 1 and not np.isfinite(merged_n).all() else ""
