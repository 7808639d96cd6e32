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

from farflung.protocol.process import exit_codes

# It said why; again is no better.
HOPELESS = frozenset({exit_codes.USAGE, exit_codes.REFUSED, exit_codes.MISMATCH})
GRACE_S = 10.0  # for the others to end, when one has failed


class Processes:
    def __init__(self, command: list[str], environment: Mapping[str, str], count: int, mark: str) -> None:
        """`mark`: the name of a variable that all that they start has, too."""
        self._mark = f"{mark}={environment[mark]}".encode() if mark in environment else b""
        self._code = 0  # of the first that failed
        self._kill_at: float | None = None  # when the others must have ended
        # A process group each: Ctrl-C reaches the agent alone, which then ends the trainer in good order.
        self.ranks = [
            subprocess.Popen(command, env=each, stdin=subprocess.DEVNULL, process_group=0)
            for each in _environments(environment, count)
        ]

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
        if self._code and (left := _with(self._mark)):
            _end(left)  # of a launcher that was killed itself
            return None
        return next((code for code in failed if code in HOPELESS), self._code)

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


def _with(mark: bytes) -> list[int]:
    """All processes of this user that were started with the variable; none where there is no /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ") if mark else ():
        with suppress(OSError):
            if mark in file.read_bytes().split(b"\0") and int(file.parent.name) != os.getpid():
                found.append(int(file.parent.name))
    return found


def _end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):  # nothing where there is no /proc
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # a name may have blanks and brackets in it
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = children.get(pid, [])
    for each in found:  # grows meanwhile
        found.extend(children.get(each, []))
    return found
