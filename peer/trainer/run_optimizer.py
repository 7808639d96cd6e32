"""`run.optimizer`: the user's inner optimizer, plus a call to the run before and after every optimizer step.

Owns: the count of optimizer steps.
Called by: the user's loop, LR schedulers, GradScaler, gradient clipping; the two callbacks are the trainer's.
Must not know: what happens in `before_step` and `after_step`.

Everything a scheduler or scaler reads or writes is the inner optimizer's own object.  `Optimizer.__init__` is
not called on purpose: it would make a second `param_groups` list and a second `state`, which drift apart from
the inner ones at the first `add_param_group` or `load_state_dict`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, overload

from torch import Tensor
from torch.optim import Optimizer

from farflung.peer.trainer.misuse import warn_of_copies
from farflung.protocol.errors import UserError

_LOOKED_AT_AFTER_STEPS = 2  # some only look at their first step
_HOOK_TABLES = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class RunOptimizer(Optimizer):
    """A `torch.optim.Optimizer` that tells the run, steps `inner` and tells the run again.

    A step that GradScaler skips is no step: it is not counted and `after_step` is not called.  Hooks are kept
    in the inner optimizer's tables, so each fires once, before `after_step`, and is handed the inner
    optimizer.
    """

    def __init__(
        self,
        inner: Optimizer,
        after_step: Callable[[], None],
        before_step: Callable[[], None] = lambda: None,
        before_rates: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        if not isinstance(inner, Optimizer):
            raise UserError(f"the inner optimizer must be a torch Optimizer, not {type(inner).__name__}")
        if isinstance(inner, RunOptimizer):
            raise UserError("this optimizer already belongs to a run: pass the one you built yourself")
        self.inner = inner
        self.steps = 0
        self._small_from = self._small_steps = 0
        self._before_step, self._after_step = before_step, after_step
        self._before_rates = (
            before_rates  # called with the rates of a step in place; what it returns, after it
        )
        for table in _HOOK_TABLES:
            self.__dict__[table] = inner.__dict__.setdefault(table, OrderedDict())

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self._before_step()
        rates = self._lower_rates()
        undo = self._before_rates()
        # Not every optimizer takes a closure; handing over None only when asked keeps those working.
        loss: float | None = self.inner.step() if closure is None else self.inner.step(closure)
        undo()
        for group, rate, full in rates:
            group["lr"] = rate if full is None else rate.copy_(full)
        self.steps += 1
        if self.steps == _LOOKED_AT_AFTER_STEPS:
            warn_of_copies(self.inner)
        self._after_step()
        return loss

    def start_small(self, steps: int) -> None:
        """The inner optimizer knows nothing yet: so many steps from now on are small, rising to their full size."""
        self._small_from, self._small_steps = self.steps, steps

    def _lower_rates(self) -> list[tuple[dict[str, Any], Any, Tensor | None]]:
        """For one step.  The rates themselves are the schedulers': they find them as they left them.

        A tensor stays the same object: a captured CUDA graph reads that one.  Its value is kept beside it meanwhile.
        """
        done = self.steps - self._small_from
        if done >= self._small_steps:
            return []
        rates = [(group, group["lr"]) for group in self.param_groups if "lr" in group]
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    # Writable, because schedulers and loaders of other libraries assign to these.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def __repr__(self) -> str:
        return f"RunOptimizer(steps={self.steps}, inner={self.inner!r})"
