"""What a coordinator needs of the place that keeps its records, whichever it is.

Two keep to it, and one suite holds both to the same promises (tests/coordinator/standby/test_run_stores.py): `Journal`
is a file in the coordinator's own folder, `EtcdStore` (coordinator/standby/) a cluster beside it, for hosts with a
standby.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import Folded, Record
from farflung.protocol.manifest import Manifest


@dataclass(frozen=True)
class RunRecords:
    """A run as its records say it: those of a store, or those that it lacks."""

    run_id: bytes
    manifest: Manifest  # that the run began with
    records: Sequence[Record]

    @property
    def ledger(self) -> Ledger:
        rules = self.manifest
        ledger = Ledger(
            rules.data.lease_samples,
            rules.round.keep_results,
            rules.fragments,
            rules.checkpoint.every_rounds,
        )
        for record in self.records:
            ledger.apply(record)
        return ledger


class RunStore(Protocol):
    """One run's records, in order, written by one coordinator at a time."""

    run_id: bytes
    manifest: Manifest  # that the run began with
    restored: bool  # it takes the place of another one, which must not be followed any more

    @property
    def where(self) -> str:
        """For people; no secret is in it."""

    @property
    def is_long(self) -> bool:
        """It is time to fold."""

    def records(self) -> list[Record]:
        """From the newest fold on.  UserError if one is missing or cannot be read."""

    def append(self, records: Sequence[Record]) -> None:
        """All of them or none; returns when they would survive whatever the store survives.  Deposed: somebody else may
        write by now, and it is not known here whether these were written."""

    def fold(self, folded: Callable[[int], Folded]) -> None:
        """Put `folded(position)`, what all records up to there made, in their place: all of it or nothing."""

    def check(self) -> None:
        """Before anything leaves: Deposed, if this coordinator may not act any more."""

    def announce(self, whereabouts: bytes) -> None:
        """For those who stand by: where whoever leads is to be found, signed."""

    def close(self) -> None:
        """Nobody writes here any more; where somebody stands by, it may lead at once."""
