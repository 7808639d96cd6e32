"""Brings a journal of an older format up to date when it is opened: first a backup beside it, then all at once.

Called by the journal, which holds the lock.  What changes in a record is said in migrations.py.  A death at any moment
leaves the old journal or the new one: the backup gets its name when it is whole, and the rest is one transaction.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from farflung.collectives import failpoints
from farflung.collectives.errors import UserError
from farflung.coordinator.migrations import SCHEMA_VERSION, is_older, migrated_manifest, migrated_record
from farflung.coordinator.records import UNREADABLE


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
