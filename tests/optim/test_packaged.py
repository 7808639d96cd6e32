"""Inner optimizers from other people's packages: one word each, through loads, and one line where a package is missing.

Needs the packages that `make optimizers` installs; what is missing is skipped, and said.
"""

from __future__ import annotations

import sys
from typing import Any, get_args

import pytest
import torch
from learning.optimizer_state import state_tensors
from torch.optim.lr_scheduler import LambdaLR

import farflung
from farflung.optim.inner import FOR_HIDDEN_MATRICES, PACKAGED, RANK_SHARE, WORDS, OptimizerOptions
from farflung.optim.recipes import inner_of, inner_of_stage
from farflung.peer.builtin.llama import Llama
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import InnerSection, Manifest, ModelSection

CONFIG = ModelSection(layers=2, width=64, heads=2, context=16)
LR = 1e-3
ROWS = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(1))


def asked_for(word: str) -> Manifest:
    return Manifest.from_toml(f'[inner]\noptimizer = "{word}"\nlr = {LR}\nbetas = [0.9, 0.99]', "run.toml")


def made(word: str, model: Llama) -> Any:
    if word in PACKAGED:
        pytest.importorskip(PACKAGED[word].module.partition(".")[0])
    return inner_of(asked_for(word), model)


def step(model: Llama, optimizer: torch.optim.Optimizer) -> float:
    loss = model.loss(ROWS)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_run_toml_knows_the_words_of_the_table() -> None:
    assert get_args(InnerSection.model_fields["optimizer"].annotation) == WORDS
    assert set(FOR_HIDDEN_MATRICES) <= set(WORDS)
    with pytest.raises(
        UserError, match=r'optimizer: expected "adamw" or "muon" or "adamw8bit".*found "adam"'
    ):
        asked_for("adam")
    with pytest.raises(UserError, match="expected one of adamw, muon, .*, found 'adam'"):
        farflung.inner_optimizer("adam", Llama(CONFIG), LR)


@pytest.mark.parametrize("word", PACKAGED)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGED[word].module.partition(".")[0], None)
    for name in [name for name in sys.modules if name.startswith(PACKAGED[word].module)]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"pip install {PACKAGED[word].install}$") as told:
        inner_of(asked_for(word), Llama(CONFIG))
    assert f'[inner] optimizer = "{word}"' in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("word", WORDS)
def test_it_learns_goes_on_from_what_is_loaded_and_keeps_its_state(word: str) -> None:
    model = Llama(CONFIG)
    optimizer = RunSteps(made(word, model), lambda: None).optimizer
    layout, before = ModelLayout.of(model, 256), {id(p): p for p in model.parameters()}
    first = step(model, optimizer)
    for _ in range(10):
        last = step(model, optimizer)
    assert last < first - 0.05, (first, last)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == before.keys()
    state = [tensor.clone() for tensor in state_tensors(optimizer)]
    flat = torch.zeros(layout.total_elements)
    layout.write_anchor(model, flat)
    flat += 1.0
    layout.load(model, flat)
    for kept, now in zip(state, state_tensors(optimizer), strict=True):
        assert torch.equal(kept, now), "a load is none of the optimizer's business"
    step(model, optimizer)
    moved = torch.zeros_like(flat)
    layout.write_anchor(model, moved)
    inside = sum(p.numel() for p in model.parameters())
    far = float((moved - flat)[:inside].abs().max())
    assert 0.0 < far < 0.2, "the step begins where the load ended, not where the optimizer was before"
    assert bool(torch.isfinite(moved).all())


@pytest.mark.parametrize("word", WORDS)
def test_schedulers_and_the_small_first_steps_reach_every_group(word: str) -> None:
    model = Llama(CONFIG)
    inner = made(word, model)
    steps, optimizer = RunSteps(inner, lambda: None), inner
    schedule = LambdaLR(optimizer, lambda number: 0.5)
    assert {float(group["lr"]) for group in inner.param_groups} == {0.5 * LR}
    sizes = []
    for small in (True, False):
        step(model, optimizer)  # SOAP's first step only looks
        begin = [p.detach().clone() for p in model.parameters()]
        if small:
            steps.start_small(1000)
        else:
            steps.start_small(0)
        step(model, optimizer)
        schedule.step()
        pairs = zip(begin, model.parameters(), strict=True)
        sizes.append(max(float((a - b.detach()).abs().max()) for a, b in pairs))
    assert 0.0 < sizes[0] < sizes[1] / 20


@pytest.mark.parametrize("word", WORDS)
def test_a_stage_without_a_hidden_matrix_is_trained_too(word: str) -> None:
    if word in PACKAGED:
        pytest.importorskip(PACKAGED[word].module.partition(".")[0])
    stage = torch.nn.Sequential(torch.nn.Embedding(300, 16))
    optimizer = inner_of_stage(asked_for(word), stage, is_last=False)
    for _ in range(2):
        stage(torch.arange(8)).square().sum().backward()
        optimizer.step()
    assert isinstance(optimizer, torch.optim.AdamW) == (word == "adamw" or word in FOR_HIDDEN_MATRICES)


def test_matrices_are_learned_in_a_quarter_of_their_dimensions_and_the_rest_as_ever() -> None:
    pytest.importorskip("galore_torch")
    model = Llama(CONFIG)
    groups = made("galore", model).param_groups
    matrices = OptimizerOptions(model, LR, (0.9, 0.99), 0.1).matrices
    assert [group.get("rank") for group in groups] == [None, CONFIG.width // RANK_SHARE]
    assert [id(p) for p in groups[1]["params"]] == [id(p) for p in matrices]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_8_bits_are_8_bits_and_adam_mini_has_one_rate_a_row() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("adam_mini")
    model = Llama(CONFIG)
    weight = next(p for n, p in model.named_parameters() if n == "model.layers.0.mlp.up_proj.weight")
    eight, mini = made("adamw8bit", model), made("adam-mini", model)
    for optimizer in (eight, mini):
        step(model, optimizer)
    assert eight.state[weight]["state1"].dtype == torch.uint8
    assert mini.state[weight]["vmean"].shape == (weight.shape[0], 1)
    tables = next(p for n, p in model.named_parameters() if n == "model.embed_tokens.weight")
    assert mini.state[tables]["vmean"].shape == (256, 1)
