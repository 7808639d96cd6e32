"""The trainers of a cut model on their stages: machines, belts and codecs, without a network."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farflung.peer.crossings.shared_slots import GIVEN, PLACES, slot_of
from farflung.peer.local.words import FreezeSums, Frozen, MicrobatchWork, NeedSamples, Stop, WorkDone
from farflung.peer.pipeline.samples import ReadMicrobatch, Samples
from farflung.peer.trainer.inner_loop import GRADIENT_EVERY_S
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.errors import Refused, UserError
from rig.stage_agents import Pipeline, model_of, train_stages
from rig.unsplit import BUILT_IN, LLAMA, MICROS, SEQUENTIAL, AdamW, Task, Unsplit, weights_hash

UPDATES = 20  # as in the table of docs/pipelines.md
FP32 = "fp32"


def unsplit(task: Task, seed: int, updates: int) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer, losses = Unsplit(task, seed), AdamW(), []
    for version in range(updates):
        loss, gradients = model.batch(version)
        optimizer.step(model.named_tensors(), gradients)
        losses.append(loss)
    return model.named_tensors(), losses


def parameters(named: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named.items() if like[name].requires_grad}


@pytest.mark.parametrize(
    ("cuts", "updates"),
    [([3], 4), pytest.param([2, 4], UPDATES, marks=pytest.mark.hard), ([1, 3, 5], 4)],
    ids=str,
)
def test_F1_stages_over_belts_learn_the_bits_of_one_process(
    tmp_path: Path, cuts: list[int], updates: int
) -> None:
    expected, losses = unsplit(BUILT_IN, 0, updates)
    found, lost, _ = train_stages(tmp_path, BUILT_IN, 0, updates, cuts, FP32)
    assert lost == losses
    assert weights_hash(found) == weights_hash(expected)


def test_F1_holds_with_buffers_that_are_averaged_and_with_chance(tmp_path: Path) -> None:
    """BatchNorm's statistics go through the round as what they moved, so only parameters have the same bits."""
    expected, losses = unsplit(SEQUENTIAL, 0, 8)
    found, lost, _ = train_stages(tmp_path, SEQUENTIAL, 0, 8, [1, 2], FP32)
    assert lost == losses
    assert weights_hash(parameters(found, expected)) == weights_hash(parameters(expected, expected))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_F1_holds_for_a_llama_of_transformers(tmp_path: Path) -> None:
    expected, losses = unsplit(LLAMA, 0, 5)
    found, lost, _ = train_stages(tmp_path, LLAMA, 0, 5, [1, 3], FP32)
    assert lost == losses and weights_hash(found) == weights_hash(expected)


def test_int8_crossings_are_a_quarter_as_long_and_move_the_loss_by_less_than_half_a_percent(
    tmp_path: Path,
) -> None:
    _, losses = unsplit(BUILT_IN, 1, 10)
    sizes = []
    for codec in ("fp32", "int8"):
        folder = tmp_path / codec
        folder.mkdir()
        _, lost, pipeline = train_stages(folder, BUILT_IN, 1, 10, [2, 4], codec)
        sizes.append(pipeline.crossed_bytes)
    assert lost[-1] == pytest.approx(losses[-1], rel=0.005)
    assert lost[-1] != losses[-1], "nothing went through the codec"
    assert 0.25 < sizes[1] / sizes[0] < 0.31, "labels travel as they are"


# ---- what a stage hears and says


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    model, micro = model_of(BUILT_IN, 0, 2, [2, 4])
    made = Pipeline.start(tmp_path, model, micro)
    made.load(0)
    return made


def forward(pipeline: Pipeline, micro: int, upto: int) -> list[bytes]:
    """What stages 0 to `upto` are given."""
    given = [b""]
    for stage in range(upto):
        given.append(pipeline.work(stage, "forward", 0, micro, given[-1], b"")[1])
    return given


def sums(pipeline: Pipeline, stage: int) -> list[Tensor]:
    return [each.clone() for _, each in pipeline.loops[stage].held.loop.sums.items()]


def test_no_peer_builds_another_stage(pipeline: Pipeline) -> None:
    names = [[name for name, _ in loop.stage.named_parameters()] for loop in pipeline.loops]
    parts = [sorted({int(name.partition(".")[0]) for name in each}) for each in names]
    assert parts == [[0, 1], [2, 3], [4, 5]]


def test_only_the_source_tells_of_its_data(tmp_path: Path) -> None:
    model, micro = model_of(BUILT_IN, 0, 2, [2, 4])
    pipeline = Pipeline.start(tmp_path, model, micro)
    needs = [(agent.stage, each.samples) for agent in pipeline.agents for each in agent.heard(NeedSamples)]
    assert needs == [(0, 2 * MICROS * micro)]


def test_the_trial_of_a_new_stage_leaves_nothing_behind(pipeline: Pipeline) -> None:
    for stage in range(3):
        assert all(not each.any() for each in sums(pipeline, stage))
        assert pipeline.loops[stage].held.loop.open_count == 0


def test_a_stage_goes_back_without_having_gone_forward(pipeline: Pipeline) -> None:
    """Its peer was lost when the next stage had the microbatch already: only the gradient is wanted of the new one."""
    given = forward(pipeline, 0, 2)
    _, gradient = pipeline.work(2, "both", 0, 0, given[2], b"")
    pipeline.work(1, "backward", 0, 0, given[1], gradient)
    with_forward = sums(pipeline, 1)
    pipeline.load(0)  # another trainer, in effect
    made, _ = pipeline.work(1, "backward", 0, 0, given[1], gradient)
    assert not made.problem and made.tokens > 0
    assert all(torch.equal(one, other) for one, other in zip(with_forward, sums(pipeline, 1), strict=True))


def test_a_source_reads_a_microbatch_once_for_both_ways(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []
    read = Samples.read

    def counting(self: Samples, epoch: int, start: int, stop: int) -> ReadMicrobatch:
        asked.append((epoch, start, stop))
        return read(self, epoch, start, stop)

    monkeypatch.setattr(Samples, "read", counting)
    given = forward(pipeline, 1, 2)
    _, gradient = pipeline.work(2, "both", 0, 1, given[2], b"")
    _, gradient = pipeline.work(1, "backward", 0, 1, given[1], gradient)
    made, nothing = pipeline.work(0, "backward", 0, 1, b"", gradient)
    assert asked == [(0, pipeline.samples, 2 * pipeline.samples)]
    assert (made.bytes_made, nothing) == (0, b"")
    assert pipeline.loops[0]._read == {}, "what came back is kept no longer"


def test_a_value_that_is_no_number_is_told_and_counts_nowhere(pipeline: Pipeline) -> None:
    given = forward(pipeline, 0, 2)
    with torch.no_grad():
        for parameter in pipeline.loops[1].stage.parameters():
            parameter.fill_(torch.inf)
    made, out = pipeline.work(1, "forward", 0, 1, given[1], b"")
    assert "has a value that is no number" in made.problem and out == b"" and made.bytes_made == 0
    with torch.no_grad():
        next(pipeline.loops[2].stage.parameters()).fill_(torch.nan)
    made, _ = pipeline.work(2, "both", 0, 0, given[2], b"")
    assert "the loss of microbatch 0 of version 0 is nan" in made.problem and made.loss is None
    assert all(not each.any() for stage in (1, 2) for each in sums(pipeline, stage))
    pipeline.tell(2, FreezeSums(version=0, slot=0))
    assert not pipeline.agents[2].said, "there is nothing to freeze"


def test_what_the_agent_wrote_over_is_told_and_counts_nowhere(pipeline: Pipeline) -> None:
    given = forward(pipeline, 0, 2)
    made, _ = pipeline.work(2, "both", 0, 0, given[2][:-1] + b"", b"")
    assert "what lies in the belt is no crossing" in made.problem
    made, _ = pipeline.work(2, "both", 0, 0, b"\xff" * len(given[2]), b"")
    assert "is no crossing" in made.problem
    assert all(not each.any() for each in sums(pipeline, 2))


def test_a_short_microbatch_at_the_end_of_an_epoch_crosses_too(pipeline: Pipeline) -> None:
    pipeline.samples -= 1
    given = forward(pipeline, 0, 2)
    made, gradient = pipeline.work(2, "both", 0, 0, given[2], b"")
    assert made.tokens == 48 and not made.problem
    made, _ = pipeline.work(1, "backward", 0, 0, given[1], gradient)
    assert made.tokens == 48


def test_tokens_reach_every_stage_and_sums_are_divided_by_those_in_them(pipeline: Pipeline) -> None:
    for micro in (0, 2):
        given = forward(pipeline, micro, 2)
        _, gradient = pipeline.work(2, "both", 0, micro, given[2], b"")
        for stage in (1, 0):
            _, gradient = pipeline.work(stage, "backward", 0, micro, given[stage], gradient)
    for stage in range(3):
        before = sums(pipeline, stage)
        pipeline.tell(stage, FreezeSums(version=0, slot=2))
        frozen = pipeline.agents[stage].answer(Frozen)
        assert (frozen.tokens, frozen.counted) == (2 * 2 * 48, mask_to_bytes(mask_of((0, 2))))
        shared, layout = pipeline.agents[stage].shared, pipeline.loops[stage].held.layout
        assert shared is not None
        written = layout.named_tensors(shared.slots[2])
        for (name, _), each in zip(pipeline.loops[stage].held.loop.sums.items(), before, strict=True):
            assert torch.equal(written[name], each / frozen.tokens)
        norm = math.sqrt(sum(float((each / frozen.tokens).square().sum()) for each in before))
        assert shared.read_gradient_norm() == pytest.approx(norm, rel=1e-5)


def test_the_norm_of_the_gradient_is_read_seldom(pipeline: Pipeline) -> None:
    loop, agent, now = pipeline.loops[2], pipeline.agents[2], [100.0]
    loop._clock = lambda: now[0]
    told = []
    for micro, then in enumerate((0.0, GRADIENT_EVERY_S - 1, 1.0)):
        now[0] += then
        pipeline.work(2, "both", 0, micro, forward(pipeline, micro, 2)[2], b"")
        pipeline.tell(2, FreezeSums(version=0, slot=2))
        agent.answer(Frozen)
        assert agent.shared is not None
        told.append(agent.shared.read_gradient_norm())
    assert told[0] is not None and told[0] == told[1] != told[2]


def test_memory_that_does_not_suffice_ends_the_trainer_in_one_line(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = forward(pipeline, 0, 1)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nand much more")

    monkeypatch.setattr(pipeline.loops[1].held.loop, "forward", full)
    words = r"a microbatch of 2 samples .* beside stage 1 of 3 does not fit into the GPU's memory: CUDA out of memory.$"
    with pytest.raises(UserError, match=words):
        pipeline.work(1, "forward", 0, 0, given[1], b"")


def test_two_works_lie_at_two_places(pipeline: Pipeline) -> None:
    """The agent writes the next input while the trainer is at work: neither disturbs the other."""
    one, other = forward(pipeline, 0, 1)[1], forward(pipeline, 1, 1)[1]
    agent = pipeline.agents[1]
    assert agent.belt is not None and PLACES == 2
    for place, payload in ((0, one), (1, other)):
        agent.belt.write(slot_of(place, GIVEN), payload)
        agent.coming.append(
            MicrobatchWork(
                way="forward",
                version=0,
                micro=place,
                epoch=0,
                start=0,
                stop=2,
                place=place,
                given_bytes=len(payload),
                returned_bytes=0,
            )
        )
    made = []
    while len(made) < 2:
        pipeline.loops[1].turn()
        made += [each for each in agent.said if isinstance(each, WorkDone)]
        agent.said.clear()
    found = [agent.belt.read(slot_of(each.micro, 2), each.bytes_made) for each in made]
    assert found == [
        pipeline.work(1, "forward", 0, micro, payload, b"")[1] for micro, payload in ((0, one), (1, other))
    ]


def test_a_refusal_is_raised(tmp_path: Path) -> None:
    model, micro = model_of(BUILT_IN, 0, 2, [2, 4])
    pipeline = Pipeline.start(tmp_path, model, micro)
    with pytest.raises(Refused, match="no seat"):
        pipeline.tell(1, Stop(code="full", reason="no seat"))
