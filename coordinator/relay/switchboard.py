"""Who is joined to whom at the relay, who waits, and whose time is over.  Pure.

Asked by relay.py, which owns the connections and names them by numbers.  A connection is a guest until it has shown a
ticket, then one side of a pair; two sides of a pair are joined.  Whatever a stranger does costs one of few places for a
few seconds; whatever somebody with a ticket does costs its own pair.  Must not know sockets, SOCKS or bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from farflung.coordinator.reach.relays import Ticket
from farflung.protocol.process.networks import StrangerCounts

PAIRS_MOST = 128
GUESTS_MOST = 64  # connections without a ticket
GUESTS_OF_NETWORK = 16
GUEST_PATIENCE_S = 5.0  # so long a ticket may take
WAITS_S = 60.0  # for the other side
IDLE_S = 600.0  # rounds may be minutes apart
AGAIN_S = 1.0  # a side takes its own place anew at most so often


class PairingOutcome(NamedTuple):
    """What becomes of a connection that showed a ticket."""

    why_not: str = ""
    joined_to: int | None = None  # the other side's connection; None: it waits for it
    closed: tuple[int, ...] = ()  # connections whose place it took


@dataclass
class _Pair:
    sides: list[int | None] = field(default_factory=lambda: [None, None])
    since: list[float] = field(default_factory=lambda: [float("-inf"), float("-inf")])
    newest_until_s: list[int] = field(default_factory=lambda: [0, 0])  # of the tickets that were used
    joined: bool = False
    moved_at: float = 0.0

    @property
    def here(self) -> tuple[int, ...]:
        return tuple(side for side in self.sides if side is not None)


class Switchboard:
    def __init__(self) -> None:
        self._guests = StrangerCounts(GUESTS_MOST, GUESTS_OF_NETWORK, GUEST_PATIENCE_S)
        self._guest_since: dict[int, float] = {}
        self._pairs: dict[bytes, _Pair] = {}
        self._pair_of: dict[int, bytes] = {}
        self._wanted: frozenset[bytes] = frozenset()
        self._clock_ahead_s = 0.0

    @property
    def guests(self) -> int:
        return len(self._guest_since)

    @property
    def joined(self) -> int:
        return sum(pair.joined for pair in self._pairs.values())

    @property
    def waiting(self) -> int:
        return sum(bool(pair.here) and not pair.joined for pair in self._pairs.values())

    def want(self, pairs: Iterable[bytes], clock_ahead_s: float = 0.0) -> list[int]:
        """The coordinator names those that may meet; which connections are to be closed.  `clock_ahead_s`: of the clock
        by which tickets end."""
        self._clock_ahead_s = clock_ahead_s
        self._wanted = frozenset(list(pairs)[:PAIRS_MOST])
        closed = [
            each for name, pair in self._pairs.items() if name not in self._wanted for each in pair.here
        ]
        self._pairs = {name: pair for name, pair in self._pairs.items() if name in self._wanted}
        for connection in closed:
            self._pair_of.pop(connection, None)
        return closed

    def comes(self, connection: int, network: str, now: float) -> list[int]:
        """Which connections are to be closed, to make room; perhaps this very one."""
        cut = self._guests.comes(connection, network, now)
        for each in cut:
            self._guest_since.pop(each, None)
        if connection not in cut:
            self._guest_since[connection] = now
        return cut

    def shows(self, connection: int, ticket: Ticket, now: float) -> PairingOutcome:
        if now + self._clock_ahead_s > ticket.until_s:
            return PairingOutcome("its ticket has ended")
        if ticket.pair not in self._wanted:
            return PairingOutcome("the coordinator does not want this pair to meet")
        pair = self._pairs.setdefault(ticket.pair, _Pair())
        side, other = ticket.side, pair.sides[1 - ticket.side]
        if ticket.until_s < pair.newest_until_s[side]:
            return PairingOutcome("a newer ticket was shown already")
        before = pair.sides[side]
        if before is not None and now - pair.since[side] < AGAIN_S:
            return PairingOutcome("it took its own place a moment ago")
        closed = (() if before is None else (before,)) + (
            (other,) if pair.joined and other is not None else ()
        )
        for (
            each
        ) in closed:  # the other end of a connection that is replaced would wait for bytes that never come
            self._forget(each)
        self._leave_guests(connection)
        pair.sides[side], pair.since[side] = connection, now
        pair.newest_until_s[side] = ticket.until_s
        self._pair_of[connection] = ticket.pair
        other = pair.sides[1 - side]
        pair.joined, pair.moved_at = other is not None, now
        return PairingOutcome(joined_to=other, closed=closed)

    def pair_of(self, connection: int) -> bytes | None:
        return self._pair_of.get(connection)

    def moved(self, pair: bytes, now: float) -> None:
        if pair in self._pairs:
            self._pairs[pair].moved_at = now

    def ends(self, connection: int) -> list[int]:
        """It is closed; who must be closed with it."""
        self._leave_guests(connection)
        name = self._pair_of.get(connection)
        if name is None:
            return []
        pair = self._pairs[name]
        others = [each for each in pair.here if each != connection] if pair.joined else []
        for each in (connection, *others):
            self._forget(each)
        return others

    def over(self, now: float) -> list[int]:
        """Those whose time is over: without a ticket, without the other side, without a byte."""
        late = [each for each, since in self._guest_since.items() if now - since >= GUEST_PATIENCE_S]
        for pair in self._pairs.values():
            patience_s = IDLE_S if pair.joined else WAITS_S
            if pair.here and now - pair.moved_at >= patience_s:
                late += pair.here
        return late

    def _leave_guests(self, connection: int) -> None:
        self._guests.ends(connection)
        self._guest_since.pop(connection, None)

    def _forget(self, connection: int) -> None:
        name = self._pair_of.pop(connection, None)
        if name is not None and (pair := self._pairs.get(name)) is not None:
            pair.sides = [None if each == connection else each for each in pair.sides]
            pair.joined = False


# ---- turns -------------------------------------------------------------------------------------------------
# Whose bytes pass next, and how many: a rate for all pairs together, which those that have something to pass
# share equally. Pure.
#
# Asked by relay.py before each read. What is not read waits in the kernel, and then at its sender: TCP holds
# it back. A pair that hogs waits for its turn as the others do; one that sends little gets all that it needs.
# Must not know sockets.

TURN_BYTES = 256 * 1024  # at most, in one turn: fewer would cost the processor more for each byte
LEAST_TURN_BYTES = 4 * 1024
TURN_S = 0.05  # nor more than passes in so long: with a low rate, turns are small
SAVED_TURNS, SAVED_S = 8, 0.02  # may pass at once after a pause, or when this process woke up late
GATHERED_TURNS = 4  # are waited for together: to wake up costs more than to pass a turn


class RelayTurn(NamedTuple):
    pair: bytes
    most_bytes: int


class Turns:
    def __init__(self, bytes_per_s: float, now: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._turn_bytes = int(min(TURN_BYTES, max(LEAST_TURN_BYTES, TURN_S * bytes_per_s)))
        self._saved_most = max(float(SAVED_TURNS * self._turn_bytes), SAVED_S * bytes_per_s)
        self._left = self._saved_most
        self._filled_at = now
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # -> what it has left of its turn

    def __len__(self) -> int:
        return len(self._waiting)

    def wants(self, pair: bytes) -> None:
        """It has something to pass, and keeps its place."""
        self._waiting.setdefault(pair, self._turn_bytes)

    def rests(self, pair: bytes) -> None:
        """It has nothing more for now, or nobody takes it: the next time it comes last."""
        self._waiting.pop(pair, None)

    def next(self, now: float) -> RelayTurn | None:
        """None: nobody waits, or nothing may pass yet (`wait_s`)."""
        self._fill(now)
        pair = next(iter(self._waiting), None)
        if pair is None:
            return None
        due = self._waiting[pair]
        return RelayTurn(pair, due) if self._left >= due else None

    def took(self, pair: bytes, size: int) -> None:
        self._left -= size
        left = self._waiting.get(pair)
        if left is None:
            return
        if left - size > LEAST_TURN_BYTES:
            self._waiting[pair] = left - size
        else:
            self._waiting[pair] = self._turn_bytes
            self._waiting.move_to_end(pair)

    def wait_s(self, now: float) -> float | None:
        """Until something may pass; None: nobody waits."""
        pair = next(iter(self._waiting), None)
        if pair is None:
            return None
        self._fill(now)
        if self._left >= self._waiting[pair]:
            return 0.0
        return (GATHERED_TURNS * self._turn_bytes - self._left) / self.bytes_per_s

    def _fill(self, now: float) -> None:
        self._left = min(self._saved_most, self._left + (now - self._filled_at) * self.bytes_per_s)
        self._filled_at = now
