"""The relay over real sockets: what passes, and what strangers and hostile guests get."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from farflung.coordinator.relay.socks import NOT_ALLOWED
from farflung.coordinator.relay.switchboard import GUEST_PATIENCE_S
from rig.in_thread import InThread
from rig.relay_rig import GREETING, JOINED, RelayRig
from rig.waiting import eventually

ANN, BOB, CYD, EVE = (name * 32 for name in (b"a", b"b", b"c", b"e"))


@pytest.fixture
def rig() -> Iterator[RelayRig]:
    with RelayRig(spawn=InThread) as found:
        found.want((ANN, BOB), (ANN, CYD))
        yield found


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def read_all(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        came = connection.recv(min(1 << 20, count - len(found)))
        assert came
        found += came
    return bytes(found)


def test_bytes_pass_unchanged_both_ways_at_once(rig: RelayRig) -> None:
    ann, bob = rig.joined(ANN, BOB)
    there, back = os.urandom(8 << 20), os.urandom(8 << 20)
    senders = [
        threading.Thread(target=each.sendall, args=(data,)) for each, data in ((ann, there), (bob, back))
    ]
    got: dict[str, bytes] = {}
    reader = threading.Thread(target=lambda: got.update(bob=read_all(bob, len(there))))
    for each in (*senders, reader):
        each.start()
    assert read_all(ann, len(back)) == back
    for each in (*senders, reader):
        each.join()
    assert got["bob"] == there
    eventually(lambda: rig.moved_bytes == len(there) + len(back), "each byte is counted once")
    assert rig.said[-1].pairs == 1
    bob.close()
    assert hung_up(ann), "half a pair is of no use"


@pytest.mark.parametrize("kind", ["made up", "another run's", "expired", "unwanted"])
def test_it_is_no_open_proxy(rig: RelayRig, kind: str) -> None:
    if kind == "made up":
        name = "localhost"
    elif kind == "another run's":
        with RelayRig(spawn=InThread) as other:
            name = other.ticket(ANN, BOB)
    else:
        name = rig.ticket(ANN, BOB, lasts_s=-2.0) if kind == "expired" else rig.ticket(ANN, EVE)
    stranger = rig.guest(name)
    assert read_all(stranger, len(NOT_ALLOWED)) == NOT_ALLOWED and hung_up(stranger)
    eventually(lambda: rig.refused == 1, "it is counted")


def test_a_ticket_that_was_replaced_by_a_newer_one_opens_nothing(rig: RelayRig) -> None:
    old = rig.ticket(ANN, BOB, lasts_s=100.0)
    ann, bob = rig.joined(ANN, BOB)
    thief = rig.guest(old)
    assert read_all(thief, len(NOT_ALLOWED)) == NOT_ALLOWED
    ann.sendall(b"still here")
    assert read_all(bob, 10) == b"still here"


def test_one_ticket_is_one_side_and_cannot_be_joined_to_itself(rig: RelayRig) -> None:
    name = rig.ticket(ANN, BOB)
    one, other = rig.guest(name), rig.guest(name)
    assert read_all(other, len(NOT_ALLOWED)) == NOT_ALLOWED, "not within a second"
    bob = rig.guest(rig.ticket(BOB, ANN))
    assert read_all(bob, len(JOINED)) == JOINED == read_all(one, len(JOINED))


def test_who_says_nothing_or_nothing_sensible_is_hung_up_on(rig: RelayRig) -> None:
    silent = socket.create_connection(("127.0.0.1", rig.port), 30.0)
    half = socket.create_connection(("127.0.0.1", rig.port), 30.0)
    half.sendall(GREETING[:2])
    browser = socket.create_connection(("127.0.0.1", rig.port), 30.0)
    browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert hung_up(browser)
    begun = time.monotonic()
    assert hung_up(silent) and hung_up(half)
    assert time.monotonic() - begun > GUEST_PATIENCE_S / 2


def test_who_waits_must_not_speak(rig: RelayRig) -> None:
    ann = rig.guest(rig.ticket(ANN, BOB))
    ann.sendall(b"to whom?")
    assert hung_up(ann)


def test_a_reader_that_takes_nothing_holds_up_its_own_pair_alone_and_in_few_bytes(rig: RelayRig) -> None:
    ann, bob = rig.joined(ANN, BOB)
    other, cyd = rig.joined(ANN, CYD)
    ann.setblocking(False)
    sent = 0
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 1.0:
        try:
            sent += ann.send(bytes(1 << 16))
            quiet_since = time.monotonic()
        except BlockingIOError:
            time.sleep(0.01)
    assert sent < 40 << 20, "the rest waits at its sender"
    data = os.urandom(4 << 20)
    sender = threading.Thread(target=other.sendall, args=(data,))
    sender.start()
    assert read_all(cyd, len(data)) == data
    sender.join()
    assert len(read_all(bob, sent)) == sent, "nothing was lost meanwhile"


def test_a_guest_that_breaks_off_ends_its_pair_though_the_other_side_reads_nothing() -> None:
    with RelayRig() as rig:
        rig.want((ANN, BOB))
        ann, bob = rig.joined(ANN, BOB)
        ann.setblocking(False)
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 0.5:
            try:
                ann.send(bytes(1 << 16))
                quiet_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        ann.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        ann.close()  # with a reset
        eventually(lambda: rig.said and rig.said[-1].pairs == 0, "the pair is over")
        bob.close()


def test_those_that_are_wanted_no_more_are_hung_up_on(rig: RelayRig) -> None:
    ann, bob = rig.joined(ANN, BOB)
    other, cyd = rig.joined(ANN, CYD)
    rig.want((ANN, CYD))
    assert hung_up(ann) and hung_up(bob)
    other.sendall(b"on")
    assert read_all(cyd, 2) == b"on"


def test_killed_it_comes_back_on_the_same_port_and_knows_who_may_meet() -> None:
    with RelayRig() as rig:
        rig.want((ANN, BOB))
        ann, _ = rig.joined(ANN, BOB)
        port, pid = rig.port, rig.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert hung_up(ann)
        eventually(lambda: rig.process.starts == 2 and rig.process.port == port, "it listens again")
        eventually(lambda: len(rig.notes) == 2, "people are told of both")
        assert "killed by SIGKILL" in rig.notes[0] and f"open again on port {port}" in rig.notes[1]
        ann, bob = rig.joined(ANN, BOB)
        ann.sendall(b"again")
        assert read_all(bob, 5) == b"again"


def test_where_it_cannot_listen_people_are_told_and_nothing_else_happens() -> None:
    with RelayRig() as rig:
        other = RelayRig()
        other.process.begin = type(other.process.begin)(
            run_id=bytes(16),
            incarnation=1,
            public=bytes(32),
            host="127.0.0.1",
            port=rig.port,
            bytes_per_s=1e6,
        )
        try:
            eventually(
                lambda: list(other.process.receive(time.monotonic())) or other.notes, "it says why not"
            )
            assert "cannot listen" in other.notes[0] and other.process.port is None
            assert "cannot listen" in other.process.why_not
        finally:
            other.process.close()


def test_whoever_asks_where_it_is_is_told_and_let_go() -> None:
    with RelayRig() as rig:
        asking = rig.guest("where")
        mine = asking.getsockname()
        told = read_all(asking, 10)
        assert told[:4] == b"\x05\x02\x00\x01" and hung_up(asking)
        assert (socket.inet_ntoa(told[4:8]), int.from_bytes(told[8:], "big")) == mine
        assert not rig.refused, "that is no attempt without a ticket"
