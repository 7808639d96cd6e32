"""Brings a journal of an older format up to date when it is opened: first a backup beside it, then all at once.

Called by the journal, which holds the lock.  What changes in a record is said in the steps, below.  A death at any
moment leaves the old journal or the new one: the backup gets its name when it is whole, and the rest is one
transaction.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from farflung.coordinator.ledger.old_sentences import abort_cause, departure_cause, exclusion_cause
from farflung.coordinator.ledger.records import UNREADABLE
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import failpoints


def backup_path(path: Path, schema: int) -> Path:
    return path.with_name(f"{path.name}.format-{schema}")


def upgrade(db: sqlite3.Connection, path: Path, schema: int) -> None:
    """UserError if this format is not known, or something in the journal cannot be read."""
    if schema > SCHEMA_VERSION:
        raise UserError(
            f"{path}: written in format {schema} by a newer farflung, this one reads format {SCHEMA_VERSION}: "
            f"install the newer farflung again (or go back to {backup_path(path, SCHEMA_VERSION).name}, if it is there)"
        )
    if not is_older(schema):
        raise UserError(
            f"{path}: written in format {schema}, which no farflung has; is this a run's journal?"
        )
    _back_up(db, path, backup_path(path, schema))
    failpoints.hit("upgrade.after_backup")
    try:
        with db:
            [(manifest,)] = db.execute("SELECT value FROM meta WHERE key = 'manifest'").fetchall()
            changed = [("manifest", migrated_manifest(manifest, schema)), ("schema", b"%d" % SCHEMA_VERSION)]
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", changed)
            for pos, body in db.execute("SELECT pos, body FROM journal ORDER BY pos").fetchall():
                new = migrated_record(body, schema)
                if new != body:
                    db.execute("UPDATE journal SET body = ? WHERE pos = ?", (new, pos))
            failpoints.hit("upgrade.mid")
    except (*UNREADABLE, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: cannot be brought from format {schema} to {SCHEMA_VERSION}: a record cannot be read ({error}); "
            "nothing was changed: use the farflung that wrote it, or an intact copy"
        ) from error


def _back_up(db: sqlite3.Connection, path: Path, kept: Path) -> None:
    begun = kept.with_name(f"{kept.name}.part")
    begun.unlink(missing_ok=True)
    db.execute("VACUUM INTO ?", (str(begun),))
    with begun.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(begun, kept)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A new file is only there after a power cut if its folder was synced too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- one step for each older format -------------------------------------------------------------------
#
# To change the format: raise SCHEMA_VERSION, add the step from the number before, and to tests/journals/ a
# journal of that number, written by the last farflung that had it.


SCHEMA_VERSION = 3
Plain = dict[str, Any]


def _codecs_of_members(record: Plain) -> Plain:
    """Format 1 began with one codec for all members of a round, and later named each one's."""
    plan = record.get("plan")
    if record["record"] != "opened" or plan is None or "codec" not in plan:
        return record
    rest = {name: value for name, value in plan.items() if name != "codec"}
    return {**record, "plan": {**rest, "codecs": [plan["codec"]] * len(plan["members"])}}


def _causes(record: Plain) -> Plain:
    """Formats 1 and 2 told in sentences alone why a round was aborted, and who departed or was left out for what."""
    match record:
        case {"record": "aborted", "reason": reason}:
            return {**record, "cause": abort_cause(reason)}
        case {"record": "departed", "reason": reason}:
            return {**record, "cause": departure_cause(reason)}
        case {"record": "decided", "decision": {"reasons": reasons}}:
            return {**record, "causes": {peer: exclusion_cause(text) for peer, text in reasons.items()}}
        case {"record": "committed", "excluded": excluded}:
            told = {peer: {"cause": exclusion_cause(text), "text": text} for peer, text in excluded.items()}
            return {**record, "excluded": told}
        case {"record": "folded", "ledger": raw}:
            if hash_bytes(raw) != record["digest"]:
                raise msgspec.ValidationError("the folded ledger is damaged")
            ledger: Plain = msgspec.msgpack.decode(raw)
            most, rounds = ledger["rounds"]
            new = msgspec.msgpack.encode({**ledger, "rounds": [most, [_causes(each) for each in rounds]]})
            return {**record, "ledger": new, "digest": hash_bytes(new)}
        case _:
            return record


def _as_it_is(manifest: Plain) -> Plain:
    return manifest


@dataclass(frozen=True)
class Step:
    record: Callable[[Plain], Plain]
    manifest: Callable[[Plain], Plain] = _as_it_is


STEPS: dict[int, Step] = {1: Step(_codecs_of_members), 2: Step(_causes)}  # from this format to the next


def is_older(schema: int) -> bool:
    """One that there are steps from."""
    return schema in STEPS


def migrated_record(raw: bytes, schema: int) -> bytes:
    record: Plain = msgspec.msgpack.decode(raw)
    for number in range(schema, SCHEMA_VERSION):
        record = STEPS[number].record(record)
    return msgspec.msgpack.encode(record)


def migrated_manifest(raw: bytes, schema: int) -> bytes:
    """UserError if it has keys that no farflung knows any more."""
    manifest: Plain = json.loads(raw)
    for number in range(schema, SCHEMA_VERSION):
        manifest = STEPS[number].manifest(manifest)
    return Manifest.from_older(json.dumps(manifest).encode("utf-8")).canonical()
