"""What a model computes, in a few numbers: peers whose code differs have other ones at the same weights.

Called by the inner loop before a step, where the model holds a version of the run and nothing else.
Must not know: rounds, words, what others compute.

Names, shapes and dtypes of the parameters are compared when a peer is let in; GELU here and ReLU there have the same
ones.  So the script's own first call is looked at, and the model is called once more with made-up input of such a form:
the same for everybody, and nothing of anybody's data.  What comes out is folded into `FORWARD_NUMBERS` sums.

It may find nothing, and says nothing then: a compiled wrapper that is called in the model's place, inputs that are no
tensors, a model that takes no other sizes, one that gives other results each time.
Not seen: dropout and whatever else is off in eval mode, the loss where the script computes it, the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from farflung.peer.checks.finite import tensors_in
from farflung.peer.checks.misuse import Nothing
from farflung.protocol.round_words import FORWARD_NUMBERS, Forward

log = logging.getLogger(__name__)

FORM_BYTES = 8
SAMPLES = 2
LONGEST = 16  # of the sides of token ids, masks and labels
TOKENS = 8  # ids below it are in every vocabulary
READ_VALUES = 1 << 22  # of what comes out
SEED = 20
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COARSE = (torch.bfloat16, torch.float16)


class _NoForm(Exception):
    """The call has something in it that can't be made up."""


class ForwardCheck:
    """Of one model.  The hook lies in the user's module until its first call in training."""

    def __init__(self, model: nn.Module) -> None:
        # What a compiled one wraps: other sizes would compile it once more.
        self._model = getattr(model, "_orig_mod", model)
        self._made: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._form = b""
        self._tried = False
        self._handle = model.register_forward_pre_hook(_Seen(self), with_kwargs=True)

    def end(self) -> None:
        """Safe to repeat."""
        self._handle.remove()

    def see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._model.training or torch.compiler.is_compiling() or _is_captured():
            return
        self.end()
        made = _MadeUp()
        try:
            self._made = tuple(map(made.like, args)), {name: made.like(each) for name, each in kwargs.items()}
        except _NoForm as why:
            log.debug("what the model computes is not compared: %s", why)
            return
        self._form = hashlib.blake2b(
            repr((made.form, sorted(kwargs))).encode(), digest_size=FORM_BYTES
        ).digest()

    def read(self, version: int) -> Forward | None:
        """What the model computes now, with the weights of the version; None: nothing that could be compared."""
        if self._made is None:
            return None
        numbers = self._numbers()
        if not self._tried and numbers is not None and self._numbers(drawn=1) != numbers:
            numbers = None  # by chance, or by how often it was called
        self._tried = True
        if numbers is None:
            self._made = None
            return None
        coarse = any(each.dtype in _COARSE for each in self._model.parameters())
        return Forward(version, self._form, coarse, numbers)

    def _numbers(self, drawn: int = 0) -> tuple[float, ...] | None:
        """`drawn`: random numbers before the call."""
        assert self._made is not None
        args, kwargs = self._made
        try:
            with as_it_was(self._model) as devices, torch.no_grad():
                for device in devices:
                    torch.rand(drawn, device=device)
                made = list(tensors_in(self._model(*args, **kwargs)))
        except Exception as why:  # the outermost call of the script's code, with odd sizes
            log.debug("what the model computes is not compared: %s: %s", type(why).__name__, why)
            return None
        return folded([each for each in made if each.is_floating_point()])


class _Seen:
    """The hook."""

    def __init__(self, check: ForwardCheck) -> None:
        self._check = check

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check.see(args, kwargs)

    def __reduce__(self) -> tuple[type[Nothing], tuple[()]]:
        """What it becomes in a copy of the model."""
        return Nothing, ()


class _MadeUp:
    """Input of a form, the same wherever the form is."""

    def __init__(self) -> None:
        self.form: list[object] = []
        self._random = torch.Generator().manual_seed(SEED)
        self._samples: int | None = None  # of the script's own batch

    def like(self, value: Any) -> Any:
        if (
            isinstance(value, Tensor)
            and type(value) in (Tensor, nn.Parameter)
            and value.layout is torch.strided
        ):
            return self._tensor(value)
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self.like(each) for each in value)
        if isinstance(value, Mapping):
            return {name: self.like(each) for name, each in value.items()}
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            self.form.append(str(value))
            return value
        raise _NoForm(f"it is called with a {type(value).__name__}")

    def _tensor(self, seen: Tensor) -> Tensor:
        whole = seen.dtype in _WHOLE
        if not whole and not seen.is_floating_point():
            raise _NoForm(f"it is called with a tensor of {seen.dtype}")
        if not seen.dim():
            self.form.append(())
            return torch.ones((), dtype=seen.dtype, device=seen.device)
        if self._samples is None:
            self._samples = seen.shape[0]
        first = SAMPLES if seen.shape[0] == self._samples else seen.shape[0]
        rest = [min(side, LONGEST) for side in seen.shape[1:]] if whole else list(seen.shape[1:])
        most = int(seen.max()) if whole and seen.numel() and seen.dtype != torch.bool else 1
        below = TOKENS if most >= TOKENS else 2 if most > 1 else 1
        self.form.append((whole, below if whole else 0, first, *rest))
        sides = (first, *rest)
        if not whole:
            made = torch.randn(sides, generator=self._random)
        elif below == 1:  # a mask
            made = torch.ones(sides)
        else:
            made = torch.randint(below, sides, generator=self._random)
        return made.to(seen.device, seen.dtype)


def folded(found: list[Tensor]) -> tuple[float, ...] | None:
    """Sums with random signs.  A difference of all values is one of the sums, and about as large a part of them."""
    left, parts = READ_VALUES, []
    for each in found:
        parts.append(each.detach().flatten()[:left].double().cpu())
        left -= parts[-1].numel()
    values = torch.cat(parts) if parts else torch.zeros(0)
    if not values.numel() or not bool(values.isfinite().all()):
        return None
    rows = -(-values.numel() // FORWARD_NUMBERS)
    table = nn.functional.pad(values, (0, rows * FORWARD_NUMBERS - values.numel())).view(
        rows, FORWARD_NUMBERS
    )
    signs = torch.randint(2, (rows, 1), generator=torch.Generator().manual_seed(SEED)).double() * 2 - 1
    sums = (table * signs).sum(0) / math.sqrt(rows)
    return tuple(float(each) for each in sums)


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[set[torch.device]]:
    """In eval mode, without autocast; modes, buffers and random numbers are afterwards what they were.  Gives the
    devices."""
    modules = list(model.modules())
    modes = [each.training for each in modules]
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    devices = {each.device for each in model.parameters()}
    kinds = {each.type for each in devices} or {"cpu"}
    try:
        for each in modules:
            each.training = False
        with contextlib.ExitStack() as ends:
            ends.enter_context(torch.random.fork_rng([each for each in devices if each.type == "cuda"]))
            for kind in kinds:
                ends.enter_context(torch.autocast(kind, enabled=False))
            yield devices
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
