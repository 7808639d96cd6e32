"""What synchronous batches need of a run machine, by hand: workers that are simply there, and a desk that writes down.

Used by tests/coordinator/batches/.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import Record
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Beat


@dataclass
class Worker:
    peer: str
    process: bytes = b"first"
    verified: bool = True
    leaving: bool = False
    stage: int = 0
    dialable: bool = True
    fits: tuple[int, ...] = ()
    beat: Beat | None = None


@dataclass
class Desk:
    ledger: Ledger
    manifest: Manifest
    now: float = 100.0
    began_at: float = 0.0
    held: str = ""
    finished: bool = False
    written: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    struck: list[tuple[str, str]] = field(default_factory=list)

    @property
    def clock_s(self) -> float:
        return self.now

    def write(self, record: Record) -> None:
        self.ledger.apply(record)
        self.written.append(record)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def name(self, peer: str) -> str:
        return peer

    def strike(self, peer: str, reason: str) -> None:
        self.struck.append((peer, reason))
