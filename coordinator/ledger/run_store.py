"""What a coordinator needs of the place that keeps its records, whichever it is.

Two keep to it, and one suite holds both to the same promises (tests/coordinator/standby/test_run_stores.py): `Journal`
is a file in the coordinator's own folder, `EtcdStore` (coordinator/standby/) a cluster beside it, for hosts with a
standby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from farflung.coordinator.ledger.ledger import Ledger, LedgerRules, unpacked
from farflung.coordinator.ledger.records import CommittedBatch, CommittedRound, Folded, Record, from_bytes
from farflung.protocol.digests import hash_bytes, keyed_hash
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.round_words import Commit


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
            LedgerRules(
                rules.data.lease_samples,
                rules.round.keep_results,
                rules.fragments,
                rules.checkpoint.every_rounds,
            )
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


# ---- chain -------------------------------------------------------------------------------------------------
# A checksum that runs through all records: it holds of no record that is damaged, missing or in a wrong
# place.
#
# Used by both stores. It begins with what the run is (format, id, rules), and
# each record's goes over all before it; a fold begins it again, as it takes the place of all before. It tells
# of disks and copies that lie, not of people: whoever can write the file can calculate it. Pure.

SCHEMA_VERSION = 4  # of the records as they are kept; another one is refused
CHECK_BYTES = 8  # that are kept of it


@dataclass(frozen=True)
class RecordChain:
    """Up to one record.  `position` is that record's, counted from 1."""

    start: bytes
    position: int
    value: bytes

    @classmethod
    def of(cls, run_id: bytes, manifest: bytes) -> RecordChain:
        start = hash_bytes(b"farflung books %d\0" % SCHEMA_VERSION, run_id, manifest)
        return cls(start, 0, start)

    def then(self, body: bytes) -> RecordChain:
        position = self.position + 1
        value = keyed_hash(self.value, position.to_bytes(8, "big"), body)
        return replace(self, position=position, value=value)

    def through(self, bodies: Iterable[bytes]) -> RecordChain:
        chain = self
        for body in bodies:
            chain = chain.then(body)
        return chain

    def before_fold_at(self, position: int) -> RecordChain:
        return replace(self, position=position - 1, value=self.start)

    @property
    def check(self) -> bytes:
        """Before the first record it is that of what the run is."""
        return self.value[:CHECK_BYTES]

    @property
    def head(self) -> bytes:
        """Which record is the newest one, and what it is."""
        return self.position.to_bytes(8, "big") + self.check


def damaged(where: str, what: str, sound: Sequence[bytes], restore: str) -> UserError:
    """`sound`: the records before the damage; their checksums hold."""
    if not sound:
        return UserError(f"{where}: {what}; nothing before it can be relied on; {restore}")
    commit = _newest_commit(sound)
    made = f"up to version {commit.version} (round {commit.round_no})" if commit else "without any commit"
    return UserError(f"{where}: {what}; what stands before it is sound, {made}; {restore}")


def _newest_commit(bodies: Sequence[bytes]) -> Commit | None:
    for body in reversed(bodies):
        match from_bytes(body):
            case CommittedRound(commit=commit):
                return commit
            case CommittedBatch(rounds=rounds):
                return rounds[-1].commit
            case Folded(ledger=raw):
                ledger: Ledger = unpacked(raw, Ledger)
                return ledger.totals.rounds[-1].commit if ledger.totals.rounds else None
    return None
