"""The largest run that the limits allow: status, plan and members still fit into their messages."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from farflung.coordinator.ledger.records import CommittedRound, DigestFixed, Record
from farflung.coordinator.modes import registry
from farflung.coordinator.roster import partial_view
from farflung.coordinator.rounds import round_policy
from farflung.coordinator.rounds.round_rules import own_part
from farflung.coordinator.run import digest_agreement, membership
from farflung.coordinator.run.effects import Tell
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.status import status_json
from farflung.protocol import limits, messages
from farflung.protocol import messages as m
from farflung.protocol.errors import DepartureCause, Verdict
from farflung.protocol.messages import Message
from farflung.protocol.round_words import Commit
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import Names, World
from rig.crowd import crowd
from rig.pieces import pieces


def no_constant(name: str) -> object:
    raise AssertionError(f"{name} is not JSON")


def checked_status(machine: RunMachine) -> dict[str, Any]:
    """The status, if it is strict JSON and fits into the message that carries it."""
    raw = status_json(machine.core, machine.drivers, machine.counters, 1.0)
    assert len(raw) <= limits.CONTROL_BIN_BYTES
    reply = m.StatusReply(status=raw)
    assert messages.decode(messages.encode(reply), frozenset({"status"})) == reply
    status: dict[str, Any] = json.loads(raw, parse_constant=no_constant)
    return status


@pytest.mark.parametrize("loss", [None, 2.5, float("nan"), float("inf"), -float("inf")])
def test_the_status_is_valid_json_whatever_a_peer_says_of_its_loss(loss: float | None) -> None:
    members = checked_status(crowd(3, loss=loss))["members"]
    assert [member["loss"] for member in members] == [loss if loss == 2.5 else None] * 3


def test_the_status_of_the_largest_run_fits_into_one_message() -> None:
    assert checked_status(crowd(limits.MAX_PEERS))["version"] == 0


def test_the_status_of_a_run_that_lost_everybody_fits_into_one_message() -> None:
    machine = crowd(limits.ROSTER_MOST)
    for member in list(machine.core.members.members.values()):
        machine.sessions.lose(member, DepartureCause.SILENT, "r" * 2000)
    members = checked_status(machine)["members"]
    assert members and not any(member["alive"] for member in members)


@pytest.mark.parametrize("count", [2, limits.MEMBERS_PER_ROUND, limits.MEMBERS_PER_ROUND + 1, 200])
def test_a_round_has_no_more_members_than_a_plan_can_name(count: int) -> None:
    effects = crowd(count, ready=True).on_timer(0.1)
    opened = [e.message for e in effects if isinstance(e, Tell) and isinstance(e.message, m.OpenRound)]
    assert len(opened) == min(count, limits.MEMBERS_PER_ROUND)
    for message in opened:
        assert messages.decode(messages.encode(message), frozenset({"open"})) == message


@pytest.mark.parametrize("decided", [False, True])
def test_the_longest_report_of_the_largest_round_fits_into_one_message(decided: bool) -> None:
    """One owner has all chunks of the largest model: others can't be dialled."""
    members, chunks = limits.MEMBERS_PER_ROUND, limits.CHUNKS_PER_FRAGMENT
    names, mask = [f"{n:052}" for n in range(members)], b"\xff" * (chunks // 8)
    pairs = members * (members + 1) // 2
    dots = m.DotProducts(b"\xff" * (members // 8), mask, (1e300 / 3.0,) * pairs)
    report = m.ProgressReport(
        session=bytes(16),
        seq=1 << 50,
        round_no=1 << 50,
        decision_no=1 << 20,
        held={name: (mask, bytes(32)) for name in names},
        refused=dict.fromkeys(names[: members // 2], Verdict.BAD_HASH),
        cut_off=tuple(names[members // 2 :]),
        merged=mask if decided else b"",
        merged_hashes=bytes(32 * chunks) if decided else b"",
        got=mask,
        got_hash=bytes(32),
        dots=None if decided else dots,
        inputs=bytes(32),
        signature=bytes(64),
        lengths=bytes(8 * chunks) if decided else b"",
        got_by={names[0]: bytes(32)},
    )
    assert messages.decode(messages.encode(report), frozenset({m.kind_of(report)})) == report


def test_P3_a_round_of_a_crowd_has_members_that_can_own_chunks_however_few_these_are() -> None:
    """Who others can dial is rare here, and was ready last: a round without them could only fail, again and again."""
    machine = crowd(200, ready=True)
    members = machine.core.members
    last = sorted(members.members, key=lambda peer: members.members[peer].joined_no)[-2:]
    for peer, member in members.members.items():
        if peer not in last:
            member.contact = msgspec.structs.replace(member.contact, address="")
    machine.on_timer(0.1)
    flight = machine.drivers[0].round
    assert flight is not None and len(flight.plan.members) == limits.MEMBERS_PER_ROUND
    owners = {flight.plan.members[owner] for owner in flight.plan.owners}
    assert owners and owners <= set(last)


# ---- rounds in groups: what the coordinator says to a member does not grow with the members -------------------------

IN_GROUPS = (64, 128, 512)


def opening_bytes(count: int) -> float:
    """Of the plans of a round, and of whom each member is told of for it, a member."""
    effects = crowd(count, ready=True, group=16).on_timer(0.1)
    told = [e.message for e in effects if isinstance(e, Tell)]
    opened = [message for message in told if isinstance(message, m.OpenRound)]
    assert len(opened) == count and all(len(message.plan.members) <= 17 for message in opened)
    return sum(len(messages.encode(message)) for message in told) / count


def test_in_groups_the_opening_of_a_round_costs_each_member_as_much_whatever_their_number() -> None:
    few, *more = map(opening_bytes, IN_GROUPS)
    assert few < 6144
    assert all(each < 1.3 * few for each in more), (few, more)


def test_in_groups_a_commit_is_told_to_nearly_all_as_far_as_it_is_their_own() -> None:
    for count in IN_GROUPS:
        machine = crowd(count, group=16)
        driver, members = machine.drivers[0], list(machine.core.members.alive.values())
        peers = tuple(sorted(machine.core.members.alive))
        commit = Commit(1, 1, peers, (1.0 / count,) * count, bytes(64), "int8")
        told = {member.peer: driver.agreement.commit_for(member, commit) for member in members}
        own = {peer: each for peer, each in told.items() if each != commit}
        assert len(own) >= count - 16
        for peer, each in own.items():
            assert (each.included, each.hashes) == ((peer,), commit.hashes)
        assert own_part(commit, "a stranger").included == ()
        assert sum(len(msgspec.msgpack.encode(each)) for each in told.values()) / count < 600 + 80


# ---- beats are rare where members are many ---------------------------------------------------------------------------

RARELY_S = 6.0  # what beats stretch to, in place of one a second
IN_A_ROUND = 10  # beats of a member in a round, and until it has shown what came of it


class Rarely(World):
    """Two of eight are in each round, and the others are left to their rare beats."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Scenario(peers=8, rounds=6, end_s=400.0, faults_until_s=0.0))
        self.beats, self.members = 0, 0  # all; of rounds, together
        self.settled_s: list[float] = []  # from a commit until two of its round had shown the version

    def _deliver(self, source: str, target: str, message: Message, allowed: Names, key: bytes = b"") -> None:
        self.beats += isinstance(message, m.Beat)
        super()._deliver(source, target, message, allowed, key)

    def _write(self, record: Record) -> None:
        super()._write(record)
        if isinstance(record, CommittedRound):
            self.members += len(record.commit.members)
            self.committed_at = self.now
        elif isinstance(record, DigestFixed) and record.version:
            self.settled_s.append(self.now - self.committed_at)


@pytest.fixture
def rare_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are as many as thousands."""
    monkeypatch.setattr(partial_view, "WHOLE_ROSTER", 1)
    if registry.found("restoring") is not None:
        monkeypatch.setattr("farflung.coordinator.restoring.kept_books.WHOLE_ROSTER", 1)
        monkeypatch.setattr("farflung.coordinator.restoring.kept_books.KEEPERS", 2)
    monkeypatch.setattr(digest_agreement, "CROWD", 1)
    monkeypatch.setattr(membership, "BEATS_MOST_PER_S", 4 / RARELY_S)


# 259: a trainer learns on after its work was forgotten, and before a state is here to load.
SEEDS = [259, *range(0, 39, 3)]


@pytest.mark.parametrize("seed", pieces(SEEDS, 5))
@pytest.mark.usefixtures("rare_beats")
def test_every_promise_holds_where_beats_are_rare(seed: int) -> None:
    """By those that a run has at its worst: deaths, losses, words that overtake each other."""
    World(seed, Scenario.of(seed)).run()


@pytest.mark.parametrize("seed", pieces(range(0, 30, 5), 2))
@pytest.mark.usefixtures("rare_beats")
def test_P18_no_liar_gains_by_rare_beats(seed: int) -> None:
    World(seed, Scenario.of_liars(seed)).run()


@pytest.mark.usefixtures("rare_beats")
def test_in_a_large_run_what_is_new_waits_for_the_next_beat_unless_a_round_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_policy, "MEMBERS_PER_ROUND", 2)
    monkeypatch.setattr(membership, "BEATS_MOST_PER_S", 8 / RARELY_S)
    world = Rarely(1)
    report = world.run()
    assert report.outcome == "finished" and world.members == 2 * report.version
    usual = report.seconds * membership.BEATS_MOST_PER_S
    assert world.beats - usual < IN_A_ROUND * world.members, "it would be 14 if all said at once what is new"
    assert len(world.settled_s) == report.version and max(world.settled_s) < 2.0
