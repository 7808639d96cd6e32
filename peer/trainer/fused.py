"""What is made of a model's values at a freeze and at a load: in torch, and on a processor in one compiled pass.

Called by layout.py and pending_delta.py, which say what is to be made, and by the tiles below, which have it made
where values lie. Must not know when to freeze or to load.

In torch each operation runs over memory by itself, five of them where one pass would do.  values.c has that one pass
for fp32 and bf16; it is compiled as the codecs are (compression/native.py), compared with torch at its first use,
and left where it differs or where there is no compiler.  FARFLUNG_NATIVE=0 turns it off, too.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from farflung.compression.native import SWITCH, NoLibrary, library
from farflung.optim.recipes import ahead
from farflung.peer.island.blocks import Box

SOURCE = Path(__file__).with_name("values.c")
FUSED_VALUES = 1 << 21  # what a call is given: a millisecond, beside which Python's part is small
SHARED_OUT_VALUES = 1 << 22  # less than this is done before another thread has begun
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_ADDRESS, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "owed": (*[_ADDRESS] * 4, _COUNT),
    "ahead": (*[_ADDRESS] * 5, _FLOAT, _COUNT),
    "taken": (*[_ADDRESS] * 6, ctypes.c_int, _FLOAT, _COUNT),
}
_WHAT = {"": 0, "learned": 1, "restored": 2}

Call = Callable[[], object]


class Recipe(Protocol):
    """Changes the model's values where it is to, and returns what is to be written elsewhere."""

    def __call__(self, values: Tensor, *given: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class OnValues:
    """With the model's values at hand: these, of one tile."""

    values: Tensor
    recipe: Recipe

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        return self.recipe(self.values, *given)


# ---- recipes


@dataclass(frozen=True, slots=True)
class Owed:
    """Given what was loaded, and what was carried before if anything: what no commit has used."""

    def __call__(self, values: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        then, *carry = given
        delta = learned(then, values)
        return (delta.add_(carry[0]) if carry else delta,)

    def compiled(
        self, functions: ctypes.CDLL, values: Tensor, given: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Call:
        then, *carry = given
        places = (values, then, carry[0] if carry else None, writes[0])
        return functools.partial(_function(functions, "owed", values), *_places(places), values.numel())


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Given anchor, momentum and what is owed: where to go on meanwhile (optim/recipes.py); and that is written,
    too."""

    rate: float  # of the momentum
    is_parameter: bool

    def __call__(self, values: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        anchor, momentum, owed = (each.reshape(-1) for each in given)
        parameters = anchor.numel() if self.is_parameter else 0
        values.copy_(ahead(self.rate, anchor, momentum, owed, parameters).view(values.shape))
        return (values,)

    def compiled(
        self, functions: ctypes.CDLL, values: Tensor, given: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Call:
        anchor, momentum, owed = given
        moves = self.is_parameter and self.rate != 0.0
        places = (values, writes[0], anchor, momentum if moves else None, owed)
        return functools.partial(
            _function(functions, "ahead", values), *_places(places), -self.rate, values.numel()
        )


@dataclass(frozen=True, slots=True)
class Taken:
    """Given the new anchor: the model takes it, less what is kept; that is written, and what is kept if any is.

    kept      "learned": given what was loaded, then what was carried before (`has_old`) and what a commit has used of
              both (`in_slot`); "restored": given a slot, that; "": nothing
    mix       so much of where it stood the model keeps; what it is then away from the anchor is kept
    """

    kept: Literal["learned", "restored", ""]
    has_old: bool = False
    in_slot: bool = False
    mix: float = 0.0

    def __call__(self, values: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        new, *rest = given
        kept = None
        if self.kept:
            kept = rest[0] if self.kept == "restored" else learned(rest[0], values)
            if self.has_old:
                kept = kept + rest[1]
            if self.in_slot:
                kept = kept - rest[-1]
        value = new if kept is None else new - kept
        if self.mix:
            value = torch.lerp(value, values.to(torch.float32), self.mix)
            kept = new - value
        values.copy_(value)
        return (values,) if kept is None else (values, kept)

    def compiled(
        self, functions: ctypes.CDLL, values: Tensor, given: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Call:
        loaded, *kept = writes
        old = given[2] if self.has_old else None
        slot = given[-1] if self.in_slot or self.kept == "restored" else None
        places = (values, loaded, given[0], old, slot, kept[0] if kept else None)
        numbers = (_WHAT[self.kept], self.mix, values.numel())
        return functools.partial(_function(functions, "taken", values), *_places(places), *numbers)

    def is_in_place(self, given: Sequence[Tensor], writes: Sequence[Tensor]) -> bool:
        """What was loaded is read where it is written."""
        return self.kept != "learned" or given[1].data_ptr() == writes[0].data_ptr()


def learned(then: Tensor, now: Tensor) -> Tensor:
    """then - now in fp32; calculated in fp64 for fp64 tensors, whose small steps fp32 would swallow."""
    wide = torch.float64 if then.dtype == torch.float64 else torch.float32
    delta = then.to(wide) - now.to(wide)
    # Equal values have learned nothing; -inf in an attention mask would otherwise give inf - inf = nan.  On a CPU a sum
    # tells sooner whether there is any; on a device it would have to be waited for.
    if delta.device.type != "cpu" or not bool(delta.sum().isfinite()):
        delta.masked_fill_(then == now, 0.0)
    return delta.to(torch.float32)


# ---- the compiled way


def prepared(make: object, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Call | None:
    """What does it all, on any thread; None: it is left to torch."""
    if not isinstance(make, OnValues) or not isinstance(make.recipe, Owed | Lookahead | Taken):
        return None
    functions = usable()
    if functions is None or not _fits(make, reads, writes):
        return None
    if not isinstance(make.recipe, Owed):
        increment_version(make.values)  # as every change in place: a graph that still needs them is told so
    call = make.recipe.compiled(functions, make.values, reads, writes)

    def with_memory(_: object = (make, reads, writes)) -> None:
        call()  # it knows addresses alone

    return with_memory


def fits_compiled(values: Tensor) -> bool:
    """A model's, or a part of them.  Other classes of tensors may have their values anywhere."""
    is_plain = type(values) is Tensor and values.dtype in _NAMES and values.is_contiguous()
    return is_plain and usable() is not None


def _fits(make: OnValues, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> bool:
    values, recipe = make.values, make.recipe
    if not fits_compiled(values) or not all(each.is_contiguous() for each in (*reads, *writes)):
        return False
    if isinstance(recipe, Owed):
        then, *flat = reads
        return then.dtype == values.dtype and _all_fp32((*flat, *writes))
    loaded, *kept = writes
    flat = list(reads)
    if isinstance(recipe, Taken) and recipe.kept == "learned":
        del flat[1]
        if not recipe.is_in_place(reads, writes):
            return False
    return loaded.dtype == values.dtype and _all_fp32((*flat, *kept))


def _all_fp32(tensors: Sequence[Tensor]) -> bool:
    return all(each.dtype == torch.float32 for each in tensors)


def _function(functions: ctypes.CDLL, what: str, values: Tensor) -> Callable[..., None]:
    function = getattr(functions, f"{what}_{_NAMES[values.dtype]}")
    function.restype, function.argtypes = None, _ARGUMENTS[what]
    return function  # type: ignore[no-any-return]


def _places(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if each is None else each.data_ptr() for each in tensors]


def usable() -> ctypes.CDLL | None:
    return None if os.environ.get(SWITCH) == "0" else _checked()


@functools.cache
def _checked() -> ctypes.CDLL | None:
    try:
        functions = ctypes.CDLL(str(library(os.environ, SOURCE)))
    except (NoLibrary, OSError):
        return None  # the agent says why for its codecs, which want the same
    return functions if all(map(functools.partial(_agrees, functions), _samples())) else None


Sample = tuple[Recipe, Tensor, list[Tensor], list[Tensor]]


def _samples() -> Iterator[Sample]:
    """A recipe, the model's values, what it is given, and room for what it writes."""
    chance = torch.Generator().manual_seed(7)

    def some() -> Tensor:
        values = torch.randn(4096, generator=chance)
        values[::7] *= 2.0 ** torch.randint(-140, 90, values[::7].shape, generator=chance)
        values[::61] = 0.0
        return values

    for dtype in _NAMES:
        then, now = some().to(dtype), some().to(dtype)
        now[::5] = then[::5]
        then[5::1000] = now[5::1000] = -torch.inf
        for carry in ([], [some()]):
            yield Owed(), now, [then, *carry], [some()]
        for is_parameter in (True, False):
            yield Lookahead(0.567, is_parameter), now, [some(), some(), some()], [torch.empty_like(then)]
        for mix in (0.0, 0.25, 0.5):
            kept = [some()] if mix else []
            yield Taken("", mix=mix), now, [some()], [torch.empty_like(then), *kept]
            for old, slot in (([], []), ([some()], []), ([], [some()]), ([some()], [some()])):
                recipe = Taken("learned", bool(old), bool(slot), mix)
                yield recipe, now, [some(), then, *old, *slot], [then, some()]
        yield Taken("restored"), now, [some(), some()], [torch.empty_like(then), some()]


def _agrees(functions: ctypes.CDLL, sample: Sample) -> bool:
    recipe, values, given, writes = sample
    assert isinstance(recipe, Owed | Lookahead | Taken)
    found = []
    for is_compiled in (False, True):
        now, out = values.clone(), [each.clone() for each in writes]
        # What is read where it is written lies in one place here, too.
        own = {id(each): copy for each, copy in zip(writes, out, strict=True)}
        reads = [own.get(id(each), each) for each in given]
        if is_compiled:
            recipe.compiled(functions, now, reads, out)()
        else:
            for into, value in zip(out, recipe(now, *reads), strict=True):
                into.copy_(value)
        found.append([now, *out])
    return all(
        torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in zip(*found, strict=True)
    )


def do_all(calls: Sequence[Call], values: int) -> None:
    """`values`: of all of them together.  On as many threads as torch would take; it has nothing to do meanwhile."""
    left = deque(calls)

    def work() -> None:
        while True:
            try:
                call = left.popleft()
            except IndexError:
                return
            call()

    helpers = min(torch.get_num_threads(), values // SHARED_OUT_VALUES + 1, len(calls)) - 1
    if helpers < 1:
        work()
        return
    with ThreadPoolExecutor(helpers, "farflung-values") as pool:
        begun = [pool.submit(work) for _ in range(helpers)]
        work()
    for each in begun:
        each.result()


# ---- tiles -------------------------------------------------------------------------------------------------
# Work on a model's values, one tile after the other: what lies in host memory goes in, what is made comes
# back.
#
# Called by the layout of a model for whatever it reads and writes: anchors, pseudo-gradients, copies. Must
# not know what they are.
#
# A model may be larger than what is left of memory, so nothing as long as a tensor is made on the way: a tile
# is what the caches of a processor hold, or what a bus carries in a millisecond. Where a tensor lies decides
# by which `TilePlace` its tiles are worked on:
#
#     Here     in host memory: on the values themselves, in torch or by what is compiled
#     Across   on a device: read through pinned staging memory and written back through it, two tiles at a time on two
#              queues (`CopyQueue`), so that one comes while the other goes; registered memory needs no staging
#
# A `CopyQueue` is what a device's queue can do; copy_queues.py has the real one.

HERE_VALUES = 1 << 18  # 1 MiB of fp32
ACROSS_VALUES = 1 << 22  # 16 MiB: a millisecond of a bus, beside which starting a copy costs nothing

Make = Callable[..., Sequence[Tensor]]


class TilePlace(Protocol):
    def most(self, values: Tensor) -> int:
        """Of these, in a tile."""

    def work(self, reads: Sequence[Tensor], make: Make, writes: Sequence[Tensor]) -> None:
        """`make` is handed the reads where the model's tensors lie, and returns what is to be written.

        Reads and writes lie in host memory.  What it does may be done later, but in order with what comes next for the
        same values, and before `finish` returns.
        """

    def finish(self) -> None:
        """Until all is read and written."""


class Here:
    """What is compiled waits for `finish`, where several threads do it: tiles have no values in common."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._calls: list[Call] = []
        self._values = 0

    def most(self, values: Tensor) -> int:
        return self._most or (FUSED_VALUES if fits_compiled(values) else HERE_VALUES)

    def work(self, reads: Sequence[Tensor], make: Make, writes: Sequence[Tensor]) -> None:
        call = prepared(make, reads, writes)
        if call is not None:
            self._calls.append(call)
            self._values += writes[0].numel()
            return
        for into, value in zip(writes, make(*reads), strict=True):
            into.copy_(value)

    def finish(self) -> None:
        calls, self._calls = self._calls, []
        do_all(calls, self._values)
        self._values = 0


class CopyQueue(Protocol):
    """A queue of a device, beside the one on which the model is computed."""

    def follow(self) -> None:
        """What comes next begins after all that the script has queued by now."""

    def put(self, work: Callable[[], None]) -> None:
        """Copies and arithmetic that may be done any time from now on, one after the other."""

    def wait(self) -> None:
        """Until all of it is done."""

    def there(self, value: Tensor) -> Tensor:
        """Within `put`: a copy on the device, of contiguous memory that the device reaches."""

    def reaches(self, value: Tensor) -> bool:
        """Whether the device reads and writes this host memory by itself: contiguous, and registered."""

    def room(self, like: Tensor, number: int) -> Tensor:
        """Staging memory that the device reaches, as long as this: each number of a lane has its own."""


@dataclass(frozen=True, slots=True)
class _StagedTile:
    """What stands in staging memory once the lane has done its work."""

    staged: Tensor
    into: Tensor


class Across:
    def __init__(self, lanes: Sequence[CopyQueue], most: int = ACROSS_VALUES) -> None:
        self._most = most
        self._lanes = lanes
        self._coming: list[list[_StagedTile]] = [[] for _ in lanes]
        self._busy = [False] * len(lanes)
        self._next = 0

    def most(self, values: Tensor) -> int:
        return self._most

    def work(self, reads: Sequence[Tensor], make: Make, writes: Sequence[Tensor]) -> None:
        at = self._next
        self._next = (at + 1) % len(self._lanes)
        lane = self._lanes[at]
        self._settle(at)  # its staging memory is free then
        if not any(self._busy):
            for each in self._lanes:
                each.follow()
        self._busy[at] = True
        given = [self._staged(lane, value, number) for number, value in enumerate(reads)]
        wanted = [
            into if lane.reaches(into) else lane.room(into, len(reads) + number)
            for number, into in enumerate(writes)
        ]

        def tile() -> None:
            made = make(*(lane.there(value) for value in given))
            for into, value in zip(wanted, made, strict=True):
                into.copy_(value.to(into.dtype), non_blocking=True)

        lane.put(tile)
        pairs = zip(wanted, writes, strict=True)
        self._coming[at] = [_StagedTile(staged, into) for staged, into in pairs if staged is not into]

    def _staged(self, lane: CopyQueue, value: Tensor, number: int) -> Tensor:
        return value if lane.reaches(value) else lane.room(value, number).copy_(value)

    def _settle(self, at: int) -> None:
        if self._busy[at]:
            self._lanes[at].wait()
            self._busy[at] = False
            for each in self._coming[at]:
                each.into.copy_(each.staged)
            self._coming[at] = []

    def finish(self) -> None:
        for at in range(len(self._lanes)):
            self._settle(at)


def tiles(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most so many values that together are this one, in row-major order."""
    if box.numel <= most:
        if box.numel:
            yield box
        return
    row = box.numel // box.shape[0]
    count = max(1, most // row)
    for first in range(0, box.shape[0], count):
        rows = min(count, box.shape[0] - first)
        part = Box((box.start[0] + first, *box.start[1:]), (rows, *box.shape[1:]))
        if rows == 1 and row > most:
            for inner in tiles(Box(part.start[1:], part.shape[1:]), most):
                yield Box((part.start[0], *inner.start), (1, *inner.shape))
        else:
            yield part
