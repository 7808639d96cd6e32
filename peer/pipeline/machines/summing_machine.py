"""What the trainers of synchronous batches have in common: sums of one version, which end at a load.  Pure.

Owns: which microbatches are in the sums, their tokens, when sums are written and dropped; how a trainer gets in, and
how it ends.
Called by its two kinds, which say what is computed next: the batch machine below (a whole model, by what is granted)
and stage_machine.py (a stage of one, by what is handed over).
Must not know: tensors, clocks, sockets, seats, rounds, who else computes, where microbatches come from.

A shell tells all words that have come, then asks `next`, and carries out what it says.  Between that and what came of
it, words wait: nothing is dropped under a gradient that is just being added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from farflung.peer.local.words import (
    Attach,
    Finish,
    FreezeSums,
    Frozen,
    Grants,
    Loaded,
    LoadState,
    MicrobatchCounted,
    MicrobatchWork,
    NeedSamples,
    Provide,
    Provided,
    Shared,
    Stop,
    ToTrainer,
    Unusable,
)
from farflung.peer.trainer.effects import (
    Effect,
    EndWithRefusal,
    LoadAnchor,
    OpenShared,
    RunOver,
    SayWord,
    TrainerState,
    WaitBefore,
    WriteAnchor,
)
from farflung.peer.trainer.machine import GOOD_ENDS, NOT_LOADED
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.model_schema import ModelSchema

# ---- effects -----------------------------------------------------------------------------------------------
# What a trainer's machine of synchronous batches tells its shell to do, besides what any trainer's does.
# Types only.
#
# Made by the machines beside it; carried out by their loops on a model, and by the simulator's trainers on
# numbers that can be counted.


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the gradient of these samples to the sums of the batch, each token as much as any other."""

    version: int
    micro: int  # its number in the batch
    epoch: int
    start: int  # positions [start, stop) of the epoch's order
    stop: int
    held_out: bool = False  # or of the windows of [eval], for their loss alone


@dataclass(frozen=True, slots=True)
class StageWork:
    """Work on a microbatch of one stage: from the slots of its place, or from the data set, into the slot for it."""

    word: MicrobatchWork


@dataclass(frozen=True, slots=True)
class WriteSums:
    """Write the sums into the slot, divided by the tokens in them, as what falls if they are taken; and keep them."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LocalStep:
    """Take a step of the inner optimizer on the mean gradient of the tokens in the sums; then those are zero.

    run_step  the run's own step, which the rate follows from (optim/schedule.py)
    share     of the rate: a step of fewer microbatches than others is smaller by as much
    """

    run_step: int
    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class WriteLearned:
    """Write what the local steps have moved since the anchor was loaded into the slot, as what falls if it is taken."""

    slot: int


@dataclass(frozen=True, slots=True)
class DropSums:
    """The sums are zero again."""


SumsEffect = Effect | Accumulate | StageWork | WriteSums | LocalStep | WriteLearned | DropSums


# ---- summing machine ---------------------------------------------------------------------------------------

_ENDS = frozenset({TrainerState.OVER, TrainerState.REFUSED})
Due = TypeVar("Due", Accumulate, StageWork)


@dataclass
class CountedSums:
    """What is in the sums of the batch from the version that is loaded."""

    counted: set[int] = field(default_factory=set)  # microbatches
    unusable: set[int] = field(default_factory=set)  # those that gave no gradient: not asked for again here
    tokens: int = 0
    losses: list[tuple[float, int]] = field(default_factory=list)  # with their tokens

    @property
    def loss(self) -> float | None:
        weight = sum(tokens for _, tokens in self.losses)
        return sum(loss * tokens for loss, tokens in self.losses) / weight if weight else None

    def count(self, micro: int, tokens: int, loss: float | None) -> None:
        self.counted.add(micro)
        self.tokens += tokens
        self.losses += [(loss, tokens)] if loss is not None else []

    def as_frozen(self, slot: int, fragment: int) -> Frozen:
        return Frozen(
            slot=slot,
            tokens=self.tokens,
            steps=len(self.counted),
            used=(),
            loss=self.loss,
            fragment=fragment,
            counted=mask_to_bytes(mask_of(self.counted)),
        )


class SummingMachine(ABC, Generic[Due]):
    def __init__(self) -> None:
        self.stand = TrainerState.ATTACHING
        self.version = NOT_LOADED
        self.sums = CountedSums()
        self._fragment = 0  # that is loaded
        self._computing: Due | None = None
        self._frozen = False  # and nothing was counted since
        self._refusal: EndWithRefusal | None = None

    @property
    def finished(self) -> bool:
        return self.stand in _ENDS

    # ---- what its kinds say

    @abstractmethod
    def _on_work(self, word: ToTrainer) -> None:
        """A word that belongs to none of all machines: work for the version that is loaded, or nothing."""

    @abstractmethod
    def _forget_work(self) -> None:
        """Whatever was to be computed is of no use any more."""

    @abstractmethod
    def _next_due(self) -> Due | None:
        """What to compute now; None where there is nothing."""

    def _freeze(self, slot: int) -> list[SumsEffect]:
        return [*self._write(slot), SayWord(self.sums.as_frozen(slot, self._fragment))]

    def _write(self, slot: int) -> list[SumsEffect]:
        """What this trainer has for the round of the batch goes into the slot."""
        return [WriteSums(slot, self.sums.tokens)]

    # ---- the end

    def on_agent_gone(self, problem: str) -> list[SumsEffect]:
        return self._refuse("agent", problem)

    def _refuse(self, code: str, reason: str) -> list[SumsEffect]:
        self.stand = TrainerState.REFUSED
        self._refusal = EndWithRefusal(code, reason)
        return [self._refusal]

    def _end(self, stopped: bool) -> list[SumsEffect]:
        self.stand = TrainerState.OVER
        return [RunOver(stopped)]

    # ---- the agent's words

    def on_message(self, word: ToTrainer) -> list[SumsEffect]:
        if self._computing is not None:
            raise RuntimeError("a word while a microbatch is computed: tell it afterwards")
        if self.stand is TrainerState.REFUSED:
            return []
        match word:
            case Shared():
                return self._on_shared(word)
            case Provide():
                return [WriteAnchor(), SayWord(Provided())]
            case LoadState():
                return self._load(word)
            case FreezeSums(version=version, slot=slot) if version == self.version and self.sums.counted:
                self._frozen = True
                return self._freeze(slot)
            case Finish():
                return self._finish(word)
            case Stop(code=code, reason=reason):
                good = code in GOOD_ENDS and self.version != NOT_LOADED
                return self._end(stopped=True) if good else self._refuse(code, reason)
            case _:
                self._on_work(word)
        return []

    def _finish(self, word: Finish) -> list[SumsEffect]:
        effects: list[SumsEffect] = []
        for load in word.loads:
            effects += self._load(load)
        return effects + self._end(stopped=False)

    def _on_shared(self, word: Shared) -> list[SumsEffect]:
        return [OpenShared(word)]

    def _load(self, load: LoadState) -> list[SumsEffect]:
        """A new version, or the seat that these sums belong to is gone: either way nobody will ask for them again."""
        self.version, self.sums, self._frozen = load.version, CountedSums(), False
        self._fragment = load.fragment
        self._forget_work()
        anchor = LoadAnchor(
            fragment=load.fragment, version=load.version, keep="drop", slot=load.slot, steps=0
        )
        return [DropSums(), anchor, SayWord(Loaded(version=load.version, fragment=load.fragment))]

    # ---- microbatches

    def next(self) -> list[SumsEffect]:
        """What to do now that all words are told: one thing to compute, or `WaitBefore`, or the end."""
        if self._refusal is not None:
            return [self._refusal]
        if self.stand is TrainerState.OVER:
            return [RunOver(stopped=False)]
        if self.version == NOT_LOADED:
            return [WaitBefore(TrainerState.ATTACHING)]
        due = self._next_due()
        if due is None:
            self.stand = TrainerState.AT_BARRIER if self._frozen else TrainerState.WITHOUT_DATA
            return [WaitBefore(self.stand)]
        self.stand = TrainerState.STEPPING
        self._computing = due
        return [due]

    def _count(self, micro: int, tokens: int, loss: float | None) -> None:
        self.sums.count(micro, tokens, loss)
        self._frozen = False

    def _take(self) -> Due:
        done, self._computing = self._computing, None
        if done is None:
            raise RuntimeError("no microbatch is being computed")
        return done


# ---- batch machine -----------------------------------------------------------------------------------------
# The trainer's machine where updates are synchronous batches of a whole model: what to compute next. Pure.
#
# Owns: which microbatches of the batch are granted, and which is next. Sums, loads, the end
# are those of the machine above. Called by its shells: the batch loop (which works on a model) and the simulator's
# trainer. Must not know: tensors, clocks, sockets, seats, rounds, who else computes.
#
#     event                        what it decides
#     attach, on_message           what to load, when sums are dropped or written, the end
#     next                         the next microbatch, or that there is none
#     on_counted, on_unusable      what came of it


class BatchMachine(SummingMachine[Accumulate]):
    def __init__(self, micro: int) -> None:
        """`micro`: samples in a microbatch, as the manifest says."""
        super().__init__()
        self._micro = micro
        self._grants: Grants | None = None

    def attach(self, model: ModelSchema, pid: int, samples: int, data: bytes) -> list[SumsEffect]:
        """Say what the model is, how many samples the data set has and what its fingerprint is."""
        said = [
            SayWord(Attach(model=model, pid=pid)),
            SayWord(NeedSamples(samples=samples, want=0, data=data)),
        ]
        return [*said, WaitBefore(TrainerState.ATTACHING)]

    # ---- what is granted

    def _on_work(self, word: ToTrainer) -> None:
        """Grants of a version that is not loaded are none: a `Load` makes them void anyway."""
        if isinstance(word, Grants) and word.version == self.version:
            self._grants = word

    def _forget_work(self) -> None:
        self._grants = None

    def _next_due(self) -> Accumulate | None:
        micro = self._first_open()
        if micro is None or self._grants is None:
            return None
        grants, start = self._grants, self._grants.start + micro * self._micro
        stop = min(start + self._micro, grants.stop)
        return Accumulate(self.version, micro, grants.epoch, start, stop, grants.held_out)

    def _first_open(self) -> int | None:
        done = self.sums.counted | self.sums.unusable
        ranges = self._grants.ranges if self._grants is not None else ()
        return next((m for first, stop in ranges for m in range(first, stop) if m not in done), None)

    # ---- what came of it

    def on_counted(self, tokens: int, loss: float | None) -> list[SumsEffect]:
        """Its gradient is in the sums."""
        done = self._take()
        self._count(done.micro, tokens, loss)
        return [SayWord(MicrobatchCounted(version=done.version, micro=done.micro, tokens=tokens, loss=loss))]

    def on_unusable(self, problem: str) -> list[SumsEffect]:
        """Its loss or its gradient is not finite, and the sums are as they were before it."""
        done = self._take()
        self.sums.unusable.add(done.micro)
        return [SayWord(Unusable(version=done.version, micro=done.micro, problem=problem))]
