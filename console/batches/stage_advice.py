"""What the doctor thinks of a machine for a run whose model is cut into stages: which stages fit it, and whether its
line pays.  Pure.

Found by the doctor (facts.py).  The sizes and the seconds come from the run's status, before anybody joins; how good
the line is comes from facts.py.  Must not know how either is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farflung.collectives.pipeline.seats import LINE_UP, BorderTraffic, Traffic, line_rate, traffic_of
from farflung.console.doctor.advice import (
    FAIL,
    OK,
    WARN,
    Advice,
    HeldPart,
    LineToCoordinator,
    MachineFacts,
    rates_of,
    room_here,
    rules_of,
)
from farflung.console.screen.text import Record, known, number, records
from farflung.peer.footprint import FreeMemory, MemoryNeed, MemoryRules, need_of, of_stage
from farflung.protocol.caps import si
from farflung.protocol.manifest import Manifest, PipelineSection
from farflung.protocol.outer_numbers import VALUE_BYTES

CODECS = ("fp32", "bf16", "int8", "int4")  # each about half of the one before
GOOD_SHARE = 0.5  # of a GPU that works: less is a warning
_WORTH_SAYING = 0.1  # what a coarser codec must win


@dataclass(frozen=True)
class StageFacts:
    """One, as the run's status tells it."""

    compute_bytes: float  # parameters, buffers and sums of gradients
    state_bytes: float  # one part of the outer state
    unit_s: float | None  # busy seconds of its usual seat for one microbatch
    seats: int
    gives: BorderTraffic  # to the next one

    def need(self, rules: MemoryRules) -> MemoryNeed:
        """A little more than the script's, which knows what of it are buffers and has the last word."""
        values = self.state_bytes / VALUE_BYTES
        return need_of(of_stage(rules, self.compute_bytes, values, values))


def made(manifest: Manifest, status: Record) -> StagePart | None:
    """None: the run's model is in one piece."""
    return StagePart(manifest.pipeline, stages_in(status)) if manifest.pipeline.stages > 1 else None


class StagePart(HeldPart):
    """One of the stages, which the coordinator chooses among those that fit."""

    def __init__(self, pipeline: PipelineSection, stages: tuple[StageFacts, ...]) -> None:
        """`stages`: empty where nobody has brought the model yet."""
        self._pipeline, self.stages = pipeline, stages

    def held_bytes(self, facts: MachineFacts) -> int | None:
        """Of the largest that fits this machine."""
        fit = self._fitting(facts)
        return int(max(self.stages[number].state_bytes for number in fit)) if fit else None

    def fellows(self, facts: MachineFacts) -> int:
        return max((stage.seats for stage in self.stages), default=0)

    def memory(self, facts: MachineFacts) -> Advice | None:
        if not self.stages:
            return None
        fit, text = memory_words(self.stages, room_here(facts), rules_of(facts))
        todo = "" if fit else "end other programs, or ask for a run with more [pipeline] stages"
        return Advice("memory", OK if fit else FAIL, text, todo)

    def on_line(self, facts: MachineFacts, line: LineToCoordinator) -> list[Advice]:
        """Does it keep a GPU busy?  A microbatch crosses it once for each border of the stage, each way."""
        fit = self._fitting(facts)
        if not fit:
            why = "no stage fits this machine" if self.stages else "the first peer brings the model"
            return [Advice("a stage here", OK, f"unknown yet: {why}")]
        share, text, todo = line_words(self.stages, fit, self._pipeline.codec, rates_of(facts, line))
        if share is None or share >= GOOD_SHARE:
            return [Advice("a stage here", OK, text, todo)]
        todo = todo or "a run whose peers take local steps asks less of a line"
        return [Advice("a stage here", WARN, text, todo)]

    def _fitting(self, facts: MachineFacts) -> list[int]:
        return fitting(self.stages, room_here(facts), rules_of(facts))


def stages_in(status: Record) -> tuple[StageFacts, ...]:
    """Empty: the model is in one piece, or nobody has brought it yet."""
    rows = records(status, "stages")
    if not rows or any(known(row, "state_bytes") is None for row in rows):
        return ()
    return tuple(
        StageFacts(
            compute_bytes=number(row, "compute_bytes"),
            state_bytes=number(row, "state_bytes"),
            unit_s=known(row, "unit_s"),
            seats=int(number(row, "seats")),
            gives=_gives(row.get("gives")),
        )
        for row in rows
    )


def _gives(said: object) -> BorderTraffic:
    told = said if isinstance(said, Mapping) else {}
    return BorderTraffic(int(number(told, "values")), int(number(told, "raw_bytes")))


# ---- memory ------------------------------------------------------------------------------------------------


def fitting(stages: Sequence[StageFacts], room: FreeMemory, rules: MemoryRules) -> list[int]:
    return [number for number, stage in enumerate(stages) if stage.need(rules).within(room)]


def memory_words(stages: Sequence[StageFacts], room: FreeMemory, rules: MemoryRules) -> tuple[list[int], str]:
    """(the stages that fit, a sentence)."""
    fit = fitting(stages, room, rules)
    where = "memory" if room.gpu_bytes is None else "GPU memory"
    here = si(room.host_bytes if room.gpu_bytes is None else room.gpu_bytes, "B")
    if room.gpu_bytes is not None:
        here += f" and {si(room.host_bytes, 'B')} of host memory"
    most = max(fit, key=lambda number: stages[number].compute_bytes, default=None)
    if most is None:
        least = min(stages, key=lambda stage: sum(stage.need(rules)[:2]))
        return (
            [],
            f"no stage fits: the smallest needs {_need(least.need(rules), room)} of {where}, here are {here}",
        )
    needs = _need(stages[most].need(rules), room)
    some = (
        f"all {len(stages)} stages fit"
        if len(fit) == len(stages)
        else f"{_list(fit)} of {len(stages)} stages fit"
    )
    return (
        fit,
        f"{some}: the largest of them needs {needs} of {where} and what its parts keep, here are {here}",
    )


def _need(need: MemoryNeed, room: FreeMemory) -> str:
    if room.gpu_bytes is None:
        return si(need.gpu_bytes + need.host_bytes, "B")
    return f"{si(need.gpu_bytes, 'B')} (and {si(need.host_bytes, 'B')} of the host's)"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (" ..." if len(numbers) > 6 else "")


# ---- the line ----------------------------------------------------------------------------------------------


class Use(NamedTuple):
    """Of a machine in one stage."""

    stage: int
    line_per_s: float  # microbatches that the line carries
    way: str
    gpu_per_s: float  # that the stage's peers compute
    share: float  # of such a GPU that would work here


def use_of(
    stages: Sequence[StageFacts],
    stage: int,
    codec: str,
    up_bytes_per_s: float,
    down_bytes_per_s: float,
) -> Use | None:
    """None: nobody has measured yet how long a microbatch takes."""
    unit_s = stages[stage].unit_s
    if not unit_s:
        return None
    carries, way = line_rate(_traffic(stages, stage, codec), up_bytes_per_s, down_bytes_per_s)
    return Use(stage, carries, way, 1.0 / unit_s, min(1.0, carries * unit_s))


def _traffic(stages: Sequence[StageFacts], stage: int, codec: str) -> Traffic:
    return traffic_of([each.gives for each in stages[:-1]], stage, codec)


def line_words(
    stages: Sequence[StageFacts], fit: Sequence[int], codec: str, rates: tuple[float, float]
) -> tuple[float | None, str, str]:
    """(the least share of a GPU that would work here, a sentence, what to do about it).

    `rates`: bytes a second up and down.  The coordinator chooses the stage, so the sentence is of the one that asks
    most of a line, and of the best one beside it.
    """
    uses = [use for stage in fit if (use := use_of(stages, stage, codec, *rates)) is not None]
    if not uses:
        asks = max(fit, key=lambda stage: _traffic(stages, stage, codec).up_bytes)
        carries, way = line_rate(_traffic(stages, asks, codec), *rates)
        told = f"your {_load(way)} carries {_rate(carries)} microbatches/s of stage {asks} in {codec}"
        return None, f"{told}; nobody has measured yet how long a peer computes one", ""
    worst, best = (pick(uses, key=lambda use: use.share) for pick in (min, max))
    told = (
        f"your {_load(worst.way)} carries {_rate(worst.line_per_s)} microbatches/s of stage {worst.stage}, the stage's "
        f"peers compute {_rate(worst.gpu_per_s)}/s each: {worst.share:.0%} of a GPU here would work"
    )
    if best.share >= worst.share + _WORTH_SAYING:
        told += f" (in stage {best.stage} {best.share:.0%})"
    return worst.share, told, _coarser(stages, worst, codec, rates)


def _coarser(stages: Sequence[StageFacts], now: Use, codec: str, rates: tuple[float, float]) -> str:
    """The finest codec that makes the line no hindrance, else the coarsest; empty: none helps."""
    for name in CODECS[CODECS.index(codec) + 1 :]:
        then = use_of(stages, now.stage, name, *rates)
        enough = then is not None and (then.share >= 0.9 or name == CODECS[-1])
        if then is not None and enough and then.share >= now.share + _WORTH_SAYING:
            return f"{name} would make it {then.share:.0%}: [pipeline] codec of the run's run.toml"
    return ""


def _load(way: str) -> str:
    return "upload" if way == LINE_UP else "download"


def _rate(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s < 100 else si(per_s)
