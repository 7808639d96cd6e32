"""The agent's view of a synchronous batch: its seat, what its trainer has counted, what that is to do next.  Pure.

Part of the training (trainer_proxy.py).  The coordinator's tick says the whole of it each time, the trainer is told
what is new, and the beat says what is counted.  Sums belong to one seat and one version: when either goes, so do
they. Where work comes from is another matter: `BatchWork` passes on what is granted, of a model in one piece; a stage
of a model that is cut gets it from its neighbours (stage_transfers.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.optim.schedule import ScheduleRules
from farflung.peer.local.words import FreezeSums, Frozen, Grants, LoadState, MicrobatchCounted, Unusable
from farflung.peer.machine.effects import Effect, Note, TellTrainer
from farflung.peer.machine.replicas import Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy, TrainerSync
from farflung.protocol.digests import bits, mask_from_bytes, mask_to_bytes
from farflung.protocol.limits import NATS_MOST
from farflung.protocol.messages import Tick
from farflung.protocol.mode_words import BatchBeat, BatchTick, Complaint
from farflung.protocol.round_words import section

UNIT_SMOOTHED = 0.3  # of the newest microbatch in the mean time of one


class SeatSums:
    """What is in the sums of one seat, and what becomes of them, wherever the work came from."""

    def __init__(self) -> None:
        self.seat = 0  # 0: none
        self._trainer = 0  # how many trainers' sums were lost
        self._version = NO_VERSION  # that the trainer has loaded, or was told to
        self._counted = self._unusable = 0  # masks
        self._losses: dict[int, float] = {}  # of what is counted of a held-out batch
        self._due: BatchTick | None = None  # as the coordinator said last
        self._frozen_at = 0  # the mask at which it was told to freeze
        self._unit_s = 0.0
        self._busy_since = 0.0

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def counted(self) -> int:
        return self._counted

    @property
    def open(self) -> int:
        """The mask of what the trainer is to compute and has not."""
        raise NotImplementedError

    @property
    def table_no(self) -> int:
        """Of a stage: the newest table of seats that is known here."""
        return 0

    @property
    def holds(self) -> int:
        """Of a stage: microbatches that wait for the trainer, or that it has in hand."""
        return 0

    @property
    def made(self) -> int:
        """Of a stage: works that the trainer has made in this seat."""
        return 0

    @property
    def complains(self) -> tuple[Complaint, ...]:
        """Of a stage: neighbours that I can't work with now."""
        return ()

    def has_news(self, now: float) -> bool:
        """What is counted is to be told before the next beat is due."""
        return False

    def on_told(self, now: float) -> None:
        """A beat has said what is counted."""

    def beat(self, attached: bool) -> BatchBeat:
        return BatchBeat(
            version=self._version,
            seat=self.seat,
            trainer=self._trainer,
            counted=mask_to_bytes(self._counted),
            unusable=mask_to_bytes(self._unusable),
            want=attached and self._version != NO_VERSION,
            unit_s=round(self._unit_s, 6),
            table_no=self.table_no,
            holds=self.holds,
            made=self.made,
            complains=self.complains,
            losses=self._told_losses(),
        )

    @property
    def is_held_out(self) -> bool:
        """What is in the sums is of a batch of which the losses are wanted, and nothing else."""
        return self._due is not None and self._due.held_out

    def _count(self, micro: int, loss: float | None) -> None:
        self._counted |= 1 << micro
        if self.is_held_out and loss is not None and 0.0 <= loss <= NATS_MOST:
            self._losses[micro] = loss

    def _told_losses(self) -> bytes:
        """Of all that is counted, or none: where the model does not end here there are none."""
        if not self._losses or len(self._losses) != self._counted.bit_count():
            return b""
        return struct.pack(f"<{len(self._losses)}f", *(self._losses[micro] for micro in bits(self._counted)))

    # ---- the trainer -------------------------------------------------------------------------------------

    def on_load(self, version: int) -> None:
        """It was told to load: its sums are zero then, and it knows of no work."""
        self._version, self._counted, self._unusable = version, 0, 0
        self._losses, self._frozen_at = {}, 0

    def on_loaded(self) -> None:
        """It has loaded whatever it was told to: what it says from now on is of those sums."""

    def forget(self) -> None:
        """It holds nothing that counts, until it loads."""
        self.on_load(NO_VERSION)

    def lose_sums(self) -> None:
        """They are gone, as with another trainer: the seat is of no use any more."""
        self._trainer += 1
        self.forget()

    def is_mine(self, frozen: Frozen) -> bool:
        """It holds exactly what is counted."""
        return mask_from_bytes(frozen.counted) == self._counted != 0

    # ---- the coordinator ---------------------------------------------------------------------------------

    def on_tick(self, due: BatchTick | None) -> bool:
        """True: the sums are of no use any more, since the seat that they belong to is gone."""
        if due is None:
            if not self.is_held_out:
                return False
            # That batch is over, and none has begun: the seat ended with it.
            lost, self.seat, self._due = self.seat != 0, 0, None
            return lost
        self._due = due
        lost, self.seat = due.seat != self.seat and self.seat != 0, due.seat
        return lost

    def words(self, frozen: Frozen | None, spare: int, now: float) -> list[Effect]:
        """What the trainer is to be told now.  `frozen`: what stands in a slot; `spare`: the slot to freeze into."""
        due = self._due
        if due is None or not due.seat or due.seat != self.seat or due.version != self._version:
            return []
        told = self._work(due, now)
        stands = frozen is not None and self.is_mine(frozen)
        if due.freeze and self._counted and not stands and self._frozen_at != self._counted:
            self._frozen_at = self._counted
            told.append(TellTrainer(FreezeSums(version=due.version, slot=spare)))
        return told

    def _work(self, due: BatchTick, now: float) -> list[Effect]:
        """What follows for the trainer's work from the batch that is due, in a seat that is here."""
        raise NotImplementedError

    def _took(self, took_s: float, before_s: float) -> float:
        """The mean time of one, with the newest in it."""
        return before_s + (UNIT_SMOOTHED if before_s else 1.0) * (max(0.0, took_s) - before_s)


class BatchWork(SeatSums):
    """Of a model in one piece: the trainer computes what is granted, and nobody else is asked."""

    def __init__(self) -> None:
        super().__init__()
        self._granted: Grants | None = None  # as the trainer was told last

    @property
    def open(self) -> int:
        granted = 0
        for first, stop in self._granted.ranges if self._granted is not None else ():
            granted |= (1 << stop) - (1 << first)
        return granted & ~(self._counted | self._unusable)

    def on_load(self, version: int) -> None:
        super().on_load(version)
        self._granted = None

    def on_counted(self, word: MicrobatchCounted, now: float) -> bool:
        """True: it has nothing more to compute."""
        if word.version != self._version or not self.open >> word.micro & 1:
            return False
        self._unit_s = self._took(now - self._busy_since, self._unit_s)
        self._busy_since = now
        self._count(word.micro, word.loss)
        return not self.open

    def on_unusable(self, word: Unusable, now: float) -> bool:
        """True: it is news."""
        if word.version != self._version or not self.open >> word.micro & 1:
            return False
        self._busy_since = now
        self._unusable |= 1 << word.micro
        return True

    def _work(self, due: BatchTick, now: float) -> list[Effect]:
        grants = Grants(
            version=due.version,
            epoch=due.epoch,
            start=due.start,
            stop=due.stop,
            count=due.count,
            ranges=due.granted,
            held_out=due.held_out,
        )
        if grants == self._granted or not (grants.ranges or self._granted is not None):
            return []
        idle = not self.open
        self._granted = grants
        self._busy_since = now if idle else self._busy_since
        return [TellTrainer(grants)]


# ---- batch proxy -------------------------------------------------------------------------------------------
# The agent's view of a trainer that makes sums of a synchronous batch, in place of steps of its own. Pure.
#
# The core's view and what a new version means for the trainer's work (peer/machine/trainer_proxy.py,
# trainer_proxy.py), where they differ: sums are made from one version and belong to one seat, so that what no
# commit used is of no use, and there is nothing to take alone.


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
        of_losses = self._sums.is_held_out
        lost = self._sums.on_tick(section(BatchTick, tick.sections))
        return [*self.free_slots(), *(self._drop_sums(of_losses) if lost else []), *super().on_tick(tick)]

    def _drop_sums(self, of_losses: bool) -> list[Effect]:
        """My seat is given up, and somebody else computes what I had counted; nobody does where these were losses
        (`of_losses`), which are told."""
        self._sums.forget()
        told = "my place in the batch was given up: I begin with other microbatches"
        effects: list[Effect] = [] if of_losses else [Note(told, routine=True)]
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
