"""Synchronous batches: begins them, seats trainers, grants microbatches, and says when the round of a batch may open.

One of the parts of the run machine, where `[pipeline] batch` asks for it: the guidance tells it every beat and asks
what to answer, the conductor asks it who must be in a round, the run machine lets it look at every turn.  What is
granted to whom is durable (coordinator/ledger/batch_book.py); which microbatches are counted is what living members
say, and is said again with every beat.  Must not know rounds, digests, or how members come in.  Pure.

Why no microbatch counts twice.  It is granted to one seat at a time.  It is granted again only when that seat is gone
for good, by a durable record, and its number never comes again.  What a seat counts goes into a commit only if the
seat's own signed word in that round names exactly the microbatches that the books and its beats say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from farflung.coordinator.batches.micros import Pace, first_of, to_grant
from farflung.coordinator.ledger.batch_book import Batch, BatchBook, Seat, spans_of_mask
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import (
    BatchBegun,
    GrantedMicros,
    MicroSkipped,
    Record,
    Seated,
    TakenBack,
    Unseated,
)
from farflung.protocol.digests import bits, mask_from_bytes, mask_to_bytes
from farflung.protocol.limits import MEMBERS_PER_ROUND
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import UNKNOWN_LENGTH, BatchBeat, BatchTick, Beat, Sent

# A restarted coordinator waits so many times dead_after_s for those whose seats are in its books.
AWAIT_DEAD = 2.0
PATIENCE_UNITS = 10.0  # a seat may take so many times its usual for one microbatch
PATIENCE_FIRST = 5.0  # and so many times the deadline for its first one, before which a trainer may compile
SEAT_EVERY_S = 1.0  # a peer gets no other seat before: each is two records
NAMED_MOST = 4  # peers in one sentence
NOTHING = BatchBeat(-1, 0, 0, b"", b"", False, 0.0)  # what counts of a member that is not at the run's state


class Worker(Protocol):
    """A living member, as the batches see it."""

    @property
    def peer(self) -> str: ...
    @property
    def process(self) -> bytes: ...
    @property
    def verified(self) -> bool: ...
    @property
    def leaving(self) -> bool: ...
    @property
    def beat(self) -> Beat | None: ...


class Desk(Protocol):
    """What the batches need of the run machine's core."""

    ledger: Ledger
    manifest: Manifest
    now: float
    began_at: float

    @property
    def held(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    def write(self, record: Record) -> None: ...
    def note(self, text: str) -> None: ...
    def name(self, peer: str) -> str: ...


@dataclass(frozen=True)
class House:
    """What the batches ask the other parts of the run machine."""

    living: Callable[[], Mapping[str, Worker]]
    fits: Callable[[str], bool]  # the peer has the run's data
    in_round: Callable[[str], bool]  # a round in flight may use what it counted


@dataclass(frozen=True)
class Share:
    """What a round must have of one member."""

    seat: int
    counted: bytes  # mask


@dataclass
class Heard:
    """What a seat has said."""

    counted: int = 0  # mask
    unit_s: float = 0.0
    since: float = 0.0  # it has counted nothing since then, while it could
    at_all: bool = False  # by this coordinator
    ready: bool = False  # its sums stand frozen

    def forget(self) -> None:
        """What it said of a batch is not said of the next one."""
        self.counted, self.ready = 0, False


@dataclass
class Batches:
    desk: Desk
    house: House
    _heard: dict[int, Heard] = field(default_factory=dict)  # by seat
    # Trainers that held work for long and did nothing.
    _idle: set[tuple[str, int]] = field(default_factory=set)
    # By peer: when it got its last seat, and what it got no gradient out of in this batch, whatever it says later.
    _seated_at: dict[str, float] = field(default_factory=dict)
    _unusable: dict[str, int] = field(default_factory=dict)
    _was: object = None  # what members were told of last

    @property
    def book(self) -> BatchBook:
        return self.desk.ledger.batches

    @property
    def counted(self) -> int:
        """The mask of all that is counted."""
        mask = 0
        for number in self.book.seats:
            mask |= self._of(number).counted
        return mask

    @property
    def complete(self) -> bool:
        """Every microbatch is counted by somebody who is here."""
        batch = self.book.batch
        return batch is not None and not batch.whole & ~self.counted

    def _of(self, number: int) -> Heard:
        return self._heard.setdefault(number, Heard(since=self.desk.now))

    # ---- a beat ------------------------------------------------------------------------------------------

    def on_beat(self, worker: Worker, beat: Beat) -> BatchTick | None:
        """Take it in, and say what the member is to do."""
        batch, said = self.book.batch, beat.batch
        if said is None or batch is None:
            return None
        seat = self.book.seat_of(worker.peer)
        if seat is None and self._may_sit(worker, said):
            number = self.book.last_seat + 1
            self.desk.write(
                Seated(number=number, peer=worker.peer, process=worker.process, trainer=said.trainer)
            )
            seat = self.book.seats[number]
            self._seated_at[worker.peer] = self.desk.now
        if seat is None or not _is_of(seat, worker, said):
            return _tick(batch, None, False)
        self._hear(seat, said if worker.verified else NOTHING, beat)
        if said.want and worker.verified and not worker.leaving and said.version == batch.version:
            self._grant(seat)
        return _tick(batch, seat, self.complete and self._of(seat.number).counted != 0)

    def _may_sit(self, worker: Worker, said: BatchBeat) -> bool:
        rested = self.desk.now - self._seated_at.get(worker.peer, float("-inf")) >= SEAT_EVERY_S
        room = len(self.book.seats) < MEMBERS_PER_ROUND and (worker.peer, said.trainer) not in self._idle
        able = said.want and worker.verified and not worker.leaving and not self.house.in_round(worker.peer)
        return rested and room and able and not self.complete and self.house.fits(worker.peer)

    def _hear(self, seat: Seat, said: BatchBeat, beat: Beat) -> None:
        heard, batch = self._of(seat.number), self.book.batch
        heard.at_all = True
        if batch is None or (said.version, said.seat) != (batch.version, seat.number):
            heard.forget()
            return
        counted = mask_from_bytes(said.counted) & seat.mask
        if counted != heard.counted:
            heard.since = self.desk.now
        heard.counted, heard.unit_s = counted, said.unit_s
        unusable = mask_from_bytes(said.unusable) & batch.whole & seat.mask & ~counted
        self._unusable[seat.peer] = self._unusable.get(seat.peer, 0) | unusable
        heard.ready = any(
            each.ready and each.version == batch.version and each.round_no == 0 for each in beat.fragments
        )

    def _grant(self, seat: Seat) -> None:
        free = self.book.free & ~self._unusable.get(seat.peer, 0)
        living = self.house.living()
        busy = [
            each
            for each in self.book.seats.values()
            if each.number == seat.number
            or (_wants(living.get(each.peer), each) and free & ~self._unusable.get(each.peer, 0))
        ]
        paces = {
            each.number: Pace(self._open(each).bit_count(), self._of(each.number).unit_s) for each in busy
        }
        count = to_grant(seat.number, paces, free.bit_count(), self.desk.manifest.net.heartbeat_s)
        if count and not self._open(seat):
            self._of(seat.number).since = self.desk.now
        for first, stop in first_of(free, count):
            self.desk.write(GrantedMicros(seat=seat.number, first=first, stop=stop))

    def _open(self, seat: Seat) -> int:
        """The mask of what it is to compute and has not."""
        return seat.mask & ~self._of(seat.number).counted

    # ---- every turn --------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Unseat who is gone, begin the batch that is due.  True: members should hear of it at once."""
        self._heard = {n: heard for n, heard in self._heard.items() if n in self.book.seats}
        for seat in list(self.book.seats.values()):
            why = "" if self.house.in_round(seat.peer) else self._why_gone(seat)
            if why:
                self._unseat(seat, why)
        if not self.book.seats:
            self._idle.clear()
        if self.book.batch is None:
            self._maybe_begin()
        elif not self.complete:
            self._look_at_unusable(self.book.batch)
        now = (self.book.batch and self.book.batch.version, self.complete, tuple(self.book.seats))
        news, self._was = now != self._was, now
        return news and self.book.batch is not None  # at a commit nobody has said yet that it holds it

    def _why_gone(self, seat: Seat) -> str:
        desk, worker = self.desk, self.house.living().get(seat.peer)
        if worker is None:
            # After a restart those who hold seats have a while to come back.
            waited = desk.now - desk.began_at >= AWAIT_DEAD * desk.manifest.net.dead_after_s
            return "it is gone" if waited or self._of(seat.number).at_all else ""
        if worker.process != seat.process:
            return "it came back as another process"
        said = worker.beat.batch if worker.beat is not None else None
        if said is not None and said.trainer != seat.trainer:
            return "its trainer was lost, and its sums with it"
        return self._why_idle(seat)

    def _why_idle(self, seat: Seat) -> str:
        heard = self._of(seat.number)
        owes = bool(self._open(seat)) or (self.complete and heard.counted != 0 and not heard.ready)
        if not owes:
            heard.since = self.desk.now
            return ""
        deadline_s = self.desk.manifest.round.deadline_s
        patience_s = (
            max(deadline_s, PATIENCE_UNITS * heard.unit_s) if heard.unit_s else PATIENCE_FIRST * deadline_s
        )
        if self.desk.now - heard.since < patience_s or not self._has_others(seat.peer):
            return ""
        self._idle.add((seat.peer, seat.trainer))
        return f"it holds microbatches and has counted none for {patience_s:.0f} s"

    def _has_others(self, than: str) -> bool:
        """Somebody else could do its share."""
        return any(
            worker.verified
            and worker.beat is not None
            and worker.beat.batch is not None
            and worker.beat.batch.want
            and (peer, worker.beat.batch.trainer) not in self._idle
            for peer, worker in self.house.living().items()
            if peer != than
        )

    def _unseat(self, seat: Seat, why: str) -> None:
        lost = self._of(seat.number).counted.bit_count() if self.book.batch is not None else 0
        self.desk.write(Unseated(number=seat.number, peer=seat.peer, reason=why))
        if lost:
            self.desk.note(
                f"{self.desk.name(seat.peer)} had counted {lost} microbatches, which are computed again: {why}"
            )
        self._heard.pop(seat.number, None)

    def _maybe_begin(self) -> None:
        desk, ledger, manifest = self.desk, self.desk.ledger, self.desk.manifest
        able = [w for w in self.house.living().values() if w.verified and self.house.fits(w.peer)]
        samples = ledger.leases.samples
        known = 0 < samples < UNKNOWN_LENGTH and any(w.beat is not None and w.beat.batch for w in able)
        if desk.finished or desk.held or not known or len(able) < manifest.run.min_peers:
            return
        self._idle.clear()
        self._unusable.clear()
        self._seated_at = {peer: at for peer, at in self._seated_at.items() if peer in self.house.living()}
        due = self.book.next_batch(ledger.version, samples, manifest.pipeline.batch, manifest.pipeline.micro)
        desk.write(
            BatchBegun(version=due.version, epoch=due.epoch, start=due.start, stop=due.stop, count=due.count)
        )
        for heard in self._heard.values():
            heard.forget()

    def _look_at_unusable(self, batch: Batch) -> None:
        """What one trainer gets no gradient out of another one tries; after two, or where there is no other, the batch
        goes without it."""
        for seat in list(self.book.seats.values()):
            for first, stop in spans_of_mask(seat.mask & self._unusable.get(seat.peer, 0)):
                why = f"{self.desk.name(seat.peer)} gets no finite gradient out of it"
                self.desk.write(TakenBack(seat=seat.number, first=first, stop=stop, reason=why))
        tried = 0
        for mask in self._unusable.values():
            tried |= mask
        for micro in bits(tried & self.book.free):
            by = [peer for peer, mask in self._unusable.items() if mask >> micro & 1]
            if self.book.batch is batch and (len(by) >= 2 or not self._has_others(by[0])):
                self._skip(batch, micro, by)

    def _skip(self, batch: Batch, micro: int, peers: list[str]) -> None:
        size = self.desk.manifest.pipeline.micro
        samples = min(batch.start + (micro + 1) * size, batch.stop) - batch.start - micro * size
        why = f"{self._names(peers)} got no finite gradient out of it"
        self.desk.write(MicroSkipped(version=batch.version, micro=micro, samples=samples, reason=why))
        self.desk.note(f"microbatch {micro} of the batch from version {batch.version} is skipped: {why}")
        if not batch.whole:
            self.desk.note("no microbatch of this batch gave a finite gradient: has the model diverged?")

    # ---- the round ---------------------------------------------------------------------------------------

    def shares(self) -> tuple[dict[str, Share], str]:
        """(who must be in the round of this batch, and with what; why it can't open yet)."""
        batch = self.book.batch
        if batch is None:
            return {}, self._why_no_batch()
        if not self.complete:
            done = (self.counted & batch.whole).bit_count()
            return {}, f"waiting for microbatches: {done} of {batch.whole.bit_count()} counted"
        seats = [seat for seat in self.book.seats.values() if self._of(seat.number).counted]
        late = [seat.peer for seat in seats if not self._of(seat.number).ready]
        if late:
            return {}, f"every microbatch is counted: waiting for the sums of {self._names(late)}"
        return {
            seat.peer: Share(seat.number, mask_to_bytes(self._of(seat.number).counted)) for seat in seats
        }, ""

    def _why_no_batch(self) -> str:
        samples, least = self.desk.ledger.leases.samples, self.desk.manifest.run.min_peers
        if not samples:
            return "waiting for a peer that says how long its data set is"
        if samples == UNKNOWN_LENGTH:
            return "the data set is a stream: synchronous batches need one of known length"
        able = sum(w.verified and self.house.fits(w.peer) for w in self.house.living().values())
        return f"a batch begins with at least {least} verified peers, {able} are here"

    def problem(self, share: Share | None, sent: Sent) -> str:
        """Why this word does not go with the share that the round was opened with; empty: it does."""
        if share is None or (sent.seat, sent.counted) == (share.seat, share.counted):
            return ""
        if not sent.hashes:
            return ""  # it has nothing to contribute, and the round says so
        due, has = (mask_from_bytes(raw).bit_count() for raw in (share.counted, sent.counted))
        return f"seat {sent.seat} names {has} microbatches, seat {share.seat} had counted {due}"

    def give_up(self, peers: Iterable[str], why: str) -> None:
        """Their sums did not come into a round, though they live: others compute their share."""
        for peer in peers:
            seat = self.book.seat_of(peer)
            if seat is not None:
                self._unseat(seat, why)

    def told(self) -> dict[str, object]:
        """For the status: how far the batch is."""
        batch = self.book.batch
        counted = self.counted & batch.whole if batch is not None else 0
        return {
            "samples": self.desk.ledger.leases.samples or None,  # of an epoch
            "epoch": batch.epoch if batch is not None else self.book.cursor[0],
            "start": batch.start if batch is not None else self.book.cursor[1],
            "stop": batch.stop if batch is not None else None,
            "microbatches": batch.whole.bit_count() if batch is not None else None,
            "counted": counted.bit_count(),
            "skipped_samples": self.book.skipped_samples,  # ever: nobody got a finite gradient out of them
        }

    def share_of(self, peer: str) -> dict[str, object]:
        """Of one member, for the status; nothing where it has no seat."""
        seat = self.book.seat_of(peer)
        if seat is None:
            return {}
        heard = self._of(seat.number)
        return {
            "seat": seat.number,
            "granted": seat.mask.bit_count(),
            "counted": heard.counted.bit_count(),
            "unit_s": round(heard.unit_s, 4) or None,
        }

    def _names(self, peers: list[str]) -> str:
        named = ", ".join(map(self.desk.name, peers[:NAMED_MOST]))
        return named if len(peers) <= NAMED_MOST else f"{named} and {len(peers) - NAMED_MOST} more"


def _is_of(seat: Seat, worker: Worker, said: BatchBeat) -> bool:
    """The seat is this very trainer's."""
    return (seat.process, seat.trainer) == (worker.process, said.trainer)


def _wants(worker: Worker | None, seat: Seat) -> bool:
    said = worker.beat.batch if worker is not None and worker.beat is not None else None
    return (
        worker is not None
        and said is not None
        and said.want
        and not worker.leaving
        and _is_of(seat, worker, said)
    )


def _tick(batch: Batch, seat: Seat | None, freeze: bool) -> BatchTick:
    return BatchTick(
        version=batch.version,
        epoch=batch.epoch,
        start=batch.start,
        stop=batch.stop,
        count=batch.count,
        seat=seat.number if seat is not None else 0,
        granted=tuple(seat.granted) if seat is not None else (),
        freeze=freeze,
    )
