"""The register: who was invited, who is banned, who was struck, and the run's own clock.  A fold over records.  Pure.

Part of the ledger, so that all of it outlives the coordinator.  The run's clock counts the seconds since the run
began: while a coordinator runs by its monotonic clock, which nobody can set; while none runs by the wall clock of its
machine, and never backwards.  No peer's clock takes part, and no peer is told a time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from farflung.coordinator.ledger.records import (
    Admitted,
    Banned,
    CommittedBatch,
    CommittedRound,
    Invited,
    Paused,
    Record,
    Resumed,
    Revoked,
    Started,
    Struck,
    Unbanned,
)

STRIKE_LASTS_S = 86400.0
STRIKES_KEPT = 64  # of one peer
PEERS_KEPT = 4096  # that were struck, or are banned: strangers make ids for nothing


@dataclass
class Invitation:
    uses: int
    until_s: float  # on the run's clock
    note: str
    guests: set[str] = field(default_factory=set)
    revoked: str | None = None  # why


@dataclass
class Register:
    clock_s: float = 0.0  # the newest reading of the run's clock in any record
    began_s: float = 0.0  # the run's clock when the newest coordinator started
    wall_s: float = 0.0  # and the wall clock of its machine then
    invitations: dict[bytes, Invitation] = field(default_factory=dict)
    guests: set[str] = field(default_factory=set)  # peers that came in by an invitation: they may come again
    bans: OrderedDict[str, Banned] = field(default_factory=OrderedDict)
    strikes: OrderedDict[str, deque[Struck]] = field(default_factory=OrderedDict)
    paused: Paused | None = None

    def apply(self, record: Record) -> None:
        match record:
            case Started(clock_s=clock_s, wall_s=wall_s):
                self._saw(clock_s)
                self.began_s, self.wall_s = clock_s, wall_s
            case CommittedRound(at_s=at_s):
                self._saw(at_s)
            case CommittedBatch(rounds=rounds):
                self._saw(rounds[-1].at_s)
            case Invited():
                self._saw(record.at_s)
                self.invitations[record.digest] = Invitation(record.uses, record.until_s, record.note)
            case Revoked(digest=digest) if digest in self.invitations:
                self._saw(record.at_s)
                self.invitations[digest].revoked = record.reason
                if record.guests:
                    self.guests -= self.invitations[digest].guests
            case Admitted(peer=peer, invitation=digest) if digest in self.invitations:
                self.invitations[digest].guests.add(peer)
                self.guests.add(peer)
            case Banned(peer=peer):
                self._saw(record.at_s)
                self.bans[peer] = record
                _keep(self.bans)
            case Unbanned(peer=peer):
                self.bans.pop(peer, None)
                self.strikes.pop(peer, None)
            case Struck(peer=peer):
                self._saw(record.at_s)
                self.strikes.setdefault(peer, deque(maxlen=STRIKES_KEPT)).append(record)
                self.strikes.move_to_end(peer)
                _keep(self.strikes)
            case Paused():
                self.paused = record
            case Resumed():
                self.paused = None
            case _:
                pass

    def clock_at_start(self, wall_s: float) -> float:
        """Of a coordinator that starts now: time went on while there was none."""
        away_s = wall_s - self.wall_s if self.wall_s and wall_s else 0.0
        return max(self.clock_s, self.began_s + away_s)

    def _saw(self, at_s: float) -> None:
        self.clock_s = max(self.clock_s, at_s)

    def strikes_of(self, peer: str, clock_s: float) -> list[Struck]:
        """Those that still count."""
        return [each for each in self.strikes.get(peer, ()) if clock_s - each.at_s < STRIKE_LASTS_S]

    def ban_of(self, peer: str, network: str, clock_s: float) -> Banned | None:
        """The ban that keeps this peer out: its own, or that of its network."""
        for each in (self.bans.get(peer), *self.bans.values()):
            if each is None or clock_s >= each.until_s:
                continue
            if each.peer == peer or (network and each.network == network):
                return each
        return None


def _keep(table: OrderedDict[str, Banned] | OrderedDict[str, deque[Struck]]) -> None:
    while len(table) > PEERS_KEPT:
        table.popitem(last=False)
