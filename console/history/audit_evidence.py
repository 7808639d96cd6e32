"""Of the audit: the evidence that the coordinator kept, checked signature by signature, and asked who sent some bytes.

Called by the command line with the folder of a run, or with one file that is to convict somebody.  Believes no file:
only what is signed, and what is calculated here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from farflung.console.history.history import Finding, History
from farflung.coordinator.court.proofs import SUFFIX as PROOF_SUFFIX
from farflung.coordinator.court.proofs import Proof, proof_from_bytes
from farflung.coordinator.ledger.evidence import SUFFIX, Evidence
from farflung.coordinator.ledger.provenance import ROW_BYTES_MAX, Provenance, read
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


# ---- audit provenance --------------------------------------------------------------------------------------
# Of the audit: who contributed how many tokens to a model, from the coordinator's signed rows and nothing
# else.
#
# Called by `farflung audit --provenance` and by `farflung checkpoint export --provenance`. With the key of
# the join URL it needs to ask nobody.

SHOWN_PROBLEMS = 5


def provenance_in(file: Path, run_key: bytes = b"", upto: int | None = None) -> Provenance:
    """Of the version at the file's end, or of `upto`.  UserError if it cannot be read; problems are in what it says."""
    try:
        with file.open("rb") as opened:
            lines = []
            while line := opened.readline(ROW_BYTES_MAX + 1):
                lines.append(line.removesuffix(b"\n"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    found = read(lines, upto)
    if not found.rows and not found.problems:
        raise UserError(
            f"{file}: no provenance; a coordinator writes it as provenance.jsonl in its data folder"
        )
    if found.key and run_key and curve_key_of(found.key) != run_key:
        found.problems.insert(0, "it is signed by another coordinator than that of this join URL")
    if upto is not None and found.version < upto:
        found.problems.append(f"it ends at version {found.version}, before version {upto}")
    return found


def lines_of(found: Provenance) -> list[str]:
    """A line for each peer, most tokens first, and what is wrong."""
    tokens, versions = found.tokens(), found.versions()
    total = max(1, sum(tokens.values()))
    lines = [
        f"{peer}  {count:>14} tokens  {100 * count / total:5.1f} %  in {versions[peer]} versions"
        for peer, count in sorted(tokens.items(), key=lambda each: (-each[1], each[0]))
    ]
    void = f"; {found.void} commits that the run went back behind are not counted" if found.void else ""
    lines.append(f"version {found.version} of run {found.run_id[:8]}: {sum(tokens.values())} tokens{void}")
    hidden = len(found.problems) - SHOWN_PROBLEMS
    more = [f"and {hidden} more"] if hidden > 0 else []
    return lines + [f"BROKEN  {problem}" for problem in [*found.problems[:SHOWN_PROBLEMS], *more]]


def facts_of(found: Provenance) -> str:
    """For the head of an exported model: JSON, a name for all rows, and each peer's tokens."""
    tokens, versions = found.tokens(), found.versions()
    peers: dict[str, Any] = {peer: [tokens[peer], versions[peer]] for peer in sorted(tokens)}
    last = found.rows[-1]
    facts = {"version": found.version, "key": last.key, "peers": peers}
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))
