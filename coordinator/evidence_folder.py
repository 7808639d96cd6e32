"""Where the evidence of the last commits lies, and the proofs of who cheated: one file each, in a bounded number.

Written by the server after the commit is durable, read by the audit.  Must not know what evidence proves.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.court import proofs
from farflung.coordinator.ledger.evidence import FORMAT, SUFFIX, Evidence
from farflung.coordinator.run.effects import KeepEvidence, KeepProof
from farflung.protocol.limits import EVIDENCE_BYTES_MOST, EVIDENCE_COMMITS_KEPT, PROOFS_KEPT
from farflung.protocol.process import own_files

FOLDER_NAME = "evidence"

log = logging.getLogger("farflung.coordinator")


class EvidenceFolder:
    """Where the newest evidence lies.  A disk that takes no more costs evidence, and no round."""

    def __init__(self, folder: Path, run_id: bytes, signing: Ed25519PrivateKey) -> None:
        self._folder, self._run_id, self._signing = folder, run_id, signing

    def keep(self, effect: KeepEvidence | KeepProof) -> None:
        key = self._signing.public_key().public_bytes_raw()
        if isinstance(effect, KeepProof):
            proof = cast(proofs.Proof, effect.proof)
            if isinstance(proof, proofs.FalseClaim):
                proof = msgspec.structs.replace(
                    proof, key=key, signature=self._signing.sign(proof.signed_part())
                )
            self._write(proof.name, proofs.proof_to_bytes(proof))
            return
        bare = Evidence(FORMAT, self._run_id, effect.commit, effect.said, key)
        whole = msgspec.structs.replace(bare, signature=self._signing.sign(bare.signed_part()))
        self._write(whole.name, msgspec.msgpack.encode(whole))

    def _write(self, name: str, raw: bytes) -> None:
        try:
            own_files.replaced(own_files.made_folder(self._folder) / name, raw)
            self._forget()
        except OSError as error:
            log.warning("%s: %s is not kept: %s", self._folder, name, error)

    def _forget(self) -> None:
        """The oldest ones, where there are too many or they are too large."""
        files = sorted(self._folder.glob(f"*{SUFFIX}"), reverse=True)
        sizes = [file.stat().st_size for file in files]
        for at, file in enumerate(files):
            if at >= EVIDENCE_COMMITS_KEPT or (at and sum(sizes[: at + 1]) > EVIDENCE_BYTES_MOST):
                file.unlink()
        for old in sorted(self._folder.glob(f"*{proofs.SUFFIX}"))[:-PROOFS_KEPT]:
            old.unlink()
