"""A peer's ports: who may come in, how many connections may stand, what they cost.  Over real sockets on loopback."""

from __future__ import annotations

import itertools
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from farflung.collectives.link import lean as lean_module
from farflung.collectives.link import port, tcp_counts
from farflung.collectives.link.peer_connections import ZmqConnection
from farflung.collectives.link.port import LINES_OF_CONTACT, SILENT_MOST, SILENT_OF_NETWORK
from farflung.collectives.link.tcp_counts import LOOK_EVERY_S, TcpCounts
from farflung.collectives.link.zmq_link import LinkSettings, ZmqLink
from farflung.coordinator.door.dialer import Dialer, Target
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.process.sockets import CLIENT, Keys, Socket, curve_client, curve_raw, opened
from farflung.protocol.round_words import Contact
from rig.waiting import eventually

TAG = b"run-tag!"
HELLO = (with_payload(Header(Kind.CONTRIBUTION, TAG), b"x").header.pack(), b"x")


_open: list[ZmqLink] = []


@pytest.fixture(autouse=True)
def _all_closed_at_the_end() -> Iterator[None]:
    """Also where a test failed: the garbage collector would wait for a context whose sockets are open, for ever."""
    yield
    while _open:
        _open.pop().close()


class End:
    def __init__(self, name: str, visitor: bytes = b"", lean: bool = False) -> None:
        self.keys: Keys = zmq.curve_keypair()
        self.link = ZmqLink(self.keys, LinkSettings(visitor=visitor, lean=lean))
        self.link.expect(name, TAG, 100_000)
        self.port = self.link.listen("127.0.0.1", 0)
        self.contact = Contact(name, name, curve_raw(self.keys[0]), f"127.0.0.1:{self.port}")
        self.got: list[tuple[str, bytes]] = []
        _open.append(self.link)

    def turn(self) -> None:
        for sender, came in self.link.receive():
            assert isinstance(came, Frame)
            self.got.append((sender, bytes(came.payload)))
        self.link.flush()
        self.link.on_tick()

    @property
    def standing(self) -> int:
        return len(self.link._port.lines)


@pytest.fixture
def bob() -> End:
    return End("bob")


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    made: zmq.Context[Socket] = zmq.Context()
    made.set(zmq.MAX_SOCKETS, 4096)
    yield made
    made.destroy(linger=0)


def knocking(context: zmq.Context[Socket], keys: Keys, at: End, *said: bytes) -> Socket:
    made = opened(context, zmq.DEALER, CLIENT, curve_client(keys, at.contact.key))
    made.setsockopt(zmq.RECONNECT_IVL, -1)
    made.connect(f"tcp://{at.contact.address}")
    if said:
        made.send_multipart(said)
    return made


def strangers(number: int, to: int, host: str = "127.0.0.1") -> list[socket.socket]:
    """That say nothing."""
    made = [socket.socket() for _ in range(number)]
    for each in made:
        each.setblocking(False)
        each.bind((host, 0))
        each.connect_ex(("127.0.0.1", to))
    return made


def message(text: bytes) -> Frame:
    return with_payload(Header(Kind.CONTRIBUTION, TAG, round_no=1, chunk=2), text)


def turns(*ends: End) -> None:
    for end in ends:
        end.turn()


# ---- who may come in -------------------------------------------------------------------------------------------


def test_P8_a_key_that_was_not_named_does_not_get_through_the_handshake(
    bob: End, context: zmq.Context[Socket]
) -> None:
    eve: Keys = zmq.curve_keypair()
    made = opened(context, zmq.DEALER, CLIENT, curve_client(eve, bob.contact.key))
    monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    made.connect(f"tcp://{bob.contact.address}")

    def told() -> int:
        bob.turn()
        return int(parse_monitor_message(monitor.recv_multipart())["event"]) if monitor.poll(0) else 0

    assert eventually(told, "an answer") == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert bob.link.counts.verdicts.as_dict()["unauthorised"] == 1
    made.disable_monitor()
    monitor.close(0)


def test_the_coordinator_dials_a_newcomer_back_with_its_own_key(context: zmq.Context[Socket]) -> None:
    keys: Keys = zmq.curve_keypair()
    bob = End("bob", visitor=curve_raw(keys[0]))
    dialler = Dialer(context, keys)
    dialler.dial(Target("bob", b"", bob.contact.address, bob.contact.key))

    def reached() -> list[bool]:
        bob.turn()
        return [verdict for _, verdict in dialler.verdicts()]

    assert eventually(reached, "a verdict") == [True]
    dialler.close()


def test_who_dials_before_it_was_introduced_is_heard_a_moment_after(bob: End) -> None:
    """The coordinator tells a newcomer of the others first."""
    ann = End("ann")
    ann.link.set_contacts([bob.contact])
    ann.link.send("bob", message(b"early"))

    def refused() -> bool:
        turns(ann, bob)
        return bob.link.counts.verdicts.as_dict()["unauthorised"] > 0

    eventually(refused, "bob does not know ann")
    bob.link.set_contacts([Contact("ann", "ann", ann.contact.key, "")])  # which he can't dial
    eventually(lambda: (turns(ann, bob), bob.got)[1], "bob hears ann")
    assert bob.got == [("ann", b"early")]


def test_who_is_not_let_in_dials_ever_more_rarely(bob: End, monkeypatch: pytest.MonkeyPatch) -> None:
    dials: list[float] = []
    now = [1000.0]
    ann = ZmqLink(zmq.curve_keypair(), LinkSettings(clock=lambda: now[0]))
    _open.append(ann)
    ann.expect("ann", TAG, 1000)
    watched = ZmqConnection.watched

    def counted(*args: object) -> ZmqConnection:
        dials.append(now[0])
        return watched(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ZmqConnection, "watched", counted)
    ann.set_contacts([bob.contact])
    for refusals in range(1, 5):

        def refused(refusals: int = refusals) -> bool:
            bob.turn()
            ann.on_tick()
            return (
                bob.link.counts.verdicts.as_dict()["unauthorised"] == refusals and not ann.lines["bob"].opened
            )

        eventually(refused, "refused")
        assert len(dials) == refusals
        now[0] = ann.lines["bob"].refused.again_at
        ann.on_tick()
    assert [round(b - a, 2) for a, b in itertools.pairwise(dials)] == [0.25, 0.5, 1.0, 2.0]


def test_P8_of_who_is_no_contact_any_more_no_connection_stands_whether_it_spoke_or_not(
    bob: End, context: zmq.Context[Socket]
) -> None:
    eve, ann = End("eve"), End("ann")
    for end in (ann, bob):
        end.link.set_contacts([ann.contact, bob.contact, eve.contact])
    lines = [knocking(context, eve.keys, bob, *HELLO) for _ in range(5)]
    silent = knocking(context, eve.keys, bob)
    events = silent.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    eventually(lambda: (turns(ann, bob), bob.standing >= 7)[1], "all stand")
    bob.link.set_contacts([ann.contact])
    eventually(lambda: (turns(ann, bob), bob.standing <= 2 and events.poll(0))[1], "hers have ended")
    ann.link.send("bob", message(b"ann stays"))
    eventually(lambda: (turns(ann, bob), bob.got)[1], "ann is heard")
    silent.disable_monitor()
    events.close(0)
    del lines


# ---- how many --------------------------------------------------------------------------------------------------


def test_P8_one_contact_has_so_many_connections_and_the_newest_are_those(
    bob: End, context: zmq.Context[Socket]
) -> None:
    eve: Keys = zmq.curve_keypair()
    bob.link.set_contacts([Contact("eve", "eve", curve_raw(eve[0]), "")])
    lines = []
    for _ in range(3 * LINES_OF_CONTACT):
        lines.append(knocking(context, eve, bob, *HELLO))
        bob.turn()

    def few() -> bool:
        bob.turn()
        heard = bob.link.counts.arrived_frames
        return heard == len(lines) and len(bob.link._port.lines._open) == LINES_OF_CONTACT

    eventually(few, "the newest stand")
    assert len(bob.link.lines["eve"].routes) <= LINES_OF_CONTACT
    assert len(bob.link._tcp._open) == LINES_OF_CONTACT


@pytest.mark.parametrize("lean", [False, True])
def test_P8_strangers_of_one_network_push_out_each_other_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, lean: bool
) -> None:
    monkeypatch.setattr(lean_module, "network_of", str)
    monkeypatch.setattr(port, "network_at", host_at)
    bob = End("bob", lean=True)
    there = bob.link._lean.port if lean else bob.port
    [honest] = strangers(1, there, "127.0.0.2")
    eventually(lambda: (bob.turn(), bob.standing == 1)[1], "it stands")
    crowd = strangers(2 * SILENT_OF_NETWORK, there)
    ended = []

    def pushed_out() -> bool:
        bob.turn()
        ended.extend(each for each in crowd if each not in ended and has_ended(each))
        return len(ended) == SILENT_OF_NETWORK

    eventually(pushed_out, "the oldest of the crowd are cut")
    assert ended == crowd[:SILENT_OF_NETWORK] and not has_ended(honest)
    assert bob.standing == 1 + SILENT_OF_NETWORK
    for each in (honest, *crowd):
        each.close()


def host_at(line: int) -> str:
    with socket.socket(fileno=line) as lent:
        try:
            return str(lent.getpeername()[0]).removeprefix("::ffff:")
        finally:
            lent.detach()


def has_ended(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        while came := line.recv(1000):
            assert came[:1] == b"\xff", "the greeting of ZeroMQ"
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_P8_strangers_are_few_at_both_ports_together() -> None:
    bob = End("bob", lean=True)
    crowd = strangers(200, bob.port) + strangers(200, bob.link._lean.port)
    eventually(lambda: (bob.turn(), len(bob.link._port.lines._open) == SILENT_MOST)[1], "few are left")
    for each in crowd:
        each.close()
    eventually(lambda: (bob.turn(), bob.standing == 0)[1], "all have gone")


VICTIM = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
import zmq
from farflung.collectives.link.zmq_link import LinkSettings, ZmqLink
link = ZmqLink(zmq.curve_keypair(), LinkSettings(lean=True))
link.expect("bob", bytes(8), 1000)
print(link.listen("127.0.0.1", 0), link._lean.port, flush=True)
asked, stood = 0, False
def look():
    for _ in link.receive():
        pass
    link.on_tick()
while asked < 20:
    poller = zmq.Poller()
    for each, events in link.sockets():
        poller.register(each, events)
    poller.poll(10)
    look()
    stood = stood or len(link._port.lines._open) > 40
    if stood:
        held = [open("/dev/null") for _ in range(60)]
        asked += 1
print("open() works", flush=True)
sys.stdin.read()  # until all strangers have dialled
"""


def test_P8_strangers_leave_a_peer_its_descriptors() -> None:
    """Of a process that may have 400, where each that stands may take two."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard == resource.RLIM_INFINITY or hard >= 1024
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        ports = [int(each) for each in victim.stdout.readline().split()]
        held = [
            socket.create_connection(("127.0.0.1", each), timeout=60) for each in ports for _ in range(100)
        ]
        assert victim.communicate(timeout=60)[0] == "open() works\n"
        for one in held:
            one.close()
    assert victim.returncode == 0


# ---- what they cost ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_P8_totals_cost_the_same_however_many_connections_stand(
    bob: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []
    read = tcp_counts._read
    monkeypatch.setattr(tcp_counts, "_read", lambda line: (reads.append(line), read(line))[1])
    crowd = strangers(50, bob.port)
    eventually(lambda: (bob.turn(), bob.standing == 50)[1], "all stand")
    for _ in range(100):
        bob.turn()
        bob.link.moved(), bob.link.waiting_bytes()
    assert not reads, "nobody's bytes are counted before it has shown whose it is"
    for each in crowd:
        each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_totals_are_those_of_the_kernel_and_read_now_and_then() -> None:
    now, counts = [0.0], TcpCounts(lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as door:
        pairs = [(socket.create_connection(door.getsockname()), door.accept()[0]) for _ in range(3)]
        names = [counts.watch(mine) for mine, _ in pairs]
        begun = counts.totals.sent  # with what opens a connection
        for mine, other in pairs:
            mine.sendall(b"x" * 1000)
            other.sendall(b"y" * 10)
        eventually(lambda: sum(counts.of(name).sent for name in names) == begun + 3000, "acknowledged")
        assert counts.totals[:2] == (begun + 3000, 30)
        pairs[0][0].sendall(b"x" * 500)
        eventually(lambda: tcp_counts._read(counts._open[names[0]]).sent == begun // 3 + 1500, "acknowledged")  # type: ignore[union-attr]
        assert counts.totals.sent == begun + 3000, "not read again so soon"
        now[0] += LOOK_EVERY_S
        assert counts.totals.sent == begun + 3500
        counts.forget(names[0])
        counts.forget(names[0])
        assert counts.totals[:2] == (begun + 3500, 30) and counts.of(names[0]) == tcp_counts.NOTHING
        counts.close()
        assert counts.totals[:2] == (begun + 3500, 30)
        for pair in pairs:
            for each in pair:
                each.close()
