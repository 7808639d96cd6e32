"""When a peer takes up what had arrived of the run's state before it was killed.  Pure.

Part of the peer machine, beside the saving and restoring of checkpoints.  Asked once, when the coordinator first says
where the run is; what is found is only a beginning, and everything else is fetched as ever (checkpoints/transfer.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from farflung.checkpoints.transfer import NO_VERSION
from farflung.coordinator.messages import Tick
from farflung.peer.effects import Effect, Note, Recall
from farflung.peer.lane import Lane

Held = dict[int, tuple[int, bytes]]  # chunk -> (version, digest of that version or empty)


class Recalling:
    def __init__(self) -> None:
        self.enabled = False  # the shell has a place where pieces may lie
        self.busy = False  # they are being read into the state
        self._era = 0

    def look(self, tick: Tick, lanes: Sequence[Lane]) -> list[Effect]:
        """Asked at every tick."""
        if not self.enabled or tick.goal == "found":
            return []
        self.enabled = False
        empty = all(lane.version == NO_VERSION and not lane.sealing for lane in lanes)
        if not empty or any(v != NO_VERSION for lane in lanes for v in lane.catch.versions):
            return []
        self.busy, self._era = True, tick.era
        return [Recall(tick.era)]

    def on_end(self, held: Held, lanes: Sequence[Lane], era: int) -> list[Effect]:
        self.busy = False
        if era != self._era or not held:
            return []
        for lane in lanes:
            lane.catch.recalled(held)
        kept = sum(v != NO_VERSION for lane in lanes for v in lane.catch.versions)
        of = sum(lane.fragment.count for lane in lanes)
        return [Note(f"{kept} of {of} pieces of the state had arrived before; only the others are fetched")]
