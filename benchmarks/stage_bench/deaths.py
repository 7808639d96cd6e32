"""Who of the crowd dies when, and who comes back: the plan of benchmarks/stages.py's deaths.

Asked by the crowd's loop (crowd.py) at every turn.  Either one peer every so many seconds, which comes back a while
later, or one in each batch at a certain moment of it.  What a death cost is found by pipeline_figures.py from what is
written down here.  Must not know words between agent and trainer.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from stage_bench.sham_stage import ShamTrainer, Shape

from farflung.console.screen.status_client import StatusClient
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process.journal import Follower

Moment = Literal["counting", "frozen", "scatter", "prepared"]
MOMENTS: tuple[Moment, ...] = ("counting", "frozen", "scatter", "prepared")
COUNTED_PART = 0.5  # of a batch, at a death while it is counted
STATUS_S = 5.0


class PeersAtRisk(Protocol):
    """Who lives, and who may be killed."""

    here: dict[str, ShamTrainer]  # by name
    folder: Path
    url: JoinUrl
    shape: Shape

    @property
    def seats(self) -> tuple[int, ...]: ...
    @property
    def version(self) -> int: ...
    def bring(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...


@dataclass(frozen=True)
class DeathPlan:
    every_s: float = 0.0  # 0: nobody dies by the clock
    return_after_s: float = 3.0
    moments: tuple[Moment, ...] = ()  # one death in each batch from version 1 on
    seed: int = 0


@dataclass
class Death:
    """As it stood when it happened."""

    peer: str
    stage: int
    version: int
    at: float
    moment: str = ""
    counted: dict[int, int] = field(default_factory=dict)  # by stage, of living seats
    share: int = 0  # that the dead one had counted


class Deaths:
    def __init__(self, plan: DeathPlan, crowd: PeersAtRisk, too_many: bool = False) -> None:
        """`too_many`: stages have more peers than seats, and those beyond go when the first batch is committed."""
        self._plan, self._crowd, self._too_many = plan, crowd, too_many
        self.thinned_at: float | None = None
        self._dice = random.Random(plan.seed)
        self._next_at = 0.0
        self._coming: list[tuple[float, str]] = []  # who is back when
        self._left = list(plan.moments)
        self._version = 0  # of the death by a moment that is next
        self._aim: DeathAim | None = None
        self.all: list[Death] = []

    @property
    def aims(self) -> bool:
        return self._aim is not None

    def on_turn(self, now: float) -> None:
        for due in [each for each in self._coming if each[0] <= now]:
            self._coming.remove(due)
            self._crowd.bring(due[1])
        if self._crowd.version < 1 or self._crowd.version >= self._crowd.shape.manifest.run.rounds:
            return
        if self._too_many:
            self._thin_out(now)
        elif self._plan.every_s:
            self._by_clock(now)
        elif self._left:
            self._by_moment(now)

    def _thin_out(self, now: float) -> None:
        self._too_many, self.thinned_at = False, now
        for stage, seats in enumerate(self._crowd.seats):
            held = sorted(name for name, each in self._crowd.here.items() if each.stage == stage)
            for name in held[seats:]:
                self._crowd.kill(name)

    def _by_clock(self, now: float) -> None:
        if not self._next_at:
            self._next_at = now + self._plan.every_s / 2
        if now >= self._next_at:
            self._next_at += self._plan.every_s
            spare = [each for each in self._crowd.here.values() if self._has_others(each)]
            if spare:
                self._die(self._dice.choice(sorted(spare, key=lambda each: each.name)), now)

    def _has_others(self, one: ShamTrainer) -> bool:
        return sum(other.stage == one.stage for other in self._crowd.here.values()) > 1

    def _die(self, one: ShamTrainer, now: float, moment: str = "") -> None:
        version = one.machine.version
        living = [o for o in self._crowd.here.values() if o is not one and o.machine.version == version]
        stages = range(len(self._crowd.shape.unit_s))
        counted = {s: len(set().union(*(o.counted for o in living if o.stage == s))) for s in stages}
        self._crowd.kill(one.name)
        self.all.append(Death(one.name, one.stage, version, now, moment, counted, len(one.counted)))
        self._coming.append((now + self._plan.return_after_s, one.name))

    # ---- at a certain moment of a batch

    def _by_moment(self, now: float) -> None:
        crowd = self._crowd
        whole = len(crowd.here) == sum(crowd.seats) and all(
            each.machine.version == crowd.version for each in crowd.here.values()
        )
        if self._aim is None and whole and crowd.version > self._version:
            victim = self._dice.choice(sorted(crowd.here.values(), key=lambda each: each.name))
            self._version = crowd.version
            self._aim = DeathAim(self._left[0], victim, crowd)
        aim = self._aim
        if aim is None:
            return
        if aim.is_due():
            self._die(aim.victim, now, aim.moment)
            aim.end()
            self._aim = None
            self._left.pop(0)
        elif crowd.version > self._version:  # the batch is over: it is tried again in the next one
            aim.end()
            self._aim = None


class DeathAim:
    """One peer dies when its batch has come so far."""

    def __init__(self, moment: Moment, victim: ShamTrainer, crowd: PeersAtRisk) -> None:
        self.moment, self.victim = moment, victim
        self._crowd, self._version = crowd, crowd.version
        self._plans = {each.name: self._follower(each) for each in crowd.here.values()}
        self._held_back: int | None = None  # an agent that is stopped, so that its stage is not prepared yet

    def _follower(self, one: ShamTrainer) -> Follower:
        follower = Follower(self._crowd.folder / f"{one.name}.events.jsonl")
        list(follower.new_events())
        return follower

    def is_due(self) -> bool:
        match self.moment:
            case "counting":
                due = self._crowd.shape.works[self.victim.stage, self._version].made
                return due >= COUNTED_PART * self._crowd.shape.manifest.pipeline.batch
            case "frozen":
                return self.victim.frozen_at == self._version
            case "scatter":
                return self._in_round(self.victim)
            case "prepared":
                return self._hold_back() and self._is_prepared()

    def _in_round(self, one: ShamTrainer) -> bool:
        """Its agent has the plan of this batch's round."""
        events = self._plans[one.name].new_events()
        return any(event["event"] == "plan" and event["version"] == self._version for event in events)

    def _hold_back(self) -> bool:
        """Somebody of another stage stops in mid-round: the victim's stage is prepared and has to wait."""
        if self._held_back is None:
            for one in self._crowd.here.values():
                if one.stage != self.victim.stage and self._in_round(one) and one.agent.pid is not None:
                    self._held_back = one.agent.pid
                    os.kill(self._held_back, signal.SIGSTOP)
                    break
        return self._held_back is not None

    def _is_prepared(self) -> bool:
        with StatusClient(self._crowd.url) as client:
            rows: list[dict[str, Any]] = client.fetch(STATUS_S)["stages"]
        return bool(rows[self.victim.stage]["prepared"])

    def end(self) -> None:
        if self._held_back is not None:
            os.kill(self._held_back, signal.SIGCONT)
            self._held_back = None
