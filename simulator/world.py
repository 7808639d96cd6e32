"""The simulator: the production machines in virtual time over a seeded, hostile network.

One seed is one run: peers join, learn and leave; frames are delayed, dropped, repeated and reordered; links are cut;
any party is killed and started again between any two effects; trainers crash.  The invariants are checked at every
event.  After the faults the network is calm and the run must come to its end.

Used by the tests, and by hand: `python -m farflung.simulator.world SEED`, with `batches` or `stages` behind it for
another kind of run (`Scenario.of_batches`, `of_stages`, `of_amendments`).  Nothing here waits or sleeps.
"""

from __future__ import annotations

import heapq
import importlib
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.collectives.round.effects import SendFrame
from farflung.compression.codec import codec_named
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import CommittedBatch, CommittedRound, Record, from_bytes, to_bytes
from farflung.coordinator.run.effects import (
    AnswerDoor,
    DialBack,
    Effect,
    HandEffect,
    KeepEvidence,
    KeepProof,
    Tell,
    Write,
)
from farflung.coordinator.run.machine import RunMachine
from farflung.peer.machine.handshake import HandshakeState, Me
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.machine.modes import kinds_of
from farflung.protocol import messages
from farflung.protocol.errors import FrameError
from farflung.protocol.frames import (
    Frame,
    Spoiled,
    check_payload,
    claimed,
    parse,
)
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import DOOR_IN, DOOR_OUT, MEMBER_IN, MEMBER_OUT, FromMember, Message, Order
from farflung.protocol.run_terms import tag_of
from farflung.protocol.signing import name_of, peer_id_of
from farflung.simulator.bad_peers import (
    LARGEST_BYTES,
    LastPeer,
    LiarsLeague,
    Neighbours,
    WorkLeague,
    trainer_for,
)
from farflung.simulator.cut_lines import (
    HOST_LOOKS_EVERY_S,
    CutLines,
    HeldAtCut,
    HostChanges,
    LostDisk,
    OrdersOfHost,
    SlowLine,
    let_some_die,
    let_some_leave,
    of_slow_line,
)
from farflung.simulator.disk import OwnDisk, VirtualDisk, is_kept
from farflung.simulator.invariants import Broken, Invariants, all_is_held
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario, SimulationReport, manifest_for, model_for
from farflung.simulator.trainer import LOCAL_DELAYS_S, RUN_ID, TrainerSurroundings, VirtualTrainer
from farflung.simulator.virtual_relay import Between, VirtualOffers, VirtualRelay, VirtualRouters

COORDINATOR = "coordinator"
TAG = tag_of(RUN_ID)
AMONG_LIARS = "liars made its last rounds among themselves"  # and gave them to nobody else
TICK_S = 0.4
LIARS_LATE_S = 4.0  # somebody honest founds the run: what liars alone have made is nobody's loss
JOINERS_LATE_S = 8.0
_MEMBERS = frozenset(MEMBER_IN), frozenset(MEMBER_OUT)
_DOOR = frozenset(DOOR_IN), frozenset(DOOR_OUT)
_AT_DOOR: frozenset[type] = frozenset((*DOOR_IN.values(), *DOOR_OUT.values()))
Names = frozenset[str]


def invariants_of(scenario: Scenario, batches: tuple[int, Manifest], seen: tuple[Any, ...]) -> Invariants:
    """Those of batches are read only where a run has some: they lean on the mode's records (coordinator/batches)."""
    if scenario.stages > 1:
        calm = scenario.is_calm and not scenario.poison_every
        of_stages = importlib.import_module("farflung.simulator.batches.stage_invariants").StageInvariants
        return cast(Invariants, of_stages(calm, scenario.lines_are_good, batches, *seen))
    if scenario.batch:
        of_batches = importlib.import_module("farflung.simulator.batches.stage_invariants").BatchInvariants
        return cast(Invariants, of_batches(batches, *seen))
    return Invariants(*seen)


def _batch_trainer(scenario: Scenario) -> Callable[..., VirtualTrainer]:
    name = "VirtualStageTrainer" if scenario.stages > 1 else "VirtualBatchTrainer"
    found = getattr(importlib.import_module("farflung.simulator.batches.stage_trainer"), name)
    return cast(Callable[..., VirtualTrainer], found)


class World:
    trainer_class: type[VirtualTrainer] = VirtualTrainer
    tick_s = TICK_S

    def __init__(self, seed: int, scenario: Scenario, machine: type[PeerMachine] = PeerMachine) -> None:
        self.seed, self.scenario = seed, scenario
        self.random = random.Random(seed)
        self.now = 0.0
        self.log: list[str] = []
        self.kills = self.events = 0
        self.manifest = manifest_for(scenario)
        self.model = model_for(scenario)
        gather = codec_named(self.manifest.round.gather_codec)
        seen = (self.model, gather, self.manifest.fragments, lambda: self._living)
        batches = self.trainer_class.dataset_samples, self.manifest
        self.invariants = invariants_of(scenario, batches, seen)
        self._kinds = kinds_of(stages=scenario.stages > 1)
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0
        self._cut: set[frozenset[str]] = set()
        self._machine_class = machine
        self._ended = False
        self._waited_for: list[VirtualPeer] = []  # who was in the run at its last commit
        self.journal: list[bytes] = []
        self.coordinator: RunMachine | None = None
        self.peers: dict[str, VirtualPeer] = {}
        self.disks: dict[int, VirtualDisk] = {}  # they survive every kill
        self.own: dict[int, OwnDisk] = {}  # and so does what lies beside a peer's key
        self._keys = [self._identity() for _ in range(scenario.peers + scenario.stranger)]
        liars = {peer_of(key) for key in self._keys[scenario.peers - scenario.liars :]}
        self.league = LiarsLeague(scenario.lies, liars, RUN_ID)
        self.invariants.liars |= liars
        self.invariants.lied, self.invariants.lies_to_itself = self.league.lied, scenario.lies == "echo"
        self._lines = CutLines(scenario, [peer_of(key) for key in self._keys[: scenario.cut_off]])
        self._host = OrdersOfHost(scenario)
        self._changes = HostChanges(scenario, seed)
        self.lost_disk = LostDisk(self, self._changes, seed)
        self.relay, first = VirtualRelay(scenario, seed), peer_of(self._keys[0])
        self.slow_line = SlowLine(scenario, first, self.model)
        self.routers = VirtualRouters(scenario, seed, self.peers, self.after, self._look, first)
        self.offers = VirtualOffers(scenario, seed, self.peers, self.after, self._carry_out)
        self.between = Between(self.relay, self.offers, self.routers)
        self._killed: list[tuple[float, VirtualPeer]] = []
        self.invariants.believed = self._just_killed
        self._held_at_cut = HeldAtCut()
        self.last = LastPeer(scenario, peer_of(self._keys[-1]), self.random, self.model.chunk_elements)
        self.invariants.cheated, self.invariants.wrong_sums = self.last.wrong, self.last.wrong_sums
        lies_itself = scenario.cheats or scenario.accuses or scenario.mutes or scenario.withholds
        about_sums = scenario.league + lies_itself
        self.invariants.liars |= {peer_of(key) for key in self._keys[len(self._keys) - about_sums :]}
        by_peer = {peer_of(key): key for key in self._keys}
        self.neighbours = Neighbours(scenario, list(by_peer), self.random, self._ledger, lambda: self.now)
        self.work_league = WorkLeague.of(scenario, RUN_ID, by_peer, self._ledger, seed)

    def _ledger(self) -> Ledger | None:
        return self.coordinator.core.ledger if self.coordinator is not None else None

    # ---- time -----------------------------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._order, action))

    def run(self) -> SimulationReport:
        self.start_coordinator()
        for index in range(self.scenario.peers):
            starts_s = self._late_s(index) + self.random.uniform(0, 3.0)
            self.after(starts_s, lambda index=index: self.start_peer(index))  # type: ignore[misc]
        self.after(1.0, self._misfortune)
        let_some_die(self, self.scenario.deaths_per_s, self._kill)
        if self.scenario.blackout_at_s:
            self.after(self.scenario.blackout_at_s, self._blackout)
        if self.scenario.cut_off:
            self.after(self.scenario.cut_off_at_s, self._cut_off)
        self._changes.begin(self.after, lambda: self.coordinator, self._obey)
        if self.scenario.host_after_s:
            self.after(HOST_LOOKS_EVERY_S, self._ask_host)
        while self._queue and self.now < self.scenario.end_s and not self._ended:
            self.now, _, action = heapq.heappop(self._queue)
            self.events += 1
            action()
        here = (p for p in self.peers.values() if p.alive and p.exit_code != "refused")
        founded = self.coordinator is None or self.coordinator.tick_builder.version_zero.is_founded
        self.invariants.at_rest(here, founded)
        return self._report()

    def _late_s(self, index: int) -> float:
        honest = self.scenario.peers - self.scenario.liars
        if index >= honest:
            return LIARS_LATE_S
        return JOINERS_LATE_S if index >= honest - self.scenario.late_joiners else 0.0

    def _observe(self, what: str, details: object) -> None:
        self.invariants.observe(what, details)
        self.work_league.saw(what, details)
        if what == "exit" and self.calm:  # a peer that was asked to leave comes back
            gone = all(not p.alive or p.exit_code not in ("", "left") for p in self.peers.values())
            self._ended = self._ended or gone  # everybody who is left has finished

    @property
    def calm(self) -> bool:
        return self.now >= self.scenario.faults_until_s

    # ---- the coordinator --------------------------------------------------------------------------------------

    def start_coordinator(self, restored: bool = False) -> None:
        records = [from_bytes(raw) for raw in self.journal]
        machine = RunMachine(self.manifest, RUN_ID, records, self.random.randbytes)
        if len(records) % 2:  # as a long journal is folded: the run must not notice
            self.journal = [to_bytes(machine.core.ledger.folded(len(records)))]
            machine = RunMachine(self.manifest, RUN_ID, [from_bytes(self.journal[0])], self.random.randbytes)
        self.slow_line.prepare(machine)
        self._changes.prepare(machine)
        if self.scenario.any_gain_moves:
            machine.modes["batches"].batches.moves.least_gain = 1.01
        self.coordinator = machine
        if self.scenario.routers:
            machine.core.members.ways.sees_ports()
        self._carry_out(machine, machine.start(self.now, 1, 1e9 + self.now, restored))
        self._tick(machine)

    def _look(self, key: bytes, door: str, endpoint: str) -> None:
        if self.coordinator is not None:
            self._carry_out(self.coordinator, self.coordinator.on_look(key, door, endpoint, self.now))

    def _tick(self, machine: RunMachine) -> None:
        if self.coordinator is machine:
            self._carry_out(machine, self.between.on_tick(machine, self.now))
        if self.coordinator is machine:
            self._carry_out(machine, machine.on_timer(self.now))
            self.after(self.tick_s, lambda: self._tick(machine))

    def _carry_out(self, machine: RunMachine, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, KeepEvidence):
                self.invariants.on_evidence(effect)
                continue
            if isinstance(effect, KeepProof):
                self.invariants.on_proof(effect)
                continue
            if self.coordinator is not machine or not self.survives(COORDINATOR):
                return
            match effect:
                case Write(record=record):
                    self._write(record)
                case AnswerDoor(caller=caller, message=message):
                    self.answer(caller.decode(), message)
                case Tell(peer=peer, message=message):
                    self._deliver(COORDINATOR, peer, message, _MEMBERS[1])
                case DialBack():
                    self._dial_back(machine, effect)
                case HandEffect():
                    self.between.asked(machine, effect, self.now)
        if any(isinstance(effect, Write) for effect in effects):
            self.invariants.on_books(machine.core.ledger)
            audits = machine.modes.get("audits")
            self.invariants.on_strikes(audits.desk.cases.struck if audits is not None else ())

    def _dial_back(self, machine: RunMachine, effect: DialBack) -> None:
        """A handshake is a few packets; where none arrives the dialler gives up."""
        delays = self._delays(COORDINATOR, effect.peer)
        reached = bool(delays) and self._dialable(effect.peer)

        def answer() -> None:
            if self.coordinator is machine:
                done = machine.on_dialled(effect.peer, effect.session, reached, self.now)
                self._carry_out(machine, done)

        self.after(2 * delays[0] if delays else 3.0, answer)

    def _write(self, record: Record) -> None:
        self.journal.append(to_bytes(record))
        self.note(f"durable: {type(record).__name__}")
        self.invariants.on_record(record)
        self.lost_disk.on_record(record)
        self.work_league.on_record(record, self._tokens_of)
        if self.scenario.restarts and isinstance(record, CommittedRound):
            self.after(0.01, lambda: self._restart_accomplices(record.commit.included))
        rounds = self._changes.rounds(self.coordinator)
        over = self.invariants.version == rounds and isinstance(record, CommittedRound | CommittedBatch)
        if over and self.calm:
            here = self.coordinator.core.members.alive if self.coordinator is not None else {}
            # In contact on both sides: a peer that was out of contact then may come back to an empty run.
            sessions = {member.session for member in here.values()}
            self._waited_for = [
                p
                for p in self.peers.values()
                if p.alive
                and p.machine.doorway.stand == HandshakeState.INSIDE
                and p.member.reports.session in sessions
            ]

    def _ends_with_liars_alone(self) -> bool:
        """The newest version of a fragment was made by liars among themselves, as `min_peers` lets so many."""
        newest = {commit.fragment: commit for _, commit in sorted(self.invariants.commits.items())}
        alone = any(set(commit.included) <= self.league.members for commit in newest.values())
        return alone and self.scenario.min_peers <= len(self.league.members)

    def _tokens_of(self, peer: str, round_no: int) -> int:
        return self.invariants.contributions[peer, round_no].steps * self.trainer_class.tokens_per_step

    # ---- peers ------------------------------------------------------------------------------------------------

    def _identity(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.random.randbytes(32))

    def start_peer(self, index: int) -> None:
        key = self._keys[index]
        public = key.public_key().public_bytes_raw()
        me = Me(
            peer=peer_id_of(public),
            name=name_of(public),
            identity=public,
            key=self.random.randbytes(32),
            process=self.random.randbytes(16),
            software="simulated",
            sign=key.sign,
        )
        world = TrainerSurroundings(
            now=lambda: self.now,
            after=self.after,
            delay=self._local_delay,
            to_door=lambda peer, effect: self._deliver(peer, COORDINATOR, effect.message, _DOOR[0], me.key),
            to_coordinator=lambda peer, effect: self._say(peer, effect.message, me.key),
            to_peer=self._send_frame,
            survives=self.survives,
            observe=self._observe,
            machine=self._machine_class,
            run_tag=TAG,
            trainer=self._trainers(),
            forge=self.last.forges,
            forge_sum=self.last.forges_sum,
            pinned=self._changes.pinned,
        )
        self.note(f"{me.peer} starts")
        own = self.own.setdefault(index, OwnDisk.of(self.scenario.results_on_disk, self.scenario.keeps))
        address = "" if index < self.scenario.undialable else f"10.0.{index // 256}.{index % 256}:1"
        peer = VirtualPeer(
            me,
            self.manifest,
            self.model,
            world,
            address,
            self._disk_of(index),
            own,
            helps=0 <= self.scenario.peers - 1 - index < self.scenario.helpers,
            offers=self.scenario.offers[index] if self.scenario.offers else (),
            pace=self.scenario.slow_peers[index] if self.scenario.slow_peers else 1.0,
        )
        # Thin and thick lines, around what this small model's contributions need: with "auto" the codecs differ.
        values = self.model.chunk_count * self.model.chunk_elements
        needed = values / self.manifest.round.scatter_grace_s
        drawn = lambda: round(needed * self.random.choice((0.1, 0.4, 0.9, 3.0)))  # noqa: E731
        peer.member.reports.vitals.up_bytes_per_s = self.slow_line.up_bytes_per_s(me.peer, drawn)
        self.peers[me.peer] = peer
        self._peer_tick(peer)

    def _trainers(self) -> Callable[..., VirtualTrainer]:
        if self.scenario.batch:
            return partial(_batch_trainer(self.scenario), poison_every=self.scenario.poison_every)
        made = trainer_for(self.scenario, self.trainer_class)
        taking = {"overlap_steps": self.scenario.overlap_steps, "mix": self.scenario.mix}
        return lambda host, world, rules: made(host, world, replace(rules, **taking))

    def _say(self, peer: str, message: FromMember, key: bytes) -> None:
        told = self.last.says(self.neighbours.says(peer, message), lies=peer in self.invariants.liars)
        said = self.league.says(self.peers[peer], told) if told and peer in self.league.members else told
        if said is not None:
            self._deliver(peer, COORDINATOR, self.work_league.said(peer, said), _MEMBERS[0], key)

    def _disk_of(self, index: int) -> VirtualDisk | None:
        if not self.scenario.every_rounds:
            return None
        place = 0 if self.scenario.one_store else index
        fails = lambda: not self.calm and self.random.random() < self.scenario.store_fails  # noqa: E731
        return self.disks.setdefault(place, VirtualDisk(fails))

    def _peer_tick(self, peer: VirtualPeer) -> None:
        if peer.alive and not peer.exit_code:
            self.between.tell(peer, self.now)
            peer.carry_out(peer.machine.on_timer(self.now))
            self.after(self.tick_s, lambda: self._peer_tick(peer))

    def _local_delay(self, what: str) -> float:
        return self.random.uniform(*LOCAL_DELAYS_S[what])

    # ---- the network --------------------------------------------------------------------------------------------

    def _delays(self, source: str, target: str) -> list[float]:
        """One delay per copy that arrives; none if the message is lost."""
        scenario, draw = self.scenario, self.random
        if self._lines.is_cut(source, target, self.now) and COORDINATOR in (source, target):
            return []
        if self.calm:
            return [draw.uniform(0.005, 0.05)]
        if frozenset((source, target)) in self._cut or draw.random() < scenario.drop:
            return []
        copies = 2 if draw.random() < scenario.duplicate else 1
        return [draw.uniform(0.005, 3.0 if draw.random() < scenario.slow else 0.08) for _ in range(copies)]

    def _deliver(self, source: str, target: str, message: Message, allowed: Names, key: bytes = b"") -> None:
        raw = messages.encode(message)
        for delay_s in self._delays(source, target):
            self.after(delay_s, lambda: self._arrive(source, target, messages.decode(raw, allowed), key))

    def answer(self, peer: str, message: Message) -> None:
        self._deliver(COORDINATOR, peer, message, _DOOR[1])

    def _arrive(self, source: str, target: str, message: Message, key: bytes) -> None:
        if target == COORDINATOR:
            machine = self.coordinator
            self.lost_disk.on_door(source, message)
            if machine is not None and type(message) in _AT_DOOR:
                self._carry_out(machine, machine.on_door(source.encode(), key, message, self.now))  # type: ignore[arg-type]
            elif machine is not None:
                self._carry_out(machine, machine.on_member(key, message, self.now))  # type: ignore[arg-type]
            return
        peer = self.peers.get(target)
        if peer is None or not peer.alive or peer.exit_code:
            return
        if type(message) in _AT_DOOR:
            peer.carry_out(peer.machine.on_door(message, self.now))  # type: ignore[arg-type]
        else:
            heard = self.league.hears(peer, message) if target in self.league.members else message  # type: ignore[arg-type]
            self.between.hears(peer, heard, self.now)
            peer.carry_out(peer.machine.on_control(heard, self.now))  # type: ignore[arg-type]

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        one, other = self.peers.get(source), self.peers.get(effect.to)
        dialled = self._dialable(source) or self._dialable(effect.to)
        if not (dialled or self.between.carries(one, other, self.now)):
            return  # nobody can open a connection between the two
        if self.last.withholds(source, effect, self.peers[source].member.part):
            return
        if self.neighbours.holds_back(source, effect):
            return
        packed, payload = effect.frame.header.pack(), bytes(effect.frame.payload)
        header, payload = self.last.spoils(source, packed, payload, self.now)
        header, payload = self.neighbours.spoils(source, effect, header, payload, self.calm)
        if self.league.keeps(effect.frame.header.kind, source, effect.to):
            return
        if source in self.league.members:
            header, payload = self.league.serves(effect.frame.header.kind, header, payload)
        waits_s = self.slow_line.waits_s(source, effect.to, effect.frame.header.kind, self.now)
        for delay_s in self._delays(source, effect.to):
            self.after(waits_s + delay_s, lambda: self._frame_arrives(source, effect.to, header, payload))

    def _dialable(self, peer: str) -> bool:
        return peer in self.peers and bool(self.peers[peer].address)

    def _frame_arrives(self, source: str, target: str, header: bytes, payload: bytes) -> None:
        peer = self.peers.get(target)
        if peer is not None and peer.alive and not peer.exit_code:
            try:
                parsed = parse(header, len(payload), TAG, LARGEST_BYTES, self._kinds)
                check_payload(parsed, payload)
            except FrameError as error:  # as the data plane does it
                peer.on_spoiled(source, Spoiled(error.verdict, claimed(header, TAG, self._kinds)))
            else:
                peer.on_frame(source, Frame(parsed, payload))

    # ---- misfortune -----------------------------------------------------------------------------------------------

    def survives(self, party: str) -> bool:
        """Asked before every effect of every party: False means that it was killed right here."""
        if not (party == COORDINATOR and self.lost_disk.is_now()):
            if self.calm or self.random.random() >= self.scenario.kill_per_effect:
                return True
        self._kill(party)
        return False

    def _kill(self, party: str) -> None:
        self.kills += 1
        self.note(f"{party} is killed")
        delay_s = self.random.choice((0.0, 0.5, 2.0, 6.0))
        if party == COORDINATOR:
            self.coordinator = None
            self.after(delay_s, self.lost_disk.start)
        else:
            self.peers[party].alive = False
            self._killed.append((self.now, self.peers[party]))
            self.after(delay_s, lambda: self.start_again(party))

    def _restart_accomplices(self, peers: Iterable[str]) -> None:
        """What they sent is lost with them, so that nobody can do the sums again."""
        for peer in map(peer_of, self._keys[-1 - self.scenario.league : -1]):
            if peer in peers and self.peers[peer].alive and not self.peers[peer].exit_code:
                self.peers[peer].alive = False
                self.start_again(peer)

    def start_again(self, peer: str) -> None:
        self.start_peer(next(i for i, key in enumerate(self._keys) if peer_of(key) == peer))

    def _blackout(self) -> None:
        """Everybody at once that is not cut off: what is left is the journal, and the checkpoints."""
        for party in [p.peer for p in self.peers.values() if p.alive and not p.exit_code]:
            if not self._lines.is_behind(party, self.now):
                self._kill(party)
        if self.coordinator is not None:
            self._kill(COORDINATOR)

    def _cut_off(self) -> None:
        self.note(f"the coordinator is cut off from {len(self._lines.behind)} peers")
        self._held_at_cut = HeldAtCut.by(self._living, self.invariants)
        if self.scenario.stranger:
            self.after(1.0, lambda: self.start_peer(len(self._keys) - 1))

    def _obey(self, machine: RunMachine, order: Order) -> None:
        reply, effects = machine.obey(order, self.now)
        self.note(f"the host says {order}: {reply.text}")
        self._carry_out(machine, effects)

    def _ask_host(self) -> None:
        machine = self.coordinator
        order = self._host.order(machine, self._living, self.now) if machine is not None else None
        if machine is not None and order is not None:
            self.invariants.host_says = True
            self._obey(machine, order)
            self.invariants.host_says = False
        self.after(HOST_LOOKS_EVERY_S, self._ask_host)

    @property
    def _living(self) -> list[VirtualPeer]:
        return [peer for peer in self.peers.values() if peer.alive and not peer.exit_code]

    def _just_killed(self) -> list[VirtualPeer]:
        """Of these the coordinator may not know yet that they are dead."""
        return [peer for at, peer in self._killed if self.now - at < self.scenario.dead_after_s]

    def _misfortune(self) -> None:
        """Once a virtual second: links are cut and mended, trainers crash."""
        # In a fixed order: a set's order changes from process to process, and a seed must not.
        self._cut = {link for link in sorted(self._cut, key=sorted) if self.random.random() < 0.6}
        if self.calm:
            self._cut.clear()
            return
        parties = [COORDINATOR, *self.peers]
        if len(parties) > 1 and self.random.random() < self.scenario.cut_per_s * len(parties):
            self._cut.add(frozenset(self.random.sample(parties, 2)))
        let_some_leave(self, self.scenario.leave_per_s)
        for peer in list(self.peers.values()):
            if peer.alive and peer.trainer and self.random.random() < self.scenario.trainer_crash_per_s:
                self.note(f"the trainer of {peer.peer} crashes")
                peer.kill_trainer()
                self.after(0.5, lambda peer=peer: peer.alive and peer.start_trainer())  # type: ignore[misc]
        self.after(1.0, self._misfortune)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.log.append(f"{self.now:8.3f} {text}")

    def _can_be_resumed(self, ledger: Ledger, peers: Iterable[VirtualPeer]) -> bool:
        """Those who are here have checkpoints of the run, and it may go back to them."""
        known = {number: tuple(book.digests.items()) for number, book in enumerate(ledger.books)}
        disks = [peer.disk for peer in peers if peer.disk is not None]
        return self.manifest.checkpoint.go_back_after_s > 0 and is_kept(known, disks)

    def _report(self) -> SimulationReport:
        coordinator = self.coordinator
        if coordinator is None:
            raise Broken("P5 is broken: the coordinator never came back")
        ledger = coordinator.core.ledger
        finished = ledger.version >= self._changes.rounds(coordinator)
        self._changes.check_all_know(coordinator, self._waited_for if finished else ())
        outcome = "finished" if finished else "; ".join(c.reason for c in coordinator.drivers)
        here = [p for p in self.peers.values() if p.alive and p.exit_code != "refused"]
        # Who does nothing for what nobody founded, or for a run that is complete.
        host = self.scenario.host_after_s > 0.0 and ledger.learned and not finished
        can_go_on = host or all_is_held(ledger, here) or self._can_be_resumed(ledger, here)
        can_go_on = can_go_on and not self.work_league.ends_the_stream
        lost = self._held_at_cut.lost(self.invariants) if self.scenario.cut_off == self.scenario.peers else []
        if lost:
            raise Broken(f"P20 is broken: {lost} were held by living peers at the cut, and are lost")
        if not finished and can_go_on:
            raise Broken(
                f"P3 is broken: calm since {self.scenario.faults_until_s} s, yet not finished: {outcome}"
            )
        if not finished and self._ends_with_liars_alone():
            outcome = AMONG_LIARS  # it waits for what they made and gave to nobody
        left_behind = [
            p.peer
            for p in self._waited_for
            if p.alive and not p.exit_code and p.peer not in self.league.members
        ]
        if finished and left_behind:
            if can_go_on and not self._ends_with_liars_alone():
                raise Broken(f"P3 is broken: the run is over, and {left_behind} never got its last version")
            # One fragment was done and lost with everybody, the other came to its end after that.
            outcome = AMONG_LIARS if can_go_on else "complete, and its last version is lost"
        return SimulationReport(
            self.seed,
            ledger.version,
            self.now,
            self.events,
            self.invariants.checks,
            self.kills,
            self.invariants.steps_committed,
            outcome,
            self.log,
        )


def peer_of(key: Ed25519PrivateKey) -> str:
    return peer_id_of(key.public_key().public_bytes_raw())


def simulate(
    seed: int, scenario: Scenario | None = None, machine: type[PeerMachine] = PeerMachine
) -> SimulationReport:
    """One seeded run; raises Broken at the event that breaks a promise."""
    return World(seed, scenario or Scenario.of(seed), machine).run()


if __name__ == "__main__":
    seed, kind = int(sys.argv[1]), "_".join(["of", *sys.argv[2:]])
    report = simulate(seed, of_slow_line(seed) if kind == "of_slow_line" else getattr(Scenario, kind)(seed))
    print("\n".join(report.log))
    told = f"version {report.version} after {report.seconds:.1f} virtual s, {report.kills} kills"
    print(report.outcome, told)
