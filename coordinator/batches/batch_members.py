"""What the batches see of the other parts of the run machine, and what they keep of a seat's words.  Pure.

Read by the modules of this room, and by the run machine, which fills `BatchMembers` in.  Interfaces and data; what
follows from them is decided in `batches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from farflung.coordinator.batches.batch_book import BookedSeat
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import Record
from farflung.protocol.digests import bits
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import BatchBeat, Beat

NAMED_MOST = 4  # peers in one sentence
AWAIT_DEAD = 2.0  # times dead_after_s


class BatchWorker(Protocol):
    """A living member, as the batches see it."""

    @property
    def peer(self) -> str: ...
    @property
    def process(self) -> bytes: ...
    @property
    def stage(self) -> int: ...
    @property
    def verified(self) -> bool: ...
    @property
    def leaving(self) -> bool: ...
    @property
    def dialable(self) -> bool: ...
    @property
    def fits(self) -> tuple[int, ...]: ...  # the stages that it could hold
    @property
    def beat(self) -> Beat | None: ...


class BatchDesk(Protocol):
    """What the batches need of the run machine's core."""

    ledger: Ledger
    now: float
    began_at: float

    @property
    def manifest(self) -> Manifest: ...  # as it holds now
    @property
    def clock_s(self) -> float: ...  # the run's own
    @property
    def held(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    def write(self, record: Record) -> None: ...
    def note(self, text: str) -> None: ...
    def name(self, peer: str) -> str: ...
    def strike(self, peer: str, reason: str) -> None: ...


@dataclass(frozen=True)
class BatchMembers:
    """What the batches ask the other parts of the run machine."""

    living: Callable[[], Mapping[str, BatchWorker]]
    fits: Callable[[str], bool]  # the peer has the run's data
    in_round: Callable[[str], bool]  # a round in flight may use what it counted
    flying: Callable[[int], bool]  # a round of this stage is in flight
    abort: Callable[[int, str], None]  # that round: what it merges has no part in the batch any more
    saved_by: Callable[[int], Collection[str]] = lambda stage: ()  # who wrote a checkpoint of this stage
    # These two have a way, though neither can be dialled: past their routers, or at a relay.
    meet: Callable[[str, str], bool] = lambda one, other: False


@dataclass
class SeatWord:
    """What a seat has said."""

    counted: int = 0  # mask
    unit_s: float = 0.0
    since: float = 0.0  # it has counted nothing since then, while it could
    at_all: bool = False  # by this coordinator
    ready: bool = False  # its sums stand frozen
    holds: int = 0  # microbatches that wait for its trainer
    made: int = 0  # works that its trainer has made

    def forget(self) -> None:
        """What it said of a batch is not said of the next one."""
        self.counted, self.ready, self.holds, self.made = 0, False, 0, 0


@dataclass
class UnusableMicros:
    """Microbatches without a finite gradient: who tried which.

    What one trainer gets no gradient out of another one tries; after two, or where there is no other, the batch goes
    without it.  Of a model in one piece a grant changes hands.  In a stage of several nobody can take a microbatch from
    a living seat (collectives/pipeline/seats.py), so the seat that complains is given up for this batch.
    """

    # (stage, peer) -> mask, whatever it says later.
    _said: dict[tuple[int, str], int] = field(default_factory=dict)

    def hear(self, stage: int, peer: str, mask: int) -> None:
        if mask:
            self._said[stage, peer] = self.of(stage, peer) | mask

    def of(self, stage: int, peer: str) -> int:
        return self._said.get((stage, peer), 0)

    def forget(self) -> None:
        """Another batch begins."""
        self._said.clear()

    def who(self, stage: int, micro: int) -> list[str]:
        return [peer for (at, peer), mask in self._said.items() if at == stage and mask >> micro & 1]

    def tried(self) -> list[tuple[int, int]]:
        """(stage, microbatch) of all that somebody got no gradient out of."""
        masks: dict[int, int] = {}
        for (stage, _), mask in self._said.items():
            masks[stage] = masks.get(stage, 0) | mask
        return [(stage, micro) for stage, mask in sorted(masks.items()) for micro in bits(mask)]

    def hopeless(self, has_others: Callable[[int, str], bool]) -> list[tuple[int, int, list[str]]]:
        """(stage, microbatch, who tried it) that nobody is left to try."""
        found = []
        for stage, micro in self.tried():
            by = self.who(stage, micro)
            if len(by) >= 2 or not has_others(stage, by[0]):
                found.append((stage, micro, by))
        return found


def are_coming_back(desk: BatchDesk) -> bool:
    """A restarted coordinator waits so long for those whose seats are in its books."""
    return desk.now - desk.began_at < AWAIT_DEAD * desk.manifest.net.dead_after_s


def names_of(desk: BatchDesk, peers: Sequence[str]) -> str:
    named = ", ".join(map(desk.name, peers[:NAMED_MOST]))
    return named if len(peers) <= NAMED_MOST else f"{named} and {len(peers) - NAMED_MOST} more"


def is_of(seat: BookedSeat, worker: BatchWorker, said: BatchBeat) -> bool:
    """The seat is this very trainer's."""
    return (seat.process, seat.trainer) == (worker.process, said.trainer)


def wants(worker: BatchWorker | None, seat: BookedSeat) -> bool:
    said = worker.beat.batch if worker is not None and worker.beat is not None else None
    return (
        worker is not None
        and said is not None
        and said.want
        and not worker.leaving
        and is_of(seat, worker, said)
    )
