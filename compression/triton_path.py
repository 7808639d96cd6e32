"""The Triton path of the block codecs on a GPU: built if it can be, checked against the plain path, used or left.

Owns: the choice for each codec and device and its reason, how a payload lies on a device, and the launches.
Called by: codec.py; `device_path_in_use` by whoever tells a user about it.
Must not know: the arithmetic, peers, rounds.

Nothing depends on this path: on the device at hand it gives the bytes of the plain path, or it is not used.
FARFLUNG_NATIVE=0 turns it off, as it does the compiled path of native.py.
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from farflung.compression.native import SWITCH, Layout, first_difference, from_bytes
from farflung.compression.plain_codecs import HEADER_BYTES, Bytes

CODECS = ("int8", "int4")
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
PROGRAM_VALUES = 4096  # that one program takes: 32 for each of its threads
_WARPS = 4
_FENCE = 60_000.0  # finite in fp16, and larger than the values of the vectors that end near a program's end
# Of another version of Triton, of a GPU that is too old or too full, of a launcher that no C compiler is there for.
_FAILURES = (
    *(RuntimeError, OSError, subprocess.SubprocessError),
    *(ValueError, TypeError, LookupError, AttributeError),
)
_FLAG_BYTES = 16  # a flag of 4, padded so that what follows is aligned for the widest access


@dataclass(frozen=True)
class OnDevice:
    """A payload on a device, with room for whole programs: `flag | steps | codes`, each part aligned."""

    room: Tensor  # u8
    codes_at: int

    @property
    def flag(self) -> Tensor:
        """i32 [1]: not 0 where a value is not finite."""
        return self.room[:4].view(torch.int32)

    @property
    def steps(self) -> Tensor:
        return self.room[_FLAG_BYTES : self.codes_at].view(torch.int16)

    @property
    def codes(self) -> Tensor:
        return self.room[self.codes_at :].view(torch.int8)


class TritonPath:
    """One codec's kernels on one device.  Payloads have the length and the header that the codec expects."""

    def __init__(self, kernels: ModuleType, codec: Layout, device: torch.device) -> None:
        self._block, self._code_bytes = codec.format.block, codec.code_bytes
        self._rows = PROGRAM_VALUES // self._block
        self._encode = getattr(kernels, f"{codec.format.name}_encode")
        self._restore = getattr(kernels, f"{codec.format.name}_restore")
        self._device = device
        # Before the last arguments of the kernels; int8 codes are their own levels.
        self._to_nibbles = [_nibbles(codec.levels).to(device)] if codec.levels else []
        self._to_levels = [_level_pairs(codec.levels).to(device)] if codec.levels else []

    def can_use(self, values_n: Tensor) -> bool:
        return values_n.device == self._device and values_n.is_contiguous() and values_n.dtype in INPUTS

    def encode(self, flat_n: Tensor, header: bytes) -> bytes | None:
        """The payload; None where a value is not finite."""
        coded = self.encode_on_device(flat_n)
        blocks = self._blocks(flat_n.numel())
        room = coded.room.cpu().numpy()  # the one transfer, the flag with it
        if room[:4].any():
            return None
        steps = room[_FLAG_BYTES:][: 2 * blocks]
        codes = room[coded.codes_at :][: blocks * self._code_bytes]
        return b"".join((header, steps.data, codes.data))

    def encode_on_device(self, flat_n: Tensor) -> OnDevice:
        elements = flat_n.numel()
        coded = self._room(elements)
        coded.flag.zero_()
        if elements:
            to = (coded.flag, coded.steps, coded.codes, *self._to_nibbles)
            with self._launching():
                self._encode[self._grid(elements)](
                    flat_n, *to, elements, ROWS=self._rows, num_warps=_WARPS, enable_fp_fusion=False
                )
        return coded

    def check(self, payload: Bytes, elements: int) -> bool:
        """Not known here: payloads are checked on the CPU, where they arrive."""
        return False

    def decode(self, payload: Bytes, out_n: Tensor) -> None:
        self.restore_on_device(self.put_on_device(payload, out_n.numel()), 1.0, out_n, add=False)

    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None:
        self.restore_on_device(self.put_on_device(payload, total_n.numel()), weight, total_n, add=True)

    def put_on_device(self, payload: Bytes, elements: int) -> OnDevice:
        blocks = self._blocks(elements)
        coded = self._room(elements)
        body = from_bytes(np.frombuffer(payload, np.uint8, -1, HEADER_BYTES), torch.device("cpu"))
        coded.room[_FLAG_BYTES:][: 2 * blocks].copy_(body[: 2 * blocks])
        coded.room[coded.codes_at :][: blocks * self._code_bytes].copy_(body[2 * blocks :])
        return coded

    def restore_on_device(self, coded: OnDevice, weight: float, out_n: Tensor, *, add: bool) -> None:
        """fp32 `out_n` is set to the values, or gets weight times them added."""
        assert out_n.dtype == torch.float32, out_n.dtype
        elements = out_n.numel()
        if elements:
            of = (coded.steps, coded.codes, *self._to_levels)
            with self._launching():
                self._restore[self._grid(elements)](
                    *(*of, float(weight), out_n, elements),  # an int would be another kernel
                    ROWS=self._rows,
                    ADD=add,
                    num_warps=_WARPS,
                    enable_fp_fusion=False,  # with it, weight * value + total would be rounded once
                )

    def _room(self, elements: int) -> OnDevice:
        # Not from scratch(): torch's own allocator knows which stream still uses the memory.
        rows = self._grid(elements)[0] * self._rows
        codes_at = _FLAG_BYTES + 2 * rows
        room = torch.empty(codes_at + rows * self._code_bytes, dtype=torch.uint8, device=self._device)
        return OnDevice(room, codes_at)

    def _grid(self, elements: int) -> tuple[int]:
        return (-(-self._blocks(elements) // self._rows),)

    def _blocks(self, elements: int) -> int:
        return -(-elements // self._block)

    def _launching(self) -> AbstractContextManager[object]:
        """Triton launches on torch's current device, wherever the tensors are."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _nibbles(levels: tuple[int, ...]) -> Tensor:
    """i8 [256]: the nearest level's nibble, at the place of each int8 code as a number without sign."""
    codes = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int32)
    return torch.from_numpy(np.abs(codes[:, None] - np.array(levels)).argmin(1).astype(np.int8))


def _level_pairs(levels: tuple[int, ...]) -> Tensor:
    """i16 [256]: the levels of both nibbles of a byte, the low one's in the low half."""
    pairs = np.array(levels, dtype=np.int8)[np.arange(256)[:, None] >> np.array([0, 4]) & 15]
    return torch.from_numpy(pairs.view(np.int16).reshape(-1))


class ThroughDevice:
    """A codec as the check before use sees it: CPU tensors in and out, the work on the device.

    There the values lie between two fences of as many as one program takes: what is read beyond the end changes the
    bytes, what is written beyond it is found.
    """

    def __init__(self, codec: Layout, path: TritonPath, device: torch.device) -> None:
        self._codec, self._path, self._device = codec.using(path), path, device

    def encode(self, chunk_n: Tensor) -> bytes:
        return self._codec.encode(self._inside(self._fenced(chunk_n)))

    def decode(self, payload: Bytes, elements: int) -> Tensor:
        fenced = self._fenced(torch.zeros(elements))
        self._codec.decode(payload, elements, self._inside(fenced))
        return self._intact(fenced)

    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None:
        fenced = self._fenced(total_n)
        self._codec.decode_add(payload, weight, self._inside(fenced))
        total_n.copy_(self._intact(fenced))

    def _fenced(self, values: Tensor) -> Tensor:
        fence = torch.full((PROGRAM_VALUES,), _FENCE, dtype=values.dtype)
        return torch.cat((fence, values.reshape(-1), fence)).to(self._device)

    def _inside(self, fenced: Tensor) -> Tensor:
        values_n = fenced[PROGRAM_VALUES:-PROGRAM_VALUES]
        # A tensor that the path leaves to numpy would compare numpy with itself.
        assert self._path.can_use(values_n), (values_n.device, values_n.dtype)
        return values_n

    def _intact(self, fenced: Tensor) -> Tensor:
        for fence in (fenced[:PROGRAM_VALUES], fenced[-PROGRAM_VALUES:]):
            if not bool((fence == _FENCE).all()):
                raise RuntimeError("they write beyond a tensor")
        return self._inside(fenced).cpu()


@dataclass(frozen=True, slots=True)
class _DeviceChoice:
    path: TritonPath | None
    reason: str


class _DeviceChoices:
    """Made at most once a process: at the first use of each codec on each device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str, torch.device], _DeviceChoice] = {}

    def of(self, codec: Layout, device: torch.device) -> _DeviceChoice:
        key = codec.format.name, device
        choice = self._made.get(key)
        if choice is None:
            with self._lock:
                choice = self._made.get(key) or choose(codec, device)
                self._made[key] = choice
        return choice


_choices = _DeviceChoices()


def choose(codec: Layout, device: torch.device) -> _DeviceChoice:
    name = codec.format.name
    if name not in CODECS:
        return _DeviceChoice(None, f"there are Triton kernels for {' and '.join(CODECS)} only")
    try:
        from triton.errors import TritonError

        from farflung.compression import triton_kernels
    except ImportError as error:
        return _DeviceChoice(None, f"Triton cannot be imported: {error}")
    try:
        path = TritonPath(triton_kernels, codec, device)
        through = ThroughDevice(codec, path, device)
        difference = first_difference(codec.using(None), through, INPUTS)
    except (TritonError, *_FAILURES) as error:
        first_line = (str(error).strip() or "no reason given").splitlines()[0]
        return _DeviceChoice(None, f"the Triton kernels cannot run: {type(error).__name__}: {first_line}")
    if difference:
        return _DeviceChoice(None, f"the Triton kernels differ from the plain code: {difference}")
    return _DeviceChoice(path, f"Triton kernels, checked on {device}")


def device_path_for(codec: Layout, device: torch.device) -> TritonPath | None:
    """None for the plain path.  Builds and checks the kernels at a codec's first use on a device: seconds."""
    if not codec.format.block or device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return None
    return _choices.of(codec, _numbered(device)).path


def device_path_in_use(codec: Layout, device: torch.device) -> tuple[str, str]:
    """("triton" or "plain", why)"""
    if device.type != "cuda":
        return "plain", f"there are Triton kernels for cuda only, not for {device.type}"
    if os.environ.get(SWITCH) == "0":
        return "plain", f"{SWITCH}=0 is set"
    choice = _choices.of(codec, _numbered(device))
    return "triton" if choice.path else "plain", choice.reason


def _numbered(device: torch.device) -> torch.device:
    """As tensors name their device: "cuda" alone is the current one."""
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())
