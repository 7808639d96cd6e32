"""What peers are to keep of the books is short enough for that, however many members and fragments there are (P21)."""

from __future__ import annotations

import time

import msgspec

from farflung.coordinator.ledger.ledger import FragmentBook, HolderMark
from farflung.coordinator.restoring.kept_books import Books, KeptSteps, kept_commit, leases_in
from farflung.protocol.limits import KEPT_BOOKS_BYTES, MAX_PEERS
from rig.crowd import crowd
from rig.lent_leases import lent, peer_names


def test_P21_the_books_of_the_largest_run_are_short_enough_to_be_kept() -> None:
    core = crowd(2).core
    for members, have_holders in ((1024, True), (MAX_PEERS, False)):
        core.ledger.leases = lent(1, members)
        KeptSteps.of(core.ledger).link = KeptSteps.of(core.ledger).link.then(1, (), b"a step")
        began = time.process_time()
        kept = kept_commit(core.ledger, core.run_id, bytes(32), lambda statement: bytes(96))
        assert kept is not None and len(kept.books) <= KEPT_BOOKS_BYTES, members
        assert bool(leases_in(msgspec.msgpack.decode(kept.books)[5]).held) == have_holders
        assert time.process_time() - began < 5.0, "nearly no time: a quarter of a second"


def test_P21_of_many_fragments_the_books_name_those_who_brought_most_and_are_kept() -> None:
    """Whoever was ever here is named in each of them: nobody kept anything any more, and no word told it."""
    core, names = crowd(2).core, peer_names(256)
    core.ledger.books = [FragmentBook() for _ in range(64)]
    for book in core.ledger.books:
        book.vouched = set(names)
        book.digests = {version: bytes([version]) * 32 for version in (1, 2)}
        book.holders = {peer: HolderMark(2, tokens) for tokens, peer in enumerate(names)}
    core.ledger.leases = lent(1, 40, fragments=64)
    KeptSteps.of(core.ledger).link = KeptSteps.of(core.ledger).link.then(1, (), b"a step")
    kept = kept_commit(core.ledger, core.run_id, bytes(32), lambda statement: bytes(96))
    assert kept is not None and len(kept.books) <= KEPT_BOOKS_BYTES
    books = msgspec.msgpack.decode(kept.books, type=Books)
    for each in books.fragments:
        assert [peer for peer, _, _ in each.holders] == names[: -1 - len(each.holders) : -1]
        assert each.vouched == tuple(peer for peer, _, _ in each.holders) and len(each.holders) >= 16
