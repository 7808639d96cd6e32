"""The agent: one process that owns a peer's network and outer state.  A thin shell around the peer machine.

Started by the public API as a child of the training script (main.py), or by
`farflung join`, which then also has it start the trainer.  It polls sockets, runs arithmetic beside the loop,
carries out effects in order, and decides nothing about rounds.  No CUDA here.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from functools import partial

import zmq
from msgspec.structs import replace

from farflung.checkpoints.kept_state import Arrived
from farflung.collectives.round.effects import Install, Measure, Merge, Roll, Seal, SendFrame, Weigh
from farflung.peer.agent.fetch_lines import Fetching
from farflung.peer.agent.io_workers import IoWorkers, WorkerTools, largest_payload_bytes, stages_in_order
from farflung.peer.agent.journal_writer import (
    RoundEvents,
    TrainerProgress,
    beginning_of,
    counts_of,
    open_journal,
    use_of,
)
from farflung.peer.agent.looking_up import LookingUp
from farflung.peer.agent.metrics import PeerMetrics
from farflung.peer.agent.mode_hand import ModeHand
from farflung.peer.agent.options import AgentOptions, config_of, memory_of_helper, store_of
from farflung.peer.agent.supervisor import Supervisor
from farflung.peer.agent.waits import WaitLines
from farflung.peer.first_contact import RememberedPlaces
from farflung.peer.identity import Identity
from farflung.peer.line.control import BeatClock, ControlLink
from farflung.peer.line.data_line import DataLine, Expected
from farflung.peer.line.reachability import Offering, Reaching
from farflung.peer.local.channel import ChannelGreeting, LocalServer
from farflung.peer.local.folder import remove_folder, write_about
from farflung.peer.local.memory import SharedState, let_go_of_text, unmap_pages
from farflung.peer.local.words import (
    Attach,
    Bye,
    FromTrainer,
    Frozen,
    LoadState,
    PeerHere,
    Provide,
    Provided,
    Stop,
    WorkDone,
    to_bytes,
)
from farflung.peer.machine import effects as do
from farflung.peer.machine.handshake import me_of
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.machine.modes import kinds_of
from farflung.peer.machine.trainer_proxy import Pulse
from farflung.peer.settings import default_path
from farflung.peer.state.checkpoint_thread import RunFacts
from farflung.peer.state.delta_encoder import Encoded
from farflung.peer.state.keeping_state import name_on_disk
from farflung.peer.state.outer_state import OuterState
from farflung.peer.worker import Inbox, Job, Pool, nothing, shares, usual_threads
from farflung.protocol.errors import Counters, FarflungError, LeaveCause, Verdict
from farflung.protocol.frames import Frame, FrameKind, Kind, Payload
from farflung.protocol.limits import WAYS_MOST
from farflung.protocol.messages import (
    DOOR_OUT,
    Beat,
    Committed,
    Decided,
    Hello,
    Knock,
    Leave,
    OpenRound,
    ProgressReport,
    Sent,
    Tick,
)
from farflung.protocol.mode_words import ReachBeat
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.process import failpoints
from farflung.protocol.process.failpoints import hit, is_armed, passing
from farflung.protocol.process.log_lines import LineWriter
from farflung.protocol.process.sockets import curve_raw
from farflung.protocol.run_terms import Attached

# ---- failpoint names ---------------------------------------------------------------------------------------
# The agent's failpoints: which effect, and which word that arrives, passes which point.
#
# Called by the agent before each effect and after each word. Off, each call returns at once
# (protocol/process/failpoints.py).

_EFFECTS: dict[type, str] = {
    do.EnterMembers: "joining.after_welcome",
    Install: "joining.mid",
    do.Encode: "scatter.before_encode",
    Merge: "gather.before_merge",
    do.Resolve: "apply.before_resolve",
    Roll: "apply.mid",
    Seal: "apply.before_seal",
    do.Restore: "restore.before",
    do.SaveFragment: "checkpoint.before_copy",
}
_FRAMES: dict[FrameKind, str] = {
    Kind.CONTRIBUTION: "scatter.mid",
    Kind.RESULT: "gather.mid",
    Kind.MANIFEST: "serve.manifest",
    Kind.STATE: "serve.mid",
    Kind.LOGGED: "serve.logged",
}
_SAID: dict[type, str] = {
    Knock: "joining.before_knock",
    Hello: "joining.before_hello",
    Sent: "scatter.before_sent",
    ProgressReport: "gather.before_progress",
    Leave: "leave.before_word",
    LoadState: "load.before_word",
    Provide: "found.before_word",
}
_HEARD: dict[type, str] = {
    OpenRound: "open.arrived",
    Decided: "decide.arrived",
    Committed: "commit.arrived",
    Frozen: "ready.arrived",
    WorkDone: "counting.made",
}


def before_effect(effect: do.Effect) -> None:
    if not is_armed():
        return
    match effect:
        case SendFrame():
            pass  # see on_the_way
        case do.ToCoordinator(message=Beat() as beat):
            _pass("ready.before_beat" if any(each.ready for each in beat.fragments) else None)
        case do.ToCoordinator(message=said) | do.ToDoor(message=said) | do.TellTrainer(message=said):
            _pass(_SAID.get(type(said)))
        case _:
            _pass(_EFFECTS.get(type(effect)))


def on_the_way(frame: Frame) -> Frame:
    """A bulk frame leaves, perhaps with a byte that is not as it was."""
    point = _FRAMES.get(frame.header.kind) if is_armed() else None
    return Frame(frame.header, passing(point, bytes(frame.payload))) if point is not None else frame


def on_word(message: object) -> None:
    """It has arrived, and nothing was done about it yet."""
    foreseen = isinstance(message, Decided) and message.decision.foreseen
    if is_armed() and not foreseen:
        _pass(_HEARD.get(type(message)))


def _pass(point: str | None) -> None:
    if point is not None:
        hit(point)


# ---- agent -------------------------------------------------------------------------------------------------

TICK_S = 0.05
ASKED = "stopped by its user"


class Agent:
    def __init__(self, options: AgentOptions, supervisor: Supervisor, say: LineWriter) -> None:
        self._options = options
        self._supervisor = supervisor
        self._say = say
        self._identity = Identity.load_or_create(options.own.identity)
        self._inbox = Inbox()
        self._arithmetic = Pool("arithmetic", self._inbox.submit, usual_threads())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = zmq.curve_keypair()
        self._line = DataLine(keys, options.own, coordinator=options.url.key)
        self._link = self._line.link
        folder = (options.own.identity or default_path()).parent / "state"
        store = store_of(options.own)
        self._local = LocalServer(options.folder)
        self._tools = WorkerTools(
            self._identity,
            options.own,
            folder,
            store,
            self._line,
            self._arithmetic,
            self._carry_out,
            self._local.send,
            say,
        )
        self._hands: IoWorkers | None = None
        self._versions: dict[int, int] = {}  # of each fragment that was sealed, for who reads the memory
        self._control = ControlLink(self._context, options.url, keys, Counters())
        self._reaching = Reaching(self._context, options.url.key, keys, self._line)
        self._offering = Offering(options.relay, self._identity.peer_id, say)
        self._remembered = RememberedPlaces(folder, options.url, say)
        self._looking_up = LookingUp(options.own.book, options.url, say)
        me = me_of(self._identity, curve_raw(keys[0]), os.urandom(16), options.url.token or "")
        config = config_of(options, me, store is not None, self._remembered, folder)
        self._machine = machine = PeerMachine(config, random.random)
        self._control.look_at(machine.seeking.places)
        self._address = ""  # where other peers dial this one, once it listens
        self._opened = False  # the line to the others
        self._crossing_bytes = 0  # as the trainer says, if it holds a stage
        self._exit: do.Exit | None = None
        self._asked_to_leave = 0
        self._beats = BeatClock()
        self._fetching, self._waits = Fetching(say), WaitLines(say)
        self._pulse = Pulse(options.own.stuck_after)
        self._events = RoundEvents(
            open_journal(options.journal, options.own.identity, say),
            beginning_of(me, options.url.run, options.own.upload_limits),
            lambda: use_of(self._link.counts, self._arithmetic, self._control, self._mode_hand),
            lambda: counts_of(self._link.counts, machine.member, self._held_back),
        )
        self._metrics = PeerMetrics(options.own.metrics, options.url.run)
        failpoints.arm(os.environ, self._events.on_failpoint)

    # ---- the loop --------------------------------------------------------------------------------------------

    def run(self) -> do.Exit:
        """Until the run is over, the user leaves, or the trainer is gone for good."""
        me = self._identity
        self._say(f"this peer is {me.name} ({me.peer_id})", peer=me.peer_id, name=me.name)
        next_tick = 0.0
        try:
            while self._exit is None:
                self._wait(next_tick)
                self._take_what_came()
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._on_tick(now)
        except FarflungError as error:
            self._local.send(Stop(code="failed", reason=str(error)))
            raise
        finally:
            self._close()
        return self._exit

    def ask_to_leave(self) -> None:
        """From a signal handler: leave in good order, at the next turn of the loop; at once when asked again."""
        self._asked_to_leave += 1

    def _wait(self, until: float) -> None:
        poller = zmq.Poller()
        for quiet in (self._local.socket, self._inbox.wake, *self._control.sockets()):
            poller.register(quiet, zmq.POLLIN)
        for bulk, events in self._link.sockets():
            poller.register(bulk, events)
        wait_s = min(until - time.monotonic(), self._link.idle_s())
        if self._hands is not None:
            wait_s = min(wait_s, self._hands.answering.idle_s())
        poller.poll(max(0, math.ceil(1000 * wait_s)))

    def _take_what_came(self) -> None:
        machine = self._machine
        for message in self._control.receive():
            took = self._beats.on_heard(message, time.monotonic())
            if took is not None:
                self._line.on_answer(time.monotonic(), took)
                self._reaching.on_answer(took)
                self._events.on_answer(took.both_ways_s)
                self._metrics.on_answer(took.both_ways_s)
            self._events.on_control(message)
            if isinstance(message, Committed) and self._hands is not None and self._hands.archive is not None:
                self._hands.archive.on_commit(message.commit)
            on_word(message)
            if isinstance(message, Tick):
                self._reaching.on_tick(message, time.monotonic())
                self._offering.on_tick(message, machine.member.reports.run_id, time.monotonic())
            handle = machine.on_door if type(message) in DOOR_OUT.values() else machine.on_control
            self._carry_out(handle(message, time.monotonic()))  # type: ignore[arg-type]
        while (local := self._local.recv_nowait()) is not None:
            self._on_local(local[1])
        for sender, came in self._link.receive():
            now = time.monotonic()
            if isinstance(came, Frame):
                if came.header.kind == Kind.STATE:
                    self._fetching.came(sender, came.header.chunk, len(came.payload))
                hands = self._hands
                if hands is None or not hands.answering.takes(sender, came, machine.member, now):
                    self._carry_out(machine.member.on_frame(sender, came, now))
            else:
                self._carry_out(machine.member.on_spoiled(sender, came, now))
        self._inbox.collect()
        if machine.member.part is not None:
            self._events.on_progress(machine.member.part.flights)
        self._link.flush()
        if self._hands is not None:
            self._hands.answering.turn(machine.member, time.monotonic())

    @property
    def _mode_hand(self) -> ModeHand:
        return self._hands.of_mode if self._hands is not None else ModeHand()

    @property
    def _held_back(self) -> int:
        """Questions that wait for their turn."""
        return self._hands.answering.held if self._hands is not None else 0

    def _on_tick(self, now: float) -> None:
        machine, member = self._machine, self._machine.member
        vitals = member.reports.vitals
        self._control.on_tick()
        for record in self._looking_up.turn(machine.doorway.inside, now):
            self._carry_out(machine.seeking.on_found(record, now))
        problem = self._supervisor.watch(now)
        for text in self._supervisor.take_lines():
            self._say(text)
        if self._supervisor.just_died:
            self._events.on_trainer("gone")
            self._carry_out(machine.on_trainer_gone(now))
        if problem is not None and not member.leaving.asked:
            self._carry_out(member.take_leave(problem, now, LeaveCause.TRAINER))
        if self._asked_to_leave:
            go = member.take_leave(ASKED, now) if self._asked_to_leave == 1 else member.leave(ASKED)
            self._carry_out(go)
        if self._hands is not None:
            vitals.step, vitals.tokens, vitals.loss = self._hands.shared.read_progress()
            self._look_at_trainer(now, vitals.step)
        part = member.part
        if (
            self._hands is not None
            and part is not None
            and all(each.held.whole for each in part.replicas.values())
        ):
            self._hands.shared.write_version(min(each.held.version for each in part.replicas.values()))
        expected = (
            Expected(part.others_in_round, part.owing_in_round, part.expects_bytes) if part else Expected()
        )
        self._line.on_tick(now, expected)
        member.on_lines(self._link.unreached(), self._link.arriving(), now)
        self._events.on_tick(now, vitals.saved, self._trained)
        frames = self._link.counts
        # Of a frame that takes half a minute, too: a newcomer that fetches nothing loses its place.
        vitals.rx_bytes = max(frames.arrived_bytes, self._link.moved().received_bytes)
        vitals.tx_bytes = frames.sent_bytes
        vitals.up_bytes_per_s, vitals.down_bytes_per_s, vitals.rough = self._line.rates
        punched, unmet = self._reaching.turn(now), tuple(sorted(self._link.unmet()))
        vitals.reach = ReachBeat(punched[:WAYS_MOST], self._offering.turn(now), unmet[:WAYS_MOST])
        self._metrics.on_tick(now, machine, self._link)
        self._carry_out(machine.on_timer(now))
        self._waits.turn(machine, self._fetching.share, now)

    def _trained(self) -> TrainerProgress | None:
        """What its trainer has come to; None before there is one."""
        if self._hands is None:
            return None
        step, tokens, loss = self._hands.shared.read_progress()
        return TrainerProgress(step, tokens, loss, self._hands.shared.read_gradient_norm())

    def _look_at_trainer(self, now: float, step: int) -> None:
        member, vitals = self._machine.member, self._machine.member.reports.vitals
        before, vitals.stuck = vitals.stuck, self._pulse.check_stuck(now, step, member.training.stepping)
        if vitals.stuck and not before:
            self._events.on_trainer("stuck")
            self._supervisor.on_stuck(self._pulse.patience_s)

    # ---- the trainer -----------------------------------------------------------------------------------------

    def _on_local(self, message: FromTrainer | ChannelGreeting) -> None:
        now = time.monotonic()
        if isinstance(message, ChannelGreeting):
            self._carry_out(self._machine.on_trainer_waiting())
            return
        if isinstance(message, Attach):
            self._on_attach(message, now)
            return
        if isinstance(message, Provided) and self._hands is not None:
            self._hands.state.restart_moments()
        elif isinstance(message, Bye) and self._exit is not None:
            return
        self._events.on_local(message, self._machine.member)
        on_word(message)
        made: Payload = b""
        if isinstance(message, WorkDone):
            # Before anything else: the next work goes into the same place.
            made = self._mode_hand.take(message, self._machine.place_of(message))
        self._carry_out(self._machine.on_local(message, now, made))

    def _on_attach(self, message: Attach, now: float) -> None:
        machine = self._machine
        if machine.known is None:
            return  # it can't know what the run is
        attached = Attached(
            machine.known, message.model, stages_in_order(message, machine.known, self._tools)
        )
        if not self._opened:
            self._open_line(attached)
        self._crossing_bytes = message.crossing_bytes
        if not message.stages:  # it holds all of it: nobody has to say what
            self._hold(attached)
        self._pulse.on_new_trainer()
        self._supervisor.on_attached()
        self._events.on_local(message, machine.member)
        on_word(message)
        self._carry_out(machine.on_attach(message.model, self._address, now, attached.stages))

    def _assist(self, model: ModelSchema) -> None:
        """No trainer will come: the door has told the model."""
        if (known := self._machine.known) is None:
            return
        attached = Attached(known, model, ())
        self._say(memory_of_helper(known.manifest, model, self._options.own))
        self._open_line(attached)
        self._hold(attached)
        self._carry_out(self._machine.on_attach(model, self._address, time.monotonic()))

    def _open_line(self, attached: Attached) -> None:
        """Others dial me there; what frames of this run look like follows from the model."""
        kinds = kinds_of(stages=bool(attached.model.stages))
        tag, largest = attached.known.tag, largest_payload_bytes(attached)
        self._link.expect(self._identity.peer_id, tag, largest, kinds)
        self._address = self._line.open(self._control.at, attached.known.manifest.net)
        self._opened = True
        if told := self._line.router_says:
            self._say(told, routine=True)

    def _hold(self, attached: Attached) -> None:
        """Tell the trainer where the memory is.  The first one's model says how large everything is."""
        hands = self._hands or self._share_memory(attached)
        beside = self._tools.folder / name_on_disk(attached, self._identity.peer_id)
        told = replace(hands.shared.as_message(), beside=str(beside) if self._options.own.keep else "")
        for stage in hands.attached.stages:
            told = replace(told, stage=stage, belt=hands.of_mode.begin(self._crossing_bytes))
        self._local.send(told)

    def _share_memory(self, attached: Attached) -> IoWorkers:
        count = sum(fragment.count for fragment in attached.held)
        elements = count * attached.model.chunk_elements
        shared = SharedState.create(self._options.folder, elements, attached.form.names)
        if not attached.stages:
            url, manifest = self._options.url, attached.known.manifest.canonical()
            here = PeerHere(
                run=url.run, key=url.key, manifest=manifest, model=attached.model, shared=shared.as_message()
            )
            write_about(self._options.folder, to_bytes(here))
        self._versions = {}
        self._hands = hands = IoWorkers.of(attached, shared, self._machine.member, self._tools)
        self._fetching.expect(count)
        self._arithmetic.submit(hands.state.choose_paths, nothing)
        self._arithmetic.submit(hands.unsent.read, nothing)
        self._arithmetic.submit(let_go_of_text, nothing)
        return hands

    def _vacate(self) -> None:
        """The stage is given up: what is being calculated for it ends first, then its memory goes."""
        if (hands := self._hands) is not None:
            hands.begin_to_close()
            self._leave_unsent(hands)
        self._arithmetic.submit(lambda: None, lambda _: self._vacated())

    def _leave_unsent(self, hands: IoWorkers) -> None:
        era, versions = self._machine.member.reports.era, self._versions
        self._arithmetic.submit(lambda: hands.unsent.write(hands.state, era, versions), nothing)

    def _vacated(self) -> None:
        hands, self._hands = self._hands, None
        if hands is not None:
            self._machine.member.counters.count(Verdict.STALE, hands.answering.held)
            hands.close()
            hands.shared.remove()
            if hands.shared.place != self._options.folder:
                remove_folder(hands.shared.place)
        del hands
        gc.collect()  # the next stage takes as much memory
        self._carry_out(self._machine.on_vacated(time.monotonic()))

    # ---- effects ---------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            self._do(effect)

    def _do(self, effect: do.Effect) -> None:
        self._events.on_effect(effect, self._machine)
        before_effect(effect)
        match effect:
            case do.ToDoor(message=message):
                self._control.to_door(message)
            case do.ToCoordinator(message=said):
                self._beats.on_said(said, time.monotonic())
                self._control.to_members(said)
            case do.EnterMembers(port=port):
                self._control.enter_members(port)
                self._line.coordinator_is_at(self._control.at)
                self._reaching.enter(self._control.at.port, port)
                self._say(f"in touch with the coordinator at {self._control.at}")
            case do.LookAt(places=places):
                self._control.look_at(places)
            case do.LookElsewhere():
                self._control.shun()
            case do.Remember(whereabouts=whereabouts, commits=commits):
                if whereabouts:
                    self._remembered.save(whereabouts)
                if commits:
                    self._remembered.save_commits(commits)
            case do.LeaveMembers():
                self._control.leave_members()
                self._beats.forget()
                self._line.forget_coordinator()
                self._reaching.leave()
                self._offering.leave()
            case do.Contacts(roster=()):
                pass  # let in with a crowd: the first tick tells who is here
            case do.Contacts(roster=roster, ways=ways):
                self._link.set_contacts(roster)
                self._link.set_ways(self._line.relayed_by(ways))
                self._fetching.meet(roster)
            case SendFrame(to=to, frame=frame):
                self._link.send(to, on_the_way(frame))
            case do.TellTrainer(message=told):
                self._local.send(told)
            case do.Hold(attached=attached):
                self._hold(attached)
            case do.Vacate():
                self._vacate()
            case do.Note(text=text, routine=routine):
                self._waits.note(text, routine, self._machine)
            case do.Exit():
                self._exit = effect
            case do.Assist(model=model):
                self._assist(model)
            case do.ModeEffect():
                if self._hands is not None:
                    self._hands.of_mode.carry_out(effect)
            case _ if self._hands is None:
                raise RuntimeError(f"before a trainer attached: {type(effect).__name__}")
            case _:
                self._use(self._hands, effect)

    def _use(
        self,
        hands: IoWorkers,
        effect: Install
        | Roll
        | Seal
        | Merge
        | Weigh
        | Measure
        | do.Encode
        | do.Resolve
        | do.Serve
        | do.KeepBefore
        | do.Undo
        | do.ProveHolding
        | do.FetchShown
        | do.BesideRounds,
    ) -> None:
        member, state, submit = self._machine.member, hands.state, self._arithmetic.submit
        match effect:
            case Install():
                self._events.on_piece(effect.chunk, effect.version)
                self._fetching.taken(effect.chunk, time.monotonic())
                self._change(hands, effect, lambda: state.install(effect))
            case Roll():
                hands.rolled(effect, member)
                self._change(hands, effect, lambda: state.roll(effect))
            case Seal():
                self._seal(hands, effect)
            case Merge() | Weigh() | Measure():
                then = partial(self._calculated, effect)
                self._arithmetic.beside(effect.chunk, lambda: state.calculate(effect), then)
            case do.Encode():
                self._encode(hands, effect)
            case do.Resolve(slot=slot, used=used, fragment=fragment):
                submit(lambda: state.resolve(hands.shared.slots[slot], used, fragment), nothing)
            case do.KeepBefore() | do.ProveHolding() | do.FetchShown():
                self._prove(state, effect)
            case do.Serve(kind=Kind.LOGGED):
                hands.serve_logged(effect, member, self._on_own_frame)
            case do.Serve():
                hands.answering.serve(effect, state)
            case do.Undo():
                tell = lambda undone: self._carry_out(member.on_disk(undone, time.monotonic()))  # noqa: E731
                hands.undo(effect, member.reports.era, self._arithmetic, tell)
            case _:
                self._use_beside(hands, effect)

    def _use_beside(self, hands: IoWorkers, effect: do.BesideRounds) -> None:
        """What happens beside the rounds, and seldom."""
        member, state = self._machine.member, hands.state
        match effect:
            case do.Recall():
                hands.arriving.recall(effect, state, member, time.monotonic)
            case do.KeepBase() | do.KeepAhead():
                if hands.keeping is not None:
                    hands.keeping.carry_out(effect, state)
            case do.BeginFrom():
                hands.beginning.begin(effect, state, time.monotonic)
            case do.Follow(terms=terms):
                self._line.follow(terms.newest.net)
                hands.follow(terms, self._arithmetic.submit)
            case _ if hands.checkpoints is not None:
                known = member.joined.amending.terms if member.joined is not None else None
                facts = RunFacts(hands.attached, self._machine.doorway.incarnation, known)
                hands.checkpoints.carry_out(effect, facts, state, time.monotonic)

    def _encode(self, hands: IoWorkers, effect: do.Encode) -> None:
        state, submit = hands.state, self._arithmetic.submit
        part = self._machine.member.part
        self._link.forget_rounds_before(part.oldest_round_no if part is not None else 0)
        encoding = state.encoding(hands.shared.slots[effect.slot], effect, unmap_pages)

        def follow(made: Encoded) -> None:
            if encoding.is_wanted(made):
                self._carry_out(self._machine.member.on_encoded(effect.round_no, *made, time.monotonic()))

        era, number = self._machine.member.reports.era, effect.fragment
        before = hands.unsent.of_before
        submit(lambda: before.take_up(state, number, era, self._versions.get(number, 0)), nothing)
        submit(encoding.begin, nothing)
        for first in encoding.firsts:
            self._arithmetic.beside(
                (do.Encode, effect.fragment, first), partial(encoding.some, first), follow
            )
        submit(encoding.end, nothing)

    def _seal(self, hands: IoWorkers, seal: Seal) -> None:
        """Each thread hashes a part of what did not change by a result, which has its hash by then."""
        arithmetic, events, state, fragment = self._arithmetic, self._events, hands.state, seal.fragment
        era, chunks = self._machine.member.reports.era, hands.attached.fragments[fragment].chunks
        arithmetic.submit(lambda: events.on_rolled(seal.version, fragment))
        arithmetic.spread([partial(state.hash, part) for part in shares(chunks, arithmetic.size)])

        def sealed() -> bytes:
            self._versions[fragment] = seal.version
            if len(self._versions) == len(hands.attached.held):
                hands.shared.write_version(min(self._versions.values()))
            return state.seal(fragment)

        job = partial(events.sealing, seal.version, fragment, era, sealed)
        arithmetic.submit(hands.arriving.after_seal(seal, job), partial(self._sealed, seal))

    def _prove(self, state: OuterState, effect: do.KeepBefore | do.ProveHolding | do.FetchShown) -> None:
        """What others may want to see: read and calculated in its turn, between the changes of the state."""
        member, submit = self._machine.member, self._arithmetic.submit
        match effect:
            case do.KeepBefore(fragment=fragment, version=version):
                submit(lambda: state.keep_before(fragment, version), nothing)
            case do.ProveHolding(fragment=fragment, nonce=nonce):
                submit(
                    lambda: state.prove_holding(fragment, nonce), lambda value: self._proven(effect, value)
                )
            case do.FetchShown(show=show, logged=logged):
                submit(
                    lambda: bytes(logged) if logged is not None else state.shown(show),
                    lambda raw: self._carry_out(member.on_shown(show, raw, time.monotonic())),
                )

    def _change(self, hands: IoWorkers, effect: Install | Roll, job: Job) -> None:
        member = self._machine.member
        digest = member.digest_of(effect.chunk, effect.version)
        arrived = Arrived(effect.version, member.reports.era, digest)
        kept = hands.arriving.after(effect, arrived, hands.state, job)
        if hands.archive is not None:
            hands.archive.changed(effect)
        self._arithmetic.beside(effect.chunk, lambda: hands.change(effect.chunk, kept))

    def _sealed(self, seal: Seal, digest: object) -> None:
        assert isinstance(digest, bytes)
        hands = self._hands
        if hands is not None and hands.archive is not None:
            chunks = hands.attached.fragments[seal.fragment].chunks
            hashes = hands.state.hashes_of(chunks)
            hands.archive.sealed(seal, self._machine.member.reports.era, digest, hashes)
        if hands is not None and hands.keeping is not None:
            hands.keeping.sealed(seal, digest, self._machine.member.reports.era)
        failpoints.hit("apply.after_seal")
        self._fetching.sealed(time.monotonic())
        self._carry_out(self._machine.member.on_sealed(seal.fragment, seal.version, digest, time.monotonic()))
        of = hands.attached.of_part(seal.fragment) if hands is not None else ""
        if seal.version > 0:  # of its own first values a peer does not know yet whether they are the run's
            self._say(f"version {seal.version}{of} is here, digest {digest.hex()[:8]}", routine=True)

    def _on_own_frame(self, frame: Frame) -> None:
        self._carry_out(self._machine.member.on_frame(self._identity.peer_id, frame, time.monotonic()))

    def _proven(self, effect: do.ProveHolding, value: object) -> None:
        assert isinstance(value, bytes)
        self._carry_out(self._machine.member.on_holding_proven(effect, value, time.monotonic()))

    def _calculated(self, effect: Merge | Weigh | Measure, made: object) -> None:
        self._carry_out(self._machine.member.on_calculated(effect, made, time.monotonic()))

    # ---- the end ---------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._metrics.close()
        self._events.close(self._exit)
        finished = self._exit is not None and self._exit.code == "finished"
        hands = self._hands
        if hands is not None:
            hands.begin_to_close(finished)
            if not finished:
                self._leave_unsent(hands)
        self._arithmetic.close()
        self._inbox.close()
        if hands is not None:
            hands.close()
        self._local.close()
        self._supervisor.stop()
        self._reaching.close()
        self._offering.close()
        self._looking_up.close()
        self._control.close()
        self._line.close()
        self._context.destroy(linger=0)
        if hands is not None:
            remove_folder(hands.shared.place)
