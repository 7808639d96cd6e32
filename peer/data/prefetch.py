"""Batches that are read before they are wanted, by processes of their own: `run.batches(workers=, prefetch=)`.

Called by `run.batches` for map-style data.  Must not know leases beyond spans of positions, models, or the network.

What is leased is decided in the trainer's process alone, and nothing counts as handed out before a batch is given to
the script.  A batch that was read early is a guess by its spans: it is given out only if these are what comes next
then, and thrown away where they are not, after work was dropped.  So P7 rests on the leases as ever.

Chance in the data (random augmentation) follows from the run's seed and the batch's first position, so that it does not
depend on which worker reads it.

Each worker has a line of its own to the script and answers in the order in which it is asked: no thread stands between
them.  Small tensors come over that line; large ones through shared memory, which takes half a dozen messages each.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from blake3 import blake3

from farflung.peer.data.leased_data import Span
from farflung.protocol.errors import UserError

PICKLE_PROTOCOL = 5  # between processes of one script, both of which are forked or spawned by it
INLINE_BYTES = 128 << 10  # of a tensor; the buffer of a line holds a little more

Spans = tuple[Span, ...]
Read = Callable[[Spans], Any]  # the batch of these spans, made ready


class _Failed(NamedTuple):
    """In place of a batch."""

    error: Exception
    where: str  # as text: frames of another process can't be sent


class _RemoteError(Exception):
    """Shown above an error of a worker's: where it was there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Worker:
    def __init__(self, context: Any, read: Read, seed: int) -> None:
        self._line, theirs = context.Pipe()
        # Whoever trains ends it, and it ends with whoever trains.
        self._process = context.Process(target=_work, args=(theirs, self._line, read, seed), daemon=True)
        self._process.start()
        theirs.close()
        self.due: deque[Spans] = deque()  # asked for, in order

    def ask(self, spans: Spans) -> None:
        self._line.send(spans)
        self.due.append(spans)

    def answer(self, wanted: Spans) -> Any:
        """What was asked for before and is wanted no more goes by."""
        while True:
            found = self._line.recv()
            if self.due.popleft() == wanted:
                return found

    def end(self) -> None:
        self._line.close()
        self._process.kill()  # it holds nothing that an orderly end would save
        self._process.join()


class Prefetch:
    """Reads batches in `workers` processes; in a `with` block, which ends them."""

    def __init__(self, workers: int, read: Read, seed: int) -> None:
        # The pickler of torch's context hands tensors over in shared memory.
        context = torch.multiprocessing.get_context()
        self._workers = [_Worker(context, read, seed) for _ in range(workers)]
        self._coming: dict[Spans, _Worker] = {}

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def take(self, spans: Spans, following: Sequence[Spans]) -> Any:
        """The batch of these spans; meanwhile those that seem to follow are read."""
        wanted = [spans, *following]
        for each in [each for each in self._coming if each not in wanted]:
            del self._coming[each]
        try:
            for each in wanted:
                if each not in self._coming:
                    idlest = min(self._workers, key=lambda worker: len(worker.due))
                    idlest.ask(each)
                    self._coming[each] = idlest
            found = self._coming.pop(spans).answer(spans)
        except (EOFError, ConnectionError, FileNotFoundError):  # the last: its shared memory went with it
            raise UserError(
                "a worker that reads the data set was killed or could not start: is memory short? Take fewer workers, "
                "or workers=0 to see what it says in this process"
            ) from None
        if isinstance(found, _Failed):
            raise found.error from _RemoteError(found.where)
        return found


# ---- in a worker --------------------------------------------------------------------------------------------------


def _work(line: Connection, scripts_end: Connection, read: Read, seed: int) -> None:
    scripts_end.close()  # forked with it: the line would not end with the script
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the script's, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_script, daemon=True).start()
    try:
        while True:
            spans = line.recv()
            _draw_by(seed, spans[0])
            line.send_bytes(_answer(read, spans))
    except (EOFError, ConnectionError):
        return  # nobody asks any more


def _answer(read: Read, spans: Spans) -> Any:
    """As bytes, which name the memory where its tensors are."""
    try:
        return _pickled(read(spans))
    except Exception as error:  # a worker's outermost loop: what the data set raises is the script's to hear
        where = traceback.format_exc()
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # the outermost: an error whose class can't be sent is told by its words
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return _pickled(_Failed(error, where))


class _Pickler(ForkingPickler):
    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor or thing.nbytes > INLINE_BYTES or not thing.nbytes:
            return NotImplemented
        if thing.layout is not torch.strided or thing.requires_grad or thing.device.type != "cpu":
            return NotImplemented
        if thing.is_quantized:
            return NotImplemented
        raw = thing.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return _tensor_of, (bytearray(raw.numpy().data), thing.dtype, tuple(thing.shape))


def _pickled(thing: Any) -> bytes:
    made = io.BytesIO()
    _Pickler(made, PICKLE_PROTOCOL).dump(thing)
    return made.getvalue()


def _tensor_of(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def _end_with_the_script() -> None:
    """One that was killed can't end its workers: they would wait for it for ever."""
    script = multiprocessing.parent_process()
    if script is not None:
        script.join()
        os._exit(1)


def _draw_by(seed: int, first: Span) -> None:
    chance = int.from_bytes(blake3(f"{seed}:{first.epoch}:{first.start}".encode()).digest(length=4), "little")
    # That of the CPU alone: torch.manual_seed keeps a note for every kind of device that has not begun, each time.
    torch.default_generator.manual_seed(chance)
    random.seed(chance)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(chance)
