"""The trainer's hold on its agent: found or started, watched, told good-bye.

Called by the public API.  Must not know models, rounds or data.

Two ways lead here.  A user's own script starts an agent as its child and takes it along when it ends.  A script
that `farflung join` started finds its agent running (FARFLUNG_AGENT names the folder they share): when such a
script crashes, the agent stays, and starts it again.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from farflung.peer.first_contact import check
from farflung.peer.identity import InUse, path_of
from farflung.peer.island.island import Island
from farflung.peer.island.ranks import ALONE, Ranks, ranks_here
from farflung.peer.local.channel import LocalClient
from farflung.peer.local.folder import is_abandoned, make_folder, remove_folder, sweep_stale
from farflung.peer.local.words import Begin, Bye, Stop, ToTrainer
from farflung.peer.settings import own_config, refuse_contradictions
from farflung.protocol.errors import Refused, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process.log_lines import Teller

log = logging.getLogger(__name__)

AGENT_VARIABLE = "FARFLUNG_AGENT"
RUN_VARIABLE = "FARFLUNG_RUN"
POLL_S = 0.5
PATIENCE_S = 30.0
LEAVE_S = 10.0  # for an agent to leave the run
TERMINATE_S = 2.0
_SAID_BY_TRAINERS = frozenset({"agent", "rank", "misfit", "replaced"})  # codes that end no agent
_REASON_CHARS = 500  # the wire allows more; a whole traceback helps nobody at the other end


class Hearing(Protocol):
    """Whatever the agent's words come through."""

    def recv(self, timeout_s: float) -> ToTrainer | None: ...


class Child(Protocol):
    """An agent's process, as far as its trainer has to do with it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def started(words: list[str]) -> Child:
    """By the options of `python -m farflung.peer.agent.main`."""
    # A process group of its own: Ctrl-C reaches the script alone, which then tells the agent to leave.
    # stdout is the script's; what the agent has to say goes to stderr.
    command = [sys.executable, "-m", "farflung.peer.agent.main", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0)


class AgentHandle(Protocol):
    """What a script has of its agent, whether it is one process or one of several."""

    @property
    def channel(self) -> LocalClient | Island: ...

    def wait_for_begin(self) -> Begin: ...

    def problem(self) -> str | None: ...

    def close(self, reason: str) -> None: ...

    def abandon(self) -> None: ...


def start_or_find(
    url: str | None, own: Mapping[str, object], agree: Callable[[Island], None]
) -> tuple[AgentHandle, Ranks]:
    """The agent, and the other ranks of this script.  Called by all of them at the same time.

    `agree`: what they find out about each other before there is an agent; a UserError of it is one on all of them.
    """
    if ranks_here() <= 1:
        return AgentProcess.start_or_find(url, own), ALONE
    _refuse_worker()
    from farflung.peer.island.group import GlooGroup  # only here: it loads torch.distributed

    island = Island(GlooGroup())
    agree(island)
    return IslandAgent(island, url, own), island


class AgentProcess:
    """`child` is None for an agent that was there before."""

    def __init__(self, folder: Path, child: Child | None) -> None:
        self.channel = LocalClient(folder)
        self._folder = folder
        self._child = child
        self._pid = os.getpid()
        self._closed = False
        atexit.register(self._at_exit)

    @classmethod
    def start_or_find(
        cls, url: str | None, own: Mapping[str, object], start: Callable[[list[str]], Child] = started
    ) -> AgentProcess:
        """`own`: the volunteer's settings as far as they were given as arguments (peer/settings.py)."""
        _refuse_worker()
        if found := os.environ.get(AGENT_VARIABLE):
            if is_abandoned(Path(found)):
                raise UserError(
                    f"{AGENT_VARIABLE} names {found}, but no agent is there; is `farflung join` running?"
                )
            return cls(Path(found), None)
        url = url or os.environ.get(RUN_VARIABLE)
        if not url:
            raise UserError(f"which run? pass its join URL to farflung.join, or set {RUN_VARIABLE}")
        # Mistakes are told here, before a child process loads what takes seconds.
        parsed, settings, say = JoinUrl.parse(url), own_config(own), Teller.from_environment("script")
        refuse_contradictions(settings)
        InUse.take(
            path_of(settings.identity, parsed), os.getpid(), say
        ).free()  # the agent takes it, and keeps it
        check(parsed, settings, say)
        sweep_stale()
        folder = make_folder()
        words = ["--url", url, "--folder", str(folder), "--parent", str(os.getpid())]
        return cls(folder, start([*words, "--settings", settings.as_json()]))

    @property
    def pid(self) -> int | None:
        """None for an agent that was there before."""
        return self._child.pid if self._child is not None else None

    def wait_for_begin(self) -> Begin:
        return wait_for_begin(self.channel, self.problem)

    def problem(self) -> str | None:
        """Why the agent is gone, or None while it lives."""
        if self._child is None:
            return "the agent that started this script is gone" if is_abandoned(self._folder) else None
        code = self._child.poll()
        return None if code is None else f"the agent ended with exit code {code}; its last messages say why"

    def close(self, reason: str) -> None:
        """Leave the run: the agent goes too."""
        if self._forget():
            return
        self.channel.send(Bye(reason=reason[:_REASON_CHARS]))
        self.channel.close()
        self._end_child()

    def abandon(self) -> None:
        """This script failed.  An agent that started it will start it again; a child has no reason to live."""
        if self._child is not None:
            self.close("the training script failed")
        elif not self._forget():
            self.channel.close()

    def _forget(self) -> bool:
        """Whether it was closed before, or is not this process's to close: a forked child's way out is its own."""
        if os.getpid() != self._pid:
            return True
        before, self._closed = self._closed, True
        atexit.unregister(self._at_exit)
        return before

    def _end_child(self) -> None:
        if self._child is None:
            return
        try:
            self._child.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            log.warning("the agent did not leave within %g s and is stopped", LEAVE_S)
            self._child.terminate()
            try:
                self._child.wait(TERMINATE_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        remove_folder(self._folder)

    def _at_exit(self) -> None:
        if getattr(sys, "last_type", None) is not None:  # the interpreter printed a traceback
            self.abandon()
        else:
            self.close("the training script ended")


class IslandAgent:
    """The agent as each rank of an island has it: rank 0's, of which the others hear."""

    def __init__(self, island: Island, url: str | None, own: Mapping[str, object]) -> None:
        self.channel = island
        self._own: AgentProcess | None = None
        island.begin(lambda: self._start(url, own))

    def _start(self, url: str | None, own: Mapping[str, object]) -> AgentProcess:
        self._own = AgentProcess.start_or_find(url, own)
        return self._own

    def wait_for_begin(self) -> Begin:
        return wait_for_begin(self.channel, self.channel.problem)

    def problem(self) -> str | None:
        return self.channel.problem()

    def close(self, reason: str) -> None:
        if self.channel.is_broken:
            self.abandon()
        elif self._own is not None:
            self._own.close(reason)

    def abandon(self) -> None:
        if self._own is not None:
            self._own.abandon()


def wait_for_begin(channel: Hearing, problem: Callable[[], str | None]) -> Begin:
    """The agent knows the run's manifest once it has reached the coordinator, however long that takes."""
    warn_at = time.monotonic() + PATIENCE_S
    while True:
        # Asked first: an agent that is gone by now has said all that it had to say.
        gone = problem()
        message = channel.recv(0.0 if gone else POLL_S)
        if isinstance(message, Begin):
            return message
        if isinstance(message, Stop):
            raise refusal(message.code, message.reason)
        if message is None and gone is not None:
            raise Refused("agent", gone)
        if time.monotonic() >= warn_at:
            warn_at += PATIENCE_S
            log.warning("still waiting for the coordinator")


def refusal(code: str, reason: str) -> Refused:
    """What the agent's `Stop` is to the script.  An agent that `farflung join` started ends with it, and says it."""
    error = Refused(code, reason)
    error.said = AGENT_VARIABLE in os.environ and code not in _SAID_BY_TRAINERS
    return error


def refuse_ranks() -> None:
    """Each rank would be a peer of its own: two with one key, or two that train on the same gradients."""
    ranks = ranks_here()
    if ranks > 1:
        raise UserError(
            f"this is one of {ranks} processes that train together (torchrun, accelerate launch), and this way of "
            "taking part is for one process: join with farflung.join and a loop of your own (docs/islands.md), or "
            "start one process for each GPU without them, each with CUDA_VISIBLE_DEVICES and an --identity of its own; "
            "unset WORLD_SIZE if it is left over from something else"
        )


def _refuse_worker() -> None:
    """It would be a peer whose parent waits for samples, and one more for each worker."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise UserError(
            "a run can't be joined from a DataLoader's worker: call farflung.join or farflung.pipeline in the script's "
            "main process, not in the data set"
        )
