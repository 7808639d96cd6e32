"""The compiled path of the block codecs: loaded if it can be had, checked against the plain path, used or left.

Owns: the choice for each codec and its reason, and the calls into the library.
Called by: codec.py; `path_in_use` by whoever tells a user about it.
Must not know: the arithmetic, peers, rounds.

Nothing depends on this path: the bytes are those of the plain path or it is not used.  FARFLUNG_NATIVE=0 turns it
off.  The library is called without the interpreter's lock, so other threads go on.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression.native_build import SWITCH, NoLibrary, library
from farflung.compression.native_check import first_difference
from farflung.compression.payload import HEADER_BYTES, Bytes, Format
from farflung.compression.scratch import scratch

_CPU = torch.device("cpu")
_SPAN = 1 << 20  # values that are encoded at a time: whole blocks of each codec
_GROUP = 1024  # values that the library decodes at a time
_ADDRESS, _COUNT = ctypes.c_void_p, ctypes.c_int64

Products = NDArray[np.float64]


class Layout(Protocol):
    """What this file sees of a block codec."""

    format: Format
    code_bytes: int
    levels: tuple[int, ...]

    def using(self, fast: FastPath | None) -> Layout:
        """The same codec on this path only; None is the plain path."""

    def encode(self, chunk_n: Tensor) -> bytes: ...
    def decode(self, payload: Bytes, elements: int, out_n: Tensor | None = None) -> Tensor: ...
    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None: ...


class FastPath(Protocol):
    """Another way to the plain path's bits, for the tensors that it can use: compiled here, in Triton on a GPU."""

    def can_use(self, values_n: Tensor) -> bool: ...

    def encode(self, flat_n: Tensor, header: bytes) -> Bytes | None:
        """The payload, until this thread's next one; None where a value is not finite."""

    def check(self, payload: Bytes, elements: int) -> bool:
        """True where the payload is known to be good; the plain path words what is wrong with any other."""

    def decode(self, payload: Bytes, out_n: Tensor) -> None: ...
    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None: ...


class Compiled:
    """One codec's functions.  Payloads have the length and the header that the codec expects."""

    def __init__(self, functions: ctypes.CDLL, codec: Layout) -> None:
        self._block, self._code_bytes = codec.format.block, codec.code_bytes

        def bound(what: str, result: type | None, *arguments: type) -> Callable[..., int]:
            function = getattr(functions, f"{codec.format.name}_{what}")
            function.restype, function.argtypes = result, arguments
            return function  # type: ignore[no-any-return]

        coded = (_ADDRESS, _ADDRESS, _COUNT)
        self._encode = bound("encode", ctypes.c_int, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS)
        self._check = bound("check", ctypes.c_int, *coded)
        self._decode = bound("decode", None, *coded, _ADDRESS)
        self._decode_add = bound("decode_add", None, *coded, ctypes.c_float, _ADDRESS)
        self._dots = bound("dots", None, _ADDRESS, _ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS)

    @staticmethod
    def can_use(values_n: Tensor) -> bool:
        return values_n.device == _CPU and values_n.is_contiguous()

    def encode(self, flat_n: Tensor, header: bytes) -> Bytes | None:
        elements = flat_n.numel()
        blocks = -(-elements // self._block)
        payload = scratch("payload", len(header) + blocks * (2 + self._code_bytes), torch.uint8, _CPU)
        room = payload.numpy()
        room[: len(header)] = np.frombuffer(header, np.uint8)
        steps_at = payload.data_ptr() + len(header)
        codes_at = steps_at + 2 * blocks
        for start in range(0, elements, _SPAN):
            part_n = flat_n[start : start + _SPAN]
            if part_n.dtype != torch.float32:
                part_n = scratch("input", part_n.numel(), torch.float32, _CPU).copy_(part_n)
            before = start // self._block
            to = steps_at + 2 * before, codes_at + self._code_bytes * before
            if not self._encode(part_n.data_ptr(), part_n.numel(), *to):
                return None
        return room.data

    def check(self, payload: Bytes, elements: int) -> bool:
        steps_at, codes_at = self._addresses(payload, elements)
        return bool(self._check(steps_at, codes_at, elements))

    def decode(self, payload: Bytes, out_n: Tensor) -> None:
        self._decode(*self._addresses(payload, out_n.numel()), out_n.numel(), out_n.data_ptr())

    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None:
        elements = total_n.numel()
        self._decode_add(*self._addresses(payload, elements), elements, weight, total_n.data_ptr())

    def dots(self, payloads: Sequence[Bytes], elements: int) -> Products:
        """<x_i, x_j> of the decoded values for i <= j, row by row, in any order of their sums."""
        places = np.array([self._addresses(payload, elements) for payload in payloads], np.uint64).T.copy()
        rooms, out = _rooms_and_products(len(payloads), max(_GROUP, self._block))
        self._dots(
            places[0].ctypes.data, places[1].ctypes.data, len(payloads), elements, rooms.data_ptr(), out.ctypes.data
        )  # fmt: skip
        return out

    def _addresses(self, payload: Bytes, elements: int) -> tuple[int, int]:
        """Of steps and codes.  The caller holds the payload, so its memory stays until the call is over."""
        steps_at = np.frombuffer(payload, np.uint8).ctypes.data + HEADER_BYTES
        return steps_at, steps_at + 2 * -(-elements // self._block)


@dataclass(frozen=True, slots=True)
class _Choice:
    compiled: Compiled | None
    reason: str


class _Choices:
    """Made at most once a process: at the first use of each codec."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._library: ctypes.CDLL | NoLibrary | None = None
        self._by_codec: dict[str, _Choice] = {}

    def of(self, codec: Layout) -> _Choice:
        choice = self._by_codec.get(codec.format.name)
        if choice is None:
            with self._lock:
                choice = self._by_codec.get(codec.format.name) or self._choose(codec)
                self._by_codec[codec.format.name] = choice
        return choice

    def library(self) -> ctypes.CDLL | NoLibrary:
        with self._lock:
            if self._library is None:
                self._library = loaded()
            return self._library

    def _choose(self, codec: Layout) -> _Choice:
        self._library = self.library()
        if isinstance(self._library, NoLibrary):
            return _Choice(None, str(self._library))
        compiled = Compiled(self._library, codec)
        difference = first_difference(codec.using(None), codec.using(compiled))
        if difference:
            return _Choice(None, f"the compiled code differs from the plain code: {difference}")
        return _Choice(compiled, f"compiled, in {self._library._name}")


_choices = _Choices()


def loaded() -> ctypes.CDLL | NoLibrary:
    """The library, or why there is none."""
    try:
        return ctypes.CDLL(str(library(os.environ)))
    except NoLibrary as error:
        return error
    except OSError as error:
        return NoLibrary(f"the compiled library cannot be loaded: {error}")


def fp32_dots(payloads: Sequence[Bytes], elements: int) -> Products | None:
    """As `Compiled.dots`, of fp32 payloads; None where there is no library."""
    functions = _choices.library() if os.environ.get(SWITCH) != "0" else None
    if not isinstance(functions, ctypes.CDLL):
        return None
    function = functions.fp32_dots
    function.restype = None
    function.argtypes = (_ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS)
    values = [np.frombuffer(payload, np.uint8).ctypes.data + HEADER_BYTES for payload in payloads]
    places = np.array(values, np.uint64)
    rooms, out = _rooms_and_products(len(payloads), _GROUP)
    function(places.ctypes.data, len(payloads), elements, rooms.data_ptr(), out.ctypes.data)
    return out


def _rooms_and_products(members: int, group: int) -> tuple[Tensor, Products]:
    return scratch("rooms", members * group, torch.float32, _CPU), np.zeros(members * (members + 1) // 2)


Floats = NDArray[np.float32]
OuterStep = Callable[[Floats, Floats, Floats, float, float], None]


def outer_step() -> OuterStep | None:
    """The compiled outer step (theta, momentum, delta, mu, lr), all contiguous fp32; not checked yet."""
    functions = loaded() if os.environ.get(SWITCH) != "0" else None
    if not isinstance(functions, ctypes.CDLL):
        return None
    function = functions.outer_step
    function.restype = None
    function.argtypes = (_ADDRESS, _ADDRESS, _ADDRESS, _COUNT, ctypes.c_float, ctypes.c_float)

    def step(theta_n: Floats, m_n: Floats, d_n: Floats, mu: float, lr: float) -> None:
        places = (theta_n, m_n, d_n)
        assert all(each.flags.c_contiguous and each.dtype == np.float32 for each in places)
        function(*(each.ctypes.data for each in places), len(theta_n), mu, lr)

    return step


def compiled_for(codec: Layout) -> Compiled | None:
    """None for the plain path: of whatever has no blocks, too."""
    is_off = not codec.format.block or os.environ.get(SWITCH) == "0"
    return None if is_off else _choices.of(codec).compiled


def path_in_use(codec: Layout) -> tuple[str, str]:
    """("compiled" or "plain", why)"""
    if os.environ.get(SWITCH) == "0":
        return "plain", f"{SWITCH}=0 is set"
    choice = _choices.of(codec)
    return "compiled" if choice.compiled else "plain", choice.reason
