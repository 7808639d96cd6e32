"""The rate of a line from what moved over it, on made-up lines whose true rate is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from farflung.collectives.link.rates import FEW_LINES, LONG_WAY_S, AtLeast, RateMeter, is_mine, streams_wanted

MBIT = 125_000.0  # bytes/s
MIB = 1 << 20


class MadeUpLine:
    """Moves chunks at a given rate.  A buffer swallows the first chunks of each transfer at once."""

    def __init__(self, bytes_per_s: float, chunk_bytes: int = MIB, buffer_bytes: int = 0) -> None:
        self.meter = RateMeter()
        self.now = 100.0
        self.bytes_per_s = bytes_per_s
        self.chunk_bytes = chunk_bytes
        self.buffer_bytes = buffer_bytes
        self.seen: list[float | None] = []

    def transfer(self, seconds: float, pace: Callable[[int], float] = lambda chunk: 1.0) -> None:
        """As many chunks as go in that time; `pace` makes single ones slower or faster."""
        self.meter.feed(self.now, 0, backlog=False)
        end, room, chunk = self.now + seconds, self.buffer_bytes, 0
        while self.now < end:
            if room >= self.chunk_bytes:
                room -= self.chunk_bytes
                self.now += 1e-5
            else:
                self.now += self.chunk_bytes / self.bytes_per_s * pace(chunk)
            chunk += 1
            self.meter.feed(self.now, self.chunk_bytes, backlog=True)
            self.seen.append(self.meter.bytes_per_s)

    def idle(self, seconds: float) -> None:
        self.now += seconds
        self.meter.feed(self.now, 0, backlog=False)

    @property
    def estimate(self) -> float:
        assert self.meter.bytes_per_s is not None
        return self.meter.bytes_per_s

    def is_right(self, tolerance: float = 0.05) -> bool:
        return self.estimate == pytest.approx(self.bytes_per_s, rel=tolerance)


LINES = pytest.mark.parametrize("mbit", [0.5, 10, 100, 1000])


@LINES
@pytest.mark.parametrize("buffer_bytes", [0, 4 * MIB])
def test_a_steady_line_is_measured_right(mbit: float, buffer_bytes: int) -> None:
    line = MadeUpLine(mbit * MBIT, buffer_bytes=buffer_bytes)
    line.transfer(max(6.5, 10 * MIB / line.bytes_per_s))
    assert line.is_right(0.01)


def test_nothing_is_claimed_before_it_is_known() -> None:
    line = MadeUpLine(10 * MBIT)
    assert line.meter.bytes_per_s is None
    line.transfer(1.7)
    assert line.meter.bytes_per_s is None
    line.transfer(6.5)
    assert line.is_right()


def test_an_idle_line_tells_nothing() -> None:
    meter = RateMeter()
    for second in range(1000):
        meter.feed(float(second), 1000, backlog=False)
    assert meter.bytes_per_s is None


@LINES
def test_idle_gaps_change_nothing(mbit: float) -> None:
    line = MadeUpLine(mbit * MBIT)
    for _ in range(6):
        line.transfer(max(1.5, 5 * MIB / line.bytes_per_s))
        line.idle(60.0)
    assert line.is_right(0.01)
    line.idle(10_000_000.0)
    assert line.is_right(0.01)


def test_trickles_between_transfers_change_nothing() -> None:
    line = MadeUpLine(100 * MBIT)
    line.transfer(5.0)
    for _ in range(100):
        line.now += 1.0
        line.meter.feed(line.now, 300, backlog=False)
    assert line.is_right(0.01)


@pytest.mark.parametrize("buffer_bytes", [MIB, 8 * MIB])
def test_what_a_buffer_swallows_is_not_the_lines_rate(buffer_bytes: int) -> None:
    """Many short transfers, each of which begins with a burst into an empty buffer."""
    line = MadeUpLine(10 * MBIT, buffer_bytes=buffer_bytes)
    for _ in range(10):
        line.transfer(4.0)
        line.idle(20.0)
    assert line.is_right(0.02)


def test_bursts_in_the_middle_even_out() -> None:
    """Chunks arrive four at a time, as they do when a receiver is slow to read."""
    line = MadeUpLine(10 * MBIT)
    line.transfer(120.0, pace=lambda chunk: 3.997 if chunk % 4 == 0 else 0.001)
    assert line.is_right(0.25)
    settled = [rate for rate in line.seen[30:] if rate is not None]
    assert max(settled) < 1.3 * line.bytes_per_s and min(settled) > 0.75 * line.bytes_per_s


@pytest.mark.parametrize("before, after", [(10, 100), (1, 1000)])
def test_a_faster_line_is_believed_at_once(before: float, after: float) -> None:
    line = MadeUpLine(before * MBIT)
    line.transfer(60.0)
    line.bytes_per_s = after * MBIT
    line.transfer(6.5)
    assert line.is_right(0.1)


@pytest.mark.parametrize("before, after", [(100, 10), (1000, 1)])
def test_a_slower_line_is_believed_when_it_stays_slow(before: float, after: float) -> None:
    line = MadeUpLine(before * MBIT)
    line.transfer(60.0)
    line.bytes_per_s = after * MBIT
    line.transfer(24 * 3 * MIB / line.bytes_per_s)  # two generations of windows with three chunks each
    assert line.is_right(0.1)


def test_time_in_which_another_line_was_the_narrow_one_takes_nothing_away() -> None:
    """Of every four transfers one runs at full speed, the others wait for somebody slow."""
    line = MadeUpLine(100 * MBIT)
    for turn in range(40):
        line.transfer(2.0, pace=lambda chunk, turn=turn: 1.0 if turn % 4 == 0 else 3.0)  # type: ignore[misc]
        line.idle(5.0)
        if turn:
            assert line.is_right(0.1)


def test_a_line_that_falls_silent_is_not_believed_for_ever() -> None:
    line = MadeUpLine(100 * MBIT)
    line.transfer(10.0)
    line.meter.feed(line.now + 0.05, 0, backlog=True)
    assert line.is_right(0.01), "a chunk is on its way"
    line.meter.feed(line.now + 200.0, 0, backlog=True)
    assert line.estimate < 0.1 * line.bytes_per_s


def test_polling_gives_the_same_as_reporting_each_chunk() -> None:
    meter, now = RateMeter(), 0.0
    for _ in range(100):
        now += 0.1
        meter.feed(now, 12_500, backlog=True)
    assert meter.bytes_per_s == pytest.approx(MBIT)


def test_a_trickle_tells_nothing_of_the_line() -> None:
    meter = RateMeter()
    for second in range(100):
        meter.feed(float(second), 200, backlog=True)
    assert meter.bytes_per_s is None


# ---- whose line it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mbit, known", [(200, None), (20, 20)])
def test_what_a_slow_receiver_lets_pass_is_not_taken_for_the_senders_own_line(
    mbit: float, known: float | None
) -> None:
    """Rounds of eight: 1.5 MB for each of the seven others, the last of which takes in 3 Mbit/s from everybody."""
    meter, now, step_s = RateMeter(), 0.0, 0.05
    for _ in range(4):
        left = dict.fromkeys(range(7), 1_500_000.0)
        while left:
            share = mbit * MBIT * step_s / len(left)
            rates = {peer: min(share, 3 * MBIT * step_s) if peer == 6 else share for peer in left}
            moved = {peer: min(left[peer], rates[peer]) for peer in left}
            left = {peer: left[peer] - moved[peer] for peer in left if left[peer] - moved[peer] > 1}
            now += step_s
            meter.feed(now, round(sum(moved.values())), is_mine(len(left), others=7))
        now += 1.0
        meter.feed(now, 0, is_mine(0, others=7))
    assert meter.bytes_per_s == (None if known is None else pytest.approx(known * MBIT, rel=0.15))


@pytest.mark.parametrize(
    "busy, others, mine", [(1, 1, 1), (1, 2, 0), (2, 2, 1), (2, 3, 1), (3, 7, 0), (0, 0, 0)]
)
def test_more_than_half_of_the_others_wait_for_a_line_that_is_the_narrow_one(
    busy: int, others: int, mine: int
) -> None:
    assert is_mine(busy, others) == bool(mine)


def test_what_a_line_carried_once_it_can_carry_at_least() -> None:
    found, now = AtLeast(), 100.0
    found.feed(now, 10_000_000)
    assert found.bytes_per_s is None, "nobody knows for how long these bytes were on their way"
    for _ in range(4):
        now += 0.125
        found.feed(now, 250_000)
    for _ in range(100):
        now += 0.125
        found.feed(now, 10)
    assert found.bytes_per_s == pytest.approx(2_000_000)


def test_a_line_that_never_carried_anything_is_not_known() -> None:
    found = AtLeast()
    for second in range(10):
        found.feed(float(second), 0)
    assert found.bytes_per_s is None


@pytest.mark.parametrize(
    ("rtt_s", "lines", "streams"),
    [
        (None, 4, 1),
        (LONG_WAY_S / 2, 4, 1),
        (LONG_WAY_S, 4, 2),
        (0.1, FEW_LINES, 2),
        (0.1, FEW_LINES + 1, 1),
    ],
)
def test_a_long_way_has_two_streams_unless_there_are_many(
    rtt_s: float | None, lines: int, streams: int
) -> None:
    assert streams_wanted(rtt_s, lines) == streams
