"""How much each of many may do: buckets that fill at a steady rate, by name, and a count of misdeeds.  Pure.

`Tally` counts what keys did wrong, at the front door and at the members' socket.  `Quota` is asked at the front door
and by the admission, for networks; `Allowance` by the server before a member's frame is parsed, so that a member that
floods costs little and the others nothing.  What an honest peer sends follows from the run's rules; the rate leaves it
several times that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from farflung.protocol.limits import MESSAGES_BURST_S, MESSAGES_LEAST_PER_S, MESSAGES_PER_BEAT

KEYS_KEPT = 20_480  # more than a run has members, or a day networks; the least recent go

Name = TypeVar("Name", bound=Hashable)


class Tally(OrderedDict[Name, int]):
    """So often for each name.  Strangers make keys for nothing: it must not grow with them."""

    def add(self, name: Name) -> int:
        self[name] = self.get(name, 0) + 1
        self.move_to_end(name)
        while len(self) > KEYS_KEPT:
            self.popitem(last=False)
        return self[name]


class Quota(Generic[Name]):
    """So much for each name: `burst` at once, and `per_s` comes back every second."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._left: OrderedDict[Name, tuple[float, float]] = OrderedDict()  # name -> (left, when)

    def take(self, name: Name, now: float, amount: float = 1.0) -> bool:
        """False: that is over its allowance, and nothing was taken."""
        left, at = self._left.pop(name, (self.burst, now))
        left = min(self.burst, left + (now - at) * self.per_s)
        granted = left >= amount
        self._left[name] = (left - amount if granted else left, now)
        while len(self._left) > KEYS_KEPT:
            self._left.popitem(last=False)
        return granted

    def wait_s(self, name: Name, now: float, amount: float = 1.0) -> float:
        """Until so much would be granted."""
        left, at = self._left.get(name, (self.burst, now))
        return max(0.0, (amount - left) / self.per_s - (now - at))


class Allowance:
    def __init__(self, heartbeat_s: float, fragments: int) -> None:
        self.per_s = MESSAGES_LEAST_PER_S * fragments + MESSAGES_PER_BEAT / heartbeat_s
        self.burst = self.per_s * MESSAGES_BURST_S
        self._quota: Quota[bytes] = Quota(self.per_s, self.burst)
        self._refused: Tally[bytes] = Tally()

    def takes(self, key: bytes, now: float) -> bool:
        """False for a message too many."""
        granted = self._quota.take(key, now)
        if not granted:
            self._refused.add(key)
        return granted

    def is_flood(self, key: bytes) -> bool:
        """As many again were refused as may come at once: true once for each such lot."""
        return self._refused.get(key, 0) % max(1, round(self.burst)) == 0
