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
        there = (each for each in workers.values() if each.stage == worker.stage)
        return not served or any(each.dialable and each.verified for each in there)

    def too_many(
        self, seats: Iterable[Seat], workers: Mapping[str, Worker], now: float, patience_s: float
    ) -> list[Seat]:
        """Seats that can have no part in a round, the stage's oldest one excepted, whoever comes back within the
        patience."""
        sitting: dict[int, list[Seat]] = {}
        for seat in seats:
            sitting.setdefault(seat.stage, []).append(seat)
        reached = _reached(workers)
        without = [stage for stage in sitting if stage not in reached]
        self._without_since = {stage: self._without_since.get(stage, now) for stage in without}
        return [
            seat
            for stage, since in self._without_since.items()
            if now - since >= patience_s
            for seat in sorted(sitting[stage], key=lambda seat: seat.number)[1:]
        ]

    def why_no_way(self, stages: int, workers: Mapping[str, Worker]) -> str:
        """Neighbouring stages of which nobody can be dialled, in words; empty: there is a way."""
        held, reached = {worker.stage for worker in workers.values()}, _reached(workers)
        shut = [stage for stage in range(stages) if stage in held and stage not in reached]
        for stage in shut:
            if stage + 1 in shut:
                return (
                    f"nobody of stages {stage} and {stage + 1} can be dialled, so that they can't reach each other: "
                    "one peer there needs an open port (farflung doctor)"
                )
        return ""


def _reached(workers: Mapping[str, Worker]) -> set[int]:
    """In one pass, or a thousand workers in 32 stages would be looked at 32 times."""
    return {worker.stage for worker in workers.values() if worker.dialable and worker.verified}
