"""Files and folders of a run are for this user alone, from the first byte, whatever the umask says."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farflung.protocol.process import own_files


@pytest.fixture(autouse=True, params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    with open(tmp_path / "new", "wb", opener=own_files.opened):
        assert mode_of(tmp_path / "new") == 0o600, "before anything is in it"
    own_files.replaced(tmp_path / "replaced", b"x")
    own_files.begun(tmp_path / "begun", b"x")
    for name in ("new", "replaced", "begun"):
        assert mode_of(tmp_path / name) == 0o600
    own_files.made_folder(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a") == mode_of(tmp_path / "a" / "b") == 0o700


def test_a_file_of_before_is_closed_to_others_and_a_folder_is_told(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"secret")
    old.chmod(0o644)
    with open(old, "ab", opener=own_files.opened):
        assert mode_of(old) == 0o600
    assert old.read_bytes() == b"secret"
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    own_files.made_folder(shared)
    assert mode_of(shared) == 0o755, "it may be a home, or /tmp"
    assert own_files.is_open_to_others(shared)
    shared.chmod(0o700)
    assert not own_files.is_open_to_others(shared)


def test_no_folder_is_made_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        own_files.made_folder(tmp_path / "file")


def test_who_cannot_write_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_files.replaced(tmp_path / "kept", b"old")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            own_files.replaced(tmp_path / "kept", b"new", durable=True)
        with pytest.raises(OSError, match="No space left"):
            own_files.begun(tmp_path / "other", b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_of_two_who_begin_a_file_one_wins(tmp_path: Path) -> None:
    said = [bytes([number]) * 1000 for number in range(8)]
    threads = [threading.Thread(target=own_files.begun, args=(tmp_path / "key", each)) for each in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "key").read_bytes() in said and len(list(tmp_path.iterdir())) == 1
