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
        "it waits for all who may hold the newest commit",
        "coordinator/restoring/restoring.py",
        "missing = set(heard.holders) - set(heard.answered)",
        "missing: set[str] = set()",
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
        "a step whose books others keep is waited for",
        _RESTORING,
        "if left_s > 0.0 and heard.lacks:",
        "if False:",
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
