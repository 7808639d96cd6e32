"""The schema of a whole model in stages: the same on every peer, and each stage lies exactly where it says."""

from __future__ import annotations

import importlib.util
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.peer.builtin.llama import parts_of
from farflung.peer.pipeline.parts import Part, Stage, survey_parts
from farflung.peer.pipeline.whole import WholeModel, whole_model
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest, ModelSection
from farflung.protocol.model_schema import BorderTensor

SEED = 3


def manifest(stages: int, cuts: Any = "auto", chunk_kb: int = 1, **more: Any) -> Manifest:
    return Manifest.model_validate(
        {
            "run": {"seed": SEED},
            "model": {"kind": ""},
            "round": {"chunk_kb": chunk_kb},
            "merge": {"policy": "mean"},
            "outer": {"step": "adamw"},
            "pipeline": {"batch": 4, "micro": 2, "stages": stages, "cuts": cuts, **more},
        }
    )


def image_loss(logits: Tensor, riders: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits, riders["kind"])


def token_loss(logits: Tensor, riders: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), riders["labels"].flatten())


def images() -> tuple[list[Part], dict[str, Tensor], tuple[str, ...], Any]:
    parts: list[Part] = [
        partial(nn.Conv2d, 1, 8, 3),
        partial(nn.BatchNorm2d, 8),
        nn.Flatten,
        partial(nn.Linear, 8 * 36, 20),
        partial(nn.BatchNorm1d, 20),
        partial(nn.Linear, 20, 3),
    ]
    item = {"x": torch.zeros(1, 8, 8), "kind": torch.zeros((), dtype=torch.int64)}
    return parts, item, ("kind",), image_loss


def tokens() -> tuple[list[Part], dict[str, Tensor], tuple[str, ...], Any]:
    ids = torch.zeros(16, dtype=torch.int64)
    return (
        parts_of(ModelSection(layers=4, width=32, heads=2, context=16, tied=False), SEED),
        {"x": ids, "labels": ids},
        ("labels",),
        token_loss,
    )


def whole_of(model: Any, said: Manifest) -> WholeModel:
    parts, item, riders, loss = model
    return whole_model(survey_parts(parts, item, ("x",), loss), item, riders, said)


@pytest.mark.parametrize("model", [images, tokens])
def test_a_stage_lies_exactly_at_its_chunks(model: Any) -> None:
    parts = model()[0]
    for stages in (2, 3, 4):
        cuts = [c for c in combinations(range(1, len(parts)), stages - 1) if model is tokens or 3 not in c]
        for cut in cuts[:6]:
            whole = whole_of(model(), manifest(stages, list(cut)))
            at = tensor_at = 0
            for number, (first, stop) in enumerate(pairwise([0, *cut, len(parts)])):
                own = ModelLayout.of(Stage.build(parts, first, stop, SEED), 256)
                spec = whole.schema.stages[number]
                fragment = whole.schema.fragments(stages)[number]
                assert (fragment.first, fragment.count) == (at, own.chunk_count)
                assert spec.chunk_count == own.chunk_count and spec.first_part == first
                plain = [whole.schema.is_plain(at + chunk) for chunk in range(own.chunk_count)]
                assert plain == [chunk >= own.first_plain_chunk for chunk in range(own.chunk_count)]
                assert whole.layouts[number] == own
                assert spec.first_tensor == tensor_at
                assert whole.schema.tensors[tensor_at : tensor_at + len(own.specs)] == own.specs
                at, tensor_at = at + own.chunk_count, tensor_at + len(own.specs)
            assert whole.schema.chunk_count == at and len(whole.schema.tensors) == tensor_at


def test_the_schema_is_the_same_whatever_a_peer_has_built_before_and_however_its_parts_are_given() -> None:
    said = manifest(3, [1, 3])
    fresh = whole_of(tokens(), said).schema
    parts, item, riders, loss = tokens()
    Stage.build(parts, 1, 3, SEED)
    torch.manual_seed(99)
    assert whole_of((parts, item, riders, loss), said).schema == fresh
    built: list[Part] = list(Stage.build(parts, 0, len(parts), SEED).children())
    assert whole_of((built, item, riders, loss), said).schema == fresh
    assert whole_of((parts, item, riders, loss), said).schema.hash == fresh.hash


def test_no_parameter_takes_memory_for_the_schema() -> None:
    """A model of a terabyte can be described by any peer."""
    width = 130_000
    parts: list[Part] = [partial(nn.Linear, width, width) for _ in range(8)]
    item = {"x": torch.zeros(width), "kind": torch.zeros((), dtype=torch.int64)}
    whole = whole_of((parts, item, ("kind",), image_loss), manifest(8, chunk_kb=16384))
    assert sum(plan.memory_bytes for plan in whole.plans) > 1e12
    assert whole.schema.chunk_count * whole.schema.chunk_elements >= 8 * width * (width + 1)


def test_it_says_what_passes_each_border_and_how_long_a_crossing_can_be() -> None:
    whole = whole_of(tokens(), manifest(3, [1, 3], codec="fp32"))
    gives = [stage.gives for stage in whole.schema.stages]
    assert gives == [(BorderTensor("float32", (16, 32)),), (BorderTensor("float32", (16, 32)),), ()]
    assert whole.schema.riders == (BorderTensor("int64", (16,), "labels"),)
    assert len(whole.borders) == 2
    values, labels = 2 * 16 * 32, 2 * 16
    there, back = (whole.borders[0].most_bytes(backwards) for backwards in (False, True))
    heads = 16 + (8 + 12) + (8 + 8)
    assert there == heads + 16 + 4 * values + 8 * labels == whole.crossing_bytes
    assert back == 16 + (8 + 12) + 16 + 4 * values


def test_auto_cuts_are_the_same_for_everybody_and_the_schema_names_them() -> None:
    schema = whole_of(tokens(), manifest(3)).schema
    assert [stage.first_part for stage in schema.stages] == [0, 2, 3]
    assert whole_of(tokens(), manifest(3, [2, 3])).schema.stages == schema.stages


# ---- refused


class Tied(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(x)
        return y


class Whole(nn.Module):
    """Gives integers alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1, keepdim=True)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.table(x[:, 0])
        return y


class Fan(nn.Module):
    """Gives one tensor more than cross a border."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.mix(x) for _ in range(17))


class Gather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, *x: Tensor) -> Tensor:
        y: Tensor = self.head(sum(x))
        return y


ROW = {"x": torch.zeros(8), "kind": torch.zeros((), dtype=torch.int64)}
LINEAR, HEAD = partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 3)
TIED = nn.Linear(8, 8)
REFUSED: dict[str, tuple[list[Any], Any, str]] = {
    "frozen": (
        [LINEAR, lambda: nn.Linear(8, 8).requires_grad_(False), HEAD],
        [2],
        r"parameter '1.weight' does not train: in a model that is cut into stages all do",
    ),
    "tied": ([partial(Tied, TIED), LINEAR, partial(Tied, TIED), HEAD], [2], "are one parameter"),
    "fewer parts": ([LINEAR, HEAD], "auto", "stages is 3, and the model has 2 parts: .* take at most 2 stages"),
    "cuts beyond": ([LINEAR, LINEAR, HEAD], [1, 7], r"cuts \[1, 7\]: there is no part 7, the last one of"),
    "nothing to train": ([LINEAR, nn.GELU, nn.Tanh, HEAD], [1, 3], "stage 1, parts 1 to 2, has no parameter"),
    "nothing in one part": ([LINEAR, nn.GELU, HEAD], [1, 2], "stage 1, part 1, has no parameter to train"),
    "only integers": (
        [LINEAR, Whole, Looks],
        [2],
        r"stage 0 gives only integers to stage 1 \(int64 \[1\]\), through which no gradient comes back",
    ),
    "too many tensors": ([LINEAR, Fan, Gather], [2], "what stage 0 gives to stage 1 can't cross: a border has 1 to 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_in_one_line(name: str) -> None:
    parts, cuts, words = REFUSED[name]
    stages = 3 if cuts == "auto" else len(cuts) + 1
    with pytest.raises(UserError, match=words) as told:
        whole_of((parts, ROW, ("kind",), image_loss), manifest(stages, cuts))
    assert len(str(told.value).splitlines()) == 1


def test_a_stage_of_too_many_chunks_says_how_long_they_must_be() -> None:
    wide: list[Part] = [partial(nn.Linear, 1100, 1100), partial(nn.Linear, 1100, 3)]
    item = {"x": torch.zeros(1100), "kind": ROW["kind"]}
    with pytest.raises(
        UserError, match=r"a stage of the model makes 4731 chunks, .* set chunk_kb in \[round\].* to 2 or"
    ):
        whole_of((wide, item, ("kind",), image_loss), manifest(2))


def test_a_stage_that_is_built_otherwise_than_it_was_said_is_refused() -> None:
    built = iter(range(100))

    def odd() -> nn.Module:
        return nn.Linear(8, 8, bias=next(built) == 0)

    whole = whole_of(([odd, HEAD], ROW, ("kind",), image_loss), manifest(2))
    with pytest.raises(UserError, match="stage 0 was built with other tensors than its parts said before"):
        whole.check_built(Stage.build([odd, HEAD], 0, 1, SEED), 0)
    found = whole.check_built(Stage.build([odd, HEAD], 1, 2, SEED), 1)
    assert found == whole.layouts[1]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_llama_of_transformers_is_described_without_being_built() -> None:
    import transformers

    import farflung

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    ids = torch.zeros(16, dtype=torch.int64)
    parts = farflung.hf_parts(config)
    whole = whole_of((parts, {"x": ids, "labels": ids}, ("labels",), token_loss), manifest(3, [1, 3]))
    ends = [0, *accumulate(layout.chunk_count for layout in whole.layouts)]
    assert whole.schema.chunk_count == ends[-1]
    for number, (first, stop) in enumerate(pairwise([0, 1, 3, len(parts)])):
        whole.check_built(Stage.build(parts, first, stop, SEED), number)
