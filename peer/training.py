"""The agent's view of its trainer: what is loaded, what is frozen, which data is leased.  Pure.

Part of the peer machine.  It decides when the trainer loads a new anchor and how much of its own work it
keeps (P6), when it goes on without the network (P5), and which samples it may use (P7).  What concerns one
fragment is in work.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from farflung.checkpoints.transfer import NO_VERSION
from farflung.collectives.plan import Used
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.messages import Lease
from farflung.optim.schedule import Rules, rules_of
from farflung.peer.effects import Effect, Tell
from farflung.peer.local_messages import Finish, Frozen, LeasesNow, Load, Need
from farflung.peer.work import Work

DONE_KEPT = 1024
BLOCKING = Rules("blocking", period_steps=1)


class Training:
    def __init__(self, rules: Rules = BLOCKING) -> None:
        self.rules = rules
        self.works = [Work(number) for number in range(rules.fragments)]
        self.attached = False
        self.moved_on = False  # some fragment was loaded since the last freeze
        self.leases: dict[int, Lease] = {}
        self.samples = 0
        self.want = 0
        self.unsure = False  # nobody here knows how far the leases are acknowledged: the coordinator is asked
        self._done: deque[int] = deque(
            maxlen=DONE_KEPT
        )  # leases that every fragment has learned from to their end
        self._finish_told = False

    @staticmethod
    def of(manifest: Manifest) -> Training:
        return Training(rules_of(manifest))

    # ---- the trainer comes and goes -----------------------------------------------------------------------

    def on_attach(self) -> None:
        self.attached = True
        self._finish_told = False
        self.want = 0
        for work in self.works:
            work.on_attach()

    def on_gone(self) -> None:
        self.attached = False
        for work in self.works:
            work.on_gone()

    @property
    def loading(self) -> bool:
        return any(work.loading for work in self.works)

    @property
    def waiting(self) -> bool:
        """At the barrier: some frozen work has not been answered yet."""
        return self.attached and any(work.waiting for work in self.works)

    @property
    def stepping(self) -> bool:
        """It is to load what it was told to, or to take inner steps: it waits neither for a round nor for data."""
        busy = self.attached and not self.waiting and not self.want
        return busy and all(not work.fresh for work in self.works)

    # ---- loading ------------------------------------------------------------------------------------------

    def load(self, fragment: int, version: int, consumed: Frozen | None) -> list[Effect]:
        """The anchor is at a new version (or the trainer is fresh).  `consumed`: what a commit used."""
        work = self.works[fragment]
        if consumed is not None:
            work.frozen = None
        return self._tell_load(work.load(version, consumed)) if self.attached else []

    def drop_work(self, fragment: int, version: int) -> list[Effect]:
        """The unmerged work of a fragment goes: it was not finite, or nobody knows whether it was used."""
        self.works[fragment].frozen = None
        return self._tell_load(self.works[fragment].drop(version)) if self.attached else []

    def _drop_all(self, versions: Sequence[int]) -> list[Effect]:
        """`versions`: of each fragment; where none is here, the next load will be a first one."""
        effects: list[Effect] = []
        for fragment, version in enumerate(versions):
            if version == NO_VERSION:
                self.works[fragment].forget()
            else:
                effects += self.drop_work(fragment, version)
        return effects

    def _tell_load(self, load: Load) -> list[Effect]:
        self.moved_on = True
        # Who starts from the anchor or from a slot must know where to go on reading.
        restarts = load.keep in ("drop", "restore")
        return [*(self._tell_leases() if restarts else []), Tell(load)]

    def on_loaded(self, fragment: int) -> None:
        self.works[fragment].on_loaded()

    # ---- freezing -----------------------------------------------------------------------------------------

    def on_frozen(self, frozen: Frozen) -> None:
        self.moved_on = False
        news = tuple(used for used in frozen.used if not self._is_committed(frozen.fragment, used))
        self.works[frozen.fragment].on_frozen(msgspec.structs.replace(frozen, used=news))

    def _is_committed(self, fragment: int, used: Used) -> bool:
        """A trainer that was restarted, or has not heard of the last commit yet, names it all the same."""
        lease = self.leases.get(used.lease)
        known = lease is not None and lease.reached(len(self.works))[fragment] >= used.upto
        return known or used.lease in self._done

    def resume(self) -> list[Effect]:
        """The trainer goes on, whatever it waits for."""
        return [Tell(work.resume()) for work in self.works if self.attached and work.waiting]

    def resume_where(self, idle: Sequence[bool]) -> list[Effect]:
        """Each fragment that no round is using, and whose trainer waits for a word, goes on."""
        return [
            Tell(work.resume())
            for work, free in zip(self.works, idle, strict=True)
            if self.attached and free and work.waiting
        ]

    def on_opened(self, fragment: int, uses: bool) -> list[Effect]:
        """A round of the fragment began; `uses`: what stands frozen goes into it."""
        if not (self.attached and self.rules.told_of_rounds):
            return []
        return [Tell(self.works[fragment].opened(uses and not self.rules.waits))]

    def finish(self, versions: Sequence[int]) -> list[Effect]:
        if not self.attached or self.loading or self._finish_told:
            return []
        self._finish_told = True
        # The script's model is then the run's, without the steps that no round will use any more.
        return [*self._drop_all(versions), Tell(Finish(version=min(versions)))]

    # ---- data ---------------------------------------------------------------------------------------------

    def on_need(self, need: Need) -> None:
        self.samples, self.want = need.samples, need.want

    def on_leases(self, leases: tuple[Lease, ...]) -> list[Effect]:
        """The coordinator's list of all that is leased to me.

        A lease that is not in it any more stays until a commit acknowledges it or the coordinator voids it: work
        behind it may be unmerged, and only `on_void` knows that this work must go.
        """
        fresh = {lease.lease: lease for lease in leases if lease.lease not in self.leases}
        if not (fresh or self.unsure):
            return []
        self.unsure = False
        self.want = max(0, self.want - sum(lease.stop - lease.upto for lease in fresh.values()))
        self.leases |= fresh
        return self._tell_leases()

    def forget_leases(self) -> list[Effect]:
        """Nobody here knows how far they were acknowledged: the coordinator tells them again, as they are now."""
        self.leases.clear()
        self.unsure = True
        return self._tell_leases()

    def on_commit_used(self, fragment: int, used: dict[int, int]) -> list[Effect]:
        """A commit acknowledged my samples for this fragment: the trainer must not name them again."""
        for lease_id, upto in used.items():
            lease = self.leases.get(lease_id)
            if lease is not None:
                uptos = list(lease.reached(len(self.works)))
                uptos[fragment] = max(uptos[fragment], upto)
                self.leases[lease_id] = _moved(lease, uptos)
                if min(uptos) >= lease.stop:
                    del self.leases[lease_id]
                    self._done.append(lease_id)
        return self._tell_leases() if used and not self.works[fragment].fresh else []

    def on_void(self, void: tuple[int, ...], versions: Sequence[int]) -> list[Effect]:
        """Samples that I took for mine were given to somebody else: the work behind them goes, in all fragments."""
        mine = self.known_leases & set(void)
        if not mine:
            return []
        for lease_id in mine:
            self.leases.pop(lease_id, None)
        return self._drop_all(versions)

    @property
    def known_leases(self) -> set[int]:
        """Leases that I think are mine, and those behind work that stands frozen."""
        return self.leases.keys() | {u.lease for work in self.works for u in _used(work)}

    def _tell_leases(self) -> list[Effect]:
        """Where each fragment's work goes on: behind what is committed, and behind what stands frozen."""
        if not self.attached:
            return []
        frozen = [{used.lease: used.upto for used in _used(work)} for work in self.works]
        told = []
        for _, lease in sorted(self.leases.items()):
            reached = lease.reached(len(self.works))
            uptos = [max(upto, by.get(lease.lease, 0)) for upto, by in zip(reached, frozen, strict=True)]
            told.append(_moved(lease, uptos))
        return [Tell(LeasesNow(leases=tuple(told), unsure=self.unsure))]


def _used(work: Work) -> tuple[Used, ...]:
    return work.frozen.used if work.frozen is not None else ()


def _moved(lease: Lease, uptos: Sequence[int]) -> Lease:
    return Lease.at(lease.lease, lease.epoch, lease.start, lease.stop, tuple(uptos))
