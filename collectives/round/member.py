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
here or of `Roles` gives the answer of a flat round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import ClassVar

from farflung.collectives.round.effects import DataEffect, Measure, Merge, SendFrame, Weigh
from farflung.collectives.round.pieces import (
    IN_GROUP,
    OVERTAKING,
    ChunkPiece,
    Counted,
    Progress,
    Roles,
    RoundPieces,
    Weighing,
    by_owner,
    encoding_order,
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
from farflung.protocol.frames import (
    ANSWER_TO,
    WANT_FOR,
    Frame,
    FrameKind,
    Header,
    Kind,
    Payload,
    Spoiled,
    with_payload,
)
from farflung.protocol.process.mode_folders import module_of
from farflung.protocol.round_words import Decision, Plan

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

    def counted(self, members: Sequence[str]) -> list[tuple[str, float]]:
        """(member, weight) of all that go into a sum, in its order.  Ask only when there is a decision."""
        weights = self.newest.weights if self.newest is not None else ()
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


# ---- member ------------------------------------------------------------------------------------------------

ASK_AT_ONCE = 8  # chunks asked of one peer in one go: a repair must not become a flood


class MemberRound:
    roles_of: ClassVar[type[Roles]] = Roles

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
        self.run_tag = run_tag
        self._deciding = Deciding()
        self.pieces = RoundPieces(me, plan, measure)
        self.faults = MemberFaults()
        self.weighing = Weighing(full_mask(len(plan.members)), compare)
        self._doubt = Doubt()
        self._merging: set[int] = set()
        self._answered_at: dict[tuple[str, FrameKind, int], float] = {}  # (asker, kind of want, chunk)
        self._quiet_s = quiet_s
        self._asking = ResultRequests(self.roles.near, quiet_s, now)

    # ---- the coordinator's words -------------------------------------------------------------------

    def on_plan(self, plan: Plan, now: float) -> list[DataEffect]:
        """Ownership moved.  Send my chunks to their new owners; serve what I already have as an owner."""
        if plan.epoch <= self.plan.epoch:
            return []
        before, self.plan, self.roles = self.plan, plan, self.roles_of(self.me, plan)
        self.weighing.changed = True
        self._asking.begin_anew(self.roles.near, now)
        kept = mask_from_bytes(plan.kept)
        elsewhere = self.pieces.move(plan, kept)
        effects = self._on_spares(before)
        for chunk in elsewhere:
            if chunk in self.pieces.mine:
                effects += self._deliver(chunk)
            if plan.owner_of(chunk) == self.me and chunk in self.pieces.results:
                # I hold a lost owner's result, which is proven: I give it to others and do not compute it again.  Whose
                # sum it is does not change by that: my signature is not on it.
                effects += self._spread(chunk, self.pieces.results[chunk])
        return effects + self._on_roots(before, kept) + self._merge_ready()

    @property
    def decision(self) -> Decision | None:
        """By which results are made now, whether or not it stands."""
        return self._deciding.newest

    def _is_newest(self, decision_no: int) -> bool:
        return self.decision is not None and decision_no == self.decision.decision_no

    @property
    def decided_no(self) -> int:
        """Of the decision that stands; 0: I have not heard of it."""
        return self._deciding.made_no

    def on_decision(self, decision: Decision, now: float) -> list[DataEffect]:
        news = self._deciding.hear(decision)
        if news is DecisionNews.NONE:
            return []
        self.weighing.active = self.weighing.active and not self._deciding.is_made
        self._asking.start_patience(self.roles.near, now)
        if news is DecisionNews.STANDS:
            return []
        self._begin(decision)
        return self._merge_ready()

    def _begin(self, decision: Decision) -> None:
        """Results of an earlier decision have other weights: they are worth nothing."""
        self.pieces.forget_results()
        self._merging.clear()
        self._answered_at.clear()

    def on_may_encode(self, decision_no: int) -> None:
        """The coordinator has seen what was to be seen before results of this decision are made."""

    # ---- my own arithmetic -------------------------------------------------------------------------

    @property
    def order(self) -> list[int]:
        return encoding_order(self.plan, self.me)

    def on_encoded(self, payloads: Mapping[int, Payload]) -> list[DataEffect]:
        """Some of my chunks; the first are on their way before the last are encoded."""
        effects: list[DataEffect] = []
        for chunk, payload in payloads.items():
            self.pieces.mine[chunk] = ChunkPiece(payload, hash_bytes(payload))
            effects += self._deliver(chunk) + self._weigh_ready(chunk)
        return effects + self._merge_ready()

    def on_sent_ahead(self, pieces: Mapping[int, ChunkPiece]) -> list[DataEffect]:
        """My contribution was encoded before the round began, and most owners have it."""
        self.pieces.mine.update(pieces)
        return [effect for chunk in self.pieces.owned for effect in self._deliver(chunk)]

    def on_calculated(self, effect: Merge | Weigh | Measure, made: object) -> list[DataEffect]:
        if isinstance(effect, Weigh):
            assert isinstance(made, tuple)
            index = effect.chunk - self.first_chunk
            self.weighing.on_weighed(index, effect.members, made)
            return []  # what came of it is told with the progress
        if isinstance(effect, Measure):
            assert isinstance(made, float)
            self.pieces.lengths[effect.chunk - self.first_chunk] = effect.hash, length_to_bytes(made)
            return []  # that one is told with the progress, too
        assert isinstance(made, bytes)
        return self.on_merged(effect.decision_no, effect.chunk, made)

    def on_merged(self, decision_no: int, chunk: int, payload: Payload) -> list[DataEffect]:
        if not self._is_newest(decision_no):
            return []
        index = chunk - self.first_chunk
        self._merging.discard(index)
        if not self.roles.makes(index):
            return []  # ownership moved while I computed
        return self._publish(index, ChunkPiece(payload, hash_bytes(payload)))

    # ---- frames from other members -----------------------------------------------------------------

    def is_early(self, sender: str, frame: Frame) -> bool:
        """It overtook the plan or the decision that explains it: worth keeping for a moment."""
        header, index = frame.header, frame.header.chunk - self.first_chunk
        if not 0 <= index < len(self.plan.owners):
            return False
        if header.kind == Kind.CONTRIBUTION:
            return not self.roles.takes(sender, index)
        return header.kind in OVERTAKING and header.decision_no > self._deciding.number

    def on_frame(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        """A frame of THIS round whose payload already matched its hash."""
        header, index = frame.header, frame.header.chunk - self.first_chunk
        if sender not in self.roles.near or (header.kind in IN_GROUP and sender not in self.plan.members):
            return Verdict.UNAUTHORISED, []
        if not 0 <= index < len(self.plan.owners):
            return Verdict.MALFORMED, []
        match header.kind:
            case Kind.CONTRIBUTION:
                return self._on_contribution(sender, frame, now)
            case Kind.RESULT:
                return self._on_result(sender, frame, now)
            case Kind.WANT_CONTRIBUTION | Kind.WANT_RESULT | Kind.WANT_SUM:
                return self._on_want(sender, header, now)
            case _:
                return self._on_other(sender, frame, now)

    def _on_want(self, sender: str, header: Header, now: float) -> tuple[Verdict, list[DataEffect]]:
        index = header.chunk - self.first_chunk
        decided = header.kind in (Kind.WANT_RESULT, Kind.WANT_SUM)
        if decided and not self._is_newest(header.decision_no):
            return Verdict.STALE, []
        if not self.roles.may_ask(sender, header.kind, index):
            return Verdict.STALE, []  # my plan is older than its, or the other way round
        key = (sender, header.kind, index)
        if now - self._answered_at.get(key, -self._quiet_s) < self._quiet_s / 2:
            # Nobody asks again so soon, and a question of 96 bytes must not draw megabytes without end.
            return Verdict.DUPLICATE, []
        kind = ANSWER_TO[header.kind]
        piece = self._made(kind, index)
        if piece is not None:
            self._answered_at[key] = now
        return Verdict.ACCEPTED, self._answer(sender, kind, index, piece)

    def _on_contribution(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        chunk = frame.header.chunk - self.first_chunk
        is_mine = self.plan.owner_of(chunk) == self.me
        if not self.roles.takes(sender, chunk):
            return Verdict.STALE, []
        self._asking.on_heard(sender, now)
        if sender in self.faults.refused:
            return Verdict.UNAUTHORISED, []
        if not self.pieces.shelve(chunk, sender, ChunkPiece(frame.payload, frame.header.hash)):
            return Verdict.DUPLICATE, []
        follows = self._weigh_ready(chunk) + self._merge_ready(chunk) if is_mine else []
        return Verdict.ACCEPTED, follows

    def on_missing(self, sender: str, now: float) -> None:
        """It has not got it yet, but it answers."""
        if sender in self.roles.near:
            self._asking.on_heard(sender, now)

    def refuse(self, sender: str, why: Verdict) -> None:
        """It sent something of no use: nothing of it counts here, it is not asked again, it should own nothing (P9)."""
        if sender in self.plan.members and sender != self.me:
            self.faults.refused.setdefault(sender, why)
            self.weighing.changed = True
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
        if header is None or header.kind not in OVERTAKING:
            return []  # it does not say what it should have been: what is missing is asked for when time has passed
        index = header.chunk - self.first_chunk
        if not 0 <= index < len(self.plan.owners):
            return []
        return [SendFrame(sender, Frame(self._header(WANT_FOR[header.kind], index)))]

    def _on_result(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        chunk = frame.header.chunk - self.first_chunk
        if not self._is_newest(frame.header.decision_no):
            return Verdict.STALE, []
        if sender != self.roles.giver(chunk):
            return Verdict.STALE, []
        self._asking.on_heard(sender, now)
        if chunk in self.pieces.results:
            return Verdict.DUPLICATE, []
        self.pieces.results[chunk] = ChunkPiece(frame.payload, frame.header.hash)
        return Verdict.ACCEPTED, self._on_given(chunk)

    # ---- the data plane's word, and time -----------------------------------------------------------

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        self.faults.unreached = unreached
        self._asking.on_arriving(arriving, now)

    def on_timer(self, now: float) -> list[DataEffect]:
        """Ask for what is missing from whoever has been quiet for too long."""
        effects = self._look_again()
        self._doubt.look(self._deciding.is_made and len(self.pieces.measured) == len(self.plan.owners), now)
        for member in self.roles.near:
            if member != self.me and self._asking.is_due(member, now):
                wants = self._wants_of(member)
                if wants:
                    self._asking.on_asked(member, now)
                    effects += [SendFrame(member, Frame(header)) for header in wants[:ASK_AT_ONCE]]
        return effects

    def _wants_of(self, member: str) -> list[Header]:
        wants: list[Header] = []
        if member in self.faults.refused:
            pass
        elif self._deciding.may_count(member, self.plan.members):
            for chunk in self.pieces.owned:
                here = self._is_summed(chunk) and self._deciding.is_made
                if member not in self.pieces.held.get(chunk, {}) and not here:
                    wants.append(self._header(Kind.WANT_CONTRIBUTION, chunk))
        if self._deciding.is_made:
            for chunk in self.plan.chunks_of(member):
                if chunk not in self.pieces.results:
                    wants.append(self._header(Kind.WANT_RESULT, chunk))
        return wants

    # ---- reports -----------------------------------------------------------------------------------

    def progress(self) -> Progress:
        pieces = self.pieces
        got = {chunk: piece.hash + pieces.length_of(chunk) for chunk, piece in pieces.measured.items()}
        merged = {chunk: digest for chunk, digest in pieces.merged.items() if chunk in got}
        return Progress(
            pieces.proofs(),
            dict(sorted(self.faults.refused.items())),
            tuple(sorted(self.faults.cut_off(self.roles.near, self._asking.in_vain))),
            merged,
            self._inputs(merged),
            (mask_of(got), combined(got.items())),
            self.weighing.report(pieces.owned, self._refused_mask),
            b"".join(pieces.length_of(chunk) for chunk in sorted(merged)),
            by_owner(self.plan, got) if self._doubt.is_on else {},
        )

    def _inputs(self, chunks: Collection[int]) -> bytes:
        """Which contributions went into what I made of these chunks; empty if that is nothing."""
        if self.decision is None:
            return b""
        return self.pieces.inputs(chunks, self.decision.included(self.plan.members))

    @property
    def complete(self) -> tuple[bool, bool, bool]:
        """(contributions that I own are here, they are compared and summed, every result is here): told at once."""
        held, due, got, chunks = self.counts
        return held >= due, self._is_compared(), got == chunks and len(self.pieces.measured) == got

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
        if self.decision is not None:
            owing = {self.roles.giver(chunk) for chunk in self.pieces.missing_results()} - {self.me}
        if self._deciding.is_made:
            return owing
        heard = set(self.plan.members) - {self.me, *self.faults.refused}
        held = self.pieces.held
        return owing | {m for m in heard if any(m not in held.get(c, ()) for c in self.pieces.owned)}

    # ---- helpers -----------------------------------------------------------------------------------

    def _header(self, kind: FrameKind, index: int) -> Header:
        chunk, number = self.first_chunk + index, self._deciding.number
        return Header(kind, self.run_tag, self.plan.round_no, number, self.plan.version, chunk)

    def _deliver(self, chunk: int) -> list[DataEffect]:
        """My contribution of one chunk goes to its owner; what I own myself on my shelf, and to a keeper if any."""
        to, mine = self.plan.owner_of(chunk), self.pieces.mine[chunk]
        if to != self.me:
            return self._answer(to, Kind.CONTRIBUTION, chunk, mine)
        self.pieces.shelve(chunk, self.me, mine)
        keeper = self.roles.keeper(chunk)
        return self._answer(keeper, Kind.CONTRIBUTION, chunk, mine) if keeper else []

    def _answer(self, to: str, kind: FrameKind, chunk: int, piece: ChunkPiece | None) -> list[DataEffect]:
        if piece is None:
            return [SendFrame(to, Frame(self._header(Kind.MISSING, chunk)))]
        return [SendFrame(to, with_payload(self._header(kind, chunk), piece.payload, piece.hash))]

    def _publish(self, chunk: int, piece: ChunkPiece) -> list[DataEffect]:
        self.pieces.results[chunk] = piece
        self.pieces.merged[chunk] = piece.hash
        return [*self._spread(chunk, piece), *self._measure(chunk)]

    def _measure(self, chunk: int) -> list[DataEffect]:
        """A result is here: how long it is has to be known before I can say so."""
        if not self.pieces.measures:
            return []
        piece = self.pieces.results[chunk]
        return [Measure(self.plan.round_no, self.first_chunk + chunk, piece.hash, piece.payload)]

    def _spread(self, chunk: int, piece: ChunkPiece) -> list[DataEffect]:
        effects: list[DataEffect] = []
        for member in self.roles.receivers(chunk):
            if member != self.me:
                effects += self._answer(member, Kind.RESULT, chunk, piece)
        return effects

    @property
    def _refused_mask(self) -> int:
        return mask_of(self.plan.members.index(member) for member in self.faults.refused)

    def _weigh_ready(self, only: int | None = None) -> list[DataEffect]:
        """Compare what is here, chunk by chunk, where nothing is missing for it."""
        self.weighing.changed = self.weighing.changed and only is not None
        held, chunks = self.pieces.held, self.pieces.owned if only is None else [only]
        shelves = {chunk: held.get(chunk, {}) for chunk in chunks}
        return [*self.weighing.weigh_all(self.plan, shelves, self._refused_mask, self.first_chunk)]

    def _merge_ready(self, only: int | None = None) -> list[DataEffect]:
        """Start the sum of every chunk of mine whose included contributions are all here."""
        if self.decision is None:
            return []
        counted, effects = self._deciding.counted(self.plan.members), list[DataEffect]()
        for chunk in self.pieces.owned if only is None else [only]:
            if chunk not in self._merging:
                effects += self._make(chunk, counted, self.decision)
        return effects

    def _merge(
        self, chunk: int, counted: Counted, decision: Decision, kind: type[Merge] = Merge
    ) -> list[DataEffect]:
        """Of what is included, if all of it is here."""
        shelf = self.pieces.held.get(chunk, {})
        if any(m not in shelf for m, _ in counted):
            return []
        self._merging.add(chunk)
        numbers = self.plan.round_no, decision.decision_no, self.first_chunk + chunk
        payloads = tuple(shelf[member].payload for member, _ in counted)
        return [kind(*numbers, payloads, tuple(weight for _, weight in counted))]

    # ---- where a round in groups does something else -----------------------------------------------

    def _make(self, chunk: int, counted: Counted, decision: Decision) -> list[DataEffect]:
        """What is to be made of it next, as far as that is here."""
        return [] if chunk in self.pieces.results else self._merge(chunk, counted, decision)

    def _on_spares(self, before: Plan) -> list[DataEffect]:
        """Ownership moved: what others keep of mine goes to whoever keeps it now."""
        return []

    def _on_roots(self, before: Plan, kept: int) -> list[DataEffect]:
        """Ownership moved, in other groups too."""
        return []

    def _on_given(self, chunk: int) -> list[DataEffect]:
        """Its result came."""
        return self._measure(chunk)

    def _on_other(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        return Verdict.STALE if frame.header.kind == Kind.SUM else Verdict.MALFORMED, []

    def _made(self, kind: FrameKind, chunk: int) -> ChunkPiece | None:
        return (self.pieces.results if kind == Kind.RESULT else self.pieces.mine).get(chunk)

    def _is_summed(self, chunk: int) -> bool:
        """Contributions to it are needed no more."""
        return chunk in self.pieces.results

    def _is_compared(self) -> bool:
        return self.weighing.is_complete(self.pieces.owned, self._refused_mask)

    def _look_again(self) -> list[DataEffect]:
        """What may have become possible since time was told last."""
        return self._weigh_ready() if self.weighing.changed else []

    @property
    def sums(self) -> Mapping[int, ChunkPiece]:
        """What I added up of each chunk for somebody else, who makes the result."""
        return {}


# ---- shape -------------------------------------------------------------------------------------------------
# Which class of a round a plan asks for: a flat one, or one in groups, which is a mode. Pure.

IN_GROUPS = "farflung.collectives.mesh.mesh_round"


def class_of(plan: Plan, me: str, chunks: int) -> type[MemberRound] | None:
    """None: it is no plan of so many chunks in which I have a part, or I can't take part in it."""
    found: type[MemberRound] | None = MemberRound
    if plan.column:
        module = module_of(IN_GROUPS)
        found = module.MeshRound if module is not None else None
    return found if found is not None and found.roles_of(me, plan).fits(chunks) else None
