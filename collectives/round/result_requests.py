"""When a member is asked for what is missing of it: after it was quiet for too long.  Pure.

Owned by a member's round (member.py), and after its commit by what is still on its way (late_results.py): they tell it
of every frame of use and know what is missing.  Must not know frames, chunks or sockets.

A large frame takes seconds on a slow line, and several wait for each other there.  While bytes of a member keep coming
in, what is missing is most likely among them: to ask would only draw a second copy.  Not without end, though: a frame
can be lost while something else of the same member comes in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from farflung.collectives.round.effects import SendFrame
from farflung.protocol.frames import Frame
from farflung.protocol.round_words import Plan
from farflung.protocol.verdicts import Verdict

BACKOFF_MOST = 4  # doublings of the patience
ARRIVING_PATIENCE = 8  # times more patience while bytes come in
SPOILED_FORGIVEN = 1  # damaged frames of a member: asked for again; one more and it is out
IN_VAIN = 4  # times in a row, each with more patience: then somebody else should own its chunks


class ResultRequests:
    def __init__(self, members: Iterable[str], quiet_s: float, now: float) -> None:
        self._quiet_s = quiet_s
        self._asked_times: dict[str, int] = {}  # in vain, in a row: a slow line must not be asked ever more
        self.start_patience(members, now)

    def start_patience(self, members: Iterable[str], now: float) -> None:
        """Something new is expected of everybody from now on."""
        self._heard_at = dict.fromkeys(members, now)  # something of use, or it was asked
        self._bytes_at = dict(self._heard_at)  # any bytes at all

    def begin_anew(self, members: Iterable[str], now: float) -> None:
        """And nobody owes an answer."""
        self.start_patience(members, now)
        self._asked_times.clear()

    def on_heard(self, member: str, now: float) -> None:
        self._heard_at[member] = self._bytes_at[member] = now
        self._asked_times.pop(member, None)

    def on_arriving(self, members: Iterable[str], now: float) -> None:
        """Bytes of them came in, of frames that are not whole yet."""
        for member in members:
            if member in self._bytes_at:
                self._bytes_at[member] = now

    def is_due(self, member: str, now: float) -> bool:
        patience_s = self._quiet_s * 2 ** min(self._asked_times.get(member, 0), BACKOFF_MOST)
        waited_s = now - self._heard_at[member]
        return waited_s >= ARRIVING_PATIENCE * patience_s or (
            waited_s >= patience_s and now - self._bytes_at[member] >= self._quiet_s
        )

    def on_asked(self, member: str, now: float) -> None:
        self._heard_at[member] = now
        self._asked_times[member] = self._asked_times.get(member, 0) + 1

    @property
    def in_vain(self) -> set[str]:
        """Members that were asked again and again, and gave nothing."""
        return {member for member, times in self._asked_times.items() if times >= IN_VAIN}


class MemberFaults:
    """Members that are of no use in this round."""

    def __init__(self) -> None:
        self.refused: dict[str, Verdict] = {}  # they sent bytes of no use, and why
        self.unreached: set[str] = set()  # something waits for them and can't leave
        self.owners: set[str] = set()  # their results do not match their hash
        self._spoiled: Counter[str] = Counter()

    def forgives(self, sender: str) -> bool:
        """A frame of it arrived damaged."""
        self._spoiled[sender] += 1
        return self._spoiled[sender] <= SPOILED_FORGIVEN

    def cut_off(self, near: Collection[str], in_vain: set[str]) -> set[str]:
        """They should own nothing, as far as I can tell."""
        return (self.unreached | self.owners | in_vain) & set(near)


# ---- results of a committed round that are still on their way -----------------------------------------
#
# A round commits as soon as every result is proven, and on thin lines the last ones reach some members only
# after that. To ask a donor for them at once would bring them twice, over the line that they are just
# coming through.


class LateResults:
    def __init__(self, plan: Plan, me: str, first_chunk: int, quiet_s: float, now: float) -> None:
        self.version = plan.version + 1
        self._plan, self._me, self._first_chunk = plan, me, first_chunk
        self._asking = ResultRequests(plan.members, quiet_s, now)

    def on_result(self, sender: str, frame: Frame, now: float) -> list[SendFrame]:
        """It is the one that was committed.  In a mesh, what comes to an owner is for its group."""
        if sender in self._plan.members:
            self._asking.on_heard(sender, now)
        index = frame.header.chunk - self._first_chunk
        mine = self._plan.column and self._plan.owner_of(index) == self._me
        others = (member for member in self._plan.members if member != self._me)
        return [SendFrame(member, frame) for member in others] if mine else []

    def on_arriving(self, members: set[str], now: float) -> None:
        self._asking.on_arriving(members, now)

    def coming(self, now: float) -> set[tuple[int, int]]:
        """(version, chunk) of which the owner has not been quiet for too long."""
        speaking = {m for m in self._plan.members if not self._asking.is_due(m, now)}
        owners = [self._plan.members[owner] for owner in self._plan.owners]
        return {(self.version, self._first_chunk + i) for i, owner in enumerate(owners) if owner in speaking}
