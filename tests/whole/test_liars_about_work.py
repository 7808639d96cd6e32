"""P7, P9, P18: members that lie about their data and their tokens, alone and in league up to all but one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from farflung.coordinator.ledger.leases import Leases
from farflung.coordinator.rounds import weights
from farflung.coordinator.run.lease_desk import DatasetAgreement
from farflung.simulator.invariants import Broken
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World
from rig.pieces import pieces, seeds

EACH = 5  # seeds of one test


def about_data(seed: int) -> Scenario:
    """Fewer than half lie from the start, or up to all but one from the first commit on."""
    drawn, draw = Scenario.of(seed), random.Random(f"league {seed}")
    early = draw.random() < 0.4
    peers = draw.choice((4, 5)) if early else draw.choice((2, 3, 4, 5))
    return replace(
        drawn,
        peers=peers,
        work_liars=1 if early else draw.randint(1, peers - 1),
        min_peers=3 if early else 1,  # what is committed first has honest work in it
        rounds=draw.choice((3, 5, 8)),
        undialable=0,
        work_lies=draw.choice(("length", "end", "print", "wild", "end", "length print")),
        work_lies_early=early,
        stream_samples=draw.choice((0, 13, 40, 64)),
        kill_per_effect=drawn.kill_per_effect / 2,
    )


def about_tokens(seed: int) -> Scenario:
    """Fewer than half from the start, or up to all but one once the run has a past to compare with."""
    drawn, draw = Scenario.of(seed), random.Random(f"tokens {seed}")
    early = draw.random() < 0.5
    peers = draw.choice((3, 4, 5)) if early else draw.choice((2, 3, 4, 5))
    liars = draw.randint(1, (peers - 1) // 2 if early else peers - 1)
    return replace(
        drawn,
        peers=peers,
        work_liars=liars,
        min_peers=2 * liars + 1 if early else 2,
        rounds=4 if early else 8,
        undialable=0,
        work_lies="tokens",
        work_lies_early=early,
        kill_per_effect=drawn.kill_per_effect / 2,
    )


@pytest.mark.parametrize("batch", pieces(3))
def test_P7_P18_who_lies_about_its_data_sends_no_honest_peer_away(batch: int) -> None:
    finished = 0
    for seed in seeds(batch, EACH):
        finished += World(seed, about_data(seed)).run().outcome == "finished"
    assert finished >= 0.6 * EACH, "the rest lost every holder of the newest version"


@pytest.mark.parametrize("batch", pieces(3))
def test_P9_a_thousand_times_the_tokens_buy_neither_weight_nor_a_place_in_the_books(batch: int) -> None:
    found_out = 0
    for seed in seeds(batch, EACH):
        world = World(seed, about_tokens(seed))
        world.run()
        ledger = world.coordinator.core.ledger if world.coordinator is not None else None
        found_out += ledger is not None and any(
            world.work_league.keys.keys() & record.merged.clipped.keys() for record in ledger.totals.rounds
        )
    assert found_out >= 0.6 * EACH, "the record says who claimed too much"


# ---- mutations: each breaks one rule, and some seed must notice -------------------------------------------------


def broken_in(scenarios: list[Scenario]) -> str:
    for seed, scenario in enumerate(scenarios):
        try:
            World(seed, scenario).run()
        except Broken as seen:
            return str(seen)
    return ""


def test_the_simulator_sees_a_coordinator_that_believes_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    before = DatasetAgreement._choose

    def choose_as_they_say(self: DatasetAgreement) -> None:
        self._chosen_at = (-1, 0)
        before(self)

    monkeypatch.setattr(DatasetAgreement, "_choose", choose_as_they_say)
    monkeypatch.setattr(
        Leases, "settled", property(lambda self: False, lambda self, value: None), raising=False
    )
    assert broken_in([about_data(seed) for seed in range(60)])


def test_the_simulator_sees_tokens_that_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "RATE_MOST", 1e9)
    monkeypatch.setattr(weights, "PACE_MOST", 1e9)
    assert broken_in([about_tokens(seed) for seed in range(40)]).startswith("P9")
