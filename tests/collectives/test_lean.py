"""Lean connections over real sockets: who gets one, what somebody on the way can do to it, and what is left then."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import zmq

from farflung.collectives.link import sealed_records
from farflung.collectives.link.lean import (
    AGAIN_MOST_S,
    PORTS_AFTER,
    TICKETS_OF_A_PEER,
    Lean,
    LeanSide,
)
from farflung.collectives.link.peer_connections import ConnectionKind
from farflung.collectives.link.port import SILENT_MOST
from farflung.collectives.link.sealed_records import HALF_BYTES, HELLO_BYTES
from farflung.collectives.link.tcp_counts import TcpCounts
from farflung.collectives.link.zmq_link import UNREACHED_AFTER_S, LinkSettings, ZmqLink
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.limits import HANDSHAKE_S
from farflung.protocol.process.sockets import curve_raw
from farflung.protocol.round_words import Contact
from rig.waiting import PATIENCE_S, Patience

RUN = b"run-tag!"
PAYLOAD_MAX = 100_000
SO_MAX_PACING_RATE = 47  # of Linux
_open: list[End] = []


@pytest.fixture(autouse=True)
def _all_closed_at_the_end() -> Iterator[None]:
    yield
    while _open:
        _open.pop().link.close()


@dataclass(eq=False)
class End:
    name: str
    lean: bool = True
    connections: int = 0
    now: float = 1000.0
    got: list[tuple[str, Frame]] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = zmq.curve_keypair()
        settings = LinkSettings(clock=lambda: self.now, lean=self.lean, connections=self.connections)
        self.link = ZmqLink(keys, settings)
        self.link.expect(self.name, RUN, PAYLOAD_MAX)
        address = f"127.0.0.1:{self.link.listen('127.0.0.1', 0)}"
        self.contact = Contact(self.name, self.name, curve_raw(keys[0]), address)
        _open.append(self)

    @property
    def side(self) -> LeanSide:
        return self.link._lean

    def to(self, other: End) -> list[Lean]:
        return [
            each for each in self.link.lines[other.name].over(ConnectionKind.LEAN) if isinstance(each, Lean)
        ]

    def stands(self, other: End) -> bool:
        return any(each.up for each in self.to(other))

    def verdicts(self) -> set[str]:
        return {name for name, count in self.link.counts.verdicts.as_dict().items() if count}

    def turn(self) -> None:
        for sender, came in self.link.receive():
            assert isinstance(came, Frame)
            self.got.append((sender, came))
        self.link.flush()
        self.link.on_tick()


def until(ends: tuple[End, ...], wanted: Callable[[], object], what: str) -> None:
    patience = Patience()
    while not wanted():
        assert not patience.is_over, f"not within {PATIENCE_S:g} s: {what}"
        poller = zmq.Poller()
        for end in ends:
            for each, events in end.link.sockets():
                poller.register(each, events)
        poller.poll(5)
        for end in ends:
            end.turn()


def meet(*ends: End) -> None:
    for end in ends:
        end.link.set_contacts([each.contact for each in ends])


def frame(number: int, size: int = 50_000) -> Frame:
    return with_payload(Header(Kind.CONTRIBUTION, RUN, round_no=1, chunk=number), bytes([number]) * size)


@dataclass
class Middle:
    """Somebody on the way from ann to bob's port, who changes what ann says as he likes."""

    bob: End
    change: Callable[[int, bytes], bytes]  # where in all that ann said these bytes stand
    said: bytes = b""
    sockets: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.there = ("127.0.0.1", self.bob.side.port)
        self.selector = selectors.DefaultSelector()
        door = socket.create_server(("127.0.0.1", 0))
        self.sockets.append(door)
        self.selector.register(door, selectors.EVENT_READ, None)
        self.bob.side.port = door.getsockname()[1]

    def turn(self) -> None:
        for key, _ in self.selector.select(0):
            here = key.fileobj
            assert isinstance(here, socket.socket)
            if key.data is None:
                self._join(here.accept()[0], socket.create_connection(self.there))
                continue
            with contextlib.suppress(OSError):
                came = here.recv(65536)
                other, from_ann = key.data
                if not came:
                    other.shutdown(socket.SHUT_WR)
                    self.selector.unregister(here)
                    continue
                if from_ann:
                    at, self.said = len(self.said), self.said + came
                    came = self.change(at, came)
                other.sendall(came)

    def _join(self, ann: socket.socket, bob: socket.socket) -> None:
        self.sockets += [ann, bob]
        self.selector.register(ann, selectors.EVENT_READ, (bob, True))
        self.selector.register(bob, selectors.EVENT_READ, (ann, False))

    def close(self) -> None:
        self.selector.close()
        for each in self.sockets:
            each.close()


def test_what_a_stream_that_is_given_up_had_not_brought_there_goes_over_others() -> None:
    """One that crawls, as TCP does at times; whether it is to be given up: test_stalled_streams.py."""
    ann, bob = End("ann"), End("bob")
    meet(ann, bob)
    until((ann, bob), lambda: ann.stands(bob), "lean")
    crawls, line = ann.to(bob)[0], ann.link.lines["bob"]
    crawls.socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 37_500)
    sent = range(40)
    for n in sent:
        ann.link.send("bob", frame(n, 20_000 if n % 2 else 90_000))
    until((ann, bob), lambda: bob.got, "something crawls there")
    ann.turn()
    assert len(bob.got) < len(sent) and crawls.held_bytes
    line.give_up(crawls)
    until((ann, bob), lambda: {each.header.chunk for _, each in bob.got} == {*sent}, "all is there")
    assert len(bob.got) < len(sent) + 5, "next to nothing comes twice"
    ann.now += 5.0
    until((ann, bob), lambda: ann.stands(bob), "another one stands")
    assert crawls not in ann.to(bob) and bob.verdicts() <= {"accepted"}


def test_a_stream_that_is_given_up_leaves_nothing_of_rounds_that_are_over() -> None:
    ann, bob = End("ann"), End("bob")
    meet(ann, bob)
    until((ann, bob), lambda: ann.stands(bob), "lean")
    crawls, line = ann.to(bob)[0], ann.link.lines["bob"]
    crawls.socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 37_500)
    for n in range(9):
        ann.link.send("bob", frame(n, 90_000))
    ann.link.forget_rounds_before(2)
    line.give_up(crawls)
    assert not line.waits


# ---- who gets one --------------------------------------------------------------------------------------------


def test_frames_go_over_a_lean_connection_once_one_stands() -> None:
    ann, bob = End("ann"), End("bob")
    meet(ann, bob)
    until((ann, bob), lambda: ann.stands(bob) and bob.stands(ann), "both are lean")
    over_zmq = [each.on_the_way.taken_bytes for each in ann.link.lines["bob"].over(ConnectionKind.DIALLED)]
    for n in range(20):
        ann.link.send("bob", frame(n))
    until((ann, bob), lambda: len(bob.got) == 20, "all are there")
    assert [
        each.on_the_way.taken_bytes for each in ann.link.lines["bob"].over(ConnectionKind.DIALLED)
    ] == over_zmq
    assert ann.to(bob)[0].on_the_way.taken_bytes > 20 * 50_000
    assert ann.verdicts() == bob.verdicts() == {"accepted"}


@pytest.mark.parametrize("leans", [(True, False), (False, True)])
def test_with_whoever_knows_no_lean_connections_all_goes_over_zeromq(leans: tuple[bool, bool]) -> None:
    ann, bob = End("ann", leans[0]), End("bob", leans[1])
    meet(ann, bob)
    ann.link.send("bob", frame(1))
    bob.link.send("ann", frame(2))
    until((ann, bob), lambda: ann.got and bob.got and ann.link.round_trips_s, "they hear each other")
    for _ in range(20):
        ann.turn(), bob.turn()
    assert not ann.to(bob) and not bob.to(ann) and ann.verdicts() == bob.verdicts() == {"accepted"}


def test_where_no_way_leads_to_the_port_all_goes_over_zeromq_and_attempts_become_rare() -> None:
    ann, bob = End("ann"), End("bob")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        bob.side.port = closed.getsockname()[1]
    meet(ann, bob)
    asked = []
    for number in range(12):
        ann.link.send("bob", frame(number))
        until((ann, bob), lambda number=number: len(bob.got) > number, "it arrives")  # type: ignore[misc]
        asked.append(ann.side._asking["bob"].again_at if "bob" in ann.side._asking else 0.0)
        ann.now += 10.0
    assert not ann.stands(bob)
    assert ann.side._asking["bob"].pause_s > 60.0 and ann.side._asking["bob"].pause_s <= AGAIN_MOST_S


def test_as_many_stand_as_the_line_needs() -> None:
    ann, bob = End("ann", connections=3), End("bob")
    meet(ann, bob)
    until((ann, bob), lambda: sum(each.up for each in ann.to(bob)) == 3, "three stand")
    assert len(bob.link.lines["ann"].accepted) == 3 and len(bob.to(ann)) == 1


def test_two_stand_where_the_way_is_long_and_frames_take_turns_between_them() -> None:
    ann, bob = End("ann"), End("bob")
    meet(ann, bob)
    until((ann, bob), lambda: ann.stands(bob), "one stands")
    ann.link._pings.rtt_s = dict.fromkeys(["bob"], 0.1)
    until((ann, bob), lambda: sum(each.up for each in ann.to(bob)) == 2, "two stand")
    for number in range(20):
        ann.link.send("bob", frame(number))
    until((ann, bob), lambda: len(bob.got) == 20, "all are there")
    assert all(each.on_the_way.taken_bytes >= 5 * 50_000 for each in ann.to(bob))


def test_the_port_follows_from_the_one_that_the_owner_chose() -> None:
    found = False
    for _ in range(10):  # what is free now may be somebody else's in a moment
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        side = LeanSide(bytes(32), TcpCounts(), lambda: 0.0, bytes)
        side.listen("127.0.0.1", free - PORTS_AFTER)
        if found := side.port == free:
            break
        side.close()
    assert found
    other = LeanSide(bytes(32), TcpCounts(), lambda: 0.0, bytes)
    other.listen("127.0.0.1", side.port - PORTS_AFTER)
    assert other.port not in (0, side.port), "it is taken: any other will do"
    side.close(), other.close()


# ---- somebody on the way ---------------------------------------------------------------------------------------


def _flipped(first: int) -> Callable[[int, bytes], bytes]:
    """From that byte on, one."""

    def change(at: int, came: bytes) -> bytes:
        if not at <= first < at + len(came):
            return came
        return came[: first - at] + bytes([came[first - at] ^ 1]) + came[first - at + 1 :]

    return change


def _repeated(first: int) -> Callable[[int, bytes], bytes]:
    return lambda at, came: came + came[-600:] if at <= first < at + len(came) else came


def _left_out(first: int) -> Callable[[int, bytes], bytes]:
    return lambda at, came: came[:-600] if at <= first < at + len(came) else came


@pytest.mark.parametrize("kind", [_flipped, _repeated, _left_out])
@pytest.mark.parametrize("first", [HELLO_BYTES + 1, HELLO_BYTES + 50, HELLO_BYTES + 5_000, 140_000])
def test_P8_what_was_changed_on_the_way_ends_the_connection_and_is_never_heard(
    kind: Callable[[int], Callable[[int, bytes], bytes]], first: int
) -> None:
    ann, bob = End("ann"), End("bob")
    middle = Middle(bob, kind(first))
    meet(ann, bob)
    ends = (ann, bob)

    def turned(wanted: Callable[[], object], what: str) -> None:
        def look() -> object:
            middle.turn()
            return wanted()

        until(ends, look, what)

    turned(lambda: ann.stands(bob), "lean by way of the middle")
    [lean] = ann.to(bob)
    for n in range(6):
        ann.link.send("bob", frame(n))
    turned(lambda: lean.is_over, "bob hung up")
    for n in range(6):  # as whoever misses them asks for them
        ann.link.send("bob", frame(n))
    turned(lambda: {each.header.chunk for _, each in bob.got} == set(range(6)), "all are there")
    for _, each in bob.got:
        assert each == frame(each.header.chunk)
    assert bob.verdicts() <= {"accepted"}
    middle.close()


def test_P8_a_ticket_is_good_for_one_connection_and_only_with_its_secret() -> None:
    """What was seen on the way, said again; and the ticket of somebody else, by whoever saw it."""
    ann, bob = End("ann"), End("bob")
    middle = Middle(bob, lambda at, came: came)
    meet(ann, bob)
    until((ann, bob), lambda: (middle.turn(), ann.stands(bob))[1], "lean by way of the middle")
    again = middle.said[:HELLO_BYTES]
    assert sealed_records.ticket_in(again)
    half = bytes(HALF_BYTES)
    granted = bob.side.grant("ann", ann.contact.key, half)
    grant = sealed_records.grant_of(granted or b"")
    assert grant is not None
    forged = again[:4] + grant.ticket + bytes(16)
    accepted = len(bob.link.lines["ann"].accepted)
    for hello in (again, forged, b"GET / HTTP/1.1\r\n" + bytes(HELLO_BYTES)):
        with socket.create_connection(middle.there) as caller:
            caller.sendall(hello)
            assert heard_end(caller, bob)
    assert len(bob.link.lines["ann"].accepted) == accepted
    middle.close()


def heard_end(caller: socket.socket, bob: End) -> bool:
    """Whether bob hangs up, and says nothing before."""
    caller.setblocking(False)
    patience = Patience()
    while not patience.is_over:
        bob.turn()
        try:
            return not caller.recv(100)
        except BlockingIOError:
            continue
        except ConnectionError:
            return True
    return False


def test_P8_strangers_are_few_and_stay_for_a_moment_only() -> None:
    bob = End("bob")
    there = ("127.0.0.1", bob.side.port)
    callers = [socket.create_connection(there)]
    until((bob,), lambda: len(bob.side._strangers) == 1, "it stands at the door")
    for _ in range(SILENT_MOST):
        callers.append(socket.create_connection(there))
        bob.turn()
    assert heard_end(callers[0], bob) and len(bob.side._strangers) <= SILENT_MOST
    bob.now += HANDSHAKE_S + 1.0
    bob.turn()
    assert not bob.side._strangers and heard_end(callers[-1], bob)
    for each in callers:
        each.close()


def test_P8_who_asks_without_end_has_a_few_tickets_and_none_for_long() -> None:
    ann, bob = End("ann"), End("bob")
    grants = [bob.side.grant("ann", ann.contact.key, bytes([n]) * HALF_BYTES) for n in range(50)]
    assert len(set(grants)) == 50 and len(bob.side._tickets) == TICKETS_OF_A_PEER
    assert bob.side.grant("ann", ann.contact.key, b"short") is None
    bob.now += HANDSHAKE_S + 1.0
    bob.side.grant("cid", ann.contact.key, bytes(HALF_BYTES))
    assert len(bob.side._tickets) == 1
    bob.side.forget("cid")
    assert not bob.side._tickets


# ---- its end ---------------------------------------------------------------------------------------------------


def test_a_connection_that_sealed_enough_is_followed_by_another_with_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ann, bob = End("ann"), End("bob")
    meet(ann, bob)
    until((ann, bob), lambda: ann.stands(bob), "lean")
    [first] = ann.to(bob)
    monkeypatch.setattr(sealed_records, "SEALED_BYTES_MOST", 1000)
    for n in range(2):
        ann.link.send("bob", frame(n))
    until((ann, bob), lambda: len(bob.got) == 2, "the second goes another way")
    ann.now += 2.0
    until((ann, bob), lambda: ann.stands(bob) and ann.to(bob) != [first], "another one")


def test_P3_a_cut_line_is_noticed_although_a_silent_connection_stands_beside() -> None:
    ann, bob = End("ann"), End("bob")
    meet(ann, bob)
    until((ann, bob), lambda: ann.stands(bob), "lean")
    ann.to(bob)[0].silent_since = ann.now - UNREACHED_AFTER_S
    assert ann.link.unreached() == {"bob"}


def test_what_a_frame_brings_about_may_close_the_next_connection() -> None:
    """Several can be read in one turn; the owner drops a contact when the first frame of another is there."""
    ann, bob, cid = End("ann"), End("bob"), End("cid")
    meet(ann, bob, cid)
    until((ann, bob, cid), lambda: bob.stands(ann) and cid.stands(ann), "lean")
    for end in (bob, cid):
        end.link.send("ann", frame(1, 500))
        end.link.flush()
    patience, senders = Patience(), set()
    while not senders:
        assert not patience.is_over
        for sender, _ in ann.link.receive():
            senders.add(sender)
            ann.link.set_contacts([each.contact for each in (bob, cid) if each.name == sender])
    assert len(senders) == 1 and set(ann.link.lines) == senders


def test_P8_who_is_no_contact_any_more_has_no_connection_left() -> None:
    ann, bob = End("ann"), End("bob")
    meet(ann, bob)
    until((ann, bob), lambda: ann.stands(bob) and bob.link.lines["ann"].accepted, "lean")
    theirs = [*bob.to(ann), *bob.link.lines["ann"].accepted]
    bob.link.set_contacts([bob.contact])
    assert all(isinstance(each, Lean) and each.socket.fileno() < 0 for each in theirs)
    until((ann,), lambda: not ann.stands(bob), "ann sees it")
