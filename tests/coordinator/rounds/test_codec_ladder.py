"""codec = "auto": the finest codec that a member's uplink carries in time, without flapping."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from farflung.coordinator.rounds.shares import ROOM, codecs_by_member
from farflung.protocol.round_words import BITS_PER_VALUE, LADDER

MBIT = 125_000.0  # bytes/s
SIZES = {"int8": 100_000_000, "int4": 50_000_000, "int2": 25_000_000, "topk": 2_700_000}


def chosen(mbit: float | None, last: str | None = None, target_s: float = 60.0) -> str:
    rate = None if mbit is None else mbit * MBIT
    given_before = {} if last is None else {"ann": last}
    return codecs_by_member(SIZES, {"ann": rate}, target_s, given_before)["ann"]


def test_the_finest_codec_that_fits() -> None:
    assert [chosen(mbit) for mbit in (100, 10, 5, 1, 0.01)] == ["int8", "int4", "int2", "topk", "topk"]


def test_each_member_by_its_own_uplink() -> None:
    rates = {"ann": 100 * MBIT, "bob": 5 * MBIT, "cyd": None}
    assert codecs_by_member(SIZES, rates, 60.0, {}) == {"ann": "int8", "bob": "int2", "cyd": "int8"}


def test_an_unknown_rate_means_int8_unless_something_was_chosen_before() -> None:
    assert chosen(None) == chosen(0) == "int8"
    assert chosen(None, last="int2") == "int2"


def test_a_finer_codec_needs_room_to_spare() -> None:
    border = SIZES["int8"] / 60.0 / MBIT
    assert chosen(1.1 * border, last="int8") == "int8"
    assert chosen(1.1 * border, last="int4") == "int4"
    assert chosen(1.21 * border, last="int4") == "int8"
    assert chosen(0.99 * border, last="int8") == "int4"


def test_a_much_better_line_climbs_several_steps_at_once() -> None:
    assert chosen(1000, last="topk") == "int8"


def test_only_codecs_with_a_known_size_are_used() -> None:
    sizes = {name: SIZES[name] for name in ("int4", "topk")}
    assert codecs_by_member(sizes, {"ann": 1000 * MBIT}, 60.0, {"ann": "int8"}) == {"ann": "int4"}


@given(st.floats(0.01, 1000), st.floats(0.1, 1000), st.sampled_from(LADDER))
def test_the_choice_fits_if_any_does_and_is_stable(mbit: float, target_s: float, last: str) -> None:
    now = chosen(mbit, last, target_s)
    assert chosen(mbit, now, target_s) == now
    seconds = {name: SIZES[name] / (mbit * MBIT) for name in LADDER}
    assert seconds[now] <= target_s or now == "topk"
    finer = LADDER[: LADDER.index(now)]
    assert all(seconds[name] * ROOM > target_s for name in finer)


@given(st.floats(0.5, 200), st.lists(st.floats(0.92, 1.08), min_size=20, max_size=20))
def test_noise_of_eight_percent_changes_the_codec_at_most_once(mbit: float, noise: list[float]) -> None:
    """Namely if the first choice was made in a lucky or unlucky moment."""
    seen, last = [], None
    for factor in noise:
        last = chosen(mbit * factor, last)
        seen.append(last)
    assert sum(before != after for before, after in itertools.pairwise(seen)) <= 1


def test_the_sizes_known_to_the_coordinator_are_those_of_the_codecs() -> None:
    from farflung.compression.codec import codec_named, codec_names

    assert set(BITS_PER_VALUE) == set(codec_names())
    for name, bits in BITS_PER_VALUE.items():
        found = 8 * codec_named(name).payload_bytes(1 << 18) / (1 << 18)
        assert abs(found - bits) < 0.01 * bits, name
