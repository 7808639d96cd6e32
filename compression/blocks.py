"""What the block codecs share: one 16-bit step for each block of values, then the blocks' codes.

Owns: the payload `header | steps u16[blocks] | codes u8[blocks * code_bytes]`, the form of a step, and the passes
over a chunk.  The arithmetic of one tile is a `Kernel`, which each codec brings.  native.py on a CPU and triton_path.py
on a GPU may know a faster way to the same bits; what is written in torch is the reference, the fallback, and what
words every refusal.
Called by: int8, int4, int2, topk.
Must not know: peers, rounds, how many bits a code has.

A step is a positive number of 8 exponent and 8 fraction bits: the middle 16 of the 32 bits of an fp32.  With fp16,
which is as long, blocks above 65504 would overflow and steps under 6e-5, the usual ones of a pseudo-gradient, would
lose their digits.  Nine significant bits also make `code * step` exact, so a decoded value is not rounded at all.

Exactness: a chunk gives the same bytes on every machine, because only these are used: single fp32 operations that
IEEE 754 rounds correctly and that are written one by one, so that nothing can be fused; maxima, which are exact in
any order; sums over a tree that is written out; and integers.  No step, quotient or code that matters can be
subnormal, so machines that flush subnormals to zero agree too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression.native import FastPath, compiled_for
from farflung.compression.payload import HEADER_BYTES, Bytes, Format, check_header
from farflung.compression.tiles import (
    flat,
    fp32_rows,
    from_bytes,
    refuse_non_finite,
    scratch,
    tile_length,
    to_bytes,
)
from farflung.compression.triton_path import DeviceLayout, device_path_for
from farflung.protocol.errors import FrameError
from farflung.protocol.verdicts import Verdict

MIN_STEP = 2.0**-125
_MIN_STEP_BITS = 2 << 8
_DROPPED_BITS = 15
_HALF = 1 << (_DROPPED_BITS - 1)
_CPU = torch.device("cpu")


def max_step(largest_level: int) -> float:
    """The largest step by which the largest level still is finite."""
    limit = np.float32(np.finfo(np.float32).max / largest_level)
    bits = int(limit.view(np.uint32)) >> _DROPPED_BITS << _DROPPED_BITS
    return float(np.uint32(bits).view(np.float32))


class StepRounder:
    """fp32 [rows] to the nearest step, in place, ties up.  The constants wait as tensors: wrapping costs µs."""

    def __init__(self, device: torch.device) -> None:
        self._half = torch.tensor(_HALF, dtype=torch.int32, device=device)
        self._mask = torch.tensor(-1 << _DROPPED_BITS, dtype=torch.int32, device=device)

    def round_(self, steps_r: Tensor) -> Tensor:
        bits_r = steps_r.view(torch.int32)
        bits_r.add_(self._half).bitwise_and_(self._mask)
        return steps_r


class Kernel(Protocol):
    """The arithmetic of `rows` blocks on one device, with its scratch: a span to quantise, a tile to restore."""

    def quantise(self, values_rb: Tensor, peaks_r: Tensor, steps_r: Tensor, codes_rc: Tensor) -> None:
        """fp32 [rows, block] -> peaks [rows] (for the finite check), steps [rows], codes u8 [rows, code_bytes].

        Where values aren't finite, steps and codes may be anything: the chunk is refused afterwards.
        """

    def restore(self, steps_r: Tensor, codes_rc: Tensor, out_rb: Tensor) -> None:
        """fp32 [rows], u8 [rows, code_bytes] -> fp32 [rows, block]"""


def fast_path(codec: DeviceLayout, device: torch.device) -> FastPath | None:
    return compiled_for(codec) if device.type == "cpu" else device_path_for(codec, device)


class BlockCodec:
    format: ClassVar[Format]
    code_bytes: ClassVar[int]  # of one block
    largest_level: ClassVar[int]
    may_be_zero: ClassVar[bool] = False  # a step of 0 is a block of zeros
    levels: ClassVar[tuple[int, ...]] = ()  # of each code, in steps; none where a code is its own level

    def __init__(self, choose: Callable[[DeviceLayout, torch.device], FastPath | None] = fast_path) -> None:
        self._choose = choose

    @property
    def name(self) -> str:
        return self.format.name

    def using(self, fast: FastPath | None) -> Self:
        """The same codec on this path only; None is the torch path."""
        return type(self)(lambda codec, device: fast)

    def payload_bytes(self, elements: int) -> int:
        return HEADER_BYTES + self._blocks(elements) * (2 + self.code_bytes)

    def encode(self, chunk_n: Tensor) -> bytes:
        return bytes(self.encode_here(chunk_n))

    def encode_here(self, chunk_n: Tensor) -> Bytes:
        flat_n = flat(chunk_n)
        fast = self._fast_path_for(flat_n)
        # None where a value is not finite: the way through torch finds out which.
        payload = fast.encode(flat_n, self.format.header(flat_n.numel())) if fast else None
        return payload or self._encode_by_torch(flat_n)

    def _encode_by_torch(self, flat_n: Tensor) -> bytes:
        elements, device = flat_n.numel(), flat_n.device
        blocks = self._blocks(elements)
        peaks = scratch("peaks", blocks, torch.float32, device)
        steps = scratch("steps", blocks, torch.float32, device)
        codes = scratch("codes", blocks * self.code_bytes, torch.uint8, device).view(blocks, self.code_bytes)
        first = 0
        for values_rb, filled in fp32_rows(flat_n, self.format.block):
            at = slice(first, first + len(values_rb))
            self._kernel(len(values_rb), filled, device).quantise(values_rb, peaks[at], steps[at], codes[at])
            first = at.stop
        refuse_non_finite(flat_n, peaks)
        bits = (steps.view(torch.int32) >> _DROPPED_BITS).to(torch.int16)
        return to_bytes(self.format.header(elements), bits, codes.view(-1))

    def check(self, payload: Bytes, elements: int) -> None:
        check_header(payload, self.format, elements, self.payload_bytes(elements))
        fast = self._choose(self, _CPU)
        if fast and fast.check(payload, elements):
            return
        bits, codes = self._parts(payload, elements)
        if elements:
            highest = int(np.float32(max_step(self.largest_level)).view(np.uint32)) >> _DROPPED_BITS
            valid = (bits >= _MIN_STEP_BITS) & (bits <= highest)
            if self.may_be_zero:
                valid |= bits == 0
            if not valid.all():
                place = int(valid.argmin())
                raise FrameError(
                    Verdict.MALFORMED, f"{self.name} payload: the step of block {place} is out of range"
                )
            self._check_codes(codes)

    def decode(self, payload: Bytes, elements: int, out_n: Tensor | None = None) -> Tensor:
        self.check(payload, elements)
        out_n = torch.empty(elements, dtype=torch.float32) if out_n is None else out_n
        fast = self._fast_path_for(out_n)
        if fast:
            fast.decode(payload, out_n)
        else:
            out_n.copy_(self._decode_by_torch(payload, elements))
        return out_n

    def _decode_by_torch(self, payload: Bytes, elements: int) -> Tensor:
        out_rb = torch.empty(self._blocks(elements), self.format.block, dtype=torch.float32)
        outs = torch.split(out_rb, self._tile_rows(_CPU))
        tiles = self._tiles(payload, elements, _CPU)
        for (kernel, steps_r, codes_rc), tile_rb in zip(tiles, outs, strict=False):
            kernel.restore(steps_r, codes_rc, tile_rb)
        return out_rb.view(-1)[:elements]

    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None:
        self.check(payload, total_n.numel())
        fast = self._fast_path_for(total_n)
        if fast:
            fast.decode_add(payload, weight, total_n)
        else:
            self._decode_add_by_torch(payload, weight, total_n)

    def _decode_add_by_torch(self, payload: Bytes, weight: float, total_n: Tensor) -> None:
        device, block = total_n.device, self.format.block
        factor = torch.tensor(weight, dtype=torch.float32, device=device)
        rows = self._tile_rows(device)
        room = scratch("values", rows * block, torch.float32, device)
        room_rb = room.view(-1, block)
        totals = torch.split(total_n, rows * block)
        tiles = self._tiles(payload, total_n.numel(), device)
        for (kernel, steps_r, codes_rc), part_n in zip(tiles, totals, strict=False):
            values_n, values_rb = room, room_rb
            if part_n.numel() != room.numel():
                values_n, values_rb = room[: part_n.numel()], room_rb[: len(steps_r)]
            kernel.restore(steps_r, codes_rc, values_rb)
            # Two roundings on purpose: fused with the addition, some machines would round once.
            values_n.mul_(factor)
            part_n.add_(values_n)

    def _fast_path_for(self, values_n: Tensor) -> FastPath | None:
        fast = self._choose(self, values_n.device)
        return fast if fast and fast.can_use(values_n) else None

    def _tiles(
        self, payload: Bytes, elements: int, device: torch.device
    ) -> Iterator[tuple[Kernel, Tensor, Tensor]]:
        """(kernel, steps, codes) of each tile of a checked payload."""
        if elements == 0:
            return
        bits, codes = self._parts(payload, elements)
        steps = from_bytes(bits.astype(np.uint32) << _DROPPED_BITS, device).view(torch.float32)
        codes_rc = from_bytes(codes, device).view(-1, self.code_bytes)
        rows = self._tile_rows(device)
        kernels: dict[int, Kernel] = {}
        for steps_r, part_rc in zip(torch.split(steps, rows), torch.split(codes_rc, rows), strict=True):
            if len(steps_r) not in kernels:
                kernels[len(steps_r)] = self._kernel(len(steps_r), self.format.block, device)
            yield kernels[len(steps_r)], steps_r, part_rc

    def _tile_rows(self, device: torch.device) -> int:
        return max(1, tile_length(device) // self.format.block)

    def _blocks(self, elements: int) -> int:
        return -(-elements // self.format.block)

    def _parts(self, payload: Bytes, elements: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        blocks = self._blocks(elements)
        bits = np.frombuffer(payload, np.uint16, blocks, HEADER_BYTES)
        return bits, np.frombuffer(payload, np.uint8, -1, HEADER_BYTES + 2 * blocks)

    def _kernel(self, rows: int, filled: int, device: torch.device) -> Kernel:
        """`filled`: values that count in the last row, which otherwise is padded with zeros."""
        raise NotImplementedError

    def _check_codes(self, codes: NDArray[np.uint8]) -> None:
        """FrameError where a code has no meaning; most have none such."""
