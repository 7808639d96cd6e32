"""What a script can get wrong without a word: weights that it loads after it joined, and an optimizer of other values.

Called when a run is joined, and the optimizer is looked at once more after its first steps.  Must not know rounds, the
channel, the layout or the agent.

Weights: a pseudo-gradient is what the model was loaded with minus what it is now, so a checkpoint that
`Trainer.train(resume_from_checkpoint=...)` or `load_state_dict` puts in between is the largest "step" of all: it would
move every peer.  Values that a script writes by itself, clipped weights say, are its own affair.  The hooks lie in the
user's modules.  A copy of such a module (`copy.deepcopy`) may load what it likes, and one that is pickled
(`torch.save(model)`) takes a hook along that does nothing.

Optimizers: one that was made before the model was built anew, moved by replacing its parameters, or sharded, steps on
tensors that nobody reads: the peer would send nothing for ever.  One that keeps a copy of the parameters (schedule-free
ones, Lookahead, fp32 masters) steps from its copy: what a round has put into the model is undone by the next step.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from farflung.peer.island.sharded import local_of
from farflung.protocol.errors import UserError

log = logging.getLogger(__name__)

# A copy is about as far from its parameter as a few steps go.  A moment, which is of gradients, is another thing.
COPY_WITHIN = 0.05
LOOKED_AT_VALUES = 1 << 24  # a larger parameter is not read for this

LOADED_AFTER_JOIN = (
    "weights were loaded into the model after it joined the run: they would be sent to everybody as if they had been "
    "learned; the run's state is in the model already (no resume_from_checkpoint, no load_state_dict): load what the "
    "run is to begin with before farflung.join, and what is only to be looked at into a copy of the model"
)


class LoadWatch:
    """Holds the hooks on one model and all modules in it."""

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[RemovableHandle] = [
            module.register_load_state_dict_pre_hook(Refusal())  # type: ignore[no-untyped-call]
            for module in model.modules()
        ]

    def end(self) -> None:
        """From now on the model is the script's alone.  Safe to repeat."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Refusal:
    """The hook of one module.  It is called before anything is written."""

    def __call__(self, *_: Any) -> NoReturn:
        raise UserError(LOADED_AFTER_JOIN)

    def __reduce__(self) -> tuple[type[Nothing], tuple[()]]:
        """What it becomes in a copy of the model."""
        return Nothing, ()


class Nothing:
    """The hook of a module that no run is in."""

    def __call__(self, *_: Any) -> None:
        pass


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
