"""Who can talk with whom, and who owns chunks where nobody can be dialled."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.reach.reach import ASKED_S, RELAY_PART, RENEWED_S, TICKET_S, Routes
from farflung.coordinator.reach.relays import PAIRS_MOST, Relays, TicketScope, read
from farflung.coordinator.roster.ways import MemberPlace, RelayNow, pair_of
from farflung.protocol.round_words import Contact

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PUBLIC = KEY.public_key().public_bytes_raw()
RUN = TicketScope(b"r" * 16, 1)
RELAY = RelayNow(29802, 6e6)


@dataclass
class Somebody:
    contact: Contact
    joined_no: int
    place: MemberPlace


def somebody(number: int, address: str = "", **place: Any) -> Somebody:
    contact = Contact(f"peer-{number:03}", f"name-{number}", number.to_bytes(32, "big"), address)
    return Somebody(contact, number, MemberPlace(**place))


def ways_of(living: list[Somebody], now: float = 10.0, relay: RelayNow | None = RELAY) -> Routes:
    ways = Routes(Relays(relay))
    ways.relays.see(named(living), now)
    ways.refresh(living, now, RUN, KEY.sign)
    return ways


def named(living: list[Somebody]) -> dict[str, Somebody]:
    return {each.contact.peer: each for each in living}


def test_two_that_nobody_can_dial_meet_at_the_relay_with_a_ticket_each() -> None:
    living = [somebody(0), somebody(1)]
    ways = ways_of(living)
    [mine], [theirs] = ways.told("peer-000"), ways.told("peer-001")
    assert (mine.peer, theirs.peer, mine.port) == ("peer-001", "peer-000", 29802)
    tickets = [read(each.ticket.encode(), RUN, PUBLIC) for each in (mine, theirs)]
    assert [ticket and ticket.side for ticket in tickets] == [0, 1]
    assert (
        {ticket.pair for ticket in tickets if ticket}
        == set(ways.pairs)
        == {pair_of(living[0].contact.key, living[1].contact.key)}
    )
    assert {ticket.until_s for ticket in tickets if ticket} == {int(10.0 + TICKET_S)}
    assert ways.can_talk(*living) and ways.owners(named(living), 10.0) == {"peer-000", "peer-001"}


def test_without_a_relay_they_cannot_talk_and_own_nothing() -> None:
    living = [somebody(0), somebody(1)]
    ways = ways_of(living, relay=None)
    assert not ways.can_talk(*living) and ways.owners(named(living), 10.0) == set() and ways.pairs == ()
    assert ways.owners({"peer-000": living[0]}, 10.0) == set()


def test_where_nobody_can_sign_nobody_is_let_in() -> None:
    ways = Routes(Relays(RELAY))
    ways.relays.see({}, 10.0)
    ways.refresh([somebody(0), somebody(1)], 10.0, RUN, lambda statement: b"")
    assert ways.pairs == () and ways.told("peer-000") == ()


def test_whoever_can_be_dialled_owns_and_needs_no_place_at_the_relay() -> None:
    living = [somebody(0), somebody(1), somebody(2, "host:1")]
    ways = ways_of(living)
    assert ways.owners(named(living), 10.0) == {"peer-002"}
    assert len(ways.pairs) == 1 and not ways.meets("peer-000", "peer-002")
    assert all(ways.can_talk(*pair) for pair in combinations(living, 2))
    assert ways.share_bytes_per_s(named(living), {"peer-002"}) is None, (
        "nothing of the round passes the relay"
    )
    # It is not in this round, or others could not reach it: then there is another way.
    assert ways.owners(named(living[:2]), 10.0) == {"peer-000", "peer-001"}


def test_whoever_others_could_not_reach_meets_them_at_the_relay_while_that_is_doubted() -> None:
    living = [somebody(0), somebody(1, "host:1")]
    ways = ways_of(living)
    assert ways.pairs == () and ways.way_of(living[1]) == "dialled"
    living[1].place.doubted_until = 60.0
    assert ways.refresh(living, 11.0, RUN, KEY.sign) and ways.meets("peer-000", "peer-001")
    assert ways.owners(named(living), 11.0) == {"peer-000"}
    assert ways.way_of(living[1]) == "relayed" and "could not reach" in ways.why_this_way(living[1])
    assert ways.refresh(living, 60.0, RUN, KEY.sign) and ways.pairs == ()
    assert ways.owners(named(living), 60.0) == {"peer-001"}


def test_a_relayed_member_carries_its_share_of_the_relay() -> None:
    living = [somebody(number) for number in range(3)]
    ways = ways_of(living)
    assert ways.share_bytes_per_s(named(living), ways.owners(named(living), 10.0)) == pytest.approx(2e6)


def test_doubts_bar_nobody_from_owning_where_they_are_of_everybody() -> None:
    living = [somebody(0, doubted_until=60.0), somebody(1)]
    ways = ways_of(living)
    assert ways.owners(named(living), 10.0) == {"peer-001"}
    living[1].place.doubted_until = 60.0
    assert ways.owners(named(living), 10.0) == {"peer-000", "peer-001"}


def test_it_is_waited_for_what_comes_of_dialling_somebody_but_not_long() -> None:
    living = [somebody(0), somebody(1, claimed="10.0.0.1:5", since=10.0)]
    ways = ways_of(living)
    assert ways.pairs == ()
    assert not ways.refresh(living, 10.0 + ASKED_S / 2, RUN, KEY.sign)
    assert ways.refresh(living, 10.0 + ASKED_S, RUN, KEY.sign) and len(ways.pairs) == 1
    living[1].contact = Contact("peer-001", "name-1", living[1].contact.key, "10.0.0.1:5")
    assert ways.refresh(living, 13.0, RUN, KEY.sign) and ways.pairs == ()
    again = ways_of([somebody(0), somebody(1, claimed="10.0.0.1:5", since=10.0, not_reached=True)])
    assert len(again.pairs) == 1, "it was tried, in vain"


def test_nothing_changes_until_somebody_comes_or_tickets_grow_old() -> None:
    living = [somebody(0), somebody(1)]
    ways = ways_of(living)
    before = ways.told("peer-000")
    assert not ways.refresh(living, 10.0 + RENEWED_S - 1, RUN, KEY.sign) and ways.told("peer-000") == before
    assert ways.refresh(living, 10.0 + RENEWED_S, RUN, KEY.sign) and ways.told("peer-000") != before
    assert ways.refresh([*living, somebody(2)], 10.0 + RENEWED_S, RUN, KEY.sign) and len(ways.pairs) == 3
    assert ways.refresh(living[:1], 10.0 + RENEWED_S, RUN, KEY.sign) and ways.pairs == ()


@pytest.mark.parametrize(("count", "hubs"), [(2, 2), (16, 16), (17, 12), (64, 2), (129, 1), (130, 0)])
def test_of_more_than_the_relay_has_places_for_a_few_meet_everybody(count: int, hubs: int) -> None:
    living = [somebody(number) for number in range(count)]
    ways = ways_of(living)
    assert len(ways.pairs) <= PAIRS_MOST
    owners = ways.owners(named(living), 10.0)
    assert len(owners) == hubs
    assert all(ways.meets(hub, each) for hub in owners for each in named(living) if each != hub)


def met_scene(
    homes: int, *apart: tuple[int, int], relay: RelayNow | None = RELAY
) -> tuple[Routes, list[Somebody]]:
    """Two that can be dialled, and some at home who all met each other but for these pairs."""
    living = [somebody(number) for number in range(homes)]
    living += [somebody(homes + number, f"host{number}:1") for number in range(2)]
    ways = Routes(Relays(relay))
    ways.meetings.is_on = True
    ways.relays.see(named(living), 10.0)
    ways.refresh(living, 10.0, RUN, KEY.sign)
    left = {frozenset(pair) for pair in apart}
    for each in living[:homes]:
        met = (
            o
            for o in living[:homes]
            if frozenset((each.joined_no, o.joined_no)) not in left and o is not each
        )
        ways.meetings.says(each.contact.key, tuple(other.contact.peer for other in met))
    ways.refresh(living, 12.0, RUN, KEY.sign)
    return ways, living


def test_whoever_met_all_the_others_owns_beside_those_that_can_be_dialled() -> None:
    ways, living = met_scene(3)
    assert ways.meetings.punched == 3
    assert ways.owners(named(living), 12.0) == {each.contact.peer for each in living}
    assert ways.share_bytes_per_s(named(living), ways.owners(named(living), 12.0)) is None
    living[0].place.doubted_until = 60.0
    assert ways.owners(named(living), 12.0) == {each.contact.peer for each in living[1:]}
    assert ways.owners(named([living[1], living[3]]), 12.0) == {"peer-003"}, "it met nobody of these"


def test_one_that_somebody_could_not_meet_owns_nothing_beside_those_that_can_be_dialled() -> None:
    ways, living = met_scene(4, (0, 3))
    assert ways.owners(named(living), 12.0) == {
        each.contact.peer for each in living if each.joined_no not in (0, 3)
    }
    ways, living = met_scene(4, (0, 3), (1, 3), (2, 3))
    assert ways.owners(named(living), 12.0) == {each.contact.peer for each in living[4:]}
    assert ways.owners(named([*living[:3], living[4]]), 12.0) == {
        "peer-000", "peer-001", "peer-002", "peer-004",
    }, "it is not in this plan"  # fmt: skip


HARD = ((0, 3), (1, 3), (2, 3))  # the last one at home could meet nobody past its router
MBYTE = 1e6


def test_who_meets_some_at_the_relay_could_own_beside_the_others_the_fewer_it_meets_there_the_sooner() -> (
    None
):
    ways, living = met_scene(4, *HARD)
    among = named(living)
    owners = ways.owners(among, 12.0)
    near, all_of_them = ways.wider(among, owners, 12.0)
    mine = RELAY_PART * 6 * MBYTE
    assert near == pytest.approx(dict.fromkeys(("peer-000", "peer-001", "peer-002"), mine / 3))
    names = ("peer-000", "peer-001", "peer-002", "peer-003")
    assert all_of_them == pytest.approx(dict.fromkeys(names, mine / 6)), "bytes go both ways then"


def test_nobody_could_own_besides_where_some_pair_has_no_way_at_all() -> None:
    ways, living = met_scene(4, *HARD, relay=None)
    among = named(living)
    assert ways.wider(among, ways.owners(among, 12.0), 12.0) == []


def test_who_is_doubted_or_not_in_the_round_counts_for_nothing() -> None:
    ways, living = met_scene(4, *HARD)
    living[0].place.doubted_until = 60.0
    among = named(living)
    near, _ = ways.wider(among, ways.owners(among, 12.0), 12.0)
    assert near.keys() == {"peer-001", "peer-002"}
    without = named([*living[:3], *living[4:]])
    assert ways.wider(without, ways.owners(without, 12.0), 12.0) == [], "they all met, and own already"


def test_where_owners_meet_others_at_the_relay_anyway_nobody_is_added() -> None:
    ways, living = met_scene(4, *HARD)
    among = named(living[:4])
    owners = ways.owners(among, 12.0)
    assert owners == {"peer-000", "peer-001", "peer-002"} and ways.wider(among, owners, 12.0) == []


def test_who_meets_only_some_of_those_that_it_needs_the_relay_for_could_own_nothing() -> None:
    """Of more than the relay has places for, a few meet everybody."""
    living = [somebody(number) for number in range(20)] + [somebody(20, "host:1")]
    ways = ways_of(living)
    among = named(living)
    hubs = {peer for peer in among if all(peer == o or ways.meets(peer, o) for o in among if o != "peer-020")}
    found = ways.wider(among, ways.owners(among, 10.0), 10.0)
    assert found[-1].keys() == hubs - {"peer-020"} and 0 < len(found[-1]) < 20
