"""Rounds in groups of many peers over home lines, with churn, in virtual time: how many commit, and how long they take.

    python benchmarks/mesh.py [--peers 256] [--group 16] [--chunks 32] [--rounds 4] [--mb 25] [--churn 0.05]
                              [--rough] [--policy robust] [--period 30] [--seed 1] [--json]

The machines are the program's own, as in the simulator, and every promise is checked at every event: each committed
result is held to a reference of the two sums, bit by bit (simulator/invariants.py).  New here are lines: frames
of contributions, sums and results pass one after the other up the sender's line and down the receiver's, as if a
contribution were so many megabytes; what waits for a peer that dies takes nobody's line.
Each peer's line is drawn from `PLANS`, which are plans as they are sold to homes,
not a data set.  Peers tell what their lines carry, as they do once rounds have filled them; with `--rough` as before
that.  In each round that share of its members is killed at a time that is drawn; they come back within seconds.  State
for them passes besides, as the simulator has it: as fast as messages.

What a round asks of the coordinator is counted from its opening until `TOLD_S` after its commit: seconds of its
arithmetic, as the processor counts them, and bytes of words both ways before they are sealed; beats are in it.

`ideal` of a round is the time in which the slowest of its members could send its contribution at its line's full rate,
and then either the slowest could get the results, or all together could send them, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec

import torch

from farflung.collectives.mesh.mesh_round import MeshKind
from farflung.collectives.round.effects import SendFrame
from farflung.coordinator.ledger.records import AbortedRound, CommittedRound, Opened, Record
from farflung.coordinator.run.effects import Effect
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol import messages
from farflung.protocol.frames import FrameKind, Kind
from farflung.protocol.messages import Message
from farflung.protocol.round_words import BITS_PER_VALUE, SUM_CODEC, Plan
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import Names, World

# (Mbit/s down, Mbit/s up, how many of a hundred homes)
PLANS = (
    (50, 10, 15),
    (100, 20, 15),
    (250, 25, 20),
    (250, 50, 15),
    (500, 100, 15),
    (1000, 200, 10),
    (1000, 1000, 10),
)
BULK: dict[FrameKind, str] = {
    Kind.CONTRIBUTION: "int8",
    Kind.RESULT: "int8",
    Kind.LOGGED: "int8",
    MeshKind.SUM: SUM_CODEC,
}
TOLD_S = 5.0  # later everybody has heard of a commit and shown its new version
STEPS = 4  # of the simulator's runs, between rounds
P = ParamSpec("P")
BYTES_PER_MBIT = 1e6 / 8


@dataclass(eq=False)
class Passing:
    """A frame on its way; `arrives` is called when it is there."""

    source: str
    target: str
    size_bytes: float
    arrives: Callable[[], None]


@dataclass
class Line:
    down_bytes_per_s: float
    up_bytes_per_s: float
    down_free_at: float = 0.0
    waiting: deque[Passing] = field(default_factory=deque)
    leaving: Passing | None = None


class HomeLines:
    """In the place of the simulator's one slow line."""

    peer = ""  # nobody is special

    def __init__(self, seed: int, contribution_bytes: float, chunks: int, elements: int) -> None:
        self._draw = random.Random(f"lines {seed}")
        self._chunk_bytes, self.contribution_bytes = contribution_bytes / chunks, contribution_bytes
        self._told_of = chunks * elements / contribution_bytes  # the model's bytes for one of these
        self.of: dict[str, Line] = {}
        self.after: Callable[[float, Callable[[], None]], None] = lambda delay_s, action: None

    def line(self, peer: str) -> Line:
        if peer not in self.of:
            [(down, up, _)] = self._draw.choices(PLANS, [share for _, _, share in PLANS])
            self.of[peer] = Line(down * BYTES_PER_MBIT, up * BYTES_PER_MBIT)
        return self.of[peer]

    def prepare(self, machine: RunMachine) -> None:
        """Nothing is sent ahead in groups."""

    def up_bytes_per_s(self, peer: str, otherwise: Callable[[], int]) -> int:
        otherwise()
        return round(self.line(peer).up_bytes_per_s * self._told_of)

    def down_bytes_per_s(self, peer: str) -> int:
        return round(self.line(peer).down_bytes_per_s * self._told_of)

    def waits_s(self, source: str, target: str, kind: FrameKind, now: float) -> float:
        """What is large has passed the lines when it gets here (`Homes._send_frame`), and what is small waits for
        nothing."""
        return 0.0

    def send(self, kind: FrameKind, frame: Passing, now: float) -> None:
        frame.size_bytes = self._chunk_bytes * BITS_PER_VALUE[BULK[kind]] / BITS_PER_VALUE["int8"]
        line = self.line(frame.source)
        line.waiting.append(frame)
        if line.leaving is None:
            self._next(line, now)

    def _next(self, line: Line, now: float) -> None:
        line.leaving = frame = line.waiting.popleft() if line.waiting else None
        if frame is None:
            return
        up_s, down = frame.size_bytes / line.up_bytes_per_s, self.line(frame.target)
        # What waits at a slow sender keeps nobody else's frames from coming in: only the way down itself does.
        down.down_free_at = max(now, down.down_free_at) + frame.size_bytes / down.down_bytes_per_s
        self.after(up_s, lambda: self._next(line, now + up_s) if line.leaving is frame else None)
        self.after(max(up_s, down.down_free_at - now), frame.arrives)

    def is_cut(self, peer: str) -> None:
        """It died, with what it had to send; and what waits for it leaves nobody's line."""
        own = self.line(peer)
        own.waiting.clear()
        own.leaving = None
        for line in self.of.values():
            line.waiting = deque(frame for frame in line.waiting if frame.target != peer)


class Homes(World):
    def __init__(self, scenario: Scenario, asked: argparse.Namespace) -> None:
        self._rough, self._step_s = asked.rough, asked.period / STEPS
        seed, contribution_bytes, churn = asked.seed, 1e6 * asked.mb, asked.churn
        super().__init__(seed, scenario)
        of_model = self.model.chunk_count, self.model.chunk_elements
        self.lines = HomeLines(seed, contribution_bytes, *of_model)
        self.slow_line = self.lines  # type: ignore[assignment]
        self._churn, self._deaths = churn, random.Random(f"deaths {seed}")
        self.lines.after = self.after
        self._passing: set[tuple[object, ...]] = set()  # copies that are on their way
        self._coming: defaultdict[str, Counter[str]] = defaultdict(Counter)  # to whom -> from whom, how many
        self._asked_of_it = [0.0, 0.0]  # of the coordinator: seconds, bytes
        self._timed: RunMachine | None = None
        self.coordinators: list[tuple[float, float]] = []  # a member and round: milliseconds, KB
        self.plans: dict[int, Plan] = {}  # by round, as it opened
        self.committed: list[tuple[float, float]] = []  # (how long it took, ideal)
        self.aborted: list[str] = []

    def _local_delay(self, what: str) -> float:
        drawn = super()._local_delay(what)
        return self._step_s if what == "step" else drawn

    def start_peer(self, index: int) -> None:
        """It tells both directions of its line, and whether rounds have filled it."""
        super().start_peer(index)
        for peer in self.peers.values():
            vitals = peer.member.reports.vitals
            vitals.down_bytes_per_s, vitals.rough = self.lines.down_bytes_per_s(peer.peer), self._rough

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        """No second copy of what is on its way, as the real data plane has it."""
        header = effect.frame.header
        copy = (
            source,
            effect.to,
            header.kind,
            header.round_no,
            header.decision_no,
            header.chunk,
            header.version,
        )
        if header.kind not in BULK:
            super()._send_frame(source, effect)
        elif copy not in self._passing:
            self._passing.add(copy)
            self._coming[effect.to][source] += 1
            self.lines.send(
                header.kind,
                Passing(source, effect.to, 0.0, lambda: self._passed(copy, source, effect)),
                self.now,
            )

    def _passed(self, copy: tuple[object, ...], source: str, effect: SendFrame) -> None:
        if copy in self._passing:
            self._forget(copy)
            super()._send_frame(source, effect)

    def _forget(self, copy: tuple[object, ...]) -> None:
        self._passing.discard(copy)
        self._coming[str(copy[1])][str(copy[0])] -= 1

    def _peer_tick(self, peer: VirtualPeer) -> None:
        """It hears from whom something comes in, as the real data plane tells it."""
        coming = {source for source, count in self._coming[peer.peer].items() if count > 0}
        if peer.alive and peer.peer in self._coming:
            peer.member.on_lines(set(), coming, self.now)
        super()._peer_tick(peer)

    def _deliver(self, source: str, target: str, message: Message, allowed: Names, key: bytes = b"") -> None:
        """Every word is the coordinator's, or for it."""
        self._asked_of_it[1] += len(messages.encode(message))
        super()._deliver(source, target, message, allowed, key)

    def _carry_out(self, machine: RunMachine, effects: list[Effect]) -> None:
        if self._timed is not machine:
            self._timed = machine
            machine.on_member = self._timing(machine.on_member)  # type: ignore[method-assign]
            machine.on_timer = self._timing(machine.on_timer)  # type: ignore[method-assign]
        super()._carry_out(machine, effects)

    def _timing(self, does: Callable[P, list[Effect]]) -> Callable[P, list[Effect]]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> list[Effect]:
            began = time.thread_time()
            effects = does(*args, **kwargs)
            self._asked_of_it[0] += time.thread_time() - began
            return effects

        return timed

    def _count(self, before: list[float], members: int) -> None:
        seconds, size = (after - each for after, each in zip(self._asked_of_it, before, strict=True))
        self.coordinators.append((1e3 * seconds / members, size / 1e3 / members))

    def _write(self, record: Record) -> None:
        super()._write(record)
        if isinstance(record, Opened) and record.plan.epoch == 1:
            self.plans[record.plan.round_no] = record.plan
            self._let_some_die(record.plan)
            self._when_opened = [*self._asked_of_it]
        elif isinstance(record, CommittedRound):
            before, members = self._when_opened, len(self.plans[record.commit.round_no].members)
            self.after(TOLD_S, lambda: self._count(before, members))
            self.committed.append((record.seconds, self.ideal_s(self.plans[record.commit.round_no])))
        elif isinstance(record, AbortedRound):
            self.aborted.append(record.reason)

    def _let_some_die(self, plan: Plan) -> None:
        within_s = self.ideal_s(plan)
        for peer in self._deaths.sample(plan.members, round(self._churn * len(plan.members))):
            self.after(self._deaths.uniform(0.0, within_s), lambda peer=peer: self._die(peer))  # type: ignore[misc]

    def _die(self, peer: str) -> None:
        if self.peers[peer].alive and not self.peers[peer].exit_code:
            self._kill(peer)
            self.lines.is_cut(peer)
            for copy in [copy for copy in self._passing if peer in copy[:2]]:
                self._forget(copy)

    def ideal_s(self, plan: Plan) -> float:
        lines, size = [self.lines.line(peer) for peer in plan.members], self.lines.contribution_bytes
        elsewhere = 1.0 - len(plan.owners) // plan.count / len(lines)  # in a group, besides what one keeps
        sent = size * elsewhere / min(line.up_bytes_per_s for line in lines)
        got = size / min(line.down_bytes_per_s for line in lines)
        given = size * elsewhere * len(lines) / sum(line.up_bytes_per_s for line in lines)
        return sent + max(got, given)

    def figures(self) -> dict[str, object]:
        times = [took / ideal for took, ideal in self.committed]
        here = [peer for peer in self.peers.values() if peer.alive or peer.exit_code == "finished"]
        digests = {tuple(peer.state.digests) for peer in here if peer.exit_code == "finished"}
        return {
            "peers": self.scenario.peers,
            "groups": [max(plan.groups or (0,)) + 1 for plan in self.plans.values()],
            "committed": len(self.committed),
            "aborted": self.aborted,
            "killed": self.kills,
            "seconds": [round(took, 2) for took, _ in self.committed],
            "over_ideal": [round(each, 3) for each in times],
            "over_ideal_median": round(statistics.median(times), 3) if times else None,
            "coordinator_cpu_ms_a_member_and_round": [round(cpu_ms, 2) for cpu_ms, _ in self.coordinators],
            "coordinator_kb_a_member_and_round": [round(kb, 1) for _, kb in self.coordinators],
            "results_equal_to_the_reference": len(self.invariants.sums_of_groups),
            "digests_of_those_that_finished": len(digests),
        }


def play(asked: argparse.Namespace) -> dict[str, object]:
    scenario = Scenario(
        peers=asked.peers,
        group=asked.group,
        chunks=asked.chunks,
        rounds=asked.rounds,
        min_peers=max(2, asked.peers // 2),
        codec="int8",
        gather_codec="int8",
        policy=asked.policy,
        audit=0.0,
        deadline_s=asked.period,
        grace_s=120.0,
        faults_until_s=0.0,
        end_s=600.0 * asked.rounds,
        dead_after_s=5.0,  # as where run.toml says nothing
    )
    began = time.process_time()
    world = Homes(scenario, asked)
    report = world.run()
    return {"outcome": report.outcome, **world.figures(), "cpu_s": round(time.process_time() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=256)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--mb", type=float, default=25.0, help="of one contribution, as int8")
    parser.add_argument("--churn", type=float, default=0.05, help="share of a round's members that die in it")
    parser.add_argument("--period", type=float, default=30.0, help="seconds of learning between rounds")
    parser.add_argument(
        "--rough", action="store_true", help="lines are known roughly, as before the first round"
    )
    parser.add_argument("--policy", choices=("robust", "mean"), default="robust")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # vectors of a dozen values
    found = play(asked)
    print(
        json.dumps(found) if asked.json else "\n".join(f"{name:32} {value}" for name, value in found.items())
    )


if __name__ == "__main__":
    main()
