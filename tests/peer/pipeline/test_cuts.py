"""Cuts: the best ones against all there are, and what is refused."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.peer.pipeline.parts import PartFacts, Signature
from farflung.peer.pipeline.whole import best_cuts, plan_stages, stage_work
from farflung.protocol.errors import UserError


def facts_of(flops: list[int], carried: list[int]) -> list[PartFacts]:
    return [
        PartFacts(f"part {n}", work, 8 * n, (Signature("int8", (size,)),))
        for n, (work, size) in enumerate(zip(flops, carried, strict=True))
    ]


def price(facts: list[PartFacts], cuts: tuple[int, ...]) -> tuple[int, int]:
    upto = [0, *accumulate(fact.flops for fact in facts)]
    borders = [0, *cuts, len(facts)]
    largest = max(stage_work(upto, *pair) for pair in pairwise(borders))
    return largest, sum(facts[cut - 1].gives[0].bytes for cut in cuts)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 9))
def test_no_other_cuts_are_better(data: st.DataObject, count: int) -> None:
    # Few values, so that there are ties to break; zeros, as parts without a matrix have.
    flops = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    carried = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    stages = data.draw(st.integers(1, count))
    facts = facts_of(flops, carried)
    everything = [(price(facts, cuts), cuts) for cuts in combinations(range(1, count), stages - 1)]
    best = tuple(best_cuts(facts, stages))
    assert (price(facts, best), best) == min(everything)


def test_the_last_stage_saves_one_forward_pass() -> None:
    assert [stage.work_flops for stage in plan_stages(facts_of([6, 6], [1, 1]), 2, "auto")] == [24, 18]


def test_a_stage_says_what_it_needs_and_what_it_gives() -> None:
    plan = plan_stages(facts_of([1, 1, 1], [5, 7, 9]), 2, [2])
    assert [(stage.first, stage.stop) for stage in plan] == [(0, 2), (2, 3)]
    assert [stage.memory_bytes for stage in plan] == [8, 16]
    assert [stage.border_bytes for stage in plan] == [7, 0]


@pytest.mark.parametrize(
    ("stages", "cuts", "words"),
    [
        (4, "auto", r"stages is 4, and the model has 3 parts: .* take at most 3 stages"),
        (3, [1], r"cuts \[1\]: 3 stages need 2, found 1"),
        (3, [2, 2], r"cuts \[2, 2\]: 2 after 2; each stage begins after the one before"),
        (2, [0], r"cuts \[0\]: 0 after 0"),
        (2, [3], r"cuts \[3\]: there is no part 3, the last one of this model is 2"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(stages: int, cuts: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan_stages(facts_of([1, 1, 1], [1, 1, 1]), stages, cuts)
