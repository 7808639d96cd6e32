"""One round at one member: as sender, as owner, and as receiver.  A pure state machine.

Owned by the peer machine, which feeds it the coordinator's words (plan, decision), frames from other
members, finished arithmetic, and time; it returns effects.  It must not know sockets, clocks, tensors or
the coordinator: it never decides that a round commits, it only reports what it holds.

The rules, in the order in which a round meets them:
  * A contribution is encoded once and its bytes kept until the round is over: any owner, first or second,
    receives the same bytes.
  * An owner merges only by a decision, be it a foreseen one, and only when it holds every included
    contribution of the chunk.  Order and weights are fixed by plan and decision, so two owners produce the same bytes.
  * Where contributions are compared, an owner computes the dot products of each chunk once all contributions
    to it are here, and reports their sums before the decision.
  * Nothing is asked for twice in a hurry: what is missing is asked for after `quiet_s` without news.

Inside, a chunk is its index within the round's fragment, as in the plan; frames and effects carry its number.

A round in groups is another class (collectives/mesh/mesh_round.py, found by `IN_GROUPS`): where it differs, a method
here, of `Owner` or of `Roles` gives the answer of a flat round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import ClassVar

from farflung.collectives.round.effects import Calculated, DataEffect, Measure, Merge, SendFrame, Weigh
from farflung.collectives.round.pieces import (
    IN_GROUP,
    ChunkPiece,
    Counted,
    Dots,
    Progress,
    Roles,
    RoundPieces,
    Weighing,
    by_owner,
)
from farflung.protocol.digests import (
    combined,
    full_mask,
    hash_bytes,
    length_to_bytes,
    mask_from_bytes,
    mask_of,
)
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload, Spoiled, with_payload
from farflung.protocol.process.mode_folders import module_of
from farflung.protocol.round_words import Decision, ModeSection, Plan

# ---- decision news -----------------------------------------------------------------------------------------
# What a member knows of the decision of a round: none yet, one that is foreseen, or the one that stands.
# Pure.
#
# Part of the round at a member. A decision that is foreseen says by which weights the round will
# most likely be merged. Owners begin with it as soon as what goes into a chunk is here, and everybody takes
# results made by it; but no contribution is less awaited for it, owners go on comparing, and nobody is asked
# for a result, which may be waiting for somebody else's contribution. The decision itself is another word:
# with the same number and the same weights it makes what was made by the foreseen one stand; with anything
# else all of that is worth nothing.
#
# Must not know frames, chunks or who holds what.

DOUBTED_S = 2.0  # with every result here and no commit for so long: some owner may tell what nobody can prove


class DecisionNews(Enum):
    NONE = auto()  # an older word, or one that is known
    STANDS = auto()  # what was foreseen is decided: all that was made by it is worth something
    OTHER = auto()  # other weights than before: what was made by those is worth nothing


class Deciding:
    def __init__(self) -> None:
        self.newest: Decision | None = None  # by which results are made now

    def hear(self, decision: Decision) -> DecisionNews:
        known = self.newest
        if known is None or decision.decision_no > known.decision_no:
            self.newest = decision
            return DecisionNews.OTHER
        if decision.decision_no < known.decision_no or decision.foreseen or not known.foreseen:
            return DecisionNews.NONE
        self.newest = decision
        return DecisionNews.STANDS if decision.weights == known.weights else DecisionNews.OTHER

    @property
    def is_made(self) -> bool:
        return self.newest is not None and not self.newest.foreseen

    @property
    def number(self) -> int:
        """Of the one by which results are made now; 0: there is none."""
        return self.newest.decision_no if self.newest is not None else 0

    @property
    def made_no(self) -> int:
        """Of the one that stands; 0: I have not heard of it."""
        return self.number if self.is_made else 0

    def is_newest(self, number: int) -> bool:
        return self.newest is not None and number == self.newest.decision_no

    def counted(self, members: Sequence[str]) -> list[tuple[str, float]]:
        """(member, weight) of all that go into a sum, in its order; none before a decision."""
        weights = self.newest.weights if self.newest is not None else (0.0,) * len(members)
        return [(m, w) for m, w in zip(members, weights, strict=True) if w > 0.0]

    def may_count(self, member: str, members: Sequence[str]) -> bool:
        """Its contribution is of use, as far as I know."""
        if self.newest is None or not self.is_made:
            return True
        return self.newest.weights[members.index(member)] > 0.0


class Doubt:
    """Every result is here, it is decided, and for too long no commit comes."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.is_on = False

    def look(self, whole: bool, now: float) -> None:
        if not whole:
            self._since = None
        elif self._since is None:
            self._since = now
        self.is_on = self._since is not None and now - self._since >= DOUBTED_S


# ---- result requests ---------------------------------------------------------------------------------------
# When a member is asked for what is missing of it: after it was quiet for too long. Pure.
#
# Owned by a member's round, and after its commit by what is still on its way (below):
# they tell it of every frame of use and know what is missing. Must not know frames, chunks or sockets.
#
# A large frame takes seconds on a slow line, and several wait for each other there. While bytes of a member
# keep coming in, what is missing is most likely among them: to ask would only draw a second copy. Not without
# end, though: a frame can be lost while something else of the same member comes in.

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
        if member in self._heard_at:
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


# ---- sender ------------------------------------------------------------------------------------------------


class Sender:
    """Frames of the round that leave me: contributions, results, answers and questions."""

    def __init__(
        self, roles: Roles, pieces: RoundPieces, deciding: Deciding, run_tag: bytes, first_chunk: int
    ) -> None:
        self.roles = roles  # of the newest plan
        self.first_chunk = first_chunk
        self._pieces, self._deciding, self._run_tag = pieces, deciding, run_tag

    def header(self, kind: FrameKind, index: int) -> Header:
        plan, chunk = self.roles.plan, self.first_chunk + index
        return Header(kind, self._run_tag, plan.round_no, self._deciding.number, plan.version, chunk)

    def deliver(self, chunk: int) -> list[DataEffect]:
        """My contribution of one chunk goes to its owner; what I own myself on my shelf, and to a keeper if any."""
        to: str | None = self.roles.plan.owner_of(chunk)
        mine = self._pieces.mine[chunk]
        if to == self.roles.me:
            self._pieces.shelve(chunk, to, mine)
            to = self.roles.keeper(chunk)
        return [self.answer(to, Kind.CONTRIBUTION, chunk, mine)] if to else []

    def answer(self, to: str, kind: FrameKind, chunk: int, piece: ChunkPiece | None) -> SendFrame:
        if piece is None:
            return SendFrame(to, Frame(self.header(Kind.MISSING, chunk)))
        return SendFrame(to, with_payload(self.header(kind, chunk), piece.payload, piece.hash))

    def spread(self, chunk: int) -> list[DataEffect]:
        """A result that is here goes to all that get it from me."""
        piece, receivers = self._pieces.results[chunk], self.roles.receivers(chunk)
        return [self.answer(to, Kind.RESULT, chunk, piece) for to in receivers if to != self.roles.me]


# ---- owner -------------------------------------------------------------------------------------------------


class Owner:
    """Compares and sums what comes for the chunks that I own; has all results measured."""

    summed: ClassVar[FrameKind] = Kind.CONTRIBUTION  # brings what a result is the sum of

    def __init__(
        self, sender: Sender, pieces: RoundPieces, deciding: Deciding, faults: MemberFaults, compare: bool
    ) -> None:
        self.roles = sender.roles  # of the newest plan
        self.weighing = Weighing(full_mask(len(self.roles.plan.members)), compare)
        self._sender, self._pieces, self._deciding, self._faults = sender, pieces, deciding, faults
        self._merging: set[int] = set()

    # ---- the coordinator's words -------------------------------------------------------------------

    def begin(self, decision: Decision) -> list[DataEffect]:
        """Sums of an earlier decision have other weights."""
        self._merging.clear()
        return self.merge_ready()

    def on_sections(self, told: Sequence[ModeSection]) -> None:
        """What a tick says of the round to a mode of it."""

    def on_roots(self, before: Plan, kept: int) -> list[DataEffect]:
        """Ownership moved, in other groups too."""
        return []

    # ---- arithmetic --------------------------------------------------------------------------------

    def weigh_ready(self, only: int | None = None) -> list[DataEffect]:
        """Compare what is here, chunk by chunk, where nothing is missing for it."""
        self.weighing.changed = self.weighing.changed and only is not None
        held, chunks = self._pieces.held, self._pieces.owned if only is None else [only]
        shelves = {chunk: held.get(chunk, {}) for chunk in chunks}
        return [*self.weighing.weigh_all(self.roles.plan, shelves, self._refused, self._sender.first_chunk)]

    def merge_ready(self, only: int | None = None) -> list[DataEffect]:
        """Start the sum of every chunk of mine whose included contributions are all here."""
        decision, effects = self._deciding.newest, list[DataEffect]()
        if decision is None:
            return effects
        counted = self._deciding.counted(self.roles.plan.members)
        for chunk in self._pieces.owned if only is None else [only]:
            if chunk not in self._merging:
                effects += self._make(chunk, counted, decision)
        return effects

    def _make(self, chunk: int, counted: Counted, decision: Decision) -> list[DataEffect]:
        """What is to be made of it next, as far as that is here."""
        return [] if chunk in self._pieces.results else self._merge(chunk, counted, decision)

    def _merge(
        self, chunk: int, counted: Counted, decision: Decision, kind: type[Merge] = Merge
    ) -> list[DataEffect]:
        """Of what is included, if all of it is here."""
        shelf = self._pieces.held.get(chunk, {})
        if any(m not in shelf for m, _ in counted):
            return []
        self._merging.add(chunk)
        numbers = self.roles.plan.round_no, decision.decision_no, self._sender.first_chunk + chunk
        payloads = tuple(shelf[member].payload for member, _ in counted)
        return [kind(*numbers, payloads, tuple(weight for _, weight in counted))]

    def measure(self, chunk: int) -> list[DataEffect]:
        """A result is here: how long it is has to be known before I can say so."""
        if not self._pieces.measures:
            return []
        piece, number = self._pieces.results[chunk], self._sender.first_chunk + chunk
        return [Measure(self.roles.plan.round_no, number, piece.hash, piece.payload)]

    def on_calculated(self, effect: Calculated, made: object) -> list[DataEffect]:
        chunk = effect.chunk - self._sender.first_chunk
        if isinstance(effect, Weigh):
            assert isinstance(made, tuple)
            self.weighing.on_weighed(chunk, effect.members, made)
            return []  # what came of it is told with the progress
        if isinstance(effect, Measure):
            assert isinstance(made, float)
            self._pieces.lengths[chunk] = effect.hash, length_to_bytes(made)
            return []  # that one is told with the progress, too
        assert isinstance(made, bytes)
        if not self._deciding.is_newest(effect.decision_no):
            return []
        self._merging.discard(chunk)
        if not self.roles.makes(chunk):
            return []  # ownership moved while I computed
        self._pieces.results[chunk] = ChunkPiece(made, hash_bytes(made))
        self._pieces.merged[chunk] = self._pieces.results[chunk].hash
        return [*self._sender.spread(chunk), *self.measure(chunk)]

    def look_again(self) -> list[DataEffect]:
        """What may have become possible since time was told last."""
        return self.weigh_ready() if self.weighing.changed else []

    # ---- what came of it ---------------------------------------------------------------------------

    def is_summed(self, chunk: int) -> bool:
        """Contributions to it are needed no more."""
        return chunk in self._pieces.results

    def is_compared(self) -> bool:
        return self.weighing.is_complete(self._pieces.owned, self._refused)

    def dots(self) -> Dots | None:
        return self.weighing.report(self._pieces.owned, self._refused)

    @property
    def _refused(self) -> int:
        members = self.roles.plan.members
        return mask_of(members.index(member) for member in self._faults.refused)


# ---- member ------------------------------------------------------------------------------------------------

ASK_AT_ONCE = 8  # chunks asked of one peer in one go: a repair must not become a flood

Judged = tuple[Verdict, list[DataEffect]]  # what a frame is worth, and what follows from it


class MemberRound:
    roles_of: ClassVar[type[Roles]] = Roles
    owner_class: ClassVar[type[Owner]] = Owner

    def __init__(
        self,
        me: str,
        plan: Plan,
        run_tag: bytes,
        quiet_s: float,
        now: float,
        first_chunk: int = 0,
        compare: bool = False,
        measure: bool = False,
    ) -> None:
        self.me = me
        self.first_chunk = first_chunk
        self.plan, self.roles = plan, self.roles_of(me, plan)
        self.deciding = Deciding()
        self.pieces = RoundPieces(me, plan, measure)
        self.faults = MemberFaults()
        self._sender = Sender(self.roles, self.pieces, self.deciding, run_tag, first_chunk)
        self.owner = self.owner_class(self._sender, self.pieces, self.deciding, self.faults, compare)
        self._doubt = Doubt()
        self._answered_at: dict[tuple[str, FrameKind, int], float] = {}  # (asker, kind of want, chunk)
        self._quiet_s = quiet_s
        self.asking = ResultRequests(self.roles.near, quiet_s, now)

    # ---- the coordinator's words -------------------------------------------------------------------

    def on_plan(self, plan: Plan, now: float) -> list[DataEffect]:
        """Ownership moved.  Send my chunks to their new owners; serve what I already have as an owner."""
        if plan.epoch <= self.plan.epoch:
            return []
        before, self.plan = self.plan, plan
        self.roles = self._sender.roles = self.owner.roles = self.roles_of(self.me, plan)
        self.owner.weighing.changed = True
        self.asking.begin_anew(self.roles.near, now)
        kept = mask_from_bytes(plan.kept)
        elsewhere, effects = self.pieces.move(plan, kept), list[DataEffect]()
        for chunk in self.roles.kept_elsewhere(before):
            if chunk in self.pieces.mine:
                effects += self._sender.deliver(chunk)
        for chunk in elsewhere:
            if chunk in self.pieces.mine:
                effects += self._sender.deliver(chunk)
            if plan.owner_of(chunk) == self.me and chunk in self.pieces.results:
                # I hold a lost owner's result, which is proven: I give it to others and do not compute it again.  Whose
                # sum it is does not change by that: my signature is not on it.
                effects += self._sender.spread(chunk)
        return effects + self.owner.on_roots(before, kept) + self.owner.merge_ready()

    def on_decision(self, decision: Decision, now: float) -> list[DataEffect]:
        news = self.deciding.hear(decision)
        if news is DecisionNews.NONE:
            return []
        self.owner.weighing.active = self.owner.weighing.active and not self.deciding.is_made
        self.asking.start_patience(self.roles.near, now)
        if news is DecisionNews.STANDS:
            return []
        # Results of an earlier decision have other weights: they are worth nothing.
        self.pieces.forget_results()
        self._answered_at.clear()
        return self.owner.begin(decision)

    # ---- my own contribution -----------------------------------------------------------------------

    def on_encoded(self, payloads: Mapping[int, Payload]) -> list[DataEffect]:
        """Some of my chunks; the first are on their way before the last are encoded."""
        effects: list[DataEffect] = []
        for chunk, payload in payloads.items():
            self.pieces.mine[chunk] = ChunkPiece(payload, hash_bytes(payload))
            effects += self._sender.deliver(chunk) + self.owner.weigh_ready(chunk)
        return effects + self.owner.merge_ready()

    def on_sent_ahead(self, pieces: Mapping[int, ChunkPiece]) -> list[DataEffect]:
        """My contribution was encoded before the round began, and most owners have it."""
        self.pieces.mine.update(pieces)
        return [effect for chunk in self.pieces.owned for effect in self._sender.deliver(chunk)]

    # ---- frames from other members -----------------------------------------------------------------

    def is_early(self, sender: str, frame: Frame) -> bool:
        """It overtook the plan or the decision that explains it: worth keeping for a moment."""
        header, index = frame.header, frame.header.chunk - self.first_chunk
        if not 0 <= index < len(self.plan.owners):
            return False
        if header.kind == Kind.CONTRIBUTION:
            return not self.roles.takes(sender, index)
        return header.kind.overtakes and header.decision_no > self.deciding.number

    def on_frame(self, sender: str, frame: Frame, now: float) -> Judged:
        """A frame of THIS round whose payload already matched its hash."""
        header, index = frame.header, frame.header.chunk - self.first_chunk
        if sender not in self.roles.near or (header.kind in IN_GROUP and sender not in self.plan.members):
            return Verdict.UNAUTHORISED, []
        if not 0 <= index < len(self.plan.owners):
            return Verdict.MALFORMED, []
        match header.kind:
            case Kind.CONTRIBUTION:
                return self._on_contribution(sender, index, frame, now)
            case Kind.RESULT:
                return self._on_result(sender, index, frame, now)
            case Kind.WANT_CONTRIBUTION | Kind.WANT_RESULT:
                return self._on_want(sender, index, header, now)
            case _:
                return self._on_other(sender, index, frame, now)

    def _on_want(self, sender: str, chunk: int, header: Header, now: float) -> Judged:
        kind = header.kind.answer
        assert kind is not None
        if kind != Kind.CONTRIBUTION and not self.deciding.is_newest(header.decision_no):
            return Verdict.STALE, []
        key = (sender, header.kind, chunk)
        if now - self._answered_at.get(key, -self._quiet_s) < self._quiet_s / 2:
            # Nobody asks again so soon, and a question of 96 bytes must not draw megabytes without end.
            return Verdict.DUPLICATE, []
        piece = self._piece(kind, chunk)
        if piece is not None:
            self._answered_at[key] = now
        return Verdict.ACCEPTED, [self._sender.answer(sender, kind, chunk, piece)]

    def _piece(self, kind: FrameKind, chunk: int) -> ChunkPiece | None:
        """What I have of it to give."""
        return (self.pieces.mine if kind == Kind.CONTRIBUTION else self.pieces.results).get(chunk)

    def _on_contribution(self, sender: str, chunk: int, frame: Frame, now: float) -> Judged:
        if not self.roles.takes(sender, chunk):
            return Verdict.STALE, []
        self.asking.on_heard(sender, now)
        if sender in self.faults.refused:
            return Verdict.UNAUTHORISED, []
        if not self.pieces.shelve(chunk, sender, ChunkPiece(frame.payload, frame.header.hash)):
            return Verdict.DUPLICATE, []
        if self.plan.owner_of(chunk) != self.me:
            return Verdict.ACCEPTED, []
        return Verdict.ACCEPTED, self.owner.weigh_ready(chunk) + self.owner.merge_ready(chunk)

    def _on_result(self, sender: str, chunk: int, frame: Frame, now: float) -> Judged:
        if not self.deciding.is_newest(frame.header.decision_no):
            return Verdict.STALE, []
        if sender != self.roles.giver(chunk):
            return Verdict.STALE, []
        self.asking.on_heard(sender, now)
        if chunk in self.pieces.results:
            return Verdict.DUPLICATE, []
        self.pieces.results[chunk] = ChunkPiece(frame.payload, frame.header.hash)
        # Only in groups does an owner get a result from somebody else: it is for its group.
        passed_on = self._sender.spread(chunk) if self.plan.owner_of(chunk) == self.me else []
        return Verdict.ACCEPTED, [*passed_on, *self.owner.measure(chunk)]

    def _on_other(self, sender: str, chunk: int, frame: Frame, now: float) -> Judged:
        """For whoever sent it this is a round of another shape, if it is of a round at all."""
        return Verdict.STALE if frame.header.kind.of_round else Verdict.MALFORMED, []

    def refuse(self, sender: str, why: Verdict) -> None:
        """It sent something of no use: nothing of it counts here, it is not asked again, it should own nothing (P9)."""
        if sender in self.plan.members and sender != self.me:
            self.faults.refused.setdefault(sender, why)
            self.owner.weighing.changed = True
        if sender in self.roles.near:  # of another group it is the sums that are of no use
            self.faults.owners.add(sender)

    def on_spoiled(self, sender: str, spoiled: Spoiled) -> list[DataEffect]:
        """A frame arrived damaged during this round.  It is asked for once more; then its sender is out (P8)."""
        if sender not in self.roles.near or sender in self.faults.owners:
            return []
        if not self.faults.forgives(sender):
            self.refuse(sender, spoiled.verdict)
            return []
        header = spoiled.header
        if header is None or not header.kind.overtakes or (question := header.kind.question) is None:
            return []  # it does not say what it should have been: what is missing is asked for when time has passed
        index = header.chunk - self.first_chunk
        if not 0 <= index < len(self.plan.owners):
            return []
        return [SendFrame(sender, Frame(self._sender.header(question, index)))]

    # ---- the data plane's word, and time -----------------------------------------------------------

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        self.faults.unreached = unreached
        self.asking.on_arriving(arriving, now)

    def on_timer(self, now: float) -> list[DataEffect]:
        """Ask for what is missing from whoever has been quiet for too long."""
        effects = self.owner.look_again()
        self._doubt.look(self.deciding.is_made and len(self.pieces.measured) == len(self.plan.owners), now)
        for member in self.roles.near:
            if member != self.me and self.asking.is_due(member, now):
                wants = self._wants_of(member)
                if wants:
                    self.asking.on_asked(member, now)
                    effects += [SendFrame(member, Frame(header)) for header in wants[:ASK_AT_ONCE]]
        return effects

    def _wants_of(self, member: str) -> list[Header]:
        wants: list[Header] = []
        if member in self.faults.refused:
            pass
        elif self.deciding.may_count(member, self.plan.members):
            for chunk in self.pieces.owned:
                here = self.owner.is_summed(chunk) and self.deciding.is_made
                if member not in self.pieces.held.get(chunk, {}) and not here:
                    wants.append(self._sender.header(Kind.WANT_CONTRIBUTION, chunk))
        if self.deciding.is_made:
            for chunk in self.plan.chunks_of(member):
                if chunk not in self.pieces.results:
                    wants.append(self._sender.header(Kind.WANT_RESULT, chunk))
        return wants

    # ---- reports -----------------------------------------------------------------------------------

    @property
    def given(self) -> Mapping[FrameKind, Mapping[int, ChunkPiece]]:
        """What of my own goes into results, chunk by chunk, by the frames that bring it."""
        return {Kind.CONTRIBUTION: self.pieces.mine}

    def codec_of(self, kind: FrameKind, sender: str) -> str:
        """In which its bytes are due here; empty: that is not for me to say."""
        mine = kind == Kind.CONTRIBUTION and sender in self.plan.members
        return self.plan.codec_of(sender) if mine else ""

    def progress(self) -> Progress:
        pieces = self.pieces
        got = {chunk: piece.hash + pieces.length_of(chunk) for chunk, piece in pieces.measured.items()}
        merged = {chunk: digest for chunk, digest in pieces.merged.items() if chunk in got}
        return Progress(
            pieces.proofs(),
            dict(sorted(self.faults.refused.items())),
            tuple(sorted(self.faults.cut_off(self.roles.near, self.asking.in_vain))),
            merged,
            pieces.inputs(merged, self.deciding.counted(self.plan.members)),
            (mask_of(got), combined(got.items())),
            self.owner.dots(),
            b"".join(pieces.length_of(chunk) for chunk in sorted(merged)),
            by_owner(self.plan, got) if self._doubt.is_on else {},
        )

    @property
    def complete(self) -> tuple[bool, bool, bool]:
        """(contributions that I own are here, they are compared and summed, every result is here): told at once."""
        held, due, got, chunks = self.counts
        return held >= due, self.owner.is_compared(), got == chunks and len(self.pieces.measured) == got

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(contributions here, contributions due here, results here, results in all)."""
        # Counted, not looked up: this is asked after every frame.
        due = len(self.pieces.owned) * (len(self.plan.members) - len(self.faults.refused))
        return self.pieces.shelved, due, len(self.pieces.results), len(self.plan.owners)

    @property
    def owing(self) -> set[str]:
        """Members that are sending to me now, or should be."""
        owing: set[str] = set()
        if self.deciding.newest is not None:
            owing = {self.roles.giver(chunk) for chunk in self.pieces.missing_results()} - {self.me}
        if self.deciding.is_made:
            return owing
        heard = set(self.plan.members) - {self.me, *self.faults.refused}
        held = self.pieces.held
        return owing | {m for m in heard if any(m not in held.get(c, ()) for c in self.pieces.owned)}


# ---- shape -------------------------------------------------------------------------------------------------
# Which class of a round a plan asks for: a flat one, or one in groups, which is a mode. Pure.

IN_GROUPS = "farflung.collectives.mesh.mesh_round"


def shape(in_groups: bool) -> type[MemberRound] | None:
    """None: that mode was taken out."""
    module = module_of(IN_GROUPS) if in_groups else None
    found: type[MemberRound] | None = module.MeshRound if module is not None else None
    return found if in_groups else MemberRound


def class_of(plan: Plan, me: str, chunks: int) -> type[MemberRound] | None:
    """None: it is no plan of so many chunks in which I have a part, or I can't take part in it."""
    found = shape(in_groups=bool(plan.column))
    return found if found is not None and found.roles_of(me, plan).fits(chunks) else None
