"""Who takes its leave costs the others no waiting, at whatever moment it is asked, and its samples are free at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from farflung.coordinator.ledger.records import (
    CommittedRound,
    DecidedOn,
    DigestFixed,
    Opened,
    Record,
    Released,
)
from farflung.coordinator.rounds.round import Foresight
from farflung.coordinator.run.effects import Tell
from farflung.peer.machine.handshake import STAY_S, Leaving
from farflung.simulator.cut_lines import ask_to_leave
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.world import Scenario, World

CALM = {"drop": 0, "duplicate": 0, "slow": 0, "kill_per_effect": 0, "cut_per_s": 0, "trainer_crash_per_s": 0}
VERSION = 2  # the one that is being made when somebody is asked to leave
PHASES: dict[str, Callable[[Record], bool]] = {
    "scatter": lambda record: isinstance(record, Opened) and record.plan.version == VERSION - 1,
    "gather": lambda record: isinstance(record, DecidedOn) and record.decision.round_no == VERSION,
    "apply": lambda record: isinstance(record, CommittedRound) and record.commit.version == VERSION,
    "inner": lambda record: isinstance(record, DigestFixed) and record.version == VERSION - 1,
}


class Steady(World):
    """Everything takes the same time in every run, so that two runs can be compared to the millisecond."""

    def __init__(self, phase: str = "", twice: bool = False) -> None:
        super().__init__(3, Scenario(peers=4, chunks=4, rounds=4, faults_until_s=0.0, **CALM))  # type: ignore[arg-type]
        self._phase, self._twice = phase, twice
        self.leaver: VirtualPeer | None = None
        self._an_owner = ""  # of chunks in the newest round
        self.asked_at_s = self.left_at_s = 0.0
        self.committed_s: dict[int, float] = {}
        self.included: dict[int, tuple[str, ...]] = {}
        self.moved = False
        self.released_at_s = 0.0
        self.run()

    def _delays(self, source: str, target: str) -> list[float]:
        return [0.02]

    def _local_delay(self, what: str) -> float:
        return {"compute": 0.02, "local": 0.002, "step": 0.2, "store": 0.1}[what]

    def _carry_out(self, machine, effects):  # type: ignore[no-untyped-def]
        self.moved = self.moved or any(
            isinstance(e, Tell) and getattr(getattr(e.message, "plan", None), "epoch", 1) > 1 for e in effects
        )
        super()._carry_out(machine, effects)

    def _write(self, record: Record) -> None:
        super()._write(record)
        if isinstance(record, CommittedRound):
            self.committed_s[record.commit.version] = self.now
            self.included[record.commit.version] = record.commit.included
        if isinstance(record, Released) and self.leaver is not None and not self.released_at_s:
            self.released_at_s = self.now
        if isinstance(record, Opened):
            self._an_owner = record.plan.members[record.plan.owners[-1]]
        if self._phase and self.leaver is None and PHASES[self._phase](record):
            self.leaver = self.peers[self._an_owner]
            self.after(0.05, self._ask)

    def _ask(self) -> None:
        assert self.leaver is not None
        self.asked_at_s = self.now
        ask_to_leave(self, self.leaver, self._twice)

    def _observe(self, what: str, details: object) -> None:
        super()._observe(what, details)
        if what == "exit" and isinstance(details, tuple) and details[0] is self.leaver:
            self.left_at_s = self.now


@pytest.fixture(scope="module", autouse=True)
def results_that_wait_for_the_decision() -> Iterator[None]:
    """Else a round is at its end as soon as it is decided, and nobody could go in between."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Foresight, "is_on", False)
        yield


@pytest.fixture(scope="module")
def undisturbed() -> Steady:
    return Steady()


@pytest.mark.parametrize("phase", PHASES)
def test_leaving_costs_the_others_no_waiting(undisturbed: Steady, phase: str) -> None:
    world = Steady(phase)
    assert world.leaver is not None and world.leaver.exit_code == "left"
    for version, at_s in undisturbed.committed_s.items():
        # Fewer owners have more chunks to merge each; 0.2 s is far below any patience of the protocol.
        room_s = 0.0 if version <= VERSION and phase != "inner" else 0.2
        assert world.committed_s[version] <= at_s + room_s + 1e-9, version
    stayed = phase in ("scatter", "gather")
    assert (world.leaver.peer in world.included[VERSION]) == (phase != "inner"), (
        "what it used is acknowledged"
    )
    assert world.left_at_s - world.asked_at_s <= (1.0 if stayed else 0.0)
    assert not world.moved, "nothing of a round was done again"
    assert world.asked_at_s <= world.released_at_s <= world.left_at_s + 0.5, (
        "its other samples are free at once"
    )
    ledger = world.coordinator.core.ledger  # type: ignore[union-attr]
    assert not ledger.leases.of(world.leaver.peer)


@pytest.mark.parametrize("phase", PHASES)
def test_who_is_asked_twice_goes_at_once_and_its_chunks_move_at_once(undisturbed: Steady, phase: str) -> None:
    world = Steady(phase, twice=True)
    assert world.leaver is not None and world.left_at_s == world.asked_at_s
    assert world.moved == (phase in ("scatter", "gather"))
    for version, at_s in undisturbed.committed_s.items():
        # Progress is told at turns of the clock, every 0.4 s here; the shortest patience is 1 s.
        assert world.committed_s[version] <= at_s + 0.9, (
            "the share is sent once more, and no patience runs out"
        )
    assert not world.coordinator.core.ledger.leases.of(world.leaver.peer)  # type: ignore[union-attr]


def test_a_round_that_takes_too_long_keeps_nobody() -> None:
    leaving = Leaving()

    class InRound:
        flights = ("a round",)

    part: object = InRound()
    assert not leaving.may_go(part, True, 0.0)  # type: ignore[arg-type]
    leaving.ask("asked", "left", 10.0)
    assert not leaving.may_go(part, True, 10.0 + STAY_S - 0.1)  # type: ignore[arg-type]
    assert leaving.may_go(part, True, 10.0 + STAY_S)  # type: ignore[arg-type]
    assert leaving.may_go(part, False, 10.0), "out of contact: nobody hears of it anyway"  # type: ignore[arg-type]
    assert leaving.may_go(None, True, 10.0)


def test_in_a_hostile_world_peers_come_and_go_and_no_promise_is_broken() -> None:
    for seed in range(3):
        often = {"leave_per_s": 0.2, "trainer_crash_per_s": 0.1}
        scenario = Scenario(peers=4, fragments=1 + seed % 3, chunks=4, rounds=4, **often)  # type: ignore[arg-type]
        try:
            World(seed, scenario).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
