"""One round at one member: as sender, as owner, and as receiver.  A pure state machine.

Owned by the peer machine, which feeds it the coordinator's words (plan, decision), frames from other
members, finished arithmetic, and time; it returns effects.  It must not know sockets, clocks, tensors or
the coordinator: it never decides that a round commits, it only reports what it holds.

The rules, in the order in which a round meets them:
  * A contribution is encoded once and its bytes kept until the round is over: any owner, first or second,
    receives the same bytes.
  * An owner merges only by a decision, be it a foreseen one (decision_news.py), and only when it holds every included
    contribution of the chunk.  Order and weights are fixed by plan and decision, so two owners produce the same bytes.
  * Where contributions are compared, an owner computes the dot products of each chunk once all contributions
    to it are here, and reports their sums before the decision; a root does so with the sums of groups, after it.
  * Nothing is asked for twice in a hurry: what is missing is asked for after `quiet_s` without news.

Inside, a chunk is its index within the round's fragment, as in the plan; frames and effects carry its number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from farflung.collectives.round.decision_news import Deciding, DecisionNews, Doubt
from farflung.collectives.round.dot_products import Weighing
from farflung.collectives.round.effects import (
    DataEffect,
    Measure,
    Merge,
    MergeGroup,
    SendFrame,
    Weigh,
    WeighSums,
)
from farflung.collectives.round.mesh_backups import keeps, moved, proofs, spare_of
from farflung.collectives.round.mesh_columns import GroupSumsHere, MeshColumns
from farflung.collectives.round.pieces import (
    ANSWER_TO,
    IN_GROUP,
    OVERTAKING,
    WANT_FOR,
    ChunkPiece,
    Progress,
    by_owner,
    encoding_order,
)
from farflung.collectives.round.result_requests import ResultRequests
from farflung.protocol.digests import (
    bits,
    combined,
    full_mask,
    hash_bytes,
    length_to_bytes,
    mask_from_bytes,
    mask_of,
)
from farflung.protocol.frames import Frame, Header, Kind, Payload, Spoiled, with_payload
from farflung.protocol.round_words import SUM_TAG_BYTES, Decision, Plan
from farflung.protocol.signed_words import inputs_of
from farflung.protocol.verdicts import Verdict

ASK_AT_ONCE = 8  # chunks asked of one peer in one go: a repair must not become a flood
SPOILED_FORGIVEN = 1  # damaged frames of a member: asked for again; one more and it is out


class MemberRound:
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
        self.plan = plan
        self.run_tag = run_tag
        self._deciding = Deciding()
        self.mine: dict[int, ChunkPiece] = {}  # my contribution, by chunk, as far as it is encoded
        self.held: dict[int, dict[str, ChunkPiece]] = {}  # chunk -> member -> contribution
        self.results: dict[int, ChunkPiece] = {}
        self.merged: dict[int, bytes] = {}  # what I made myself, by its hash
        self.columns = MeshColumns(me, plan)
        self.sums = GroupSumsHere()  # of groups, where there are several
        self._freed = False  # results of these may be encoded at last
        self.weighing = Weighing(full_mask(len(plan.members)), compare)
        # Chunk -> (a result's hash, its length), where the gradient is clipped: by both together I prove to hold it.
        self._lengths: dict[int, tuple[bytes, bytes]] = {}
        self._measures = measure
        self._doubt = Doubt()
        self._merging: set[int] = set()
        self._my_chunks = plan.chunks_of(me)
        self._shelved = 0  # contributions on my shelves
        self.refused: dict[str, Verdict] = {}  # members that sent bytes of no use, and why
        self.unreached: set[str] = set()  # something waits for them and can't leave
        self._faulty: set[str] = set()  # owners whose results do not match their hash
        self._spoiled: dict[str, int] = {}
        self._answered_at: dict[tuple[str, Kind, int], float] = {}  # (asker, kind of want, chunk)
        self._quiet_s = quiet_s
        self._asking = ResultRequests(self._near, quiet_s, now)

    # ---- the coordinator's words -------------------------------------------------------------------

    def on_plan(self, plan: Plan, now: float) -> list[DataEffect]:
        """Ownership moved.  Send my chunks to their new owners; serve what I already have as an owner."""
        if plan.epoch <= self.plan.epoch:
            return []
        before, self.plan = self.plan, plan
        columns, self.columns = self.columns, MeshColumns(self.me, plan)
        self.weighing.changed = True
        self._my_chunks = plan.chunks_of(self.me)
        self._asking.begin_anew(self._near, now)
        # A living owner loses chunks too, when others can't reach it: what it holds of them counts no more.
        self._shelved = sum(len(self.held.get(chunk, ())) for chunk in self._my_chunks)
        effects: list[DataEffect] = []
        kept = mask_from_bytes(plan.kept)
        elsewhere = [c for c in range(len(plan.owners)) if before.owner_of(c) != plan.owner_of(c)]
        for chunk in moved(before, plan, [chunk for chunk in self._my_chunks if chunk in self.mine]):
            effects += self._deliver(chunk)
        for chunk in elsewhere:
            self.merged.pop(chunk, None)
            if not kept >> chunk & 1:
                self.results.pop(chunk, None)  # nobody has proven these bytes: they are made again
            if chunk in self.mine:
                effects += self._deliver(chunk)
            if plan.owner_of(chunk) == self.me and chunk in self.results:
                # I hold a lost owner's result, which is proven: I give it to others and do not compute it again.  Whose
                # sum it is does not change by that: my signature is not on it.
                effects += self._spread(chunk, self.results[chunk])
        return effects + self._on_roots(columns, kept) + self._merge_ready()

    def _on_roots(self, before: MeshColumns, kept: int) -> list[DataEffect]:
        """Sums of chunks that I still own go elsewhere now."""
        effects: list[DataEffect] = []
        for chunk in self._my_chunks:
            root = self.columns.root(chunk)
            if chunk not in before.rows or root == before.root(chunk):
                continue
            if not kept >> chunk & 1:
                self.results.pop(chunk, None)
                self.merged.pop(chunk, None)
            elif root == self.me and chunk in self.results:
                effects += self._spread(chunk, self.results[chunk])
            effects += self._pass_sum_on(chunk)
        return effects

    @property
    def decision(self) -> Decision | None:
        """By which results are made now, whether or not it stands."""
        return self._deciding.newest

    @property
    def decided_no(self) -> int:
        """Of the decision that stands; 0: I have not heard of it."""
        return self._deciding.made_no

    def on_decision(self, decision: Decision, now: float) -> list[DataEffect]:
        news = self._deciding.hear(decision)
        if news is DecisionNews.NONE:
            return []
        self.weighing.active = self.weighing.active and not self._deciding.is_made
        self._asking.start_patience(self._near, now)
        if news is DecisionNews.STANDS:
            return []
        self.results.clear()  # results of an earlier decision have other weights: they are worth nothing
        self.merged.clear()
        self.sums.begin(decision)
        self._merging.clear()
        self._answered_at.clear()
        return self._merge_ready()

    def on_may_encode(self, decision_no: int) -> None:
        """The coordinator has seen the dot products of the sums of this decision."""
        self._freed = self.sums.on_may_encode(decision_no) or self._freed

    # ---- my own arithmetic -------------------------------------------------------------------------

    @property
    def order(self) -> list[int]:
        return encoding_order(self.plan, self.me)

    def on_encoded(self, payloads: Mapping[int, Payload]) -> list[DataEffect]:
        """Some of my chunks; the first are on their way before the last are encoded."""
        effects: list[DataEffect] = []
        for chunk, payload in payloads.items():
            self.mine[chunk] = ChunkPiece(payload, hash_bytes(payload))
            effects += self._deliver(chunk) + self._weigh_ready(chunk)
        return effects + self._merge_ready()

    def on_sent_ahead(self, pieces: Mapping[int, ChunkPiece]) -> list[DataEffect]:
        """My contribution was encoded before the round began, and most owners have it."""
        self.mine.update(pieces)
        return [effect for chunk in self._my_chunks for effect in self._deliver(chunk)]

    def on_calculated(self, effect: Merge | Weigh | Measure, made: object) -> list[DataEffect]:
        if isinstance(effect, Weigh):
            assert isinstance(made, tuple)
            index = effect.chunk - self.first_chunk
            if isinstance(effect, WeighSums):
                self.sums.on_weighed(effect.decision_no, index, effect.members, made)
            else:
                self.weighing.on_weighed(index, effect.members, made)
            return []  # what came of it is told with the progress
        if isinstance(effect, Measure):
            assert isinstance(made, float)
            self._lengths[effect.chunk - self.first_chunk] = effect.hash, length_to_bytes(made)
            return []  # that one is told with the progress, too
        assert isinstance(made, bytes)
        if isinstance(effect, MergeGroup):
            return self._on_summed(effect.decision_no, effect.chunk, made)
        return self.on_merged(effect.decision_no, effect.chunk, made)

    @property
    def _near(self) -> list[str]:
        """Everybody that I exchange frames with in this round."""
        return [*self.plan.members, *sorted(self.columns.peers)]

    @property
    def encoded(self) -> bool:
        return len(self.mine) == len(self.plan.owners)

    def hashes(self) -> bytes:
        """Of all my chunks, once they are encoded."""
        return b"".join(self.mine[chunk].hash for chunk in range(len(self.plan.owners)))

    def on_merged(self, decision_no: int, chunk: int, payload: Payload) -> list[DataEffect]:
        if self.decision is None or decision_no != self.decision.decision_no:
            return []
        index = chunk - self.first_chunk
        self._merging.discard(index)
        if self.plan.owner_of(index) != self.me or self.columns.root(index) != self.me:
            return []  # ownership moved while I computed
        return self._publish(index, ChunkPiece(payload, hash_bytes(payload)))

    def _on_summed(self, decision_no: int, chunk: int, payload: Payload) -> list[DataEffect]:
        """What my group adds to the result."""
        if self.decision is None or decision_no != self.decision.decision_no:
            return []
        index = chunk - self.first_chunk
        self._merging.discard(index)
        self.sums.put(index, self.columns.group, ChunkPiece(payload, hash_bytes(payload)))
        return self._pass_sum_on(index) + self._merge_ready(index)

    def _pass_sum_on(self, chunk: int) -> list[DataEffect]:
        """To the root, if that is somebody else."""
        piece, root = self.sums.get(chunk, self.columns.group), self.columns.root(chunk)
        if piece is None or root == self.me or self.plan.owner_of(chunk) != self.me:
            return []
        return self._answer(root, Kind.SUM, chunk, piece)

    # ---- frames from other members -----------------------------------------------------------------

    def is_early(self, sender: str, frame: Frame) -> bool:
        """It overtook the plan or the decision that explains it: worth keeping for a moment."""
        header, index = frame.header, frame.header.chunk - self.first_chunk
        if not 0 <= index < len(self.plan.owners):
            return False
        if header.kind == Kind.CONTRIBUTION:
            return self.plan.owner_of(index) != self.me and not keeps(self.plan, sender, index)
        known = self._deciding.number
        if header.kind == Kind.SUM and not self._is_root_of(index):
            return header.decision_no >= known
        return header.kind in OVERTAKING and header.decision_no > known

    def _is_root_of(self, index: int) -> bool:
        return self.plan.owner_of(index) == self.me and self.columns.root(index) == self.me

    def on_frame(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        """A frame of THIS round whose payload already matched its hash."""
        header, index = frame.header, frame.header.chunk - self.first_chunk
        if sender not in self._near or (header.kind in IN_GROUP and sender not in self.plan.members):
            return Verdict.UNAUTHORISED, []
        if not 0 <= index < len(self.plan.owners):
            return Verdict.MALFORMED, []
        match header.kind:
            case Kind.CONTRIBUTION:
                return self._on_contribution(sender, frame, now)
            case Kind.RESULT:
                return self._on_result(sender, frame, now)
            case Kind.SUM:
                return self._on_sum(sender, frame, now)
            case Kind.WANT_CONTRIBUTION | Kind.WANT_RESULT | Kind.WANT_SUM:
                return self._on_want(sender, header, now)
            case _:
                return Verdict.MALFORMED, []

    def _on_want(self, sender: str, header: Header, now: float) -> tuple[Verdict, list[DataEffect]]:
        index = header.chunk - self.first_chunk
        decided = header.kind in (Kind.WANT_RESULT, Kind.WANT_SUM)
        if decided and (self.decision is None or header.decision_no != self.decision.decision_no):
            return Verdict.STALE, []
        if header.kind == Kind.WANT_SUM and sender != self.columns.root(index):
            return Verdict.STALE, []  # my plan is older than its, or the other way round
        key = (sender, header.kind, index)
        if now - self._answered_at.get(key, -self._quiet_s) < self._quiet_s / 2:
            # Nobody asks again so soon, and a question of 96 bytes must not draw megabytes without end.
            return Verdict.DUPLICATE, []
        kind = ANSWER_TO[header.kind]
        if kind == Kind.SUM:
            piece = self.sums.get(index, self.columns.group)
        else:
            piece = (self.results if kind == Kind.RESULT else self.mine).get(index)
        if piece is not None:
            self._answered_at[key] = now
        return Verdict.ACCEPTED, self._answer(sender, kind, index, piece)

    def _on_sum(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        chunk = frame.header.chunk - self.first_chunk
        if self.decision is None or frame.header.decision_no != self.decision.decision_no:
            return Verdict.STALE, []
        group = self.columns.group_of(sender, chunk)
        if group is None or not self._is_root_of(chunk):
            return Verdict.STALE, []
        self._asking.on_heard(sender, now)
        if sender in self._faulty:
            return Verdict.UNAUTHORISED, []
        if not self.sums.put(chunk, group, ChunkPiece(frame.payload, frame.header.hash)):
            return Verdict.DUPLICATE, []
        return Verdict.ACCEPTED, self._merge_ready(chunk)

    def _on_contribution(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        chunk = frame.header.chunk - self.first_chunk
        is_mine = self.plan.owner_of(chunk) == self.me
        if not is_mine and not keeps(self.plan, sender, chunk):
            return Verdict.STALE, []
        self._asking.on_heard(sender, now)
        shelf = self.held.setdefault(chunk, {})
        if sender in self.refused:
            return Verdict.UNAUTHORISED, []
        if sender in shelf:
            return Verdict.DUPLICATE, []
        shelf[sender] = ChunkPiece(frame.payload, frame.header.hash)
        self._shelved += is_mine
        follows = self._weigh_ready(chunk) + self._merge_ready(chunk) if is_mine else []
        return Verdict.ACCEPTED, follows

    def on_missing(self, sender: str, now: float) -> None:
        """It has not got it yet, but it answers."""
        if sender in self._near:
            self._asking.on_heard(sender, now)

    def refuse(self, sender: str, why: Verdict) -> None:
        """It sent something of no use: nothing of it counts here, it is not asked again, it should own nothing (P9)."""
        if sender in self.plan.members and sender != self.me:
            self.refused.setdefault(sender, why)
            self.weighing.changed = True
        if sender in self._near:  # of another group it is the sums that are of no use
            self._faulty.add(sender)

    def on_spoiled(self, sender: str, spoiled: Spoiled) -> list[DataEffect]:
        """A frame arrived damaged during this round.  It is asked for once more; then its sender is out (P8)."""
        if sender not in self._near or sender in self._faulty:
            return []
        self._spoiled[sender] = self._spoiled.get(sender, 0) + 1
        if self._spoiled[sender] > SPOILED_FORGIVEN:
            self.refuse(sender, spoiled.verdict)
            return []
        header = spoiled.header
        if header is None or header.kind not in WANT_FOR:
            return []  # it does not say what it should have been: what is missing is asked for when time has passed
        index = header.chunk - self.first_chunk
        if not 0 <= index < len(self.plan.owners):
            return []
        return [SendFrame(sender, Frame(self._header(WANT_FOR[header.kind], index)))]

    def _on_result(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        chunk = frame.header.chunk - self.first_chunk
        if self.decision is None or frame.header.decision_no != self.decision.decision_no:
            return Verdict.STALE, []
        owner = self.plan.owner_of(chunk)
        if sender != (owner if owner != self.me else self.columns.root(chunk)):
            return Verdict.STALE, []
        self._asking.on_heard(sender, now)
        if chunk in self.results:
            return Verdict.DUPLICATE, []
        self.results[chunk] = piece = ChunkPiece(frame.payload, frame.header.hash)
        passed_on = self._spread(chunk, piece) if owner == self.me else []
        return Verdict.ACCEPTED, [*passed_on, *self._measure(chunk)]

    # ---- the data plane's word, and time -----------------------------------------------------------

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        self.unreached = unreached
        self._asking.on_arriving(arriving, now)

    def on_timer(self, now: float) -> list[DataEffect]:
        """Ask for what is missing from whoever has been quiet for too long."""
        effects = self._weigh_ready() if self.weighing.changed else []
        if self._freed:
            self._freed, effects = False, [*effects, *self._merge_ready()]
        self._doubt.look(self._deciding.is_made and len(self._measured) == len(self.plan.owners), now)
        for member in self._near:
            if member != self.me and self._asking.is_due(member, now):
                wants = self._wants_of(member)
                if wants:
                    self._asking.on_asked(member, now)
                    effects += [SendFrame(member, Frame(header)) for header in wants[:ASK_AT_ONCE]]
        return effects

    def _wants_of(self, member: str) -> list[Header]:
        wants: list[Header] = []
        if member not in self.plan.members:
            return self._wants_of_column(member)
        if member in self.refused:
            pass
        elif self._deciding.may_count(member, self.plan.members):
            for chunk in self._my_chunks:
                summed = self.sums.get(chunk, self.columns.group) is not None
                here = (summed if self.plan.column else chunk in self.results) and self._deciding.is_made
                if member not in self.held.get(chunk, {}) and not here:
                    wants.append(self._header(Kind.WANT_CONTRIBUTION, chunk))
        if self._deciding.is_made:
            for chunk in self.plan.chunks_of(member):
                if chunk not in self.results:
                    wants.append(self._header(Kind.WANT_RESULT, chunk))
        return wants

    def _wants_of_column(self, peer: str) -> list[Header]:
        """Of an owner in another group: its group's sums where I am the root, results where it is."""
        if self.decision is None or peer in self._faulty:
            return []
        lacking = [
            chunk
            for chunk in self.columns.summed_by(peer)
            if self.columns.group_of(peer, chunk) in self.sums.missing(chunk, self.decision)
        ]
        sums = [self._header(Kind.WANT_SUM, chunk) for chunk in lacking if chunk not in self.results]
        rooted = [chunk for chunk in self.columns.rooted_at(peer) if chunk not in self.results]
        return sums + [self._header(Kind.WANT_RESULT, chunk) for chunk in rooted]

    # ---- reports -----------------------------------------------------------------------------------

    def progress(self) -> Progress:
        got = {chunk: piece.hash + self._length_of(chunk) for chunk, piece in self._measured.items()}
        merged = {chunk: digest for chunk, digest in self.merged.items() if chunk in got}
        sums = self.sums.of_group(self.columns.group, self._my_chunks)
        added = self.sums.hashes_in(merged, self.decision)
        return Progress(
            proofs(self.plan, self.me, self.held),
            dict(sorted(self.refused.items())),
            tuple(sorted(self._cut_off())),
            merged,
            inputs_of(added) if added else self._inputs(merged),
            (mask_of(got), combined(got.items())),
            self.weighing.report(self._my_chunks, self._refused_mask),
            b"".join(self._length_of(chunk) for chunk in sorted(merged)),
            by_owner(self.plan, got) if self._doubt.is_on else {},
            {chunk: piece.hash for chunk, piece in sums.items()},
            self._inputs(sums),
            self.sums.dots(self.columns.rooted),
            b"".join(each[:SUM_TAG_BYTES] for each in added),
        )

    @property
    def _measured(self) -> dict[int, ChunkPiece]:
        """Results that I can prove to hold: where the gradient is clipped, by their length too."""
        if not self._measures:
            return self.results
        return {
            c: piece for c, piece in self.results.items() if self._lengths.get(c, (b"",))[0] == piece.hash
        }

    def _length_of(self, chunk: int) -> bytes:
        return self._lengths[chunk][1] if self._measures else b""

    def _inputs(self, chunks: Collection[int]) -> bytes:
        """Which contributions went into what I made of these chunks; empty if that is nothing."""
        if self.decision is None or not chunks:
            return b""
        counted = self.decision.included(self.plan.members)
        return inputs_of(self.held[chunk][member].hash for chunk in sorted(chunks) for member in counted)

    def _cut_off(self) -> set[str]:
        """Members that should own nothing, as far as I can tell."""
        return (self.unreached | self._faulty | self._asking.in_vain) & set(self._near)

    @property
    def complete(self) -> tuple[bool, bool, bool]:
        """(contributions that I own are here, they are compared and summed, every result is here): told at once."""
        held, due, got, chunks = self.counts
        weighed = self.weighing.is_complete(self._my_chunks, self._refused_mask)
        weighed = weighed and self.sums.are_complete(self.columns, self._my_chunks)
        return held >= due, weighed, got == chunks and len(self._measured) == got

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(contributions here, contributions due here, results here, results in all)."""
        # Counted, not looked up: this is asked after every frame.
        due = len(self._my_chunks) * (len(self.plan.members) - len(self.refused))
        return self._shelved, due, len(self.results), len(self.plan.owners)

    @property
    def owing(self) -> set[str]:
        """Members that are sending to me now, or should be."""
        owing: set[str] = set()
        if self.decision is not None:
            missing = self.missing_results()
            column = {self.columns.root(c) for c in missing if self.plan.owner_of(c) == self.me}
            owing = ({self.plan.owner_of(chunk) for chunk in missing} | column) - {self.me}
        if self._deciding.is_made:
            return owing
        heard = set(self.plan.members) - {self.me, *self.refused}
        return owing | {
            m for m in heard if any(m not in self.held.get(chunk, ()) for chunk in self._my_chunks)
        }

    def missing_results(self) -> list[int]:
        return list(bits(full_mask(len(self.plan.owners)) & ~mask_of(self.results)))

    # ---- helpers -----------------------------------------------------------------------------------

    def _header(self, kind: Kind, index: int) -> Header:
        chunk, number = self.first_chunk + index, self._deciding.number
        return Header(kind, self.run_tag, self.plan.round_no, number, self.plan.version, chunk)

    def _deliver(self, chunk: int) -> list[DataEffect]:
        """My contribution of one chunk goes to its owner; what I own myself on my shelf, and in a mesh to a keeper."""
        to: str | None = self.plan.owner_of(chunk)
        if to == self.me:
            shelf = self.held.setdefault(chunk, {})
            self._shelved += self.me not in shelf
            shelf[self.me] = self.mine[chunk]
            to = spare_of(self.plan, chunk)
        return self._answer(to, Kind.CONTRIBUTION, chunk, self.mine[chunk]) if to else []

    def _answer(self, to: str, kind: Kind, chunk: int, piece: ChunkPiece | None) -> list[DataEffect]:
        if piece is None:
            return [SendFrame(to, Frame(self._header(Kind.MISSING, chunk)))]
        return [SendFrame(to, with_payload(self._header(kind, chunk), piece.payload, piece.hash))]

    def _publish(self, chunk: int, piece: ChunkPiece) -> list[DataEffect]:
        self.results[chunk] = piece
        self.merged[chunk] = piece.hash
        return [*self._spread(chunk, piece), *self._measure(chunk)]

    def _measure(self, chunk: int) -> list[DataEffect]:
        """A result is here: how long it is has to be known before I can say so."""
        if not self._measures:
            return []
        piece = self.results[chunk]
        return [Measure(self.plan.round_no, self.first_chunk + chunk, piece.hash, piece.payload)]

    def _spread(self, chunk: int, piece: ChunkPiece) -> list[DataEffect]:
        effects: list[DataEffect] = []
        for member in (*self.columns.others(chunk), *self.plan.members):
            if member != self.me:
                effects += self._answer(member, Kind.RESULT, chunk, piece)
        return effects

    @property
    def _refused_mask(self) -> int:
        return mask_of(self.plan.members.index(member) for member in self.refused)

    def _weigh_ready(self, only: int | None = None) -> list[DataEffect]:
        """Compare what is here, chunk by chunk, where nothing is missing for it."""
        self.weighing.changed = self.weighing.changed and only is not None
        shelves = {chunk: self.held.get(chunk, {}) for chunk in (self._my_chunks if only is None else [only])}
        return [*self.weighing.weigh_all(self.plan, shelves, self._refused_mask, self.first_chunk)]

    def _merge_ready(self, only: int | None = None) -> list[DataEffect]:
        """Start the sum of every chunk of mine whose included contributions are all here."""
        if self.decision is None:
            return []
        counted = self._deciding.counted(self.plan.members)
        effects: list[DataEffect] = []
        for chunk in self._my_chunks if only is None else [only]:
            shelf = self.held.get(chunk, {})
            summed = not counted or self.sums.get(chunk, self.columns.group) is not None
            # A result that came before my group's sum was made waits for my word of it: the one before me left none.
            if chunk in self._merging or (chunk in self.results and (summed or not self.plan.column)):
                continue
            if self.plan.column and summed:
                effects += self._merge_sums(chunk, self.decision)
                continue
            if any(m not in shelf for m, _ in counted):
                continue
            self._merging.add(chunk)
            kind = MergeGroup if self.plan.column else Merge
            numbers = self.plan.round_no, self.decision.decision_no, self.first_chunk + chunk
            payloads = tuple(shelf[member].payload for member, _ in counted)
            effects.append(kind(*numbers, payloads, tuple(weight for _, weight in counted)))
        return effects

    def _merge_sums(self, chunk: int, decision: Decision) -> list[DataEffect]:
        """The second sum, at the root: of all groups, once they are here."""
        if self.columns.root(chunk) != self.me or self.sums.missing(chunk, decision):
            return []
        if self.sums.held_back:
            return [*self.sums.weigh(self.plan, chunk, self.first_chunk, decision)]
        self._merging.add(chunk)
        payloads = tuple(piece.payload for piece in self.sums.in_order(chunk, decision))
        number, place = self.plan.round_no, self.first_chunk + chunk
        # Weighed they are already.
        return [Merge(number, decision.decision_no, place, payloads, (1.0,) * len(payloads))]
