"""The relay of `farflung join --relay RATE` and `farflung assist --relay RATE`: the coordinator's, beside an agent.

Made by the command line, and handed to the agent, which is in the same process and knows nothing of a relay's code
(peer/line/reachability.py).  It is a process of its own with the same bounds as a coordinator's: a rate for all pairs,
fair shares, a month's bytes.  It is told the run's public key, and lets in whoever has a ticket for this very relay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from farflung.coordinator.relay.relay_hand import KeptRelay, Month, RelayProcess
from farflung.coordinator.relay.relay_words import RelaySettings
from farflung.peer.line.reachability import RelayTerms
from farflung.peer.settings import OwnConfig, default_path
from farflung.protocol.caps import parse_relay
from farflung.protocol.errors import RelayCause, UserError
from farflung.protocol.mode_words import RelayOffer
from farflung.protocol.process import own_files

FILE_NAME = "relay.json"
MONTH_SETTING = "--relay"


class OfferedRelay:
    def __init__(
        self, host: str, port: int, bytes_per_s: float, month: Month, note: Callable[[str], None]
    ) -> None:
        """`port`: 0 takes any free one."""
        self._host, self._port, self._bytes_per_s = host, port, bytes_per_s
        self._month = month
        self._note = note
        self._terms: RelayTerms | None = None
        self._kept: KeptRelay | None = None

    def follow(self, terms: RelayTerms, pairs: tuple[bytes, ...], clock_ahead_s: float) -> None:
        if self._kept is None or terms != self._terms:
            self._begin(terms)
        if self._kept is not None:
            self._kept.process.want(pairs, clock_ahead_s)

    def _begin(self, terms: RelayTerms) -> None:
        """Another coordinator signs other tickets: then those who are joined come again."""
        if self._kept is not None:
            self._port = self._kept.process.port or self._port
            self._kept.close()
        begin = RelaySettings(
            run_id=terms.run_id,
            incarnation=terms.incarnation,
            public=terms.public,
            host=self._host,
            port=self._port,
            bytes_per_s=self._bytes_per_s,
            relay=terms.peer,
        )
        self._terms = terms
        self._kept = KeptRelay(RelayProcess(begin, self._note), self._month, MONTH_SETTING)

    def turn(self, now: float) -> RelayOffer:
        rate = round(self._bytes_per_s)
        if self._kept is None:
            return RelayOffer(0, rate, 0, why_not=RelayCause.NO_ORDER)
        relay, _ = self._kept.turn(now, time.time())
        usage = self._kept.usage
        return RelayOffer(
            relay.port if relay is not None else 0,
            rate,
            0,
            usage.pairs,
            usage.waiting,
            usage.moved_bytes,
            usage.refused,
            self._kept.cause if relay is None else "",
        )

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


def offered_relay(own: OwnConfig, note: Callable[[str], None]) -> OfferedRelay | None:
    """What the volunteer's settings ask for; None: no relay.  UserError for one that nobody could reach."""
    limits = parse_relay(own.relay) if own.relay else None
    if limits is None:
        return None
    if own.listen == "off":
        raise UserError("--relay: others must be able to dial this peer for that; leave --listen off away")
    host = own.listen.rpartition(":")[0].strip("[]")
    place = (own.identity or default_path()).parent
    own_files.made_folder(place)
    month = Month.load(Path(place) / FILE_NAME, limits.month_bytes)
    host = "*" if host in ("", "0.0.0.0", "::") else host
    return OfferedRelay(host, limits.port, limits.bytes_per_s, month, note)
