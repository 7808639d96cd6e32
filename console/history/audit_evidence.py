"""Of the audit: the evidence that the coordinator kept, checked signature by signature, and asked who sent some bytes.

Called by the command line with the folder of a run, or with one file that is to convict somebody.  Believes no file:
only what is signed, and what is calculated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from farflung.console.history.finding import Finding
from farflung.console.history.history import History
from farflung.coordinator.court.proofs import SUFFIX as PROOF_SUFFIX
from farflung.coordinator.court.proofs import Proof, proof_from_bytes
from farflung.coordinator.ledger.evidence import SUFFIX, Evidence
from farflung.coordinator.ledger.records import UNREADABLE
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.limits import PROOF_BYTES_MOST
from farflung.protocol.round_words import result_name
from farflung.protocol.signing import curve_key_of

FILE_BYTES_MAX = 16 << 20  # 64 of the longest hash lists, and a commit
PROOF_FILE_BYTES_MAX = FILE_BYTES_MAX + PROOF_BYTES_MOST


def check_evidence(folder: Path, history: History) -> Finding:
    finding = Finding("P9", "hash lists signed by who sent them", "commits")
    lists = 0
    for path, found in _all(folder):
        problem = found if isinstance(found, str) else found.problem() or _other(found, history)
        finding.expect(not problem, f"{path.name}: {problem}")
        lists += len(found.said) if isinstance(found, Evidence) else 0
    finding.more = f"{lists} hash lists" if finding.checked else ""
    return finding


def check_proofs(folder: Path, history: History) -> Finding:
    finding = Finding("P19", "who was found out is convicted by its own signature", "proofs")
    run_id = str(history.coordinators[0].start["run_id"])
    for path in sorted(folder.rglob(f"*{PROOF_SUFFIX}")):
        found = read_proof(path)
        if isinstance(found, str):
            problem = found
        else:
            problem = found.problem() if found.run_id.hex() == run_id else "it is of another run"
        finding.expect(not problem, f"{path.name}: {problem}")
    return finding


def findings(folder: Path, history: History) -> list[Finding]:
    """Of what there is."""
    both = [check_evidence(folder, history), check_proofs(folder, history)]
    return [finding for finding in both if finding.checked]


def judge(file: Path) -> tuple[bool, list[str]]:
    """Does this file convict somebody?  And the lines that say who did what, or why it proves nothing."""
    found = read_proof(file)
    if isinstance(found, str):
        raise UserError(f"{file}: {found}")
    problem = found.problem()
    if problem:
        return False, [f"{file}: it proves nothing: {problem}"]
    return True, [found.told, *(f"    {line}" for line in found.details)]


def read_proof(path: Path) -> Proof | str:
    """What is in a file, or why nothing is."""
    try:
        if path.stat().st_size > PROOF_FILE_BYTES_MAX:
            return f"more than {PROOF_FILE_BYTES_MAX} bytes"
        raw = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error}"
    try:
        return proof_from_bytes(raw)
    except UNREADABLE as error:
        return f"cannot be read: {error}"


def who_sent(folder: Path, file: Path) -> list[str]:
    """One line for each peer that signed having sent these bytes: the encoded chunk as it was on the wire."""
    try:
        digest = hash_bytes(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    lines, looked_at = [], 0
    for _, found in _all(folder):
        if isinstance(found, str) or found.problem():
            continue
        looked_at += 1
        where = f"fragment {found.commit.fragment}, round {found.commit.round_no}"
        lines += [
            f"{peer} signed that it sent these bytes: chunk {chunk} of {where}"
            for peer, chunk in found.who_sent(digest)
        ]
    nobody = f"nobody signed that it sent these bytes (in the evidence of {looked_at} commits)"
    return lines or [nobody]


def _all(folder: Path) -> Iterator[tuple[Path, Evidence | str]]:
    return ((path, read_evidence(path)) for path in sorted(folder.rglob(f"*{SUFFIX}")))


def _other(found: Evidence, history: History) -> str:
    """Why this is not evidence of a commit of this run, or empty."""
    run_id = str(history.coordinators[0].start["run_id"])
    if found.run_id.hex() != run_id:
        return "it is of another run"
    written = history.by_round.get(found.commit.round_no, [])
    if written and result_name(found.commit) not in [each["result"] for each in written]:
        return "its results are not those of the journal"
    return ""


def evidence_below(folder: Path, run_key: bytes) -> dict[tuple[int, int], Evidence]:
    """What a coordinator signed of commits, by round and fragment; `run_key`: the one of that join URL, if given."""
    found = [each for _, each in _all(folder) if isinstance(each, Evidence) and not each.problem()]
    return {
        (each.commit.round_no, each.commit.fragment): each
        for each in found
        if not run_key or curve_key_of(each.key) == run_key
    }


def read_evidence(path: Path) -> Evidence | str:
    """The evidence in a file, or why there is none."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return f"more than {FILE_BYTES_MAX} bytes"
        raw = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error}"
    try:
        return msgspec.msgpack.decode(raw, type=Evidence)
    except UNREADABLE as error:
        return f"cannot be read: {error}"
