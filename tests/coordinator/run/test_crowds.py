"""Runs of more members than are told of each other: beats that stretch, lists of those whom one needs."""

from __future__ import annotations

import heapq
from collections import Counter

from msgspec.structs import replace

from farflung.coordinator.roster.partial_view import WHOLE_ROSTER
from farflung.coordinator.rounds.round import PAUSE_MOST_S
from farflung.coordinator.run.effects import Effect, Tell
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.membership import (
    BEATS_MOST_PER_S,
    BEATS_TO_DEATH,
    LOOK_S_PER_MEMBER,
    TURN_LATEST,
    TURN_SOONEST,
    BeatTurns,
    Member,
)
from farflung.coordinator.run.ticks import DONORS_LEAST, DONORS_TOLD
from farflung.protocol import messages as m
from farflung.protocol.limits import BEAT_LONGEST_S, MEMBERS_PER_ROUND
from rig.crowd import crowd

LARGE = 3000  # a beat every three seconds
LATER_S = LARGE * LOOK_S_PER_MEMBER + 0.01


def one(machine: RunMachine, at: int = 0) -> Member:
    return machine.core.members.alive[machine.core.members.in_order[at]]


def hears(machine: RunMachine, member: Member, now: float, **changes: object) -> list[object]:
    """All that it is told, when it says once more what it said last."""
    assert member.beat is not None
    beat = replace(member.beat, seq=member.heard.seq + 1, **changes)
    effects = machine.on_member(member.contact.key, beat, now)
    return [each.message for each in effects if isinstance(each, Tell) and each.peer == member.peer]


def tick(machine: RunMachine, member: Member, now: float, **changes: object) -> m.Tick:
    return next(each for each in hears(machine, member, now, **changes) if isinstance(each, m.Tick))


def told(effects: list[Effect], kind: type) -> list[str]:
    return [each.peer for each in effects if isinstance(each, Tell) and isinstance(each.message, kind)]


# ---- beats --------------------------------------------------------------------------------------------------


def test_beats_stretch_with_the_number_of_members() -> None:
    few, many = crowd(WHOLE_ROSTER + 1), crowd(LARGE)
    assert tick(few, one(few), 0.1).beat_s == 0.0, "as the run's terms say"
    all_s = LARGE / BEATS_MOST_PER_S
    assert TURN_SOONEST * all_s <= tick(many, one(many), 0.1).beat_s <= TURN_LATEST * all_s <= BEAT_LONGEST_S


def test_members_that_beat_all_at_once_beat_one_after_the_other_from_then_on() -> None:
    turns, all_s = BeatTurns(), LARGE / BEATS_MOST_PER_S
    due = [(0.0, number) for number in range(LARGE)]
    beats: list[float] = []
    while due[0][0] < 10 * all_s:
        now, number = heapq.heappop(due)
        beats.append(now)
        heapq.heappush(due, (now + turns.next_in_s(all_s, now), number))
    later = [at for at in beats if at >= all_s]
    in_a_second = Counter(int(at) for at in later)
    del in_a_second[max(in_a_second)], in_a_second[min(in_a_second)]
    assert max(in_a_second.values()) <= BEATS_MOST_PER_S + 1
    assert min(in_a_second.values()) >= 0.9 * BEATS_MOST_PER_S
    times = Counter(round(at, 6) for at in later)
    assert max(times.values()) == 1, "no two at one time"


def test_whoever_beats_more_often_than_it_was_told_makes_nobody_wait_for_longer_than_the_longest_time() -> (
    None
):
    turns, all_s = BeatTurns(), LARGE / BEATS_MOST_PER_S
    told = [turns.next_in_s(all_s, 0.0) for _ in range(10 * LARGE)]
    assert told == sorted(told) and told[-1] == TURN_LATEST * all_s
    assert all(turns.next_in_s(BEAT_LONGEST_S, 1e5 / 3 + n / 7) <= BEAT_LONGEST_S for n in range(LARGE)), (
        "no bit more"
    )
    assert turns.next_in_s(all_s, 1e6) == TURN_SOONEST * all_s


def test_P3_a_member_counts_as_lost_by_the_beat_that_it_was_told() -> None:
    machine = crowd(LARGE)
    liveness = machine.core.members.liveness
    dead_s = liveness.dead_after_s
    ann, bob = one(machine, 0), one(machine, 1)
    every_s = tick(machine, ann, 1.0).beat_s
    late_s = every_s - machine.core.manifest.net.heartbeat_s
    silent = {each.peer for each in liveness.silent(dead_s + 0.1, 1.0)}
    assert bob.peer in silent and ann.peer not in silent, "who was told nothing is due as in a small run"
    assert ann not in liveness.silent(1.0 + dead_s + late_s - 0.01, 1.0)
    assert ann in liveness.silent(1.0 + dead_s + late_s, 1.0)


def test_P3_whoever_is_in_a_round_is_missed_as_soon_as_in_a_small_run() -> None:
    machine = crowd(LARGE)
    liveness = machine.core.members.liveness
    dead_s = liveness.dead_after_s
    ann = one(machine)
    assert tick(machine, ann, 1.0).beat_s > 0.0
    liveness.await_words([ann], 2.0)
    assert ann not in liveness.silent(2.0 + dead_s - 0.01, 1.0)
    assert ann in liveness.silent(2.0 + dead_s, 1.0)


def test_P3_members_of_a_round_beat_so_often_that_they_count_as_lost_as_soon_as_in_a_small_run() -> None:
    machine = crowd(LARGE, ready=True)
    machine.on_timer(0.1)
    flight = machine.drivers[0].round
    assert flight is not None
    alive, inside = machine.core.members.alive, set(flight.plan.members)
    ann, net = alive[flight.plan.members[0]], machine.core.manifest.net
    assert net.heartbeat_s < tick(machine, ann, 0.2).beat_s == net.dead_after_s / BEATS_TO_DEATH
    assert (
        ann.heard.pause_s == 0.0
        and machine.core.members.liveness.next_beat_s(ann, net.dead_after_s / 2.0, True, 0.3) == 0.0
    )
    other = next(member for peer, member in alive.items() if peer not in inside)
    assert tick(machine, other, 0.2).beat_s > 0.0


def beats_next_in_s(machine: RunMachine, member: Member, now: float) -> float:
    """What it is told after a beat."""
    assert member.beat is not None
    member.beat = replace(member.beat, seq=member.beat.seq + 1)
    return machine.core.members.liveness.next_beat_s(member, 1.0, False, now)


def test_after_a_shorter_word_the_longer_one_counts_until_it_was_surely_heard() -> None:
    """An answer may be lost: then the member beats by the one before."""
    machine = crowd(LARGE)
    members, ann = machine.core.members, one(machine)
    longer = beats_next_in_s(machine, ann, 0.0)
    for peer in list(members.in_order)[2500:]:
        members.liveness.drop(members.alive[peer])
    shorter = beats_next_in_s(machine, ann, 100.0)
    assert 0.0 < shorter < longer and ann.heard.pause_s == longer - 1.0
    third = beats_next_in_s(machine, ann, 200.0)
    assert ann.heard.pause_s == max(shorter, third) - 1.0


def test_P3_an_answer_that_is_given_once_more_tells_of_the_same_turn() -> None:
    """With news of others.  If each told of a later one, the member would count as lost before it may speak."""
    machine = crowd(LARGE)
    members, ann = machine.core.members, one(machine)
    told = beats_next_in_s(machine, ann, 0.0)
    for now in (0.0, 0.001, 3.0):
        assert members.liveness.next_beat_s(ann, 1.0, False, now) == told
    members.liveness.await_words([ann], 4.0)
    assert ann.heard.pause_s == 0.0 and members.liveness.next_beat_s(ann, 1.0, True, 4.0) != told
    assert members.liveness.next_beat_s(ann, 1.0, False, 5.0) == told and ann.heard.pause_s == told - 1.0, (
        "out of it again"
    )


# ---- who is told of whom ------------------------------------------------------------------------------------


def test_whoever_has_the_newest_version_is_told_of_few_who_have_it_and_whoever_lacks_it_of_many() -> None:
    machine = crowd(LARGE, ready=True)
    ann, bob = one(machine, 0), one(machine, 1)
    assert ann.verified and len(tick(machine, ann, 0.1).fragments[0].donors) == DONORS_LEAST
    assert bob.beat is not None
    behind = (replace(bob.beat.fragments[0], version=-1, digest=b"", ready=False),)
    assert len(tick(machine, bob, 0.1, fragments=behind).fragments[0].donors) == DONORS_TOLD


def test_a_member_of_a_large_run_hears_of_those_whom_it_needs_and_they_of_it() -> None:
    machine = crowd(LARGE)
    ann = one(machine)
    first = tick(machine, ann, 0.1)
    assert first.roster is not None and 0 < len(first.roster) < 100
    names = {contact.peer for contact in first.roster}
    assert set(first.fragments[0].donors) <= names
    assert tick(machine, ann, 0.2, roster_no=first.roster_no).roster is None
    donor = machine.core.members.alive[first.fragments[0].donors[0]]
    roster = tick(machine, donor, 0.3).roster
    assert roster is not None and ann.peer in {contact.peer for contact in roster}


def test_before_a_plan_its_members_hear_of_each_other() -> None:
    machine = crowd(LARGE, ready=True)
    effects = machine.on_timer(0.1)
    plans = told(effects, m.OpenRound)
    assert len(plans) == MEMBERS_PER_ROUND
    for peer in plans[:3]:
        mine = [each.message for each in effects if isinstance(each, Tell) and each.peer == peer]
        kinds = [type(each) for each in mine]
        assert kinds.index(m.Tick) < kinds.index(m.OpenRound)
        heard = mine[kinds.index(m.Tick)]
        assert isinstance(heard, m.Tick) and heard.roster is not None
        assert set(plans) - {peer} <= {contact.peer for contact in heard.roster}


# ---- looks at all -------------------------------------------------------------------------------------------


def test_what_all_members_are_looked_at_for_waits_a_moment_in_a_crowd() -> None:
    machine = crowd(LARGE)
    machine.on_timer(0.1)
    assert machine.drivers[0].round is None
    for member in machine.core.members.alive.values():
        assert member.beat is not None
        ready = replace(member.beat.fragments[0], ready=True)
        member.beat = replace(member.beat, fragments=(ready,))
    machine.on_timer(0.11)
    assert machine.drivers[0].round is None
    machine.on_timer(0.1 + PAUSE_MOST_S)
    assert machine.drivers[0].round is not None
