"""Is a codec's fast path the same as its plain path, bit for bit?  A fixed set of awkward inputs tells.

Called by: native.py and triton_path.py, once for each codec, device and process, before a fast path is used.
Must not know: what the codecs compute, how the library came about.

A compiler or a processor with another idea of rounding shows here.  It takes about a tenth of a second, so the
vectors are short, each made for one way of going wrong; the long and random ones are in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from farflung.compression.payload import HEADER_BYTES, Bytes, NonFinite
from farflung.protocol.errors import FrameError

_LENGTHS = (0, 1, 63, 65, 255, 257, 1023, 1025, 4095, 4097)
_ROWS = ((128, 256), (256, 64), (8, 64))
_WEIGHT = -1 / 7
_LARGEST = torch.finfo(torch.float32).max


class Path(Protocol):
    """A codec on one of its two paths."""

    def encode(self, chunk_n: Tensor) -> bytes: ...
    def decode(self, payload: Bytes, elements: int) -> Tensor: ...
    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None: ...


def first_difference(
    reference: Path, candidate: Path, inputs: tuple[torch.dtype, ...] = (torch.float32,)
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


def _encoded(path: Path, vector: Tensor) -> bytes | None:
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


def _decodes_differently(reference: Path, candidate: Path, payload: bytes, elements: int) -> str:
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


def _decoded(path: Path, payload: bytes, elements: int) -> Tensor | None:
    try:
        return path.decode(payload, elements)
    except FrameError:
        return None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
