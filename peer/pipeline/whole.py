"""A whole model in stages, as every peer can say it without memory for it: schema, layouts, borders.

Owns: the schema with stages, where a stage's values lie in it, what passes each border; every refusal that needs a cut.
Called by: `farflung.pipeline`, before the run hears of this peer, and again when this peer's stage is built.
Must not know: which stage this peer will hold, values, sockets.

Each stage begins a chunk of its own:  [ parameters | padding | floating buffers | padding ]  of each.  Chunks are
numbered through the whole model, so a stage is a fragment of it.  All of this follows from the parts as they are on
the meta device, and from the manifest: peers that hold different stages say the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from torch import Tensor

from farflung.collectives.pipeline.crossing import Border, border_after
from farflung.compression.codec import codec_named
from farflung.peer.pipeline.parts import PartFacts, Signature, Stage
from farflung.peer.trainer.layout import ModelLayout, refuse_no_matrix, refuse_unsendable
from farflung.peer.trainer.model_tensors import Survey, dtype_name
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec

# ---- cuts --------------------------------------------------------------------------------------------------
# Where a list of parts is cut into stages.
#
# Owns: the cuts with the least largest stage, the check of cuts given by hand, what stages need and borders
# carry. Called by: whoever fixes the cuts of a run, and the benchmark of pipelines. Must not know: how the
# facts about parts were found, the network.
#
# A stage's work is its forward pass four times: once on the way there, once more on the way back, and a
# backward pass, which costs twice a forward one. The last stage goes back at once and saves one of the four.

_PASSES, _PASSES_OF_THE_LAST = 4, 3


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Parts [first, stop), what they need of a device, and what passes to the next stage (nothing after the last)."""

    first: int
    stop: int
    work_flops: int  # for one sample
    memory_bytes: int  # parameters, buffers and sums; activations come on top
    gives: tuple[Signature, ...]

    @property
    def border_bytes(self) -> int:
        """For one sample, uncompressed, one way."""
        return sum(signature.bytes for signature in self.gives)


def plan_stages(
    facts: Sequence[PartFacts], stages: int, cuts: Sequence[int] | Literal["auto"]
) -> list[StagePlan]:
    """`cuts`: the numbers of the parts at which stages 1, 2, ... begin."""
    if stages > len(facts):
        raise UserError(
            f"[pipeline] stages is {stages}, and the model has {len(facts)} parts: each stage holds at least one; take "
            f"at most {len(facts)} stages, or cut the model into more parts"
        )
    chosen = best_cuts(facts, stages) if cuts == "auto" else checked_cuts(cuts, stages, len(facts))
    borders = [0, *chosen, len(facts)]
    return [_stage(facts, first, stop) for first, stop in pairwise(borders)]


def checked_cuts(cuts: Sequence[int], stages: int, parts: int) -> list[int]:
    if len(cuts) != stages - 1:
        raise UserError(f"[pipeline] cuts {list(cuts)}: {stages} stages need {stages - 1}, found {len(cuts)}")
    for before, cut in pairwise([0, *cuts]):
        if cut <= before:
            raise UserError(
                f"[pipeline] cuts {list(cuts)}: {cut} after {before}; each stage begins after the one before"
            )
        if cut >= parts:
            raise UserError(
                f"[pipeline] cuts {list(cuts)}: there is no part {cut}, the last one of this model is {parts - 1}"
            )
    return list(cuts)


def best_cuts(facts: Sequence[PartFacts], stages: int) -> list[int]:
    """Cuts whose largest stage is least; of these, those that carry the fewest bytes; of these, the earliest."""
    upto = [0, *accumulate(fact.flops for fact in facts)]
    carried = [sum(signature.bytes for signature in fact.gives) for fact in facts]
    largest = _least_largest(upto, stages)
    return _fewest_bytes(upto, carried, stages, largest)


def stage_work(upto: Sequence[int], first: int, stop: int) -> int:
    """`upto[n]`: the FLOPs of the first n parts."""
    passes = _PASSES_OF_THE_LAST if stop == len(upto) - 1 else _PASSES
    return passes * (upto[stop] - upto[first])


def _least_largest(upto: Sequence[int], stages: int) -> int:
    count = len(upto) - 1
    least = [0, *([math.inf] * count)]  # of the first n parts in so many stages
    for stage in range(1, stages + 1):
        least = [
            min(
                (max(least[first], stage_work(upto, first, stop)) for first in range(stage - 1, stop)),
                default=math.inf,
            )
            for stop in range(count + 1)
        ]
    return int(least[count])


def _fewest_bytes(upto: Sequence[int], carried: Sequence[int], stages: int, largest: int) -> list[int]:
    """Backwards: what parts from `first` on cost in so many stages, none of which is larger than `largest`."""
    count = len(upto) - 1
    Way = tuple[float, list[int]]  # bytes at the borders, cuts
    nothing: Way = (math.inf, [])
    best: list[Way] = [nothing] * count + [(0, [])]
    for left in range(1, stages + 1):
        now = [nothing] * (count + 1)
        for first in range(count):
            # The last stage ends with the last part; any other leaves a part to each stage after it.
            for stop in [count] if left == 1 else range(first + 1, count):
                if stage_work(upto, first, stop) <= largest:
                    border = 0 if left == 1 else carried[stop - 1]
                    rest_bytes, rest = best[stop]
                    way = (border + rest_bytes, [stop, *rest] if left > 1 else [])
                    now[first] = min(now[first], way)
        best = now
    return best[0][1]


def _stage(facts: Sequence[PartFacts], first: int, stop: int) -> StagePlan:
    upto = [0, *accumulate(fact.flops for fact in facts)]
    return StagePlan(
        first=first,
        stop=stop,
        work_flops=stage_work(upto, first, stop),
        memory_bytes=sum(fact.memory_bytes for fact in facts[first:stop]),
        gives=facts[stop - 1].gives if stop < len(facts) else (),
    )


# ---- whole -------------------------------------------------------------------------------------------------

_NOTHING_FROZEN = bytes(32)


@dataclass(frozen=True)
class WholeModel:
    """`layouts` are of each stage alone, from 0; `borders[n]` lies between stages n and n + 1."""

    schema: ModelSchema
    plans: tuple[StagePlan, ...]
    layouts: tuple[ModelLayout, ...]
    borders: tuple[Border, ...]

    @property
    def crossing_bytes(self) -> int:
        """No crossing of this model is longer."""
        return max(border.most_bytes(backwards) for border in self.borders for backwards in (False, True))

    def check_built(self, stage: Stage, number: int) -> ModelLayout:
        """UserError if the stage, with values, is another one than it was to be."""
        due, found = self.layouts[number], ModelLayout.of(stage, self.schema.chunk_elements)
        if found != due:
            differs = next(
                (f"{b.name!r}" for a, b in zip(due.specs, found.specs, strict=False) if a != b),
                "their number",
            )
            raise UserError(
                f"stage {number} was built with other tensors than its parts said before ({differs}): a part must "
                "build the same module each time, and no two parts may share a tensor"
            )
        return found


def whole_model(
    facts: Sequence[PartFacts], item: Mapping[str, Tensor], riders: Sequence[str], manifest: Manifest
) -> WholeModel:
    """`item`: one sample by name, of which `riders` travel along.  UserError with one line where it can't be."""
    pipeline, chunk_elements = manifest.pipeline, manifest.round.chunk_kb * 1024 // 4
    plans = plan_stages(facts, pipeline.stages, pipeline.cuts)
    layouts = [_layout(number, plan, facts, chunk_elements) for number, plan in enumerate(plans)]
    schema = ModelSchema(
        tensors=tuple(spec for layout in layouts for spec in layout.specs),
        chunk_elements=chunk_elements,
        chunk_count=sum(layout.chunk_count for layout in layouts),
        first_plain_chunk=sum(layout.chunk_count for layout in layouts),
        frozen=_NOTHING_FROZEN,
        stages=_stage_specs(plans, layouts),
        riders=tuple(
            BorderTensor(dtype_name(item[name].dtype), tuple(item[name].shape), name) for name in riders
        ),
        matrices=_matrices(plans, layouts, facts) if manifest.outer.step == "muon" else (),
    )
    borders = _borders(schema, manifest)
    refuse_unsendable(schema)
    return WholeModel(schema, tuple(plans), tuple(layouts), borders)


def _layout(number: int, plan: StagePlan, facts: Sequence[PartFacts], chunk_elements: int) -> ModelLayout:
    found = Survey()
    for part in facts[plan.first : plan.stop]:
        for mine, more in (
            (found.params, part.holds.params),
            (found.frozen, part.holds.frozen),
            (found.buffers, part.holds.buffers),
        ):
            mine.update(more)
        found.aliases.update(part.holds.aliases)
    if found.frozen:
        raise UserError(
            f"parameter {next(iter(found.frozen))!r} does not train: in a model that is cut into stages all do, since "
            "a stage's peers could not compare it with the others'; make it a buffer with persistent=False"
        )
    if not found.params:
        raise UserError(
            f"stage {number}, {_parts_of(plan)}, has no parameter to train: take fewer [pipeline] stages, or name "
            "other cuts"
        )
    return ModelLayout.placed(found, chunk_elements)


def _parts_of(plan: StagePlan) -> str:
    last = plan.stop - 1
    return f"part {plan.first}" if plan.first == last else f"parts {plan.first} to {last}"


def _stage_specs(plans: Sequence[StagePlan], layouts: Sequence[ModelLayout]) -> tuple[StageSpec, ...]:
    specs, first_tensor = [], 0
    for plan, layout in zip(plans, layouts, strict=True):
        specs.append(
            StageSpec(
                first_part=plan.first,
                first_tensor=first_tensor,
                chunk_count=layout.chunk_count,
                plain_chunks=layout.chunk_count - layout.first_plain_chunk,
                gives=tuple(BorderTensor(signature.dtype, signature.shape) for signature in plan.gives),
            )
        )
        first_tensor += len(layout.specs)
    return tuple(specs)


def _matrices(
    plans: Sequence[StagePlan], layouts: Sequence[ModelLayout], facts: Sequence[PartFacts]
) -> tuple[int, ...]:
    """Places of the hidden ones among the tensors of all stages; a stage may have none."""
    found: list[int] = []
    first_tensor = 0
    for plan, layout in zip(plans, layouts, strict=True):
        names = {name for part in facts[plan.first : plan.stop] for name in part.matrices}
        found += [first_tensor + place for place in layout.places_of(names)]
        first_tensor += len(layout.specs)
    refuse_no_matrix(found)
    return tuple(found)


def _borders(schema: ModelSchema, manifest: Manifest) -> tuple[Border, ...]:
    borders = []
    for number, stage in enumerate(schema.stages[:-1]):
        if not any(_is_floating(tensor) for tensor in stage.gives):
            given = ", ".join(map(str, stage.gives))
            raise UserError(
                f"stage {number} gives only integers to stage {number + 1} ({given}), through which no gradient comes "
                "back: name other [pipeline] cuts"
            )
        try:
            borders.append(border_after(number, schema, manifest.pipeline, payload_bytes))
        except ValueError as error:
            raise UserError(
                f"what stage {number} gives to stage {number + 1} can't cross: {error}; name other [pipeline] cuts, or "
                "take a smaller [pipeline] micro"
            ) from None
    return tuple(borders)


def _is_floating(tensor: BorderTensor) -> bool:
    return Signature(tensor.dtype, tensor.shape).is_floating


def payload_bytes(codec: str, elements: int) -> int:
    return codec_named(codec).payload_bytes(elements)
