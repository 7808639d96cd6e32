"""Faults that come by chance in a run of real processes: agents, trainers, the coordinator and its children are killed
or stopped, again and again, each kind as often as its weather says.

    storm = Storm(arena, random.Random(1), ["ann", "bob"], HARSH)
    storm.rage(60.0)          # afterwards all that was broken is mended

Used by benchmarks/storm.py and tests/chaos/test_storm.py.  What ends by itself is started again as a service manager
would, and counted.  Only processes of the arena are struck, by their ids.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rig.arena import Arena, children_of

RESTART_S = 1.0
STOP_S = (3.0, 10.0)
LOOK_S = 0.02
# A trainer that was killed twice before it had joined ends its peer: its script is taken for broken.
ENDS_ALLOWED = frozenset({1})

# Faults an hour, by who is struck and how.
Weather = Mapping[str, float]
CALM: Weather = {"agent killed": 97.0, "agent stopped": 28.0, "coordinator killed": 8.0}
HARSH: Weather = {
    "agent killed": 240.0,
    "agent stopped": 90.0,
    "trainer killed": 60.0,
    "trainer stopped": 40.0,
    "coordinator killed": 300.0,
    "coordinator stopped": 60.0,
    "child killed": 60.0,  # of the coordinator: its front door
}


@dataclass
class Fault:
    at: float
    kind: str
    who: str
    until: float  # when it is started again, or woken
    pid: int = 0  # of what is not a party itself
    back_s: float | None = None  # from then on until its work is in a commit


@dataclass
class Storm:
    arena: Arena
    draw: random.Random
    names: list[str]
    weather: Weather
    look: Callable[[float], None] = lambda now: None  # called all the time
    faults: list[Fault] = field(default_factory=list)
    pending: list[Fault] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)  # by itself: who, and with which exit code

    def rage(self, seconds: float) -> float:
        """Returns when it was over: no more faults, all that was broken mended."""
        begin = time.monotonic()
        end, next_at = begin + seconds, begin + self._pause()
        while (now := time.monotonic()) < end or self.pending:
            self._mend(now)
            self._start_what_ended(now)
            self.look(now)
            if now >= next_at and now < end:
                next_at = now + self._pause()
                self._strike(now)
            time.sleep(LOOK_S)
        return time.monotonic()

    @property
    def killed(self) -> Counter[str]:
        return Counter(fault.kind for fault in self.faults)

    def _pause(self) -> float:
        return self.draw.expovariate(sum(self.weather.values()) / 3600.0)

    def _strike(self, now: float) -> None:
        kind = self.draw.choices(list(self.weather), list(self.weather.values()))[0]
        struck, how = kind.split()
        busy = {fault.who for fault in self.pending}
        if struck in ("coordinator", "child"):
            whole = [name for name in ("coordinator",) if name not in busy]
        else:
            whole = [name for name in self.names if name not in busy]
        whole = [name for name in whole if self.arena.parties[name].alive]
        if not whole:
            return
        who = self.draw.choice(whole)
        until = now + (RESTART_S if how == "killed" else self.draw.uniform(*STOP_S))
        if struck in ("agent", "coordinator"):
            self._strike_party(kind, who, how, until)
        elif pid := self._process_of(struck, who):
            self._strike_process(Fault(now, kind, who, until, pid), how)

    def _strike_party(self, kind: str, who: str, how: str, until: float) -> None:
        if how == "killed":
            at = self.arena.kill(who)
        else:
            at = time.monotonic()
            self.arena.parties[who].signal(signal.SIGSTOP)
        self.pending.append(Fault(at, kind, who, until))

    def _process_of(self, struck: str, who: str) -> int:
        """Its number; 0: there is none now."""
        party = self.arena.parties[who]
        if struck == "child":
            assert party.process is not None
            children = children_of(party.process.pid)
            return self.draw.choice(children) if children else 0
        # Trainers are started by the nursery; the one that attached last is in the journal.
        try:
            pid = self.arena.trainer_of(who)
        except StopIteration:
            return 0
        return pid if pid in self.arena.processes()["trainer"] else 0

    def _strike_process(self, fault: Fault, how: str) -> None:
        try:
            os.kill(fault.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        except ProcessLookupError:
            return  # it ended just now, by itself
        self.pending.append(fault)

    def _mend(self, now: float) -> None:
        for fault in [each for each in self.pending if now >= each.until]:
            self.pending.remove(fault)
            self.faults.append(fault)
            struck, how = fault.kind.split(maxsplit=1)
            if struck in ("trainer", "child"):
                self._wake(fault, how)
            elif how == "stopped":
                self.arena.parties[fault.who].signal(signal.SIGCONT)
            else:
                self._start(fault.who)

    def _wake(self, fault: Fault, how: str) -> None:
        """What was killed its parent starts again."""
        if how == "stopped":
            try:
                os.kill(fault.pid, signal.SIGCONT)
            except ProcessLookupError:
                pass  # its parent has given it up meanwhile

    def _start_what_ended(self, now: float) -> None:
        busy = {fault.who for fault in self.pending if fault.pid == 0}
        for who in ("coordinator", *self.names):
            party = self.arena.parties[who]
            if who not in busy and not party.alive and party.process is not None:
                self.ended[
                    f"{'coordinator' if who == 'coordinator' else 'agent'}: {party.process.returncode}"
                ] += 1
                self.pending.append(Fault(now, "ended by itself", who, now + RESTART_S))

    def _start(self, who: str) -> None:
        if who == "coordinator":
            self.arena.coordinate()
        else:
            self.arena.join(who)

    # ---- what came of it ---------------------------------------------------------------------------------------

    def tracebacks(self) -> list[str]:
        """By whom, and the last lines of each."""
        found = []
        for party in self.arena.parties.values():
            text = party.log.read_text(errors="replace") if party.log.exists() else ""
            found += [
                f"{party.name}: {part[:600]}" for part in text.split("Traceback (most recent call last)")[1:]
            ]
        return found

    def dropped(self) -> list[int]:
        """Rounds whose work the guard threw away."""
        return [
            e["round"] for e in self.arena.coordinator.look() if e["event"] == "aborted" and e.get("dropped")
        ]
