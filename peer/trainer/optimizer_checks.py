"""Does this optimizer train this model, and from where the run puts it?  What a script can get wrong without a word.

Called when a run is joined, and once more after the optimizer's first steps.  Must not know rounds or the agent.

An optimizer that was made before the model was built anew, moved by replacing its parameters, or sharded, steps on
tensors that nobody reads: the peer would send nothing for ever.  One that keeps a copy of the parameters (schedule-free
ones, Lookahead, fp32 masters) steps from its copy: what a round has put into the model is undone by the next step.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.peer.island.sharded import local_of
from farflung.protocol.errors import UserError

log = logging.getLogger(__name__)

# A copy is about as far from its parameter as a few steps go.  A moment, which is of gradients, is another thing.
COPY_WITHIN = 0.05
LOOKED_AT_VALUES = 1 << 24  # a larger parameter is not read for this


def refuse_other_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """UserError if nothing of the model that trains is in the optimizer.  What is no optimizer is told of elsewhere."""
    if not isinstance(optimizer, Optimizer):
        return
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trained and not trained & stepped:
        raise UserError(
            "the optimizer has no parameter of this model: make it of model.parameters() after the model is built, "
            "moved, sharded and given its adapter, and before joining"
        )


def warn_of_copies(optimizer: Optimizer) -> None:
    """Once, after its first steps; not in the midst of a CUDA graph's capture, where nothing may be read."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    name = _copy_in(optimizer)
    if name:
        log.warning(
            "the optimizer seems to keep a copy of the parameters (%r of its state): what a round puts into the model "
            "would be undone by its next step, so its work harms the run; take one that steps from the parameters",
            name,
        )


def _copy_in(optimizer: Optimizer) -> str:
    """The name of a state that holds the values of its parameter; empty: there seems to be none."""
    for parameter in _examples(optimizer):
        now = local_of(parameter.detach()).float()
        size = float(now.norm())
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                away = float((local_of(value.detach()).to(now) - now).norm())
                if size > 0.0 and away < COPY_WITHIN * size:
                    return str(name)
    return ""


def _examples(optimizer: Optimizer) -> list[Tensor]:
    """The largest parameter that may be read, of each group: norms and biases may be all zeros or ones."""
    found = []
    for group in optimizer.param_groups:
        fitting = [each for each in group["params"] if 1 < each.numel() <= LOOKED_AT_VALUES]
        found += [max(fitting, key=lambda each: int(each.numel()))] if fitting else []
    return found
