"""A coordinator with several addresses, over real sockets: the first door that answers is the one that is spoken to."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq

from farflung.peer.line.control import ControlLink
from farflung.protocol import messages
from farflung.protocol.errors import Counters
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.messages import AskStatus, Challenge, Hello, Knock, Message, Refuse
from farflung.protocol.mode_words import StandsBy
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.sockets import curve_raw, curve_server
from rig.waiting import Patience

PUBLIC, SECRET = zmq.curve_keypair()
MODEL = ModelSchema(
    tensors=(TensorSpec("w", (256,), "float32", "param"),), chunk_elements=256, chunk_count=1, first_plain_chunk=1,
    frozen=bytes(32),
)  # fmt: skip
HELLO = Hello(
    protocol=PROTOCOL_VERSION, run_id=bytes(16), identity=bytes(32), key=bytes(32), address="", software="test",
    manifest=bytes(32), model=MODEL, fragments=(0,), version=-1, digest=b"", process=bytes(16), token="",
    signature=bytes(64),
)  # fmt: skip
KNOCK = Knock(protocol=PROTOCOL_VERSION, run="demo")
CHALLENGE = Challenge(nonce=bytes(32), run_id=bytes(16), manifest=b"{}", protocol=PROTOCOL_VERSION)
HEARD = frozenset({"knock", "hello", "ask_status"})


BUSY = Refuse(code="busy", reason="later", retry_after_s=1.0)


class Door:
    """That of a coordinator, on a free port of this machine."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        answer: Message = CHALLENGE,
        host: str = "127.0.0.1",
    ) -> None:
        self._answer = answer
        self.socket = context.socket(zmq.ROUTER)
        for option, value in curve_server(SECRET).items():
            self.socket.setsockopt(option, value)
        self.socket.setsockopt(zmq.IPV6, 1)
        port = self.socket.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        self.at = Address(host, port)
        self.heard: list[Message] = []

    def turn(self, answer: bool = True) -> None:
        while self.socket.poll(5):
            caller, raw = self.socket.recv_multipart()
            self.heard.append(messages.decode(raw, HEARD))
            if answer:
                self.socket.send_multipart([caller, messages.encode(self._answer)])


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def dead() -> Iterator[Address]:
    """Somebody listens there and never says a word."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield Address("127.0.0.1", silent.getsockname()[1])


def linked(context: zmq.Context[zmq.Socket[bytes]], *places: Address) -> ControlLink:
    url = JoinUrl.at(places, "demo", curve_raw(PUBLIC))
    return ControlLink(context, url, zmq.curve_keypair(), Counters())


def until_answered(control: ControlLink, *doors: Door, silent: tuple[Door, ...] = ()) -> Message:
    patience = Patience()
    while not patience.is_over:
        control.on_tick()
        for door in (*doors, *silent):
            door.turn(answer=door not in silent)
        for message in control.receive():
            return message
    raise AssertionError("nobody answered")


def test_a_silent_address_keeps_nobody_from_the_next_one(
    context: zmq.Context[zmq.Socket[bytes]], dead: Address
) -> None:
    door = Door(context)
    control = linked(context, dead, door.at)
    control.to_door(KNOCK)
    assert until_answered(control, door) == CHALLENGE
    assert control.at == door.at and len(list(control.sockets())) == 1
    control.close()


def test_what_is_said_next_is_said_where_the_answer_came_from(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    quiet, door = Door(context), Door(context)
    control = linked(context, quiet.at, door.at)
    control.to_door(KNOCK)
    until_answered(control, door, silent=(quiet,))
    control.to_door(AskStatus(run="demo"))
    until_answered(control, door, silent=(quiet,))
    assert door.heard == [KNOCK, AskStatus(run="demo")] and quiet.heard == [KNOCK]
    control.close()


def test_after_a_replaced_coordinator_the_other_address_is_tried(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    old, new = Door(context), Door(context)
    control = linked(context, old.at, new.at)
    control.to_door(KNOCK)
    until_answered(control, old, new)
    assert control.at == old.at
    control.shun()
    control.to_door(KNOCK)
    until_answered(control, old, new)
    assert control.at == new.at and old.heard == [KNOCK]
    control.close()


def test_a_coordinator_that_stands_by_keeps_nobody_from_the_one_that_leads(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    standby, leader = Door(context, StandsBy(whereabouts=b"signed")), Door(context)
    control = linked(context, standby.at, leader.at)
    control.to_door(KNOCK)
    assert until_answered(control, standby, leader) == StandsBy(whereabouts=b"signed")
    assert until_answered(control, standby, leader) == CHALLENGE and control.at == leader.at
    control.to_door(AskStatus(run="demo"))
    until_answered(control, leader)
    assert standby.heard == [KNOCK]
    control.close()


def test_a_door_without_a_coordinator_behind_it_keeps_nobody_from_the_one_that_leads(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """It answers knocks, since it is a process of its own, and its hellos are answered by nobody."""
    hollow, leader = Door(context), Door(context, BUSY)
    now = [100.0]
    url = JoinUrl.at((hollow.at, leader.at), "demo", curve_raw(PUBLIC))
    control = ControlLink(context, url, zmq.curve_keypair(), Counters(), lambda: now[0])
    control.to_door(KNOCK)
    assert until_answered(control, hollow) == CHALLENGE
    control.to_door(HELLO)
    now[0] += 1.0
    control.to_door(KNOCK)
    assert control.at == hollow.at and len(list(control.sockets())) == 1, "it may be slow"
    until_answered(control, hollow)
    now[0] += 1.5
    control.to_door(KNOCK)
    assert until_answered(control, leader, silent=(hollow,)) == BUSY
    assert control.at == leader.at
    control.close()


def test_a_list_that_is_learned_later_is_followed(
    context: zmq.Context[zmq.Socket[bytes]], dead: Address
) -> None:
    door = Door(context)
    control = linked(context, dead)
    control.to_door(KNOCK)
    control.look_at((door.at, dead))
    assert until_answered(control, door) == CHALLENGE
    control.close()


def test_of_two_families_the_one_that_is_there(
    context: zmq.Context[zmq.Socket[bytes]], dead: Address
) -> None:
    if not socket.has_ipv6:
        pytest.skip("NOT RUN: this machine has no IPv6")
    try:
        door = Door(context, host="::1")
    except zmq.ZMQError:
        pytest.skip("NOT RUN: this machine has no IPv6 loopback")
    control = linked(context, dead, door.at)
    control.to_door(KNOCK)
    assert until_answered(control, door) == CHALLENGE
    control.close()
