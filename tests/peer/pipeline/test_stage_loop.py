"""The work of a stage: the bits of an unsplit process, whatever is in the parts and wherever they are cut."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.peer.pipeline.parts import Stage
from farflung.peer.pipeline.stage_loop import MicroActivations, NonFiniteTensor, StageLoop
from farflung.protocol.errors import UserError
from rig.unsplit import BUILT_IN, LLAMA, SEQUENTIAL, Task, train_pipeline, train_unsplit


class Pair(nn.Module):
    """Takes one tensor, gives three: one that is changed, one as it is for later, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.mix(x), x, torch.arange(len(x), device=x.device) % 3


class Pass(nn.Module):
    """Leaves the second tensor alone, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, y: Tensor, x: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.drop(F.gelu(self.mix(y))), x, kinds


class Join(nn.Module):
    def __init__(self, uses_x: bool) -> None:
        super().__init__()
        self.uses_x = uses_x
        self.kinds = nn.Embedding(3, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, y: Tensor, x: Tensor, kinds: Tensor) -> Tensor:
        return self.head(y + self.kinds(kinds) + (x if self.uses_x else 0))


class Narrow(nn.Module):
    """fp32 in and out, bf16 within: the dtypes of a model may be mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.to(torch.bfloat16))


class Widen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.float())


class Adapted(nn.Module):
    """A frozen matrix with a small one beside it, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Spectral(nn.Module):
    """A buffer that decides what comes out, and changes with every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return self.mix(x * self.scale)


def frozen() -> nn.Module:
    return nn.Linear(6, 6).requires_grad_(False)


def rows(dice: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, generator=dice), torch.randint(4, (4,), generator=dice)


def kind_loss(logits: Tensor, item: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits, item["labels"])


LINEAR = partial(nn.Linear, 6, 6)
HEAD = partial(nn.Linear, 6, 4)
SMALL = {
    "tuples": [LINEAR, Pair, Pass, Pass, partial(Join, True)],
    "a tensor that nobody uses": [LINEAR, Pair, Pass, partial(Join, False)],
    "mixed dtypes": [LINEAR, Narrow, Widen],
    "adapters": [Adapted, Adapted, HEAD],
    "frozen below": [frozen, frozen, Adapted, HEAD],
    "frozen above": [LINEAR, frozen, frozen, partial(nn.Linear, 6, 4)],
    "buffers that matter": [LINEAR, Spectral, Spectral, HEAD],
    "in place": [LINEAR, partial(nn.ReLU, inplace=True), LINEAR, partial(nn.ReLU, inplace=True), HEAD],
}
TASKS = {
    name: Task(lambda seed, parts=parts: list(parts), kind_loss, rows) for name, parts in SMALL.items()
} | {"built in": BUILT_IN, "BatchNorm and dropout": SEQUENTIAL}
UPDATES = 3


@pytest.mark.parametrize("name", TASKS)
def test_any_cuts_give_the_bits_of_one_process(name: str) -> None:
    task = TASKS[name]
    expected = train_unsplit(task, 1, UPDATES)
    count = len(task.parts(1))
    for stages in range(1, min(count, 4) + 1):
        for cuts in list(combinations(range(1, count), stages - 1))[:4]:
            found = train_pipeline(task, 1, UPDATES, list(cuts))[:2]
            assert found == expected, cuts


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_llama_of_transformers_in_stages_gives_the_bits_of_one_process() -> None:
    expected = train_unsplit(LLAMA, 1, UPDATES)
    for cuts in ([], [2], [1, 3], [1, 2, 4]):
        assert train_pipeline(LLAMA, 1, UPDATES, cuts)[:2] == expected, cuts


# ---- one stage


def loop_of(*parts: nn.Module, first: int = 0, loss: object = kind_loss) -> StageLoop:
    return StageLoop(Stage(first, list(parts)), 0, loss)  # type: ignore[arg-type]


MICRO = MicroActivations(0, 0, 4, {"labels": torch.tensor([0, 1, 2, 3])})


def test_on_the_way_there_no_graph_is_kept_and_nothing_is_summed() -> None:
    loop = loop_of(nn.Linear(6, 6), first=1, loss=None)
    x = torch.randn(4, 6)
    (out,) = loop.forward(MICRO, (x,))
    assert not out.requires_grad
    assert loop.open_count == 1
    assert all(not sums.any() for _, sums in loop.sums.items())
    (gradient,) = loop.backward(MICRO, (x,), (torch.ones(4, 6),))
    assert gradient.shape == (4, 6) and loop.open_count == 0


def test_the_first_stage_has_no_gradient_to_pass_on() -> None:
    loop = loop_of(nn.Linear(6, 4))
    gradients, _ = loop.last(MICRO, (torch.randn(4, 6),))
    assert gradients == ()


def test_sums_are_of_loss_times_tokens() -> None:
    once, twice = loop_of(nn.Linear(6, 4)), loop_of(nn.Linear(6, 4))
    twice.stage.load_state_dict(once.stage.state_dict())
    x = torch.randn(4, 6)
    once.last(MICRO, (x,))
    twice.last(replace(MICRO, tokens=8), (x,))
    for (_, one), (_, two) in zip(once.sums.items(), twice.sums.items(), strict=True):
        assert one.any() and torch.equal(two, 2 * one)


def test_sums_of_narrow_parameters_are_wide() -> None:
    loop = loop_of(Narrow(), Widen())
    for number in range(3):
        loop.last(replace(MICRO, number=number), (torch.randn(4, 6),))
    assert {sums.dtype for _, sums in loop.sums.items()} == {torch.float32}
    narrow = dict(loop.sums.items())["0.mix.weight"]
    assert not torch.equal(narrow, narrow.to(torch.bfloat16).float()), "rounded to bf16 between microbatches"


def test_a_loss_that_is_no_number_leaves_sums_and_buffers_as_they_were() -> None:
    loop = loop_of(nn.BatchNorm1d(6), nn.Linear(6, 4))
    loop.last(MICRO, (torch.randn(4, 6),))
    before = [sums.clone() for _, sums in loop.sums.items()]
    buffers = [buffer.clone() for buffer in loop.stage.buffers()]
    with pytest.raises(NonFiniteTensor, match="the loss of microbatch 5 of version 0 is nan"):
        loop.last(replace(MICRO, number=5), (torch.full((4, 6), torch.nan),))
    assert all(torch.equal(was, now) for was, (_, now) in zip(before, loop.sums.items(), strict=True))
    assert all(torch.equal(was, now) for was, now in zip(buffers, loop.stage.buffers(), strict=True))


class Steep(torch.autograd.Function):
    """A finite value with a gradient that is not."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.inf


def test_a_gradient_that_is_not_finite_leaves_the_sums_as_they_were() -> None:
    loop = loop_of(nn.Linear(6, 4))
    loop.last(MICRO, (torch.randn(4, 6),))
    before = [sums.clone() for _, sums in loop.sums.items()]
    loop._loss = lambda logits, item: Steep.apply(logits).sum()
    with pytest.raises(NonFiniteTensor, match="the gradient of microbatch 5 of version 0 is not finite"):
        loop.last(replace(MICRO, number=5), (torch.randn(4, 6),))
    assert all(torch.equal(was, now) for was, (_, now) in zip(before, loop.sums.items(), strict=True))


def test_a_gradient_for_the_stage_before_that_is_not_finite_leaves_the_sums_as_they_were() -> None:
    """Its own gradients may be finite all the same: what cannot be passed on counts nowhere."""

    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return Steep.apply(x) + self.shift

    loop = loop_of(Sharp(), first=1, loss=None)
    x = torch.randn(4, 6)
    loop.forward(MICRO, (x,))
    with pytest.raises(NonFiniteTensor, match="the gradient of microbatch 0 of version 0 is not finite"):
        loop.backward(MICRO, (x,), (torch.ones(4, 6),))
    assert all(not sums.any() for _, sums in loop.sums.items())
    assert loop.stage.get_parameter("1.shift").grad is None


def test_a_microbatch_that_went_forward_elsewhere_counts_in_the_buffers_on_its_way_back() -> None:
    """Its peer was lost after the next stage had it: only its gradient comes here."""
    x, gradient = torch.randn(4, 6), torch.ones(4, 6)
    both, only_back = (loop_of(nn.BatchNorm1d(6), first=1, loss=None) for _ in range(2))
    both.forward(MICRO, (x,))
    one, other = both.backward(MICRO, (x,), (gradient,)), only_back.backward(MICRO, (x,), (gradient,))
    assert torch.equal(one[0], other[0])
    for (name, had), now in zip(both.stage.named_buffers(), only_back.stage.buffers(), strict=True):
        assert torch.equal(had, now), name
    assert both.stage.get_buffer("1.num_batches_tracked") == 1
    with pytest.raises(NonFiniteTensor):
        only_back.backward(replace(MICRO, number=1), (x,), (gradient * torch.inf,))
    assert only_back.stage.get_buffer("1.num_batches_tracked") == 1, "what does not count moves no buffer"


def test_a_forward_pass_can_be_undone() -> None:
    loop = loop_of(nn.BatchNorm1d(6), first=1, loss=None)
    loop.forward(MICRO, (torch.randn(4, 6),))
    loop.undo_forward(0)
    assert loop.open_count == 0
    assert loop.stage.get_buffer("1.num_batches_tracked") == 0
    assert not loop.stage.get_buffer("1.running_mean").any()


def test_a_loss_without_a_way_back_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="the loss depends on no parameter that trains"):
        loop_of(frozen(), nn.Linear(6, 4).requires_grad_(False)).last(MICRO, (torch.randn(4, 6),))
    with pytest.raises(UserError, match=r"the loss has shape \[4, 4\]: a scalar is needed"):
        loop_of(nn.Linear(6, 4), loss=lambda logits, item: logits).last(MICRO, (torch.randn(4, 6),))


def test_dropping_forgets_sums_and_what_is_open() -> None:
    loop = loop_of(nn.Linear(6, 6), first=1, loss=None)
    loop.forward(MICRO, (torch.randn(4, 6),))
    loop.forward(replace(MICRO, number=1), (torch.randn(4, 6),))
    loop.backward(MICRO, (torch.randn(4, 6),), (torch.ones(4, 6),))
    loop.drop()
    assert loop.open_count == 0
    assert all(not sums.any() for _, sums in loop.sums.items())


def test_what_is_drawn_does_not_depend_on_what_was_drawn_before_and_leaves_nothing_behind() -> None:
    x = torch.ones(64, 6)
    loop = loop_of(nn.Dropout(0.5), nn.Linear(6, 6), first=1, loss=None)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (one,) = loop.forward(MICRO, (x,))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    (again,) = loop.forward(MICRO, (x,))
    (other,) = loop.forward(replace(MICRO, number=1), (x,))
    (later,) = loop.forward(replace(MICRO, version=1), (x,))
    assert torch.equal(one, again)
    assert not torch.equal(one, other) and not torch.equal(one, later)
