"""Batches that are read before they are wanted, by processes of their own: `run.batches(workers=, prefetch=)`.

Called by `run.batches` for map-style data.  Must not know leases beyond spans of positions, models, or the network.

What is leased is decided in the trainer's process alone, and nothing counts as handed out before a batch is given to
the script.  A batch that was read early is a guess by its spans: it is given out only if these are what comes next
then, and thrown away where they are not, after work was dropped.  So P7 rests on the leases as ever.

Chance in the data (random augmentation) follows from the run's seed and the batch's first position, so that it does not
depend on which worker reads it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
import torch.multiprocessing
from blake3 import blake3

from farflung.peer.data.leased_data import Span
from farflung.protocol.errors import UserError

Spans = tuple[Span, ...]
Read = Callable[[Spans], Any]  # the batch of these spans, made ready

_read: Read | None = None  # in a worker
_seed = 0


class Ahead:
    """Reads batches in `workers` processes; in a `with` block, which ends them."""

    def __init__(self, workers: int, read: Read, seed: int) -> None:
        # The queues of torch's context hand tensors over in shared memory.
        context = torch.multiprocessing.get_context()
        self._pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(read, seed))
        self._coming: dict[Spans, Future[Any]] = {}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def take(self, spans: Spans, following: Sequence[Spans]) -> Any:
        """The batch of these spans; meanwhile those that seem to follow are read."""
        wanted = [spans, *following]
        for each in [each for each in self._coming if each not in wanted]:
            self._coming.pop(each).cancel()
        try:
            for each in wanted:
                if each not in self._coming:
                    self._coming[each] = self._pool.submit(_work, each)
            return self._coming.pop(spans).result()
        except BrokenProcessPool:
            raise UserError(
                "a worker that reads the data set was killed or could not start: is memory short? Take fewer workers, "
                "or workers=0 to see what it says in this process"
            ) from None


def _begin(read: Read, seed: int) -> None:
    global _read, _seed
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the script's, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_script, daemon=True).start()
    _read, _seed = read, seed


def _end_with_the_script() -> None:
    """One that was killed can't end its workers: they would wait for it for ever."""
    script = multiprocessing.parent_process()
    if script is not None:
        script.join()
        os._exit(1)


def _work(spans: Spans) -> Any:
    if _read is None:
        raise UserError("this worker was not started by run.batches")
    first = spans[0]
    chance = int.from_bytes(
        blake3(f"{_seed}:{first.epoch}:{first.start}".encode()).digest(length=4), "little"
    )
    torch.manual_seed(chance)
    random.seed(chance)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(chance)
    return _read(spans)
