"""Peers' fastest way and the plain codecs, which the court takes too: the same bytes, and the same values.

Both ways, for every codec, any length and any finite values; and what the one refuses, the other refuses.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from farflung.compression.codec import NonFinite, codec_names
from farflung.compression.codec import codec_named as fast_codec_named
from farflung.compression.native import awkward_vectors
from farflung.compression.plain_codecs import (
    HEADER_BYTES,
    codec_in,
    codec_named,
    decode,
    encode,
)
from farflung.protocol.errors import FrameError, UserError, Verdict

NAMES = tuple(codec_names())
LENGTHS = (0, 1, 2, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 9001)
any_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Many of each: blocks of nothing but extremes are where a step is bounded, is zero, or has no bits left.
EXTREMES = (0.0, -0.0, 1e-45, -1e-45, 1.2e-38, -1.1e-38, 2.0**-100, 3.4028234663852886e38, -3.4e38, 1.0, -0.5)


def noise(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Heavy-tailed, as pseudo-gradients are."""
    chance = np.random.default_rng(seed)
    wide = chance.standard_normal(count) * np.exp(chance.standard_normal(count))
    return (wide * 1e-3).astype(np.float32)


def same(name: str, values: NDArray[np.float32]) -> None:
    theirs = fast_codec_named(name)
    payload = theirs.encode(torch.empty(len(values)).copy_(torch.from_numpy(values)))
    assert encode(name, values) == payload, name
    decoded = theirs.decode(payload, len(values)).numpy()
    assert decode(payload, len(values)).tobytes() == decoded.tobytes(), name
    assert codec_named(name).payload_bytes(len(values)) == len(payload)


@pytest.mark.parametrize("name", NAMES)
def test_P1_pseudo_gradients_of_any_length(name: str) -> None:
    for length in LENGTHS:
        same(name, noise(length, seed=length))


@pytest.mark.parametrize("name", NAMES)
def test_P1_awkward_values(name: str) -> None:
    """Those on which compiled code and graphics cards are tried: the last bit of a step decides in them."""
    for vector in awkward_vectors().values():
        if bool(vector.isfinite().all()):
            same(name, vector.reshape(-1).numpy())


@pytest.mark.parametrize("name", NAMES)
def test_P1_every_size_that_fp32_knows(name: str) -> None:
    values = np.clip(noise(200) * 1000, -1, 1).astype(np.float64)
    for exponent in range(-150, 128):
        same(name, (values * 2.0**exponent).astype(np.float32))
    same(name, np.full(4096, -1e-40, np.float32))  # a row that holds no normal number


@settings(max_examples=60)
@given(st.lists(any_floats | st.sampled_from(EXTREMES), max_size=300), st.sampled_from(NAMES))
def test_P1_any_values(values: list[float], name: str) -> None:
    same(name, np.array(values, np.float32))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(EXTREMES) | any_floats, st.integers(1, 300)), max_size=20),
    st.sampled_from(NAMES),
)
def test_P1_long_stretches_of_one_value(stretches: list[tuple[float, int]], name: str) -> None:
    parts = [np.full(count, value, np.float32) for value, count in stretches]
    same(name, np.concatenate([np.zeros(0, np.float32), *parts]))


@settings(max_examples=40)
@given(st.binary(max_size=16384), st.sampled_from(NAMES))
def test_P1_any_bits_that_are_numbers(raw: bytes, name: str) -> None:
    values = np.frombuffer(raw[: len(raw) // 4 * 4], np.float32)
    same(name, np.where(np.isfinite(values), values, np.float32(0)))


# ---- refusals ----------------------------------------------------------------------------------------------


def accepted_by_both(name: str, payload: bytes, elements: int) -> bool:
    """Whether they take it; that they do or refuse alike, and read the same values, is asserted."""
    try:
        theirs = fast_codec_named(name).decode(payload, elements).numpy().tobytes()
    except FrameError:
        with pytest.raises(FrameError) as caught:
            codec_named(name).decode(payload, elements)
        assert caught.value.verdict is Verdict.MALFORMED
        return False
    assert codec_named(name).decode(payload, elements).tobytes() == theirs
    return True


@settings(max_examples=120)
@given(st.data(), st.sampled_from(NAMES), st.sampled_from((1, 64, 70, 300, 4097)))
def test_P8_any_body_is_refused_by_both_or_means_the_same_to_both(
    data: st.DataObject, name: str, elements: int
) -> None:
    payload = bytearray(encode(name, noise(elements)))
    at = data.draw(st.integers(HEADER_BYTES, len(payload) - 1))
    change = data.draw(st.binary(min_size=1, max_size=len(payload) - at))
    payload[at : at + len(change)] = change
    accepted_by_both(name, bytes(payload), elements)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "topk", "sparse"])
def test_P8_every_step_is_taken_by_both_or_by_none(name: str) -> None:
    payload = bytearray(encode(name, noise(64)))
    taken = 0
    for bits in range(1 << 16):
        payload[HEADER_BYTES : HEADER_BYTES + 2] = bits.to_bytes(2, "little")
        # Those in the middle are alike: all near the two ends, and some of the others.
        if bits % 97 == 0 or min(abs(bits - edge) for edge in (0, 0x200, 0xF600, 0xFA00, 0xFDFF)) < 200:
            taken += accepted_by_both(name, bytes(payload), 64)
    assert taken


@pytest.mark.parametrize("name", NAMES)
def test_P8_any_other_header_or_length_is_refused(name: str) -> None:
    payload = encode(name, noise(300))
    for place in range(HEADER_BYTES):
        broken = bytearray(payload)
        broken[place] ^= 0x11
        assert not accepted_by_both(name, bytes(broken), 300)
    for cut in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(payload) - 1):
        assert not accepted_by_both(name, payload[:cut], 300)
        with pytest.raises(FrameError):
            decode(payload[:cut], 300)
    assert not accepted_by_both(name, payload + b"\0", 300)
    assert not accepted_by_both(name, payload, 301)
    assert not accepted_by_both(name, payload, 2**31 - 1)  # before memory is taken for so many
    for elements in (-1, 2**31, 2**40):
        with pytest.raises(FrameError, match="a chunk of"):
            decode(payload, elements)


@settings(max_examples=100)
@given(st.binary(max_size=400), st.integers(0, 300))
def test_P8_garbage_is_a_frame_error_and_nothing_else(garbage: bytes, elements: int) -> None:
    for payload in (garbage, b"FFQ\0" + garbage):
        with pytest.raises(FrameError):
            decode(payload, elements)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_not_encoded(name: str, bad: float) -> None:
    values = noise(5000)
    values[4999] = bad
    with pytest.raises(NonFinite, match="value 4999 is"):
        fast_codec_named(name).encode(torch.from_numpy(values))
    with pytest.raises(NonFinite, match="value 4999 is"):
        encode(name, values)


def test_a_codec_is_known_by_its_name_and_by_its_payloads() -> None:
    for name in NAMES:
        assert codec_in(encode(name, noise(3))).name == name
    with pytest.raises(UserError, match='no installed package has the codec "zip"'):
        codec_named("zip")
