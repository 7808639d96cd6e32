"""A hostile world in virtual time around the real machines of microbatches (collectives/pipeline/).

    python tests/rig/flow_world.py 3000 [--from 0]     so many seeds: what failed, what happened, how long it took

A seed draws stages, seats, batches and misfortunes: deaths, peers that are cut off from the coordinator and go on, lost
trainers (the same peer under a new seat), peers that become slow in mid-batch, pairs that can't talk to each other,
newcomers, stages that are empty for a while, and frames that are late, out of order, doubled, lost and damaged.  The
trainers add up what they are handed, in sums that nothing repairs, so that what is checked is what a GPU would have
summed.  Checked, at events and at commits:

P11  at a commit the sums of the living seats of every stage have every microbatch once
P14  a microbatch is computed again only for a seat that held it and is gone
R6   nobody sends one to another seat while the first one lives, unless that one has said that it gives it back, and
     nobody says so who has begun it
P15  every batch commits, after the last misfortune too; what waits never exceeds the room that was given
P16  whatever is sent again or handed to a trainer is kept, until its batch is committed
P8   every frame ends in one counter
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from farflung.collectives.pipeline import effects, seats, stage_scheduler
from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.peer.machine.modes import kinds_of
from farflung.protocol.digests import bits, mask_of
from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.frames import Frame, Kind, Spoiled, claimed, parse, with_payload

TAG = b"flow-run"
KINDS = kinds_of(stages=True)
FAIR = ("accepted", "duplicate", "stale")  # where frames of the honest end
BEAT_S = 0.3
DEAD_S = 1.0
CALM_AT_S = 8.0  # no misfortune begins later
UNIT_SMOOTHED = 0.3
LIMIT_S = 900.0  # by then everything is committed, where one slow seat is left of a stage too
SLOW_TIMES = 4.0


class Broken(AssertionError):
    """A promise does not hold."""


@dataclass
class Room:
    """The modules under test: a mutation brings others of the same names."""

    effects: Any = effects
    stage_scheduler: Any = stage_scheduler
    seats: Any = seats


@dataclass
class Scenario:
    stages: int = 3
    per_stage: int = 2
    count: int = 24
    batches: int = 2
    deaths: int = 0
    cut_off: float = 0.3  # of the deaths: it lives on, and only the coordinator does not hear it
    voids: int = 0
    pairs: int = 0
    joins: int = 0
    empties: bool = False
    slow: float = 0.0  # of the frames: seconds
    lost: float = 0.0
    doubled: float = 0.0
    damaged: float = 0.0
    unit_s: float = 0.02
    slows: int = 0  # peers that become SLOW_TIMES as slow
    paces: tuple[float, ...] = (0.5, 1.0, 3.0)  # of a peer one of these, times `unit_s`
    shares: tuple[float, ...] = (0.5, 1.0, 2.0)  # of a seat one of these
    takes_back: bool = True  # False: nobody is heard that has nothing to do

    @property
    def lines_are_good(self) -> bool:
        """Whatever is sent comes, and soon: nobody who is well has to be asked for anything twice."""
        return not (self.slow or self.lost or self.damaged or self.pairs)


def scenario_of(seed: int) -> Scenario:
    draw = random.Random(f"flow {seed}")
    bad = draw.random() < 0.5
    return Scenario(
        stages=draw.choice((2, 3, 3, 4)),
        per_stage=draw.choice((1, 2, 2, 3)),
        count=draw.choice((4, 8, 24, 48)),
        batches=draw.choice((1, 2, 3)),
        deaths=draw.choice((0, 1, 2, 4, 6)),
        cut_off=draw.choice((0.0, 0.3, 0.7)),
        voids=draw.choice((0, 0, 1, 2)),
        pairs=draw.choice((0, 0, 0, 1)),
        joins=draw.choice((0, 1, 2)),
        empties=draw.random() < 0.2,
        slow=draw.choice((0, 0.05, 0.2)),
        lost=draw.choice((0.01, 0.1)) if bad else 0.0,
        doubled=draw.choice((0, 0.1)) if bad else 0.0,
        damaged=draw.choice((0, 0.02)) if bad else 0.0,
        unit_s=draw.choice((0.01, 0.02, 0.08)),
        slows=draw.choice((0, 1, 2)),
    )


def crossing(kind: str, version: int, stage: int, micro: int) -> bytes:
    return f"{kind} {version} {stage} {micro}".encode()


@dataclass
class Host:
    """One process of a peer: its machine, its trainer and what it keeps."""

    peer: str
    seat: Any
    machine: Any
    unit_s: float
    up: bool = True
    cut: bool = False  # the coordinator and it don't hear each other
    kept: dict[tuple[int, int, str], bytes] = field(default_factory=dict)
    work: list[Any] = field(default_factory=list)
    busy: bool = False
    slow: bool = False
    usual_s: dict[str, float] = field(default_factory=dict)  # by way, as its agent measures it
    # (version, microbatch): how often it was added.
    sums: Counter[tuple[int, int]] = field(default_factory=Counter)
    frames: int = 0  # given to its machine


class World:
    def __init__(self, seed: int, scenario: Scenario, room: Room) -> None:
        self.seed, self.sc, self.room = seed, scenario, room
        self.random = random.Random(seed)
        self.now, self.order = 0.0, 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.table = room.seats.Table()
        self.hosts: dict[int, Host] = {}  # by seat
        self.at_peer: dict[str, Host] = {}
        self.doomed: set[int] = set()
        self.pairs: set[frozenset[str]] = set()
        self.version, self.granted, self.again, self.believed = 0, {}, 0, {}
        self.last_seat = self.peers = 0
        self.forwards: Counter[tuple[int, int, int]] = Counter()  # (version, stage, microbatch)
        self.backwards: Counter[tuple[int, int, int]] = Counter()
        self.held_by: dict[tuple[int, int, int], set[int]] = defaultdict(set)  # seats that ever had it
        # What was sent on to whom, and given back by whom to whom: (version, stage, microbatch, seat) -> seat.
        self.sent_to: dict[tuple[int, int, int, int], int] = {}
        self.given_back: set[tuple[int, int, int, int, int]] = set()
        self.handed: set[tuple[int, int, int, int]] = set()  # (version, stage, microbatch, seat)
        self.told: Counter[str] = Counter()
        for stage in range(scenario.stages):
            for _ in range(scenario.per_stage):
                self.join(stage)
        self.misfortunes()
        self.grant()
        self.tell_all()

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.order, what))

    # ---- the coordinator -------------------------------------------------------------------------------------

    def join(self, stage: int, peer: str = "") -> None:
        self.last_seat += 1
        if not peer:
            self.peers += 1
            peer = f"p{self.peers}"
        number = self.last_seat
        self.table = self.table.seated(number, peer, stage, self.random.choice(self.sc.shares))
        seat = self.table.seats[number]
        chance = random.Random(f"{self.seed} {number}").random
        place = self.room.stage_scheduler.SeatPlace(TAG, seat, self.sc.stages)
        machine = self.room.stage_scheduler.StageScheduler(place, self.table, self.check, chance)
        host = Host(peer, seat, machine, self.sc.unit_s * self.random.choice(self.sc.paces))
        machine.on_unit(host.unit_s)
        self.hosts[number] = self.at_peer[peer] = host
        self.after(self.random.uniform(0, BEAT_S), lambda: self.beat(host))

    def grant(self) -> None:
        """What nobody living has goes to the sources in turns."""
        sources = [seat.number for seat in self.table.living(0)]
        taken = 0
        for number, mask in list(self.granted.items()):
            if self.table.lives(number):
                taken |= mask
            else:
                self.again |= self.granted.pop(number)
        free = ((1 << self.sc.count) - 1) & ~taken
        for at, micro in enumerate(bits(free) if sources else ()):
            number = sources[at % len(sources)]
            self.granted[number] = self.granted.get(number, 0) | 1 << micro

    def tell_all(self) -> None:
        for host in self.hosts.values():
            if self.table.lives(host.seat.number) or not host.machine.over:
                self.tell(host)

    def tell(self, host: Host) -> None:
        """A snapshot as of now; it may come late, and after a newer one."""
        table, version, mine = self.table, self.version, self.granted.get(host.seat.number, 0)
        again = self.again & mine

        def come() -> None:
            if host.up and not host.cut:
                machine = host.machine
                self.carry_out(host, machine.on_seats(table, self.now))
                gone = not table.lives(host.seat.number)
                self.need(machine.over or not gone, f"R5: {host.seat} read that it is gone and goes on")
                self.carry_out(host, machine.on_version(version, self.sc.count, self.now))
                self.carry_out(host, machine.on_grants(version, mine, again, table.number, self.now))

        if self.random.random() >= self.sc.lost:
            self.after(self.delay(), come)

    def beat(self, host: Host) -> None:
        """The machine hears the clock; what is counted goes to the coordinator, and its answer comes back."""
        if not host.up or host.machine.over:
            return
        self.carry_out(host, host.machine.on_timer(self.now))
        if not host.cut and self.random.random() >= self.sc.lost:
            said = (host.machine.version, host.machine.counted)
            self.after(self.delay(), lambda: self.on_beat(host, *said))
        self.after(BEAT_S, lambda: self.beat(host))

    def on_beat(self, host: Host, version: int, counted: int) -> None:
        number = host.seat.number
        if version == self.version and self.table.lives(number):
            self.believed[number] = counted
            self.maybe_commit()
        self.tell(host)

    def maybe_commit(self) -> None:
        whole = (1 << self.sc.count) - 1
        for stage in range(self.sc.stages):
            union = 0
            for seat in self.table.living(stage):
                union |= self.believed.get(seat.number, 0)
            if union != whole:
                return
        self.check_commit()
        self.version += 1
        self.granted, self.again, self.believed = {}, 0, {}
        self.table = self.table.of_next_batch({})
        self.grant()
        self.tell_all()

    def unseat(self, number: int, back: str = "") -> None:
        if not self.table.lives(number):
            return
        stage = self.table.seats[number].stage
        self.table = self.table.unseated(number)
        self.believed.pop(number, None)
        if back:
            self.join(stage, back)
        elif not self.table.living(stage):
            self.after(self.random.uniform(0.1, 2.0), lambda: self.come_in(stage))
        self.grant()
        self.tell_all()

    def come_in(self, stage: int) -> None:
        self.join(stage)
        self.grant()
        self.tell_all()

    # ---- misfortunes -----------------------------------------------------------------------------------------

    def misfortunes(self) -> None:
        sc, draw = self.sc, self.random
        span = min(CALM_AT_S, 0.5 + sc.batches * sc.count * sc.unit_s * 3)
        for times, what in (
            (sc.deaths, self.kill),
            (sc.voids, self.void),
            (sc.pairs, self.part),
            (sc.joins, lambda: self.come_in(draw.randrange(sc.stages))),
            (sc.slows, self.slow_down),
        ):
            for _ in range(times):
                self.after(draw.uniform(0.05, span), what)

    def victim(self) -> Host | None:
        able = []
        for stage in range(self.sc.stages):
            well = [seat.number for seat in self.table.living(stage) if seat.number not in self.doomed]
            able += well if len(well) > 1 or self.sc.empties else []
        if not able:
            return None
        number = self.random.choice(able)
        self.doomed.add(number)
        return self.hosts[number]

    def kill(self) -> None:
        host = self.victim()
        if host is None:
            return
        if self.random.random() < self.sc.cut_off:
            host.cut = True
            self.told["cut off"] += 1
            # Later it hears that it is gone; by then somebody else may sit on its place.
            self.after(DEAD_S + self.random.uniform(0.5, 4.0), lambda: self.mend(host))
        else:
            host.up = False
            self.told["deaths"] += 1
        self.after(DEAD_S, lambda: self.unseat(host.seat.number))

    def mend(self, host: Host) -> None:
        host.cut = False
        self.tell(host)
        self.after(1.0, lambda: self.tell(host))

    def void(self) -> None:
        """The trainer dies: at once the peer has another seat, and its old machine is no more."""
        host = self.victim()
        if host is not None:
            host.up = False
            self.told["voids"] += 1
            self.after(self.delay(), lambda: self.unseat(host.seat.number, host.peer))

    def slow_down(self) -> None:
        """One of a stage with others, and only once: the run shall come to its end."""
        stages = [seats for at in range(self.sc.stages) if len(seats := self.table.living(at)) > 1]
        host = self.hosts[self.random.choice(self.random.choice(stages)).number] if stages else None
        if host is not None and not host.slow:
            host.unit_s, host.slow = SLOW_TIMES * host.unit_s, True
            self.told["slowed down"] += 1

    def part(self) -> None:
        """Two neighbours can't talk to each other any more; after a while one of them is unseated for it."""
        host = self.victim()
        near = (
            [s for s in self.table.living(host.seat.stage + 1) if s.number not in self.doomed] if host else []
        )
        if host is None or not near:
            return
        other = self.hosts[self.random.choice(near).number]
        self.pairs.add(frozenset((host.peer, other.peer)))
        self.told["pairs"] += 1

        def name() -> None:
            for one, far in ((host, other), (other, host)):
                if one.up:
                    self.carry_out(one, one.machine.on_lines({far.peer}, frozenset(), self.now))

        def judge() -> None:
            self.unseat(host.seat.number)
            host.up = host.up and self.random.random() < 0.5

        self.after(1.0, name)
        self.after(2.5, judge)

    # ---- the lines -------------------------------------------------------------------------------------------

    def delay(self) -> float:
        slow = self.random.random() < self.sc.slow
        return self.random.uniform(0.005, 3.0 if slow else 0.04)

    def send(self, source: Host, to: str, frame: Frame) -> None:
        self.check_hands(source, to, frame)
        if frozenset((source.peer, to)) in self.pairs or self.random.random() < self.sc.lost:
            self.told["frames lost"] += 1
            return
        if frame.header.kind == CrossingKind.IDLE and not self.sc.takes_back:
            return
        self.told["frames"] += 1
        if self.sc.lines_are_good and frame.header.kind in (CrossingKind.WANT_HELD, Kind.MISSING):
            well = {source.seat.number, self.at_peer[to].seat.number}.isdisjoint(self.doomed)
            self.need(
                not well, f"P15: {frame.header.kind.name} of {source.seat} to {to}, and nothing was lost"
            )
        for _ in range(2 if self.random.random() < self.sc.doubled else 1):
            self.after(self.delay(), lambda: self.arrive(source.peer, to, frame))

    def arrive(self, sender: str, to: str, frame: Frame) -> None:
        host = self.at_peer[to]
        if not host.up:
            return
        raw = frame.header.pack()
        if frame.payload and self.random.random() < self.sc.damaged:
            spoiled = Spoiled(Verdict.BAD_HASH, claimed(raw, TAG, KINDS))
            self.carry_out(host, host.machine.on_spoiled(sender, spoiled, self.now))
            return
        header = parse(raw, len(frame.payload), TAG, 4096, KINDS)
        host.frames += 1
        self.carry_out(host, host.machine.on_frame(sender, Frame(header, frame.payload), self.now))

    def check(self, kind: Kind, payload: Any) -> None:
        if bytes(payload).split()[0] != (b"act" if kind == CrossingKind.ACTIVATION else b"grad"):
            raise FrameError(Verdict.MALFORMED, "not a crossing")

    # ---- a peer's shell and trainer -----------------------------------------------------------------------------

    def carry_out(self, host: Host, todo: list[Any]) -> None:
        e, stage = self.room.effects, host.seat.stage
        for effect in todo:
            if isinstance(effect, e.SendCrossingFrame):
                self.send(host, effect.to, effect.frame)
            elif isinstance(effect, e.SendKept):
                key = (effect.header.version, e.micro_of(effect.header), str(effect.piece))
                self.need(key in host.kept, f"P16: {host.seat} is to send {key} and has not kept it")
                self.send(host, effect.to, with_payload(effect.header, host.kept[key]))
            elif isinstance(effect, e.KeepCrossingPiece):
                way = "act" if effect.piece in (e.KeptPiece.INPUT, e.KeptPiece.OUTPUT) else "grad"
                at = stage - 1 if effect.piece == e.KeptPiece.INPUT else stage
                at = stage + 1 if effect.piece == e.KeptPiece.RETURNED else at
                right = crossing(way, effect.version, at, effect.micro)
                self.need(bytes(effect.payload) == right, f"{host.seat} keeps {effect!r}, not {right!r}")
                key = (effect.version, effect.micro, str(effect.piece))
                back = any(
                    (effect.version, stage, effect.micro, host.seat.number) == each[:4]
                    for each in self.given_back
                )
                once = key not in host.kept or (back and effect.piece == e.KeptPiece.INPUT)
                self.need(once, f"P14: {host.seat} gets {key} a second time")
                host.kept[key] = bytes(effect.payload)
                if effect.piece == e.KeptPiece.INPUT:
                    self.held_by[effect.version, stage, effect.micro].add(host.seat.number)
            elif isinstance(effect, e.Forget):
                self.need(effect.version < self.version, f"P16: {host.seat} forgets {effect}")
                host.kept = {key: kept for key, kept in host.kept.items() if key[0] > effect.version}
            elif isinstance(effect, e.GiveWork):
                self.handed.add((effect.version, stage, effect.micro, host.seat.number))
                host.work.append(effect)
                self.compute(host)
            elif isinstance(effect, e.FlowNote):
                self.told[f"note {effect.cause}"] += 1
                self.need(effect.cause != e.NoteReason.CONTESTED, f"{host.seat} notes {effect}")
            else:
                self.need(isinstance(effect, e.SeatLost), f"what is {effect!r}?")
        machine = host.machine
        if len(machine.waiting) > machine.room_limit:
            raise Broken(f"P15: {host.seat}: {len(machine.waiting)} wait, in room for {machine.room_limit}")

    def compute(self, host: Host) -> None:
        if host.busy or not host.work:
            return
        hand, host.busy = host.work.pop(0), True
        e, micro, stage = self.room.effects, hand.micro, host.seat.stage
        if stage:
            have = (hand.version, micro, "input") in host.kept or host.machine.version > hand.version
            self.need(have, f"P16: {host.seat} is handed {hand} without its input")
        else:
            self.held_by[hand.version, 0, micro].add(host.seat.number)
        if hand.way == e.FlowDirection.BACKWARD:
            have = (hand.version, micro, "returned") in host.kept or host.machine.version > hand.version
            self.need(have, f"P16: {host.seat} is handed {hand} without its gradient")

        took_s = host.unit_s * (1 if hand.way == e.FlowDirection.FORWARD else 3)

        def done() -> None:
            host.busy = False
            if not host.up:
                return
            before_s = host.usual_s.get(hand.way, took_s)
            host.usual_s[hand.way] = before_s + UNIT_SMOOTHED * (took_s - before_s)
            host.machine.on_unit(sum(host.usual_s.values()))
            key = (hand.version, stage, micro)
            if hand.way != e.FlowDirection.BACKWARD:
                self.forwards[key] += 1
            if hand.way != e.FlowDirection.FORWARD:
                self.backwards[key] += 1
                host.sums[hand.version, micro] += 1
            payload = crossing(
                "act" if hand.way == e.FlowDirection.FORWARD else "grad", hand.version, stage, micro
            )
            self.carry_out(
                host, host.machine.on_made(e.WorkMade(hand.way, hand.version, micro, payload), self.now)
            )
            self.compute(host)

        self.after(took_s, done)

    # ---- the promises ----------------------------------------------------------------------------------------

    def need(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Broken(f"at {self.now:.2f} s, version {self.version}: {otherwise}")

    def check_hands(self, source: Host, to: str, frame: Frame) -> None:
        """R6, of what is sent just now."""
        header, mine, table = frame.header, source.seat, source.machine.table
        what = (header.version, self.room.effects.micro_of(header))
        if header.kind == CrossingKind.ACTIVATION:
            [due] = [seat.number for seat in table.living(mine.stage + 1) if seat.peer == to]
            before = self.sent_to.get((what[0], mine.stage, what[1], mine.number), due)
            back = (what[0], mine.stage + 1, what[1], before, mine.number) in self.given_back
            told = f"R6: {mine} gives {what} to seat {due}, and seat {before} has not given it back"
            self.need(before == due or back or not table.lives(before), told)
            self.sent_to[what[0], mine.stage, what[1], mine.number] = due
        elif header.kind == CrossingKind.GIVEN_BACK:
            key = (what[0], mine.stage, what[1], mine.number)
            self.need(key not in self.handed, f"R6: {mine} gives {what} back and has begun it")
            [due] = [seat.number for seat in table.living(mine.stage - 1) if seat.peer == to]
            self.told["given back"] += (*key, due) not in self.given_back
            self.given_back.add((*key, due))
            self.held_by[what[0], mine.stage, what[1]].discard(mine.number)

    def check_commit(self) -> None:
        for stage in range(self.sc.stages):
            added: Counter[int] = Counter()
            for seat in self.table.living(stage):
                sums = self.hosts[seat.number].sums
                mine = {micro: times for (version, micro), times in sums.items() if version == self.version}
                believed = self.believed.get(seat.number, 0)
                self.need(mask_of(mine) & believed == believed, f"P11: {seat} counts what it did not add")
                added.update(mine)
            wrong = {micro: added[micro] for micro in range(self.sc.count) if added[micro] != 1}
            self.need(not wrong, f"P11: stage {stage} has microbatches so often: {wrong}")
            for micro in range(self.sc.count):
                self.check_work(stage, micro)

    def check_work(self, stage: int, micro: int) -> None:
        def lost(at: int) -> int:
            """Seats of the stage that had it and are gone, or will be seen to be."""
            held = self.held_by[self.version, at, micro]
            return sum(not self.table.lives(number) or number in self.doomed for number in held)

        key = (self.version, stage, micro)
        forwards, backwards = self.forwards[key], self.backwards[key]
        self.need(
            backwards <= 1 + lost(stage), f"P14: {backwards} backward passes of {micro} in stage {stage}"
        )
        most = 1 + lost(stage) + lost(stage + 1)
        self.need(
            forwards <= most, f"P14: {forwards} forward passes of {micro} in stage {stage}, at most {most}"
        )

    def check_end(self) -> None:
        for host in self.hosts.values():
            machine = host.machine
            counted = machine.counters.total + machine.early_count
            self.need(counted == host.frames, f"P8: {host.seat}: {host.frames} frames, {counted} counted")
            self.need(
                not machine.refused_for_room, f"P15: {host.seat} refused {machine.refused_for_room} for room"
            )
            ends = machine.counters.as_dict()
            foul = {end: times for end, times in ends.items() if times and end not in FAIR}
            self.need(not foul, f"P8: everybody is honest, and {host.seat} refused frames: {foul}")
            for end in FAIR:
                self.told[f"frames {end}"] += ends[end]

    def run(self) -> None:
        while self.version < self.sc.batches:
            if not self.queue or self.now > LIMIT_S:
                raise Broken(
                    f"P15: {self.version} of {self.sc.batches} batches after {self.now:.0f} s: {self.stands()}"
                )
            self.now, _, what = heapq.heappop(self.queue)
            what()
        self.check_end()
        self.told["batches"] += self.version
        self.told["forward again"] += self.forwards.total() - len(self.forwards)
        self.told["backward again"] += self.backwards.total() - len(self.backwards)

    def stands(self) -> str:
        """What is not counted anywhere, for whoever reads a failure."""
        told = []
        for stage in range(self.sc.stages):
            union = 0
            for seat in self.table.living(stage):
                union |= self.hosts[seat.number].machine.counted
            told.append(f"stage {stage} lacks {[m for m in range(self.sc.count) if not union >> m & 1]}")
        return "; ".join(told)


def run_seed(seed: int, room: Room | None = None, scenario: Scenario | None = None) -> Counter[str]:
    """What happened; Broken if a promise does not hold."""
    world = World(seed, scenario or scenario_of(seed), room or Room())
    world.run()
    return world.told


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seeds", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    args = parser.parse_args()
    told: Counter[str] = Counter()
    failed, began = 0, time.monotonic()
    for seed in range(args.first, args.first + args.seeds):
        try:
            told += run_seed(seed)
        except Broken as problem:
            failed += 1
            print(f"seed {seed}: {problem}", flush=True)
    took_s = time.monotonic() - began
    print(f"{args.seeds} seeds, {failed} failed, {took_s:.0f} s: {dict(sorted(told.items()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
