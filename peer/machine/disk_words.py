"""What the shell says of disks: this peer's own, and the place for checkpoints.  `MemberMachine.on_disk` hears it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from farflung.peer.machine.effects import Effect
from farflung.protocol.mode_words import Shelved

Held = dict[int, tuple[int, bytes]]  # chunk -> (version, digest of that version or empty)


@dataclass(frozen=True, slots=True)
class Reached:
    """What can be had from the disk of a fragment: its base, and the newest version; -1: nothing."""

    era: int
    fragment: int
    base: int
    version: int
    made: int  # the version that was to be reached
    ahead: frozenset[int] = frozenset()  # chunks whose results of the version after it lie there
    base_of: int = -1  # of a base that has just been written


@dataclass(frozen=True, slots=True)
class AheadKept:
    """The results of a round lie on the disk, or can't."""

    fragment: int
    version: int  # that they make
    round_no: int
    decision_no: int


@dataclass(frozen=True, slots=True)
class KeepingFailed:
    problem: str


@dataclass(frozen=True, slots=True)
class StateRead:
    """The state is that of a checkpoint; or NO_VERSION: none was found that is whole and of this run."""

    version: int
    problems: list[str]
    touched: bool  # values of one were written into the state all the same


@dataclass(frozen=True, slots=True)
class Undone:
    """What came of an `Undo`."""

    fragment: int
    version: int
    era: int  # of the run, when it was asked for
    whole: bool  # all of it was there


@dataclass(frozen=True, slots=True)
class PiecesRecalled:
    """These pieces of the run's state, which had arrived before a crash, stand in it again."""

    held: Held


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    version: int
    problem: str = ""  # why it was not


@dataclass(frozen=True, slots=True)
class ShelfListed:
    """All that lies there whole of the run, of every version and stage."""

    place: str
    found: list[Shelved]


@dataclass(frozen=True, slots=True)
class ResultsFound:
    """By version, chunks whose results lie on disk from a former life."""

    chunks: dict[int, set[int]]


@dataclass(frozen=True, slots=True)
class ResultsLost:
    """The disk can't keep results any more: the memory does."""

    why: str


KeptWord = Reached | AheadKept | KeepingFailed
StateWord = KeptWord | StateRead | Undone | PiecesRecalled  # of the run's state: something may follow from it
DiskWord = StateWord | CheckpointWritten | ShelfListed | ResultsFound | ResultsLost


class DiskListener(Protocol):
    """The peer machine, as whoever works on a disk for it sees it."""

    def on_disk(self, word: DiskWord, now: float) -> list[Effect]: ...
