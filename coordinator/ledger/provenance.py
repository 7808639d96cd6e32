"""Provenance: who contributed how many tokens to which version, in rows that the run's key signs one after the other.

The coordinator appends a row at every commit (coordinator/run_files.py).  Whoever has the file and the join URL
can check it without the coordinator (console/history/audit_evidence.py): each row names the hash of the one before
it, so none can be taken out, put in or changed.  Tokens are what each peer claimed and signed, and what the coordinator
counted.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import MEMBERS_PER_MESH
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.protocol.round_words import Commit, Count, PeerName, result_name
from farflung.protocol.signed_words import SignedList
from farflung.protocol.signing import verify

ROW_BYTES_MAX = 64 * 1024
_NO_ROW = "0" * 64

Hex = Annotated[str, Meta(pattern="^[0-9a-f]*$", max_length=128)]


class MemberShare(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Of one member in one commit."""

    peer: PeerName
    tokens: Count
    weight: float


class ProvenanceRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one commit, in JSON on a line of its own."""

    row: Annotated[int, Meta(ge=1)]
    before: Hex  # the hash of the line before it
    run_id: Hex
    fragment: Count
    version: Count
    round_no: Count
    results: Hex  # the name of the commit's results, as in event journals
    shares: Annotated[tuple[MemberShare, ...], Meta(max_length=MEMBERS_PER_MESH)]
    key: Hex  # the coordinator's, ed25519
    signature: Hex = ""

    def signed_part(self) -> bytes:
        return b"farflung/provenance/1\0" + hash_bytes(line_of(msgspec.structs.replace(self, signature="")))

    @property
    def is_signed(self) -> bool:
        return verify(bytes.fromhex(self.key), self.signed_part(), bytes.fromhex(self.signature))


def line_of(row: ProvenanceRow) -> bytes:
    """Without the end of the line: the one byte string of this content."""
    return msgspec.json.encode(row, order="deterministic")


def row_of(line: bytes) -> ProvenanceRow | None:
    """None if it is no row, or not written as `line_of` writes it."""
    try:
        row = msgspec.json.decode(line, type=ProvenanceRow)
        whole = all(len(each) % 2 == 0 for each in (row.key, row.signature)) and line_of(row) == line
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return row if whole else None


class ProvenanceChain:
    """Makes the next row.  `last`: the line that the file ends with, empty if it is new."""

    def __init__(self, run_id: bytes, key: bytes, sign: Callable[[bytes], bytes], last: bytes = b"") -> None:
        self._run_id, self._key, self._sign = run_id, key, sign
        row = row_of(last) if last else None
        self._rows = row.row if row is not None else 0
        self._before = hash_bytes(last).hex() if row is not None else _NO_ROW

    def next(self, commit: Commit, said: Iterable[SignedList]) -> bytes:
        tokens = {each.peer: each.sent.tokens for each in said}
        weights = dict(zip(commit.members, commit.weights, strict=True))
        shares = tuple(MemberShare(peer, tokens.get(peer, 0), weights[peer]) for peer in commit.included)
        self._rows += 1
        bare = ProvenanceRow(
            row=self._rows,
            before=self._before,
            run_id=self._run_id.hex(),
            fragment=commit.fragment,
            version=commit.version,
            round_no=commit.round_no,
            results=result_name(commit),
            shares=shares,
            key=self._key.hex(),
        )
        line = line_of(msgspec.structs.replace(bare, signature=self._sign(bare.signed_part()).hex()))
        self._before = hash_bytes(line).hex()
        return line


@dataclass
class Provenance:
    """What a file says of the state at its end, or at some version."""

    run_id: str = ""
    key: bytes = b""
    rows: list[ProvenanceRow] = field(default_factory=list)  # those that the state is made of, in order
    void: int = 0  # commits that the run went back behind: they are in no state
    problems: list[str] = field(default_factory=list)

    @property
    def version(self) -> int:
        return max((row.version for row in self._books), default=0)

    @property
    def _books(self) -> list[ProvenanceRow]:
        """The same tokens went into every fragment: they are counted once."""
        return [row for row in self.rows if row.fragment == BOOKS_FRAGMENT]

    def tokens(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for row in self._books:
            total.update({share.peer: share.tokens for share in row.shares})
        return total

    def versions(self) -> Counter[str]:
        """In how many versions each peer was."""
        return Counter(share.peer for row in self._books for share in row.shares)


def read(lines: Iterable[bytes], upto: int | None = None) -> Provenance:
    """Every row checked; with `upto`, what is newer than this version is left aside."""
    found, before = Provenance(), _NO_ROW
    newest: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        row = row_of(line)
        problem = "it is no row" if row is None else _problem(row, found, number, before)
        before = hash_bytes(line).hex()
        if row is None or problem:
            found.problems.append(f"line {number}: {problem}")
            continue
        found.run_id, found.key = row.run_id, bytes.fromhex(row.key)
        if row.version <= newest.get(row.fragment, 0):
            # A version that is made again takes the place of what was made before of it, and after it.
            kept = [
                each for each in found.rows if each.fragment != row.fragment or each.version < row.version
            ]
            found.void += len(found.rows) - len(kept)
            found.rows = kept
        newest[row.fragment] = row.version
        found.rows.append(row)
    if upto is not None:
        found.rows = [row for row in found.rows if row.version <= upto]
    found.problems += _missing(found.rows)
    return found


def _problem(row: ProvenanceRow, found: Provenance, number: int, before: str) -> str:
    if not row.is_signed:
        return "the signature does not fit it"
    if (row.row, row.before) != (number, before):
        return "it does not follow on the line before it: something was taken out, put in or changed"
    if found.key and (row.key, row.run_id) != (found.key.hex(), found.run_id):
        return "it is of another run than the lines before it"
    return ""


def _missing(rows: list[ProvenanceRow]) -> list[str]:
    """A coordinator that was killed between a commit and its row wrote none: that is told."""
    newest: dict[int, int] = {}
    problems = []
    for row in rows:
        last = newest.get(row.fragment, 0)
        if row.version != last + 1:
            problems.append(f"fragment {row.fragment}: version {last + 1} is missing")
        newest[row.fragment] = row.version
    return problems
