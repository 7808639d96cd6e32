"""Which samples the trainer reads: positions within its leases, and batches of them (P7).

Called by the inner loop (`LeaseBook`) and by `run.batches` (`checked_size`, `tokens_in`).
Must not know the network, or how leases are granted and acknowledged.

A lease's samples [start, stop) are first read and later used: `read` moves when a batch is handed out,
`used` when the optimizer step that saw the batch is done.  A batch never spans two leases, so one number per
lease says exactly which samples are in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import IterableDataset

from farflung.collectives.errors import UserError
from farflung.collectives.plan import Used
from farflung.coordinator.messages import Lease

_WANT_MOST = 1 << 20  # the bound of the wire


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of one epoch's order, all within one lease."""

    lease: int
    epoch: int
    start: int
    stop: int


@dataclass(slots=True)
class _Open:
    lease: Lease
    read: int
    used: int


class LeaseBook:
    def __init__(self) -> None:
        self._told: tuple[Lease, ...] = ()
        self._open: dict[int, _Open] = {}
        self._unused: list[Span] = []  # handed out, not yet in an optimizer step
        self._asked = False

    # ---- what the agent says

    def on_leases(self, leases: tuple[Lease, ...]) -> None:
        """The whole list.  A lease that is missing in it is committed to its end, or somebody else's now."""
        self._told = leases
        self._asked = False
        before, self._open = self._open, {}
        for lease in sorted(leases, key=lambda each: each.lease):
            known = before.get(lease.lease)
            # Only a new lease is read from `upto`: a known one may have been read further, and that stands.
            read, used = (known.read, known.used) if known is not None else (lease.upto, lease.upto)
            self._open[lease.lease] = _Open(lease, read, used)

    def restart(self) -> None:
        """Unmerged work was dropped, or taken over from a trainer that died: go on where the agent said."""
        self._unused = []
        self._open = {}
        self.on_leases(self._told)

    # ---- what the trainer does

    def next_span(self, most: int) -> Span | None:
        """The next samples, in order, up to the end of their lease; they count as read at `hand_out`."""
        for lease_id, each in self._open.items():
            if each.read < each.lease.stop:
                return Span(lease_id, each.lease.epoch, each.read, min(each.read + most, each.lease.stop))
        return None

    def hand_out(self, span: Span) -> None:
        self._open[span.lease].read = span.stop
        self._unused.append(span)

    def on_step(self) -> None:
        """An optimizer step has used everything handed out so far."""
        for span in self._unused:
            if span.lease in self._open:  # else it vanished in the meantime
                self._open[span.lease].used = span.stop
        self._unused = []

    def used(self) -> tuple[Used, ...]:
        """How far each lease is in the model.

        What is committed already may be named again, which does no harm.  It must be: a trainer that was
        restarted is only told where to go on, not how much of that a commit has acknowledged.
        """
        return tuple(Used(i, each.used) for i, each in self._open.items() if each.used > each.lease.start)

    def ask(self, batch: int, lease_samples: int) -> int:
        """How many samples to ask for now, so that about two leases lie ahead; 0 for none."""
        unit = max(batch, lease_samples)
        missing = 2 * unit - sum(each.lease.stop - each.read for each in self._open.values())
        if self._asked or missing < unit:
            return 0
        self._asked = True
        return min(missing, _WANT_MOST)


def checked_size(dataset: object) -> int:
    """The number of samples of a data set that leases can address."""
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise UserError(
            f"{type(dataset).__name__} has no length or no index: run.batches leases samples by number, so it "
            "needs a map-style data set with __len__ and __getitem__. Index the stream (for example by file and "
            "line), or load it into a list"
        )
    size = len(dataset)
    if size < 1:
        raise UserError("the data set is empty")
    return size


def tokens_in(batch: object, samples: int) -> int:
    """Elements of the first integer tensor with two or more dimensions; else the number of samples."""
    found = _first_token_tensor(batch)
    return samples if found is None else found.numel()


def _first_token_tensor(batch: object) -> Tensor | None:
    if isinstance(batch, Tensor):
        whole = not batch.is_floating_point() and not batch.is_complex()
        return batch if whole and batch.dim() >= 2 else None
    if isinstance(batch, Mapping):
        return next((t for t in map(_first_token_tensor, batch.values()) if t is not None), None)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return next((t for t in map(_first_token_tensor, batch) if t is not None), None)
    return None
