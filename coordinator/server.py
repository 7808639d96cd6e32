"""The coordinator's shell around the run machine: the members' socket, the front door, journal and clock.

Owned by hosting.py.  Decides nothing about the run.  It keeps three promises for the machine: what is
written is durable before anything after it leaves, an answer goes only over a connection that proved its key,
and every frame that arrives ends in one counter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import zmq
from msgspec.structs import replace

from farflung.coordinator.door import gateways
from farflung.coordinator.door.allowance import Allowance, Tally
from farflung.coordinator.door.dialer import Dialer, Target
from farflung.coordinator.door.front_door_process import (
    Brings,
    DoorAnswer,
    DoorLimits,
    DoorProcess,
    FramesCounted,
    FromDoor,
    ModelNow,
    Saw,
    StatusNow,
    WantsStatus,
    settings_of,
)
from farflung.coordinator.door.gateways import GatewayProcess, Gateways, is_held_elsewhere, route_of
from farflung.coordinator.door.hello_check import HelloPassed
from farflung.coordinator.door.keys import CoordinatorKeys
from farflung.coordinator.door.listener import GOODBYE_MS, Arrival, Listener, ListenOn
from farflung.coordinator.ledger.record_events import RecordEvents
from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    CommittedBatch,
    CommittedRound,
    DecidedOn,
    Departed,
    DigestFixed,
    Genesis,
    Granted,
    Opened,
    Record,
    RolledBack,
)
from farflung.coordinator.ledger.run_store import RunStore
from farflung.coordinator.modes import registry
from farflung.coordinator.modes.registry import ServerHand
from farflung.coordinator.operator_socket import OperatorSocket
from farflung.coordinator.roster.ways import DOORS
from farflung.coordinator.run.effects import (
    Allow,
    AnswerDoor,
    DialBack,
    Effect,
    Forbid,
    HandEffect,
    KeepEvidence,
    KeepProof,
    Note,
    Tell,
    Write,
)
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run_files import EvidenceFolder, ProvenanceFile
from farflung.coordinator.run_metrics import run_metrics
from farflung.protocol import messages
from farflung.protocol.errors import FrameError, UserError, Verdict
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.messages import (
    MEMBER_IN,
    Aborted,
    Committed,
    Decided,
    FromMember,
    Message,
    OpenRound,
    Order,
    Reply,
    Welcome,
)
from farflung.protocol.mode_words import Look
from farflung.protocol.process.child import STARTS_WITHIN_S, CannotListen, Spawn, started
from farflung.protocol.process.descriptors import network_at, room_for_connections
from farflung.protocol.process.failpoints import hit, is_armed
from farflung.protocol.process.metrics import Exporter
from farflung.protocol.process.networks import LEFT_OPEN_S, Lines
from farflung.protocol.process.sockets import ZapHandler

# ---- failpoint names ---------------------------------------------------------------------------------------
# The coordinator's failpoints: which of its records and words passes which point.
#
# Called by the server, around every write and every word. Off, each call returns at once
# (protocol/process/failpoints.py).

_RECORDS: dict[type, str] = {
    Genesis: "genesis",
    Admitted: "admit",
    Departed: "depart",
    Granted: "lease",
    Opened: "open",
    DecidedOn: "decide",
    CommittedRound: "commit",
    CommittedBatch: "commit",
    AbortedRound: "abort",
    DigestFixed: "digest",
    RolledBack: "go_back",
}
_WORDS: dict[type, str] = {
    OpenRound: "open.mid_announce",
    Decided: "decide.mid_announce",
    Committed: "commit.mid_announce",
    Aborted: "abort.mid_announce",
}


def before_record(records: Sequence[Record]) -> None:
    """They are about to be written."""
    if is_armed():
        _pass(records, "before_fsync")


def after_record(records: Sequence[Record]) -> None:
    """They are durable, and nobody knows."""
    if is_armed():
        _pass(records, "after_fsync")


def before_answer(message: Message) -> None:
    if is_armed() and isinstance(message, Welcome):
        hit("admit.before_answer")


def after_word(message: Message) -> None:
    """It has left for one member."""
    foreseen = isinstance(message, Decided) and message.decision.foreseen
    if is_armed() and type(message) in _WORDS and not foreseen:
        hit(_WORDS[type(message)])


def _pass(records: Sequence[Record], when: str) -> None:
    for record in records:
        name = _RECORDS.get(type(record))
        if name is not None:
            hit(f"{name}.{when}")


# ---- server ------------------------------------------------------------------------------------------------

JOURNAL_NAME = "journal.sqlite"
TICK_S = 0.1
NO_DESCRIPTOR = -1  # of a connection that a gateway holds
STRIKES = 3  # malformed frames of one key, or floods, before it is cut off

Action = AnswerDoor | Tell | Allow | Forbid | DialBack | HandEffect | Note | KeepEvidence | KeepProof
_OF_MEMBERS = frozenset(MEMBER_IN)

log = logging.getLogger("farflung.coordinator")


@dataclass(frozen=True, slots=True)
class Speaker:
    peer: str
    session: bytes
    routing_id: bytes
    key: bytes


class Server:
    """Use as a context manager: sockets are open inside it.  `run_until` is the whole process's loop."""

    def __init__(
        self,
        machine: RunMachine,
        journal: RunStore,
        keys: CoordinatorKeys,
        listen: ListenOn,
        events: RecordEvents | None = None,
        folder: Path | None = None,
        spawn: Spawn = started,
        limits: DoorLimits | None = None,
    ) -> None:
        """`folder`: where the operator's socket and the allowlist are; None: there are none."""
        self._spawn = spawn
        self.asked_to_stop: Callable[[], bool] = lambda: False  # while it opens
        self.gateways = Gateways([], self._on_news)  # none listens before all do
        self._limits = limits or DoorLimits()
        self._machine = machine
        self._events = events if events is not None else RecordEvents(None)
        self._journal = journal
        self._keys = keys
        self._listen = listen
        self._folder = folder
        self._operator: OperatorSocket | None = None
        self.hands: list[ServerHand] = []  # of modes
        self.url: JoinUrl | None = None  # what an invitation is made of
        self._allowed: set[bytes] = set()
        self._routes: dict[bytes, bytes] = {}  # session -> routing id of the connection it last spoke on
        self._speakers: dict[bytes, Speaker] = {}  # by routing id: whose connection it is
        self._own = Lines(room_for_connections())  # connections of this process's own socket
        self._strikes: Tally[bytes] = Tally()
        rules = machine.core.manifest
        self._allowance = Allowance(rules.net.heartbeat_s, rules.fragments)
        self.arrived = 0  # frames, and connections that were never let in
        self.evidence: EvidenceFolder | None = None  # where it is kept
        self.provenance: ProvenanceFile | None = None
        self.exporter: Exporter | None = None  # where /metrics is wanted
        self._slowest_turn_s = 0.0
        self._told_model: object = None  # to which front door, and of which model
        self._asked: list[tuple[Effect, bytes]] = []  # by the machine in this turn, each with whom it answers
        self.undelivered = 0  # answers whose reader was gone or did not read; the next beat makes them good

    def __enter__(self) -> Server:
        with contextlib.ExitStack() as on_failure:
            self._context = on_failure.enter_context(zmq.Context())
            self._zap = ZapHandler(self._context)
            on_failure.callback(self._zap.close)
            self._zap.set_policy("members", self._allowed.__contains__)
            host = self._listen.host
            begin = settings_of(self._machine.facts, self._keys.secret, self._listen, self._limits)
            self._door = self.front_door = DoorProcess(begin, self._on_news, self._spawn)
            on_failure.callback(self._door.close)
            self._door.open(self.asked_to_stop)
            self._dialer = Dialer(self._context, (self._keys.public, self._keys.secret))
            on_failure.callback(self._dialer.close)
            port = self._listen.member_port
            self._members = Listener(self._context, "members", self._keys, host, port, self._on_accepted)
            on_failure.callback(self._members.close)
            self.gateways = Gateways(self._begins(), self._on_news, self._spawn, lambda: list(self._allowed))
            on_failure.callback(self.gateways.close)
            self._await_gateways()
            if self._folder is not None:
                self._operator = OperatorSocket(self._folder, self._obey)
                on_failure.callback(self._operator.close)
                made = registry.hands()
                self.hands = [hand(self._machine.modes[name], self._folder) for name, hand in made.items()]
                for each in self.hands:
                    on_failure.callback(each.close)
                self._look_at_files()
            self._machine.core.members.ways.sees_ports()  # both sockets do
            self._execute(self._start())
            self._carry_out()
            self._closing = on_failure.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def port(self) -> int:
        """Of the door: what a join URL names."""
        return self._door.begin.port

    @property
    def counts(self) -> dict[str, Any]:
        return {"arrived": self.arrived, "counters": self._machine.counters.as_dict()}

    def run_until(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop()` is true; it is asked at least once per tick."""
        poller, generation = self._poller(), self._generation
        next_tick = time.monotonic()
        while not stop():
            if generation != self._generation:
                poller, generation = self._poller(), self._generation
            poller.poll(max(0, round((next_tick - time.monotonic()) * 1000)))
            begun = time.monotonic()
            # In this order, because descriptors are used again: by the time a key is let in, the news of the
            # connection that had its descriptor before is there to be read, and its own frames come after.
            self._zap.serve_waiting()
            self._read_news(self._members)
            for arrival in self._members.arrivals():
                self._on_member_frame(arrival)
            for gateway, gateway_word in self.gateways.receive(time.monotonic()):
                self._on_gateway_word(gateway, gateway_word)
            self._execute(self._machine.settle(time.monotonic()))
            now = time.monotonic()
            for word in self._door.receive(now):
                self._on_door_word(word, now)
            if self._operator is not None:
                self._operator.serve_waiting(now)
            if now >= next_tick:
                next_tick = now + TICK_S
                self._on_tick(now)
            self._carry_out()
            self.gateways.flush()
            self._slowest_turn_s = max(self._slowest_turn_s, time.monotonic() - begun)

    def _tell_metrics(self, now: float) -> None:
        if self.exporter is not None and self.exporter.is_due(now):
            counts = self.counts | {"undelivered": self.undelivered}
            self.exporter.tell(
                run_metrics(self._machine.core, self._machine.drivers, counts, self._slowest_turn_s)
            )
            self._slowest_turn_s = 0.0

    def _start(self) -> list[Effect]:
        now, port = time.monotonic(), self._members.port
        return self._machine.start(now, port, time.time(), self._journal.restored)

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for readable in (self._zap.socket, *self._members.readable):
            poller.register(readable, zmq.POLLIN)
        if self._operator is not None:
            poller.register(self._operator.fileno(), zmq.POLLIN)
        if self._door.channel is not None and not self._door.channel.closed:
            poller.register(self._door.channel.socket, zmq.POLLIN)
        for channel in self.gateways.channels():
            poller.register(channel, zmq.POLLIN)
        return poller

    @property
    def _generation(self) -> int:
        return self._door.generation + self.gateways.generation

    def _on_news(self, text: str) -> None:
        self._execute(self._machine.on_news(text, time.monotonic()))

    # ---- gateways ------------------------------------------------------------------------------------

    def _begins(self) -> list[gateways.GatewaySettings]:
        net, listen = self._machine.core.manifest.net, self._listen
        bare = gateways.GatewaySettings(
            secret=self._keys.secret,
            host=listen.host,
            port=0,
            heartbeat_s=net.heartbeat_s,
            fragments=self._machine.core.manifest.fragments,
        )
        return [replace(bare, port=port) for port in listen.gateway_ports]

    def _await_gateways(self) -> None:
        """Members are to find them from the first one on; who can't listen says so, and the others do its work."""
        self.gateways.watch(time.monotonic())
        until = time.monotonic() + STARTS_WITHIN_S
        while len(self.gateways.ports) < len(list(self.gateways)) and time.monotonic() < until:
            for _, word in self.gateways.receive(time.monotonic()):
                if isinstance(word, CannotListen):
                    raise UserError(f"--gateways: {word.reason}")
            zmq.select(list(self.gateways.channels()), [], [], TICK_S)
        self._machine.sessions.member_ports = self.gateways.ports

    def _on_gateway_word(self, gateway: GatewayProcess, word: gateways.FromGateway) -> None:
        match word:
            case gateways.Heard(lot=lot):
                for route, key, raw in lot:
                    # It looked at the frame's shape and at its sender's rate; what it means is looked at here.
                    self._on_member_frame(Arrival(route_of(gateway, route), key, NO_DESCRIPTOR, raw))
            case gateways.Ended(routes=routes):
                for route in routes:
                    self._on_closed(route_of(gateway, route))
            case gateways.Looked(key=key, endpoint=endpoint):
                self._execute(self._machine.on_look(key, DOORS[1], endpoint, time.monotonic()))
            case gateways.Misbehaved(route=route, key=key, why=why):
                self._cut_off_for(route_of(gateway, route), key, why)
            case FramesCounted():
                self._on_counted(word)

    def _on_counted(self, word: FramesCounted) -> None:
        self.arrived += word.arrived
        self.undelivered += word.undelivered
        for verdict, count in word.counters.items():
            self._machine.counters.count(verdict, count)

    def _watch_gateways(self, now: float) -> None:
        """Whose gateway has died is not gone: it dials again, or falls silent."""
        for number in self.gateways.watch(now):
            routes = [route for route in self._speakers if route[0] == number]
            for route in routes:
                self._routes.pop(self._speakers.pop(route).session, None)
        self._machine.sessions.member_ports = self.gateways.ports

    def _on_tick(self, now: float) -> None:
        self._watch_gateways(now)
        for target, reached in self._dialer.verdicts():
            self._execute(self._machine.on_dialled(target.peer, target.session, reached, now))
        for descriptor in self._own.due(now, self._stays):
            self._members.cut(descriptor)
        self._look_at_files()
        for hand in self.hands:
            self._execute(list(hand.turn(now, time.time())))
        self._execute(self._machine.on_timer(now))
        self._tell_model()
        self._events.on_timer(now, self.counts)
        self._tell_metrics(now)

    def _tell_model(self) -> None:
        """To the front door, for those who come without a trainer."""
        model = self._machine.core.ledger.model
        if model is None or self._told_model == (self._door.generation, model):
            return
        if self._door.send(ModelNow(model=model)):
            self._told_model = (self._door.generation, model)

    # ---- the operator ----------------------------------------------------------------------------------

    def _obey(self, order: Order) -> Reply:
        reply, effects = self._machine.obey(order, time.monotonic())
        self._look_at_files()  # one may be asked for from now on
        self._execute(effects)
        self._carry_out()  # durable before the operator is told
        token = reply.found.get("token")
        if token is None or self.url is None:
            return reply
        return replace(reply, found={**reply.found, "url": str(dataclasses.replace(self.url, token=token))})

    def _look_at_files(self) -> None:
        for hand in self.hands:
            hand.look()

    # ---- what arrives --------------------------------------------------------------------------------

    def _on_door_word(self, word: FromDoor, now: float) -> None:
        match word:
            case Brings():
                passed = HelloPassed(word.hello, word.nonce, word.came_from)
                self._execute(self._machine.on_hello(word.caller, passed, now))
            case Saw(key=key, endpoint=endpoint):
                self._execute(self._machine.on_look(key, DOORS[0], endpoint, now))
            case WantsStatus():
                self._door.send(StatusNow(status=self._machine.status(now)))
            case FramesCounted():
                self._on_counted(word)

    def _on_member_frame(self, arrival: Arrival) -> None:
        is_own = arrival.descriptor != NO_DESCRIPTOR
        if is_own:
            self._on_own_line(arrival, time.monotonic())
        if is_own and not self._allowance.takes(arrival.key, time.monotonic()):
            self.arrived += 1
            self._machine.counters.count(Verdict.OVERSIZE)
            if self._allowance.is_flood(arrival.key):
                self._strike(arrival, f"more than {self._allowance.per_s:.0f} messages a second")
            return
        message = cast(FromMember | Look | None, self._decode(arrival, _OF_MEMBERS))
        if message is None:
            return
        if isinstance(message, Look):
            self._on_look(arrival)
            return
        self._learn_route(arrival, message.session)
        effects = self._machine.on_member(arrival.key, message, time.monotonic(), last=False)
        self._execute(effects, arrival.routing_id)
        if is_own and not self._members.is_open(arrival.descriptor):
            self._on_closed(arrival.routing_id)  # these were its last words, read after the news of its end

    def _on_accepted(self, descriptor: int) -> list[int]:
        self._on_closed(self._own.ends(descriptor))  # the one that had this number before
        return self._own.comes(descriptor, network_at(descriptor))

    def _on_own_line(self, arrival: Arrival, now: float) -> None:
        for descriptor in self._own.heard(arrival.descriptor, arrival.routing_id, arrival.key):
            self._members.cut(descriptor)
        if not self._stays(arrival.key):
            self._own.send_away(arrival.key, now + GOODBYE_MS / 1000)

    def _stays(self, key: bytes) -> bool:
        return key in self._allowed and self._strikes.get(key, 0) < STRIKES

    def _on_look(self, arrival: Arrival) -> None:
        """Over another connection than the beats: answers go on over theirs, and whose it is tells its key alone."""
        self._machine.counters.count(Verdict.ACCEPTED)
        seen = self._members.comes_from(arrival)
        if seen:
            self._execute(self._machine.on_look(arrival.key, DOORS[1], seen, time.monotonic()))

    def _learn_route(self, arrival: Arrival, session: bytes) -> None:
        """Answers to a session go where it last spoke; only its own key may say where that is."""
        member = self._machine.core.members.by_session.get(session)
        if member is None or member.contact.key != arrival.key:
            return
        old = self._speakers.get(arrival.routing_id)
        if old is not None and old.session != session:
            self._routes.pop(old.session, None)
        self._routes[session] = arrival.routing_id
        self._speakers[arrival.routing_id] = Speaker(member.peer, session, arrival.routing_id, arrival.key)

    def _decode(self, arrival: Arrival, allowed: frozenset[str]) -> Message | None:
        counters = self._machine.counters
        self.arrived += 1
        if self._strikes.get(arrival.key, 0) >= STRIKES:
            counters.count(Verdict.UNAUTHORISED)
            return None
        try:
            if arrival.payload is None:
                raise FrameError(Verdict.MALFORMED, "a control message is exactly one frame")
            return messages.decode(arrival.payload, allowed)
        except FrameError as error:
            counters.count(error.verdict)
            log.debug("frame dropped: %s", error)
            if error.verdict == Verdict.MALFORMED:
                self._strike(arrival, "malformed frames")
            return None

    def _strike(self, arrival: Arrival, why: str) -> None:
        if self._strikes.add(arrival.key) == STRIKES:
            self._cut_off_for(arrival.routing_id, arrival.key, why)

    def _cut_off_for(self, route: bytes, key: bytes, why: str) -> None:
        log.warning("key %s... is cut off: %s", key.hex()[:16], why)
        self._shut(key, cut=True)
        speaker = self._speakers.get(route)
        if speaker is not None:
            self._execute(self._machine.on_garbage(speaker.peer, speaker.session, time.monotonic()))
        self._on_closed(route)

    def _read_news(self, listener: Listener) -> None:
        ended, verdicts = listener.take_ended()
        for verdict in verdicts:
            self.arrived += 1
            self._machine.counters.count(verdict)
        for descriptor in ended:
            self._on_closed(self._own.ends(descriptor))

    def _on_closed(self, route: bytes) -> None:
        speaker = self._speakers.pop(route, None)
        # A member that is back already speaks on a newer connection: then the old one's end means nothing.
        if speaker is not None and self._routes.get(speaker.session) == speaker.routing_id:
            del self._routes[speaker.session]
            self._execute(self._machine.on_closed(speaker.peer, speaker.session, time.monotonic()))

    # ---- what the machine asks for -------------------------------------------------------------------

    def _execute(self, effects: list[Effect], reply_to: bytes = b"") -> None:
        """At the end of this turn of the loop."""
        self._asked += [(effect, reply_to) for effect in effects]

    def _carry_out(self) -> None:
        """What this turn's events ask for: all records in one transaction, with one wait for the disk, then the rest
        in order.  So a crowd at the door waits for the disk once, not once for each."""
        self._journal.check()
        asked, self._asked = self._asked, []
        self._write([effect.record for effect, _ in asked if isinstance(effect, Write)])
        for effect, reply_to in asked:
            if not isinstance(effect, Write):
                self._act(effect, reply_to)

    def _write(self, records: list[Record]) -> None:
        if not records:
            return
        try:
            before_record(records)
            self._journal.append(records)
            after_record(records)
            if self._journal.is_long:
                # Just now the ledger is what the journal says: all that was asked is written.
                self._journal.fold(self._machine.core.ledger.folded)
        except (OSError, sqlite3.Error) as error:
            mend = "what was committed is safe: mend this (is the disk full?) and start the coordinator again"
            raise UserError(f"{self._journal.where}: cannot be written: {error}; {mend}") from error
        self._events.on_records(records)

    def _act(self, effect: Action, reply_to: bytes) -> None:
        match effect:
            case AnswerDoor(caller=caller, message=answer):
                before_answer(answer)
                if not self._door.send(DoorAnswer(caller=caller, message=messages.encode(answer))):
                    self.undelivered += 1
            case Tell(peer="", message=told):  # to whoever spoke last: no member of ours
                self._deliver(reply_to, told)
            case Tell(session=session, message=told):
                self._deliver(self._routes.get(session, b""), told)
            case Allow(key=key):
                self._allowed.add(key)
                self.gateways.let(key)
            case Forbid(key=key, cut=cut):
                self._shut(key, cut)
            case DialBack(peer=peer, session=session, address=address, key=key):
                self._dialer.dial(Target(peer, session, address, key))
            case HandEffect():
                for hand in self.hands:
                    hand.act(effect, time.monotonic())
            case KeepEvidence():
                if self.evidence is not None:
                    self.evidence.keep(effect)
                if self.provenance is not None:
                    self.provenance.keep(effect)
            case KeepProof():
                if self.evidence is not None:
                    self.evidence.keep(effect)
            case Note(text=text, cause=cause, routine=routine):
                log.log(logging.DEBUG if routine else logging.INFO, "%s", text)
                self._events.on_note(text, cause)

    def _shut(self, key: bytes, cut: bool) -> None:
        """It may not come in any more.  `cut`: what it sends is not read, and its connections end in a moment, in which
        a last word may still leave; else they end when it speaks, or a while later."""
        now = time.monotonic()
        self._allowed.discard(key)
        self.gateways.shut(key, cut)
        self._own.send_away(key, now + (GOODBYE_MS / 1000 if cut else LEFT_OPEN_S))
        if cut:
            self._strikes[key] = STRIKES
            for descriptor in self._own.silent():  # nobody knows whose: who may come in dials again
                self._members.cut(descriptor)

    def _deliver(self, routing_id: bytes, message: Message) -> None:
        holder = self.gateways if is_held_elsewhere(routing_id) else self._members
        if not routing_id or not holder.send(routing_id, messages.encode(message)):
            self.undelivered += 1
        after_word(message)
