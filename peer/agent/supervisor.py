"""The agent's eye on the trainer process: started and restarted by the agent, or the agent's own parent.

Called by the agent's loop.  Must not know rounds or messages.
"""

from __future__ import annotations

import os
from typing import Protocol

from farflung.peer.agent.processes import HOPELESS, Processes
from farflung.protocol.process import failpoints

RESTART_S = 0.5  # doubles with each crash in a row
RESTART_MAX_S = 30.0
CRASHES_IN_A_ROW = 5
CRASHES_BEFORE_JOINING = 2  # of a script that has never come so far: it will fail at the same line again
STEADY_S = 60.0  # a trainer that lived so long starts the count anew
STOP_S = 10.0
SLOW_START_S = 5.0  # a trainer that has not joined after so long is told of, and again after twice as long
GOODBYE_S = 5.0  # after a trainer's end with success its good-bye is here, or it never joined


class Supervisor(Protocol):
    def watch(self, now: float) -> str | None:
        """Why the agent must give up, or None."""

    @property
    def just_died(self) -> bool:
        """True once after each death of a trainer."""

    def take_lines(self) -> list[str]:
        """What a person should hear since the last call."""

    def on_attached(self) -> None:
        """A trainer has said what its model is."""

    def on_stuck(self, seconds: float) -> None:
        """Once: the trainer has taken no step for so long, though it could."""

    def stop(self) -> None:
        """The agent ends: so does a trainer that it started."""


class NoTrainer:
    """Of a peer that only helps: nothing is started, and nothing can die."""

    just_died = False
    hopeless_code: int | None = None

    def watch(self, now: float) -> str | None:
        return None

    def take_lines(self) -> list[str]:
        return []

    def on_attached(self) -> None:
        """Nobody does."""

    def on_stuck(self, seconds: float) -> None:
        """Nothing can hang."""

    def kill(self) -> None:
        """There is nothing."""

    def stop(self) -> None:
        """There is nothing."""


class ParentTrainer:
    """The user's own script started this agent: when it is gone, there is nobody to train for."""

    just_died = False

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._news: list[str] = []

    def take_lines(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def on_attached(self) -> None:
        pass  # it is not started again, so nothing is counted

    def on_stuck(self, seconds: float) -> None:
        """It is not ours to kill."""
        self._news.append(
            f"the training script has taken no step for {seconds:.0f} s; rounds go on without it"
        )

    def watch(self, now: float) -> str | None:
        return None if os.getppid() == self._pid else "the training script is gone"

    def stop(self) -> None:
        pass  # it is not ours to stop


class ChildTrainer:
    """The agent starts the trainer, and starts it again when it crashes: from the anchor in memory (section 5)."""

    def __init__(
        self, command: list[str], environment: dict[str, str], ranks: int = 1, mark: str = ""
    ) -> None:
        """`ranks`: so many processes that train together.  `mark`: a variable that is in `environment` alone."""
        self._command = command
        self._environment = environment
        self._ranks, self._mark = ranks, mark
        self._processes: Processes | None = None
        self._start_at = 0.0
        self._started_at = 0.0
        self._crashes = 0
        self._attached_once = False
        self._tell_start_at: float | None = None  # while it has not attached
        self._died = False
        self.hopeless_code: int | None = None  # the exit code of a trainer that is not worth starting again
        self.ended = False  # it ended by itself with success: it is not started again
        self._news: list[str] = []

    @property
    def just_died(self) -> bool:
        died, self._died = self._died, False
        return died

    def take_lines(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def watch(self, now: float) -> str | None:
        if self._processes is not None:
            code = self._processes.look(now)
            if code is None:
                self._tell_slow_start(now)
                return None
            return self._on_exit(code, now)
        if self.ended:
            late = now - self._start_at >= GOODBYE_S
            return "the script ended without a word to the run; does it call farflung.join?" if late else None
        if now < self._start_at:
            return None
        self._processes = Processes(self._command, self._environment, self._ranks, self._mark)
        self._started_at, self._tell_start_at = now, now + SLOW_START_S
        return None

    def _tell_slow_start(self, now: float) -> None:
        if self._tell_start_at is None or now < self._tell_start_at:
            return
        gone_s = now - self._started_at
        self._tell_start_at = now + gone_s
        self._news.append(
            f"the trainer has been starting for {gone_s:.0f} s: torch is loaded, its model and data are made"
        )

    def on_attached(self) -> None:
        self._attached_once, self._tell_start_at = True, None

    def on_stuck(self, seconds: float) -> None:
        if self._processes is not None:
            self._news.append(f"the trainer has taken no step for {seconds:.0f} s: it is killed")
            self._processes.kill()

    def _on_exit(self, code: int, now: float) -> str | None:
        self._processes = None
        self._died = True
        self._environment.pop(failpoints.VARIABLE, None)  # what a test broke once is not to break for ever
        if code == 0:
            self.ended, self._start_at = True, now
            return None
        self._crashes = 1 if now - self._started_at >= STEADY_S else self._crashes + 1
        if code in HOPELESS:
            self.hopeless_code = code
            return f"the trainer ended with exit code {code}; its last message says why"
        what = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not self._attached_once and self._crashes >= CRASHES_BEFORE_JOINING:
            return f"the script failed {self._crashes} times before it joined the run, lastly with {what}"
        if self._crashes >= CRASHES_IN_A_ROW:
            return f"the trainer crashed {self._crashes} times in a row, the last time with {what}"
        wait_s = min(RESTART_MAX_S, RESTART_S * 2 ** (self._crashes - 1))
        self._start_at = now + wait_s
        self._news.append(f"the trainer ended with {what}; it starts again from the anchor in {wait_s:g} s")
        return None

    def kill(self) -> None:
        """Whatever it does: there is no agent for it."""
        if self._processes is not None and not self._processes.wait(0.0):
            self._processes.kill()
            self._processes.wait()

    def stop(self) -> None:
        # It was told to finish; it may be saving the model.
        if self._processes is None or self._processes.wait(STOP_S):
            return
        self._processes.terminate()
        if not self._processes.wait(STOP_S):
            self._processes.kill()
            self._processes.wait()
