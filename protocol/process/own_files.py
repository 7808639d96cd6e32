"""Files and folders of a run, for this user alone: so from the first byte, whatever the umask says.

Called by all that keep something of a run on a disk: keys, journals, checkpoints, what a peer keeps.  What a user asks
for by name to hand it on (`--out`, pictures) is not made here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

OWN_FILE, OWN_FOLDER = 0o600, 0o700
_OTHERS = 0o077


def opened(path: str | Path, flags: int) -> int:
    """For `open(..., opener=opened)`, and by itself.  A file of before that others may read is closed to them."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, OWN_FILE)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_mode & _OTHERS and found.st_uid == os.geteuid():
            os.fchmod(descriptor, OWN_FILE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def made_folder(path: Path) -> Path:
    """Those above it that are missing as well.  One that is there stays as it is: it may be /tmp, or a home."""
    missing = [path, *path.parents]
    for folder in reversed([each for each in missing if not each.exists()]):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=OWN_FOLDER)
    if not path.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(path))
    return path


def is_open_to_others(folder: Path) -> bool:
    return bool(folder.stat().st_mode & _OTHERS)


def replaced(path: Path, raw: bytes, durable: bool = False) -> None:
    """Written aside, then put in its place: whoever is killed in between leaves the old one.

    `durable`: it is there after a power cut as well.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(aside, "xb", opener=opened) as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def begun(path: Path, raw: bytes) -> None:
    """The file, unless there is one: nobody ever sees half of it, and of two who begin it one wins."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(aside, "xb", opener=opened) as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """A new name is only there after a power cut if its folder was synced too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
