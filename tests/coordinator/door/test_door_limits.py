"""What strangers may say and send at the front door, and the operator on its socket: each limit is gone over here."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from farflung.coordinator.door import front_door
from farflung.coordinator.door.front_door import BURST_S, BYTES_BURST, HELLOS_AT_ONCE, STRIKES, FrontDoor
from farflung.coordinator.door.front_door_process import BYTES_PER_S, FRAMES_PER_S, TO_DOOR, DoorSettings
from farflung.coordinator.door.hello_check import (
    CHALLENGES_KEPT,
    CHALLENGES_PER_CALLER,
    DoorFacts,
    Doorkeeper,
    HelloPassed,
)
from farflung.coordinator.door.listener import Arrival
from farflung.coordinator.operator_socket import LINE_BYTES, SOCKET_NAME, OperatorSocket
from farflung.peer.identity import Identity
from farflung.peer.machine.handshake import Handshake, Offer, me_of
from farflung.protocol import messages
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Challenge, Hello, Knock, Message, Refuse, Reply
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.process.child import Channel, pair
from farflung.protocol.run_terms import Attached, Known

KNOCK = messages.encode(Knock(protocol=PROTOCOL_VERSION, run="demo"))
MODEL = ModelSchema((), 4, 1, 1, bytes(32))


class Door(FrontDoor):
    """With what it says in a list instead of on the wire."""

    said: list[Message]

    def _say(self, routing_id: bytes, message: Message) -> None:
        self.said.append(message)

    def comes(
        self, payload: bytes, now: float = 0.0, network: str = "192.0.2.7", key: bytes = b"k" * 32
    ) -> None:
        self._on_frame(Arrival(b"r", key, 99, payload, network), now)

    def refusals(self) -> list[str]:
        return [each.code for each in self.said if isinstance(each, Refuse)]


@pytest.fixture
def door() -> Iterator[Door]:
    ours, theirs = pair()
    _, secret = zmq.curve_keypair()
    begin = DoorSettings(
        name="demo",
        run_id=bytes(16),
        manifest=Manifest().canonical(),
        secret=secret,
        host="127.0.0.1",
        port=0,
    )
    opened = Door(begin, Channel(ours, TO_DOOR))
    opened.said = []
    yield opened
    opened.close()
    ours.close()
    theirs.close()


def a_hello(door: Door) -> Hello:
    doorway = Handshake(me_of(Identity.generate(), b"k" * 32, bytes(16)), "demo")
    doorway.on_timer(0.0)
    challenge = door.said[-1]
    assert isinstance(challenge, Challenge) and doorway.on_challenge(challenge)
    known = Known(Manifest.from_canonical(challenge.manifest), challenge.run_id)
    return doorway.greet(Offer(Attached(known, MODEL), ""), -1, b"", 0.0)


def test_a_network_says_only_so_much_and_hears_once_that_it_is_too_much(door: Door) -> None:
    most = round(FRAMES_PER_S * BURST_S)
    for _ in range(most + 50):
        door.comes(KNOCK)
    assert len([each for each in door.said if isinstance(each, Challenge)]) == most
    assert door.refusals() == ["busy"]
    door.comes(KNOCK, network="198.51.100.1")
    assert isinstance(door.said[-1], Challenge), "other networks are heard"
    door.comes(KNOCK, now=1.0)
    assert isinstance(door.said[-1], Challenge), "and this one, a while later"


def test_a_network_sends_only_so_many_bytes(door: Door) -> None:
    large = messages.encode(Knock(protocol=PROTOCOL_VERSION, run="demo")) + bytes(200_000)
    for _ in range(BYTES_BURST // len(large)):
        assert door._is_within_limits(Arrival(b"r", b"k", 9, large, "192.0.2.7"), 0.0)
    door.comes(large)
    assert door.refusals() == ["busy"]
    assert door._is_within_limits(Arrival(b"r", b"k", 9, large, "192.0.2.7"), len(large) / BYTES_PER_S)


def test_only_so_many_hellos_are_passed_on(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[HelloPassed] = []
    monkeypatch.setattr(door, "_bring", lambda caller, passed: not brought.append(passed))
    monkeypatch.setattr(
        door._keeper, "examine", lambda caller, key, hello, came_from: HelloPassed(hello, bytes(32))
    )
    door.comes(KNOCK)
    hello = messages.encode(a_hello(door))
    for number in range(round(HELLOS_AT_ONCE) + 5):
        door.comes(hello, network=f"10.0.{number % 250}.1")
    assert len(brought) == HELLOS_AT_ONCE and door.refusals() == ["busy"] * 5


def test_hellos_wait_for_a_coordinator_that_takes_none_in_a_bounded_number_of_bytes(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "WAITING_BYTES_MOST", 2000)
    door.comes(KNOCK)
    passed = HelloPassed(a_hello(door), bytes(32))
    taken = [door._bring(b"c", passed) for _ in range(20)]
    assert taken[0] and not taken[-1] and door._waiting_bytes <= 2000
    assert sum(map(len, door._waiting)) == door._waiting_bytes


def test_who_sends_garbage_at_the_door_is_not_parsed_any_more(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[int] = []
    monkeypatch.setattr(door._listener, "cut", cut.append)
    for _ in range(STRIKES):
        door.comes(b"\xc1")
    assert cut == []
    door.comes(KNOCK)
    assert door.said == [] and cut == [99]
    door.comes(KNOCK, key=b"o" * 32)
    assert isinstance(door.said[-1], Challenge)


def test_a_flood_of_knocks_pushes_out_old_challenges() -> None:
    keeper = Doorkeeper(DoorFacts("demo", bytes(16), b"{}"))
    knock = Knock(protocol=PROTOCOL_VERSION, run="demo")
    for number in range(CHALLENGES_KEPT + 10):
        keeper.knock(b"%d" % number, knock, bytes(32))
    assert len(keeper._challenges) == CHALLENGES_KEPT and b"0" not in keeper._challenges


def test_who_answers_a_challenge_that_is_forgotten_is_told_so_and_not_that_it_is_somebody_else(
    door: Door,
) -> None:
    """Its knocks had waited in a line that was cut."""
    keeper, knock = door._keeper, Knock(protocol=PROTOCOL_VERSION, run=door._keeper._facts.name)
    first = keeper.knock(b"caller", knock, b"n" * 32)
    assert isinstance(first, Challenge)
    door.comes(KNOCK)
    hello = a_hello(door)
    forged = keeper.examine(b"caller", hello.key, hello)
    assert isinstance(forged, Refuse) and forged.code == "signature"
    for number in range(CHALLENGES_PER_CALLER + 1):
        keeper.knock(b"caller", knock, bytes([number]) * 32)
    late = keeper.examine(b"caller", hello.key, hello)
    assert isinstance(late, Refuse) and (late.code, late.retry_after_s) == ("challenge", 0.5)
    assert "knock again" in late.reason and "signed" not in late.reason


def test_an_order_without_end_is_hung_up_on(tmp_path: Path) -> None:
    served = OperatorSocket(tmp_path, lambda order: Reply(text="heard"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(os.path.relpath(tmp_path / SOCKET_NAME))
        line.setblocking(False)
        rest = memoryview(b"x" * (LINE_BYTES + 1))
        until, answer = time.monotonic() + 10.0, None
        while answer is None and time.monotonic() < until:
            try:
                rest = rest[line.send(rest) :] if rest else rest
            except (BlockingIOError, BrokenPipeError):
                pass
            served.serve_waiting(time.monotonic())
            try:
                answer = line.recv(100)
            except BlockingIOError:
                pass
            except ConnectionResetError:
                answer = b""
    served.close()
    assert answer == b"", "hung up, without a word"


def test_the_operator_is_answered_where_descriptors_have_run_out(tmp_path: Path) -> None:
    """Whatever has taken them: the order that mends it must get through, and the next one, too."""
    served = OperatorSocket(tmp_path, lambda order: Reply(text="heard"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as kept:
        callers = [kept.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(3)]
        kept.callback(served.close)
        for caller in callers:
            caller.connect(os.path.relpath(tmp_path / SOCKET_NAME))
            caller.sendall(b'{"do": "invites"}\n')
        taken: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (callers[-1].fileno() + 20, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(callers[0].fileno()))
            for _ in callers:
                served.serve_waiting(time.monotonic())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in taken:
                os.close(each)
        for caller in callers:
            caller.settimeout(10.0)
            assert caller.recv(1000).endswith(b"\n")
