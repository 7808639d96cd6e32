"""A peer's part in the rounds and commits of one fragment: contribute, own, apply, serve.  Pure.

Held by the participation, one for each fragment; the replicas know nothing of each other.  A replica owns the round in
flight (collectives/round/member.py), the catch-up (checkpoints/state_sync.py) and the result log.  What it holds of the
outer state is facts only: the version, the digest; the bytes are the shell's.

Its states are declared in replica_states.py.  Nobody else writes them, and the replica does so in `_stands` and
`_plays`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from farflung.checkpoints.result_log import ResultLog
from farflung.checkpoints.sources import SPOILED_FORGIVEN
from farflung.checkpoints.state_sync import NO_VERSION, StateSync
from farflung.checkpoints.swarm import HaveAnnouncer, Holding
from farflung.collectives.round.effects import DataEffect, Install, Roll, Seal
from farflung.collectives.round.kept import Given, KeptContributions
from farflung.collectives.round.member import MemberRound
from farflung.collectives.round.pieces import OVERTAKING, ChunkPiece
from farflung.collectives.round.result_requests import LateResults
from farflung.collectives.round.shape import class_of
from farflung.peer.local.words import Frozen
from farflung.peer.machine.early_work import EarlyWork
from farflung.peer.machine.effects import (
    Effect,
    Encode,
    Note,
    Resolve,
    ServeLogged,
)
from farflung.peer.machine.replica_states import (
    ROLES,
    STANDS,
    Contributing,
    Contribution,
    Current,
    Empty,
    Filling,
    Hashing,
    Idle,
    LastCommit,
    Merged,
    Owning,
    ReplicaEvent,
    ReplicaState,
    Role,
    RoleEvent,
    Rolling,
    Unsure,
    VoidFilling,
    VoidHashing,
    WorkSettled,
)
from farflung.peer.machine.state_proof import StateProof
from farflung.protocol.digests import full_mask, mask_from_bytes
from farflung.protocol.frames import Frame, Header, Kind
from farflung.protocol.messages import FragmentTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.outer_numbers import MOMENTUM_PARTS
from farflung.protocol.round_words import Commit, Decision, Plan
from farflung.protocol.verdicts import Verdict

QUIET_S = 1.0  # without news for so long, what is missing is asked for
FETCH_RETRY_S = 3.0  # a donor that gave nothing for so long: another is asked


@dataclass(frozen=True)
class ReplicaRules:
    """What the run's terms mean for it."""

    compare: bool = False  # owners compare contributions before the decision
    measure: bool = False  # how long results are decides by what they are multiplied
    rounds_kept: int = 0
    state_parts: int = MOMENTUM_PARTS


class Replica:
    def __init__(
        self,
        me: str,
        run_tag: bytes,
        fragment: Fragment,
        log: ResultLog,
        rules: ReplicaRules = ReplicaRules(),
        ahead: EarlyWork | None = None,
    ) -> None:
        self.fragment = fragment
        self.catch = StateSync(fragment, run_tag, FETCH_RETRY_S, rules.state_parts, me)
        self.log = log  # of all fragments together
        self._grounds = StateProof(fragment)
        self._telling = HaveAnnouncer(fragment, run_tag)
        self.kept = KeptContributions(run_tag, fragment.first, rules.rounds_kept)
        self.ahead = ahead or EarlyWork()
        self._me = me
        self._run_tag = run_tag
        self._rules = rules
        self._stand: ReplicaState = Empty()
        self._role: Role = Idle()
        self._last_round_no = 0
        self._planned_at = (
            NO_VERSION  # the version from which the newest round starts: the run counts on my state
        )
        self._dropped_round = 0
        self._last_commit = LastCommit()
        self._lost_track = False
        self._left = Given()  # to the round that I left last
        self._resolved: list[Resolve] = []

    # ---- the only places where the states change ----------------------------------------------------------------

    def _stands(self, event: ReplicaEvent, stand: ReplicaState) -> None:
        STANDS.check(type(self._stand), event, type(stand))
        self._stand = stand

    def _plays(self, event: RoleEvent, role: Role) -> None:
        ROLES.check(type(self._role), event, type(role))
        left = self.round
        self._role = role
        if left is not None and self.round is not left:
            self._left = Given.to(left)  # its commit may come later than a newer one

    # ---- questions --------------------------------------------------------------------------------------------

    @property
    def stand(self) -> ReplicaState:
        return self._stand

    @property
    def role(self) -> Role:
        return self._role

    @property
    def version(self) -> int:
        return self._stand.version

    @property
    def digest(self) -> bytes:
        return self._stand.digest

    @property
    def round(self) -> MemberRound | None:
        """The round in flight."""
        return self._role.round if isinstance(self._role, Owning | Contributing) else None

    @property
    def contribution(self) -> Contribution | None:
        """What I sent, while I do not know what became of it."""
        return self._role.contribution if isinstance(self._role, Contributing | Unsure) else None

    @property
    def last_round_no(self) -> int:
        return self._last_round_no

    @property
    def dropped_round(self) -> int:
        """The newest one of which I know that the guard threw its work away."""
        return self._dropped_round

    @property
    def whole(self) -> bool:
        """Every chunk is at `version`, and nothing is on its way into the anchor."""
        return isinstance(self._stand, Current)

    @property
    def holds_state(self) -> bool:
        """Whole, though it may just be changing."""
        return self.version != NO_VERSION

    @property
    def sealing(self) -> bool:
        return isinstance(self._stand, Hashing | VoidHashing)

    @property
    def filling(self) -> bool:
        """All values are being written: nothing else may change them."""
        return isinstance(self._stand, Filling | VoidFilling)

    @property
    def serves(self) -> bool:
        """It is whole, and the coordinator has confirmed its digest (P4)."""
        return isinstance(self._stand, Current) and self._stand.verified

    @property
    def before(self) -> tuple[int, bytes] | None:
        """A version and its digest that I can go back to: from it results alone made mine, or are making the next."""
        return self._grounds.before if isinstance(self._stand, Current | Rolling) else None

    @property
    def proof(self) -> bytes:
        """The coordinator's signature of my digest, where it gave one."""
        return self._stand.proof if isinstance(self._stand, Current) else b""

    @property
    def shown(self) -> bytes:
        """That I hold my version: for whoever knows the nonce."""
        return self._grounds.shown(self.version) if self.whole else b""

    @property
    def proving(self) -> bool:
        """The shell is calculating what shows that I hold my version."""
        return self.whole and self._grounds.is_proving(self.version)

    @property
    def idle(self) -> bool:
        """Nothing is going on that would end in a new version here."""
        return isinstance(self._role, Idle) and not self.sealing and self.catch.done

    @property
    def sent_slot(self) -> int | None:
        """The slot that a round is using, or one that is to come."""
        role = self._role
        if isinstance(role, Contributing | Unsure | Merged):
            return role.contribution.frozen.slot
        return self.ahead.slot

    @property
    def made_by_round(self) -> int:
        """The round that made my version, 0 if I do not know."""
        return self._last_commit.round_no if self._last_commit.version == self.version else 0

    def my_piece(self, round_no: int, chunk: int, kind: Kind = Kind.CONTRIBUTION) -> ChunkPiece | None:
        """What I gave of this chunk of the model to that round, as far as I still have it."""
        if self.round is not None and self.round.plan.round_no == round_no:
            return Given.to(self.round).of(kind).get(chunk - self.fragment.first)
        return self.kept.piece(round_no, chunk, kind)

    # ---- the coordinator's words about rounds -----------------------------------------------------------------

    def on_plan(self, plan: Plan, frozen: Frozen | None, now: float) -> list[Effect]:
        fits = class_of(plan, self._me, self.fragment.count)
        if fits is not None and self.round is not None and plan.round_no == self.round.plan.round_no:
            return [*self.round.on_plan(plan, now)]
        stale = plan.round_no <= self._last_round_no or plan.version != self.version or self.sealing
        if stale or fits is None or isinstance(self._role, Merged):
            return []
        self._last_round_no, self._planned_at = plan.round_no, plan.version
        self._end()  # a new round from the same version: the one before was aborted
        first, rules = self.fragment.first, self._rules
        flight = fits(self._me, plan, self._run_tag, QUIET_S, now, first, rules.compare, rules.measure)
        self._plays(RoleEvent.OPENED, Owning(flight))
        sent_ahead = self.ahead.ready_for(plan) if frozen is not None else None
        if sent_ahead is None:
            self._resolved += self.ahead.drop()
        if frozen is None:
            return []  # dropped since I said that I was ready; what was resolved waits for the next event, as ever
        sent = Contribution(plan.round_no, plan.version, sent_ahead or frozen)
        self._plays(RoleEvent.CONTRIBUTED, Contributing(flight, sent))
        if sent_ahead is not None:
            moved = flight.on_sent_ahead(self.ahead.pieces)
            return [*self.take_resolved(), *moved, *self.ahead.names(plan)]
        codec, order = plan.codec_of(self._me), tuple(flight.order)
        encode = Encode(plan.round_no, frozen.slot, codec, order, self.fragment.number)
        return [*self.take_resolved(), encode]

    def on_decision(self, decision: Decision, now: float) -> list[Effect]:
        return [*self.round.on_decision(decision, now)] if self.round is not None else []

    def on_commit(self, commit: Commit, now: float, nonce: bytes = b"") -> None:
        self._grounds.on_nonce(commit.version, nonce)
        if commit.version <= self.version:
            return
        self.catch.on_commit(commit)
        flight, mine = self.round, self.contribution
        over = flight is not None and commit.version > flight.plan.version
        late: LateResults | None = None
        if over and flight is not None and commit.round_no == flight.plan.round_no:
            for index, piece in flight.pieces.results.items():
                self.catch.offer(commit.version, self.fragment.first + index, piece.payload, piece.hash)
            late = LateResults(flight.plan, self._me, self.fragment.first, QUIET_S, now)
        self._last_commit = LastCommit(commit.round_no, commit.version, late)
        given = Given.to(flight) if flight is not None and late is not None else self._left
        self.kept.on_commit(commit.round_no, given, counts=self._me in commit.included)
        if mine is not None and commit.version == mine.version + 1:
            if mine.round_no == commit.round_no and self._me in commit.included:
                self._resolve(mine, used=True)
                self._plays(RoleEvent.USED, Merged(mine))
            else:
                self._end()
        elif over and mine is not None:
            self._plays(RoleEvent.MISSED, Unsure(mine))
        elif over:
            self._end()

    def on_aborted(self, round_no: int) -> None:
        """The round is over without a commit.  What I sent is worth nothing, what I learned stays (P6)."""
        flight, mine = self.round, self.contribution
        number = flight.plan.round_no if flight is not None else mine.round_no if mine is not None else 0
        if number and number == round_no:
            self._end()

    def on_unusable(self) -> None:
        """What stands frozen is not finite: nothing of it was sent."""
        if isinstance(self._role, Contributing):
            self._plays(RoleEvent.WITHDRAWN, Owning(self._role.round))

    def on_tick(self, tick: FragmentTick) -> bool:
        """Where the run is.  True: what I held was not its state."""
        stand = self._stand
        self.ahead.on_tick(tick)
        self._grounds.on_nonce(tick.nonce_for, tick.nonce)
        if tick.verified and isinstance(stand, Current) and stand.version == tick.version:
            self._stands(ReplicaEvent.CONFIRMED, replace(stand, verified=True, proof=tick.proof))
            self._grounds.lose()
        digests, keep = dict(tick.digests), self.log.keep_versions
        self.catch.on_run_state(tick.version, digests, tick.donors, keep, tick.fellows)
        if self.catch.lowest == NO_VERSION and not self.sealing and not self.filling:
            # Too far behind: fetched anew, chunk by chunk.  Who holds nothing whole says so, and is told commits.
            self._stands(ReplicaEvent.FORGOTTEN, Empty())
            self._lose_grounds()
        known = self.catch.digests.get(self.version)
        differs = (
            self.version != NO_VERSION and not self.sealing and known is not None and known != self.digest
        )
        refuted = bool(tick.refuted) and tick.refuted == self.digest and self.whole
        # What I calculated from a confirmed version I keep, whatever others say, until it is proven wrong.
        differs = refuted or (differs and not self._grounds.calculated)
        if differs:
            self._forget_state()
        if tick.version == self.version:
            # The run is still at my version and counts on me in no round, or in another: mine was aborted.
            for mine in (self.round.plan.round_no if self.round else 0, self._round_awaited):
                if mine and mine != tick.round_no:
                    self.on_aborted(mine)
        if self.round is not None and tick.round_no == self.round.plan.round_no:
            self.round.weighing.on_asked(mask_from_bytes(tick.compare))
            self.round.on_may_encode(tick.encode_no)
        return differs

    def on_guard(self, dropped_round: int) -> bool:
        """The newest round whose work the guard threw away.  True: it is news, and I was in it."""
        news, self._dropped_round = dropped_round > self._dropped_round, dropped_round
        return news and dropped_round == self._last_round_no

    @property
    def _round_awaited(self) -> int:
        """The round of a contribution of this version that nobody has settled."""
        mine = self.contribution
        return mine.round_no if mine is not None and mine.version == self.version else 0

    def _end(self) -> None:
        """Whatever part I had in a round is over, and no commit used what I sent."""
        if isinstance(self._role, Idle):
            return
        mine = self.contribution
        # What was sent ahead stays with its owners, for the next round; unless the trainer has dropped the work.
        if mine is not None and (mine.disowned or mine.frozen is not self.ahead.frozen):
            self._resolve(mine, used=False)
        self._plays(RoleEvent.ENDED, Idle())

    def _resolve(self, mine: Contribution, used: bool) -> None:
        """What became of my contribution is known."""
        self._resolved.append(Resolve(mine.frozen.slot, used, self.fragment.number))
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
            self._resolved += self.ahead.drop()

    # ---- the state ------------------------------------------------------------------------------------------------

    def send_ahead(self, newest: Frozen | None) -> list[Effect]:
        """`newest`: what stands frozen.  Between rounds, where my line is slow."""
        return self.ahead.keep_going(newest) if isinstance(self._role, Idle) else []

    def fill(self) -> None:
        """All values are about to be written: by the trainer, from a checkpoint, from what had arrived before a crash.
        Exactly one of the next four ends it.  What is on its way here comes too late, and is asked for again."""
        self._stands(ReplicaEvent.BEGUN, Filling(before=self._stand))
        self.catch.set_aside()

    def found(self) -> list[Effect]:
        """The trainer has written the initial values, or they were read: this is version 0 now."""
        self._end()
        return self.filled(0)

    def filled(self, version: int) -> list[Effect]:
        """Every value is that of this version now."""
        stand = self._stand
        if isinstance(stand, Filling) and isinstance(stand.before, Rolling):
            self._lose_track()
        self._lose_grounds()
        self._resolved += self.ahead.drop()
        if isinstance(stand, VoidFilling):
            self._stands(ReplicaEvent.WRITTEN, Empty())
            return []
        self._stands(ReplicaEvent.WRITTEN, Hashing())
        return [*self.catch.founded(version)]

    def unfilled(self, touched: bool) -> None:
        """It came to nothing.  `touched`: some values were written, so that what is there now is no version at all."""
        before = self._stand.before if isinstance(self._stand, Filling) else Empty()
        if not touched and isinstance(before, Rolling):
            self._stands(ReplicaEvent.UNTOUCHED, before)
            return
        if isinstance(before, Rolling):
            self._lose_track()
        if touched or isinstance(before, Current):
            self._lose_grounds()
            self.catch.reset()
        self._stands(ReplicaEvent.UNWRITTEN, Empty())

    def recalled(self, held: dict[int, tuple[int, bytes]]) -> None:
        """Pieces that were fetched before a crash stand in the state again: chunk -> (version, its digest or empty)."""
        void = isinstance(self._stand, VoidFilling)
        self.unfilled(touched=True)
        if not void:
            self.catch.recalled(held)

    def _lose_track(self) -> None:
        """What is read may be older than what my work was merged into."""
        self._end()
        self._lost_track = True

    def go_back(self, version: int, digest: bytes | None) -> bool:
        """The run lost its newest state and is at this version again: what is newer here is void, and work on it.
        True: before the last round I held just this version, and it is to be written here now."""
        self._end()
        self._resolved += self.ahead.drop()
        stand, was = self._stand, self.before
        self._lose_grounds()
        held = stand.before if isinstance(stand, Filling) else stand
        keep = isinstance(stand, Current) and (stand.version, stand.digest) == (version, digest)
        self.catch.go_back(version, keep)
        self.log.forget(self.fragment.number)
        self._last_commit = LastCommit()
        if keep:
            self._stands(ReplicaEvent.KEPT, Current(stand.version, stand.digest))
            return False
        self._lost_track = self._lost_track or held.version != NO_VERSION
        gone: ReplicaState = VoidHashing() if self.sealing else VoidFilling() if self.filling else Empty()
        self._stands(ReplicaEvent.WENT_BACK, gone)
        if was != (version, digest):
            return False
        self.fill()
        return True

    def on_sealed(self, version: int, digest: bytes) -> WorkSettled | None:
        """The state is whole at `version`; None if it is not the run's."""
        if isinstance(self._stand, VoidHashing):
            self._stands(ReplicaEvent.SEALED, Empty())
            return None
        self._stands(ReplicaEvent.SEALED, Current(version, digest))
        known = self.catch.digests.get(version)
        if known is not None and known != digest and not self._grounds.calculated:
            self._forget_state()
            return None
        self._look_whether_torn()
        if self._lost_track:
            self._resolved += self.ahead.drop()
        mine = self.contribution
        if mine is not None and version > mine.version:
            self._resolve(mine, used=False)
            self._plays(RoleEvent.OVERTAKEN, Owning(self.round) if self.round is not None else Idle())
            self._lost_track = True
        settled = WorkSettled(None, self._lost_track)
        if isinstance(self._role, Merged):
            settled = replace(settled, consumed=self._role.contribution)
            self._plays(RoleEvent.SETTLED, Idle())
        self._lost_track = False
        return settled

    def _forget_state(self) -> None:
        """What I hold is not the run's state (P4): take the run's again."""
        self._stands(ReplicaEvent.FORGOTTEN, Empty())
        self._lose_grounds()
        self.catch.reset()

    def _lose_grounds(self) -> None:
        """What I hold from now on is not what I calculated."""
        self._grounds.lose()
        self._grounds.before = None
        self._grounds.forget_holding()

    def on_holding_proven(self, version: int, nonce: bytes, value: bytes) -> None:
        self._grounds.on_proven(version, nonce, value)

    def _look_whether_torn(self) -> None:
        """A chunk may have come as the state of a newer version: until all have, nothing is served."""
        stand = self._stand
        if isinstance(stand, Current) and set(self.catch.versions) != {stand.version}:
            self._stands(ReplicaEvent.MOVED_ON, Rolling(stand.version, stand.digest))

    def advance(self, now: float) -> list[Effect]:
        """Apply what can be applied, ask for what is missing.  Not to be called while the trainer reads the anchor."""
        resolved = self.take_resolved()
        if self.sealing or self.filling:
            return [*resolved]
        before, proofs = self._stand, list[Effect]()
        effects: list[DataEffect] = self.catch.roll()
        if effects:
            self._look_whether_torn()
        came = any(isinstance(effect, Install) for effect in effects)
        if came:
            self._lose_grounds()
        if not came and isinstance(before, Current) and not self.whole:
            is_the_runs = self.catch.digests.get(before.version) == before.digest
            counted_on = before.verified or self._planned_at == before.version or is_the_runs
            proofs += self._grounds.rolls_on(before.version, before.digest, counted_on)
        shows = self._grounds.prove(self.version) if self.whole else []
        for effect in effects:
            if isinstance(effect, Roll):
                self.log.put(self.fragment.number, effect.version, effect.chunk, effect.payload)
            elif isinstance(effect, Seal):
                self._stands(ReplicaEvent.ARRIVED, Hashing(self.version, self.digest))
                shows = self._grounds.prove(effect.version)
        own = self._own_results()
        if isinstance(self._role, Idle):
            own += self.ahead.send(now)
        if not self.catch.done:
            late = self._last_commit.late
            effects += self.catch.ask(now, late.coming(now) if late is not None else frozenset())
        if self._telling.is_due(now):
            effects += self._telling.words(self._holding(), now)
        told = f"it gave bytes that are not the run's {SPOILED_FORGIVEN + 1} times and is not asked any more"
        notes = [Note(f"{donor}: {told}") for donor in self.catch.take_dropped()]
        if warning := self.log.take_warning():
            notes.append(Note(warning))
        return [*resolved, *own, *proofs, *effects, *shows, *notes]

    def _own_results(self) -> list[Effect]:
        """What a former life of mine kept on disk of the next version: one version at a time bounds the memory."""
        version = self.catch.lowest + 1
        if version == 0 or version not in self.catch.commits:
            return []
        mine, number = self.log.take_found(version, self.fragment.chunks), self.fragment.number
        return [ServeLogged(self._me, chunk, version, number) for chunk in mine]

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        """The data plane's word: for whom something waits that can't leave, and of whom bytes came in."""
        if self.round is not None:
            self.round.on_lines(unreached, arriving, now)
        elif self._last_commit.late is not None:
            self._last_commit.late.on_arriving(arriving, now)

    def on_timer(self, now: float) -> list[Effect]:
        return [*self.round.on_timer(now)] if self.round is not None else []

    # ---- frames ---------------------------------------------------------------------------------------------------

    def is_early(self, sender: str, frame: Frame) -> bool:
        """It overtook the plan or the decision that explains it."""
        number = frame.header.round_no
        if self.round is not None and number == self.round.plan.round_no:
            return self.round.is_early(sender, frame)
        return number > self._last_round_no and frame.header.kind in OVERTAKING

    def on_round_frame(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        header = frame.header
        if self.round is not None and header.round_no == self.round.plan.round_no:
            if header.kind == Kind.WANT_CONTRIBUTION:
                self.ahead.on_lacked(sender, header.chunk)
            verdict, moved = self.round.on_frame(sender, frame, now)
            return verdict, [*moved]
        last = self._last_commit
        if header.kind == Kind.RESULT and header.round_no == last.round_no:
            if self.catch.offer(last.version, header.chunk, frame.payload, header.hash):
                return Verdict.ACCEPTED, [*last.late.on_result(sender, frame, now)] if last.late else []
        if header.kind in (Kind.WANT_CONTRIBUTION, Kind.WANT_SUM):
            verdict, answer = self.kept.on_want(sender, header, self.round is not None, now)
            return verdict, [*answer]
        return Verdict.STALE, []

    def on_piece(self, sender: str, frame: Frame) -> Verdict:
        """A donor's answer: a piece of the state, a list of hashes, a kept result, or that it has none.  What is of use
        is put into the state by `advance`, and by nothing else."""
        if self.filling:
            return Verdict.STALE
        return self.catch.on_frame(sender, frame)

    def refuse(self, sender: str, round_no: int, why: Verdict) -> None:
        """What it sent in this round can't be used."""
        if self.round is not None and round_no == self.round.plan.round_no:
            self.round.refuse(sender, why)

    # ---- what a replica that is not whole gives to others ------------------------------------------------------------

    @property
    def is_the_runs(self) -> bool:
        """It is whole, and its digest is the one that the coordinator told; that I hold it is still to be shown."""
        return self.whole and self.catch.digests.get(self.version) == self.digest

    def gives(self, chunk: int) -> bool:
        """This piece stands here as it came, and was checked."""
        return not self.whole and not self.filling and self.catch.given_at(chunk) != NO_VERSION

    def on_want_have(self, sender: str, header: Header, now: float) -> None:
        """It is told by the next `advance`, or when there is news."""
        self._telling.on_want(sender, header.decision_no, now)

    def _holding(self) -> Holding:
        if self.serves or self.is_the_runs:
            return Holding(self.version, full_mask(self.fragment.count))
        return Holding() if self.whole or self.filling else self.catch.arrived()
