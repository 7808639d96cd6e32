"""R6: what a slow seat has not begun goes to one that has next to nothing to do, with the slow one's consent.  Pure.

Asked by the machine of microbatches (stage_scheduler.py), one for each seat.  So the end of a batch does not wait for
what lies in the queue of the slowest peer, also where it became slow in mid-batch.  Three parties, by words of no
payload:

    the idle one    IDLE to all who may send to it: how soon it would have done one more
    who sent        WANT_BACK to whom it waits for longest: the newest microbatch that went there, and that time
    the slow one    GIVEN_BACK, if it has not begun it, and elsewhere it would be done in half of the time; or nothing

Only the seat that has a microbatch can say that it is not begun, so only its word moves it; until that word comes, it
is with that seat, for good if need be (R1).  Why none counts twice, whatever is lost, late or doubled:

- Who gave it back remembers to whom for as long as the batch lasts, and takes no copy of that sending any more; it says
  GIVEN_BACK once more to whatever asks for it.  So it makes no difference how often any of the words come.
- It happens once to a microbatch on each side of a border.  The second sending is marked FOR_GOOD: its receiver keeps
  it, whoever asks.  So no word about the first sending can be taken for one about the second.
- What HELD has named is never given back, since all of the stage before may know it to be here (R3, R4).  What was
  given back is not named.  So when its sender is gone, HELD still says of each microbatch who has it, and nobody else.
- If the seat that gives it back goes, its word is refused like all of its frames (R5), and R2 sends it elsewhere.

Who lies: a seat that gives back what it has begun, and counts it, is found by the coordinator, as two seats of a stage
that count the same are; its gradient is refused here.  A false IDLE gets work that is not done soon, within the room
that its sayer gave.  None of them can make a sum count twice.

Must not know frames, tables, or the bytes of a crossing.
"""

from __future__ import annotations

import math

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.microbatches import ASK_AFTER_S, Asks, MicroState, Queue
from farflung.protocol.errors import Verdict

SOONER_TIMES = 2.0  # it is given back if that makes it so many times as soon done
QUIET_S = 0.25  # nothing came for so long: whoever gets one after the other is not idle
GIVES_EVERY_S = 0.5  # by then whoever got one says so with its next IDLE
_WORKS_LEFT = 1  # of one that is idle: it may be asked again while it computes
_OFFERS_PER_S, _OFFER_MOST = 100, (1 << 16) - 1


class WorkStealing:
    def __init__(self, queue: Queue, asks: Asks) -> None:
        self._queue, self._asks = queue, asks
        self._unit_s = 0.0  # busy seconds of my trainer for one microbatch; 0: not known
        self.begin({}, set())

    def begin(self, micros: dict[int, MicroState], here: set[int]) -> None:
        """A batch, with the records that the machine keeps of it.  `here`: what is here and not in the sums yet."""
        self._micros, self._here = micros, here
        # My trainer has a work in hand, and began it or ended the one before then.
        self._busy_since: float | None = None
        self._quiet_since = 0.0
        self._gave_at = -math.inf  # when I gave one back last
        self._asked_for: dict[int, int] = {}  # by idle seat: the microbatch that was asked back for it last

    # ---- my own pace ---------------------------------------------------------------------------------------------

    def on_unit(self, unit_s: float) -> None:
        self._unit_s = unit_s

    def on_made(self, now: float) -> None:
        self._busy_since = now

    def on_handed(self, now: float) -> None:
        """After every event: my trainer has what it gets now in hand."""
        if not self._queue.in_hand:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now

    def _unit_now_s(self, now: float) -> float:
        """One that sits over a work for longer than usual is as slow as that."""
        return max(self._unit_s, now - self._busy_since if self._busy_since is not None else 0.0)

    # ---- at the idle one -----------------------------------------------------------------------------------------

    def on_came(self, now: float) -> None:
        self._quiet_since = now

    def offer(self, now: float) -> int | None:
        """The mark of IDLE, if it is to be said now."""
        idle = len(self._queue) <= _WORKS_LEFT and now - self._quiet_since >= QUIET_S and self._unit_s > 0
        if not idle:
            return None
        self._quiet_since = now
        done_s = (len(self._here) + 1) * self._unit_now_s(now)
        return min(math.ceil(done_s * _OFFERS_PER_S), _OFFER_MOST)

    # ---- at who sent it ------------------------------------------------------------------------------------------

    def to_ask(self, idle: int, now: float) -> tuple[int, int] | None:
        """(the seat that is to give one back for the idle one, which microbatch): of the seat that has kept one of mine
        for the longest the newest one, which it comes to last."""
        last = self._micros.get(self._asked_for.get(idle, -1))
        if last is not None and last.meant_for == idle and not last.out_for_good and not _may_ask(last, now):
            return None  # that may still come
        kept: dict[int, list[int]] = {}
        for seat, micro in self._asks.awaited(CrossingKind.WANT_GRADIENT):
            if seat != idle and _may_be_moved(self._micros[micro], seat):
                kept.setdefault(seat, []).append(micro)
        for seat in sorted(kept, key=lambda seat: min(map(self._sent_at, kept[seat]))):
            micro = max(kept[seat], key=self._sent_at)
            record = self._micros[micro]
            if _may_ask(record, now):
                record.asked_back, record.asked_back_at, record.meant_for = seat, now, idle
                self._asked_for[idle] = micro
                return seat, micro
        return None

    def _sent_at(self, micro: int) -> tuple[float, int]:
        return self._micros[micro].sent_at, micro

    def on_given_back(self, micro: int, seat: int) -> Verdict:
        """ACCEPTED: it is with nobody of the next stage from now on, since the seat that had it says so."""
        record = self._micros.get(micro)
        if record is None or record.asked_back != seat:
            return Verdict.UNAUTHORISED
        if record.next != seat or record.out_for_good:
            return Verdict.DUPLICATE
        if record.returned:
            return Verdict.UNAUTHORISED  # it has counted it
        record.next, record.out_for_good = 0, True
        record.sent = record.missing = False
        self._asks.settle((seat, CrossingKind.WANT_GRADIENT, micro))
        return Verdict.ACCEPTED

    # ---- at the slow one -----------------------------------------------------------------------------------------

    def gives_back(self, micro: int, seat: int, offer: int, now: float) -> bool:
        """WANT_BACK came.  True: it is the seat's from now on, and nothing is done about it here."""
        record = self._micros.get(micro)
        if record is None or not _is_free(record, seat):
            return False
        behind = self._queue.behind(micro)
        if behind is None or not self._unit_s:
            return False
        # Others who ask in the same moment mean the same idle seat, and the time that it had said before.
        rested = now - self._gave_at >= GIVES_EVERY_S
        here_s = (len(self._here) - behind) * self._unit_now_s(now)
        if not rested or here_s * _OFFERS_PER_S < SOONER_TIMES * offer:
            return False
        self._gave_at = now
        self._queue.drop(micro)
        record.has, record.prev, record.given_back_to = False, 0, seat
        return True


def _may_be_moved(record: MicroState, seat: int) -> bool:
    """This seat has it, of what was sent there; not of what is there by somebody who is gone."""
    return record.next == seat and record.sent and record.out and not record.out_for_good


def _may_ask(record: MicroState, now: float) -> bool:
    return not record.asked_back or now - record.asked_back_at >= ASK_AFTER_S


def _is_free(record: MicroState, seat: int) -> bool:
    """It is here for this seat alone, and nothing was done about it."""
    known = record.in_for_good or record.named or record.next
    return record.has and record.prev == seat and not (known or record.out or record.grad or record.counted)
