"""A whole run of one script in virtual time: what `farflung simulate` does.

The coordinator, the peers' machines and trainers, rounds, codecs, error feedback, outer steps, schedules and leases are
those of production.  The network, the clock and the time that a step takes are simulated: see places.py.  Equal scripts
and places give equal numbers.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from farflung.collectives.round.effects import SendFrame
from farflung.compression.codec import codec_named
from farflung.coordinator.ledger.records import CommittedRound, Record, tag_of
from farflung.peer.machine.effects import Exit
from farflung.peer.trainer.kept_optimizer import OptimizerState
from farflung.protocol.caps import duration
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.signing import name_of
from farflung.simulator.invariants import Invariants
from farflung.simulator.laboratory.places import ReplicaPlace, VirtualLine
from farflung.simulator.laboratory.replica import Body, ScriptReplica
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import TrainerHost
from farflung.simulator.world import World, peer_of

LOCAL_S = 0.001  # a word between trainer and agent
TICK_S = 1.0
SETTLE_S = 120.0  # after the end of the last script
LIFE_S = 600.0  # beside a step and some rounds: without one of either for so long, none will come
SEEDS_APART = 1000003
FAST = 1.25e8  # bytes per second of a line without a limit, as its peer measures it


@dataclass(frozen=True)
class SimulatedRound:
    """One commit; stands as it is in what `farflung simulate --json` prints."""

    version: int
    fragment: int
    at_s: float
    members: int
    included: int
    loss: float | None  # of the members' steps
    tokens: int
    steps: int
    sent_bytes: int  # by one peer on average, since the last one


@dataclass
class SimulatedRun:
    rounds: list[SimulatedRound] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (version, loss): what [eval] says
    # (version, name, value): what scripts log
    figures: list[tuple[int, str, float]] = field(default_factory=list)
    seconds: float = 0.0  # of virtual time, from the first step
    peers: int = 0
    version: int = 0  # that the run has come to
    of: int = 0  # rounds
    steps: int = 0
    sent_bytes: int = 0  # by one peer on average, with the state that newcomers fetched
    waited: float = 0.0  # of the peers' time, for rounds

    @property
    def loss(self) -> float | None:
        """Of the last round in which there is one."""
        return next((each.loss for each in reversed(self.rounds) if each.loss is not None), None)

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.rounds if each.fragment == 0)


class Unchecked(Invariants):
    """The simulator's own runs check the promises; here each check would cost time."""

    def observe(self, what: str, details: object) -> None:
        pass

    def on_books(self, ledger: object) -> None:
        pass

    def on_evidence(self, kept: object) -> None:
        pass

    def on_proof(self, kept: object) -> None:
        pass

    def on_strikes(self, struck: object) -> None:
        pass


class Laboratory(World):
    tick_s = TICK_S

    def __init__(
        self,
        manifest: Manifest,
        script: Body,
        places: Sequence[ReplicaPlace],
        tell: Callable[[SimulatedRound], None],
    ) -> None:
        scenario = Scenario(
            peers=len(places),
            fragments=manifest.fragments,
            rounds=manifest.run.rounds,
            faults_until_s=0.0,
            end_s=math.inf,
        )
        super().__init__(manifest.run.seed, scenario)
        self.manifest, self.places = as_simulated(manifest, len(places)), places
        self._script, self._tell_round = script, tell
        self._names = [name_of(key.public_key().public_bytes_raw()) for key in self._keys]
        self._numbers = {peer_of(key): number for number, key in enumerate(self._keys)}
        self._starting = 0
        self._replicas: list[ScriptReplica] = []
        self._evaluated: dict[tuple[object, ...], object] = {}
        self._optimizers: dict[int, OptimizerState | None] = {}  # of those that left, on their own disks
        self._to_come = len(places)
        self._away: set[int] = set()
        self._up = [VirtualLine(each.up) for each in places]
        self._down = [VirtualLine(each.down) for each in places]
        self._sent = self._sent_before = 0
        # By target: of each source, how many frames.
        self._under_way: dict[str, Counter[str]] = {peer: Counter() for peer in self._numbers}
        self.outcome = SimulatedRun(peers=len(places), of=manifest.run.rounds)
        # Its script says what is trained, before there is a peer.
        self._first: ScriptReplica | None = self._made(0)
        self.model = self._first.model()
        gather = codec_named(manifest.round.gather_codec)
        self.invariants = Unchecked(self.model, gather, manifest.fragments)

    def learn(self) -> SimulatedRun:
        try:
            self._learn()
        finally:
            for each in self._replicas:
                each.leave()
        return self._summed_up()

    def _learn(self) -> None:
        self.start_coordinator()
        for number, place in enumerate(self.places):
            self._at(place.joins_s, self.start_peer, number)
            for leaves_s, comes_s in place.away_s:
                self._to_come += 1
                self._at(leaves_s, self._take_away, number)
                self._at(comes_s, self._bring_back, number)
        self._look_for_life((0, 0))
        ends_s = math.inf
        while self._queue and not self._ended and self.now < ends_s:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if ends_s == math.inf and not self._to_come and not any(each.alive for each in self._replicas):
                ends_s = self.now + SETTLE_S

    def _at(self, at_s: float, act: Callable[[int], object], number: int) -> None:
        self.after(at_s, lambda: act(number))

    def _look_for_life(self, before: tuple[int, int]) -> None:
        done = (len(self.outcome.rounds), sum(each.steps for each in self._replicas))
        longest_s = max(each.step_s for each in self.places)
        life_s = LIFE_S + 2 * longest_s + 3 * self.manifest.round.deadline_s
        if done == before and self._is_complete:
            self._ended = True  # who is still here came too late for its end, and nobody can give it on
        elif done == before and self.now and not self._to_come:
            reasons = "; ".join(each.reason for each in self.coordinator.drivers) if self.coordinator else ""
            raise UserError(
                f"the run has stood still for {duration(life_s)} of its time, at version {self._version}: {reasons}"
            )
        self.after(life_s, lambda: self._look_for_life(done))

    @property
    def _version(self) -> int:
        return self.coordinator.core.ledger.version if self.coordinator is not None else 0

    @property
    def _is_complete(self) -> bool:
        return self._version >= self.manifest.run.rounds

    # ---- replicas

    def _made(self, number: int) -> ScriptReplica:
        seed = self.manifest.run.seed + SEEDS_APART * len(self._replicas)
        place = self.places[number]
        made = ScriptReplica(
            self.manifest, self._names[number], self._script, place.step_s, seed, aloud=not self._replicas
        )
        made.kept, made.evaluated = self._optimizers.pop(number, None), self._evaluated
        self._replicas.append(made)
        return made

    def start_peer(self, index: int) -> None:
        self._to_come -= 1
        self._starting = index
        super().start_peer(index)
        peer = self.peers[peer_of(self._keys[index])]
        vitals, line = peer.member.reports.vitals, (self._up[index], self._down[index])
        vitals.up_bytes_per_s, vitals.down_bytes_per_s = (round(each.bytes_per_s or FAST) for each in line)

    def _trainers(self) -> Callable[..., Any]:
        return lambda host, world, rules: self._replica_of(host)

    def _replica_of(self, host: TrainerHost) -> ScriptReplica:
        if self._starting == 0 and self._first is not None:
            made, self._first = self._first, None
        else:
            made = self._made(self._starting)
        made.belong_to(host)
        return made

    def _take_away(self, number: int) -> None:
        peer = self.peers[peer_of(self._keys[number])]
        if peer.alive and not peer.exit_code and isinstance(peer.trainer, ScriptReplica):
            peer.leave_unsent()
            if peer.trainer.optimizer is not None:
                self._optimizers[number] = OptimizerState.of(peer.trainer.optimizer)
            peer.alive = False
            peer.trainer.leave()
            self._away.add(number)

    def _bring_back(self, number: int) -> None:
        if number in self._away and not self._is_complete:
            self._away.remove(number)
            self.start_peer(number)
        else:
            self._to_come -= 1

    def _observe(self, what: str, details: object) -> None:
        if what == "exit":
            peer, end = cast(tuple[VirtualPeer, Exit], details)
            if end.code not in ("finished", "left"):
                raise UserError(f"simulate: {peer.me.name} was sent away: {end.reason}")
        super()._observe(what, details)

    # ---- lines

    def _local_delay(self, what: str) -> float:
        return LOCAL_S if what == "local" else 0.0

    def _delay_s(self, party: str) -> float:
        return self.places[self._numbers[party]].delay_ms / 1e3 if party in self._numbers else 0.0

    def _delays(self, source: str, target: str) -> list[float]:
        return [self._delay_s(source) + self._delay_s(target)]

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        packed, payload = effect.frame.header.pack(), bytes(effect.frame.payload)
        size = len(packed) + len(payload)
        self._sent += size
        self._under_way[effect.to][source] += 1
        [delay_s] = self._delays(source, effect.to)
        up_s = self._up[self._numbers[source]].pass_s(size, self.now)
        self.after(up_s + delay_s, lambda: self._comes_down(source, effect.to, packed, payload, size))

    def _comes_down(self, source: str, target: str, header: bytes, payload: bytes, size: int) -> None:
        down_s = self._down[self._numbers[target]].pass_s(size, self.now)
        self.after(down_s, lambda: self._is_down(source, target, header, payload))

    def _is_down(self, source: str, target: str, header: bytes, payload: bytes) -> None:
        self._under_way[target][source] -= 1
        self._frame_arrives(source, target, header, payload)

    def _peer_tick(self, peer: VirtualPeer) -> None:
        # All that is under way: on a real line frames to several peers come at the same time.
        arriving = {source for source, count in self._under_way[peer.peer].items() if count}
        peer.member.on_lines(set(), arriving, self.now)
        super()._peer_tick(peer)

    # ---- what is written down

    def _write(self, record: Record) -> None:
        if isinstance(record, CommittedRound):
            commit, peers = record.commit, len(self.places)
            sent, self._sent_before = self._sent - self._sent_before, self._sent
            row = SimulatedRound(
                commit.version,
                commit.fragment,
                self.now,
                len(commit.members),
                len(commit.included),
                record.loss,
                record.tokens,
                record.steps,
                sent // peers,
            )
            self.outcome.rounds.append(row)
            self._write_figures(commit.version)
            self._tell_round(row)
        elif tag_of(record) == "evaluated":  # of a mode, which may have been taken out
            found: Any = record
            if found.loss is not None:
                self.outcome.held_out.append((found.version, found.loss))

    def _write_figures(self, version: int) -> None:
        """Of the first replica that is there: all of them evaluate the same."""
        logged = next((each.figures for each in self._replicas if each.figures), {})
        self.outcome.figures += [(version, name, value) for name, value in logged.items()]

    def _summed_up(self) -> SimulatedRun:
        done, outcome = [each for each in self._replicas if each.began_s is not None], self.outcome
        began_s = min((each.began_s or 0.0 for each in done), default=0.0)
        outcome.seconds = max([each.at_s for each in outcome.rounds], default=began_s) - began_s
        outcome.version = self._version
        self._write_figures(self._version)  # what was said after the last step, too
        outcome.steps = sum(each.steps for each in done)
        outcome.sent_bytes = self._sent // len(self.places)
        spans = sum(each.ended_s - (each.began_s or 0.0) for each in done)
        outcome.waited = sum(each.waited_s for each in done) / spans if spans else 0.0
        return outcome


def as_simulated(manifest: Manifest, peers: int) -> Manifest:
    """Without what a simulated run has not; UserError where it would be another run then."""
    if manifest.pipeline.batch:
        raise UserError(
            "simulate: [pipeline] batch is not 0, and a simulated peer has the whole model and takes steps"
        )
    if manifest.start.source:
        raise UserError("simulate: [start] source is not empty: load the weights in the script")
    if manifest.run.min_peers > peers:
        raise UserError(f"simulate: [run] min_peers is {manifest.run.min_peers}, and there are {peers} peers")
    other = {
        "checkpoint": manifest.checkpoint.model_copy(update={"every_rounds": 0}),
        "admission": manifest.admission.model_copy(update={"mode": "open"}),
    }
    return manifest.model_copy(update=other)
