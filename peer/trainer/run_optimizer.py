"""The user's optimizer in a run: its steps are the run's, by torch's own hooks before and after each of them.

Owns: the count of optimizer steps, and the small rates of a fresh optimizer.
Called by torch, in whatever loop the optimizer is stepped: the user's, GradScaler's, accelerate's, a Trainer's.  The
callbacks are the trainer's.
Must not know: what happens in `before_step` and `after_step`.

The optimizer itself stays what it is: schedulers, scalers and checkpoints see the user's own object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from farflung.peer.checks.misuse import warn_of_copies
from farflung.protocol.errors import UserError

SMALL_STEPS = 10  # of an optimizer that has just begun, in a run that has not
_LOOKED_AT_AFTER_STEPS = 2  # some only look at their first step
_HOOK_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class RunSteps:
    """Of one optimizer.  A step that GradScaler skips is no step: it is not counted and no callback is called."""

    def __init__(
        self,
        optimizer: Optimizer,
        after_step: Callable[[], None],
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UserError(f"the inner optimizer must be a torch Optimizer, not {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.steps = 0
        self._small_from = self._small_steps = 0
        self._before_step, self._after_step = before_step, after_step
        self._deep = 0  # steps within steps: a class whose step calls that of its own base is hooked twice
        self._is_skipped = False
        self._rates: list[tuple[dict[str, Any], Any, Tensor | None]] = []
        self._handles = self._hooked()

    def _hooked(self) -> list[RemovableHandle]:
        optimizer = self.optimizer
        for table in _HOOK_TABLES:  # a wrapper that never called Optimizer.__init__ has none
            hooks = optimizer.__dict__.setdefault(table, OrderedDict())
            if any(isinstance(getattr(hook, "__self__", None), RunSteps) for hook in hooks.values()):
                raise UserError("this optimizer already belongs to a run: close that one first")
        Optimizer._patch_step_function(optimizer)
        return [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def end(self) -> None:
        """Its steps are the user's alone from now on.  Safe to repeat."""
        self.forget_step()
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._deep += 1
        if self._deep > 1:
            return
        # A fused one is stepped by GradScaler all the same, and looks itself whether it may.
        found = getattr(optimizer, "found_inf", None)
        self._is_skipped = isinstance(found, Tensor) and bool(found)
        if self._is_skipped:
            return
        self._before_step()
        self._rates = self._lower_rates()

    def _after(self, *_: Any) -> None:
        self._deep -= 1
        if self._deep or self._is_skipped:
            return
        self._end_rates()
        self.steps += 1
        if self.steps == _LOOKED_AT_AFTER_STEPS:
            warn_of_copies(self.optimizer)
        self._after_step()

    def _end_rates(self) -> None:
        for group, rate, full in self._rates:
            group["lr"] = rate if full is None else rate.copy_(full)
        self._rates = []

    def forget_step(self) -> None:
        """Between steps: one that has begun and not ended was broken off by an exception."""
        self._deep = 0
        self._end_rates()

    def start_small(self, steps: int = SMALL_STEPS) -> None:
        """The optimizer knows nothing yet: so many steps from now on are small, rising to their full size."""
        self._small_from, self._small_steps = self.steps, steps

    def _lower_rates(self) -> list[tuple[dict[str, Any], Any, Tensor | None]]:
        """For one step.  The rates themselves are the schedulers': they find them as they left them.

        A tensor stays the same object: a captured CUDA graph reads that one.  Its value is kept beside it meanwhile.
        """
        done = self.steps - self._small_from
        if done >= self._small_steps:
            return []
        rates = [(group, group["lr"]) for group in self.optimizer.param_groups if "lr" in group]
        kept = [(group, rate, rate.clone() if isinstance(rate, Tensor) else None) for group, rate in rates]
        share = (done + 1) / self._small_steps
        lowered: set[int] = set()  # groups may share one tensor
        for group, rate, full in kept:
            if full is None:
                group["lr"] = rate * share
            elif id(rate) not in lowered:
                rate.mul_(share)
                lowered.add(id(rate))
        return kept
