"""Data leases: every sample of an epoch is handed out once and acknowledged by the commit that used it (P7).

Held by the ledger; changed only through journal records, so a restart restores it exactly.  Pure.
A lease is a range [start, stop) of an epoch's order; `upto` is how far commits have acknowledged it.  What a
lost holder did not get committed goes back to the pool as a range and is granted first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from farflung.collectives.plan import Used
from farflung.coordinator.messages import Lease


@dataclass
class Held:
    peer: str
    epoch: int
    start: int
    stop: int
    upto: int

    def as_lease(self, lease_id: int) -> Lease:
        return Lease(lease_id, self.epoch, self.start, self.stop, self.upto)


@dataclass
class Leases:
    """`cursor` is the next sample of `epoch` that was never granted; `returned` holds ranges to grant again."""

    lease_samples: int
    samples: int = 0  # size of the data set; 0 until the first peer names it
    epoch: int = 0
    cursor: int = 0
    next_id: int = 1
    held: dict[int, Held] = field(default_factory=dict)
    returned: list[tuple[int, int, int]] = field(default_factory=list)  # (epoch, start, stop)
    leased_samples: int = 0
    committed_samples: int = 0
    returned_samples: int = 0

    def copy(self) -> Leases:
        held = {lease_id: replace(each) for lease_id, each in self.held.items()}
        return replace(self, held=held, returned=list(self.returned))

    # ---- decisions: what to write down ---------------------------------------------------------------

    def next_range(self, wanted: int) -> tuple[int, int, int]:
        """(epoch, start, stop) of the next lease to grant; large enough that a peer needs only a few at a time."""
        if self.returned:
            return self.returned[0]
        epoch, start = (self.epoch + 1, 0) if self.cursor >= self.samples else (self.epoch, self.cursor)
        return epoch, start, min(start + max(wanted, self.lease_samples), self.samples)

    def of(self, peer: str) -> dict[int, Held]:
        return {lease_id: held for lease_id, held in self.held.items() if held.peer == peer}

    def foreign(self, peer: str, lease_ids: Iterable[int]) -> tuple[int, ...]:
        """Those ids that the peer believes to hold and does not."""
        return tuple(i for i in lease_ids if i not in self.held or self.held[i].peer != peer)

    def problem(self, peer: str, used: Iterable[Used]) -> str | None:
        """Why these samples can't be acknowledged for this peer, or None."""
        seen: set[int] = set()
        for item in used:
            held = self.held.get(item.lease)
            if item.lease in seen:
                return f"it names lease {item.lease} twice"
            seen.add(item.lease)
            if held is None or held.peer != peer:
                return f"it used lease {item.lease}, which is not its own any more"
            if not held.upto <= item.upto <= held.stop:
                return (
                    f"it says it used lease {item.lease} up to {item.upto}, outside {held.upto}..{held.stop}"
                )
        return None

    # ---- changes: called by the ledger only, for a record that is written ------------------------------

    def grant(self, peer: str, lease: Lease) -> None:
        if self.returned and self.returned[0] == (lease.epoch, lease.start, lease.stop):
            self.returned.pop(0)
        else:
            self.epoch, self.cursor = lease.epoch, lease.stop
        self.held[lease.lease] = Held(peer, lease.epoch, lease.start, lease.stop, lease.upto)
        self.next_id = lease.lease + 1
        self.leased_samples += lease.stop - lease.start

    def acknowledge(self, used: Iterable[Used]) -> None:
        for item in used:
            held = self.held[item.lease]
            self.committed_samples += item.upto - held.upto
            held.upto = item.upto
            if held.upto == held.stop:
                del self.held[item.lease]

    def release(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            held = self.held.pop(lease_id)
            self.returned.append((held.epoch, held.upto, held.stop))
            self.returned_samples += held.stop - held.upto
