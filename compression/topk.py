"""The topk codec: of each 4096 values the 64 largest, each as a place of 12 bits and a value of 2 bits.

Owns: which values are taken, and how places and values are packed.
Called by: `compression/codec.py`, which lists it.  Must not know: peers, rounds.

Of equal magnitudes the one at the lower place is taken first.  A value is its sign and one of two magnitudes, in
units of a step of rms/32, where the rms is that of the taken values: 27 and 40, border 33.5, on the border 40.
Zero can't be said; where fewer than 64 values are normal numbers, the first taken entry is repeated instead, and a
row without any has the step 0.  A row's 112 bytes: the low 8 bits of the places, then their high 4 bits (of entry i
in the low half, of entry i + 32 in the high half of byte i), then four value codes to the byte, in the same manner:
entries i, i + 16, i + 32, i + 48.  Error feedback is needed: most of the norm is lost each time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression.blocks import MIN_STEP, BlockCodec, Kernel, StepRounder, max_step
from farflung.compression.payload import Format
from farflung.compression.rms import root_mean_square
from farflung.compression.tiles import scratch
from farflung.protocol.errors import FrameError
from farflung.protocol.verdicts import Verdict

ROW = 4096
TAKEN = 64
SMALL, LARGE = 27, 40
BORDER = 33.5
STEP_OF_RMS = 2.0**-5
_MAGNITUDE = 0x7FFFFFFF
LEAST_NORMAL = 2.0**-126
_LEAST_NORMAL_BITS = 0x00800000


class TopKCodec(BlockCodec):
    format = Format("topk", number=6, version=1, block=ROW)
    code_bytes = 112
    largest_level = LARGE
    may_be_zero = True

    def _kernel(self, rows: int, filled: int, device: torch.device) -> Kernel:
        return _TopKKernel(rows, device)

    def _check_codes(self, codes: NDArray[np.uint8]) -> None:
        """A place may come again, but with its own value: which of two a scatter leaves differs by machine."""
        places_rk, codes_rk = _entries(torch.from_numpy(codes.reshape(-1, self.code_bytes).copy()))
        keys_rk = (places_rk << 2 | codes_rk).sort(1).values
        same_place = keys_rk[:, 1:] >> 2 == keys_rk[:, :-1] >> 2
        if bool((same_place & (keys_rk[:, 1:] != keys_rk[:, :-1])).any()):
            raise FrameError(Verdict.MALFORMED, "topk payload with two values for one place")


class _TopKKernel:
    def __init__(self, rows: int, device: torch.device) -> None:
        self._bits_rb = scratch("magnitudes", rows * ROW, torch.int32, device).view(rows, ROW)
        self._rounder = StepRounder(device)
        self._levels = torch.tensor([SMALL, LARGE, -SMALL, -LARGE], dtype=torch.float32, device=device)

    def quantise(self, values_rb: Tensor, peaks_r: Tensor, steps_r: Tensor, codes_rc: Tensor) -> None:
        bits_rb = torch.bitwise_and(values_rb.view(torch.int32), _MAGNITUDE, out=self._bits_rb)
        places_rk = largest_places(bits_rb)
        present_rk = bits_rb.gather(1, places_rk) >= _LEAST_NORMAL_BITS
        first_r1 = places_rk.where(present_rk, ROW - 1).amin(1, keepdim=True)
        places_rk = places_rk.where(present_rk, first_r1)
        taken_rk = values_rb.gather(1, places_rk)
        peaks_r.copy_(bits_rb.view(torch.float32).amax(1))
        self._steps(taken_rk, present_rk, peaks_r, steps_r)
        border_r1 = steps_r.unsqueeze(1) * BORDER
        # Not `< 0`: of a row without normal numbers an entry may be subnormal, and not all machines see its sign.
        negative_rk = taken_rk <= -LEAST_NORMAL
        codes_rk = (taken_rk.abs() >= border_r1).to(torch.uint8) + 2 * negative_rk.to(torch.uint8)
        codes_rc[:, :64].copy_(places_rk & 0xFF)
        high_rk = places_rk >> 8
        codes_rc[:, 64:96].copy_(high_rk[:, :32] | high_rk[:, 32:] << 4)
        one, two, three, four = codes_rk.view(-1, 4, 16).unbind(1)
        codes_rc[:, 96:] = one | two << 2 | three << 4 | four << 6

    def _steps(self, taken_rk: Tensor, present_rk: Tensor, peaks_r: Tensor, steps_r: Tensor) -> None:
        counts_r = present_rk.sum(1).clamp_(min=1).to(torch.float32)  # integers: exact in any order
        present_values_rk = taken_rk.where(present_rk, 0.0)
        root_mean_square(present_values_rk, peaks_r, counts_r, steps_r)
        self._rounder.round_(steps_r.mul_(STEP_OF_RMS)).clamp_(max=max_step(LARGE))
        steps_r.mul_(steps_r >= MIN_STEP)

    def restore(self, steps_r: Tensor, codes_rc: Tensor, out_rb: Tensor) -> None:
        places_rk, codes_rk = _entries(codes_rc)
        out_rb.zero_().scatter_(1, places_rk, self._levels[codes_rk] * steps_r.unsqueeze(1))


def _entries(codes_rc: Tensor) -> tuple[Tensor, Tensor]:
    """u8 [rows, 112] -> places and value codes, i64 [rows, 64] each."""
    low_rk, high_rh = codes_rc[:, :64].to(torch.int64), codes_rc[:, 64:96].to(torch.int64)
    places_rk = low_rk | torch.cat([high_rh & 15, high_rh >> 4], 1) << 8
    packed_rq = codes_rc[:, 96:].to(torch.int64)
    return places_rk, torch.cat([packed_rq >> shift & 3 for shift in (0, 2, 4, 6)], 1)


def largest_places(bits_rb: Tensor) -> Tensor:
    """i32 magnitudes [rows, 4096] -> ascending places [rows, 64] of the largest, of equal ones the first."""
    if bits_rb.device.type == "cpu":
        return torch.from_numpy(_largest_places_numpy(bits_rb.numpy()))
    return largest_places_sorting(bits_rb)


def largest_places_sorting(bits_rb: Tensor) -> Tensor:
    """The same by torch alone: place and magnitude in one number leave no ties to whoever wrote `topk`."""
    backwards_b = torch.arange(ROW - 1, -1, -1, dtype=torch.int64, device=bits_rb.device)
    keys_rb = (bits_rb.to(torch.int64) << 12) | backwards_b
    keys_rk = torch.topk(keys_rb, TAKEN, dim=1, sorted=False).values
    return (ROW - 1 - (keys_rk & (ROW - 1))).sort(dim=1).values


def _largest_places_numpy(bits_rb: NDArray[np.int32]) -> NDArray[np.int64]:
    """Numpy's partition is six times as fast as torch's topk: it finds the least magnitude that is taken."""
    border_r1 = np.partition(bits_rb, ROW - TAKEN, axis=1)[:, ROW - TAKEN, None]
    taken_rb = bits_rb >= border_r1
    for row in np.flatnonzero(np.count_nonzero(taken_rb, axis=1) > TAKEN):
        ties = np.flatnonzero(bits_rb[row] == border_r1[row])
        surplus = int(np.count_nonzero(taken_rb[row])) - TAKEN
        taken_rb[row, ties[len(ties) - surplus :]] = False
    return (np.flatnonzero(taken_rb) % ROW).reshape(-1, TAKEN)
