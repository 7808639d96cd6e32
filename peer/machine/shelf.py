"""Which versions of the run this peer can bring without anybody's help, beside the state that it holds.  Pure.

Part of the peer machine, told in every beat.  Three sources: checkpoints that lie whole where this peer reads and
writes them, what else lies on its disk, and its own state as it was before the last round.  Where the newest state of a
stage is lost, all stages can only go back to a version that each of them can bring: so all that there is has to be
said, also what a former process wrote, and what others wrote into the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farflung.peer.machine.effects import Digests
from farflung.peer.machine.lane import Lane
from farflung.protocol.limits import SHELVED_TOLD
from farflung.protocol.round_words import Shelved, ShelvedList

OWN_TOLD = 16  # versions of what I hold; of what other stages have less is said
OTHERS_TOLD = 2  # of each


class Shelf:
    def __init__(self) -> None:
        self._found: dict[str, ShelvedList] = {}  # by place

    def put(self, place: str, found: Iterable[Shelved]) -> None:
        """All that lies there whole.  What was found there before counts no more."""
        self._found[place] = tuple(found)

    def strike(self, fragment: int, unread: Digests) -> None:
        """It was tried, and could not be read: it may be damaged, or its place is out of reach."""
        for place, found in self._found.items():
            kept = [each for each in found if not any(_is_one(each, fragment, known) for known in unread)]
            self._found[place] = tuple(kept)

    def told(self, lanes: Sequence[Lane]) -> ShelvedList:
        """The newest first: more than a beat takes may lie there."""
        held = {lane.fragment.number for lane in lanes}
        before = [Shelved.of(was[0], lane.fragment.number, was[1:]) for lane in lanes if (was := lane.before)]
        found = sorted({each for there in self._found.values() for each in there}, key=_newest_first)
        mine = [each for each in found if each.first in held]
        others: list[Shelved] = []
        for each in found:
            if each.first not in held and sum(other.first == each.first for other in others) < OTHERS_TOLD:
                others.append(each)
        return tuple([*before, *mine[:OWN_TOLD], *others][:SHELVED_TOLD])


def _newest_first(stored: Shelved) -> tuple[int, int, bytes]:
    return -stored.version, stored.first, stored.tags


def _is_one(stored: Shelved, fragment: int, known: tuple[int, bytes]) -> bool:
    version, digest = known
    return stored.version == version and stored.is_of(fragment, digest)
