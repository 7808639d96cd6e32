"""The payload of a crossing: what one microbatch sends over one border, one way.  Pure.

Written by the shell of a trainer, read by the agent before a byte of it is believed (stage_scheduler.py, `Check`),
and by the trainer behind it.  A border is fixed for a run: how many tensors, of which dtype and shape for one sample,
in which codec, with which riders.  So all but the number of samples follows from it, and `parse` compares: it takes
no memory for what a payload claims.  Must not know tensors' values (the codecs' `check` looks at those) or who sends.

    tensors u8  riders u8  zero u16  samples u32  tokens u64
    for each: codec u8  dtype u8  dims u8  zero u8  bytes u32, and each dim u32
    after all of these the bytes of each, in order; little-endian
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.frames import FrameKind, Payload, Trait
from farflung.protocol.limits import TOKENS_MAX
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.model_schema import BorderTensor, ModelSchema

_BARE = Trait.CROSSING | Trait.BARE


class CrossingKind(FrameKind):
    ACTIVATION = 11, Trait.CROSSING  # stage s -> s + 1: what one microbatch sends over their border
    GRADIENT = 12, Trait.CROSSING  # stage s + 1 -> s: the gradient of it
    HELD = 13, Trait.CROSSING  # stage s + 1 -> s: the microbatches here whose holder in stage s is gone
    ROOM = 14, _BARE  # stage s + 1 -> s: `chunk` activations of this batch you may have sent me in all
    # stage s + 1 -> s: "I have next to nothing to do"; `chunk` says how soon one more would be done
    IDLE = 15, _BARE
    # stage s + 1 -> s: "I have not begun it and never will: give it to somebody else"
    GIVEN_BACK = 16, _BARE
    WANT_ACTIVATION = 23, _BARE
    WANT_GRADIENT = 24, _BARE
    WANT_HELD = 25, _BARE
    # stage s -> s + 1: "if you have not begun it, another seat can do it sooner"
    WANT_BACK = 26, _BARE


TENSORS_MOST = 16  # of a border, and as many riders
DIMS_MOST = 8  # with the samples'
ELEMENTS_MOST = 2**31 - 1  # the codecs count them in an int32
BYTES_MOST = 2**32 - 1

# Numbers on the wire are never given out twice.
RAW = "raw"  # integers, as memory holds them
CODECS = {RAW: 0, "fp32": 1, "bf16": 2, "int8": 3, "int4": 4}
DTYPES = {
    "float32": 1,
    "bfloat16": 2,
    "float16": 3,
    "int64": 4,
    "int32": 5,
    "int16": 6,
    "int8": 7,
    "uint8": 8,
    "bool": 9,
}
INTEGER_BYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}

_HEAD = struct.Struct("<BBHIQ")
_ITEM = struct.Struct("<BBBBI")
_DIM = struct.Struct("<I")

BytesOf = Callable[[str, int], int]  # (codec, elements): the length of its payload, as the codecs say


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a border, as the parts of the model fix it."""

    dtype: str
    shape: tuple[int, ...]  # without the samples' dimension

    def dims(self, samples: int) -> tuple[int, ...]:
        return (samples, *self.shape)


@dataclass(frozen=True)
class Border:
    """What crosses it forwards.  Backwards go the gradients of the tensors that are not integers, and no riders."""

    tensors: tuple[Tensor, ...]
    riders: tuple[Tensor, ...]
    codec: str  # of activations and of their gradients
    samples: int  # in a microbatch; the last one of an epoch may have fewer
    bytes_of: BytesOf

    def __post_init__(self) -> None:
        """ValueError for a border that no run can have."""
        if not 1 <= len(self.tensors) <= TENSORS_MOST or len(self.riders) > TENSORS_MOST:
            raise ValueError(f"a border has 1 to {TENSORS_MOST} tensors and at most as many riders")
        if any(rider.dtype not in INTEGER_BYTES for rider in self.riders):
            raise ValueError("riders are integers")
        if self.codec not in CODECS.keys() - {RAW} or self.samples < 1:
            raise ValueError(f"no border has {self.codec} and {self.samples} samples")
        for each in (*self.tensors, *self.riders):
            dims = each.dims(self.samples)
            if each.dtype not in DTYPES or len(dims) > DIMS_MOST or math.prod(dims) > ELEMENTS_MOST:
                raise ValueError(f"{each} can't cross a border with {self.samples} samples")
        if max(self.most_bytes(backwards=False), self.most_bytes(backwards=True)) > BYTES_MOST:
            raise ValueError(f"a crossing of {self.samples} samples is larger than {BYTES_MOST} bytes")

    def items(self, backwards: bool) -> tuple[tuple[str, Tensor], ...]:
        """(codec, tensor) in order; riders last."""
        tensors = [(RAW if t.dtype in INTEGER_BYTES else self.codec, t) for t in self.tensors]
        if backwards:
            return tuple((how, tensor) for how, tensor in tensors if how != RAW)
        return (*tensors, *((RAW, rider) for rider in self.riders))

    def piece_bytes(self, codec: str, tensor: Tensor, samples: int) -> int:
        elements = math.prod(tensor.dims(samples))
        return elements * INTEGER_BYTES[tensor.dtype] if codec == RAW else self.bytes_of(codec, elements)

    def most_bytes(self, backwards: bool) -> int:
        """No crossing is longer: what the data plane may take before it has seen a head."""
        items = self.items(backwards)
        pieces = sum(self.piece_bytes(codec, tensor, self.samples) for codec, tensor in items)
        return _head_bytes(items) + pieces


def border_after(stage: int, model: ModelSchema, pipeline: PipelineSection, bytes_of: BytesOf) -> Border:
    """What lies between a stage and the next one, of a model that is cut into stages; ValueError as for any border."""
    return Border(
        tensors=tuple(map(_tensor, model.stages[stage].gives)),
        riders=tuple(map(_tensor, model.riders)),
        codec=pipeline.codec,
        samples=pipeline.micro,
        bytes_of=bytes_of,
    )


def _tensor(said: BorderTensor) -> Tensor:
    return Tensor(said.dtype, said.shape)


@dataclass(frozen=True, slots=True)
class CrossingPiece:
    codec: str
    dtype: str
    dims: tuple[int, ...]
    data: Payload


@dataclass(frozen=True, slots=True)
class Crossing:
    samples: int
    tokens: int  # that the loss of the microbatch is the mean of
    pieces: tuple[CrossingPiece, ...]  # the border's tensors, and forwards its riders


def _head_bytes(items: Sequence[tuple[str, Tensor]]) -> int:
    return _HEAD.size + sum(_ITEM.size + _DIM.size * (1 + len(tensor.shape)) for _, tensor in items)


def _head_of(border: Border, backwards: bool, samples: int, tokens: int) -> bytes:
    items = border.items(backwards)
    riders = 0 if backwards else len(border.riders)
    head = bytearray(_HEAD.pack(len(items) - riders, riders, 0, samples, tokens))
    for codec, tensor in items:
        dims = tensor.dims(samples)
        length = border.piece_bytes(codec, tensor, samples)
        head += _ITEM.pack(CODECS[codec], DTYPES[tensor.dtype], len(dims), 0, length)
        head += b"".join(_DIM.pack(dim) for dim in dims)
    return bytes(head)


def pack(border: Border, backwards: bool, samples: int, tokens: int, data: Sequence[Payload]) -> bytes:
    """ValueError unless these are the encoded tensors of that border."""
    items = border.items(backwards)
    if not 1 <= samples <= border.samples or not 1 <= tokens <= TOKENS_MAX:
        raise ValueError(f"{samples} samples with {tokens} tokens: at most {border.samples} cross at once")
    due = [border.piece_bytes(codec, tensor, samples) for codec, tensor in items]
    if [len(each) for each in data] != due:
        raise ValueError(f"pieces of {[len(each) for each in data]} bytes, and the border has {due}")
    return b"".join((_head_of(border, backwards, samples, tokens), *data))


def parse(border: Border, backwards: bool, payload: Payload) -> Crossing:
    """FrameError unless it is a crossing of that border; the pieces are views of the payload, not copies.

    The head is compared with the one that this border must have.  Nothing in it is used before it is equal.
    """
    if len(payload) > border.most_bytes(backwards):
        raise FrameError(
            Verdict.OVERSIZE, f"{len(payload)} bytes, the border has at most {border.most_bytes(backwards)}"
        )
    if len(payload) < _HEAD.size:
        raise FrameError(Verdict.MALFORMED, f"a crossing of {len(payload)} bytes has no head")
    samples, tokens = _HEAD.unpack_from(payload)[3:]
    # Without tokens the mean gradient of what crosses is no number, and a step of it leaves none in the model.
    if not 1 <= samples <= border.samples or not 1 <= tokens <= TOKENS_MAX:
        raise FrameError(
            Verdict.MALFORMED,
            f"{samples} samples with {tokens} tokens, the border has {border.samples} samples",
        )
    view, due = memoryview(payload), _head_of(border, backwards, samples, tokens)
    if view[: len(due)] != due:
        raise FrameError(Verdict.MALFORMED, "a crossing of other tensors than this border has")
    pieces, at = [], len(due)
    for codec, tensor in border.items(backwards):
        upto = at + border.piece_bytes(codec, tensor, samples)
        pieces.append(CrossingPiece(codec, tensor.dtype, tensor.dims(samples), view[at:upto]))
        at = upto
    if at != len(payload):
        raise FrameError(Verdict.MALFORMED, f"{len(payload)} bytes, {at} follow from the head")
    return Crossing(samples, tokens, tuple(pieces))


def fit(given: Border, taken: Border) -> str:
    """Why what one stage gives is not what the next one takes; empty: it is.  Each side made its own from its parts."""
    for what, one, other in (
        ("tensors", given.tensors, taken.tensors),
        ("riders", given.riders, taken.riders),
        ("codec", given.codec, taken.codec),
        ("samples", given.samples, taken.samples),
    ):
        if one != other:
            return f"{what}: one stage gives {one}, the next one takes {other}"
    return ""
