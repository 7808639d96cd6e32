"""A peer of the simulator: the real peer machine and the real outer state, a virtual trainer, no process.

Driven by the simulator.  It carries out the machine's effects as the agent does, but over the simulated
network and in virtual time, and may be killed between any two of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from farflung.checkpoints.swarm import given_on
from farflung.collectives.round.effects import (
    Install,
    Measure,
    Merge,
    Roll,
    Seal,
    SendFrame,
    Weigh,
)
from farflung.compression.codec import check_payload, payload_bytes
from farflung.optim.recipes import outer_of, outer_steps_of
from farflung.optim.schedule import rules_of
from farflung.peer.local.words import Attach, FromTrainer, Shared, ToTrainer, WorkDone
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import PiecesRecalled, ResultsFound, Undone
from farflung.peer.machine.handshake import Me, PeerConfig
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.state.keeping_state import logged_answer
from farflung.peer.state.outer_state import OuterState
from farflung.peer.state.unsent import Unsent
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Frame, Header, Kind, Spoiled, with_payload
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Show
from farflung.protocol.mode_words import BatchBeat
from farflung.protocol.model_schema import Fragment, ModelSchema
from farflung.protocol.round_words import section
from farflung.protocol.run_terms import Attached
from farflung.simulator.disk import OwnDisk, VirtualCheckpoints, VirtualDisk, VirtualKeeping
from farflung.simulator.trainer import KeptWork, Trainer, TrainerSurroundings


class CrossingsOfStage(Protocol):
    def carry_out(self, effect: do.ModeEffect) -> None: ...

    def clear(self) -> None: ...


def crossings_of(peer: VirtualPeer) -> CrossingsOfStage:
    """They are read only where a model is cut into stages: they lean on what can be taken out (peer/batches)."""
    found = importlib.import_module("farflung.simulator.batches.stage_trainer").VirtualCrossings
    return cast(CrossingsOfStage, found(peer))


@dataclass
class VirtualPeer:
    me: Me
    manifest: Manifest
    model: ModelSchema
    world: TrainerSurroundings
    address: str = ""  # where others dial it; empty: nowhere
    disk: VirtualDisk | None = None
    own: OwnDisk = field(default_factory=OwnDisk)  # it survives every kill
    offers: tuple[int, ...] = ()  # the stages of a model that is cut into some, which it could hold
    pace: float = 1.0  # so many times as long a microbatch takes it as others
    helps: bool = False  # it has no trainer
    alive: bool = True
    machine: PeerMachine = field(init=False)
    trainer: Trainer | None = field(default=None, init=False)
    exit_code: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.fragments = self.model.fragments(self.manifest.fragments)
        self.outer = outer_of(self.manifest)
        self.held: tuple[Fragment, ...] = ()
        self.anchor = torch.zeros(0)
        if not self.offers:
            self._hold(self.fragments)
        config = PeerConfig(
            self.me,
            self.manifest.run.name,
            check_payload,
            payload_bytes,
            results_on_disk=self.own.results_on_disk,
            saves=self.disk is not None,
            recalls=True,
            keeps_in="kept" if self.own.kept is not None else "",
            pinned=self.world.pinned,
            helps=self.helps,
            kept_commits=self.own.commits,
        )
        self.machine = self.world.machine(config, lambda: 0.5)
        self.member = self.machine.member
        self.asked: dict[int, Show] = {}  # what the coordinator wanted to see, for those that lie about it
        self._busy_until = 0.0
        self._arrivals = [0.0, 0.0]  # the channel between agent and trainer keeps its order, both ways
        self._kept_work: dict[tuple[int, int], KeptWork] = {}  # by (slot, fragment)
        self._kept_paths: dict[int, dict[int, Any]] = {}  # by slot: of each microbatch in it
        self.belt: dict[int, bytes] = {}
        self._crossings = crossings_of(self) if self.model.stages else None
        self._checkpoints = VirtualCheckpoints(self, self.disk) if self.disk is not None else None
        kept, fails = self.own.kept, self.disk.fails if self.disk is not None else lambda: False
        self._keeping = VirtualKeeping(self, kept, fails) if kept is not None else None
        self.start_trainer()

    def _hold(self, held: tuple[Fragment, ...]) -> None:
        """Memory for these and for no others."""
        self.held, elements = held, sum(each.count for each in held) * self.model.chunk_elements
        form = self.manifest.state_form(self.model.chunk_elements)
        self.anchor, *moments = (torch.zeros(elements) for _ in form.names)
        self.moments = tuple(moments)
        self.slots = tuple(torch.zeros(elements) for _ in range(3))
        self.state = OuterState(
            self.anchor, self.model, self.manifest.round, self.outer, moments=self.moments, held=held
        )
        self.state.merge_by(self.manifest.merge.policy)

    @property
    def peer(self) -> str:
        return self.me.peer

    @property
    def seat(self) -> int:
        """That it works in; 0: none."""
        modes = self.member.joined.modes.values() if self.member.joined is not None else ()
        told = section(BatchBeat, [each for mode in modes for each in mode.sections])
        return told.seat if told is not None else 0

    @property
    def tag(self) -> bytes:
        return self.world.run_tag

    # ---- the trainer process -----------------------------------------------------------------------------

    def start_trainer(self) -> None:
        if self.helps:
            return
        self.trainer = self.world.trainer(self, self.world, rules_of(self.manifest))
        self.carry_out(self.machine.on_trainer_waiting())

    def kill_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.alive = False
            self.trainer = None
            self.carry_out(self.machine.on_trainer_gone(self.world.now()))

    def from_trainer(self, message: FromTrainer) -> None:
        self._over_channel(0, lambda: self._on_local(message))

    def _on_local(self, message: FromTrainer) -> None:
        if not self.alive:
            return
        if isinstance(message, Attach):
            self._on_attach(message)
        else:
            place = self.machine.place_of(message) if isinstance(message, WorkDone) else None
            made = self.belt.get(3 * place + 2, b"") if place is not None else b""
            self.carry_out(self.machine.on_local(message, self.world.now(), made))

    def _on_attach(self, word: Attach) -> None:
        stages = tuple(sorted(word.stages, key=lambda stage: stage != self.own.stage))
        self._attach(word.model, stages)

    def _attach(self, model: ModelSchema, stages: tuple[int, ...] = ()) -> None:
        first = self.member.joined is None
        effects = self.machine.on_attach(model, self.address, self.world.now(), stages)
        if first and self.member.joined is not None:
            effects += self.member.on_disk(ResultsFound(self.own.found(self.held)), self.world.now())
        self.carry_out(effects)

    def to_trainer(self, message: ToTrainer) -> None:
        trainer = self.trainer
        if trainer is not None:
            self._over_channel(1, lambda: trainer.on_message(message))

    def _over_channel(self, direction: int, arrive: Callable[[], None]) -> None:
        now = self.world.now()
        self._arrivals[direction] = max(self._arrivals[direction], now + self.world.delay("local"))
        self.world.after(self._arrivals[direction] - now, arrive)

    def keep_work(self, slot: int, fragment: int, work: KeptWork) -> None:
        """Which samples stand behind a slot: for the invariants, and for a trainer that starts again from it."""
        self._kept_work[slot, fragment] = work

    def kept_work(self, slot: int, fragment: int) -> KeptWork:
        return self._kept_work[slot, fragment]

    def keep_paths(self, slot: int, paths: dict[int, Any]) -> None:
        """Through which states the microbatches behind a slot have passed: for the invariants."""
        self._kept_paths[slot] = paths

    def versions(self) -> dict[int, int]:
        """Of what it holds, by fragment."""
        joined = self.member.joined
        replicas = joined.replicas if joined is not None else ()
        return {replica.fragment.number: replica.held.version for replica in replicas}

    def leave_unsent(self) -> None:
        """It ends in order: what it has not sent yet goes to its disk, as peer/state/unsent.py has it."""
        self.own.unsent = Unsent.of(self.state, self.member.reports.era, self.versions())

    def paths_of(self, slot: int) -> dict[int, Any]:
        return self._kept_paths[slot]

    # ---- effects -----------------------------------------------------------------------------------------

    def carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            if not self.alive or not self.world.survives(self.peer):
                return
            self._do(effect)
        self.world.observe("moved", (self,))

    def _do(self, effect: do.Effect) -> None:
        match effect:
            case do.ToDoor():
                self.world.to_door(self.peer, effect)
            case do.ToCoordinator():
                self.world.observe("to_coordinator", (self, effect.message))
                self.world.to_coordinator(self.peer, effect)
            case SendFrame(to=to, frame=frame):
                if frame.header.kind.name == "WANT_HELD":
                    self.world.observe("asked_held", (self, to))
                self.world.to_peer(self.peer, effect)
            case do.TellTrainer():
                self.to_trainer(effect.message)
            case do.Exit():
                self.exit_code = effect.code
                self.world.observe("exit", (self, effect))
            case (
                Install()
                | Roll()
                | Seal()
                | Merge()
                | Weigh()
                | Measure()
                | do.Encode()
                | do.Resolve()
                | do.Serve()
                | do.KeepBefore()
                | do.Undo()
                | do.ProveHolding()
                | do.FetchShown()
                | do.Recall()
            ):
                era = self.member.reports.era  # when it was asked for: the run may go back meanwhile
                self.calculate(lambda: self._compute(effect, era))
            case do.Follow(terms=terms):
                making = outer_steps_of(terms)
                self.calculate(lambda: self.state.follow(making, terms.newest.round.codec))
            case do.ModeEffect() if self._crossings is not None:
                self._crossings.carry_out(effect)
            case do.Hold(attached=attached):
                self._hold_stage(attached)
            case do.Vacate():
                self.calculate(self._vacated)
            case do.Assist(model=model):
                self._attach(model)
            case do.SaveFragment() | do.DropSave() | do.Restore() | do.ListShelf():
                self._checkpoint(effect)
            case do.KeepBase() | do.KeepAhead():
                if (keeping := self._keeping) is not None:
                    self.calculate(lambda: keeping.keep(effect))
            case do.Remember(commits=commits):
                self.own.commits = commits or self.own.commits
            case do.LookAt() | do.LookElsewhere():
                pass  # its coordinator stays where it is
            case do.Contacts() | do.EnterMembers() | do.LeaveMembers() | do.Note():
                pass  # links and logs: the simulated network needs neither

    def _hold_stage(self, attached: Attached) -> None:
        if not self.held:
            self._hold(attached.held)
            self.carry_out(self.member.on_disk(ResultsFound(self.own.found(self.held)), self.world.now()))
        [held] = self.held
        self.own.stage = held.number
        self.to_trainer(
            Shared(
                anchor="",
                moments=(),
                slots=("", "", ""),
                progress="",
                elements=held.count * self.model.chunk_elements,
                stage=held.number,
                belt="simulated",
            )
        )

    def _vacated(self) -> None:
        """The memory of the stage that was held is gone; what lies on the disk stays."""
        self.held = ()
        self._kept_work.clear()
        self._kept_paths.clear()
        if self._crossings is not None:
            self._crossings.clear()
        self.carry_out(self.machine.on_vacated(self.world.now()))

    def calculate(self, job: Callable[[], object]) -> None:
        """One arithmetic worker: everything in order, each thing taking a while."""
        self._busy_until = max(self._busy_until, self.world.now()) + self.world.delay("compute")
        self.world.after(self._busy_until - self.world.now(), lambda: self.alive and job())

    def _checkpoint(self, effect: do.SaveFragment | do.DropSave | do.Restore | do.ListShelf) -> None:
        checkpoints = self._checkpoints
        match effect:
            case _ if checkpoints is None:
                raise RuntimeError("a checkpoint without a place for it")
            case do.SaveFragment():
                self.calculate(lambda: checkpoints.save(effect))
            case do.Restore():
                self.world.after(self.world.delay("store"), lambda: checkpoints.restore(effect))
            case do.ListShelf():
                self.world.after(self.world.delay("store"), checkpoints.list_shelf)
            case do.DropSave():
                pass  # a part of another version begins another checkpoint

    def _compute(self, effect: do.Effect, era: int) -> None:
        now = self.world.now()
        match effect:
            case Install():
                self.state.install(effect)
                self._keep(effect, era)
            case Roll():
                self.world.observe("roll", (self, effect, era))
                self.state.roll(effect)
                self.own.keep_result(era, effect, self.manifest.round.keep_results)
                if self._keeping is not None:
                    self._keeping.rolled(effect, era)
                if effect.chunk in self.own.pieces:
                    self._keep(effect, era)
            case do.Recall():
                self._recall(effect, now)
            case Seal():
                for chunk in self.fragments[effect.fragment].chunks:
                    self.own.pieces.pop(chunk, None)
                digest = self.state.seal(effect.fragment)
                self.world.observe("sealed", (self, effect, digest, era))
                if self._keeping is not None:
                    self._keeping.sealed(effect, digest, era)
                self.carry_out(self.member.on_sealed(effect.fragment, effect.version, digest, now))
            case Merge() | Weigh() | Measure():
                result = self.state.calculate(effect)
                if isinstance(effect, Merge) and effect.decision_no:
                    assert isinstance(result, bytes)
                    result = self.world.forge_sum(self.peer, effect, result)
                self.carry_out(self.member.on_calculated(effect, result, now))
            case do.Encode():
                if self.own.unsent is not None:
                    version = self.versions()[effect.fragment]
                    self.own.unsent.take_up(self.state, effect.fragment, era, version)
                for made, problem in self.state.encode(self.slots[effect.slot], effect):
                    payloads = self.world.forge(self.peer, made)
                    self.world.observe("encoded", (self, effect, payloads))
                    self.carry_out(self.member.on_encoded(effect.round_no, payloads, problem, now))
            case do.Resolve(slot=slot, used=used, fragment=fragment):
                self.state.resolve(self.slots[slot], used, fragment)
            case do.KeepBefore(fragment=fragment, version=version):
                self.state.keep_before(fragment, version)
            case do.Undo(fragment=fragment, version=version):
                self.state.forget_unsent(fragment)
                chunks = self.fragments[fragment].chunks
                whole = all([self.state.undo(fragment, chunk, version) for chunk in chunks])
                self.carry_out(self.member.on_disk(Undone(fragment, version, era, whole), now))
            case do.ProveHolding():
                value = self.state.prove_holding(effect.fragment, effect.nonce)
                self.carry_out(self.member.on_holding_proven(effect, value, now))
            case do.FetchShown(show=show, logged=logged):
                self.asked[show.question] = show
                raw = bytes(logged) if logged is not None else self.state.shown(show)
                self.carry_out(self.member.on_shown(show, raw, now))
            case do.Serve(kind=Kind.LOGGED):
                self._answer_logged(effect, era)
            case do.Serve(hash=b""):
                self._answer(effect, era)
            case do.Serve():
                self._give_on(effect, era)

    def _keep(self, effect: Install | Roll, era: int) -> None:
        digest = self.member.digest_of(effect.chunk, effect.version)
        self.own.pieces[effect.chunk] = (era, effect.version, digest, self.state.chunk_bytes(effect.chunk))

    def _recall(self, effect: do.Recall, now: float) -> None:
        held = self._keeping.recall(effect) if self._keeping is not None else {}
        here = {chunk for fragment in self.held for chunk in fragment.chunks}
        for chunk, (era, version, digest, raw) in self.own.pieces.items():
            if era == effect.era and chunk in here - held.keys():
                self.state.install(Install(chunk, version, raw))
                held[chunk] = (version, digest)
        self.world.observe("recalled", (self, held))
        self.carry_out(self.member.on_disk(PiecesRecalled(held), now))

    def _answer(self, effect: do.Serve, era: int) -> None:
        self.world.observe("serve", (self, effect.fragment, effect.version, era))
        of_state = effect.kind is Kind.STATE
        manifest, piece = self.state.manifest_bytes, self.state.piece_bytes
        payload = piece(effect.chunk) if of_state else manifest(effect.fragment)
        header = Header(effect.kind, self.tag, version=effect.version, chunk=effect.chunk)
        self.world.to_peer(self.peer, SendFrame(effect.to, with_payload(header, payload)))

    def _give_on(self, piece: do.Serve, era: int) -> None:
        header = Header(Kind.STATE, self.tag, version=piece.version, chunk=piece.chunk)
        frame = given_on(header, piece.hash, self.state.piece_bytes(piece.chunk), 1 + len(self.moments))
        if frame.header.kind == Kind.STATE:
            self.world.observe("gave", (self, piece, hash_bytes(self.state.chunk_bytes(piece.chunk)), era))
        self.world.to_peer(self.peer, SendFrame(piece.to, frame))

    def _answer_logged(self, effect: do.Serve, era: int) -> None:
        payload = self.own.results.get((era, effect.version, effect.chunk))
        if self._keeping is not None and self.own.kept is not None and self._keeping.offers(effect):
            found = self.own.kept.result(era, effect.fragment, effect.version, effect.chunk)
            payload = found[0] if found is not None else None
        frame = logged_answer(effect, payload, self.tag)
        if effect.to == self.peer:
            self.on_frame(self.peer, frame)
        else:
            self.world.to_peer(self.peer, SendFrame(effect.to, frame))

    def on_spoiled(self, sender: str, spoiled: Spoiled) -> None:
        self.carry_out(self.member.on_spoiled(sender, spoiled, self.world.now()))

    def on_frame(self, sender: str, frame: Frame) -> None:
        self.carry_out(self.member.on_frame(sender, frame, self.world.now()))
