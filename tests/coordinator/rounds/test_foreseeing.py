"""What a round will most likely come to: when that can be told, and how often a mistake may cost bytes twice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from farflung.coordinator.rounds.reported import Scatter
from farflung.coordinator.rounds.round import (
    MISTAKE_ROUNDS,
    ROUNDS_MOST,
    Foresight,
    can_be_foreseen,
    weights_foreseen,
)
from farflung.coordinator.rounds.round_rules import Groups, RoundRules
from farflung.coordinator.rounds.weights import token_weights
from farflung.protocol.errors import Excluded, ExclusionCause
from farflung.protocol.messages import Sent
from farflung.protocol.round_words import Plan

ALL = ("ann", "bob", "cyd")
PLAN = Plan(1, 1, 0, ALL, (0, 1, 2), ("fp32",) * 3)
RULES = RoundRules(min_peers=2, scatter_grace_s=10.0, round_timeout_s=60.0, gather_codec="fp32")


def said(**tokens: int) -> dict[str, Sent]:
    return {
        member: Sent(
            session=bytes(16), seq=1, round_no=1, hashes=bytes(96), tokens=count, steps=1, loss=None, used=(),
            seat=0, counted=b"", signature=b"",
        )
        for member, count in tokens.items()
    }  # fmt: skip


def foreseen(
    sent: dict[str, Sent], alive: Collection[str] = ALL, barred: Collection[str] = ()
) -> dict[str, float] | None:
    out = dict.fromkeys(barred, Excluded(ExclusionCause.EMPTY, "a test"))
    return weights_foreseen(Scatter(Groups(PLAN), RULES, 0.0, sent=sent, barred=out), set(alive))


# ---- what is foreseen


def test_the_weights_are_those_of_all_who_have_said_what_they_send() -> None:
    told = foreseen(said(ann=100, bob=300, cyd=200))
    assert told == dict(zip(ALL, token_weights([100, 300, 200], 4.0), strict=True))


def test_nothing_is_foreseen_while_somebody_has_not_said_what_it_sends() -> None:
    assert foreseen(said(ann=100, bob=100)) is None


def test_who_is_gone_before_it_said_anything_is_not_awaited() -> None:
    told = foreseen(said(ann=100, bob=100), alive={"ann", "bob"})
    assert told is not None and told.keys() == {"ann", "bob"}


def test_whether_the_contribution_of_one_that_is_gone_is_whole_nobody_knows_yet() -> None:
    assert foreseen(said(ann=100, bob=100, cyd=100), alive={"ann", "bob"}) is None


def test_who_cannot_count_is_neither_awaited_nor_counted() -> None:
    told = foreseen(said(ann=100, bob=100, cyd=100), barred={"cyd"})
    assert told is not None and told.keys() == {"ann", "bob"}
    told = foreseen(said(ann=100, bob=100, cyd=0))
    assert told is not None and told.keys() == {"ann", "bob"}


def test_what_is_too_few_for_a_round_is_not_foreseen() -> None:
    assert foreseen(said(ann=100, bob=0, cyd=0)) is None
    assert foreseen(said(ann=100), alive={"ann"}) is None


CAN_NOT = {
    "groups": {"plan": with_fields(PLAN, groups=(0, 0, 1))},
    "nobody may be left out": {"rules": replace(RULES, whole=frozenset(ALL))},
    "results are measured": {"rules": replace(RULES, measures=True)},
    "alone": {"plan": Plan(1, 1, 0, ("ann",), (0, 0, 0), ("fp32",))},
}


@pytest.mark.parametrize("why", CAN_NOT)
def test_rounds_in_which_it_is_not_told(why: str) -> None:
    usual = {"plan": PLAN, "rules": RULES}
    assert can_be_foreseen(**usual)  # type: ignore[arg-type]
    assert not can_be_foreseen(**{**usual, **CAN_NOT[why]})  # type: ignore[arg-type]


# ---- how often


def test_the_first_round_shows_whether_rounds_go_as_they_are_foreseen() -> None:
    foresight = Foresight()
    assert not foresight.is_on
    foresight.on_end(False, True)
    assert foresight.is_on
    foresight.on_end(False, False)
    assert not foresight.is_on


def rounds_until_it_is_on(foresight: Foresight) -> int:
    count = 0
    while not foresight.is_on:
        foresight.on_end(False, True)
        count += 1
    return count


def test_after_each_mistake_it_takes_longer_up_to_a_bound_and_shorter_after_it_was_right() -> None:
    foresight = Foresight()
    pauses = []
    for _ in range(6):
        foresight.on_end(True, False)
        pauses.append(rounds_until_it_is_on(foresight))
    assert pauses == [4, 8, 16, 32, 32, 32] and ROUNDS_MOST == 32
    for _ in range(3):
        foresight.on_end(True, True)
    foresight.on_end(True, False)
    assert rounds_until_it_is_on(foresight) == MISTAKE_ROUNDS


@given(st.lists(st.booleans(), max_size=300))
def test_whatever_anybody_does_bytes_are_sent_twice_in_one_of_so_many_rounds(goes_so: list[bool]) -> None:
    foresight, wasted = Foresight(), []
    for number, right in enumerate(goes_so):
        told = foresight.is_on
        foresight.on_end(told, right)
        wasted += [number] if told and not right else []
    assert all(later - before > MISTAKE_ROUNDS for before, later in pairwise(wasted))
