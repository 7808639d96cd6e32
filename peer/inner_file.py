"""The file in which an optimizer's state passes between agent and trainer: where it lies, and its hash.

Used by donor.py, whose trainer writes it, and heir.py, whose trainer reads it.  Must not know what the file holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from farflung.peer.capture import Submit, nothing
from farflung.peer.local import place_with_room, remove_folder

HASHED_AT_ONCE = 32 << 20  # arithmetic of rounds goes in between


class InnerFile:
    """A name in the agent's folder, or in a folder of its own where that one is full.  Nothing is written here."""

    def __init__(self, folder: Path, name: str, bytes_needed: int) -> None:
        """UserError: there is no room for so many bytes."""
        self._folder, self._place = folder, place_with_room(folder, bytes_needed)
        self.path = self._place / name

    def remove(self) -> None:
        """What still reads it keeps it alive; its name goes at once."""
        self.path.unlink(missing_ok=True)
        if self._place != self._folder:
            remove_folder(self._place)


def hash_beside(
    submit: Submit, size: int, read: Callable[[int, int], bytes | memoryview], then: Callable[[object], None]
) -> None:
    """In the arithmetic thread; `read(at, most)` gives bytes of it, `then` hears the digest in the agent's loop."""
    hasher = blake3()
    for at in range(0, size, HASHED_AT_ONCE):
        submit(lambda at=at: hasher.update(read(at, HASHED_AT_ONCE)), nothing)  # type: ignore[misc]
    submit(hasher.digest, then)
