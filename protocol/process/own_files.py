"""Files and folders of a run, for this user alone: so from the first byte, whatever the umask says.

Called by all that keep something of a run on a disk: keys, journals, checkpoints, what a peer keeps.  What a user asks
for by name to hand it on (`--out`, pictures) is not made here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from farflung.protocol.errors import UserError

OWN_FILE, OWN_FOLDER = 0o600, 0o700
_OTHERS = 0o077
STALE_S = 7 * 86400.0


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


def left_behind(own: Path) -> list[Path]:
    """What lies beside it, is of its kind, and was not touched for long: its peer never came back."""
    found = []
    for path in own.parent.glob("*" + own.suffix):
        with contextlib.suppress(FileNotFoundError):  # its own peer was quicker
            if path != own and time.time() - path.stat().st_mtime > STALE_S:
                found.append(path)
    return found


def sync_folder(folder: Path) -> None:
    """A new name is only there after a power cut if its folder was synced too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- model folder ------------------------------------------------------------------------------------------
# A folder that `from_pretrained` loads: put in place so that a reader finds a whole model there, or none.
#
# Owns: how such a folder is replaced; which files of one are weights, which say what they are, which a
# tokenizer's. Called by `run.save_pretrained`, `farflung checkpoint export --hf` and `farflung publish`. Must
# not know what the files hold.

# By the file without which nothing is loaded: where its weights are told, and the weights.  What an earlier save left
# of these would be read instead of the new ones, or beside them; what belongs to the other kind stays.
KINDS = {
    "config.json": ("model.safetensors.index.json", "model.safetensors", "model-*-of-*.safetensors"),
    "adapter_config.json": ("adapter_model.safetensors",),
}
# Of a tokenizer and of a processor: small, and as they are.
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


def fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """An empty folder to write into.  When the block ends well, its files are in `folder`, and no other weights are.

    Other files that lie there stay.  A process that dies before leaves at most a hidden folder beside it; one that dies
    while files are moved leaves a folder that loads not at all, and not a mixture of two models.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        if not folder.exists():
            aside.replace(folder)
        else:
            _moved_into(folder, aside)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _moved_into(folder: Path, aside: Path) -> None:
    """What says what the folder holds goes before anything changes, and comes back when all of it is there."""
    if not folder.is_dir():
        raise UserError(f"cannot write {folder}: there is a file of this name")
    for config in KINDS:
        if (aside / config).is_file():
            old = [
                path for path in sorted(folder.iterdir()) if path.is_file() and fits(path.name, KINDS[config])
            ]
            for path in (folder / config, *old):
                path.unlink(missing_ok=True)
    for path in sorted(aside.iterdir(), key=lambda path: (path.name in KINDS, path.name)):
        if path.is_dir() and (folder / path.name).is_dir():
            _moved_into(folder / path.name, path)
        else:
            path.replace(folder / path.name)


def copy_files(source: Path, target: Path, patterns: Iterable[str]) -> None:
    """Those directly in `source`; symbolic links, as of a hub's cache, are followed."""
    wanted = tuple(patterns)
    for path in sorted(source.iterdir()):
        if path.is_file() and fits(path.name, wanted):
            shutil.copyfile(path, target / path.name)
