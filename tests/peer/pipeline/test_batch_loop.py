"""The trainer of synchronous batches on a model: a test plays the agent."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.peer.data.sample_source import permuted_range
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import (
    Attach,
    Finish,
    FreezeSums,
    Frozen,
    Grants,
    Loaded,
    LoadState,
    MicrobatchCounted,
    NeedSamples,
    Provide,
    Provided,
    Stop,
    Unusable,
    from_trainer,
    to_bytes,
    to_trainer,
)
from farflung.peer.pipeline.parts import Stage
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.peer.pipeline.summing_loop import BatchLoop
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.errors import Refused, UserError
from farflung.protocol.manifest import Manifest

MICRO = 2
SAMPLES = 20
POISONED = 13  # this sample's loss is no number
MANIFEST = Manifest.model_validate(
    {
        "run": {"seed": 5},
        "round": {"chunk_kb": 1},
        "merge": {"policy": "mean"},
        "pipeline": {"batch": 4, "micro": MICRO},
        "eval": {"source": "python-stdlib", "windows": 16},
    }
)


class Rows:
    """Items are mappings; the label of one sample is a mistake."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(place)
        x = torch.randn(4, generator=dice)
        return {"x": x * torch.nan if place == POISONED else x, "kind": torch.tensor(place % 3)}


def kind_loss(logits: Tensor, riders: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits, riders["kind"])


class Agent:
    """What it will say, each only when the trainer waits; and what the trainer said."""

    def __init__(self) -> None:
        self.coming: deque[object] = deque()
        self.said: list[Any] = []
        self.then: Any = lambda said: []

    def send(self, message: Any) -> None:
        self.said.append(from_trainer(to_bytes(message)))
        self.coming.extend(self.then(self.said[-1]))

    def recv(self, timeout_s: float) -> Any:
        if self.coming:
            return to_trainer(to_bytes(self.coming.popleft()))  # type: ignore[arg-type]
        assert timeout_s == 0, "this would wait for ever"
        return None


class Trainer:
    def __init__(self, folder: Path, held_out: Any = None) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.stage = StageLoop(Stage(0, [self.model]), 5, kind_loss)
        self.samples = Samples(Rows, ("x",), ("kind",), 5, held_out)
        self.agent, self.gone = Agent(), None
        self.loop = BatchLoop(self.agent, self.model, self.stage, self.samples, MANIFEST, lambda: self.gone)  # type: ignore[arg-type]
        self.shared = SharedState.create(folder, self.loop.layout.total_elements)

    def run(self, *words: object) -> list[Any]:
        """All words are there when the trainer looks; they end with its end."""
        self.agent.coming.extend((self.shared.as_message(), *words))
        self.loop.run()
        return self.agent.said

    def fill_anchor(self) -> Tensor:
        self.loop.layout.write_anchor(self.model, self.shared.anchor)
        return self.shared.anchor.clone()


def load(version: int = 0) -> LoadState:
    return LoadState(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0)


def grants(*ranges: tuple[int, int], version: int = 0) -> Grants:
    return Grants(version=version, epoch=0, start=0, stop=8, count=4, ranges=ranges)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def clean_seed_places() -> list[int]:
    return permuted_range(5, 0, SAMPLES, 0, 8)


def expected_gradient(micros: list[int]) -> tuple[dict[str, Tensor], int]:
    """By the plain way, from the data set itself."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    order, rows = clean_seed_places(), Rows()
    tokens = 0
    for micro in micros:
        items = [rows[place] for place in order[micro * MICRO : (micro + 1) * MICRO]]
        x, kinds = torch.stack([i["x"] for i in items]), torch.stack([i["kind"] for i in items])
        (F.cross_entropy(model(x), kinds) * MICRO).backward()
        tokens += MICRO
    found = {name: p.grad / tokens for name, p in model.named_parameters() if p.grad is not None}
    return found | {
        name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()
    }, tokens


def finite_micros() -> list[int]:
    order = clean_seed_places()
    return [m for m in range(4) if POISONED not in order[m * MICRO : (m + 1) * MICRO]]


def test_granted_microbatches_are_counted_and_their_mean_gradient_is_frozen(trainer: Trainer) -> None:
    anchor = trainer.fill_anchor()
    micros = finite_micros()[:3]
    ranges = tuple((m, m + 1) for m in micros)

    def answer(said: object) -> list[object]:
        if isinstance(said, MicrobatchCounted) and said.micro == micros[-1]:
            return [FreezeSums(version=0, slot=2)]
        return [Finish(version=0)] if isinstance(said, Frozen) else []

    trainer.agent.then = answer
    said = trainer.run(load(), grants(*ranges))
    assert [type(each) for each in said[:3]] == [Attach, NeedSamples, Loaded]
    assert said[1].samples == SAMPLES and said[1].data
    counted = [each for each in said if isinstance(each, MicrobatchCounted)]
    assert [(each.micro, each.tokens) for each in counted] == [(m, MICRO) for m in micros]
    frozen = next(each for each in said if isinstance(each, Frozen))
    assert (frozen.slot, frozen.tokens, frozen.steps) == (2, 6, 3)
    assert frozen.counted == mask_to_bytes(mask_of(micros))
    found = trainer.loop.layout.named_tensors(trainer.shared.slots[2])
    expected, _ = expected_gradient(micros)
    loaded = trainer.loop.layout.named_tensors(anchor)
    for name, value in expected.items():
        if "running" in name:  # a buffer: what it moved
            assert torch.equal(found[name], loaded[name] - value), name
            assert found[name].any()
        else:
            assert torch.equal(found[name], value), name


class HeldOutItems:
    """Thirty-one items, of which sixteen are at even distances."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 31

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        self.read.append(place)
        return {"x": torch.full((4,), place / 31), "kind": torch.tensor(place % 3)}


def held_out_grants(*ranges: tuple[int, int]) -> Grants:
    return Grants(version=0, epoch=0, start=0, stop=16, count=8, ranges=ranges, held_out=True)


def test_a_held_out_microbatch_is_computed_in_eval_mode_and_leaves_nothing_behind(tmp_path: Path) -> None:
    items = HeldOutItems()
    trainer = Trainer(tmp_path, held_out=lambda: items)
    trainer.fill_anchor()
    before = {name: each.clone() for name, each in trainer.model.named_buffers()}
    trainer.agent.then = lambda said: (
        [Stop(code="finished", reason="")] if isinstance(said, MicrobatchCounted) and said.micro == 7 else []
    )
    said = trainer.run(load(), held_out_grants((0, 1), (7, 8)))
    counted = [each for each in said if isinstance(each, MicrobatchCounted)]
    assert [each.micro for each in counted] == [0, 7] and items.read == [0, 2, 28, 30]
    assert trainer.model.training
    model = trainer.model.eval()
    for each, places in zip(counted, ([0, 2], [28, 30]), strict=True):
        rows = [items[place] for place in places]
        x, kinds = torch.stack([row["x"] for row in rows]), torch.stack([row["kind"] for row in rows])
        assert each.loss == pytest.approx(float(F.cross_entropy(model(x), kinds).detach()), rel=1e-6)
    assert all(torch.equal(each, before[name]) for name, each in trainer.model.named_buffers())
    assert trainer.loop.tokens == 0, "that is no progress"


class Unreadable(HeldOutItems):
    def __len__(self) -> int:
        raise OSError("the shard is away")


@pytest.mark.parametrize(
    ("held_out", "why"),
    [
        (None, "[eval] of run.toml wants 16 held-out rows, and farflung.pipeline was given no held_out"),
        (Unreadable, "OSError: the shard is away"),
        ([{"x": torch.zeros(4)}] * 3, "[eval] of run.toml wants 16 held-out rows, and there are 3"),
        (
            [{"x": torch.zeros(4)}] * 16,
            "an item of the data set has no 'kind'",
        ),
    ],
)
def test_held_out_rows_that_are_not_there_stop_nobody_and_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, held_out: Any, why: str
) -> None:
    trainer = Trainer(tmp_path, held_out=held_out)
    trainer.fill_anchor()
    trainer.agent.then = lambda said: (
        [Stop(code="finished", reason="")] if isinstance(said, Unusable) and said.micro == 1 else []
    )
    said = trainer.run(load(), held_out_grants((0, 2)))
    unusable = [each for each in said if isinstance(each, Unusable)]
    assert [each.micro for each in unusable] == [0, 1]
    assert all(each.problem.startswith(why) for each in unusable), unusable
    assert sum("no loss is computed here" in line for line in caplog.messages) == 1


class OddRows(HeldOutItems):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        row = super().__getitem__(place)
        if place != 2:
            return row
        if self.what == "away":
            raise OSError("the shard is away")
        if self.what == "unknown":
            raise UserError("[eval]: it has token 9, and the vocabulary has 3")
        return {"x": torch.ones(5 if self.what == "wide" else 4), "kind": torch.tensor(7)}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("away", "OSError: the shard is away"),
        ("unknown", "[eval]: it has token 9, and the vocabulary has 3"),
        ("wide", "stack expects each tensor to be equal size"),
        ("label", "Target 7 is out of bounds"),
    ],
)
def test_a_row_that_can_not_be_computed_costs_its_microbatch_and_no_trainer(
    tmp_path: Path, what: str, told: str
) -> None:
    """But for a place that can't be read, which is left alone for a while."""
    trainer = Trainer(tmp_path, held_out=OddRows(what))
    trainer.fill_anchor()
    last = Unusable if what == "away" else MicrobatchCounted
    trainer.agent.then = lambda said: (
        [Stop(code="finished", reason="")] if isinstance(said, last) and said.micro == 2 else []
    )
    said = trainer.run(load(), held_out_grants((0, 3)))
    unusable = [each for each in said if isinstance(each, Unusable)]
    assert [each.micro for each in unusable] == ([0, 1, 2] if what == "away" else [0])
    assert all(told in each.problem for each in unusable)
    assert all(p.grad is None for p in trainer.model.parameters()), "nothing gets into the next sums"


@pytest.mark.parametrize("loss", [-0.5, 2e4, math.inf, math.nan])
def test_what_is_no_number_of_nats_is_no_held_out_loss(tmp_path: Path, loss: float) -> None:
    trainer = Trainer(tmp_path, held_out=HeldOutItems())
    trainer.stage._loss = lambda found, riders: found.sum() * 0.0 + loss
    trainer.fill_anchor()
    trainer.agent.then = lambda said: [Stop(code="finished", reason="")] if isinstance(said, Unusable) else []
    said = trainer.run(load(), held_out_grants((0, 1)))
    assert "no number of nats from 0 to 10000" in said[-1].problem


def test_the_end_loads_the_newest_version_and_forgets_the_sums(trainer: Trainer) -> None:
    trainer.fill_anchor()
    micro = finite_micros()[0]

    def answer(said: object) -> list[object]:
        if isinstance(said, MicrobatchCounted):
            trainer.shared.anchor.copy_(trainer.shared.anchor + 1)
            return [Finish(version=1)]
        return []

    trainer.agent.then = answer
    trainer.run(load(), grants((micro, micro + 1)))
    now = torch.empty_like(trainer.shared.anchor)
    trainer.loop.layout.write_anchor(trainer.model, now)
    used = now != 0
    assert torch.equal(now[used], trainer.shared.anchor[used])
    assert all(not sums.any() for _, sums in trainer.stage.sums.items())


def test_a_microbatch_without_a_gradient_is_told_and_not_in_the_sums(trainer: Trainer) -> None:
    order = permuted_range(5, 0, SAMPLES, 0, SAMPLES)
    bad = order.index(POISONED) // MICRO
    trainer.fill_anchor()
    trainer.agent.then = lambda said: [Finish(version=0)] if isinstance(said, Unusable) else []
    whole = Grants(version=0, epoch=0, start=0, stop=SAMPLES, count=10, ranges=((bad, bad + 1),))
    said = trainer.run(load(), whole)
    assert said[-1].micro == bad
    assert "the loss of microbatch" in said[-1].problem and "is nan" in said[-1].problem
    assert not any(isinstance(each, MicrobatchCounted) for each in said)


def test_a_load_drops_the_sums(trainer: Trainer) -> None:
    trainer.fill_anchor()
    micro = finite_micros()[0]
    seen: list[bool] = []

    def answer(said: object) -> list[object]:
        if isinstance(said, MicrobatchCounted):
            return [load(1)]
        if isinstance(said, Loaded) and said.version == 1:
            seen.append(any(sums.any() for _, sums in trainer.stage.sums.items()))
            return [Finish(version=1)]
        return []

    trainer.agent.then = answer
    trainer.run(load(), grants((micro, micro + 1)))
    assert seen == [False]


def test_the_founder_writes_its_values(trainer: Trainer) -> None:
    said = trainer.run(Provide(), load(), Finish(version=0))
    assert any(isinstance(each, Provided) for each in said)
    assert trainer.shared.anchor.any()


def test_a_refusal_is_raised_and_so_is_the_agents_death(trainer: Trainer) -> None:
    with pytest.raises(Refused, match="no room"):
        trainer.run(Stop(code="full", reason="no room"))


def test_the_agents_death_ends_the_wait(trainer: Trainer) -> None:
    trainer.gone = "the agent ended with exit code 1"  # type: ignore[assignment]
    trainer.agent.recv = lambda timeout_s: None  # type: ignore[method-assign]
    with pytest.raises(Refused, match="the agent ended with exit code 1"):
        trainer.loop.run()


def test_what_cannot_be_computed_is_found_before_the_run_hears_of_this_peer(trainer: Trainer) -> None:
    trainer.loop.try_out()
    assert trainer.agent.said == []
    assert not any(sums.any() for _, sums in trainer.stage.sums.items())
    assert not trainer.model[1].running_mean.any(), "the trial left its statistics"
    with torch.no_grad():
        trainer.model[0].weight.fill_(torch.inf)
    with pytest.raises(UserError, match="with the model's first values the loss of microbatch 0"):
        trainer.loop.try_out()


# ---- samples


ITEMS = [(torch.tensor([1.0, 2.0]), 3), (torch.tensor([4.0, 5.0]), 6)]


def test_items_may_be_mappings_tuples_or_single_values() -> None:
    read = Samples(ITEMS, ("x",), ("y",), 0).read(0, 0, 2)
    assert sorted(read.riders["y"].tolist()) == [3, 6] and read.given[0].shape == (2, 2)
    assert read.tokens == 2
    single = Samples([torch.arange(5), torch.arange(5)], ("ids",), (), 0).read(0, 0, 2)
    assert single.tokens == 10 and single.riders == {}


@pytest.mark.parametrize(
    ("data", "inputs", "riders", "words"),
    [
        (ITEMS, ("x",), (), "has 2 values, and inputs and riders name 1: x"),
        (ITEMS, "x", ("y",), r"inputs is a tuple of names: write inputs=\('x',\)"),
        (ITEMS, (), ("y",), "inputs is empty"),
        (ITEMS, ("x",), ("x",), "'x' is in inputs and in riders"),
        ([{"x": 1}], ("x",), ("y",), "an item of the data set has no 'y'; it has x"),
        ([{"x": "text"}], ("x",), (), "'x' of the data set's items is list: tensors are needed"),
        ([(1.0, 2.0)], ("x",), ("y",), "'y' is float64: riders are integers"),
        ((n for n in ()), ("x",), (), "can be read only once"),
    ],
)
def test_data_that_does_not_fit_is_refused(data: object, inputs: Any, riders: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Samples(data, inputs, riders, 0).one_item()


def test_a_stream_of_unknown_length_is_refused() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(10))

    with pytest.raises(UserError, match="a stream of unknown length"):
        Samples(Endless(), ("x",), (), 0)
