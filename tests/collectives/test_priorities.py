"""Which frame leaves next: words and crossings before bulk, which keeps its quarter; and how deep sockets may be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from hypothesis import given
from hypothesis import strategies as st

from farflung.collectives.link.frame_queue import (
    CROSSING_BYTES_WAITING,
    CROSSINGS_WAITING,
    LITTLE_BYTES,
    URGENT_KINDS,
    Backlog,
    QueuedFrame,
    Rank,
    Sharing,
    has_room,
    rank_of,
)
from farflung.collectives.link.peer_connections import (
    STANDS_AFTER_S,
    Bearer,
    PeerConnections,
    ZmqConnection,
)
from farflung.collectives.link.tcp_counts import NOTHING, TcpCounts, TcpTraffic
from farflung.collectives.link.zmq_link import ROOM_AGAIN_S, LinkSettings, ZmqLink
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.process.sockets import curve_raw
from farflung.protocol.round_words import Contact
from rig.crossing_kinds import KINDS, SomeCrossing
from rig.waiting import Patience

RUN = b"run-tag!"
PAYLOAD_MAX = 1_000_000


def frame(kind: Kind, size: int = 0, chunk: int = 0) -> Frame:
    header = Header(kind, RUN, chunk=chunk)
    return with_payload(header, os.urandom(size)) if size else Frame(header)


def test_words_are_short_and_a_probe_meets_what_bulk_meets() -> None:
    for kind in KINDS.values():
        words = {
            Kind.PING,
            Kind.PONG,
            Kind.LATER,
            Kind.MISSING,
            Kind.HAVE,
            Kind.LEAN_ASKED,
            Kind.LEAN_GRANTED,
        }
        urgent = kind.crossing or kind in words
        assert rank_of(frame(kind, LITTLE_BYTES)) == (Rank.WORD if urgent else Rank.BULK)
        large = Rank.CROSSING if kind.crossing else Rank.BULK
        assert (
            rank_of(frame(kind, LITTLE_BYTES + 1)) == large
            and (kind.crossing or kind in URGENT_KINDS) == urgent
        )


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=80))
def test_bulk_keeps_a_quarter_of_the_bytes_and_crossings_the_rest(sizes: list[tuple[int, int]]) -> None:
    """Of frames of any sizes, at any moment, but for the one that is on its way."""
    sharing, took = Sharing(), {Rank.CROSSING: 0, Rank.BULK: 0}
    for crossing, bulk in sizes:
        rank = sharing.next(crossings=True, bulk=True)
        size = bulk if rank == Rank.BULK else crossing
        sharing.took(rank, size)
        took[rank] += size
        largest = max(map(max, sizes))
        assert 3 * took[Rank.BULK] >= took[Rank.CROSSING] - largest
        assert 3 * (took[Rank.BULK] - largest) <= took[Rank.CROSSING]
    assert sharing.next(crossings=False, bulk=True) == Rank.BULK
    sharing.took(Rank.BULK, 1000)
    assert sharing.next(crossings=True, bulk=True) == Rank.CROSSING
    sharing.took(Rank.CROSSING, 10)
    assert sharing.next(crossings=True, bulk=True) == Rank.BULK, "who was alone owes nothing"


def test_so_little_waits_in_sockets_that_the_next_crossing_finds_a_short_queue() -> None:
    """0.2 s of the line beside what a round trip has on its way, and two frames at least."""
    assert has_room(0, 4_000_000, None, None) and has_room(4_000_000, 4_000_000, 1e6, 0.05)
    assert not has_room(4_000_001, 4_000_000, 1e6, 0.05)
    assert has_room(6_150_000, 100_000, 25e6, 0.05) and not has_room(6_150_001, 100_000, 25e6, 0.05)
    assert has_room(2_900_000, 100_000, 10e6, None) and not has_room(2_900_001, 100_000, 10e6, None)


def test_P8_who_asks_for_microbatches_and_reads_nothing_fills_no_memory() -> None:
    backlog, large = Backlog(), frame(SomeCrossing.GRADIENT, 1 << 20)
    for chunk in range(300):
        header = Header(SomeCrossing.GRADIENT, RUN, chunk=chunk)
        backlog.put(header.pack(), Frame(header, large.payload))
    waiting = len(backlog)
    assert CROSSING_BYTES_WAITING // len(large.payload) - 1 <= waiting <= 128 and not backlog.answers
    backlog.drop_first(Rank.CROSSING)
    backlog.drop_first(Rank.CROSSING)
    backlog.put(b"another", large)
    assert len(backlog) == waiting - 1, "there is room again"
    words = Backlog()
    for chunk in range(CROSSINGS_WAITING + 9):
        words.put(chunk.to_bytes(4), frame(SomeCrossing.WANT_GRADIENT, chunk=chunk))
    assert len(words) == CROSSINGS_WAITING
    words.forget_rounds_before(99)
    assert len(words) == CROSSINGS_WAITING, "they are of no round"


@dataclass
class Told:
    """Stands in for the kernel's word on one connection."""

    crossed: TcpTraffic = NOTHING

    def of(self, descriptor: int) -> TcpTraffic:
        return self.crossed


def test_what_a_connection_holds_counts_while_it_moves() -> None:
    told = Told(TcpTraffic(700, 700, 0, 0))  # the handshake
    connection = ZmqConnection(None, None, tcp=told, up=True)  # type: ignore[arg-type]
    connection.on_the_way.take(b"header", 100_000)
    connection.listen(0.0)
    assert connection.unacknowledged_bytes(STANDS_AFTER_S) == 99_300
    assert connection.unacknowledged_bytes(STANDS_AFTER_S + 0.01) == 0, "it stands, and delays nobody else"
    told.crossed = TcpTraffic(40_000, 700, 50_000, 9)
    connection.listen(3.0)
    assert connection.unacknowledged_bytes(3.1) == 60_000
    told.crossed = NOTHING
    assert connection.unacknowledged_bytes(3.1) == 0, "nobody can tell"


def test_contributions_are_on_their_way_until_the_last_one_is_acknowledged() -> None:
    told = Told(TcpTraffic(700, 700, 0, 0))
    connection = ZmqConnection(None, None, tcp=told, up=True)  # type: ignore[arg-type]
    connection.listen(0.0)
    assert not connection.brings_contributions(0.0)
    connection.on_the_way.take(b"first", 100_000, Kind.CONTRIBUTION)
    connection.on_the_way.take(b"then", 100_000, Kind.RESULT)
    told.crossed = TcpTraffic(90_000, 700, 50_000, 9)
    connection.listen(0.1)
    assert connection.brings_contributions(0.1)
    assert not connection.brings_contributions(0.1 + STANDS_AFTER_S + 0.01), (
        "it stands, and delays nobody else"
    )
    told.crossed = TcpTraffic(100_700, 700, 50_000, 9)
    connection.listen(0.2)
    assert not connection.brings_contributions(0.2), "what is on its way is a result"


# ---- a link over ZeroMQ --------------------------------------------------------------------------------------


class End:
    def __init__(self, name: str) -> None:
        keys = zmq.curve_keypair()
        self.now = 1000.0
        self.link = ZmqLink(keys, LinkSettings(clock=lambda: self.now))
        self.link.expect(name, RUN, PAYLOAD_MAX, KINDS)
        address = f"127.0.0.1:{self.link.listen('127.0.0.1', 0)}"
        self.contact = Contact(name, name, curve_raw(keys[0]), address)
        self.got: list[Kind] = []

    def turn(self, reads: bool = True) -> None:
        self.link.flush()
        self.link.on_tick()
        self.link.answer_handshakes()
        if reads:
            self.got += [came.header.kind for _, came in self.link.receive() if isinstance(came, Frame)]

    def sends(self, to: str, kind: Kind, count: int) -> None:
        """So many of the largest."""
        for chunk in range(count):
            self.link.send(to, frame(kind, PAYLOAD_MAX, chunk))

    @property
    def unacknowledged_bytes(self) -> int:
        return self.link.counts.sent_bytes - self.link.moved().sent_bytes


def until(wanted: Callable[[], bool], *ends: tuple[End, bool]) -> None:
    patience = Patience()
    while not wanted():
        assert not patience.is_over
        for end, reads in ends:
            end.turn(reads)


def still(ann: End, *others: tuple[End, bool]) -> None:
    """Nothing is handed out any more, by her clock, which stands."""
    sent, since = -1, Patience(0.5)
    while not since.is_over:
        until(lambda: True)
        for end, reads in ((ann, True), *others):
            end.turn(reads)
        if ann.link.counts.sent_bytes != sent:
            sent, since = ann.link.counts.sent_bytes, Patience(0.5)


def town() -> tuple[End, End, End]:
    ann, bob, cyd = End("ann"), End("bob"), End("cyd")
    for end in (ann, bob, cyd):
        end.link.set_contacts([each.contact for each in (ann, bob, cyd)])
    everybody = [(end, True) for end in (ann, bob, cyd)]
    until(lambda: len(ann.link.round_trips_s) == 2, *everybody)
    return ann, bob, cyd


def close(*ends: End) -> None:
    for end in ends:
        end.link.close()


def test_sockets_are_not_filled_with_crossings_and_who_takes_nothing_holds_up_nobody() -> None:
    ann, bob, cyd = town()
    ann.sends("bob", SomeCrossing.ACTIVATION, 60)
    still(ann, (bob, False))  # bob reads nothing
    assert ann.link.peers_waiting() == 1
    assert ann.unacknowledged_bytes <= 2 * PAYLOAD_MAX + 10_000, "two frames of it, the rest waits here"
    assert ann.link.idle_s() <= ROOM_AGAIN_S, "it is looked at again"
    assert not any(events & zmq.POLLOUT for _, events in ann.link.sockets()), (
        "and no poller runs hot meanwhile"
    )
    ann.link.send("bob", frame(SomeCrossing.ROOM, chunk=7))
    assert not ann.link.lines["bob"].waiting.has(Rank.WORD), "a word goes at once"
    ann.link.send("cyd", frame(SomeCrossing.GRADIENT, PAYLOAD_MAX))
    ann.link.send("cyd", frame(Kind.STATE, PAYLOAD_MAX))
    ann.now += STANDS_AFTER_S + 0.1
    until(lambda: set(cyd.got) == {SomeCrossing.GRADIENT, Kind.STATE}, (ann, True), (cyd, True))
    until(lambda: bob.got.count(SomeCrossing.ACTIVATION) == 60, (ann, True), (bob, True))
    assert bob.got.index(SomeCrossing.ROOM) < 59
    until(lambda: not ann.link.peers_waiting(), (ann, True), (bob, True))  # the kernel is asked at ticks
    close(ann, bob, cyd)


def test_without_crossings_sockets_take_what_they_can() -> None:
    """As before there were any: rounds of a model in one piece hand out all that fits."""
    ann, bob, cyd = town()
    ann.sends("bob", Kind.STATE, 60)
    still(ann, (bob, False))
    assert ann.unacknowledged_bytes > 2 * PAYLOAD_MAX + 10_000
    until(lambda: len(bob.got) == 60, (ann, True), (bob, True))
    close(ann, bob, cyd)


def results_wait(ann: End, bob: End, cyd: End) -> None:
    """Contributions to bob, who reads nothing, and results to cyd, who would."""
    ann.sends("bob", Kind.CONTRIBUTION, 40)
    still(ann, (bob, False), (cyd, True))
    ann.sends("cyd", Kind.RESULT, 5)
    still(ann, (bob, False), (cyd, True))
    assert Kind.RESULT not in cyd.got
    assert ann.link.idle_s() <= ROOM_AGAIN_S, "it is looked at again"


def test_results_wait_while_contributions_leave_to_others() -> None:
    """Nobody merges before it has the last contribution; a result may come as late as the last one."""
    ann, bob, cyd = town()
    results_wait(ann, bob, cyd)
    until(lambda: cyd.got.count(Kind.RESULT) == 5, (ann, True), (bob, True), (cyd, True))
    until(lambda: bob.got.count(Kind.CONTRIBUTION) == 40, (ann, True), (bob, True))
    close(ann, bob, cyd)


def test_P3_who_takes_no_contribution_holds_up_nobody_s_results() -> None:
    ann, bob, cyd = town()
    results_wait(ann, bob, cyd)
    ann.now += STANDS_AFTER_S + 0.1
    until(lambda: cyd.got.count(Kind.RESULT) == 5, (ann, True), (bob, False), (cyd, True))
    close(ann, bob, cyd)


def test_where_no_contribution_leaves_results_fill_the_line() -> None:
    ann, bob, cyd = town()
    ann.sends("bob", Kind.RESULT, 40)
    still(ann, (bob, False))
    assert ann.unacknowledged_bytes > 0 and ann.link.counts.sent_bytes > 3 * PAYLOAD_MAX
    until(lambda: bob.got.count(Kind.RESULT) == 40, (ann, True), (bob, True))
    close(ann, bob, cyd)


# ---- over several connections ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Taking(Bearer):
    """It takes what it has room for."""

    room: int
    took: list[bytes]  # headers

    def offer(self, item: QueuedFrame) -> bool:
        has_room = len(self.took) < self.room
        if has_room:
            self.took.append(item.header)
        return has_room


def taken(kind: Kind, room: int) -> list[list[int]]:
    streams = [Taking(tcp=TcpCounts(), up=True, room=room, took=[]) for _ in range(2)]
    line = PeerConnections(Contact("bob", "bob", bytes(32), "127.0.0.1:9"), [*streams])
    frames = [frame(kind, 9, chunk) for chunk in range(4)]
    for each in frames:
        line.put(each)
    for each in frames:
        line.send_one(None, 0.0, rank_of(each))
    headers = [each.header.pack() for each in frames]
    return [[headers.index(header) for header in stream.took] for stream in streams]


def test_F1_no_microbatch_overtakes_another_one_over_a_second_connection() -> None:
    """Sums are made in the order in which microbatches come: it is that of one process where the line has room."""
    assert taken(SomeCrossing.ACTIVATION, room=9) == [[0, 1, 2, 3], []]
    assert taken(SomeCrossing.ACTIVATION, room=2) == [[0, 1], [2, 3]], "else they wait for nothing"
    assert taken(Kind.CONTRIBUTION, room=9) == [[1, 3], [0, 2]], "both are kept busy"
