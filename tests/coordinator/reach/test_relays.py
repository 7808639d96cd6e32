"""At which relay a pair meets: the coordinator's, or one that a member offers and that was tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.reach.reach import RENEWED_S, Routes
from farflung.coordinator.reach.relays import (
    AGAIN_S,
    AVOIDS_S,
    LOOKS_EVERY_S,
    OWN,
    RATE_MOST_BYTES_PER_S,
    SEEN_AGAIN_S,
    SETTLES_S,
    SHOWN_MOST,
    Relays,
    TicketScope,
    read,
)
from farflung.coordinator.roster.ways import MemberPlace, RelayNow, Trial
from farflung.protocol.errors import RelayCause
from farflung.protocol.mode_words import ReachBeat, RelayOffer, RelayOrder
from farflung.protocol.round_words import Contact, RelayRoute
from rig.made_run import BARE_BEAT

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PUBLIC = KEY.public_key().public_bytes_raw()
RUN = TicketScope(b"r" * 16, 1)
SLOW, FAST = 1_000_000, 10_000_000


def prove(statement: bytes) -> bytes:
    return PUBLIC + KEY.sign(statement)


@dataclass
class Somebody:
    contact: Contact
    joined_no: int
    place: MemberPlace


def somebody(number: int, address: str = "") -> Somebody:
    contact = Contact(f"peer-{number}", f"name-{number}", number.to_bytes(32, "big"), address)
    return Somebody(contact, number, MemberPlace())


class Scene:
    """Two or more that nobody can dial, and some who offer relays."""

    def __init__(self, homes: int = 2, own: RelayNow | None = None) -> None:
        self.ways = Routes(Relays(own))
        self.living = [somebody(number) for number in range(homes)]
        self.now = 10.0
        self.busy = False
        self.turn()

    def turn(self, in_s: float = 0.0) -> bool:
        self.now += in_s
        self.ways.relays.see(self.here, self.now)
        return self.ways.refresh(self.living, self.now, RUN, prove, lambda one, other: self.busy)

    @property
    def here(self) -> dict[str, Somebody]:
        return {each.contact.peer: each for each in self.living}

    def offer(self, number: int, rate: int = SLOW, port: int = 7000, address: str = "10.0.0.9:5") -> Somebody:
        host = somebody(number, address)
        self.living.append(host)
        self.beat(host, RelayOffer(port, rate, 0))
        self.turn()
        return host

    def beat(self, who: Somebody, relay: RelayOffer | None = None, unmet: tuple[str, ...] = ()) -> None:
        self.ways.hears(
            who.contact, msgspec.structs.replace(BARE_BEAT, sections=(ReachBeat((), relay, unmet),)), self.now
        )

    def order_of(self, host: Somebody) -> RelayOrder:
        order = self.ways.relays.order_for(host.contact.peer, RelayOffer(0, 0, 0))
        assert order is not None
        return order

    def follow(self, host: Somebody, rate: int = SLOW, port: int = 7000) -> None:
        """Its beat shows that its relay knows what was ordered."""
        self.beat(host, RelayOffer(port, rate, self.order_of(host).number))

    def trials(self) -> list[Trial]:
        return self.ways.trials(self.here, self.now, RUN, prove)

    def use(self, number: int, rate: int = SLOW) -> Somebody:
        """It offers one, and bytes come through it."""
        host = self.offer(number, rate)
        self.follow(host, rate)
        [trial] = self.trials()
        self.tried(trial)
        self.turn()
        return host

    def tried(self, trial: Trial, why_not: str = "") -> str:
        where = trial.host, trial.port
        return self.ways.relays.tried(trial.peer, trial.key, why_not, where, self.now)

    def told(self, number: int = 0) -> tuple[RelayRoute, ...]:
        return self.ways.told(f"peer-{number}")

    @property
    def at(self) -> list[str]:
        return sorted(self.ways.relays.at.values())


def test_an_offer_is_used_once_bytes_came_through_it_where_its_member_was_dialled() -> None:
    scene = Scene()
    host = scene.offer(5)
    assert scene.told() == () and scene.trials() == [], "its relay does not know yet for whom it is"
    scene.follow(host)
    [trial] = scene.trials()
    assert (trial.peer, trial.host, trial.port) == ("peer-5", "10.0.0.9", 7000)
    assert not scene.turn() and scene.trials() == [], "it is on trial"
    assert "bytes come through" in scene.tried(trial)
    assert scene.turn() and not scene.turn()
    [way] = scene.told()
    assert (way.peer, way.host, way.port) == ("peer-1", "10.0.0.9", 7000) and scene.ways.pairs == ()
    assert scene.ways.owners({each.contact.peer: each for each in scene.living[:2]}, scene.now) == {
        "peer-0",
        "peer-1",
    }


def test_a_ticket_is_good_at_the_relay_that_it_is_for_and_nowhere_else() -> None:
    scene = Scene()
    scene.use(5)
    [way] = scene.told()
    name = way.ticket.encode()
    assert read(name, replace(RUN, relay="peer-5"), PUBLIC) is not None
    assert read(name, RUN, PUBLIC) is None and read(name, replace(RUN, relay="peer-6"), PUBLIC) is None


def test_its_relay_is_told_of_its_pairs_alone_and_of_the_one_for_trials() -> None:
    scene = Scene(own=RelayNow(29802, 1.0))
    host = scene.use(5)
    other = scene.offer(6)
    assert len(scene.order_of(host).pairs) == 2 and len(scene.order_of(other).pairs) == 1
    assert set(scene.order_of(host).pairs).isdisjoint(scene.order_of(other).pairs)
    assert "not tried" in scene.order_of(other).why_not and not scene.order_of(host).why_not
    known = RelayOffer(7000, SLOW, scene.order_of(host).number)
    assert scene.ways.relays.order_for("peer-5", known) is None and scene.order_of(host).public == PUBLIC


def test_what_lets_nothing_through_is_not_used_and_tried_ever_more_rarely() -> None:
    scene = Scene()
    host = scene.offer(5)
    scene.follow(host)
    waits = []
    for _ in range(3):
        [trial] = scene.trials()
        scene.tried(trial, "nobody answers there")
        scene.turn()
        scene.follow(host)
        begun = scene.now
        while not (found := scene.trials()):
            scene.now += 1.0
        waits.append(scene.now - begun)
        scene.ways.relays._offers["peer-5"].is_on_trial = False
        assert found
    assert waits == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S] and scene.told() == ()
    assert "nobody answers there" in str(scene.ways.relays.told({})[0]["why_not"])


def test_one_that_passed_bytes_and_fails_twice_is_left() -> None:
    scene = Scene()
    host = scene.use(5)
    for after_s, left in ((SEEN_AGAIN_S, 1), (AGAIN_S, 0)):
        scene.turn(after_s)
        scene.follow(host) if scene.ways.relays.order_for("peer-5", host_said(scene)) else None
        [trial] = scene.trials()
        scene.tried(trial, "no bytes came through within 5 s")
        scene.turn()
        assert len(scene.told()) == left
    assert scene.ways.way_of(scene.living[0]) == "none"


def host_said(scene: Scene) -> RelayOffer:
    return scene.ways.relays._offers["peer-5"].said


@pytest.mark.parametrize(
    ("address", "port", "why"),
    [
        ("", 7000, "nobody can dial"),
        ("home.example.org:5", 7000, "by a name"),
        ("10.0.0.9:5", 25, "below 1024"),
        ("10.0.0.9:5", 0, "not listen"),
    ],
)
def test_nothing_is_dialled_but_a_port_of_its_own_at_the_address_at_which_its_member_was(
    address: str, port: int, why: str
) -> None:
    scene = Scene()
    host = scene.offer(5, port=port, address=address)
    scene.follow(host, port=port)
    assert scene.trials() == [] and why in str(scene.ways.relays.told({})[0]["why_not"])


def test_pairs_go_where_they_get_most_and_a_claim_counts_up_to_a_bound() -> None:
    scene = Scene(homes=4, own=RelayNow(29802, RATE_MOST_BYTES_PER_S / 2))
    assert scene.at == [OWN] * 6
    scene.use(5, rate=10**12)
    for _ in range(8):
        scene.turn(LOOKS_EVERY_S)
    assert 3 <= scene.at.count("peer-5") <= 5, "no more than its bound is worth"


def test_a_pair_changes_for_more_only_while_no_round_has_both() -> None:
    scene = Scene(own=RelayNow(29802, 1e5))
    scene.busy = True
    scene.use(5, FAST)
    scene.turn(LOOKS_EVERY_S)
    assert scene.at == [OWN]
    scene.busy = False
    assert scene.turn(LOOKS_EVERY_S) and scene.at == ["peer-5"]


def test_whoever_cannot_meet_the_other_there_gets_another_relay_and_says_so_without_end_in_vain() -> None:
    scene = Scene(homes=3)
    scene.use(5)
    scene.use(6)
    [name] = [name for name, pair in scene.ways._pairs.items() if {"peer-0", "peer-1"} == peers(pair)]
    scene.busy = True  # nobody changes for having more elsewhere
    others = {pair: at for pair, at in scene.ways.relays.at.items() if pair != name}
    before, moves = scene.ways.relays.at[name], 0
    scene.turn(SETTLES_S)
    for _ in range(500):
        scene.beat(scene.living[0], unmet=("peer-1", "peer-5", "nobody"))
        scene.turn(1.0)
        moves += scene.ways.relays.at[name] != before
        before = scene.ways.relays.at[name]
        assert {pair: at for pair, at in scene.ways.relays.at.items() if pair != name} == others
    assert moves == 1, "where both are avoided it stays"


def peers(pair: tuple[Contact, Contact]) -> set[str]:
    return {pair[0].peer, pair[1].peer}


def test_a_member_left_out_of_a_round_leaves_a_members_relay_and_keeps_the_coordinators() -> None:
    scene = Scene()
    scene.use(5)
    scene.use(6)
    [before] = scene.at
    scene.ways.left_out("peer-0", scene.now)
    scene.turn()
    assert scene.at == [before], "it has only just come there"
    scene.turn(SETTLES_S)
    scene.ways.left_out("peer-0", scene.now)
    assert scene.turn() and scene.at != [before]
    mine = Scene(own=RelayNow(29802, 1e3))
    mine.use(5)
    mine.busy = True
    mine.turn(SETTLES_S)
    mine.ways.left_out("peer-0", mine.now)
    mine.turn()
    assert mine.at == [OWN]


def test_what_was_avoided_may_be_used_again_later() -> None:
    scene = Scene()
    scene.use(5)
    scene.turn(SETTLES_S)
    scene.beat(scene.living[0], unmet=("peer-1",))
    scene.turn()
    assert scene.at == ["peer-5"], "there is no other"
    scene.use(6)
    scene.turn()
    assert scene.at == ["peer-6"]
    scene.living = [each for each in scene.living if each.contact.peer != "peer-6"]
    assert scene.turn(AVOIDS_S) and scene.at == ["peer-5"]


def test_with_its_member_a_relay_is_gone_and_while_others_cannot_reach_that_one_too() -> None:
    scene = Scene(own=RelayNow(29802, 1e3))
    host = scene.use(5)
    scene.turn(LOOKS_EVERY_S)
    assert scene.at == ["peer-5"]
    host.place.doubted_until = scene.now + 60.0
    # It is one of those who meet at relays now, and never at its own.
    assert scene.turn() and set(scene.at) == {OWN} and len(scene.at) == 3
    host.place.doubted_until = 0.0
    scene.turn(LOOKS_EVERY_S)
    assert scene.at == ["peer-5"]
    scene.living.remove(host)
    assert scene.turn() and scene.at == [OWN] and scene.ways.relays.told({}) == []


def test_whoever_moves_its_relay_again_and_again_waits_ever_longer() -> None:
    scene = Scene()
    host = scene.use(5)
    waits = []
    for port in (7001, 7002, 7003):
        scene.beat(host, RelayOffer(port, SLOW, 0))
        assert scene.turn() and scene.told() == ()
        begun = scene.now
        scene.follow(host, port=port)
        while not (found := scene.trials()):
            scene.now += 1.0
        waits.append(scene.now - begun)
        scene.tried(found[0])
        assert scene.turn() and len(scene.told()) == 1
    assert waits == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (RelayCause.MONTH_OVER, "in a month"),
        ("/home/ann/relay.json: disk full", "its member's own output says why"),
    ],
)
def test_why_somebodys_relay_does_not_listen_is_a_code_and_no_sentence_of_its_member(
    said: str, told: str
) -> None:
    scene = Scene()
    host = scene.use(5)
    scene.beat(host, RelayOffer(0, SLOW, 0, why_not=said))
    scene.turn()
    [shown] = scene.ways.relays.told({})
    assert told in str(shown["why_not"]) and told in scene.order_of(host).why_not
    assert "/home" not in str(shown)


def test_another_rate_and_what_it_counted_change_nobodys_way() -> None:
    scene = Scene()
    host = scene.use(5)
    before = scene.told()
    number = scene.order_of(host).number
    for rate in range(1, 50):
        scene.beat(host, RelayOffer(7000, rate, number, 1, 0, rate * 10**15, rate))
        assert not scene.turn() and scene.told() == before
    assert scene.ways.relays.told({})[0]["moved_bytes"] == 49 * 10**15
    assert scene.turn(RENEWED_S) and scene.told() != before


def test_a_round_over_several_relays_reckons_with_the_sum_of_them() -> None:
    scene = Scene(homes=3, own=RelayNow(29802, 3e6))
    scene.use(5, 3_000_000)
    for _ in range(4):
        scene.turn(LOOKS_EVERY_S)
    among = {each.contact.peer: each for each in scene.living[:3]}
    owners = scene.ways.owners(among, scene.now)
    rate = 6e6 if len(set(scene.at)) == 2 else 3e6
    assert scene.ways.share_bytes_per_s(among, owners) == pytest.approx(rate / 3)


def test_of_many_offers_a_status_shows_a_few_those_that_are_used_first() -> None:
    scene = Scene()
    for number in range(100, 100 + 2 * SHOWN_MOST):
        scene.offer(number)
    host = scene.offer(999)
    scene.follow(host)
    scene.tried(scene.trials()[0])
    scene.turn()
    shown = scene.ways.relays.told({"peer-999": "hal"})
    assert len(shown) == SHOWN_MOST and (shown[0]["name"], shown[0]["pairs_allowed"]) == ("hal", 1)
