"""The records of a small run, for tests of the places that keep them."""

from __future__ import annotations

from farflung.coordinator.ledger.records import (
    Admitted,
    CommittedRound,
    DataFixed,
    Departed,
    DigestFixed,
    Genesis,
    Granted,
    Record,
    Started,
)
from farflung.protocol.errors import DepartureCause, Excluded, ExclusionCause
from farflung.protocol.messages import Lease
from farflung.protocol.round_words import Commit, Used

RUN_ID = bytes(range(16))
COMMIT = Commit(version=1, round_no=1, members=("p",), weights=(1.0,), hashes=b"h" * 32, codec="fp32")
RECORDS: list[Record] = [
    Started(incarnation=1),
    Admitted(peer="p", name="amber-fox", session=b"s" * 16),
    DataFixed(samples=1000, peer="p"),
    Genesis(digest=b"d" * 32, peer="p"),
    Granted(peer="p", lease=Lease(lease=1, epoch=0, start=0, stop=256, upto=0)),
    CommittedRound(
        commit=COMMIT,
        used={"p": (Used(lease=1, upto=100),)},
        excluded={"q": Excluded(ExclusionCause.NOT_WHOLE, "too late")},
        tokens=6400,
        steps=50,
        loss=2.5,
        seconds=1.25,
        tx_bytes=4096,
    ),
    DigestFixed(version=1, digest=b"e" * 32),
    Departed(peer="p", cause=DepartureCause.LEFT, reason="it left"),
]
