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

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from farflung.optim.rates import rates_of
from farflung.peer.data.leased_data import Span
from farflung.peer.data.reading import MapStyle, Source, refuse_lists, source_of, tokens_in
from farflung.peer.data.token_shards import TokenShards
from farflung.peer.data.workers import Ahead
from farflung.peer.local.channel import ELSEWHERE
from farflung.peer.local.memory import SharedState
from farflung.peer.settings import own_config
from farflung.peer.trainer.agent_process import AgentProcess
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.pretrained import SAVE_PATIENCE_S, save_pretrained
from farflung.peer.trainer.recording import watcher_for
from farflung.peer.trainer.run_optimizer import RunOptimizer
from farflung.protocol.errors import FarflungError, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import failpoints
from farflung.protocol.process.log_lines import mistakes_in_one_line

log = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
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
) -> Run:
    """Join the run and load its state into `model`, in place.  Returns when the first inner step can be taken.

    `url`: the join URL; None takes it from the environment (FARFLUNG_RUN).  `identity`: this peer's key file.
    `listen`: HOST:PORT where other peers may reach this one.  `upload_limit`, `download_limit`: "20 Mbit/s".
    What is not given here comes from the environment (FARFLUNG_LISTEN, ...) or ~/.config/farflung/config.toml.
    A script started by `farflung join` attaches to the agent that started it, whatever is passed here.
    """
    given = {
        "identity": identity,
        "listen": listen,
        "upload_limit": upload_limit,
        "download_limit": download_limit,
    }
    return connect(url, given).join(model, optimizer)


def connect(url: str | None = None, given: Mapping[str, str | None] = _NOTHING) -> Connection:
    """The first half of `join`, for scripts that build their model from the run's manifest.  `given`: settings."""
    mistakes_in_one_line()
    failpoints.arm(os.environ)
    with ExitStack() as undo:
        agent = AgentProcess.start_or_find(url, given)
        undo.callback(agent.close, "could not connect")
        begin = agent.wait_for_begin()
        connection = Connection(agent, Manifest.from_canonical(begin.manifest), begin.name)
        undo.pop_all()
    return connection


class _Reader:
    """From leased spans to a batch, in this process or in a worker."""

    def __init__(self, source: Source, collate: Collate) -> None:
        self.source, self._collate = source, collate

    def __call__(self, spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], Any]:
        samples: list[Any] = []
        got: list[Span] = []
        for span in spans:
            found = self.source.read(span)
            samples += found
            # At the end of a stream fewer than were leased, or none: only these count as read.
            got += [replace(span, stop=span.start + len(found))] if found else []
        return tuple(got), self._collate(samples) if samples else None


def _collate(samples: list[Any]) -> Any:
    refuse_lists(samples[0])
    return default_collate(samples)


class Connection:
    """A run whose manifest is known and whose state is not loaded yet.  Made by `connect`."""

    def __init__(self, agent: AgentProcess, manifest: Manifest, name: str) -> None:
        self.manifest = manifest
        self.name = name
        self._agent = agent

    @property
    def agent(self) -> AgentProcess:
        """For the trainer of synchronous batches, which says other words to it."""
        return self._agent

    def join(self, model: nn.Module, optimizer: Optimizer) -> Run:
        if self.manifest.pipeline.batch:
            self.abandon()
            raise UserError(
                f"run '{self.manifest.run.name}' makes its updates from synchronous batches ([pipeline] batch): join "
                "it with farflung.pipeline, which computes gradients and takes no steps of its own"
            )
        with ExitStack() as undo:
            undo.callback(self.close, "could not join")
            watcher = watcher_for(own_config({}).record, self.manifest, self.name, model, optimizer)
            loop = InnerLoop(self._agent.channel, model, self.manifest, self._agent.problem, watcher=watcher)
            inner = RunOptimizer(optimizer, loop.after_step, loop.before_step, loop.before_rates)
            run = Run(self._agent, loop, inner, self.name)
            loop.attach()
            loop.watch_loads()
            if run.version > 0:  # at version 0 nobody has more than a fresh optimizer
                inner.start_small(self.manifest.inner.rejoin_warmup_steps)
            undo.pop_all()
        return run

    def close(self, reason: str = "closed before joining") -> None:
        self._agent.close(reason)

    def abandon(self) -> None:
        """This script can't take part: an agent that started it hears so from its exit code."""
        self._agent.abandon()


class Run:
    """A joined run.  Made by `join`; use it in a `with` block, or call `close` at the end."""

    def __init__(self, agent: AgentProcess, loop: InnerLoop, optimizer: RunOptimizer, name: str) -> None:
        self.optimizer = optimizer  # for schedulers and gradient scalers; a step of it is a step of the run
        self.name = name  # of this peer, such as amber-fox
        self._agent = agent
        self._loop = loop

    # ---- training

    def step(self, loss: Tensor | float | None = None, tokens: int | None = None) -> None:
        """One inner step: the optimizer's step, then clearing the gradients.  Takes part in rounds when due.

        `loss` is shown on the dashboard.  `tokens` says how much data the step used, which decides how much
        this peer's work counts; left out, it is taken from the batches handed out since the last step.
        """
        self.record(loss, tokens)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def record(self, loss: Tensor | float | None = None, tokens: int | None = None) -> None:
        """What the next step learns from, where it is `run.optimizer.step()` in somebody else's loop: as in `step`."""
        self._loop.record(loss, tokens)

    def batches(
        self,
        dataset: Any = None,
        batch_size: int | None = None,
        collate: Collate | None = None,
        fingerprint: bool = True,
        ahead: int = 0,
        workers: int = 0,
        prefetch: int = 2,
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
            made_of, why_none = source.fingerprint(self.manifest.digest)
            if why_none:
                log.info("only the length of the data set is compared with that of others: %s", why_none)
        if workers and not isinstance(source, MapStyle):
            raise UserError(
                "workers: a stream is read in its order by one process; give run.batches a data set with __len__ and "
                "__getitem__, or a DataLoader with workers as the stream (docs/data.md)"
            )
        reader = _Reader(source, collate or _collate)
        return self._ahead(ahead, self._batches(reader, made_of, batch, workers, prefetch))

    def _ahead(self, ahead: int, batches: Iterator[Any]) -> Iterator[Any]:
        loader = self._loop.read_ahead(ahead)
        try:
            yield from batches
        finally:  # it was left, and with it what it had not given out
            self._loop.take_back(loader)

    def _batches(
        self, reader: _Reader, made_of: bytes, batch: int, workers: int, prefetch: int
    ) -> Iterator[Any]:
        with ExitStack() as ends:
            pool = ends.enter_context(Ahead(workers, reader, self.manifest.run.seed)) if workers else None
            while spans := self._loop.next_batch(reader.source.samples, batch, made_of):
                if pool is None:
                    got, made = reader(spans)
                else:
                    got, made = pool.take(spans, self._loop.following(spans, batch, workers * prefetch))
                if got:
                    samples = sum(span.stop - span.start for span in got)
                    self._loop.hand_out(got, tokens_in(made, samples))
                    yield made

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
        """Where the run is, in inner steps, each version counted as `sync_every`: the same for whoever joins late."""
        return self._loop.run_step

    @property
    def total_steps(self) -> int:
        """The `global_step` at which the run ends: `rounds * sync_every`."""
        return self.manifest.total_steps

    @property
    def finished(self) -> bool:
        """Whether the run is over for this peer: steps are local from then on, and `batches` has stopped."""
        return self._loop.finished

    def lr_lambda(self, rate: Callable[[int], float] | None = None) -> Callable[[int], float]:
        """For torch's LambdaLR: the share of the full rate at the run's step, not at this process's.

        `rate`: from `global_step` to the share; left out, `[inner] schedule` of run.toml.  A scheduler that wraps a
        function, as all of transformers do, becomes the run's by `scheduler.lr_lambdas = [run.lr_lambda(each) for each
        in scheduler.lr_lambdas]`.
        """
        of_step = rate if rate is not None else rates_of(self.manifest).share
        return lambda _: of_step(self.global_step)

    # ---- the end

    def save(self, path: str | os.PathLike[str]) -> None:
        """The run's weights at its newest version here, without this peer's unmerged work, as a safetensors file.

        Every peer writes equal bytes for a version.  A folder gets a file model.safetensors.  It may be called at any
        time: while the next version is arriving, it waits for that.  Frozen parameters are not in it.
        """
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
        save_pretrained(loop.model, loop.layout, loop.shared, Path(folder), tokenizer, max_shard_size)

    def close(self, reason: str | None = None) -> None:
        """Leave the run; waits a few seconds for the agent to say good-bye to the others.  Safe to repeat."""
        self._loop.end_watch()
        self._agent.close(reason or ("finished" if self.finished else "the training script ended"))

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
        return {name: tensor.clone() for name, tensor in layout.named_tensors(shared.anchor).items()}

    target = Path(path)
    target = target / "model.safetensors" if target.is_dir() else target
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        # One key only: safetensors writes several in a random order, and equal weights should be equal files.
        save_file(shared.copy_whole(weights, SAVE_PATIENCE_S), part, {"format": "pt"})
        part.replace(target)  # a reader never finds half a file
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {target}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


__all__: Sequence[str] = ["Connection", "Run", "connect", "join"]
