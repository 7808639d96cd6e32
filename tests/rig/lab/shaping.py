"""One direction of one host's line: its rate, queue, delay, jitter and loss, as arithmetic on time that is passed in.

`push` works out at once when a parcel will have left the queue and when it will arrive, so nothing here waits and a
late caller loses no capacity: the next parcel still starts where the one before it ended.  There is no burst
allowance: a parcel takes its full time on the wire, and one that would take longer than `BURST_S` goes in pieces.
fast.c does the same where it can be compiled; whoever changes one side changes the other.

network.py joins the lines of all hosts; tests drive a line on virtual time.  It must not know a clock, or bytes.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

from rig.lab.packets import Parcel

BURST_S = 0.002  # parcels that take longer on the wire are split, so that nothing arrives in larger lumps
PACKET_BYTES = 1500
JITTER_PERIOD_S = 0.05


@dataclass(frozen=True)
class LineSpec:
    """`loss` is the share of packets lost; `jitter_s` is added to `delay_s` at most."""

    rate_bit_s: float
    queue_bytes: int
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


@dataclass
class Counters:
    """`delivered_bytes` with IP and TCP headers, as the rate counts them; the rest in packets of a real line."""

    delivered_bytes: int = 0
    delivered: int = 0
    lost: int = 0  # by chance
    dropped: int = 0  # the queue was full
    cut: int = 0  # sent into, or in flight on, a line that was cut


class Jitter:
    """An extra delay that wanders between 0 and `jitter_s`, straight from one random point to the next.

    A fresh draw for each packet would either reorder packets or, with order kept, hold all of them to the largest
    draw.  The points lie at least twice as far apart as the delay can change, so that order is kept by itself.
    """

    def __init__(self, jitter_s: float, rng: random.Random) -> None:
        self._jitter_s, self._rng = jitter_s, rng
        self._period_s = max(JITTER_PERIOD_S, 2 * jitter_s)
        self._period_no = -1
        self._from_s = self._to_s = 0.0

    def at(self, time_s: float) -> float:
        """Times must not go back."""
        number, share = divmod(time_s / self._period_s, 1)
        if number != self._period_no:
            following = number == self._period_no + 1
            self._from_s = self._to_s if following else self._rng.uniform(0, self._jitter_s)
            self._to_s = self._rng.uniform(0, self._jitter_s)
            self._period_no = int(number)
        return self._from_s + share * (self._to_s - self._from_s)


class Losses:
    """How many packets pass before one is lost: one draw for each loss instead of one for each packet."""

    def __init__(self, loss: float, rng: random.Random) -> None:
        self._loss, self._rng = loss, rng

    def draw(self) -> float:
        if self._loss <= 0:
            return math.inf
        if self._loss >= 1:
            return 0
        return math.floor(math.log(1 - self._rng.random()) / math.log(1 - self._loss))


def packets_at_once(rate_bit_s: float) -> int:
    """The most that a parcel may hold without being split."""
    return max(1, int(BURST_S * (rate_bit_s / 8) / PACKET_BYTES))


class Line:
    def __init__(self, spec: LineSpec, rng: random.Random) -> None:
        self._spec, self._losses = spec, Losses(spec.loss, rng)
        self._jitter = Jitter(spec.jitter_s, rng) if spec.jitter_s else None
        self.counters = Counters()
        self.least_delay_s = spec.delay_s
        # (arrives, left the queue, parcel), in this order
        self._flying = deque[tuple[float, float, Parcel]]()
        self._busy_until_s = 0.0
        self._take_rate(spec.rate_bit_s, spec.queue_bytes)
        self._until_loss = self._losses.draw()

    def push(self, parcel: Parcel, now_s: float) -> None:
        """A parcel comes to the line's sending end."""
        if parcel.segments <= self._until_loss and parcel.segments <= self._at_once:
            self._until_loss -= parcel.segments
            self._enqueue(parcel, now_s)
        else:
            self._push_in_pieces(parcel, now_s)

    def due_s(self) -> float:
        """When the next parcel arrives at the receiving end."""
        return self._flying[0][0] if self._flying else math.inf

    def next_target(self) -> int | None:
        return self._flying[0][2].target if self._flying else None

    def pop(self, now_s: float) -> list[tuple[float, Parcel]]:
        """What has arrived by now, with the exact times."""
        flying, counters = self._flying, self.counters
        arrived = []
        while flying and flying[0][0] <= now_s:
            due_s, _, parcel = flying.popleft()
            counters.delivered_bytes += parcel.wire_bytes
            counters.delivered += parcel.segments
            arrived.append((due_s, parcel))
        return arrived

    def set_rate(self, rate_bit_s: float, queue_bytes: int, now_s: float) -> None:
        """What stands in the queue goes on at the new rate; what has left it is not changed."""
        slower = self._byte_s / (rate_bit_s / 8)
        moved = deque[tuple[float, float, Parcel]]()
        for due_s, left_s, parcel in self._flying:
            if left_s > now_s:
                new_left_s = now_s + (left_s - now_s) * slower
                due_s, left_s = due_s + new_left_s - left_s, new_left_s
            moved.append((due_s, left_s, parcel))
        self._flying = moved
        self._busy_until_s = now_s + max(0.0, self._busy_until_s - now_s) * slower
        self._take_rate(rate_bit_s, queue_bytes)

    def clear(self) -> None:
        """The line is cut: what is on it is gone."""
        self.counters.cut += sum(parcel.segments for _, _, parcel in self._flying)
        self._flying.clear()
        self._busy_until_s = 0.0

    # ---- inside ------------------------------------------------------------------------------------------------

    def _take_rate(self, rate_bit_s: float, queue_bytes: int) -> None:
        self._byte_s = rate_bit_s / 8
        self._queue_bytes = max(queue_bytes, PACKET_BYTES)
        self._at_once = packets_at_once(rate_bit_s)

    def _push_in_pieces(self, parcel: Parcel, now_s: float) -> None:
        start = 0
        while start < parcel.segments:
            count = int(min(parcel.segments - start, self._at_once, self._until_loss))
            if count:
                self._until_loss -= count
                self._enqueue(parcel.slice(start, start + count), now_s)
                start += count
            else:
                self.counters.lost += 1
                self._until_loss = self._losses.draw()
                start += 1

    def _enqueue(self, parcel: Parcel, now_s: float) -> None:
        starts_s = max(self._busy_until_s, now_s)
        room_bytes = self._queue_bytes - (starts_s - now_s) * self._byte_s
        if parcel.wire_bytes > room_bytes:
            # The last segment may be a short one: then what fits by this measure is a little more than the room, and
            # the next parcel finds less than none.
            fitting = max(0, int(room_bytes * parcel.segments / parcel.wire_bytes))
            self.counters.dropped += parcel.segments - fitting
            if not fitting:
                return
            parcel = parcel.slice(0, fitting)
        left_s = self._busy_until_s = starts_s + parcel.wire_bytes / self._byte_s
        due_s = left_s + self._spec.delay_s
        if self._jitter:
            due_s += self._jitter.at(left_s)
        self._flying.append((due_s, left_s, parcel))
