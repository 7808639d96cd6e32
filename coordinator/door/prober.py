"""What a stranger may measure at the door: the way here and back, and whether it can be dialled.

Called by the server with each `probe` of `farflung doctor`; a shell around the dialer.  Bounded: all strangers together
move so many bytes a second, and nobody is dialled but the caller itself, at the address its connection comes from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from farflung.coordinator.door.dialer import Dialer, Target
from farflung.coordinator.door.hello_check import is_address
from farflung.protocol.messages import Message, Probe, Probed, Refuse

BYTES_PER_S = 4 << 20
BURST_BYTES = 24 << 20
DIALS_AT_ONCE = 8
KEY_BYTES = 32
_NOBODY = ""  # the peer of a Target: a stranger's attempt is no member's


class Caller(NamedTuple):
    routing_id: bytes
    host: str  # where its connection comes from
    endpoint: str = ""  # the same with the port


class Prober:
    """`answer(routing id, message)` sends."""

    def __init__(self, dialer: Dialer, answer: Callable[[bytes, Message], None]) -> None:
        self._dialer = dialer
        self._answer = answer
        self._left_bytes = float(BURST_BYTES)
        self._filled_at = 0.0
        self._waiting: dict[bytes, Probed] = {}  # by routing id: said when the attempt has ended

    def on_probe(self, caller: Caller, probe: Probe, now: float) -> None:
        asked, host = caller.routing_id, caller.host
        if not self._may_move(len(probe.padding) + probe.want, now):
            busy = "others are measuring at the moment; try again in some seconds"
            self._answer(asked, Refuse(code="busy", reason=busy, retry_after_s=5.0))
            return
        probed = Probed(
            came_from=host[:128],
            wall_s=time.time(),
            padding=bytes(probe.want),
            dialled="",
            port=int(caller.endpoint.rpartition(":")[2] or 0),
        )
        if not probe.address:
            self._answer(asked, probed)
        elif len(probe.key) != KEY_BYTES or not _is_at(probe.address, host):
            self._say(
                asked,
                probed,
                f"not tried: your connection comes from {host.removeprefix('::ffff:') or 'elsewhere'}",
            )
        elif len(self._waiting) >= DIALS_AT_ONCE or asked in self._waiting:
            self._say(asked, probed, "not tried: too many ask at once")
        else:
            self._waiting[asked] = probed
            self._dialer.dial(Target(_NOBODY, asked, probe.address, probe.key))

    def on_verdict(self, target: Target, reached: bool) -> bool:
        """True if the attempt was a stranger's."""
        probed = self._waiting.pop(target.session, None) if target.peer == _NOBODY else None
        if probed is not None:
            self._say(target.session, probed, "yes" if reached else "no")
        return target.peer == _NOBODY

    def _say(self, caller: bytes, probed: Probed, dialled: str) -> None:
        self._answer(caller, msgspec.structs.replace(probed, dialled=dialled[:200]))

    def _may_move(self, size: int, now: float) -> bool:
        filled = self._left_bytes + (now - self._filled_at) * BYTES_PER_S
        self._left_bytes, self._filled_at = min(float(BURST_BYTES), filled), now
        if size > self._left_bytes:
            return False
        self._left_bytes -= size
        return True


def _is_at(address: str, host: str) -> bool:
    """Is that a port of this very host?  IPv4 callers of a socket for both appear as ::ffff:1.2.3.4."""
    named = address.rpartition(":")[0].strip("[]")
    return is_address(address) and bool(host) and named == host.removeprefix("::ffff:")
