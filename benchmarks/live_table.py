"""A run in one process without sockets: the real coordinator's machine, and sham members at the same table.

Used by fuzz.py: one of the members sends what it is given, while the others go on with their rounds.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import msgspec

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.coordinator.run.effects import AnswerDoor, DialBack, Effect, Tell
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol import messages
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest, NetSection, RoundSection, RunSection
from farflung.protocol.messages import DOOR_IN, MEMBER_IN, Message
from farflung.protocol.process.sockets import curve_raw
from farflung.protocol.round_words import Plan
from rig.shams import Figures, Sham, model_of, reader_of

DOOR, INSIDE = "door", "inside"
MANIFEST = Manifest(
    run=RunSection(name="table", min_peers=2, rounds=1 << 30),
    net=NetSection(heartbeat_s=1.0, dead_after_s=100.0),
    round=RoundSection(scatter_grace_s=2.0, deadline_s=5.0),
)


class Table:
    """Stands where a `Crowd` stands for its shams.  The first of them is the hostile one."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.url = JoinUrl("127.0.0.1", 7000, MANIFEST.run.name, bytes(32))
        self.heartbeat_s, self.rounds = 1.0, True
        self.model, self.only_joins = model_of({}), False
        self.at_door, self.inside = DOOR, INSIDE
        self.figures, self.members = Figures(), list[Sham]()
        self.due: list[tuple[float, int]] = []
        self.outside: dict[bytes, Sham] = {}  # sent away, as for a heartbeat that came too late
        self._chance = random.Random(seed)
        self.now = 1.0
        self.machine = RunMachine(MANIFEST, bytes(16), [], self._chance.randbytes)
        self.machine.start(self.now, 4000)
        self._mail: list[tuple[str, Sham, Message]] = []
        self.shams = [Sham(self, number, False) for number in range(count)]  # type: ignore[arg-type]
        for sham in self.shams:
            sham.address = "127.0.0.1:1"
            sham.begin(self.now)
            self._deliver()
        for _ in range(8):
            self.turn()
        assert self.machine.core.ledger.version > 0, "the table makes no rounds"

    # ---- what shams ask of a crowd ---------------------------------------------------------------------------

    def connect(self, socket: str, sham: Sham, port: int) -> None:
        pass

    def hang_up(self, sham: Sham) -> None:
        pass

    def count(self, what: str) -> None:
        pass

    def say(self, socket: str, sham: Sham, message: Message) -> None:
        self._mail.append((socket, sham, message))

    # ---- the run ---------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """A second passes."""
        self.now += 1.0
        self._carry_out(self.machine.on_timer(self.now), None)
        self.outside = {name: sham for name, sham in self.outside.items() if not sham.door.inside}
        for sham in self.outside.values():
            sham.retry(self.now)
        for sham in self.shams:
            if sham.applying > sham.version:
                sham.at_version(sham.applying, self.now)
            elif sham.session:
                sham.beat(self.now)
        self._deliver()

    def _deliver(self) -> None:
        for _ in range(10_000):
            if not self._mail:
                return
            socket, sham, message = self._mail.pop(0)
            key, name = curve_raw(sham.public), sham.name
            if socket == DOOR:
                self._carry_out(self.machine.on_door(name, key, message, self.now), sham)  # type: ignore[arg-type]
            else:
                self._carry_out(self.machine.on_member(key, message, self.now), sham)  # type: ignore[arg-type]
        raise AssertionError("the table never comes to rest")

    def _carry_out(self, effects: list[Effect], speaker: Sham | None) -> None:
        for effect in effects:
            if isinstance(effect, AnswerDoor):
                to = next(sham for sham in self.shams if sham.name == effect.caller)
                to.on_door(effect.message, self.now)
            elif isinstance(effect, Tell):
                raw = messages.encode(effect.message)  # all that is said must fit
                heard = [sham for sham in self.shams if sham.session == effect.session]
                for sham in heard if effect.peer else []:
                    kind, body = reader_of(raw)
                    sham.on_member(kind, body, self.now)
            elif isinstance(effect, DialBack):
                self._carry_out(self.machine.on_dialled(effect.peer, effect.session, True, self.now), speaker)

    # ---- the hostile one -------------------------------------------------------------------------------------

    def seeds(self) -> list[bytes]:
        """What an honest member says in a round."""
        said: list[bytes] = []
        keep, self.say = self.say, lambda socket, sham, message: said.append(messages.encode(message))  # type: ignore
        first = self.shams[0]
        first.beat(self.now)
        plan = next((c.round.plan for c in self.machine.drivers if c.round is not None), None)
        if plan is None:
            plan = Plan(
                9, 1, 1, tuple(sorted(s.peer for s in self.shams)), (0,) * 96, ("fp32",) * len(self.shams)
            )
        first._on_plan(plan)
        first._out_of_round()
        self.say = keep  # type: ignore[method-assign]
        return said

    def hostile(self, raw: bytes) -> None:
        """A frame of the first member, with a good session and number; then time goes on for the others."""
        first = self.shams[0]
        key = curve_raw(first.public)
        try:
            message: Any = messages.decode(raw, frozenset({**MEMBER_IN, **DOOR_IN}))
        finally:
            if self._chance.random() < 0.02:
                self.turn()
        if type(message) in DOOR_IN.values():
            self._carry_out(self.machine.on_door(first.name, key, message, self.now), first)
            return
        member = self.machine.core.members.members.get(first.peer)
        if member is None or not member.alive:
            first.door.leave(self.now, 0.0)
            first.retry(self.now)
            self._deliver()
            member = self.machine.core.members.members[first.peer]
        number = max(member.heard.seq, first.seq) + 1
        first.seq = number
        changed = {"session": member.session, "seq": number}
        flights = [c.round.plan.round_no for c in self.machine.drivers if c.round is not None]
        if flights and hasattr(message, "round_no") and self._chance.random() < 0.8:
            changed["round_no"] = flights[0]
        self._carry_out(
            self.machine.on_member(key, msgspec.structs.replace(message, **changed), self.now), first
        )
        self._deliver()
