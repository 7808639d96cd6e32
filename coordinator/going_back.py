"""When nobody holds the newest version any more: whether, when and how far the run goes back.  Pure.

Part of the run machine, looked at on every timer.  The run goes back only to a version of its own: a state whose
digest stands in the ledger and that a living member holds, from its memory or from a checkpoint.  The record
`RolledBack` begins a new era; what peers say of versions in an older era does not count any more.
"""

from __future__ import annotations

import msgspec

from farflung.coordinator.conductor import Conductor
from farflung.coordinator.core import Core
from farflung.coordinator.messages import Beat, FragmentBeat
from farflung.coordinator.records import RolledBack

_NOTHING = FragmentBeat(-1, b"", 0, 0, 0, False, ())


class GoingBack:
    def __init__(self, core: Core, conductors: list[Conductor]) -> None:
        self._core = core
        self._conductors = conductors
        self._held: list[
            int
        ] = []  # of each fragment the newest version that somebody holds, at the last look
        self._since = 0.0  # so long it has been like that

    def in_this_era(self, beat: Beat) -> Beat:
        """Who has not heard yet that the run went back holds nothing of it, whatever the numbers say."""
        if beat.era >= self._core.ledger.era:
            return beat
        return msgspec.structs.replace(beat, fragments=(_NOTHING,) * len(beat.fragments))

    def look(self) -> bool:
        """True if the run went back now."""
        core = self._core
        held = [self._newest_held(conductor) for conductor in self._conductors]
        if held != self._held:
            self._held, self._since = held, core.now
        patience_s = core.manifest.checkpoint.go_back_after_s
        if not self._is_lost or min(held) < 0 or not patience_s or core.now < self._since + patience_s:
            return False
        self._go_back()
        return True

    @property
    def _is_lost(self) -> bool:
        """Of some fragment, nobody who is here holds the newest version."""
        if not self._core.ledger.learned or self._core.finished:
            return False
        return any(h < c.book.version for h, c in zip(self._held, self._conductors, strict=False))

    def _newest_held(self, conductor: Conductor) -> int:
        book, newest = conductor.book, -1
        for member in self._core.members.alive.values():
            said = conductor.beat_of(member)
            if said is None or said.version <= newest:
                continue
            # A version whose digest is not settled yet is held; so is one that this journal does not know.
            known = book.digests.get(said.version)
            if said.digest == known or (known is None and said.version >= book.version):
                newest = said.version
        return min(newest, book.version)

    def _go_back(self) -> None:
        core = self._core
        now = ", ".join(str(version) for version in self._held)
        was = ", ".join(str(conductor.book.version) for conductor in self._conductors)
        for conductor in self._conductors:
            if conductor.round is not None:
                conductor.abort("the run goes back to an older state")
        reason = f"no living peer held version {was}; version {now} was the newest that one did"
        core.write(RolledBack(versions=tuple(self._held), reason=reason))
        core.note(f"the run went back from version {was} to {now}: nobody held anything newer")
        for member in core.members.alive.values():
            for standing in member.standings:
                standing.verified = standing.vouched = False
                standing.ready_since = None
            if member.beat is not None:
                member.beat = self.in_this_era(member.beat)

    def reason(self, conductor: Conductor) -> str:
        """Why a member that lacks this fragment's newest version has to wait, and for what."""
        core, newest = self._core, conductor.book.version
        lost = f"no living peer holds version {newest}{core.of(conductor.fragment)}"
        patience_s = core.manifest.checkpoint.go_back_after_s
        offer = self._held[conductor.fragment] if self._held else -1
        if offer >= newest:
            return f"waiting for the peers that hold version {newest}{core.of(conductor.fragment)} to show it"
        if core.finished:
            return f"the run is complete, and {lost}: waiting for one that does"
        if min(self._held, default=-1) < 0:
            return f"{lost}: waiting for one that does, or for one with a checkpoint (join --checkpoints)"
        if not patience_s:
            return f"{lost}, the newest held is {offer}; go_back_after_s = 0: waiting for one that holds {newest}"
        # No countdown: a text that changes would be told again and again.
        return (
            f"{lost}: the run goes back to version {offer} unless one comes within {patience_s:g} s that does"
        )
