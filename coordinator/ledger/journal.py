"""Owns the run's memory on disk: an SQLite file of records in order, and the lock that keeps it single.

Called by the server, which lets nothing leave the process before `append` has returned (P5): one of two that keep to
run_store.py, for a coordinator with a folder of its own.  Knows bytes and order only: what a record means is the
ledger's business.  A journal that has grown long is folded into one record, the ledger.

Who may lie: the disk, and whoever copied the file.  Each record has a checksum that runs on through all
(run_store.py), and the file says which one is the newest.  The lock file beside it says that as well: what SQLite
takes for the torn end of its write-ahead file, and leaves out, may be a flipped bit in what was acknowledged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from farflung.coordinator.ledger.ledger import Ledger, unpacked
from farflung.coordinator.ledger.records import UNREADABLE, Amended, Folded, Record, from_bytes, to_bytes
from farflung.coordinator.ledger.run_store import SCHEMA_VERSION, RecordChain, damaged
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import COORDINATORS_OWN, Manifest, NetSection
from farflung.protocol.process import failpoints, own_files
from farflung.protocol.run_terms import Terms
from farflung.protocol.signing import Amendment

FOLD_AFTER_BYTES = 16 << 20  # of records since it was folded last
RUN_ID_BYTES = 16
_RESTORE = (
    "put an intact copy of this file in its place, or move it aside and leave coordinator.key where it is, and start "
    "with --restored: peers give back what is missing"
)
_TABLES = (
    "CREATE TABLE journal(pos INTEGER PRIMARY KEY, body BLOB NOT NULL, sum BLOB NOT NULL)",
    # Without an index beside it, which could say something else than the table.
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
)
_WHAT_IT_IS = ("schema", "run_id", "manifest", "sum", "head")  # all in `meta`, but for the file's own place
# The latter: what SQLite complains of quotes the damaged file.
_UNUSABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
# What SQLite says of a folder or a disk, and not of the bytes in the file.
_OF_THE_PLACE = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}


class Journal:
    """One run's records, in order.  `append` returns when they would survive a power cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = b""
        self.manifest = Manifest()  # that the run began with
        self.restored = False  # it takes the place of another one, which must not be followed any more
        self._chain = RecordChain.of(b"", b"")  # through the newest record
        self._grown_bytes = 0  # since it was folded
        self._lock = -1
        self._db: sqlite3.Connection | None = None

    @classmethod
    def open_or_create(
        cls, path: Path, manifest: Manifest, new_run_id: Callable[[], bytes], restored: bool = False
    ) -> Journal:
        """The journal of this manifest's run, begun if there is none; UserError if it is another run's, a copy, or
        damaged.

        `restored`: somebody says that it takes the place of another one, which is not in use any more.
        """
        journal = cls(path)
        journal.restored = restored
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(journal.close)
            journal._lock = locked(path)
            try:
                journal._open(manifest, new_run_id)
            except _UNUSABLE as error:
                raise _unusable(path, error) from error
            except OSError as error:
                raise UserError(f"{path}: cannot use this journal: {error.strerror}") from error
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
        try:
            bodies = self._sound_bodies()
        except _UNUSABLE as error:
            raise _unusable(self.path, error) from error
        records: list[Record] = []
        first = self._chain.position - len(bodies) + 1
        for position, body in enumerate(bodies, first):
            try:
                records.append(from_bytes(body))
            except UNREADABLE as error:
                raise UserError(
                    f"{self.path}: record {position} is as it was written and cannot be read ({error}): a newer "
                    "farflung wrote it; start that one again"
                ) from error
        return records

    def append(self, records: Sequence[Record]) -> None:
        """All of them or none.  A full disk is an sqlite3.OperationalError, and nothing was appended."""
        chain, rows = self._chain, []
        for body in map(to_bytes, records):
            chain = chain.then(body)
            rows.append((chain.position, body, chain.check))
        with self._database as transaction:
            transaction.executemany("INSERT INTO journal VALUES (?, ?, ?)", rows)
            transaction.execute(_SET_HEAD, (chain.head,))
            failpoints.hit("journal.mid_write")
        self._chain = chain
        self._grown_bytes += sum(len(body) for _, body, _ in rows)
        self._witness()

    @property
    def is_long(self) -> bool:
        return self._grown_bytes >= FOLD_AFTER_BYTES

    def fold(self, folded: Callable[[int], Folded]) -> None:
        """Put `folded(position)`, what all records up to there made, in their place: all of it or nothing.

        The file does not get smaller by that; its pages are used again.
        """
        position = self._chain.position
        body = to_bytes(folded(position))
        chain = self._chain.before_fold_at(position).then(body)
        with self._database as transaction:
            transaction.execute("DELETE FROM journal WHERE pos <= ?", (position,))
            transaction.execute("INSERT INTO journal VALUES (?, ?, ?)", (position, body, chain.check))
            transaction.execute(_SET_HEAD, (chain.head,))
            failpoints.hit("journal.mid_fold")
        self._chain = chain
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
        for ending in ("", "-wal", "-shm"):  # SQLite gives its two files the mode of the first
            if not ending or os.path.exists(f"{self.path}{ending}"):
                os.close(own_files.opened(f"{self.path}{ending}", os.O_RDWR | os.O_CREAT))
        self._db = db = sqlite3.connect(self.path)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        tables = db.execute("SELECT sql FROM sqlite_master ORDER BY rowid").fetchall()
        if not tables and db.execute("PRAGMA page_count").fetchall() in (
            [(0,)],
            [(1,)],
        ):  # else they cannot be seen
            self._create(db, manifest, new_run_id())
            tables = [(table,) for table in _TABLES]
        meta: dict[str, bytes] = dict(db.execute("SELECT key, value FROM meta"))
        self._check_kind(meta)
        if tables != [(table,) for table in _TABLES]:
            raise self._damaged("its tables are described wrongly", [])
        self._chain = RecordChain.of(meta["run_id"], meta["manifest"])
        if meta["sum"] != self._chain.check:
            raise self._damaged("its run id or its rules do not match their checksum", [])
        self._sound_bodies()
        self.manifest = agreed_manifest(str(self.path), meta["manifest"], manifest, self.records)
        self._check_place(db, meta.get("place"))
        self.run_id = meta["run_id"]

    def _create(self, db: sqlite3.Connection, manifest: Manifest, run_id: bytes) -> None:
        self._check_witness(0, [])
        start = RecordChain.of(run_id, manifest.canonical())
        values = (b"%d" % SCHEMA_VERSION, run_id, manifest.canonical(), start.check, start.head)
        with db:
            db.execute("BEGIN")
            for table in _TABLES:
                db.execute(table)
            db.executemany("INSERT INTO meta VALUES (?, ?)", zip(_WHAT_IT_IS, values, strict=True))
        own_files.sync_folder(self.path.parent)

    def _sound_bodies(self) -> list[bytes]:
        """UserError, if a record is damaged or missing.  `_chain` goes through the newest one after it."""
        chain, bodies, grown = self._chain.before_fold_at(1), list[bytes](), 0
        for pos, body, check in self._database.execute("SELECT pos, body, sum FROM journal ORDER BY pos"):
            if not bodies and isinstance(pos, int) and pos > 1:  # of a fold alone
                chain = chain.before_fold_at(pos)
            # Positions count without a gap, so a lost record can't pass unnoticed.
            if pos != chain.position + 1:
                raise self._damaged(f"record {chain.position + 1} is missing", bodies)
            if not isinstance(body, bytes) or chain.then(body).check != check:
                first = "" if bodies or pos == 1 else ", the first that is there,"
                raise self._damaged(f"record {pos}{first} does not match its checksum", bodies)
            chain = chain.then(body)
            grown += len(body) if bodies or pos == 1 else 0
            bodies.append(body)
        head = self._database.execute("SELECT value FROM meta WHERE key = 'head'").fetchall()
        if head != [(chain.head,)]:
            raise self._damaged(f"after record {chain.position} some are missing", bodies)
        self._check_witness(chain.position, bodies)
        self._chain, self._grown_bytes = chain, grown
        return bodies

    def _damaged(self, what: str, sound: Sequence[bytes]) -> UserError:
        return damaged(str(self.path), what, sound, _RESTORE)

    # ---- the witness -------------------------------------------------------------------------------------

    def _witness(self) -> None:
        """Written after what it says is durable, and not waited for: so it is true, or says less, after a power cut."""
        os.pwrite(self._lock, _witness_of(self._chain.position), _WITNESS_AT)

    def _check_witness(self, position: int, sound: Sequence[bytes]) -> None:
        """One that is damaged itself says nothing."""
        written = _witnessed(os.pread(self._lock, _WITNESS_BYTES, _WITNESS_AT))
        if written > position and not self.restored:
            what = f"{written} records were written, and after record {position} they are missing"
            raise self._damaged(what, sound)

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
        schema = meta.get("schema", b"")
        if isinstance(schema, bytes) and schema.isdigit() and int(schema) != SCHEMA_VERSION:
            raise UserError(
                f"{self.path}: written in format {int(schema)}, this farflung reads format {SCHEMA_VERSION}: "
                "go on with the farflung that wrote it, or begin a new run in an empty folder"
            )
        whole = meta.keys() - {"place"} == set(_WHAT_IT_IS) and all(
            isinstance(value, bytes) for value in meta.values()
        )
        if not whole or not schema.isdigit() or len(meta["run_id"]) != RUN_ID_BYTES:
            raise UserError(f"{self.path}: not the journal of a run, or damaged; {_RESTORE}")


_SET_HEAD = "UPDATE meta SET value = ? WHERE key = 'head'"
_PID_BYTES = 16  # of the lock file: who holds it; what follows is the witness
_WITNESS_AT, _WITNESS_BYTES = _PID_BYTES, 34


def _witness_of(position: int) -> bytes:
    said = b"%016x" % position
    return b"%s %s\n" % (said, hash_bytes(said).hex()[:16].encode("ascii"))


def _witnessed(said: bytes) -> int:
    try:
        position = int(said[:16], 16)
    except ValueError:
        return 0
    return position if said == _witness_of(position) else 0


def locked(path: Path) -> int:
    """The descriptor that holds the lock.  SQLite would let two coordinators take turns in one journal, and each would
    think it is alone."""
    lock_path, lock = f"{path}.lock", -1
    try:
        lock = own_files.opened(lock_path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(lock, f"{os.getpid()}\n".rjust(_PID_BYTES).encode("ascii"), 0)
    except BlockingIOError:
        holder = os.pread(lock, _PID_BYTES, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise UserError(
            f"{path}: another coordinator (process {holder}) has this journal open; "
            "stop that one first, or start this one with another data folder"
        ) from None
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        raise UserError(
            f"{lock_path}: cannot lock the journal: {error.strerror}; check the folder, its owner and its space"
        ) from error
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
    return run.model_copy(update={"relay": given.relay})


def _unusable(path: Path, error: Exception) -> UserError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code in _OF_THE_PLACE:  # the file may be fine: no permission, no space, ...
        return UserError(
            f"{path}: cannot use this journal: {error}; check the folder, its owner and its space"
        )
    return damaged(str(path), f"the journal is damaged ({error})", [], _RESTORE)


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
