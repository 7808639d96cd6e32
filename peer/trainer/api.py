"""The public API: `farflung.join` and the `Run` it returns.

    run = farflung.join("farflung://...", model, inner_optimizer)   # the run's state arrives here
    for batch in run.batches(dataset):                              # leased samples, no overlap
        loss = model(batch).loss
        loss.backward()
        run.step(loss)                                              # the outer round happens when due

Called by users' scripts, and in no other way by the built-in trainer.  What happens between two steps is in
inner_loop.py; starting, watching and ending the agent process is in agent_process.py.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from farflung.peer.checks.misuse import refuse_other_parameters
from farflung.peer.data.leased_data import Span
from farflung.peer.data.prefetch import Prefetch
from farflung.peer.data.sample_source import (
    MapStyle,
    SampleSource,
    pinned,
    refuse_lists,
    source_of,
    tokens_in,
)
from farflung.peer.data.token_shards import TokenShards
from farflung.peer.island import group
from farflung.peer.island.island import Island
from farflung.peer.island.parts import BatchPart, agreed_part
from farflung.peer.island.ranks import ALONE, Ranks
from farflung.peer.island.sharded import beginning, is_sharded, local_of, ranks_on_one_batch, reshard
from farflung.peer.local.channel import ELSEWHERE
from farflung.peer.local.memory import SharedState
from farflung.peer.room import rows_here, rules_here, say_whether_it_fits
from farflung.peer.settings import own_config
from farflung.peer.trainer.agent_process import AgentHandle, refuse_ranks, start_or_find
from farflung.peer.trainer.inner_loop import VERSION_PATIENCE_S, HeldOut, InnerLoop
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.model_tensors import clean_name, survey, unwrap
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.errors import FarflungError, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import failpoints
from farflung.protocol.process.log_lines import mistakes_in_one_line
from farflung.protocol.process.mode_folders import module_of
from farflung.protocol.process.own_files import made_aside

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# ---- rank agreement ----------------------------------------------------------------------------------------
# What the ranks of a script find out about each other before an agent starts: which values and samples are
# whose.
#
# Called once when a run is joined, on all ranks at the same time, with the same outcome on all of them: a
# mistake ends each of them with one sentence, and nobody waits for one that has gone. Must not know the run:
# there is none yet.
#
#     which of them are on rank 0's node   only these share memory with the agent
#     what of each tensor a rank has   its box (DTensors say it), or all of it
#     which ranks see the same samples the names of a mesh's dimensions, or the script says it
#     which plain tensors are copies   those that begin with the same values; others are refused


def agree(model: nn.Module, data_rank: tuple[int, int] | DeviceMesh | None, island: Island) -> None:
    """UserError on every rank where something about them can't be known, or does not fit."""
    module = unwrap(model)
    reshard(module)
    places = [each.decode() for each in island.gather(group.here().encode())]
    island.near, island.partners = group.near_of(places), group.partners(places)
    # Chunks are the run's, and what is whose does not depend on them.
    ModelLayout.of(module, 1, island)
    said = data_rank if isinstance(data_rank, tuple) else None
    mesh = data_rank if not isinstance(data_rank, tuple) else None
    sharers = (island.rank,) if said else ranks_on_one_batch(module, island.rank, mesh)
    island.part = agreed_part(island.gather, island.rank, said, sharers)
    found = survey(module)
    refuse_unlike(found.params | found.frozen, island)
    if island.rank == 0:
        where = f" of {len(set(places))} nodes" if island.partners else ""
        log.info("each batch is read in %d parts by %d ranks%s", island.part.of, island.count, where)


def refuse_unlike(parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
    """All ranks call it, and all of them are told: of a plain tensor nobody says whether it is one or one for each.

    Whatever is a copy is made equal by the run's state; but of what was never one, a part would be lost.
    """
    plain = {name: tensor for name, tensor in parameters.items() if not is_sharded(tensor)}
    mine = [beginning(tensor) for tensor in plain.values()]
    told = [
        msgspec.msgpack.decode(each, type=list[bytes]) for each in ranks.gather(msgspec.msgpack.encode(mine))
    ]
    for at, name in enumerate(plain):
        odd = next((rank for rank, theirs in enumerate(told) if theirs[at] != told[0][at]), None)
        if odd is not None:
            raise UserError(
                f"rank {odd} and rank 0 begin with different values of {name!r}, a plain tensor, so whether they "
                "are to be copies can't be known: if so, seed all ranks alike or wrap the model; if each rank has its "
                "own (experts), make it a DTensor, sharded over a mesh"
            )


# ---- pretrained --------------------------------------------------------------------------------------------
# `run.save_pretrained`: the model writes itself as its library does, with the run's weights in it.
#
# Owns: which values a model of transformers, or an adapter of peft, is given to write, and that its files are
# the same on every peer. Called by the public API. Must not know rounds or the agent, and imports neither
# transformers nor peft: the model brings what it is made of.

_ADAPTER_CONFIG = "adapter_config.json"


def save_pretrained(
    model: nn.Module,
    layout: ModelLayout,
    shared: SharedState,
    folder: Path,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """With the anchor in place of what the model has learned since; whole or not at all."""
    writer: Any = unwrap(model)
    for each in (writer, tokenizer):
        if each is not None and not callable(getattr(each, "save_pretrained", None)):
            instead = ": write its weights with run.save(path)" if each is writer else ""
            raise UserError(f"{type(each).__name__} has no save_pretrained{instead}")

    # What did not train and lies on several ranks is whole on none of them.  An adapter's files are without it.
    in_parts = {clean_name(n) for n, p in writer.named_parameters() if is_sharded(p) and not p.requires_grad}
    if in_parts and not hasattr(writer, "peft_config"):
        raise UserError("the frozen parameters lie on several ranks: write the rest with run.save(path)")

    def weights() -> dict[str, Tensor]:
        """A copy: the agent may write the next version while the files are written."""
        of_run = layout.named_tensors(shared.anchor)
        named = ((clean_name(name), tensor) for name, tensor in writer.state_dict().items())
        mine = {name: tensor for name, tensor in named if name not in in_parts}
        lost = sorted(of_run.keys() - mine.keys())
        if lost:
            raise UserError(
                f"{type(writer).__name__}'s state_dict has no {lost[0]!r}: write its weights with run.save(path)"
            )
        copies: dict[object, Tensor] = {}  # what is tied stays one tensor, so that it is written once
        for name, tensor in mine.items():
            here = local_of(tensor)  # of a model on several ranks this one's part, whose place is its name
            same = (here.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if here.numel() else name
            if same not in copies:
                copies[same] = of_run.get(name, tensor.detach()).to("cpu", tensor.dtype, copy=True)
            mine[name] = copies[same]
        return mine

    with made_aside(folder) as aside:
        try:
            values = shared.copy_whole(weights, VERSION_PATIENCE_S)
            writer.save_pretrained(aside, state_dict=values, max_shard_size=max_shard_size)
            _in_one_order(writer, aside)
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
        except (SafetensorError, ValueError) as error:  # such as a generation config that contradicts itself
            told = " ".join(str(error).split())
            raise UserError(f"cannot write {folder}: {told}") from None


def _in_one_order(model: Any, folder: Path) -> None:
    """peft writes its sets, such as `target_modules`, in an order that differs from process to process."""
    for name, config in getattr(model, "peft_config", {}).items():
        sets = {key for key, value in vars(config).items() if isinstance(value, set | frozenset)}
        for path in (folder / _ADAPTER_CONFIG, folder / name / _ADAPTER_CONFIG):
            if not path.is_file() or not sets:
                continue
            said = json.loads(path.read_text(encoding="utf-8"))
            said |= {key: sorted(said[key]) for key in sets if isinstance(said.get(key), list)}
            path.write_text(json.dumps(said, indent=2, sort_keys=True), encoding="utf-8")


# ---- api ---------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
Losses = Callable[[Tensor], Tensor]
Writes = Callable[[list[int], int], Iterator[int]]  # ids, at most so many -> those that come after them
Found = TypeVar("Found")
SCORING = "farflung.peer.evaluation.windows"
_NOTHING: Mapping[str, str | None] = MappingProxyType({})


def join(
    url: str | None,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    identity: str | None = None,
    listen: str | None = None,
    upload_limit: str | None = None,
    download_limit: str | None = None,
    data_rank: tuple[int, int] | DeviceMesh | None = None,
) -> Run:
    """Join the run and load its state into `model`, in place.  Returns when the first inner step can be taken.

    `url`: the join URL; None takes it from the environment (FARFLUNG_RUN).  `identity`: this peer's key file.
    `listen`: HOST:PORT where other peers may reach this one.  `upload_limit`, `download_limit`: "20 Mbit/s".
    What is not given here comes from the environment (FARFLUNG_LISTEN, ...) or ~/.config/farflung/config.toml.
    A script started by `farflung join` attaches to the agent that started it, whatever is passed here.

    Of several processes that train together (torchrun, `farflung join --nproc`) each calls it, and they are one peer
    (docs/islands.md).  `data_rank`: (number, of), which part of each batch is this process's, or the DeviceMesh of all
    of them; left out, that of the parameters.  Each has a part of its own, but for those that work on one batch
    together by the names of the mesh ("tp", "cp", "pp", "ep").
    """
    given = {
        "identity": identity,
        "listen": listen,
        "upload_limit": upload_limit,
        "download_limit": download_limit,
    }
    mistakes_in_one_line()
    survey(unwrap(model))  # what can't be exchanged is told before an agent starts
    refuse_other_parameters(model, optimizer)
    return connect(url, given, partial(agree, model, data_rank)).join(model, optimizer)


def connect(
    url: str | None = None,
    given: Mapping[str, str | None] = _NOTHING,
    agree: Callable[[Island], None] | None = None,
) -> Connection:
    """The first half of `join`, for scripts that build their model from the run's manifest.  `given`: settings.

    `agree`: the script may be one of several ranks, which all call this; what they find out about each other first.
    """
    if (connected := CONNECTED.get()) is not None:
        return connected()
    mistakes_in_one_line()
    failpoints.arm(os.environ)
    if agree is None:
        refuse_ranks()
    with ExitStack() as undo:
        agent, ranks = start_or_find(url, given, agree or _nothing)
        undo.callback(agent.close, "could not connect")
        begin = agent.wait_for_begin()
        connection = Connection(agent, Manifest.from_canonical(begin.manifest), begin.name, ranks)
        undo.pop_all()
    return connection


# In a thread whose script takes part in a simulated run (farflung simulate): its way into that one, without an agent.
CONNECTED: ContextVar[Callable[[], Connection] | None] = ContextVar("CONNECTED", default=None)


def _nothing(_: Island) -> None:
    pass


class _Reader:
    """From leased spans to this process's part of a batch, in this process or in a worker."""

    def __init__(self, source: SampleSource, collate: Collate, part: BatchPart) -> None:
        self.source, self._collate, self._part = source, collate, part

    def __call__(self, spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], Any]:
        """What was read of the whole batch, and this part of it."""
        if isinstance(self.source, MapStyle):
            samples = [each for span in self._part.spans(spans) for each in self.source.read(span)]
            return spans, self._collate(samples) if samples else None
        samples = []
        got: list[Span] = []
        # A stream is read in order, and where it ends all ranks must see.
        for span in spans:
            found = self.source.read(span)
            samples += found
            # At the end of a stream fewer than were leased, or none: only these count as read.
            got += [replace(span, stop=span.start + len(found))] if found else []
        first, stop, _ = self._part.bounds(len(samples))
        return tuple(got), self._collate(samples[first:stop]) if samples else None


def _collate(samples: list[Any]) -> Any:
    refuse_lists(samples[0])
    return default_collate(samples)


class Connection:
    """A run whose manifest is known and whose state is not loaded yet.  Made by `connect`."""

    def __init__(self, agent: AgentHandle, manifest: Manifest, name: str, ranks: Ranks = ALONE) -> None:
        self.manifest = manifest
        self.name = name
        self._agent, self._ranks = agent, ranks

    @property
    def agent(self) -> AgentHandle:
        """For the trainer of synchronous batches, which says other words to it."""
        return self._agent

    def join(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        held_out: Losses | None = None,
        writes: Writes | None = None,
    ) -> Run:
        if self.manifest.pipeline.batch:
            self.abandon()
            raise UserError(
                f"run '{self.manifest.run.name}' makes its updates from synchronous batches ([pipeline] batch): join "
                "it with farflung.pipeline, which computes gradients and takes no steps of its own"
            )
        with ExitStack() as undo:
            undo.callback(self.close, "could not join")
            refuse_other_parameters(model, optimizer)
            loop = self._loop(model)
            # Before the run's state is here: others may wait for whoever has it, and the text may be far away.
            loop.held_out = held_out_text(self.manifest, self._ranks, held_out, writes)
            steps = RunSteps(optimizer, loop.after_step, loop.before_step)
            undo.callback(steps.end)
            run = Run(self._agent, loop, steps, self.name)
            self._say_memory(loop, optimizer)
            loop.watch_optimizer(optimizer)
            loop.attach()
            loop.watch_loads()
            if run.version == 0:  # nobody has more than a fresh optimizer
                loop.kept_optimizer.forget()
            elif not loop.kept_optimizer.read_into(optimizer):
                steps.start_small()
            undo.pop_all()
        return run

    def _say_memory(self, loop: InnerLoop, optimizer: Optimizer) -> None:
        if self._ranks.rank == 0:
            rules, values = rules_here(self.manifest), loop.layout.total_elements
            here = loop.layout.local_tensors(loop.model)
            rows = rows_here(values, here, optimizer, rules, len(self._ranks.near))
            say_whether_it_fits(rows, rules, values, here[0].device)

    def _loop(self, model: nn.Module) -> InnerLoop:
        agent, island = self._agent, self._ranks
        if not isinstance(island, Island):
            return InnerLoop(agent.channel, model, self.manifest, agent.problem)
        return InnerLoop(island, model, self.manifest, island.problem, island.clock, ranks=island)

    def close(self, reason: str = "closed before joining") -> None:
        self._agent.close(reason)

    def abandon(self) -> None:
        """This script can't take part: an agent that started it hears so from its exit code."""
        self._agent.abandon()


def held_out_text(
    manifest: Manifest, ranks: Ranks, losses: Losses | None, writes: Writes | None = None
) -> HeldOut | None:
    scoring = module_of(SCORING) if losses is not None else None
    if scoring is None:
        return None
    found: HeldOut | None = scoring.made(manifest, own_config({}).data, losses, ranks.gather, writes)
    return found


class Run:
    """A joined run.  Made by `join`; use it in a `with` block, or call `close` at the end."""

    def __init__(self, agent: AgentHandle, loop: InnerLoop, steps: RunSteps, name: str) -> None:
        self.optimizer: Optimizer = (
            steps.optimizer
        )  # the one that was handed in: its step is a step of the run
        self.name = name  # of this peer, such as amber-fox
        self._agent = agent
        self._loop = loop
        self._steps = steps
        self._weight = 1.0
        self._is_closed = False

    # ---- training

    def step(self, loss: Tensor | float | None = None, tokens: int | None = None) -> None:
        """One inner step: the optimizer's step, then clearing the gradients.  Takes part in rounds when due.

        `loss` is shown on the dashboard.  `tokens` says how much data the step used, which decides how much
        this peer's work counts; left out, it is taken from the batches handed out since the last step.
        """
        self.record(loss, tokens)
        self._steps.forget_step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def record(self, loss: Tensor | float | None = None, tokens: int | None = None) -> None:
        """What the next step learns from, where it is `optimizer.step()` in any loop: as in `step`."""
        if self._weight:
            self._loop.record(loss, tokens)

    def log(self, name: str, value: Tensor | float) -> None:
        """A figure of the script's own, such as an accuracy: the newest value of up to eight names is shown beside this
        peer in the status, on the dashboard and by trackers.  Read at once: a tensor on a GPU is waited for."""
        self._loop.log_figure(name, float(value))

    @property
    def batch_weight(self) -> float:
        """How much the batch that was given out last counts among those of all ranks: 1, but where data ends.

        There a rank may have fewer samples than others, or another's once more, which count 0.  Gradients are the mean
        of the ranks': `(loss * run.batch_weight).backward()` makes that the mean over the samples, there too.
        """
        return self._weight

    def batches(
        self,
        dataset: Any = None,
        batch_size: int | None = None,
        collate: Collate | None = None,
        fingerprint: bool = True,
        ahead: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        pin: bool = False,
    ) -> Iterator[Any]:
        """Batches of samples that are leased to this peer alone, until the run is finished.

        `dataset`, the same on every peer: map-style (`__len__`, `__getitem__`), visited in the run's own order; or
        iterable, visited in its own order (docs/data.md says what that costs); or the path of a text file, whose
        lines are the samples; left out: the token shards that `[data] source` names.  A batch counts as used once the
        next step is done; where nothing more is leased it may be smaller.  Some items are read before the first batch,
        to see that all peers have the same data; `fingerprint=False` compares its length alone.  `ahead`: so many
        batches the loader around it asks for before it gives one out (1 for that of accelerate, of transformers'
        Trainer and of Lightning): they are not used yet.
        `workers`: so many processes read map-style data before it is wanted, `prefetch` batches each; 0: this one does.
        `pin`: batches lie in pinned memory, so that `batch.to("cuda", non_blocking=True)` waits for nothing; without
        CUDA they are given out as they are.
        """
        batch = self.manifest.data.batch if batch_size is None else batch_size
        if batch < 1:
            raise UserError(f"batch_size must be at least 1, found {batch}")
        for name, count in (("ahead", ahead), ("workers", workers), ("prefetch", prefetch)):
            if count < 0:
                raise UserError(f"{name} must not be negative, found {count}")
        if dataset is None:
            dataset = TokenShards.of_run(self.manifest, own_config({}).data)
        source, made_of = source_of(dataset, self.manifest.run.seed), b""
        if fingerprint:
            made_of, why_none = source.fingerprint(self._loop.run_digest)
            if why_none:
                log.info("only the length of the data set is compared with that of others: %s", why_none)
        if workers and not isinstance(source, MapStyle):
            raise UserError(
                "workers: a stream is read in its order by one process; give run.batches a data set with __len__ and "
                "__getitem__, or a DataLoader with workers as the stream (docs/data.md)"
            )
        if pin and not torch.cuda.is_available():
            log.warning("batches are not pinned: torch finds no CUDA device here")
            pin = False
        ranks = self._loop.ranks
        self._refuse_other_data((source.samples, made_of, batch, ahead))
        reader = _Reader(source, collate or _collate, ranks.part)
        return self._ahead(ahead, self._batches(reader, made_of, batch, workers, prefetch, pin))

    def _refuse_other_data(self, here: tuple[int, bytes, int, int]) -> None:
        """All ranks hold the same leases, and must read the same of them."""
        ranks = self._loop.ranks
        told = [msgspec.msgpack.decode(each) for each in ranks.gather(msgspec.msgpack.encode(here))]
        for rank, theirs in enumerate(told):
            names = ("samples", "fingerprint", "batch_size", "ahead")
            odd = [name for name, a, b in zip(names, theirs, told[ranks.rank], strict=True) if a != b]
            if odd:
                raise UserError(
                    f"run.batches: rank {rank} of this peer and rank {ranks.rank} differ in {', '.join(odd)}: give all "
                    "ranks the same data set and sizes; each of them then reads its own part"
                )

    def _ahead(self, ahead: int, batches: Iterator[Any]) -> Iterator[Any]:
        loader = self._loop.read_ahead(ahead)
        try:
            yield from batches
        finally:  # it was left, and with it what it had not given out
            self._loop.take_back(loader)

    def _batches(
        self, reader: _Reader, made_of: bytes, batch: int, workers: int, prefetch: int, pin: bool
    ) -> Iterator[Any]:
        with ExitStack() as ends:
            pool = ends.enter_context(Prefetch(workers, reader, self.manifest.run.seed)) if workers else None
            part = self._loop.ranks.part
            batch *= part.of
            while spans := self._loop.next_batch(reader.source.samples, batch, made_of):
                if pool is None:
                    got, made = reader(spans)
                else:
                    got, made = pool.take(spans, self._loop.following(spans, batch, workers * prefetch))
                if got:
                    samples = sum(span.stop - span.start for span in got)
                    first, stop, own = part.bounds(samples)
                    self._weight = part.weight(samples)
                    self._steps.forget_step()
                    self._loop.hand_out(got, tokens_in(made, stop - first) if own else 0)
                    yield pinned(made) if pin else made

    # ---- the run's version

    def evaluate(self, compute: Callable[[], Found]) -> Found:
        """What `compute` gives with the run's newest version in the model, without this peer's unmerged work.

        Called between two steps.  The model is in eval mode meanwhile, without gradients and autocast, and is
        afterwards as it was, to the bit.  It costs one copy of the model in host memory.
        """
        if self._loop.ranks.count > 1:
            raise UserError(
                "run.evaluate: not where several ranks are one peer; evaluate what run.save writes"
            )
        return self._loop.evaluated(compute)

    def held_out_loss(self, losses: Losses) -> None:
        """What `[eval]` of run.toml needs of a script; without `[eval]` nothing follows.

        `losses`: called now and then between two steps, as `evaluate` does; of rows of token ids, [rows, length], it
        gives the mean loss of each, in nats a token.  Where several ranks are one peer, all say it; it is called on
        all at the same step, with the same rows, and what rank 0 finds counts.
        """
        self._loop.held_out = held_out_text(self.manifest, self._loop.ranks, losses)

    # ---- what there is to know

    @property
    def manifest(self) -> Manifest:
        """What `run.toml` says, such as `run.manifest.data.batch` and `run.manifest.inner.lr`."""
        return self._loop.manifest

    @property
    def version(self) -> int:
        """The version of the run's state that was loaded last."""
        return self._loop.version

    @property
    def step_count(self) -> int:
        """Inner steps that this process has taken."""
        return self._loop.step_count

    @property
    def global_step(self) -> int:
        """Where the run is, in inner steps, each version counted as a whole period: the same for whoever joins late."""
        return self._loop.run_step

    @property
    def total_steps(self) -> int:
        """The `global_step` at which the run ends: `rounds * sync_every`, less what the first periods are shorter."""
        return self._loop.total_steps

    @property
    def finished(self) -> bool:
        """Whether the run is over for this peer: steps are local from then on, and `batches` has stopped."""
        return self._loop.finished

    def lr_lambda(self, rate: Callable[[int], float] | None = None) -> Callable[[int], float]:
        """For torch's LambdaLR: the share of the full rate at the run's step, not at this process's.

        `rate`: from `global_step` to the share; left out, `[inner] schedule` of run.toml.  A scheduler that wraps a
        function, as all of transformers do, becomes the run's by `scheduler.lr_lambdas = [run.lr_lambda(each) for each
        in scheduler.lr_lambdas]`.  Where the host has changed `[inner] lr`, the share is of the rate that the run began
        with.
        """
        return lambda _: self._loop.rate_share(rate)

    # ---- the end

    def save(self, path: str | os.PathLike[str]) -> None:
        """The run's weights at its newest version here, without this peer's unmerged work, as a safetensors file.

        Every peer writes equal bytes for a version.  A folder gets a file model.safetensors.  It may be called at any
        time: while the next version is arriving, it waits for that.  Frozen parameters are not in it.  Of several ranks
        the first writes, and the others do not wait for it.
        """
        if self._loop.ranks.rank == 0:
            save_weights(self._loop.layout, self._loop.shared, path)

    def save_pretrained(
        self, folder: str | os.PathLike[str], tokenizer: Any = None, max_shard_size: int | str = "5GB"
    ) -> None:
        """The run's weights as a folder that `from_pretrained` loads, with config and, if one is given, the tokenizer.

        For models that have a `save_pretrained` of their own: those of transformers, and of peft, whose adapter it
        writes.  The weights are those of `save`; frozen parameters, which are in it, too, are this peer's, whose hash
        is everybody's.  Every peer writes equal bytes for a version, with the same transformers.  `max_shard_size`: a
        larger model lies in several files with an index.  What was saved there before is replaced as a whole.
        """
        loop = self._loop
        if loop.ranks.rank == 0:
            save_pretrained(loop.model, loop.layout, loop.shared, Path(folder), tokenizer, max_shard_size)

    def close(self, reason: str | None = None) -> None:
        """Leave the run; waits a few seconds for the agent to say good-bye to the others.  Safe to repeat."""
        self._loop.end_watch()
        self._steps.end()
        try:
            self._agent.close(reason or ("finished" if self.finished else "the training script ended"))
        finally:  # an impatient Ctrl-C ends the waiting
            if self.version < self.manifest.run.rounds and not self._is_closed:
                self._loop.kept_optimizer.write(self.optimizer)
            self._is_closed = True

    def __getstate__(self) -> object:
        """A worker that is spawned and not forked would be sent a copy."""
        raise UserError(ELSEWHERE)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted")
        elif isinstance(error, FarflungError):
            self.close(str(error))
        else:
            self._agent.abandon()


def save_weights(layout: ModelLayout, shared: SharedState, path: str | os.PathLike[str]) -> None:
    """The anchor as a safetensors file, all of one version.  A folder gets a file model.safetensors."""

    def weights() -> dict[str, Tensor]:
        """A copy: the agent may write the next version while the file is written."""
        return layout.named_tensors(shared.anchor)

    target = Path(path)
    target = target / "model.safetensors" if target.is_dir() else target
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        # One key only: safetensors writes several in a random order, and equal weights should be equal files.
        save_file(shared.copy_whole(weights, VERSION_PATIENCE_S), part, {"format": "pt"})
        part.replace(target)  # a reader never finds half a file
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {target}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


__all__: Sequence[str] = ["Connection", "Run", "connect", "join"]
