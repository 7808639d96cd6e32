"""Round-trip times between peers, and a short probe of the upload: pings over the data plane itself.  Pure.

Owned by the data plane (zmq_link.py), which sends what this returns and passes on what arrives.  A ping greets too:
a peer that can't be dialled shows by it the connection over which it is answered.  Must not know sockets, rounds or
caps.

A ping waits in the queue like any frame, so one measurement may be too long and never too short: the shortest counts.
"""

from __future__ import annotations

from farflung.protocol.frames import Frame, Header, Kind, with_payload

# One after the other, each only if the last was quick.
PROBE_SIZES_BYTES = (64 * 1024, 256 * 1024, 1024 * 1024)
# A probe tells of the line only if it takes long beyond the round trip: before that it tells how TCP gains speed.
PROBE_LONG_S, PROBE_LONG_RTTS = 0.5, 8
ON_WAY_MOST = 16  # pings to one peer that were not answered: the oldest are forgotten
ANSWERED_PER_S = 32  # pings of one peer: a connection brings one, a probe three
_GREETING = b"?"


class Pings:
    def __init__(self, run_tag: bytes, payload_max: int) -> None:
        self.rtt_s: dict[str, float] = {}
        # (bytes, seconds) of a probe of this machine's upload; None: none yet, or the line is too fast for them.
        self.probed: tuple[int, float] | None = None
        self.lean_port = 0  # what answers say besides: where lean connections are taken (lean.py)
        self._run_tag = run_tag
        self._sizes = [min(size, payload_max) for size in PROBE_SIZES_BYTES]
        self._number = 0
        self._on_way: dict[tuple[str, int], tuple[float, int]] = {}  # (peer, number) -> (sent at, bytes)
        self._answered: dict[str, tuple[float, int]] = {}  # peer -> (since, answers)
        self._probing = ""  # the peer that is being probed: one in the life of a link
        self._probes_sent = 0

    def greet(self, peer: str, now: float) -> Frame:
        return self._ping(peer, len(_GREETING), now)

    def forget(self, peer: str) -> None:
        self.rtt_s.pop(peer, None)
        self._answered.pop(peer, None)
        self._on_way = {key: sent for key, sent in self._on_way.items() if key[0] != peer}
        if self._probing == peer and self.probed is None:
            self._probing, self._probes_sent = "", 0

    def on_frame(self, peer: str, header: Header, now: float) -> Frame | None:
        """What to answer to a PING or a PONG, if anything."""
        if header.kind == Kind.PING:
            since, answers = self._answered.get(peer, (now, 0))
            if now - since >= 1.0:
                since, answers = now, 0
            self._answered[peer] = (since, answers + 1)
            if answers >= ANSWERED_PER_S:
                return None
            return Frame(Header(Kind.PONG, self._run_tag, version=self.lean_port, chunk=header.chunk))
        sent = self._on_way.pop((peer, header.chunk), None)
        return self._on_pong(peer, *sent, now) if sent is not None else None

    def probe(self, now: float) -> tuple[str, Frame] | None:
        """To whom to send the first probe, once in the life of a link; called while the line has nothing to do.

        What this machine is fetching would hold the answers up, and the line would seem slow.
        """
        if self._probing or not self.rtt_s:
            return None
        self._probing, self._probes_sent = min(self.rtt_s), 1
        return self._probing, self._ping(self._probing, self._sizes[0], now)

    def _on_pong(self, peer: str, sent_at: float, size: int, now: float) -> Frame | None:
        took_s = max(1e-6, now - sent_at)
        if size == len(_GREETING):
            self.rtt_s[peer] = min(took_s, self.rtt_s.get(peer, took_s))
        if size == len(_GREETING) or peer != self._probing:
            return None
        rtt_s = self.rtt_s.get(peer, 0.0)
        beyond_s = took_s - rtt_s
        if beyond_s >= max(PROBE_LONG_S, PROBE_LONG_RTTS * rtt_s):
            self.probed = (size, beyond_s)
            return None
        if self._probes_sent == len(self._sizes):
            return None  # the line is too fast for the largest of them, and that is good to know too
        self._probes_sent += 1
        return self._ping(peer, self._sizes[self._probes_sent - 1], now)

    def _ping(self, peer: str, size: int, now: float) -> Frame:
        self._number += 1
        self._on_way[peer, self._number] = (now, size)
        unanswered = [key for key in self._on_way if key[0] == peer]
        for key in unanswered[:-ON_WAY_MOST]:
            del self._on_way[key]
        payload = _GREETING if size == len(_GREETING) else bytes(size)
        return with_payload(Header(Kind.PING, self._run_tag, chunk=self._number), payload)
