"""Dialling back: who is reached, who refuses, who is silent; and how soon each of them is known."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq

from farflung.coordinator.door.dialer import DIAL_S, Dialer, Target
from farflung.protocol.process.sockets import Keys, curve_raw
from rig.waiting import eventually


class Scene:
    """A dialer whose clock stands still: what is found out without a wait is found out by an event."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.now = 0.0
        self.keys: Keys = zmq.curve_keypair()
        self.dialer = Dialer(self.context, zmq.curve_keypair(), lambda: self.now)
        self.found: list[bool] = []

    def dial(self, address: str) -> None:
        self.dialer.dial(Target("peer", b"session", address, curve_raw(self.keys[0])))
        self.look()

    def look(self) -> list[bool]:
        self.found += [reached for _, reached in self.dialer.verdicts()]
        return self.found

    def listening(self, keys: Keys) -> tuple[zmq.Socket[bytes], str]:
        peer = self.context.socket(zmq.ROUTER)
        peer.linger = 0
        peer.curve_publickey, peer.curve_secretkey = keys
        peer.curve_server = True
        return peer, f"127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.dialer.close()
    made.context.destroy(linger=0)


def test_a_peer_with_its_key_is_reached(scene: Scene) -> None:
    _, address = scene.listening(scene.keys)
    scene.dial(address)
    eventually(lambda: scene.look() == [True], "reached")


def test_a_refused_connection_is_known_at_once(scene: Scene) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        scene.dial("{}:{}".format(*taken.getsockname()))
        eventually(lambda: scene.look() == [False], "refused")


def test_a_peer_that_ends_the_connection_is_known_at_once(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        scene.dial("{}:{}".format(*listener.getsockname()))
        listener.accept()[0].close()
        eventually(lambda: scene.look() == [False], "refused")


def test_a_peer_that_says_nothing_has_its_time_and_no_more(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        scene.dial("{}:{}".format(*listener.getsockname()))
        with listener.accept()[0]:
            scene.now = DIAL_S - 0.1
            assert scene.look() == []
            scene.now = DIAL_S
            assert scene.look() == [False]


def test_who_answers_with_another_key_is_not_that_peer(scene: Scene) -> None:
    _, address = scene.listening(zmq.curve_keypair())
    scene.dial(address)

    def waited() -> bool:
        scene.now += 0.1
        return scene.look() == [False]

    eventually(waited, "not reached")


def test_what_is_no_address_is_not_reached(scene: Scene) -> None:
    scene.dial("not an address")
    assert scene.found == [False]
