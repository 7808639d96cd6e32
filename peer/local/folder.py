"""The private folder that agent and trainer of one peer share, and whose it is.

Made by `farflung join` or by a training script before either of its processes has loaded torch: this module must not
load it.  The channel in it is channel.py's, the memory memory.py's.

    FOLDER/lock    flock, held as long as the process that made the folder lives
    FOLDER/about   where the run's state lies, for commands of the same user
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from farflung.protocol.errors import UserError
from farflung.protocol.process import own_files

_PREFIX = "farflung-"
_ABOUT = "about"
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 1 << 30  # wanted when the model is not known yet; containers often get only 64 MB of /dev/shm


def make_folder(room_bytes: int = _ROOM_BYTES) -> Path:
    """A private folder, in memory where there is room.  Its lock is held for the life of this process."""
    usable = os.access(_MEMORY, os.W_OK) and os.path.ismount(_MEMORY) and free_bytes(_MEMORY) >= room_bytes
    home = _MEMORY if usable else Path(tempfile.gettempdir())
    # Locked first and named afterwards, so that nobody sweeps it away in between.  mkdtemp makes it 0700.
    new = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}{os.getpid()}-", dir=home))
    lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the descriptor stays open: only the end of this process lets go of it
    return new.rename(home / new.name.removeprefix("new-"))


@contextlib.contextmanager
def counting(home: Path) -> Iterator[None]:
    """One peer of this user at a time: two that start at once would both be promised the same room."""
    path = home / f".{_PREFIX}room-{os.getuid()}"
    try:
        lock = own_files.opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be opened: {error.strerror}; is {home} full, or is that not yours?"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def promised_bytes(home: Path) -> int:
    """What files of living peers of this user may still grow by: they are sparse, and their room looks free."""
    promised = 0
    for folder in home.glob(f"{_PREFIX}*-*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or is_abandoned(folder):
                continue
            sizes = [file.stat() for file in folder.iterdir()]
        except OSError:  # its peer has removed it just now
            continue
        promised += sum(max(0, each.st_size - 512 * each.st_blocks) for each in sizes)
    return promised


def remove_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Whether the process that made the folder is gone, however it ended."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return not folder.exists()  # without a lock it is being made, or is not ours to judge
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def sweep_stale() -> list[Path]:
    """Remove what peers of this user left behind when they were killed; returns what was removed."""
    removed = []
    for home in {_MEMORY, Path(tempfile.gettempdir())}:
        for folder in home.glob(f"{_PREFIX}*-*"):
            try:
                mine = folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
            except OSError:  # somebody else removed it just now
                continue
            if mine and is_abandoned(folder):
                remove_folder(folder)
                removed.append(folder)
    return removed


def write_about(folder: Path, about: bytes) -> None:
    own_files.replaced(folder / _ABOUT, about)


def abouts() -> Iterator[bytes]:
    """Of this user's peers that run on this machine."""
    for home in {_MEMORY, Path(tempfile.gettempdir())}:
        for folder in sorted(home.glob(f"{_PREFIX}*-*")):
            with contextlib.suppress(OSError):  # it has told nothing yet, or was removed just now
                mine = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
                if mine and not is_abandoned(folder):
                    yield (folder / _ABOUT).read_bytes()


def free_bytes(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize
