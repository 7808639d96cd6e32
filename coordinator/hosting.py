"""What `farflung coordinate` does: a run's folder, its keys and journal, a server around its machine, until the end.

Called by the command line.  Decides nothing about the run but when its process ends; a host's mistakes end here in
one line each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from farflung.coordinator.door.keys import CoordinatorKeys
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.record_events import CoordinatorStart, RecordEvents
from farflung.coordinator.modes import registry
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run_files import (
    FILE_NAME,
    FOLDER_NAME,
    EvidenceFolder,
    ProvenanceFile,
    read_manifest,
)
from farflung.coordinator.run_lead import StoreOptions, held
from farflung.coordinator.server import Server
from farflung.protocol.caps import parse_relay
from farflung.protocol.errors import Deposed, UserError
from farflung.protocol.join_url import Address, JoinUrl, Whereabouts
from farflung.protocol.limits import ADDRESSES_MOST, WHEREABOUTS_BYTES
from farflung.protocol.process import failpoints, own_files
from farflung.protocol.process.metrics import Exporter
from farflung.protocol.process.sockets import take_all_descriptors

EVENTS_NAME = "events.jsonl"

log = logging.getLogger("farflung.coordinator")


@dataclass(frozen=True)
class Hosting:
    run_toml: Path
    data_dir: Path
    listen: str
    public: tuple[str, ...] = ()  # HOST or HOST:PORT, as peers dial it
    exit_when_done: bool = False
    metrics: str | None = None  # where /metrics answers
    restored: bool = False  # the data folder is a copy
    changes: tuple[str, ...] = ()  # to run.toml, such as round.sync_every=50
    store: str | None = (
        None  # etcd://..., which keeps the records so that another one may stand by; None: the folder
    )

    gateways: int = 0  # processes that hold members' connections

    @property
    def listens_on(self) -> str:
        """The host part: where this machine reaches the coordinator, or a word for everywhere."""
        return ListenOn.parse(self.listen).host


@dataclass(frozen=True)
class OpenedRun:
    """A coordinator that peers can join now."""

    url: JoinUrl
    incarnation: int
    prove: Callable[[bytes], bytes]  # the run's ed25519 key and its signature of a statement


def serve(
    asked_for: Hosting,
    announce: Callable[[str], None] = print,
    on_open: Callable[[OpenedRun], None] | None = None,
) -> None:
    """Run a coordinator until it is told to stop; `announce` gets the join URL once peers can use it, and `on_open`
    what else somebody beside it may need."""
    listen_on, data_dir = _listen_on(asked_for), asked_for.data_dir
    take_all_descriptors()
    exporter = Exporter(asked_for.metrics) if asked_for.metrics is not None else None
    manifest = read_manifest(asked_for.run_toml, asked_for.changes)
    _make_folder(data_dir)
    public = asked_for.public or listen_on.hosts_for_others()
    wanted = StoreOptions(
        data_dir, manifest, listen_on, asked_for.store, asked_for.restored, partial(_places, public)
    )
    with contextlib.ExitStack() as waiting:
        stopped = waiting.enter_context(stop_signals())
        found = waiting.enter_context(held(wanted, lambda: bool(stopped)))
        if found is None:
            return
        journal, keys, listen_on = found.store, found.keys, found.listen
        records, manifest = journal.records(), journal.manifest
        machine = RunMachine(manifest, journal.run_id, records, os.urandom)
        machine.core.prove = keys.prove
        events = RecordEvents(data_dir / EVENTS_NAME)
        failpoints.arm(os.environ, events.on_failpoint)
        events.write_start(CoordinatorStart(manifest, journal.run_id, machine.core.ledger, records))
        failpoints.hit("start.before_listen")
        end = QuietEnd()

        def done() -> bool:
            core, now = machine.core, time.monotonic()
            return asked_for.exit_when_done and end.is_over(core.finished, len(core.members.alive), now)

        server = Server(machine, journal, keys, listen_on, events, data_dir)
        server.asked_to_stop = lambda: bool(stopped)
        with contextlib.ExitStack() as stack, server:
            server.exporter = stack.enter_context(exporter) if exporter is not None else None
            server.evidence = EvidenceFolder(data_dir / FOLDER_NAME, journal.run_id, keys.signing)
            server.provenance = ProvenanceFile(data_dir / FILE_NAME, journal.run_id, keys.signing)
            for hand in server.hands:
                hand.begin(keys.signing.public_key().public_bytes_raw(), listen_on.host, listen_on.relay_port)
            say_what_is_missing(machine.core)
            places = _places(public, server.port)
            server.url = JoinUrl.at(places, manifest.run.name, keys.public_raw)
            machine.sessions.whereabouts = _whereabouts(machine, server.url, keys)
            journal.announce(machine.sessions.whereabouts)
            announce(str(server.url))
            if on_open is not None:
                on_open(OpenedRun(server.url, machine.core.ledger.incarnation, keys.prove))
            with _deposed_in(events, server):
                server.run_until(lambda: bool(stopped) or done() or machine.drained)
        drained = "drained" if machine.drained else "the run is complete"
        events.close("asked to stop" if stopped else drained, server.counts)


def _listen_on(asked_for: Hosting) -> ListenOn:
    return replace(ListenOn.parse(asked_for.listen), gateways=asked_for.gateways)


def _make_folder(path: Path) -> None:
    try:
        own_files.made_folder(path)
    except OSError as error:
        raise UserError(f"{path}: cannot make this folder: {error.strerror}") from error
    if own_files.is_open_to_others(path):  # not closed to them: it may be a home, or /tmp
        told = "%s: other users can list this folder, though not read what the run keeps in it; chmod 700 %s ends that"
        log.warning(told, path, shlex.quote(str(path)))


@contextlib.contextmanager
def _deposed_in(events: RecordEvents, server: Server) -> Iterator[None]:
    """Whoever reads the events sees why it ended."""
    try:
        yield
    except Deposed as error:
        events.close(str(error), server.counts)
        raise


def _places(public: Sequence[str], port: int) -> tuple[Address, ...]:
    """Where peers find the door, by the host's own word."""
    if len(public) > ADDRESSES_MOST:
        raise UserError(f"--public: {len(public)} addresses, at most {ADDRESSES_MOST} are allowed")
    bare = [f"[{each}]" if each.count(":") > 1 and "[" not in each else each for each in public]
    return tuple(dict.fromkeys(Address.parse(each, f"--public {each}", port) for each in bare))


def _whereabouts(machine: RunMachine, url: JoinUrl, keys: CoordinatorKeys) -> bytes:
    """The same, signed, for members."""
    addresses = tuple(map(str, url.addresses))
    said = Whereabouts(url.run, machine.core.ledger.incarnation, 0, addresses, 0, b"").signed(keys.prove).raw
    if len(said) > WHEREABOUTS_BYTES:
        raise UserError(
            f"--public: {addresses} are too long: {len(said)} bytes signed, at most {WHEREABOUTS_BYTES}"
        )
    return said


def say_what_is_missing(core: Core) -> None:
    """Where the host asks for it by default, and the mode was taken out."""
    if registry.found("reach") is None and parse_relay(core.manifest.net.relay) is not None:
        core.note(f"relay: none, {core.members.ways.why_no_relay}")


# ---- when a coordinator ends --------------------------------------------------------------------------


LINGER_DONE_S = 2.0  # after a finished run's last member left
LINGER_MOST_S = 60.0  # after the run finished, whoever is still there


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


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The stop signals that came so far, instead of their usual deaths."""
    asked: list[int] = []
    stops = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(stop, lambda number, _: asked.append(number)) for stop in stops]
    try:
        yield asked
    finally:
        for stop, handler in zip(stops, before, strict=True):
            signal.signal(stop, handler)
