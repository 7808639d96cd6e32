"""The agent: one process that owns a peer's network and outer state.  A thin shell around the peer machine.

Started by the public API as a child of the training script (main.py), or by
`farflung join`, which then also has it start the trainer.  It polls sockets, runs arithmetic beside the loop,
carries out effects in order, and decides nothing about rounds.  No CUDA here.
"""

from __future__ import annotations

import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from farflung.collectives.round.effects import Install, Merge, Roll, Seal, SendFrame, Weigh
from farflung.compression.native import outer_step
from farflung.optim.outer import checked
from farflung.optim.recipes import outer_of
from farflung.peer.agent.answers import Answering
from farflung.peer.agent.failpoint_names import before_effect, on_the_way, on_word
from farflung.peer.agent.fetch_lines import Fetching
from farflung.peer.agent.journal_writer import RoundEvents, counts_of, open_journal, use_of
from farflung.peer.agent.metrics import PeerMetrics
from farflung.peer.agent.supervisor import Supervisor
from farflung.peer.identity import Identity, default_path
from farflung.peer.line.control import BeatClock, ControlLink
from farflung.peer.line.data_line import DataLine, Expected
from farflung.peer.local.channel import Greeting, LocalServer
from farflung.peer.local.memory import SharedState, let_go_of_text, remove_folder, unmap_pages
from farflung.peer.local.words import Attach, Bye, FromTrainer, Provided, Stop
from farflung.peer.machine import effects as do
from farflung.peer.machine.getting_in import me_of
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.machine.trainer_view import Pulse
from farflung.peer.settings import OwnConfig
from farflung.peer.state.arrived_pieces import Arriving
from farflung.peer.state.checkpoint_thread import Checkpointing
from farflung.peer.state.outer_state import CHUNKS_AT_ONCE, OuterState, payload_bytes_most
from farflung.peer.state.results_on_disk import KeepingResults
from farflung.peer.worker import Inbox, Worker, nothing
from farflung.protocol.errors import FarflungError
from farflung.protocol.frames import Frame, Kind
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.messages import DOOR_OUT
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.process import failpoints
from farflung.protocol.process.log_lines import Say
from farflung.protocol.process.sockets import curve_raw
from farflung.protocol.verdicts import Counters

TICK_S = 0.05
ASKED = "the user asked it to leave"


@dataclass(frozen=True)
class AgentOptions:
    url: JoinUrl
    folder: Path
    own: OwnConfig
    journal: Path | None = None  # what happens is written here (journal_writer.py)


class Agent:
    def __init__(self, options: AgentOptions, supervisor: Supervisor, say: Say) -> None:
        self._options = options
        self._supervisor = supervisor
        self._say = say
        self._identity = Identity.load_or_create(options.own.identity)
        self._inbox = Inbox()
        self._arithmetic = Worker("arithmetic", self._inbox.submit)
        self._checkpoints = Checkpointing(
            options.own.checkpoints, self._identity, self._arithmetic.submit, self._carry_out
        )
        folder = (options.own.identity or default_path()).parent / "state"
        self._arriving = Arriving(folder, self._arithmetic.submit, self._carry_out)
        self._results = KeepingResults(folder, self._arithmetic.submit, self._carry_out)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = zmq.curve_keypair()
        self._line = DataLine(keys, options.own)
        self._link = self._line.link
        self._answering = Answering(self._line, self._arithmetic.submit, self._carry_out)
        self._control = ControlLink(self._context, options.url, keys, Counters())
        self._local = LocalServer(options.folder)
        me = me_of(self._identity, curve_raw(keys[0]), os.urandom(16), options.url.token or "")
        self._machine = machine = PeerMachine(me, options.url.run, random.random)
        self._checkpoints.begin(self._machine, options.url.key)
        machine.log.limit_bytes, machine.log.on_disk = options.own.results_limit, options.own.results_on_disk
        self._shared: SharedState | None = None
        self._state: OuterState | None = None
        self._exit: do.Exit | None = None
        self._asked_to_leave = 0
        self._beats = BeatClock()
        self._fetching = Fetching(say)
        self._pulse = Pulse(options.own.stuck_after)
        self._events = RoundEvents(
            open_journal(options.journal, options.own.identity, say),
            lambda: use_of(self._link.counts, self._arithmetic),
            lambda: counts_of(self._link.counts, machine, self._answering.held),
        )
        self._events.begin(machine.me, options.url.run, options.own.upload_limits)
        self._metrics = PeerMetrics(options.own.metrics, options.url.run)
        failpoints.arm(os.environ, self._events.on_failpoint)

    # ---- the loop --------------------------------------------------------------------------------------------

    def run(self) -> do.Exit:
        """Until the run is over, the user leaves, or the trainer is gone for good."""
        self._say(f"I am {self._identity.name} ({self._identity.peer_id})", peer=self._identity.peer_id)
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
            self._local.send(Stop(code="agent", reason=str(error)))
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
        wait_s = min(until - time.monotonic(), self._link.idle_s(), self._answering.idle_s())
        poller.poll(max(0, math.ceil(1000 * wait_s)))

    def _take_what_came(self) -> None:
        machine = self._machine
        for message in self._control.receive():
            took = self._beats.on_heard(message, time.monotonic())
            if took is not None:
                self._line.on_answer(time.monotonic(), took)
                self._events.on_answer(took.both_ways_s)
                self._metrics.on_answer(took.both_ways_s)
            self._events.on_control(message)
            on_word(message)
            handle = machine.on_door if type(message) in DOOR_OUT.values() else machine.on_control
            self._carry_out(handle(message, time.monotonic()))  # type: ignore[arg-type]
        while (local := self._local.recv_nowait()) is not None:
            self._on_local(local[1])
        for sender, came in self._link.receive():
            now = time.monotonic()
            if isinstance(came, Frame):
                if came.header.kind == Kind.STATE:
                    self._fetching.came(sender, came.header.chunk, len(came.payload))
                if not self._answering.takes(sender, came, machine, now):
                    self._carry_out(machine.on_frame(sender, came, now))
            else:
                self._carry_out(machine.on_spoiled(sender, came, now))
        self._inbox.collect()
        if machine.part is not None:
            self._events.on_progress(lane.round for lane in machine.part.lanes)
        self._link.flush()
        self._answering.turn(machine, time.monotonic())

    def _on_tick(self, now: float) -> None:
        machine, vitals = self._machine, self._machine.reports.vitals
        problem = self._supervisor.watch(now)
        for text in self._supervisor.news():
            self._say(text)
        if self._supervisor.just_died:
            self._events.on_trainer("gone")
            self._carry_out(machine.on_trainer_gone(now))
        if problem is not None and not machine.leaving.asked:
            self._carry_out(machine.take_leave(problem, now, "agent"))
        if self._asked_to_leave:
            go = machine.take_leave(ASKED, now) if self._asked_to_leave == 1 else machine.leave(ASKED)
            self._carry_out(go)
        if self._shared is not None:
            vitals.step, vitals.tokens, vitals.loss = self._shared.read_progress()
            self._look_at_trainer(now, vitals.step)
        part = machine.part
        expected = (
            Expected(part.others_in_round, part.owing_in_round, part.expects_bytes) if part else Expected()
        )
        self._line.on_tick(now, expected)
        machine.on_lines(self._link.unreached(), self._link.arriving(), now)
        self._events.on_tick(now, vitals.saved)
        frames = self._link.counts
        vitals.tx_bytes, vitals.rx_bytes = frames.sent_bytes, frames.arrived_bytes
        vitals.up_bytes_per_s, vitals.down_bytes_per_s, vitals.rough = self._line.rates
        self._metrics.on_tick(now, machine, self._link)
        self._carry_out(machine.on_timer(now))

    def _look_at_trainer(self, now: float, step: int) -> None:
        before, vitals = self._machine.reports.vitals.stuck, self._machine.reports.vitals
        vitals.stuck = self._pulse.look(now, step, self._machine.training.stepping)
        if vitals.stuck and not before:
            self._events.on_trainer("stuck")
            self._supervisor.on_stuck(self._pulse.patience_s)

    # ---- the trainer -----------------------------------------------------------------------------------------

    def _on_local(self, message: FromTrainer | Greeting) -> None:
        now = time.monotonic()
        if isinstance(message, Greeting):
            self._carry_out(self._machine.on_trainer_waiting())
            return
        if isinstance(message, Attach):
            self._share_memory(message.model)
            self._pulse.on_new_trainer()
        elif isinstance(message, Provided) and self._state is not None:
            self._state.restart_momentum()
        elif isinstance(message, Bye) and self._exit is not None:
            return
        self._events.on_local(message, self._machine)
        on_word(message)
        self._carry_out(self._machine.on_local(message, now))

    def _share_memory(self, model: ModelSchema) -> None:
        """The first trainer's model says how large everything is; later ones find it made."""
        manifest = self._machine.manifest
        assert manifest is not None
        if self._shared is None:
            self._shared = SharedState.create(self._options.folder, model.chunk_count * model.chunk_elements)
            elements = model.chunk_elements
            self._arriving.begin(self._machine)
            self._fetching.expect(model.chunk_count)
            self._answering.begin(manifest.round.fragments, 8 * elements)
            outer = outer_of(manifest, checked(outer_step()))
            mark = self._shared.mark_torn
            anchor, momentum = self._shared.anchor, self._shared.momentum
            self._state = state = OuterState(anchor, model, manifest.round, outer, mark, momentum)
            self._arithmetic.submit(state.choose_paths, nothing)
            self._arithmetic.submit(let_go_of_text, nothing)
            largest = max(8 * elements, 32 * model.chunk_count, payload_bytes_most(manifest.round, elements))
            self._results.begin(self._machine, model.hash, largest)
            self._link.expect(self._identity.peer_id, self._machine.doorway.run_id[:8], largest)
            self._machine.doorway.address = self._line.open(self._options.url, manifest.net)
        self._local.send(self._shared.as_message())

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
                self._say("in touch with the coordinator")
            case do.LeaveMembers():
                self._control.leave_members()
                self._beats.forget()
                self._line.forget_coordinator()
            case do.Contacts(roster=()):
                pass  # let in with a crowd: the first tick tells who is here
            case do.Contacts(roster=roster):
                self._link.set_contacts(roster)
                self._fetching.meet(roster)
            case SendFrame(to=to, frame=frame):
                self._link.send(to, on_the_way(frame))
            case do.Tell(message=told):
                self._local.send(told)
            case do.Note(text=text):
                self._say(text)
            case do.Exit():
                self._exit = effect
            case do.ServeLogged():
                self._results.serve(effect)
            case do.SaveFragment() | do.DropSave() | do.Restore():
                assert self._state is not None, "a state before a trainer attached"
                self._checkpoints.carry_out(effect, self._machine, self._state, time.monotonic)
            case _:
                self._calculate(effect)

    def _calculate(
        self,
        effect: Install
        | Roll
        | Seal
        | Merge
        | Weigh
        | do.Encode
        | do.Resolve
        | do.ServeState
        | do.ServeManifest
        | do.Recall,
    ) -> None:
        state, shared = self._state, self._shared
        assert state is not None and shared is not None, "arithmetic before a trainer attached"
        submit, change = self._arithmetic.submit, self._checkpoints.change
        match effect:
            case Install():
                self._events.on_piece(effect.chunk, effect.version)
                self._fetching.taken(effect.chunk, time.monotonic())
                job = self._arriving.after(effect, state, lambda: state.install(effect))
                submit(lambda: change(effect.chunk, job), nothing)
            case Roll():
                self._results.rolled(effect)
                job = self._arriving.after(effect, state, lambda: state.roll(effect))
                submit(lambda: change(effect.chunk, job), nothing)
            case Seal(version=version, fragment=fragment):
                seal, era = self._events.sealing, self._machine.reports.era
                submit(
                    self._arriving.after_seal(
                        effect, lambda: seal(version, fragment, era, lambda: state.seal(fragment))
                    ),
                    lambda digest: self._sealed(effect, digest),
                )
            case do.Recall():
                self._arriving.recall(effect, state, time.monotonic)
            case Merge() | Weigh():
                submit(lambda: state.calculate(effect), lambda made: self._calculated(effect, made))
            case do.Encode():
                assert self._machine.part is not None
                self._link.forget_rounds_before(self._machine.part.oldest_round_no)
                encoding = state.encode(shared.slots[effect.slot], effect, unmap_pages)
                for _ in range(0, len(effect.order), CHUNKS_AT_ONCE):
                    submit(lambda: next(encoding, None), lambda made: self._encoded(effect.round_no, made))
            case do.Resolve(slot=slot, used=used, fragment=fragment):
                submit(lambda: state.resolve(shared.slots[slot], used, fragment), nothing)
            case do.ServeState() | do.ServeManifest():
                self._answering.serve(effect, self._machine.doorway.run_id[:8], state)

    def _sealed(self, seal: Seal, digest: object) -> None:
        assert isinstance(digest, bytes)
        failpoints.hit("apply.after_seal")
        self._fetching.sealed(time.monotonic())
        self._carry_out(self._machine.on_sealed(seal.fragment, seal.version, digest, time.monotonic()))
        of = f" of fragment {seal.fragment}" if len(self._machine.training.works) > 1 else ""
        self._say(f"version {seal.version}{of} is here, digest {digest.hex()[:8]}", routine=True)

    def _calculated(self, effect: Merge | Weigh, made: object) -> None:
        self._carry_out(self._machine.on_calculated(effect, made, time.monotonic()))

    def _encoded(self, round_no: int, made: object) -> None:
        if isinstance(made, tuple):  # and not None: nothing comes after a problem
            self._carry_out(self._machine.on_encoded(round_no, made[0], made[1], time.monotonic()))

    # ---- the end ---------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._metrics.close()
        self._events.close(self._exit)
        finished = self._exit is not None and self._exit.code == "finished"
        self._checkpoints.close(finished)
        self._results.close(finished)
        self._arithmetic.close()
        self._inbox.close()
        self._arriving.close()
        self._local.close()
        self._supervisor.stop()
        self._control.close()
        self._link.close()
        self._context.destroy(linger=0)
        if self._shared is not None:
            remove_folder(self._shared.place)
