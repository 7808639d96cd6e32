"""From positions of an epoch's order to what the first part takes and what rides along.

Owns: the names of what an item holds, and the making of microbatches of them.
Called by: the batch loop.  Must not know: who granted the positions, models, the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import default_collate

from farflung.peer.data.leased_data import Span
from farflung.peer.data.sample_source import SampleSource, source_of, tokens_in
from farflung.peer.pipeline.parts import THEIR_ERRORS, Riders, Tensors, first_line
from farflung.peer.trainer.model_tensors import dtype_name
from farflung.protocol.errors import FarflungError, UserError
from farflung.protocol.messages import UNKNOWN_LENGTH


class ReadMicrobatch(NamedTuple):
    """A microbatch."""

    given: Tensors  # to the first part
    riders: Riders
    tokens: int


class Samples:
    """`data`: a data set, or what makes one when it is called.  An item is a mapping with the names in `inputs` and
    `riders`, or a tuple of the values in that order, or the only value."""

    def __init__(self, data: Any, inputs: Sequence[str], riders: Sequence[str], run_seed: int) -> None:
        self.inputs, self.riders = _names("inputs", inputs), _names("riders", riders)
        if not self.inputs:
            raise UserError("inputs is empty: name what the first part takes, such as inputs=('ids',)")
        if twice := sorted({*self.inputs} & {*self.riders}):
            raise UserError(f"{twice[0]!r} is in inputs and in riders: a value has one place")
        makes = isinstance(data, type) or (
            callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")
        )
        self.source: SampleSource = source_of(data() if makes else data, run_seed)
        if self.source.samples == UNKNOWN_LENGTH:
            raise UserError(
                "this data set is a stream of unknown length: synchronous batches need one with a length"
            )

        self._read_any = False

    def one_item(self) -> dict[str, Tensor]:
        """Of the run's order the first, without a samples' dimension."""
        return {name: tensor[0] for name, tensor in self._collated(0, 0, 1).items()}

    def read(self, epoch: int, start: int, stop: int) -> ReadMicrobatch:
        """The samples at positions [start, stop) of the epoch's order."""
        named = self._collated(epoch, start, stop)
        return ReadMicrobatch(
            given=tuple(named[name] for name in self.inputs),
            riders={name: named[name] for name in self.riders},
            tokens=tokens_in(named, stop - start),
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


def _names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise UserError(f"{what} is a tuple of names: write {what}=({names!r},)")
    return tuple(names)
