"""The trainer's machine on a model: carries out what it decides, and blocks where it waits.

Owns: the channel to the agent, the shared memory, the model's tensors, the losses.  What is frozen, loaded, read or
waited for is decided in machine.py; what is owed of each fragment is in pending_delta.py.
Called by the public API after every optimizer step, and while it waits for data.

Of an island of several ranks each has a loop of its own, over its part of the model.  They hear the same words and the
same time (`ranks`, which is the channel, too), so that all of them do the same at the same step.
Must not know: processes, sockets, rounds, how the outer step works.  Messages come through a channel.
"""

from __future__ import annotations

import logging
import math
import os
import re
import struct
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.optim.recipes import momentum_rate, outer_of
from farflung.optim.schedule import rates_of, rules_of
from farflung.peer.checks.finite import Remembered, not_finite
from farflung.peer.checks.forward_check import ForwardCheck, as_it_was
from farflung.peer.checks.misuse import LoadWatch
from farflung.peer.data.leased_data import Span
from farflung.peer.island.group import FarMemory
from farflung.peer.island.ranks import ALONE, Ranks, mean_of
from farflung.peer.island.sharded import read_as_one, whole_loss
from farflung.peer.local.memory import SharedState, VersionArriving
from farflung.peer.local.words import Computed, FromTrainer, Logged, Score, Scored, Shared, ToTrainer
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.agent_process import refusal
from farflung.peer.trainer.copy_queues import LASTING
from farflung.peer.trainer.kept_optimizer import KeptOptimizer
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.machine import TrainerMachine
from farflung.peer.trainer.pending_delta import PendingDelta
from farflung.protocol.errors import ScoreCause, UserError
from farflung.protocol.limits import FIGURE_CHARS, FIGURES_MOST
from farflung.protocol.manifest import Manifest
from farflung.protocol.mode_words import FIGURE_NAME
from farflung.protocol.model_schema import fragments_of
from farflung.protocol.process import failpoints

log = logging.getLogger(__name__)

Found = TypeVar("Found")

VERSION_PATIENCE_S = 60.0  # for one that is just arriving
POLL_S = 0.5  # while blocked: how often to see whether the agent lives
LOSS_EVERY_S = 0.5  # reading a loss waits for the GPU, so it is not read at every step
_NORM = struct.Struct("<dq?")
GRADIENT_EVERY_S = 10.0  # its norm reads all of it once: so seldom that nobody notices
NOT_FINITE_MOST = 3  # freezes in a row: then this is no bad batch, and the script ends
# A scaler that finds no finite gradient skips each step, and halves its scale: batches without one, doubling from here.
UNSTEPPED_LOOK = 8
UNSTEPPED_MOST = 256  # no script accumulates the gradients of so many by intent
NO_STEP = (
    "{} batches were read, and the optimizer that was handed to farflung.join has taken no step: nothing is learned "
    "here; call its step(), or run.step(loss), after backward()"
)
NO_LOSS = (
    "steps are counted, and their loss is not known: run.step(loss) in place of optimizer.step(), or run.record(loss) "
    "before it, shows it to everybody"
)


class HeldOut(Protocol):
    def answer(self, score: Score) -> Scored: ...


class Channel(Protocol):
    def send(self, message: FromTrainer) -> None: ...

    def recv(self, timeout_s: float) -> ToTrainer | None: ...


class MeanLoss:
    """The mean of the losses since the last freeze, summed where they are computed."""

    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, loss: Tensor | float) -> None:
        # A new tensor each time: the caller's own must neither change nor keep its graph alive.
        value = whole_loss(loss.detach()).float().mean() if isinstance(loss, Tensor) else loss
        self._sum = self._sum + value
        self._count += 1

    def sums(self) -> tuple[float, int]:
        """The sum, and of how many."""
        return float(self._sum), self._count

    def read(self) -> float | None:
        """None where there is no loss, or none that is a number."""
        return mean_of([self.sums()])

    def clear(self) -> None:
        self._sum, self._count = 0.0, 0


def gradient_norm(found: list[Tensor], ranks: Ranks = ALONE) -> float | None:
    """As the optimizer has just taken it, which is after the script has clipped it; None where there is none, or where
    it is of a kind that has no norm here.  Of several ranks each brings what is its own."""
    usable = not any(each.layout != torch.strided for each in found)
    mine = float(nn.utils.get_total_norm(found)) if found and usable else 0.0
    told = [_NORM.unpack(each) for each in ranks.gather(_NORM.pack(mine, len(found), usable))]
    if not all(usable for *_, usable in told) or not any(count for _, count, _ in told):
        return None
    return told[0][0] if len(told) == 1 else math.sqrt(sum(norm * norm for norm, *_ in told))


class InnerLoop:
    def __init__(
        self,
        channel: Channel,
        model: nn.Module,
        manifest: Manifest,
        agent_problem: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks = ALONE,
    ) -> None:
        self._manifest = manifest
        self.ranks = ranks
        self.layout = ModelLayout.of(model, manifest.round.chunk_kb * 1024 // 4, ranks)
        fragments = fragments_of(self.layout.chunk_count, manifest.fragments)
        self.parts = [PendingDelta(self.layout, fragment) for fragment in fragments]
        self.machine = TrainerMachine(rules_of(manifest), manifest.data.lease_samples, clock())
        self._model = model
        self._channel = channel
        self._agent_problem = agent_problem  # why the agent is gone, or None
        self._clock = clock
        self._shared: SharedState | None = None
        self._beside = ""
        self._loaded: list[Tensor] = []  # the model, each part of it as it was set last
        self._before: dict[int, list[Tensor]] = {}  # fragments, before a step that they must not see
        self._watch: LoadWatch | None = None  # that no weights are loaded past the run
        self._forward: ForwardCheck | None = None
        self._forward_of = -1  # the version of which it was read
        self._loaded_at = 0  # the step
        self._said_tokens: int | None = None
        self._batches = 0  # handed out, all in all
        self._unstepped = 0  # of them, since the last step
        self._remembered: Remembered | None = None
        self._broken: list[str] = []  # tensors of this freeze that are not finite
        self._broken_in_a_row = 0
        self._losses = MeanLoss()
        self._was_told_loss = False  # or has said that it was not
        self._loss: float | None = None
        self._figures: dict[str, float] = {}  # the script's own
        self._figures_told: dict[str, float] = {}
        self.held_out: HeldOut | None = None  # what [eval] names, where the script computes losses of it
        self._loss_at = self._gradient_at = -math.inf

    @property
    def shared(self) -> SharedState:
        assert self._shared is not None, "before attach()"
        return self._shared

    @property
    def kept_optimizer(self) -> KeptOptimizer:
        """Of several ranks each has a part of what is to be known: none is kept."""
        return KeptOptimizer(self._beside if self.ranks.count == 1 else "")

    @property
    def run_digest(self) -> bytes:
        """It names the run: of what it began with, whatever its host has changed since."""
        return self._manifest.digest

    @property
    def manifest(self) -> Manifest:
        """What holds at this version."""
        terms = self.machine.terms
        return self._manifest if terms is None else terms.at(max(0, self.version))

    @property
    def total_steps(self) -> int:
        terms = self.machine.terms
        return self._manifest.total_steps if terms is None else terms.total_steps(max(0, self.version))

    def rate_share(self, rate: Callable[[int], float] | None) -> float:
        """At the run's step, of the rate that the run began with.  `rate`: in place of [inner] schedule."""
        manifest = self.manifest
        share = rate if rate is not None else rates_of(manifest, self.total_steps).share
        return share(self.run_step) * (manifest.inner.lr / self._manifest.inner.lr)

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def version(self) -> int:
        """Of the least advanced fragment in the model."""
        return self.machine.version

    @property
    def step_count(self) -> int:
        return self.machine.step_count

    @property
    def run_step(self) -> int:
        return self.machine.run_step

    @property
    def finished(self) -> bool:
        return self.machine.finished

    @property
    def waited_s(self) -> float:
        """For rounds, all in all."""
        return self.machine.waited_s

    def attach(self) -> None:
        """Say what the model is, and wait until the run's state is in it."""
        failpoints.hit("trainer.attach")
        schema = self.layout.model_schema(self._model, ranks=self.ranks)
        self._carry_out(self.machine.attach(schema, os.getpid()))
        self._wait()

    def watch_loads(self) -> None:
        """From now on what the script loads into the model by itself is refused, as long as the run is on."""
        if not self.finished:
            self._watch = LoadWatch(self._model)
            # In an island, a call that one rank can't make would leave the others waiting.
            if self.ranks.count == 1:
                self._forward = ForwardCheck(self._model)

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """What it remembers is looked at, too, where the model is: see finite.py."""
        self._remembered = Remembered(optimizer)

    def end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._forward is not None:
            self._forward.end()
            self._forward = None

    # ---- inner steps

    def record(self, loss: Tensor | float | None, tokens: int | None) -> None:
        """What the caller says about the step that comes next."""
        if tokens is not None and tokens < 0:
            raise UserError(f"tokens must not be negative, found {tokens}")
        if loss is not None:
            self._was_told_loss = True
            self._losses.add(loss)
        self._said_tokens = tokens

    def log_figure(self, name: str, value: float) -> None:
        """Of the script's own; told with the next loss."""
        if not re.fullmatch(FIGURE_NAME, name):
            raise UserError(
                f"run.log: expected a name of 1 to {FIGURE_CHARS} of A-Z, a-z, 0-9, _ . / and -, found {name!r}"
            )
        if name not in self._figures and len(self._figures) >= FIGURES_MOST:
            raise UserError(
                f"run.log: {name!r} would be the {FIGURES_MOST + 1}th figure, at most {FIGURES_MOST} are shown"
            )
        self._figures[name] = value

    def before_step(self) -> None:
        """Before every optimizer step."""
        self._say_what_is_computed()
        self._carry_out(self.machine.before_step())

    def _say_what_is_computed(self) -> None:
        """Of each version, where the model holds it and nothing that is learned since."""
        if self._forward is None or self._loaded_at != self.step_count or self.finished:
            return  # nearly every step
        versions = {account.version for account in self.machine.accounts}
        if len(versions) > 1 or self._forward_of in versions or any(part.has_owed for part in self.parts):
            return
        self._forward_of = self.version
        if (found := self._forward.read(self.version)) is not None:
            self._channel.send(Computed(forward=found))

    def after_step(self) -> None:
        """After every optimizer step.  Loads may come at any step; a freeze waits for the agent."""
        if self.finished:
            return
        failpoints.hit("trainer.step")
        self._unstepped = 0
        said, self._said_tokens = self._said_tokens, None
        outlook = self.machine.outlook(self._clock())
        tokens = self.ranks.tokens_of_step(said, self.machine.leases.step_tokens, self._batches, outlook)
        self._carry_out(self.machine.on_step(self._clock(), tokens))
        self._before.clear()
        while (message := self._channel.recv(0.0)) is not None:
            self._hear(message)
        self._show_progress()
        self._carry_out(self.machine.on_heard(self._clock()))
        self._wait()

    def _show_progress(self) -> None:
        now = self._clock()
        if now - self._loss_at >= LOSS_EVERY_S:
            self._loss_at = now
            loss = self._losses.read()
            self._loss = self._loss if loss is None else loss
            if self._figures != self._figures_told:
                self._figures_told = dict(self._figures)
                self._channel.send(Logged(figures=tuple(self._figures.items())))
        is_due = now - self._gradient_at >= GRADIENT_EVERY_S
        if is_due:
            self._gradient_at = now
            norm = gradient_norm(self.layout.own_gradients(self._model), self.ranks)
        if self.ranks.rank != 0:
            return
        self.shared.write_progress(self.machine.step_count, self.machine.all_tokens, self._loss)
        if is_due:
            self.shared.write_gradient_norm(norm)

    # ---- data

    def next_batch(self, samples: int, batch: int, data: bytes = b"") -> tuple[Span, ...]:
        """The next leased samples; waits for a lease where there is none.  Empty: the run is over.

        `samples`: of an epoch, as far as it is known by now; `data`: the fingerprint of the data set.
        """
        while not self.finished:
            effects = self.machine.on_want(samples, batch, self._clock(), data)
            self._carry_out(effects)
            for effect in effects:
                if isinstance(effect, do.ReadSamples):
                    return (effect.span, *effect.more)
            self._hear(self._next_message())
            self.machine.on_waited(self._clock())
        return ()

    def following(self, spans: tuple[Span, ...], batch: int, count: int) -> list[tuple[Span, ...]]:
        """At most so many batches that seem to come after this one; nothing rests on it."""
        seen = [spans]
        while len(seen) <= count and (further := self.machine.leases.next_batch(batch, seen)):
            seen.append(further)
        return seen[1:]

    def hand_out(self, spans: tuple[Span, ...], tokens: int) -> None:
        self.machine.hand_out(spans, tokens)
        self._batches += 1
        self._unstepped += 1
        self._look_at_the_unstepped()

    def read_ahead(self, batches: int) -> int:
        """Of the loader that begins now: see TrainerMachine.read_ahead."""
        return self.machine.read_ahead(batches)

    def take_back(self, loader: int) -> None:
        self.machine.take_back(loader)

    # ---- the agent's words

    def _wait(self) -> None:
        while self.machine.waits:
            self._hear(self._next_message())

    def _hear(self, message: ToTrainer | None) -> None:
        now = self._clock()
        heard = self.machine.on_silence(now) if message is None else self.machine.on_message(message, now)
        self._carry_out(heard)

    def _next_message(self) -> ToTrainer | None:
        """Waits a moment; Refused once the agent is gone and its last words are read."""
        message = self._channel.recv(POLL_S)
        self.machine.count_tokens(self.ranks.tokens_heard())
        if message is None and (problem := self._agent_problem()) is not None:
            message = self._channel.recv(0.0)
            if message is None:
                self._carry_out(self.machine.on_agent_gone(problem))
        return message

    # ---- effects

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.SayWord(word):
                    self._channel.send(word)
                case do.SayFrozen():
                    self._say_frozen(effect)
                    self._broken_in_a_row *= bool(self._broken)
                    self._start_again_if_broken()
                case do.Warn(text):
                    self._warn(text)
                case do.EndWithRefusal(code, reason):
                    raise refusal(code, reason)
                case do.RunOver():
                    self.end_watch()
                case do.ReadSamples() | do.GoOn() | do.WaitBefore():
                    pass  # seen by the callers, which ask the machine where it stands
                case _:
                    self._on_model(effect)
                    if isinstance(self._shared, FarMemory):
                        self._shared.let_go()

    def _on_model(self, effect: do.OnModel) -> None:
        match effect:
            case do.OpenShared(word):
                self._open(word)
            case do.WriteAnchor():
                self.layout.write_anchor(self._model, self.shared.anchor)
                self._bring(self.shared.anchor, 0)
            case do.LoadAnchor():
                if not self._loaded:
                    # Room for what every part is loaded with.
                    self._loaded = self.layout.snapshot(self._model)
                    weakref.finalize(self, LASTING.end, LASTING.add(self._loaded))
                slot = [self.shared.slots[effect.slot]] if effect.keep in ("rest", "restore") else []
                self._fetch(effect.fragment, self.shared.anchor, *slot)
                self._loaded_at = self.step_count
                self.parts[effect.fragment].load(effect, self._model, self._loaded, self.shared)
            case do.Freeze():
                self._freeze(effect)
            case do.GoAhead() if self._broken:
                pass  # it would go on from what is not finite
            case do.GoAhead(fragment, slot):
                go_ahead = partial(self._go_ahead, fragment, slot)
                read_as_one(self.ranks, self.shared.read_changes, self._clock, go_ahead)
            case do.CopyFragments(fragments):
                self._before = {each: self.parts[each].copied(self._model) for each in fragments}
            case do.PutBack(fragments):
                for fragment in fragments:
                    self.parts[fragment].put_back(self._model, self._before[fragment])
            case do.ForgetLoss():
                self._losses.clear()
            case do.ComputeScore(word):
                self._channel.send(self._scored(word))

    # ---- the run's version in the model, for a moment

    def evaluated(self, compute: Callable[[], Found]) -> Found:
        """For the script."""
        return self.at_version(compute)

    def at_version(self, act: Callable[[], Found], patience_s: float = VERSION_PATIENCE_S) -> Found:
        """What `act` finds with the anchor in the model; all of the model is afterwards as it was, to the bit."""
        total = self.layout.total_elements
        before = self.layout.copied(self._model, 0, total)
        try:
            self._load_whole(partial(self.layout.load, self._model, self.shared.anchor), patience_s)
            with as_it_was(self._model), torch.no_grad():
                return act()
        finally:
            self.layout.put_back(self._model, before, 0, total)
            self.machine.on_waited(self._clock())  # that was no part of a step

    def _load_whole(self, load: Callable[[], None], patience_s: float) -> None:
        """All of one version."""
        if self.ranks.count == 1:
            return self.shared.copy_whole(load, patience_s)

        def read() -> None:
            for fragment in range(len(self.parts)):
                self._fetch(fragment, self.shared.anchor)
            load()

        read_as_one(self.ranks, self.shared.read_changes, self._clock, read)

    def _scored(self, word: Score) -> Scored:
        """The agent asks while it holds that version: it counts if it still does when it hears the answer."""
        held_out, everywhere = self.held_out, all(self.ranks.gather(b"here" if self.held_out else b""))
        if held_out is None or not everywhere:
            return Scored(number=word.number, why_not=ScoreCause.NO_SCRIPT)
        began = self._clock()
        try:
            found = self.at_version(lambda: held_out.answer(word), patience_s=0.0)
        except VersionArriving:
            found = Scored(number=word.number, why_not=ScoreCause.PASSED)
        except Exception as error:  # the outermost call of the script's code: training goes on
            self._warn(f"the held-out loss was not computed: {type(error).__name__}: {error}")
            found = Scored(number=word.number, why_not=ScoreCause.FAILED)
        return msgspec.structs.replace(found, seconds=self._clock() - began)

    def _go_ahead(self, fragment: int, slot: int) -> None:
        self._fetch(fragment, self.shared.anchor, self.shared.moments[0], self.shared.slots[slot])
        makes = self.machine.accounts[fragment].version + 1
        rate = momentum_rate(outer_of(self.manifest), makes)
        self.parts[fragment].train_on(self._model, self._loaded, self.shared, rate, slot)

    def _open(self, word: Shared) -> None:
        if word.elements != self.layout.total_elements:
            theirs, ours = word.elements, self.layout.total_elements
            raise UserError(f"the agent shares {theirs} values, this model has {ours}")
        if self.ranks.rank not in self.ranks.near:
            self._shared = FarMemory(word)
            return
        shared = self._shared = SharedState.open(word)
        self._beside = word.beside
        lasting = LASTING.add((shared.anchor, *shared.moments, *shared.slots))
        weakref.finalize(shared, LASTING.end, lasting)

    def _bring(self, part: Tensor, start: int) -> None:
        """What ranks on other nodes have written into theirs, into the memory that the agent shares."""
        self.ranks.bring(lambda rank: self.layout.places(rank, part, start, to_write=True))

    def _fetch(self, fragment: int, *vectors: Tensor) -> None:
        """The other way, before they read it."""
        for flat in vectors:
            part, start = self.parts[fragment].part(flat), self.parts[fragment].start
            self.ranks.fetch(partial(self.layout.places, part=part, start=start, to_write=False))

    def _freeze(self, freeze: do.Freeze) -> None:
        part = self.parts[freeze.fragment]
        part.level(self._model, self.ranks)
        self._look_whether_finite(part)
        part.write_owed(self._model, self._loaded, part.part(self.shared.slots[freeze.slot]))
        failpoints.hit("freeze.mid")
        self._bring(part.part(self.shared.slots[freeze.slot]), part.start)

    # ---- what is not finite

    def _look_whether_finite(self, part: PendingDelta | None = None) -> None:
        """`part`: of it, and of what is remembered of it; None: of the model.  All ranks find the same."""
        tensors = self.layout.tensors_of(self._model, *((part.start, part.count) if part else ()))
        found = not_finite(tensors)
        told = self.ranks.gather("\n".join(found).encode())
        named = dict.fromkeys(name for each in told for name in each.decode().split("\n") if name)
        self._broken += [name for name in named if name not in self._broken]
        if self._broken or self._remembered is None:
            return
        # A step that is divided by an infinity moves nothing: weights stay as they are, for ever.
        if worn := self._remembered.not_finite(tensors.values()):
            names = {id(tensor): name for name, tensor in tensors.items()}
            self._remembered.forget(worn)
            which = _named([names[id(each)] for each in worn])
            self._warn(
                f"step {self.step_count}: what the optimizer remembered of {which} was not finite and is reset"
            )

    def _start_again_if_broken(self) -> None:
        """The whole model: one fragment that is not finite makes all others so with the next step."""
        if not self._broken:
            return
        broken, self._broken = self._broken, []
        self._broken_in_a_row += 1
        with torch.no_grad():
            for tensor, loaded in zip(self.layout.local_tensors(self._model), self._loaded, strict=True):
                tensor.copy_(loaded)
        self.machine.on_not_finite()
        self._losses.clear()
        count = 0
        if self._remembered is not None:
            tensors = self.layout.tensors_of(self._model)
            worn = [*self._remembered.not_finite(), *(tensors[name] for name in broken)]
            count = self._remembered.forget({id(each): each for each in worn}.values())
        if self._broken_in_a_row >= NOT_FINITE_MOST:
            raise UserError(
                f"{_named(broken)} of the model was not finite at {self._broken_in_a_row} freezes in a row, last at "
                f"step {self.step_count}: lower the learning rate, clip gradients, or look at the data and the dtype"
            )
        self._warn(
            f"step {self.step_count}: {_named(broken)} of the model is not finite: the model is back at version "
            f"{self.version}, what the optimizer remembered of {count} parameters is reset, and the steps since then "
            "are lost"
        )

    def _warn(self, text: str) -> None:
        if self.ranks.rank == 0:
            log.warning(text)

    def _look_at_the_unstepped(self) -> None:
        """No step is taken while all gradients are infinite, and so no freeze would ever come."""
        due = self._unstepped >= UNSTEPPED_LOOK and self._unstepped & (self._unstepped - 1) == 0
        if due and self._unstepped >= UNSTEPPED_MOST:
            self._warn(NO_STEP.format(self._unstepped))
        if due and self._loaded and not self.finished:
            self._look_whether_finite()
            self._start_again_if_broken()

    def _say_frozen(self, frozen: do.SayFrozen) -> None:
        failpoints.hit("freeze.before_word")
        loss = self.ranks.mean(*self._losses.sums())
        if not self._was_told_loss:
            self._was_told_loss = True
            self._warn(NO_LOSS)
        for word in frozen.words:
            self._channel.send(msgspec.structs.replace(word, loss=loss))


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
