"""Results that leave before the decision that they most likely follow from: rounds are shorter, no promise is weaker,
and whoever makes what was foreseen wrong costs bytes twice in few rounds only.

It is on in every run of the simulator whose rounds are flat (P1 to P9 of all seeds); here it is looked at itself.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from farflung.collectives.round.effects import SendFrame
from farflung.coordinator.ledger.records import CommittedRound, DecidedOn, from_bytes
from farflung.coordinator.rounds.round import MISTAKE_ROUNDS, Foresight
from farflung.protocol.frames import Kind
from farflung.protocol.messages import Decided, Message
from farflung.simulator.cut_lines import calm_slow_line
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World
from rig.pieces import pieces, seeds

ROUNDS = 24


class Watched(World):
    """Which results left by which decision, and what was told of it."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.results: defaultdict[int, set[int]] = defaultdict(set)  # round -> numbers of decisions
        self.copies: defaultdict[tuple[int, int, int, str, str], int] = defaultdict(int)
        self.foreseen: set[int] = set()  # rounds
        self.early: set[int] = set()  # rounds of which a result left before the decision was written
        super().__init__(seed, scenario)

    @property
    def records(self) -> list[object]:
        return [from_bytes(raw) for raw in self.journal]

    @property
    def decided(self) -> dict[int, int]:
        """Round -> the number of its last decision."""
        made = [each.decision for each in self.records if isinstance(each, DecidedOn)]
        return {decision.round_no: decision.decision_no for decision in made}

    @property
    def commits(self) -> list[CommittedRound]:
        return [each for each in self.records if isinstance(each, CommittedRound)]

    @property
    def twice(self) -> list[int]:
        """Rounds whose results left twice, by what was foreseen and by what came."""
        return sorted(number for number in self.foreseen if len(self.results[number]) > 1)

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        header = effect.frame.header
        if header.kind is Kind.RESULT:
            self.results[header.round_no].add(header.decision_no)
            self.copies[header.round_no, header.decision_no, header.chunk, source, effect.to] += 1
            flight = self.coordinator.drivers[0].round if self.coordinator is not None else None
            if flight is not None and flight.plan.round_no == header.round_no and flight.decision is None:
                self.early.add(header.round_no)
        super()._send_frame(source, effect)

    def _arrive(self, source: str, target: str, message: Message, key: bytes) -> None:
        if isinstance(message, Decided) and message.decision.foreseen:
            self.foreseen.add(message.decision.round_no)
        super()._arrive(source, target, message, key)


def calm(seed: int, kind: type[Watched] = Watched, **changes: object) -> Watched:
    scenario = replace(calm_slow_line(seed, faults_until_s=0.0), slow_line_s=0.0, rounds=ROUNDS, end_s=400.0)
    world = kind(seed, replace(scenario, **changes))  # type: ignore[arg-type]
    assert world.run().outcome == "finished"
    return world


@pytest.mark.parametrize("seed", pieces(range(3)))
def test_where_nothing_happens_nearly_every_round_is_foreseen_and_no_result_leaves_twice(seed: int) -> None:
    world = calm(seed, drop=0.0, duplicate=0.0, slow=0.0, policy="mean")
    rounds = {record.commit.round_no for record in world.commits}
    assert len(world.foreseen & rounds) >= 0.5 * len(rounds) and len(world.early) >= 0.25 * len(rounds)
    assert set(world.decided.values()) == {1} and not world.twice
    assert max(world.copies.values()) == 1


def test_rounds_are_shorter_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def took() -> float:
        quiet = {"drop": 0.0, "duplicate": 0.0, "slow": 0.0, "policy": "mean"}
        return median(record.seconds for record in calm(0, **quiet).commits[1:])

    with_it = took()
    monkeypatch.setattr(Foresight, "is_on", property(lambda self: False))
    assert with_it < 0.95 * took()


@pytest.mark.usefixtures("equal_work")
@pytest.mark.parametrize("forges", ["1000x", "flip"])
def test_P9_where_one_is_shortened_or_out_in_each_round_nothing_is_told_ahead(forges: str) -> None:
    world = calm(1, peers=5, forges=forges, policy="robust", min_peers=2)
    assert not world.foreseen


class Withholding(Watched):
    """The last peer gives one of the others nothing, whenever the round was foreseen."""

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        flight = self.coordinator.drivers[0].round if self.coordinator is not None else None
        last = list(self.peers)[-1]
        if effect.frame.header.kind is Kind.CONTRIBUTION and source == last and flight is not None:
            if flight.foresees and effect.to == next(m for m in flight.plan.members if m != last):
                return
        super()._send_frame(source, effect)


@pytest.mark.parametrize("seed", pieces(range(3)))
def test_P9_one_that_makes_it_wrong_whenever_it_can_costs_bytes_twice_in_few_rounds(seed: int) -> None:
    world = calm(seed, Withholding, peers=4, policy="mean", min_peers=2, grace_s=2.0)
    assert world.twice and all(later - before > MISTAKE_ROUNDS for before, later in pairwise(world.twice))
    assert len(world.twice) <= 4, "it takes twice as long after each"
    assert all(world.decided[number] == 2 for number in world.twice)


def bad(seed: int) -> Watched:
    return Watched(seed, replace(Scenario(), rounds=12, end_s=200.0, faults_until_s=20.0))


@pytest.mark.parametrize("batch", pieces(4))
def test_P1_P2_P9_in_a_bad_world_what_was_foreseen_wrongly_costs_nothing_but_time(batch: int) -> None:
    """Deaths, late members, lost words, a coordinator that dies: each promise is looked at in every event."""
    foreseen = 0
    for seed in seeds(batch, 5):
        world = bad(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed} of bad()")
            raise
        foreseen += len(world.foreseen)
        for number, last in world.decided.items():
            assert max(world.results[number], default=0) <= last or number in world.foreseen
    assert foreseen > 5


class Leaving(Watched):
    """An owner goes at once, a moment after the first thing that is told ahead."""

    gone = ""

    def _arrive(self, source: str, target: str, message: Message, key: bytes) -> None:
        super()._arrive(source, target, message, key)
        if self.foreseen and not self.gone and isinstance(message, Decided):
            self.gone = target
            self.after(0.02, lambda: self._kill(target))


@pytest.mark.parametrize("seed", pieces(range(3)))
def test_P3_who_dies_after_it_was_told_ahead_stops_nobody(seed: int) -> None:
    """Before and after its contribution is whole; its round commits, with it or without it."""
    world = calm(seed, Leaving, drop=0.0, duplicate=0.0, slow=0.0, policy="mean", min_peers=2)
    assert world.gone and min(world.foreseen) in {record.commit.round_no for record in world.commits}
