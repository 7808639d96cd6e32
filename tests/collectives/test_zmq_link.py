"""The data plane over real sockets on loopback: who is heard, who is reached, and what ends in which counter."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from farflung.collectives.link import zmq_link
from farflung.collectives.link.frame_queue import OnTheWay
from farflung.collectives.link.peer_connections import HELP_AFTER_S, PeerConnections, ZmqConnection
from farflung.collectives.link.rates import Pacer
from farflung.collectives.link.tcp_counts import NEWS_BYTES, NOTHING, Incoming, TcpTraffic
from farflung.collectives.link.zmq_link import STALL_S, UNREACHED_AFTER_S, LinkSettings, ZmqLink
from farflung.protocol.frames import Frame, Header, Kind, Spoiled, with_payload
from farflung.protocol.process.sockets import bulk, curve_raw, opened
from farflung.protocol.round_words import CROWD, Contact
from rig.waiting import PATIENCE_S, Patience

RUN = b"run-tag!"
PAYLOAD_MAX = 100_000


_open: list[End] = []


@pytest.fixture(autouse=True)
def _all_closed_at_the_end() -> Iterator[None]:
    """Also where a test failed: the garbage collector would wait for a context whose sockets are open, for ever."""
    yield
    while _open:
        _open[-1].close()


@dataclass(eq=False)
class End:
    """One peer's link, as an agent holds it."""

    name: str
    dialable: bool = True
    settings: LinkSettings = field(default_factory=LinkSettings)
    contact: Contact = field(init=False)
    got: list[tuple[str, Frame]] = field(default_factory=list)
    spoiled: list[tuple[str, Spoiled]] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = zmq.curve_keypair()
        self.link = ZmqLink(keys, self.settings)
        self.link.expect(self.name, RUN, PAYLOAD_MAX)
        address = f"127.0.0.1:{self.link.listen('127.0.0.1', 0)}" if self.dialable else ""
        self.contact = Contact(self.name, self.name, curve_raw(keys[0]), address)
        _open.append(self)

    def turn(self) -> None:
        self.link.flush()
        # Payloads are copied out: a view would keep its network frame alive.
        for sender, came in self.link.receive():
            if isinstance(came, Spoiled):
                self.spoiled.append((sender, came))
            else:
                self.got.append((sender, Frame(came.header, bytes(came.payload))))
        self.link.on_tick()

    def close(self) -> None:
        _open.remove(self)
        self.link.close()


def frame(kind: Kind = Kind.CONTRIBUTION, payload: bytes = b"payload", run: bytes = RUN) -> Frame:
    return with_payload(Header(kind, run, round_no=1, chunk=2), payload)


def until(ends: list[End], wanted: Callable[[], bool], what: str) -> None:
    patience = Patience()
    while not wanted():
        assert not patience.is_over, f"not within {PATIENCE_S:g} s: {what}"
        for end in ends:
            end.turn()


@pytest.fixture
def ends() -> list[End]:
    made = [End("ann"), End("bob"), End("cid", dialable=False)]
    for end in made:
        end.link.set_contacts([e.contact for e in made])
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_kernel_counts_what_crossed_the_line(ends: list[End]) -> None:
    ann, bob, _ = ends
    for n in range(20):
        ann.link.send("bob", frame(payload=bytes([n]) * 50_000))
    until(ends, lambda: len(bob.got) == 20 and ann.link.moved().sent_bytes > 1_000_000, "all is acknowledged")
    sent, received = ann.link.moved().sent_bytes, bob.link.moved().received_bytes
    assert 1_000_000 < sent < 1_100_000 and 1_000_000 < received < 1_100_000
    ann.link.set_contacts([])
    assert ann.link.moved().sent_bytes >= sent, "what is closed still counts"


def test_frames_arrive_whole_and_with_their_sender(ends: list[End]) -> None:
    ann, bob, _ = ends
    sent = [frame(payload=bytes([n]) * 50_000) for n in range(40)]  # more than the sockets hold
    for each in sent:
        assert ann.link.send("bob", each)
    until(ends, lambda: len(bob.got) == 40, "all frames are there")
    # There are two connections between them, each with its own order.
    assert sorted(f.payload for _, f in bob.got) == [f.payload for f in sent]
    assert {f.header for _, f in bob.got} == {f.header for f in sent} and {s for s, _ in bob.got} == {"ann"}
    assert (
        ann.link.counts.sent_bytes == bob.link.counts.arrived_bytes - len(b"")
        or ann.link.counts.sent_bytes > 0
    )


def test_who_cannot_be_dialled_is_reached_over_its_own_connection(ends: list[End]) -> None:
    ann, _, cid = ends
    ann.link.send("cid", frame(payload=b"for cid"))
    until(ends, lambda: bool(cid.got), "cid hears ann")
    assert cid.got[0][0] == "ann" and cid.got[0][1].payload == b"for cid"
    cid.link.send("ann", frame(payload=b"for ann"))
    until(ends, lambda: bool(ann.got), "ann hears cid")
    assert ann.got[0][0] == "cid"


def test_who_cannot_be_dialled_dials_in_a_crowd_when_something_is_to_go_there() -> None:
    cid, ann = End("cid", dialable=False), End("ann")
    others = [Contact(f"other {n}", f"other {n}", bytes([n % 256]) * 32, "127.0.0.1:9") for n in range(CROWD)]
    cid.link.set_contacts([ann.contact, *others])
    ann.link.set_contacts([cid.contact])
    assert not any(line.opened for line in cid.link.lines.values())
    cid.link.send("ann", frame(payload=b"for ann"))
    until([cid, ann], lambda: bool(ann.got), "ann hears cid")
    assert [peer for peer, line in cid.link.lines.items() if line.opened] == ["ann"]


def test_a_process_that_may_open_no_more_sockets_goes_on_with_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended by an error that nobody caught, at some 345 members that could be dialled."""
    monkeypatch.setattr(zmq_link, "SOCKETS_MOST", 12)
    ann, bob = End("ann", dialable=False), End("bob")
    bob.link.set_contacts([ann.contact])
    others = [Contact(f"other {n}", f"other {n}", bytes([n]) * 32, "127.0.0.1:9") for n in range(9)]
    ann.link.set_contacts([bob.contact, *others])
    unopened = [peer for peer, line in ann.link.lines.items() if not line.opened]
    assert unopened and "bob" not in unopened
    assert ann.link.send(unopened[0], frame()), "it waits"
    ann.link.send("bob", frame(payload=b"for bob"))
    until([ann, bob], lambda: bool(bob.got), "bob hears ann")
    ann.link.set_contacts([bob.contact, *others[-1:]])  # the others are gone, and what they held is free
    patience = Patience()
    while not ann.link.lines[others[-1].peer].opened:
        assert not patience.is_over
        ann.turn()
        ann.link.send(others[-1].peer, frame())


def test_P8_strangers_and_former_members_are_not_heard(ends: list[End]) -> None:
    ann, bob, cid = ends
    ann.link.send("bob", frame())
    until(ends, lambda: bool(bob.got), "bob hears ann")
    bob.link.set_contacts([bob.contact, cid.contact])  # ann left the run

    def ann_is_counted() -> bool:
        ann.link.send("bob", frame())  # the first may leave over a connection that bob has just closed
        return bob.link.counts.verdicts.as_dict()["unauthorised"] >= 1

    until(ends, ann_is_counted, "ann is counted")
    assert len(bob.got) == 1
    assert not bob.link.send("ann", frame())


def test_P8_wrong_frames_end_in_their_counter(ends: list[End]) -> None:
    ann, bob, _ = ends
    good = frame()
    bad = [
        frame(run=b"another!"),
        Frame(dataclasses.replace(good.header, chunk=3), b"payloae"),  # one byte differs from the hash
        Frame(dataclasses.replace(good.header, chunk=4), b"payload, longer"),
    ]
    for each in [*bad, good]:
        ann.link.send("bob", each)
    # There are two connections between them, each with its own order.
    until(ends, lambda: bool(bob.got) and len(bob.spoiled) == len(bad), "all have arrived")
    counts = bob.link.counts.verdicts.as_dict()
    assert (counts["unauthorised"], counts["bad hash"], counts["malformed"]) == (1, 1, 1)
    assert [f for _, f in bob.got] == [good]
    told = {(sender, came.header.chunk if came.header else None) for sender, came in bob.spoiled}
    assert told == {("ann", None), ("ann", 3), ("ann", 4)}, "whoever asks again must know for what"


def test_P8_an_oversized_frame_is_cut_before_memory_is_taken(ends: list[End]) -> None:
    ann, bob, cid = ends
    ann.link.send("bob", frame(payload=bytes(50 * PAYLOAD_MAX)))
    cid.link.send("bob", frame(payload=b"meanwhile"))
    until(ends, lambda: bool(bob.got), "others are heard")
    assert [s for s, _ in bob.got] == ["cid"]


def test_P10_a_capped_upload_lets_a_frame_go_when_all_before_it_is_paid() -> None:
    now = [1000.0]
    ann = End("ann", settings=LinkSettings(clock=lambda: now[0], upload=Pacer(1000.0)))
    bob = End("bob")
    both = [ann, bob]
    for end in both:
        end.link.set_contacts([ann.contact, bob.contact])

    def paid_and_all_said() -> bool:
        now[0] += 100.0  # what greetings cost is paid
        return bool(ann.link.round_trips_s and bob.link.round_trips_s) and not ann.link.waiting_bytes()

    until(both, paid_and_all_said, "they know each other")
    now[0] += 10_000.0
    before = ann.link.counts.sent_bytes
    for number in range(3):
        ann.link.send("bob", frame(payload=bytes([number]) * 5000))
    assert ann.link.counts.sent_bytes - before == 5096, "one is let go, whatever its size; the others wait"
    for _ in range(20):
        ann.turn()
    assert ann.link.counts.sent_bytes - before == 5096 and 4.5 < ann.link.idle_s() <= 5.096
    now[0] += STALL_S + UNREACHED_AFTER_S
    ann.link.on_tick()
    assert ann.link.stalls == 0 and ann.link.unreached() == set(), "what a cap holds back is nobody's fault"
    until(both, lambda: len(bob.got) >= 2, "the second arrives once its time has come")
    now[0] += 10.0
    until(both, lambda: [len(f.payload) for _, f in bob.got].count(5000) == 3, "and the third")


def test_who_limits_the_download_is_reached_over_the_connections_of_others() -> None:
    """Nobody can dial ann: bob, whose download is limited, has nothing but what she opened."""
    ann, bob = End("ann", dialable=False), End("bob", settings=LinkSettings(download=Pacer(1e6)))
    for end in (ann, bob):
        end.link.set_contacts([ann.contact, bob.contact])
    for chunk in range(20):
        header = Header(Kind.CONTRIBUTION, RUN, round_no=1, chunk=chunk)
        ann.link.send("bob", with_payload(header, os.urandom(PAYLOAD_MAX)))
    until([ann, bob], lambda: len(bob.got) == 20, "bob has all of it")


@pytest.mark.skipif(sys.platform != "linux", reason="others count buffers otherwise")
def test_under_a_download_limit_buffers_hold_a_fifth_of_a_second_of_it() -> None:
    """Less, and a line with a long round trip stays below the limit; more, and it crosses the line unasked."""

    def buffer_bytes(limit: float | None) -> int:
        with opened(context, zmq.DEALER, bulk(PAYLOAD_MAX, limit)) as socket:
            return int(socket.getsockopt(zmq.RCVBUF))

    with zmq.Context() as context:
        found = [buffer_bytes(limit) for limit in (1e5, 1e6, 2.5e6, 6e6, 7e6, None)]
    assert found == [128 * 1024, 200_000, 500_000, 1_200_000, -1, -1]


def test_under_a_cap_every_line_has_its_turn() -> None:
    """One frame may leave at a time: it must not be the first line's for as long as that has one."""
    now = [100.0]
    ann = End("ann", settings=LinkSettings(upload=Pacer(1000), clock=lambda: now[0]))
    others = [End(name) for name in ("bob", "cyd", "dan")]
    both = [ann, *others]
    for end in both:
        end.link.set_contacts([each.contact for each in both])

    def greeted() -> bool:
        now[0] += 1.0
        return len(ann.link.round_trips_s) == 3

    until(both, greeted, "everybody is connected")
    for number in range(4):
        for name in ("bob", "cyd", "dan"):
            ann.link.send(name, frame(payload=bytes([number]) * 904))
    assert ann.link.peers_waiting() == 3
    before = [line.sent_bytes for line in ann.link.lines.values()]
    for _ in range(6):
        now[0] += 1.0
        ann.turn()
    sent = [line.sent_bytes - at for line, at in zip(ann.link.lines.values(), before, strict=True)]
    assert max(sent) - min(sent) <= 1200 and sum(sent) >= 4000, "a frame, and answers to greetings"


def test_the_other_sides_connection_helps_only_where_our_own_takes_nothing_for_a_while() -> None:
    """A frame that was given to the slower of two connections comes last."""
    now = [100.0]
    ann, bob = End("ann", settings=LinkSettings(clock=lambda: now[0])), End("bob")
    both = [ann, bob]
    for end in both:
        end.link.set_contacts([ann.contact, bob.contact])
    line = ann.link.lines["bob"]
    until(both, lambda: bool(line.routes) and line.opened[0].up, "both have dialled")

    still, number = Patience(), 0
    while not line.waits or number < 100:  # bob reads nothing: at last no connection takes another
        assert not still.is_over
        header = Header(Kind.CONTRIBUTION, RUN, round_no=1, chunk=number)
        ann.link.send("bob", with_payload(header, os.urandom(PAYLOAD_MAX)))
        ann.link.on_tick()
        number += 1
    assert line.sent_bytes > 0 and line.refused_since == now[0] and ann.link.peers_waiting() == 1
    now[0] += HELP_AFTER_S - 0.01
    waiting = len(line.waiting)
    ann.link.flush()
    own = line.sent_bytes
    now[0] += 0.02
    ann.link.flush()
    assert len(line.waiting) < waiting and line.sent_bytes >= own + PAYLOAD_MAX, "now the route takes some"
    until(both, lambda: not line.waits, "all of it leaves once bob reads")
    assert line.refused_since is None
    until(both, lambda: not ann.link.peers_waiting(), "nor does the kernel hold anything")


def test_P3_who_cannot_be_reached_is_named_after_a_while_and_only_if_something_waits() -> None:
    now = [0.0]
    ann, bob = End("ann", settings=LinkSettings(clock=lambda: now[0])), End("bob")
    bob.close()  # before ann dials: nobody is there, and no connection is half made
    ann.link.set_contacts([ann.contact, bob.contact])
    now[0] = 10.0
    ann.turn()
    assert ann.link.unreached() == set()
    ann.link.send("bob", frame())
    assert ann.link.unreached() == set()
    now[0] += UNREACHED_AFTER_S
    ann.turn()
    assert ann.link.unreached() == {"bob"}


@dataclass
class Told:
    """Stands in for the kernel's word on one connection."""

    crossed: TcpTraffic = NOTHING

    def of(self, descriptor: int) -> TcpTraffic:
        return self.crossed


def test_P3_what_nobody_acknowledges_shows_a_cut_line() -> None:
    """Connections over it stand for many seconds more."""
    one, other = Told(), Told()
    # No real sockets: only what the kernel tells is looked at.
    opened = [ZmqConnection(None, None, tcp=told, up=True) for told in (one, other)]  # type: ignore[arg-type]
    line = PeerConnections(Contact("bob", "bob", bytes(32), "127.0.0.1:9"), opened)

    def since(now: float, first: TcpTraffic, second: TcpTraffic) -> float | None:
        one.crossed, other.crossed = first, second
        for connection in opened:
            connection.listen(now)
        return line.unreached_since()

    flying = NOTHING._replace(sent=10, flying=3)
    assert since(0.0, NOTHING, NOTHING) is None, "nothing is on its way"
    assert since(0.5, flying, NOTHING) is None
    assert since(1.0, flying, NOTHING) is None, "the other connection is not known to hang"
    assert since(1.5, flying, flying) is None and since(2.0, flying, flying) == 2.0
    assert since(2.5, flying, flying) == 2.0
    assert since(3.0, flying, flying._replace(sent=11)) is None, "something arrived"
    assert since(3.5, flying, flying._replace(sent=11)) == 3.5
    assert since(4.0, NOTHING._replace(sent=13), flying._replace(sent=11)) is None
    assert since(4.5, flying, flying) is None and since(5.0, flying, flying) == 5.0
    assert since(9.0, flying, flying) is None, "we slept and heard nothing of what came"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what arrived of a frame")
@pytest.mark.parametrize("dialable", [True, False])
def test_the_bytes_of_a_large_frame_are_news_of_its_sender(dialable: bool) -> None:
    """Over whichever connection they come."""
    ann, bob = End("ann"), End("bob", dialable)
    both = [ann, bob]
    for end in both:
        end.link.set_contacts([ann.contact, bob.contact])
    until(both, lambda: bool(bob.link.round_trips_s), "they have greeted each other")
    bob.link.arriving()
    ann.link.send("bob", frame(payload=b"small"))
    until(both, lambda: len(bob.got) == 1, "a small frame")
    assert bob.link.arriving() == set(), "questions and answers are no news"
    ann.link.send("bob", frame(Kind.RESULT, payload=os.urandom(PAYLOAD_MAX)))
    # Whether the frame is whole by then is chance here; that it need not be is the kernel's count (below).
    until(both, lambda: bob.link.arriving() == {"ann"}, "news of a large frame")
    assert ann.link.arriving() == set()


def test_a_descriptor_that_another_peer_has_now_speaks_for_that_one() -> None:
    told = {3: NOTHING._replace(received=100), 4: NOTHING}

    class Kernel:
        def of(self, descriptor: int) -> TcpTraffic:
            return told.get(descriptor, NOTHING)

    incoming = Incoming(Kernel())
    incoming.came_over(3, "ann")
    incoming.came_over(4, "bob")  # nothing is known of it, as where the kernel tells nothing
    assert incoming.take_peers_heard() == set(), "from now on"
    told[3] = NOTHING._replace(received=100 + NEWS_BYTES - 1)
    assert incoming.take_peers_heard() == set()
    told[3] = NOTHING._replace(received=100 + NEWS_BYTES)
    assert incoming.take_peers_heard() == {"ann"} and incoming.take_peers_heard() == set()
    incoming.came_over(3, "cyd")
    assert incoming.take_peers_heard() == set()
    told[3] = NOTHING._replace(received=told[3].received + NEWS_BYTES)
    assert incoming.take_peers_heard() == {"cyd"}
    told[3] = NOTHING._replace(received=5)  # closed, and opened anew by nobody knows whom
    assert incoming.take_peers_heard() == set()
    told[3] = NOTHING._replace(received=9 * NEWS_BYTES)
    assert incoming.take_peers_heard() == set()


def test_what_is_asked_for_while_it_is_on_its_way_is_not_sent_twice() -> None:
    told = Told(TcpTraffic(700, 700, 0, 0))  # the handshake
    connection = ZmqConnection(None, None, tcp=told, up=True)  # type: ignore[arg-type]
    line = PeerConnections(Contact("bob", "bob", bytes(32), "127.0.0.1:9"), [connection])
    large, small = frame(payload=bytes(100_000)), frame(Kind.RESULT, payload=b"little")

    def is_put(asked: Frame) -> bool:
        line.put(asked)
        put = line.waits
        line.forget_rounds_before(99)
        return put

    connection.listen(0.0)
    for each in (large, small):
        connection.on_the_way.take(each.header.pack(), 96 + len(each.payload))
    assert not is_put(large), "the line is slow, and it will arrive"
    assert is_put(small), "a second copy does no harm"
    told.crossed = TcpTraffic(90_000, 700, 5_000, 3)
    connection.listen(0.1)
    assert not is_put(large)
    told.crossed = TcpTraffic(101_000, 700, 0, 0)
    assert is_put(large), "it arrived, and was not what it should be"


def test_what_encryption_adds_does_not_grow_for_as_long_as_a_connection_stands() -> None:
    """Listened to every 50 ms, as the agent does.  Else, after a day, no large frame counts as on its way."""
    told, now = Told(TcpTraffic(700, 700, 0, 0)), 0.0
    connection = ZmqConnection(None, None, tcp=told, up=True)  # type: ignore[arg-type]
    for number in range(50):
        connection.on_the_way.take(number.to_bytes(2), 1_000)
        now += 0.05
        connection.listen(now)
        told.crossed = told.crossed._replace(sent=told.crossed.sent + 1_077)
        for _ in range(5):
            now += 0.05
            connection.listen(now)
    large = frame(payload=bytes(100_000))
    connection.on_the_way.take(large.header.pack(), 100_096)
    told.crossed = told.crossed._replace(sent=told.crossed.sent + 99_000, flying=3)
    connection.listen(now + 0.05)
    assert connection.carries(large.header.pack()), "its last bytes are not there yet"


def test_what_libzmq_has_and_the_kernel_has_not_yet_is_on_its_way() -> None:
    told = Told(TcpTraffic(700, 700, 0, 0))
    connection = ZmqConnection(None, None, tcp=told, up=True)  # type: ignore[arg-type]
    for tick in range(10):
        connection.listen(tick * 0.05)  # it rests
    large = frame(payload=bytes(100_000)).header.pack()
    connection.on_the_way.take(large, 100_096)
    for at in (0.5, 0.55, 0.59):
        connection.listen(at)
        assert connection.carries(large), "libzmq's thread waits for a core"


def test_what_is_asked_for_while_it_is_on_its_way_ends_nothing(
    ends: list[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow line: nothing waits for the peer, and what it asks for again is under way."""
    ann, bob, _ = ends
    monkeypatch.setattr(ZmqConnection, "carries", lambda self, header: True)
    ann.link.send("bob", frame())  # its connection is being made: nothing is on its way over it yet
    assert ann.link.send("bob", frame())
    assert not ann.link.lines["bob"].waits
    monkeypatch.undo()
    ann.link.send("bob", frame(payload=b"later"))
    until(ends, lambda: bool(bob.got), "what is sent afterwards arrives")


def test_what_was_on_its_way_over_a_connection_that_broke_is_sent_again() -> None:
    way, header = OnTheWay(), frame().header.pack()
    way.take(header, 100_000)
    assert way.has(header, 0)
    way.forget()
    assert not way.has(header, 0)


@given(st.lists(st.tuples(st.integers(1, 300_000), st.integers(0, 400_000), st.booleans()), max_size=40))
def test_nothing_is_on_its_way_for_ever(turns: list[tuple[int, int, bool]]) -> None:
    """Whatever encryption adds: when all is acknowledged, nothing is held back."""
    way, taken, acknowledged = OnTheWay(), 0, 700
    for number, (size, more, looks) in enumerate(turns):
        way.take(number.to_bytes(2), size)
        taken += size + size // 3000 + 33
        acknowledged = min(700 + taken, acknowledged + more)
        if looks:
            way.on_tick(acknowledged, acknowledged == 700 + taken)
    assert not any(way.has(number.to_bytes(2), 700 + taken) for number in range(len(turns)))


@pytest.mark.slow
def test_P3_a_connection_that_breaks_while_the_queue_is_full_kills_nobody() -> None:
    """libzmq 4.3.5 aborts here when ZMTP heartbeats are on.  In a process of its own, since it would take us along."""
    script = f"""
import importlib.util, time
spec = importlib.util.spec_from_file_location("links", {__file__!r})
links = importlib.util.module_from_spec(spec)
import sys; sys.modules["links"] = links
spec.loader.exec_module(links)
ann, bob = links.End("ann"), links.End("bob")
for end in (ann, bob):
    end.link.set_contacts([ann.contact, bob.contact])
bob.link.send("ann", links.frame())
links.until([ann, bob], lambda: bool(ann.got), "connected")
for _ in range(200):
    ann.link.send("bob", links.frame(payload=bytes(50_000)))
for _ in range(20):
    ann.turn(); bob.link.answer_handshakes(); time.sleep(0.01)  # bob does not read: its queue fills up
ann.close()
time.sleep(4)  # two heartbeats' time, for the library's own threads
print("alive")
bob.close()
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * PATIENCE_S, env=environ
    )
    assert done.returncode == 0 and done.stdout == "alive\n", done.stderr
