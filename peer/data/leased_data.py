"""Which samples the trainer reads: positions within its leases (P7).  Pure.

Held by the trainer's machine.
Must not know the network, or how leases are granted and acknowledged.

A lease's samples [start, stop) are first handed out and later used: `used` moves when the optimizer step that saw the
batch is done.  Each lease is read in order, so one number per lease says exactly which samples are in the model.
A batch goes on in the next lease where one ends: only where nothing more is leased is it shorter than it should be.
With several fragments it is one number for each of them: when work on one of them was dropped or lost, its samples are
read once more, and only the fragments that lack them learn from that step.

A loader may read ahead: it asks for batches that no step has seen yet when it gives one out.  A step has then used all
that was handed out but the newest so many.  When samples have to be read once more, the batches that such a loader
holds back come first; where a fragment has learned from them, or lacks what comes before, their steps are put back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.protocol.messages import UNKNOWN_LENGTH, Lease
from farflung.protocol.round_words import Used

_WANT_MOST = 1 << 20  # the bound of the wire
AHEAD_S = 600.0  # of training lie ahead at least, where the data set is large enough
LEASES_OF_AN_EPOCH = 32  # at least; but for small data sets, whose leases are of `lease_samples`
PACE_PART, SLOWER_MOST = 0.1, 2.0
_STEPS_SEEN = 3  # before something is said of how a loader asks
_UNKNOWN = -1  # how far a fragment has learned from a lease: the agent will say


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of one epoch's order, all within one lease: a batch, or a part of one."""

    lease: int
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Handed:
    """A batch."""

    spans: tuple[Span, ...]
    tokens: int


@dataclass(slots=True)
class _OpenLease:
    lease: Lease
    used: list[int]  # by each fragment
    told: bool = True  # it is in the agent's list: samples of it may be read

    @property
    def is_even(self) -> bool:
        """All fragments have learned equally much from it."""
        return len(set(self.used)) == 1

    @property
    def is_over(self) -> bool:
        """Nothing that is unmerged depends on it."""
        return not self.told and all(upto in (_UNKNOWN, self.lease.stop) for upto in self.used)


class LeaseBook:
    def __init__(self, fragments: int = 1) -> None:
        self._fragments = range(fragments)
        self._open: dict[int, _OpenLease] = {}
        self._handed: list[_Handed] = []  # handed out, not yet in an optimizer step
        self._ahead = 0  # so many of the newest of them the next step has not seen
        self._asked = False
        self._unsure = False
        self._ends = UNKNOWN_LENGTH  # of this peer's data: what is leased beyond is not there
        self._reached = 0  # the furthest place that was ever leased to it

    # ---- what the agent says

    def on_leases(self, leases: tuple[Lease, ...], unsure: bool = False) -> None:
        """The whole list.  A lease that is missing in it is committed to its end or somebody else's now.

        `unsure`: the agent itself does not know, and waits to be told.  Nothing is read then, and nothing forgotten:
        what is told again later may be less than what was learned and is not merged yet.
        """
        self._asked, self._unsure = False, unsure
        for each in self._open.values():
            each.told = False
        for lease in sorted(leases, key=lambda each: each.lease):
            self._reached = max(self._reached, lease.stop)
            reached = list(lease.reached(len(self._fragments)))
            known = self._open.get(lease.lease)
            # Only of a new lease the agent knows where to go on: from a known one more may have been learned.
            used = reached if known is None else known.used
            used = [reached[f] if used[f] == _UNKNOWN else used[f] for f in self._fragments]
            self._open[lease.lease] = _OpenLease(lease, used)
        self._forget()

    def restart(self, fragment: int = 0) -> None:
        """A fragment's unmerged work was dropped, or taken over from a trainer that died: as the agent said last."""
        for each in self._open.values():
            reached = each.lease.reached(len(self._fragments))
            each.used[fragment] = reached[fragment] if each.told else _UNKNOWN
        self._forget()

    def _forget(self) -> None:
        if self._unsure:
            return
        self._open = {i: each for i, each in self._open.items() if not each.is_over}

    # ---- what the trainer does

    def on_end(self, samples: int) -> None:
        """The data was read to its end.  What is leased beyond it goes back to the others: the agent sees to that."""
        self._ends = samples

    def _stop(self, lease: Lease) -> int:
        return max(lease.start, min(lease.stop, self._ends))

    def known(self, samples: int) -> int:
        """Of an epoch of so many.  A stream's end may be near: what one peer holds, the others don't learn from."""
        return self._reached if samples == UNKNOWN_LENGTH else samples

    def read_ahead(self, batches: int) -> None:
        """The loader that begins now holds so many batches back when it gives one out."""
        self._ahead = batches

    def take_back(self) -> None:
        """That loader is gone, and what it held back with it."""
        del self._handed[self._seen :]
        self._ahead = 0

    @property
    def handed_out(self) -> int:
        """Batches that are out and in no step yet."""
        return len(self._handed)

    @property
    def _seen(self) -> int:
        """So many of them are in the next step."""
        return max(0, len(self._handed) - self._ahead)

    @property
    def step_tokens(self) -> int:
        return sum(each.tokens for each in self._handed[: self._seen])

    def next_batch(self, most: int, behind: Sequence[tuple[Span, ...]] = ()) -> tuple[Span, ...]:
        """The next samples, in order, of one lease or of several; they count as read at `hand_out`.

        All of them are new to the same fragments.  `behind`: as if these batches were handed out, too.
        """
        spans: list[Span] = []
        out = [*self._handed, *(_Handed(each, 0) for each in behind)]
        for lease_id, each in self._open.items():
            place = self._place(lease_id, each, out)
            if not each.told or place >= self._stop(each.lease):
                continue
            if spans and not each.is_even:
                break
            ends = [upto for upto in each.used if upto > place]
            stop = min(place + most, self._stop(each.lease), *ends)
            spans.append(Span(lease_id, each.lease.epoch, place, stop))
            most -= stop - place
            if not most or not each.is_even:
                break
        return tuple(spans)

    def _place(self, lease_id: int, each: _OpenLease, out: list[_Handed]) -> int:
        """Where to go on reading: at the first sample that some fragment lacks, and that is not out to be learned."""
        if not self._goes_on(_spans_of(out)):
            # The step that these are in is lost.  Only those that stay out after it, were it the next thing to come,
            # can be learned: the one to be read now, and before it the newest that are held back.
            out = out[len(out) - (self._ahead - 1) :] if self._ahead > 1 else []
        place = min(each.used)
        for span in _spans_of(out):
            if span.lease == lease_id and span.start == place:
                place = span.stop
        return place

    def _goes_on(self, spans: list[Span]) -> bool:
        """Each of them begins where somebody's learning will have ended."""
        at: dict[int, int] = {}
        for span in spans:
            each = self._open.get(span.lease)
            if each is None or at.get(span.lease, min(each.used)) != span.start:
                return False
            at[span.lease] = span.stop
        return True

    def hand_out(self, spans: tuple[Span, ...], tokens: int = 0) -> None:
        self._handed.append(_Handed(spans, tokens))

    def learners(self) -> list[int]:
        """The fragments that the next step may change: those to which all that it has seen is new.

        For the others the step must have no effect; what they lack of its samples is read again.
        """
        return [fragment for fragment in self._fragments if self._is_new(fragment)]

    def _is_new(self, fragment: int) -> bool:
        at: dict[int, int] = {}
        for span in self._spans_of_step():
            each = self._open.get(span.lease)
            if each is None or at.get(span.lease, each.used[fragment]) != span.start:
                return False
            at[span.lease] = span.stop
        return True

    def _spans_of_step(self) -> list[Span]:
        return _spans_of(self._handed[: self._seen])

    def on_step(self) -> None:
        """An optimizer step has used all that it has seen, in the fragments that `learners` names."""
        learners, spans = self.learners(), self._spans_of_step()
        del self._handed[: self._seen]
        for span in spans:
            for fragment in learners:
                self._open[span.lease].used[fragment] = span.stop

    def used(self, fragment: int = 0) -> tuple[Used, ...]:
        """How far the fragment has learned from each lease.

        What is committed already may be named again, which does no harm.  It must be: a trainer that was
        restarted is only told where to go on, not how much of that a commit has acknowledged.
        """
        found = [(i, each.lease.start, each.used[fragment]) for i, each in self._open.items()]
        return tuple(Used(i, used) for i, start, used in found if used > start)

    def ask_anew(self) -> None:
        self._asked = False

    @property
    def unread(self) -> int:
        """Samples that are leased and not handed out."""
        return sum(
            max(0, self._stop(each.lease) - self._place(i, each, self._handed))
            for i, each in self._open.items()
            if each.told
        )

    def ask(self, batch: int, lease_samples: int) -> int:
        """How many samples to ask for now, so that about two leases lie ahead; 0 for none."""
        unit = max(batch, lease_samples)
        missing = 2 * unit - self.unread
        if self._asked or missing < unit:
            return 0
        self._asked = True
        return min(missing, _WANT_MOST)


def _spans_of(handed: list[_Handed]) -> list[Span]:
    return [span for each in handed for span in each.spans]


class ReadPace:
    """How fast a script reads, for how much of its data is to lie ahead: a coordinator may be gone for a while."""

    def __init__(self) -> None:
        self._read_at: float | None = None
        self._samples = 0  # read at that time
        self._sample_s: float | None = None  # lately

    def on_read(self, samples: int, now: float) -> None:
        """A batch of so many is handed out.  Several may be told with the same time."""
        if self._read_at is not None and now > self._read_at:
            took_s = (now - self._read_at) / self._samples
            usual_s = took_s if self._sample_s is None else self._sample_s
            # A round that was waited for, or data that came late, is no pace of reading.
            self._sample_s = usual_s + PACE_PART * (min(took_s, SLOWER_MOST * usual_s) - usual_s)
            self._samples = 0
        self._read_at, self._samples = now, self._samples + samples

    def unit(self, least: int, of_all: int) -> int:
        """So many samples to a lease that one lasts AHEAD_S, but no large part of an epoch: what one holds nobody
        else learns from."""
        if self._sample_s is None:
            return least
        return max(least, min(math.ceil(AHEAD_S / self._sample_s), of_all // LEASES_OF_AN_EPOCH))


class LoaderPace:
    """How many batches a loader holds back, as far as it can be seen from when it asks.

    What a script says of it may be wrong, and then samples are counted as learned that are not, or the other way round.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self._since = 0  # batches handed out since the last step
        self._steps: list[int] = []  # so many before the first step, before the second, ...

    def on_hand_out(self) -> None:
        self._since += 1

    def on_step(self, out: int) -> str:
        """`out`: batches that are in no step yet.  What the script should hear; empty: nothing."""
        if not self._since or len(self._steps) == _STEPS_SEEN:
            return ""
        self._steps.append(self._since)
        self._since = 0
        if len(self._steps) == 1 and out <= self.ahead:
            said, self.ahead = self.ahead, out - 1
            return (
                f"run.batches was told that its loader reads {said} ahead, and the first step came after {out} "
                f"batches: taken as ahead={self.ahead}"
            )
        if len(self._steps) == _STEPS_SEEN and self._steps[0] - self._steps[1] > self.ahead:
            first, later = self._steps[0], self._steps[1]
            if later == self._steps[2]:
                return (
                    f"{first} batches were read before the first step and {later} before each of the next: does a "
                    "loader read ahead of the steps, as accelerate's, the Trainer's and Lightning's do? Say so, "
                    f"run.batches(..., ahead={first - later}), or samples count as learned too early (docs/data.md)"
                )
        return ""
