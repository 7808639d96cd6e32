"""The files of a run at its coordinator, beside the journal: run.toml, evidence of commits, provenance."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.court import proofs
from farflung.coordinator.ledger.evidence import FORMAT, SUFFIX, Evidence
from farflung.coordinator.ledger.provenance import ROW_BYTES_MAX, ProvenanceChain
from farflung.coordinator.run.effects import KeepEvidence, KeepProof
from farflung.protocol.errors import UserError
from farflung.protocol.limits import EVIDENCE_BYTES_MOST, EVIDENCE_COMMITS_KEPT, PROOFS_KEPT
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import own_files

# ---- run file ----------------------------------------------------------------------------------------------
# `run.toml` from the disk, with what the command line says in place of its keys.
#
# Called by the console before anything large is loaded, and by the coordinator. What the keys mean is in
# manifest.py.

_KEY = r"[A-Za-z0-9_-]{1,60}"


def read_manifest(path: Path, changes: Sequence[str]) -> Manifest:
    """Who reads of a mistake sees whether it may stand in the file or on the command line."""
    name = " with ".join([str(path), *(f"--set {each}" for each in changes)])
    try:
        return Manifest.from_toml(path.read_text(encoding="utf-8"), name, [_change(each) for each in changes])
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}; `farflung init` writes one") from error


def _change(words: str) -> tuple[str, str, Any]:
    """SECTION.KEY=VALUE.  The value is TOML; a word that is none is text, since shells take quotes away."""
    where, equals, raw = words.partition("=")
    section, _, key = where.strip().partition(".")
    if not (equals and re.fullmatch(_KEY, section) and re.fullmatch(_KEY, key)):
        raise UserError(f"--set {words}: expected SECTION.KEY=VALUE, such as --set round.sync_every=50")
    if "\n" in raw:
        raise UserError(f"--set {where}: the value must be on one line")
    try:
        return section, key, tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        return section, key, raw.strip()


# ---- evidence folder ---------------------------------------------------------------------------------------
# Where the evidence of the last commits lies, and the proofs of who cheated: one file each, in a bounded
# number.
#
# Written by the server after the commit is durable, read by the audit. Must not know what evidence proves.

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


# ---- provenance file ---------------------------------------------------------------------------------------
# Where the provenance of a run lies: one file beside the journal, to which every commit adds a signed row.
#
# Written by the server after the commit is durable. It is never shortened: it is the only thing that still
# names who took part in a version when the journal was folded. Must not know what a row proves
# (ledger/provenance.py).

FILE_NAME = "provenance.jsonl"


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
