"""The agent's view of a trainer that makes sums of a synchronous batch, in place of steps of its own.  Pure.

The core's view and what a new version means for the trainer's work (peer/machine/trainer_proxy.py, trainer_sync.py),
where they differ: sums are made from one version and belong to one seat, so that what no commit used is of no use, and
there is nothing to take alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from farflung.optim.schedule import ScheduleRules
from farflung.peer.batches.batch_work import BatchWork, SeatSums
from farflung.peer.local.words import Frozen, LoadState, MicrobatchCounted
from farflung.peer.machine.effects import Effect, Note, TellTrainer
from farflung.peer.machine.replicas import Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.peer.machine.trainer_sync import TrainerSync
from farflung.protocol.messages import BatchBeat, Tick


class BatchProxy(TrainerProxy):
    # Sums of a batch are of no other: a round that takes them is the one that a leaving peer stays for.
    stays_for_round = True

    def __init__(self, rules: ScheduleRules, sums: SeatSums, held: Iterable[int] | None = None) -> None:
        super().__init__(rules, held)
        self.sums = sums

    # ---- questions --------------------------------------------------------------------------------------

    @property
    def waits_for_round(self) -> bool:
        return False

    @property
    def owes(self) -> bool:
        return self.sums.counted != 0

    @property
    def stepping(self) -> bool:
        return self.attached and not self.loading and self.sums.open != 0

    def batch_beat(self) -> BatchBeat:
        return self.sums.beat(self.attached)

    def on_told(self, now: float) -> None:
        self.sums.on_told(now)

    # ---- the trainer ------------------------------------------------------------------------------------

    def on_gone(self) -> None:
        super().on_gone()
        self.on_unusable()

    def on_unusable(self) -> None:
        """Its sums are lost: others compute the share again, or this trainer does, in another seat."""
        self.sums.lose_sums()
        self.on_sums_changed()

    def on_sums_changed(self) -> None:
        """What stands frozen is not what is counted."""
        for work in self.works.values():
            work.frozen = None

    def load(self, fragment: int, version: int, consumed: Frozen | None) -> list[Effect]:
        return self.drop_work(fragment, version)

    def _tell_load(self, load: LoadState) -> list[Effect]:
        self.moved_on = True
        self.sums.on_load(load.version)
        return [TellTrainer(load)]

    def on_loaded(self, fragment: int) -> None:
        super().on_loaded(fragment)
        if not self.loading:
            self.sums.on_loaded()

    def on_frozen(self, frozen: Frozen) -> None:
        self.moved_on = False
        if self.sums.is_mine(frozen):
            self.works[frozen.fragment].on_frozen(msgspec.structs.replace(frozen, seat=self.sums.seat))

    def on_counted(self, work: BatchWork, word: MicrobatchCounted, now: float) -> bool:
        """True: the trainer has nothing more to compute.  What it says before it has loaded is of older sums."""
        if self.loading:
            return False
        before, idle = work.counted, work.on_counted(word, now)
        if work.counted != before:
            self.on_sums_changed()
        return idle


class BatchSync(TrainerSync):
    def __init__(self, part: Replicas, training: BatchProxy) -> None:
        super().__init__(part, training)
        self._sums = training.sums

    def on_tick(self, tick: Tick) -> list[Effect]:
        lost = self._sums.on_tick(tick.batch)
        return [*self.free_slots(), *(self._drop_sums() if lost else []), *super().on_tick(tick)]

    def _drop_sums(self) -> list[Effect]:
        """The coordinator has given my seat up: somebody else computes what I had counted."""
        self._sums.forget()
        told = "my place in the batch was given up: I begin with other microbatches"
        effects: list[Effect] = [Note(told, routine=True)]
        for replica, work in self._pairs:
            held = replica.held
            replica.rounds.disown()
            if held.whole:
                effects += [*self.free_slots(), *self._training.drop_work(work.fragment, held.version)]
            else:
                work.forget()
        return effects

    def tell_work(self, now: float) -> list[Effect]:
        """What the trainer is to know of the batch that is due."""
        if not self._training.attached:
            return []
        resolved, [work, *_] = self.free_slots(), list(self._training.works.values())
        return [*resolved, *self._sums.words(work.frozen, work.spare, now)]

    def go_on_alone(self) -> list[Effect]:
        return []  # it has no steps of its own to take

    def go_on(self) -> list[Effect]:
        return []
