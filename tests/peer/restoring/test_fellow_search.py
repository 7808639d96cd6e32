"""A peer that lost its coordinator: what it believes of where that is, whom it asks, and whom it answers."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farflung.collectives.round.effects import SendFrame
from farflung.compression.codec import check_payload, payload_bytes
from farflung.peer.identity import Identity
from farflung.peer.machine.effects import Contacts, Effect, LookAt, LookElsewhere, Remember, ToDoor
from farflung.peer.machine.handshake import Handshake, PeerConfig, me_of
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.restoring import fellow_search
from farflung.peer.restoring.fellow_search import (
    ANSWER_EVERY_S,
    ASK_AFTER_S,
    ASK_EVERY_S,
    FORMER_S,
    FellowSearch,
    WhereKind,
)
from farflung.protocol.errors import Counters
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.join_url import Address, Whereabouts
from farflung.protocol.messages import FragmentTick, Knock, Tick, Welcome
from farflung.protocol.mode_words import StandsBy
from farflung.protocol.round_words import Contact
from farflung.protocol.signing import curve_key_of

SECRET = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
PINNED = curve_key_of(SECRET.public_key().public_bytes_raw())
TAG = bytes(8)
GIVEN, NEW = Address("old.example", 1), Address("new.example", 2)
ME = me_of(Identity.generate(), bytes(32), bytes(16))


def told(number: int, *addresses: str, secret: Ed25519PrivateKey = SECRET) -> bytes:
    said = Whereabouts("demo", 1, number, addresses or (str(GIVEN),), 0, b"")
    return said.signed(lambda raw: secret.public_key().public_bytes_raw() + secret.sign(raw)).raw


class Peer:
    def __init__(self, kept: bytes = b"", pinned: bytes = PINNED) -> None:
        config = PeerConfig(
            ME, "demo", check_payload, payload_bytes, pinned=pinned, places=(GIVEN,), kept=kept
        )
        self.hurried: list[float] = []
        self.seeking = FellowSearch(config, self.hurried.append)
        self.counters = Counters()

    def heard(
        self, sender: str, kind: Kind, payload: bytes = b"", now: float = 0.0, version: int = 0
    ) -> list[Effect]:
        header = Header(kind, TAG, version=version)
        frame = with_payload(header, payload) if payload else Frame(header)
        return self.seeking.on_frame(sender, frame, self.counters, now)

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.counters.as_dict().items() if count}


def roster(*peers: str) -> tuple[Contact, ...]:
    return tuple(Contact(peer, peer, bytes([at]) * 32, "") for at, peer in enumerate((ME.peer, *peers)))


def welcome(incarnation: int, peers: tuple[str, ...], list_of: bytes = b"") -> Welcome:
    return Welcome(
        session=bytes(16), incarnation=incarnation, member_port=1, fragments=(0,), roster=roster(*peers),
        whereabouts=list_of,
    )  # fmt: skip


def asked_in(effects: list[Effect]) -> list[str]:
    assert all(
        isinstance(each, SendFrame) and each.frame.header.kind == WhereKind.WANT_WHERE for each in effects
    )
    return [each.to for each in effects if isinstance(each, SendFrame)]


def lost(*fellows: str, kept: bytes = b"") -> Peer:
    peer = Peer(kept)
    peer.seeking.on_welcome(welcome(1, fellows), 0.0)
    peer.seeking.on_lost(TAG, 0.0)
    return peer


# ---- what it believes -------------------------------------------------------------------------------------------


def test_the_newest_list_comes_first_and_the_url_stays() -> None:
    peer = Peer()
    assert peer.seeking.places == (GIVEN,)
    _, effects = peer.seeking.hear(told(1, str(NEW)))
    assert effects == [Remember(told(1, str(NEW))), LookAt((NEW, GIVEN))]
    peer.seeking.hear(told(2, "third.example:3"))
    assert peer.seeking.places == (Address("third.example", 3), GIVEN, NEW), "and the list before, last"


def test_what_was_kept_is_believed_no_more_than_what_is_heard() -> None:
    assert Peer(kept=told(5, str(NEW))).seeking.places == (NEW, GIVEN)
    assert Peer(kept=told(5, str(NEW), secret=OTHER)).seeking.places == (GIVEN,)
    assert Peer(kept=b"rubbish").seeking.places == (GIVEN,)
    assert Peer(kept=told(5, str(NEW)), pinned=b"").seeking.places == (GIVEN,), "it could not be checked"


@given(st.permutations([1, 2, 3, 4, 5]))
def test_in_whatever_order_lists_come_the_newest_stays(numbers: list[int]) -> None:
    """An old list that is played again over a newer one changes nothing."""
    peer, best = Peer(), 0
    for number in numbers:
        verdict, effects = peer.seeking.hear(told(number, f"h{number}.example:1"))
        assert bool(effects) == (number > best) and verdict == ("accepted" if number > best else "stale")
        best = max(best, number)
        assert peer.seeking.places[0] == Address(f"h{best}.example", 1)
        assert peer.seeking.hear(told(best, f"h{best}.example:1")) == ("duplicate", [])


def test_a_liar_can_not_send_it_elsewhere() -> None:
    peer = lost("ann")
    assert asked_in(peer.seeking.on_timer(ASK_AFTER_S)) == ["ann"]
    forged = told(9, "evil.example:1", secret=OTHER)
    altered = msgspec.structs.replace(
        Whereabouts("demo", 1, 9, ("evil.example:1",), 0, b""), proof=msgspec.msgpack.decode(told(9))[-1]
    ).raw
    for at, raw in enumerate((forged, altered, b"x"), start=1):
        assert peer.heard("ann", WhereKind.WHERE, raw) == []
        assert peer.heard("ann", WhereKind.WHERE, told(9, str(NEW))) == [], "one answer for each question"
        assert peer.seeking.on_timer(ASK_AFTER_S + at * ASK_EVERY_S)
    assert (
        peer.counts == {"unauthorised": 3, "stale": 3}
        and peer.seeking.places == (GIVEN,)
        and not peer.hurried
    )


# ---- asking -----------------------------------------------------------------------------------------------------


def test_it_asks_a_few_fellows_at_a_time_and_all_in_turn() -> None:
    peers = [f"p{at}" for at in range(6)]
    peer = lost(*peers)
    assert peer.seeking.on_timer(ASK_AFTER_S - 0.1) == []
    first = asked_in(peer.seeking.on_timer(ASK_AFTER_S))
    assert len(first) == fellow_search.ASKED_AT_ONCE
    assert peer.seeking.on_timer(ASK_AFTER_S + ASK_EVERY_S - 0.1) == []
    second = asked_in(peer.seeking.on_timer(ASK_AFTER_S + ASK_EVERY_S))
    assert set(first) | set(second) == set(peers) and ME.peer not in first + second


def test_whoever_can_check_nothing_asks_nobody() -> None:
    peer = Peer(pinned=b"")
    peer.seeking.on_welcome(welcome(1, ("ann",)), 0.0)
    peer.seeking.on_lost(TAG, 0.0)
    assert peer.seeking.on_timer(60.0) == []


def test_an_answer_is_followed_at_once_and_one_that_nobody_asked_for_is_not() -> None:
    peer = lost("ann")
    assert peer.heard("ann", WhereKind.WHERE, told(3, str(NEW))) == [] and peer.counts == {"stale": 1}
    peer.seeking.on_timer(ASK_AFTER_S)
    effects = peer.heard("ann", WhereKind.WHERE, told(3, str(NEW)), now=2.5)
    assert effects[-1] == LookAt((NEW, GIVEN)) and peer.hurried == [2.5]
    assert peer.heard("ann", WhereKind.WHERE, told(3, str(NEW)), now=2.6) == [] and peer.hurried == [2.5]


# ---- answering --------------------------------------------------------------------------------------------------


def test_it_gives_a_newer_list_and_not_too_often() -> None:
    mine = told(3, str(NEW))
    peer = Peer(kept=mine)
    known = peer.seeking.newest.order if peer.seeking.newest is not None else 0
    peer.seeking.on_welcome(welcome(1, ("ann", "bob")), 0.0)
    [answer] = peer.heard("ann", WhereKind.WANT_WHERE)
    assert isinstance(answer, SendFrame) and (answer.to, bytes(answer.frame.payload)) == ("ann", mine)
    assert peer.heard("ann", WhereKind.WANT_WHERE, now=ANSWER_EVERY_S - 0.1) == []
    assert len(peer.heard("bob", WhereKind.WANT_WHERE, now=ANSWER_EVERY_S - 0.1)) == 1
    assert len(peer.heard("ann", WhereKind.WANT_WHERE, now=ANSWER_EVERY_S)) == 1
    assert peer.heard("ann", WhereKind.WANT_WHERE, now=60.0, version=known) == [], "it knows as much"
    assert Peer().heard("ann", WhereKind.WANT_WHERE) == [], "it knows nothing"


def test_of_those_whom_a_new_coordinator_does_not_know_yet_only_that_question_is_heard() -> None:
    peer = Peer()
    peer.seeking.on_welcome(welcome(1, ("ann", "bob")), 0.0)
    effects = peer.seeking.on_welcome(welcome(2, ("bob",), told(4, str(NEW))), 100.0)
    [contacts] = [each for each in effects if isinstance(each, Contacts)]
    assert [each.peer for each in contacts.roster] == [ME.peer, "bob", "ann"]
    assert peer.seeking.takes("ann", Frame(Header(Kind.WANT_STATE, TAG)))
    assert not peer.seeking.takes("bob", Frame(Header(Kind.WANT_STATE, TAG)))
    assert peer.heard("ann", Kind.WANT_STATE, now=101.0) == [] and peer.counts == {"stale": 1}
    assert len(peer.heard("ann", WhereKind.WANT_WHERE, now=101.0)) == 1
    back = peer.seeking.contacts(roster("bob", "ann"), (), 102.0)
    assert len(back.roster) == 3 and not peer.seeking.takes("ann", Frame(Header(Kind.WANT_STATE, TAG)))


def tick(number: int, *peers: str, since: int = 0, gone: tuple[str, ...] = ()) -> Tick:
    return Tick(
        session=bytes(16), seq=1, answers=1, heard_s=0.0, fragments=(FragmentTick(0, 0, (), True, (), 0, False, 0),),
        goal="train", reason="", roster_no=number, roster=tuple(Contact(p, p, bytes(32), "") for p in peers),
        leases=None, void=(), era=0, advice="", era_because="", roster_since=since, roster_gone=gone,
    )  # fmt: skip


def test_what_is_new_since_a_roster_that_it_has_is_put_into_that() -> None:
    peer = Peer()
    peer.seeking.on_welcome(welcome(1, ("ann",)), 0.0)

    def hears(told: Tick) -> list[str] | None:
        effects = peer.seeking.on_roster(told, 1.0)
        assert all(isinstance(each, Contacts) for each in effects)
        return (
            sorted(c.peer for each in effects if isinstance(each, Contacts) for c in each.roster)
            if effects
            else None
        )

    assert hears(tick(6, "eve", since=5)) is None, "of a roster that it never had"
    assert peer.seeking.roster_no == 0
    assert hears(tick(5, "ann", "bob")) == ["ann", "bob"] and peer.seeking.roster_no == 5
    assert hears(tick(7, "cyd", since=5, gone=("ann",))) == ["bob", "cyd"]
    assert hears(tick(8, "cyd", "dan", since=5, gone=("ann", "bob"))) == ["cyd", "dan"], (
        "two that crossed a beat"
    )
    assert hears(tick(11, "eve", since=9)) is None and peer.seeking.roster_no == 8
    assert hears(tick(7, "eve", since=5)) is None and peer.seeking.roster_no == 8, "an older one"
    assert hears(tick(3, "fay")) == ["fay"] and peer.seeking.roster_no == 3, "whole"
    peer.seeking.on_welcome(welcome(1, ("ann",)), 0.0)
    assert hears(tick(4, "eve", since=3)) is None, "a session that begins has been told nothing"


@pytest.mark.parametrize("later_s", [FORMER_S - 1.0, FORMER_S])
def test_who_does_not_come_back_is_forgotten(later_s: float) -> None:
    peer = Peer()
    peer.seeking.on_welcome(welcome(1, ("ann",)), 0.0)
    peer.seeking.on_welcome(welcome(2, ()), 100.0)
    found = peer.seeking.contacts(roster("bob"), (), 100.0 + later_s)
    assert ("ann" in [each.peer for each in found.roster]) == (later_s < FORMER_S)


def test_the_same_coordinator_knows_whom_it_let_go() -> None:
    peer = Peer()
    peer.seeking.on_welcome(welcome(1, ("ann",)), 0.0)
    [contacts] = peer.seeking.on_welcome(welcome(1, ()), 1.0)
    assert isinstance(contacts, Contacts) and [each.peer for each in contacts.roster] == [ME.peer]


# ---- in the machine ---------------------------------------------------------------------------------------------


def test_a_replaced_coordinator_is_left_for_another_address() -> None:
    doorway = Handshake(ME, "demo")
    doorway.incarnation = 5
    assert LookElsewhere() in doorway.outdated(welcome(4, ()))
    assert doorway.outdated(welcome(5, ())) == []


def test_what_fellows_say_brings_the_next_knock_forward() -> None:
    config = PeerConfig(ME, "demo", check_payload, payload_bytes, pinned=PINNED, places=(GIVEN,))
    machine = PeerMachine(config, lambda: 0.5)
    knocks = [at for at in range(200) if machine.on_timer(at / 10)]
    pause = max(range(1, len(knocks)), key=lambda at: knocks[at] - knocks[at - 1])
    now = knocks[pause - 1] / 10 + 0.1
    machine = PeerMachine(config, lambda: 0.5)
    for at in range(knocks[pause - 1] + 1):
        machine.on_timer(at / 10)
    assert machine.on_timer(now) == []
    machine.doorway.hurry(now)
    [knock] = machine.on_timer(now)
    assert isinstance(knock, ToDoor) and isinstance(knock.message, Knock)


# ---- a coordinator that stands by ------------------------------------------------------------------------------


def knocking(peer: PeerMachine, until: float) -> list[float]:
    """When it knocks, looked at ten times a second."""
    times = [each / 10 for each in range(round(until * 10))]
    return [now for now in times if any(isinstance(each, ToDoor) for each in peer.on_timer(now))]


def machine() -> PeerMachine:
    config = PeerConfig(ME, "demo", check_payload, payload_bytes, pinned=PINNED, places=(GIVEN,))
    return PeerMachine(config, lambda: 0.0)


def test_who_is_told_by_a_standby_where_the_leader_is_knocks_there_at_once() -> None:
    peer = machine()
    knocking(peer, 3.0)
    list_of = told(5, str(NEW))
    effects = peer.on_door(StandsBy(whereabouts=list_of), 3.05)
    assert effects == [Remember(list_of), LookAt((NEW, GIVEN))]
    assert any(isinstance(each, ToDoor) for each in peer.on_timer(3.1)), "and needs no second word"
    assert peer.on_door(StandsBy(whereabouts=list_of), 3.2) == [], "the same list says nothing new"
    assert peer.on_door(StandsBy(whereabouts=told(9, str(NEW), secret=OTHER)), 3.3) == [], "whoever signs it"


def test_who_finds_a_standby_alone_keeps_knocking_without_losing_patience() -> None:
    """It leads within seconds, and a peer that comes every ten would stand still for that long."""
    peer = machine()
    times: list[float] = []
    for each in range(1200):
        now = each / 10
        if any(isinstance(effect, ToDoor) for effect in peer.on_timer(now)):
            times.append(now)
            assert peer.on_door(StandsBy(whereabouts=b""), now + 0.01) == []
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) < 1.2 and times[-1] > 118, "nor does it give up after a minute: somebody is there"
