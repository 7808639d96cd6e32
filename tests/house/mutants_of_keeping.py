"""Mutants of what peers keep for a coordinator that loses its disk, and of how it asks.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

UNITS = ("tests/coordinator/restoring/test_restoring.py",)
_RESTORING, _BOOKS, _KEPT = (
    "coordinator/restoring/restoring.py",
    "coordinator/ledger/ledger.py",
    "checkpoints/kept_commits.py",
)

KEEPING = (
    Mutant(
        "P21 what is shown is signed by the run's key",
        _RESTORING,
        "if not head.is_by(own.key):",
        "if False:",
        UNITS,
    ),
    Mutant(
        "P21 the books are those that were signed",
        "coordinator/ledger/kept_books.py",
        "books = _books.decode(kept.books) if kept.is_whole else None",
        "books = _books.decode(kept.books)",
        UNITS,
    ),
    Mutant(
        "P21 a chain of another run is refused",
        _RESTORING,
        "if own.run_id and head.run_id != own.run_id:",
        "if False:",
        UNITS,
    ),
    Mutant(
        "P21 the newest chain goes on",
        _RESTORING,
        "chain = [max(whole, key=lambda kept: kept.head.order)]",
        "chain = [min(whole, key=lambda kept: kept.head.order)]",
        UNITS,
    ),
    Mutant(
        "P21 nobody answers for another peer",
        _RESTORING,
        "if not verify(kept.identity, kept_part(kept, self._nonce), kept.signature):",
        "if False:",
        UNITS,
    ),
    Mutant(
        "P21 an old copy loses to what is newer",
        _BOOKS,
        "if newest is not None and books is not None and newest.head.order > ledger.link.order:",
        "if newest is not None and books is not None and newest.head.order < ledger.link.order:",
        UNITS,
    ),
    Mutant(
        "P7 no lease is given a number twice after a disk was lost",
        _BOOKS,
        "ledger.leases.next_id += NUMBERS_AHEAD",
        "ledger.leases.next_id += 0",
        UNITS,
    ),
    Mutant(
        "no round is given a number twice after a disk was lost",
        _BOOKS,
        "ledger.round_no += NUMBERS_AHEAD",
        "ledger.round_no += 0",
        UNITS,
    ),
    Mutant(
        "a fork of the coordinator's own is told",
        _RESTORING,
        "if number == head.number and after != head.after and len(self.notes) < NOTES_MOST:",
        "if False:",
        UNITS,
    ),
    Mutant(
        "P21 it waits as long as every living peer needs to knock",
        _RESTORING,
        "    left_s = heard.first_at + PATIENCE_S - now",
        "    left_s = heard.first_at - now",
        UNITS,
    ),
    Mutant(
        "a peer keeps what the run's key signed",
        _KEPT,
        "known = bool(self._pinned) and curve_key_of(head.proof[:32]) == self._pinned",
        "known = True",
        UNITS,
    ),
    Mutant(
        "a peer never goes back to an older head",
        _KEPT,
        "if newest is not None and head.order <= newest.order:",
        "if False:",
        UNITS,
    ),
    Mutant(
        "who keeps no books keeps the head",
        "coordinator/run/core.py",
        "else kept.without_books",
        "else None",
        ("tests/coordinator/run/test_crowds.py",),
    ),
    Mutant(
        "in a large run some keep the books, whatever its rounds are",
        "coordinator/run/core.py",
        "if not self.manifest.round.group and len(self.members.alive) <= WHOLE_ROSTER:",
        "if not self.manifest.round.group:",
        ("tests/coordinator/run/test_crowds.py",),
    ),
    Mutant(
        "who keeps the books hears of a commit at once",
        "coordinator/run/core.py",
        "key=lambda each: (each not in told, hash_bytes(",
        "key=lambda each: (False, hash_bytes(",
        ("tests/coordinator/run/test_crowds.py",),
    ),
    Mutant(
        "books that would be too long have leases that nobody holds",
        "coordinator/ledger/kept_books.py",
        "        if len(raw) <= most_bytes:\n",
        "        if raw:\n",
        ("tests/coordinator/ledger/test_kept_books.py",),
    ),
    Mutant(
        "P21 of many fragments the books name fewer holders rather than being kept by nobody",
        "coordinator/ledger/keeping.py",
        "        holders //= 2",
        "        break",
        ("tests/coordinator/ledger/test_kept_books.py",),
    ),
    Mutant(
        "P7 no sample waits in the books that was committed",
        "coordinator/ledger/leases.py",
        "other.go_back([self.reach(fragment) for fragment in range(self.fragments)])",
        "other.returned = [*self.returned, *(each.as_range for each in self.held.values())]",
        ("tests/coordinator/ledger/test_kept_books.py",),
    ),
    Mutant(
        "people are told which books are waited for",
        _RESTORING,
        "    if heard.lacks:",
        "    if False:",
        UNITS,
    ),
    Mutant(
        "P21 no commit counts that the run went back behind",
        _BOOKS,
        "        lowest = [min(pair) for pair in zip(lowest, kept.head.versions, strict=True)]",
        "        lowest = [max(pair) for pair in zip(lowest, kept.head.versions, strict=True)]",
        UNITS,
    ),
    Mutant(
        "a step that was given up holds nobody up",
        "coordinator/run/core.py",
        "known = max(self.ledger.link.order, self.ledger.given_up)",
        "known = self.ledger.link.order",
        UNITS,
    ),
    Mutant(
        "false amendments take no true ones' place",
        _RESTORING,
        "believed = Terms(first).believed(told, head.run_id, curve_key_of(self._own.key)).amendments",
        "believed = told",
        UNITS,
    ),
    Mutant(
        "whoever shows the books of a step counts after somebody with its head alone",
        _RESTORING,
        "if known is None or not known.books:",
        "if known is None:",
        UNITS,
    ),
    Mutant(
        "a peer keeps no books that are not what was signed",
        _KEPT,
        "is_damaged = bool(kept.books) and not kept.is_whole",
        "is_damaged = False",
        UNITS,
    ),
)
