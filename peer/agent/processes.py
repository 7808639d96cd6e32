"""The processes of one trainer: a script, or the ranks of one that trains on several GPUs.

Held by the supervisor.  Must not know rounds, messages, or when a trainer is started again.

Ranks are started as torchrun would: by RANK, WORLD_SIZE and what else torch.distributed reads.  They live and die
together: when one fails the others are asked to end, and killed if they do not.  A trainer is over when nothing of it
is left, and not before: a rank that lives on would hold its GPU, and write into memory that the next trainer shares.
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
from typing import NamedTuple

from farflung.protocol.process import exit_codes

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
