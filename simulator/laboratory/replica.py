"""A training script as one replica of a simulated run: the production trainer's loop, in a thread of its own.

The script is the one that `farflung join --script` starts, unchanged.  It has the turn, or the world has: a thread runs
only while the world waits for it, so that the order is that of the virtual clock.  What it waits for (words, the time
that a step takes) gives the turn back.  Must not know lines or the coordinator.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from farflung.peer.local.memory import LOOK_AGAIN_S, Copied, SharedState, VersionArriving
from farflung.peer.local.words import Attach, Begin, Bye, FromTrainer, ToTrainer
from farflung.peer.trainer.api import CONNECTED, Connection, Found
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.kept_optimizer import KeptOptimizer, OptimizerState
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema
from farflung.simulator.trainer import TrainerHost

Body = Callable[[], None]
# Whether what this thread's script prints is to be shown: all replicas print the same.
ALOUD: ContextVar[bool] = ContextVar("ALOUD", default=True)


class Left(BaseException):
    """The replica was killed: its script ends where it stands."""


class ScriptFailed(Exception):
    """Of this replica; its cause is what the script raised."""


class Turn:
    """A thread that runs only while somebody waits in `give`."""

    def __init__(self, body: Body, name: str) -> None:
        self._body = body
        # Each is freed by the one, and taken by the other.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._left = False
        self.over = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self) -> None:
        """Returns when the script waits for something, or is over."""
        if not self.over:
            self._go.release()
            self._back.acquire()

    def wait(self) -> None:
        """Called by the script: what the world does next comes first."""
        if not self._left:
            self._back.release()
            self._go.acquire()
        if self._left:
            raise Left

    def leave(self) -> None:
        self._left = True
        self.give()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._left:
                self._body()
        except Left:
            pass
        except BaseException as error:  # outermost of the thread: the world raises it
            # What a script that was killed raises on its way out is nobody's.
            if not (self._left or (isinstance(error, SystemExit) and error.code in (None, 0))):
                self.error = error
        finally:
            self.over = True
            self._back.release()


class OwnDice:
    """Random numbers that a script draws without a generator of its own: each replica has its own stream of them."""

    _holder: OwnDice | None = None

    def __init__(self, seed: int) -> None:
        kept = self._read()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._state = self._read()
        self._write(kept)

    def take(self) -> None:
        if OwnDice._holder is self:
            return
        if OwnDice._holder is not None:
            OwnDice._holder._state = self._read()
        OwnDice._holder = self
        self._write(self._state)

    @staticmethod
    def _read() -> tuple[Any, ...]:
        return torch.get_rng_state(), random.getstate(), np.random.get_state()

    @staticmethod
    def _write(state: tuple[Any, ...]) -> None:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])


class ScriptReplica:
    """The trainer of a virtual peer; to its script the channel to the agent, and the agent."""

    def __init__(
        self, manifest: Manifest, name: str, script: Body, step_s: float, seed: int, aloud: bool = False
    ) -> None:
        self._manifest, self.name, self._step_s, self._aloud = manifest, name, step_s, aloud
        self._host: TrainerHost | None = None
        self._said: list[FromTrainer] = []  # before the peer was in the run
        self._inbox: deque[ToTrainer] = deque()
        self._begun = False
        self._hears = False
        self._waits = 0  # how often it has waited: what wakes it is of one of these
        self._closed = False
        self.loop: ReplicaLoop | None = None
        self.figures: dict[str, float] = {}
        self.optimizer: Optimizer | None = None
        self.kept: OptimizerState | None = None  # by the replica before it, which left in order
        self.evaluated: dict[tuple[object, ...], Any] = {}  # of all replicas, at the end of the run
        self.began_s: float | None = None  # its first step
        self.ended_s = 0.0  # its last
        self._dice = OwnDice(seed)
        self._turn = Turn(lambda: self._run(script), name)

    def _run(self, script: Body) -> None:
        ALOUD.set(self._aloud)
        CONNECTED.set(lambda: ReplicaConnection(self, self._manifest, self.name))
        script()

    # ---- the world's side

    @property
    def alive(self) -> bool:
        return not self._turn.over

    @property
    def error(self) -> BaseException | None:
        return self._turn.error

    @property
    def waited_s(self) -> float:
        return self.loop.waited_s if self.loop is not None else 0.0

    @property
    def steps(self) -> int:
        return self.loop.step_count if self.loop is not None else 0

    @property
    def host(self) -> TrainerHost:
        assert self._host is not None, "before it has a peer"
        return self._host

    def model(self) -> ModelSchema:
        """Runs the script until it says what it trains.  UserError: it never does."""
        self._give()
        found = next((word.model for word in self._said if isinstance(word, Attach)), None)
        if found is None:
            raise UserError("the script ended without farflung.join: a run needs a model")
        return found

    def belong_to(self, host: TrainerHost) -> None:
        self._host = host
        host.world.after(0.0, self._give)

    def on_message(self, message: ToTrainer) -> None:
        if isinstance(message, Begin):
            self._begun = True
            said, self._said = self._said, []
            for word in said:
                self.host.from_trainer(word)
            return
        self._inbox.append(message)
        if self._hears:
            self._give()

    def leave(self) -> None:
        self._turn.leave()

    def _wake(self, waits: int) -> None:
        if self._waits == waits:  # nothing else has woken it
            self._give()

    def _give(self) -> None:
        self._hears = False
        self._waits += 1
        self._dice.take()
        self._turn.give()
        if self.error is not None:
            raise ScriptFailed(self.name) from self.error

    # ---- the script's side

    def _wait(self, seconds: float, hears: bool) -> None:
        self._hears = hears
        waits = self._waits
        if self._host is not None:
            self._host.world.after(seconds, lambda: self._wake(waits))
        self._turn.wait()

    def pass_step(self) -> None:
        """The time that it takes."""
        self.began_s = self.now() if self.began_s is None else self.began_s
        self.pass_time(self._step_s)
        self.ended_s = self.now()

    def pass_time(self, seconds: float) -> None:
        self._wait(seconds, hears=False)

    def now(self) -> float:
        return self._host.world.now() if self._host is not None else 0.0

    def send(self, message: FromTrainer) -> None:
        if self._begun:
            self.host.from_trainer(message)
        else:
            self._said.append(message)

    def recv(self, timeout_s: float) -> ToTrainer | None:
        if not self._inbox and timeout_s:
            self._wait(timeout_s, hears=True)
        return self._inbox.popleft() if self._inbox else None

    @property
    def channel(self) -> Any:
        return self

    def wait_for_begin(self) -> Begin:
        return Begin(manifest=self._manifest.canonical(), peer="", name=self.name)

    def problem(self) -> str | None:
        return None

    def close(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self.send(Bye(reason=reason))

    def abandon(self) -> None:
        self.close("the training script failed")


class ReplicaConnection(Connection):
    def __init__(self, replica: ScriptReplica, manifest: Manifest, name: str) -> None:
        super().__init__(replica, manifest, name)
        self._replica = replica

    def _loop(self, model: nn.Module) -> InnerLoop:
        self._replica.loop = ReplicaLoop(self._replica, model, self.manifest)
        return self._replica.loop

    def _say_memory(self, loop: InnerLoop, optimizer: Optimizer) -> None:
        self._replica.optimizer = optimizer  # memory is that of one machine, whose replicas these are


class ReplicaLoop(InnerLoop):
    """A step takes its time before it counts; the state lies in the virtual peer's memory."""

    def __init__(self, replica: ScriptReplica, model: nn.Module, manifest: Manifest) -> None:
        super().__init__(replica, model, manifest, replica.problem, replica.now)
        self._replica = replica
        self._asked: Counter[tuple[object, ...]] = Counter()

    @property
    def kept_optimizer(self) -> KeptOptimizer:
        return KeptInMemory(self._replica.kept)

    def before_step(self) -> None:
        if not self.finished:
            self._replica.pass_step()
        super().before_step()

    def evaluated(self, compute: Callable[[], Found]) -> Found:
        """Once the run is over, all replicas hold the same weights: what the same line of the same script makes of them
        for the first, second, ... time, the first of them computes for all."""
        code = getattr(compute, "__code__", None)
        if not self.finished or code is None:
            return super().evaluated(compute)
        line = self.version, code.co_filename, code.co_firstlineno
        self._asked[line] += 1
        key = (*line, self._asked[line])
        if key not in self._replica.evaluated:
            self._replica.evaluated[key] = super().evaluated(compute)
        found: Found = self._replica.evaluated[key]
        return found

    def log_figure(self, name: str, value: float) -> None:
        super().log_figure(name, value)
        self._replica.figures[name] = value

    def _say_what_is_computed(self) -> None:
        pass  # all replicas run the same script

    @property
    def shared(self) -> SharedState:
        if self._shared is None:
            self._shared = VirtualMemory(self._replica)
        return self._shared


class KeptInMemory(KeptOptimizer):
    def __init__(self, state: OptimizerState | None) -> None:
        super().__init__("")
        self._state = state

    def read_into(self, optimizer: Optimizer) -> bool:
        return self._state is not None and self._state.put_into(optimizer)


class VirtualMemory(SharedState):
    def __init__(self, replica: ScriptReplica) -> None:
        host = replica.host
        self._replica, self._state = replica, host.state
        self._vitals = host.member.reports.vitals
        self.anchor, self.moments, self.slots = host.anchor, host.moments, host.slots

    def write_progress(self, step: int, tokens: int, loss: float | None) -> None:
        self._vitals.step, self._vitals.tokens, self._vitals.loss = step, tokens, loss

    def write_gradient_norm(self, norm: float | None) -> None:
        pass

    def read_changes(self) -> int:
        return int(self._state.is_torn)

    def copy_whole(self, copy: Callable[[], Copied], patience_s: float) -> Copied:
        waited_s = 0.0
        while self._state.is_torn:
            if waited_s >= patience_s:
                raise VersionArriving("the run's next version is just arriving")
            self._replica.pass_time(LOOK_AGAIN_S)
            waited_s += LOOK_AGAIN_S
        return copy()


def script_at(path: Path) -> Body:
    """Each call runs it as a main module of its own; what it imports is shared by all replicas."""
    loader = SourceFileLoader("__main__", str(path))

    def run() -> None:
        module = types.ModuleType("__main__")
        module.__file__ = str(path)
        sys.modules["__main__"] = module  # where dataclasses look up what their annotations name
        loader.exec_module(module)

    return run
