"""Weights that a script loads into its model after it joined: refused, for they would be sent as if they were learned.

Put on by `farflung.join`, taken off when the run is over or left.  Must not know rounds, the channel or the layout.

A pseudo-gradient is what the model was loaded with minus what it is now, so a checkpoint that
`Trainer.train(resume_from_checkpoint=...)` or `load_state_dict` puts in between is the largest "step" of all: it moves
every peer.  Values that a script writes by itself, clipped weights say, are its own affair.

The hooks lie in the user's modules.  A copy of such a module (`copy.deepcopy`) may load what it likes, and one that is
pickled (`torch.save(model)`) takes a hook along that does nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from farflung.protocol.errors import UserError

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
