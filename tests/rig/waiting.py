"""How tests wait for what other threads and processes do.

One deadline for all of them: it is only reached by a test that fails, so it may be long, and a machine that stands
still for half a minute makes no test fail.  What is waited for must be a state that lasts until the test ends it, or a
trace that stays (a log, a journal, an exit code): whoever looks may be stopped for seconds between two looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 120.0
LONG_S = 300.0  # for what compiles, installs, or starts processes that import torch
LOOK_EVERY_S = 0.02


class Patience:
    """So many seconds in which this process could look: a standstill of the machine counts as one of them."""

    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self._left_s, self._looked_at = seconds, time.monotonic()

    @property
    def is_over(self) -> bool:
        now = time.monotonic()
        self._left_s -= min(1.0, now - self._looked_at)
        self._looked_at = now
        return self._left_s <= 0.0


def eventually(probe: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """What the probe found, as soon as that is true; `what` says in the failure what was waited for."""
    patience = Patience(patience_s)
    while True:
        if found := probe():
            return found
        if patience.is_over:
            pytest.fail(f"not within {patience_s:g} s: {what}")
        time.sleep(LOOK_EVERY_S)


def is_running(pid: int) -> bool:
    """A zombie has ended too: whoever inherited it has only not looked yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
