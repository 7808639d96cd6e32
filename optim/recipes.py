"""What run.toml asks of optim/: the outer step, the schedule, the inner optimizer.

Called by the agent, the trainer and the simulator, which all read the same manifest.  Must not know how any of these
works.
"""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer

from farflung.optim.inner import muon
from farflung.optim.outer import Fused, OuterStep, outer_step_for
from farflung.protocol.manifest import Manifest


def outer_of(manifest: Manifest, fused: Fused | None = None) -> OuterStep:
    return outer_step_for(manifest.outer_numbers, fused)


def inner_of(manifest: Manifest, model: nn.Module) -> Optimizer:
    """For the built-in trainer; a script brings an optimizer of its own."""
    inner = manifest.inner
    if inner.optimizer == "muon":
        return muon(model, inner.lr, inner.betas, inner.weight_decay)
    return AdamW(model.parameters(), inner.lr, inner.betas, weight_decay=inner.weight_decay)
