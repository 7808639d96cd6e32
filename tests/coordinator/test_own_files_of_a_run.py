"""A run's files are for its user alone, and a disk without room ends a coordinator in one line, wherever it ends."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.checkpoints.files import Folder
from farflung.checkpoints.kept_state import KeptResults
from rig.waiting import PATIENCE_S


def begun(folder: Path, most_bytes: int | None = None) -> subprocess.Popen[str]:
    """A coordinator under the most open of umasks."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text("run.rounds = 3")
    words = [
        "coordinate",
        str(folder / "run.toml"),
        "--data",
        str(folder / "data"),
        "--listen",
        "127.0.0.1:0",
    ]

    def alone() -> None:
        os.umask(0)
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    return subprocess.Popen(
        [sys.executable, "-m", "farflung", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=alone,
    )


def until_it_listens(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return any("farflung://" in line for line in process.stdout)


def modes_in(folder: Path) -> dict[str, int]:
    return {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}


@pytest.mark.slow
def test_files_of_a_coordinator_are_its_users_alone(tmp_path: Path) -> None:
    process = begun(tmp_path / "run")
    try:
        assert until_it_listens(process)
        folder = tmp_path / "run" / "data"
        found = modes_in(folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert found.keys() >= {"coordinator.key", "journal.sqlite", "journal.sqlite-wal", "journal.sqlite.lock"}
    assert set(found.values()) == {0o600}, found


def test_what_is_written_later_is_no_more_open(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Folder(str(tmp_path / "checkpoints")).write("v1", "chunk", [b"x"])
        KeptResults(tmp_path / "kept", b"what", 2, 1 << 20, 1 << 10).put(0, 0, 1, 0, b"payload")
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.hard
def test_a_disk_without_room_ends_a_coordinator_in_one_line_wherever_it_is(tmp_path: Path) -> None:
    """No file may be longer than so many bytes: the lock, the key, the journal, its two companions, the events."""
    ended = 0
    for most in (0, 8, 16, 40, 100, 200, 4000, 5000, 20_000, 33_000, 40_000, 50_000, 1_000_000):
        process = begun(tmp_path / str(most), most)
        if until_it_listens(process):
            process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in told, told
        if process.returncode:
            ended += 1
            assert process.returncode == 2 and len(told.strip().splitlines()) == 1, told
    assert ended >= 6
