"""Leases samples to members, and takes back what lost members hold (P7).  Pure.

One of the parts of the run machine: the guidance asks it at every beat, the run machine at every turn of the clock.
The commits of one fragment acknowledge samples for all of them: its conductor is the one that is asked here.
"""

from __future__ import annotations

from farflung.collectives.fragments import BOOKS_FRAGMENT
from farflung.coordinator.conductor import Conductor
from farflung.coordinator.core import Core
from farflung.coordinator.membership import Member
from farflung.coordinator.messages import Beat, Lease
from farflung.coordinator.records import DataFixed, Granted, Released

RELEASE_AFTER_DEAD = (
    2.0  # times dead_after_s: how long a lost peer's leases wait for it before others get them
)
LEASES_PER_PEER = 64


class Lending:
    def __init__(self, core: Core, keeper: Conductor) -> None:
        self._core = core
        self._keeper = keeper  # its commits acknowledge samples
        self._absent_since: dict[str, float] = {}

    def take_size(self, member: Member, beat: Beat) -> str | None:
        core = self._core
        alone = not core.ledger.learned and core.members.alive.keys() == {member.peer}
        if (
            beat.samples
            and beat.samples != core.ledger.leases.samples
            and (not core.ledger.leases.samples or alone)
        ):
            core.write(DataFixed(samples=beat.samples, peer=member.peer))
        run_samples = core.ledger.leases.samples
        if beat.samples and beat.samples != run_samples:
            return f"data set has {beat.samples} samples here, {run_samples} in the run; use the same data"
        return None

    def lease(self, member: Member, beat: Beat) -> tuple[tuple[Lease, ...] | None, tuple[int, ...]]:
        """(all leases of the member if it does not know them yet, those it must not use any more)."""
        core = self._core
        leases = core.ledger.leases
        flight, version = self._keeper.round, self._keeper.book.version
        in_flight = flight is not None and member.peer in flight.plan.members
        if in_flight and not self._keeper.counts_on(member):
            return (
                None,
                (),
            )  # what its former self contributed may yet be acknowledged: nothing is handed out twice
        if beat.want and leases.samples and self._keeper.standing(member).verified and not core.finished:
            self._grant(member, beat)
        mine = leases.of(member.peer)
        settled = beat.fragments[BOOKS_FRAGMENT].version == version and not in_flight
        void = leases.foreign(member.peer, beat.have) if settled else ()
        if mine.keys() <= set(beat.have):
            return None, void
        return tuple(held.as_lease(i) for i, held in sorted(mine.items())), void

    def _grant(self, member: Member, beat: Beat) -> None:
        leases = self._core.ledger.leases
        mine = leases.of(member.peer)
        on_the_way = sum(h.stop - h.upto for i, h in mine.items() if i not in beat.have)
        while on_the_way < beat.want and len(mine) < LEASES_PER_PEER:
            epoch, start, stop = leases.next_range(beat.want)
            lease = Lease(leases.next_id, epoch, start, stop, start)
            self._core.write(Granted(peer=member.peer, lease=lease))
            mine = leases.of(member.peer)
            on_the_way += stop - start

    def reclaim(self) -> None:
        """What lost peers did not get committed goes back to the pool, after a while."""
        core = self._core
        holders = {held.peer for held in core.ledger.leases.held.values()}
        flight = self._keeper.round
        busy = set(flight.plan.members) if flight is not None else set()
        absent = sorted(p for p in holders if p not in core.members.alive and p not in busy)
        self._absent_since = {p: self._absent_since.get(p, core.now) for p in absent}
        patience_s = RELEASE_AFTER_DEAD * core.members.dead_after_s
        for peer, since in self._absent_since.items():
            if core.now - since >= patience_s:
                core.write(
                    Released(
                        leases=tuple(core.ledger.leases.of(peer)),
                        reason=f"{core.name(peer)} did not come back",
                    )
                )
