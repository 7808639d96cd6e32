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
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from farflung.peer.data.data_files import ENDINGS, ending_of
from farflung.peer.data.fingerprint import FIRST_ITEMS, READ_AGAIN, Fingerprint, fingerprint, places
from farflung.peer.data.leased_data import Span
from farflung.peer.data.sample_order import permuted_range
from farflung.peer.data.text_lines import TextLines
from farflung.protocol.errors import UserError
from farflung.protocol.messages import UNKNOWN_LENGTH

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
        return self._items(list(permuted_range(self._seed, span.epoch, self.samples, span.start, span.stop)))

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
