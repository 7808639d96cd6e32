"""Caps: the forms people write, the hours of a day, and a pace that is exact at every rate and chunk size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.collectives.link.rates import Pacer
from farflung.protocol.caps import DAY_S, Cap, Hours, parse_cap, strictest
from farflung.protocol.errors import UserError

KBIT = 125.0  # bytes/s
HOUR_S = 3600

fixed = settings(max_examples=60)
rates = st.floats(64, 10_000_000).map(lambda kbit: kbit * KBIT)
chunk_sizes = st.integers(4096, 4 << 20)


# --- what people write ---


@pytest.mark.parametrize(
    "text, bytes_per_s",
    [
        ("20 Mbit/s", 2_500_000),
        ("2.5 MB/s", 2_500_000),
        ("500 kbit/s", 62_500),
        ("500kbit/s", 62_500),
        ("  1 gbit/s ", 125_000_000),
        ("64000 bit/s", 8_000),
        ("3 kB/s", 3_000),
        ("3 KB/s", 3_000),
        ("none", None),
        ("None", None),
    ],
)
def test_accepted_forms(text: str, bytes_per_s: float | None) -> None:
    assert parse_cap(text) == Cap(bytes_per_s)


@pytest.mark.parametrize(
    "text, why",
    [
        ("20", "20 has no unit"),
        (20, "no text with a unit"),
        (2.5, "no text with a unit"),
        (True, "no text with a unit"),
        ("", "is not a rate"),
        ("-5 Mbit/s", "is not a rate"),
        ("fast", "is not a rate"),
        ("nan Mbit/s", "is not a rate"),
        ("٢٠ Mbit/s", "is not a rate"),
        ("20 Mb/s", '"Mb/s" is not a known unit'),
        ("20 MiB/s", '"MiB/s" is not a known unit'),
        ("20 Mbit", '"Mbit" is not a known unit'),
        ("0 Mbit/s", "is not between"),
        ("9" * 400 + " Mbit/s", "is not between"),
        ("5 Mbit/s, 4 Mbit/s", "only one entry"),
        ("5 Mbit/s 08:00-08:00", "must not end when it starts"),
        ("5 Mbit/s 25:00-26:00", "25:00 is no time of day"),
        ("5 Mbit/s 08:60-09:00", "08:60 is no time of day"),
        ("5 Mbit/s 08:00", "is not a rate"),
        ("5 Mbit/s 08:00-12:00, 4 Mbit/s 11:00-13:00", "two ranges of hours overlap"),
        ("5 Mbit/s 22:00-06:00, 4 Mbit/s 05:59-07:00", "two ranges of hours overlap"),
        ("5 Mbit/s,", "is not a rate"),
    ],
)
def test_anything_else_is_refused_with_the_forms(text: object, why: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_cap(text)
    assert why in str(caught.value) and '"20 Mbit/s", "2.5 MB/s"' in str(caught.value)
    assert "\n" not in str(caught.value)


@fixed
@given(st.text(max_size=40))
def test_any_text_is_a_cap_or_a_users_mistake(text: str) -> None:
    try:
        cap = parse_cap(text)
    except UserError:
        return
    assert cap.bytes_per_s is None or cap.bytes_per_s > 0


# --- hours of the day ---


def test_hours_hold_from_their_start_until_before_their_end() -> None:
    cap = parse_cap("20 Mbit/s, 5 Mbit/s 08:00-18:00")
    assert cap == Cap(20_000 * KBIT, (Hours(8 * HOUR_S, 18 * HOUR_S, 5_000 * KBIT),))
    day = [cap.at(second) for second in (0, 8 * HOUR_S - 1, 8 * HOUR_S, 18 * HOUR_S - 0.1, 18 * HOUR_S)]
    assert day == [20_000 * KBIT, 20_000 * KBIT, 5_000 * KBIT, 5_000 * KBIT, 20_000 * KBIT]


def test_several_ranges_over_midnight_and_none() -> None:
    cap = parse_cap("5 Mbit/s 8:00-12:00, 10 Mbit/s, none 22:30 - 06:00, 1 Mbit/s 12:00-13:00")
    found = [cap.at(hour * HOUR_S) for hour in (0, 5.99, 6, 8, 12, 13, 22, 22.5, 23.99, 24)]
    five, ten, one = 5_000 * KBIT, 10_000 * KBIT, 1_000 * KBIT
    assert found == [None, None, ten, five, one, ten, ten, None, None, None]


def test_without_an_entry_for_all_hours_the_rest_is_uncapped() -> None:
    cap = parse_cap("5 Mbit/s 18:00-24:00")
    assert cap.at(18 * HOUR_S) == cap.at(DAY_S - 1) == 5_000 * KBIT
    assert cap.at(0) is None
    assert parse_cap("5 Mbit/s 18:00-00:00").at(DAY_S - 1) == 5_000 * KBIT


@fixed
@given(st.one_of(st.none(), rates), st.one_of(st.none(), rates))
def test_the_stricter_of_two_holds(own: float | None, run: float | None) -> None:
    both = strictest(own, run)
    assert both == strictest(run, own)
    assert both in (own, run)
    assert all(cap is None or (both is not None and both <= cap) for cap in (own, run))


# --- the pace ---


@fixed
@given(rates, chunk_sizes, st.floats(0, 1e7))
def test_the_rate_is_kept_within_one_percent_over_ten_seconds(rate: float, chunk: int, start: float) -> None:
    """From the start of one chunk to that of another, at least 10 s later, exactly the rate has passed."""
    pacer, now, passed, chunks = Pacer(rate), start, 0, 0
    while now < start + 10 and chunks < 20_000:  # small chunks at a high rate: a shorter time will do
        now += pacer.take(now, chunk)
        passed, chunks = passed + chunk, chunks + 1
    now += pacer.wait_s(now)
    tolerance = 0.01 * max(now - start, 10)
    assert abs(passed / rate - (now - start)) <= tolerance


@pytest.mark.parametrize("rate", [10_000_000 * KBIT])
def test_a_million_small_chunks_on_a_fast_line_add_up_no_rounding(rate: float) -> None:
    pacer, start = Pacer(rate), 1e7
    now = start
    for _ in range(1_000_000):
        now += pacer.take(now, 4096)
    assert 1_000_000 * 4096 / (now - start + Pacer.BURST_S) == pytest.approx(rate, rel=1e-4)


@fixed
@given(rates, st.lists(st.tuples(chunk_sizes, st.floats(0, 0.2)), min_size=2, max_size=60))
def test_no_window_holds_more_than_the_rate_a_burst_and_one_chunk(
    rate: float, traffic: list[tuple[int, float]]
) -> None:
    """Whatever the sizes, and however late the caller is."""
    pacer, now, starts = Pacer(rate), 50.0, []
    for chunk, late_s in traffic:
        now += pacer.take(now, chunk) + late_s
        starts.append((now, chunk))
    largest = max(chunk for chunk, _ in traffic)
    # Lateness moves a chunk out of its place: it may then stand closer to the next one by as much.
    allowed_s = Pacer.BURST_S + max(late_s for _, late_s in traffic)
    for first in range(len(starts)):
        passed = 0
        for at, chunk in starts[first:]:
            passed += chunk
            window_s = at - starts[first][0]
            assert passed <= rate * (window_s + allowed_s) * (1 + 1e-9) + largest


@fixed
@given(rates, st.lists(st.floats(0, 0.04), min_size=50, max_size=50))
def test_a_caller_that_comes_a_little_late_loses_nothing(rate: float, late: list[float]) -> None:
    pacer, chunk = Pacer(rate), max(1, round(rate * 0.05))
    now = start = 10.0
    for late_s in late:
        now += pacer.wait_s(now) + late_s
        assert pacer.take(now, chunk) == 0
    assert now - start <= 50 * chunk / rate + 0.04 + 1e-6


def test_a_large_chunk_goes_at_once_and_the_next_waits() -> None:
    pacer = Pacer(1000.0)
    assert pacer.take(0.0, 100_000) == 0
    assert pacer.wait_s(0.0) == pytest.approx(100 - Pacer.BURST_S)
    assert pacer.take(50.0, 1) == pytest.approx(50 - Pacer.BURST_S)


def test_uncapped_never_waits() -> None:
    pacer = Pacer(None)
    assert [pacer.take(1.0, 1 << 30) for _ in range(3)] == [0, 0, 0]


def test_the_rate_can_change_while_bytes_are_owed() -> None:
    pacer = Pacer(1000.0)
    pacer.take(0.0, 10_050)
    pacer.set_rate(5.0, 5000.0)  # 5000 bytes are still owed
    assert pacer.wait_s(5.0) == pytest.approx(1.0)
    pacer.set_rate(5.5, 500.0)
    assert pacer.wait_s(5.5) == pytest.approx(5.0)
    pacer.set_rate(6.0, None)
    assert pacer.take(6.0, 1 << 40) == 0
    pacer.set_rate(7.0, 1000.0)
    assert pacer.take(7.0, 1050) == 0
    assert pacer.wait_s(7.0) == pytest.approx(1.0)


def test_a_change_of_rate_gives_no_new_burst() -> None:
    pacer, now = Pacer(1000.0), 0.0
    for step in range(100):
        now += pacer.take(now, 100)
        pacer.set_rate(now, 1000.0 + step % 2)
    assert now == pytest.approx(100 * 100 / 1000.5, rel=0.02)
