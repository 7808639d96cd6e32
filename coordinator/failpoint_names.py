"""The coordinator's failpoints: which of its records and words passes which point.

Called by the server, around every write and every word.  Off, each call returns at once
(protocol/process/failpoints.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    CommittedBatch,
    CommittedRound,
    DecidedOn,
    Departed,
    DigestFixed,
    Genesis,
    Granted,
    Opened,
    Record,
    RolledBack,
)
from farflung.protocol.messages import Aborted, Committed, Decided, Message, OpenRound, Welcome
from farflung.protocol.process.failpoints import hit, is_armed

_RECORDS: dict[type, str] = {
    Genesis: "genesis",
    Admitted: "admit",
    Departed: "depart",
    Granted: "lease",
    Opened: "open",
    DecidedOn: "decide",
    CommittedRound: "commit",
    CommittedBatch: "commit",
    AbortedRound: "abort",
    DigestFixed: "digest",
    RolledBack: "go_back",
}
_WORDS: dict[type, str] = {
    OpenRound: "open.mid_announce",
    Decided: "decide.mid_announce",
    Committed: "commit.mid_announce",
    Aborted: "abort.mid_announce",
}


def before_record(records: Sequence[Record]) -> None:
    """They are about to be written."""
    if is_armed():
        _pass(records, "before_fsync")


def after_record(records: Sequence[Record]) -> None:
    """They are durable, and nobody knows."""
    if is_armed():
        _pass(records, "after_fsync")


def before_answer(message: Message) -> None:
    if is_armed() and isinstance(message, Welcome):
        hit("admit.before_answer")


def after_word(message: Message) -> None:
    """It has left for one member."""
    foreseen = isinstance(message, Decided) and message.decision.foreseen
    if is_armed() and type(message) in _WORDS and not foreseen:
        hit(_WORDS[type(message)])


def _pass(records: Sequence[Record], when: str) -> None:
    for record in records:
        name = _RECORDS.get(type(record))
        if name is not None:
            hit(f"{name}.{when}")
