"""A member that comes back with newer state than the run has: the era that the run went back from goes on.  Pure.

Part of the run machine, asked at every beat.  A line that was cut may hide the peers that hold the newest state for as
long as the run waits for them, and longer.  When one comes back with a settled version of the era that was given up,
and the run has not gone as far since, that era is won back (the record `WonBack`): what was made since is void, its
samples are trained again, and everybody is told why.  Where the run has gone further, the one that comes back is told
so, and takes the run's state.

Until that is decided a member hears nothing of the younger era: it would throw its state away.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.coordinator.ledger.eras import NOTHING, Abandoned, AbandonedBook
from farflung.coordinator.run.conductor import Conductor
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.going_back import GoingBack
from farflung.coordinator.run.membership import Member
from farflung.protocol.messages import Beat, FragmentTick
from farflung.protocol.states import Goal

# Times dead_after_s: how long others of the same era are waited for, that hold what it lacks.
PATIENCE_IN_DEAD = 2.0


@dataclass
class Claim:
    """What a member says of an era that was given up."""

    beat: Beat
    since: float
    answer: str = ""  # why it was not won back, once that is decided


class WinningBack:
    def __init__(self, core: Core, conductors: list[Conductor], going_back: GoingBack) -> None:
        self._core = core
        self._conductors = conductors
        self._going_back = going_back
        self._claims: dict[bytes, Claim] = {}  # by session

    def hear(self, member: Member, beat: Beat) -> bool:
        """What the member says of versions.  True if the run went on from what it holds, right now."""
        core, abandoned = self._core, self._core.ledger.abandoned
        if beat.era >= core.ledger.era or abandoned is None or beat.era != abandoned.era:
            self._claims.pop(member.session, None)
            return False
        claim = self._claims.get(member.session)
        if claim is not None and claim.answer:
            return False
        if any(said.version >= 0 for said in beat.fragments):
            claim = Claim(beat, claim.since if claim is not None else core.now)
            self._claims[member.session] = claim
        if claim is None:
            return False
        here = {each.session for each in core.members.alive.values()}
        self._claims = {session: each for session, each in self._claims.items() if session in here}
        versions = self._held_of(abandoned)
        now = [conductor.book.version for conductor in self._conductors]
        if versions is not None and all(map(int.__ge__, versions, now)) and versions != now:
            told, void = ", ".join(map(str, versions)), ", ".join(map(str, now))
            name = core.name(member.peer)
            self._going_back.win_back(
                abandoned.era,
                versions,
                f"{name} came back with version {told} of an earlier era; what was made since then, up to version "
                f"{void}, is void, and its samples are trained again",
            )
            self._claims.clear()
            return True
        if not self._is_open(claim, abandoned):
            claim.answer = self._answer(claim, abandoned)
            if claim.answer:
                core.note(f"{core.name(member.peer)}: {claim.answer}")
            else:
                del self._claims[member.session]
        return False

    def has_proven(self, member: Member, fragment: int, version: int) -> bool:
        """It holds this version of the era that was given up: it shows so under the version's nonce, and it was there
        when the version was made or had shown it before."""
        claim, abandoned = self._claims.get(member.session), self._core.ledger.abandoned
        said = claim.beat.of(fragment) if claim is not None else None
        if said is None or abandoned is None or said.version != version:
            return False
        book = abandoned.books[fragment]
        may_hold = book.reached.get(member.peer, NOTHING) >= version
        shown = self._conductors[fragment].settling.has_shown(said)
        return may_hold and said.digest == book.digests.get(version) and shown == book.shown.get(version)

    def era_of(self, member: Member) -> int:
        """The one that the member is answered in."""
        claim = self._claims.get(member.session)
        return self._core.ledger.era if claim is None or claim.answer else claim.beat.era

    def why_of_era(self, member: Member, beat: Beat) -> str:
        """Why another era than the member's began; empty if that is no news to it."""
        if beat.era >= self.era_of(member):
            return ""
        claim = self._claims.get(member.session)
        return claim.answer if claim is not None else self._core.ledger.era_reason

    def words(self, member: Member) -> tuple[Goal, str, tuple[FragmentTick, ...]] | None:
        """(goal, reason, fragments) of the answer to a member that is to show what it holds: in its own era, and of
        nothing that came later.  None: it is a member as all others are."""
        abandoned = self._core.ledger.abandoned
        if abandoned is None or self.era_of(member) == self._core.ledger.era:
            return None
        ticks = tuple(
            FragmentTick(number, abandoned.books[number].version, (), False, (), 0, False, 0)
            for number in member.standings
        )
        return Goal.WAIT, "it holds state of an earlier era: waiting for whether that can be won back", ticks

    # ---- what is won ---------------------------------------------------------------------------------------

    def _held_of(self, abandoned: Abandoned) -> list[int] | None:
        """Of each fragment the newest version of that era that is here, of the stages of a model the newest that all of
        them have; None if one is not here at all."""
        found = []
        for number, (book, conductor) in enumerate(zip(abandoned.books, self._conductors, strict=True)):
            versions = [
                version
                for member in conductor.holders
                if (version := self._version_of(member, number)) > book.forked
                and self.has_proven(member, number, version)
            ]
            mine = conductor.book.digests.get(book.forked)
            both = conductor.book.version == book.forked and mine == book.digests.get(book.forked)
            if both and (book.forked or self._is_held(conductor)):
                versions.append(book.forked)  # both eras have it, unless version 0 was founded anew
            if not versions:
                return None
            found.append(set(versions))
        if self._core.manifest.pipeline.stages == 1:
            return [max(versions) for versions in found]
        common = set.intersection(*found)
        return [max(common)] * len(found) if common else None

    def _is_held(self, conductor: Conductor) -> bool:
        """Version 0 of a fragment, by somebody here.  One that nobody holds makes no model with what is won of others:
        the run would wait for it again, where it was to be founded anew."""
        number = conductor.fragment
        shown = any(self.has_proven(member, number, 0) for member in conductor.holders)
        return shown or self._going_back.newest_held(conductor, settled=True) >= 0

    def _version_of(self, member: Member, fragment: int) -> int:
        claim = self._claims.get(member.session)
        said = claim.beat.of(fragment) if claim is not None and not claim.answer else None
        return said.version if said is not None else -1

    def _is_open(self, claim: Claim, abandoned: Abandoned) -> bool:
        """Others may come with what it lacks, or it may prove what it holds: it has newer state of some fragment."""
        patience_s = PATIENCE_IN_DEAD * self._core.members.dead_after_s
        if self._core.manifest.pipeline.stages > 1 and not all(map(self._may_claim, self._conductors)):
            return False
        return self._is_newer(claim, abandoned) and self._core.now - claim.since < patience_s

    def _may_claim(self, stage: Conductor) -> bool:
        """Of a model in stages all are needed.  One that is here in the younger era has given the older one up: whoever
        comes late, since it heard late of it, would hold up all others for nothing."""
        there = [member for member in stage.holders if member.beat is not None]
        return not there or any(member.session in self._claims for member in there)

    def _is_newer(self, claim: Claim, abandoned: Abandoned) -> bool:
        pairs = [(each, abandoned.books[each.fragment]) for each in claim.beat.fragments]
        return any(
            said.version > self._conductors[said.fragment].book.version and _is_settled(book, said.version)
            for said, book in pairs
        )

    def _answer(self, claim: Claim, abandoned: Abandoned) -> str:
        """Why its state is void; nothing needs to be said to one that lacks nothing but news."""
        beyond = [s for s in claim.beat.fragments if s.version > abandoned.books[s.fragment].forked]
        if not beyond:
            return ""
        held = ", ".join(str(said.version) for said in claim.beat.fragments)
        now = ", ".join(str(conductor.book.version) for conductor in self._conductors)
        if self._is_newer(claim, abandoned):
            why = "nobody came with the rest of it, or it was not shown to be the run's"
        elif any(not _is_settled(abandoned.books[s.fragment], s.version) for s in beyond):
            why = "its digest was never settled"
        else:
            why = "the run has gone as far since, or further"
        return (
            f"it holds version {held} of an earlier era, which the run had gone back from; {why}: it is at version "
            f"{now} now. What was learned in between is lost; the run's state is taken"
        )


def _is_settled(book: AbandonedBook, version: int) -> bool:
    return version in book.digests
