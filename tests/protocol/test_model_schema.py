"""`first_difference`: a refused model is told in words where it differs from the run's."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec, TensorSpec, first_difference

RUN = ModelSchema(
    tensors=(
        TensorSpec("0.weight", (8, 4), "float32", "param"),
        TensorSpec("1.running_mean", (8,), "float32", "buffer"),
        TensorSpec("head = 0.weight", (), "", "alias"),
    ),
    chunk_elements=16,
    chunk_count=3,
    first_plain_chunk=2,
    frozen=bytes(32),
)


def with_tensor(index: int, **changes: object) -> ModelSchema:
    tensors = list(RUN.tensors)
    tensors[index] = replace(tensors[index], **changes)
    return replace(RUN, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (with_tensor(0, shape=(8, 16)), "'0.weight': shape is [8, 16] here, [8, 4] in the run"),
        (with_tensor(1, dtype="bfloat16"), "dtype is bfloat16 here, float32 in the run"),
        (with_tensor(1, kind="frozen"), "kind is frozen here, buffer in the run"),
        (with_tensor(2, name="head = tail"), "name is head = tail here, head = 0.weight in the run"),
        (replace(RUN, tensors=RUN.tensors[:2]), "number of tensors is 2 here, 3 in the run"),
        (replace(RUN, tensors=RUN.tensors + RUN.tensors[:1]), "first extra: '0.weight'"),
        (replace(RUN, chunk_elements=32), "chunk_elements is 32 here, 16 in the run"),
        (replace(RUN, first_plain_chunk=1), "first_plain_chunk is 1 here, 2 in the run"),
        (replace(RUN, frozen=bytes([1] * 32)), "load the same pretrained weights"),
    ],
)
def test_the_first_difference_is_told_in_words(mine: ModelSchema, text: str) -> None:
    told = first_difference(mine, RUN)
    assert told is not None
    assert text in told


STAGED = replace(
    RUN,
    first_plain_chunk=3,
    stages=(StageSpec(0, 0, 2, 1, (BorderTensor("float32", (16, 8)),)), StageSpec(2, 2, 1, 0)),
    riders=(BorderTensor("int64", (16,), "labels"),),
)


def with_stage(number: int, **changes: object) -> ModelSchema:
    stages = list(STAGED.stages)
    stages[number] = replace(stages[number], **changes)
    return replace(STAGED, stages=tuple(stages))


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (with_stage(1, first_part=3), "begin at parts [0, 3] here, [0, 2] in the run"),
        (replace(STAGED, stages=()), "begin at parts [] here, [0, 2] in the run"),
        (with_stage(0, plain_chunks=0), "other chunks here"),
        (
            with_stage(0, gives=(BorderTensor("bfloat16", (16, 8)), BorderTensor("int64", ()))),
            "stage 0 gives bfloat16 [16, 8], int64 [] here, float32 [16, 8] in the run",
        ),
        (with_stage(0, gives=()), "stage 0 gives nothing here"),
        (replace(STAGED, riders=()), "riders: none here, labels int64 [16] in the run"),
        (
            replace(STAGED, riders=(BorderTensor("int64", (16,), "mask"),)),
            "riders: mask int64 [16] here, labels int64 [16] in the run",
        ),
    ],
)
def test_the_first_difference_of_stages_is_told_in_words(mine: ModelSchema, text: str) -> None:
    told = first_difference(mine, STAGED)
    assert told is not None
    assert text in told


def test_equal_models_do_not_differ() -> None:
    assert first_difference(RUN, replace(RUN)) is None
