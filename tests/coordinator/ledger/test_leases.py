"""Data leases through the journal's records: every sample once (P7), whatever peers do, and again after a restart."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.coordinator.ledger.leases import Range
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import (
    CommittedRound,
    DataFixed,
    Granted,
    Record,
    Released,
    RolledBack,
    from_bytes,
    to_bytes,
)
from farflung.protocol.messages import Lease
from farflung.protocol.round_words import Commit, Used

PEERS = ("ann", "bob", "cyd")
Sample = tuple[int, int]  # (epoch, sample)

fixed = settings(max_examples=60)


class Book:
    """The ledger with its journal beside it, and a second account of who holds and who used which sample."""

    def __init__(self, samples: int, lease_samples: int, fragments: int = 1) -> None:
        self.lease_samples = lease_samples
        self.ledger = Ledger(LedgerRules(lease_samples, keep_results=3, fragments=fragments))
        self.journal: list[bytes] = []
        self.used: list[list[Sample]] = [[] for _ in range(fragments)]
        self.at: list[list[int]] = [[0] for _ in range(fragments)]  # by version: how many samples were used
        self.write(DataFixed(samples=samples, peer="ann"))

    @property
    def leases(self):  # type: ignore[no-untyped-def]
        return self.ledger.leases

    def write(self, record: Record) -> None:
        self.journal.append(to_bytes(record))
        self.ledger.apply(record)

    def grant(self, peer: str, wanted: int = 1) -> Lease:
        found = self.leases.next_range(wanted)
        lease = Lease.at(self.leases.next_id, found.epoch, found.start, found.stop, found.uptos)
        self.write(Granted(peer=peer, lease=lease))
        return lease

    def commit(self, used: dict[str, tuple[Used, ...]], fragment: int = 0) -> None:
        """A committed round acknowledges what its members used."""
        for peer, items in used.items():
            assert self.leases.problem(peer, items, fragment) is None
            for item in items:
                held = self.leases.held[item.lease]
                self.used[fragment] += [(held.epoch, s) for s in range(held.uptos[fragment], item.upto)]
        self.at[fragment].append(len(self.used[fragment]))
        members = tuple(sorted(used))
        version = self.ledger.books[fragment].version + 1
        weights = tuple(1 / len(members) for _ in members)
        self.write(
            CommittedRound(
                commit=Commit(version, version, members, weights, bytes(32), "fp32", fragment),
                used=used,
                excluded={},
                tokens=1,
                steps=1,
                loss=None,
                seconds=1.0,
                tx_bytes=0,
            )
        )

    def release(self, peer: str) -> None:
        if self.leases.of(peer):
            self.write(Released(leases=tuple(self.leases.of(peer)), reason="it did not come back"))

    def go_back(self, by: int) -> None:
        """Every fragment to an older version, one of them perhaps not."""
        versions = [max(0, book.version - by * (f != by % 3)) for f, book in enumerate(self.ledger.books)]
        for fragment, version in enumerate(versions):
            self.at[fragment] = self.at[fragment][: version + 1]
            self.used[fragment] = self.used[fragment][: self.at[fragment][-1]]
        self.write(RolledBack(versions=tuple(versions), reason="lost"))

    def check(self) -> None:
        leases = self.leases
        out = [(h.epoch, sample) for h in leases.held.values() for sample in range(h.upto, h.stop)]
        back = [(r.epoch, sample) for r in leases.returned for sample in range(r.start, r.stop)]
        granted = leases.epoch * leases.samples + leases.cursor
        by_all = set.intersection(*map(set, self.used))
        for fragment, used in enumerate(self.used):
            missing = [(e, s) for e, a, b in leases.reach(fragment).missing for s in range(a, b)]
            known = [*used, *missing]
            assert len(set(known)) == len(known), "a fragment learned from a sample twice, or will"
            assert len(known) == granted, "a granted sample is nowhere"
        assert sorted(by_all) == sorted(set.union(*map(set, self.used)) - set(out) - set(back))
        assert (leases.committed_samples, leases.held_samples) == (len(by_all), len(out))
        assert leases.leased_samples == leases.committed_samples + len(out) + leases.returned_samples
        assert leases.waiting_samples == len(back) <= leases.returned_samples

    def replayed(self) -> Ledger:
        ledger = Ledger(self.ledger.rules)
        for raw in self.journal:
            ledger.apply(from_bytes(raw))
        return ledger


def used_by(book: Book, peer: str, share: float, fragment: int = 0) -> tuple[Used, ...]:
    """The fragment learned from a share of what the peer holds, lease after lease."""
    held = sorted(book.leases.of(peer).items())
    left = round(share * sum(h.stop - h.uptos[fragment] for _, h in held))
    used = []
    for lease_id, lease in held:
        take = min(left, lease.stop - lease.uptos[fragment])
        left -= take
        if take:
            used.append(Used(lease_id, lease.uptos[fragment] + take))
    return tuple(used)


deeds = st.tuples(
    st.sampled_from(["grant", "grant", "commit", "commit", "release", "restart", "back"]),
    st.sampled_from(PEERS),
    st.floats(0, 1),
    st.integers(1, 12),
)


@fixed
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.lists(deeds, max_size=40))
def test_P7_whatever_happens_every_fragment_learns_from_every_sample_once(
    samples: int, lease_samples: int, fragments: int, story: list[tuple[str, str, float, int]]
) -> None:
    book = Book(samples, lease_samples, fragments)
    for deed, peer, share, wanted in story:
        match deed:
            case "grant":
                book.grant(peer, wanted)
            case "release":
                book.release(peer)
            case "restart":
                book.ledger = book.replayed()
            case "commit":
                fragment = wanted % fragments
                book.commit({p: used_by(book, p, share, fragment) for p in PEERS if p >= peer}, fragment)
            case "back":
                book.go_back(wanted % 4)
        book.check()
    assert book.replayed() == book.ledger


@pytest.mark.parametrize("seed", range(10))
def test_every_sample_of_every_epoch_is_acknowledged_exactly_once(seed: int) -> None:
    """Three epochs; peers use a part, use all, or are lost, in an order drawn from the seed."""
    draw = random.Random(seed)
    book = Book(samples=draw.choice((1, 7, 30, 64)), lease_samples=draw.choice((1, 5, 8, 100)))
    epochs = 3
    while len([1 for epoch, _ in book.used[0] if epoch < epochs]) < epochs * book.leases.samples:
        peer = draw.choice(PEERS)
        if draw.random() < 0.2:
            book.release(peer)
        elif draw.random() < 0.5 and len(book.leases.of(peer)) < 4:
            book.grant(peer)
        else:
            book.commit({peer: used_by(book, peer, draw.choice((0.3, 1.0)))})
        book.check()
    once = sorted(sample for sample in book.used[0] if sample[0] < epochs)
    assert once == [(epoch, s) for epoch in range(epochs) for s in range(book.leases.samples)]


def test_a_restart_restores_the_leases_exactly() -> None:
    book = Book(samples=20, lease_samples=6)
    first, second = book.grant("ann"), book.grant("bob")
    book.commit({"ann": (Used(first.lease, first.start + 2),), "bob": ()})
    book.release("bob")
    assert book.replayed() == book.ledger
    assert book.replayed().leases.of("ann")[first.lease].as_lease(first.lease) == Lease(1, 0, 0, 6, 2)
    assert book.replayed().leases.returned == [Range(0, second.start, second.stop, (second.start,))]


def test_what_a_lost_holder_did_not_get_committed_is_granted_first() -> None:
    book = Book(samples=20, lease_samples=6)
    lost = book.grant("ann")
    book.commit({"ann": (Used(lost.lease, 4),)})
    book.release("ann")
    again = book.grant("bob")
    assert (again.epoch, again.start, again.stop, again.upto) == (0, 4, 6, 4)
    assert book.grant("bob").start == 6


def test_a_lease_has_one_holder_and_only_the_holder_may_use_it() -> None:
    book = Book(samples=20, lease_samples=6)
    lease = book.grant("ann")
    assert book.leases.of("bob") == {}
    assert book.leases.foreign("bob", [lease.lease]) == (lease.lease,)
    assert book.leases.foreign("ann", [lease.lease]) == ()
    assert "not its own" in book.leases.problem("bob", [Used(lease.lease, 3)])
    assert "not its own" in book.leases.problem("ann", [Used(99, 3)])


@pytest.mark.parametrize("upto", [-1, 3, 7])
def test_samples_outside_what_is_left_of_a_lease_are_refused(upto: int) -> None:
    book = Book(samples=20, lease_samples=6)
    lease = book.grant("ann")
    book.commit({"ann": (Used(lease.lease, 4),)})
    assert "outside 4..6" in book.leases.problem("ann", [Used(lease.lease, upto)])


def test_a_lease_named_twice_in_one_contribution_is_refused() -> None:
    """Acknowledged twice it would count samples a second time, or be gone at the second time."""
    book = Book(samples=20, lease_samples=6)
    lease = book.grant("ann")
    for first, second in ((6, 6), (5, 3), (3, 5)):
        twice = [Used(lease.lease, first), Used(lease.lease, second)]
        assert book.leases.problem("ann", twice) is not None, (first, second)


def test_a_small_data_set_starts_its_next_epoch_by_itself() -> None:
    book = Book(samples=3, lease_samples=8)
    granted = [book.grant("ann") for _ in range(3)]
    assert [(lease.epoch, lease.start, lease.stop) for lease in granted] == [(0, 0, 3), (1, 0, 3), (2, 0, 3)]
