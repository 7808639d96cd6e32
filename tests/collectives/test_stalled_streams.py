"""One stream falls while the others of its line are through: what it holds goes over a new one.  In virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from farflung.collectives.link.rates import AtLeast
from farflung.collectives.link.stalled_streams import AGAIN_S, Around, Speed, StalledStreams

MBIT = 125_000.0
MB = 1_000_000
TICK_S = 0.05
PEERS = ("bob", "cyd", "dan")
FRAME = 256 * 1024


@dataclass
class Stream:
    """TCP as it is met: from a start it doubles in a round trip, once it fell it grows by a seventh of itself."""

    held: float = 0.0
    rate: float = 15_000.0 / 0.1
    grows: float = 2.0
    rtt_s: float = 0.1
    moved: float = 0.0
    speed: Speed = field(default_factory=Speed)

    def tick(self, now: float, share: float) -> float:
        self.rate = min(share, self.rate * self.grows ** (TICK_S / self.rtt_s))
        took = min(self.held, self.rate * TICK_S)
        self.held, self.moved = self.held - took, self.moved + took
        self.speed.feed(now, round(took), self.held > 0)
        return took


@dataclass
class Scene:
    """One peer's line, and what it has to give to three others at `line`, of whom bob takes at most `bob_takes`."""

    gives_up: bool = True
    line: float = 200 * MBIT
    bob_takes: float = 200 * MBIT
    rtt_s: float = 0.1
    falls_at: float = 1e9  # bob's stream, to 0.3 Mbit/s
    now: float = 0.0
    given_up: int = 0
    twice: float = 0.0

    def __post_init__(self) -> None:
        self.streams = {peer: Stream(rtt_s=self.rtt_s) for peer in PEERS}
        self.tails = {peer: StalledStreams() for peer in PEERS}
        self.carried = AtLeast()
        self.has_fallen = False

    def give(self, size: float) -> float:
        """So much to each; how long it takes until all have it."""
        began = self.now
        for stream in self.streams.values():
            stream.held += size
        while any(stream.held for stream in self.streams.values()):
            self._tick()
            assert self.now - began < 600
        return self.now - began

    def rest(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self._tick()

    def _tick(self) -> None:
        self.now += TICK_S
        if self.now >= self.falls_at and not self.has_fallen:
            self.has_fallen = True
            self.streams["bob"].rate, self.streams["bob"].grows = 0.3 * MBIT, 1.15
        busy = [peer for peer in PEERS if self.streams[peer].held]
        share = self.line / max(1, len(busy))
        moved = 0.0
        for peer, stream in self.streams.items():
            moved += stream.tick(self.now, min(share, self.bob_takes) if peer == "bob" else share)
        self.carried.feed(self.now, round(moved))
        speeds = [stream.speed.latest or 0.0 for stream in self.streams.values() if stream.held]
        around = Around(self.carried.bytes_per_s, sum(speeds), len(speeds), len(PEERS))
        for peer, stream in self.streams.items():
            if (
                self.tails[peer].look(self.now, stream.speed, round(stream.held), around, self.rtt_s)
                and self.gives_up
            ):
                self.given_up += 1
                # What is begun comes twice: a part of one frame, and what was flying.
                again = min(FRAME, stream.moved) + stream.rate * self.rtt_s
                self.twice += again
                self.streams[peer] = Stream(held=stream.held + again, rtt_s=self.rtt_s)


def test_a_stream_that_falls_to_a_third_of_a_megabit_holds_nobody_up_for_long() -> None:
    crawls, mended = Scene(gives_up=False), Scene()
    usual = crawls.give(12 * MB)
    mended.give(12 * MB)
    for scene in (crawls, mended):
        scene.rest(2.0)
        scene.falls_at = scene.now + 0.6
    took, least = crawls.give(12 * MB), mended.give(12 * MB)
    assert crawls.given_up == 0 and mended.given_up == 1
    assert took > usual + 2.5, "that is what it would cost"
    assert least < usual + 1.0
    assert mended.twice < 0.02 * 36 * MB, "bytes that come twice"


@pytest.mark.parametrize("rtt_s", [0.005, 0.1, 0.3])
def test_streams_that_gain_speed_are_left_alone(rtt_s: float) -> None:
    scene = Scene(rtt_s=rtt_s)
    for _ in range(5):
        scene.give(6 * MB)
        scene.streams = {peer: Stream(rtt_s=rtt_s) for peer in PEERS}  # after a pause all begin anew
        scene.rest(1.0)
    assert not scene.given_up


def test_a_peer_with_a_slow_line_has_not_fallen() -> None:
    scene = Scene(bob_takes=5 * MBIT)
    scene.give(6 * MB)
    assert not scene.given_up and scene.now > 9.0


def test_streams_that_are_slow_together_are_left_alone() -> None:
    """Their line is: somebody else in the house took it."""
    scene = Scene()
    scene.give(6 * MB)
    scene.line = 2 * MBIT
    scene.give(1 * MB)
    assert not scene.given_up


LAST = Around(100e6, 1e3, 1, 8)  # all others are through


def given_up(slow: int, around: Around = LAST, held: int = 10 * MB, seconds: float = 2.0) -> list[float]:
    """When a stream is given up that moves 10 MB a second for a second, and then `slow` bytes in each look."""
    stream, tails, found = Speed(), StalledStreams(), []
    for look in range(round((1.0 + seconds) / TICK_S)):
        stream.feed(look * TICK_S, 500_000 if look < 20 else slow, True)
        if tails.look(look * TICK_S, stream, held, around, 0.1):
            found.append(look * TICK_S)
    return found


def test_what_crawls_is_given_up_within_a_second() -> None:
    assert 1.0 < given_up(500)[0] < 2.0


def test_what_is_slower_than_the_others_is_given_up_while_these_still_carry() -> None:
    assert given_up(500, Around(100e6, 50e6, 7, 8))
    assert not given_up(500, Around(100e6, 70e3, 7, 8)), "all are slow"


def test_a_stream_gets_its_share_among_many() -> None:
    """Far less than when it was alone, and it has not fallen."""
    assert not given_up(25_000, Around(20e6, 20e6, 40, 60))


def test_what_is_nearly_through_is_left_alone() -> None:
    assert not given_up(500, held=5_000)


def test_a_line_that_stands_still_is_not_one_stream_s_fault() -> None:
    """It is cut, or the other side does not read: a new stream would stand, too."""
    assert not given_up(0)


def test_the_streams_of_a_peer_are_not_given_up_one_after_the_other() -> None:
    found = given_up(500, seconds=20.0)
    assert len(found) >= 2
    assert min(after - before for before, after in pairwise(found)) >= AGAIN_S
