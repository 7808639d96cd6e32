"""How long this coordinator may act: a lease at the cluster, and the thread that keeps it alive.

Called by etcd_store.py.  `StoreLease` is pure, and errs to the safe side: it counts from the moment at which the
cluster was asked, so it is over here before it is over there, and nobody else leads until then.  It is no fence: a
process that stood still between a look and a word would not notice.  What is fenced are the writes (etcd_store.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from farflung.coordinator.standby.gateway import EtcdGateway
from farflung.protocol.errors import Unreachable, UserError

RENEWALS = 4  # in each lease
log = logging.getLogger("farflung.coordinator")


class StoreLease:
    def __init__(self, asked_at: float, length_s: float) -> None:
        """`length_s`: as the cluster gave it."""
        self.length_s = length_s
        self._until = asked_at + length_s
        self._is_lost = False

    @property
    def renew_every_s(self) -> float:
        return self.length_s / RENEWALS

    def on_answer(self, asked_at: float, left_s: float) -> None:
        """`left_s`: what the cluster says is left of it; nothing: it knows no such lease any more."""
        if left_s <= 0:
            self._is_lost = True
        self._until = max(self._until, asked_at + left_s)

    def left_s(self, now: float) -> float:
        return 0.0 if self._is_lost else max(0.0, self._until - now)

    def why_over(self, now: float) -> str:
        """Empty: it is not."""
        if self._is_lost:
            return "its lease ran out at the store"
        if now >= self._until:
            return f"the store did not renew its lease of {self.length_s:g} s in time"
        return ""


class LeaseKeeper:
    """Renews it until it is over, or `close`."""

    def __init__(
        self,
        gateway: EtcdGateway,
        number: str,
        lease: StoreLease,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`number`: of the lease, at the cluster.  The gateway is this thread's alone."""
        self._gateway, self._number, self._lease, self._clock = gateway, number, lease, clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lease")
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._lease.renew_every_s) and self._lease.left_s(self._clock()) > 0:
                self._renew()
        finally:
            self._gateway.close()

    def _renew(self) -> None:
        asked_at, every_s = self._clock(), self._lease.renew_every_s
        try:
            told = self._gateway.ask("/v3/lease/keepalive", {"ID": self._number}, every_s, every_s)
        except Unreachable:
            return  # another one of the cluster is asked next; the lease itself says when that was too often
        except UserError as error:
            log.warning("the lease is not renewed: %s", error)
            return
        self._lease.on_answer(asked_at, float(told.get("result", {}).get("TTL", 0)))
