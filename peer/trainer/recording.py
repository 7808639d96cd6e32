"""A watcher of the inner loop: records what a span of steps is made of, or puts that back so that it is taken again.

Chosen by the environment when a trainer joins: FARFLUNG_RECORD (or `record` in config.toml) names a folder to record
into, FARFLUNG_REDO one span to take again.  A span begins when a round is over and ends with the next freeze.  Both
watchers see the same moments, so whatever one of them keeps the other puts back at the same place:

    begins       the model is loaded, no batch of the span has been asked for
    on_read      a batch is about to be read: the first one fixes the random numbers
    on_rates     right before each step of the inner optimizer
    on_frozen    the pseudo-gradient stands in its slot, and is not told yet

Only the blocking schedule with periods counted in steps: with the others a result comes in the midst of a span.
Must not know the network, or what becomes of the pseudo-gradient.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.peer.data.leased_data import Span
from farflung.peer.record.optimizer_state import (
    OptimizerState,
    Unrecordable,
    parameters_of,
    put_together,
    taken_apart,
    tensors_by_key,
)
from farflung.peer.record.work_files import (
    REDO_VARIABLE,
    ROUNDING_VARIABLE,
    Number,
    Rates,
    Samples,
    Step,
    Work,
    WorkHead,
    write_work,
)
from farflung.peer.trainer.model_tensors import unwrap
from farflung.protocol.errors import StoreError, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema

log = logging.getLogger(__name__)

Undo = Callable[[], None]


@dataclass
class Held:
    """What the inner loop holds besides the model, as the span begins: to be kept, or to be put back."""

    versions: Sequence[int]
    loaded: list[Tensor]
    carries: list[Tensor | None]  # of each fragment


class Watcher(Protocol):
    def begins(self, held: Held) -> None: ...

    def on_loaded(self) -> None:
        """A result came into the model."""

    def on_want(self, samples: int, data: bytes) -> None: ...

    def on_read(self) -> None: ...

    def batch_size(self, asked: int) -> int: ...

    def on_handed_out(self, spans: tuple[Span, ...]) -> None: ...

    def on_rates(self) -> Undo: ...

    def on_frozen(self, step: int, delta: Tensor, model: ModelSchema) -> None: ...


class NoWatcher:
    """Of a trainer that records nothing."""

    def begins(self, held: Held) -> None:
        pass

    def on_loaded(self) -> None:
        pass

    def on_want(self, samples: int, data: bytes) -> None:
        pass

    def on_read(self) -> None:
        pass

    def batch_size(self, asked: int) -> int:
        return asked

    def on_handed_out(self, spans: tuple[Span, ...]) -> None:
        pass

    def on_rates(self) -> Undo:
        return _nothing

    def on_frozen(self, step: int, delta: Tensor, model: ModelSchema) -> None:
        pass


def watcher_for(
    record: Path | None, manifest: Manifest, name: str, model: nn.Module, optimizer: Optimizer
) -> Watcher:
    """`record`: where this peer's owner wants its work kept.  UserError where that can't be done."""
    if redo := os.environ.get(REDO_VARIABLE):
        size, _, seed = os.environ.get(ROUNDING_VARIABLE, "0 0").partition(" ")
        return Redoing(Work(Path(redo)), model, optimizer, float(size), int(seed))
    if record is None:
        return NoWatcher()
    if why := why_not(manifest):
        log.warning("nothing is recorded: %s", why)
        return NoWatcher()
    return Recording(record, manifest, name, model, optimizer)


def why_not(manifest: Manifest) -> str:
    """Why spans of this run can't be taken again, or empty."""
    if manifest.outer.schedule != "blocking":
        return f'[outer] schedule = "{manifest.outer.schedule}": results come in the midst of a span of steps'
    if manifest.round.period_s:
        return "[round] period_s: a span ends by the clock, and not after so many steps"
    if manifest.pipeline.batch:
        return "[pipeline] batch: a trainer counts microbatches there, and takes no steps of its own"
    return ""


# ---- keeping ---------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """The span that is being recorded."""

    versions: tuple[int, ...]
    tensors: dict[str, Tensor]
    optimizer: OptimizerState
    random: dict[str, Number] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    spans: list[Samples] = field(default_factory=list)  # handed out since the last step
    batches: list[int] = field(default_factory=list)  # so many samples in each of them
    has_read: bool = False
    problem: str = ""  # why it can't be taken again


class Recording:
    def __init__(
        self, place: Path, manifest: Manifest, name: str, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self._place, self._manifest, self._name = place, manifest, name
        self._model, self._optimizer = model, optimizer
        self._open: _Open | None = None
        self._has_warned = False
        self._samples, self._data = 0, b""

    def begins(self, held: Held) -> None:
        tensors = {f"model.{name}": value for name, value in _state_of(self._model).items()}
        tensors |= {f"loaded.{at}": each for at, each in enumerate(held.loaded)}
        tensors |= {f"carry.{at}": each for at, each in enumerate(held.carries) if each is not None}
        try:
            state = taken_apart(self._optimizer)
        except Unrecordable as error:
            return self._give_up(error)
        tensors |= {f"optimizer.{key}": value for key, value in state.tensors.items()}
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
        self._open = _Open(tuple(held.versions), copies, state)
        return None

    def _give_up(self, error: Unrecordable) -> None:
        """Whoever trains goes on: that no work is kept takes nothing from it."""
        self._open = None
        if not self._has_warned:
            log.warning("nothing is recorded, as this optimizer's work can't be taken again: %s", error)
        self._has_warned = True

    def on_loaded(self) -> None:
        self._spoil("a result came in the midst of it")

    def _spoil(self, problem: str) -> None:
        if self._open is not None and self._open.has_read:
            self._open.problem = self._open.problem or problem

    def on_want(self, samples: int, data: bytes) -> None:
        self._samples, self._data = samples, data

    def on_read(self) -> None:
        span = self._open
        if span is not None and not span.has_read:
            span.has_read = True
            tensors, span.random = random_state()
            span.tensors |= {f"random.{name}": value for name, value in tensors.items()}

    def batch_size(self, asked: int) -> int:
        return asked

    def on_handed_out(self, spans: tuple[Span, ...]) -> None:
        if self._open is not None:
            self._open.spans += [(span.epoch, span.start, span.stop) for span in spans]
            self._open.batches.append(sum(span.stop - span.start for span in spans))

    def on_rates(self) -> Undo:
        span = self._open
        if span is not None:
            if not span.spans:
                self._spoil("a step was taken on samples that were not leased")
            try:
                rates = tuple(map(_rates_of, self._optimizer.param_groups))
            except Unrecordable as error:
                self._give_up(error)
                return _nothing
            span.steps.append(Step(tuple(span.spans), rates, tuple(span.batches)))
            span.spans, span.batches = [], []
        return _nothing

    def on_frozen(self, step: int, delta: Tensor, model: ModelSchema) -> None:
        span, self._open = self._open, None
        if span is None:
            return
        if span.spans:
            span.problem = span.problem or "samples were handed out ahead of the next step"
        if span.problem or not span.has_read:
            told = span.problem or "its samples were not leased by run.batches"
            return log.warning("the work up to step %d is not recorded: %s", step, told)
        head = WorkHead(
            manifest=self._manifest.canonical(),
            name=self._name,
            model=model,
            versions=span.versions,
            steps=tuple(span.steps),
            epoch_samples=self._samples,
            data=self._data,
            optimizer=span.optimizer.numbers,
            more=span.optimizer.more,
            on_host=tuple(span.optimizer.on_host),
            random=span.random,
            threads=torch.get_num_threads(),
            software=f"torch {torch.__version__}",
            device=str(next(self._model.parameters()).device),
        )
        try:
            write_work(self._place, step, head, span.tensors, {"delta": delta.clone()})
        except StoreError as error:
            log.warning("%s; training goes on", error)
        return None


# ---- taking it again ---------------------------------------------------------------------------------------------


class Redoing:
    """Puts the span's beginning back once; what comes after its end is of no interest."""

    def __init__(self, work: Work, model: nn.Module, optimizer: Optimizer, size: float, seed: int) -> None:
        """`size`: by how much of its root mean square each gradient is moved at every step, as rounding might."""
        self._work, self._tensors = work, work.before()
        self._model, self._optimizer, self._size = model, optimizer, size
        self._chance = torch.Generator().manual_seed(seed)
        self._begun = self._has_read = False
        self._step = self._batch = 0
        self._sizes = [size for step in work.head.steps for size in step.batch_sizes]

    def begins(self, held: Held) -> None:
        if self._begun:
            return
        self._begun = True
        where = self._work.folder
        state = _state_of(self._model)
        _copy_all(where, {f"model.{name}": value for name, value in state.items()}, self._tensors)
        _copy_all(where, {f"loaded.{at}": each for at, each in enumerate(held.loaded)}, self._tensors)
        for at in range(len(held.carries)):
            carry = self._tensors.get(f"carry.{at}")
            held.carries[at] = carry.clone() if carry is not None else None
        self._restore_optimizer()

    def _restore_optimizer(self) -> None:
        head, tensors = self._work.head, tensors_by_key(self._tensors, "optimizer.")
        try:
            put_together(
                self._optimizer, OptimizerState(tensors, head.optimizer, head.more, list(head.on_host))
            )
        except UserError as error:
            raise UserError(f"{self._work.folder}: {error}") from None

    def on_loaded(self) -> None:
        pass

    def on_want(self, samples: int, data: bytes) -> None:
        head = self._work.head
        if not self._has_read and (samples, data) != (head.epoch_samples, head.data):
            self._has_read = True
            raise UserError(
                "the data set here is not the one of the recorded work: another length or fingerprint"
            )

    def on_read(self) -> None:
        if not self._has_read:
            self._has_read = True
            set_random_state(tensors_by_key(self._tensors, "random."), self._work.head.random)

    def batch_size(self, asked: int) -> int:
        """A batch was shorter than it should be where no more was leased just then."""
        return self._sizes[self._batch] if self._batch < len(self._sizes) else asked

    def on_handed_out(self, spans: tuple[Span, ...]) -> None:
        self._batch += 1

    def on_rates(self) -> Undo:
        steps, at = self._work.head.steps, self._step
        self._step += 1
        groups = self._optimizer.param_groups
        if at >= len(steps):
            return _nothing
        if len(steps[at].rates) != len(groups):
            raise UserError(
                f"{self._work.folder}: its optimizer has {len(steps[at].rates)} groups, here {len(groups)}"
            )
        before = [dict(group) for group in groups]
        for group, rates in zip(groups, steps[at].rates, strict=True):
            group.update(rates)
        self._move_gradients()

        def undo() -> None:
            for group, rates, old in zip(groups, steps[at].rates, before, strict=True):
                group.update({name: old[name] for name in rates if name in old})

        return undo

    def _move_gradients(self) -> None:
        if not self._size:
            return
        for parameter in parameters_of(self._optimizer):
            if (gradient := parameter.grad) is not None:
                noise = torch.randn(gradient.shape, generator=self._chance).to(gradient)
                gradient.add_(noise * (self._size * gradient.square().mean().sqrt()))

    def on_frozen(self, step: int, delta: Tensor, model: ModelSchema) -> None:
        pass


# ---- what there is to keep ----------------------------------------------------------------------------------------


def random_state() -> tuple[dict[str, Tensor], dict[str, Number]]:
    """Of Python, numpy and torch, on every device: tensors, and what is none."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    tensors["numpy"] = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    if torch.cuda.is_available():
        tensors |= {f"cuda.{at}": each for at, each in enumerate(torch.cuda.get_rng_state_all())}
    numbers: dict[str, Number] = {"python version": version, "python gauss": gauss, "numpy place": int(place)}
    return tensors, {**numbers, "numpy has_gauss": int(has_gauss), "numpy cached": float(cached)}


def set_random_state(tensors: Mapping[str, Tensor], numbers: Mapping[str, Number]) -> None:
    """UserError if it is none."""
    try:
        words = tuple(int(word) for word in tensors["python"].tolist())
        random.setstate((numbers["python version"], words, numbers["python gauss"]))
        keys = tensors["numpy"].numpy().astype(np.uint32)
        place, has_gauss = int(numbers["numpy place"] or 0), int(numbers["numpy has_gauss"] or 0)
        np.random.set_state(("MT19937", keys, place, has_gauss, float(numbers["numpy cached"] or 0.0)))
        torch.set_rng_state(tensors["torch"])
        for at in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if f"cuda.{at}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{at}"], at)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"the recorded state of random numbers is damaged: {error}") from None


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    found = unwrap(model).state_dict(keep_vars=True)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _rates_of(group: Mapping[str, Any]) -> Rates:
    found: Rates = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            raise Unrecordable(f"{name} of a group is a tensor")
        if isinstance(value, bool):
            continue  # how it is calculated (fused, foreach): this machine's business
        numbers = value if isinstance(value, tuple) else (value,)
        if all(isinstance(each, int | float) for each in numbers):
            found[name] = value
    return found


def _copy_all(where: Path, into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in into.items():
            value = tensors.get(name)
            if value is None or value.shape != target.shape or value.dtype != target.dtype:
                raise UserError(
                    f"{where}: it has no {name} of {target.dtype} {list(target.shape)}, as the model here"
                )
            target.copy_(value)


def _nothing() -> None:
    pass
