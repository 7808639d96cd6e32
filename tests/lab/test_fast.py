"""The compiled network does what the one in Python does: the same packets at the same times, to the last bit."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rig.lab.fast
from farflung.compression.native import NoLibrary, library
from rig.lab.fast import FastNetwork
from rig.lab.network import Network
from rig.lab.packets import NEEDS_CHECKSUM, NOT_GSO, VNET, Parcel
from rig.lab.shaping import LineSpec

HOSTS, SEGMENT_BYTES, TCPV4, TCP = 3, 1448, 1, 6


@pytest.fixture(scope="module")
def compiled() -> str:
    try:
        return str(library(os.environ, Path(rig.lab.fast.__file__).with_name("fast.c")))
    except NoLibrary as error:
        pytest.skip(str(error))


def packet(payload_bytes: int, draw: random.Random, target: int) -> Parcel:
    """TCP in one piece that stands for many, or a small packet as it is."""
    payload = draw.randbytes(payload_bytes)
    large = payload_bytes > SEGMENT_BYTES
    flags, sequence = draw.randrange(256), draw.randrange(1 << 32)
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 7, 8 << 4, flags, 500, 0, 0) + draw.randbytes(12)
    ip = struct.pack("!BBHHHBB", 0x45, 0, 52 + payload_bytes, draw.randrange(1 << 16), 0, 64, TCP)
    ip += bytes(2) + draw.randbytes(8)
    vnet = VNET.pack(NEEDS_CHECKSUM, TCPV4 if large else NOT_GSO, 52, SEGMENT_BYTES if large else 0, 20, 16)
    return Parcel(vnet + ip + tcp + payload, target)


SPECS = st.builds(
    LineSpec,
    rate_bit_s=st.sampled_from([1e6, 20e6, 1e9]),
    queue_bytes=st.sampled_from([2000, 64_000, 1 << 24, 1 << 24]),
    delay_s=st.sampled_from([0.0, 0.001, 0.025]),
    jitter_s=st.sampled_from([0.0, 0.004]),
    loss=st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.02, 1.0]),
)
LINES = st.tuples(SPECS, SPECS)
HOST = st.integers(0, HOSTS - 1)
SENT = st.tuples(st.just("send"), HOST, HOST, st.sampled_from([0, 1, 700, 1448, 1449, 20_000, 65_000]))
ORDERS = st.one_of(
    SENT,
    SENT,
    SENT,
    st.tuples(st.just("wait"), st.floats(0, 0.05)),
    st.tuples(st.just("until due")),
    st.tuples(st.just("cut"), HOST, st.none() | HOST, st.booleans()),
    st.tuples(st.just("heal"), HOST, st.none() | HOST),
    st.tuples(st.just("rate"), HOST, SPECS, SPECS),
)


def happenings(
    net: Network | FastNetwork, orders: list[tuple[object, ...]], seed: int
) -> Iterator[list[object]]:
    draw, now_s = random.Random(seed), 5.0
    for what, *words in [*orders, ("wait", 1e6)]:
        match what, words:
            case "send", [int(source), int(target), int(size)]:
                net.send(source, packet(size, draw, target), now_s)
            case "wait", [float(seconds)]:
                now_s += seconds
            case "until due", []:
                now_s = max(now_s, min(net.due_s(), now_s + 10.0))
            case "cut", [int(host), (int() | None) as other, bool(one_way)]:
                net.cut(host, other, one_way, now_s)
            case "heal", [int(host), (int() | None) as other]:
                net.heal(host, other, now_s)
            case "rate", [int(host), LineSpec() as up, LineSpec() as down]:
                net.set_rate(host, up, down, now_s)
            case _:
                raise AssertionError(what)
        if what in ("wait", "until due"):
            yield [(parcel.target, parcel.data) for parcel in net.deliver(now_s)]
        yield [now_s, net.due_s(), net.take_worst_late_s(), net.counters()]


@settings(max_examples=300)
@given(
    # Equal lines too: then packets of several senders arrive at the very same time.
    st.lists(LINES, min_size=HOSTS, max_size=HOSTS) | LINES.map(lambda both: [both] * HOSTS),
    st.lists(ORDERS, min_size=10, max_size=60),
    st.integers(0, 1 << 16),
)
def test_both_networks_do_the_same(
    compiled: str, specs: list[tuple[LineSpec, LineSpec]], orders: list[tuple[object, ...]], seed: int
) -> None:
    fast = FastNetwork(compiled, specs, seed)
    try:
        plain = happenings(Network(specs, seed), orders, seed)
        for expected, found in zip(plain, happenings(fast, orders, seed), strict=True):
            assert found == expected
    finally:
        fast.close()


def test_what_arrives_at_the_same_moment_goes_on_in_the_order_of_its_senders(compiled: str) -> None:
    spec, draw = LineSpec(1e9, 1 << 30, 0.01), random.Random(1)
    late, early = packet(100, draw, 1), packet(100, draw, 1)
    fast = FastNetwork(compiled, [(spec, spec)] * HOSTS, 1)
    for net in (fast, Network([(spec, spec)] * HOSTS, 1)):
        net.send(2, late, 5.0)
        net.send(0, early, 5.0)
        assert [parcel.data for parcel in net.deliver(9.0)] == [early.data, late.data]
    fast.close()


def test_more_than_a_ring_holds_at_first_comes_in_order(compiled: str) -> None:
    spec = LineSpec(1e9, 1 << 30, 0.01)
    fast, draw = FastNetwork(compiled, [(spec, spec)] * HOSTS, 1), random.Random(1)
    sent = [packet(100, draw, 1) for _ in range(1000)]
    for number, parcel in enumerate(sent):
        fast.send(0, parcel, number * 1e-6)
        if number == 40:
            fast.send(0, packet(100, draw, 2), number * 1e-6)
    got = [parcel.data for parcel in fast.deliver(9.0) if parcel.target == 1]
    fast.close()
    assert got == [parcel.data for parcel in sent]
