"""Parts: a model as a list of things that build modules, so that a peer builds only what it holds.

Owns: what a part may be, how it is built, what goes in and out of it.
Called by: the check of parts, the stage loop, `farflung.pipeline`, users' scripts (`parts_of`).
Must not know: stages, batches, the run.

A part is a module that is built already, or anything that builds one when it is called: a class, a partial.  Each is
built under a seed made of the run's seed and the part's number, so the model is the same however it is cut, and whoever
holds part 7 need not build parts 0 to 6.  A part takes what the one before it gives: a tensor or a tuple of tensors.
Riders (labels, masks: small integer tensors) travel along; a part is handed a rider when its `forward` has a
keyword-only parameter of that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from blake3 import blake3
from torch import Tensor, nn

from farflung.peer.trainer.model_tensors import unwrap
from farflung.protocol.errors import FarflungError, UserError

# What somebody else's part, loss or data set may raise by a mistake in it.
THEIR_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

Part = nn.Module | Callable[[], nn.Module]
Tensors = tuple[Tensor, ...]
Riders = Mapping[str, Tensor]

_FIRST_VALUES = "farflung.part.1"
_CHANCE = "farflung.chance.1"
_BY_HAND = """parts are a list such as
    parts = [Embed, *(functools.partial(Block, n) for n in range(24)), Head]
in which each item builds an nn.Module when it is called, and each module takes what the one before it gives"""


def parts_of(sequential: nn.Sequential) -> list[Part]:
    """The children of an `nn.Sequential` as parts.  Their values are kept, so every peer must build the same ones."""
    if not isinstance(sequential, nn.Sequential):
        raise UserError(f"parts_of takes an nn.Sequential, not {type(sequential).__name__}; {_BY_HAND}")
    return checked_parts(list(sequential))


def checked_parts(parts: Sequence[Part]) -> list[Part]:
    """The list, if it can be one of parts."""
    if isinstance(parts, nn.Module) or not isinstance(parts, Sequence) or not parts:
        found = type(parts).__name__ if not isinstance(parts, Sequence) else "an empty list"
        raise UserError(f"a model is a list of parts, found {found}; {_BY_HAND}")
    for number, part in enumerate(parts):
        if not callable(part):
            raise UserError(f"part {number} is {type(part).__name__}, which builds no module; {_BY_HAND}")
    return list(parts)


def build(part: Part, number: int, run_seed: int) -> nn.Module:
    """On the CPU.  The caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(_FIRST_VALUES, run_seed, number))
        return built(part, number)


def built(part: Part, number: int) -> nn.Module:
    try:
        module = part if isinstance(part, nn.Module) else part()
    except FarflungError:
        raise
    except THEIR_ERRORS as error:
        raise UserError(
            f"part {number} ({_name_of(part)}) can't be built: {first_line(error)}; each part is built without values "
            "first (torch.device('meta')), so it must not read any, and all that it needs must be here"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"part {number} builds {type(module).__name__}, not an nn.Module; {_BY_HAND}")
    return module


def _name_of(part: Part) -> str:
    inside = getattr(part, "func", part)  # of a partial
    return str(getattr(inside, "__name__", type(inside).__name__))


def first_line(error: BaseException) -> str:
    """What kind it is, and what it says first."""
    told = str(error).splitlines()
    return f"{type(error).__name__}: {told[0][:200]}" if told else type(error).__name__


def seed_of(domain: str, *numbers: int) -> int:
    """Text is hashed, so that no two lists of numbers collide; below 2**63, which every generator takes."""
    text = ":".join((domain, *map(str, numbers))).encode()
    return int.from_bytes(blake3(text).digest(length=8), "little") >> 1


def seed_of_chance(run_seed: int, version: int, micro: int, part: int) -> int:
    """For what a part draws (dropout) in a microbatch: by part, so that it is the same however the model is cut."""
    return seed_of(_CHANCE, run_seed, version, micro, part)


class Stage(nn.Module):
    """Consecutive parts as one module.  Tensors are named by the number of their part in the whole: `7.weight`."""

    def __init__(self, first: int, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first = first
        for number, module in enumerate(modules, first):
            self.add_module(str(number), module)

    @classmethod
    def build(cls, parts: Sequence[Part], first: int, stop: int, run_seed: int) -> Stage:
        """Parts [first, stop) of the list; no other part is built."""
        return cls(first, [build(parts[number], number, run_seed) for number in range(first, stop)])

    def forward(self, *given: Tensor, **riders: Tensor) -> Tensor | Tensors:
        """All of its parts, one after the other: for looking at a model that is trained."""
        for number, module in self.numbered():
            given = run_part(number, module, given, riders)
        return as_output(given)

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        return enumerate(self.children(), self.first)


def label(number: int, module: nn.Module) -> str:
    return f"part {number} ({type(unwrap(module)).__name__})"


def run_part(number: int, module: nn.Module, given: Tensors, riders: Riders) -> Tensors:
    wanted = wanted_riders(module)
    missing = [name for name in wanted if name not in riders]
    if missing:
        there = ", ".join(riders) or "none"
        raise UserError(
            f"{label(number, module)} wants the rider {missing[0]!r}; named as riders are: {there}"
        )
    return as_tensors(module(*given, **{name: riders[name] for name in wanted}), label(number, module))


def wanted_riders(module: nn.Module) -> tuple[str, ...]:
    """Names of the keyword-only parameters of its `forward`, those without a default."""
    parameters = inspect.signature(unwrap(module).forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def as_tensors(found: object, giver: str) -> Tensors:
    if isinstance(found, Tensor):
        return (found,)
    if isinstance(found, tuple) and found and all(isinstance(item, Tensor) for item in found):
        return tuple(found)
    kinds = f"a tuple with {', '.join(type(i).__name__ for i in found)}" if isinstance(found, tuple) else None
    raise UserError(
        f"{giver} gives {kinds or type(found).__name__}: what passes between parts is a tensor or a tuple of tensors"
    )


def as_output(tensors: Tensors) -> Tensor | Tensors:
    """As the loss takes it: what the last part gave."""
    return tensors[0] if len(tensors) == 1 else tensors
