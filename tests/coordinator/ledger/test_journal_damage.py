"""Disks that lie: bits that flip in a journal, writes that are torn, and no room left at any write.

Nothing that matters passes unnoticed, and what is said is one line.  10,000 bits, and what became of them:
`FARFLUNG_LONG=1 python -m pytest -s tests/coordinator/ledger/test_journal_damage.py -k ten_thousand`.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import Record, Struck
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from rig.journal_records import RECORDS, RUN_ID

FILES = ("j", "j-wal", "j.lock")
Books = tuple[bytes, bytes, list[Record]]


def struck(number: int) -> Record:
    return Struck(peer="p", reason=f"{number}", at_s=0.0)


def opened(folder: Path) -> Journal:
    return Journal.open_or_create(folder / "j", Manifest(), lambda: RUN_ID)


def books_in(folder: Path) -> Books:
    with opened(folder) as journal:
        return journal.run_id, journal.manifest.canonical(), journal.records()


def in_use(folder: Path, folded: bool) -> dict[str, bytes]:
    """The files of a coordinator that was killed: some records in the file, the newer ones in the one beside it."""
    folder.mkdir()
    with opened(folder) as journal:
        ledger = Ledger(LedgerRules(256, 8))
        for record in RECORDS:
            ledger.apply(record)
        journal.append(RECORDS)
        if folded:
            journal.fold(ledger.folded)
        journal._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for number in range(0, 12, 2):
            journal.append([struck(number), struck(number + 1)])
        return {name: (folder / name).read_bytes() for name in FILES}


def put(folder: Path, files: dict[str, bytes]) -> None:
    """As the same file, in the same place: only what is in it is another."""
    for left in (folder / "j-wal", folder / "j-shm"):
        left.unlink(missing_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def flipped(raw: bytes, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flips(tmp_path: Path, count: int, seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    chance = random.Random(seed)
    for folded in (False, True):
        folder = tmp_path / f"{folded}-{seed}"
        files = in_use(folder, folded)
        closed = dict(files)
        put(folder, files)
        whole = books_in(folder)  # which moves all into the file
        closed = {name: (folder / name).read_bytes() for name in ("j", "j.lock")}
        for number in range(count // 2):
            before = (files, closed)[number % 2]
            # Each of its files as often as the others, however long it is.
            name = chance.choice([*before])
            bit = chance.randrange(8 * len(before[name]))
            put(folder, {**before, name: flipped(before[name], bit)})
            try:
                same = books_in(folder) == whole
            except UserError as error:
                assert "\n" not in str(error)
                found["refused"] += 1
                continue
            assert same, f"bit {bit} of {name} of the {'folded ' * folded}journal changed the books unseen"
            found["no effect"] += 1
    return found


def test_a_flipped_bit_changes_no_books_unseen(tmp_path: Path) -> None:
    found = flips(tmp_path, 300, seed=1)
    assert found["refused"] > 30 and found["no effect"] > 30, found


@pytest.mark.hard
def test_ten_thousand_flipped_bits_change_no_books_unseen(tmp_path: Path) -> None:
    found = flips(tmp_path, int(os.environ.get("FLIPS", "10000")), seed=2)
    print(f"\n{dict(found)}, 0 unseen, 0 tracebacks")


def test_each_bit_of_records_and_of_what_the_run_is_has_a_checksum(tmp_path: Path) -> None:
    """Where SQLite is right about where a value is."""
    folder = tmp_path / "j"
    in_use(folder, folded=False)
    with sqlite3.connect(folder / "j") as db:
        rows = db.execute("SELECT pos, body FROM journal").fetchall()
        kept = dict(db.execute("SELECT key, value FROM meta WHERE key != 'place'"))
        for pos, body in rows:
            db.execute(
                "UPDATE journal SET body = ? WHERE pos = ?", (flipped(body, 8 * (len(body) // 2)), pos)
            )
            db.commit()
            with pytest.raises(UserError, match=f"record {pos} does not match its checksum"):
                opened(folder)
            db.execute("UPDATE journal SET body = ? WHERE pos = ?", (body, pos))
        for key, value in kept.items():
            db.execute("UPDATE meta SET value = ? WHERE key = ?", (flipped(value, 1), key))
            db.commit()
            with pytest.raises(UserError):
                opened(folder)
            db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))
    db.close()
    assert books_in(folder)[2] == [*RECORDS, *map(struck, range(12))]


# ---- torn writes -------------------------------------------------------------------------------------


def test_what_is_torn_is_as_if_it_had_not_begun_and_what_was_acknowledged_is_missed(tmp_path: Path) -> None:
    folder = tmp_path / "j"
    with_all = in_use(folder, folded=False)
    put(folder, with_all)
    with opened(folder) as journal:
        before = {name: (folder / name).read_bytes() for name in FILES}
        known = journal.records()
        journal.append([struck(100), struck(101)])
        after = {name: (folder / name).read_bytes() for name in FILES}
    frames = len(after["j-wal"])
    for cut in (0, 1, 31, 32, 33, 100, frames // 2, frames - 4096, frames - 1):
        torn = after["j-wal"][:cut]
        put(folder, {**after, "j-wal": torn, "j.lock": before["j.lock"]})
        if len(torn) >= len(before["j-wal"]):
            assert books_in(folder)[2] == known, "nobody was answered yet"
        put(folder, {**after, "j-wal": torn})
        with pytest.raises(
            UserError, match=r"22 records were written, and after record \d+ they are missing"
        ):
            opened(folder)
    put(folder, {**after, "j.lock": b""})
    assert books_in(folder)[2] == [*known, struck(100), struck(101)], "without a lock file nothing is missed"


def test_an_older_copy_put_in_its_place_is_noticed_but_where_somebody_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.append(RECORDS)
        journal._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copy(tmp_path / "j", tmp_path / "backup")
        journal.append([struck(1)])
    (tmp_path / "j").write_bytes((tmp_path / "backup").read_bytes())
    with pytest.raises(
        UserError, match="9 records were written, and after record 8 they are missing; .*up to version 1"
    ):
        opened(tmp_path)
    with Journal.open_or_create(tmp_path / "j", Manifest(), lambda: RUN_ID, restored=True) as journal:
        assert journal.records() == RECORDS
        journal.append([struck(2)])
    assert books_in(tmp_path)[2] == [*RECORDS, struck(2)]
    (tmp_path / "j").unlink()
    with pytest.raises(UserError, match="9 records were written, and after record 0 they are missing"):
        opened(tmp_path)


# ---- no room -----------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that: SQLite and Python are told as of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_there_is_no_room_at_any_write_it_says_so_and_keeps_what_it_acknowledged(
    tmp_path: Path,
) -> None:
    told: Counter[str] = Counter()
    for number, most in enumerate(
        (0, 8, 20, 40, 512, 9000, 20_000, 33_000, 45_000, 60_000, 80_000, 120_000, 400_000)
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        acknowledged: list[Record] = []
        with files_of_at_most(most):
            try:
                with opened(folder) as journal:
                    for each in range(12):
                        batch = [struck(each), struck(1000 + each)]
                        journal.append(batch)
                        acknowledged += batch
                    told["all"] += 1
            except UserError as error:
                assert "\n" not in str(error) and (
                    "cannot use this journal" in str(error) or "cannot lock" in str(error)
                )
                told["opening"] += 1
            except (OSError, sqlite3.OperationalError):  # which the server turns into a line
                told["appending"] += 1
        found = books_in(folder)[2]
        assert found[: len(acknowledged)] == acknowledged and len(found) - len(acknowledged) in (0, 2)
    assert told["opening"] >= 3 and told["appending"] >= 2 and told["all"] >= 1, told
