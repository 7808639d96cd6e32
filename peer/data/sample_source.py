"""From leased positions to samples: what a data set can do decides how it is read (P7).

Called by `run.batches`.  Must not know leases beyond a span of positions, models, or the network.

A map-style data set is visited in the run's own order.  A stream has no random access: its own order counts, and
positions that belong to others are read and thrown away.  A position before the last one read means reading from
the beginning again.  A stream with a method `skip(n)`, as those of Hugging Face `datasets` have, is asked to skip
instead; one with `set_epoch(epoch)` is told the epoch.  Nothing is imported for that.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from farflung.peer.data.data_files import ENDINGS, ending_of
from farflung.peer.data.leased_data import Span
from farflung.peer.data.text_lines import TextLines
from farflung.protocol.errors import UserError
from farflung.protocol.messages import UNKNOWN_LENGTH

# ---- sample order ------------------------------------------------------------------------------------------
# The order in which samples are visited: a pseudo-random permutation that nobody has to store.
#
# Owns: (seed, epoch, position) -> sample index, the same on every machine. Called by: the trainer and
# `run.batches`, to turn leased positions into indices of the user's dataset. Must not know: leases, datasets,
# torch.
#
# A Feistel network permutes [0, 4**k) for the smallest 4**k >= size; indices outside [0, size) are sent
# through again ("cycle walking", under four times on average), which leaves a permutation of [0, size). Black
# and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 2. Difference: the round function is a
# 64-bit mixer keyed by blake3, not a cipher. It shuffles; it keeps no secret.

_ROUNDS = 6
_BLOCK = 1024  # positions whose samples are found at once
_ORDER_DOMAIN = "farflung.order.1"


def permuted_index(seed: int, epoch: int, size: int, position: int) -> int:
    """The sample at `position` of this epoch's order over `size` samples."""
    return permuted_range(seed, epoch, size, position, position + 1)[0]


def permuted_range(seed: int, epoch: int, size: int, start: int, stop: int) -> list[int]:
    """The samples at positions start, ..., stop - 1."""
    if not 0 <= start <= stop <= size:
        raise ValueError(f"range [{start}, {stop}) is outside [0, {size})")
    found: list[int] = []
    while start < stop:
        first = start - start % _BLOCK
        found += _block(seed, epoch, size, first)[start - first : stop - first].tolist()
        start = first + _BLOCK
    return found


@lru_cache(maxsize=64)
def _block(seed: int, epoch: int, size: int, first: int) -> NDArray[np.uint64]:
    """The samples from this position on.  Leases are read one batch after the other, and the samples of each batch by
    themselves cost more than a small step."""
    keys, half_bits, last = _round_keys(seed, epoch), _half_bits(size), np.uint64(size - 1)
    places_n = np.uint64(first) + np.arange(min(_BLOCK, size - first), dtype=np.uint64)
    indices_n = _feistel(places_n, keys, half_bits)
    while len(outside := np.flatnonzero(indices_n > last)):
        indices_n[outside] = _feistel(indices_n[outside], keys, half_bits)
    return indices_n


def _half_bits(size: int) -> int:
    if size > 2**64:
        raise ValueError(f"size {size} is more than 2**64")
    return max(1, ((size - 1).bit_length() + 1) // 2)


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    # Text, so that any integer is a valid seed and no two pairs collide.
    stream = blake3(f"{_ORDER_DOMAIN}:{seed}:{epoch}".encode()).digest(length=8 * _ROUNDS)
    return np.frombuffer(stream, "<u8").astype(np.uint64)


def _feistel(values_n: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    half, shift = np.uint64(half_bits), np.uint64(64 - half_bits)
    left_n, right_n = values_n >> half, values_n & np.uint64((1 << half_bits) - 1)
    for key in keys:
        left_n, right_n = right_n, left_n ^ (_mix(right_n ^ key) >> shift)
    return (left_n << half) | right_n


def _mix(x_n: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The 64-bit finalizer of splitmix64: every input bit reaches every output bit.  Products keep their lower half."""
    x_n = (x_n ^ (x_n >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_n = (x_n ^ (x_n >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_n ^ (x_n >> np.uint64(31))


# ---- fingerprint -------------------------------------------------------------------------------------------
# The fingerprint of a data set: a hash that tells two data sets apart and costs little.
#
# Called by what reads the data, once, before the first samples are asked for. Must not
# know leases, models or the network.
#
# It is taken over some items: of data that can be indexed 64 at places that follow from its length and the
# run, of a stream the first ones. Items are numbers, texts, bytes, arrays, tensors, and lists, tuples and
# dicts of these. Items of another kind, or that differ when they are read again (random augmentation), have
# none: then peers compare the length alone.

ITEMS = 64
FIRST_ITEMS = 4  # of a stream
READ_AGAIN = 16  # of these, to see whether they are always the same
BYTES = 16
_FINGERPRINT_DOMAIN = b"farflung.data.1"


class Fingerprint(NamedTuple):
    data: bytes  # empty: none
    why_none: str = ""


def places(samples: int, run: bytes) -> list[int]:
    """Which items of so many are looked at: the same ones at every peer of the run."""
    if samples <= ITEMS:
        return list(range(samples))
    drawn = blake3(_FINGERPRINT_DOMAIN + run + str(samples).encode()).digest(length=8 * ITEMS)
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
    return Fingerprint(blake3(_FINGERPRINT_DOMAIN + about.encode() + b"".join(hashes)).digest(length=BYTES))


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


# ---- sample source -----------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

PATIENCE_S = 30.0  # between two words about a long way to the leased samples


class SampleSource(Protocol):
    samples: int  # of an epoch; UNKNOWN_LENGTH as long as a stream has not been read to its end

    def read(self, span: Span) -> list[Any]:
        """The samples of the span; fewer if a stream ends within it."""

    def fingerprint(self, run: bytes) -> Fingerprint:
        """Of what the data set has in it: equal data sets have equal ones, in one run."""


def source_of(dataset: Any, seed: int) -> SampleSource:
    """UserError for what can't be read twice in the same order."""
    if isinstance(dataset, (str, os.PathLike)):
        if ending_of(place := os.fspath(dataset)) in ENDINGS:
            raise UserError(
                f"{place}: shards of tokens are no text: farflung.TokenShards({place!r}, length=...)"
            )
        dataset = TextLines(dataset)
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if not is_stream and hasattr(dataset, "__len__"):
        return MapStyle(dataset, seed)
    if hasattr(dataset, "__iter__"):
        return Stream(dataset)
    raise UserError(
        f"{type(dataset).__name__} is no data set: it needs __len__ and __getitem__, or __iter__ that "
        "begins anew each time, or be the path of a text file"
    )


class MapStyle:
    def __init__(self, dataset: Any, seed: int) -> None:
        self.samples = _checked(len(dataset))
        self._dataset, self._seed = dataset, seed

    def read(self, span: Span) -> list[Any]:
        return self._items(permuted_range(self._seed, span.epoch, self.samples, span.start, span.stop))

    def _items(self, indices: list[int]) -> list[Any]:
        # Of torch's own convention; many times as fast.
        at_once = getattr(self._dataset, "__getitems__", None)
        return list(at_once(indices)) if at_once is not None else [self._dataset[index] for index in indices]

    def fingerprint(self, run: bytes) -> Fingerprint:
        """Of items as they are read for training, a few at a time: each may be a request to a store far away."""
        looked_at = places(self.samples, run)
        few = [looked_at[at : at + READ_AGAIN] for at in range(0, len(looked_at), READ_AGAIN)]
        return fingerprint(
            f"{self.samples} indexed", lambda: (item for indices in few for item in self._items(indices))
        )


class Stream:
    def __init__(self, dataset: Any, clock: Callable[[], float] = time.monotonic) -> None:
        if hasattr(dataset, "__next__"):
            raise UserError(
                f"{type(dataset).__name__} can be read only once, and samples that a lost peer had leased must be read "
                "again: pass a data set whose __iter__ begins anew each time (a torch IterableDataset)"
            )
        self._named = _length_of(dataset)
        self.samples = self._named
        self._dataset, self._clock = dataset, clock
        self._iterator: Iterator[Any] = iter(())
        self._epoch, self._at = -1, 0  # where the iterator stands

    def read(self, span: Span) -> list[Any]:
        if span.start >= self.samples:
            return []
        if span.epoch != self._epoch or span.start < self._at:
            self._begin(span.epoch, span.start)
        self._pass_over(span.start)
        found = list(islice(self._iterator, max(0, span.stop - self._at))) if self._at == span.start else []
        self._at += len(found)
        if self._at < span.stop:
            self._ends()
        return found

    def fingerprint(self, run: bytes) -> Fingerprint:
        """Of its first items: it begins anew for that, as it does for every epoch."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(0)
        return fingerprint("stream", lambda: islice(iter(self._dataset), FIRST_ITEMS))

    def _begin(self, epoch: int, start: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        can_skip = start > 0 and callable(getattr(self._dataset, "skip", None))
        self._iterator = iter(self._dataset.skip(start) if can_skip else self._dataset)
        self._epoch, self._at = epoch, start if can_skip else 0

    def _pass_over(self, start: int) -> None:
        """Samples before `start` are others'."""
        warn_at = self._clock() + PATIENCE_S
        while self._at < start:
            missing = object()
            if next(self._iterator, missing) is missing:
                return
            self._at += 1
            if self._at % 1024 == 0 and self._clock() >= warn_at:
                warn_at += PATIENCE_S
                log.warning("on the way to the leased samples: at %d of %d in the stream", self._at, start)

    def _ends(self) -> None:
        if self._named not in (UNKNOWN_LENGTH, self._at):
            raise UserError(f"the data set says it has {self._named} samples, and ends after {self._at}")
        self.samples = _checked(self._at)


def _length_of(dataset: Any) -> int:
    """Of a stream: many know theirs, others raise TypeError or have no such method."""
    try:
        return _checked(len(dataset))
    except (TypeError, NotImplementedError):
        return UNKNOWN_LENGTH


def _checked(samples: int) -> int:
    if samples < 1:
        raise UserError("the data set is empty")
    return samples


def refuse_lists(sample: object) -> None:
    """torch's own collate turns them into a list of tensors, one for each place: no model takes that."""
    if not isinstance(sample, Mapping):
        return
    for name, value in sample.items():
        if isinstance(value, list) and value and isinstance(value[0], (int, float)):
            raise UserError(
                f"the data set's samples have plain lists of numbers ({name!r}) and no tensors: give run.batches "
                'dataset.with_format("torch"), or collate=, such as a DataCollator of transformers'
            )


# ---- how much a batch weighs


def tokens_in(batch: object, samples: int) -> int:
    """Elements of the first integer tensor with two or more dimensions, an image aside; else the number of samples."""
    found = _first_token_tensor(batch)
    return samples if found is None else found.numel() or samples


def _first_token_tensor(batch: object) -> Tensor | None:
    if isinstance(batch, Tensor):
        whole = not batch.is_floating_point() and not batch.is_complex()
        image = batch.dtype == torch.uint8 and batch.dim() >= 3
        return batch if whole and batch.dim() >= 2 and not image else None
    if isinstance(batch, Mapping):
        return next((t for t in map(_first_token_tensor, batch.values()) if t is not None), None)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return next((t for t in map(_first_token_tensor, batch) if t is not None), None)
    return None


def pinned(batch: Any, pin: Callable[[Tensor], Tensor] = Tensor.pin_memory) -> Any:
    """The batch with its tensors in memory from which a GPU copies beside the host; what holds them is made anew.

    Something of another kind that has a `pin_memory` of its own does it by that, as for a DataLoader.
    """
    if isinstance(batch, Tensor):
        return pin(batch) if batch.device.type == "cpu" and batch.layout == torch.strided else batch
    if isinstance(batch, (str, bytes)):
        return batch
    if callable(own := getattr(batch, "pin_memory", None)):
        return own()
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        made.update({name: pinned(value, pin) for name, value in batch.items()})
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(pinned(value, pin) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(pinned(value, pin) for value in batch)
    return batch
