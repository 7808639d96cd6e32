"""Asks this machine's router to open a port, keeps it open, and closes it again: when to say what.  Pure.

Driven by opened_port.py, which has the socket and the clock.  PCP first; a router that knows only NAT-PMP says so, and
one that says nothing is asked in both.  Half of a lifetime before its end it is asked again.  Must not know who needs
the port.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from farflung.peer.router.packets import (
    Mapped,
    RouterRefused,
    pcp_map,
    pmp_address,
    pmp_map,
    read_pcp,
    read_pmp_address,
    read_pmp_map,
)
from farflung.protocol.join_url import Address

LIFETIME_S = 3600
SHORTEST_S = 60.0  # whatever a router says: it is asked no more often
AGAIN_S = (0.15, 0.3)  # after a question without an answer; then the next protocol, or that was all


class Tongue(StrEnum):
    PCP = "PCP"
    PMP = "NAT-PMP"


@dataclass
class PortRequest:
    client: str  # this machine's address towards the router
    port: int
    nonce: bytes  # that nobody can guess: an answer must have it
    tongue: Tongue = Tongue.PCP
    mapped: Mapped | None = None
    why_not: str = ""  # it is over: no port is open
    _asked: int = 0  # times, since the last answer
    _next_at: float = -math.inf
    _ends_at: float = math.inf  # of what is open
    _host: str = ""  # the router's, outside, by NAT-PMP

    @property
    def address(self) -> str:
        """HOST:PORT by which others reach the port; empty where that is not known."""
        host = (self.mapped.host or self._host) if self.mapped is not None else ""
        if self.mapped is None or not host:
            return ""
        return str(Address(host, self.mapped.port))

    def wait_s(self, now: float) -> float:
        """Until there is something to say, unless something is heard."""
        return math.inf if self.why_not else max(0.0, self._next_at - now)

    def due(self, now: float) -> list[bytes]:
        """What to send now."""
        if self.why_not or now < self._next_at:
            return []
        if self.mapped is not None and now >= self._ends_at:
            self._give_up("the router does not answer any more")
            return []
        if self._asked > len(AGAIN_S) - 1 and self.mapped is None:
            if self.tongue == Tongue.PMP:
                self._give_up("the router answers neither PCP nor NAT-PMP")
                return []
            self.tongue, self._asked = Tongue.PMP, 0
        pause_s = AGAIN_S[min(self._asked, len(AGAIN_S) - 1)]
        left_s = max(0.0, self._ends_at - now) if self.mapped is not None else 0.0
        self._asked += 1
        self._next_at = now + max(pause_s, left_s / 8)
        return self._questions(LIFETIME_S)

    def closing(self) -> list[bytes]:
        """What to send at the end."""
        return self._questions(0) if self.mapped is not None and not self.why_not else []

    def _questions(self, lifetime_s: int) -> list[bytes]:
        suggested = self.mapped.port if self.mapped is not None else self.port
        if self.tongue == Tongue.PCP:
            return [pcp_map(self.client, self.nonce, self.port, suggested, lifetime_s)]
        found = [pmp_map(self.port, suggested, lifetime_s)]
        return found if self._host or not lifetime_s else [pmp_address(), *found]

    def hear(self, raw: bytes, now: float) -> None:
        if self.why_not:
            return
        said: Mapped | RouterRefused | str | None
        if self.tongue == Tongue.PCP:
            said = read_pcp(raw, self.nonce, self.port)
        else:
            said = read_pmp_map(raw, self.port) or read_pmp_address(raw)
        match said:
            case RouterRefused(is_older=True) if self.tongue == Tongue.PCP:
                self.tongue, self._asked, self._next_at = Tongue.PMP, 0, now
            case RouterRefused(why=why):
                self._give_up(f"the router was asked to open a port ({self.tongue}): {why}")
            case str():
                self._host = said
            case Mapped(lifetime_s=lifetime_s) if lifetime_s:
                self.mapped, self._asked = said, 0
                kept_s = max(2 * SHORTEST_S, min(LIFETIME_S, lifetime_s))
                self._next_at, self._ends_at = now + kept_s / 2, now + kept_s

    def nobody_listens(self) -> None:
        """The router's machine says that nothing is at that port."""
        if self.mapped is None:
            self._give_up("the router answers neither PCP nor NAT-PMP")

    def _give_up(self, why: str) -> None:
        self.mapped, self.why_not = None, why
