"""The file in which a peer keeps where a run's coordinator was last, by the coordinator's own signed word.

Owned by the agent.  One file for each run, beside the peer's key, so that an old join URL still leads to a coordinator
that has moved since.  What stands in it is believed nothing: whoever reads it checks the signature.  Losing it costs a
peer no more than that, so a disk that can't be written is told once.  Must not know what a list says.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from farflung.protocol.digests import hash_bytes
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import WHEREABOUTS_BYTES
from farflung.protocol.process.log_lines import Say


class RememberedPlaces:
    def __init__(self, folder: Path, url: JoinUrl, say: Say) -> None:
        """`folder`: of this peer's state; made when there is something to keep."""
        name = hash_bytes(b"farflung/places/1\0" + url.key + url.run.encode()).hex()[:32]
        self.path = folder / f"coordinator-{name}.places"
        self._say = say
        self._failed = False

    def load(self) -> bytes:
        """Empty where nothing usable is kept."""
        try:
            # Non-blocking, because opening a pipe would otherwise wait for a writer for ever.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._tell(error)
            return b""
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b""
            raw = file.read(WHEREABOUTS_BYTES + 1)
        return raw if len(raw) <= WHEREABOUTS_BYTES else b""

    def save(self, whereabouts: bytes) -> None:
        """Written aside, then put in its place: whoever is killed in between keeps the old one."""
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(whereabouts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"{self.path}: where the coordinator is can't be kept here: {error.strerror}")
