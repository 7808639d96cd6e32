"""The trainer's side of a run: when to hand work over, what to keep of it, what to load.

Owns: the unmerged work (`carry` and what was learned since the last load), its counts, when a slot is written.
Called by the public API after every optimizer step, and while it waits for data.
Must not know: processes, sockets, rounds, how the outer step works.  Messages come through a channel.

    learned = loaded - now           since the last load; rounding the anchor to bf16 is in neither
    owed    = carry + learned        everything that no commit has used; this is frozen into a slot

`run.step` blocks only here: from the moment a pseudo-gradient is frozen until the agent says how to go on.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from farflung.collectives.errors import Refused, UserError
from farflung.coordinator.manifest import Manifest
from farflung.peer.layout import ModelLayout
from farflung.peer.leased_data import LeaseBook, Span
from farflung.peer.local import SharedState
from farflung.peer.local_messages import (
    Attach,
    Finish,
    FromTrainer,
    Frozen,
    LeasesNow,
    Load,
    Loaded,
    Need,
    Provide,
    Provided,
    Resume,
    Shared,
    Stop,
    ToTrainer,
)

log = logging.getLogger(__name__)

NOT_LOADED = -1
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
        self.leases = LeaseBook()
        self.version = NOT_LOADED
        self.step_count = 0
        self.finished = False
        self._model = model
        self._channel = channel
        self._agent_problem = agent_problem  # why the agent is gone, or None
        self._clock = clock
        self._shared: SharedState | None = None
        self._loaded: list[Tensor] = []  # the model right after the last load
        self._carry: Tensor | None = None  # unmerged work from before it, fp32; None is zero
        self._tokens = self._steps = 0  # counts of the unmerged work
        self._since_freeze = 0
        self._spare = 0  # the slot to freeze into; the agent names it, since it knows which ones are in use
        self._blocked = False
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

    def attach(self) -> None:
        """Say what the model is, and wait until the run's state is in it."""
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

    def after_step(self) -> None:
        """After every optimizer step.  Loads may come at any step; a freeze waits for the agent."""
        if self.finished:
            return
        self._count_step()
        while (message := self._channel.recv(0.0)) is not None:
            self._handle(message)
        self._show_progress()
        if self._since_freeze >= self.manifest.round.sync_every and not self.finished:
            self._freeze()

    def _count_step(self) -> None:
        # A step that nobody counted counts as one token, so that weights still follow the work done.
        said, batch = self._said_tokens, self._batch_tokens
        tokens = said if said is not None else max(1, batch)
        self._said_tokens, self._batch_tokens = None, 0
        self.step_count += 1
        self._all_tokens += tokens
        self._tokens += tokens
        self._steps += 1
        self._since_freeze += 1
        self.leases.on_step()

    def _show_progress(self) -> None:
        now = self._clock()
        if now - self._loss_at >= LOSS_EVERY_S:
            self._loss_at = now
            loss = self._losses.read()
            self._loss = self._loss if loss is None else loss
        self.shared.write_progress(self.step_count, self._all_tokens, self._loss)

    def _freeze(self) -> None:
        slot = self._spare
        self.layout.write_delta(self._model, self._loaded, self._carry, self.shared.slots[slot])
        loss = self._losses.read()
        self._start_period()
        self._blocked = True
        self._channel.send(
            Frozen(slot=slot, tokens=self._tokens, steps=self._steps, used=self.leases.used(), loss=loss)
        )
        while self._blocked and not self.finished:
            message = self._next_message()
            if message is not None:
                self._handle(message)

    def _start_period(self) -> None:
        self._since_freeze = 0
        self._losses.clear()

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
                self._load(message)
            case Resume(spare=spare):
                self._spare, self._blocked = spare, False
            case LeasesNow(leases=leases):
                self.leases.on_leases(leases)
            case Finish():
                self.finished = True
            case Stop(code=code, reason=reason):
                if code not in ("finished", "left"):
                    raise Refused(code, reason)
                self.finished = True
            case _:
                pass  # Begin, once more: the agent tells it to every trainer that waits

    def _load(self, load: Load) -> None:
        self._carry = _none_if_zero(self._kept(load))
        anchor = self.shared.anchor
        self.layout.load(self._model, anchor if self._carry is None else anchor - self._carry)
        self._loaded = self.layout.snapshot(self._model)
        self.version, self._spare, self._blocked = load.version, load.spare, False
        self._channel.send(Loaded(version=load.version))

    def _kept(self, load: Load) -> Tensor | None:
        """The unmerged work after this load; the counts follow it."""
        match load.keep:
            case "all":
                return self._owed()
            case "rest":
                self._tokens = max(0, self._tokens - load.tokens)
                self._steps = max(0, self._steps - load.steps)
                return self._owed().sub_(self.shared.slots[load.slot])
            case "drop" | "restore":
                self._tokens, self._steps = load.tokens, load.steps  # drop: zero
                self._start_period()
                self.leases.restart()
                return self.shared.slots[load.slot].clone() if load.keep == "restore" else None

    def _owed(self) -> Tensor:
        owed = torch.empty(self.layout.total_elements)
        self.layout.write_delta(self._model, self._loaded, self._carry, owed)
        return owed

    # ---- data

    def next_span(self, samples: int, batch: int) -> Span | None:
        """The next leased samples; waits for a lease where there is none.  None: the run is over."""
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
            message = self._next_message()
            if message is not None:
                self._handle(message)
            if self._clock() >= warn_at:
                warn_at += PATIENCE_S
                log.warning("waiting for data: no samples are leased to this peer; is the coordinator there?")
        return None

    def hand_out(self, span: Span, tokens: int) -> None:
        self.leases.hand_out(span)
        self._batch_tokens += tokens


def _none_if_zero(carry: Tensor | None) -> Tensor | None:
    """Exactly nothing left: the anchor is then loaded as it is, bit for bit."""
    return carry if carry is not None and bool(carry.any()) else None
