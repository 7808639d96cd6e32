"""When peers that catch up are given what they ask for: what a round leaves of the line, and no more than they take.

Owned by io_workers.py.  State is large and can wait, a round can't: while this peer is in one, questions for state are
held back unless the line lies idle, but for one piece now and then, so that a joiner gets on in a run whose rounds
never end.  They are held back as well while this peer's results still leave, and when the next round is near.  While
microbatches cross between stages, which they do for most of the time, joiners get a quarter of the line.  An honest
peer has a few questions open per fragment (checkpoints/fetcher.py); whoever asks for more gets what it can take
and no more.  Pure.  Knows nothing of bytes, sockets or why a peer asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from farflung.checkpoints.fetcher import ASKED_OF_ONE_DONOR
from farflung.protocol.frames import Frame, FrameKind, Kind

What = tuple[FrameKind, int]  # kind of answer, and chunk

LATER_EVERY_S = 1.0  # an asker that waits hears so, or it would ask somebody else
HELD_MOST_S = 120.0  # after so long the question was given to somebody else
IDLE_S = 2.0  # nothing has waited to leave for so long at least, in a round: the round waits for others
# Of the line for joiners, in rounds that never end or follow each other at once.  Whoever gets pieces more slowly than
# its results are forgotten never gets in.
LEAST_PART = 0.02
# Nobody knows a line that no round has ever filled: a piece in so long while bytes wait, and else the next one when
# the last has left.  Small pieces are of small models, whose rounds are short: they take their bytes' part of that, or
# a joiner would never keep up with such rounds.
UNKNOWN_EVERY_S, UNFILLED_EVERY_S = 5.0, 0.05
# The same while microbatches cross: as much as the link leaves to bulk (collectives/link/frame_queue.py).
LEAST_PART_BESIDE_CROSSINGS, UNKNOWN_PIECE_S = 0.25, 0.25
USUAL_PIECE_BYTES = 2 << 20  # of a chunk of a megabyte, with its momentum: what these seconds are for
# What is in sockets can't be called back: as many pieces as are asked for at once, at half of the line's rate, since
# several donors share a joiner's line.
PIECES_AWAY = 2 * ASKED_OF_ONE_DONOR


@dataclass(frozen=True)
class LineNow:
    in_round: bool
    waiting_bytes: int  # that could not leave yet
    room_bytes: int  # so much may wait without the line ever running dry
    piece_s: float  # how long a piece of state takes; 0: nobody knows
    piece_bytes: int = USUAL_PIECE_BYTES
    crossings: bool = False  # microbatches are under way


@dataclass
class HeldFrame:
    to: str
    frame: Frame
    since: float
    told_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.told_at = self.since

    @property
    def what(self) -> tuple[FrameKind, int, int]:
        """Lists of hashes are asked for by version: a newer question is no double of an older one."""
        header = self.frame.header
        return header.kind, header.chunk, header.version


class Serving:
    def __init__(self, fragments: int) -> None:
        # Twice: it may have given up on the first ones and ask again.
        self.most = 2 * ASKED_OF_ONE_DONOR * fragments
        self._making: dict[str, set[What]] = {}
        self._held: list[HeldFrame] = []
        self._busy_at = 0.0
        self._passed_at: float | None = None
        self.next_round = NextRound()
        self._results_leave = False

    def on_turn(self, in_round: bool, line: Callable[[], LineNow], now: float) -> None:
        """At every turn of the agent's loop, whether or not anybody waits."""
        self.next_round.on_turn(in_round, now)
        # Others may lack what this peer, which has all, still has to send.
        self._results_leave = in_round or (self._results_leave and line().waiting_bytes > 0)

    # ---- answers that are being made ----------------------------------------------------------------------

    def start_answer(self, to: str, what: What, waiting: int) -> bool:
        """May this answer be made?  `waiting`: how many are made and have not left yet."""
        if what in self._making.get(to, ()) or not self.has_room(to, waiting):
            return False
        self._making.setdefault(to, set()).add(what)
        return True

    def has_room(self, to: str, waiting: int) -> bool:
        """One answer more may be made for this asker."""
        return len(self._making.get(to, ())) + waiting < self.most

    def end(self, to: str, what: What) -> None:
        self._making[to].discard(what)
        if not self._making[to]:
            del self._making[to]

    # ---- questions that wait ------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        return len(self._held)

    def hold(self, to: str, frame: Frame, now: float) -> bool:
        """False: it waits already, or its asker has too many waiting."""
        if not self._held:
            self._busy_at = now  # nobody has looked for a while
        # Only the first time: a slow donor's questions are forgotten before one has its turn.
        self._passed_at = now if self._passed_at is None else self._passed_at
        new = HeldFrame(to, frame, now)
        mine = [each.what for each in self._held if each.to == to]
        takes = new.what not in mine and len(mine) < self.most
        if takes:
            self._held.append(new)
        return takes

    def may_pass(self, line: LineNow, now: float) -> bool:
        """Is there room on the line for one more piece of state?"""
        busy = line.in_round or line.crossings
        if not busy or line.waiting_bytes:
            self._busy_at = now
        if any(self._making.values()):
            return False
        away_s = PIECES_AWAY * line.piece_s
        near = self.next_round.is_near(away_s, now)
        if not busy and not self._results_leave and not near:
            return line.waiting_bytes < line.room_bytes
        part = min(1.0, line.piece_bytes / USUAL_PIECE_BYTES)
        unknown_s = part * (UNKNOWN_EVERY_S if line.waiting_bytes else UNFILLED_EVERY_S)
        patience_s = line.piece_s / LEAST_PART or unknown_s
        if line.crossings and not line.in_round and not self._results_leave:
            patience_s = (line.piece_s or part * UNKNOWN_PIECE_S) / LEAST_PART_BESIDE_CROSSINGS
        # Those others may be here at any moment, and this peer's next bytes wait for what it gives away now.
        idle = busy and now - self._busy_at >= max(IDLE_S, away_s)
        return idle or self._passed_at is None or now - self._passed_at >= patience_s

    def next(self, can: Callable[[HeldFrame], bool], line: LineNow, now: float) -> HeldFrame | None:
        """The question whose turn it is, if there is one; `can`: it can be answered at all just now."""
        room = self.may_pass(line, now)
        for each in self._held:
            heavy = each.frame.header.kind == Kind.WANT_STATE
            if can(each) and (room or not heavy):
                self._held.remove(each)
                if heavy:
                    self._passed_at = now
                    # Another asker that waits is next.
                    self._held.sort(key=lambda other: other.to == each.to)
                return each
        return None

    def let_go(self, now: float) -> int:
        """How many were held for so long that nobody waits for them any more."""
        before = len(self._held)
        self._held = [each for each in self._held if now - each.since < HELD_MOST_S]
        return before - len(self._held)

    def to_put_off(self, now: float) -> list[HeldFrame]:
        """Those that have waited for a while since they heard of it last."""
        due = [each for each in self._held if now - each.told_at >= LATER_EVERY_S]
        for each in due:
            each.told_at = now
        return due


# ---- when the next round will probably begin ----------------------------------------------------------
#
# A donor gives nothing large away just before a round: what a socket has taken can't be called back, and
# would share the line with the round's first seconds.


PAUSES_KEPT = 3  # fragments' rounds come in turns, with pauses of different lengths
LATE_PART, LATE_MOST_S = 0.1, 5.0  # a round that is later than that is not waited for
LEAD_PART = 0.5  # of a pause at most: short pauses are used as well


class NextRound:
    def __init__(self) -> None:
        self._pauses_s: deque[float] = deque(maxlen=PAUSES_KEPT)
        self._ended_at: float | None = None
        self._in_round = False

    def on_turn(self, in_round: bool, now: float) -> None:
        """At every turn of the agent's loop."""
        if in_round == self._in_round:
            return
        self._in_round = in_round
        if not in_round:
            self._ended_at = now
        elif self._ended_at is not None:
            self._pauses_s.append(now - self._ended_at)

    def is_near(self, lead_s: float, now: float) -> bool:
        """May it begin within `lead_s`, or is it just late?"""
        if self._in_round or self._ended_at is None:
            return False
        paused_s = now - self._ended_at
        return any(
            -min(lead_s, LEAD_PART * usual_s) <= paused_s - usual_s <= min(LATE_MOST_S, LATE_PART * usual_s)
            for usual_s in self._pauses_s
        )
