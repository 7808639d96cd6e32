"""What the inner optimizer has learned of the model, on this peer's own disk while its script is away.

Written when a script leaves a run that goes on, and read when it is back in that run, by the same optimizer on
parameters of the same shapes: with a fresh one, a peer that was stopped for a minute would go on with noise.  It is a
peer's own memory: what cannot be kept or read is told, and training begins with small steps.
Called by the public API, for scripts of one rank.  Must not know rounds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.protocol.process import own_files

log = logging.getLogger(__name__)

SUFFIX = ".optimizer"
_ROOM = 2  # times its size must be left on the disk
Plain = int | float | None


@dataclass(frozen=True)
class OptimizerState:
    about: str  # of which class, for parameters of which shapes
    tensors: Mapping[
        str, Tensor
    ]  # by "number of the parameter.where.name"; where: "here", beside it, or "host"
    plain: Mapping[str, Plain]

    @staticmethod
    def of(optimizer: Optimizer) -> OptimizerState | None:
        """The tensors are the optimizer's own.  None: it knows nothing yet, or what cannot be written down."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Plain] = {}
        for number, parameter in enumerate(_parameters(optimizer)):
            for name, value in optimizer.state.get(parameter, {}).items():
                if type(value) in (Tensor, nn.Parameter):
                    where = "here" if value.device == parameter.device else "host"
                    tensors[f"{number}.{where}.{name}"] = value.detach()
                elif value is None or isinstance(value, int | float):
                    plain[f"{number}.here.{name}"] = value
                else:
                    return None
        return OptimizerState(_about(optimizer), tensors, plain) if tensors else None

    def put_into(self, optimizer: Optimizer) -> bool:
        """False, and nothing is changed: it is of another optimizer or model, or spoilt."""
        floats = [each for each in self.tensors.values() if each.is_floating_point()]
        if self.about != _about(optimizer) or not all(bool(each.isfinite().all()) for each in floats):
            return False
        parameters = _parameters(optimizer)
        for key, value in (*self.tensors.items(), *self.plain.items()):
            number, where, name = key.split(".", 2)
            parameter = parameters[int(number)]
            if isinstance(value, Tensor):
                value = value.to(parameter.device if where == "here" else "cpu", copy=True)
            optimizer.state[parameter][name] = value
        return True


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _about(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    shapes = [list(each.shape) for each in _parameters(optimizer)]
    # What it keeps depends on its switches, such as amsgrad, and on whether there is a momentum.
    switches = [
        {name: value for name, value in group.items() if isinstance(value, bool)}
        | {"momentum": bool(group.get("momentum"))}
        for group in optimizer.param_groups
    ]
    return json.dumps([f"{kind.__module__}.{kind.__qualname__}", shapes, switches])


class KeptOptimizer:
    """`beside`: the beginning of the file's name; empty: this peer keeps nothing on its disk."""

    def __init__(self, beside: str) -> None:
        self._path = Path(f"{beside}{SUFFIX}") if beside else None

    def read_into(self, optimizer: Optimizer) -> bool:
        """Whether it goes on where it was.  What was read is over then: it is written again at the next end."""
        path = self._path
        if path is None:
            return False
        try:
            # Of peers that never came back, and of a write of this one that was cut short.
            for other in (*own_files.left_behind(path), *path.parent.glob(f".{path.name}.*.part")):
                other.unlink(missing_ok=True)
            if not path.exists():
                return False
            with safe_open(path, framework="pt") as file:
                told = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            state = OptimizerState(told["about"], tensors, json.loads(told["plain"]))
            taken = state.put_into(optimizer)
            path.unlink(missing_ok=True)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            log.warning("what the optimizer knew when this peer left is lost: %s: %s", path, error)
            self.forget()
            return False
        if taken:
            log.info("the optimizer goes on with what it knew when this peer left")
        else:
            log.info(
                "the optimizer begins from nothing: what was kept is of another one, or of another model"
            )
        return taken

    def forget(self) -> None:
        """What was kept is of no use."""
        with contextlib.suppress(OSError):  # it is overwritten at the next end
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    def write(self, optimizer: Optimizer) -> None:
        state = OptimizerState.of(optimizer) if self._path is not None else None
        if self._path is None or state is None:
            return
        size = sum(each.nbytes for each in state.tensors.values())
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        try:
            if shutil.disk_usage(self._path.parent).free < _ROOM * size:
                raise OSError(f"{size / 1e9:.2f} GB are more than a half of what the disk has left")
            os.close(own_files.opened(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            tensors = {name: each.to("cpu").contiguous() for name, each in state.tensors.items()}
            save_file(tensors, aside, {"about": state.about, "plain": json.dumps(state.plain)})
            aside.replace(self._path)
        except (OSError, SafetensorError, RuntimeError) as error:
            log.warning("what the optimizer knows is not kept: %s", error)
        finally:
            aside.unlink(missing_ok=True)
