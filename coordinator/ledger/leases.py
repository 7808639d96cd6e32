"""Data leases: every sample of an epoch is handed out once and acknowledged by the commits that used it (P7).

Held by the ledger; changed only through journal records, so a restart restores it exactly.  Pure.
A lease is a range [start, stop) of an epoch's order.  A holder whose own data ends within it keeps the part before.
A sample's gradient goes into every fragment, and each fragment commits for itself: `uptos` is how far each has
learned from the range.  A sample counts as committed when the last fragment has learned from it.  What a lost holder
did not get committed goes back to the pool with its `uptos`, and is granted first: the next holder lets only those
fragments learn that have not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from farflung.protocol.messages import UNKNOWN_LENGTH, Lease
from farflung.protocol.round_words import Used

Uptos = tuple[int, ...]  # of each fragment
Missing = tuple[int, int, int]  # (epoch, start, stop)


@dataclass(frozen=True)
class Range:
    """Samples [start, stop) of an epoch's order; a fragment has learned from those before its `upto`."""

    epoch: int
    start: int
    stop: int
    uptos: Uptos

    def cut(self, start: int, stop: int) -> Range:
        return Range(self.epoch, start, stop, tuple(min(max(upto, start), stop) for upto in self.uptos))


@dataclass
class HeldLease:
    peer: str
    epoch: int
    start: int
    stop: int
    uptos: Uptos

    @property
    def upto(self) -> int:
        """Every fragment has learned from the samples before it."""
        return min(self.uptos)

    @property
    def as_range(self) -> Range:
        return Range(self.epoch, self.start, self.stop, self.uptos)

    def as_lease(self, lease_id: int) -> Lease:
        return Lease.at(lease_id, self.epoch, self.start, self.stop, self.uptos)


@dataclass(frozen=True)
class CoveredRange:
    """What one fragment had not learned from when it made some version: these ranges, and all from the cursor on."""

    epoch: int
    cursor: int
    missing: tuple[Missing, ...]


@dataclass
class Leases:
    """`cursor` is the next sample of `epoch` that was never granted; `returned` holds ranges to grant again."""

    lease_samples: int
    samples: int = 0  # of an epoch; 0 until the first peer names it, UNKNOWN_LENGTH until a stream has ended
    fragments: int = 1
    epoch: int = 0
    cursor: int = 0
    next_id: int = 1
    held: dict[int, HeldLease] = field(default_factory=dict)
    returned: list[Range] = field(default_factory=list)
    returned_samples: int = 0  # ever
    data: bytes = b""  # the fingerprint of the run's data set, where it has one
    stream: bool = False  # its length was unknown at first
    settled: bool = False  # something that was leased is committed: this data set is the run's for good
    before_end: int = 0  # the cursor when the end of a stream was found; it may have been beyond
    # Of `held`: asked for at every beat.
    _by_peer: dict[str, dict[int, HeldLease]] = field(default_factory=dict)

    def after_unpacking(self) -> None:
        self._by_peer = {}
        # Of a ledger that was folded before these were known.
        self.stream = self.stream or self.samples == UNKNOWN_LENGTH
        self.settled = self.settled or self.committed_samples > 0
        for lease_id, held in self.held.items():
            self._by_peer.setdefault(held.peer, {})[lease_id] = held

    # ---- the accounts -----------------------------------------------------------------------------------

    @property
    def granted_samples(self) -> int:
        """Of all epochs, each counted once."""
        return (self.epoch * self.samples if self.epoch else 0) + self.cursor + self.beyond_end

    @property
    def beyond_end(self) -> int:
        """Granted of a stream before its end was known.  Who holds such samples finds nothing; they wait for ever."""
        return max(0, self.before_end - self.samples)

    @property
    def held_samples(self) -> int:
        """Out with peers, and not committed yet."""
        return sum(held.stop - held.upto for held in self.held.values())

    @property
    def waiting_samples(self) -> int:
        """Handed back, and not granted again yet."""
        return sum(each.stop - each.start for each in self.returned)

    @property
    def committed_samples(self) -> int:
        return self.granted_samples - self.held_samples - self.waiting_samples

    @property
    def leased_samples(self) -> int:
        """Ever leased; a sample that was handed back and leased again counts each time."""
        return self.committed_samples + self.held_samples + self.returned_samples

    # ---- decisions: what to write down ---------------------------------------------------------------

    def next_range(self, wanted: int, ends: int = UNKNOWN_LENGTH) -> Range | None:
        """The next lease to grant; large enough that a peer needs only a few at a time.

        `ends`: how many samples the peer has.  None: it has none of those that are to be leased now.
        """
        size = max(wanted, self.lease_samples)
        ends = min(ends, self.samples)
        for each in self.returned:
            if each.start < ends:
                return each.cut(each.start, min(each.start + size, each.stop, ends))
        epoch, start = (self.epoch + 1, 0) if self.cursor >= self.samples else (self.epoch, self.cursor)
        if start >= ends:
            return None
        return Range(epoch, start, min(start + size, self.samples, ends), (start,) * self.fragments)

    def reaching_beyond(self, peer: str, samples: int) -> list[int]:
        """Leases of a peer that has no more than so many samples, and can't read them to their ends."""
        return [lease_id for lease_id, held in self._by_peer.get(peer, {}).items() if held.stop > samples]

    def of(self, peer: str) -> dict[int, HeldLease]:
        return dict(self._by_peer.get(peer, {}))

    def foreign(self, peer: str, lease_ids: Iterable[int]) -> tuple[int, ...]:
        """Those ids that the peer believes to hold and does not."""
        return tuple(i for i in lease_ids if i not in self.held or self.held[i].peer != peer)

    def newly_used(self, used: Iterable[Used], fragment: int = 0) -> int:
        """Samples that the fragment has not learned from before, of leases in which there is no `problem`."""
        return sum(item.upto - self.held[item.lease].uptos[fragment] for item in used)

    def problem(self, peer: str, used: Iterable[Used], fragment: int = 0) -> str | None:
        """Why these samples can't be acknowledged for this peer, or None."""
        seen: set[int] = set()
        for item in used:
            held = self.held.get(item.lease)
            if item.lease in seen:
                return f"it names lease {item.lease} twice"
            seen.add(item.lease)
            if held is None or held.peer != peer:
                return f"it used lease {item.lease}, which is not its own any more"
            upto = held.uptos[fragment]
            if not upto <= item.upto <= held.stop:
                return f"it says it used lease {item.lease} up to {item.upto}, outside {upto}..{held.stop}"
        return None

    # ---- changes: called by the ledger only, for a record that is written ------------------------------

    def grant(self, peer: str, lease: Lease) -> None:
        again = next((at for at, each in enumerate(self.returned) if _begins_at(each, lease)), None)
        if again is not None:
            first = self.returned[again]
            self.returned[again : again + 1] = (
                [first.cut(lease.stop, first.stop)] if lease.stop < first.stop else []
            )
        else:
            self.epoch, self.cursor = lease.epoch, lease.stop
        held = HeldLease(peer, lease.epoch, lease.start, lease.stop, lease.reached(self.fragments))
        self.held[lease.lease] = self._by_peer.setdefault(peer, {})[lease.lease] = held
        self.next_id = lease.lease + 1

    def acknowledge(self, used: Iterable[Used], fragment: int = 0) -> None:
        for item in used:
            held = self.held.get(item.lease)
            if held is None:
                continue  # named once more; the last fragment has learned from all of it since then
            self.settled = self.settled or item.upto > held.start
            held.uptos = (*held.uptos[:fragment], item.upto, *held.uptos[fragment + 1 :])
            if held.upto == held.stop:
                self._take(item.lease)

    def release(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            held = self._take(lease_id)
            self._give_back(held.as_range.cut(held.upto, held.stop))

    def cut_short(self, lease_ids: Iterable[int], samples: int) -> None:
        """Their holder has no more than so many samples: what lies beyond is for others."""
        for lease_id in lease_ids:
            held = self.held[lease_id]
            whole = held.as_range
            stop = min(max(held.start, samples), held.stop)
            rest = whole.cut(max(stop, held.upto), held.stop)
            held.stop, held.uptos = stop, whole.cut(held.start, stop).uptos
            if held.upto == stop:
                self._take(lease_id)
            self._give_back(rest)

    def _give_back(self, rest: Range) -> None:
        if rest.start < rest.stop:
            self.returned.append(rest)
            self.returned_samples += rest.stop - rest.start

    def _take(self, lease_id: int) -> HeldLease:
        held = self.held.pop(lease_id)
        of_peer = self._by_peer[held.peer]
        del of_peer[lease_id]
        if not of_peer:
            del self._by_peer[held.peer]
        return held

    def end_stream(self, samples: int) -> None:
        """The data set turned out to have so many samples.  Leases beyond stay with their holders, who find nothing
        there and say so."""
        self.samples, self.before_end = samples, max(self.before_end, self.cursor)
        self.cursor = min(self.cursor, samples)

    # ---- going back -------------------------------------------------------------------------------------

    def reach(self, fragment: int) -> CoveredRange:
        """What the fragment has learned from by now."""
        ranges: list[HeldLease | Range] = [*self.held.values(), *self.returned]
        missing = [(r.epoch, r.uptos[fragment], r.stop) for r in ranges if r.uptos[fragment] < r.stop]
        granted = self.cursor if self.epoch else max(self.cursor, self.before_end)
        return CoveredRange(self.epoch, granted, tuple(missing))

    def held_by_nobody(self) -> Leases:
        """Another book, in which all that is out with peers waits to be leased again."""
        other = replace(self, held={}, _by_peer={})
        other.go_back([self.reach(fragment) for fragment in range(self.fragments)])
        return other

    def go_back(self, reaches: Sequence[CoveredRange]) -> None:
        """Each fragment has learned again from no more than its `reach` says: nobody holds a lease any more."""
        before = self.waiting_samples
        self.held.clear()
        self._by_peer.clear()
        self.returned = _ranges([(*reach.missing, *self._granted_since(reach)) for reach in reaches])
        self.returned_samples += self.waiting_samples - before

    def _granted_since(self, reach: CoveredRange) -> list[Missing]:
        found = []
        for epoch in range(reach.epoch, self.epoch + 1):
            start = reach.cursor if epoch == reach.epoch else 0
            stop = self.cursor if epoch == self.epoch else self.samples
            if epoch == 0:  # the only epoch of a stream whose end was not known
                stop = max(stop, self.before_end)
            if start < stop:
                found.append((epoch, start, stop))
        return found


def _begins_at(each: Range, lease: Lease) -> bool:
    return (each.epoch, each.start) == (lease.epoch, lease.start)


def _ranges(missing: Sequence[Sequence[Missing]]) -> list[Range]:
    """What each fragment lacks, as ranges within which the same fragments lack every sample."""
    found: list[Range] = []
    # By epoch and edge: of each fragment, how many of its spans begin there, less those that end.
    edges: defaultdict[int, defaultdict[int, list[int]]]
    edges = defaultdict(lambda: defaultdict(lambda: [0] * len(missing)))
    for fragment, lacks in enumerate(missing):
        for epoch, start, stop in lacks:
            edges[epoch][start][fragment] += 1
            edges[epoch][stop][fragment] -= 1
    for epoch in sorted(edges):
        depths, pieces = [0] * len(missing), []
        for first, last in pairwise(sorted(edges[epoch])):
            depths = [sum(each) for each in zip(depths, edges[epoch][first], strict=True)]
            pieces.append((first, last, tuple(depth > 0 for depth in depths)))
        for lacking, group in groupby(pieces, key=lambda piece: piece[2]):
            joined = list(group)
            start, stop = joined[0][0], joined[-1][1]
            if any(lacking):
                found.append(Range(epoch, start, stop, tuple(start if lacks else stop for lacks in lacking)))
    return found
