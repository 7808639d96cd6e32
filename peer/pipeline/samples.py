"""From positions of an epoch's order to what the first part takes and what rides along.

Owns: the names of what an item holds, and the making of microbatches of them.
Called by: the loops of batches and of stages.  Must not know: who granted the positions, the network; what models do
with it, but that what is held out may fail in one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import default_collate

from farflung.peer.builtin.corpus import row_of_window
from farflung.peer.checks.forward_check import as_it_was
from farflung.peer.data.leased_data import Span
from farflung.peer.data.sample_source import SampleSource, source_of, tokens_in
from farflung.peer.pipeline.parts import THEIR_ERRORS, Riders, Tensors, first_line
from farflung.peer.pipeline.stage_loop import NonFiniteTensor
from farflung.peer.trainer.model_tensors import dtype_name
from farflung.protocol.errors import FarflungError, StoreError, UserError
from farflung.protocol.messages import UNKNOWN_LENGTH

log = logging.getLogger(__name__)

READ_AGAIN_S = 300.0  # held-out rows that could not be read


class ReadMicrobatch(NamedTuple):
    """A microbatch."""

    given: Tensors  # to the first part
    riders: Riders
    tokens: int


class Samples:
    """`data`: a data set, or what makes one when it is called.  An item is a mapping with the names in `inputs` and
    `riders`, or a tuple of the values in that order, or the only value."""

    def __init__(
        self,
        data: Any,
        inputs: Sequence[str],
        riders: Sequence[str],
        run_seed: int,
        held_out: Any = None,
    ) -> None:
        """`held_out`: another `data`, of items that nobody learns from; None: there is none."""
        self.inputs, self.riders = _names("inputs", inputs), _names("riders", riders)
        if not self.inputs:
            raise UserError("inputs is empty: name what the first part takes, such as inputs=('ids',)")
        if twice := sorted({*self.inputs} & {*self.riders}):
            raise UserError(f"{twice[0]!r} is in inputs and in riders: a value has one place")
        self.source: SampleSource = source_of(_made(data), run_seed)
        if self.source.samples == UNKNOWN_LENGTH:
            raise UserError(
                "this data set is a stream of unknown length: synchronous batches need one with a length"
            )

        self._read_any = False
        self.held_out = HeldOutRows(self, held_out)

    def one_item(self) -> dict[str, Tensor]:
        """Of the run's order the first, without a samples' dimension."""
        return {name: tensor[0] for name, tensor in self._collated(0, 0, 1).items()}

    def read(self, epoch: int, start: int, stop: int) -> ReadMicrobatch:
        """The samples at positions [start, stop) of the epoch's order."""
        return self.microbatch(self._collated(epoch, start, stop), stop - start)

    def microbatch(self, named: Mapping[str, Tensor], count: int) -> ReadMicrobatch:
        return ReadMicrobatch(
            given=tuple(named[name] for name in self.inputs),
            riders={name: named[name] for name in self.riders},
            tokens=tokens_in(named, count),
        )

    def _collated(self, epoch: int, start: int, stop: int) -> dict[str, Tensor]:
        try:
            items = self.source.read(Span(lease=0, epoch=epoch, start=start, stop=stop))
        except FarflungError:
            raise
        except THEIR_ERRORS as error:
            if not self._read_any:
                raise UserError(f"the data set's first sample can't be read: {first_line(error)}") from error
            raise
        self._read_any = True
        if len(items) != stop - start:
            raise UserError(
                f"the data set ends after {start + len(items)} samples, and said it had {self.source.samples}"
            )
        return self.collated(items)

    def collated(self, items: Sequence[Any]) -> dict[str, Tensor]:
        """By name, with a samples' dimension."""
        collated = default_collate([self._named(item) for item in items])
        for name, value in collated.items():
            if not isinstance(value, Tensor):
                raise UserError(
                    f"{name!r} of the data set's items is {type(value).__name__}: tensors are needed"
                )
            if name in self.riders and value.is_floating_point():
                raise UserError(
                    f"{name!r} is {dtype_name(value.dtype)}: riders are integers, what is computed with is an input"
                )
        return dict(collated)

    def _named(self, item: Any) -> dict[str, Any]:
        names = (*self.inputs, *self.riders)
        if isinstance(item, Mapping):
            if missing := [name for name in names if name not in item]:
                raise UserError(
                    f"an item of the data set has no {missing[0]!r}; it has {', '.join(map(str, item))}"
                )
            return {name: item[name] for name in names}
        values = tuple(item) if isinstance(item, tuple | list) else (item,)
        if len(values) != len(names):
            raise UserError(
                f"an item of the data set has {len(values)} values, and inputs and riders name {len(names)}: "
                f"{', '.join(names)}"
            )
        return dict(zip(names, values, strict=True))


class NoHeldOutLoss(Exception):
    """Of these windows there is none at this peer: others may have it."""


class HeldOutRows:
    """The windows of [eval], as microbatches: rows at even distances, opened when they are asked for, and tried again
    now and then as long as that can't be."""

    def __init__(self, samples: Samples, data: Any) -> None:
        self._samples, self._data = samples, data
        self._rows: Any = None
        self._why_not, self._tried_at, self._told_at = "", -math.inf, -math.inf

    def read(self, start: int, stop: int, of: int) -> ReadMicrobatch:
        """Windows [start, stop) of so many."""
        if self._rows is None and time.monotonic() - self._tried_at < READ_AGAIN_S:
            raise NoHeldOutLoss(self._why_not)
        try:
            rows = self._rows = self._opened(of) if self._rows is None else self._rows
            items = [rows[row_of_window(len(rows), window, of)] for window in range(start, stop)]
            return self._samples.microbatch(self._samples.collated(items), stop - start)
        except (FarflungError, *THEIR_ERRORS) as error:
            if self._rows is None or isinstance(error, OSError | StoreError):
                self._rows, self._tried_at = None, time.monotonic()
            raise self.no_loss(error) from error

    @contextmanager
    def computed(self, stage: nn.Module) -> Iterator[None]:
        """In eval mode, and nothing of it remains.  What can't be computed, for whatever reason a model has, ends no
        training."""
        try:
            with as_it_was(stage):
                yield
        except (NonFiniteTensor, UserError, *THEIR_ERRORS) as error:
            raise self.no_loss(error) from error

    def no_loss(self, error: Exception) -> NoHeldOutLoss:
        """What keeps a microbatch from having one.  It is told now and then, not of each."""
        ours = isinstance(error, FarflungError | NonFiniteTensor)
        why = str(error) if ours else first_line(error)
        if time.monotonic() - self._told_at >= READ_AGAIN_S:
            log.warning("of some held-out rows no loss is computed here: %s", why)
            self._told_at = time.monotonic()
        self._why_not = why
        return NoHeldOutLoss(why)

    def _opened(self, windows: int) -> Any:
        rows = _made(self._data)
        wanted = f"[eval] of run.toml wants {windows} held-out rows"
        if rows is None:
            raise UserError(f"{wanted}, and farflung.pipeline was given no held_out")
        if len(rows) < windows:
            raise UserError(f"{wanted}, and there are {len(rows)}")
        return rows


def _made(data: Any) -> Any:
    """The data set, which may be made by what was handed in."""
    has_items = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    return data() if isinstance(data, type) or (callable(data) and not has_items) else data


def _names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise UserError(f"{what} is a tuple of names: write {what}=({names!r},)")
    return tuple(names)
