"""The allowlist: a file in the data folder, one peer id a line, read again whenever it has changed.

Called by the server.  A file that cannot be read lets in nobody new: the list that was read last stays.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from farflung.coordinator.admission.admission import Admission
from farflung.coordinator.modes.registry import ServerHand
from farflung.protocol.process import own_files

FILE_NAME = "allowlist.txt"
FILE_BYTES = 1 << 20
_PEER_ID = re.compile(r"[a-z2-7]{16}")
BEGINNING = """\
# Peers that may take part in this run: one id a line, for example
#   abcdefghijklmnop   Ann's box
# `farflung join` prints the id of its peer.  Read again when it changes.
"""

log = logging.getLogger("farflung.coordinator")


class Allowlist:
    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self.ids: frozenset[str] = frozenset()
        self._seen: tuple[int, int] | None = None

    def create(self) -> None:
        """An empty one with a word on how to fill it, unless there is one.  Without it nobody new comes in."""
        try:
            if not self.path.exists():
                own_files.replaced(self.path, BEGINNING.encode("utf-8"))
        except OSError as error:  # the run goes on for those who are in; the host may still write it
            log.warning("%s: cannot be written (%s); write it yourself", self.path, error)

    def refreshed(self) -> frozenset[str]:
        try:
            found = self.path.stat()
            if (found.st_mtime_ns, found.st_size) != self._seen:
                self._seen = (found.st_mtime_ns, found.st_size)
                self._read(self.path.read_text(encoding="utf-8")[:FILE_BYTES])
        except (OSError, UnicodeDecodeError) as error:
            if self._seen is not None:
                self._seen = None
                log.warning("%s: cannot be read (%s); the list stays as it was", self.path, error)
        return self.ids

    def _read(self, text: str) -> None:
        ids, problems = parsed(text)
        for problem in problems[:5]:
            log.warning("%s: %s", self.path, problem)
        if ids != self.ids:
            log.info("%s: %d peers may take part", self.path, len(ids))
        self.ids = ids


def parsed(text: str) -> tuple[frozenset[str], list[str]]:
    """(the ids, what is wrong with other lines)."""
    ids, problems = set(), []
    for number, line in enumerate(text.splitlines(), 1):
        first = line.partition("#")[0].split()[:1]
        if first and _PEER_ID.fullmatch(first[0]):
            ids.add(first[0])
        elif first:
            problems.append(f"line {number}: {first[0][:40]!r} is no peer id: 16 of a-z and 2-7")
    return frozenset(ids), problems


class AllowlistHand(ServerHand):
    """Reads the list from when on the host wants one: from the beginning, or by an amendment."""

    def __init__(self, mode: Admission, folder: Path) -> None:
        self._mode = mode
        self._folder = folder
        self._list: Allowlist | None = None

    def look(self) -> None:
        if self._mode.rules.mode != "allowlist":
            return
        if self._list is None:
            self._list = Allowlist(self._folder)
            self._list.create()
        self._mode.allowed = self._list.refreshed()


hand = AllowlistHand
