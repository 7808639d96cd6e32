"""How many members a run can use: known noise in, the estimate out within a band; an honest "not known yet" before."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.coordinator.ledger.ledger import (
    MEMBERS_MOST,
    NOISE_LEFT,
    ROUNDS_KEPT,
    ROUNDS_LEAST,
    useful_members,
)
from farflung.coordinator.rounds.weights import Matrix, Screening
from farflung.coordinator.run.status import build_status
from farflung.protocol.errors import Counters
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World

VALUES = 2000


def cosine_of(names: str, products: Matrix, counted: str) -> float | None:
    return Screening("", products, tuple(names)).cosine(counted)


def rounds_with(noise: float, members: int, rounds: int, seed: int) -> list[float]:
    """`noise`: the power of what a member learns alone, against that of what all have in common."""
    draw, found = np.random.default_rng(seed), []
    names = "abcdefghijkl"[:members]
    for _ in range(rounds):
        common = draw.normal(size=VALUES)
        learned = common + noise**0.5 * draw.normal(size=(members, VALUES))
        cosine = cosine_of(names, learned @ learned.T, names)
        assert cosine is not None
        found.append(cosine)
    return found


@given(st.floats(0.05, 20.0), st.integers(2, 12), st.integers(0, 1000))
def test_noise_that_is_known_gives_the_members_that_average_it_out(
    noise: float, members: int, seed: int
) -> None:
    useful = useful_members(rounds_with(noise, members, ROUNDS_KEPT, seed))
    due = noise / NOISE_LEFT
    assert useful.members is not None and useful.most is not None
    assert abs(useful.members - due) <= max(1.0, 0.15 * due)
    assert useful.least <= useful.members <= useful.most
    assert useful.most - useful.least <= max(2.0, 0.6 * due)


def test_the_band_holds_what_is_true_nearly_always() -> None:
    bands = [useful_members(rounds_with(4.0, 6, ROUNDS_KEPT, seed)) for seed in range(200)]
    held = sum(each.least <= 80 <= (each.most or 0) for each in bands)
    assert held >= 180, held


def test_a_few_rounds_are_no_figure() -> None:
    few = useful_members([0.4] * (ROUNDS_LEAST - 1))
    assert (few.members, few.least, few.most) == (None, 0, None)
    assert few.text.startswith(f"not known yet: {ROUNDS_LEAST - 1} of {ROUNDS_LEAST} rounds")
    assert useful_members([0.4] * ROUNDS_LEAST).members == 30


@given(st.integers(2, 12), st.integers(0, 1000))
def test_members_with_nothing_in_common_are_no_figure_but_a_least_one(members: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    names = "abcdefghijkl"[:members]
    found = [learned @ learned.T for learned in draw.normal(size=(ROUNDS_KEPT, members, VALUES))]
    cosines = [cosine_of(names, each, names) or 0.0 for each in found]
    useful = useful_members([each - 0.002 for each in cosines])
    assert useful.members is None and useful.most is None and useful.least > 1000


@given(st.lists(st.floats(-1.0, 1.0), min_size=ROUNDS_LEAST, max_size=ROUNDS_KEPT))
def test_whatever_is_said_the_figures_are_in_order(cosines: list[float]) -> None:
    useful = useful_members(cosines)
    assert 1 <= useful.least <= (useful.members or useful.least) <= (useful.most or MEMBERS_MOST)
    assert useful.text and json.dumps(useful.told(), allow_nan=False)


def test_only_those_that_counted_are_compared() -> None:
    products = np.array([[1.0, 0.5, 9.0], [0.5, 1.0, 9.0], [9.0, 9.0, 100.0]])
    assert cosine_of("abc", products, "ab") == pytest.approx(0.5)
    assert cosine_of("abc", products, "a") is None and cosine_of("abc", np.zeros((3, 3)), "abc") is None


def test_a_run_tells_it_keeps_it_over_a_fold_and_forgets_what_went_back() -> None:
    world = World(1, Scenario(peers=4, rounds=ROUNDS_LEAST + 2, drop=0.0, slow=0.0, kill_per_effect=0.0))
    world.run()
    assert world.coordinator is not None
    core = world.coordinator.core
    book = core.ledger.books[0]
    assert len(book.figures.cosines) >= ROUNDS_LEAST
    told = build_status(core, world.coordinator.drivers, Counters(), world.now)["useful_members"]
    assert told["rounds"] == len(book.figures.cosines) and (told["members"] or told["least"])
    newest = max(book.figures.cosines)
    book.forget_after(newest - 2)
    assert max(book.figures.cosines) <= newest - 2
