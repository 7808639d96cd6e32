"""What an inner optimizer remembers, as tensors and plain values: taken apart to be recorded, and put together again.

Called by peer/trainer/recording.py.  Must not know files, spans, or what the state is for.

Most optimizers keep tensors and numbers.  Some keep lists of tensors (SOAP), or an object that holds one (GaLore,
APOLLO).  Of objects only those of `KINDS` are taken: a record names one by its word there, and what is read makes that
class, without a call of it, and fills in numbers, words and tensors.  A record that names anything else makes nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farflung.peer.record.work_files import Form, Known, Leaf, Nothing, Number, Placed, Several
from farflung.protocol.errors import UserError

# Word -> the module and the class.  Both are plain holders of what they are given.
KINDS = {
    "galore projector": ("galore_torch.galore_projector", "GaLoreProjector"),
    "apollo projector": ("apollo_torch.random_projector", "GradientProjector"),
}


class Unrecordable(Exception):
    """The state holds something that no record can."""


@dataclass
class OptimizerState:
    """By "number of the parameter.name"; what lies inside something else has a key behind a slash."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    more: dict[str, Form] = field(default_factory=dict)
    on_host: list[str] = field(default_factory=list)  # tensors that do not lie where their parameter does


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def taken_apart(optimizer: Optimizer) -> OptimizerState:
    """The tensors are the optimizer's own.  Unrecordable where there is more than can be put together again."""
    found = OptimizerState()
    for at, parameter in enumerate(parameters_of(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            key = f"{at}.{name}"
            if isinstance(value, Tensor):
                _keep(found, key, value, parameter.device)
            elif isinstance(value, int | float | bool | None):
                found.numbers[key] = value
            else:
                found.more[key] = _form_of(found, key, value, parameter.device)
    return found


def _keep(found: OptimizerState, key: str, value: Tensor, beside: torch.device) -> None:
    found.tensors[key] = value
    if value.device != beside:
        found.on_host.append(key)


def _form_of(found: OptimizerState, key: str, value: object, beside: torch.device) -> Form:
    if type(value) is list and value:
        return Several(tuple(_leaf_of(found, f"{key}/{at}", each, beside) for at, each in enumerate(value)))
    for kind, (module, name) in KINDS.items():
        if (type(value).__module__, type(value).__qualname__) == (module, name):
            inside = vars(value).items()
            return Known(kind, {each: _leaf_of(found, f"{key}/{each}", of, beside) for each, of in inside})
    return _leaf_of(found, key, value, beside)


def _leaf_of(found: OptimizerState, key: str, value: object, beside: torch.device) -> Leaf:
    if isinstance(value, Tensor):
        _keep(found, key, value, beside)
        return Placed(_order_of(value))
    if isinstance(value, int | float | bool | str | None):
        return value
    if type(value) is list and not value:
        return Nothing()
    raise Unrecordable(f"its state has {key}, a {type(value).__name__}")


def put_together(optimizer: Optimizer, state: OptimizerState) -> None:
    """In place of what the optimizer remembers.  UserError for a state that is not one of this optimizer's."""
    parameters = list(parameters_of(optimizer))
    optimizer.state.clear()
    inner = {f"{key}/{name}" for key, form in state.more.items() for name in _names_in(form)}
    plain: dict[str, Any] = {key: Placed() for key in state.tensors if key not in inner}
    for key, form in {**plain, **state.numbers, **state.more}.items():
        number, _, name = key.partition(".")
        if not number.isdecimal() or int(number) >= len(parameters):
            raise UserError("the recorded optimizer has another number of parameters")
        parameter = parameters[int(number)]
        optimizer.state[parameter][name] = _made(state, key, form, parameter.device)


def _names_in(form: Form) -> Iterator[str]:
    if isinstance(form, Several):
        yield from map(str, range(len(form.of)))
    elif isinstance(form, Known):
        yield from form.of


def _made(state: OptimizerState, key: str, form: Form, beside: torch.device) -> object:
    match form:
        case Placed(order):
            value = state.tensors.get(key)
            if value is None:
                raise UserError(f"the recorded optimizer's state has no tensor {key}")
            return _laid_out(value.clone() if key in state.on_host else value.to(beside, copy=True), order)
        case Nothing():
            return []
        case Several(of):
            return [_made(state, f"{key}/{at}", each, beside) for at, each in enumerate(of)]
        case Known(kind, of):
            made = _empty(kind)
            vars(made).update(
                {name: _made(state, f"{key}/{name}", each, beside) for name, each in of.items()}
            )
            return made
    return form


def _order_of(value: Tensor) -> tuple[int, ...]:
    """A singular vector's matrix lies by columns: with it the other way round a product would have other bits."""
    order = sorted(range(value.ndim), key=lambda dim: -value.stride()[dim])
    return () if order == list(range(value.ndim)) else tuple(order)


def _laid_out(value: Tensor, order: tuple[int, ...]) -> Tensor:
    if not order:
        return value
    if sorted(order) != list(range(value.ndim)):
        raise UserError(
            f"the recorded optimizer's state has a tensor of {value.ndim} dimensions laid out as {order[:9]}"
        )
    back = sorted(range(value.ndim), key=lambda dim: order[dim])
    return value.permute(order).contiguous().permute(back)


def _empty(kind: str) -> object:
    if kind not in KINDS:
        raise UserError(f"the recorded optimizer's state has an object of an unknown kind, {kind[:40]!r}")
    module, name = KINDS[kind]
    try:
        known: type = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0].replace("_", "-")
        raise UserError(
            f"the recorded work needs a package that is not here ({error}): pip install {package}"
        ) from None
    return object.__new__(known)


def tensors_by_key(found: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
