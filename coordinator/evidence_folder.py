"""Where the evidence of the last commits lies: one file each, signed by the coordinator, in a bounded number.

Written by the server after the commit is durable, read by the audit.  Must not know what evidence proves.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.ledger.evidence import FORMAT, SUFFIX, Evidence
from farflung.coordinator.run.effects import KeepEvidence, KeepRefutation
from farflung.protocol.limits import EVIDENCE_BYTES_MOST, EVIDENCE_COMMITS_KEPT

FOLDER_NAME = "evidence"

log = logging.getLogger("farflung.coordinator")


class EvidenceFolder:
    """Where the newest evidence lies.  A disk that takes no more costs evidence, and no round."""

    def __init__(self, folder: Path, run_id: bytes, signing: Ed25519PrivateKey) -> None:
        self._folder, self._run_id, self._signing = folder, run_id, signing

    def keep(self, effect: KeepEvidence) -> None:
        key = self._signing.public_key().public_bytes_raw()
        bare = Evidence(FORMAT, self._run_id, effect.commit, effect.said, key)
        whole = msgspec.structs.replace(bare, signature=self._signing.sign(bare.signed_part()))
        aside = self._folder / f".{whole.name}"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            aside.write_bytes(msgspec.msgpack.encode(whole))
            os.replace(aside, self._folder / whole.name)
            self._forget()
        except OSError as error:
            log.warning(
                "%s: evidence of round %d is not kept: %s", self._folder, effect.commit.round_no, error
            )

    def keep_refutation(self, effect: KeepRefutation) -> None:
        log.warning("a state of version %d was proven wrong: %s", effect.version, ", ".join(effect.peers))

    def _forget(self) -> None:
        """The oldest ones, where there are too many or they are too large."""
        files = sorted(self._folder.glob(f"*{SUFFIX}"), reverse=True)
        sizes = [file.stat().st_size for file in files]
        for at, file in enumerate(files):
            if at >= EVIDENCE_COMMITS_KEPT or (at and sum(sizes[: at + 1]) > EVIDENCE_BYTES_MOST):
                file.unlink()
