"""Going back by one version without a byte from anybody: out of what each chunk was before the last round.  Pure.

Part of the peer machine.  The shell has kept it since the round began (peer/state/before_images.py).  It is asked for
as soon as the run says that it is at that version again, and the trainer reads the state no more; until the answer is
here, nothing else may be written into the fragment.  What comes of it is hashed like every other state: where a disk
gave something else, nothing of the fragment is held, as if nothing had been asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.peer.machine.effects import Undo


@dataclass(frozen=True)
class Undone:
    """What came of an `Undo`.  `era`: of the run, when it was asked for; `whole`: all of it was there."""

    fragment: int
    version: int
    era: int
    whole: bool


class Undoing:
    """Its fragments are filled (lane_states.py) from the moment at which the run goes back."""

    def __init__(self) -> None:
        self._due: dict[int, int] = {}  # fragment -> version
        self._asked: dict[int, int] = {}  # fragment -> era in which the shell was asked
        self._era = 0

    def begin(self, back: dict[int, int], era: int) -> frozenset[int]:
        """The run begins an era; these fragments go back to these versions, and no others do.  Returns those of an
        older era that nothing was written into yet."""
        given_up = frozenset(self._due)
        self._due, self._era = dict(back), era
        return given_up

    def take_due(self, loading: bool) -> list[Undo]:
        """`loading`: the trainer reads the state."""
        if loading:
            return []
        due = [Undo(number, version) for number, version in self._due.items() if number not in self._asked]
        for undo in due:
            del self._due[undo.fragment]
            self._asked[undo.fragment] = self._era
        return due

    def on_undone(self, undone: Undone) -> bool:
        """False: it was asked for by whoever held another stage here."""
        if self._asked.get(undone.fragment) != undone.era:
            return False
        del self._asked[undone.fragment]
        return True
