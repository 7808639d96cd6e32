"""Two links of which neither can dial the other connect at one instant: what each side does, without a router.

On one machine without routers two first packets never cross, so one side of each meeting listens at its port instead;
past real routers they meet in tests/lab/test_routers.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq

from farflung.collectives.link.link import Appointment
from farflung.collectives.link.peer_connections import ConnectionKind
from farflung.collectives.link.undialled import LATE_S, RETIRES_S, SHIFTS_S
from farflung.protocol.mode_words import MEET_EVERY_S, MEET_TRIES
from farflung.protocol.process.sockets import BULK_CLIENT, Keys, curve_client, curve_raw, curve_server, opened
from rig.link_ends import End, frame, until, ways
from rig.relay_rig import RelayRig
from rig.waiting import eventually

EVERY = "0.0.0.0"


@dataclass
class Other:
    """Ann's contact: it listens where she expects it to connect to her."""

    ann: End
    keys: Keys
    port: int = 0
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.key = curve_raw(self.keys[0])
        serves = self.key < self.ann.key
        curve = curve_server(self.keys[1]) if serves else curve_client(self.keys, self.ann.key)
        self.socket = opened(
            self.context, zmq.DEALER, BULK_CLIENT, {zmq.LINGER: 0, zmq.IPV6: int(":" in self.host)}, curve
        )
        self.socket.bind(f"tcp://{self.host}:{self.port or '*'}")
        self.port = int(bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])  # type: ignore[arg-type]

    def echo(self) -> None:
        """Sends back what has come: Ann's greeting too, which may come before or after her frame."""
        while self.socket.poll(0):
            self.socket.send_multipart(self.socket.recv_multipart())

    def close(self) -> None:
        self.context.destroy(linger=0)


def keys_beside(key: bytes, lower: bool) -> Keys:
    while (curve_raw((keys := zmq.curve_keypair())[0]) < key) != lower:
        pass
    return keys


@pytest.fixture
def ann() -> Iterator[End]:
    found = End("ann")
    found.link.meeting_port(EVERY)
    try:
        yield found
    finally:
        found.link.close()


def meet(ann: End, other: Other, in_s: float = 0.1, key: bytes = b"") -> None:
    bob = ann.contact.__class__("bob", "bob", key or other.key, "")
    ann.link.set_contacts([ann.contact, bob])
    at = ann.link.settings.clock() + in_s
    ann.link.set_appointments({"bob": Appointment(f"{other.host}:{other.port}", at)})


@pytest.mark.parametrize("lower", [True, False], ids=["the other serves", "I serve"])
def test_frames_pass_both_ways_from_the_one_port(ann: End, lower: bool) -> None:
    other = Other(ann, keys_beside(ann.key, lower))
    try:
        meet(ann, other)
        assert ann.link.send("bob", frame(0, b"here"))
        until((ann,), lambda: ann.link.punched() == {"bob"}, "it stands")
        until((ann,), lambda: (other.echo(), ann.got)[1], "the frame has come, and back")
        [connection] = ann.link.lines["bob"].opened
        with socket.socket(fileno=os.dup(connection.descriptor)) as line:
            assert line.getsockname()[1] == ann.link.meeting_port(EVERY)
            assert line.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)[:1] == b"\1", "nothing of it stays"
        other.close()
        until((ann,), lambda: not ann.link.punched(), "its end is seen")
    finally:
        other.close()


@pytest.mark.parametrize("lower", [True, False], ids=["the other serves", "I serve"])
def test_two_meet_over_IPv6_as_well(lower: bool) -> None:
    ann = End("ann")
    try:
        if not ann.link.meeting_port("[::]"):
            pytest.skip("NOT RUN: this machine has no IPv6")
        try:
            other = Other(ann, keys_beside(ann.key, lower), host="[::1]")
        except zmq.ZMQError:
            pytest.skip("NOT RUN: this machine has no IPv6 loopback")
        try:
            meet(ann, other)
            assert ann.link.send("bob", frame(0, b"here"))
            until((ann,), lambda: ann.link.punched() == {"bob"}, "it stands")
            until((ann,), lambda: (other.echo(), ann.got)[1], "the frame has come, and back")
            [connection] = ann.link.lines["bob"].opened
            with socket.socket(fileno=os.dup(connection.descriptor)) as line:
                assert line.family == socket.AF_INET6
                assert line.getsockname()[1] == ann.link.meeting_port("[::]")
        finally:
            other.close()
    finally:
        ann.link.close()


def test_whoever_else_answers_there_gets_nothing(ann: End) -> None:
    eve = Other(ann, keys_beside(ann.key, True))
    try:
        meet(ann, eve, key=curve_raw(zmq.curve_keypair()[0]))
        ann.link.send("bob", frame(0, b"secret"))
        until((ann,), lambda: ann.link.lines["bob"].tries == MEET_TRIES, "all is tried")
        assert not eve.socket.poll(0) and not ann.link.punched() and len(ann.link.lines["bob"].waiting) == 1
    finally:
        eve.close()


def test_tries_are_a_second_apart_and_then_over(ann: End) -> None:
    """And not one of them before its instant."""
    now = [1000.0]
    ann.link.settings.clock = ann.link._clock = ann.link._undialled.clock = lambda: now[0]
    nobody = socket.create_server(("127.0.0.1", 0))
    port = nobody.getsockname()[1]
    nobody.close()
    bob = ann.contact.__class__("bob", "bob", bytes(32), "")
    ann.link.set_contacts([ann.contact, bob])
    told = {"bob": Appointment(f"127.0.0.1:{port}", 1000.5)}
    ann.link.set_appointments(told)
    line = ann.link.lines["bob"]
    assert ann.link.idle_s() == pytest.approx(0.5)
    for late_s, tries in ((0.0, 0), (0.49, 0), (0.5, 1), (1.49, 1), (1.5, 2), (2.5, 3), (3.5, 3), (9.0, 3)):
        now[0] = 1000.0 + late_s
        ann.turn()
        ann.link.set_appointments(told)  # said again: no news
        assert line.tries == tries, late_s
        eventually(lambda: (ann.turn(), not line.over(ConnectionKind.PUNCHED))[1], "refused")
    assert ann.link.idle_s() == 60.0
    ann.link.set_appointments({"bob": told["bob"]._replace(at=1010.0)})
    now[0] = 1010.0 + MEET_EVERY_S + LATE_S + 0.01
    ann.turn()
    assert line.tries == 2 and not line.over(ConnectionKind.PUNCHED), (
        "whoever is late waits for the next instant"
    )


@pytest.mark.parametrize(("theirs", "shifts_s"), [(bytes(32), (0.0, 0.0, 0.0)), (b"\xff" * 32, SHIFTS_S)])
def test_one_of_both_shifts_its_later_tries(ann: End, theirs: bytes, shifts_s: tuple[float, ...]) -> None:
    """Clocks that differ by more than the way takes miss each other in the first try, and not in all of them."""
    assert len(SHIFTS_S) == MEET_TRIES and len(set(SHIFTS_S)) == MEET_TRIES
    ann.link.set_contacts([ann.contact, ann.contact.__class__("bob", "bob", theirs, "")])
    line = ann.link.lines["bob"]
    line.appointment = Appointment("127.0.0.1:4000", 1000.0)
    for number, shift_s in enumerate(shifts_s):
        due = 1000.0 + number * MEET_EVERY_S + shift_s
        assert ann.link._undialled._next_at(line, due - 0.001) == pytest.approx(due)
        line.tries += 1
    assert ann.link._undialled._next_at(line, 1002.9) is None


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:80", "127.0.0.1:70000", "localhost:4000", "nonsense", "[::1]:4000", "1.2.3.4", ":5000"],
)
def test_no_other_address_is_taken_from_anybody(ann: End, endpoint: str) -> None:
    bob = ann.contact.__class__("bob", "bob", bytes(32), "")
    ann.link.set_contacts([ann.contact, bob])
    ann.link.set_appointments(
        {"bob": Appointment(endpoint, 0.0), "stranger": Appointment("1.2.3.4:5000", 0.0)}
    )
    assert ann.link.lines["bob"].appointment is None


def test_a_relayed_pair_changes_over_when_the_ticket_is_told_no_more_and_nothing_is_lost(ann: End) -> None:
    bob = End("bob")
    ends = (ann, bob)
    try:
        with RelayRig() as rig:
            rig.want((ann.key, bob.key))
            for mine, theirs, way in zip(ends, reversed(ends), ways(rig, ends), strict=True):
                mine.link.set_contacts([ann.contact, bob.contact])
                mine.link.set_ways({theirs.name: way})
            ann.link.send("bob", frame(0, b"over the relay"))
            until(ends, lambda: bob.got, "they meet there")
            listens_instead(bob)
            at = ann.link.settings.clock() + 0.2
            for mine, theirs in ((ann, bob), (bob, ann)):
                port = theirs.link.meeting_port(EVERY)
                mine.link.set_appointments({theirs.name: Appointment(f"127.0.0.1:{port}", at)})
            until(ends, lambda: ann.link.punched() and bob.link.punched(), "they met")
            before = rig.moved_bytes
            for chunk in range(1, 5):
                ann.link.send("bob", frame(chunk, os.urandom(100_000)))
            until(ends, lambda: len(bob.got) == 5, "frames have come")
            until(ends, lambda: rig.moved_bytes > before + 400_000, "over the relay: that is the way told")
            before = rig.moved_bytes
            bob.link.send("ann", frame(7, os.urandom(200_000)))  # on its way when Ann hears the news
            ann.link.set_ways({})
            for chunk in range(5, 9):
                ann.link.send("bob", frame(chunk, os.urandom(100_000)))
            until(ends, lambda: len(bob.got) == 9 and ann.got, "nothing is lost, either way")
            assert rig.moved_bytes - before < 400_000, "what leaves now goes past the relay"
            assert ann.link.lines["bob"].relay_way is not None
            ann.link._undialled.clock = lambda: at + 3600 + RETIRES_S
            until((ann,), lambda: ann.link.lines["bob"].relay_way is None, "after a while it is left")
            assert ann.link.punched()
    finally:
        bob.link.close()


def listens_instead(end: End) -> None:
    """At its port, at the instant, instead of connecting."""
    tries = end.link._undialled

    def listen(line, endpoint, now):  # type: ignore[no-untyped-def]
        connection = tries._connection(line, {}, ConnectionKind.PUNCHED)
        line.tries, line.try_until = MEET_TRIES, now + 60.0
        connection.socket.bind(f"tcp://127.0.0.1:{tries._port}")
        line.opened.append(connection)

    tries._try = listen  # type: ignore[method-assign]


def test_a_port_of_another_family_is_none(ann: End) -> None:
    assert ann.link.meeting_port(EVERY) == ann.link.meeting_port(EVERY) > 1024
    assert ann.link.meeting_port("[::]") == 0
