"""The inner optimizer's state (Adam's moments and the like) as a file, and back: what a joiner may take.

Called by the trainer: a donor's writes a file between two steps, a joiner's reads one.  The file is in the
safetensors layout, data alone: `PARAMETER/KEY` for each tensor, numbers as JSON in its metadata.  Parameters go by the
model's names, so the order in which an optimizer holds them does not matter.  Settings (rates, betas) stay at home.
Must not know processes, sockets or whom the file came from.

A joiner believes nothing: keys, shapes and dtypes must be those that its own optimizer has after a step, and every
number finite.  What it has is found by a step of size zero, after which model and optimizer are as before.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.peer.model_tensors import unwrap

Value = Tensor | int | float | bool
HEAD_BYTES = 64 * 1024 * 1024  # the most that names and places of tensors may take
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class NotTaken(Exception):
    """There is no state to give, or this one can't be taken; the text says why."""


class InnerState:
    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._names = {id(p): name for name, p in unwrap(model).named_parameters() if p.requires_grad}

    # ---- at the donor ------------------------------------------------------------------------------------

    def write(self, path: Path, most_bytes: int) -> int:
        """The state as it is now, each tensor copied once; the bytes of the file.  NotTaken, OSError."""
        values = dict(self._values())
        if not values:
            raise NotTaken("its optimizer has no state yet")
        tensors = {key: value.detach() for key, value in values.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        head, places, size = _head(tensors, numbers)
        if size > most_bytes:
            raise NotTaken(f"its optimizer's state has {size} bytes, at most {most_bytes} are wanted")
        with open(path, "wb") as file:
            file.write(head)
            file.flush()
            # A write in the middle of a step to memory that is not there would end the process.
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        for key, tensor in tensors.items():
            at, stop = (len(head) + place for place in places[key])
            if stop > at:
                whole[at:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return size

    # ---- at the joiner -----------------------------------------------------------------------------------

    def expect(self) -> int:
        """How large a file may be that this optimizer can take.  NotTaken if it can take none."""
        if self._optimizer.state:
            raise NotTaken("this optimizer has a state already")
        try:
            wanted = self._after_a_step_of_zero()
        finally:
            self.forget()
        if not wanted:
            raise NotTaken("this optimizer keeps no state")
        tensors = {key: value for key, value in wanted.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in wanted.items() if not isinstance(value, Tensor)}
        head, _, size = _head(tensors, numbers)
        return size + len(head)  # numbers may have more digits

    def take(self, path: Path) -> None:
        """Put what the file holds into the optimizer; NotTaken leaves it as fresh as it was."""
        try:
            wanted = self._after_a_step_of_zero()
            self._fill(path, wanted)
            # A negative mean of squares, a count below zero: no rule knows them all, a step does.
            self._after_a_step_of_zero()
            self._fill(path, wanted)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            self.forget()
            raise NotTaken(f"the file can't be read: {error}") from None
        except NotTaken:
            self.forget()
            raise

    def forget(self) -> None:
        """The optimizer is to be as fresh as a new one."""
        self._optimizer.state.clear()

    # ---- helpers -----------------------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[str, Value]]:
        """(PARAMETER/KEY, value) of all that is kept; NotTaken where that is neither tensors nor numbers."""
        for parameter, kept in list(self._optimizer.state.items()):
            name = self._names.get(id(parameter))
            if name is None:
                raise NotTaken("its optimizer keeps more than a state of the model's parameters")
            for key, value in kept.items():
                if value is None:
                    continue  # nothing yet: SGD before its first step
                plain = isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in _DTYPES
                if not (plain or isinstance(value, int | float)) or not isinstance(key, str) or "/" in key:
                    raise NotTaken(f"the optimizer keeps a {type(value).__name__} as {key!r}")
                yield f"{name}/{key}", value

    def _after_a_step_of_zero(self) -> dict[str, Value]:
        """What is kept after a step with gradients and rates of zero.  The model stays as it is."""
        groups = self._optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        rates = [group.get("lr") for group in groups]
        before: list[tuple[Tensor, Tensor | None]] = []
        try:
            before += [(p.detach().clone(), p.grad) for p in parameters]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for group in groups:
                if isinstance(rate := group.get("lr"), Tensor):
                    group["lr"] = torch.zeros_like(rate)
                elif rate is not None:
                    group["lr"] = 0.0
            self._optimizer.step()
            if not all(bool(torch.isfinite(p.detach()).all()) for p in parameters):
                raise NotTaken("a step with it makes numbers that are not finite")
            return dict(self._values())
        except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
            raise NotTaken(f"a step with it fails: {error}") from None
        finally:
            with torch.no_grad():
                for parameter, (value, gradient) in zip(parameters, before, strict=False):
                    parameter.copy_(value)
                    parameter.grad = gradient
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate

    def _fill(self, path: Path, wanted: dict[str, Value]) -> None:
        """Check everything, then copy."""
        with safe_open(str(path), framework="pt") as file:
            numbers = _numbers((file.metadata() or {}).get("numbers", "{}"))
            given = set(file.keys()) | numbers.keys()
            whole = {key.rpartition("/")[0] for key in given}
            # A parameter without gradients has no state at a donor; one that has some must have all of it.
            needed = {key for key in wanted if key.rpartition("/")[0] in whole}
            if given != needed or not given:
                odd = sorted(given ^ needed)[:1]
                raise NotTaken(f"it is of another optimizer or model: {odd[0] if odd else 'it is empty'}")
            for key in file.keys():  # noqa: SIM118  (no dict)
                _check(key, file.get_tensor(key), wanted[key])
            for key, number in numbers.items():
                if isinstance(wanted[key], Tensor) or isinstance(wanted[key], bool) != isinstance(
                    number, bool
                ):
                    raise NotTaken(f"{key} is a number")
            for key in file.keys():  # noqa: SIM118
                mine = wanted[key]
                assert isinstance(mine, Tensor)
                mine.copy_(file.get_tensor(key))
        for parameter, kept in list(self._optimizer.state.items()):
            name = self._names[id(parameter)]
            if name not in whole:
                del self._optimizer.state[parameter]
            kept.update({key: numbers[f"{name}/{key}"] for key in list(kept) if f"{name}/{key}" in numbers})


def _head(
    tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The beginning of a safetensors file, where each tensor lies behind it, and the size of the whole."""
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for key, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        places[key] = at, at + tensor.numel() * tensor.element_size()  # the widest first: all lie even
        at = places[key][1]
    entries: dict[str, object] = {"__metadata__": {"numbers": json.dumps(numbers)}}
    for key, place in places.items():
        shape = list(tensors[key].shape)
        entries[key] = {"dtype": _DTYPES[tensors[key].dtype], "shape": shape, "data_offsets": list(place)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEAD_BYTES:
        raise NotTaken(f"the names of its optimizer's state take {len(text)} bytes")
    return len(text).to_bytes(8, "little") + text, places, 8 + len(text) + at


def _numbers(text: str) -> dict[str, int | float | bool]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise NotTaken("its numbers are no table")
    for key, number in found.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise NotTaken(f"{key} is not a finite number")
    return found


def _check(key: str, given: Tensor, mine: Value) -> None:
    if not isinstance(mine, Tensor) or given.shape != mine.shape or given.dtype != mine.dtype:
        told = f"{mine.dtype} {list(mine.shape)}" if isinstance(mine, Tensor) else "a number"
        raise NotTaken(f"{key} is {given.dtype} {list(given.shape)}, wanted is {told}")
    if given.is_floating_point() and not bool(torch.isfinite(given).all()):
        raise NotTaken(f"{key} is not finite")
