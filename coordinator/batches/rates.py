"""How many microbatches a second a peer does in a stage, and all seats of it together.  Pure.

Called by whoever moves peers between stages (rebalancing.py) and by the batches, which tell the wiring of each seat's
share. Must not know seats, records or members: it is given what each peer says of itself.

A peer's rate is one over the slowest of three: computing a microbatch, sending what it gives, receiving what it gets.
What members say of themselves is believed within bounds of what is usual, so that a liar gains nothing by it: nobody
counts for more than `BELIEVED` times the median of its stage, and no line for more than so many times the usual one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from farflung.collectives.pipeline.stage_rates import Traffic, borders_of, seat_pace, traffic_of
from farflung.coordinator.batches.grants import BELIEVED, UNIT_LEAST_S, believed_unit_s
from farflung.protocol.manifest_sections import PipelineSection
from farflung.protocol.model_schema import ModelSchema

SHARE_STEADY = 1.25  # the wiring is told of new shares when one differs by this factor


@dataclass(frozen=True)
class Mate:
    """One peer in its stage, as it describes itself."""

    peer: str
    stage: int
    unit_s: float = 0.0  # busy seconds for one microbatch; 0: not known
    up_bytes_per_s: float = 0.0  # 0: not known
    down_bytes_per_s: float = 0.0


def traffic_of_stages(model: ModelSchema | None, pipeline: PipelineSection) -> list[Traffic]:
    """Of one seat of each stage, for one microbatch."""
    borders = borders_of(model, pipeline.micro) if model is not None and model.stages else ()
    codecs = pipeline.codec, pipeline.gradient_codec
    return [traffic_of(borders, stage, *codecs) for stage in range(pipeline.stages)]


class SeatRates:
    def __init__(self, crew: Iterable[Mate], traffic: Sequence[Traffic]) -> None:
        """`crew`: of all stages; `traffic`: of each."""
        self.crew, self._traffic = tuple(crew), traffic
        units = [
            [believed_unit_s(mate.unit_s) for mate in self.of_stage(n) if mate.unit_s > 0]
            for n in range(self.stages)
        ]
        # Before each stage that is served has measured something, peers and stages count alike.
        self.measured = all(units[mate.stage] for mate in self.crew)
        self._costs = [median(each) if each and self.measured else 1.0 for each in units]
        self._up, self._down = (
            _most(getattr(mate, name) for mate in self.crew)
            for name in ("up_bytes_per_s", "down_bytes_per_s")
        )
        self.sums = [sum(self.of(mate, n) for mate in self.of_stage(n)) for n in range(self.stages)]

    @property
    def stages(self) -> int:
        return len(self._traffic)

    def of_stage(self, stage: int) -> list[Mate]:
        return [mate for mate in self.crew if mate.stage == stage]

    def of(self, mate: Mate, stage: int) -> float:
        """That it has, or would have, in this stage."""
        here = self._costs[mate.stage]
        unit_s = mate.unit_s if self.measured and mate.unit_s > 0 else here
        unit_s = max(unit_s, here / BELIEVED, UNIT_LEAST_S) / here * self._costs[stage]
        if not self.measured:  # a unit is no second then
            return 1.0 / unit_s
        up, down = min(mate.up_bytes_per_s, self._up), min(mate.down_bytes_per_s, self._down)
        return seat_pace(unit_s, self._traffic[stage], up, down).micros_per_s or 0.0

    def after(self, mate: Mate, to: int) -> float:
        """The slowest stage's rate once it has moved there."""
        moved = list(self.sums)
        moved[mate.stage] -= self.of(mate, mate.stage)
        moved[to] += self.of(mate, to)
        return min(moved)

    def shares(self) -> dict[str, float]:
        """By peer: of the microbatches of its stage, as the wiring is to spread them; 1 is a usual one's."""
        found: dict[str, float] = {}
        for stage in range(self.stages):
            rates = {mate.peer: self.of(mate, stage) for mate in self.of_stage(stage)}
            usual = median(rates.values()) if rates else 1.0
            for peer, rate in rates.items():
                found[peer] = round(min(BELIEVED, max(1 / BELIEVED, rate / usual)), 3)
        return found


def news_of_shares(told: Mapping[str, float], due: Mapping[str, float]) -> dict[str, float]:
    """All of `due`, if one of them is worth a table; nothing while what was told is near enough."""
    far = any(
        not 1 / SHARE_STEADY < share / told[peer] < SHARE_STEADY
        for peer, share in due.items()
        if peer in told
    )
    return {peer: share for peer, share in due.items() if peer in told} if far else {}


def _most(rates: Iterable[float]) -> float:
    """That a line is believed to carry."""
    known = [rate for rate in rates if rate > 0]
    return BELIEVED * median(known) if known else 0.0
