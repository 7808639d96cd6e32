"""What a mode may decide of the rounds of a fragment in place of the core, and the core's own answers.  Pure.

`RoundPolicy` is asked by the round driver, `FlatSums` by the round in flight.  What stands here are the answers of
a flat round with whoever is ready: every member exchanges contributions with all owners, and an owner's result is the
sum of what it got.  At most one mode has a policy for a run: two that say who must be in a round can't both be right.
Must not know members beyond their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from farflung.coordinator.rounds.round_rules import Beats, Groups, codecs_for, owners_for
from farflung.protocol.errors import AbortCause
from farflung.protocol.limits import MEMBERS_PER_ROUND
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Beat, FragmentBeat, OfFragmentTick, ProgressReport, Sent
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import Commit, Decision, GroupSums, Plan

# ---- steps -------------------------------------------------------------------------------------------------
# What is due in a round: one of six steps, each with its reason. Pure data.
#
# Made by `Round.next_step`, carried out by the driver, which announces it and writes it down. Must not
# know how any of it was found out.


@dataclass(frozen=True)
class OwnersMoved:
    """Ownership changed: announce the plan of the new epoch."""

    plan: Plan
    reason: str
    unfit: frozenset[str]  # living owners that others could not get through to


@dataclass(frozen=True)
class RoundCommitted:
    decision: Decision
    reason: str
    merged: str = ""  # how, where contributions were compared


@dataclass(frozen=True)
class Foreseen:
    """What the round will most likely come to: members may begin by it, and nothing is written down."""

    decision: Decision


@dataclass(frozen=True)
class Done:
    commit: Commit
    norm: float | None = None  # of the merged update, where it is known
    late: frozenset[str] = frozenset()  # they lack results, and the round would have needed them too
    # Where the gradient of a batch is clipped: of each chunk's result, the sum of the squares of its values.
    lengths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Failed:
    reason: str
    cause: AbortCause
    unfit: frozenset[str] = frozenset()  # living owners that gave no results, where others could have
    dropped: bool = False  # the guard: what was contributed must not come again
    lost: frozenset[str] = frozenset()  # whose share of a batch must be computed again


@dataclass(frozen=True)
class RoundWaits:
    reason: str


Step = OwnersMoved | RoundCommitted | Foreseen | Done | Failed | RoundWaits


# ---- round policy ------------------------------------------------------------------------------------------

Place = tuple[int, int]  # (chunk, group)
NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class MadeSum:
    """The first signed word for a group's sum.  An heir that makes it anew makes the same bytes."""

    peer: str
    word: GroupSums


@dataclass(frozen=True)
class SeatShare:
    """What a round must have of one member."""

    seat: int
    counted: bytes  # mask


class FlatSums:
    """Of one round, the `flight`: how it goes from contributions to results.  In a flat one nothing is in between."""

    at_odds: Mapping[str, str] = NONE  # who contradicts whom: nobody knows which one lies
    captured: Mapping[int, str] = NONE  # groups that are out as a whole for where their sum points, and why

    @property
    def held_back(self) -> bool:
        """Nothing may be encoded yet."""
        return False

    @property
    def sections(self) -> tuple[OfFragmentTick, ...]:
        """What ticks say of them to members of the round."""
        return ()

    @property
    def impossible(self) -> Mapping[str, str]:
        """Whose numbers no vectors have, and why."""
        return NONE

    # ---- what members hear ----------------------------------------------------------------------------

    def plan_for(self, groups: Groups, member: str, epoch: int) -> Plan:
        return groups.plan

    def decision_for(self, groups: Groups, decision: Decision, member: str) -> Decision:
        return decision

    def touched(self, before: Plan, after: Plan) -> set[str]:
        """Who has to hear that ownership moved."""
        return set(after.members)

    def take_news(self) -> bool:
        """True once after each change of what may be encoded."""
        return False

    # ---- what members say -----------------------------------------------------------------------------

    def hear(self, peer: str, report: ProgressReport, groups: Groups) -> set[str]:
        """Returns members whose results waited for that."""
        return set()

    def named(
        self, flight: Any, peer: str, report: ProgressReport, decision: Decision
    ) -> Mapping[int, tuple[bytes, ...]] | None:
        """Of each chunk that counts, the sums that its result is made of; None: of contributions, so all count."""
        return None

    # ---- what follows ---------------------------------------------------------------------------------

    def marks(self, groups: Groups, weights: Mapping[str, float], screened: bool) -> Mapping[str, Any]:
        """Fields of a decision."""
        return NONE

    def begin(self, decision: Decision, groups: Groups) -> None:
        """Another decision: what was made by the one before is void."""

    def step(self, flight: Any, alive: set[str], decision: Decision) -> Step | None:
        """What is due after the decision, and before a commit."""
        return None

    def beside(self, groups: Groups, owner: str) -> set[str]:
        """Other owners with whom this one exchanges sums."""
        return set()

    def keeping(self, groups: Groups, chunk: int, got: Mapping[str, int]) -> list[str]:
        """Who should give this result to more; `got`: member -> mask of the results that it holds."""
        return [groups.plan.root_of(chunk)]

    def owing(self, groups: Groups, chunk: int, decision: Decision | None) -> list[str]:
        """Whom the result of this chunk waits for."""
        return [groups.plan.root_of(chunk)]

    def lacking(self, groups: Groups) -> Sequence[str]:
        """While results are held back: whose word is waited for."""
        return ()

    def used(self, makers: Mapping[int, Any], decision: Decision | None) -> Mapping[Place, MadeSum]:
        """By chunk and group, who made what the results are made of."""
        return {}


class LineShares:
    """Who owns which chunk of a round, and in which codec each member sends, by what they say of their lines.  Nobody's
    is special here; a mode may see to it that no round waits for a slow one."""

    slow: Mapping[str, Any] = NONE  # peers for whom no round waits, and what is `told` of their lines

    def __init__(self, fragment: int, manifest: Callable[[], Manifest]) -> None:
        """`manifest`: what holds now; the host may change it."""
        self._fragment, self._holds = fragment, manifest
        self._codecs: dict[str, str] = {}  # what each peer was given last, where the run leaves it open

    def on_commit(self, included: Sequence[str], now: float) -> None:
        """A round was committed with these members."""

    def is_due(self, now: float) -> bool:
        """It is time to `look`."""
        return False

    def look(
        self,
        beats: Mapping[str, Beat],
        can_own: Set[str],
        model: ModelSchema,
        now: float,
        name: Callable[[str], str],
    ) -> list[str]:
        """Returns what people are to hear of it."""
        return []

    def sections(
        self, peer: str, beats: Callable[[], Mapping[str, FragmentBeat]]
    ) -> tuple[OfFragmentTick, ...]:
        """What a tick says of them to this member.  `beats`: what each says of the fragment."""
        return ()

    def shared_out(
        self,
        beats: Beats,
        can_own: Set[str],
        model: ModelSchema,
        groups: Sequence[int] = (),
        wider: Sequence[Mapping[str, float]] = (),
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Of a round with these members: (each one's codec, chunk -> index of its owner).  `groups`: of each member, in
        a mesh, where each group has a row of owners.  `wider`: who could own, too, if bytes of the round passed
        relays."""
        codecs = self.codecs_of(beats, model)
        if groups:
            return tuple(codecs.values()), self._owners_by_group(beats, codecs, can_own, model, groups)
        owners = owners_for(beats, codecs, can_own, self._fragment, self._holds(), model, wider)
        return tuple(codecs.values()), owners

    def _owners_by_group(
        self,
        beats: Beats,
        codecs: Mapping[str, str],
        can_own: Set[str],
        model: ModelSchema,
        groups: Sequence[int],
    ) -> tuple[int, ...]:
        peers, rows = list(beats), []
        for group in range(max(groups) + 1):
            places = [at for at, its in enumerate(groups) if its == group]
            part = {peers[at]: beats[peers[at]] for at in places}
            row = owners_for(part, codecs, can_own & part.keys(), self._fragment, self._holds(), model)
            rows += [places[owner] for owner in row]
        return tuple(rows)

    def codecs_of(self, beats: Beats, model: ModelSchema, time_s: float | None = None) -> dict[str, str]:
        if not beats:
            return {}
        codecs = codecs_for(beats, self._fragment, self._holds(), model, self._codecs, time_s)
        self._codecs |= codecs
        return codecs

    def values(self, model: ModelSchema) -> int:
        chunks = model.stages[self._fragment].chunk_count if model.stages else model.chunk_count
        return chunks * model.chunk_elements


class RoundPolicy:
    """Of the rounds of one fragment."""

    names_members: bool = False  # it says who must be in a round; else whoever is ready is

    @property
    def is_begun(self) -> bool:
        """What the next round is to merge is being made."""
        return True

    @property
    def under_way(self) -> bool:
        """A round is in flight that the next one belongs to: it is opened whatever else holds the run."""
        return False

    def shares(self) -> tuple[Mapping[str, SeatShare], str]:
        """(who must be in the next round, all of them, and with what; why it can't open yet)."""
        return {}, ""

    def problem(self, share: SeatShare | None, sent: Sent) -> str:
        """Why this word does not go with the share that the round was opened with; empty: it does."""
        return ""

    def finished(self, dones: Sequence[Done]) -> Sequence[Done]:
        """Rounds that one record commits, as it is to have them."""
        return dones

    def give_up(self, peers: Iterable[str], why: str) -> None:
        """The share of each of these did not come into a round: others make it."""

    def most(self, able: int) -> int:
        """Members of one round, so many of which can own chunks."""
        return MEMBERS_PER_ROUND

    def drawn(self, peers: Sequence[str], able: Set[str], seed: bytes) -> tuple[int, ...]:
        """The group of each of them; () if they are one group."""
        return ()

    def lines(self, fragment: int, manifest: Callable[[], Manifest]) -> LineShares:
        """By what members say of their lines; `manifest`: what holds now."""
        return LineShares(fragment, manifest)

    def sums(self) -> FlatSums:
        """For a round that is opened."""
        return FlatSums()
