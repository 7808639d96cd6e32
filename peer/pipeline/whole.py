"""A whole model in stages, as every peer can say it without memory for it: schema, layouts, borders.

Owns: the schema with stages, where a stage's values lie in it, what passes each border; every refusal that needs a cut.
Called by: `farflung.pipeline`, before the run hears of this peer, and again when this peer's stage is built.
Must not know: which stage this peer will hold, values, sockets.

Each stage begins a chunk of its own:  [ parameters | padding | floating buffers | padding ]  of each.  Chunks are
numbered through the whole model, so a stage is a fragment of it.  All of this follows from the parts as they are on
the meta device, and from the manifest: peers that hold different stages say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from farflung.collectives.pipeline.crossing import Border, border_after
from farflung.compression.codec import codec_named
from farflung.peer.pipeline.cuts import StagePlan, plan_stages
from farflung.peer.pipeline.part_checks import PartFacts, Signature
from farflung.peer.pipeline.parts import Stage
from farflung.peer.trainer.layout import ModelLayout, refuse_no_matrix, refuse_unsendable
from farflung.peer.trainer.model_tensors import Survey, dtype_name
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec

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
