"""What ranks compare and put together of a model's values: copies that must be equal, bytes that lie in several places.

Called by the layout of a model, and before an agent starts.  Must not know the flat vector, words or rounds.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from farflung.peer.island.blocks import Box, HeldBlock, row_major, within
from farflung.peer.island.ranks import Ranks
from farflung.peer.island.sharded import local_of
from farflung.peer.local.memory import FAR
from farflung.protocol.errors import UserError

COMPARED = 256  # values of a parameter: its beginning
AT_ONCE_BYTES = 16 << 20  # of a tensor that lies on several ranks
ONE_VERSION_S = 60.0  # for an agent to have applied a version
LOOK_AGAIN_S = 0.01
_CHANGES = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A tensor as it lies here."""

    name: str
    is_buffer: bool
    tensor: Tensor
    twin: int  # the lowest rank that has the same values


def level(copies: Sequence[TensorCopy], ranks: Ranks) -> None:
    """Of a buffer that follows each rank's own samples, that of the lowest rank counts; parameters must be equal."""
    mine = [_sample(each) for each in copies]
    told = [
        msgspec.msgpack.decode(each, type=list[bytes]) for each in ranks.gather(msgspec.msgpack.encode(mine))
    ]
    for at, copy in enumerate(copies):
        theirs = told[copy.twin][at]
        if theirs == mine[at]:
            continue
        if not copy.is_buffer:
            raise UserError(
                f"rank {ranks.rank} and rank {copy.twin} have different values of {copy.name!r}: is the model wrapped, "
                "in DistributedDataParallel or by fully_shard, so that its gradients are summed over the ranks?"
            )
        with torch.no_grad():
            raw = torch.frombuffer(bytearray(theirs), dtype=torch.uint8).view(copy.tensor.dtype)
            copy.tensor.copy_(raw.view(copy.tensor.shape))


def read_as_one(
    ranks: Ranks, changes: Callable[[], int], clock: Callable[[], float], read: Callable[[], None]
) -> None:
    """What all ranks read of the anchor is of one version; `read`: may be done again, which then is all that counts.

    The agent may be applying the next one meanwhile.  One process reads what it finds, some values of each; but of
    copies on several ranks, which go on by equal gradients, all must begin with the same.  `changes`: of the anchor
    (SharedState.read_changes).  `clock`: the same on all ranks.
    """
    end = None
    while True:
        ranks.wait_for_all()
        end = clock() + ONE_VERSION_S if end is None else end
        before = changes()
        read()
        if ranks.count == 1:
            return
        told = ranks.gather(_CHANGES.pack(before, changes()))
        seen = {number for each in told for number in _CHANGES.unpack(each)} - {FAR}
        if (len(seen) == 1 and not any(number % 2 for number in seen)) or clock() >= end:
            return
        time.sleep(LOOK_AGAIN_S)


def _sample(copy: TensorCopy) -> bytes:
    if copy.is_buffer:
        return _raw(local_of(copy.tensor).detach()).numpy().tobytes()
    return beginning(copy.tensor)


def beginning(tensor: Tensor) -> bytes:
    """Equal for copies, and else for hardly any two parameters: of the values that lie here."""
    return blake3(_raw(local_of(tensor).detach().reshape(-1)[:COMPARED]).numpy().data).digest(length=8)


def whole_bytes(tensor: Tensor, held: HeldBlock | None, ranks: Ranks) -> Iterator[memoryview | bytes]:
    """The raw bytes of the whole tensor in row-major order.  `held`: what of it is here; None: all, here alone.

    Ranks tell each other what they would write of it, a piece at a time, and have no more of it than that at once.
    """
    local = local_of(tensor).detach()
    if held is None:
        yield _raw(local).numpy().data
        return
    size, count = prod(tensor.shape), max(1, AT_ONCE_BYTES // local.element_size())
    for first in range(0, size, count):
        yield _piece(tuple(tensor.shape), local, held, (first, min(size, first + count)), ranks)


def _piece(
    shape: tuple[int, ...], local: Tensor, held: HeldBlock, part: tuple[int, int], ranks: Ranks
) -> bytes:
    mine = within(shape, max(part[0], held.first), min(part[1], held.stop), held.box)
    raw = b"".join(_raw(local[box.seen_from(held.box).slices]).numpy().tobytes() for box in mine)
    width = local.element_size()
    found = torch.zeros(width * (part[1] - part[0]), dtype=torch.uint8)
    strides = row_major((*shape, width))
    for each in ranks.gather(msgspec.msgpack.encode((mine, raw))):
        boxes, values = msgspec.msgpack.decode(each, type=tuple[list[Box], bytes])
        at = 0
        for box in boxes:
            place = sum(a * b for a, b in zip(box.start, strides, strict=False)) - part[0] * width
            cells = found.as_strided((*box.shape, width), strides, place)
            told = bytearray(values[at : at + box.numel * width])
            cells.copy_(torch.frombuffer(told, dtype=torch.uint8).view(cells.shape))
            at += len(told)
    return found.numpy().tobytes()


def _raw(tensor: Tensor) -> Tensor:
    """Its bytes, in row-major order."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
