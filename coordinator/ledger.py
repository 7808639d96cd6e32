"""What the run durably knows: a fold over the journal's records and nothing else.

The run machine reads it and changes it only by `apply(record)`; a restart replays the same records and ends
in the same state (P5).  Pure: no clock, no I/O, and nothing that is not in a record.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from farflung.collectives.plan import Commit
from farflung.coordinator.leases import Leases
from farflung.coordinator.records import (
    AbortedRound,
    Admitted,
    CommittedRound,
    DataFixed,
    DecidedOn,
    Departed,
    DigestFixed,
    Genesis,
    Granted,
    ModelFixed,
    Opened,
    Record,
    Released,
    Started,
    Vouched,
)
from farflung.coordinator.schema import ModelSchema

ROUNDS_SHOWN = 50
DIGESTS_KEPT = 16


@dataclass
class Ledger:
    lease_samples: int
    keep_results: int
    incarnation: int = 0
    model: ModelSchema | None = None
    founder: str = ""
    version: int = 0
    round_no: int = 0
    open_round: int = 0  # a round that was opened and neither committed nor aborted, 0 if none
    tokens: int = 0
    loss: float | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)  # the last `keep_results`
    rounds: deque[CommittedRound] = field(default_factory=lambda: deque(maxlen=ROUNDS_SHOWN))
    vouched: set[str] = field(default_factory=set)  # peers that have shown the run's state
    names: dict[str, str] = field(default_factory=dict)
    leases: Leases = field(init=False)

    def __post_init__(self) -> None:
        self.leases = Leases(self.lease_samples)

    def apply(self, record: Record) -> None:
        match record:
            case Started(incarnation=incarnation):
                self.incarnation = incarnation
            case ModelFixed(model=model):
                self.model = model
                self.digests.clear()  # only before anything was learned: version 0 must be founded for this model
            case DataFixed(samples=samples):
                # Named again only before anything was learned, by a peer that is alone: then nothing is leased.
                self.leases = Leases(self.lease_samples, samples, next_id=self.leases.next_id)
            case Genesis(digest=digest, peer=peer):
                self.digests[0] = digest
                self.founder = peer
            case Admitted(peer=peer, name=name):
                self.names[peer] = name
            case Vouched(peer=peer):
                self.vouched.add(peer)
            case Opened(plan=plan):
                self.round_no = max(self.round_no, plan.round_no)
                self.open_round = plan.round_no
            case CommittedRound():
                self._commit(record)
            case AbortedRound():
                self.open_round = 0
            case DigestFixed(version=version, digest=digest):
                self.digests[version] = digest
                self.digests.pop(version - DIGESTS_KEPT, None)
            case Granted(peer=peer, lease=lease):
                self.leases.grant(peer, lease)
            case Released(leases=lease_ids):
                self.leases.release(lease_ids)
            case Departed() | DecidedOn():
                pass  # kept for the audit; nothing durable follows from them

    def _commit(self, record: CommittedRound) -> None:
        commit = record.commit
        self.version = commit.version
        self.open_round = 0
        self.commits[commit.version] = commit
        self.commits.pop(commit.version - self.keep_results, None)
        self.tokens += record.tokens
        self.loss = record.loss if record.loss is not None else self.loss
        self.rounds.append(record)
        for used in record.used.values():
            self.leases.acknowledge(used)
