"""One NaN costs a peer at most one round: weights, buffers and what the optimizer remembers are finite again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peer.trainer.test_inner_loop import FakeChannel, load
from torch import Tensor, nn

from farflung.optim.inner import muon
from farflung.peer.checks.finite import Remembered, not_finite, tensors_in
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Frozen, LeasesNow, LoadState, ResumeSteps
from farflung.peer.trainer.inner_loop import NOT_FINITE_MOST, UNSTEPPED_LOOK, InnerLoop
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Lease
from farflung.protocol.round_words import Used

EVERY = 3
MANIFEST = {"round": {"sync_every": EVERY, "chunk_kb": 1}, "data": {"batch": 2, "lease_samples": 6}}


class Quantised:
    """As optimizers keep 8-bit moments: codes, and a scale that is NaN where a moment was."""

    def __init__(self) -> None:
        self.codes = torch.zeros(4, dtype=torch.uint8)
        self.scale = torch.ones(1)


class EightBit(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                kept = self.state[each].setdefault("moment", [Quantised()])[0]
                kept.scale = kept.scale * 0.5 + each.grad.abs().max()
                with torch.no_grad():
                    each.sub_(1e-3 * each.grad * kept.scale)


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), 1e-2, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), 1e-2, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 1e-2, momentum=0.5),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), 1e-2),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), 1e-2, max_iter=2),
    "muon": lambda m: muon(m, 1e-2),
    "8 bit": lambda m: EightBit(m.parameters(), 1e-2),
}


class Trainer:
    def __init__(self, folder: Path, optimizer: str = "adamw", **rules: object) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        self.channel = FakeChannel()
        count = 2 if rules.get("schedule") == "streaming" else 1
        content = {"round": MANIFEST["round"] | {"fragments": count}, "outer": rules}
        manifest = Manifest.model_validate(MANIFEST | content)
        self.loop = InnerLoop(self.channel, self.model, manifest, clock=lambda: 0.0)
        self.shared = SharedState.create(folder, self.loop.layout.total_elements)
        self.loop.layout.write_anchor(self.model, self.shared.anchor)
        inner = OPTIMIZERS[optimizer](self.model)
        self.loop.watch_optimizer(inner)
        fragments = range(manifest.fragments)
        self.channel.will_say(self.shared.as_message(), *(load(0, fragment=each) for each in fragments))
        self.loop.attach()
        self.optimizer = RunSteps(inner, self.loop.after_step, self.loop.before_step).optimizer

    def step(self, poison: float = 0.0) -> list[Frozen]:
        """`poison`: added to the loss, times a parameter."""
        self.channel.take()
        torch.manual_seed(self.loop.step_count)
        inputs = torch.randn(8, 4)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = (self.model(inputs) - inputs).square().mean()
            if poison:
                loss = loss + poison * next(self.model.parameters()).flatten()[0]
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            self.optimizer.step()
        return [word for word in self.channel.said if isinstance(word, Frozen)]

    def period(self, *answers: object, poison: float = 0.0) -> Frozen:
        self.channel.will_answer(*answers)
        found = [word for number in range(EVERY) for word in self.step(poison if number == 1 else 0.0)]
        assert len(found) == 1
        return found[0]

    def frozen(self, word: Frozen) -> Tensor:
        return self.loop.parts[word.fragment].part(self.shared.slots[word.slot])

    def slot(self) -> Tensor:
        return self.shared.slots[0]

    @property
    def is_finite(self) -> bool:
        state = [each for each in self.optimizer.state.values() for each in tensors_in(each)]
        told = {str(at): each for at, each in enumerate([*self.model.state_dict().values(), *state])}
        return not not_finite(told)


DROP = LoadState(version=0, keep="drop", slot=0, tokens=0, steps=0, spare=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_nan_costs_one_round(optimizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(tmp_path, optimizer)
    trainer.period(ResumeSteps(spare=0))
    assert trainer.slot().isfinite().all()
    trainer.period(DROP, poison=math.nan)
    assert not trainer.slot().isfinite().all(), "the agent finds it by itself, and the round goes on without"
    assert "step 6: 0.weight (and" in caplog.text and "the model is back at version 0" in caplog.text
    assert trainer.is_finite
    frozen = trainer.period(load(1, keep="all"))
    assert trainer.slot().isfinite().all() and trainer.slot().any() and frozen.steps == EVERY
    assert trainer.is_finite


def test_buffers_are_those_of_the_run_again(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    before = {name: each.clone() for name, each in trainer.loop.layout.buffers(trainer.model).items()}
    trainer.period(DROP, poison=math.nan)
    found = trainer.loop.layout.buffers(trainer.model)
    assert before and all(torch.equal(found[name], each) for name, each in before.items())


def test_a_trainer_that_goes_on_during_the_round_makes_no_new_nan(tmp_path: Path) -> None:
    """With overlap steps are taken before the agent has said what to load; with fragments, in between two of them."""
    trainer = Trainer(tmp_path, schedule="overlap")
    trainer.period(poison=math.nan)
    assert trainer.is_finite, "before the agent has said a word"
    trainer.step()
    assert trainer.is_finite


def test_one_fragment_that_is_not_finite_puts_all_of_them_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path, schedule="streaming")
    while "is back at version 0" not in caplog.text:
        for word in trainer.step(poison=math.nan):
            finite = trainer.frozen(word).isfinite().all()
            trainer.channel.will_say(ResumeSteps(spare=0, fragment=word.fragment) if finite else DROP)
    assert trainer.is_finite
    assert [account.steps for account in trainer.loop.machine.accounts] == [0, 0]
    for _ in range(2 * EVERY):
        for word in trainer.step():
            assert trainer.frozen(word).isfinite().all()
            trainer.channel.will_say(ResumeSteps(spare=0, fragment=word.fragment))
    assert trainer.is_finite


def test_what_the_optimizer_remembers_is_reset_though_the_weights_are_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that is divided by an infinity moves nothing: the parameter would never learn again."""
    trainer = Trainer(tmp_path)
    trainer.step()
    weight = next(trainer.model.parameters())
    trainer.optimizer.state[weight]["exp_avg_sq"].fill_(math.inf)
    trainer.channel.will_answer(load(1, keep="all"))
    trainer.step()
    trainer.step()
    assert "what the optimizer remembered of 0.weight was not finite and is reset" in caplog.text
    assert trainer.is_finite and trainer.slot().isfinite().all()
    assert len(trainer.optimizer.state) > 1, "of the others all is kept"


def test_the_samples_of_the_lost_steps_are_not_read_again(tmp_path: Path) -> None:
    """One of them may have done it, and would do it to every peer, one by one."""
    trainer = Trainer(tmp_path)
    leases = LeasesNow(leases=(Lease.at(1, 0, 0, 100, (0,)),))
    trainer.channel.will_say(leases)
    trainer.step()
    trainer.channel.will_answer(leases, DROP)
    for number in range(2):
        trainer.loop.hand_out(trainer.loop.next_batch(100, 2), 2)
        trainer.step(math.nan if number else 0.0)
    [span] = trainer.loop.next_batch(100, 2)
    assert span.start == 4
    trainer.loop.hand_out((span,), 2)
    frozen = trainer.period(ResumeSteps(spare=0))
    assert frozen.used == (Used(1, 6),) and frozen.tokens == 2 + 2


def test_several_rounds_in_a_row_end_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for _ in range(NOT_FINITE_MOST - 1):
        trainer.period(DROP, poison=math.nan)
    with pytest.raises(
        UserError, match=r"0.weight .* was not finite at 3 freezes in a row, last at step 9: lower the"
    ):
        trainer.period(DROP, poison=math.nan)


def test_one_good_round_in_between_and_the_count_begins_again(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for _ in range(NOT_FINITE_MOST):
        trainer.period(DROP, poison=math.nan)
        trainer.period(ResumeSteps(spare=0))
    assert trainer.is_finite


def test_under_a_scaler_that_skips_every_step_the_weights_are_put_back_without_a_freeze(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    trainer.channel.will_say(LeasesNow(leases=(Lease.at(1, 0, 0, 1000, (0,)),)))
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(math.nan)
    for _ in range(UNSTEPPED_LOOK + 1):
        trainer.loop.hand_out(trainer.loop.next_batch(1000, 2), 2)
        trainer.optimizer.zero_grad()
        loss = trainer.model(torch.randn(8, 4)).square().mean()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(trainer.optimizer)
        scaler.update()
    assert trainer.loop.step_count > 0 and trainer.is_finite
    assert scaler.get_scale() >= 2.0 ** (16 - UNSTEPPED_LOOK)
    assert "the model is back at version 0" in caplog.text


def test_what_a_captured_graph_reads_stays_in_its_place() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], 1e-2)
    remembered = Remembered(optimizer)
    weight.grad = torch.full((3,), math.nan)
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = True
    moment = optimizer.state[weight]["exp_avg"]
    assert remembered.not_finite() == [weight] and remembered.forget([weight]) == 1
    assert optimizer.state[weight]["exp_avg"] is moment and not moment.any()


def test_rates_that_an_optimizer_thinks_up_are_those_of_the_beginning() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 1e-2)
    optimizer.param_groups[0]["d"] = 1e-6
    remembered = Remembered(optimizer)
    optimizer.param_groups[0]["d"] = math.nan
    remembered.forget([weight])
    assert optimizer.param_groups[0]["d"] == 1e-6


def test_all_tensors_of_a_state_are_looked_at() -> None:
    deep = {
        "q": [torch.ones(1), (torch.ones(2),)],
        "o": Quantised(),
        "n": 3,
        "sparse": torch.eye(2).to_sparse(),
    }
    assert sorted(each.numel() for each in tensors_in(deep)) == [1, 1, 2, 2, 4]
    pair = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert [each.numel() for each in tensors_in([pair])] == [2, 3]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_only_what_is_not_finite_is_named(dtype: torch.dtype) -> None:
    great = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    bad = torch.zeros(64, dtype=dtype)
    bad[7] = math.nan
    assert (
        not_finite({"great": great, "none": torch.zeros(0), "number": torch.ones(3, dtype=torch.int64)}) == []
    )
    assert not_finite({"great": great, "bad": bad}) == ["bad"]
    assert not_finite({"bad": bad * 0 + math.inf}) == ["bad"]
