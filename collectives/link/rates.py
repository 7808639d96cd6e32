"""How fast a line is, learned from what really moved over it, and how many connections it needs.  Pure.

Owns: the estimate, one meter for each direction.  Called by the agent, which feeds it what left or arrived, and by
the data plane, which asks for the connections.
Must not know: sockets, clocks, which peer the bytes were for.

Only time in which bytes were waiting counts: a line that idles tells nothing of what it could carry.  The first
moments of such a time do not count either, since bytes then vanish into buffers faster than any line is, or a
connection has not yet gained its speed.  Busy time is cut into windows, from one move of bytes to another.  They are
long: when a lost packet comes at last, all that had to wait for it counts at once, and that may be half a second of
the line.

Even a busy window tells only what the line carried AT LEAST: the other end's line may have been the narrow one.
While bytes for most of the others wait, that is unlikely; once only one slow peer is left to be served, it is its
line that is measured (is_mine).  Small rounds on a fast line may never tell, and not to know is better than a tenth
of it.  So the best of the last windows is the estimate, never their mean.  A mean would feed on itself: a line that
was measured too low is given less to carry, carries less, and is measured lower still.
"""

from __future__ import annotations

import math

from farflung.protocol.caps import CONNECTIONS_MOST
from farflung.protocol.frames import Frame, Header, Kind, with_payload

SETTLE_S = 0.25  # of each busy time that do not count
# Of busy time at least, and until enough has moved; a shorter one would take a burst for the line.
WINDOW_S = 0.5
FULL_WINDOW_S = 5.0  # a longer busy time is cut
WINDOW_MOVES = 3
WINDOW_BYTES = 128 * 1024  # less tells of the size of what was to be sent, not of the line
WINDOWS_A_GENERATION = 6  # the best of this generation and of the one before it counts
SPAN_S = 0.5
LONG_WAY_S = 0.02  # a round trip
FEW_LINES = 32
# A full window of TCP is seen as less: the kernel counts its own overhead into it, and a span holds the slow start.
HELD_BACK_AT = 0.35


def is_mine(busy_peers: int, others: int) -> bool:
    """Whether it is this peer's own line that bytes wait for: they wait for, or from, more than half of the others."""
    return others > 0 and 2 * busy_peers > others


class RateMeter:
    """The sustainable rate of one direction of a line."""

    def __init__(self) -> None:
        self._fed_at: float | None = None
        self._settling_s: float | None = 0.0  # seconds of this busy time so far; None once it has settled
        self._window_s = 0.0
        self._window_bytes = self._window_moves = 0
        self._pending_s = 0.0  # busy, but nothing has moved yet
        self._last_move_bytes = 0
        self._windows = 0  # of this generation
        self._best = self._best_before = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """None until something was seen."""
        rate = max(self._best, self._best_before)
        if not rate:
            return None
        # A line that has gone silent: at best, a move like the last one is just about to be reported.
        at_best_bytes = rate * WINDOW_S + self._last_move_bytes
        return min(rate, at_best_bytes / self._pending_s) if self._pending_s > WINDOW_S else rate

    def feed(self, now: float, moved_bytes: int, backlog: bool) -> None:
        """`moved_bytes` moved since the last call; `backlog`: more was waiting during all of that time.

        Call it when something has moved, or now and then; for a sender that means sent or acknowledged, not queued.
        """
        span_s = 0.0 if self._fed_at is None else now - self._fed_at
        assert span_s >= 0 and moved_bytes >= 0
        backlog = backlog and self._fed_at is not None
        self._fed_at = now
        if not backlog:
            self._end_window()
            self._begin_window()
            self._pending_s, self._settling_s = 0.0, 0.0
        elif self._settling_s is not None:
            self._settling_s += span_s
            if self._settling_s >= SETTLE_S and moved_bytes:
                self._settling_s = None  # counting starts with a move: none is counted with half its time
        else:
            self._pending_s += span_s
            if moved_bytes:
                self._add_move(moved_bytes)

    def _add_move(self, moved_bytes: int) -> None:
        self._window_s += self._pending_s
        self._window_bytes += moved_bytes
        self._window_moves += 1
        self._pending_s, self._last_move_bytes = 0.0, moved_bytes
        if self._window_s >= FULL_WINDOW_S and self._window_tells:
            self._end_window()
            self._begin_window()

    @property
    def _window_tells(self) -> bool:
        return self._window_moves >= WINDOW_MOVES and self._window_bytes >= WINDOW_BYTES

    def _begin_window(self) -> None:
        self._window_s, self._window_bytes, self._window_moves = 0.0, 0, 0

    def _end_window(self) -> None:
        if self._window_s < WINDOW_S or not self._window_tells:
            return
        self._best = max(self._best, self._window_bytes / self._window_s)
        self._windows += 1
        if self._windows == WINDOWS_A_GENERATION:
            self._windows, self._best_before, self._best = 0, self._best, 0.0


class AtLeast:
    """What one direction has carried in some half second, busy or not: so much it can carry, whatever held it back."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._since: float | None = None
        self._bytes = 0

    def feed(self, now: float, moved_bytes: int) -> None:
        if self._since is None:
            self._since = now
            return  # over what time these moved is not known
        self._bytes += moved_bytes
        span_s = now - self._since
        if span_s >= SPAN_S:
            self.bytes_per_s = max(self.bytes_per_s or 0.0, self._bytes / span_s) or None
            self._since, self._bytes = now, 0


def connections_wanted(have: int, line_bytes_per_s: float, rtt_s: float, window_bytes: int) -> int:
    """`line_bytes_per_s`: over a span in which something waited all the time, through all `have` connections.

    One TCP connection has at most a window of bytes on its way, so it moves at most window / round-trip time.  Where a
    line that always has something to send moves about that much, the window is what holds it back, and another
    connection helps.  Where it moves less, the line itself is full, and another would only make it unfair.
    """
    if have < 1:
        return 1
    on_the_way_bytes = line_bytes_per_s / have * rtt_s
    if on_the_way_bytes < HELD_BACK_AT * window_bytes:
        return have
    return min(CONNECTIONS_MOST, 2 * have)


def streams_wanted(rtt_s: float | None, lines: int) -> int:
    """Connections to one peer, however much they move.  After it lost something at a bad moment a stream of TCP takes
    seconds to gain its speed back where the way is long, and a round waits for its last frame: of two, the other one
    takes most of what waits.  Where the way is short it is quick again, and of many lines one is slow at any time."""
    return 2 if rtt_s is not None and rtt_s >= LONG_WAY_S and lines <= FEW_LINES else 1


# ---- pacer -------------------------------------------------------------------------------------------------
# Pacing: when bytes may pass, so that a rate is kept. Pure.
#
# Owned by the data plane, one for each direction. Must not know who set the rate, or what passes.


class Pacer:
    """Says when bytes may pass, so that a rate is kept.  One for each direction.

    Bytes may pass as soon as all bytes before them would have passed at the rate.  A chunk of any size goes out
    whole when its time has come, and what comes after it waits.  After a pause, or for a caller that comes late, at
    most BURST_S worth of bytes is made up for.
    """

    BURST_S = 0.05

    def __init__(self, bytes_per_s: float | None) -> None:
        assert bytes_per_s is None or bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        # All bytes taken so far have passed at _since + _taken_bytes / rate.  Whole bytes are counted, so that
        # millions of small additions to a large time do not add up their rounding.
        self._since = -math.inf
        self._taken_bytes = 0

    @property
    def bytes_per_s(self) -> float | None:
        return self._bytes_per_s

    def set_rate(self, now: float, bytes_per_s: float | None) -> None:
        """From now on; what was let through beforehand and is still owed is paid off at the new rate."""
        assert bytes_per_s is None or bytes_per_s > 0
        if bytes_per_s == self._bytes_per_s:
            return
        free_at = self._free_at()
        if self._bytes_per_s is not None and free_at > now:
            self._since, self._taken_bytes = now, math.ceil((free_at - now) * self._bytes_per_s)
        else:
            self._since, self._taken_bytes = free_at, 0
        self._bytes_per_s = bytes_per_s

    def wait_s(self, now: float) -> float:
        """How long until something may pass; takes nothing."""
        return max(0.0, self._free_at() - now)

    def take(self, now: float, moved_bytes: int) -> float:
        """Seconds to wait before these bytes may pass.  They count as passed: the caller lets them pass then."""
        free_at = self._free_at()
        if free_at < now - self.BURST_S:
            self._since, self._taken_bytes = now - self.BURST_S, 0
        self._taken_bytes += moved_bytes
        return max(0.0, free_at - now)

    def _free_at(self) -> float:
        if self._bytes_per_s is None:
            return -math.inf
        return self._since + self._taken_bytes / self._bytes_per_s


# ---- courtesy: a line whose queue stays short for everybody else in the house -------------------------
#
# A home router keeps a second of data in its queue before it drops any, and many TCPs fill it: then a beat
# waits for a second as well, and so does the family's call. A beat that takes much longer than the quickest
# one shows a queue, so the pace falls below what the line was carrying, the queue drains, and the pace
# feels its way up again.
# Only the way there counts: what fills the way back is not what this peer sends. It is measured on two
# clocks, so only differences tell. The queue may be of other people in the house, and then a slower pace
# would help nobody: it never falls below a part of what the line is known to carry.


QUEUED_S = 0.12  # longer than the quickest: this is a queue and no chance
SLOWER, FASTER_PER_S = 0.85, 1.15
LEAST_PART = 0.5  # of what the line is known to carry
FREE_ABOVE = 2.0  # times that: no pace is needed
QUICKEST_KEPT_S = 300.0  # the way to the coordinator may change, and two clocks drift apart


class Courtesy:
    def __init__(self) -> None:
        self.bytes_per_s: float | None = None  # the pace; None: as fast as it goes
        self._quickest = self._quickest_before = float("inf")
        self._quickest_since = 0.0
        self._slowed_at = self._looked_at = float("-inf")

    def on_answer(self, now: float, took_s: float, there: float, line: float | None) -> None:
        """An answer of the coordinator came after `took_s`; `there`: seconds of the way there, from any beginning.

        `line`: bytes per second that the line is known to carry; None while that is not known or nothing has to leave.
        """
        self._remember(now, there)
        since_s, self._looked_at = min(1.0, now - self._looked_at), now
        if line is None:
            return
        queued_s = there - min(self._quickest, self._quickest_before)
        if queued_s > QUEUED_S:
            # What is queued must drain before an answer can tell of the new pace.
            if now - self._slowed_at > took_s + 2 * queued_s:
                self._slowed_at = now
                before = line if self.bytes_per_s is None else min(line, self.bytes_per_s)
                self.bytes_per_s = max(LEAST_PART * line, SLOWER * before)
        elif self.bytes_per_s is not None:
            self.bytes_per_s *= FASTER_PER_S**since_s
            if self.bytes_per_s > FREE_ABOVE * line:
                self.bytes_per_s = None

    def forget_way(self) -> None:
        """The coordinator that answers from now on may have another clock."""
        self._quickest = self._quickest_before = float("inf")

    def _remember(self, now: float, there: float) -> None:
        if now - self._quickest_since > QUICKEST_KEPT_S:
            self._quickest_before, self._quickest, self._quickest_since = self._quickest, there, now
        self._quickest = min(self._quickest, there)


# ---- pings -------------------------------------------------------------------------------------------------
# Round-trip times between peers, and a short probe of the upload: pings over the data plane itself. Pure.
#
# Owned by the data plane (zmq_link.py), which sends what this returns and passes on what arrives. A ping
# greets too: a peer that can't be dialled shows by it the connection over which it is answered. Must not know
# sockets, rounds or caps.
#
# A ping waits in the queue like any frame, so one measurement may be too long and never too short: the
# shortest counts.

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
