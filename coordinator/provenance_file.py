"""Where the provenance of a run lies: one file beside the journal, to which every commit adds a signed row.

Written by the server after the commit is durable.  It is never shortened: it is the only thing that still names who
took part in a version when the journal was folded.  Must not know what a row proves (ledger/provenance.py).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.ledger.provenance import ROW_BYTES_MAX, ProvenanceChain
from farflung.coordinator.run.effects import KeepEvidence
from farflung.protocol.process import own_files

FILE_NAME = "provenance.jsonl"

log = logging.getLogger("farflung.coordinator")


class ProvenanceFile:
    """A disk that takes no more costs rows, and no round."""

    def __init__(self, path: Path, run_id: bytes, signing: Ed25519PrivateKey) -> None:
        self._path = path
        key = signing.public_key().public_bytes_raw()
        self._chain = ProvenanceChain(run_id, key, signing.sign, self._last_line())

    def keep(self, effect: KeepEvidence) -> None:
        line = self._chain.next(effect.commit, effect.said)
        try:
            with open(self._path, "ab", opener=own_files.opened) as file:
                file.write(line + b"\n")
        except OSError as error:
            told = "who took part in round %d is not kept: %s"
            log.warning("%s: " + told, self._path, effect.commit.round_no, error.strerror)

    def _last_line(self) -> bytes:
        """What a killed coordinator had half written goes, so that the next row begins a line."""
        try:
            with open(self._path, "r+b", opener=own_files.opened) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 2 * ROW_BYTES_MAX))
                tail = file.read()
                whole = tail[: tail.rfind(b"\n") + 1]
                file.truncate(size - len(tail) + len(whole))
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("%s: cannot be read: %s", self._path, error.strerror)
            return b""
        return whole.rstrip(b"\n").rpartition(b"\n")[2]
