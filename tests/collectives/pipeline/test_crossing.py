"""The payload of a crossing: what is packed comes back, and nothing else is taken for one (P8)."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farflung.collectives.pipeline.crossing import (
    DTYPES,
    RAW,
    Border,
    Tensor,
    border_after,
    fit,
    pack,
    parse,
)
from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec

FLOATS, INTEGERS = ("float32", "bfloat16", "float16"), ("int64", "int32", "int16", "int8", "uint8", "bool")
CODECS = ("fp32", "bf16", "int8", "int4")


def bytes_of(codec: str, elements: int) -> int:
    """As codecs do: a head, and blocks of 256."""
    return 16 + {"fp32": 4 * elements, "bf16": 2 * elements}.get(codec, -(-elements // 256) * (2 + 256))


shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
floats = st.builds(Tensor, st.sampled_from(FLOATS), shapes)
integers = st.builds(Tensor, st.sampled_from(INTEGERS), shapes)
borders = st.builds(
    Border,
    st.lists(floats | integers, min_size=1, max_size=4).map(tuple),
    st.lists(integers, max_size=3).map(tuple),
    st.sampled_from(CODECS),
    st.integers(1, 6),
    st.just(bytes_of),
)
BORDER = Border(
    (Tensor("float32", (3, 2)), Tensor("int64", (2,))), (Tensor("int32", (3,)),), "int8", 4, bytes_of
)


def packed(border: Border, backwards: bool, samples: int, tokens: int = 7) -> bytes:
    due = [border.piece_bytes(codec, tensor, samples) for codec, tensor in border.items(backwards)]
    return pack(border, backwards, samples, tokens, [bytes([at % 251]) * n for at, n in enumerate(due)])


def verdict_of(border: Border, backwards: bool, payload: Any) -> Verdict:
    try:
        parse(border, backwards, payload)
    except FrameError as error:
        assert str(error)
        return error.verdict
    return Verdict.ACCEPTED


@settings(max_examples=150)
@given(borders, st.booleans(), st.data())
def test_what_is_packed_comes_back(border: Border, backwards: bool, data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, border.samples))
    payload = packed(border, backwards, samples)
    found = parse(border, backwards, bytearray(payload))
    assert (found.samples, found.tokens) == (samples, 7)
    items = border.items(backwards)
    assert [(p.codec, p.dtype, p.dims) for p in found.pieces] == [
        (codec, tensor.dtype, (samples, *tensor.shape)) for codec, tensor in items
    ]
    again = pack(border, backwards, samples, 7, [piece.data for piece in found.pieces])
    assert again == payload and len(payload) <= border.most_bytes(backwards)
    assert len(payload) == border.most_bytes(backwards) or samples < border.samples


@settings(max_examples=200)
@given(borders, st.booleans(), st.data())
def test_a_damaged_head_is_never_taken(border: Border, backwards: bool, data: st.DataObject) -> None:
    """But for the number of tokens, which nothing here can know."""
    payload = bytearray(packed(border, backwards, border.samples))
    head = 16 + sum(8 + 4 * (1 + len(tensor.shape)) for _, tensor in border.items(backwards))
    place = data.draw(st.integers(0, head - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    tokens = struct.unpack_from("<Q", payload, 8)[0]
    verdict = verdict_of(border, backwards, bytes(payload))
    assert (verdict == Verdict.ACCEPTED) == (8 <= place < 16 and 1 <= tokens <= 1 << 50)


@settings(max_examples=200)
@given(borders, st.booleans(), st.binary(max_size=400))
def test_bytes_that_are_no_crossing_end_in_words(border: Border, backwards: bool, raw: bytes) -> None:
    assert verdict_of(border, backwards, raw) in (Verdict.MALFORMED, Verdict.OVERSIZE)


@settings(max_examples=100)
@given(borders, borders, st.booleans(), st.booleans())
def test_a_crossing_of_another_border_is_refused(
    one: Border, other: Border, way: bool, other_way: bool
) -> None:
    assume(one.items(way) != other.items(other_way))
    assert verdict_of(one, way, packed(other, other_way, other.samples)) != Verdict.ACCEPTED


@pytest.mark.parametrize(
    ("payload", "verdict"),
    [
        (packed(BORDER, False, 4) + b"x", Verdict.OVERSIZE),
        (packed(BORDER, False, 3) + b"x", Verdict.MALFORMED),
        (packed(BORDER, False, 4)[:-1], Verdict.MALFORMED),
        (packed(BORDER, False, 4)[:15], Verdict.MALFORMED),
        (b"", Verdict.MALFORMED),
        (packed(BORDER, True, 4), Verdict.MALFORMED),
    ],
)
def test_lengths_that_do_not_fit_are_refused(payload: bytes, verdict: Verdict) -> None:
    assert verdict_of(BORDER, False, payload) == verdict


def test_a_head_that_claims_gigabytes_takes_no_memory() -> None:
    """Nothing of what it claims is used before it is equal to the head that is due."""
    head = struct.pack("<BBHIQ", 255, 255, 0, 2**32 - 1, 2**63)
    assert verdict_of(BORDER, False, head + b"\xff" * 64) == Verdict.MALFORMED
    head = struct.pack("<BBHIQ", 2, 1, 0, 4, 7) + struct.pack("<BBBBI", 3, 1, 3, 0, 2**32 - 1)
    assert verdict_of(BORDER, False, head + b"\xff" * 64) == Verdict.MALFORMED


def test_gradients_go_back_for_floats_alone() -> None:
    assert [codec for codec, _ in BORDER.items(False)] == ["int8", RAW, RAW]
    assert [(codec, tensor.dtype) for codec, tensor in BORDER.items(True)] == [("int8", "float32")]


@pytest.mark.parametrize(
    "data", [[], [b"x"] * 3, [b"x" * 274, b"x" * 64, b"x" * 47], [b"x" * 274, b"x" * 64, b"x" * 48, b""]]
)
def test_pieces_that_are_not_of_the_border_are_not_packed(data: list[bytes]) -> None:
    with pytest.raises(ValueError, match="bytes, and the border has"):
        pack(BORDER, False, 4, 7, data)


@pytest.mark.parametrize(("samples", "tokens"), [(0, 7), (5, 7), (4, 0), (4, -1), (4, (1 << 50) + 1)])
def test_samples_and_tokens_have_bounds(samples: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="at most 4 cross"):
        pack(BORDER, False, samples, tokens, [])


def test_P9_a_neighbour_that_says_that_nothing_was_learned_from_gives_nobody_a_mean_of_nothing() -> None:
    payload = bytearray(packed(BORDER, False, 4, tokens=1))
    assert verdict_of(BORDER, False, bytes(payload)) == Verdict.ACCEPTED
    payload[8] = 0
    assert verdict_of(BORDER, False, bytes(payload)) == Verdict.MALFORMED


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tensors": ()}, "1 to 16 tensors"),
        ({"tensors": (Tensor("float32", ()),) * 17}, "1 to 16 tensors"),
        ({"riders": (Tensor("float32", ()),)}, "riders are integers"),
        ({"codec": "raw"}, "no border has raw"),
        ({"samples": 0}, "0 samples"),
        ({"tensors": (Tensor("complex64", ()),)}, "can't cross"),
        ({"tensors": (Tensor("float32", (1,) * 8),)}, "can't cross"),
        ({"tensors": (Tensor("float32", (2**20, 2**20)),)}, "can't cross"),
        ({"tensors": (Tensor("float32", (2**28,)),) * 2}, "larger than"),
    ],
)
def test_a_border_that_no_run_can_have_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Border(**{**vars(BORDER), "codec": "fp32", **change})


def test_two_stages_agree_on_their_border_or_say_where_they_do_not() -> None:
    assert fit(BORDER, Border(**vars(BORDER))) == ""
    for key, other in (
        ("tensors", BORDER.tensors[:1]),
        ("riders", ()),
        ("codec", "bf16"),
        ("samples", 2),
    ):
        assert fit(BORDER, Border(**{**vars(BORDER), key: other})).startswith(f"{key}: one stage gives")


def test_numbers_on_the_wire_are_exactly_these() -> None:
    assert list(DTYPES.values()) == list(range(1, 10)) and set(DTYPES) == {*FLOATS, *INTEGERS}


def test_the_border_after_a_stage_is_what_the_schema_says() -> None:
    """So agent and trainer, and the trainers of both stages, have the same one."""
    gives = (BorderTensor("float32", (3, 2)), BorderTensor("int64", (2,)))
    stages = (StageSpec(0, 0, 1, 0), StageSpec(1, 1, 1, 0, gives), StageSpec(2, 2, 1, 0))
    model = ModelSchema((), 4, 3, 3, bytes(32), stages, (BorderTensor("int32", (3,), "mask"),))
    how = PipelineSection(batch=8, stages=3, micro=4, codec="int8")
    assert border_after(1, model, how, bytes_of) == BORDER
    with pytest.raises(ValueError, match="1 to 16 tensors"):
        border_after(2, model, how, bytes_of)  # nothing lies behind the last one
