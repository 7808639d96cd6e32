"""How many messages a member may send: a bucket for each key, which fills at a steady rate.  Pure.

Asked by the server before a frame is parsed, so that a member that floods costs little and the others nothing.  What
an honest peer sends follows from the run's rules; the rate leaves it several times that.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from farflung.collectives.limits import MESSAGES_BURST_S, MESSAGES_LEAST_PER_S, MESSAGES_PER_BEAT

KEYS_KEPT = 4096  # more than a run has members; the least recent go


@dataclass
class _Bucket:
    left: float
    at: float
    refused: int = 0


class Allowance:
    def __init__(self, heartbeat_s: float, fragments: int) -> None:
        self.per_s = MESSAGES_LEAST_PER_S * fragments + MESSAGES_PER_BEAT / heartbeat_s
        self.burst = self.per_s * MESSAGES_BURST_S
        self._buckets: OrderedDict[bytes, _Bucket] = OrderedDict()

    def takes(self, key: bytes, now: float) -> bool:
        """False for a message too many."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(self.burst, now)
            while len(self._buckets) > KEYS_KEPT:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        bucket.left = min(self.burst, bucket.left + (now - bucket.at) * self.per_s)
        bucket.at = now
        if bucket.left < 1.0:
            bucket.refused += 1
            return False
        bucket.left -= 1.0
        return True

    def is_flood(self, key: bytes) -> bool:
        """As many again were refused as may come at once: true once for each such lot."""
        return self._buckets[key].refused % max(1, round(self.burst)) == 0
