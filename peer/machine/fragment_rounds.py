"""What a peer does in the rounds of one fragment, and what became of the work that it sent.  Pure.

Part of a replica (replicas.py).  Here are the round in flight (collectives/round/member.py), what was given to rounds
that are over, and the work that leaves ahead of its round.  It is in one state of the table `ROLES` at any time, and it
alone moves, in `_plays`.  Must not know what this peer holds of the fragment's state: it is told the version.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.collectives.round.member import LateResults, MemberRound, class_of
from farflung.collectives.round.pieces import ChunkPiece, encoding_order
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import Effect, Encode, Resolve
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload
from farflung.protocol.limits import FRAGMENTS_MAX
from farflung.protocol.messages import FragmentTick, OfFragmentBeat
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit, Plan
from farflung.protocol.states import Transitions

# ---- replica modes -----------------------------------------------------------------------------------------
# What a replica asks of modes, and the answers where nothing has been installed. Pure.
#
# A mode sends work ahead of its round where a line is much slower than most (peer/slow_lines); another keeps
# what was given to rounds that are over, for auditors (peer/audits).


def fragment_of(round_no: int) -> int | None:
    """Of an `Encode` that is for no round yet; None: it is for one."""
    return -round_no % FRAGMENTS_MAX if round_no < 0 else None


class EarlyWork:
    # ---- questions --------------------------------------------------------------------------------------

    @property
    def sections(self) -> tuple[OfFragmentBeat, ...]:
        """What a beat says of it."""
        return ()

    @property
    def is_mine(self) -> bool:
        """I am to send my work ahead."""
        return False

    @property
    def delivered(self) -> bool:
        """What is to be my next contribution is with its owners: a round may begin with me."""
        return False

    @property
    def encode_no(self) -> int:
        """Under which it is encoded, in place of a round's number; 0: there is none."""
        return 0

    @property
    def frozen(self) -> Frozen | None:
        """What it is made of."""
        return None

    @property
    def slot(self) -> int | None:
        """That must not be written."""
        return None

    @property
    def pieces(self) -> Mapping[int, ChunkPiece]:
        return {}

    # ---- its way ----------------------------------------------------------------------------------------

    def on_tick(self, tick: FragmentTick) -> None:
        """The coordinator's word."""

    def keep_going(self, newest: Frozen | None) -> list[Effect]:
        """`newest`: what stands frozen now."""
        return []

    def on_encoded(self, round_no: int, payloads: Mapping[int, Payload]) -> bool:
        """False: that work was dropped."""
        return False

    def send(self, now: float) -> list[Effect]:
        return []

    def drop(self) -> list[Resolve]:
        """It is for no round, and never will be."""
        return []

    def forget(self, frozen: Frozen) -> None:
        """What became of this work is known."""

    # ---- its round --------------------------------------------------------------------------------------

    def ready_for(self, plan: Plan) -> Frozen | None:
        """What I contribute to this round, encoded as it wants it; some of its owners may still lack some of it."""
        return None

    def names(self, plan: Plan) -> list[Effect]:
        """Tells owners that what they have of it counts."""
        return []

    def on_lacked(self, owner: str, chunk: int) -> None:
        """It asks for that piece."""

    # ---- frames -----------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame) -> tuple[Verdict, list[Effect]]:
        return Verdict.STALE, []

    def takes(self, kind: FrameKind) -> bool:
        """It is for `on_frame`."""
        return False

    def meant(self, sender: str, frame: Frame) -> Frame | None:
        """The contribution in place of a frame that says that it counts; None: I do not keep it."""
        return frame


@dataclass(frozen=True)
class Given:
    """What I gave to one round, by the kind of the frames that bring it and by chunk of the fragment."""

    round_no: int = 0
    pieces: Mapping[FrameKind, Mapping[int, ChunkPiece]] = field(default_factory=dict)

    @staticmethod
    def to(flight: MemberRound) -> Given:
        return Given(flight.plan.round_no, flight.given)

    def of(self, kind: FrameKind) -> Mapping[int, ChunkPiece]:
        return self.pieces.get(kind, {})


class KeptWork:
    def on_commit(self, round_no: int, given: Given, counts: bool = True) -> None:
        """`given`: to the last round that I was in, that one or another; `counts`: what I contributed did."""

    def on_want(
        self, sender: str, header: Header, in_round: bool, now: float
    ) -> tuple[Verdict, list[Effect]]:
        """For something of a round that is not in flight.  `in_round`: another one is."""
        return Verdict.STALE, []


@dataclass(frozen=True)
class ReplicaModes:
    ahead: EarlyWork = field(default_factory=EarlyWork)
    kept: KeptWork = field(default_factory=KeptWork)


# ---- fragment rounds ---------------------------------------------------------------------------------------

QUIET_S = 1.0  # without news for so long, what is missing is asked for


@dataclass(frozen=True)
class RoundTerms:
    """What the run's terms mean for rounds."""

    compare: bool = False  # owners compare contributions before the decision
    measure: bool = False  # how long results are decides by what they are multiplied


@dataclass(frozen=True)
class Contribution:
    """What was sent in a round, until it is known whether a commit used it."""

    round_no: int
    version: int  # that the round started from: only the next version's commit can have used it
    frozen: Frozen
    # The trainer has dropped this work: nothing of it is left that a commit could take.
    disowned: bool = False


@dataclass(frozen=True)
class LastCommit:
    """The newest commit: its late results still help."""

    round_no: int = 0
    version: int = 0
    late: LateResults | None = None  # if this peer was in its round

    def made(self, version: int) -> int:
        """The round that made this version; 0: not known."""
        return self.round_no if self.version == version else 0

    def coming(self, now: float) -> Set[tuple[int, int]]:
        """(version, chunk) of results that are not missed yet."""
        return self.late.coming(now) if self.late is not None else frozenset()


@dataclass(frozen=True)
class WorkSettled:
    """What the seal of a version says of this peer's work."""

    consumed: Contribution | None  # a commit on the way used it
    lost_track: bool  # a commit was missed: nobody here knows whether it used that


@dataclass(frozen=True, slots=True)
class Idle:
    """In no round, and nothing is open of an earlier one."""


@dataclass(frozen=True, slots=True)
class Owning:
    """In a round to which it contributes nothing: it owns, merges and receives."""

    round: MemberRound


@dataclass(frozen=True, slots=True)
class Contributing:
    round: MemberRound
    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Unsure:
    """The run is further than the round: whether its commit, which was not seen, used the work is not known."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Merged:
    """A commit used the work; that is settled with the trainer when the version is sealed."""

    contribution: Contribution


Role = Idle | Owning | Contributing | Unsure | Merged
RoleKind = type[Idle] | type[Owning] | type[Contributing] | type[Unsure] | type[Merged]


class RoleEvent(StrEnum):
    OPENED = "a round opened"
    CONTRIBUTED = "work was frozen for it"
    WITHDRAWN = "the work is not finite"
    DISOWNED = "the trainer dropped the work"
    ENDED = "over without my work"
    USED = "a commit used it"
    MISSED = "a later commit came"
    OVERTAKEN = "sealed without its commit"
    SETTLED = "its version is sealed"


ROLES: Transitions[RoleKind, RoleEvent] = Transitions(
    {
        Idle: {RoleEvent.OPENED: Owning},
        Owning: {RoleEvent.CONTRIBUTED: Contributing, RoleEvent.ENDED: Idle},
        Contributing: {
            RoleEvent.WITHDRAWN: Owning,
            RoleEvent.DISOWNED: Contributing,
            RoleEvent.ENDED: Idle,
            RoleEvent.USED: Merged,
            RoleEvent.MISSED: Unsure,
            RoleEvent.OVERTAKEN: Owning,
        },
        Unsure: {
            RoleEvent.DISOWNED: Unsure,
            RoleEvent.ENDED: Idle,
            RoleEvent.USED: Merged,
            RoleEvent.OVERTAKEN: Idle,
        },
        Merged: {RoleEvent.DISOWNED: Merged, RoleEvent.ENDED: Idle, RoleEvent.SETTLED: Idle},
    }
)


class FragmentRounds:
    def __init__(
        self, me: str, run_tag: bytes, fragment: Fragment, terms: RoundTerms, modes: ReplicaModes
    ) -> None:
        self.ahead, self.kept = modes.ahead, modes.kept
        self.last_no = 0
        self.dropped_no = 0  # the newest round of which it is known that the guard threw its work away
        # The version that the newest round starts from: the run counts on it here.
        self.planned_at = NO_VERSION
        self.last_commit = LastCommit()
        self._me, self._run_tag, self._fragment, self._terms = me, run_tag, fragment, terms
        self._role: Role = Idle()
        self._left = Given()  # to the round that was left last
        self._lost_track = False
        self._resolved: list[Resolve] = []

    def _plays(self, event: RoleEvent, role: Role) -> None:
        ROLES.check(type(self._role), event, type(role))
        left = self.flight
        self._role = role
        if left is not None and self.flight is not left:
            self._left = Given.to(left)  # its commit may come later than a newer one

    # ---- questions --------------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        return self._role

    @property
    def is_idle(self) -> bool:
        return isinstance(self._role, Idle)

    @property
    def flight(self) -> MemberRound | None:
        """The round in flight."""
        return self._role.round if isinstance(self._role, Owning | Contributing) else None

    def flight_of(self, round_no: int) -> MemberRound | None:
        """This round, if it is in flight."""
        flight = self.flight
        return flight if flight is not None and flight.plan.round_no == round_no else None

    @property
    def contribution(self) -> Contribution | None:
        """What was sent, while it is not known what became of it."""
        return self._role.contribution if isinstance(self._role, Contributing | Unsure) else None

    @property
    def sent_slot(self) -> int | None:
        """The slot that a round is using, or one that is to come."""
        role = self._role
        if isinstance(role, Contributing | Unsure | Merged):
            return role.contribution.frozen.slot
        return self.ahead.slot

    # ---- the coordinator's words ------------------------------------------------------------------------------

    def on_plan(self, plan: Plan, frozen: Frozen | None, now: float, is_here: bool) -> list[Effect]:
        """`is_here`: the version that it starts from is."""
        fits, flight = class_of(plan, self._me, self._fragment.count), self.flight_of(plan.round_no)
        if fits is not None and flight is not None:
            return [*flight.on_plan(plan, now)]
        if plan.round_no <= self.last_no or not is_here or fits is None or isinstance(self._role, Merged):
            return []
        self.last_no, self.planned_at = plan.round_no, plan.version
        self.end()  # a new round from the same version: the one before was aborted
        first, terms = self._fragment.first, self._terms
        flight = fits(self._me, plan, self._run_tag, QUIET_S, now, first, terms.compare, terms.measure)
        self._plays(RoleEvent.OPENED, Owning(flight))
        sent_ahead = self.ahead.ready_for(plan) if frozen is not None else None
        if sent_ahead is None:
            self.drop_ahead()
        if frozen is None:
            return []  # dropped since it was said to be ready; what was resolved waits for the next event, as ever
        sent = Contribution(plan.round_no, plan.version, sent_ahead or frozen)
        self._plays(RoleEvent.CONTRIBUTED, Contributing(flight, sent))
        if sent_ahead is not None:
            moved = flight.on_sent_ahead(self.ahead.pieces)
            return [*self.take_resolved(), *moved, *self.ahead.names(plan)]
        codec, order = plan.codec_of(self._me), tuple(encoding_order(plan, self._me))
        encode = Encode(plan.round_no, frozen.slot, codec, order, self._fragment.number)
        return [*self.take_resolved(), encode]

    def on_commit(self, commit: Commit, now: float) -> Mapping[int, ChunkPiece]:
        """Of a version that is newer than what is held.  Returns those of its results that came in its round, by index
        within the fragment."""
        flight, mine = self.flight, self.contribution
        over = flight is not None and commit.version > flight.plan.version
        ended = flight if over and flight is not None and commit.round_no == flight.plan.round_no else None
        late = None
        if ended is not None:
            late = LateResults(ended.plan, self._me, self._fragment.first, QUIET_S, now)
        self.last_commit = LastCommit(commit.round_no, commit.version, late)
        given = Given.to(ended) if ended is not None else self._left
        self.kept.on_commit(commit.round_no, given, counts=self._me in commit.included)
        if mine is not None and commit.version == mine.version + 1:
            if mine.round_no == commit.round_no and self._me in commit.included:
                self._resolve(mine, used=True)
                self._plays(RoleEvent.USED, Merged(mine))
            else:
                self.end()
        elif over and mine is not None:
            self._plays(RoleEvent.MISSED, Unsure(mine))
        elif over:
            self.end()
        return ended.pieces.results if ended is not None else {}

    def on_aborted(self, round_no: int) -> None:
        """The round is over without a commit.  What was sent is worth nothing, what was learned stays (P6)."""
        flight, mine = self.flight, self.contribution
        number = flight.plan.round_no if flight is not None else mine.round_no if mine is not None else 0
        if number and number == round_no:
            self.end()

    def on_tick(self, tick: FragmentTick, version: int) -> None:
        """`version`: held here."""
        self.ahead.on_tick(tick)
        if tick.version == version:
            # The run is still at this version, and counts on this peer in no round or in another: its own was aborted.
            flight, mine = self.flight, self.contribution
            awaited = mine.round_no if mine is not None and mine.version == version else 0
            for number in (flight.plan.round_no if flight is not None else 0, awaited):
                if number and number != tick.round_no:
                    self.on_aborted(number)
        if (flight := self.flight_of(tick.round_no)) is not None:
            flight.owner.weighing.on_asked(mask_from_bytes(tick.compare))
            flight.owner.on_sections(tick.sections)

    def on_guard(self, dropped_no: int) -> bool:
        """The newest round whose work the guard threw away.  True: it is news, and this peer was in it."""
        news, self.dropped_no = dropped_no > self.dropped_no, dropped_no
        return news and dropped_no == self.last_no

    # ---- what becomes of the work -----------------------------------------------------------------------------

    def on_unusable(self) -> None:
        """What stands frozen is not finite: nothing of it was sent."""
        if isinstance(self._role, Contributing):
            self._plays(RoleEvent.WITHDRAWN, Owning(self._role.round))

    def end(self) -> None:
        """Whatever part this peer had in a round is over, and no commit used what it sent."""
        if isinstance(self._role, Idle):
            return
        mine = self.contribution
        # What was sent ahead stays with its owners, for the next round; unless the trainer has dropped the work.
        if mine is not None and (mine.disowned or mine.frozen is not self.ahead.frozen):
            self._resolve(mine, used=False)
        self._plays(RoleEvent.ENDED, Idle())

    def _resolve(self, mine: Contribution, used: bool) -> None:
        """What became of this contribution is known."""
        self._resolved.append(Resolve(mine.frozen.slot, used, self._fragment.number))
        self.ahead.forget(mine.frozen)

    def take_resolved(self) -> list[Resolve]:
        """To be carried out before the trainer hears of a free slot."""
        resolved, self._resolved = self._resolved, []
        return resolved

    def disown(self) -> None:
        """The trainer drops its unmerged work, also what a round is using: a commit takes nothing from it any more."""
        role = self._role
        if isinstance(role, Contributing | Unsure | Merged):
            disowned = replace(role.contribution, disowned=True)
            self._plays(RoleEvent.DISOWNED, replace(role, contribution=disowned))
        if self.contribution is None:
            self.drop_ahead()

    def drop_ahead(self) -> None:
        """What was sent ahead is for no round any more."""
        self._resolved += self.ahead.drop()

    def lose_track(self) -> None:
        """What is read may be older than what the work was merged into."""
        self.end()
        self._lost_track = True

    def go_back(self, lost: bool) -> None:
        """The run did, and no commit is known any more; `lost`: what is held is void, and the work on it."""
        self.end()
        self.drop_ahead()
        self.last_commit = LastCommit()
        self._lost_track = self._lost_track or lost

    def on_sealed(self, version: int) -> WorkSettled:
        """The run's state is whole here at this version."""
        if self._lost_track:
            self.drop_ahead()
        mine = self.contribution
        if mine is not None and version > mine.version:
            self._resolve(mine, used=False)
            self._plays(RoleEvent.OVERTAKEN, Owning(self.flight) if self.flight is not None else Idle())
            self._lost_track = True
        settled = WorkSettled(None, self._lost_track)
        if isinstance(self._role, Merged):
            settled = replace(settled, consumed=self._role.contribution)
            self._plays(RoleEvent.SETTLED, Idle())
        self._lost_track = False
        return settled

    # ---- frames -------------------------------------------------------------------------------------------------

    def is_early(self, sender: str, frame: Frame) -> bool:
        """It overtook the plan or the decision that explains it."""
        number = frame.header.round_no
        if (flight := self.flight_of(number)) is not None:
            return flight.is_early(sender, frame)
        return number > self.last_no and frame.header.kind.overtakes

    def on_frame(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        header = frame.header
        if (flight := self.flight_of(header.round_no)) is not None:
            if header.kind == Kind.WANT_CONTRIBUTION:
                self.ahead.on_lacked(sender, header.chunk)
            verdict, moved = flight.on_frame(sender, frame, now)
            return verdict, [*moved]
        verdict, answer = self.kept.on_want(sender, header, self.flight is not None, now)
        return verdict, [*answer]

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        """The data plane's word: for whom something waits that can't leave, and of whom bytes came in."""
        if self.flight is not None:
            self.flight.on_lines(unreached, arriving, now)
        elif self.last_commit.late is not None:
            self.last_commit.late.on_arriving(arriving, now)
