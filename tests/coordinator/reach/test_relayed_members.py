"""The run machine with members that nobody can dial: who is told of which way, and who owns."""

from __future__ import annotations

from farflung.coordinator.reach.reach import ASKED_S, RelayPairs
from farflung.coordinator.roster.ways import Usage, pair_of
from farflung.coordinator.run.effects import Tell
from farflung.coordinator.run.status import build_status, member_status
from farflung.protocol import messages as m
from farflung.protocol.errors import Counters
from rig.guests import Guest
from rig.relayed_hall import RELAY, hall_with, pairs_in, ways_in


def test_both_hear_of_each_other_and_the_relay_hears_first() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann)
    hall.beat(ann)
    assert not pairs_in(hall.effects)
    welcome = hall.hello(bob, address="")
    assert isinstance(welcome, m.Welcome)
    bob.session, bob.seq = welcome.session, 0
    name = pair_of(ann.key, bob.key)
    assert pairs_in(hall.effects) == [(name,)]
    kinds = [type(effect) for effect in hall.effects]
    assert kinds.index(RelayPairs) < kinds.index(Tell), "or its ticket would be refused once"
    [way] = ways_in(hall.effects, ann) or ()
    assert (way.peer, way.port) == (bob.peer, RELAY.port)
    tick = hall.beat(bob)
    assert tick.roster is not None and [each.peer for each in tick.ways] == [ann.peer]
    assert tick.ways[0].ticket != way.ticket, "each has its own side"
    assert hall.beat(bob, roster_no=tick.roster_no).ways == (), "told once"


def test_whoever_goes_takes_its_pair_along() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann, bob)
    hall.beat(ann)
    hall.beat(bob)
    bob.seq += 1
    effects = hall.says(bob, m.Leave(session=bob.session, seq=bob.seq, reason="bye"))
    effects += hall.machine.on_timer(1.0)
    assert pairs_in(effects) == [()] and ways_in(effects, ann) == ()


def test_dialled_a_member_needs_no_way_and_not_dialled_it_gets_one() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann)
    welcome = hall.hello(bob)
    assert isinstance(welcome, m.Welcome)
    bob.session = welcome.session
    assert not pairs_in(hall.effects), "it is tried first"
    effects = hall.machine.on_dialled(bob.peer, bob.session, False, 0.5)
    assert len(pairs_in(effects)[0]) == 1
    ways = hall.machine.core.members.ways
    assert ways.way_of(hall.machine.core.members.alive[bob.peer]) == "relayed"
    effects = hall.machine.on_dialled(bob.peer, bob.session, True, 60.0)
    assert pairs_in(effects) == [()]
    assert hall.machine.core.members.can_own(60.0, [ann.peer, bob.peer]) == {bob.peer}


def test_no_answer_to_the_attempt_is_not_waited_for_long() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann)
    hall.hello(bob)
    assert not pairs_in(hall.machine.on_timer(ASKED_S / 2))
    assert len(pairs_in(hall.machine.on_timer(ASKED_S))[0]) == 1


def test_without_a_relay_nothing_is_told_and_the_status_says_why() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann, bob, relay=None)
    assert hall.beat(ann).ways == ()
    core, drivers = hall.machine.core, hall.machine.drivers
    member = core.members.alive[ann.peer]
    shown = member_status(core, drivers, None, member)
    assert (
        shown["way"] == "none"
        and "--listen off" in shown["why_this_way"]
        and "no relay: off" in shown["why_this_way"]
    )
    told = build_status(core, drivers, Counters(), 0.0)["relay"]
    assert told["on"] is False and told["why_not"] == "off"
    hall.machine.modes["reach"].on_relay(RELAY, "", Usage(pairs=1, moved_bytes=5), 1.0)
    told = build_status(core, drivers, Counters(), 1.0)["relay"]
    assert (told["on"], told["port"], told["pairs_allowed"], told["pairs"], told["moved_bytes"]) == (
        True,
        29802,
        1,
        1,
        5,
    )
    assert member_status(core, drivers, None, member)["way"] == "relayed"


def test_a_plan_over_the_relay_reckons_with_a_share_of_it() -> None:
    ann, bob = Guest(1), Guest(2)
    hall = hall_with(ann, bob)
    members = hall.machine.core.members
    owners = members.can_own(0.0, [ann.peer, bob.peer])
    assert owners == {ann.peer, bob.peer}
    assert members.ways.share_bytes_per_s([ann.peer, bob.peer], owners) == RELAY.bytes_per_s / 2
