"""The machine of microbatches at one member of one stage.  Pure.

Driven by the agent of a stage, and by the world of the tests.  Owns: which microbatches are here, where each came from
and went to, what the trainer does next, who is asked again.  Must not know sockets, the bytes of a crossing, the model,
how anybody is found to be gone, or the rounds that follow a batch.

Why no microbatch counts twice in a stage: it has one holder there, and it changes hands by the table (seats.py), or by
that holder's own word that it has not begun it.

R1  The coordinator says who holds it in stage 0 (grants), and its holder in stage s says who holds it in stage s + 1.
R2  A table shows my `next` gone: the kept activation goes to another seat, marked `again`; also if a gradient is here
    already, since the sums of who is gone went with it.  That gradient stays good.
R3  A table shows a loss in the stage before mine, or somebody new there after a loss: all living members of it hear
    HELD, the microbatches that I have and whose holder there is gone.
R4  What is marked `again` is computed only after every member of the next stage that was there at the last loss in my
    own stage has said HELD of at least that number.  If one of them has it, it is asked for the gradient, and nothing
    is computed forward.
R5  Frames of a seat that is gone are refused; what may move a microbatch and names a later table than mine waits for
    that table; who reads that its own seat is gone has lost its sums.  A frame that names a table from before my own
    seat was meant for another seat of the same peer, and is refused too.
R6  A living seat that has not begun a microbatch may give it back to whoever sent it, once, when it is asked to
    (work_stealing.py): the only other way in which one changes hands.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import (
    AGAIN,
    FOR_GOOD,
    Effect,
    FlowDirection,
    FlowNote,
    Forget,
    GiveWork,
    KeepCrossingPiece,
    KeptPiece,
    NoteReason,
    SeatLost,
    WorkMade,
    mark_of,
    micro_of,
    seat_of,
    table_of,
)
from farflung.collectives.pipeline.microbatches import Asks, MicroState, Queue
from farflung.collectives.pipeline.neighbours import (
    CreditsGiven,
    CreditsHeld,
    NeighbourHealth,
    Routing,
    Window,
)
from farflung.collectives.pipeline.seats import SeatPlace, Table
from farflung.collectives.pipeline.stage_frames import EarlyFrames, Sending, is_early, refusal
from farflung.collectives.pipeline.work_stealing import WorkStealing
from farflung.protocol.digests import bits, mask_from_bytes, mask_of
from farflung.protocol.errors import Counters, FrameError, Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload, Spoiled

ROOM_AGAIN_S = 1.0
_QUESTIONS: Mapping[FrameKind, CrossingKind] = {
    CrossingKind.ACTIVATION: CrossingKind.WANT_ACTIVATION,
    CrossingKind.GRADIENT: CrossingKind.WANT_GRADIENT,
    CrossingKind.HELD: CrossingKind.WANT_HELD,
}
_ANSWERS = frozenset({*_QUESTIONS, Kind.LATER, Kind.MISSING, CrossingKind.GIVEN_BACK})
Check = Callable[
    [FrameKind, Payload], None
]  # FrameError unless this is a crossing of that border (crossing.py)


class StageScheduler(Sending):
    def __init__(self, place: SeatPlace, table: Table, check: Check, chance: Callable[[], float]) -> None:
        super().__init__(place, table)
        self.over = False  # my seat is gone
        self.counters = Counters()
        self.refused_for_room = 0
        self._check = check
        self._wiring = Routing(chance)
        self._asks, self._early, self._queue = Asks(), EarlyFrames(), Queue(place.hands_most)
        self._taking_back = WorkStealing(self._queue, self._asks)
        self._window = Window(place.stages, place.open_most)
        self._shunned: frozenset[str] = frozenset()
        self._doubts = NeighbourHealth()
        self._forward = FlowDirection.BOTH if place.is_last else FlowDirection.FORWARD
        self._begin(-1, 0)
        self._meet()

    def _begin(self, version: int, count: int) -> None:
        self.version, self.count = version, count
        self._micros = {}
        self.waiting: set[int] = set()  # they spent room here, and did not move on yet
        self._reopened: set[int] = set()  # moved on once, and are here again by a loss
        self._open: set[int] = set()  # here, and neither in the sums nor given up
        self._taking_back.begin(self._micros, self._open)
        self._shut: set[int] = set()  # of these at a source: not in the window yet
        self._unsent: set[int] = set()  # for want of room
        self._in_doubt: set[int] = set()  # for want of HELD
        self._heard: dict[int, int] = {}  # of whom HELD, by number of table
        self._doubts.clear()
        self._giving, self._spending = CreditsGiven(), CreditsHeld()
        self._queue.clear()
        self._asks.clear()
        self._told_room_at = 0.0

    def _meet(self) -> None:
        """Neighbours as the table has them."""
        # Who is shunned is given no room, as long as it has others to send to; what it was given it keeps.
        out = self._shunned if len(self.table.living(self._stage)) > 1 else frozenset()
        senders = [s.number for s in self._before if s.peer not in out or self._giving.total(s.number)]
        self._giving.on_senders(senders)
        self._spending.on_seats(seat.number for seat in self._after)
        self._wiring.on_seats(self._after)

    # ---- questions ---------------------------------------------------------------------------------------------

    @property
    def counted(self) -> int:
        """The mask of what is in the trainer's sums."""
        return mask_of(micro for micro, record in self._micros.items() if record.counted)

    @property
    def held_for_trainer(self) -> int:
        """Works that it has in hand or that wait for it: who holds some and makes none hangs."""
        return len(self._queue)

    @property
    def is_done(self) -> bool:
        """Of all that is here nothing is left to do: what is counted is news, and not only a part of it."""
        return not self._open

    @property
    def room_limit(self) -> int:
        return self._giving.limit

    @property
    def early_count(self) -> int:
        """Frames that wait for their explanation, and end in a counter when it comes."""
        return len(self._early)

    @property
    def complaints(self) -> dict[int, bool]:
        """Seats that I can't work with now; True: what comes from them is damaged."""
        return self._doubts.complaints(self.table.lives)

    # ---- the coordinator ---------------------------------------------------------------------------------------

    def on_seats(self, table: Table, now: float) -> list[Effect]:
        if self.over or table.number <= self.table.number:
            return []
        old, self.table = self.table.number, table
        if not table.lives(self._me):
            self.leave()
            return [SeatLost(self._me)]
        self._meet()
        self._asks.only({seat.number for seat in (*self._before, *self._after)})
        if any(record.next and not table.lives(record.next) for record in self._micros.values()):
            self._window.on_loss()
        for micro, record in self._micros.items():  # R2
            if record.next and not table.lives(record.next):
                record.next, record.again = 0, True
                record.sent = record.missing = record.returned = False
                if record.has and micro not in self.waiting:
                    self._reopened.add(micro)
        effects: list[Effect] = []
        lost, changed = table.last_loss(self._stage - 1), table.last_change(self._stage - 1)
        if self.version >= 0 and lost and changed > old:  # R3: newcomers have to wait for it too
            effects += self._tell_held(self._before)
        effects += self._replay(now)
        for micro in list(self._micros):
            effects += self._consider(micro, now)
        return effects + self._settle(now)

    def on_grants(self, version: int, granted: int, again: int, table_no: int, now: float) -> list[Effect]:
        """Masks of what is mine in stage 0, all of it each time, and of these what somebody had who is gone.

        A grant is never taken back from a living seat.  False words about it are the coordinator's, who is believed.
        """
        if self.over or self._stage or version != self.version or table_no > self.table.number:
            return []  # it is told with every tick
        for micro in bits(granted & (1 << self.count) - 1):
            record = self._micros.setdefault(micro, MicroState())
            if not record.has and not record.stuck:
                record.has, record.again = True, record.again or bool(again >> micro & 1)
                self._shut.add(micro)
                self._open.add(micro)
        return self._open_more(now) + self._settle(now)

    def on_skipped(self, version: int, skipped: int, now: float) -> list[Effect]:
        """The mask of what the batch goes without: nobody computes, sends, asks for or counts it any more."""
        if self.over or version != self.version:
            return []
        for micro in bits(skipped & (1 << self.count) - 1):
            record = self._micros.setdefault(micro, MicroState())
            if not record.stuck and not record.counted:
                self._let_go(micro, record)
                self._queue.drop(micro)
                self._asks.drop(micro)
        return self._open_more(now) + self._settle(now)

    def on_version(self, version: int, count: int, now: float) -> list[Effect]:
        """A batch of so many microbatches is learned from this version; those before it are committed or void."""
        if self.over or version <= self.version:
            return []
        effects: list[Effect] = [Forget(self.version)]
        self._begin(version, count)
        self._meet()
        if self.table.last_loss(self._stage - 1):
            effects += self._tell_held(self._before)
        return effects + self._replay(now) + self._settle(now)

    def on_lines(self, unreached: set[str], shunned: frozenset[str], now: float) -> list[Effect]:
        """Peers that I can't talk to, and those that I found of no use before, who get nothing as long as there are
        others.  What they hold stays theirs until the table says that they are gone."""
        if shunned != self._shunned:
            self._shunned = shunned
            self._meet()
        self._wiring.on_lines(unreached, shunned)
        return self._push_unsent(now) + self._settle(now) if not self.over else []

    def on_doubted(self, seats: Iterable[int], now: float) -> None:
        """Somebody complains of these.  Do I get on with them?  What they have of who is gone is answered at once."""
        after = {seat.number for seat in self._after}
        for seat in after.intersection(seats) if self.version >= 0 and not self.over else ():
            self._asks.expect((seat, CrossingKind.WANT_HELD, 0), now)

    def leave(self) -> None:
        """My trainer's sums are gone, and with them the seat: nothing more is done in it."""
        self.over = True
        self.counters.count(Verdict.STALE, len(self._early.take_all()))

    # ---- the trainer -------------------------------------------------------------------------------------------

    def on_unit(self, unit_s: float) -> None:
        """It takes so long for one microbatch: more of them may wait."""
        self._giving.on_unit(unit_s)
        self._taking_back.on_unit(unit_s)

    def on_made(self, made: WorkMade, now: float) -> list[Effect]:
        work = (made.way, made.micro)
        if self.over or made.version != self.version or work not in self._queue.in_hand:
            return []
        self._queue.in_hand.discard(work)
        self._taking_back.on_made(now)
        record, micro = self._micros[made.micro], made.micro
        if made.problem:
            self._let_go(micro, record)
            return [FlowNote(NoteReason.UNUSABLE, self._me, micro), *self._open_more(now), *self._settle(now)]
        effects: list[Effect] = []
        if made.way == FlowDirection.FORWARD:
            record.out = True
            effects.append(KeepCrossingPiece(self.version, micro, KeptPiece.OUTPUT, made.payload))
        else:
            record.counted = True
            self._open.discard(micro)
            if self._stage:
                effects.append(KeepCrossingPiece(self.version, micro, KeptPiece.GIVEN, made.payload))
                effects += self._give(micro, record)
            else:
                self._window.on_back(now - record.sent_at)
        return effects + self._consider(micro, now) + self._open_more(now) + self._settle(now)

    # ---- the clock ---------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[Effect]:
        if self.over or self.version < 0:
            return []
        effects: list[Effect] = []
        for seat, kind, micro in self._asks.due(now):
            effects += self._ask(seat, kind, micro)
        silent = self._doubts.on_silent(self._asks.silent(now))
        effects += [FlowNote(NoteReason.SILENT, seat, 0) for seat in silent]
        if now - self._told_room_at >= ROOM_AGAIN_S:
            self._told_room_at = now
            effects += [
                e for seat in self._giving.unspent for e in self._say_room(seat, self._giving.total(seat))
            ]
        if self._stage and (offer := self._taking_back.offer(now)) is not None:
            effects += [
                e for seat in self._giving.unspent for e in self._say(seat, CrossingKind.IDLE, mark=offer)
            ]
        return effects + self._settle(now)

    # ---- frames ------------------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[Effect]:
        """Of a known peer, and its payload matches its hash.  It ends in exactly one counter."""
        verdict = self._refusal(sender, frame.header)
        if verdict is not None:
            self.counters.count(verdict)
            return []
        if self._is_early(frame.header):
            self.counters.count(Verdict.STALE, self._early.keep(sender, frame))
            return []
        verdict, effects = self._taken(frame, now)
        self.counters.count(verdict)
        return effects + self._settle(now)

    def on_spoiled(self, sender: str, spoiled: Spoiled, now: float) -> list[Effect]:
        """A frame that is not what it should be, and that the data plane counted: ask again, the second time tell."""
        header = spoiled.header
        if header is None or self._refusal(sender, header) is not None or self._is_early(header):
            return []
        return self._on_damage(header)

    def _refusal(self, sender: str, header: Header) -> Verdict | None:
        if self.over:
            return Verdict.STALE
        return refusal(self.place.seat, self.table, self.version, sender, header)

    def _is_early(self, header: Header) -> bool:
        return is_early(self.table, self.version, header)

    def _replay(self, now: float) -> list[Effect]:
        return [e for sender, frame in self._early.take_all() for e in self.on_frame(sender, frame, now)]

    def _taken(self, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        header = frame.header
        seat, micro = seat_of(header), micro_of(header)
        if header.kind in _ANSWERS:
            self._asks.on_answered(seat)
        if header.kind == CrossingKind.ROOM:  # its number is all of `chunk`
            return self._on_room(seat, header.chunk, now)
        if micro >= self.count:
            return Verdict.MALFORMED, []
        match header.kind:
            case CrossingKind.ACTIVATION:
                return self._on_activation(seat, frame, now)
            case CrossingKind.GRADIENT:
                return self._on_gradient(seat, frame, now)
            case CrossingKind.HELD:
                return self._on_held(seat, frame, now)
            case CrossingKind.WANT_GRADIENT:
                return self._on_want_gradient(seat, micro, mark_of(header))
            case CrossingKind.WANT_HELD:
                return Verdict.ACCEPTED, self._tell_held([self.table.seats[seat]])
            case CrossingKind.WANT_ACTIVATION:
                return self._on_want_activation(seat, micro)
            case Kind.MISSING:
                return self._on_missing(seat, micro, now)
            case CrossingKind.IDLE:
                return self._on_idle(seat, mark_of(header), now)
            case CrossingKind.WANT_BACK:
                return self._on_want_back(seat, micro, mark_of(header), now)
            case CrossingKind.GIVEN_BACK:
                return self._on_given_back(seat, micro, now)
            case _:  # LATER
                self._asks.on_answer((seat, CrossingKind.WANT_GRADIENT, micro), now)
                return Verdict.ACCEPTED, []

    def _on_activation(self, seat: int, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        micro, mark = micro_of(frame.header), mark_of(frame.header)
        record = self._micros.get(micro)
        if record is not None and record.stuck and not record.has:
            self._giving.on_received(seat, micro)
            return Verdict.STALE, []  # the batch goes without it
        if not mark & FOR_GOOD and record is not None and record.is_back_at(seat):
            return Verdict.STALE, self._say(seat, CrossingKind.GIVEN_BACK, micro)
        if record is not None and record.has:
            if not self._adopt(record, seat):
                return Verdict.UNAUTHORISED, [FlowNote(NoteReason.CONTESTED, seat, micro)]
            self._giving.on_received(seat, micro)
            return Verdict.DUPLICATE, self._give(micro, record) if record.counted else []
        if not self._giving.admits(seat, micro):
            self.refused_for_room += 1
            return Verdict.UNAUTHORISED, []
        verdict = self._flaw(frame)
        if verdict is not None:
            return verdict, self._on_damage(frame.header)
        self._doubts.on_good(seat)
        self._giving.on_received(seat, micro)
        self._asks.settle((seat, CrossingKind.WANT_ACTIVATION, micro))
        record = self._micros.setdefault(micro, MicroState())
        record.prev, record.has, record.again = seat, True, record.again or bool(mark & AGAIN)
        record.in_for_good = bool(mark & FOR_GOOD)
        self._taking_back.on_came(now)
        self.waiting.add(micro)
        self._open.add(micro)
        kept = KeepCrossingPiece(self.version, micro, KeptPiece.INPUT, frame.payload)
        return Verdict.ACCEPTED, [kept, *self._consider(micro, now)]

    def _on_gradient(self, seat: int, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        micro = micro_of(frame.header)
        record = self._micros.get(micro)
        if record is None or record.next != seat or not record.sent:
            return Verdict.UNAUTHORISED, []  # I gave it nothing to make a gradient of
        if record.returned:
            return Verdict.DUPLICATE, []
        verdict = self._flaw(frame)
        if verdict is not None:
            return verdict, self._on_damage(frame.header)
        self._doubts.on_good(seat)
        record.returned = True
        self._asks.settle((seat, CrossingKind.WANT_GRADIENT, micro))
        effects: list[Effect] = []
        if not record.grad:
            record.grad = True
            effects.append(KeepCrossingPiece(self.version, micro, KeptPiece.RETURNED, frame.payload))
        return Verdict.ACCEPTED, effects + self._consider(micro, now)

    def _on_held(self, seat: int, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        mask = mask_from_bytes(bytes(frame.payload)) if len(frame.payload) <= self.count // 8 + 1 else -1
        if mask < 0 or mask >> self.count:
            return Verdict.MALFORMED, []
        number = table_of(frame.header)
        if number < self._heard.get(seat, 0):
            return Verdict.STALE, []
        self._doubts.on_good(seat)
        self._heard[seat] = number
        effects: list[Effect] = []
        for micro in bits(mask):
            record = self._micros.setdefault(micro, MicroState())
            if record.next and record.next != seat:
                # The first one stands until it is gone.
                effects.append(FlowNote(NoteReason.CONTESTED, seat, micro))
            record.next = record.next or seat
        self._asks.settle((seat, CrossingKind.WANT_HELD, 0))
        for micro in sorted(self._in_doubt):
            effects += self._consider(micro, now)
        return Verdict.ACCEPTED, effects

    def _on_want_gradient(self, seat: int, micro: int, mark: int) -> tuple[Verdict, list[Effect]]:
        record = self._micros.get(micro)
        if not mark & FOR_GOOD and record is not None and record.is_back_at(seat):
            return Verdict.ACCEPTED, self._say(seat, CrossingKind.GIVEN_BACK, micro)
        if record is None or not record.has:
            return Verdict.ACCEPTED, self._say(seat, Kind.MISSING, micro, CrossingKind.WANT_GRADIENT)
        if not self._adopt(record, seat):
            return Verdict.UNAUTHORISED, [FlowNote(NoteReason.CONTESTED, seat, micro)]
        later = self._say(seat, Kind.LATER, micro, CrossingKind.WANT_GRADIENT)
        return Verdict.ACCEPTED, self._give(micro, record) if record.counted else later

    def _on_want_activation(self, seat: int, micro: int) -> tuple[Verdict, list[Effect]]:
        record = self._micros.get(micro)
        if record is None or record.next != seat or not record.out:
            late = record is not None and record.was_at(seat)
            return Verdict.STALE if late else Verdict.UNAUTHORISED, []
        return Verdict.ACCEPTED, self._pass_on(micro, record)

    def _on_missing(self, seat: int, micro: int, now: float) -> tuple[Verdict, list[Effect]]:
        record = self._micros.get(micro)
        if record is None or record.next != seat or not record.sent or record.returned:
            return Verdict.STALE, []
        self._asks.on_answer((seat, CrossingKind.WANT_GRADIENT, micro), now)
        if record.missing and now - record.sent_at < ROOM_AGAIN_S:
            return Verdict.DUPLICATE, []  # what it misses is on its way
        record.missing, record.sent = True, False
        return Verdict.ACCEPTED, self._consider(micro, now)

    def _on_idle(self, seat: int, offer: int, now: float) -> tuple[Verdict, list[Effect]]:
        able = self._spending.left(seat) > 0 and self.table.seats[seat].peer not in self._shunned
        asked = self._taking_back.to_ask(seat, now) if able else None
        return Verdict.ACCEPTED, self._say(asked[0], CrossingKind.WANT_BACK, asked[1], offer) if asked else []

    def _on_want_back(self, seat: int, micro: int, offer: int, now: float) -> tuple[Verdict, list[Effect]]:
        record = self._micros.get(micro)
        if self._taking_back.gives_back(micro, seat, offer, now):
            self._giving.on_given_back(seat, micro)
            self._open.discard(micro)
            self._moved_on(micro)
        # Or else it stays, and nothing needs to be said.
        back = record is not None and record.is_back_at(seat)
        return Verdict.ACCEPTED, self._say(seat, CrossingKind.GIVEN_BACK, micro) if back else []

    def _on_given_back(self, seat: int, micro: int, now: float) -> tuple[Verdict, list[Effect]]:
        verdict = self._taking_back.on_given_back(micro, seat)
        if verdict is not Verdict.ACCEPTED:
            return verdict, []
        self._spending.on_given_back(seat, micro)
        return verdict, self._consider(micro, now)

    def _on_room(self, seat: int, total: int, now: float) -> tuple[Verdict, list[Effect]]:
        if not self._spending.on_room(seat, total):
            return Verdict.DUPLICATE, []
        self._wiring.on_room(seat, self._spending.left(seat), self._spending.most(seat))
        return Verdict.ACCEPTED, self._push_unsent(now)

    def _flaw(self, frame: Frame) -> Verdict | None:
        try:
            self._check(frame.header.kind, frame.payload)
        except FrameError as error:
            return error.verdict
        return None

    def _on_damage(self, header: Header) -> list[Effect]:
        seat, question = seat_of(header), _QUESTIONS.get(header.kind)
        if question is None or seat not in self.table.seats:
            return []
        told = [FlowNote(NoteReason.DAMAGED, seat, micro_of(header))] if self._doubts.on_damaged(seat) else []
        return [*told, *self._say(seat, question, micro_of(header))]

    def _adopt(self, record: MicroState, seat: int) -> bool:
        """Somebody of the stage before says that it holds this one.  False: a living other one does."""
        if record.prev != seat and self.table.lives(record.prev):
            return False
        record.prev = seat
        return True

    # ---- what follows ------------------------------------------------------------------------------------------

    def _consider(self, micro: int, now: float) -> list[Effect]:
        """The next thing that is to be done about a microbatch."""
        record = self._micros[micro]
        if not record.has or record.stuck:
            return []
        if self.place.is_last:
            if record.counted:
                self._moved_on(micro)
            else:
                self._queue.put(FlowDirection.BOTH, micro)
            return []
        if record.grad and not record.counted:
            self._queue.put(FlowDirection.BACKWARD, micro)
        if record.sent or (self._stage == 0 and not record.opened):
            return []
        if record.next and not record.missing:
            return self._claim(micro, record, now)
        if record.again and not record.out and not self._all_have_told(now):  # R4
            self._in_doubt.add(micro)
            return []
        self._in_doubt.discard(micro)
        if not record.out:
            self._queue.put(FlowDirection.FORWARD, micro)
            return []
        return self._send_on(micro, record, now)

    def _all_have_told(self, now: float) -> bool:
        """R4.  Who sat down after the last loss in my stage never took anything of whoever is gone (R5).

        So nobody waits for an empty stage: whoever comes into it has nothing.
        """
        need = self.table.last_loss(self._stage)
        silent = [s.number for s in self._after if s.since <= need and self._heard.get(s.number, 0) < need]
        for seat in silent:
            self._asks.expect((seat, CrossingKind.WANT_HELD, 0), now)
        return not silent

    def _claim(self, micro: int, record: MicroState, now: float) -> list[Effect]:
        """Somebody of the next stage has it from a seat that is gone: it shall give me the gradient."""
        self._in_doubt.discard(micro)
        self._on_its_way(micro, record, now)
        return self._ask(record.next, CrossingKind.WANT_GRADIENT, micro)

    def _send_on(self, micro: int, record: MicroState, now: float) -> list[Effect]:
        if not record.next:
            chosen = self._wiring.choose(self._spending.able, record.meant_for)
            if chosen is None:
                self._unsent.add(micro)
                return []
            record.next = chosen
            self._spending.on_sent(chosen, micro)
            self._wiring.on_room(chosen, self._spending.left(chosen), self._spending.most(chosen))
        self._on_its_way(micro, record, now)
        return self._pass_on(micro, record)

    def _on_its_way(self, micro: int, record: MicroState, now: float) -> None:
        record.sent, record.sent_at = True, now
        self._unsent.discard(micro)
        self._moved_on(micro)
        self._asks.expect((record.next, CrossingKind.WANT_GRADIENT, micro), now)

    def _let_go(self, micro: int, record: MicroState) -> None:
        """Nothing comes of it here: it takes no room, and no place in the window."""
        record.stuck = True
        self._moved_on(micro)
        for waiting in (self._open, self._shut, self._unsent, self._in_doubt):
            waiting.discard(micro)

    def _moved_on(self, micro: int) -> None:
        self.waiting.discard(micro)
        self._reopened.discard(micro)

    def _push_unsent(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for micro in sorted(self._unsent):
            effects += self._consider(micro, now)
        return effects

    def _open_more(self, now: float) -> list[Effect]:
        """At a source: as many as the window lets, what was granted before to somebody else first."""
        effects: list[Effect] = []
        if self._shut:
            room = self._window.size - len(self._open) + len(self._shut)
            order = heapq.nsmallest(
                room, self._shut, key=lambda micro: (not self._micros[micro].again, micro)
            )
            for micro in order:
                self._shut.discard(micro)
                self._micros[micro].opened = True
                effects += self._consider(micro, now)
        return effects

    def _settle(self, now: float) -> list[Effect]:
        """After every event: work for the trainer, and room for those who send."""
        effects: list[Effect] = [
            GiveWork(way, self.version, micro) for way, micro in self._queue.take(self._forward)
        ]
        self._taking_back.on_handed(now)
        if self._stage and self.version >= 0:
            for seat in sorted(self._giving.more(len(self.waiting) + len(self._reopened))):
                effects += self._say_room(seat, self._giving.total(seat))
        return effects
