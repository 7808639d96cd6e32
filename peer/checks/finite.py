"""What is not finite in a model and in what its optimizer remembers: found, named, and made new.

Called by the inner loop, at each freeze.  Must not know rounds, words, or where values go that are put back.

A NaN that reached the weights is in the moments of Adam, too: weights that are put back alone would be NaN again after
one step.  An optimizer makes what it remembers of a parameter when it first steps on it, so that what is forgotten is
made anew.  Two kinds are filled in place instead: what the optimizer's constructor had made (Adagrad), which no step
makes again, and what a captured CUDA graph reads, which is in these very tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.peer.island.sharded import local_of

DEEPEST = 4  # an object in a list in a dict in an object


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those that hold a NaN or an infinity.  Each device is waited for once, where all is well."""
    wide = {name: _wide(each) for name, each in tensors.items() if _is_of_numbers(each)}
    sums: dict[torch.device, list[Tensor]] = {}
    for each in wide.values():
        # A sum is finite only if all in it is; the reverse is not so sure.
        sums.setdefault(each.device, []).append(each.sum().float())
    if all(bool(torch.stack(each).isfinite().all()) for each in sums.values()):
        return []
    return [name for name, each in wide.items() if not bool(each.isfinite().all())]


def _is_of_numbers(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0 and not tensor.is_meta


def _wide(tensor: Tensor) -> Tensor:
    found = local_of(tensor.detach())
    found = torch.view_as_real(found) if found.is_complex() else found
    return found.float() if found.element_size() < 4 else found


def tensors_in(value: object, deep: int = 0) -> Iterator[Tensor]:
    """All plain tensors in a state: in lists, dicts, objects, and in tensors that are made of others (8-bit ones)."""
    if isinstance(value, Tensor):
        yield from _plain(value)
    elif deep == DEEPEST or isinstance(value, str | bytes | type | ModuleType | nn.Module | torch.Generator):
        return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, deep + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from tensors_in(each, deep + 1)
    elif hasattr(value, "__dict__"):
        for each in vars(value).values():
            yield from tensors_in(each, deep + 1)


def _plain(whole: Tensor) -> Iterator[Tensor]:
    value = local_of(whole)  # of a tensor that lies in several ranks
    made_of: Any = getattr(value, "__tensor_flatten__", None)
    if value.is_nested:
        yield from value.unbind()
    elif made_of is not None:
        for name in made_of()[0]:
            if isinstance(part := getattr(value, name), Tensor):
                yield from _plain(part)
    elif value.layout is torch.sparse_coo:
        yield value._values()
    elif value.layout is torch.strided:
        yield value.detach()


def _is_nan(value: object) -> bool:
    """Of a number in a state; an infinity may be a bound there."""
    return isinstance(value, float) and math.isnan(value)


class Remembered:
    """What an optimizer remembers of each parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Before its first step in the run."""
        self._optimizer = optimizer
        # Parameter -> what its constructor had made, by name.
        self._made = {
            parameter: {name: float(each.flatten()[0]) for name, each in found.items() if each.numel()}
            for parameter, state in optimizer.state.items()
            if isinstance(parameter, Tensor) and (found := _constants(state))
        }
        self._groups = [_numbers(group) for group in optimizer.param_groups]

    def not_finite(self, among: Collection[Tensor] | None = None) -> list[Tensor]:
        """Parameters of which something is remembered that is not finite.  `among`: None for all."""
        parts: dict[str, Tensor] = {}
        owners: dict[str, Tensor] = {}
        found = []
        wanted = None if among is None else {id(each) for each in among}
        for at, (parameter, state) in enumerate(self._optimizer.state.items()):
            if not isinstance(parameter, Tensor) or (wanted is not None and id(parameter) not in wanted):
                continue
            if isinstance(state, Mapping) and any(map(_is_nan, state.values())):
                found.append(parameter)
                continue
            for number, each in enumerate(tensors_in(state)):
                parts[f"{at}.{number}"], owners[f"{at}.{number}"] = each, parameter
        bad = {id(owners[name]): owners[name] for name in not_finite(parts)}
        return [*found, *bad.values()]

    def forget(self, parameters: Collection[Tensor]) -> int:
        """All that is remembered of them.  Of how many there was anything."""
        in_place = {
            id(each)
            for group in self._optimizer.param_groups
            if group.get("capturable")
            for each in group["params"]
        }
        count = 0
        for parameter in parameters:
            if not (state := self._optimizer.state.get(parameter)):
                continue
            count += 1
            if id(parameter) in in_place or parameter in self._made:
                _fill(state, self._made.get(parameter, {}))
            else:
                del self._optimizer.state[parameter]
        self._mend_groups()
        return count

    def _mend_groups(self) -> None:
        """Some count in their groups what they think of the rate (Prodigy)."""
        for group, first in zip(self._optimizer.param_groups, self._groups, strict=False):
            for name, value in first.items():
                if _is_nan(group.get(name)):
                    group[name] = value


def _constants(state: object) -> dict[str, Tensor]:
    """Empty: something in it is not one value throughout, so that it comes from steps."""
    if not isinstance(state, Mapping):
        return {}
    found = {str(name): each for name, each in state.items() if isinstance(each, Tensor)}
    plain = all(each.layout is torch.strided and not each.is_nested for each in found.values())
    if not plain or not all(
        bool((each == each.flatten()[0]).all()) for each in found.values() if each.numel()
    ):
        return {}
    return found


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {name: each for name, each in group.items() if isinstance(each, float) and not math.isnan(each)}


def _fill(state: Mapping[str, object], made: Mapping[str, float]) -> None:
    with torch.no_grad():
        for name, value in state.items():
            for each in tensors_in(value):
                each.fill_(made.get(name, 0.0))
