"""The files in which a peer keeps what a run's coordinator signed: where it was last, and the run's newest steps.

Owned by the agent.  Two files for each run, beside the peer's key: an old join URL still leads to a coordinator that
has moved since, and a coordinator that lost its disk gets the run's history back.  What stands in them is believed
nothing: whoever reads it checks the signatures.  Losing them costs a peer no more than that, so a disk that can't be
written is told once.  Must not know what they say.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from farflung.protocol.digests import hash_bytes
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import KEPT_BOOKS_BYTES, KEPT_COMMITS, WHEREABOUTS_BYTES
from farflung.protocol.process import own_files
from farflung.protocol.process.log_lines import LineWriter

COMMITS_BYTES = (KEPT_COMMITS + 8) * KEPT_BOOKS_BYTES  # with what else is told of the run


class RememberedPlaces:
    def __init__(self, folder: Path, url: JoinUrl, say: LineWriter) -> None:
        """`folder`: of this peer's state; made when there is something to keep."""
        name = hash_bytes(b"farflung/places/1\0" + url.key + url.run.encode()).hex()[:32]
        self.path = folder / f"coordinator-{name}.places"
        self._say = say
        self._failed = False

    def load(self) -> bytes:
        """Empty where nothing usable is kept."""
        return self._load(self.path, WHEREABOUTS_BYTES)

    def save(self, whereabouts: bytes) -> None:
        self._save(self.path, whereabouts, sync=True)

    def load_commits(self) -> bytes:
        return self._load(self.path.with_suffix(".commits"), COMMITS_BYTES)

    def save_commits(self, raw: bytes) -> None:
        """At every commit, so nothing waits for the disk: a file that is not whole shows, and counts as none."""
        self._save(self.path.with_suffix(".commits"), raw, sync=False)

    def _load(self, path: Path, most: int) -> bytes:
        try:
            # Non-blocking, because opening a pipe would otherwise wait for a writer for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._tell(error)
            return b""
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b""
            raw = file.read(most + 1)
        return raw if len(raw) <= most else b""

    def _save(self, path: Path, raw: bytes, sync: bool) -> None:
        """Written aside, then put in its place: whoever is killed in between keeps the old one."""
        try:
            own_files.replaced(own_files.made_folder(path.parent) / path.name, raw, durable=sync)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"{self.path}: what the coordinator signed can't be kept here: {error.strerror}")
