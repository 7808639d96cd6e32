"""Every kind of ZeroMQ socket with the options that it has when it binds or connects, and no others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from farflung.collectives.link.rates import Pacer
from farflung.collectives.link.zmq_link import LinkSettings, ZmqLink
from farflung.console.bench import bench
from farflung.console.bench.bench import ABOVE_THE_DOOR, BenchLine, Collector, send_report
from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.door.dialer import Dialer, Target
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import Listener
from farflung.peer.line.control import ControlLink
from farflung.peer.local.channel import LocalClient, LocalServer
from farflung.protocol import messages
from farflung.protocol.errors import Counters, Unreachable
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.messages import AskStatus
from farflung.protocol.process.sockets import ZapHandler
from farflung.protocol.round_words import Contact
from rig.ports import free_ports

CONTROL_BYTES = 320 * 1024 + 4096
# They say what a socket is or does just now.  HWM and IPV4ONLY are other names for what other options tell.
NOT_SET = {"FD", "EVENTS", "LAST_ENDPOINT", "RCVMORE", "TYPE", "THREAD_SAFE", "HWM", "IPV4ONLY"}
KEYS = {"CURVE_PUBLICKEY", "CURVE_SECRETKEY", "CURVE_SERVERKEY"}  # libzmq does not tell them

CLIENT_KEYS = {"CURVE_PUBLICKEY": "set", "CURVE_SECRETKEY": "set", "CURVE_SERVERKEY": "set", "MECHANISM": 2}
# No public key: the side that is dialled proves its secret, and libzmq reads nothing else there.
SERVER_KEYS = {"CURVE_SECRETKEY": "set", "CURVE_SERVER": 1, "MECHANISM": 2}
KEPT_ALIVE = {
    "TCP_KEEPALIVE": 1, "TCP_KEEPALIVE_IDLE": 15, "TCP_KEEPALIVE_INTVL": 5, "TCP_KEEPALIVE_CNT": 3,
    "TCP_MAXRT": 10_000,
}  # fmt: skip


def readable(socket: zmq.Socket[bytes]) -> dict[str, Any]:
    found = {}
    for option in zmq.SocketOption:
        if option.name not in NOT_SET:
            try:
                found[option.name] = socket.getsockopt(option)
            except zmq.ZMQError:
                continue  # this one can only be set
    return found


@dataclass
class Recorded:
    """(what it was made to do, its type, its options that differ from a new socket's) of each, in order."""

    sockets: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)

    def only(self, did: str, kind: int) -> dict[str, Any]:
        found = [options for done, type_, options in self.sockets if (done, type_) == (did, kind)]
        assert len(found) == 1, self.sockets
        return found[0]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    made, written = Recorded(), dict[int, dict[str, Any]]()
    usual_set, usual_setsockopt = zmq.Socket.set, zmq.Socket.setsockopt

    def setting(usual: Callable[..., None]) -> Callable[..., None]:
        def set_it(self: zmq.Socket[bytes], option: int, value: Any) -> None:
            usual(self, option, value)
            name = zmq.SocketOption(option).name
            written.setdefault(id(self), {})[name] = "set" if name in KEYS else value

        return set_it

    def doing(name: str) -> Callable[..., Any]:
        usual = getattr(zmq.Socket, name)

        def do(self: zmq.Socket[bytes], address: str) -> Any:
            if self.type != zmq.PAIR:  # of monitors
                with zmq.Context() as context, context.socket(self.type) as new:
                    differs = dict(readable(self).items() - readable(new).items())
                unreadable = {n: v for n, v in written.get(id(self), {}).items() if n not in readable(self)}
                made.sockets.append((name, self.type, differs | unreadable))
            written.pop(id(self), None)
            return usual(self, address)

        return do

    monkeypatch.setattr(zmq.Socket, "set", setting(usual_set))
    monkeypatch.setattr(zmq.Socket, "setsockopt", setting(usual_setsockopt))
    monkeypatch.setattr(zmq.Socket, "bind", doing("bind"))
    monkeypatch.setattr(zmq.Socket, "connect", doing("connect"))
    yield made


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


URL = JoinUrl("127.0.0.1", 9, "run", bytes(range(32)))
CLIENT = {"LINGER": 0, "IPV6": 1, **CLIENT_KEYS}


def test_a_peers_connection_to_its_coordinator(
    recorded: Recorded, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    control = ControlLink(context, URL, zmq.curve_keypair(), Counters())
    control.enter_members(9)
    control.close()
    assert recorded.only("connect", zmq.DEALER) == CLIENT | {
        "SNDHWM": 256, "MAXMSGSIZE": CONTROL_BYTES, "RECONNECT_IVL": 200, "RECONNECT_IVL_MAX": 2000,
        "HANDSHAKE_IVL": 5000, "TCP_KEEPALIVE": 1, "TCP_MAXRT": 10_000,
    }  # fmt: skip


def test_a_peers_connection_to_the_door_is_tried_again_each_second(
    recorded: Recorded, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    control = ControlLink(context, URL, zmq.curve_keypair(), Counters())
    control.to_door(AskStatus(run="run"))
    control.close()
    assert recorded.only("connect", zmq.DEALER) == CLIENT | {
        "MAXMSGSIZE": CONTROL_BYTES, "RECONNECT_IVL": 200, "HANDSHAKE_IVL": 5000, "IMMEDIATE": 1,
        "CONNECT_TIMEOUT": 1000, "TCP_MAXRT": 10_000,
    }  # fmt: skip


def test_a_door_that_was_not_there_hears_the_newest_word_and_no_other(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Else ten knocks arrive when a line heals, and each draws a challenge."""
    public, secret = zmq.curve_keypair()
    port = next(free_ports())
    control = ControlLink(
        context, JoinUrl("127.0.0.1", port, "run", z85.decode(public)), zmq.curve_keypair(), Counters()
    )
    for number in range(10):
        control.to_door(AskStatus(run=f"run {number}"))
    door = context.socket(zmq.ROUTER)
    door.curve_server, door.curve_secretkey = True, secret
    door.bind(f"tcp://127.0.0.1:{port}")
    heard: list[bytes] = []
    end = time.monotonic() + 30.0
    while not heard and time.monotonic() < end:
        control.on_tick()
        if door.poll(20):
            heard.append(door.recv_multipart()[-1])
    assert not door.poll(300) and len(heard) == 1
    assert messages.decode(heard[0], frozenset({"ask_status"})) == AskStatus(run="run 9")
    control.close()


def test_somebody_who_only_asks(recorded: Recorded) -> None:
    with StatusClient(URL) as client, pytest.raises(Unreachable):
        client.fetch(0.0)
    assert recorded.only("connect", zmq.DEALER) == CLIENT | {
        "MAXMSGSIZE": CONTROL_BYTES, "RECONNECT_IVL": 200, "HANDSHAKE_IVL": 5000,
    }  # fmt: skip


def test_the_coordinator_dialling_back(recorded: Recorded, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    dialer = Dialer(context, zmq.curve_keypair())
    dialer.dial(Target("ann", b"", "127.0.0.1:9", bytes(range(32))))
    assert not list(dialer.verdicts())
    dialer.close()
    assert recorded.only("connect", zmq.DEALER) == CLIENT | {"RECONNECT_IVL": -1}


def test_the_coordinators_listening_socket(
    recorded: Recorded, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    listener = Listener(context, "door", load_or_create(tmp_path), "127.0.0.1", 0)
    listener.close(0)
    assert recorded.only("bind", zmq.ROUTER) == {
        **SERVER_KEYS, **KEPT_ALIVE, "ZAP_DOMAIN": b"door", "LINGER": 0, "IPV6": 1, "MAXMSGSIZE": CONTROL_BYTES,
        "SNDHWM": 256, "RCVHWM": 64, "ROUTER_MANDATORY": 1, "BACKLOG": 1024, "HANDSHAKE_IVL": 5000,
    }  # fmt: skip


def test_the_handler_of_handshakes(recorded: Recorded, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    ZapHandler(context).close()
    assert recorded.only("bind", zmq.REP) == {"LINGER": 0}


@pytest.mark.parametrize(
    ("payload_max", "frames"), [(100_000, 10), (10 << 20, 2), (1, 64)], ids=["usual", "large", "small"]
)
@pytest.mark.parametrize(
    ("limit", "limited"),
    [(None, {}), (7e6, {"RCVHWM": 2}), (2.5e6, {"RCVHWM": 2, "RCVBUF": 500_000}),
     (1e5, {"RCVHWM": 2, "RCVBUF": 131_072})],
    ids=["open", "high limit", "limited", "low limit"],
)  # fmt: skip
def test_the_data_planes_sockets(
    recorded: Recorded, payload_max: int, frames: int, limit: float | None, limited: dict[str, int]
) -> None:
    link = ZmqLink(zmq.curve_keypair(), LinkSettings(download=Pacer(limit)))
    link.expect("ann", bytes(8), payload_max)
    link.listen("127.0.0.1", 0)
    link.set_contacts([Contact("bob", "bob", bytes(range(32)), "127.0.0.1:9")])
    link.close()
    both = {
        **KEPT_ALIVE, "LINGER": 0, "SNDHWM": frames, "RCVHWM": frames, "MAXMSGSIZE": payload_max + 4096,
        "HANDSHAKE_IVL": 5000, "RECONNECT_IVL": 200, "RECONNECT_IVL_MAX": 5000, "IPV6": 1,
    } | limited  # fmt: skip
    server = {"ZAP_DOMAIN": b"data", "ROUTER_HANDOVER": 1, "ROUTER_MANDATORY": 1}
    assert recorded.only("bind", zmq.ROUTER) == both | SERVER_KEYS | server
    assert recorded.only("connect", zmq.DEALER) == both | CLIENT_KEYS | {"IMMEDIATE": 1}


def test_the_two_ends_of_a_benchs_reports(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SEND_S", 0.0)
    with Collector(tmp_path, "127.0.0.1", BenchLine(0)):
        pass
    # Fmt: skip.
    assert recorded.only("bind", zmq.REP) == SERVER_KEYS | {"LINGER": 1000, "IPV6": 1, "MAXMSGSIZE": 64 << 20}
    with pytest.raises(Unreachable):
        send_report(JoinUrl("127.0.0.1", 9 - ABOVE_THE_DOOR, "run", bytes(range(32))), {})
    assert recorded.only("connect", zmq.REQ) == CLIENT


def test_the_two_ends_of_the_local_channel(recorded: Recorded, tmp_path: Path) -> None:
    server, client = LocalServer(tmp_path), LocalClient(tmp_path)
    client.close()
    server.close()
    both = {"RCVHWM": 1000, "SNDHWM": 1000, "MAXMSGSIZE": 4 << 20, "LINGER": 0}
    # A thousand is also what libzmq takes for granted.
    both = {name: value for name, value in both.items() if value != 1000}
    assert recorded.only("bind", zmq.ROUTER) == recorded.only("connect", zmq.DEALER) == both
