"""A listening socket of the coordinator, and the news of its connections: who came, who never got in, who left.

There are two: the door, where strangers knock, in a process of its own (front_door.py), and the members' socket in the
server.  Bounds what may arrive before anything is parsed.  Must not know messages.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from farflung.coordinator.door.keys import CurveKeys
from farflung.protocol.errors import UserError, Verdict
from farflung.protocol.process.descriptors import end, endpoint_of, plain_host
from farflung.protocol.process.sockets import CONTROL_SERVER, curve_server, opened

FRAMES_PER_TURN = 64  # one busy socket must not keep timers and the other socket waiting
GOODBYE_MS = 1000
_EVERY_ADDRESS = ("*", "0.0.0.0", "::")

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True)
class ListenOn:
    """Where to listen; port 0 is any free one.  An IPv6 host has no brackets here."""

    host: str
    port: int
    member_port: int = 0
    relay_port: int = 0
    gateways: int = 0  # processes that hold members' connections

    @property
    def gateway_ports(self) -> list[int]:
        """Those that follow the ports that were named, where a firewall must let them through; else any."""
        last = max(self.member_port, self.relay_port) if self.member_port else 0
        return [last + number if last else 0 for number in range(1, self.gateways + 1)]

    @classmethod
    def parse(cls, text: str) -> ListenOn:
        """`HOST:PORT`, or `HOST:PORT:MEMBER_PORT:RELAY_PORT` where a firewall must let them through."""
        host, bracket, rest = text[1:].partition("]") if text.startswith("[") else ("", "", "")
        if not bracket:
            host, colon, rest = text.partition(":")
            rest = colon + rest
        empty, *ports = rest.split(":")
        numbers = [int(port) for port in ports if port.isascii() and port.isdigit() and int(port) <= 65535]
        if empty or not ports or len(ports) > 3 or len(numbers) != len(ports):
            raise UserError(
                f"listen address '{text}': expected HOST:PORT, HOST:PORT:MEMBER_PORT or "
                "HOST:PORT:MEMBER_PORT:RELAY_PORT, such as *:7000"
            )
        return cls(host or "*", *numbers)

    def hosts_for_others(self) -> tuple[str, ...]:
        """What to put into a URL: if this listens everywhere, the addresses that lead out of this machine."""
        if self.host not in _EVERY_ADDRESS:
            return (self.host,)
        # Of nobody; choosing a route sends no packet.
        found = [_route_out(socket.AF_INET, "192.0.2.1")]
        if self.host != "0.0.0.0":
            found.append(_route_out(socket.AF_INET6, "2001:db8::1"))
        return tuple(filter(None, found)) or ("127.0.0.1",)


def _route_out(family: int, towards: str) -> str:
    """This machine's address on the way there; empty if there is none that others could use."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            host = str(probe.getsockname()[0])
    except OSError:
        return ""  # no route, or no such family
    return "" if ipaddress.ip_address(host.partition("%")[0]).is_link_local else host


@dataclass(frozen=True, slots=True)
class Arrival:
    routing_id: bytes  # names the connection for as long as it lasts
    key: bytes  # the CURVE key that the connection proved
    descriptor: int  # of its TCP socket: what the news of its end will name
    payload: bytes | None  # None: it was not exactly one frame
    came_from: str = ""  # the address of the other end


class Listener:
    """A bound ROUTER that speaks CURVE.  Poll `readable`; read `news` before `arrivals`."""

    def __init__(
        self,
        context: zmq.Context[zmq.SyncSocket],
        domain: str,
        keys: CurveKeys,
        host: str,
        port: int,
        on_accepted: Callable[[int], list[int]] | None = None,
    ) -> None:
        """`on_accepted(descriptor)` says, before its handshake, which connections are to be cut.  It also means that
        the connection that had this descriptor before has ended, of which there may be no other news."""
        curve = curve_server(keys.secret, domain.encode("ascii"))
        self._socket = opened(context, zmq.ROUTER, CONTROL_SERVER, curve)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._heard: dict[int, bool] = {}  # open connections by descriptor: has a frame come over it?
        self._on_accepted = on_accepted
        self._refused = False  # the latest news was of a key that may not come in
        try:
            self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close(0)
            raise UserError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose a free port, and an address of "
                "this machine (* for all of them)"
            ) from error
        endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT))
        self.port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    @property
    def readable(self) -> tuple[zmq.SyncSocket, zmq.SyncSocket]:
        return self._socket, self._monitor

    def close(self, linger_ms: int = GOODBYE_MS) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger_ms)

    def send(self, routing_id: bytes, raw: bytes) -> bool:
        """False if the connection is gone or its reader has stopped reading."""
        try:
            self._socket.send_multipart([routing_id, raw], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def cut(self, descriptor: int) -> None:
        """End a connection."""
        if descriptor not in self._heard:
            return
        self._heard[descriptor] = True  # what it would have said nobody knows: its end is no bad frame
        end(descriptor, self.port)

    def comes_from(self, arrival: Arrival) -> str:
        """HOST:PORT of its sender, as it is seen here; empty if it has gone again."""
        found = endpoint_of(arrival.descriptor) if arrival.descriptor in self._heard else ""
        # Its number may be another connection's by now.
        return found if found.rpartition(":")[0].strip("[]") == plain_host(arrival.came_from) else ""

    def is_open(self, descriptor: int) -> bool:
        return descriptor in self._heard

    def take_ended(self) -> tuple[list[int], list[Verdict]]:
        """(connections that ended, a verdict for each that ended without a frame) since the last call."""
        ended: dict[int, None] = {}
        verdicts: list[Verdict] = []
        while True:
            try:
                report = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return list(ended), verdicts
            event, descriptor = report["event"], report["value"]
            if event == zmq.EVENT_ACCEPTED:
                self._heard[descriptor] = False
                if self._on_accepted is not None:
                    # Or the end of the older one would be told as that of this one.
                    ended.pop(descriptor, None)
                    for each in self._on_accepted(descriptor):
                        self.cut(each)
            elif event == zmq.EVENT_DISCONNECTED:
                ended[descriptor] = None
                # Why a handshake failed is often not said (a web browser, no encryption, another server's key in
                # the URL): all that counts as bytes that could not be read.
                if not self._heard.pop(descriptor, True):
                    verdicts.append(Verdict.UNAUTHORISED if self._refused else Verdict.MALFORMED)
            # The end of a refused connection is always the very next news.
            self._refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def arrivals(self) -> Iterator[Arrival]:
        """The frames waiting now, a bounded number."""
        for _ in range(FRAMES_PER_TURN):
            try:
                routing_id = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            first = last = self._socket.recv(copy=False)
            while last.more:  # dropped one by one: a message of a million parts must not become a list
                last = self._socket.recv(copy=False)
            descriptor = int(first.get(zmq.SRCFD))
            if descriptor in self._heard:
                self._heard[descriptor] = True
            key = bytes.fromhex(str(first.get("User-Id")))
            whole = first.bytes if first is last else None
            yield Arrival(routing_id, key, descriptor, whole, str(first.get("Peer-Address") or ""))
