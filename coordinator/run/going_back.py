"""When nobody holds the newest version any more: whether, when and how far the run goes back.  Pure.

Part of the run machine, looked at on every timer.  The run goes back only to a version of its own: a state whose
digest stands in the ledger and that a living member holds, from its memory or from a checkpoint.  Where everything
was lost before the first checkpoint was due, it starts again at version 0, which is founded anew.  The record
`RolledBack` begins a new era; what peers say of versions in an older era does not count any more.
"""

from __future__ import annotations

import msgspec

from farflung.coordinator.ledger.records import RolledBack
from farflung.coordinator.run.conductor import Conductor
from farflung.coordinator.run.core import Core
from farflung.protocol.causes import AbortCause
from farflung.protocol.messages import Beat, FragmentBeat


class GoingBack:
    def __init__(self, core: Core, conductors: list[Conductor]) -> None:
        self._core = core
        self._conductors = conductors
        # Of each fragment: the newest version that somebody held at the last look, and since when it is not the newest.
        self._held = [-1] * len(conductors)
        self._lost_since: list[float | None] = [None] * len(conductors)

    def in_this_era(self, beat: Beat) -> Beat:
        """A member that has not heard yet that the run went back holds nothing of it, whatever its numbers say."""
        if beat.era >= self._core.ledger.era:
            return beat
        return msgspec.structs.replace(beat, fragments=tuple(map(_nothing_of, beat.fragments)))

    def check_what_is_held(self) -> bool:
        """True if the run went back now."""
        core = self._core
        may = core.ledger.learned and not (core.finished and core.ledger.delivered) and core.members.alive
        for at, conductor in enumerate(self._conductors):
            held, before = self._newest_held(conductor), self._held[at]
            if held >= conductor.book.version or not may:
                self._lost_since[at] = None
            elif self._lost_since[at] is None or held != before:
                self._lost_since[at] = core.now
            self._held[at] = held
        lost_s = [core.now - since for since in self._lost_since if since is not None]
        patience_s = core.manifest.checkpoint.go_back_after_s
        anything_left = min(self._held) >= 0 or self._before_the_first_checkpoint
        if not lost_s or not anything_left or not patience_s or max(lost_s) < patience_s:
            return False
        if min(lost_s) < min(patience_s, core.members.dead_after_s):
            return False  # some fragment's newest version is just being applied: it shall not be lost as well
        settled = [self._newest_held(conductor, settled=True) for conductor in self._conductors]
        if settled != self._held and max(lost_s) < patience_s + 2 * core.members.dead_after_s:
            return False  # that much later the digest of a version that is held is settled, or never will be
        if min(settled) < 0 and not self._before_the_first_checkpoint:
            return False
        self._go_back(settled)
        return True

    def is_lost(self, conductor: Conductor) -> bool:
        """Nobody holds its newest version, and it is not just being applied."""
        since = self._lost_since[conductor.fragment]
        return since is not None and self._core.now - since >= self._core.members.dead_after_s

    def _newest_held(self, conductor: Conductor, settled: bool = False) -> int:
        """`settled`: that the run has agreed on the digest of."""
        book, newest = conductor.book, -1
        for member in conductor.holders:
            said = conductor.beat_of(member)
            if said is None or said.version <= newest:
                continue
            # A version whose digest is not settled yet is held; so is one that this journal does not know.
            known = book.digests.get(said.version)
            unknown = known is None and said.version >= book.version and not settled
            if said.digest == known or unknown:
                newest = said.version
        return min(newest, book.version)

    @property
    def _before_the_first_checkpoint(self) -> bool:
        """Nobody can have one: some fragment never came to the version at which it would have been taken."""
        every = self._core.manifest.checkpoint.every_rounds
        return self._core.ledger.version < every

    def _go_back(self, held: list[int]) -> None:
        core = self._core
        lost_all = min(held) < 0
        versions = tuple(0 if lost_all else version for version in held)
        now = ", ".join(str(version) for version in versions)
        was = ", ".join(str(conductor.book.version) for conductor in self._conductors)
        for conductor in self._conductors:
            if conductor.round is not None:
                conductor.abort(AbortCause.WENT_BACK, "the run goes back to an older state")
        self._lost_since = [None] * len(self._conductors)
        if lost_all:
            reason = f"nobody held version {was}, nor any other, and no checkpoint was due yet"
            core.note(f"the run starts again at version {now}: {reason}; all that it had learned is lost")
        else:
            reason = f"no living peer held version {was}; version {now} was the newest that one did"
            core.note(f"the run went back from version {was} to {now}: nobody held anything newer")
        core.write(RolledBack(versions=versions, reason=reason))
        for member in core.members.alive.values():
            for standing in member.standings.values():
                standing.verified = standing.vouched = False
                standing.ready_since = None
            if member.beat is not None:
                member.beat = self.in_this_era(member.beat)

    def reason(self, conductor: Conductor) -> str:
        """Why a member that lacks this fragment's newest version has to wait, and for what."""
        core, newest = self._core, conductor.book.version
        lost = f"no living peer holds version {newest}{core.of(conductor.fragment)}"
        patience_s = core.manifest.checkpoint.go_back_after_s
        offer = self._held[conductor.fragment]
        if offer >= newest:
            return f"waiting for the peers that hold version {newest}{core.of(conductor.fragment)} to show it"
        if core.finished and core.ledger.delivered:
            out = (
                "its model was handed out already; waiting for a peer with a checkpoint of it (Ctrl-C leaves)"
            )
            return f"the run is complete, and {lost}: {out}"
        if min(self._held) < 0 and self._before_the_first_checkpoint and patience_s:
            return (
                f"{lost}, and no checkpoint was due before version {core.manifest.checkpoint.every_rounds}: the run "
                f"starts again at version 0 unless one comes within {patience_s:g} s that does"
            )
        if min(self._held) < 0:
            return f"{lost}: waiting for one that does, or for one with a checkpoint (join --checkpoints)"
        if not patience_s:
            return f"{lost}, the newest held is {offer}; go_back_after_s = 0: waiting for one that holds {newest}"
        # No countdown: a text that changes would be told again and again.
        return (
            f"{lost}: the run goes back to version {offer} unless one comes within {patience_s:g} s that does"
        )


def _nothing_of(said: FragmentBeat) -> FragmentBeat:
    return FragmentBeat(said.fragment, -1, b"", 0, 0, 0, False, ())
