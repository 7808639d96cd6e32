"""Courtesy to the house: the pace that keeps the line's queue short, the clock of beats, probes of an idle line."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass

import pytest
import zmq

from farflung.collectives.link.rates import FREE_ABOVE, LEAST_PART, PROBE_SIZES_BYTES, Courtesy, Pings
from farflung.collectives.link.tcp_counts import TcpCounts
from farflung.peer.line.control import ON_WAY_MOST, BeatClock
from farflung.protocol.frames import Header, Kind
from farflung.protocol.messages import Beat, Tick

LINE = 1.25e6  # bytes/s
QUICK_S = 0.1
BEAT_S = 0.5
FAR_CLOCK = -1234.5  # the coordinator's began at another time


@dataclass
class House:
    """A line behind a router with a deep queue, and somebody who sends as fast as the pace allows."""

    courtesy: Courtesy
    now: float = 0.0
    queued_bytes: float = 0.0
    queue_bytes: float = LINE  # a second of it

    def beat(self, carries: float = LINE, others_s: float = 0.0, back_s: float = 0.0) -> float:
        """Half a second of sending, then an answer.  Returns how long that answer took beyond the quickest."""
        pace = self.courtesy.bytes_per_s
        comes = 10 * LINE if pace is None else pace
        self.queued_bytes = min(self.queue_bytes, max(0.0, self.queued_bytes + (comes - carries) * BEAT_S))
        self.now += BEAT_S
        queued_s = self.queued_bytes / carries + others_s
        self.courtesy.on_answer(
            self.now, QUICK_S + queued_s + back_s, FAR_CLOCK + QUICK_S / 2 + queued_s, LINE
        )
        return queued_s


def calm() -> House:
    house = House(Courtesy())
    house.courtesy.on_answer(0.0, QUICK_S, FAR_CLOCK + QUICK_S / 2, None)
    return house


def test_P10_a_deep_queue_is_kept_short_and_the_line_is_used_all_the_same() -> None:
    house = calm()
    queued = [house.beat() for _ in range(240)]
    later = sorted(queued[10:])
    assert queued[0] == 1.0 and later[len(later) * 99 // 100] < 0.25
    paces = [house.courtesy.bytes_per_s for _ in range(60) if house.beat() >= 0]
    assert all(pace is not None for pace in paces)
    assert sum(min(LINE, pace) for pace in paces if pace is not None) / len(paces) > 0.9 * LINE


def test_the_pace_is_dropped_when_the_line_carries_all_that_comes() -> None:
    house = calm()
    house.beat()
    assert house.courtesy.bytes_per_s is not None
    for _ in range(40):
        house.beat(carries=10 * FREE_ABOVE * LINE)
    assert house.courtesy.bytes_per_s is None


def test_a_queue_that_is_not_ours_costs_us_half_of_the_line_at_most() -> None:
    house = calm()
    for _ in range(200):
        house.beat(others_s=1.0)
    assert house.courtesy.bytes_per_s == LEAST_PART * LINE


def test_a_queue_on_the_way_back_is_not_of_our_making() -> None:
    house = calm()
    for _ in range(20):
        house.beat(carries=20 * LINE, back_s=1.0)
    assert house.courtesy.bytes_per_s is None


def test_another_coordinators_clock_is_no_queue() -> None:
    house = calm()
    house.courtesy.forget_way()
    house.courtesy.on_answer(1.0, QUICK_S, FAR_CLOCK + 5000.0, LINE)
    assert house.courtesy.bytes_per_s is None


def test_nothing_is_concluded_while_nothing_is_sent_or_the_line_is_unknown() -> None:
    courtesy = Courtesy()
    for beat in range(100):
        courtesy.on_answer(float(beat), QUICK_S + (beat % 7), beat % 7, None)
    assert courtesy.bytes_per_s is None


def test_a_way_that_became_longer_is_no_queue_for_ever() -> None:
    courtesy, now = Courtesy(), 0.0
    courtesy.on_answer(now, QUICK_S, QUICK_S / 2, None)
    for _ in range(4000):
        now += BEAT_S
        courtesy.on_answer(now, 3 * QUICK_S, 2.5 * QUICK_S, LINE)
    assert courtesy.bytes_per_s is None


# ---- what answers take ---------------------------------------------------------------------------------------------


def a_beat(seq: int) -> Beat:
    return Beat(
        **dict.fromkeys(("step", "tokens", "tx_bytes", "rx_bytes", "roster_no", "want", "samples"), 0),
        **dict.fromkeys(("up_bytes_per_s", "down_bytes_per_s"), 0),
        **{
            "session": bytes(16),
            "seq": seq,
            "fragments": (),
            "phase": "",
            "loss": None,
            "have": (),
            **{"rough": False, "era": 0, "saved": -1, "unsure": False, "leaving": False, "data": b""},
        },
    )


def a_tick(answers: int) -> Tick:
    nothing = {
        "fragments": (),
        "era": 0,
        "goal": "",
        "reason": "",
        "roster": None,
        "leases": None,
        "void": (),
        "advice": "",
        "era_because": "",
    }
    return Tick(session=bytes(16), seq=1, answers=answers, heard_s=700.0, roster_no=0, **nothing)  # type: ignore[arg-type]


def test_an_answer_is_timed_by_the_beat_that_it_names() -> None:
    clock = BeatClock()
    for seq in range(3):
        clock.on_said(a_beat(seq), now=float(seq))
    assert clock.on_heard("something else", 2.5) is None
    assert clock.on_heard(a_tick(1), 2.5) == (1.5, 699.0)
    assert clock.on_heard(a_tick(1), 2.6) is None and clock.on_heard(a_tick(0), 2.6) is None, "told already"
    clock.forget()
    assert clock.on_heard(a_tick(2), 3.0) is None, "of a connection that is gone"


def test_beats_that_are_never_answered_are_forgotten() -> None:
    clock = BeatClock()
    for seq in range(3 * ON_WAY_MOST):
        clock.on_said(a_beat(seq), 0.0)
    assert clock.on_heard(a_tick(3 * ON_WAY_MOST - 1), 1.0) == (1.0, 700.0)
    assert clock.on_heard(a_tick(0), 1.0) is None


# ---- the kernel's pace ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is told of a pace")
def test_every_connection_is_paced_also_one_that_is_opened_later() -> None:
    rate = 47  # SO_MAX_PACING_RATE
    counts = TcpCounts()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()) for _ in range(2)]
        counts.on_news(zmq.EVENT_CONNECTED, ends[0].fileno())
        counts.pace(250_000.4)
        counts.on_news(zmq.EVENT_CONNECTED, ends[1].fileno())
        assert [end.getsockopt(socket.SOL_SOCKET, rate) for end in ends] == [250_000, 250_000]
        counts.pace(None)
        assert {end.getsockopt(socket.SOL_SOCKET, rate) & 0xFFFF_FFFF for end in ends} == {0xFFFF_FFFF}
        for end in ends:
            end.close()
        counts.close()


# ---- probes --------------------------------------------------------------------------------------------------------


def pong(pings: Pings, peer: str, number: int, now: float) -> int | None:
    """The answer to ping `number`; the size of the next probe, if there is one."""
    found = pings.on_frame(peer, Header(Kind.PONG, bytes(8), chunk=number), now)
    return None if found is None else len(found.payload)


def test_a_probe_waits_until_it_is_let_and_grows_while_it_is_quick() -> None:
    pings = Pings(bytes(8), payload_max=1 << 20)
    assert pings.probe(0.0) is None, "nobody is known yet"
    pings.greet("bob", 0.0)
    assert pong(pings, "bob", 1, 0.1) is None and pings.rtt_s == {"bob": pytest.approx(0.1)}
    found = pings.probe(1.0)
    assert found is not None and found[0] == "bob" and len(found[1].payload) == PROBE_SIZES_BYTES[0]
    assert pings.probe(1.0) is None, "one at a time"
    assert pong(pings, "bob", 2, 1.2) == PROBE_SIZES_BYTES[1]
    assert pong(pings, "bob", 3, 1.5) == PROBE_SIZES_BYTES[2]
    assert pong(pings, "bob", 4, 2.6) is None and pings.probe(9.0) is None
    assert pings.probed == (PROBE_SIZES_BYTES[2], pytest.approx(1.0))


def test_a_line_that_is_too_fast_for_the_probes_stays_unknown() -> None:
    pings = Pings(bytes(8), payload_max=1 << 20)
    pings.greet("bob", 0.0)
    pong(pings, "bob", 1, 0.1)
    assert pings.probe(1.0) is not None
    sizes = [pong(pings, "bob", number, 1.0 + 0.4 * (number - 1)) for number in (2, 3, 4)]
    assert sizes == [*PROBE_SIZES_BYTES[1:], None]
    assert pings.probed is None, "what TCP needs to gain speed would be taken for the line"


def test_a_slow_probe_is_the_last_and_a_lost_one_goes_to_somebody_else() -> None:
    pings = Pings(bytes(8), payload_max=1 << 20)
    for number, peer in enumerate(("ann", "bob"), start=1):
        pings.greet(peer, 0.0)
        pong(pings, peer, number, 0.1)
    assert pings.probe(1.0) is not None
    pings.forget("ann")
    found = pings.probe(2.0)
    assert found is not None and found[0] == "bob"
    assert pong(pings, "bob", 4, 4.1) is None and pings.probed == (PROBE_SIZES_BYTES[0], pytest.approx(2.0))
