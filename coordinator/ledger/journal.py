"""Owns the run's memory on disk: an SQLite file of records in order, and the lock that keeps it single.

Called by the server, which lets nothing leave the process before `append` has returned (P5): one of two that keep to
run_store.py, for a coordinator with a folder of its own.  Knows bytes and order only: what a record means is the
ledger's business.  A journal that has grown long is folded into one record, the ledger; one of an older format is
brought up to date as it is opened (journal_upgrade.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from farflung.coordinator.ledger.journal_upgrade import SCHEMA_VERSION, sync_folder, upgrade
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import UNREADABLE, Amended, Folded, Record, from_bytes, to_bytes
from farflung.coordinator.ledger.snapshot import unpacked
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import COORDINATORS_OWN, Manifest
from farflung.protocol.manifest_sections import NetSection
from farflung.protocol.moments import Terms
from farflung.protocol.process import failpoints
from farflung.protocol.signing import Amendment

FOLD_AFTER_BYTES = 16 << 20  # of records since it was folded last
_RESTORE = (
    "move the whole folder aside and start from an intact copy of it, or begin a new run in an empty folder"
)
_TABLES = """
CREATE TABLE IF NOT EXISTS journal(pos INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value BLOB NOT NULL);
"""


class Journal:
    """One run's records, in order.  `append` returns when they would survive a power cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = b""
        self.manifest = Manifest()  # that the run began with
        self.upgraded_from = 0  # the older format that it had
        self.restored = False  # it takes the place of another one, which must not be followed any more
        self._position = 0  # of the newest record
        self._grown_bytes = 0  # since it was folded
        self._lock = -1
        self._db: sqlite3.Connection | None = None

    @classmethod
    def open_or_create(
        cls, path: Path, manifest: Manifest, new_run_id: Callable[[], bytes], restored: bool = False
    ) -> Journal:
        """The journal of this manifest's run, begun if there is none; UserError if it is another run's, or a copy.

        `restored`: somebody says that it takes the place of another one, which is not in use any more.
        """
        journal = cls(path)
        journal.restored = restored
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(journal.close)
            journal._lock = locked(path)
            try:
                journal._open(manifest, new_run_id)
            except sqlite3.DatabaseError as error:
                raise _unusable(path, error) from error
            on_failure.pop_all()
        return journal

    @property
    def where(self) -> str:
        return str(self.path)

    def check(self) -> None:
        """Nobody can take it away from who holds its lock."""

    def announce(self, whereabouts: bytes) -> None:
        """Nobody stands by who could be told."""

    def records(self) -> list[Record]:
        """From the newest fold on."""
        records: list[Record] = []
        self._position = self._grown_bytes = 0
        try:
            for pos, body in self._database.execute("SELECT pos, body FROM journal ORDER BY pos"):
                record = from_bytes(body)
                if isinstance(record, Folded) and not records and record.position == pos:
                    self._position = pos - 1
                else:
                    self._grown_bytes += len(body)
                # Positions count without a gap, so a lost record can't pass unnoticed.
                if pos != self._position + 1:
                    raise UserError(f"{self.path}: record {self._position + 1} is missing; {_RESTORE}")
                records.append(record)
                self._position = pos
        except UNREADABLE as error:
            where = f"record {self._position + 1} cannot be read ({error})"
            raise UserError(
                f"{self.path}: {where}: the file is damaged, or a newer farflung wrote it; {_RESTORE}"
            ) from error
        except sqlite3.DatabaseError as error:
            raise _unusable(self.path, error) from error
        return records

    def append(self, records: Sequence[Record]) -> None:
        """All of them or none.  A full disk is an sqlite3.OperationalError, and nothing was appended."""
        bodies = [(to_bytes(record),) for record in records]
        with self._database as transaction:
            transaction.executemany("INSERT INTO journal(body) VALUES (?)", bodies)
            failpoints.hit("journal.mid_write")
        self._position += len(records)
        self._grown_bytes += sum(len(body) for (body,) in bodies)

    @property
    def is_long(self) -> bool:
        return self._grown_bytes >= FOLD_AFTER_BYTES

    def fold(self, folded: Callable[[int], Folded]) -> None:
        """Put `folded(position)`, what all records up to there made, in their place: all of it or nothing.

        The file does not get smaller by that; its pages are used again.
        """
        position = self._position
        body = to_bytes(folded(position))
        with self._database as transaction:
            transaction.execute("DELETE FROM journal WHERE pos <= ?", (position,))
            transaction.execute("INSERT INTO journal(pos, body) VALUES (?, ?)", (position, body))
            failpoints.hit("journal.mid_fold")
        self._grown_bytes = 0
        failpoints.hit("journal.after_fold")

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock >= 0:
            os.close(self._lock)  # and with it goes the lock
            self._lock = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _database(self) -> sqlite3.Connection:
        assert self._db is not None, "the journal is closed"
        return self._db

    def _open(self, manifest: Manifest, new_run_id: Callable[[], bytes]) -> None:
        self._db = db = sqlite3.connect(self.path)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(_TABLES)
        meta: dict[str, bytes] = dict(db.execute("SELECT key, value FROM meta"))
        if not meta:
            meta = {
                "schema": str(SCHEMA_VERSION).encode("ascii"),
                "run_id": new_run_id(),
                "manifest": manifest.canonical(),
            }
            with db:
                db.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
            sync_folder(self.path.parent)
        self._check_kind(meta)
        schema = int(meta["schema"])
        if schema != SCHEMA_VERSION:
            self._check_place(db, meta.get("place"))  # a copy is nothing to write into
            upgrade(db, self.path, schema)
            self.upgraded_from = schema
            meta = dict(db.execute("SELECT key, value FROM meta"))
        self.manifest = agreed_manifest(str(self.path), meta["manifest"], manifest, self.records)
        self._check_place(db, meta.get("place"))
        self.run_id = meta["run_id"]
        [(self._position,)] = db.execute("SELECT ifnull(max(pos), 0) FROM journal").fetchall()

    def _check_place(self, db: sqlite3.Connection, known: bytes | None) -> None:
        """A lock keeps two coordinators out of one file; that there are not two files is what this is for.

        A copy of a file is another file, with another number.  (Not so that of a whole disk: see docs/host.md.)
        """
        here = str(os.stat(self.path).st_ino).encode("ascii")
        if known == here:
            return
        if known is not None and not self.restored:
            raise UserError(
                f"{self.path}: this is a copy of the run's journal; two coordinators would tear the run apart. If "
                "the coordinator of the original does not run any more, and will not, start with --restored"
            )
        with db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('place', ?)", (here,))

    def _check_kind(self, meta: dict[str, bytes]) -> None:
        whole = meta.keys() - {"place"} == {"schema", "run_id", "manifest"} and len(meta["run_id"]) == 16
        if not whole or not meta["schema"].isdigit():
            raise UserError(f"{self.path}: not the journal of a run; {_RESTORE}")


def locked(path: Path) -> int:
    """The descriptor that holds the lock.  SQLite would let two coordinators take turns in one journal, and each would
    think it is alone."""
    lock_path, lock = f"{path}.lock", -1
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise UserError(
            f"{path}: another coordinator (process {holder}) has this journal open; "
            "stop that one first, or start this one with another data folder"
        ) from None
    except OSError as error:
        raise UserError(f"{lock_path}: cannot lock the journal: {error.strerror}") from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode("ascii"), 0)
    return lock


def agreed_manifest(
    where: str, kept: bytes, given: Manifest, records: Callable[[], Sequence[Record]]
) -> Manifest:
    """What the run began with, with what is the coordinator's own as the host gives it now.

    The file that is given says what the run began with, or what its host has amended it to, at any time: who stood by
    or was stopped since then has an older one than the newest, and goes on with the newest terms all the same.
    """
    if kept == given.canonical():
        return given
    first = Manifest.from_canonical(kept)
    amendments = _amendments_in(records())
    terms = Terms.of(first, amendments)
    if terms.includes(given):
        own = {"admission": given.admission, "net": _with_relay(first.net, given.net)}
        return first.model_copy(update=own)
    amended = f", with {len(amendments)} amendments" if amendments else ""
    raise UserError(
        f"{where}: this journal is of a run with other rules{amended}: {_first_difference(given, terms.newest)}; "
        "put the value back, or begin a new run in an empty folder; what may change while a run goes on is changed "
        "with farflung amend"
    )


def _amendments_in(records: Sequence[Record]) -> list[Amendment]:
    found: list[Amendment] = []
    for record in records:
        match record:
            case Folded(ledger=raw):
                found = list(unpacked(raw, Ledger).amendments)
            case Amended(amendment=amendment):
                found.append(amendment)
    return found


def _with_relay(run: NetSection, given: NetSection) -> NetSection:
    return run.model_copy(update={"relay": given.relay, "relay_month": given.relay_month})


def _unusable(path: Path, error: sqlite3.DatabaseError) -> UserError:
    if isinstance(error, sqlite3.OperationalError):  # the file may be fine: no permission, no space, ...
        return UserError(
            f"{path}: cannot use this journal: {error}; check the folder, its owner and its space"
        )
    return UserError(f"{path}: the journal is damaged ({error}); {_RESTORE}")


def _first_difference(wanted: Manifest, kept: Manifest) -> str:
    ours, theirs = dict(_flat(wanted)), dict(_flat(kept))
    for key, value in ours.items():
        if value != theirs[key]:
            return f"{key} is {value!r} in the file given, {theirs[key]!r} in the run"
    raise AssertionError("equal manifests have equal bytes")


def _flat(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    for section, keys in manifest.model_dump(exclude=COORDINATORS_OWN).items():
        for key, value in keys.items():
            yield f"[{section}] {key}", value
