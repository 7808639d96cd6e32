"""The built-in trainer's own mistakes: told on one line, and the agent that started it hears of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from farflung.peer.builtin import corpus, sizes, trainer
from farflung.peer.builtin.llama import Llama
from farflung.peer.footprint import FreeMemory, MemoryRules
from farflung.protocol.manifest import Manifest, ModelSection


def test_a_peer_without_the_optimizers_package_is_told_what_to_install_and_gives_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest.from_toml('[inner]\noptimizer = "soap"\n', "run.toml")
    given_up: list[bool] = []
    connection = SimpleNamespace(manifest=manifest, abandon=lambda: given_up.append(True))
    monkeypatch.setattr(trainer, "connect", lambda: connection)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    assert trainer.main([]) == 2 and given_up == [True]
    said = capsys.readouterr().err
    assert "pip install pytorch-optimizer" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "toml",
    [
        "[model]\nlayers = 1\nwidth = 32768\nheads = 64",
        "[model]\ncontext = 1048576\nwidth = 32768\nlayers = 1\nheads = 64",
        "[model]\ncontext = 1048576\n[data]\nbatch = 65536\nlease_samples = 65536",
        "[model]\ncontext = 1048576\n[pipeline]\nbatch = 4\nmicro = 65536\n[merge]\npolicy = 'mean'",
        "[model]\ncontext = 1048576\n[pipeline]\nbatch = 4\nmicro = 65536\nstages = 2\n[merge]\npolicy = 'mean'\n"
        "[outer]\nstep = 'adamw'",
    ],
)
def test_a_run_that_can_not_fit_is_refused_in_a_line_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toml: str
) -> None:
    manifest, given_up = Manifest.from_toml(toml, "run.toml"), list[bool]()
    connection = SimpleNamespace(manifest=manifest, abandon=lambda: given_up.append(True))
    monkeypatch.setattr(trainer, "connect", lambda: connection)
    monkeypatch.setattr(trainer, "room_on", lambda device: FreeMemory(None, 64e9))
    for module, name in ((trainer, "model_of"), (trainer, "made_by_first"), (corpus, "load_corpus")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("something was made"))
    assert trainer.main([]) == 2 and given_up == [True]
    said = capsys.readouterr().err
    assert "run 'my-run' does not fit this machine" in said and said.count("\n") == 1
    assert "64.0GB are free" in said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layers", "width", "context", "batch"), [(2, 64, 64, 8), (4, 128, 128, 4), (1, 96, 512, 2)]
)
def test_what_is_counted_of_a_run_is_less_than_it_takes_and_not_much(
    layers: int, width: int, context: int, batch: int, precision: str
) -> None:
    toml = f"[model]\nlayers = {layers}\nwidth = {width}\ncontext = {context}\n[data]\nbatch = {batch}\n"
    toml += f"[inner]\nprecision = '{precision}'"
    manifest = Manifest.from_toml(toml, "run.toml")
    model = Llama(ModelSection(layers=layers, width=width, heads=4, context=context))
    assert sizes.values_of(manifest.model) == sum(each.numel() for each in model.parameters())
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in weights:
            kept[at] = tensor
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(torch.zeros(batch, context + 1, dtype=torch.int64))
    real = sum(each.untyped_storage().nbytes() for each in kept.values())
    assert 0.65 * real < sizes.step_bytes(manifest, batch) <= real


def test_small_runs_fit_small_machines() -> None:
    """No run of the examples is refused where it ran before."""
    manifest = Manifest()
    sizes.shape_here(manifest, MemoryRules.of(manifest), FreeMemory(None, 20e6))
    sizes.shape_here(manifest, MemoryRules.of(manifest), FreeMemory(None, 0.0))  # a system that does not say


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (1, 0), (4, 1)])
def test_of_several_gpus_it_says_which_it_takes_and_how_to_use_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, lines: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert trainer.best_device().type == ("cuda" if count else "cpu")
    said = capsys.readouterr().err
    assert said.count("\n") == lines
    if lines:
        assert "cuda:0 (Some GPU), and not on 3 more" in said and "CUDA_VISIBLE_DEVICES" in said
