"""Ways between members where there is none but to dial: what the core has without the mode that finds others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from farflung.coordinator.hosting import say_what_is_missing
from farflung.coordinator.modes import registry
from farflung.coordinator.roster.ways import MemberPlace, RouteNews, Ways, pair_of
from farflung.coordinator.run.effects import HandEffect, Note
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.status import build_status, member_status
from farflung.protocol import messages as m
from farflung.protocol.errors import Counters, UserError
from farflung.protocol.manifest import Manifest, NetSection
from farflung.protocol.round_words import Contact
from rig.guests import Guest
from rig.made_run import BARE_BEAT
from rig.undialled_hall import Hall


@dataclass
class Somebody:
    contact: Contact
    place: MemberPlace
    joined_no: int = 1


def somebody(name: str, address: str = "", doubted_until: float = 0.0) -> Somebody:
    return Somebody(Contact(name, name, bytes(32), address), MemberPlace(doubted_until=doubted_until))


def test_whoever_can_be_dialled_is_reached_and_nobody_else() -> None:
    near, far = somebody("ann", "host:1"), somebody("bob")
    doubted = somebody("cyd", "host:2", doubted_until=9.0)
    among = {each.contact.peer: each for each in (near, far, doubted)}
    ways = Ways()
    assert ways.owners(among, 1.0) == {"ann"} and ways.owners(among, 9.0) == {"ann", "cyd"}
    assert ways.wider(among, {"ann"}, 1.0) == [] and ways.share_bytes_per_s(among, {"ann"}) is None
    assert not ways.meets("ann", "bob") and not ways.is_punched("ann", "bob")
    assert ways.news_for(far.contact, BARE_BEAT, 1.0) == RouteNews((), (), ())
    assert [ways.way_of(each) for each in (near, far)] == ["dialled", "none"]
    assert ways.why_this_way(near) == ""


def test_a_pair_has_one_name_whoever_says_it_and_no_other_pair_has_it() -> None:
    one, other, third = bytes(32), b"1" * 32, b"2" * 32
    assert pair_of(one, other) == pair_of(other, one) != pair_of(one, third)


@pytest.fixture
def hall(monkeypatch: pytest.MonkeyPatch) -> Hall:
    monkeypatch.setattr(registry, "found", lambda name: None)
    return Hall()


def test_where_the_mode_was_taken_out_two_come_in_and_nobody_is_sent_to_another(hall: Hall) -> None:
    ann, bob = Guest(1), Guest(2)
    for guest in (ann, bob):
        welcome = hall.hello(guest, address="")
        assert isinstance(welcome, m.Welcome)
        guest.session, guest.seq = welcome.session, 0
    tick = hall.beat(ann)
    assert (tick.ways, tick.sections) == ((), ())
    assert tick.roster is not None and {each.peer for each in tick.roster} == {ann.peer, bob.peer}
    effects = hall.machine.on_timer(5.0) + hall.machine.on_look(ann.key, "door", "9.1.1.1:40001", 5.0)
    assert not [each for each in effects if isinstance(each, HandEffect)]


def test_where_the_mode_was_taken_out_nobody_is_said_to_meet_others_past_a_router(hall: Hall) -> None:
    ann = Guest(1)
    welcome = hall.hello(ann, address="host:1")
    assert isinstance(welcome, m.Welcome)
    [news] = hall.machine.on_dialled(ann.peer, welcome.session, False, 1.0)
    assert isinstance(news, Note)
    assert news.text.endswith("can't be dialled at host:1: it takes part, and dials those who can be dialled")


def test_where_the_mode_was_taken_out_the_status_says_so_and_lacks_nothing(hall: Hall) -> None:
    ann = Guest(1)
    hall.hello(ann, address="")
    core, drivers = hall.machine.core, hall.machine.drivers
    shown = member_status(core, drivers, None, core.members.alive[ann.peer])
    assert shown["way"] == "none" and "--listen off" in shown["why_this_way"]
    assert "no relay: this coordinator was installed without reach" in shown["why_this_way"]
    told = build_status(core, drivers, Counters(), 0.0)
    assert told["relay"]["on"] is False and told["relay"]["why_not"] == core.members.ways.why_no_relay
    assert told["relays_offered"] == [] and told["meetings"] == {"on": False, "pairs": 0, "tries": 0}


def test_a_relay_is_refused_in_one_line_where_the_mode_was_taken_out_unless_it_is_asked_for_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "found", lambda name: None)
    for relay, said in ((NetSection().relay, 1), ("off", 0)):
        machine = RunMachine(Manifest(net=NetSection(relay=relay)), bytes(16), [], bytes)
        machine.start(0.0, 1)
        say_what_is_missing(machine.core)
        notes = [each.text for each in machine.core.take_effects() if isinstance(each, Note)]
        assert notes == ["relay: none, this coordinator was installed without reach"] * said
    with pytest.raises(
        UserError, match=r"\[net\] relay = '9 Mbit/s' of run.toml: .* installed without reach"
    ):
        RunMachine(Manifest(net=NetSection(relay="9 Mbit/s")), bytes(16), [], bytes)


@pytest.mark.mode("reach")
def test_it_is_the_status_of_a_run_with_ways_in_every_field() -> None:
    ways = Hall().machine.core.members.ways
    assert type(ways) is not Ways
    told, plain = ways.status({}), Ways().status({})
    assert told.keys() == plain.keys()
    assert all(told[key].keys() == plain[key].keys() for key in ("relay", "meetings"))
