"""Muon for matrices and AdamW for the rest: each parameter moves as under the optimizer that is its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

import farflung
from farflung.optim.inner import MuonAdamW, muon
from farflung.optim.recipes import inner_of
from farflung.peer.builtin.llama import Llama
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest, ModelSection

HIDDEN = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.down")
CONFIG = ModelSection(layers=1, width=8, heads=2, context=8)


def learn(model: Llama, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = model.loss(torch.randint(0, 256, (2, 9), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def kinds(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, set[str]]:
    assert isinstance(optimizer, MuonAdamW)
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        type(optimizer._parts[group["part"]]).__name__: {names[id(p)] for p in group["params"]}
        for group in optimizer.param_groups
    }


def test_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    model = Llama(CONFIG)
    found = kinds(farflung.muon(model, 1e-3, adamw=["model.layers.0.mlp.up_proj.weight"]), model)
    assert found["Muon"] == {f"model.layers.0.{name}_proj.weight" for name in HIDDEN}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"} <= found[
        "AdamW"
    ]
    assert len(found["Muon"]) + len(found["AdamW"]) == len(list(model.parameters()))


def test_a_head_of_its_own_is_no_hidden_matrix() -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 6), nn.Linear(6, 11))
    assert kinds(muon(model, 1e-3), model)["Muon"] == {"1.weight"}


def test_each_parameter_moves_as_under_its_own_optimizer_alone() -> None:
    model, other = Llama(CONFIG), Llama(CONFIG)
    hidden = [p for n, p in other.named_parameters() if n.startswith("model.layers") and p.ndim == 2]
    rest = [p for n, p in other.named_parameters() if not (n.startswith("model.layers") and p.ndim == 2)]
    matrices = Muon(hidden, 1e-2, 0.1, 0.95, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(rest, 1e-2, (0.9, 0.95), weight_decay=0.1)
    learn(model, muon(model, 1e-2))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        other.loss(torch.randint(0, 256, (2, 9), generator=generator)).backward()
        for each in (matrices, adamw):
            each.step()
            each.zero_grad()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_schedulers_reach_both_and_a_saved_state_goes_on_the_same() -> None:
    model = Llama(CONFIG)
    optimizer = RunSteps(muon(model, 1e-2), lambda: None).optimizer
    LambdaLR(optimizer, lambda step: 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5e-2}
    learn(model, optimizer)
    twin, saved = Llama(CONFIG, 5), copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict(model.state_dict())
    again = muon(twin, 1.0)
    again.load_state_dict(saved)
    learn(model, optimizer, seed=2)
    learn(twin, again, seed=2)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match="no trainable parameter 'hed'"):
        muon(Llama(CONFIG), 1e-3, adamw=["hed"])
    with pytest.raises(UserError, match="no hidden weight matrix; use AdamW"):
        muon(nn.Sequential(nn.LayerNorm(4)), 1e-3)


def test_run_toml_names_it_with_one_word() -> None:
    model = Llama(CONFIG)
    assert isinstance(inner_of(Manifest(), model), AdamW)
    asked = Manifest.from_toml('[inner]\noptimizer = "muon"\nlr = 0.5', "run.toml")
    assert {group["lr"] for group in inner_of(asked, model).param_groups} == {0.5}
