"""The agent's eye on the trainer process: started and restarted by the agent, or the agent's own parent.

Called by the agent's loop.  Must not know rounds or messages.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from farflung.protocol.process import exit_codes, failpoints

# ---- processes ---------------------------------------------------------------------------------------------
# The processes of one trainer: a script, or the ranks of one that trains on several GPUs.
#
# Held by the supervisor. Must not know rounds, messages, or when a trainer is started again.
#
# Ranks are started as torchrun would: by RANK, WORLD_SIZE and what else torch.distributed reads. They live
# and die together: when one fails the others are asked to end, and killed if they do not. A trainer is over
# when nothing of it is left, and not before: a rank that lives on would hold its GPU, and write into memory
# that the next trainer shares.

# It said why; again is no better.
HOPELESS = frozenset({exit_codes.USAGE, exit_codes.REFUSED, exit_codes.MISMATCH})
GRACE_S = 10.0  # for the others to end, when one has failed
# So long it is waited for a process that can't be asked whose it is: most are just being started.
UNSURE_S = 2.0
_KERNEL_THREAD = 0x200000  # of a process's flags


class Processes:
    def __init__(self, command: list[str], environment: Mapping[str, str], count: int, mark: str) -> None:
        """`mark`: the name of a variable that all that they start has, too."""
        self._mark = f"{mark}={environment[mark]}".encode() if mark in environment else b""
        self._code = 0  # of the first that failed
        self._kill_at: float | None = None  # when the others must have ended
        self._unsure_until: float | None = None
        # A process group each: Ctrl-C reaches the agent alone, which then ends the trainer in good order.
        self.ranks = [
            subprocess.Popen(command, env=each, stdin=subprocess.DEVNULL, process_group=0)
            for each in _environments(environment, count)
        ]
        self._started_at = _stat(self.ranks[0].pid).started_at

    def look(self, now: float) -> int | None:
        """The exit code, once all are gone: if one said that to start it again is no use, that."""
        codes = [each.poll() for each in self.ranks]
        failed = [code for code in codes if code]
        if failed and self._kill_at is None:
            self._code, self._kill_at = min(failed), now + GRACE_S  # a signal rather than who heard of it
            self.terminate()
        if None in codes:
            if self._kill_at is not None and now >= self._kill_at:
                self.kill()
            return None
        if self._code and self._are_left(now):
            return None
        return next((code for code in failed if code in HOPELESS), self._code)

    def _are_left(self, now: float) -> bool:
        """Of a launcher that was killed itself; they are ended."""
        found, unsure = _with(self._mark, self._started_at)
        _end(found)
        if self._unsure_until is None:
            self._unsure_until = now + UNSURE_S
        return bool(found) or (unsure and now < self._unsure_until)

    def terminate(self) -> None:
        for each in self.ranks:
            if each.poll() is None:
                each.terminate()

    def kill(self) -> None:
        """With all that they started.  A launcher's workers, or those of a data loader, outlive it, in sessions of
        their own."""
        started = [
            pid for each in self.ranks for pid in _descendants(each.pid)
        ]  # before they are somebody else's
        for each in self.ranks:
            if each.poll() is None:
                each.kill()
        _end(started)

    def wait(self, patience_s: float = math.inf) -> bool:
        """Whether all have ended by then."""
        end = time.monotonic() + patience_s
        try:
            for each in self.ranks:
                each.wait(None if end == math.inf else max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True


def _environments(environment: Mapping[str, str], count: int) -> list[dict[str, str]]:
    if count == 1:
        return [dict(environment)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "OMP_NUM_THREADS": "1",  # else each rank would take all cores
        **environment,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


class _Stat(NamedTuple):
    """Of a process: what the kernel says in /proc."""

    state: str = "Z"  # it is gone, or there is no /proc
    parent: int = 0
    flags: int = 0
    started_at: int = 0  # in ticks since the machine started


def _pids() -> list[int]:
    """Of all processes; none where there is no /proc.  Some may be gone when they are looked at."""
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _stat(pid: int) -> _Stat:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _Stat()
    fields = text.rpartition(")")[2].split()  # a name may have blanks and brackets in it
    return _Stat(fields[0], int(fields[1]), int(fields[6]), int(fields[19]))


def _with(mark: bytes, since: int = 0) -> tuple[list[int], bool]:
    """All processes of this user that were started with the variable; none where there is no /proc.  And whether one
    that was started since then can't be asked: for a moment, between two programs and while it ends, a process has no
    environment."""
    found, unsure = [], False
    for pid in _pids() if mark else ():
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            if mark in variables.split(b"\0") and pid != os.getpid():
                found.append(pid)
            unsure = unsure or (not variables and _may_be_between(_stat(pid), since))
    return found, unsure


def _may_be_between(stat: _Stat, since: int) -> bool:
    return stat.state not in "ZX" and not stat.flags & _KERNEL_THREAD and stat.started_at >= since


def _end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for each in _pids():
        children.setdefault(_stat(each).parent, []).append(each)
    found = children.get(pid, [])
    for each in found:  # grows meanwhile
        found.extend(children.get(each, []))
    return found


# ---- supervisor --------------------------------------------------------------------------------------------

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
