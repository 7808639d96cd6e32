"""P5: what is written down is on disk before anybody sees what follows from it.  No sockets: the server's own turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.records import Paused, Record, Resumed
from farflung.coordinator.run.effects import Allow, Effect, Forbid, Write
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.server import JOURNAL_NAME, Server
from farflung.protocol.errors import Deposed, UserError
from farflung.protocol.manifest import Manifest

KEY, OTHER = b"k" * 32, b"o" * 32
FULL = 2  # of sqlite: a transaction is on disk when its commit returns


class Diary:
    """A journal that looks at what the server has let out when it is written to."""

    def __init__(self, fails: bool = False) -> None:
        self.where, self.is_long, self.fails, self.deposed = "journal", False, fails, False
        self.appended: list[list[Record]] = []
        self.let_in: list[set[bytes]] = []  # by the server, each time that something was appended
        self.server: Server | None = None

    def check(self) -> None:
        if self.deposed:
            raise Deposed("another one leads")

    def append(self, records: Sequence[Record]) -> None:
        if self.fails:
            raise OSError("No space left on device")
        assert self.server is not None
        self.appended.append(list(records))
        self.let_in.append(set(self.server._allowed))


def server_with(diary: Diary, folder: Path) -> Server:
    machine = RunMachine(Manifest(), bytes(16), [], lambda count: bytes(count))
    diary.server = Server(machine, diary, load_or_create(folder), ListenOn("127.0.0.1", 0))  # type: ignore[arg-type]
    return diary.server


STORY: list[Effect] = [Write(Paused(reason="")), Allow(KEY), Write(Resumed()), Allow(OTHER), Forbid(KEY)]


def test_P5_all_records_of_a_turn_are_durable_before_anything_else_of_it_happens(tmp_path: Path) -> None:
    diary = Diary()
    server = server_with(diary, tmp_path)
    server._execute(STORY[:3])
    server._execute(STORY[3:])
    assert diary.appended == [] and server._allowed == set(), "nothing happens before the turn ends"
    server._carry_out()
    assert diary.appended == [[Paused(reason=""), Resumed()]], (
        "one wait for the disk, in the order of writing"
    )
    assert diary.let_in == [set()]
    assert server._allowed == {OTHER}, "and then the rest, in order"
    server._carry_out()
    assert len(diary.appended) == 1, "each once"


def test_P5_where_the_journal_takes_no_more_nothing_follows_from_what_is_not_written(tmp_path: Path) -> None:
    server = server_with(Diary(fails=True), tmp_path)
    server._execute(STORY)
    with pytest.raises(UserError, match="No space left on device; what was committed is safe"):
        server._carry_out()
    assert server._allowed == set()


def test_P5_who_may_not_lead_any_more_says_nothing_more(tmp_path: Path) -> None:
    """Also where nothing is to be written in this turn, which the store itself would refuse."""
    diary = Diary()
    server = server_with(diary, tmp_path)
    server._execute([Allow(KEY)])
    diary.deposed = True
    with pytest.raises(Deposed):
        server._carry_out()
    assert server._allowed == set() and diary.appended == []


def test_P5_the_journal_waits_for_the_disk_with_every_transaction(tmp_path: Path) -> None:
    with Journal.open_or_create(tmp_path / JOURNAL_NAME, Manifest(), lambda: bytes(16)) as journal:
        [[level]] = journal._database.execute("PRAGMA synchronous").fetchall()
        assert level >= FULL
