"""Who holds a fragment, who of them is ready for a round, and why none is opened.  Pure.

The ground that a driver stands on (round_driver.py): what members last said of its fragment, read and never written.
Whether a round may be opened depends on who is ready, who is about to be, whose line is slow, who keeps restarting, and
who can be dialled.  Must not know rounds in flight.
"""

from __future__ import annotations

from collections.abc import Collection

from farflung.coordinator.ledger.ledger import FragmentBook
from farflung.coordinator.rounds.patience import Steadiness
from farflung.coordinator.rounds.round_policy import LineShares
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member, Standing
from farflung.protocol.messages import FragmentBeat


class Eligibility:
    def __init__(self, core: Core, fragment: int) -> None:
        self.core = core
        self.fragment = fragment
        self.lines = LineShares(fragment, lambda: core.manifest)
        self._steadiness = Steadiness()
        self._not_before = 0.0  # after a round that failed

    @property
    def book(self) -> FragmentBook:
        return self.core.ledger.books[self.fragment]

    @property
    def holders(self) -> Collection[Member]:
        """Living members that hold this fragment: nobody else has a part in its rounds."""
        return self.core.members.holders(self.fragment)

    def standing(self, member: Member) -> Standing:
        """Of a member that holds this fragment."""
        return member.standings[self.fragment]

    def beat_of(self, member: Member) -> FragmentBeat | None:
        """What the member last said of this fragment."""
        return member.beat.of(self.fragment) if member.beat is not None else None

    @property
    def _of_several_stages(self) -> bool:
        return self.core.manifest.pipeline.stages > 1

    @property
    def able(self) -> list[Member]:
        return [m for m in self.holders if self.standing(m).verified and not m.helps]

    @property
    def _helping(self) -> set[str]:
        return self.core.members.helping(self.fragment, self.core.now)

    @property
    def _least(self) -> int:
        """Contributions that a round needs.  Members whose data is at its end are here, and have none to give: others
        must be able to go on, or they would never find that end themselves."""
        without = sum(m.without_data and not self._is_ready(m) for m in self.able)
        return max(1, self.core.manifest.run.min_peers - without)

    def _counted_on(self, ready: list[Member]) -> list[Member]:
        """Without those that keep restarting with what they owe, where there are enough others."""
        steady = self._steadiness.counted_on(member.peer for member in ready)
        owners = self.core.members.can_own(self.core.now, steady | self._helping)
        enough = len(steady) >= self._least and owners
        return [member for member in ready if member.peer in steady] if enough else ready

    def _is_ready(self, member: Member) -> bool:
        beat = self.beat_of(member)
        if beat is None or beat.dropped != self.book.dropped_round:
            return False  # a member that has not heard that the guard threw a round away might bring its work again
        return beat.ready and beat.version == self.book.version and beat.round_no == 0

    def _why_not_open(self, able: list[Member], ready: list[Member]) -> str:
        rules, now = self.core.manifest.round, self.core.now
        least = self.core.manifest.run.min_peers
        if len(able) < least:
            held = f"version {self.book.version}{self.core.of(self.fragment)}"
            return f"{len(able)} of at least {least} peers hold {held}"
        if len(ready) < self._least:
            return f"inner steps: {len(ready)} of at least {least} peers are ready"
        if now < self._not_before:
            return f"the last round failed; trying again in {self._not_before - now:.1f} s"
        slow = self.lines.slow
        setting_the_pace = [m for m in ready if m.peer not in slow] or ready
        since = [self.standing(m).ready_since for m in setting_the_pace]
        first = min(at for at in since if at is not None)
        here = {m.peer for m in ready}
        expected = [m for m in able if m.peer in here or (m.trains and not m.without_data)]
        expected = [
            m for m in expected + self._arriving if not m.leaving and m.peer not in slow.keys() - here
        ]
        expected = [m for m in expected if m.peer in here or not self._steadiness.rounds_out(m.peer)]
        if len(ready) < len(expected) and now < first + rules.deadline_s:
            left_s = first + rules.deadline_s - now
            return f"inner steps: {len(ready)} of {len(expected)} ready, at most {left_s:.1f} s more"
        here |= self._helping
        if not self.core.members.can_own(self.core.now, here):
            return "no ready peer can be dialled, so nobody can own a chunk"
        return ""

    @property
    def _arriving(self) -> list[Member]:
        """Members that are just applying the newest commit: a slow disk or CPU must not cost them the next round."""
        return [member for member in self.holders if self.is_arriving(member) and not member.helps]

    def is_arriving(self, member: Member) -> bool:
        standing, beat = self.standing(member), self.beat_of(member)
        known = standing.vouched and not (standing.verified or standing.quarantined)
        return known and beat is not None and beat.version >= max(0, self.book.version - 1)

    def _can_own(self, members: Collection[str]) -> set[str]:
        """Those that others get through to.  Whoever is alone in the round of a stage need not be dialled: the other
        stages wait for it."""
        alone = self._of_several_stages and len(members) == 1
        return set(members) if alone else self.core.members.can_own(self.core.now, members)

    def _why_without(self, member: Member) -> str:
        """A round was opened without this able member."""
        if rounds := self._steadiness.rounds_out(member.peer):
            left = "1 more round" if rounds == 1 else f"{rounds} more rounds"
            why = "it restarted again and again while others needed what it had sent"
            return f"{why}; it takes part again after {left}"
        if member.peer in self.lines.slow:
            return f"what it learned is on its way: {self.lines.slow[member.peer].told}"
        return "all its places were taken" if self._is_ready(member) else "it was not ready in time"
