"""The agent's view of its trainer: what is loaded, what is frozen, which data is leased.  Pure.

Part of the peer machine.  It decides when the trainer loads a new anchor and how much of its own work it
keeps (P6), when it goes on without the network (P5), and which samples it may use (P7).
"""

from __future__ import annotations

from farflung.coordinator.messages import Lease
from farflung.peer.effects import Effect, Tell
from farflung.peer.local_messages import Finish, Frozen, Keep, LeasesNow, Load, Need, Resume


class Training:
    def __init__(self) -> None:
        self.attached = False
        self.fresh = True  # the trainer has loaded nothing since it attached
        self.loading = False
        self.running = False  # taking inner steps, not waiting at the barrier
        self.frozen: Frozen | None = None  # unmerged work that stands in a slot
        self.sent_slot: int | None = (
            None  # the slot that a round is using, until its commit or abort is known
        )
        self.leases: dict[int, Lease] = {}
        self.samples = 0
        self.want = 0
        self._finish_told = False

    # ---- the trainer comes and goes -----------------------------------------------------------------------

    def on_attach(self) -> None:
        self.attached = self.fresh = True
        self.loading = self.running = self._finish_told = False
        self.want = 0

    def on_gone(self) -> None:
        """It died.  Work that stands in a slot is still good; the rest died with it."""
        self.attached = self.loading = self.running = False
        self.fresh = True

    # ---- loading ------------------------------------------------------------------------------------------

    def load(self, version: int, consumed: Frozen | None) -> list[Effect]:
        """The anchor is at a new version (or the trainer is fresh).  `consumed`: what a commit used."""
        if consumed is not None:
            self.frozen = None
        if not self.attached:
            return []
        if self.fresh:
            return self._load(version, "restore" if self.frozen is not None else "drop", self.frozen)
        return self._load(version, "all" if consumed is None else "rest", consumed)

    def drop_work(self, version: int) -> list[Effect]:
        """The samples behind the unmerged work were given to somebody else."""
        self.frozen = None
        return self._load(version, "drop", None) if self.attached else []

    def _load(self, version: int, keep: Keep, work: Frozen | None) -> list[Effect]:
        """`work`: what a commit used (rest), or what the trainer takes as its own (restore)."""
        effects: list[Effect] = []
        if self.fresh or keep == "drop":
            effects += self._tell_leases()
        self.fresh = False
        self.loading = self.running = True
        effects.append(
            Tell(
                Load(
                    version=version,
                    keep=keep,
                    slot=work.slot if work else 0,
                    tokens=work.tokens if work else 0,
                    steps=work.steps if work else 0,
                    spare=self._spare(),
                )
            )
        )
        return effects

    def on_loaded(self) -> None:
        self.loading = False

    # ---- freezing -----------------------------------------------------------------------------------------

    def on_frozen(self, frozen: Frozen) -> None:
        if self.loading:
            # It crossed the Load.  What it speaks of may be merged or dropped by now, and its slot may be the one
            # that the Load names as spare.  The trainer goes on, and its next freeze holds all that it still owes.
            return
        self.frozen = frozen
        self.running = False

    def resume(self) -> list[Effect]:
        self.running = True
        return [Tell(Resume(spare=self._spare()))]

    def _spare(self) -> int:
        """A slot that holds neither the newest frozen work nor what a round is using."""
        taken = {self.sent_slot, self.frozen.slot if self.frozen is not None else None}
        return min({0, 1, 2} - taken)

    def finish(self, version: int) -> list[Effect]:
        if not self.attached or self.loading or self._finish_told:
            return []
        self._finish_told = True
        # The script's model is then the run's, without the steps that no round will use any more.
        return [*self._load(version, "drop", None), Tell(Finish(version=version))]

    # ---- data ---------------------------------------------------------------------------------------------

    def on_need(self, need: Need) -> None:
        self.samples, self.want = need.samples, need.want

    def on_leases(self, leases: tuple[Lease, ...]) -> list[Effect]:
        """The coordinator's list of all that is leased to me.

        A lease that is not in it any more stays until a commit acknowledges it or the coordinator voids it: work
        behind it may be unmerged, and only `on_void` knows that this work must go.
        """
        fresh = {lease.lease: lease for lease in leases if lease.lease not in self.leases}
        if not fresh:
            return []
        self.want = max(0, self.want - sum(lease.stop - lease.upto for lease in fresh.values()))
        self.leases |= fresh
        return self._tell_leases()

    def on_commit_used(self, used: dict[int, int]) -> list[Effect]:
        """A commit acknowledged my samples: the trainer must not name them again."""
        for lease_id, upto in used.items():
            lease = self.leases.get(lease_id)
            if lease is not None:
                if upto >= lease.stop:
                    del self.leases[lease_id]
                else:
                    self.leases[lease_id] = Lease(lease.lease, lease.epoch, lease.start, lease.stop, upto)
        return self._tell_leases() if used and not self.fresh else []

    def on_void(self, void: tuple[int, ...], version: int) -> list[Effect]:
        mine = self.known_leases & set(void)
        if not mine:
            return []
        for lease_id in mine:
            self.leases.pop(lease_id, None)
        return self.drop_work(version)

    @property
    def known_leases(self) -> set[int]:
        """Leases that I think are mine, and those behind work that stands frozen."""
        behind = {u.lease for u in self.frozen.used} if self.frozen is not None else set()
        return self.leases.keys() | behind

    def _tell_leases(self) -> list[Effect]:
        """Where to go on reading: behind what is committed, and behind what stands frozen."""
        if not self.attached:
            return []
        frozen = {u.lease: u.upto for u in self.frozen.used} if self.frozen is not None else {}
        return [
            Tell(
                LeasesNow(
                    leases=tuple(
                        Lease(x.lease, x.epoch, x.start, x.stop, max(x.upto, frozen.get(x.lease, 0)))
                        for _, x in sorted(self.leases.items())
                    )
                )
            )
        ]
