"""The store of a run's records, held by this process: its folder's journal, or one that others may take over.

Called by hosting.py.  With `--restored` peers are asked for what came after the copy (a mode: coordinator/restoring/),
and its records are written first.  A store outside the folder belongs to another mode (coordinator/standby/): a small
file in the folder says in which one its run is, so that no second run begins in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from farflung.coordinator.door.keys import FILE_NAME as KEY_NAME
from farflung.coordinator.door.keys import CoordinatorKeys, load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.run_store import RunRecords, RunStore
from farflung.coordinator.modes import registry
from farflung.coordinator.server import JOURNAL_NAME
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import Address
from farflung.protocol.manifest import Manifest

BELONGS_NAME = "store"  # which run of which store this folder is of


@dataclass(frozen=True)
class StoreOptions:
    """What the host said of it."""

    data_dir: Path
    manifest: Manifest
    listen: ListenOn
    store: str | None  # a URL; None: the folder
    restored: bool
    places: Callable[[int], tuple[Address, ...]]  # of a door at this port, as peers dial it


@dataclass(frozen=True)
class RunLead:
    """This process leads the run, and nobody else does."""

    store: RunStore
    keys: CoordinatorKeys
    listen: ListenOn  # where peers were told to knock, if it stood by


class LeadsStore(Protocol):
    """Of a store that others may lead from."""

    def __call__(
        self, asked: StoreOptions, url: str, stopped: Callable[[], bool]
    ) -> AbstractContextManager[RunLead | None]: ...


class AsksPeers(Protocol):
    """For a run, or for what `copy` lacks of it; None: it was told to stop before that was known."""

    def __call__(
        self,
        manifest: Manifest,
        keys: CoordinatorKeys,
        copy: RunRecords | None,
        listen: ListenOn,
        asked_to_stop: Callable[[], bool],
    ) -> RunRecords | None: ...


def held(asked: StoreOptions, stopped: Callable[[], bool]) -> AbstractContextManager[RunLead | None]:
    """None: it was told to stop before it led."""
    if asked.restored:
        asks_peers()  # refused before anybody waits for the lead
    if asked.store is None:
        return _held_in_folder(asked, stopped)
    standby = registry.found("standby")
    if standby is None:
        raise UserError(
            "--store: this installation has no standby; go on without --store: the run is kept in the data folder"
        )
    stands_by: LeadsStore = standby.stands_by
    return stands_by(asked, asked.store, stopped)


@contextlib.contextmanager
def _held_in_folder(asked: StoreOptions, stopped: Callable[[], bool]) -> Iterator[RunLead | None]:
    folder = asked.data_dir
    belongs = folder / BELONGS_NAME
    if belongs.exists():
        raise UserError(
            f"{folder}: this run is kept elsewhere ({belongs.read_text().strip()}): name that with --store, or "
            "begin a new run in an empty folder"
        )
    manifest, run_id, given_back = asked.manifest, os.urandom(16), None
    if asked.restored:
        check_key(folder)
        copy = _copy_in(folder, manifest)
        given_back = asks_peers()(manifest, load_or_create(folder), copy, asked.listen, stopped)
        if given_back is None:
            yield None
            return
        manifest, run_id = given_back.manifest, given_back.run_id
    with Journal.open_or_create(folder / JOURNAL_NAME, manifest, lambda: run_id, asked.restored) as journal:
        if given_back is not None:
            journal.append(given_back.records)
        yield RunLead(journal, load_or_create(folder), asked.listen)


# ---- put together again out of what peers keep


def asks_peers() -> AsksPeers:
    restoring = registry.found("restoring")
    if restoring is None:
        raise UserError(
            "--restored: this installation cannot ask peers for a run; install farflung whole, or go on without "
            "--restored where the whole journal is"
        )
    asks: AsksPeers = restoring.ask_peers
    return asks


def check_key(data_dir: Path) -> None:
    """UserError where there is nothing at all to put a run together from."""
    if not os.path.lexists(data_dir / KEY_NAME):
        raise UserError(
            f"--restored: {data_dir} has no {KEY_NAME}; put a copy of it there (mode 0600): without the run's key "
            "no peer believes this coordinator, and its join URL leads nowhere"
        )


def _copy_in(data_dir: Path, manifest: Manifest) -> RunRecords | None:
    """A journal that is an old copy; None: it was lost."""
    path = data_dir / JOURNAL_NAME
    if not path.exists():
        return None
    with Journal.open_or_create(path, manifest, lambda: os.urandom(16), restored=True) as journal:
        return RunRecords(journal.run_id, journal.manifest, journal.records())
