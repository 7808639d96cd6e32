"""The control envelope: one msgpack map per message, bounded and typed.

`encode` and `decode` are used by the coordinator, the peers and the simulator.  Parsing is msgpack's own,
with explicit limits; types are checked by msgspec against the schemas in messages.py.  Nothing is executed,
no extension types are known, and every failure is a FrameError that names its counter (P8).

Two versions of the protocol are spoken, this and the last one, so that a host and its volunteers need not upgrade in
one moment.  A field or a kind of message that came with this version is named below, and the field's default means
what the last version did: `encode` leaves it out of what is said to whom speaks that one, and who hears that one reads
defaults.  Whoever speaks the last one is told all fields that it knows, also those that this one leaves out where they
are as usual.  No field is ever added to what is signed for third parties (`SIGNED`): a signature covers all fields, and
whoever checks it may know fewer.  When PROTOCOL_VERSION is raised, NEW_FIELDS and NEW_KINDS begin empty, and
tests/rig/last_protocol.py is written anew: it says what the version that became the last one knows.
"""

from __future__ import annotations

from typing import Any, cast

import msgpack
import msgspec

from farflung.protocol import limits
from farflung.protocol.errors import FrameError
from farflung.protocol.messages import (
    KINDS,
    AuditChunks,
    Audited,
    Beat,
    Challenge,
    FragmentTick,
    Message,
    ProgressReport,
    Sent,
    Tick,
    kind_of,
)
from farflung.protocol.round_words import Commit, Decision, Plan, Way
from farflung.protocol.signing import Amendment, Head, Kept, KeptCommit
from farflung.protocol.verdicts import Verdict

NEW_FIELDS: dict[type[msgspec.Struct], frozenset[str]] = {
    Challenge: frozenset({"protocol"}),
    Beat: frozenset({"relay", "unmet", "lacks_start", "shelf", "forward"}),
    Tick: frozenset({"relay", "beat_s", "roster_since", "roster_gone"}),
    Way: frozenset({"host"}),
    Plan: frozenset({"groups", "roots", "column"}),
    Decision: frozenset({"summed", "weigh_sums", "foreseen"}),
    ProgressReport: frozenset({"sums", "sum_dots", "sum_tags", "held_since"}),
    Audited: frozenset({"group"}),
    AuditChunks: frozenset({"group", "of_sums"}),
    FragmentTick: frozenset({"encode_no"}),
}
# Not said to whom speaks the last version: whoever decides to say them sees to it.
NEW_KINDS: frozenset[str] = frozenset()
SIGNED = frozenset({Sent, Kept, KeptCommit, Head, Commit, Amendment})

_encoder = msgspec.msgpack.Encoder()


def both_speak(newest: int) -> int:
    """The version for somebody whose newest one this is; 0: there is none.  Everybody speaks the one before, too."""
    shared = min(newest, limits.PROTOCOL_VERSION)
    return shared if shared >= max(newest - 1, limits.LAST_PROTOCOL) else 0


def spoken(part: Any, version: int) -> Any:
    """What there is to encode for whom speaks that version."""
    return part if version >= limits.PROTOCOL_VERSION else _without_news(part)


def _without_news(part: Any) -> Any:
    """The very same object where there is none in it: so its bytes are those that were always said."""
    if isinstance(part, msgspec.Struct):
        new = NEW_FIELDS.get(type(part), frozenset())
        kept = {name: getattr(part, name) for name in part.__struct_fields__ if name not in new}
        values = _without_news(kept)
        if values is kept and not new:
            return part
        return list(values.values()) if part.__struct_config__.array_like else values
    if isinstance(part, dict):
        told = {key: _without_news(value) for key, value in part.items()}
        return told if any(told[key] is not value for key, value in part.items()) else part
    if isinstance(part, tuple | list):
        each_told = [_without_news(each) for each in part]
        return each_told if any(one is not two for one, two in zip(each_told, part, strict=True)) else part
    return part


def encode(message: Message, version: int = limits.PROTOCOL_VERSION) -> bytes:
    """`version`: of the protocol, that its receiver speaks."""
    kind = kind_of(message)
    if version < limits.PROTOCOL_VERSION and kind in NEW_KINDS:
        raise ValueError(f"a {kind} message to somebody who speaks version {version} and does not know it")
    raw = _encoder.encode({"kind": kind, "body": spoken(message, version)})
    if len(raw) > limits.CONTROL_FRAME_BYTES:
        raise ValueError(
            f"{kind_of(message)} message of {len(raw)} bytes is over {limits.CONTROL_FRAME_BYTES}"
        )
    return raw


def decode(raw: bytes, allowed: frozenset[str]) -> Message:
    """One message of an allowed kind, or a FrameError."""
    if len(raw) > limits.CONTROL_FRAME_BYTES:
        raise FrameError(
            Verdict.OVERSIZE, f"control frame of {len(raw)} bytes, at most {limits.CONTROL_FRAME_BYTES}"
        )
    envelope = _unpack(raw)
    if not isinstance(envelope, dict) or envelope.keys() != {"kind", "body"}:
        raise FrameError(Verdict.MALFORMED, "control frame is not a map of kind and body")
    kind = envelope["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise FrameError(Verdict.MALFORMED, f"unknown kind {str(kind)[:40]!r}")
    if kind not in allowed:
        raise FrameError(Verdict.UNAUTHORISED, f"{kind} is not accepted here")
    try:
        return cast(Message, msgspec.convert(envelope["body"], KINDS[kind], strict=True))
    except msgspec.ValidationError as error:
        raise FrameError(Verdict.MALFORMED, f"{kind}: {error}") from None


def _unpack(raw: bytes) -> Any:
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_str_len=limits.CONTROL_STR_BYTES,
            max_bin_len=limits.CONTROL_BIN_BYTES,
            max_array_len=limits.CONTROL_ARRAY_LEN,
            max_map_len=limits.CONTROL_MAP_LEN,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise FrameError(
            Verdict.MALFORMED, f"not msgpack within the limits: {type(error).__name__}"
        ) from None
