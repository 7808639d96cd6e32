"""The trainer's side of handing an optimizer's state over: what the agent says of it, and what follows.

Held by the inner loop, which passes the words on.  A donor's trainer writes its state between two steps; a
joiner's asks for one when the run's state is loaded, waits for it (the agent says how long), and starts with small
steps if none came.  Must not know who gave it, or what is in it (inner_state.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from farflung.coordinator.manifest import InnerSection
from farflung.peer.inner_state import InnerState, NotTaken
from farflung.peer.local_messages import (
    FromTrainer,
    InnerHere,
    InnerKept,
    InnerTaken,
    KeepInner,
    TakeInner,
    WantInner,
)
from farflung.peer.optimizer import RunOptimizer


class InnerWords:
    def __init__(
        self,
        optimizer: RunOptimizer,
        state: InnerState,
        rules: InnerSection,
        send: Callable[[FromTrainer], None],
    ) -> None:
        self._optimizer, self._state, self._rules, self._send = optimizer, state, rules, send
        self._is_to_ask = False
        self._on_trial = False  # a donor's state, of which no commit has shown yet that it does no harm
        self.waits = False

    def on_message(self, message: TakeInner | KeepInner | InnerHere) -> None:
        match message:
            case TakeInner():
                self._is_to_ask = True
            case KeepInner():
                self._send(self._keep(message))
            case InnerHere() if self.waits:
                self.waits = False
                self._take(message)
            case InnerHere():
                pass  # nobody waits for it any more

    def begin(self, version: int) -> None:
        """The run's state is loaded.  At version 0 nobody has more than a fresh optimizer."""
        if not version:
            return
        if not self._is_to_ask:
            self._optimizer.start_small(self._rules.rejoin_warmup_steps)
            return
        try:
            self._send(WantInner(most_bytes=self._state.expect()))
            self.waits = True
        except NotTaken as error:
            self._optimizer.start_small(self._rules.rejoin_warmup_steps)
            self._send(InnerTaken(problem=str(error)))

    def on_commit(self) -> None:
        """A commit used what was learned here."""
        self._on_trial = False

    def on_dropped(self) -> None:
        """What was learned since the last load had to go: if that came of a donor's state, it goes too."""
        if self._on_trial:
            self._start_fresh("what was learned with it was not usable")

    def _keep(self, asked: KeepInner) -> InnerKept:
        began = time.monotonic()
        try:
            size = self._state.write(Path(asked.path), asked.most_bytes)
        except NotTaken as error:
            return InnerKept(number=asked.number, size=0, took_s=0.0, problem=str(error))
        except OSError as error:
            problem = f"no room for a copy: {error.strerror}"
            return InnerKept(number=asked.number, size=0, took_s=0.0, problem=problem)
        return InnerKept(number=asked.number, size=size, took_s=time.monotonic() - began)

    def _take(self, here: InnerHere) -> None:
        problem = here.problem
        if not problem:
            try:
                self._state.take(Path(here.path))
            except NotTaken as error:
                problem = str(error)
        if problem:
            self._start_fresh(problem)
        else:
            self._on_trial = True
            self._send(InnerTaken())

    def _start_fresh(self, problem: str) -> None:
        self._on_trial = False
        self._state.forget()
        self._optimizer.start_small(self._rules.rejoin_warmup_steps)
        self._send(InnerTaken(problem=problem))
