"""Leases in the books that peers keep: the same when they are read again, and short enough however many members hold
them (P21); what can't be read is an error that whoever asks for books knows."""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.coordinator.ledger.leases import Leases, Missing, Range, _ranges
from farflung.coordinator.ledger.ledger import packed
from farflung.coordinator.restoring.kept_books import kept_leases, leases_in
from rig.lent_leases import lent, peer_names

ALL = 1 << 30  # bytes: short enough
MOST = 30  # members, of whom any may hold leases


def missing(leases: Leases) -> list[set[tuple[int, int]]]:
    """Of each fragment, every sample that it has not learned from."""
    reaches = [leases.reach(fragment) for fragment in range(leases.fragments)]
    return [
        {(epoch, sample) for epoch, start, stop in reach.missing for sample in range(start, stop)}
        for reach in reaches
    ]


any_lent = st.builds(
    lent, st.integers(0, 10_000), st.integers(0, MOST), st.integers(1, 3), st.sampled_from([500, 1 << 40])
)


@given(any_lent)
@settings(max_examples=60)
def test_P21_leases_in_the_books_are_the_same_when_they_are_read_again(leases: Leases) -> None:
    again = leases_in(kept_leases(leases, ALL))
    assert again == replace(leases, held=dict(sorted(leases.held.items())))
    assert packed(again) == packed(replace(leases, held=dict(sorted(leases.held.items()))))
    for peer in peer_names(MOST):
        assert again.of(peer) == leases.of(peer)


@given(any_lent)
@settings(max_examples=60)
def test_P7_where_they_would_be_too_long_nobody_holds_one_and_the_very_same_samples_wait(
    leases: Leases,
) -> None:
    before = packed(leases)
    again = leases_in(kept_leases(leases, len(kept_leases(leases, ALL)) - 1))
    assert not again.held and missing(again) == missing(leases) and again.settled == leases.settled
    assert (again.epoch, again.cursor, again.next_id) == (leases.epoch, leases.cursor, leases.next_id)
    assert again.committed_samples == leases.committed_samples
    assert packed(leases) == before, "the run's own leases stay with their holders"


def changed(raw: bytes, **columns: Any) -> bytes:
    found = msgspec.msgpack.decode(zlib.decompress(raw))
    names = ("rest", "settled", "returned", "held", "ids", "holders", "peers")
    return zlib.compress(
        msgspec.msgpack.encode([columns.get(n, each) for n, each in zip(names, found, strict=True)])
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-3],
        lambda raw: raw + b"more",
        lambda raw: raw[:9] + b"\x00" + raw[10:],
        lambda raw: changed(raw, ids=[1]),
        lambda raw: changed(raw, holders=[7] * 18),
        lambda raw: changed(raw, held=[[0], [0], [1], []]),
        lambda raw: changed(raw, rest=msgspec.msgpack.encode({"cursor": "x"})),
        lambda raw: b"x" + raw[1:2],
        lambda raw: zlib.compress(bytes(9 << 20)),
        lambda raw: b"",
    ],
)
def test_P8_what_is_no_leases_is_an_error_that_is_known(damage: Any) -> None:
    raw = kept_leases(lent(3, 9), ALL)
    with pytest.raises((ValueError, TypeError, LookupError, msgspec.MsgspecError)):
        leases_in(damage(raw))


def slowly(lacks_of: list[list[Missing]]) -> list[Range]:
    """Sample by sample."""
    found: list[Range] = []
    for epoch in sorted({epoch for lacks in lacks_of for epoch, _, _ in lacks}):
        spans = [[(start, stop) for e, start, stop in lacks if e == epoch] for lacks in lacks_of]
        for sample in range(max((stop for of in spans for _, stop in of), default=0)):
            lacking = tuple(any(start <= sample < stop for start, stop in of) for of in spans)
            if not any(lacking):
                continue
            last = found[-1] if found else None
            same = last is not None and (last.epoch, last.stop) == (epoch, sample)
            if last is not None and same and tuple(upto < last.stop for upto in last.uptos) == lacking:
                found.pop()
                first = last.start
            else:
                first = sample
            uptos = tuple(first if lacks else sample + 1 for lacks in lacking)
            found.append(Range(epoch, first, sample + 1, uptos))
    return found


spans = st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)).map(
    lambda x: (x[0], x[1], x[1] + x[2])
)


@given(st.lists(st.lists(spans, max_size=6), min_size=1, max_size=3))
def test_what_fragments_lack_is_put_together_as_if_each_sample_was_looked_at(
    lacks: list[list[Missing]],
) -> None:
    assert _ranges(lacks) == slowly(lacks)


def test_twenty_thousand_spans_are_put_together_in_no_time() -> None:
    """A run of ten thousand goes back to an older state: the coordinator may not stand still for minutes."""
    began = time.process_time()
    found = _ranges([[(0, 100 * n, 100 * n + 64) for n in range(20_000)]])
    assert len(found) == 20_000 and time.process_time() - began < 5.0
