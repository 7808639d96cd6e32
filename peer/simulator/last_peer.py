"""The last peer of a simulated run, where its scenario has it break rules.

It damages frames, changes what it has learned, makes wrong sums, lies about those of others, or keeps to itself what
auditors ask for.
Asked by the world (world.py) whenever that peer sends something or has calculated something.  Must not know the clock,
the network, or what anybody makes of it.  Nothing here draws anything in a run without such a peer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from farflung.collectives.round.effects import Merge, SendFrame
from farflung.peer.machine.lanes import Participation
from farflung.peer.simulator.hostile import Parts, forged, forged_sum, lied, spoil
from farflung.peer.simulator.scenario import Scenario
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Kind, Payload
from farflung.protocol.messages import Audited, FromMember


@dataclass
class LastPeer:
    scenario: Scenario
    peer: str
    random: random.Random
    elements: int  # of a chunk
    cheated: dict[int, int] = field(default_factory=dict)  # by round, the chunk that is made wrong
    wrong: set[bytes] = field(default_factory=set)  # hashes of the sums that it made wrong
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
        """One chunk of each round that it owns any of."""
        if not self.scenario.cheats or source != self.peer:
            return made
        if self.cheated.setdefault(effect.round_no, effect.chunk) != effect.chunk:
            return made
        wrong = forged_sum(made)
        self.wrong.add(hash_bytes(wrong))
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

    def withholds(self, source: str, effect: SendFrame, part: Participation | None) -> bool:
        """Owners get its contribution, and auditors do not."""
        if not self.scenario.withholds or source != self.peer:
            return False
        header = effect.frame.header
        lane = part.lane_of_chunk(header.chunk) if part is not None else None
        if header.kind != Kind.CONTRIBUTION or lane is None:
            return False
        flight = lane.round if lane.is_in_flight(header.round_no) else None
        return flight is None or flight.plan.owner_of(header.chunk - lane.fragment.first) != effect.to
