"""What a member knows of one microbatch, what its trainer is to do next, and what it waits for.  Pure.

Records and queues of the machine of microbatches (stage_scheduler.py), which alone changes them.  Must not know
frames or tables.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import FlowDirection

ASK_AFTER_S = 1.0
USUAL_TIMES = 3.0  # and so many times the usual time between a question and a word on it
BACKOFF_MOST = 4.0  # times that patience, at most
# So long without an answer to anything, after so many questions: the coordinator should hear of it.
SILENT_S = 5.0
SILENT_TIMES = 3
ONE_IN_VAIN = 6  # times in a row that one question stays without a word, though others are answered
_USUAL_SMOOTHED = 0.2


@dataclass(slots=True)
class MicroState:
    """`next` is the seat of the next stage that holds it, or that it was sent to; 0: nobody does."""

    prev: int = 0  # the seat of the stage before that holds it
    has: bool = False  # its input is here (at a source: it was granted)
    again: bool = False  # somebody who is gone may have passed it on: see R4
    next: int = 0
    sent: bool = False  # `next` was told, by an activation or by a question
    missing: bool = False  # `next` says that it has nothing: only the activation helps
    returned: bool = False  # `next` has counted it
    out: bool = False  # its output is kept
    grad: bool = False  # a gradient for it is kept, from whoever it was: it stays good
    counted: bool = False  # it is in the trainer's sums
    stuck: bool = False  # the trainer gets nothing out of it
    opened: bool = False  # at a source: it is in the window
    sent_at: float = 0.0
    # R6, towards the stage before:
    given_back_to: int = 0  # the seat there to which I gave it back, not begun
    named: bool = False  # HELD named it: any seat there may ask for it later, so it is not given back
    in_for_good: bool = False  # it came as one that was given back before
    # R6, towards the next stage:
    asked_back: int = 0  # the seat there that was asked to give it back
    asked_back_at: float = 0.0
    meant_for: int = 0  # the seat there that can do it sooner
    out_for_good: bool = False  # it was given back: whoever gets it now keeps it

    def is_back_at(self, seat: int) -> bool:
        """I gave it back to this seat of the stage before, and did not get it again."""
        return self.given_back_to == seat and not self.has

    def was_at(self, seat: int) -> bool:
        """This seat of the next stage gave it back; what it asked before may come late."""
        return self.out_for_good and self.asked_back == seat


class Queue:
    """Gradients before activations, of each the first that came; to the trainer only a few at a time."""

    def __init__(self, hands_most: int) -> None:
        self._hands_most = hands_most
        self.clear()

    def clear(self) -> None:
        self._backward: deque[int] = deque()
        self._forward: deque[int] = deque()
        self._due: set[tuple[FlowDirection, int]] = set()
        self.in_hand: set[tuple[FlowDirection, int]] = set()

    def __len__(self) -> int:
        return len(self._due) + len(self.in_hand)

    def behind(self, micro: int) -> int | None:
        """How many the trainer goes forward with after this one; None: it has it in hand, or none is due."""
        if micro not in self._forward:
            return None
        return len(self._forward) - 1 - self._forward.index(micro)

    def drop(self, micro: int) -> None:
        """It is not wanted any more; what the trainer has in hand of it, it ends."""
        for waiting in (self._backward, self._forward):
            if micro in waiting:
                waiting.remove(micro)
        self._due = {work for work in self._due if work[1] != micro}

    def put(self, way: FlowDirection, micro: int) -> None:
        if (way, micro) not in self._due and (way, micro) not in self.in_hand:
            self._due.add((way, micro))
            (self._backward if way == FlowDirection.BACKWARD else self._forward).append(micro)

    def take(self, forward: FlowDirection) -> list[tuple[FlowDirection, int]]:
        """What the trainer gets now.  `forward`: what an activation is here, BOTH in the last stage."""
        taken = []
        while len(self.in_hand) < self._hands_most and (self._backward or self._forward):
            way = FlowDirection.BACKWARD if self._backward else forward
            micro = (self._backward or self._forward).popleft()
            self._due.discard((way, micro))
            self.in_hand.add((way, micro))
            taken.append((way, micro))
        return taken


@dataclass(slots=True)
class _Ask:
    due: float
    patience_s: float
    asked_at: float = 0.0  # 0: not asked, or answered
    in_vain: int = 0  # times since the last word on it


@dataclass(slots=True)
class _Silence:
    since: float  # the first question to this seat that it did not answer
    times: int = 0


Question = tuple[int, CrossingKind, int]  # whom, by seat; what, as the question for it; of which microbatch


class Asks:
    """What is awaited, and when it is asked for; who is asked in vain."""

    def __init__(self) -> None:
        self._asks: dict[Question, _Ask] = {}
        self._silences: dict[int, _Silence] = {}
        self._usual_s = 0.0

    def clear(self) -> None:
        """Nothing is awaited; what is usual stays."""
        self._asks.clear()
        self._silences.clear()

    def expect(self, question: Question, now: float) -> None:
        patience_s = ASK_AFTER_S + USUAL_TIMES * self._usual_s
        self._asks.setdefault(question, _Ask(now + patience_s, patience_s))

    def settle(self, question: Question) -> None:
        self._asks.pop(question, None)

    def on_answer(self, question: Question, now: float) -> None:
        """A word on it: LATER, or that it is missing.  Patience is by how long such words take on this way.

        By how long gradients take it must not be: who waits for a gradient waits for all that is lost on the whole way
        behind, so that the patience of each stage would grow by that of the next one, and with every loss.
        """
        ask = self._asks.get(question)
        if ask is not None:
            ask.in_vain = 0
        if ask is not None and ask.asked_at:
            took_s, ask.asked_at = now - ask.asked_at, 0.0
            self._usual_s += (_USUAL_SMOOTHED if self._usual_s else 1.0) * (took_s - self._usual_s)

    def awaited(self, kind: CrossingKind) -> list[tuple[int, int]]:
        """(seat, microbatch) of all that is awaited of this kind."""
        return [(seat, micro) for seat, each, micro in self._asks if each == kind]

    def drop(self, micro: int) -> None:
        """Nothing is awaited of this microbatch; what a stage has of who is gone is about all of them."""
        self._asks = {
            question: ask
            for question, ask in self._asks.items()
            if question[2] != micro or question[1] == CrossingKind.WANT_HELD
        }

    def on_answered(self, seat: int) -> None:
        """It gave what somebody is asked for, of whichever microbatch.  That it gives room answers nothing."""
        self._silences.pop(seat, None)

    def only(self, living: set[int]) -> None:
        self._asks = {question: ask for question, ask in self._asks.items() if question[0] in living}
        self._silences = {seat: silence for seat, silence in self._silences.items() if seat in living}

    def due(self, now: float) -> list[Question]:
        """To be asked now; each time with more patience."""
        found = [question for question, ask in self._asks.items() if ask.due <= now]
        most_s = BACKOFF_MOST * (ASK_AFTER_S + USUAL_TIMES * self._usual_s)
        for question in found:
            ask = self._asks[question]
            ask.patience_s = min(2 * ask.patience_s, most_s)
            ask.due, ask.asked_at = now + ask.patience_s, now
            ask.in_vain += 1
        for seat in {question[0] for question in found}:
            self._silences.setdefault(seat, _Silence(now)).times += 1
        return found

    def silent(self, now: float) -> set[int]:
        """Seats that answer nothing, or never this one thing."""
        nothing = {
            seat
            for seat, silence in self._silences.items()
            if silence.times >= SILENT_TIMES and now - silence.since >= SILENT_S
        }
        return nothing | {seat for (seat, _, _), ask in self._asks.items() if ask.in_vain >= ONE_IN_VAIN}
