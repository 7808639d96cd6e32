"""Stages in which nobody can be dialled: how many seats such a stage may have.  Pure.

Asked by `batches.py`.  Two peers behind routers that let nobody in can't talk to each other, so they can make no round
together: somebody of their stage has to be there whom both of them dial.  While there is nobody, one seat has the
stage for itself, since a round of one needs no line; else a batch that is counted could never be summed up.  Must not
know how anybody was found to be dialable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from farflung.coordinator.batches.words import Worker
from farflung.coordinator.ledger.batch_book import Seat

WHY_GIVEN_UP = "nobody of its stage can be dialled, and an older seat has the stage for itself"


@dataclass
class Reach:
    """Which stages nobody can dial into, and since when: a dialable peer that reconnects is soon back."""

    _without_since: dict[int, float] = field(default_factory=dict)  # by stage: nobody there can be dialled

    def may_sit(self, worker: Worker, served: bool, workers: Mapping[str, Worker]) -> bool:
        """`served`: somebody else has a seat in its stage."""
        return not served or _is_reached(worker.stage, workers)

    def too_many(
        self, seats: Iterable[Seat], workers: Mapping[str, Worker], now: float, patience_s: float
    ) -> list[Seat]:
        """Seats that can have no part in a round, the stage's oldest one excepted, whoever comes back within the
        patience."""
        sitting: dict[int, list[Seat]] = {}
        for seat in seats:
            sitting.setdefault(seat.stage, []).append(seat)
        without = [stage for stage in sitting if not _is_reached(stage, workers)]
        self._without_since = {stage: self._without_since.get(stage, now) for stage in without}
        return [
            seat
            for stage, since in self._without_since.items()
            if now - since >= patience_s
            for seat in sorted(sitting[stage], key=lambda seat: seat.number)[1:]
        ]

    def why_no_way(self, stages: int, workers: Mapping[str, Worker]) -> str:
        """Neighbouring stages of which nobody can be dialled, in words; empty: there is a way."""
        held = {worker.stage for worker in workers.values()}
        shut = [stage for stage in range(stages) if stage in held and not _is_reached(stage, workers)]
        for stage in shut:
            if stage + 1 in shut:
                return (
                    f"nobody of stages {stage} and {stage + 1} can be dialled, so that they can't reach each other: "
                    "one peer there needs an open port (farflung doctor)"
                )
        return ""


def _is_reached(stage: int, workers: Mapping[str, Worker]) -> bool:
    return any(worker.dialable and worker.verified for worker in workers.values() if worker.stage == stage)
