"""The journal: what was acknowledged is there after any death, and what can't be trusted is refused in words."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import Departed, Record
from farflung.protocol.errors import DepartureCause, UserError
from farflung.protocol.manifest import Manifest, RoundSection, RunSection
from rig.journal_records import RECORDS, RUN_ID
from rig.waiting import LONG_S


def opened(path: Path, manifest: Manifest | None = None) -> Journal:
    return Journal.open_or_create(path, manifest or Manifest(), lambda: RUN_ID)


def filled(path: Path) -> None:
    with opened(path) as journal:
        journal.append(RECORDS[:3])
        journal.append(RECORDS[3:])


def ledger_of(records: list[Record]) -> Ledger:
    ledger = Ledger(LedgerRules(256, 8))
    for record in records:
        ledger.apply(record)
    return ledger


def test_what_goes_in_comes_out_and_means_the_same(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    with Journal.open_or_create(tmp_path / "j", Manifest(), lambda: b"x" * 16) as journal:
        assert journal.run_id == RUN_ID, "the id is drawn once"
        assert journal.records() == RECORDS
        assert ledger_of(journal.records()) == ledger_of(RECORDS)


def test_two_coordinators_cannot_share_a_journal(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "j"),
        pytest.raises(UserError, match=r"another coordinator \(process \d+\) has this journal open; stop"),
    ):
        opened(tmp_path / "j")
    opened(tmp_path / "j").close()


def test_other_rules_are_another_run(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    changed = Manifest(run=RunSection(rounds=7), round=RoundSection(sync_every=9))
    with pytest.raises(
        UserError, match=r"other rules: \[run\] rounds is 7 in the file given, 100 in the run"
    ):
        opened(tmp_path / "j", changed)
    opened(tmp_path / "j").close()


# Forks writers and kills each at some random moment, so that no interpreter has to start twenty times.
KILLS = """
import os, random, signal, sys
from pathlib import Path
from farflung.coordinator.ledger.journal import Journal
from farflung.protocol.manifest import Manifest
from farflung.coordinator.ledger.records import Struck

def opened():
    return Journal.open_or_create(Path(sys.argv[1]), Manifest(), lambda: bytes(16))

def write_for_ever(number, acknowledge):
    with opened() as journal:
        while True:
            journal.append([Struck(peer="p", reason=str(each), at_s=0.0) for each in (number, number + 1)])
            number += 2
            os.write(acknowledge, b".")

opened().close()
chance, there = random.Random(1), 0
for life in range(25):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_for_ever(there, write)
    os.close(write)
    seen = len(os.read(read, 1))
    for _ in range(chance.randrange(12)):
        seen += len(os.read(read, 1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(read, 4096):
        seen += len(more)
    os.close(read)
    with opened() as journal:
        found = [record.reason for record in journal.records()]
    assert found == [str(n) for n in range(len(found))], "out of order, or a hole"
    assert len(found) % 2 == 0, "half an append"
    assert there + 2 * seen <= len(found) <= there + 2 * seen + 2, (there, seen, len(found))
    there = len(found)
print(there)
"""


@pytest.mark.slow
def test_kill_9_loses_no_acknowledged_record(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLS, str(tmp_path / "j")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 50


def test_a_torn_last_write_is_as_if_it_had_not_begun(tmp_path: Path) -> None:
    """A power cut may leave half of the last transaction in the write-ahead file."""
    torn = tmp_path / "torn"
    torn.mkdir()
    with opened(tmp_path / "j") as journal:
        journal.append(RECORDS[:3])
        journal.append(RECORDS[3:])
        for name in ("j", "j-wal"):
            shutil.copy(tmp_path / name, torn / name)
    with open(torn / "j-wal", "rb+") as wal:
        wal.truncate((torn / "j-wal").stat().st_size - 100)
    with Journal.open_or_create(torn / "j", Manifest(), lambda: RUN_ID, restored=True) as journal:
        assert journal.records() == RECORDS[:3]


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    (tmp_path / "j").write_bytes(b"not a journal at all" * 300)
    with pytest.raises(
        UserError, match="the journal is damaged .*; nothing before it can be relied on; put an intact copy"
    ):
        opened(tmp_path / "j")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            "UPDATE journal SET body = x'83a6' WHERE pos = 7",
            r"record 7 does not match its checksum; what stands before it is sound, up to version 1 \(round 1\)",
        ),
        (
            "UPDATE journal SET body = 'text' WHERE pos = 2",
            "record 2 does not match its checksum; what stands before it is sound, without any commit",
        ),
        ("UPDATE journal SET sum = x'00' WHERE pos = 3", "record 3 does not match its checksum"),
        ("DELETE FROM journal WHERE pos = 5", "record 5 is missing"),
        ("DELETE FROM journal WHERE pos < 5", "record 5, the first that is there, does not match"),
        ("DELETE FROM journal WHERE pos = 8", "after record 7 some are missing"),
        (
            "UPDATE journal SET pos = 2 * pos - 100 WHERE pos = 8",
            "record 1 is missing; nothing before it can be",
        ),
        ("UPDATE meta SET value = x'31' WHERE key = 'head'", "after record 8 some are missing"),
        (
            "UPDATE meta SET value = zeroblob(16) WHERE key = 'run_id'",
            "its run id or its rules do not match their checksum; nothing",
        ),
        ("UPDATE meta SET key = 'heap' WHERE key = 'head'", "not the journal of a run, or damaged"),
        ("DROP TABLE journal", "its tables are described wrongly"),
    ],
)
def test_a_damaged_record_is_not_skipped(tmp_path: Path, change: str, complaint: str) -> None:
    filled(tmp_path / "j")
    with sqlite3.connect(tmp_path / "j") as db:
        db.execute(change)
    db.close()
    advice = "; put an intact copy of this file in its place, or move it aside .* start with --restored"
    with pytest.raises(UserError, match=f"{complaint}.*{advice}") as told:
        opened(tmp_path / "j")
    assert "\n" not in str(told.value)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot lock the journal: No such file or directory"):
        opened(tmp_path / "nowhere" / "j")


def test_a_full_disk_is_an_error_and_appends_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append(RECORDS)
        journal._database.execute("PRAGMA max_page_count = 1")  # SQLite's own way to have no room left
        with pytest.raises(sqlite3.OperationalError, match="full"):
            journal.append([Departed(peer="p", cause=DepartureCause.LEFT, reason="x" * 5000)] * 10)
        assert journal.records() == RECORDS


def test_a_copy_of_a_journal_is_used_only_where_somebody_says_that_the_original_is_gone(
    tmp_path: Path,
) -> None:
    filled(tmp_path / "j")
    shutil.copy(tmp_path / "j", tmp_path / "copy")
    with pytest.raises(UserError, match="this is a copy of the run's journal; .* start with --restored"):
        opened(tmp_path / "copy")
    with Journal.open_or_create(tmp_path / "copy", Manifest(), lambda: RUN_ID, restored=True) as journal:
        assert journal.restored and journal.records() == RECORDS
    for path in ("j", "copy"):
        opened(tmp_path / path).close()
    (tmp_path / "copy").rename(tmp_path / "moved")
    opened(tmp_path / "moved").close()  # a file that was only moved is the same file
