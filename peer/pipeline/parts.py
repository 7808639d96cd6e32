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

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from farflung.optim.inner import outer_matrices
from farflung.peer.trainer.model_tensors import Survey, dtype_name, survey, unwrap
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


# ---- part checks -------------------------------------------------------------------------------------------
# What a list of parts amounts to, found out on the meta device: work, bytes, what passes; and what cannot be
# cut.
#
# Owns: the dry run of all parts, without memory for a single parameter, and every refusal that it allows.
# Called by: whoever fixes the cuts of a run, once, before anything trains. Must not know: stages, the run,
# the network.

Loss = Callable[..., Tensor]

# Two sizes: what differs between them is the samples' dimension.  Both above one, as BatchNorm wants it.
_SAMPLES = (2, 3)
_CROSSING_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_GRADIENT_BYTES = 4  # sums are fp32
_TRIED_BYTES = 64 << 20  # what the last part gives is made up for one trial of the loss, if it is no larger


@dataclass(frozen=True, slots=True)
class Signature:
    """One tensor of a border: its dtype, and its shape without the samples' dimension."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of one sample."""
        size = getattr(torch, self.dtype).itemsize
        for length in self.shape:
            size *= length
        return int(size)

    @property
    def is_floating(self) -> bool:
        return bool(getattr(torch, self.dtype).is_floating_point)


@dataclass(frozen=True, slots=True)
class PartFacts:
    label: str
    flops: int  # of the forward pass of one sample
    memory_bytes: int  # parameters, buffers, and the fp32 sums of what trains
    gives: tuple[Signature, ...]  # for the last part too, where nothing passes
    holds: Survey = field(default_factory=Survey)  # by their names in a stage, without values
    matrices: frozenset[str] = frozenset()  # of what it holds: what the outer step may take for hidden ones


def survey_parts(
    parts: Sequence[Part], item: Mapping[str, Tensor], inputs: Sequence[str], loss: Loss
) -> list[PartFacts]:
    """What each part costs and gives.  `item`: one sample by name; what `inputs` does not name rides along.

    UserError with one line where the list cannot be trained in stages.
    """
    parts = checked_parts(parts)
    modules, held, matrices = _meta_modules(parts)
    small, large = (_dry_run(modules, _repeated(item, count), inputs, loss) for count in _SAMPLES)
    _check_loss_on_values(loss, small[-1].gives, item, inputs)
    facts = []
    for number, (module, few, more, holds) in enumerate(zip(modules, small, large, held, strict=True)):
        at_border = number < len(modules) - 1
        facts.append(
            PartFacts(
                label=label(number, module),
                flops=few.flops // _SAMPLES[0],
                memory_bytes=_memory_bytes(module),
                gives=_signatures(label(number, module), few.gives, more.gives) if at_border else (),
                holds=holds,
                matrices=frozenset(holds.params) & matrices,
            )
        )
    return facts


# ---- building without memory


def _meta_modules(parts: Sequence[Part]) -> tuple[list[nn.Module], list[Survey], set[str]]:
    """Every part on the meta device, what it holds, and which of all that are hidden matrices.

    A parameter in two parts is refused: each stage would train its own.
    """
    holders: dict[int, str] = {}
    alive: list[nn.Module] = []  # ids stay what they are as long as the objects live
    modules, held = [], []
    for number, part in enumerate(parts):
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = built(part, number)
        for name, parameter in module.named_parameters():
            here = f"{label(number, module)} as {name!r}"
            before = holders.setdefault(_identity(parameter), here)
            if before is not here:
                raise UserError(
                    f"{before} and {here} are one parameter: a parameter lies in one part; give each part its own, "
                    "or put both places into one part"
                )
        alive.append(module)
        modules.append(_on_meta(module))
        # Of the module as it was built: what its copy shares is not what it shares itself.
        held.append(survey(Stage(number, [module]), planned=True))
    hidden = {id(parameter) for parameter in outer_matrices(alive)}
    names = (name for found in held for name, tensor in found.params.items() if id(tensor) in hidden)
    return modules, held, set(names)


def _identity(parameter: nn.Parameter) -> int:
    # Two Parameter objects over one memory are one parameter, too; on meta there is no memory.
    if parameter.is_meta or not parameter.numel():
        return id(parameter)
    return parameter.untyped_storage().data_ptr()


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy whose tensors hold nothing.  Values are never copied: the copy is told its tensors beforehand."""
    known: dict[int, Any] = {}
    for parameter in module.parameters():
        known[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        known[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, known)


def _memory_bytes(module: nn.Module) -> int:
    trained = sum(p.numel() * _GRADIENT_BYTES for p in module.parameters() if p.requires_grad)
    return trained + sum(t.numel() * t.itemsize for t in (*module.parameters(), *module.buffers()))


# ---- running without values


@dataclass(frozen=True, slots=True)
class _Ran:
    flops: int
    gives: Tensors


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose result, or its shape, depends on values: on the meta device there are none."""

    def __init__(self, who: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._who = who

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags):
            raise _DependsOnData(
                f"{self._who} does what depends on the values of its data ({func}), so the shape of what it gives "
                "is not known beforehand; use masks of a fixed shape, or put it into the loss"
            )
        return func(*args, **(kwargs or {}))


class _DependsOnData(UserError):
    pass


def _repeated(item: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    return {name: torch.empty((count, *t.shape), dtype=t.dtype, device="meta") for name, t in item.items()}


def _dry_run(
    modules: Sequence[nn.Module], item: Mapping[str, Tensor], inputs: Sequence[str], loss: Loss
) -> list[_Ran]:
    given = tuple(item[name] for name in inputs)
    riders = {name: tensor for name, tensor in item.items() if name not in inputs}
    ran = []
    for number, module in enumerate(modules):
        ran.append(_run_one(number, module, given, riders))
        given = ran[-1].gives
    _check_loss(loss, given, riders)
    return ran


def _run_one(number: int, module: nn.Module, given: Tensors, riders: Riders) -> _Ran:
    from torch.utils.flop_counter import FlopCounterMode  # here: it loads triton, 0.1 s of every peer's start

    who = label(number, module)
    counter = FlopCounterMode(display=False)
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
            counter,
            _NoValues(who),
        ):
            gives = run_part(number, module, given, riders)
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        taken = " and ".join(f"{dtype_name(t.dtype)} {list(t.shape)}" for t in given)
        source = f"part {number - 1} gives" if number else "the inputs are"
        raise UserError(f"{who} does not take what {source}, {taken}: {first_line(error)}") from error
    return _Ran(counter.get_total_flops(), gives)


def _check_loss(loss: Loss, given: Tensors, riders: Riders) -> None:
    leaves = tuple(t.detach().requires_grad_() if t.is_floating_point() else t for t in given)
    try:
        with torch.enable_grad(), torch.device("meta"), _NoValues("the loss"):
            found = loss(as_output(leaves), riders)
    except _DependsOnData:
        return  # a loss may look at its labels; it is checked again with the first microbatch
    except UserError:
        raise
    except THEIR_ERRORS as error:
        taken = " and ".join(f"{dtype_name(t.dtype)} {list(t.shape)}" for t in given)
        raise UserError(
            f"the loss fails on what the last part gives, {taken}, and the riders {', '.join(riders) or '(none)'}: "
            f"{first_line(error)}; it is called as loss(output, riders)"
        ) from error
    check_scalar(found)
    if not found.requires_grad:
        raise UserError(
            "the loss has no gradient: it must be computed from what the last part gives, by what torch can go back "
            "through (no argmax, .item() or .detach())"
        )


def _check_loss_on_values(
    loss: Loss, gives: Tensors, item: Mapping[str, Tensor], inputs: Sequence[str]
) -> None:
    """With a sample's own labels: one that is out of range shows itself before anything trains.

    What the last part gives is made up, between 0 and 1, as it may be logits or shares.  A loss of made-up values may
    be anything, so what comes out is not looked at.
    """
    if sum(t.numel() * t.itemsize for t in gives) > _TRIED_BYTES:
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        made = tuple(
            torch.rand((1, *t.shape[1:])).to(t.dtype)
            if t.is_floating_point()
            else torch.zeros((1, *t.shape[1:]), dtype=t.dtype)
            for t in gives
        )
        riders = {
            name: tensor[None] for name, tensor in item.items() if name not in inputs and not tensor.is_meta
        }
        try:
            loss(as_output(made), riders)
        except UserError:
            raise
        except THEIR_ERRORS as error:
            raise UserError(
                f"the loss fails on the labels of a sample of the data set: {first_line(error)}; do the data and the "
                "shape that the last part gives belong together?"
            ) from error


def check_scalar(found: object) -> None:
    if not isinstance(found, Tensor):
        raise UserError(f"the loss gives {type(found).__name__}: a tensor with one value is needed")
    if found.numel() != 1:
        raise UserError(f"the loss has shape {list(found.shape)}: a scalar is needed, such as its .mean()")
    if not found.is_floating_point():
        raise UserError(
            f"the loss is {dtype_name(found.dtype)}: a mean loss with a gradient is needed, no count"
        )


def _signatures(who: str, few: Tensors, more: Tensors) -> tuple[Signature, ...]:
    """From what the part gave for two counts of samples."""
    if len(few) != len(more):
        raise UserError(
            f"{who} gives {len(few)} tensors for {_SAMPLES[0]} samples and {len(more)} for {_SAMPLES[1]}"
        )
    signatures = []
    for one, other in zip(few, more, strict=True):
        shapes = f"{list(one.shape)} for {_SAMPLES[0]} samples, {list(other.shape)} for {_SAMPLES[1]}"
        if (one.shape[:1], other.shape[:1]) != (_SAMPLES[:1], _SAMPLES[1:]):
            raise UserError(f"{who} gives {shapes}: the first dimension must be the samples")
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise UserError(f"{who} gives {shapes}: one sample must have the same shape in every microbatch")
        if one.is_complex() or (one.is_floating_point() and one.dtype not in _CROSSING_FLOATS):
            raise UserError(
                f"{who} gives {dtype_name(one.dtype)}: only fp32, bf16, fp16 and integers can pass between parts"
            )
        signatures.append(Signature(dtype_name(one.dtype), tuple(one.shape[1:])))
    return tuple(signatures)
