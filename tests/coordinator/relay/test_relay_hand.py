"""The relay in the hand of its mode: hiccups are not heard of, and a month ends."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from farflung.coordinator.relay.relay_hand import BACK_WITHIN_S, SAVED_EVERY_S, Month, RelayHand
from farflung.coordinator.relay.relay_words import PairsCounted
from farflung.coordinator.run.effects import Note
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest, NetSection

JULY, AUGUST = 1_783_000_000.0, 1_786_000_000.0  # seconds since 1970, of 2026


class Process:
    """A relay's process, without one."""

    def __init__(self) -> None:
        self.port: int | None = None
        self.why_not = "it has not begun to listen yet"
        self.bytes_per_s = 1e6
        self.says: list[PairsCounted] = []
        self.closed = False

    def receive(self, now: float) -> Iterator[PairsCounted]:
        says, self.says = self.says, []
        yield from says

    def close(self) -> None:
        self.closed = True


def counted(moved: int, pairs: int = 1) -> PairsCounted:
    return PairsCounted(pairs=pairs, waiting=0, guests=0, moved_bytes=moved, refused=2)


@pytest.fixture
def machine() -> RunMachine:
    found = RunMachine(Manifest(), bytes(16), [], lambda size: bytes(size))
    found.start(0.0, 1)
    return found


def relaying(machine: RunMachine, path: Path, limit: int = 1000) -> tuple[RelayHand, Process]:
    process = Process()
    hand = RelayHand(machine.modes["reach"], path.parent)
    hand.keep(process, Month.load(path, limit))  # type: ignore[arg-type]
    return hand, process


def test_a_relay_that_is_back_soon_is_no_news_and_one_that_stays_away_is(
    machine: RunMachine, tmp_path: Path
) -> None:
    shell, process = relaying(machine, tmp_path / "relay.json")
    ways = machine.core.members.ways
    shell.turn(0.0, JULY)
    assert ways.relays.own is None and "not begun" in ways.why_no_relay
    process.port = 29802
    [news] = shell.turn(1.0, JULY)
    assert isinstance(news, Note) and "on port 29802" in news.text and ways.relays.own is not None
    process.port, process.why_not = None, "killed by SIGKILL"
    assert shell.turn(2.0, JULY) == [] and shell.turn(2.0 + BACK_WITHIN_S - 0.1, JULY) == []
    [news] = shell.turn(2.0 + BACK_WITHIN_S, JULY)
    assert isinstance(news, Note) and "killed by SIGKILL" in news.text and ways.relays.own is None
    process.port = 29802
    assert len(shell.turn(30.0, JULY)) == 1 and ways.relays.own is not None


def test_a_month_that_is_used_up_closes_it_until_the_next_one_also_after_a_restart(
    machine: RunMachine, tmp_path: Path
) -> None:
    path = tmp_path / "relay.json"
    shell, process = relaying(machine, path)
    process.port = 29802
    process.says = [counted(600), counted(399)]
    shell.turn(0.0, JULY)
    ways = machine.core.members.ways
    assert ways.relays.own is not None and ways.usage.moved_bytes == 999 and ways.usage.refused == 4
    process.says = [counted(1)]
    shell.turn(1.0, JULY)
    assert ways.relays.own is None and "of 2026-07 ([net] relay)" in ways.why_no_relay
    shell.close()
    assert process.closed
    again, process = relaying(machine, path)
    process.port = 29802
    again.turn(2.0, JULY + 5.0)
    assert ways.relays.own is None and ways.usage.month_bytes == 1000
    again.turn(3.0, AUGUST)
    assert ways.relays.own is not None and ways.usage.month_bytes == 0


def test_it_is_written_down_now_and_then_and_a_damaged_file_is_no_end(
    machine: RunMachine, tmp_path: Path
) -> None:
    path = tmp_path / "relay.json"
    path.write_text("{")
    shell, process = relaying(machine, path)
    shell.turn(0.0, JULY)
    process.says = [counted(7)]
    shell.turn(SAVED_EVERY_S, JULY)
    assert Month.load(path, 1).used_bytes == 7
    path.unlink()
    path.mkdir()
    shell.close()  # it says so in the log


def test_what_is_written_of_a_month_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Month(tmp_path / "relay.json", 1).save()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "relay.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "5 Mbit/s 08:00-10:00",
        "fast",
        "5 Mbit/s, 1",
        "5 Mbit/s, off",
        "5 Mbit/s, 1 a month",
        "5 Mbit/s, port 9",
    ],
)
def test_what_a_relay_may_pass_is_a_rate_and_a_size(text: str) -> None:
    with pytest.raises(UserError, match=r"\[net\] relay"):
        Manifest.from_toml(f'[net]\nrelay = "{text}"\n', "run.toml")


def test_a_host_may_change_what_its_relay_passes_without_another_run() -> None:
    other = Manifest(net=NetSection(relay="50 Mbit/s, 5 TB a month"))
    assert other.digest == Manifest().digest and other.canonical() == Manifest().canonical()
