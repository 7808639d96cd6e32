"""How many steps the ranks of an island take between two looks at the agent.  Pure.

Rank 0 has the pace and says with each look when the next one is, so that all look at the same step.
Called by island.py; an outlook is made by the trainer's machine.  Must not know models, gloo, or what the words mean.

A look is an exchange that all ranks wait for.  After every step it would take a good part of a short one, and for what
it brings a moment is nothing: an agent's words come over a network, a few times in a period.  What follows from the
count of steps alone is never late: all ranks know that it is due, and look at that step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

SHARE = 0.003  # of the time of training, for looks
LATEST_S = 0.5  # a word waits no longer than this, as far as the pace of the last steps tells
MOST_STEPS = 32  # whatever they take: a step may suddenly take far longer
SEEN = 8  # steps, and looks, by which both are measured; the first steps are all looked at


@dataclass(frozen=True, slots=True)
class Outlook:
    """Of a step that is taken and not counted yet: the same on all ranks.

    due_at   by the clock: the shell is to hear the time by then
    """

    is_due: bool  # something may follow from this very step, by its count
    steps: int = MOST_STEPS  # so many may pass after it without a word
    due_at: float = math.inf


class LookPace:
    """How long steps and looks take on rank 0."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=SEEN)
        self._looks_s: deque[float] = deque(maxlen=SEEN)
        self._began: float | None = None  # of the step that is under way

    def on_step(self, now: float) -> None:
        """It is over."""
        if self._began is not None:
            self._steps_s.append(now - self._began)
        self._began = now

    def on_look(self, began: float, now: float) -> None:
        """After a step; what is waited for a slower rank counts, too."""
        self._looks_s.append(now - began)
        self._began = now

    def on_waited(self) -> None:
        """For words, or for what others write: that is no part of a step."""
        self._began = None

    def steps(self, outlook: Outlook, now: float) -> int:
        """From one look to the next."""
        if len(self._steps_s) < SEEN or not self._looks_s:
            return 1
        step_s = statistics.median(self._steps_s)
        if step_s <= 0.0:
            return 1
        # Up to a moment of the clock half of the way each time: steps are not all alike.
        room_s = min(LATEST_S, 0.5 * (outlook.due_at - now))
        wanted = math.ceil(statistics.fmean(self._looks_s) / (SHARE * step_s))
        return max(1, min(wanted, int(room_s / step_s), outlook.steps, MOST_STEPS))
