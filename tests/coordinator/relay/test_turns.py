"""The relay's rate holds, and pairs share it, whatever one of them does."""

from __future__ import annotations

import random

import pytest

from farflung.coordinator.relay.switchboard import (
    GATHERED_TURNS,
    SAVED_S,
    SAVED_TURNS,
    TURN_BYTES,
    TURN_S,
    Turns,
)

RATE = 12.5e6


def passed(turns: Turns, has: dict[bytes, float], seconds: float, chance: random.Random) -> dict[bytes, int]:
    """`has`: bytes a second that come for each pair; what is not read waits."""
    now, moved = 0.0, dict.fromkeys(has, 0)
    waiting = dict.fromkeys(has, 0.0)
    while now < seconds:
        step = chance.uniform(0.0005, 0.01)
        now += step
        for pair, rate in has.items():
            waiting[pair] += rate * step
            if waiting[pair] >= 1:
                turns.wants(pair)
        while (turn := turns.next(now)) is not None:
            size = min(turn.most_bytes, int(waiting[turn.pair]))
            turns.took(turn.pair, size)
            moved[turn.pair] += size
            waiting[turn.pair] -= size
            if waiting[turn.pair] < 1:
                turns.rests(turn.pair)
    return moved


@pytest.mark.parametrize("rate", [1e5, RATE, 1.25e9])
def test_the_rate_is_kept_and_used(rate: float) -> None:
    moved = passed(
        Turns(rate, 0.0), {b"a": 10 * rate, b"b": 10 * rate, b"c": 10 * rate}, 10.0, random.Random(1)
    )
    saved = max(SAVED_TURNS * min(TURN_BYTES, TURN_S * rate), SAVED_S * rate)
    assert 0.95 * 10 * rate <= sum(moved.values()) <= 10 * rate + saved


def test_a_pair_that_hogs_gets_no_more_than_the_others() -> None:
    moved = passed(
        Turns(RATE, 0.0), {b"hog": 100 * RATE, b"b": RATE / 2, b"c": RATE / 2}, 10.0, random.Random(2)
    )
    equal = sum(moved.values()) / 3
    assert all(abs(each / equal - 1) < 0.05 for each in moved.values())


def test_what_little_ones_leave_is_for_the_others() -> None:
    moved = passed(Turns(RATE, 0.0), {b"hog": 100 * RATE, b"b": RATE / 20}, 10.0, random.Random(3))
    assert moved[b"b"] == pytest.approx(10 * RATE / 20, rel=0.05), "all that it had"
    assert sum(moved.values()) >= 0.95 * 10 * RATE


def test_nothing_passes_before_it_is_due_and_it_is_known_when_that_is() -> None:
    turns = Turns(RATE, 0.0)
    assert turns.wait_s(0.0) is None and turns.next(0.0) is None
    turns.wants(b"a")
    while (turn := turns.next(0.0)) is not None:
        turns.took(turn.pair, turn.most_bytes)
    wait_s = turns.wait_s(0.0)
    assert wait_s is not None and 0 < wait_s <= GATHERED_TURNS * TURN_BYTES / RATE
    assert turns.next(0.9 * TURN_BYTES / RATE) is None and turns.next(wait_s) is not None
    assert turns.wait_s(wait_s) == 0.0
