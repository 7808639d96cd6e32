"""The run machine with members that meet past their routers: who is to show itself, who hears of which instant."""

from __future__ import annotations

from msgspec.structs import replace

from farflung.coordinator.reach.hole_punching import HOLD_S, LOOKS_S
from farflung.coordinator.reach.reach import ASKED_S
from farflung.coordinator.roster.ways import DOORS
from farflung.coordinator.run.effects import Effect, Tell
from farflung.coordinator.run.status import build_status, member_status
from farflung.protocol import messages as m
from farflung.protocol.errors import Counters
from farflung.protocol.mode_words import Meet, ReachBeat, ReachTick
from farflung.protocol.round_words import section
from rig.guests import Guest
from rig.relayed_hall import RELAY, hall_with, pairs_in
from rig.undialled_hall import Hall

ENDPOINTS = {1: "9.1.1.1:40001", 2: "9.1.1.2:40002"}


def meeting_hall(*guests: Guest, **more: object) -> Hall:
    hall = hall_with(**more)  # type: ignore[arg-type]
    hall.machine.core.members.ways.meetings.is_on = True
    for guest in guests:
        come_in(hall, guest)
    return hall


def come_in(hall: Hall, guest: Guest, address: str = "") -> None:
    welcome = hall.hello(guest, address)
    assert isinstance(welcome, m.Welcome)
    guest.session, guest.seq = welcome.session, 0


def show(hall: Hall, guest: Guest, endpoint: str, now: float = 0.0) -> list[Effect]:
    return [each for door in DOORS for each in hall.machine.on_look(guest.key, door, endpoint, now)]


def reach_of(tick: m.Tick) -> ReachTick:
    return section(ReachTick, tick.sections) or ReachTick()


def meets_in(effects: list[Effect], guest: Guest) -> list[Meet]:
    ticks = [each.message for each in effects if isinstance(each, Tell) and each.peer == guest.peer]
    return [meet for tick in ticks if isinstance(tick, m.Tick) for meet in reach_of(tick).meets]


def says(hall: Hall, guest: Guest, *punched: str, now: float = 0.0) -> list[Effect]:
    beat = hall.machine.core.members.alive[guest.peer].beat
    assert beat is not None
    guest.seq += 1
    return hall.machine.on_member(
        guest.key, replace(beat, session=guest.session, seq=guest.seq, sections=(ReachBeat(punched),)), now
    )


def test_whoever_nobody_can_dial_is_asked_to_show_itself_until_it_was_seen() -> None:
    ann = Guest(1)
    hall = meeting_hall(ann)
    assert reach_of(hall.beat(ann)).look
    show(hall, ann, ENDPOINTS[1])
    assert not reach_of(hall.beat(ann)).look
    assert not reach_of(hall_with(ann).beat(ann)).look, "where nobody can tell ports, nobody is asked"


def test_who_may_be_dialled_is_not_asked_and_who_calls_from_elsewhere_is_at_once() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = meeting_hall()
    come_in(hall, ann, "192.168.1.2:4000")
    come_in(hall, bob, "9.1.1.2:4000")
    members = hall.machine.core.members.alive
    members[ann.peer].place.came_from, members[bob.peer].place.came_from = "9.1.1.1", "::ffff:9.1.1.2"
    hall.machine.on_timer(ASKED_S / 2)
    looks = hall.machine.core.members.ways.meetings.is_to_look
    assert looks(ann.key) and not looks(bob.key)


def test_two_that_were_seen_hear_of_each_other_at_once_and_the_relay_waits() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = meeting_hall(ann, bob)
    hall.beat(ann), hall.beat(bob)
    show(hall, ann, ENDPOINTS[1])
    effects = show(hall, bob, ENDPOINTS[2])
    [mine], [theirs] = meets_in(effects, ann), meets_in(effects, bob)
    assert (mine.peer, mine.endpoint) == (bob.peer, ENDPOINTS[2]) and mine.at_s == theirs.at_s
    assert reach_of(hall.beat(ann)).meets == (mine,), "said again with every tick"
    assert not any(pairs_in(effects)) and hall.beat(ann).ways == ()
    effects = hall.machine.on_timer(mine.at_s + HOLD_S)
    assert len(pairs_in(effects)[0]) == 1, "in vain: they meet at the relay"


def test_a_connection_that_both_tell_of_makes_them_owners_without_the_relay() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = meeting_hall(ann, bob)
    hall.beat(ann), hall.beat(bob)
    show(hall, ann, ENDPOINTS[1]), show(hall, bob, ENDPOINTS[2])
    members = hall.machine.core.members
    both = [ann.peer, bob.peer]
    assert members.can_own(0.0, both) == set()
    says(hall, ann, bob.peer, now=0.6)
    assert members.can_own(0.6, both) == set(), "one word is no proof"
    before = members.everybody.number
    says(hall, bob, ann.peer, now=0.6)
    assert members.can_own(0.6, both) == set(both) and members.everybody.number > before
    assert members.ways.share_bytes_per_s(both, set(both)) is None, "nothing passes the relay"
    core = hall.machine.core
    shown = member_status(core, hall.machine.drivers, None, members.alive[ann.peer])
    assert shown["way"] == "punched" and "--listen off" in shown["why_this_way"]
    told = build_status(core, hall.machine.drivers, Counters(), 0.6)["meetings"]
    assert told == {"on": True, "pairs": 1, "tries": 1}
    effects = says(hall, bob, now=5.0)
    assert len(pairs_in(effects)[0]) == 1 and members.can_own(5.0, both) == set(both), "by the relay now"


def test_without_a_relay_two_that_met_still_own() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = meeting_hall(ann, bob, relay=None)
    hall.beat(ann), hall.beat(bob)
    show(hall, ann, ENDPOINTS[1]), show(hall, bob, ENDPOINTS[2])
    says(hall, ann, bob.peer, now=0.6), says(hall, bob, ann.peer, now=0.6)
    assert hall.machine.core.members.can_own(0.6, [ann.peer, bob.peer]) == {ann.peer, bob.peer}


def test_the_status_says_why_a_hard_router_is_relayed() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = meeting_hall(ann, bob)
    show(hall, ann, ENDPOINTS[1])
    for door, port in zip(DOORS, (40002, 51234), strict=True):
        hall.machine.on_look(bob.key, door, f"9.1.1.2:{port}", 0.0)
    core = hall.machine.core
    shown = member_status(core, hall.machine.drivers, None, core.members.alive[bob.peer])
    assert shown["way"] == "relayed" and "another port for each connection" in shown["why_this_way"]
    assert core.members.ways.relays.own == RELAY


def test_a_look_with_a_key_that_is_nobodys_changes_nothing() -> None:
    ann = Guest(1)
    hall = meeting_hall(ann)
    assert show(hall, Guest(7), "9.9.9.9:40000") == []
    assert reach_of(hall.beat(ann)).look
    assert hall.machine.on_timer(2 * LOOKS_S) is not None
