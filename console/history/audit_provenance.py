"""Of the audit: who contributed how many tokens to a model, from the coordinator's signed rows and nothing else.

Called by `farflung audit --provenance` and by `farflung checkpoint export --provenance`.  With the key of the join URL
it needs to ask nobody.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farflung.coordinator.ledger.provenance import ROW_BYTES_MAX, Provenance, read
from farflung.protocol.errors import UserError
from farflung.protocol.signing import curve_key_of

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
