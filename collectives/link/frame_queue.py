"""What every transport keeps book of: what arrived and if it is a frame, what waits for a peer, what is on its way.

Pure.  Called by a link, and by its lines (peer_connections.py).  Must not know sockets, peers, or why a frame is sent.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from farflung.collectives.link.link import FrameCounts
from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.frames import (
    CORE_KINDS,
    Frame,
    FrameKind,
    Kind,
    Kinds,
    Payload,
    Spoiled,
    Trait,
    check_payload,
    claimed,
    parse,
)

# ---- priorities --------------------------------------------------------------------------------------------
# Which of the frames that wait leaves next: words, then crossings of microbatches, then what is large and can
# wait.
#
# Asked by zmq_link.py for each frame that it lets go of. Somebody computes nothing until a crossing is there,
# while a round or a joiner takes as long as it takes: so crossings go first, but bulk keeps a quarter of the
# bytes, or a joiner would never get in and a round never end. What a socket has taken can't be called back:
# while crossings wait, so little is handed out that the next one finds a short queue, and enough that the
# line never runs dry. Where there are no crossings, in a run of a model in one piece, nothing is held back
# for them.
#
# Pure. Must not know sockets, peers, or what a frame is about.

LITTLE_BYTES = 4096  # of a payload: such a frame makes no queue longer
_OF_LINKS = {Kind.PING, Kind.PONG, Kind.LEAN_ASKED, Kind.LEAN_GRANTED}
URGENT_KINDS = _OF_LINKS | {Kind.LATER, Kind.MISSING, Kind.HAVE}  # as is each crossing
BULK_PART = 4  # one in so many bytes is bulk, at least, while crossings wait too

DEEP_S = 0.2  # of the line's rate may wait in sockets, beside what a round trip has on its way
DEEP_FRAMES = 2  # at least
ROUND_TRIP_S = 0.1  # where none was measured


class Rank(IntEnum):
    WORD = 0  # short, and somebody waits for it
    CROSSING = 1
    BULK = 2


def rank_of(frame: Frame) -> Rank:
    """A ping of many bytes probes the line, and meets what bulk meets."""
    kind = frame.header.kind
    if len(frame.payload) <= LITTLE_BYTES and (kind.crossing or kind in URGENT_KINDS):
        return Rank.WORD
    return Rank.CROSSING if kind.crossing else Rank.BULK


class Sharing:
    """The bytes of one line between crossings and bulk, while both wait."""

    def __init__(self) -> None:
        self._both = False
        self._crossing_bytes = self._bulk_bytes = 0

    def next(self, crossings: bool, bulk: bool) -> Rank:
        """Whose turn it is, of what could leave now: one of the two at least."""
        self._both = crossings and bulk
        if not self._both:
            self._crossing_bytes = self._bulk_bytes = 0  # who was alone owes the other nothing
            return Rank.CROSSING if crossings else Rank.BULK
        due = (BULK_PART - 1) * self._bulk_bytes < self._crossing_bytes
        return Rank.BULK if due else Rank.CROSSING

    def took(self, rank: Rank, size_bytes: int) -> None:
        """What left after `next`; words are too short to count."""
        if self._both and rank == Rank.BULK:
            self._bulk_bytes += size_bytes
        elif self._both and rank == Rank.CROSSING:
            self._crossing_bytes += size_bytes


def has_room(
    waiting_bytes: int, frame_bytes: int, bytes_per_s: float | None, round_trip_s: float | None
) -> bool:
    """May another frame be handed out while crossings wait?  `waiting_bytes`: handed out, and not acknowledged yet."""
    span_s = DEEP_S + (ROUND_TRIP_S if round_trip_s is None else round_trip_s)
    most = max(DEEP_FRAMES * frame_bytes, span_s * (bytes_per_s or 0.0))
    return waiting_bytes + frame_bytes <= most


# ---- what arrived: each frame is counted once ---------------------------------------------------------


class Intake:
    def __init__(self, run_tag: bytes = bytes(8), payload_max: int = 0) -> None:
        self.counts = FrameCounts()
        self.expect(run_tag, payload_max)

    def expect(self, run_tag: bytes, payload_max: int, kinds: Kinds = CORE_KINDS) -> None:
        self.run_tag, self.payload_max, self.kinds = run_tag, payload_max, kinds

    def on_bytes(self, size: int) -> None:
        """A frame arrived, whatever it is; its verdict is next."""
        self.counts.arrived_frames += 1
        self.counts.arrived_bytes += size

    def frame_of(self, header: bytes, payload: Payload) -> Frame | Spoiled:
        """From a contact.  A frame that is what it claims to be ends in a counter of whoever takes it."""
        try:
            parsed = parse(header, len(payload), self.run_tag, self.payload_max, self.kinds)
            check_payload(parsed, payload)
        except FrameError as error:
            self.counts.verdicts.count(error.verdict)
            return Spoiled(error.verdict, claimed(header, self.run_tag, self.kinds))
        return Frame(parsed, payload)

    def unreadable(self) -> Spoiled:
        """From a contact, and not even its header can be told."""
        return Spoiled(self.counts.verdicts.count(Verdict.MALFORMED), None)

    def turned_away(self) -> None:
        """A connection that was not let in counts as a frame: what it would have said nobody knows."""
        self.counts.arrived_frames += 1
        self.stranger()

    def stranger(self) -> None:
        self.counts.verdicts.count(Verdict.UNAUTHORISED)


# ---- what waits for one peer --------------------------------------------------------------------------

# What answers the other side: it waits for a few answers at a time (checkpoints/state_sync.py) and takes them.
ANSWERS_WAITING = 256
ANSWER_BYTES_WAITING = 128 * 1024 * 1024
# Of microbatches to one peer, beyond which nothing more is put in line: it may ask for any of them at any time.
CROSSINGS_WAITING = 4096
CROSSING_BYTES_WAITING = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class QueuedFrame:
    round_no: int
    header: bytes
    payload: Payload
    answer: bool  # drawn by the other side's question
    kind: FrameKind

    @property
    def crossing(self) -> bool:
        """Of a microbatch."""
        return self.kind.crossing

    @property
    def size(self) -> int:
        return len(self.header) + len(self.payload)


class Backlog:
    """Frames by rank and in the order in which they came, each once; of answers and crossings a bounded number."""

    def __init__(self) -> None:
        self.answers = self.answer_bytes = self._frames = 0
        self._crossings = self._crossing_bytes = self._from_round = 0
        self._items: dict[Rank, OrderedDict[bytes, QueuedFrame]] = {  # by header: nothing waits twice
            rank: OrderedDict() for rank in Rank
        }

    def __len__(self) -> int:
        return self._frames

    def has(self, rank: Rank) -> bool:
        return bool(self._items[rank])

    def put(self, header: bytes, frame: Frame) -> None:
        items, kind = self._items[rank_of(frame)], frame.header.kind
        if header in items:
            return  # asked for again while it still waits: once is enough
        answer = not frame.header.round_no and Trait.ANSWER in kind.traits
        item = QueuedFrame(frame.header.round_no, header, frame.payload, answer, kind)
        # A peer that asks without end and takes nothing must not fill our memory.  An honest asker asks again.
        if answer and (self.answers >= ANSWERS_WAITING or self.answer_bytes >= ANSWER_BYTES_WAITING):
            return
        full = self._crossings >= CROSSINGS_WAITING or self._crossing_bytes >= CROSSING_BYTES_WAITING
        if item.crossing and full:
            return
        self._count(item, 1)
        items[header] = item

    def put_back(self, items: Iterable[QueuedFrame]) -> None:
        """What left and did not arrive, in front of all that waits."""
        for item in reversed([*items]):
            rows = self._items[Rank.CROSSING if item.crossing else Rank.BULK]
            if item.header not in rows and not 0 < item.round_no < self._from_round:
                self._count(item, 1)
                rows[item.header] = item
                rows.move_to_end(item.header, last=False)

    def first(self, rank: Rank) -> QueuedFrame | None:
        return next(iter(self._items[rank].values()), None)

    def drop_first(self, rank: Rank) -> None:
        _, item = self._items[rank].popitem(last=False)
        self._count(item, -1)

    def _count(self, item: QueuedFrame, one: int) -> None:
        self._frames += one
        if item.answer:
            self.answers += one
            self.answer_bytes += one * item.size
        if item.crossing:
            self._crossings += one
            self._crossing_bytes += one * item.size

    def forget_rounds_before(self, round_no: int) -> None:
        """Answers and crossings are of no round, and stay."""
        self._from_round = round_no
        for items in self._items.values():
            over = [header for header, item in items.items() if 0 < item.round_no < round_no]
            for header in over:
                self._count(items.pop(header), -1)


# ---- large frames that the other side has not acknowledged yet ----------------------------------------
# On a slow line the other side asks for what it misses while that is still on its way: TCP loses nothing,
# so a second copy would only make the line slower.
#
# Counted are a frame's own bytes and the least that encryption adds: what the kernel has had acknowledged
# runs a little ahead. So a frame may be held for delivered too early, and be sent twice as without this;
# never for on its way for ever.


LARGE_BYTES = 65536  # a second copy of less does no harm
ENCRYPTION_BYTES = 70  # that CURVE and ZMTP add to a frame of two parts, at least (to a large one 77)


class OnTheWay:
    def __init__(self) -> None:
        self._taken_bytes = self._taken_before = self._contributions_end = 0
        # Where its last byte stands, its header, and what it was, if that is to be known.
        self._frames: deque[tuple[int, bytes, QueuedFrame | None]] = deque()
        self._headers: set[bytes] = set()

    def take(
        self, header: bytes, size: int, kind: FrameKind | None = None, item: QueuedFrame | None = None
    ) -> None:
        """`item`: what it was, if that is to be known."""
        self._taken_bytes += size
        if kind == Kind.CONTRIBUTION:
            self._contributions_end = self._taken_bytes
        if size >= LARGE_BYTES:
            self._headers.add(header)
        if size >= LARGE_BYTES or item is not None:
            self._frames.append((self._taken_bytes, header, item))

    @property
    def taken_bytes(self) -> int:
        return self._taken_bytes

    def unacknowledged(self, acknowledged_bytes: int) -> int:
        return max(0, self._taken_bytes - acknowledged_bytes)

    def has_contributions(self, acknowledged_bytes: int) -> bool:
        return acknowledged_bytes < self._contributions_end

    def may_have(self, header: bytes) -> bool:
        """No: then nobody needs to ask the kernel."""
        return header in self._headers

    def has(self, header: bytes, acknowledged_bytes: int) -> bool:
        self.forget_acknowledged(acknowledged_bytes)
        return header in self._headers

    def left(self, acknowledged_bytes: int) -> list[QueuedFrame]:
        """What has not arrived, as far as that is known."""
        self.forget_acknowledged(acknowledged_bytes)
        return [item for _, _, item in self._frames if item is not None]

    def forget_acknowledged(self, acknowledged_bytes: int) -> None:
        while self._frames and self._frames[0][0] <= acknowledged_bytes:
            self._headers.discard(self._frames.popleft()[1])

    def on_tick(self, acknowledged_bytes: int, is_empty: bool) -> None:
        """`is_empty`: the kernel holds nothing that is not acknowledged, and has had nothing for a while."""
        self.forget_acknowledged(acknowledged_bytes)
        if is_empty and self._taken_bytes == self._taken_before:
            # Everything arrived.  Counted from here again, or what encryption adds would grow for as long as it stands.
            self.forget()
            self._taken_bytes = self._contributions_end = acknowledged_bytes
        self._taken_before = self._taken_bytes

    def forget(self) -> None:
        """It is another connection from now on, and what was on its way may be lost."""
        self._taken_bytes = self._taken_before = self._contributions_end = 0
        self._frames.clear()
        self._headers.clear()
