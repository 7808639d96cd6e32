"""The compiled path of the block codecs: loaded if it can be had, checked against the plain path, used or left.

Owns: the choice for each codec and its reason, and the calls into the library.
Called by: codec.py; `path_in_use` by whoever tells a user about it.
Must not know: the arithmetic, peers, rounds.

Nothing depends on this path: the bytes are those of the plain path or it is not used.  FARFLUNG_NATIVE=0 turns it
off.  The library is called without the interpreter's lock, so other threads go on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from farflung.compression.plain_codecs import HEADER_BYTES, MAX_ELEMENTS, Bytes, Format, NonFinite
from farflung.protocol.errors import FrameError

# ---- native build ------------------------------------------------------------------------------------------
# Turns kernels.c, or another file of C, into a shared library, once, in a folder that only its user can write
# to.
#
# Owns: the choice of compiler, the flags, the cache folder and its checks. Every way to fail has a reason in
# words. The lab of the benchmarks builds its router with it, too. Must not know: tensors, codecs, whether the
# library is used.
#
# The library's name is a hash of all that its bytes depend on: source, flags, compiler and processor, because
# code for one processor may not run on another, and a home folder may be shared by both. It is written beside
# its place and renamed, so any number of processes may build at the same time: each finds a whole library or
# none.

SWITCH = "FARFLUNG_NATIVE"  # set to 0, nothing compiled is used
SOURCE = Path(__file__).with_name("kernels.c")
# The second line keeps every bit: no fused operations and no other order.  The third only allows that errno and the
# processor's exception flags are not kept, which nobody reads.
FLAGS = (
    *("-std=c11", "-O3", "-march=native", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-fast-math"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
COMPILE_LIMIT_S, VERSION_LIMIT_S = 60.0, 10.0
_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features", "isa")


class NoLibrary(Exception):
    """There is no compiled library, and this is why."""


def library(environ: Mapping[str, str], source: Path | None = None) -> Path:
    """The library for this machine, compiled now if no earlier run has done it.  Raises NoLibrary."""
    source = source or SOURCE
    compiler = _compiler(environ)
    folder = cache_folder(environ)
    identity = [_text(source), *FLAGS, *compiler, _version(compiler), _processor()]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:24]
    place = folder / f"{source.stem}-{key}.so"
    if not place.exists():
        _compile(compiler, source, place)
    refuse_unless_ours(place)
    return place


def _text(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except OSError as error:
        raise NoLibrary(f"cannot read {source}: {error.strerror}") from error


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Made if it is not there.  A user who can write to it, or put another in its place, could run code as this one."""
    if not hasattr(os, "getuid"):
        raise NoLibrary("compiled codecs are for POSIX systems only")
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
    if not os.path.isabs(home):
        raise NoLibrary("neither XDG_CACHE_HOME nor HOME names an absolute folder for the compiled codecs")
    folder = Path(home) / "farflung" / "kernels"
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NoLibrary(f"cannot make the folder {folder}: {error.strerror}") from error
    refuse_unless_ours(folder)
    for parent in folder.resolve().parents:
        _refuse_open_parent(parent)
    return folder


def refuse_unless_ours(path: Path) -> None:
    """Raises NoLibrary unless `path` is this user's own and nobody else can write to it."""
    try:
        found = path.lstat()
    except OSError as error:
        raise NoLibrary(f"cannot look at {path}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise NoLibrary(f"{path} is a link; remove it")
    if found.st_uid != os.getuid():
        raise NoLibrary(f"{path} belongs to another user (uid {found.st_uid}); remove it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoLibrary(f"others may write to {path}; remove it, or run: chmod go-w {shlex.quote(str(path))}")


def _refuse_open_parent(parent: Path) -> None:
    found = parent.stat()
    if found.st_uid not in (0, os.getuid()):
        raise NoLibrary(f"{parent} belongs to another user (uid {found.st_uid}), who could replace the cache")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise NoLibrary(f"everybody may write to {parent} and could replace the cache")


def _compiler(environ: Mapping[str, str]) -> list[str]:
    try:
        wished = shlex.split(environ.get("CC", ""))
    except ValueError as error:
        raise NoLibrary(f"CC={environ['CC']} is not a command: {error}") from error
    for words in (wished, ["cc"], ["gcc"], ["clang"]):
        found = shutil.which(words[0], path=environ.get("PATH")) if words else None
        if found:
            return [found, *words[1:]]
    raise NoLibrary("no C compiler found (CC, cc, gcc, clang); install gcc or clang for faster codecs")


def _version(compiler: list[str]) -> str:
    return _output([*compiler, "--version"], VERSION_LIMIT_S)


def _compile(compiler: list[str], source: Path, place: Path) -> None:
    try:
        handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=place.parent)
    except OSError as error:
        raise NoLibrary(f"cannot write to {place.parent}: {error.strerror}") from error
    os.close(handle)
    unfinished = Path(name)
    try:
        _output([*compiler, *FLAGS, "-o", name, str(source), "-lm"], COMPILE_LIMIT_S)
        unfinished.chmod(0o700)  # a compiler makes it as the umask says
        unfinished.replace(place)
    except OSError as error:
        raise NoLibrary(f"cannot write {place}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _output(command: list[str], limit_s: float) -> str:
    """What a compiler says on stdout.  Raises NoLibrary where it fails or takes longer than it may."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except OSError as error:
        raise NoLibrary(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise NoLibrary(f"{command[0]} took longer than {limit_s:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoLibrary(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}")
    return done.stdout


def _processor() -> str:
    """Its model and what it can do; where the system does not tell, the machine's name stands in for both."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "\n".join((platform.machine(), platform.processor(), platform.node()))
    first_core = text.partition("\n\n")[0].splitlines()
    told = [line for line in first_core if line.partition(":")[0].strip() in _CPU_FIELDS]
    return "\n".join((platform.machine(), *told))


# ---- native ------------------------------------------------------------------------------------------------

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


# Is a codec's fast path the same as its plain path, bit for bit?  A fixed set of awkward inputs tells.
#
# Done here and by triton_path.py, once for each codec, device and process, before a fast path is used.
# Must not know: what the codecs compute, how the library came about.
#
# A compiler or a processor with another idea of rounding shows here.  It takes about a tenth of a second, so the
# vectors are short, each made for one way of going wrong; the long and random ones are in the tests.

_LENGTHS = (0, 1, 63, 65, 255, 257, 1023, 1025, 4095, 4097)
_ROWS = ((128, 256), (256, 64), (8, 64))
_WEIGHT = -1 / 7
_LARGEST = torch.finfo(torch.float32).max


class CodecPath(Protocol):
    """A codec on one of its two paths."""

    def encode(self, chunk_n: Tensor) -> bytes: ...
    def decode(self, payload: Bytes, elements: int) -> Tensor: ...
    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None: ...


def first_difference(
    reference: CodecPath, candidate: CodecPath, inputs: tuple[torch.dtype, ...] = (torch.float32,)
) -> str:
    """The first input that they treat differently, in words; "" if there is none."""
    for name, vector in awkward_vectors().items():
        for dtype in inputs:
            narrow = vector.to(dtype)
            if _encoded(candidate, narrow) != _encoded(reference, narrow):
                return f"encoding {name} as {dtype}"
        payload = _encoded(reference, vector)
        if payload:
            for kind, body in _bodies(payload, seed=vector.numel()):
                difference = _decodes_differently(reference, candidate, body, vector.numel())
                if difference:
                    return f"{difference} {kind} of {name}"
    return ""


def awkward_vectors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def noise(count: int) -> Tensor:
        return torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp()

    tiny = torch.tensor([1e-45, -1e-45, 1e-40, -1e-39, 1.1e-38, 1.2e-38, -2.4e-38, 0.0, -0.0])
    ties = torch.tensor([0.5, -0.5, 1.5, -1.5, 2.5, 126.5, -126.5, 127.0, -0.0, 5.5, -5.5] * 30)
    bits = torch.randint(-(2**31), 2**31, (5000,), generator=generator, dtype=torch.int64).to(torch.int32)
    any_bits = bits.view(torch.float32)
    scales = torch.tensor([1e-37, 1e-30, 1e-20, 1.0, 1e20, 1e30, 1e37]).repeat_interleave(256)
    # At most 32768 values each: with more, torch asks other threads, and waits where the machine is busy.
    peaked_rb, even_rb, taken_rk = (noise(rows * width).view(rows, width) for rows, width in _ROWS)
    sparse_rkb = torch.zeros(8, 64, 64)
    sparse_rkb[:, :, 5] = _between_steps(taken_rk, _rms(taken_rk), 2.0**-5)
    bad = noise(5000)
    bad[4999] = float("nan")
    return {
        "zeros": torch.zeros(300),
        "subnormals": tiny.repeat(100),
        "subnormals among large values": torch.cat([torch.tensor([1e3]), tiny.repeat(15)]),
        "the largest values": torch.full((300,), _LARGEST) * torch.tensor([1.0, -1.0, 0.5]).repeat(100),
        "ties": ties,
        "equal magnitudes": torch.tensor([1.0, -1.0]).repeat(2060),
        "many scales": noise(len(scales)) * scales,
        "sparse values": noise(9000) * (torch.arange(9000) % 97 == 0),
        "any bits": torch.where(any_bits.isfinite(), any_bits, torch.zeros(())),
        "peaks between two steps": _between_steps(peaked_rb, peaked_rb.double().abs().amax(1), 1 / 127),
        "values between two codes": _between_codes(),
        "an rms between two steps": _between_steps(even_rb, _rms(even_rb), 0.09),
        "few values with an rms between two steps": sparse_rkb,
        "NaN at the end": bad,
        "infinity": torch.cat([noise(100), torch.tensor([float("-inf")]), noise(100)]),
    } | {f"{length} values": noise(length) * 1e-3 for length in _LENGTHS}


def _rms(values_rb: Tensor) -> Tensor:
    return values_rb.double().square().mean(1).sqrt()


def _between_steps(values_rb: Tensor, sizes_r: Tensor, step_of_size: float) -> Tensor:
    """Rows scaled so that what becomes the step lies within a rounding or two of the middle between two steps.

    There the last bit decides: another order of a sum or a fused operation shows, as elsewhere it would not.
    """
    rows_r = torch.arange(len(values_rb)).double()
    middles_r = (1 + (2 * rows_r % 256 + 1) * 2.0**-9) * (1 + (rows_r % 7 - 3) * 2.0**-25)
    return (values_rb.double() * (middles_r / (step_of_size * sizes_r)).unsqueeze(1)).float()


def _between_codes() -> Tensor:
    """Rows of 256 whose quotients by the step lie within a rounding of a half."""
    steps_r = 1 + torch.arange(128).double() * 2.0**-8
    halves_b = torch.arange(256).double().sub_(127.5).clamp_(-126.5, 126.5)
    rows_rb = steps_r.unsqueeze(1) * halves_b
    rows_rb[:, 0] = 127 * steps_r
    return rows_rb.float()


def _encoded(path: CodecPath, vector: Tensor) -> bytes | None:
    try:
        return path.encode(vector)
    except NonFinite:
        return None


def _bodies(payload: bytes, seed: int) -> Iterator[tuple[str, bytes]]:
    """The payload itself, then with codes and with a step that may mean nothing."""
    yield "the payload", payload
    if len(payload) > HEADER_BYTES:
        generator = torch.Generator().manual_seed(seed)
        body = (
            torch.randint(0, 256, (len(payload),), generator=generator, dtype=torch.uint8).numpy().tobytes()
        )
        half = HEADER_BYTES + (len(payload) - HEADER_BYTES) // 2  # behind the steps
        yield "the payload with other codes", payload[:half] + body[half:]
    if HEADER_BYTES < len(payload) < 200:
        for step in (b"\0\0", b"\xff\x01", b"\0\x02", b"\xff\xff"):
            yield "the payload with another step", payload[:HEADER_BYTES] + step + payload[HEADER_BYTES + 2 :]


def _decodes_differently(reference: CodecPath, candidate: CodecPath, payload: bytes, elements: int) -> str:
    wanted, came = _decoded(reference, payload, elements), _decoded(candidate, payload, elements)
    if wanted is None or came is None:
        return "" if wanted is came else "checking"
    if not _same_bits(wanted, came):
        return "decoding"
    start = torch.arange(elements, dtype=torch.float32).sub_(elements / 2).mul_(1e-4)
    one, other = start.clone(), start.clone()
    reference.decode_add(payload, _WEIGHT, one)
    candidate.decode_add(payload, _WEIGHT, other)
    return "" if _same_bits(one, other) else "adding"


def _decoded(path: CodecPath, payload: bytes, elements: int) -> Tensor | None:
    try:
        return path.decode(payload, elements)
    except FrameError:
        return None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


# Working memory of the codecs, taken once per thread; from any tensor to a flat one, and from bytes to tensors.
#
# Called by: the codecs, and what is calculated with them.
# Must not know: formats, scales, levels.

_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], Tensor] = {}


_scratch = _Scratch()


def scratch(role: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count], with whatever it held before.  One buffer for each role, thread and device."""
    size = count * dtype.itemsize
    buffer = _scratch.buffers.get((role, device))
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(-(-size // 4096) * 4096, dtype=torch.uint8, device=device)
        _scratch.buffers[(role, device)] = buffer
    return buffer[:size].view(dtype)


def flat(chunk_n: Tensor) -> Tensor:
    """One dimension, contiguous, without gradient; copied only where it must be."""
    if chunk_n.dtype not in _INPUTS:
        raise ValueError(f"codecs encode fp32, bf16 and fp16, not {chunk_n.dtype}")
    if chunk_n.numel() > MAX_ELEMENTS:
        raise ValueError(f"a chunk of {chunk_n.numel()} values is longer than {MAX_ELEMENTS}")
    return chunk_n.detach().reshape(-1).contiguous()


def from_bytes(part: NDArray[np.generic], device: torch.device) -> Tensor:
    """u8 [bytes], to be read only: on a CPU it is the frame's own memory, which may be a `bytes` object."""
    try:
        shared = from_dlpack(part.view(np.uint8))
    except BufferError:  # a numpy that lends no read-only memory
        shared = torch.from_numpy(part.view(np.uint8).copy())
    return shared.to(device)
