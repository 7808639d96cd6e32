"""Which answers are being made for peers that catch up, so that nobody asks for more than it takes.

Owned by the agent, which makes them beside its loop.  An honest peer has a few questions open per fragment
(checkpoints/transfer.py); whoever asks for more gets what it can take and no more, and delays no round.
Knows nothing of bytes, sockets or why a peer asks.
"""

from __future__ import annotations

from farflung.checkpoints.transfer import ASKED_OF_ONE_DONOR
from farflung.collectives.frames import Kind

What = tuple[Kind, int]  # kind of answer and chunk


class Serving:
    def __init__(self, fragments: int) -> None:
        # Twice: it may have given up on the first ones and ask again.
        self.most = 2 * ASKED_OF_ONE_DONOR * fragments
        self._making: dict[str, set[What]] = {}

    def begin(self, to: str, what: What, waiting: int) -> bool:
        """May this answer be made?  `waiting`: how many are made and have not left yet."""
        making = self._making.setdefault(to, set())
        if what in making or len(making) + waiting >= self.most:
            return False
        making.add(what)
        return True

    def end(self, to: str, what: What) -> None:
        self._making[to].discard(what)
        if not self._making[to]:
            del self._making[to]
