"""What run.toml asks of optim/: the outer step, the schedule, the inner optimizer.

Called by the agent, the trainer and the simulator, which all read the same manifest.  Must not know how any of these
works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.optim.inner import FOR_HIDDEN_MATRICES, hidden_matrices, inner_optimizer
from farflung.optim.outer import Fused, Nesterov, OuterStep, outer_step_for
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


# ---- lookahead ---------------------------------------------------------------------------------------------
# Where a peer trains on while the round of its frozen work is in flight. Pure, and each peer's own affair: no
# shared bits depend on it, and neither does what the peer owes.
#
# Called by the trainer (and the simulator's) right after a freeze, with `schedule = "overlap"`. Must not know
# rounds, slots or what becomes of the work.
#
# With a momentum of 0.9 the anchor goes several times as far as one round's pseudo-gradient, and what the
# momentum will do is known before the round ends. A peer that stayed where it stands would learn for a whole
# period at a place that the run is about to leave, and once more to go that way. So it goes ahead by what the
# momentum alone will do.
#
# The steps of AdamW and Muon have a bounded length, whatever the round will bring, and plain averaging has no
# momentum: there a peer stays.


def momentum_rate(outer: OuterStep, version: int) -> float:
    """By how much of the momentum alone the step that makes this version will move."""
    return outer.lr * outer.momentum_of(version) ** 2 if isinstance(outer, Nesterov) else 0.0


def ahead(rate: float, anchor_n: Tensor, momentum_n: Tensor, owed_n: Tensor, learned: int) -> Tensor:
    """Of one fragment, fp32 [n].  `learned`: so many values at its beginning are parameters, the rest are buffers.

    anchor - owed is where the peer stands; buffers know no momentum and stay there.
    """
    ahead_n = anchor_n - owed_n
    if rate:
        ahead_n[:learned].sub_(momentum_n[:learned], alpha=rate)
    return ahead_n
