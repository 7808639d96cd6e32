"""What a member tells of its progress in a round, how often, and what of it again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from farflung.collectives.round.member import Deciding
from farflung.collectives.round.pieces import Progress
from farflung.peer.machine.effects import ToCoordinator
from farflung.peer.machine.heartbeat import (
    GATHER_EVERY_S,
    PROGRESS_EVERY_S,
    SCATTER_EVERY_S,
    HeartbeatBuilder,
)
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import FragmentTick, ProgressReport
from farflung.protocol.round_words import Decision, MeshColumn, Plan
from farflung.protocol.run_terms import Known

KNOWN = Known(Manifest(), bytes(16))
PLAN = Plan(7, 1, 3, ("ann", "bob", "cyd"), (0, 1, 2), ("fp32",) * 3)
MESH = Plan(
    *(7, 1, 3, ("ann", "bob", "cyd"), (0, 1, 2), ("fp32",) * 3),
    column=MeshColumn(0, 2, ("ann", "dan"), (0, 1), (0,)),
)
NOTHING = Progress({}, {}, (), {}, b"", (0, bytes(32)), None, b"", {}, {}, b"", None, b"")


@dataclass
class Flight:
    plan: Plan = MESH
    deciding: Deciding = field(default_factory=Deciding)
    complete: tuple[bool, bool, bool] = (False, False, False)
    counts: tuple[int, int, int, int] = (0, 16, 0, 3)
    held: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def progress(self) -> Progress:
        return replace(NOTHING, held=dict(self.held))


class Peer:
    def __init__(self, plan: Plan = MESH) -> None:
        self.reports, self.flight = HeartbeatBuilder(lambda raw: bytes(64)), Flight(plan)
        self.reports.begin_session(bytes(16), KNOWN)
        self.reports.begin_round(plan.fragment)

    def tells(self, now: float, *held: str) -> ProgressReport | None:
        self.flight.held |= dict.fromkeys(held, (1, bytes(32)))
        flight: Any = self.flight
        told = self.reports.maybe_progress(flight, now)
        return only(told) if told else None

    def repeats(self, seen: int) -> list[ToCoordinator]:
        flight: Any = self.flight
        return self.reports.repeat(FragmentTick(0, 3, (), True, (), 7, True, seen), flight)


def only(told: list[ToCoordinator]) -> ProgressReport:
    [each] = told
    assert isinstance(each.message, ProgressReport)
    return each.message


def test_in_a_mesh_what_is_held_is_told_by_what_came_since_the_report_before() -> None:
    peer = Peer()
    first, second = peer.tells(10.0, "ann"), peer.tells(20.0, "bob")
    assert first is not None and second is not None
    assert (first.held.keys(), first.held_since) == ({"ann"}, 0)
    assert (second.held.keys(), second.held_since) == ({"bob"}, first.seq)
    again = only(peer.repeats(first.seq))
    assert (again.held.keys(), again.held_since) == ({"ann", "bob"}, 0), "all of what was not seen"
    third = peer.tells(30.0, "cyd")
    assert third is not None and (third.held.keys(), third.held_since) == ({"cyd"}, again.seq)
    assert not peer.repeats(third.seq)


def test_in_one_room_all_of_it_is_told_as_every_version_understands() -> None:
    peer = Peer(PLAN)
    peer.tells(10.0, "ann")
    second = peer.tells(20.0, "bob")
    assert second is not None and (second.held.keys(), second.held_since) == ({"ann", "bob"}, 0)


def test_a_session_that_begins_is_told_all_and_so_is_whoever_heard_of_what_is_held_no_more() -> None:
    peer = Peer()
    peer.tells(10.0, "ann")
    peer.reports.begin_session(bytes([1]) * 16, KNOWN)
    second = peer.tells(20.0, "bob")
    assert second is not None and (second.held.keys(), second.held_since) == ({"ann", "bob"}, 0)
    del peer.flight.held["ann"]
    third = peer.tells(30.0, "cyd")
    assert third is not None and (third.held.keys(), third.held_since) == ({"bob", "cyd"}, 0)


@pytest.mark.parametrize(
    ("plan", "decided", "here", "every_s"),
    [
        (PLAN, False, 0, PROGRESS_EVERY_S),
        (PLAN, True, 0, PROGRESS_EVERY_S),
        (MESH, False, 13, SCATTER_EVERY_S),
        (MESH, False, 14, GATHER_EVERY_S),  # of 16: who died leaves the others out for good
        (MESH, True, 0, GATHER_EVERY_S),
    ],
)
def test_a_part_is_told_now_and_then_and_what_is_complete_at_once(
    plan: Plan, decided: bool, here: int, every_s: float
) -> None:
    peer = Peer(plan)
    peer.flight.counts = here, 16, 0, 3
    peer.flight.deciding.newest = Decision(7, 1, (1.0,) * 3, {}) if decided else None
    assert peer.tells(10.0, "ann") is not None
    assert peer.tells(10.0 + every_s - 0.01, "bob") is None
    assert peer.tells(10.0 + every_s, "bob") is not None
    peer.flight.complete = (True, False, False)
    assert peer.tells(10.01 + every_s, "cyd") is not None
    assert peer.tells(90.0) is None, "nothing new"
