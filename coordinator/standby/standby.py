"""The store that `farflung coordinate --store` names, led by this process: at once, or after it has stood by.

Where the mode begins: the core asks for `stands_by` (coordinator/run_lead.py).  It waits until nobody leads, with a
door open at which it names who does; what it says and when it claims the lead is decided in standby_rules.py.  A data
folder belongs to one run in one place: a small file in it says in which, so that a mistyped prefix begins no second
run.  With `--restored` the lease is renewed while peers are asked, so that nobody else asks or writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from farflung.coordinator.door.front_door_process import DoorLimits, DoorProcess, settings_of
from farflung.coordinator.door.hello_check import DoorFacts
from farflung.coordinator.door.keys import FILE_NAME as KEY_NAME
from farflung.coordinator.door.keys import CoordinatorKeys, load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.journal import locked
from farflung.coordinator.ledger.run_store import RunRecords
from farflung.coordinator.run_lead import BELONGS_NAME, RunLead, StoreOptions, asks_peers, check_key
from farflung.coordinator.server import JOURNAL_NAME
from farflung.coordinator.standby.etcd_store import EtcdStore
from farflung.coordinator.standby.etcd_url import StoreUrl
from farflung.coordinator.standby.standby_rules import (
    LOOK_EVERY_S,
    ShowLeader,
    StandbyNote,
    StandbyRules,
    Step,
    StoredRun,
    TryToLead,
)
from farflung.protocol.errors import Unreachable, UserError
from farflung.protocol.process import own_files

START_PATIENCE_S = 10.0  # a store that is started in the same moment needs some seconds

log = logging.getLogger("farflung.coordinator")


@contextlib.contextmanager
def stands_by(asked: StoreOptions, url: str, stopped: Callable[[], bool]) -> Iterator[RunLead | None]:
    """None: it was stopped while it stood by."""
    folder = asked.data_dir
    if (folder / JOURNAL_NAME).exists():
        raise UserError(
            f"{folder}: here lies the journal of a run, which is not moved into a store; go on without --store, or "
            "name an empty folder with --data"
        )
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, locked(folder / BELONGS_NAME))
        yield _led(asked, StoreUrl.parse(url, asked.manifest.run.name), stack, stopped)


def _led(
    asked: StoreOptions, url: StoreUrl, stack: contextlib.ExitStack, stopped: Callable[[], bool]
) -> RunLead | None:
    store = EtcdStore(url, asked.restored)
    stack.callback(store.close)
    kept = _first_look(store, stopped)
    if asked.restored and kept is None:
        check_key(asked.data_dir)
    keys = _keys(asked.data_dir, kept, store.where)
    places = asked.places(asked.listen.port) if asked.listen.port else ()
    waiting = StandbyRules(store.where, keys.public_raw, asked.manifest.run.name, places)
    listen = _Standby(asked, store, keys, waiting).until_it_leads(stopped)
    if listen is None:
        return None
    if not _begun(asked, store, keys, listen, stopped):
        return None
    _write_belongs(asked.data_dir / BELONGS_NAME, _belongs(store, store.run_id))
    return RunLead(store, keys, listen)


def _begun(
    asked: StoreOptions,
    store: EtcdStore,
    keys: CoordinatorKeys,
    listen: ListenOn,
    stopped: Callable[[], bool],
) -> bool:
    """The run is there, with all that is to be in it before it goes on.  False: it was told to stop."""

    def is_to_stop() -> bool:
        store.check()  # Deposed, as soon as its lease is over: then it is another one's turn to ask
        return stopped()

    kept = store.look().kept
    if kept is not None or not asked.restored:
        _check_belongs(asked.data_dir, store, kept)
        store.begin(asked.manifest, keys.public_raw, lambda: os.urandom(16))
    if not asked.restored:
        return True
    copy = RunRecords(store.run_id, store.manifest, store.records()) if kept is not None else None
    found = asks_peers()(asked.manifest, keys, copy, listen, is_to_stop)
    if found is None:
        return False
    if copy is None:
        _check_found(asked.data_dir, found)
        store.begin(found.manifest, keys.public_raw, lambda: found.run_id)
        store.records()  # none: what is written next is the first
    store.append(found.records)
    return True


def _first_look(store: EtcdStore, stopped: Callable[[], bool]) -> StoredRun | None:
    until = time.monotonic() + START_PATIENCE_S
    while True:
        try:
            return store.look().kept
        except Unreachable as error:
            if stopped() or time.monotonic() > until:
                raise Unreachable(
                    f"{error}; is etcd running there, and does a firewall let it through?"
                ) from None


def _keys(folder: Path, kept: StoredRun | None, where: str) -> CoordinatorKeys:
    """A new key for a run that has one would be a URL that nobody was given."""
    if kept is not None and not os.path.lexists(folder / KEY_NAME):
        raise UserError(
            f"{where}: a run is kept there, and {folder} has no {KEY_NAME}; copy that file from the data folder of the "
            "coordinator that began it, readable by you alone, or choose another prefix for a run of your own"
        )
    return load_or_create(folder)


def _check_belongs(folder: Path, store: EtcdStore, kept: StoredRun | None) -> None:
    run_id = _run_of(folder)
    if run_id and (kept is None or kept.run_id.hex() != run_id):
        raise UserError(
            f"{store.where}: run {run_id}, whose folder this is, is not kept there; is it another store or prefix? "
            "If the store was lost, start with --restored. "
            f"If that run is over, name an empty folder with --data, with a copy of {KEY_NAME}"
        )


def _check_found(folder: Path, found: RunRecords) -> None:
    """With the key alone it is the run that most peers show."""
    run_id = _run_of(folder)
    if run_id not in ("", found.run_id.hex()):
        raise UserError(
            f"{folder}: this is the folder of run {run_id}, and peers give back run {found.run_id.hex()}; to go on "
            f"with that one, name an empty folder with --data, with a copy of {KEY_NAME}"
        )


def _run_of(folder: Path) -> str:
    """Empty: of none yet."""
    path = folder / BELONGS_NAME
    return path.read_text().strip().partition(" ")[0] if path.exists() else ""


def _write_belongs(path: Path, said: str) -> None:
    try:
        own_files.replaced(path, said.encode("utf-8"), durable=True)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; check the folder and its space"
        ) from error


def _belongs(store: EtcdStore, run_id: bytes) -> str:
    return f"{run_id.hex()} {store.where}\n"


class _Standby:
    """Asks the store, and has a door as long as somebody else leads."""

    def __init__(
        self, asked: StoreOptions, store: EtcdStore, keys: CoordinatorKeys, waiting: StandbyRules
    ) -> None:
        self._asked, self._store, self._keys, self._waiting = asked, store, keys, waiting
        self._door: DoorProcess | None = None
        self._listen = asked.listen

    def until_it_leads(self, stopped: Callable[[], bool]) -> ListenOn | None:
        """Where it listens then; None: it was stopped."""
        try:
            while not stopped():
                if self._look():
                    return self._listen
                self._wait(time.monotonic() + LOOK_EVERY_S)
            return None
        finally:
            if self._door is not None:
                self._door.close()

    def _look(self) -> bool:
        try:
            sight = self._store.look()
            steps = self._waiting.on_sight(sight)
            if sight.leading is not None and self._door is None and sight.kept is not None:
                self._open(sight.kept)
            return any([self._take(step) for step in steps])
        except Unreachable as error:
            return any([self._take(step) for step in self._waiting.on_silence(str(error))])

    def _take(self, step: Step) -> bool:
        match step:
            case TryToLead():
                return self._store.try_to_lead(f"{socket.gethostname()} (process {os.getpid()})")
            case ShowLeader(whereabouts=whereabouts):
                if self._door is not None:
                    self._door.stand_by(whereabouts)
            case StandbyNote(text=text):
                log.info("%s", text)
        return False

    def _open(self, kept: StoredRun) -> None:
        """What is wrong with this coordinator's own files is found now, not when it is needed."""
        asked = self._asked
        self._store.check_rules(kept, asked.manifest)
        _check_belongs(asked.data_dir, self._store, kept)
        facts = DoorFacts(asked.manifest.run.name, kept.run_id, kept.manifest)
        begin = settings_of(facts, self._keys.secret, asked.listen, DoorLimits())
        self._door = DoorProcess(begin, lambda text: log.info("%s", text))
        self._door.stand_by(b"")
        self._door.open()
        self._listen = replace(asked.listen, port=self._door.begin.port)

    def _wait(self, until: float) -> None:
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))
            if self._door is not None:
                for _ in self._door.receive(time.monotonic()):
                    pass  # counts of a door that lets nobody in
