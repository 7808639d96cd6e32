"""What run.toml asks of optim/: the outer step, the schedule, the inner optimizer.

Called by the agent, the trainer and the simulator, which all read the same manifest.  Must not know how any of these
works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from farflung.optim.inner import FOR_HIDDEN_MATRICES, hidden_matrices, inner_optimizer
from farflung.optim.outer import Fused, OuterStep, outer_step_for
from farflung.protocol.manifest import Manifest
from farflung.protocol.run_terms import Terms


def outer_of(manifest: Manifest, fused: Fused | None = None) -> OuterStep:
    return outer_step_for(manifest.outer_numbers, fused)


def outer_steps_of(terms: Terms, fused: Fused | None = None) -> Callable[[int], OuterStep]:
    """Which step makes a version: that of the terms in which its round began."""
    steps: dict[int, OuterStep] = {}

    def making(version: int) -> OuterStep:
        number = terms.number_at(version - 1)
        if number not in steps:
            steps[number] = outer_of(terms.at(version - 1), fused)
        return steps[number]

    return making


def inner_of(manifest: Manifest, model: nn.Module) -> Optimizer:
    """For the built-in trainer; a script brings an optimizer of its own."""
    return _inner_of(manifest, model, manifest.inner.optimizer)


def inner_of_stage(manifest: Manifest, stage: nn.Module, is_last: bool) -> Optimizer:
    """For one stage of a model.  What the last layer of all gives is for the loss: that is no hidden matrix, though no
    embedding beside it says so.  A stage without a hidden matrix takes AdamW alone, where the word is about those."""
    head = [f"{name}.weight" for name, m in stage.named_modules() if is_last and isinstance(m, nn.Linear)][
        -1:
    ]
    word = manifest.inner.optimizer
    of_matrices = word in FOR_HIDDEN_MATRICES and not hidden_matrices(stage, head)
    return _inner_of(manifest, stage, "adamw" if of_matrices else word, head)


def _inner_of(manifest: Manifest, model: nn.Module, word: str, head: Sequence[str] = ()) -> Optimizer:
    inner = manifest.inner
    return inner_optimizer(word, model, inner.lr, inner.betas, inner.weight_decay, head)
