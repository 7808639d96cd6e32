"""Plays a transcript's events to the trainer's machine: see transcript.py.

rules SCHEDULE STEPS [FIELD=VALUE ...]    makes the machine
begin               attach, and load version 0 of every fragment: says nothing
attach              said by the shell
hear WORD ...       a word of the agent, leases as NUMBER:START-STOP[@UPTO[,UPTO ...]];
                    `Finish version=V fragments=N` loads version V of each
step [TOKENS]       before, count and heard in one
count [TOKENS]      a step, and its words are still to come
heard               they have come
read N              the next N samples, handed out at once, five tokens each
at SECONDS          the clock
silence, gone       of the agent
counts              shows the machine's counts
place               shows the run's own step

Most transcripts are of steps without leased samples: that the machine says so once is shown only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from farflung.optim.schedule import ScheduleRules
from farflung.peer.local import words
from farflung.peer.local.words import Finish, LeasesNow, LoadState, ToTrainer
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.machine import NO_LEASED_DATA, TrainerMachine
from farflung.protocol.messages import Lease
from farflung.protocol.model_schema import ModelSchema
from rig.transcript import check_transcript

MODEL = ModelSchema((), 4, 1, 1, bytes(32))
NUMBERS = {"slot": "0", "tokens": "0", "steps": "0", "spare": "0"}  # of a LoadState that names none


def word_of(text: str) -> ToTrainer:
    name, *given = text.split()
    if name == "LeasesNow":
        return LeasesNow(
            leases=tuple(lease_of(each) for each in given if ":" in each), unsure="unsure" in given
        )
    fields = dict(each.split("=") for each in given)
    if name == "Finish":
        version, count = int(fields["version"]), int(fields.get("fragments", 0))
        return Finish(version=version, loads=tuple(last_load(version, number) for number in range(count)))
    kind = getattr(words, name)
    return msgspec.convert((NUMBERS if name == "LoadState" else {}) | fields, kind, strict=False)  # type: ignore[no-any-return]


def last_load(version: int, fragment: int = 0) -> LoadState:
    return LoadState(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0, fragment=fragment)


def lease_of(text: str) -> Lease:
    number, _, rest = text.partition(":")
    places, _, uptos = rest.partition("@")
    start, stop = map(int, places.split("-"))
    reached = tuple(map(int, uptos.split(","))) if uptos else (start,)
    return Lease(int(number), 0, start, stop, min(reached), reached if len(reached) > 1 else ())


class Player:
    """Reads a transcript's events and tells them to a machine."""

    machine: TrainerMachine

    def __init__(self, kind: type[TrainerMachine] = TrainerMachine, shows_own_data: bool = False) -> None:
        self.kind = kind
        self.hidden = () if shows_own_data else (do.Warn(NO_LEASED_DATA),)
        self.now = 0.0

    def __call__(self, event: str) -> Iterable[object]:
        name, _, rest = event.partition(" ")
        return [effect for effect in getattr(self, f"_{name}")(rest) if effect not in self.hidden]

    def _rules(self, given: str) -> list[do.Effect]:
        schedule, steps, *more = given.split()
        fields = {"schedule": schedule, "period_steps": steps, **dict(each.split("=") for each in more)}
        self.machine = self.kind(msgspec.convert(fields, ScheduleRules, strict=False), lease_samples=4)
        return []

    def _begin(self, _: str) -> list[do.Effect]:
        self.machine.attach(MODEL, pid=7)
        for number in range(self.machine.rules.fragments):
            first = LoadState(version=0, keep="drop", slot=0, tokens=0, steps=0, spare=0, fragment=number)
            self.machine.on_message(first, self.now)
        return []

    def _attach(self, _: str) -> list[do.Effect]:
        return self.machine.attach(MODEL, pid=7)

    def _at(self, seconds: str) -> list[do.Effect]:
        self.now = float(seconds)
        return []

    def _step(self, tokens: str) -> list[do.Effect]:
        return [*self.machine.before_step(), *self._count(tokens), *self._heard("")]

    def _count(self, tokens: str) -> list[do.Effect]:
        return self.machine.on_step(self.now, [int(tokens) if tokens else None])

    def _heard(self, _: str) -> list[do.Effect]:
        return self.machine.on_heard(self.now)

    def _read(self, samples: str) -> list[do.Effect]:
        effects = self.machine.on_want(100, int(samples), self.now)
        for effect in effects:
            if isinstance(effect, do.ReadSamples):
                spans = (effect.span, *effect.more)
                self.machine.hand_out(spans, 5 * sum(span.stop - span.start for span in spans))
        return effects

    def _hear(self, text: str) -> list[do.Effect]:
        return self.machine.on_message(word_of(text), self.now)

    def _silence(self, _: str) -> list[do.Effect]:
        return self.machine.on_silence(self.now)

    def _gone(self, _: str) -> list[do.Effect]:
        return self.machine.on_agent_gone("the agent is gone")

    def _place(self, _: str) -> list[str]:
        return [f"step {self.machine.run_step} of the run"]

    def _counts(self, _: str) -> list[str]:
        return [
            f"fragment {a.fragment} at {a.version}: {a.steps} steps, {a.tokens} tokens, spare {a.spare}"
            + (", blocked" if a.blocked else "")
            for a in self.machine.accounts
        ] + [
            f"{self.machine.stand}, {self.machine.step_count} steps in all, waited {self.machine.waited_s:g} s"
        ]


def check(text: str, kind: type[TrainerMachine] = TrainerMachine, shows_own_data: bool = False) -> None:
    check_transcript(text, Player(kind, shows_own_data), hidden=("model", "loss"))
