"""Journals that are kept for long: folded when they have grown, brought up to date when farflung has changed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.coordinator.ledger import journal as journal_module
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules, packed, unpacked
from farflung.coordinator.ledger.record_events import CoordinatorStart, RecordEvents
from farflung.coordinator.ledger.records import (
    Admitted,
    CommittedRound,
    DataFixed,
    Departed,
    DigestFixed,
    Folded,
    Genesis,
    Granted,
    HowMerged,
    Paused,
    Record,
    Started,
    Struck,
    Vouched,
)
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.errors import DepartureCause, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Lease
from farflung.protocol.process.failpoints import VARIABLE
from farflung.protocol.round_words import Commit, Used

RUN_ID = bytes(range(16))
RECORDS: list[Record] = [
    Started(incarnation=1, clock_s=0.0, wall_s=1e9),
    Admitted(peer="p", name="amber-fox", session=b"s" * 16),
    DataFixed(samples=1000, peer="p"),
    Genesis(digest=b"d" * 32, peer="p"),
    Granted(peer="p", lease=Lease(lease=1, epoch=0, start=0, stop=256, upto=0)),
    CommittedRound(
        commit=Commit(version=1, round_no=1, members=("p",), weights=(1.0,), hashes=b"h" * 32, codec="fp32"),
        used={"p": (Used(lease=1, upto=100),)},
        excluded={},
        tokens=6400,
        steps=50,
        loss=2.5,
        seconds=1.25,
        tx_bytes=4096,
        merged=HowMerged(norm=0.5),
    ),
    DigestFixed(version=1, digest=b"e" * 32),
]
PEOPLE: list[Record] = [
    Admitted(peer="q", name="bold-cat", session=b"t" * 16),
    Struck(peer="q", reason="garbage", at_s=3.0),
    Paused(reason="moving"),
    Vouched(peer="p"),
]


def opened(path: Path, manifest: Manifest | None = None) -> Journal:
    return Journal.open_or_create(path, manifest or Manifest(), lambda: RUN_ID)


def ledger_of(records: list[Record]) -> Ledger:
    ledger = Ledger(LedgerRules(256, 8))
    for record in records:
        ledger.apply(record)
    return ledger


def test_a_folded_ledger_is_the_ledger() -> None:
    """(Whole runs with deaths, fragments and steps back: the simulator folds at every second restart.)"""
    ledger = ledger_of([*RECORDS, *PEOPLE])
    again = unpacked(packed(ledger), Ledger)
    assert again == ledger
    more = Granted(peer="p", lease=Lease(lease=2, epoch=0, start=256, stop=512, upto=256))
    for record in (
        more,
        RECORDS[5],
        *PEOPLE,
    ):  # and goes on as the other does: granted, acknowledged, bounded
        ledger.apply(record)
        again.apply(record)
    assert again == ledger and again.leases.of("p") == ledger.leases.of("p")


def test_a_long_journal_is_folded_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FOLD_AFTER_BYTES", 20_000)
    path, sizes, ledger = tmp_path / "j", [], Ledger(LedgerRules(256, 8))
    with opened(path) as journal:
        for number in range(400):
            batch = [Departed(peer="p", cause=DepartureCause.LEFT, reason=f"{number} " + "x" * 500)]
            for record in batch:
                ledger.apply(record)
            journal.append(batch)
            if journal.is_long:
                journal.fold(ledger.folded)
                sizes.append(path.stat().st_size)
        folds = len(sizes)
    assert folds == 400 * 500 // 20_000 and max(sizes) < 100_000
    with opened(path) as journal:
        first, *rest = journal.records()
        assert isinstance(first, Folded) and first.position + len(rest) == 400
        journal.append([Departed(peer="p", cause=DepartureCause.LEFT, reason="one more")])
    with opened(path) as journal:
        assert len(journal.records()) == len(rest) + 2


def test_a_run_goes_on_from_a_folded_journal_as_from_the_whole_one(tmp_path: Path) -> None:
    records, more = [*RECORDS, *PEOPLE], Vouched(peer="z")
    with opened(tmp_path / "j") as journal:
        journal.append(records)
        journal.fold(RunMachine(Manifest(), RUN_ID, records, os.urandom).core.ledger.folded)
        journal.append([more])
    with opened(tmp_path / "j") as journal:
        machine = RunMachine(Manifest(), RUN_ID, journal.records(), os.urandom)
    whole = RunMachine(Manifest(), RUN_ID, [*records, more], os.urandom)
    assert machine.core.ledger == whole.core.ledger


def test_a_damaged_fold_is_told_and_not_taken_apart(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append(RECORDS)
        journal.fold(ledger_of(RECORDS).folded)
    with sqlite3.connect(tmp_path / "j") as db:
        [(body,)] = db.execute("SELECT body FROM journal").fetchall()
        db.execute("UPDATE journal SET body = ?", (body.replace(b"amber-fox", b"amber-f\xff\xff"),))
    db.close()
    with pytest.raises(UserError, match="record 7, the first that is there, does not match its checksum"):
        opened(tmp_path / "j")


def test_the_event_journal_goes_on_counting_where_the_folded_one_is(tmp_path: Path) -> None:
    ledger = ledger_of(RECORDS)
    folded = ledger.folded(len(RECORDS))
    known = [folded, Vouched(peer="z")]
    for kept in (len(RECORDS) + 1, 0):
        path = tmp_path / str(kept)
        if kept:
            before = RecordEvents(path)
            before.write_start(CoordinatorStart(Manifest(), RUN_ID, ledger, RECORDS))
            before.on_records([Vouched(peer="z")])
            before.close("a test", {})
        events = RecordEvents(path)
        events.write_start(CoordinatorStart(Manifest(), RUN_ID, ledger, known))
        events.on_records([Departed(peer="p", cause=DepartureCause.LEFT, reason="x")])
        events.close("a test", {})
        text = path.read_text()
        assert text.count('"vouched"') == 1, "written once, now or before"
        assert f'"pos":{len(RECORDS) + 2}' in text.replace(" ", "")


# ---- killed at any point -------------------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
from farflung.protocol.process import failpoints
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.protocol.manifest import Manifest
failpoints.arm()
with Journal.open_or_create(Path(sys.argv[1]), Manifest(), lambda: bytes(range(16))) as journal:
    ledger = Ledger(LedgerRules(256, 8))
    for record in journal.records():
        ledger.apply(record)
    journal.fold(ledger.folded)
print("alive")
"""


@pytest.mark.parametrize("point", ["journal.mid_fold", "journal.after_fold"])
def test_a_kill_while_it_is_folded_loses_nothing(tmp_path: Path, point: str) -> None:
    path = tmp_path / "j"
    with opened(path) as journal:
        journal.append([*RECORDS, *PEOPLE])
    command = [sys.executable, "-c", KILLED, str(path)]
    environ = os.environ | {VARIABLE: f"{point}=kill"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr
    with opened(path) as journal:
        assert ledger_of(journal.records()) == ledger_of([*RECORDS, *PEOPLE])


@pytest.mark.parametrize("schema", [1, 3, 9])
def test_a_journal_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "j"
    with opened(path) as journal:
        journal.append(RECORDS)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (b"%d" % schema,))
    db.close()
    before = path.read_bytes()
    with pytest.raises(
        UserError, match=f"written in format {schema}, this farflung reads format 4: go on with"
    ):
        opened(path)
    assert path.read_bytes() == before
