"""The stages of a model in a run that was: who sat there when, what each counted, who was lost.  Pure.

Called by the audit and by the plots, with the coordinator's records in their order.  Must not know how either looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from farflung.protocol.digests import mask_from_bytes

Event = dict[str, Any]


@dataclass
class StageStory:
    """`stairs`: (when, how many seats it had from then on); `micros`: that it counted in commits."""

    number: int
    stairs: list[tuple[float, int]] = field(default_factory=list)
    commits: int = 0
    micros: int = 0
    given_up: int = 0  # seats, while a batch was open

    @property
    def most(self) -> int:
        return max((count for _, count in self.stairs), default=0)

    def line(self) -> str:
        seats = (
            f"{self.most} seat{'s' if self.most != 1 else ''} at most, {self.given_up} given up in a batch"
        )
        return f"stage {self.number}: {seats}; {self.micros} microbatches in {self.commits} commits"


def stage_stories(records: Iterable[tuple[float, Event]]) -> list[StageStory]:
    """`records`: (when, what), commits of all stages at once told as one of each.  Empty: it has one stage."""
    found: dict[int, StageStory] = {}
    seats: dict[int, int] = {}  # number -> stage
    open_batch = False
    for at, event in records:
        match event.get("event"):
            case "batch":
                open_batch = True
            case "seated":
                stage = int(event.get("stage") or 0)
                seats[int(event["number"])] = stage
                _step(found, seats, stage, at)
            case "unseated" if (number := int(event["number"])) in seats:
                stage = seats.pop(number)
                _step(found, seats, stage, at).given_up += open_batch
            case "committed" if "of_batch" in event:
                open_batch = False
                told = found.setdefault(int(event["fragment"]), StageStory(int(event["fragment"])))
                told.commits += 1
                counted = (event.get("counted") or {}).values()
                told.micros += sum(mask_from_bytes(bytes.fromhex(raw)).bit_count() for raw in counted)
    return [found[number] for number in sorted(found)] if len(found) > 1 else []


def _step(found: dict[int, StageStory], seats: dict[int, int], stage: int, at: float) -> StageStory:
    told = found.setdefault(stage, StageStory(stage))
    told.stairs.append((at, list(seats.values()).count(stage)))
    return told
