"""The coordinator's shell: two sockets, a journal and a clock around the run machine, and `serve`, which builds it.

Called by `farflung coordinate`.  Decides nothing about the run.  It keeps three promises for the machine: what is
written is durable before anything after it leaves, an answer goes only over a connection that proved its key,
and every frame that arrives ends in one counter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import zmq

from farflung.collectives import failpoints
from farflung.collectives.errors import FrameError, UserError
from farflung.collectives.verdicts import Verdict
from farflung.coordinator import wire
from farflung.coordinator.allowance import Allowance
from farflung.coordinator.dialer import Dialer, Target
from farflung.coordinator.door import Arrival, Listener, ListenOn, take_all_descriptors
from farflung.coordinator.effects import (
    Allow,
    AnswerDoor,
    DialBack,
    Effect,
    Forbid,
    KeepEvidence,
    Note,
    Tell,
    Write,
)
from farflung.coordinator.evidence_folder import FOLDER_NAME, EvidenceFolder
from farflung.coordinator.exporter import Exporter
from farflung.coordinator.failing import after_record, after_word, before_answer, before_record
from farflung.coordinator.journal import Journal
from farflung.coordinator.keys import CoordinatorKeys, load_or_create
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.messages import DOOR_IN, MEMBER_IN, FromDoor, FromMember, Message, Probe
from farflung.coordinator.prober import Prober
from farflung.coordinator.record_events import Beginning, RecordEvents
from farflung.coordinator.records import Record
from farflung.coordinator.run import RunMachine
from farflung.coordinator.run_metrics import run_metrics
from farflung.coordinator.url import JoinUrl
from farflung.coordinator.zap import ZapHandler

JOURNAL_NAME = "journal.sqlite"
EVENTS_NAME = "events.jsonl"
TICK_S = 0.1
STRIKES = 3  # malformed frames of one key, or floods, before it is cut off
KEYS_REMEMBERED = 4096  # strangers make keys for nothing: the list of the bad ones must not grow with them
LINGER_DONE_S = 2.0  # after a finished run's last member left
LINGER_MOST_S = 60.0  # after the run finished, whoever is still there

KEY_BYTES = 32
Action = AnswerDoor | Tell | Allow | Forbid | DialBack | Note | KeepEvidence
_AT_DOOR, _OF_MEMBERS = frozenset(DOOR_IN), frozenset(MEMBER_IN)

log = logging.getLogger("farflung.coordinator")


@dataclass(frozen=True, slots=True)
class Speaker:
    peer: str
    session: bytes
    routing_id: bytes


class Server:
    """Use as a context manager: sockets are open inside it.  `run_until` is the whole process's loop."""

    def __init__(
        self,
        machine: RunMachine,
        journal: Journal,
        keys: CoordinatorKeys,
        listen: ListenOn,
        events: RecordEvents | None = None,
    ) -> None:
        self._machine = machine
        self._events = events if events is not None else RecordEvents(None)
        self._journal = journal
        self._keys = keys
        self._listen = listen
        self._allowed: set[bytes] = set()
        self._routes: dict[bytes, bytes] = {}  # session -> routing id of the connection it last spoke on
        self._speakers: dict[int, Speaker] = {}  # by descriptor: whose connection it is
        self._strikes: OrderedDict[bytes, int] = OrderedDict()
        rules = machine.core.manifest
        self._allowance = Allowance(rules.net.heartbeat_s, rules.round.fragments)
        self.arrived = 0  # frames, and connections that were never let in
        self.evidence: EvidenceFolder | None = None  # where it is kept
        self.exporter: Exporter | None = None  # where /metrics is wanted
        self._slowest_turn_s = 0.0
        self._asked: list[tuple[Effect, bytes]] = []  # by the machine in this turn, each with whom it answers
        self.undelivered = 0  # answers whose reader was gone or did not read; the next beat makes them good

    def __enter__(self) -> Server:
        with contextlib.ExitStack() as on_failure:
            self._context = on_failure.enter_context(zmq.Context())
            self._zap = ZapHandler(self._context)
            on_failure.callback(self._zap.close)
            self._zap.set_policy("door", lambda key: True)
            self._zap.set_policy("members", self._allowed.__contains__)
            host = self._listen.host
            self._door = Listener(self._context, "door", self._keys, host, self._listen.port)
            on_failure.callback(self._door.close)
            self._dialer = Dialer(self._context, zmq.curve_keypair())
            on_failure.callback(self._dialer.close)
            self._members = Listener(self._context, "members", self._keys, host, self._listen.member_port)
            on_failure.callback(self._members.close)
            self._prober = Prober(self._dialer, lambda caller, said: self._deliver(self._door, caller, said))
            self._execute(self._machine.start(time.monotonic(), self._members.port))
            self._carry_out()
            self._closing = on_failure.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def port(self) -> int:
        """Of the door: what a join URL names."""
        return self._door.port

    @property
    def counts(self) -> dict[str, Any]:
        return {"arrived": self.arrived, "counters": self._machine.counters.as_dict()}

    def run_until(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop()` is true; it is asked at least once per tick."""
        poller = zmq.Poller()
        for readable in (self._zap.socket, *self._door.readable, *self._members.readable):
            poller.register(readable, zmq.POLLIN)
        next_tick = time.monotonic()
        while not stop():
            poller.poll(max(0, round((next_tick - time.monotonic()) * 1000)))
            begun = time.monotonic()
            # In this order, because descriptors are used again: by the time a key is let in, the news of the
            # connection that had its descriptor before is there to be read, and its own frames come after.
            self._zap.serve_waiting()
            self._read_news(self._members)
            self._read_news(self._door)
            for arrival in self._members.arrivals():
                self._on_member_frame(arrival)
            self._execute(self._machine.settle(time.monotonic()))
            for arrival in self._door.arrivals():
                self._on_door_frame(arrival)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                for target, reached in self._dialer.verdicts():
                    if not self._prober.on_verdict(target, reached):
                        self._execute(self._machine.on_dialled(target.peer, target.session, reached, now))
                self._execute(self._machine.on_timer(now))
                self._events.on_timer(now, self.counts)
                self._tell_metrics(now)
            self._carry_out()
            self._slowest_turn_s = max(self._slowest_turn_s, time.monotonic() - begun)

    def _tell_metrics(self, now: float) -> None:
        if self.exporter is not None and self.exporter.is_due(now):
            counts = self.counts | {"undelivered": self.undelivered}
            self.exporter.tell(run_metrics(self._machine, counts, self._slowest_turn_s))
            self._slowest_turn_s = 0.0

    # ---- what arrives --------------------------------------------------------------------------------

    def _on_door_frame(self, arrival: Arrival) -> None:
        message = cast(FromDoor | None, self._decode(arrival, _AT_DOOR))
        if isinstance(message, Probe):
            self._machine.counters.count(Verdict.ACCEPTED)
            self._prober.on_probe(arrival.routing_id, arrival.came_from, message, time.monotonic())
        elif message is not None:
            caller = arrival.routing_id + arrival.key
            self._execute(self._machine.on_door(caller, arrival.key, message, time.monotonic()))

    def _on_member_frame(self, arrival: Arrival) -> None:
        if not self._allowance.takes(arrival.key, time.monotonic()):
            self.arrived += 1
            self._machine.counters.count(Verdict.OVERSIZE)
            if self._allowance.is_flood(arrival.key):
                self._strike(arrival, f"more than {self._allowance.per_s:.0f} messages a second")
            return
        message = cast(FromMember | None, self._decode(arrival, _OF_MEMBERS))
        if message is None:
            return
        self._learn_route(arrival, message.session)
        effects = self._machine.on_member(arrival.key, message, time.monotonic(), last=False)
        self._execute(effects, arrival.routing_id)
        if not self._members.is_open(arrival.descriptor):
            self._on_closed(arrival.descriptor)  # these were its last words, read after the news of its end

    def _learn_route(self, arrival: Arrival, session: bytes) -> None:
        """Answers to a session go where it last spoke; only its own key may say where that is."""
        member = self._machine.core.members.by_session(session)
        if member is None or member.contact.key != arrival.key:
            return
        old = self._speakers.get(arrival.descriptor)
        if old is not None and old.session != session:
            self._routes.pop(old.session, None)
        self._routes[session] = arrival.routing_id
        self._speakers[arrival.descriptor] = Speaker(member.peer, session, arrival.routing_id)

    def _decode(self, arrival: Arrival, allowed: frozenset[str]) -> Message | None:
        counters = self._machine.counters
        self.arrived += 1
        if self._strikes.get(arrival.key, 0) >= STRIKES:
            counters.count(Verdict.UNAUTHORISED)
            return None
        try:
            if arrival.payload is None:
                raise FrameError(Verdict.MALFORMED, "a control message is exactly one frame")
            return wire.decode(arrival.payload, allowed)
        except FrameError as error:
            counters.count(error.verdict)
            log.debug("frame dropped: %s", error)
            if error.verdict == Verdict.MALFORMED:
                self._strike(arrival, "malformed frames")
            return None

    def _strike(self, arrival: Arrival, why: str) -> None:
        strikes = self._strikes[arrival.key] = self._strikes.get(arrival.key, 0) + 1
        self._strikes.move_to_end(arrival.key)
        while len(self._strikes) > KEYS_REMEMBERED:
            self._strikes.popitem(last=False)
        if strikes == STRIKES:
            log.warning("key %s... is cut off: %s", arrival.key.hex()[:16], why)
            self._on_closed(arrival.descriptor)

    def _read_news(self, listener: Listener) -> None:
        ended, verdicts = listener.news()
        for verdict in verdicts:
            self.arrived += 1
            self._machine.counters.count(verdict)
        for descriptor in ended:
            self._on_closed(descriptor)

    def _on_closed(self, descriptor: int) -> None:
        speaker = self._speakers.pop(descriptor, None)
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
        except (OSError, sqlite3.OperationalError) as error:
            mend = "what was committed is safe: mend this (is the disk full?) and start the coordinator again"
            raise UserError(f"{self._journal.path}: cannot be written: {error}; {mend}") from error
        self._events.on_records(records)

    def _act(self, effect: Action, reply_to: bytes) -> None:
        match effect:
            case AnswerDoor(caller=caller, message=answer):
                self._deliver(self._door, caller[:-KEY_BYTES], answer)
            case Tell(peer="", message=told):  # to whoever spoke last: no member of ours
                self._deliver(self._members, reply_to, told)
            case Tell(session=session, message=told):
                self._deliver(self._members, self._routes.get(session, b""), told)
            case Allow(key=key):
                self._allowed.add(key)
            case Forbid(key=key):
                self._allowed.discard(key)
            case DialBack(peer=peer, session=session, address=address, key=key):
                self._dialer.dial(Target(peer, session, address, key))
            case KeepEvidence():
                if self.evidence is not None:
                    self.evidence.keep(effect)
            case Note(text=text, routine=routine):
                log.log(logging.DEBUG if routine else logging.INFO, "%s", text)
                self._events.on_note(text)

    def _deliver(self, listener: Listener, routing_id: bytes, message: Message) -> None:
        before_answer(message)
        if not routing_id or not listener.send(routing_id, wire.encode(message)):
            self.undelivered += 1
        after_word(message)


class QuietEnd:
    """When a finished run's coordinator may go home: its members have left, or had time enough to."""

    def __init__(self) -> None:
        self._finished_at: float | None = None
        self._empty_since: float | None = None

    def is_over(self, finished: bool, members: int, now: float) -> bool:
        if not finished:
            return False
        self._finished_at = now if self._finished_at is None else self._finished_at
        if members:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        quiet_s = 0.0 if self._empty_since is None else now - self._empty_since
        return quiet_s >= LINGER_DONE_S or now - self._finished_at >= LINGER_MOST_S


def serve(
    run_toml: Path,
    data_dir: Path,
    listen: str,
    public_host: str | None = None,
    exit_when_done: bool = False,
    announce: Callable[[str], None] = print,
    metrics: str | None = None,
) -> None:
    """Run a coordinator until it is told to stop; `announce` gets the join URL once peers can use it."""
    listen_on = ListenOn.parse(listen)
    take_all_descriptors()
    exporter = Exporter(metrics) if metrics is not None else None
    manifest = _read_manifest(run_toml)
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{data_dir}: cannot make this folder: {error.strerror}") from error
    with Journal.open_or_create(data_dir / JOURNAL_NAME, manifest, lambda: os.urandom(16)) as journal:
        keys, records = load_or_create(data_dir), journal.records()
        machine = RunMachine(manifest, journal.run_id, records, os.urandom)
        machine.core.prove = keys.prove
        events = RecordEvents(data_dir / EVENTS_NAME)
        failpoints.arm(os.environ, events.on_failpoint)
        events.begin(Beginning(manifest, journal.run_id, machine.core.ledger, records))
        failpoints.hit("start.before_listen")
        end = QuietEnd()

        def done() -> bool:
            core = machine.core
            return exit_when_done and end.is_over(core.finished, len(core.members.alive), time.monotonic())

        with (
            contextlib.ExitStack() as stack,
            _signals() as asked,
            Server(machine, journal, keys, listen_on, events) as server,
        ):
            server.exporter = stack.enter_context(exporter) if exporter is not None else None
            if keys.signing is not None:
                server.evidence = EvidenceFolder(data_dir / FOLDER_NAME, journal.run_id, keys.signing)
            host = public_host or listen_on.host_for_others()
            announce(str(JoinUrl(host, server.port, manifest.run.name, keys.public_raw)))
            server.run_until(lambda: bool(asked) or done())
        events.close("asked to stop" if asked else "the run is complete", server.counts)


def _read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.from_toml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}; `farflung init` writes one") from error


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The stop signals that came so far, instead of their usual deaths."""
    asked: list[int] = []
    stops = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(stop, lambda number, _: asked.append(number)) for stop in stops]
    try:
        yield asked
    finally:
        for stop, handler in zip(stops, before, strict=True):
            signal.signal(stop, handler)
