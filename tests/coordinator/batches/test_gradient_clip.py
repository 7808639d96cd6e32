"""The factor of a batch's commits: one for all stages, from lengths that whoever holds the results has proven."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflung.collectives.arithmetic.merge import square_length
from farflung.compression.codec import codec_named
from farflung.coordinator.batches.batch_mode import clipped, warning
from farflung.coordinator.rounds.round_policy import Done
from farflung.protocol.digests import length_to_bytes, split_lengths
from farflung.protocol.outer_numbers import factor_of, fp32, total
from farflung.protocol.round_words import Commit


def end(fragment: int, *squares: float) -> Done:
    commit = Commit(1, 1 + fragment, ("ann",), (1.0,), bytes(32 * len(squares)), "fp32", fragment)
    return Done(commit, None, lengths=squares)


def test_all_stages_have_one_factor_from_the_length_of_the_whole() -> None:
    ends = clipped([end(0, 9.0, 16.0), end(1, 144.0)], 6.5)
    assert [done.commit.factor for done in ends] == [fp32(6.5 / (13.0 + 1e-6))] * 2
    assert [done.norm for done in ends] == [5.0, 12.0], "of each stage, for people"
    assert [done.commit.fragment for done in ends] == [0, 1]


def test_P1_squares_are_added_up_so_that_no_order_matters() -> None:
    assert total([1e16, 1.0, 1.0]) == total([1.0, 1.0, 1e16]) == 1e16 + 2


def test_a_gradient_that_is_short_enough_stays_as_it_is_and_so_does_a_run_that_clips_nothing() -> None:
    [short] = clipped([end(0, 9.0, 16.0)], 5.1)
    assert short.commit.factor == 1.0 and short.norm == 5.0
    plain = end(0)
    assert clipped([plain], math.inf) == [plain]


def test_lengths_that_no_result_has_end_in_no_step_and_not_in_an_error() -> None:
    [done] = clipped([end(0, 1e308, 1e308)], 1.0)
    assert done.commit.factor == 0.0 and done.norm is None
    assert clipped([done, end(1, 1.0)], 1.0)[1].commit.factor == 0.0
    assert factor_of([0.0], 1.0) == 1.0


def test_people_are_told_whose_results_leave_hardly_anything_of_a_gradient() -> None:
    def told(*squares: float) -> str:
        ends = clipped([end(fragment, square) for fragment, square in enumerate(squares)], 1.0)
        return warning(ends, lambda fragment: f" of stage {fragment}")

    assert told(1.0, 99.0**2) == ""
    assert (
        "by version 1: its gradient is multiplied by 0.0001, since the results of stage 1 are 1e+04;"
        in told(1.0, 1e8)
    )
    [whole, rest] = clipped([replace(end(0, 1e308), lengths=(1e308, 1e308)), end(1, 4.0)], 1.0)
    assert "by 0, since the results of stage 0 are longer than numbers go;" in warning(
        [whole, rest], lambda fragment: f" of stage {fragment}"
    )
    assert warning([end(0)], str) == "", "a run that clips nothing"


@pytest.mark.parametrize("seed", range(5))
def test_the_factor_is_that_of_torch_up_to_the_rounding_of_its_norm(seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=dice) * 3 for size in (257, 1, 64)]
    copies = [nn.Parameter(each.clone()) for each in gradients]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient.clone()
    nn.utils.clip_grad_norm_(copies, 2.0)
    codec = codec_named("fp32")
    squares = tuple(square_length(each.numel(), codec.encode(each)) for each in gradients)
    [done] = clipped([replace(end(0), lengths=squares)], 2.0)
    assert done.commit.factor < 1.0
    for copy, gradient in zip(copies, gradients, strict=True):
        assert copy.grad is not None
        assert torch.allclose(copy.grad, gradient * done.commit.factor, rtol=1e-6, atol=0.0)


@settings(max_examples=60)
@given(st.integers(1, 700), st.integers(0, 2**32), st.sampled_from((1.0, 1e-30, 1e-44, 3e37)))
def test_P1_a_length_is_added_up_in_the_order_that_is_written_down(
    count: int, seed: int, scale: float
) -> None:
    """By Python's own numbers: halves onto each other, an odd one onto the first."""
    values_n = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
    squares = [value * value for value in values_n.double().tolist()]
    while len(squares) > 1:
        half, last = len(squares) // 2, squares[-1] if len(squares) % 2 else None
        squares = [squares[i] + squares[half + i] for i in range(half)]
        squares[0] += last or 0.0
    assert square_length(count, codec_named("fp32").encode(values_n)) == squares[0]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_a_length_is_that_of_the_values_that_everybody_applies(codec: str) -> None:
    values_n = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    payload = codec_named(codec).encode(values_n)
    decoded_n = codec_named(codec).decode(payload, 1000, torch.empty(1000))
    assert math.isclose(square_length(1000, payload), float(decoded_n.double().square().sum()), rel_tol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_P9_what_is_no_length_is_not_heard(value: float) -> None:
    assert split_lengths(length_to_bytes(2.5) + length_to_bytes(0.0)) == [2.5, 0.0]
    assert split_lengths(length_to_bytes(2.5) + length_to_bytes(value)) == []
    assert split_lengths(length_to_bytes(2.5)[:-1]) == []
