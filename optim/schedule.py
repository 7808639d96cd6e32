"""When which fragment is frozen, whether training waits for its round, and how a merged result is taken.  Pure.

Called by the trainer's inner loop (and by the simulator's trainer) after every step.  Must not know tensors, the
network, or what becomes of a frozen fragment.  Chosen by one word, `[outer] schedule` in run.toml:

    blocking    all fragments at the end of a period; training waits for their rounds
    overlap     all fragments at the end of a period; training goes on, one period ahead of the round at most
    streaming   fragment p at p/F of a period, fragment 0 at its end; training goes on

A period is `period_steps` inner steps, or `period_s` seconds where that is set: then each peer takes as many steps as
it can, and freezes so that its last step does not end after the others' are waiting.

Peers' periods are kept together by the only thing that all of them see at once: the opening of a round of fragment 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from farflung.protocol.manifest import LAST_RATE, Manifest, Periods, wsd_decay_begins

STAGGERED, GOES_ON = frozenset({"streaming"}), frozenset({"streaming", "overlap"})
SLACK = 0.02  # so much longer a slow peer's next period may be, after one for which nobody waited; then twice as much
LEAD = 10  # by steps, a peer stays no more than a period / LEAD ahead of the others, or a single step
OVERLAP_MIX = 0.5  # how much of its own values a peer keeps where it takes a result


@dataclass(frozen=True)
class ScheduleRules:
    schedule: str
    period_steps: int
    fragments: int = 1
    period_s: float = 0.0  # 0: a period is counted in steps
    # A result is taken so many steps after the freeze, or when it comes if that is later: for experiments.
    overlap_steps: int = 0
    mix: float = 0.0  # how much of its own values a peer keeps where a result is taken
    start: int = 0  # rounds with shorter periods, with which the run begins

    @property
    def periods(self) -> Periods:
        return Periods(self.period_steps, self.start)

    @property
    def waits(self) -> bool:
        """Training stands still from a freeze until the agent has said how to go on."""
        return self.schedule not in GOES_ON

    @property
    def goes_ahead(self) -> bool:
        """After a freeze, a peer goes ahead by what the momentum will do (recipes.py)."""
        return self.schedule == "overlap"

    @property
    def told_of_rounds(self) -> bool:
        """The trainer is to hear when a round opens."""
        return not self.waits or self.period_s > 0.0

    def share(self, fragment: int) -> float:
        """Of the period that is over when the fragment is frozen."""
        return fragment / self.fragments if fragment and self.schedule in STAGGERED else 1.0


class Schedule:
    def __init__(self, rules: ScheduleRules, now: float = 0.0) -> None:
        self.rules = rules
        self.period = rules.periods.at(0)  # steps of the present one
        self._done: set[int] = set()  # frozen in this period
        self._called: set[int] = set()  # to be frozen after this step
        # Frozen last before the period had its steps, since others waited or would have.
        self.early: set[int] = set()
        # Of a peer that is slower than most: what others needed for a period when it was called last, and by how much
        # longer its next period may last if it is not called.
        self._pace_s, self._slack = math.inf, SLACK
        self._first_at = now  # when the first step of this period began
        self._began_with_others = False
        self._since: dict[int, int] = {}  # steps since the fragment was frozen last
        self._steps = 0
        self._began = self._last_step_at = now
        self._steps_at_once = 0  # since the clock was told last
        self._step_s = 0.0

    def follow(self, rules: ScheduleRules, version: int) -> None:
        """A period that has begun ends by these, too."""
        before, self.rules, self.period = self.period, rules, rules.periods.at(version)
        self._pace_s *= self.period / before

    @property
    def period_s(self) -> float:
        """Of the present one, by the clock; 0: it is counted in steps."""
        return self.rules.period_s * self.period / self.rules.period_steps

    def count_step(self, now: float) -> None:
        """One step more.  Several may be told with the same time, where ranks do not hear it after each."""
        self._first_at = self._last_step_at if not self._steps else self._first_at
        self._steps += 1
        self._since = {fragment: steps + 1 for fragment, steps in self._since.items()}
        self._steps_at_once += 1
        self._step_s = self._time_of_a_step(now, self._steps_at_once)
        if now > self._last_step_at:
            self._last_step_at, self._steps_at_once = now, 0

    def take_due(self, now: float) -> list[int]:
        """The fragments to be frozen after this step.  Each is named once in a period."""
        if not self._steps:
            return []
        ends_at = now + self._step_s
        due = [f for f in self._left() if f in self._called or self._is_over(f, ends_at, self._steps)]
        if 0 in due:
            self._began_with_others = True  # the next one, as soon as this round is over
        if 0 in due and 0 not in self._called:
            self._pace_s *= 1.0 + self._slack  # nobody waited for it
            self._slack = min(1.0, 2.0 * self._slack)
        by_the_clock = self.rules.period_s > 0.0
        self.early -= set(due)
        self.early |= {f for f in due if not by_the_clock and self._steps < self._steps_of(f)}
        self._done |= set(due)
        self._called -= set(due)
        self._since |= dict.fromkeys(due, 0)
        if 0 in due:
            self.restart(now)
        return due

    def may_end(self, now: float) -> bool:
        """With the step that comes next some fragment's period may be over, by what is known now."""
        ends_at = now + self._time_of_a_step(now, self._steps_at_once + 1)
        return bool(self._called) or any(
            self._is_over(fragment, ends_at, self._steps + 1) for fragment in self._left()
        )

    @property
    def due_at(self) -> float:
        """By the clock, or at the pace of others: when the next fragment is to be frozen at the earliest."""
        if not self._left():
            return math.inf
        share = min(self.rules.share(fragment) for fragment in self._left())
        if self.rules.period_s:
            return self._began + share * self.period_s - self._step_s
        return self._first_at + share * self._pace_s - self._step_s

    @property
    def place(self) -> int:
        """How far this period is, in steps of which it has `period`, by the clock too."""
        whole, period_s = self.period, self.period_s
        if period_s and self._steps:
            return min(whole, int(whole * (self._last_step_at - self._began) / period_s))
        return min(whole, self._steps)

    def on_waited(self, now: float) -> None:
        """Training stood still until now: that was no part of a step."""
        self._last_step_at, self._steps_at_once = now, 0

    def on_opened(self, fragment: int, now: float) -> None:
        """A round of the fragment has begun: wherever this peer is, the period begins with the others'."""
        if fragment:
            return
        if self.rules.period_s:
            self._began = now
        self._steps = min(self._steps, max(1, self.period // LEAD))

    def on_called(self, fragment: int, waited_s: float, now: float) -> None:
        """Others have had their steps for so long, and wait: what there is is frozen after this step, and the next
        periods end in time."""
        if fragment in self._called:
            return
        # Where training waits for what was frozen, the rest would get no more steps and be waited for in its turn.
        self._called |= set(self._left()) if self.rules.waits else {fragment}
        if fragment or not 0 < self._steps < self._steps_of(fragment) - 1:
            return
        self._slack, pace_s = SLACK, now - waited_s - self._first_at
        if self._began_with_others and pace_s > 0.0:
            self._pace_s = pace_s

    def on_loaded(self, fragment: int, now: float, joins: bool) -> None:
        """What it was called for may have begun without it: the others are at the beginning of a period, or anywhere
        in one where this peer `joins` them."""
        self._called -= set(self._called) if self.rules.waits else {fragment}
        if not fragment:
            self._first_at = now
            self._began_with_others = self._began_with_others and not joins

    def restart(self, now: float) -> None:
        """A period begins."""
        self._steps, self._began = 0, now
        self.on_waited(now)
        self._done.clear()
        self._called.clear()

    def may_take(self, fragment: int) -> bool:
        """The overlap of the fragment's last freeze is over."""
        return self._since.get(fragment, self.rules.overlap_steps) >= self.rules.overlap_steps

    def _left(self) -> list[int]:
        """Not frozen yet in this period."""
        return [fragment for fragment in range(self.rules.fragments) if fragment not in self._done]

    def _time_of_a_step(self, now: float, steps: int) -> float:
        """`steps`: so many since the clock was told last."""
        return (now - self._last_step_at) / steps if now > self._last_step_at else self._step_s

    def _is_over(self, fragment: int, next_ends_at: float, steps: int) -> bool:
        share = self.rules.share(fragment)
        if self.period_s:
            # Rather a step too few than one that ends when everybody else waits.
            return next_ends_at > self._began + share * self.period_s
        in_time = next_ends_at <= self._first_at + share * self._pace_s
        return not in_time or steps >= self._steps_of(fragment)

    def _steps_of(self, fragment: int) -> int:
        return max(1, int(self.rules.share(fragment) * self.period))


def rules_of(manifest: Manifest) -> ScheduleRules:
    outer, rounds = manifest.outer, manifest.round
    return ScheduleRules(
        outer.schedule,
        rounds.sync_every,
        rounds.fragments,
        rounds.period_s,
        mix=OVERLAP_MIX if outer.schedule == "overlap" else 0.0,
        start=manifest.periods.start,
    )


# ---- rates -------------------------------------------------------------------------------------------------
# The inner learning rate as a function of the run's own step: `[inner] schedule` in run.toml. Pure.
#
# The trainer's machine holds a `RunPlace`; the built-in trainer and scripts have the rate through
# `run.lr_lambda`. Must not know optimizers, tensors, rounds.
#
# A rate that follows from the run's step and nothing else is the same for whoever joins late, and for a
# script that was started again: no process has a beginning of its own.
#
#     constant   the whole rate
#     linear     down to a tenth at the last step, in a straight line
#     cosine     down to a tenth at the last step, along half a cosine
#     wsd        the whole rate until the last fifth of the steps, then down to a tenth in a straight line
#
# All of them rise from 0 over warmup_steps first.


class RunPlace:
    """The run's own step, as far as one peer can see it: each version counts as a period, however many steps it took.

    So whoever joins at a version begins where the others are.  A period of which nothing was committed moves nobody
    on where training waits for rounds; elsewhere a peer goes on for one period while the version is on its way.
    """

    def __init__(self, rules: ScheduleRules) -> None:
        self._rules = rules
        self._steps_before: Callable[[int], int] = rules.periods.before
        self._has_frozen = False  # since it was loaded last
        self.step = 0

    def follow(self, rules: ScheduleRules, steps_before: Callable[[int], int]) -> None:
        """`steps_before`: the run's own, until a version, where not all its periods are of one length."""
        self._rules, self._steps_before = rules, steps_before

    def on_load(self, restarts: bool) -> None:
        """`restarts`: the state is another one.  Otherwise the step never goes down."""
        self._has_frozen = False
        self.step = 0 if restarts else self.step

    def on_freeze(self) -> None:
        self._has_frozen = True

    def see(self, version: int, place: int) -> None:
        """A step may be taken next, from this version and at this place of a period."""
        whole = self._rules.periods.at(version)
        if self._has_frozen:
            place = whole if self._rules.waits else whole + place
        self.step = max(self.step, self._steps_before(version) + place)


@dataclass(frozen=True)
class LearningRates:
    """`last`: the rate at the end, as a share of the whole one."""

    schedule: str
    total_steps: int
    warmup_steps: int = 0
    last: float = 0.0

    def share(self, step: int) -> float:
        """Of the whole rate, for the step with this number; after the last step it stays."""
        if step + 1 < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        begins = wsd_decay_begins(self.total_steps) if self.schedule == "wsd" else self.warmup_steps
        gone = min(1.0, max(0, step - begins) / max(1, self.total_steps - begins))
        left = (1.0 + math.cos(math.pi * gone)) / 2 if self.schedule == "cosine" else 1.0 - gone
        return self.last + (1.0 - self.last) * left


def rates_of(manifest: Manifest, total_steps: int | None = None) -> LearningRates:
    """`total_steps`: of the run, where not all its periods are of one length."""
    inner, total = manifest.inner, manifest.total_steps if total_steps is None else total_steps
    return LearningRates(inner.schedule, total, inner.warmup_steps, LAST_RATE)
