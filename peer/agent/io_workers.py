"""What the agent has from the moment on when a trainer has said what its model is: the state, and hands for it.

Made once by the agent, when the first trainer attaches; each hand is given what it needs then, and none of them sees
the peer machine but for the few events that it has for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from farflung.checkpoints.archive import Archive
from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.store import Store
from farflung.checkpoints.swarm import given_on
from farflung.collectives.round.effects import Roll, SendFrame
from farflung.compression.native import outer_step
from farflung.optim.outer import checked
from farflung.optim.recipes import outer_of, outer_steps_of
from farflung.peer.agent.mode_hand import ModeHand
from farflung.peer.agent.turns import HeldFrame, LineNow, Serving, What
from farflung.peer.identity import Identity
from farflung.peer.line.data_line import DataLine
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Attach, ToTrainer
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import Undone
from farflung.peer.machine.machine import MemberMachine
from farflung.peer.machine.modes import hand_of
from farflung.peer.settings import OwnConfig
from farflung.peer.state.archive import Archiving
from farflung.peer.state.checkpoint_thread import Checkpointing, StartJobs
from farflung.peer.state.keeping_state import Arriving, DiskPlace, KeepingResults, KeepingState, name_on_disk
from farflung.peer.state.keeping_state import ResultPlace as KeepingPlace
from farflung.peer.state.outer_state import Files, OuterState, payload_bytes_most, unnamed_file
from farflung.peer.state.unsent import UnsentWork
from farflung.peer.worker import Pool, Submit, nothing
from farflung.protocol.digests import HASH_BYTES
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, bare_answer, with_payload
from farflung.protocol.process.log_lines import LineWriter
from farflung.protocol.run_terms import Attached, Known, Terms

# ---- answers -----------------------------------------------------------------------------------------------
# The agent's hand for peers that catch up: holds their questions back while a round needs the line, makes
# answers.
#
# Owned by the agent. When something may pass is decided in turns.py, whether there is an answer in the peer
# machine: a question that was held back is put to it as if it had just arrived. Must not know rounds, nor
# what state is.

LOOK_AGAIN_S = 0.01  # while questions wait
ROOM_S = 0.3  # of the line's rate may wait in it, outside of rounds
_HELD_BACK = frozenset({Kind.WANT_STATE, Kind.WANT_MANIFEST})


class Answering:
    def __init__(
        self,
        line: DataLine,
        attached: Attached,
        arithmetic: Pool,
        carry_out: Callable[[list[do.Effect]], None],
    ) -> None:
        self._line, self._arithmetic, self._carry_out = line, arithmetic, carry_out
        self._serving = Serving(attached.known.manifest.fragments)
        self._tag, self._parts = attached.known.tag, attached.form.parts
        self._piece_bytes = attached.form.size_bytes

    def idle_s(self) -> float:
        return LOOK_AGAIN_S if self._serving.held else 60.0

    @property
    def held(self) -> int:
        """Questions that wait: they are in no counter yet (P8)."""
        return self._serving.held

    # ---- questions -----------------------------------------------------------------------------------------

    def takes(self, sender: str, frame: Frame, machine: MemberMachine, now: float) -> bool:
        """True: a question that has to wait its turn.  The machine hears of it later."""
        part = machine.part
        if part is None or frame.header.kind not in _HELD_BACK:
            return False
        replica = part.replica_of_chunk(frame.header.chunk)
        empty = replica is None or replica.held.version == NO_VERSION
        if replica is None or (empty and not replica.source.gives(frame.header.chunk)):
            return False  # the answer is that there is none
        if not self._serving.hold(sender, frame, now):
            part.counters.count(Verdict.DUPLICATE)
        return True

    def turn(self, machine: MemberMachine, now: float) -> None:
        """At every turn of the agent's loop."""
        part = machine.part
        if part is None:
            return
        in_round, joined = bool(part.flights), machine.joined
        crossings = joined is not None and joined.takes_line
        self._serving.on_turn(in_round, lambda: self._line_now(in_round, crossings), now)
        if not self._serving.held:
            return
        for _ in range(self._serving.let_go(now)):
            part.counters.count(Verdict.STALE)

        def can(held: HeldFrame) -> bool:
            replica = part.replica_of_chunk(held.frame.header.chunk)
            is_there = replica is not None and (replica.held.serves or replica.held.version == NO_VERSION)
            # Or it would be lost without a word to its asker, which waits for it.
            return is_there and self._serving.has_room(held.to, self._line.link.answers_waiting(held.to))

        line = self._line_now(in_round, crossings)
        while (held := self._serving.next(can, line, now)) is not None:
            self._carry_out(machine.on_frame(held.to, held.frame, now))
        for held in self._serving.to_put_off(now):
            self._line.link.send(held.to, bare_answer(Kind.LATER, held.frame.header))

    def _line_now(self, in_round: bool, crossings: bool) -> LineNow:
        """`piece_s` by what the line is known to carry: what it has carried at least would be taken for far too little
        where rounds are small."""
        waiting, known, roughly = self._line.link.waiting_bytes(), self._line.known_up, self._line.rates[0]
        room = round(ROOM_S * roughly) if roughly else self._piece_bytes
        piece_s = self._piece_bytes / known if known else 0.0
        return LineNow(in_round, waiting, room, piece_s, self._piece_bytes, crossings)

    # ---- answers -------------------------------------------------------------------------------------------

    def serve(self, effect: do.Serve, state: OuterState) -> None:
        """Read beside the agent's loop: what was asked first is read before anything that changes it."""

        header = Header(effect.kind, self._tag, version=effect.version, chunk=effect.chunk)

        def make() -> Frame:
            if effect.kind is Kind.MANIFEST:
                return with_payload(header, state.manifest_bytes(effect.fragment))
            payload = state.piece_bytes(effect.chunk)
            if effect.hash:
                return given_on(header, effect.hash, payload, self._parts)
            return with_payload(header, payload)

        what = (effect.kind, effect.chunk)
        if self._serving.start_answer(effect.to, what, self._line.link.answers_waiting(effect.to)):
            arithmetic, is_piece = self._arithmetic, effect.kind is Kind.STATE
            submit = partial(arithmetic.beside, effect.chunk) if is_piece else arithmetic.submit
            submit(make, partial(self._served, effect.to, what))

    def _served(self, to: str, what: What, frame: object) -> None:
        self._serving.end(to, what)
        assert isinstance(frame, Frame)
        self._carry_out([SendFrame(to, frame)])


# ---- io workers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerTools:
    """Of the agent, for whatever hand needs them."""

    identity: Identity
    own: OwnConfig
    folder: Path  # of this peer, beside its key
    store: Store | None  # for checkpoints, where the volunteer named a place
    line: DataLine
    arithmetic: Pool
    carry_out: Callable[[list[do.Effect]], None]
    tell: Callable[[ToTrainer], None]
    say: LineWriter


@dataclass(frozen=True)
class IoWorkers:
    attached: Attached
    shared: SharedState
    state: OuterState
    answering: Answering
    arriving: Arriving
    results: KeepingResults | None
    checkpoints: Checkpointing | None
    keeping: KeepingState | None
    beginning: StartJobs
    archive: Archiving | None
    unsent: UnsentWork
    of_mode: ModeHand

    @staticmethod
    def of(attached: Attached, shared: SharedState, machine: MemberMachine, tools: WorkerTools) -> IoWorkers:
        rules = attached.known.manifest.round
        outer = outer_of(attached.known.manifest, checked(outer_step()))
        files = Files(unnamed_file(tools.folder), unnamed_file(tools.folder))
        state = OuterState(
            shared.anchor,
            attached.model,
            rules,
            outer,
            shared.mark_torn,
            shared.moments,
            files,
            attached.held,
        )
        state.merge_by(attached.known.manifest.merge.policy)
        submit, tell, peer, own = tools.arithmetic.submit, tools.carry_out, tools.identity.peer_id, tools.own
        results = checkpoints = keeping = None
        if own.kept_results.on_disk:
            lies = DiskPlace(
                tools.folder, peer, own.kept_results.limit_bytes, largest_payload_bytes(attached)
            )
            results = KeepingResults(lies, attached, submit, machine, tell)
        if tools.store is not None:
            checkpoints = Checkpointing(tools.store, tools.identity, machine, submit, tell)
        if own.keep:
            place = KeepingPlace(tools.folder, peer, own.keep)
            keeping = KeepingState(place, attached, submit, machine, tell)
        archive = _archive_of(attached, tools) if own.archive else None
        return IoWorkers(
            attached,
            shared,
            state,
            Answering(tools.line, attached, tools.arithmetic, tell),
            Arriving(tools.folder, peer, attached, submit, tell, keeping),
            results,
            checkpoints,
            keeping,
            StartJobs(attached, machine, submit, tell),
            archive,
            UnsentWork(tools.folder, peer, attached, may_keep=bool(own.keep)),
            _mode_hand(attached, shared, tools),
        )

    def follow(self, terms: Terms, submit: Submit) -> None:
        """`submit`: to the arithmetic, behind the versions that are being made."""
        if self.archive is not None:
            self.archive.follow(terms)
        making = outer_steps_of(terms, checked(outer_step()))
        submit(lambda: self.state.follow(making, terms.newest.round.codec), nothing)

    def begin_to_close(self, finished: bool = False) -> None:
        """While the arithmetic still works; `finished`: the run is complete."""
        self.beginning.close()
        for hand in (self.checkpoints, self.results, self.archive):
            if hand is not None:
                hand.close(finished)
        if self.keeping is not None:
            self.keeping.close()

    def close(self) -> None:
        """Once everything that was asked of the arithmetic is done."""
        self.arriving.close()
        self.of_mode.close()

    def undo(self, undo: do.Undo, era: int, arithmetic: Pool, then: Callable[[Undone], None]) -> None:
        """Each chunk by itself, as a checkpoint that is being written may still need what is there now."""
        number, state, whole = undo.fragment, self.state, list[bool]()

        def job(chunk: int) -> None:
            whole.append(state.undo(number, chunk, undo.version))

        # Once, and before: jobs of chunks run side by side, also those that still roll.
        arithmetic.submit(lambda: state.forget_unsent(number), nothing)
        for chunk in self.attached.fragments[number].chunks:
            arithmetic.beside(chunk, partial(self.change, chunk, partial(job, chunk)))
        arithmetic.submit(lambda: Undone(number, undo.version, era, all(whole)), then)

    def change(self, chunk: int, job: Callable[[], object]) -> None:
        """In the arithmetic, of several chunks at once: do what changes this one, once it was copied where a checkpoint
        needs it."""
        if (checkpoints := self.checkpoints) is not None:
            then, job = job, lambda: checkpoints.change(chunk, then)
        if self.keeping is not None:
            self.keeping.change(chunk, job)
        else:
            job()

    def rolled(self, effect: Roll, machine: MemberMachine) -> None:
        """A result is to be applied, and others may ask for it, or this peer in another life."""
        if self.results is not None:
            logged = machine.joined.log.bytes if machine.joined is not None else 0
            self.results.rolled(effect, machine.reports.era, logged)
        if self.keeping is not None:
            self.keeping.rolled(effect, machine.reports.era)

    def serve_logged(self, effect: do.Serve, machine: MemberMachine, hear: Callable[[Frame], None]) -> None:
        """A result that lies on the disk; `hear`: if this peer itself asked for what a former life of it kept."""
        if self.keeping is not None and self.keeping.serves(effect):
            self.keeping.serve(effect, machine.reports.era, hear)
        elif self.results is not None:
            self.results.serve(effect, machine.reports.era)


def largest_payload_bytes(attached: Attached) -> int:
    """Of all bulk frames of this run, whichever part of it this peer holds.  UserError for what can't be sent."""
    manifest, model = attached.known.manifest, attached.model
    hashes_bytes = HASH_BYTES * max(fragment.count for fragment in attached.fragments)
    results_bytes = payload_bytes_most(manifest.round, model.chunk_elements)
    largest = max(attached.form.size_bytes, hashes_bytes, results_bytes)
    module = hand_of("batches") if model.stages else None
    return max(largest, module.largest_bytes(attached) if module is not None else 0)


def stages_in_order(said: Attach, known: Known, tools: WorkerTools) -> tuple[int, ...]:
    """Those that the trainer could hold: the one first of which this peer kept something last."""
    peer = tools.identity.peer_id

    def kept_at(stage: int) -> float:
        name = name_on_disk(Attached(known, said.model, (stage,)), peer)
        return max((path.stat().st_mtime for path in tools.folder.glob(f"{name}.*")), default=0.0)

    return tuple(sorted(said.stages, key=lambda stage: (-kept_at(stage), stage)))


def _mode_hand(attached: Attached, shared: SharedState, tools: WorkerTools) -> ModeHand:
    module = hand_of("batches") if attached.stages else None
    if module is None:
        return ModeHand()
    made: ModeHand = module.made(shared.place / "belt", tools.folder, tools.line.link.send, tools.tell)
    return made


def _archive_of(attached: Attached, tools: WorkerTools) -> Archiving | None:
    """A replay starts from a checkpoint: an archive without any would be of no use."""
    if not attached.known.manifest.checkpoint.every_rounds:
        tools.say(
            "nothing is archived: this run saves no checkpoints ([checkpoint] every_rounds in run.toml)"
        )
        return None
    return Archiving(Archive(tools.own.checkpoints), attached, tools.arithmetic.submit, tools.say)
