"""Bad neighbours in a simulated pipeline: pairs that can't reach each other, and peers that are mute, damage what they
send, or slander others.

Asked by the world for every frame and every word of a peer.  All of it lasts from a moment on until the run ends, and
nothing is drawn in a run without it.  Must not know what anybody makes of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from farflung.collectives.round.effects import SendFrame
from farflung.coordinator.ledger.ledger import Ledger
from farflung.peer.simulator.hostile import Parts, damaged
from farflung.peer.simulator.scenario import Scenario
from farflung.protocol.frames import CROSSING_KINDS, Kind
from farflung.protocol.messages import Beat, Complaint, FromMember

# A peer whose hand for crossings hangs still says that there is room: that was somebody else's work.
_MUTED = (CROSSING_KINDS | {Kind.LATER, Kind.MISSING}) - {Kind.ROOM}


@dataclass
class Neighbours:
    scenario: Scenario
    peers: Sequence[str]  # in order
    random: random.Random
    ledger: Callable[[], Ledger | None]  # of the coordinator, which knows who sits where
    now: Callable[[], float]

    def __post_init__(self) -> None:
        name, drawn = self.peers.__getitem__, self.scenario
        self._apart = {frozenset(map(name, pair)) for pair in drawn.apart}
        self._mute, self._damages = set(map(name, drawn.mute)), set(map(name, drawn.damages))
        self.slanderers = set(map(name, drawn.slanders))

    @property
    def _began(self) -> bool:
        return self.now() >= self.scenario.bad_from_s

    def holds_back(self, source: str, effect: SendFrame) -> bool:
        """It never leaves."""
        if not self._began:
            return False
        if frozenset((source, effect.to)) in self._apart:
            return True
        return source in self._mute and effect.frame.header.kind in _MUTED

    def spoils(self, source: str, effect: SendFrame, header: bytes, payload: bytes, calm: bool) -> Parts:
        if effect.frame.header.kind not in CROSSING_KINDS:
            return header, payload
        by_line = not calm and self.random.random() < self.scenario.damaged
        if by_line or (source in self._damages and self._began):
            return damaged(header, payload, self.random)
        return header, payload

    def says(self, source: str, message: FromMember) -> FromMember:
        """A slanderer complains of one neighbour, or of all of them."""
        ledger = self.ledger()
        lies = source in self.slanderers and self._began
        if not lies or not isinstance(message, Beat) or ledger is None:
            return message
        book = ledger.batches
        mine = book.seat_of(source)
        if message.batch is None or mine is None:
            return message
        near = [seat.number for seat in book.seats.values() if abs(seat.stage - mine.stage) == 1]
        few = near if self.scenario.chunks % 2 else near[:1]
        said = tuple(Complaint(number, self.scenario.batch == 12) for number in few)
        return replace(message, batch=replace(message.batch, complains=said))
