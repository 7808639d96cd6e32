"""Of which peers bytes come in, also while no frame is whole yet.

Owned by zmq_link.py, which says over which TCP connection (by its file descriptor) a peer's frames came.  Where the
kernel does not tell what arrived, nobody ever has news.  Must not know sockets, frames or rounds.
"""

from __future__ import annotations

from typing import Protocol

from farflung.collectives.tcp_counts import NOTHING, Crossed

NEWS_BYTES = 16384  # since the last news: more than questions, pings and acknowledgments come to


class Counts(Protocol):
    def of(self, descriptor: int) -> Crossed: ...


class Incoming:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._peer_of: dict[int, str] = {}
        self._received: dict[int, int] = {}  # bytes that were told already

    def came_over(self, descriptor: int, peer: str) -> None:
        """The same number may be another connection's by now, of another peer."""
        if self._peer_of.get(descriptor) != peer:
            self._peer_of[descriptor] = peer
            self._received.pop(descriptor, None)

    def news(self) -> set[str]:
        """Peers of which bytes came in since they were named last."""
        added: dict[str, int] = {}
        now: dict[int, int] = {}
        for descriptor, peer in list(self._peer_of.items()):
            crossed = self._counts.of(descriptor)
            told = self._received.setdefault(descriptor, crossed.received)
            if crossed == NOTHING or crossed.received < told:  # closed, or opened anew
                del self._peer_of[descriptor], self._received[descriptor]
                continue
            now[descriptor] = crossed.received
            added[peer] = added.get(peer, 0) + crossed.received - told
        named = {peer for peer, size in added.items() if size >= NEWS_BYTES}
        self._received |= {d: size for d, size in now.items() if self._peer_of[d] in named}
        return named
