"""Agents that are forked from this process instead of started anew: each is a process like any other.

Importing what an agent needs takes seconds of CPU.  Where sixteen of them come and go on a few cores, nothing else
would be measured.  Used by the crowd (crowd.py), which has imported all of it once.  Must not know what an agent does.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

FILES_MOST = 65536


class Forked:
    """A process that was forked here; to be used like a subprocess.Popen."""

    def __init__(self, pid: int, words: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._words = words
        self._ends = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ends)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            select.select([self._ends], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(list(self._words), timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def forked(main: Callable[[], int], words: Sequence[str]) -> Forked:
    """`main` runs there with this command line; nothing that is open here is open there, but for what it says."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid, words)
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.closerange(3, FILES_MOST)
        random.seed()  # or all of them would draw the same
        sys.argv = list(words)
        code = main()
    except BaseException:  # outermost of this process: nothing above it is the child's
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)  # the parent's own way out is not the child's
