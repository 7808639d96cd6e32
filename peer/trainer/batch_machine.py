"""The trainer's machine where updates are synchronous batches: what to compute next, when to write sums, when to drop
them.  Pure.

Owns: which microbatches of the batch are granted, which are in the sums, and how many tokens those have.
Called by its shells: the stage loop (which works on a model) and the simulator's trainer.
Must not know: tensors, clocks, sockets, seats, rounds, who else computes.

    event                        what it decides
    attach, on_message           what to load, when sums are dropped or written, the end
    next                         the next microbatch, or that there is none
    on_counted, on_unusable      what came of it

A shell tells all words that have come, then asks `next`, and carries out what it says.  Between `Accumulate` and
what came of it, words wait: nothing is dropped under a gradient that is just being added.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.peer.local.words import (
    Attach,
    Counted,
    Finish,
    Freeze,
    Frozen,
    Grants,
    Load,
    Loaded,
    Need,
    Provide,
    Provided,
    Shared,
    Stop,
    ToTrainer,
    Unusable,
)
from farflung.peer.trainer.effects import (
    Accumulate,
    DropSums,
    Effect,
    LoadAnchor,
    OpenShared,
    Over,
    Refuse,
    Say,
    Stand,
    Wait,
    WriteAnchor,
    WriteSums,
)
from farflung.peer.trainer.machine import GOOD_ENDS, NOT_LOADED
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.model_schema import ModelSchema

_ENDS = frozenset({Stand.OVER, Stand.REFUSED})


@dataclass
class Sums:
    """What is in the sums of the batch from the version that is loaded."""

    counted: set[int] = field(default_factory=set)  # microbatches
    unusable: set[int] = field(default_factory=set)  # those that gave no gradient: not asked for again here
    tokens: int = 0
    losses: list[tuple[float, int]] = field(default_factory=list)  # with their tokens

    @property
    def loss(self) -> float | None:
        weight = sum(tokens for _, tokens in self.losses)
        return sum(loss * tokens for loss, tokens in self.losses) / weight if weight else None

    def freeze(self, slot: int) -> list[Effect]:
        counted = mask_to_bytes(mask_of(self.counted))
        steps = len(self.counted)
        said = Frozen(slot=slot, tokens=self.tokens, steps=steps, used=(), loss=self.loss, counted=counted)
        return [WriteSums(slot, self.tokens), Say(said)]


class BatchMachine:
    def __init__(self, micro: int) -> None:
        """`micro`: samples in a microbatch, as the manifest says."""
        self.stand = Stand.ATTACHING
        self.version = NOT_LOADED
        self.sums = Sums()
        self._micro = micro
        self._grants: Grants | None = None
        self._computing: Accumulate | None = None
        self._frozen = False  # and nothing was counted since
        self._refusal: Refuse | None = None

    @property
    def finished(self) -> bool:
        return self.stand in _ENDS

    # ---- getting in, and the end

    def attach(self, model: ModelSchema, pid: int, samples: int, data: bytes) -> list[Effect]:
        """Say what the model is, how many samples the data set has and what its fingerprint is."""
        said = [Say(Attach(model=model, pid=pid)), Say(Need(samples=samples, want=0, data=data))]
        return [*said, Wait(Stand.ATTACHING)]

    def on_agent_gone(self, problem: str) -> list[Effect]:
        return self._refuse("agent", problem)

    def _refuse(self, code: str, reason: str) -> list[Effect]:
        self.stand = Stand.REFUSED
        self._refusal = Refuse(code, reason)
        return [self._refusal]

    def _end(self, stopped: bool) -> list[Effect]:
        self.stand = Stand.OVER
        return [Over(stopped)]

    # ---- the agent's words

    def on_message(self, word: ToTrainer) -> list[Effect]:
        if self._computing is not None:
            raise RuntimeError("a word while a microbatch is computed: tell it afterwards")
        if self.stand is Stand.REFUSED:
            return []
        match word:
            case Shared():
                return [OpenShared(word)]
            case Provide():
                return [WriteAnchor(), Say(Provided())]
            case Load():
                return self._load(word)
            case Grants(version=version) if version == self.version:
                self._grants = word
            case Freeze(version=version, slot=slot) if version == self.version and self.sums.counted:
                self._frozen = True
                return self.sums.freeze(slot)
            case Finish():
                return self._end(stopped=False)
            case Stop(code=code, reason=reason):
                good = code in GOOD_ENDS and self.version != NOT_LOADED
                return self._end(stopped=True) if good else self._refuse(code, reason)
            case _:
                pass  # Begin, once more; grants of a version that is not loaded: a Load makes them void anyway
        return []

    def _load(self, load: Load) -> list[Effect]:
        """A new version, or the seat that these sums belong to is gone: either way nobody will ask for them again."""
        self.version, self.sums, self._grants, self._frozen = load.version, Sums(), None, False
        anchor = LoadAnchor(
            fragment=load.fragment, version=load.version, keep="drop", slot=load.slot, steps=0
        )
        return [DropSums(), anchor, Say(Loaded(version=load.version, fragment=load.fragment))]

    # ---- microbatches

    def next(self) -> list[Effect]:
        """What to do now that all words are told: one `Accumulate`, or `Wait`, or the end."""
        if self._refusal is not None:
            return [self._refusal]
        if self.stand is Stand.OVER:
            return [Over(stopped=False)]
        if self.version == NOT_LOADED:
            return [Wait(Stand.ATTACHING)]
        micro = self._first_open()
        if micro is None or self._grants is None:
            self.stand = Stand.AT_BARRIER if self._frozen else Stand.WITHOUT_DATA
            return [Wait(self.stand)]
        grants, start = self._grants, self._grants.start + micro * self._micro
        stop = min(start + self._micro, grants.stop)
        self.stand = Stand.STEPPING
        self._computing = Accumulate(self.version, micro, grants.epoch, start, stop)
        return [self._computing]

    def _first_open(self) -> int | None:
        done = self.sums.counted | self.sums.unusable
        ranges = self._grants.ranges if self._grants is not None else ()
        return next((m for first, stop in ranges for m in range(first, stop) if m not in done), None)

    def on_counted(self, tokens: int, loss: float | None) -> list[Effect]:
        """Its gradient is in the sums."""
        done = self._take()
        self.sums.counted.add(done.micro)
        self.sums.tokens += tokens
        self.sums.losses += [(loss, tokens)] if loss is not None else []
        self._frozen = False
        return [Say(Counted(version=done.version, micro=done.micro, tokens=tokens, loss=loss))]

    def on_unusable(self, problem: str) -> list[Effect]:
        """Its loss or its gradient is not finite, and the sums are as they were before it."""
        done = self._take()
        self.sums.unusable.add(done.micro)
        return [Say(Unusable(version=done.version, micro=done.micro, problem=problem))]

    def _take(self) -> Accumulate:
        done, self._computing = self._computing, None
        if done is None:
            raise RuntimeError("no microbatch is being computed")
        return done
