"""The register: who was invited, who is banned, who was struck.  A fold over records.  Pure.

The admission's part of the ledger, with its records in the run's journal, so that all of it outlives the coordinator.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from farflung.coordinator.ledger.ledger import Ledger, LedgerPart
from farflung.coordinator.ledger.records import Record, Struck

STRIKE_LASTS_S = 86400.0
STRIKES_KEPT = 64  # of one peer
PEERS_KEPT = 4096  # that were struck, or are banned: strangers make ids for nothing


# ---- records ------------------------------------------------------------------------------------------


class Invited(Record, frozen=True, kw_only=True, tag="invited"):
    """So many peers may come in with the token that has this digest.  The token itself is not kept."""

    digest: bytes
    uses: int
    until_s: float  # on the run's clock
    at_s: float
    note: str = ""  # for whom


class CameByInvitation(Record, frozen=True, kw_only=True, tag="came_by_invitation"):
    """One use of it; with the record that this peer was admitted."""

    peer: str
    digest: bytes


class Revoked(Record, frozen=True, kw_only=True, tag="revoked"):
    """Nobody comes in with this invitation any more."""

    digest: bytes
    reason: str
    at_s: float
    guests: bool = False  # those who came in by it may not come again without another one


class Banned(Record, frozen=True, kw_only=True, tag="banned"):
    peer: str
    reason: str
    at_s: float
    until_s: float
    network: str = ""  # nobody else from there is let in either


class Unbanned(Record, frozen=True, kw_only=True, tag="unbanned"):
    """Its strikes are forgotten as well."""

    peer: str


OF_ADMISSION: tuple[type[Record], ...] = (Invited, CameByInvitation, Revoked, Banned, Unbanned)


# ---- what they make -------------------------------------------------------------------------------------


@dataclass
class Invitation:
    uses: int
    until_s: float  # on the run's clock
    note: str
    guests: set[str] = field(default_factory=set)
    revoked: str | None = None  # why


@dataclass
class Register(LedgerPart):
    invitations: dict[bytes, Invitation] = field(default_factory=dict)
    guests: set[str] = field(default_factory=set)  # peers that came in by an invitation: they may come again
    bans: OrderedDict[str, Banned] = field(default_factory=OrderedDict)
    strikes: OrderedDict[str, deque[Struck]] = field(default_factory=OrderedDict)

    def apply(self, record: Record, ledger: Ledger) -> None:
        match record:
            case Invited():
                self.invitations[record.digest] = Invitation(record.uses, record.until_s, record.note)
            case Revoked(digest=digest) if digest in self.invitations:
                self.invitations[digest].revoked = record.reason
                if record.guests:
                    self.guests -= self.invitations[digest].guests
            case CameByInvitation(peer=peer, digest=digest) if digest in self.invitations:
                self.invitations[digest].guests.add(peer)
                self.guests.add(peer)
            case Banned(peer=peer):
                self.bans[peer] = record
                _keep(self.bans)
            case Unbanned(peer=peer):
                self.bans.pop(peer, None)
                self.strikes.pop(peer, None)
            case Struck(peer=peer):
                self.strikes.setdefault(peer, deque(maxlen=STRIKES_KEPT)).append(record)
                self.strikes.move_to_end(peer)
                _keep(self.strikes)
            case _:
                pass

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
