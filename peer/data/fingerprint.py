"""The fingerprint of a data set: a hash that tells two data sets apart and costs little.

Called by what reads the data (sample_source.py), once, before the first samples are asked for.  Must not know leases,
models or the network.

It is taken over some items: of data that can be indexed 64 at places that follow from its length and the run, of a
stream the first ones.  Items are numbers, texts, bytes, arrays, tensors, and lists, tuples and dicts of these.  Items
of another kind, or that differ when they are read again (random augmentation), have none: then peers compare the
length alone.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

ITEMS = 64
FIRST_ITEMS = 4  # of a stream
READ_AGAIN = 16  # of these, to see whether they are always the same
BYTES = 16
_DOMAIN = b"farflung.data.1"


class Fingerprint(NamedTuple):
    data: bytes  # empty: none
    why_none: str = ""


def places(samples: int, run: bytes) -> list[int]:
    """Which items of so many are looked at: the same ones at every peer of the run."""
    if samples <= ITEMS:
        return list(range(samples))
    drawn = blake3(_DOMAIN + run + str(samples).encode()).digest(length=8 * ITEMS)
    return sorted({int.from_bytes(drawn[at : at + 8], "little") % samples for at in range(0, len(drawn), 8)})


def fingerprint(about: str, read: Callable[[], Iterable[Any]]) -> Fingerprint:
    """`read` gives the items, and again the same ones.  `about`: what else must be equal, such as the length."""
    with _own_chance():
        hashes = []
        for item in read():
            whole = _canonical(item)
            if whole is None:
                return Fingerprint(
                    b"", f"its items are of a kind that has no fixed bytes ({type(item).__name__})"
                )
            hashes.append(blake3(whole).digest())
        for before, item in zip(hashes[:READ_AGAIN], read(), strict=False):
            if blake3(_canonical(item) or b"").digest() != before:
                return Fingerprint(
                    b"", "its items differ when they are read again, as with random augmentation"
                )
    return Fingerprint(blake3(_DOMAIN + about.encode() + b"".join(hashes)).digest(length=BYTES))


@contextmanager
def _own_chance() -> Any:
    """What the items draw at random here is not missing afterwards: a script's seed gives what it gave before."""
    drawn, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(drawn)
    if numpy is not None:
        numpy.random.set_state(arrays)


def _canonical(item: Any) -> bytes | None:
    """The same bytes for equal items on every machine; None for a kind that has none."""
    match item:
        case None | bool() | int():
            return _tagged("i", repr(item).encode())
        case float():
            return _tagged("f", struct.pack("<d", item))
        case str():
            return _tagged("s", item.encode("utf-8", errors="surrogatepass"))
        case bytes() | bytearray():
            return _tagged("y", bytes(item))
        case Tensor():
            flat = item.detach().cpu().contiguous().reshape(-1)
            return _tagged(f"t {item.dtype} {tuple(item.shape)}", flat.view(torch.uint8).numpy().tobytes())
        case Mapping():
            pairs = [(_canonical(key), _canonical(each)) for key, each in item.items()]
            return _joined(
                "d", [part for pair in sorted(pairs, key=lambda pair: pair[0] or b"") for part in pair]
            )
        case list() | tuple():
            return _joined("l", [_canonical(each) for each in item])
    if type(item).__module__ == "numpy" and not getattr(item.dtype, "hasobject", True):
        return _tagged(f"a {item.dtype.str} {item.shape}", item.tobytes())
    return None


def _joined(kind: str, parts: list[bytes | None]) -> bytes | None:
    whole = [part for part in parts if part is not None]
    return _tagged(kind, b"".join(whole)) if len(whole) == len(parts) else None


def _tagged(kind: str, content: bytes) -> bytes:
    return f"{kind} {len(content)}:".encode() + content
