"""Is the trainer alive, or only its process?  Judged by its count of steps.  Pure.

Asked by the agent at every tick.  Must not know processes or messages.

A trainer that should be taking inner steps and takes none for long is stuck: a deadlock, a GPU that hangs, a process
that was stopped.  How long is long follows from what its steps have taken so far; the first one may have to
compile the model.  A trainer that waits for a round or for data is not judged.
"""

from __future__ import annotations

FIRST_S = 900.0  # for the first step
LEAST_S = 120.0  # for any other: an evaluation or a checkpoint of the script's own takes a while
TIMES_LONGEST = 10.0  # what the longest pause between two steps so far is multiplied by


class Pulse:
    def __init__(self, patience_s: float | None = None) -> None:
        """`patience_s`: said by the volunteer; None: as above."""
        self._patience_s = patience_s
        self._step: int | None = None
        self._moved_at: float | None = None  # None: it was not to take steps when it was looked at last
        self._longest_s = 0.0
        self._has_stepped = False

    def look(self, now: float, step: int, running: bool) -> bool:
        """True while it is stuck.  `running`: it is to take inner steps and has what it needs for them."""
        if not running:
            self._moved_at = None
        elif self._moved_at is None:
            self._moved_at = now
        elif step != self._step:
            if self._has_stepped:
                self._longest_s = max(self._longest_s, now - self._moved_at)
            self._moved_at, self._has_stepped = now, True
        self._step = step
        return self._moved_at is not None and now - self._moved_at >= self.patience_s

    @property
    def patience_s(self) -> float:
        if self._patience_s is not None:
            return self._patience_s
        return max(LEAST_S, TIMES_LONGEST * self._longest_s) if self._has_stepped else FIRST_S

    def on_new_trainer(self) -> None:
        self._moved_at, self._has_stepped, self._step = None, False, None
