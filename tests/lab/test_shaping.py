"""One line, and lines joined to a network, on virtual time."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.lab.network import Network
from rig.lab.packets import VNET_BYTES
from rig.lab.packets import Parcel as RealParcel
from rig.lab.shaping import BURST_S, Line, LineSpec

PACKET_BYTES = 1500
MBIT = 1e6


class Parcel(RealParcel):
    """Segments of one packet's size, with no bytes behind them."""

    def __init__(self, segments: int = 1, target: int = 0, first: int = 0) -> None:
        super().__init__(bytes(VNET_BYTES), target)
        self.segments, self.wire_bytes, self.first = segments, segments * PACKET_BYTES, first

    def slice(self, start: int, stop: int) -> Parcel:
        return Parcel(stop - start, self.target, self.first + start)


def line(**spec: float) -> Line:
    given = {"rate_bit_s": 100 * MBIT, "queue_bytes": 1 << 30, **spec}
    return Line(LineSpec(**given), random.Random(1))  # type: ignore[arg-type]


def arrivals(one: Line) -> list[tuple[float, RealParcel]]:
    return one.pop(math.inf)


@given(st.lists(st.integers(1, 44), min_size=1, max_size=50), st.sampled_from([1, 10, 200, 1000]))
def test_a_busy_line_carries_exactly_its_rate(sizes: list[int], mbit: int) -> None:
    one = line(rate_bit_s=mbit * MBIT, delay_s=0.025)
    for size in sizes:
        one.push(Parcel(size), 5.0)
    got = arrivals(one)
    assert got[-1][0] == pytest.approx(5.0 + 0.025 + sum(sizes) * PACKET_BYTES * 8 / (mbit * MBIT))
    assert one.counters.delivered == sum(sizes)
    assert one.counters.delivered_bytes == sum(sizes) * PACKET_BYTES


@given(st.integers(1, 44), st.sampled_from([1, 10, 200, 1000]))
def test_nothing_arrives_in_large_lumps(size: int, mbit: int) -> None:
    one = line(rate_bit_s=mbit * MBIT)
    one.push(Parcel(size), 0.0)
    longest_s = max(BURST_S, PACKET_BYTES * 8 / (mbit * MBIT))
    times_s = [0.0, *(due_s for due_s, _ in arrivals(one))]
    assert max(after - before for before, after in itertools.pairwise(times_s)) <= longest_s + 1e-9


def test_a_late_caller_loses_no_capacity() -> None:
    one = line()
    for number in range(100):
        one.push(Parcel(), number * 1e-6)
    assert len(one.pop(0.0031)) == 25  # asked late, and only now and then
    assert one.due_s() == pytest.approx(26 * PACKET_BYTES * 8 / (100 * MBIT))
    assert len(one.pop(1.0)) == 75


def test_an_idle_line_saves_nothing_up() -> None:
    one = line()
    one.push(Parcel(), 0.0)
    one.push(Parcel(), 10.0)
    one.push(Parcel(), 10.0)
    assert [due_s for due_s, _ in arrivals(one)] == pytest.approx([0.00012, 10.00012, 10.00024])


def test_a_full_queue_drops_the_tail_and_single_segments_of_it() -> None:
    one = line(queue_bytes=10 * PACKET_BYTES)
    one.push(Parcel(8), 0.0)
    one.push(Parcel(8), 0.0)  # two of its segments find room
    one.push(Parcel(1), 0.0)
    assert one.counters.dropped == 7
    assert [parcel.segments for _, parcel in one.pop(math.inf)] == [8, 2]
    one.push(Parcel(3), 0.0012)  # by then all had left the queue
    assert one.counters.dropped == 7


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 1.0])
def test_loss_takes_single_packets_at_the_share_asked_for(share: float) -> None:
    one = line(rate_bit_s=1e12, loss=share)
    for _ in range(5000):
        one.push(Parcel(40), 0.0)
    sent = 5000 * 40
    assert one.counters.lost == pytest.approx(sent * share, abs=4 * math.sqrt(sent * share))
    assert one.counters.lost + sum(parcel.segments for _, parcel in arrivals(one)) == sent


def test_the_same_seed_loses_the_same_packets() -> None:
    def lost() -> set[int]:
        one = line(rate_bit_s=1e12, loss=0.02)
        for number in range(0, 4000, 40):
            one.push(Parcel(40, first=number), 0.0)
        kept = {p.first + i for _, p in arrivals(one) if isinstance(p, Parcel) for i in range(p.segments)}
        return set(range(4000)) - kept

    assert lost() == lost()
    assert 40 < len(lost()) < 160


def test_jitter_stays_in_its_range_and_keeps_the_order() -> None:
    one = line(delay_s=0.02, jitter_s=0.03)
    for number in range(5000):
        one.push(Parcel(), number * 0.0005)
    extra_s = [
        due_s - number * 0.0005 - 0.00012 - 0.02 for number, (due_s, _) in enumerate(one.pop(math.inf))
    ]
    assert -1e-9 <= min(extra_s) < 0.005
    assert 0.025 < max(extra_s) <= 0.03 + 1e-9
    assert all(after - before >= -0.0005 for before, after in itertools.pairwise(extra_s))


def test_a_queue_that_is_more_than_full_drops_a_small_packet() -> None:
    """Two of three segments are let in by their mean size, but they are longer than the third: no room is left."""
    one = line(queue_bytes=2900)
    large, small = Parcel(3), Parcel(1)
    large.wire_bytes, small.wire_bytes = 3100, 52
    one.push(large, 0.0)
    one.push(small, 0.0)
    assert [parcel.segments for _, parcel in arrivals(one)] == [2]
    assert one.counters.dropped == 2


def test_a_new_rate_holds_for_what_is_queued() -> None:
    one = line(delay_s=0.1)  # one packet takes 0.12 ms
    for _ in range(10):
        one.push(Parcel(), 0.0)
    one.set_rate(10 * MBIT, 1 << 30, 0.0006)  # five are through
    one.push(Parcel(), 0.0006)
    times_s = [due_s - 0.1 for due_s, _ in arrivals(one)]
    assert times_s == pytest.approx(
        [0.00012 * n for n in range(1, 6)] + [0.0006 + 0.0012 * n for n in range(1, 7)]
    )


# ---- the network ---------------------------------------------------------------------------------------------


def network(hosts: int = 2, mbit: float = 100, delay_s: float = 0.01) -> Network:
    spec = LineSpec(mbit * MBIT, 1 << 30, delay_s)
    return Network([(spec, spec)] * hosts, seed=1)


def run(net: Network, until_s: float) -> list[tuple[float, RealParcel]]:
    """Calls `deliver` whenever the network says so, as the router would if it were never late."""
    got = []
    while (due_s := net.due_s()) <= until_s:
        got += [(due_s, parcel) for parcel in net.deliver(due_s)]
    return got


def test_a_way_takes_the_sum_of_both_hosts_delays() -> None:
    net = network()
    net.send(0, Parcel(target=1), 1.0)
    (arrived,) = run(net, 9.0)
    assert arrived[0] == pytest.approx(1.0 + 2 * 0.01 + 2 * 0.00012)


def test_senders_share_the_line_down_of_their_target() -> None:
    net = network(hosts=3)
    for _ in range(100):
        net.send(0, Parcel(target=2), 0.0)
        net.send(1, Parcel(target=2), 0.0)
    assert run(net, 9.0)[-1][0] == pytest.approx(0.02 + 0.00012 + 200 * 0.00012)


def test_a_host_that_is_cut_off_is_silent_until_healed() -> None:
    net = network()
    net.send(0, Parcel(target=1), 0.0)
    net.cut(0, None, one_way=False, now_s=0.005)  # in flight: lost
    net.send(0, Parcel(target=1), 0.006)
    net.send(1, Parcel(target=0), 0.006)
    assert run(net, 1.0) == []
    net.heal(0, None, 1.0)
    net.send(0, Parcel(target=1), 1.0)
    net.send(1, Parcel(target=0), 1.0)
    assert len(run(net, 2.0)) == 2
    (up, down), _ = net.counters()
    assert (up.cut, down.cut) == (2, 1)


def test_cutting_a_pair_leaves_the_others_alone() -> None:
    net = network(hosts=3)
    net.cut(0, 1, one_way=False, now_s=0.0)
    for source, target in itertools.permutations(range(3), 2):
        net.send(source, Parcel(target=target), 0.0)
    assert sorted(parcel.target for _, parcel in run(net, 1.0)) == [0, 1, 2, 2]


def test_one_way_cuts_lose_only_what_the_named_host_sends() -> None:
    for target in (None, 1):
        net = network()
        net.cut(0, target, one_way=True, now_s=0.0)
        net.send(0, Parcel(target=1), 0.0)
        net.send(1, Parcel(target=0), 0.0)
        assert [parcel.target for _, parcel in run(net, 1.0)] == [0]


def test_a_cut_takes_nothing_that_had_already_crossed() -> None:
    net = network()
    net.send(0, Parcel(target=1), 0.0)
    net.cut(0, None, one_way=False, now_s=0.015)  # on the other host's line by then
    assert len(run(net, 1.0)) == 1


def test_lateness_is_told() -> None:
    net = network()
    net.send(0, Parcel(target=1), 0.0)
    net.deliver(1.02024)
    assert net.take_worst_late_s() == pytest.approx(1.0)
    assert net.take_worst_late_s() == 0.0
