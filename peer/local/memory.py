"""The memory that agent and trainer of one peer share; their folder is in folder.py, their channel in channel.py.

Called by the agent (`SharedState.create`) and by the trainer (`SharedState.open`).
Must not know what the messages mean, or who may write to the anchor when.

    PLACE/anchor momentum slot0 slot1 slot2 progress    PLACE is FOLDER, or another such folder with more room; with
                                                        AdamW as the outer step second_moment, too
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from farflung.peer.local.folder import counting, free_bytes, make_folder, promised_bytes, remove_folder
from farflung.peer.local.words import Shared
from farflung.protocol.errors import UserError
from farflung.protocol.outer_numbers import MOMENTUM_PARTS, PART_NAMES, VALUE_BYTES
from farflung.protocol.process import own_files

log = logging.getLogger(__name__)

Copied = TypeVar("Copied")

_MARGIN_BYTES = 16 << 20
_PAGE_BYTES = 4096
FAR = -1  # changes of an anchor that lies on another node, which a rank sees by the eyes of its partner
NOTHING_HELD = -1
LOOK_AGAIN_S = 0.01  # while the anchor changes


class VersionArriving(UserError):
    """The anchor is not one version."""


class SharedState:
    """The anchor, its moments, three delta slots and the progress counters, mapped into both processes."""

    def __init__(self, message: Shared) -> None:
        self._message = message
        self.anchor = _mapped(message.anchor, message.elements)
        self.moments = tuple(_mapped(path, message.elements) for path in message.moments)
        self.slots = tuple(_mapped(path, message.elements) for path in message.slots)
        # One aligned 8-byte store per counter: a reader never sees half of one.
        self._counts = np.memmap(message.progress, np.int64, "r+", 0, (2,))
        self._loss = np.memmap(message.progress, np.float64, "r+", 16, (1,))
        # Odd: the anchor is just changing.
        self._changes = np.memmap(message.progress, np.int64, "r+", 24, (1,))
        self._gradient = np.memmap(message.progress, np.float64, "r+", 32, (1,))
        self._version = np.memmap(message.progress, np.int64, "r+", 40, (1,))

    @classmethod
    def create(
        cls, folder: Path, elements: int, parts: Sequence[str] = PART_NAMES[:MOMENTUM_PARTS]
    ) -> SharedState:
        """`parts`: the names of those of the outer state, the parameters first."""
        names = ("anchor", *parts[1:], "slot0", "slot1", "slot2")
        size = VALUE_BYTES * elements
        with contextlib.ExitStack() as counted:
            place = _place_with_room(folder, len(names) * size + _PAGE_BYTES, counted)
            return cls._created(place, names, parts, elements)

    @classmethod
    def _created(cls, place: Path, names: Sequence[str], parts: Sequence[str], elements: int) -> SharedState:
        size = VALUE_BYTES * elements
        anchor, *rest = (str(place / name) for name in names)
        moments, slots = rest[: len(parts) - 1], rest[len(parts) - 1 :]
        progress = str(place / "progress")
        for path, size in (
            *((path, size) for path in (anchor, *rest)),
            (progress, _PAGE_BYTES),
        ):
            with open(path, "wb", opener=own_files.opened) as file:
                file.truncate(size)
        message = Shared(
            anchor=anchor,
            moments=tuple(moments),
            slots=(slots[0], slots[1], slots[2]),
            progress=progress,
            elements=elements,
        )
        state = cls(message)
        state.write_progress(0, 0, None)
        state.write_gradient_norm(None)
        state.write_version(NOTHING_HELD)
        return state

    @classmethod
    def open(cls, shared: Shared) -> SharedState:
        return cls(shared)

    @property
    def place(self) -> Path:
        """Where the files lie: not always the folder that `create` was given.  Remove both at the end."""
        return Path(self._message.anchor).parent

    @property
    def elements(self) -> int:
        return self._message.elements

    def remove(self) -> None:
        """The names only: whoever has the memory mapped keeps it until it lets go."""
        message = self._message
        for path in (message.anchor, *message.moments, *message.slots, message.progress):
            Path(path).unlink(missing_ok=True)

    def as_message(self) -> Shared:
        return self._message

    def write_progress(self, step: int, tokens: int, loss: float | None) -> None:
        self._counts[0] = step
        self._counts[1] = tokens
        self._loss[0] = math.nan if loss is None else loss

    def write_gradient_norm(self, norm: float | None) -> None:
        """Of a step of late; None: it is not known."""
        self._gradient[0] = math.nan if norm is None else norm

    def read_gradient_norm(self) -> float | None:
        norm = float(self._gradient[0])
        return norm if math.isfinite(norm) else None

    def write_version(self, version: int) -> None:
        """That the anchor holds from now on, of the least advanced fragment; written while it is torn."""
        self._version[0] = version

    def read_version(self) -> int:
        return int(self._version[0])

    def mark_torn(self, torn: bool) -> None:
        """The agent's word, before the anchor changes and when it is one version again."""
        changes = int(self._changes[0])
        self._changes[0] = changes + (changes % 2 != int(torn))

    def read_changes(self) -> int:
        """Grows whenever the anchor begins to change, and when it is one version again; odd: it is just changing."""
        return int(self._changes[0])

    def copy_whole(self, copy: Callable[[], Copied], patience_s: float) -> Copied:
        """What `copy` takes from the anchor, all of one version; VersionArriving if it is not for so long."""
        end = time.monotonic() + patience_s
        while True:
            before = int(self._changes[0])
            if before % 2 == 0:
                copied = copy()
                if int(self._changes[0]) == before:
                    return copied
            elif time.monotonic() >= end:
                raise VersionArriving(
                    "the run's next version is just arriving and does not become whole; try later"
                )
            time.sleep(LOOK_AGAIN_S)

    def read_progress(self) -> tuple[int, int, float | None]:
        loss = float(self._loss[0])
        return int(self._counts[0]), int(self._counts[1]), None if math.isnan(loss) else loss


def _place_with_room(folder: Path, bytes_needed: int, counted: contextlib.ExitStack) -> Path:
    """`folder`, or another one.  The files are sparse: on a full /dev/shm, a write in mid-step would be a SIGBUS.

    `counted`: until the files are there nobody else of this user counts the room.
    """
    wanted = bytes_needed + _MARGIN_BYTES
    counted.enter_context(counting(folder.parent))
    if free_bytes(folder) - promised_bytes(folder.parent) >= wanted:
        return folder
    place = make_folder(wanted)
    if place.parent != folder.parent:
        counted.enter_context(counting(place.parent))
    if free_bytes(place) - promised_bytes(place.parent) < wanted:
        remove_folder(place)
        raise UserError(
            f"no room for the {wanted >> 20} MiB that agent and trainer share, neither in {folder.parent} nor in "
            f"{place.parent}: make /dev/shm larger (containers: --shm-size) or set TMPDIR to a larger disk"
        )
    log.warning(
        "%s has no room for the %d MiB that agent and trainer share; they are in %s, where rounds are written to disk; "
        "make /dev/shm larger (containers: --shm-size)",
        folder.parent,
        wanted >> 20,
        place.parent,
    )
    return place


def _mapped(path: str, elements: int) -> Tensor:
    return torch.from_file(path, shared=True, size=elements, dtype=torch.float32)


# ---- memory that a process does not keep --------------------------------------------------------------

_MADV_DONTNEED = 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def unmap_pages(values_n: Tensor) -> None:
    """These shared values have been read: this process holds their pages no longer.  The values stay, in the file.

    Without it a slot that was read once would count as this process's memory for ever.
    """
    page = resource.getpagesize()
    first = -(-values_n.data_ptr() // page) * page
    last = (values_n.data_ptr() + values_n.nbytes) // page * page
    if _madvise is not None and last > first:
        _madvise(first, last - first, _MADV_DONTNEED)


# Of a shared library, which stays where it is: what lies at the place of a file that another thread closes meanwhile
# would be lost.
_TEXT = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ [1-9]\d* .*\.so\b")


def let_go_of_text() -> None:
    """Importing torch runs through 90 MB of program text and constants, of which hardly any is needed again.

    What is comes back from the page cache, 64 KB at a time.
    """
    if _madvise is not None:
        for first, end in _unchanged_text():
            _madvise(first, end - first, _MADV_DONTNEED)


def _unchanged_text() -> list[tuple[int, int]]:
    """Only what is still as the file has it: pages that a loader or a debugger has changed exist nowhere else."""
    found: list[tuple[int, int]] = []
    mapping: re.Match[str] | None = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "-" in line.partition(" ")[0]:
            mapping = _TEXT.match(line)
        elif mapping is not None and line.split() == ["Anonymous:", "0", "kB"]:
            found.append((int(mapping[1], 16), int(mapping[2], 16)))
    return found
