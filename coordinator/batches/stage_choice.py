"""Which stage of the model a newcomer gets, of those that it could hold.  Pure.

Called by the run machine with every hello of a run in stages.  Must not know members, seats or schemas: it is given who
holds each stage, and how long members need for a microbatch there.  No two newcomers jump into one gap: one decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from farflung.protocol.manifest_sections import PipelineSection
from farflung.protocol.messages import Hello


@dataclass(frozen=True)
class StageLoad:
    """A stage as it is held now."""

    members: int  # that are here
    cost: float  # of one microbatch, in any unit that all stages have
    reached: bool = True  # some of them can be dialled


def loads_of(
    held: Sequence[int], reached: Collection[int], unit_s: Mapping[int, Sequence[float]], stages: int
) -> list[StageLoad]:
    """`held`: the stage of each member that is here; `reached`: stages in which somebody can be dialled; `unit_s`: by
    stage, what seats measured."""
    costs = enumerate(_costs(unit_s, stages))
    return [StageLoad(held.count(stage), cost, stage in reached) for stage, cost in costs]


def _costs(unit_s: Mapping[int, Sequence[float]], stages: int) -> list[float]:
    """Of one microbatch in each stage, by what members measured; alike, while that is not known of all stages."""
    measured = [[each for each in unit_s.get(stage, ()) if each > 0] for stage in range(stages)]
    return [median(each) for each in measured] if all(measured) else [1.0] * stages


def chosen(
    offered: Sequence[int], on_disk: bool, loads: Sequence[StageLoad], least: int, dialable: bool = True
) -> int:
    """Of the stages `offered`; `on_disk`: the state of the first one is with the newcomer; `least`: members that each
    stage needs; `dialable`: it says that others can dial it.

    A stage that nobody holds, or too few, comes first: without it no batch begins.  Then whoever has a state need not
    fetch another.  Then a stage whose state a single member has: it must not be lost with that one.  Else the stage
    with the fewest members for what it costs: the run is as fast as its slowest stage.
    Peers that nobody can dial can't talk to each other: where there are only such, no other one comes if it may go
    elsewhere, and the first one that can be dialled does.
    """
    alone = [stage for stage in offered if loads[stage].members and not loads[stage].reached]
    if not dialable:
        others = [stage for stage in offered if stage not in alone] or offered
        on_disk, offered = on_disk and others[0] == offered[0], others
    short = [stage for stage in offered if loads[stage].members < least]
    if short:
        fewest = min(loads[stage].members for stage in short)
        emptiest = [stage for stage in short if loads[stage].members == fewest]
        return offered[0] if on_disk and offered[0] in emptiest else min(emptiest)
    if dialable and alone:
        return offered[0] if on_disk and offered[0] in alone else min(alone)
    if on_disk:
        return offered[0]
    singles = [stage for stage in offered if loads[stage].members == 1]
    return min(singles or offered, key=lambda stage: (loads[stage].members / loads[stage].cost, stage))


def held_by_newcomer(
    pipeline: PipelineSection,
    hello: Hello,
    loads: Sequence[StageLoad],
    newest: int,
) -> tuple[int, ...]:
    """Which fragment it holds from now on: one stage of those that it offers.

    `newest`: the newest version of its first stage that somebody here holds.  Whoever brings a newer one brings it to
    that stage, or the run would go back behind it.
    """
    if hello.version > newest:
        return hello.fragments[:1]
    on_disk, least = hello.version >= 0, pipeline.min_per_stage
    return (chosen(hello.fragments, on_disk, loads, least, bool(hello.address)),)
