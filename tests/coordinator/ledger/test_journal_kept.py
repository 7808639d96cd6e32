"""Journals that are kept for long: folded when they have grown, brought up to date when farflung has changed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from farflung.coordinator.ledger import journal as journal_module
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.journal_upgrade import SCHEMA_VERSION, STEPS, migrated_record
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.record_events import Beginning, RecordEvents
from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    Banned,
    CommittedRound,
    DataFixed,
    DecidedOn,
    Departed,
    DigestFixed,
    Folded,
    Genesis,
    Granted,
    Invited,
    Opened,
    Paused,
    Record,
    Revoked,
    Started,
    Struck,
    Vouched,
    from_bytes,
    to_bytes,
)
from farflung.coordinator.ledger.snapshot import packed, unpacked
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.causes import AbortCause, DepartureCause, ExclusionCause
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Lease
from farflung.protocol.process.failpoints import VARIABLE
from farflung.protocol.round_words import Commit, Used

HERE = Path(__file__).parent
OLD_RUN = """
[run]
name = "old-run"
rounds = 3
min_peers = 2
[model]
layers = 1
width = 16
heads = 2
context = 16
[outer]
lr = 0.7
momentum = 0.9
[round]
sync_every = 2
codec = "fp32"
gather_codec = "fp32"
deadline_s = 30.0
chunk_kb = 16
[data]
lease_samples = 64
"""
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
        norm=0.5,
    ),
    DigestFixed(version=1, digest=b"e" * 32),
]
PEOPLE: list[Record] = [
    Invited(digest=b"i" * 32, uses=3, until_s=100.0, at_s=1.0, note="lab"),
    Admitted(peer="q", name="bold-cat", session=b"t" * 16, invitation=b"i" * 32),
    Revoked(digest=b"i" * 32, reason="posted", at_s=2.0),
    Struck(peer="q", reason="garbage", at_s=3.0),
    Banned(peer="q", reason="garbage", at_s=4.0, until_s=5.0, network="192.0.2.0/24"),
    Paused(reason="moving"),
    Vouched(peer="p"),
]


def opened(path: Path, manifest: Manifest | None = None) -> Journal:
    return Journal.open_or_create(path, manifest or Manifest(), lambda: RUN_ID)


def ledger_of(records: list[Record]) -> Ledger:
    ledger = Ledger(256, 8)
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
    assert again.register.strikes["q"].maxlen == ledger.register.strikes["q"].maxlen


def test_a_long_journal_is_folded_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FOLD_AFTER_BYTES", 20_000)
    path, sizes, ledger = tmp_path / "j", [], Ledger(256, 8)
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
    with opened(tmp_path / "j") as journal, pytest.raises(UserError, match="the folded ledger is damaged"):
        journal.records()


def test_the_event_journal_goes_on_counting_where_the_folded_one_is(tmp_path: Path) -> None:
    ledger = ledger_of(RECORDS)
    folded = ledger.folded(len(RECORDS))
    known = [folded, Vouched(peer="z")]
    for kept in (len(RECORDS) + 1, 0):
        path = tmp_path / str(kept)
        if kept:
            before = RecordEvents(path)
            before.write_start(Beginning(Manifest(), RUN_ID, ledger, RECORDS))
            before.on_records([Vouched(peer="z")])
            before.close("a test", {})
        events = RecordEvents(path)
        events.write_start(Beginning(Manifest(), RUN_ID, ledger, known))
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
from farflung.coordinator.ledger.ledger import Ledger
from farflung.protocol.manifest import Manifest
failpoints.arm()
path, rules = Path(sys.argv[1]), Manifest.from_toml(Path(sys.argv[2]).read_text(), "x")
with Journal.open_or_create(path, rules, lambda: bytes(range(16)), restored=True) as journal:
    ledger = Ledger(256, 8)
    for record in journal.records():
        ledger.apply(record)
    journal.fold(ledger.folded)
print("alive")
"""


@pytest.mark.parametrize(
    "point", ["upgrade.after_backup", "upgrade.mid", "journal.mid_fold", "journal.after_fold"]
)
def test_a_kill_while_it_is_upgraded_or_folded_loses_nothing(tmp_path: Path, point: str) -> None:
    path, rules = old_journal(tmp_path)
    with restored(path.with_name("whole"), tmp_path) as journal:
        whole = ledger_of(journal.records())
    command = [sys.executable, "-c", KILLED, str(path), str(rules)]
    environ = os.environ | {VARIABLE: f"{point}=kill"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr
    with opened(path, Manifest.from_toml(OLD_RUN, "x")) as journal:  # the same file: no copy, no --restored
        found = ledger_of(journal.records())
    assert found == whole
    with sqlite3.connect(f"{path}.format-1") as backup:
        assert backup.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert backup.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == (b"1",)
    backup.close()


# ---- older formats -------------------------------------------------------------------------------------------


def made_by(schema: int, path: Path) -> Path:
    """The kept journal of an older format."""
    with sqlite3.connect(path) as db:
        db.executescript((HERE / "journals" / f"format-{schema}.sql").read_text(encoding="ascii"))
    db.close()
    return path


def old_journal(folder: Path) -> tuple[Path, Path]:
    """Of a run of two peers and three rounds, written by the records and the journal of that time; and a copy of it."""
    path, rules = made_by(1, folder / "journal.sqlite"), folder / "run.toml"
    rules.write_text(OLD_RUN)
    shutil.copy(path, folder / "whole")
    return path, rules


def restored(path: Path, folder: Path) -> Journal:
    rules = Manifest.from_toml(OLD_RUN, "x")
    return Journal.open_or_create(path, rules, lambda: b"never used 16 by", restored=True)


def test_there_is_a_step_from_each_older_format() -> None:
    assert sorted(STEPS) == list(range(1, SCHEMA_VERSION))
    assert {int(path.stem.split("-")[1]) for path in (HERE / "journals").glob("format-*.sql")} == set(STEPS)


def test_a_run_of_the_first_format_goes_on(tmp_path: Path) -> None:
    path, _ = old_journal(tmp_path)
    with opened(path, Manifest.from_toml(OLD_RUN, "x")) as journal:
        assert journal.upgraded_from == 1
        records = journal.records()
        plans = [record.plan for record in records if isinstance(record, Opened)]
        assert plans and all(plan.codecs == ("fp32", "fp32") for plan in plans)
        machine = RunMachine(Manifest.from_toml(OLD_RUN, "x"), journal.run_id, records, os.urandom)
        effects = machine.start(0.0, 7000)
        assert machine.core.ledger.version == 3 and machine.core.ledger.leases.committed_samples > 0
        assert effects and any(isinstance(record, Granted) for record in records)
    with opened(path, Manifest.from_toml(OLD_RUN, "x")) as journal:
        assert journal.upgraded_from == 0 and journal.records() == records
    with pytest.raises(UserError, match=r"\[run\] rounds is 100 in the file given, 3 in the run|other rules"):
        opened(path)


def test_a_run_of_the_second_format_goes_on_with_causes_beside_its_sentences(tmp_path: Path) -> None:
    """A simulated run with a member that spoiled its bytes, folded in the middle; some records were put in by hand."""
    path = made_by(2, tmp_path / "journal.sqlite")
    with sqlite3.connect(path) as db:
        [(kept,)] = db.execute("SELECT value FROM meta WHERE key = 'manifest'").fetchall()
        old = [
            msgspec.msgpack.decode(body) for (body,) in db.execute("SELECT body FROM journal ORDER BY pos")
        ]
    db.close()
    manifest = Manifest.from_older(kept)
    with opened(path, manifest) as journal:
        assert journal.upgraded_from == 2
        records = journal.records()
        machine = RunMachine(manifest, journal.run_id, records, os.urandom)
    departed = [record for record in records if isinstance(record, Departed)]
    aborted = [record for record in records if isinstance(record, AbortedRound)]
    assert Counter(record.cause for record in departed) == {
        DepartureCause.FINISHED: 3,
        DepartureCause.CLOSED: 1,
        DepartureCause.BANNED: 1,
        DepartureCause.UNKNOWN: 1,
    }
    assert [record.cause for record in aborted] == [AbortCause.RESTARTED, AbortCause.UNKNOWN]
    told = [each["reason"] for each in old if each["record"] in ("departed", "aborted")]
    assert [r.reason for r in records if isinstance(r, Departed | AbortedRound)] == told, "as they were"
    ledger = machine.core.ledger
    excluded = [
        {why.cause for why in record.excluded.values()} for record in ledger.rounds if record.excluded
    ]
    assert excluded == [
        {ExclusionCause.DIRECTION, ExclusionCause.OTHER_BYTES},  # of the folded ledger
        {ExclusionCause.DIRECTION, ExclusionCause.NOT_WHOLE},
    ]
    decided = [record for record in records if isinstance(record, DecidedOn) and record.decision.reasons]
    assert [set(record.causes.values()) for record in decided] == excluded[1:]
    assert ledger.delivered and ledger.version == 2 and machine.start(0.0, 7000)


def test_an_older_journal_that_is_a_copy_is_not_touched(tmp_path: Path) -> None:
    path, _ = old_journal(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO meta VALUES ('place', x'31')")
    db.close()
    with pytest.raises(UserError, match="this is a copy of the run's journal"):
        opened(path, Manifest.from_toml(OLD_RUN, "x"))
    assert not Path(f"{path}.format-1").exists()


def test_a_damaged_older_journal_is_left_as_it_is(tmp_path: Path) -> None:
    path, _ = old_journal(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE journal SET body = x'83a6' WHERE pos = 2")
    db.close()
    with pytest.raises(UserError, match="cannot be brought from format 1 to 3: .*nothing was changed"):
        opened(path, Manifest.from_toml(OLD_RUN, "x"))
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == (b"1",)
    db.close()


def test_a_step_changes_what_it_is_for_and_nothing_else() -> None:
    for record in [*RECORDS, *PEOPLE]:
        assert from_bytes(migrated_record(to_bytes(record), 1)) == record
