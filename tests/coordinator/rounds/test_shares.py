"""Who owns which chunk: exact, only who can be dialled, and near the best that the model of a round's time allows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.coordinator.rounds.shares import (
    JUDGED,
    RELAY_GAIN,
    MemberRates,
    _loads,
    _phases,
    _round_s,
    assign,
    best_assigned,
    reassign,
    smoothed,
)

MBIT = 125_000.0  # bytes/s

fixed = settings(max_examples=40)
rate = st.one_of(st.none(), st.floats(0.1, 10_000).map(lambda mbit: mbit * MBIT))
rates_of_one = st.builds(MemberRates, rate, rate, st.sampled_from([0.22, 2.0, 4.0, 8.0, 32.0]))


def names(count: int) -> list[str]:
    return [f"peer{index}" for index in range(count)]


def counts_of(owners: Sequence[int], members: int) -> list[int]:
    return [owners.count(index) for index in range(members)]


def mbit(*lines: tuple[float, float]) -> list[MemberRates]:
    return [MemberRates(up * MBIT, down * MBIT) for up, down in lines]


def owned(chunks: int, rates: Sequence[MemberRates], hosts: set[str] | None = None) -> list[int]:
    members = names(len(rates))
    return counts_of(assign(chunks, members, hosts or set(members), rates), len(rates))


def round_time(counts: Sequence[int], rates: Sequence[MemberRates], gather_bits: float) -> float:
    """The model's time for these numbers of chunks, in units of (bits per value / bytes per second)."""
    loads, chunk_count = _loads(rates, gather_bits), sum(counts)
    return sum(_phases(loads, [count / chunk_count for count in counts])) if loads else 0.0


@st.composite
def rounds(draw: st.DrawFn, most_members: int = 12) -> tuple[int, list[str], set[str], list[MemberRates]]:
    members = names(draw(st.integers(1, most_members)))
    hosts = set(draw(st.lists(st.sampled_from(members), min_size=1, unique=True)))
    rates = draw(st.lists(rates_of_one, min_size=len(members), max_size=len(members)))
    return draw(st.integers(1, 300)), members, hosts, rates


# --- what always holds ---


@fixed
@given(rounds(), st.sampled_from([2.0, 8.0, 32.0]))
def test_every_chunk_has_one_owner_that_can_be_dialled(
    drawn: tuple[int, list[str], set[str], list[MemberRates]], bits: float
) -> None:
    chunks, members, hosts, rates = drawn
    owners = assign(chunks, members, hosts, rates, bits)
    assert len(owners) == chunks
    assert all(members[owner] in hosts for owner in owners)
    assert list(owners) == sorted(owners), "contiguous runs"
    assert owners == assign(chunks, members, hosts, rates, bits), "same input, same output"


@fixed
@given(rounds(), st.sampled_from([2.0, 8.0, 32.0]))
def test_never_worse_than_even_shares(
    drawn: tuple[int, list[str], set[str], list[MemberRates]], bits: float
) -> None:
    chunks, members, hosts, rates = drawn
    ours = counts_of(assign(chunks, members, hosts, rates, bits), len(members))
    even = counts_of(assign(chunks, members, hosts), len(members))
    assert round_time(ours, rates, bits) <= round_time(even, rates, bits) * (1 + 1e-9)


def test_nobody_to_own_means_no_owners() -> None:
    assert assign(5, names(3), set()) == ()
    assert assign(0, names(3), set(names(3))) == ()


def test_without_rates_shares_are_even() -> None:
    members = names(4)
    even = assign(10, members, set(members))
    assert sorted(counts_of(even, 4)) == [2, 2, 3, 3]
    unknown = [
        MemberRates(),
        MemberRates(0, 0),
        MemberRates(float("nan"), float("inf")),
        MemberRates(-1, None),
    ]
    assert assign(10, members, set(members), unknown) == even


def test_one_host_owns_all() -> None:
    assert owned(7, mbit((1, 1), (500, 500), (500, 500)), {"peer0"}) == [7, 0, 0]
    assert owned(7, mbit((1, 1))) == [7]


# --- near the best ---


def splits(chunks: int, members: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `chunks` to `members`."""
    for bars in itertools.combinations(range(chunks + members - 1), members - 1):
        edges = (-1, *bars, chunks + members - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(edges))


@pytest.mark.parametrize("chunks, members", [(40, 2), (24, 3), (14, 4), (3, 5)])
@settings(fixed, max_examples=15)
@given(data=st.data())
def test_within_two_percent_of_every_other_way(chunks: int, members: int, data: st.DataObject) -> None:
    """Brute force: the model's time for each possible split."""
    rates = data.draw(st.lists(rates_of_one, min_size=members, max_size=members))
    bits = data.draw(st.sampled_from([2.0, 8.0, 32.0]))
    hosts = set(data.draw(st.lists(st.sampled_from(names(members)), min_size=1, unique=True)))
    allowed = [
        split
        for split in splits(chunks, members)
        if all(not count or name in hosts for count, name in zip(split, names(members), strict=True))
        and (members < JUDGED or len(hosts) == 1 or max(split) < chunks)
    ]
    best = min(round_time(split, rates, bits) for split in allowed)
    ours = counts_of(assign(chunks, names(members), hosts, rates, bits), members)
    assert round_time(ours, rates, bits) <= 1.02 * best, (ours, rates)


def test_P9_of_three_or_more_nobody_owns_everything_whatever_its_line_is_said_to_be() -> None:
    homes, claims = [(20, 200)] * 8, (10_000, 10_000)
    assert owned(40, mbit(*homes, claims)) == [1, *[0] * 7, 39]
    assert owned(40, mbit((5, 50), *homes, claims))[-1] == 39
    assert owned(40, mbit(*homes, claims), {"peer8"})[-1] == 40, "nobody else can be dialled"
    assert owned(1, mbit(*homes, claims))[-1] == 1


def test_a_slow_uplink_of_eight_owns_less() -> None:
    counts = owned(256, mbit(*[(100, 100)] * 7, (10, 100)))
    assert counts[7] < 16 and min(counts[:7]) > 32


def test_a_slow_line_that_sends_little_owns_less() -> None:
    slow = MemberRates(10 * MBIT, 10 * MBIT, scatter_bits=2)
    counts = owned(256, [*mbit(*[(100, 100)] * 7), slow])
    assert counts[7] < 16 and min(counts[:7]) > 32


def test_equal_lines_own_equally() -> None:
    assert owned(64, mbit(*[(20, 100)] * 8)) == [8] * 8


def test_a_member_that_cannot_be_dialled_leaves_the_others_by_their_rates() -> None:
    counts = owned(120, mbit((20, 100), (1000, 1000), (40, 250)), {"peer1", "peer2"})
    assert counts[0] == 0 and counts[1] > 5 * counts[2] > 0


def test_unknown_rates_count_as_the_median() -> None:
    known = mbit((100, 100), (200, 200), (20, 400))
    assert owned(100, [*known, MemberRates()]) == owned(100, [*known, MemberRates(100 * MBIT, 200 * MBIT)])


def test_huge_runs_and_wild_rates_are_shared_out_too() -> None:
    wild = [MemberRates(10.0 ** (index % 13), 10.0 ** (index * 7 % 13)) for index in range(64)]
    assert sum(owned(4096, wild)) == 4096


# --- an owner dies ---


@fixed
@given(rounds(), st.data())
def test_heirs_take_exactly_what_was_lost(
    drawn: tuple[int, list[str], set[str], list[MemberRates]], data: st.DataObject
) -> None:
    chunks, members, hosts, rates = drawn
    owners = assign(chunks, members, hosts, rates)
    lost = data.draw(st.sets(st.sampled_from(sorted(set(owners)))))
    heirs = [index for index in range(len(members)) if index not in lost]
    if not heirs:
        return
    moved = reassign(owners, lost, heirs, rates)
    for before, after in zip(owners, moved, strict=True):
        assert after in heirs if before in lost else after == before
    assert moved == reassign(owners, lost, heirs, rates)


def test_without_rates_the_least_loaded_heirs() -> None:
    assert counts_of(reassign((0, 0, 0, 0, 1, 1, 2), {0}, [1, 2, 3]), 4) == [0, 3, 2, 2]


def test_a_fast_heir_takes_more() -> None:
    rates = mbit((100, 100), (10, 10), (90, 90))
    moved = reassign((0,) * 50, {0}, [1, 2], rates)
    assert counts_of(moved, 3) == [0, 5, 45]


# --- uncertain rates ---


def test_lines_that_are_about_equal_get_even_shares() -> None:
    rates = mbit((160, 130), (200, 200), (250, 210), (190, 300))
    assert owned(80, rates) != [20, 20, 20, 20]
    assert owned(80, smoothed(rates)) == [20, 20, 20, 20]


def test_a_line_that_is_clearly_slower_or_faster_keeps_its_rate() -> None:
    rates = mbit((20, 20), (200, 200), (220, 180), (1000, 1000))
    found = smoothed(rates)
    assert found[0] == rates[0] and found[3] == rates[3]
    assert found[1].up_bytes_per_s == found[2].up_bytes_per_s


def test_rough_rates_count_only_where_they_are_far_below_the_others() -> None:
    """As measured in the lab on four equal lines of 200 Mbit/s, by probes and while the state was given away."""
    seen = mbit((261, 0), (183, 0), (52, 0), (2097, 0))
    rough = [dataclasses.replace(line, rough=True) for line in seen]
    assert owned(96, smoothed(seen)) != [24, 24, 24, 24]
    assert owned(96, smoothed(rough)) == [24, 24, 24, 24]
    thin = [*rough[:3], dataclasses.replace(mbit((8, 0))[0], rough=True)]
    assert owned(96, smoothed(thin))[3] <= 2, "but a way up that is thin even for a probe is spared"


def test_a_way_down_that_was_measured_counts_also_where_the_way_up_is_not_known() -> None:
    seen = [MemberRates(None, 100e6, rough=True)] * 3 + [MemberRates(None, 50e6, rough=True)]
    assert [line.down_bytes_per_s for line in smoothed(seen)] == [100e6, 100e6, 100e6, 50e6]


def test_unknown_rates_stay_unknown() -> None:
    rates = [MemberRates(), MemberRates(MBIT), MemberRates(None, MBIT)]
    assert smoothed(rates) == rates and smoothed([]) == []


# --- owners that meet others at a relay ---


EIGHT = names(8)
DIALLED = set(EIGHT[:4])
ALIKE_LINES = [MemberRates(100 * MBIT, 100 * MBIT)] * 8


def met_at(relay_mbit: float) -> list[dict[str, float]]:
    """Three behind routers and one behind a hard router, whom these three meet at the relay only."""
    return [
        dict.fromkeys(EIGHT[4:7], relay_mbit * MBIT / 3),
        dict.fromkeys(EIGHT[4:8], relay_mbit * MBIT / 6),
    ]


def wide(relay_mbit: float, rates: Sequence[MemberRates] = ALIKE_LINES, chunks: int = 400) -> list[int]:
    owners = best_assigned(chunks, EIGHT, DIALLED, rates, 8.0, met_at(relay_mbit))
    assert len(owners) == chunks
    return counts_of(owners, 8)


def test_a_relay_as_fast_as_a_line_makes_four_dialable_ones_of_eight_as_good_as_eight() -> None:
    alone = round_time(counts_of(assign(400, EIGHT, DIALLED, ALIKE_LINES), 8), ALIKE_LINES, 8.0)
    eight = round_time(owned(400, ALIKE_LINES), ALIKE_LINES, 8.0)
    assert alone == pytest.approx(2 * eight), "four lines take in what eight did"
    assert wide(100) == [50] * 8
    counts = wide(75)
    assert min(counts) > 40 and round_time(counts, ALIKE_LINES, 8.0) <= 1.15 * eight


def test_over_a_slower_relay_fewer_own_and_less() -> None:
    counts = wide(40)
    assert counts[7] == 0 and 0 < counts[6] < counts[0], "the one whom three meet there owns nothing"


def test_what_makes_a_round_hardly_shorter_passes_no_relay() -> None:
    for relay_mbit in (1, 5, 10):
        assert wide(relay_mbit) == [100] * 4 + [0] * 4
    lines = [MemberRates(100 * MBIT, 1000 * MBIT)] * 4 + [MemberRates(1 * MBIT, 1000 * MBIT)] * 4
    assert wide(1000, lines)[4:] == [0] * 4, "their lines carry less than it would save"


def test_as_long_as_no_rate_is_known_nothing_passes_a_relay() -> None:
    assert wide(1000, [MemberRates()] * 8) == [100] * 4 + [0] * 4


@fixed
@given(rounds(8), st.floats(0.1, 1000))
def test_a_relay_is_used_only_for_a_round_that_is_so_much_shorter(
    drawn: tuple[int, list[str], set[str], list[MemberRates]], relay_mbit: float
) -> None:
    chunks, members, hosts, rates = drawn
    pairs = dict.fromkeys(sorted(set(members) - hosts), relay_mbit * MBIT)
    plain = assign(chunks, members, hosts, rates)
    owners = best_assigned(chunks, members, hosts, rates, 8.0, [pairs] if pairs else [])
    lines = [
        dataclasses.replace(line, pair_bytes_per_s=pairs.get(it))
        for it, line in zip(members, rates, strict=True)
    ]
    assert len(owners) == chunks
    assert (
        owners == plain or _round_s(owners, lines, 8.0) * RELAY_GAIN <= _round_s(plain, rates, 8.0) * 1.0001
    )
