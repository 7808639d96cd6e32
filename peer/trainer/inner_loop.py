"""The trainer's side of a run: when to hand work over, when to load what.

Owns: the step counts, the moment of a freeze, the wait after it, the leases.  What is owed of each fragment is in
unmerged.py; which fragment is frozen when is in optim/schedule.py.
Called by the public API after every optimizer step, and while it waits for data.
Must not know: processes, sockets, rounds, how the outer step works.  Messages come through a channel.

`run.step` blocks only here.  With the blocking schedule: from the moment fragments are frozen until the agent has said
of each how to go on.  With the others only where a fragment is to be frozen again and the round that uses the last
freeze is not over.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from farflung.optim.recipes import outer_of
from farflung.optim.schedule import Schedule, rules_of
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import (
    Attach,
    Finish,
    FromTrainer,
    Frozen,
    LeasesNow,
    Load,
    Loaded,
    Need,
    Opened,
    Provide,
    Provided,
    Resume,
    Shared,
    Stop,
    ToTrainer,
)
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.leased_data import LeaseBook, Span
from farflung.peer.trainer.unmerged import NOT_LOADED, Unmerged
from farflung.protocol.errors import Refused, UserError
from farflung.protocol.fragments import BOOKS_FRAGMENT, fragments_of
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import failpoints

log = logging.getLogger(__name__)

POLL_S = 0.5  # while blocked: how often to see whether the agent lives
LOSS_EVERY_S = 0.5  # reading a loss waits for the GPU, so it is not read at every step
PATIENCE_S = 30.0


class Channel(Protocol):
    def send(self, message: FromTrainer) -> None: ...

    def recv(self, timeout_s: float) -> ToTrainer | None: ...


class MeanLoss:
    """The mean of the losses since the last freeze, summed where they are computed."""

    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, loss: Tensor | float) -> None:
        # A new tensor each time: the caller's own must neither change nor keep its graph alive.
        self._sum = self._sum + (loss.detach().float().mean() if isinstance(loss, Tensor) else loss)
        self._count += 1

    def read(self) -> float | None:
        """None where there is no loss, or none that is a number."""
        mean = float(self._sum) / self._count if self._count else math.nan
        return mean if math.isfinite(mean) else None

    def clear(self) -> None:
        self._sum, self._count = 0.0, 0


class InnerLoop:
    def __init__(
        self,
        channel: Channel,
        model: nn.Module,
        manifest: Manifest,
        agent_problem: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest = manifest
        self.layout = ModelLayout.of(model, manifest.round.chunk_kb * 1024 // 4)
        fragments = fragments_of(self.layout.chunk_count, manifest.round.fragments)
        self.parts = [Unmerged(self.layout, fragment) for fragment in fragments]
        self.leases = LeaseBook(len(fragments))
        self.step_count = 0
        self.finished = False
        self._model = model
        self._channel = channel
        self._agent_problem = agent_problem  # why the agent is gone, or None
        self._clock = clock
        self._shared: SharedState | None = None
        self._loaded: list[Tensor] = []  # the model, each part of it as it was set last
        self._schedule = Schedule(rules_of(manifest), clock())
        self._outer = outer_of(manifest)
        self._held: dict[int, Load] = {}  # results that are here before their time, by fragment
        self._before: list[Tensor] | None = None  # the model before a step that some fragments must not see
        self._samples = 0
        self.waited_s = 0.0  # for rounds, all in all
        self._warn_at = 0.0
        self._all_tokens = 0
        self._batch_tokens = 0  # handed out since the last step
        self._said_tokens: int | None = None
        self._losses = MeanLoss()
        self._loss: float | None = None
        self._loss_at = -math.inf

    @property
    def shared(self) -> SharedState:
        assert self._shared is not None, "before attach()"
        return self._shared

    @property
    def version(self) -> int:
        """Of the least advanced fragment in the model."""
        return min(part.version for part in self.parts)

    def attach(self) -> None:
        """Say what the model is, and wait until the run's state is in it."""
        failpoints.hit("trainer.attach")
        self._channel.send(Attach(model=self.layout.model_schema(self._model), pid=os.getpid()))
        waited = self._clock()
        while self.version == NOT_LOADED:
            message = self._next_message()
            if isinstance(message, Stop):
                raise Refused(message.code, message.reason)
            if message is not None:
                self._handle(message)
            if self._clock() - waited >= PATIENCE_S:
                waited = self._clock()
                log.warning("still waiting for the run's state; the agent says what for")

    # ---- inner steps

    def record(self, loss: Tensor | float | None, tokens: int | None) -> None:
        """What the caller says about the step that comes next."""
        if tokens is not None and tokens < 0:
            raise UserError(f"tokens must not be negative, found {tokens}")
        if loss is not None:
            self._losses.add(loss)
        self._said_tokens = tokens

    def before_step(self) -> None:
        """Before every optimizer step.  Rarely, not all fragments may learn from it (see LeaseBook.learners)."""
        every = self.finished or len(self.leases.learners()) == len(self.parts)
        self._before = None if every else self.layout.snapshot(self._model)

    def after_step(self) -> None:
        """After every optimizer step.  Loads may come at any step; a freeze waits for the agent."""
        if self.finished:
            return
        failpoints.hit("trainer.step")
        self._count_step()
        while (message := self._channel.recv(0.0)) is not None:
            self._handle(message)
        self._load_held([f for f in self._held if self._schedule.may_take(f)])
        self._show_progress()
        due = self._schedule.take_due(self._clock())
        if due and not self.finished:
            self._freeze(due)

    def _count_step(self) -> None:
        # A step that nobody counted counts as one token, so that weights still follow the work done.
        said, batch = self._said_tokens, self._batch_tokens
        tokens = said if said is not None else max(1, batch)
        self._said_tokens, self._batch_tokens = None, 0
        self.step_count += 1
        self._all_tokens += tokens
        learners = self.leases.learners()
        for number, part in enumerate(self.parts):
            if number in learners:
                part.count(tokens)
            elif self._before is not None:
                part.put_back(self._model, self._before)
        self._before = None
        self._schedule.count_step(self._clock())
        self.leases.on_step()

    def _show_progress(self) -> None:
        now = self._clock()
        if now - self._loss_at >= LOSS_EVERY_S:
            self._loss_at = now
            loss = self._losses.read()
            self._loss = self._loss if loss is None else loss
        self.shared.write_progress(self.step_count, self._all_tokens, self._loss)

    def _freeze(self, due: Sequence[int]) -> None:
        self._load_held(due)
        self._await([self.parts[number] for number in due])
        # The work may have been dropped meanwhile.
        due = [number for number in due if self.parts[number].steps]
        loss = self._losses.read()
        for number in due:
            part = self.parts[number]
            part.write_owed(self._model, self._loaded, part.part(self.shared.slots[part.spare]))
            if self._schedule.rules.goes_ahead:
                part.train_on(self._model, self._loaded, self.shared, self._outer)
            part.blocked = True
            failpoints.hit("freeze.mid")
        if BOOKS_FRAGMENT in due:
            self._losses.clear()
        failpoints.hit("freeze.before_word")
        for number in due:
            self._channel.send(self._frozen(number, loss, more=number != due[-1]))
        if self._schedule.rules.waits:
            self._await(self.parts)

    def _await(self, parts: Sequence[Unmerged]) -> None:
        """Until the agent has said of each of these how to go on."""
        began = self._clock()
        while any(part.blocked for part in parts) and not self.finished:
            self._load_held(list(self._held))
            if not self._schedule.rules.waits and self._clock() >= self._warn_at:
                self._warn_at = self._clock() + PATIENCE_S
                log.warning(
                    "training waits: a round takes longer than a period; raise sync_every or period_s"
                )
            message = self._next_message()
            if message is not None:
                self._handle(message)
        now = self._clock()
        self.waited_s += now - began
        self._schedule.on_waited(now)

    def _frozen(self, number: int, loss: float | None, more: bool) -> Frozen:
        part = self.parts[number]
        return Frozen(
            slot=part.spare,
            tokens=part.tokens,
            steps=part.steps,
            used=self.leases.used(number),
            loss=loss,
            fragment=number,
            step=self.step_count,
            more=more,
        )

    # ---- the agent's words

    def _next_message(self) -> ToTrainer | None:
        """Waits a moment; Refused once the agent is gone and its last words are read."""
        message = self._channel.recv(POLL_S)
        if message is None and (problem := self._agent_problem()) is not None:
            message = self._channel.recv(0.0)
            if message is None:
                raise Refused("agent", problem)
        return message

    def _handle(self, message: ToTrainer) -> None:
        match message:
            case Shared():
                if message.elements != self.layout.total_elements:
                    theirs, ours = message.elements, self.layout.total_elements
                    raise UserError(f"the agent shares {theirs} values, this model has {ours}")
                self._shared = SharedState.open(message)
            case Provide():
                self.layout.write_anchor(self._model, self.shared.anchor)
                self._channel.send(Provided())
            case Load():
                self._take(message)
            case Opened(fragment=fragment, hold=hold):
                self.parts[fragment].blocked |= hold
                self._schedule.on_opened(fragment, self._clock())
            case Resume(spare=spare, fragment=fragment):
                self.parts[fragment].spare, self.parts[fragment].blocked = spare, False
            case LeasesNow(leases=leases, unsure=unsure):
                self.leases.on_leases(leases, unsure)
            case Finish():
                self.finished = True
            case Stop(code=code, reason=reason):
                if code not in ("finished", "left"):
                    raise Refused(code, reason)
                self.finished = True
            case _:
                pass  # Begin, once more: the agent tells it to every trainer that waits

    def _take(self, load: Load) -> None:
        self._load_held([load.fragment])
        if load.keep in ("all", "rest") and not self._schedule.may_take(load.fragment):
            self._held[load.fragment] = load
        else:
            self._load(load)

    def _load_held(self, fragments: Sequence[int]) -> None:
        for load in [self._held.pop(f) for f in fragments if f in self._held]:
            self._load(load)

    def _load(self, load: Load) -> None:
        if not self._loaded:
            self._loaded = self.layout.snapshot(self._model)  # room for what every part is loaded with
        mix = self._schedule.rules.mix
        self.parts[load.fragment].load(load, self._model, self._loaded, self.shared, mix)
        if load.keep in ("drop", "restore"):
            self.leases.restart(load.fragment)
            if load.fragment == BOOKS_FRAGMENT:
                self._schedule.restart(self._clock())
                self._losses.clear()
        self._channel.send(Loaded(version=load.version, fragment=load.fragment))

    # ---- data

    def next_span(self, samples: int, batch: int) -> Span | None:
        """The next leased samples; waits for a lease where there is none.  None: the run is over.

        `samples`: of an epoch, as far as it is known by now.
        """
        if samples != self._samples:
            self._samples = samples
            self.leases.ask_anew()  # the end of a stream was found: what was asked for may lie beyond it
        warn_at = self._clock() + PATIENCE_S
        while not self.finished:
            # At least a sixteenth of a round's samples: the number of leases that wait for a commit stays small.
            per_round = batch * self.manifest.round.sync_every
            want = self.leases.ask(batch, max(self.manifest.data.lease_samples, per_round // 16))
            if want:
                self._channel.send(Need(samples=samples, want=want))
            span = self.leases.next_span(batch)
            if span is not None:
                return span
            self._load_held(list(self._held))  # no step would come to take them
            message = self._next_message()
            if message is not None:
                self._handle(message)
            self._schedule.on_waited(self._clock())
            if self._clock() >= warn_at:
                warn_at += PATIENCE_S
                log.warning("waiting for data: no samples are leased to this peer; is the coordinator there?")
        return None

    def hand_out(self, span: Span, tokens: int) -> None:
        self.leases.hand_out(span)
        self._batch_tokens += tokens
