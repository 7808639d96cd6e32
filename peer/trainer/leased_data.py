"""Which samples the trainer reads: positions within its leases (P7).  Pure.

Held by the trainer's machine.
Must not know the network, or how leases are granted and acknowledged.

A lease's samples [start, stop) are first read and later used: `read` moves when a batch is handed out, `used` when
the optimizer step that saw the batch is done.  A batch never spans two leases, so one number per lease says exactly
which samples are in the model.  With several fragments it is one number for each of them: when work on one of them
was dropped or lost, its samples are read once more, and only the fragments that lack them learn from that step.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.protocol.messages import UNKNOWN_LENGTH, Lease
from farflung.protocol.round_words import Used

_WANT_MOST = 1 << 20  # the bound of the wire
_UNKNOWN = -1  # how far a fragment has learned from a lease: the agent will say


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of one epoch's order, all within one lease."""

    lease: int
    epoch: int
    start: int
    stop: int


@dataclass(slots=True)
class _Open:
    lease: Lease
    read: int
    used: list[int]  # by each fragment
    told: bool = True  # it is in the agent's list: samples of it may be read

    @property
    def is_over(self) -> bool:
        """Nothing that is unmerged depends on it."""
        return not self.told and all(upto in (_UNKNOWN, self.lease.stop) for upto in self.used)


class LeaseBook:
    def __init__(self, fragments: int = 1) -> None:
        self._fragments = range(fragments)
        self._open: dict[int, _Open] = {}
        self._unused: list[Span] = []  # handed out, not yet in an optimizer step
        self._asked = False
        self._unsure = False
        self._ends = UNKNOWN_LENGTH  # of this peer's data: what is leased beyond is not there

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
            reached = list(lease.reached(len(self._fragments)))
            known = self._open.get(lease.lease)
            # Only a new lease is read from where the agent says: a known one may have been read further.
            used = reached if known is None else known.used
            used = [reached[f] if used[f] == _UNKNOWN else used[f] for f in self._fragments]
            read = known.read if known is not None and self._is_handed_out(lease.lease) else min(used)
            self._open[lease.lease] = _Open(lease, read, used)
        self._forget()

    def restart(self, fragment: int = 0) -> None:
        """A fragment's unmerged work was dropped, or taken over from a trainer that died: as the agent said last."""
        for each in self._open.values():
            reached = each.lease.reached(len(self._fragments))
            each.used[fragment] = reached[fragment] if each.told else _UNKNOWN
        self._go_back_to_what_is_missing()
        self._forget()

    def _forget(self) -> None:
        if self._unsure:
            return
        self._open = {i: each for i, each in self._open.items() if not each.is_over}

    def _is_handed_out(self, lease: int) -> bool:
        return any(span.lease == lease for span in self._unused)

    def _go_back_to_what_is_missing(self) -> None:
        for lease, each in self._open.items():
            if each.told and not self._is_handed_out(lease):
                each.read = min(each.used)

    # ---- what the trainer does

    def on_end(self, samples: int) -> None:
        """The data was read to its end.  What is leased beyond it goes back to the others: the agent sees to that."""
        self._ends = samples

    def _stop(self, lease: Lease) -> int:
        return max(lease.start, min(lease.stop, self._ends))

    def next_span(self, most: int) -> Span | None:
        """The next samples, in order, up to the end of their lease; they count as read at `hand_out`.

        All of them are new to the same fragments.
        """
        for lease_id, each in self._open.items():
            if each.told and each.read < self._stop(each.lease):
                ends = [upto for upto in each.used if upto > each.read]
                stop = min(each.read + most, self._stop(each.lease), *ends)
                return Span(lease_id, each.lease.epoch, each.read, stop)
        return None

    def hand_out(self, span: Span) -> None:
        self._open[span.lease].read = span.stop
        self._unused.append(span)

    def learners(self) -> list[int]:
        """The fragments that the next step may change: those to which all that was handed out is new.

        For the others the step must have no effect; what they lack of its samples is read again.
        """
        return [fragment for fragment in self._fragments if self._is_new(fragment)]

    def _is_new(self, fragment: int) -> bool:
        at: dict[int, int] = {}
        for span in self._unused:
            each = self._open.get(span.lease)
            if each is None or at.get(span.lease, each.used[fragment]) != span.start:
                return False
            at[span.lease] = span.stop
        return True

    def on_step(self) -> None:
        """An optimizer step has used everything handed out so far, in the fragments that `learners` names."""
        learners = self.learners()
        spans, self._unused = self._unused, []
        for span in spans:
            for fragment in learners:
                self._open[span.lease].used[fragment] = span.stop
        if len(learners) < len(self._fragments):
            self._go_back_to_what_is_missing()

    def used(self, fragment: int = 0) -> tuple[Used, ...]:
        """How far the fragment has learned from each lease.

        What is committed already may be named again, which does no harm.  It must be: a trainer that was
        restarted is only told where to go on, not how much of that a commit has acknowledged.
        """
        found = [(i, each.lease.start, each.used[fragment]) for i, each in self._open.items()]
        return tuple(Used(i, used) for i, start, used in found if used > start)

    def ask_anew(self) -> None:
        self._asked = False

    def ask(self, batch: int, lease_samples: int) -> int:
        """How many samples to ask for now, so that about two leases lie ahead; 0 for none."""
        unit = max(batch, lease_samples)
        missing = 2 * unit - sum(
            max(0, self._stop(each.lease) - each.read) for each in self._open.values() if each.told
        )
        if self._asked or missing < unit:
            return 0
        self._asked = True
        return min(missing, _WANT_MOST)
