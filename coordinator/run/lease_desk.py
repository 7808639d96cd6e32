"""Leases samples to members, and takes back what lost members hold (P7).  Pure.

One of the parts of the run machine: the guidance asks it at every beat, the run machine at every turn of the clock.
It asks the drivers of all fragments what their rounds may still acknowledge.
"""

from __future__ import annotations

from collections.abc import Sequence

from farflung.coordinator.ledger.records import CutShort, Granted, Released
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.dataset_agreement import DatasetAgreement
from farflung.coordinator.run.membership import Looks, Member
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.messages import Beat, Lease
from farflung.protocol.model_schema import BOOKS_FRAGMENT

# Times dead_after_s: how long a lost peer's leases wait for it before others get them.
RELEASE_AFTER_DEAD = 2.0
# And how long, at least, those of a peer wait that this coordinator has not seen yet: while it was away the peer
# knocked less and less often, every 10 s in the end, and what it learned meanwhile would be lost with its leases.
BACK_WITHIN_S = 30.0
LEASES_PER_PEER = 64
POSITIONS_PER_PEER = 1024  # of fragments within leases: a tick that names them all must fit into one message


class LeaseDesk:
    def __init__(self, core: Core, drivers: Sequence[RoundDriver]) -> None:
        self._core = core
        self._drivers = drivers
        self.words = DatasetAgreement(core, drivers)
        self._absent_since: dict[str, float] = {}
        self._awaited: set[str] = set()  # since this coordinator began
        self._has_looked = False
        self._looks = Looks()
        self._leases_per_peer = max(4, min(LEASES_PER_PEER, POSITIONS_PER_PEER // len(drivers)))

    def lease(self, member: Member, beat: Beat) -> tuple[tuple[Lease, ...] | None, tuple[int, ...]]:
        """(all leases of the member if it does not know them yet, those it must not use any more)."""
        core = self._core
        leases = core.ledger.leases
        if any(c.may_use_work_of(member.peer) and not c.counts_on(member) for c in self._drivers):
            # What its former self contributed may yet be acknowledged: nothing is handed out twice.
            return None, ()
        # A member that does not hold this one learns from no samples of its own.
        books = member.standings.get(BOOKS_FRAGMENT)
        able = books is not None and books.verified and not beat.leaving
        self._cut_short(member)
        able, member.without_data = able and self.words.fits(member) and not member.helps, False
        if beat.want and leases.samples and able and not core.finished:
            self._grant(member, beat)
        mine = leases.of(member.peer)
        void = leases.foreign(member.peer, beat.have) if self._is_settled(member, beat) else ()
        if mine.keys() <= set(beat.have) and not beat.unsure:
            return None, void
        return tuple(held.as_lease(i) for i, held in sorted(mine.items())), void

    def _is_settled(self, member: Member, beat: Beat) -> bool:
        """It knows of every commit that used its work, and no round may use more of it."""
        return all(
            said.version == self._drivers[said.fragment].book.version
            and not self._drivers[said.fragment].may_use_work_of(member.peer)
            for said in beat.fragments
        )

    def _cut_short(self, member: Member) -> None:
        """A member that has read its data to the end can't use what it holds beyond: that is for others."""
        leases, ends = self._core.ledger.leases, self.words.ends_of(member)
        beyond = leases.reaching_beyond(member.peer, ends)
        # What it says now it may have said otherwise to a round that is in flight.
        sent = [flight.sent.get(member.peer) for c in self._drivers if (flight := c.round) is not None]
        used = {each.lease for said in sent if said is not None for each in said.used if each.upto > ends}
        free = tuple(each for each in beyond if each not in used)
        if free:
            self._core.write(CutShort(leases=free, samples=ends, peer=member.peer))

    def _grant(self, member: Member, beat: Beat) -> None:
        leases = self._core.ledger.leases
        mine = leases.of(member.peer)
        on_the_way = sum(h.stop - h.upto for i, h in mine.items() if i not in beat.have)
        while on_the_way < beat.want and len(mine) < self._leases_per_peer:
            found = leases.next_range(beat.want, self.words.ends_of(member))
            member.without_data = found is None
            if found is None:
                break
            lease = Lease.at(leases.next_id, found.epoch, found.start, found.stop, found.uptos)
            self._core.write(Granted(peer=member.peer, lease=lease))
            mine = leases.of(member.peer)
            on_the_way += found.stop - found.start

    def reclaim(self) -> None:
        """What peers that are gone did not get committed goes back to the pool: at once from one that took its leave,
        after a while from one that may come back."""
        core = self._core
        self.words.maybe_end()
        if not self._looks.is_due(len(core.members.alive), core.now):
            return
        holders = {held.peer for held in core.ledger.leases.held.values()}
        absent = sorted(
            peer
            for peer in holders
            if peer not in core.members.alive and not any(c.may_use_work_of(peer) for c in self._drivers)
        )
        self._absent_since = {p: self._absent_since.get(p, core.now) for p in absent}
        self._awaited = self._awaited.intersection(absent) if self._has_looked else set(absent)
        self._has_looked = True
        usual_s = RELEASE_AFTER_DEAD * core.members.dead_after_s
        for peer, since in self._absent_since.items():
            left = core.members.has_left(peer)
            patience_s = max(usual_s, BACK_WITHIN_S) if peer in self._awaited else usual_s
            if left or core.now - since >= patience_s:
                why = "left" if left else "did not come back"
                core.write(
                    Released(leases=tuple(core.ledger.leases.of(peer)), reason=f"{core.name(peer)} {why}")
                )
