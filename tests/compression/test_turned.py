"""The turn before int4: orthogonal, back to what was given, and of use where a few values are far larger."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.collectives.pipeline.crossing import Border, Tensor
from farflung.compression.codec import codec_named
from farflung.peer.pipeline.border_codec import WIDTH, BorderCodec, turned, turned_back

INT4 = codec_named("int4")
CPU = torch.device("cpu")


def made(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def through_int4(values_n: torch.Tensor) -> torch.Tensor:
    return INT4.decode(INT4.encode(values_n), values_n.numel())


@settings(max_examples=40)
@given(st.integers(0, 1300), st.integers(0, 2**32), st.sampled_from((1.0, 1e-20, 1e20)))
def test_what_is_turned_back_is_what_was_given(count: int, seed: int, scale: float) -> None:
    values_n = made(count, seed) * scale
    there_n = turned(values_n)
    assert there_n.shape == values_n.shape
    whole = count // WIDTH * WIDTH
    assert torch.equal(there_n[whole:], values_n[whole:]), "what is left behind the last whole block stays"
    assert torch.allclose(turned_back(there_n), values_n, rtol=1e-5, atol=2e-6 * scale)
    assert math.isclose(float(there_n.norm()), float(values_n.norm()), rel_tol=1e-5, abs_tol=1e-30)


def test_it_is_one_matrix_that_is_its_own_transpose_but_for_the_signs() -> None:
    matrix = torch.stack([turned(row) for row in torch.eye(WIDTH)])
    assert torch.equal(matrix.abs(), torch.full((WIDTH, WIDTH), 1 / 16))
    assert torch.equal(matrix @ matrix.T, torch.eye(WIDTH))
    assert 90 < int((matrix[:, 0] > 0).sum()) < 166, "the signs are mixed"


def test_one_value_is_spread_over_all_and_equal_ones_do_not_come_out_as_one() -> None:
    one_n, equal_n = torch.zeros(WIDTH), torch.ones(WIDTH)
    one_n[7] = 16.0
    assert turned(one_n).abs().unique().tolist() == [1.0]
    assert float(turned(equal_n).abs().max()) < 8.0


def test_int4_loses_less_of_rows_with_loud_channels() -> None:
    rows = made(64 * 2048).view(64, 2048)
    rows[:, ::20] *= 10.0
    plain = float((through_int4(rows.view(-1)) - rows.view(-1)).norm())
    after = float((turned_back(through_int4(turned(rows))) - rows.view(-1)).norm())
    assert 1.5 * after < plain


def test_hostile_values_come_back_as_numbers() -> None:
    assert turned_back(torch.full((WIDTH,), 3e38)).isfinite().all()
    assert not turned(torch.tensor([math.nan] + [0.0] * (WIDTH - 1))).isfinite().any()


def test_a_border_turns_what_goes_through_int4_and_the_crossing_is_as_long_as_ever() -> None:
    border = Border(
        tensors=(Tensor("float32", (300,)),),
        riders=(Tensor("int64", (4,)),),
        codec="int4",
        samples=2,
        bytes_of=lambda codec, elements: codec_named(codec).payload_bytes(elements),
    )
    codec = BorderCodec(border, ("kind",))
    x, kind = made(600).view(2, 300), torch.arange(8).view(2, 4)
    x[:, 7] *= 100.0
    payload = codec.there((x,), {"kind": kind}, 2)
    assert payload.count(codec_named("int4").encode(turned(x))) == 1, "no byte of it says that it was"
    read = codec.read_there(payload, CPU)
    due = turned_back(through_int4(turned(x)))
    assert torch.equal(read.given[0], due.view(2, 300)) and torch.equal(read.riders["kind"], kind)
    assert torch.equal(codec.read_back(codec.back((x,), 2), CPU)[0], due.view(2, 300)), (
        "and so are its gradients"
    )
