"""Parts: what may be one, how it is built, and which lists are refused, each in one line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.peer.pipeline.parts import Part, Signature, Stage, build, parts_of, run_part, survey_parts
from farflung.protocol.errors import UserError

ITEM = {"x": torch.zeros(8), "labels": torch.zeros((), dtype=torch.int64)}


def mean_loss(logits: Tensor, item: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits, item["labels"])


def survey(parts: list[Any], loss: Callable[..., Tensor] = mean_loss, **item: Tensor) -> Any:
    return survey_parts(parts, ITEM | item, ("x",), loss)


def test_a_stage_is_built_as_it_would_be_in_the_whole() -> None:
    parts: list[Part] = [partial(nn.Linear, 8, 8) for _ in range(4)]
    whole, middle = Stage.build(parts, 0, 4, 7), Stage.build(parts, 1, 3, 7)
    named = dict(whole.named_parameters())
    assert [name for name, _ in middle.named_parameters()] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert all(torch.equal(parameter, named[name]) for name, parameter in middle.named_parameters())
    assert not torch.equal(named["1.weight"], named["2.weight"])
    assert not torch.equal(build(parts[1], 1, 8).weight, named["1.weight"])


def test_building_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build(partial(nn.Linear, 8, 8), 0, 7)
    assert torch.equal(before, torch.get_rng_state())


def test_parts_of_takes_the_children_of_a_sequential_and_keeps_their_values() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3)))
    assert parts_of(model) == [model[0], model[1]]
    assert build(parts_of(model)[0], 0, 5) is model[0]
    with pytest.raises(UserError, match="takes an nn.Sequential, not Linear"):
        parts_of(nn.Linear(2, 2))


def test_the_survey_counts_work_and_bytes_and_says_what_passes() -> None:
    facts = survey([partial(nn.Linear, 8, 4), partial(nn.Linear, 4, 3, bias=False)])
    assert [fact.flops for fact in facts] == [2 * 8 * 4, 2 * 4 * 3]
    assert [fact.memory_bytes for fact in facts] == [36 * 8, 12 * 8]
    assert [fact.gives for fact in facts] == [(Signature("float32", (4,)),), ()]
    assert facts[0].gives[0].bytes == 16


def test_a_frozen_parameter_needs_no_room_for_sums() -> None:
    frozen = nn.Linear(8, 4)
    frozen.requires_grad_(False)
    facts = survey([frozen, partial(nn.Linear, 4, 3)])
    assert facts[0].memory_bytes == 36 * 4


def test_the_survey_copies_no_values_and_changes_no_module() -> None:
    module = nn.BatchNorm1d(8)
    module.register_parameter("large", nn.Parameter(torch.ones(4)))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    survey([module, partial(nn.Linear, 8, 3)])
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


class Masked(nn.Module):
    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x * mask


def test_a_part_is_handed_the_riders_that_its_forward_names() -> None:
    x, mask = torch.ones(2, 3), torch.tensor([[1, 0, 1], [0, 0, 1]])
    (out,) = run_part(0, Masked(), (x,), {"mask": mask, "labels": mask})
    assert torch.equal(out, mask.float())
    with pytest.raises(
        UserError, match=r"part 0 \(Masked\) wants the rider 'mask'; named as riders are: labels"
    ):
        survey([Masked, partial(nn.Linear, 8, 3)])


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Folds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1)


class Gives(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(x)


SHARED = nn.Linear(8, 8)


class Ties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Parameter(SHARED.weight.detach())  # another object over the same memory

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.twin


class Misses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise FileNotFoundError("weights.bin")


class Reads(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width + int(torch.randint(0, 4, (1,))))


HEAD = partial(nn.Linear, 8, 3)
REFUSED = {
    "one module twice": ([SHARED, SHARED, HEAD], r"part 0 \(Linear\) as 'weight' and part 1 .* are one param"),
    "by way of a builder": ([lambda: SHARED, lambda: SHARED, HEAD], "are one parameter: a parameter lies in one part"),
    "one memory": ([SHARED, Ties, HEAD], r"part 1 \(Ties\) as 'twin' are one parameter"),
    "no chain": ([partial(nn.Linear, 8, 4), HEAD], r"part 1 \(Linear\) does not take what part 0 gives, .*\[2, 4\]"),
    "a wrong input": ([partial(nn.Linear, 9, 8), HEAD], r"part 0 \(Linear\) does not take what the inputs are"),
    "too many": ([partial(Gives, lambda x: (x, x)), HEAD], r"does not take what part 0 gives, float32 .* and float32"),
    "a shape from values": ([Nonzero, HEAD], r"part 0 \(Nonzero\) does what depends on the values of its data"),
    "a branch on values": ([Branches, HEAD], r"part 0 \(Branches\) does what depends on the values of its data"),
    "folded samples": ([Folds, HEAD], "the first dimension must be the samples|does not take"),
    "a list": ([partial(Gives, lambda x: [x]), HEAD], r"part 0 \(Gives\) gives list: what passes between parts is"),
    "a None": ([partial(Gives, lambda x: (x, None)), HEAD], "gives a tuple with Tensor, NoneType"),
    "fp64": ([partial(Gives, lambda x: x.double()), nn.Identity(), HEAD], "gives float64: only fp32, bf16, fp16"),
    "no module": ([lambda: 3, HEAD], "part 0 builds int, not an nn.Module"),
    "no builder": ([3, HEAD], "part 0 is int, which builds no module"),
    "no parts": ([], "a model is a list of parts, found an empty list"),
    "a model": (nn.Sequential(SHARED), "a model is a list of parts, found Sequential"),
    "no file": ([Misses, HEAD], r"part 0 \(Misses\) can't be built: FileNotFoundError: weights.bin; each"),
    "reads values": ([partial(Reads, 8), HEAD], r"part 0 \(Reads\) can't be built: RuntimeError: Tensor.item\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_cannot_be_trained_are_refused(name: str) -> None:
    parts, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as told:
        survey(parts)
    assert len(str(told.value).splitlines()) == 1 or "parts are a list such as" in str(told.value)


def test_samples_must_be_the_first_dimension() -> None:
    transposed = partial(Gives, lambda x: x.t())
    with pytest.raises(
        UserError, match=r"gives \[8, 2\] for 2 samples, \[8, 3\] for 3: the first dimension must be"
    ):
        survey([transposed, partial(Gives, lambda x: x.t()), HEAD])


def test_the_loss_must_be_one_number() -> None:
    with pytest.raises(
        UserError, match=r"the loss has shape \[2\]: a scalar is needed, such as its .mean\(\)"
    ):
        survey([HEAD], lambda logits, item: F.cross_entropy(logits, item["labels"], reduction="none"))
    with pytest.raises(UserError, match="the loss gives float: a tensor with one value is needed"):
        survey([HEAD], lambda logits, item: 3.0)


BAD_LOSSES = {
    "counts": (lambda logits, item: (logits.argmax(1) == item["labels"]).sum(), "the loss is int64: a mean loss"),
    "detached": (lambda logits, item: F.cross_entropy(logits.detach(), item["labels"]), "the loss has no gradient"),
    "another name": (lambda logits, item: item["kind"], r"the loss fails on what the last part gives, float32 "
                     r"\[2, 3\], and the riders labels: KeyError: 'kind'; it is called as loss"),
    "one argument": (lambda logits: logits.mean(), "TypeError: .* takes 1 positional argument but 2 were given"),
    "another shape": (lambda logits, item: F.cross_entropy(logits.flatten(), item["labels"]), "the loss fails on"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_that_teaches_nothing_is_refused_before_anything_trains(name: str) -> None:
    loss, words = BAD_LOSSES[name]
    with pytest.raises(UserError, match=words) as told:
        survey([HEAD], loss)
    assert len(str(told.value).splitlines()) == 1


def test_labels_that_the_last_part_has_no_place_for_are_told_before_anything_trains() -> None:
    beyond = {"labels": torch.tensor(3)}
    with pytest.raises(
        UserError, match=r"fails on the labels of a sample of the data set: IndexError: Target 3 is out"
    ):
        survey([HEAD], **beyond)
    survey([partial(nn.Linear, 8, 4)], **beyond)


def test_a_loss_that_is_tried_with_made_up_values_may_be_anything_and_draws_nothing() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    survey([HEAD], lambda logits, item: (logits.log() / 0).mean())
    assert torch.equal(before, torch.get_rng_state())


def test_a_loss_may_look_at_its_labels() -> None:
    def loss(logits: Tensor, item: dict[str, Tensor]) -> Tensor:
        wanted = item["labels"] >= 0
        return F.cross_entropy(logits[wanted], item["labels"][wanted])

    assert len(survey([HEAD], loss)) == 1
