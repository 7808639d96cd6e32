"""The belt: crossings between the agent and the trainer of one peer, in slots of a file that both have mapped.

Called by the agent (`SharedSlots.create`: it writes what came over the line and takes what was made) and by the
trainer of a stage (`SharedSlots.open`).  Whose a slot is at a moment say their words (`Hand`, `Made` in words.py).
Must not know what a crossing holds, how it is checked, who sent it.

    PATH    3 slots for each place: what came from the stage before, the gradient that came back, what is made
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from farflung.protocol.errors import UserError

PLACES = 2  # works that a trainer has at once: while it computes one, the next one lies ready
SLOTS_PER_PLACE = 3
GIVEN, RETURNED, MADE = range(SLOTS_PER_PLACE)  # slots of one place

_LINE_BYTES = 64  # a slot begins at such a border, so that whoever decodes it reads whole numbers of it


def slot_of(place: int, which: int) -> int:
    """`which`: GIVEN, RETURNED or MADE."""
    return SLOTS_PER_PLACE * place + which


class SharedSlots:
    """Slots of `slot_bytes`, mapped into this process.  ValueError for what does not fit into one of them."""

    def __init__(self, mapped: mmap.mmap, places: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = SLOTS_PER_PLACE * places
        self._whole = memoryview(mapped)

    @classmethod
    def create(cls, path: str | Path, places: int, slot_bytes: int) -> SharedSlots:
        """A new file in place of an older one, only for this user.  UserError where there is no room for all of it."""
        size = _file_bytes(places, slot_bytes)
        Path(path).unlink(missing_ok=True)  # whoever has the older one mapped keeps it
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Taken now: where a sparse file grows on a full /dev/shm, the write itself would kill the process.
            os.posix_fallocate(file, 0, size)
            mapped = mmap.mmap(file, size)
        except OSError as error:
            os.unlink(path)
            raise UserError(
                f"no room for the {-(-size >> 20)} MiB through which activations pass between agent and trainer "
                f"({path}: {error.strerror}): make /dev/shm larger (containers: --shm-size), or [pipeline] micro of "
                "run.toml smaller"
            ) from None
        finally:
            os.close(file)
        return cls(mapped, places, slot_bytes)

    @classmethod
    def open(cls, path: str | Path, places: int, slot_bytes: int) -> SharedSlots:
        """The file that the other process has made for the same numbers; ValueError if they are others."""
        size = _file_bytes(places, slot_bytes)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(file).st_size
            if found != size:
                raise ValueError(
                    f"{path} has {found} bytes; {places} places with slots of {slot_bytes} take {size}"
                )
            mapped = mmap.mmap(file, size)
        finally:
            os.close(file)
        return cls(mapped, places, slot_bytes)

    def view(self, slot: int) -> memoryview:
        """All of a slot, for whoever it belongs to at the moment: to write into, or to read without a copy."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} of a belt with {self.slots}")
        first = slot * _stride(self.slot_bytes)
        return self._whole[first : first + self.slot_bytes]

    def write(self, slot: int, payload: bytes | bytearray | memoryview) -> int:
        """Gives how many bytes it has written: those that the word names."""
        source = memoryview(payload).cast("B")
        if len(source) > self.slot_bytes:
            raise ValueError(f"a crossing of {len(source)} bytes, and a slot has {self.slot_bytes}")
        self.view(slot)[: len(source)] = source
        return len(source)

    def read(self, slot: int, nbytes: int) -> bytes:
        """A copy: the slot is soon written again."""
        if not 0 <= nbytes <= self.slot_bytes:
            raise ValueError(f"{nbytes} bytes of a slot that has {self.slot_bytes}")
        return bytes(self.view(slot)[:nbytes])


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // _LINE_BYTES) * _LINE_BYTES


def _file_bytes(places: int, slot_bytes: int) -> int:
    if places < 1 or slot_bytes < 1:
        raise ValueError(f"a belt with {places} places and slots of {slot_bytes} bytes")
    return SLOTS_PER_PLACE * places * _stride(slot_bytes)
