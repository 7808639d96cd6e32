"""Who keeps what of the run, for a coordinator that loses its disk, and what peers keep that this journal lacks.  Pure.

The mode's part of the run machine (coordinator/modes/mode.py).  With each commit members get the newest step of the
run's history, signed, and some or all of them the books behind it, made as soon as the commit is written
(kept_books.py).  Whoever comes in shows the newest head that it keeps: where that is newer than this
journal, the journal is an old copy, and nothing is committed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farflung.coordinator.door.hello_check import HelloPassed
from farflung.coordinator.ledger.ledger import FragmentBook, Ledger
from farflung.coordinator.modes.mode import CoordinatorMode
from farflung.coordinator.restoring.kept_books import (
    Books,
    FragmentBooks,
    KeptSteps,
    kept_leases,
    name_of_model,
)
from farflung.coordinator.roster.partial_view import WHOLE_ROSTER
from farflung.coordinator.run.core import Core
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import KEPT_BOOKS_BYTES
from farflung.protocol.messages import Beat, Keep
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.signing import KeptCommit, SignedHead

KEEP_AGAIN_S = 5.0
KEEPERS = 16  # of the books of each step of the run, where not everybody is one
HOLDERS_KEPT = 256  # of a fragment, those that brought most
HOLDERS_BYTES = KEPT_BOOKS_BYTES * 3 // 4  # of all fragments; the rest is for leases
DIGESTS_IN_BOOKS = 2  # older ones stand in older books
LENGTH_BYTES = 8  # more than msgpack needs to say how long the leases are


class Keepers(CoordinatorMode):
    def __init__(self, core: Core) -> None:
        self._core = core
        self._kept: tuple[object, KeptCommit | None] = None, None
        self._keepers: tuple[object, frozenset[str]] = None, frozenset()
        # Of the newest step, by peer: in which session it was told once more, and when.
        self._told: dict[str, tuple[bytes, float]] = {}
        self._newer: SignedHead | None = None  # of this run, and not in this journal

    def on_start(self, restored: bool) -> str:
        return f"restored: {KeptSteps.of(self._core.ledger).restored_because}" if restored else ""

    # ---- what members keep -----------------------------------------------------------------------------

    def kept(self) -> KeptCommit | None:
        """What members keep of the run as it is now; signed once for each step."""
        core, link = self._core, KeptSteps.of(self._core.ledger).link
        if link is not self._kept[0]:
            self._kept = link, kept_commit(core.ledger, core.run_id, core.terms.first.digest, core.prove)
            self._told.clear()
        return self._kept[1]

    def is_keeper(self, peer: str) -> bool:
        """Who is to keep what the run is now: everybody.  But what that is grows with the members, so where these are
        many, or rounds are in groups, some do, of those who hear of a commit at once; nobody could know before who."""
        core, link = self._core, KeptSteps.of(self._core.ledger).link
        if not core.manifest.round.group and len(core.members.alive) <= WHOLE_ROSTER:
            return True
        if link is not self._keepers[0]:
            told = {maker for book in core.ledger.books for maker in book.makers}
            drawn = sorted(
                core.members.alive, key=lambda each: (each not in told, hash_bytes(link.after, each.encode()))
            )
            self._keepers = link, frozenset(drawn[:KEEPERS])
        return peer in self._keepers[1]

    def kept_by(self, peer: str) -> KeptCommit | None:
        """The head in any case: whoever goes on with a commit can prove that it is there."""
        kept = self.kept()
        return kept if kept is None or self.is_keeper(peer) else kept.without_books

    def on_answered(self, peer: str, beat: Beat) -> None:
        """What comes with each commit, for whom that did not reach.  Who can't check it never says that it has it."""
        kept = self.kept_by(peer)
        if kept is None or beat.kept == kept.head.number:
            return
        core, member = self._core, self._core.members.members[peer]
        session, told_at = self._told.get(peer, (b"", 0.0))
        if session != member.session or core.now - told_at >= KEEP_AGAIN_S:
            self._told[peer] = member.session, core.now
            core.tell(member, Keep, kept=kept)

    # ---- what this journal lacks -----------------------------------------------------------------------

    def on_hello(self, passed: HelloPassed) -> None:
        self.hear_of(passed.hello.kept)

    def hear_of(self, head: SignedHead | None) -> None:
        """What somebody who comes in keeps.  The run's own key tells if this journal is older than the run."""
        core = self._core
        known = max(KeptSteps.of(core.ledger).link.order, KeptSteps.of(core.ledger).given_up)
        if head is None or head.run_id != core.run_id or head.order <= known:
            return
        mine = core.prove(b"")[:32]
        if mine and head.is_by(mine) and (self._newer is None or head.order > self._newer.order):
            self._newer = head
            core.note(self.holds())

    def holds(self) -> str:
        link = KeptSteps.of(self._core.ledger).link
        if self._newer is None or self._newer.order <= link.order:
            return ""
        return (
            f"this journal is an old copy: it ends at step {link.number} of the run, and a peer has version "
            f"{min(self._newer.versions)}, step {self._newer.number}, signed by this run's key; nothing is committed. "
            "Stop this coordinator and start it again with --restored: peers give back what is missing"
        )

    def voids(self, fragment: int, version: int) -> bool:
        """It was made by a commit that was lost with the coordinator's disk: nobody could prove it."""
        ledger = self._core.ledger
        is_newer = bool(KeptSteps.of(ledger).restored_because) and version > ledger.books[fragment].version
        return is_newer and self._newer is None


# ---- what is kept: it knows nothing of who is told


def kept_commit(
    ledger: Ledger, run_id: bytes, manifest: bytes, prove: Callable[[bytes], bytes]
) -> KeptCommit | None:
    """None: there is nothing to keep yet, no key to sign it with, or it is too long.  `manifest`: the digest of what
    the run began with."""
    link = KeptSteps.of(ledger).link
    if not link.number or ledger.model is None:
        return None
    raw = msgspec.msgpack.encode(_books_of(ledger, ledger.model))
    if len(raw) > KEPT_BOOKS_BYTES:
        return None
    head = SignedHead(
        run_id,
        manifest,
        link.number,
        link.before,
        link.after,
        link.incarnation,
        ledger.era,
        tuple(book.version for book in ledger.books),
        link.commits,
        hash_bytes(raw),
    )
    proof = prove(head.statement)
    return KeptCommit(msgspec.structs.replace(head, proof=proof), raw) if proof else None


def _books_of(ledger: Ledger, model: ModelSchema) -> Books:
    """Of many fragments with many peers each, those who brought most: to keep less is better than to keep nothing."""
    holders = HOLDERS_KEPT
    while True:
        books = _books_with(ledger, model, holders)
        size_bytes = len(msgspec.msgpack.encode(books))
        if size_bytes <= HOLDERS_BYTES or not holders:
            break
        holders //= 2
    room_bytes = KEPT_BOOKS_BYTES - size_bytes - LENGTH_BYTES
    return msgspec.structs.replace(books, leases=kept_leases(ledger.leases, room_bytes))


def _books_with(ledger: Ledger, model: ModelSchema, holders: int) -> Books:
    return Books(
        ledger.round_no,
        ledger.tokens,
        ledger.loss,
        ledger.delivered,
        ledger.era_reason,
        b"",
        {name: kept for name, part in ledger.parts.items() if (kept := part.kept())},
        name_of_model(model),
        tuple(_fragment_of(book, holders) for book in ledger.books),
    )


def _fragment_of(book: FragmentBook, holders: int) -> FragmentBooks:
    most = sorted(book.holders.items(), key=lambda held: (-held[1].tokens, held[0]))[:holders]
    return FragmentBooks(
        tuple(sorted(book.digests.items())[-DIGESTS_IN_BOOKS:]),
        tuple(peer for peer, _ in most if peer in book.vouched),
        tuple((peer, holder.reached, holder.tokens) for peer, holder in most),
        book.dropped_round,
    )
