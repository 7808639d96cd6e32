"""Peers of a simulated run that break rules, and pairs of them that can't reach each other.

`Neighbours` are those of a pipeline: peers that are mute, damage what they send, or slander others.  The world asks
for every frame and every word of a peer; all of it lasts from a moment on until the run ends.  `LastPeer` damages
frames, changes what it has learned, makes wrong sums, lies about those of others, or keeps to itself what auditors ask
for.  The world asks whenever that peer sends something or has calculated something.  Nothing here draws anything in a
run without such peers.  Must not know the clock, the network, or what anybody makes of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from farflung.collectives.round.effects import Merge, MergeGroup, SendFrame
from farflung.coordinator.ledger.ledger import Ledger
from farflung.peer.machine.replicas import Replicas
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Kind, Payload
from farflung.protocol.messages import Audited, Beat, Complaint, FromMember
from farflung.simulator.hostile import Parts, damaged, forged, forged_sum, lied, spoil
from farflung.simulator.scenario import Scenario

# A peer whose hand for crossings hangs still says that there is room: that was somebody else's work.
_STILL_SAID = "ROOM"


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
        kind = effect.frame.header.kind
        about = kind.crossing or kind in (Kind.LATER, Kind.MISSING)
        return source in self._mute and about and kind.name != _STILL_SAID

    def spoils(self, source: str, effect: SendFrame, header: bytes, payload: bytes, calm: bool) -> Parts:
        if not effect.frame.header.kind.crossing:
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
        book = ledger.parts["batches"]
        mine = book.seat_of(source)
        if message.batch is None or mine is None:
            return message
        near = [seat.number for seat in book.seats.values() if abs(seat.stage - mine.stage) == 1]
        few = near if self.scenario.chunks % 2 else near[:1]
        said = tuple(Complaint(number, self.scenario.batch == 12) for number in few)
        return replace(message, batch=replace(message.batch, complains=said))


@dataclass
class LastPeer:
    scenario: Scenario
    peer: str
    random: random.Random
    elements: int  # of a chunk
    cheated: dict[int, int] = field(default_factory=dict)  # by round, the chunk that is made wrong
    wrong: set[bytes] = field(default_factory=set)  # hashes of the sums that it made wrong
    wrong_sums: dict[bytes, bytes] = field(default_factory=dict)  # of groups: by the hash of the right one
    told_by_auditors: list[Audited] = field(default_factory=list)

    @property
    def hostile(self) -> str:
        """Its name, where it damages its frames."""
        return self.peer if self.scenario.hostile > 0.0 else ""

    def spoils(self, source: str, header: bytes, payload: bytes, now: float) -> Parts:
        if source == self.hostile and now < self.scenario.hostile_until_s:  # else a seed keeps its course
            if self.random.random() < self.scenario.hostile:
                return spoil(header, payload, self.random)
        return header, payload

    def forges(self, source: str, payloads: dict[int, Payload]) -> dict[int, Payload]:
        how = self.scenario.forges if source == self.peer else ""
        return forged(payloads, self.elements, how) if how else payloads

    def forges_sum(self, source: str, effect: Merge, made: bytes) -> bytes:
        """One chunk of each round that it owns any of: of a mesh the result, or what its group adds to it."""
        of_group = isinstance(effect, MergeGroup)
        if not self.scenario.cheats or source != self.peer or of_group != self.scenario.cheats_in_group:
            return made
        if self.cheated.setdefault(effect.round_no, effect.chunk) != effect.chunk:
            return made
        wrong = forged_sum(made)
        self.wrong.add(hash_bytes(wrong))
        if of_group:
            self.wrong_sums[hash_bytes(made)] = wrong
        return wrong

    def says(self, message: FromMember, lies: bool) -> FromMember | None:
        """What an auditor says; `lies`: it is of the league.  None: it keeps silent."""
        if isinstance(message, Audited) and lies:
            if self.scenario.mutes:
                return None
            message = lied(message, wrong=self.scenario.accuses)
        if isinstance(message, Audited):
            self.told_by_auditors.append(message)
        return message

    def withholds(self, source: str, effect: SendFrame, part: Replicas | None) -> bool:
        """Owners get its contribution, and auditors do not."""
        if not self.scenario.withholds or source != self.peer:
            return False
        header = effect.frame.header
        replica = part.replica_of_chunk(header.chunk) if part is not None else None
        if header.kind != Kind.CONTRIBUTION or replica is None:
            return False
        plan = replica.rounds.flight.plan if replica.rounds.flight is not None else None
        if plan is None or plan.round_no != header.round_no:
            return True
        return plan.owner_of(header.chunk - replica.fragment.first) != effect.to
