"""The two ways to contacts of whom neither can dial the other: at a relay, or both connect at one instant.

Owned by zmq_link.py, which shows it its lines in each of its turns; it opens and closes their connections.  Which of
us is CURVE's server follows from our keys, in both ways, so that whoever the relay or an address brings gets nothing.

All meetings leave from one port, which is kept for as long as the link lives: routers show it outside as one port, and
the coordinator was shown which.  Nothing listens there.  Must not know rounds, or who says when to meet.
"""

from __future__ import annotations

import ipaddress
import math
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from farflung.collectives.link.link import Appointment, Relayed
from farflung.collectives.link.peer_connections import ConnectionKind, PeerConnections, ZmqConnection
from farflung.collectives.link.relay_way import RelayState, RelayWay
from farflung.collectives.link.tcp_counts import TcpCounts
from farflung.protocol.limits import HANDSHAKE_S
from farflung.protocol.mode_words import MEET_EVERY_S, MEET_TRIES
from farflung.protocol.process.sockets import (
    BULK_MEETING,
    BULK_RELAYED,
    Keys,
    Options,
    ZapHandler,
    curve_client,
    curve_raw,
    curve_server,
    end_abruptly,
)

MEET_AGAIN_S, MEET_AGAIN_MOST_S = (
    0.25,
    4.0,
)  # after an attempt at the relay, the next one; longer each time in vain
UNMET_S = 6.0  # without a connection for so long: another relay may do
RETIRES_S = 5.0  # so long a way over the relay that is told no more may still bring what is on it
LATE_S = 0.25  # whoever is later than that waits for the next instant
# By try: so much later the one of the two with the lesser key connects. What both hold for one instant differs by some
# milliseconds, in each try by the same, and a router that says no lets through only packets that cross on their way.
SHIFTS_S = (0.0, 0.01, -0.01)
LEAST_PORT = 1024  # whatever a coordinator says


class Open(Protocol):
    def __call__(self, over: ConnectionKind, *presets: Options) -> ZmqConnection | None: ...


@dataclass
class Undialled:
    keys: Keys
    zap: ZapHandler
    tcp: TcpCounts
    clock: Callable[[], float]
    open: Open
    _kept: socket.socket | None = field(default=None)  # the port that all meetings leave from
    _every: str = ""  # all addresses of its family
    _port: int = 0

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    # ---- at the relay ------------------------------------------------------------------------------------------

    def tell_way(self, line: PeerConnections, way: Relayed | None) -> None:
        before, line.way = line.way, way
        if way is not None and before is None:
            line.close(ConnectionKind.DIALLED, ConnectionKind.LEAN)  # what was opened leads another way
            line.again_at, line.pause_s, line.retires_at = 0.0, MEET_AGAIN_S, None
        elif way is not None and before is not None and way.relay != before.relay:
            # Whatever stands there: a relay that lets nothing through may well keep its connections.
            line.close(ConnectionKind.RELAYED)
            line.again_at, line.pause_s = 0.0, MEET_AGAIN_S
        elif way is None and line.is_punched:
            line.retires_at = self.clock() + RETIRES_S if line.relay_way is not None else None
        elif way is None and before is not None:
            line.close(ConnectionKind.RELAYED)

    def unmet(self, lines: Mapping[str, PeerConnections]) -> set[str]:
        """To be asked in each turn."""
        now, found = self.clock(), set()
        for peer, line in lines.items():
            if line.way is None or line.is_up:
                line.in_vain = None
            elif line.in_vain is None or line.in_vain[0].relay != line.way.relay:
                line.in_vain = line.way, now
            elif now - line.in_vain[1] >= UNMET_S:
                found.add(peer)
        return found

    def meet_at_relay(self, line: PeerConnections, way: Relayed) -> None:
        """One connection, for both directions."""
        now = self.clock()
        if line.relay_way is None and now >= line.again_at:
            line.again_at, line.pause_s = now + line.pause_s, min(MEET_AGAIN_MOST_S, 2 * line.pause_s)
            line.relay_way = RelayWay(way, now)
            self.tcp.on_news(zmq.EVENT_CONNECTED, line.relay_way.descriptor)

    def follow_relay(self, line: PeerConnections, taken: RelayWay) -> None:
        """A turn of the way over the relay.  libzmq connects once the other side is there."""
        now, opened = self.clock(), line.over(ConnectionKind.RELAYED)
        taken.turn(now)
        if taken.stand == RelayState.JOINED and not opened:
            line.pause_s = MEET_AGAIN_S
            connection = self._connection(line, BULK_RELAYED, ConnectionKind.RELAYED)
            if connection is None:
                return
            connection.carried_by = taken.descriptor
            connection.socket.connect(taken.endpoint)
            line.opened.append(connection)
        is_retired = line.retires_at is not None and now >= line.retires_at
        is_renewed = line.way != taken.way and not any(each.up for each in opened)
        if taken.stand == RelayState.OVER or is_retired or is_renewed:
            self.tcp.forget(taken.descriptor)
            line.close(ConnectionKind.RELAYED)

    # ---- at an instant -----------------------------------------------------------------------------------------

    def meeting_port(self, host: str) -> int:
        if self._kept is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                self._kept = socket.socket(family, socket.SOCK_STREAM)
                self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._kept.bind((host.strip("[]"), 0))
            except OSError:
                self._kept = None
                return 0
            self._every, self._port = host, int(self._kept.getsockname()[1])
        return self._port if host == self._every else 0

    def set_appointments(
        self, lines: Mapping[str, PeerConnections], appointments: Mapping[str, Appointment]
    ) -> None:
        for peer, appointment in appointments.items():
            line = lines.get(peer)
            if (
                line is not None
                and line.appointment != appointment
                and self._is_dialable(appointment.endpoint)
            ):
                line.appointment, line.tries = appointment, 0

    def _is_dialable(self, endpoint: str) -> bool:
        host, _, port = endpoint.rpartition(":")
        try:
            ip = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        same_family = (ip.version == 6) == (":" in self._every)
        return bool(self._port) and same_family and port.isdecimal() and LEAST_PORT <= int(port) <= 65535

    def follow_meeting(self, line: PeerConnections) -> None:
        """A turn of meeting somebody: is a try due, is one over?"""
        now = self.clock()
        for each in line.over(ConnectionKind.PUNCHED):
            if each.is_over or (not each.up and now >= line.try_until):
                line.close(ConnectionKind.PUNCHED)
            elif each.descriptor >= 0 and not each.is_abrupt:
                end_abruptly(each.descriptor)
                each.is_abrupt, line.try_until = True, now + HANDSHAKE_S
        due = self._next_at(line, now)
        if (
            due is not None
            and now >= due
            and not line.over(ConnectionKind.PUNCHED)
            and line.appointment is not None
        ):
            self._try(line, line.appointment.endpoint, now)

    def _try(self, line: PeerConnections, endpoint: str, now: float) -> None:
        # Of one family: libzmq would else take an IPv4 port through an IPv6 socket.
        family: Options = {zmq.IPV6: int(":" in self._every)}
        connection = self._connection(line, {**BULK_MEETING, **family}, ConnectionKind.PUNCHED)
        line.tries, line.try_until = line.tries + 1, now + MEET_EVERY_S
        if connection is None:
            return
        try:
            connection.socket.connect(f"tcp://{self._every}:{self._port};{endpoint}")
        except zmq.ZMQError:
            connection.close()
        else:
            line.opened.append(connection)

    def _next_at(self, line: PeerConnections, now: float) -> float | None:
        """When the next try is due; tries whose instant has gone by are left out."""
        if line.appointment is None:
            return None
        missed = math.ceil((now - LATE_S - line.appointment.at) / MEET_EVERY_S)
        line.tries = min(MEET_TRIES, max(line.tries, missed))
        if line.tries >= MEET_TRIES:
            return None
        shift_s = SHIFTS_S[line.tries] if self._is_lesser(line) else 0.0
        return line.appointment.at + line.tries * MEET_EVERY_S + shift_s

    def idle_s(self, lines: Iterable[PeerConnections], now: float) -> float:
        """Until the next try."""
        due = (self._next_at(line, now) for line in lines if not line.over(ConnectionKind.PUNCHED))
        return min((max(0.0, at - now) for at in due if at is not None), default=60.0)

    # ---- both --------------------------------------------------------------------------------------------------

    def _is_lesser(self, line: PeerConnections) -> bool:
        """Of two alike, one must do what the other doesn't: by their keys both know which."""
        return curve_raw(self.keys[0]) < line.contact.key

    def _connection(
        self, line: PeerConnections, preset: Options, over: ConnectionKind
    ) -> ZmqConnection | None:
        theirs = line.contact.key
        if self._is_lesser(line):
            # Whoever comes, only the contact itself shakes hands.
            domain = domain_of(theirs)
            self.zap.set_policy(domain, theirs.__eq__)
            curve = curve_server(self.keys[1], domain.encode())
        else:
            curve = curve_client(self.keys, theirs)
        return self.open(over, preset, curve)


def domain_of(key: bytes) -> str:
    """Of ZAP: where only this key comes in."""
    return f"pair-{key.hex()}"
