"""A peer's part in the rounds and commits of one fragment: contribute, own, apply, serve.  Pure.

Held by the participation, one for each fragment; the lanes know nothing of each other.  A lane owns the round in
flight (collectives/round/member.py), the catch-up (checkpoints/catch_up.py) and the result log.  What it holds of the
outer state is facts only: the version, the digest; the bytes are the shell's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from farflung.checkpoints.catch_up import NO_VERSION, CatchUp
from farflung.checkpoints.donors import SPOILED_FORGIVEN
from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.asking import LateResults
from farflung.collectives.round.effects import DataEffect, Roll, Seal, SendFrame
from farflung.collectives.round.member import MemberRound
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import (
    Effect,
    Encode,
    Note,
    Resolve,
    ServeLogged,
    ServeManifest,
    ServeState,
)
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.fragments import Fragment
from farflung.protocol.frames import Frame, Header, Kind, bare_answer, with_payload
from farflung.protocol.messages import FragmentTick
from farflung.protocol.round_words import Commit, Decision, Plan
from farflung.protocol.verdicts import Verdict

QUIET_S = 1.0  # without news for so long, what is missing is asked for
FETCH_RETRY_S = 3.0  # a donor that gave nothing for so long: another is asked


@dataclass(frozen=True)
class Contribution:
    """What I sent in a round, until I know whether a commit used it."""

    round_no: int
    version: int  # that the round started from: only the next version's commit can have used it
    frozen: Frozen
    # The trainer has dropped this work: nothing of it is left that a commit could take.
    disowned: bool = False


class Lane:
    def __init__(
        self, me: str, run_tag: bytes, fragment: Fragment, log: ResultLog, compare: bool = False
    ) -> None:
        self.me = me
        self.fragment = fragment
        self.catch = CatchUp(fragment, run_tag, retry_s=FETCH_RETRY_S)
        self.log = log  # of all fragments together
        self.round: MemberRound | None = None
        self.contribution: Contribution | None = None
        self.consumed: Contribution | None = None  # a commit used it; settled when that version is sealed
        self.version = NO_VERSION
        self.digest = b""
        self.sealing = False
        self.lost_track = False
        self.verified_version = NO_VERSION  # the version at which the coordinator confirmed my digest (P4)
        self.proof = b""  # the coordinator's signature of that digest, where it gives one
        self.last_round_no = 0
        self.dropped_round = 0  # the newest one of which I know that the guard threw its work away
        self._compare = compare  # owners compare contributions before the decision
        self._run_tag = run_tag
        self._resolved: list[Resolve] = []
        self._void_seal = False  # what is being hashed is a version that the run has gone back from
        self._committed_round = (0, 0)  # (round_no, version) of the newest commit: late results still help
        self._late: LateResults | None = None  # of that round, if I was in it

    # ---- questions --------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Every chunk is at `version`, and nothing is on its way into the anchor."""
        return self.version != NO_VERSION and not self.sealing and set(self.catch.versions) == {self.version}

    @property
    def holds_state(self) -> bool:
        """Whole, though it may just be changing."""
        return self.version != NO_VERSION

    @property
    def serves(self) -> bool:
        """It is whole, and the coordinator has confirmed its digest (P4)."""
        whole = self.catch.lowest == self.version and not self.sealing
        return whole and self.verified_version == self.version != NO_VERSION

    @property
    def idle(self) -> bool:
        """Nothing is going on that would end in a new version here."""
        busy = self.round is not None or self.contribution is not None or self.consumed is not None
        return not busy and not self.sealing and self.catch.done

    @property
    def sent_slot(self) -> int | None:
        """The slot that a round is using."""
        mine = self.contribution or self.consumed
        return mine.frozen.slot if mine is not None else None

    @property
    def made_by_round(self) -> int:
        """The round that made my version, 0 if I do not know."""
        round_no, version = self._committed_round
        return round_no if version == self.version else 0

    # ---- the coordinator's words about rounds -----------------------------------------------------------------

    def on_plan(self, plan: Plan, frozen: Frozen | None, now: float) -> list[Effect]:
        if self.round is not None and plan.round_no == self.round.plan.round_no:
            return [*self.round.on_plan(plan, now)]
        stale = plan.round_no <= self.last_round_no or plan.version != self.version or self.sealing
        unfit = self.me not in plan.members or len(plan.owners) != self.fragment.count
        if stale or unfit:
            return []
        self.last_round_no = plan.round_no
        first = self.fragment.first
        self.round = MemberRound(self.me, plan, self._run_tag, QUIET_S, now, first, self._compare)
        if self.contribution is not None:
            self._resolve(used=False)  # a new round from the same version: the one before was aborted
        if frozen is None:
            return []  # dropped since I said that I was ready: I own and receive, and contribute nothing
        self.contribution = Contribution(plan.round_no, plan.version, frozen)
        return [
            *self.take_resolved(),
            Encode(
                plan.round_no,
                frozen.slot,
                plan.codec_of(self.me),
                tuple(self.round.order),
                self.fragment.number,
            ),
        ]

    def on_decision(self, decision: Decision, now: float) -> list[Effect]:
        return [*self.round.on_decision(decision, now)] if self.round is not None else []

    def on_commit(self, commit: Commit, now: float) -> None:
        if commit.version <= self.version:
            return
        self.catch.on_commit(commit)
        self._late = None
        self._committed_round = (commit.round_no, commit.version)
        mine = self.contribution
        if mine is not None and commit.version == mine.version + 1:
            used = mine.round_no == commit.round_no and self.me in commit.included
            self.consumed = mine if used else self.consumed
            self._resolve(used)
        if self.round is not None and commit.version > self.round.plan.version:
            if commit.round_no == self.round.plan.round_no:
                for index, piece in self.round.results.items():
                    self.catch.offer(commit.version, self.fragment.first + index, piece.payload, piece.hash)
                self._late = LateResults(self.round.plan, self.fragment.first, QUIET_S, now)
            self.round = None

    def on_aborted(self, round_no: int) -> None:
        """The round is over without a commit.  What I sent is worth nothing, what I learned stays (P6)."""
        if self.round is not None and self.round.plan.round_no == round_no:
            self.round = None
        if self.contribution is not None and self.contribution.round_no == round_no:
            self._resolve(used=False)

    def on_tick(self, tick: FragmentTick) -> bool:
        """Where the run is.  True: what I held was not its state."""
        if tick.verified and self.version == tick.version:
            self.verified_version, self.proof = self.version, tick.proof
        self.catch.on_run_state(tick.version, dict(tick.digests), tick.donors, self.log.keep_versions)
        if self.catch.lowest == NO_VERSION and not self.sealing:
            # Too far behind: chunk by chunk it is fetched anew.  Who holds nothing whole says so, and is told commits.
            self.version, self.digest = NO_VERSION, b""
        known = self.catch.digests.get(self.version)
        differs = (
            self.version != NO_VERSION and not self.sealing and known is not None and known != self.digest
        )
        if differs:
            self.forget_state()
        if tick.version == self.version:
            # The run is still at my version and counts on me in no round, or in another: mine was aborted.
            for mine in (self.round.plan.round_no if self.round else 0, self._round_awaited):
                if mine and mine != tick.round_no:
                    self.on_aborted(mine)
        if self.round is not None and tick.round_no == self.round.plan.round_no:
            self.round.weighing.on_asked(mask_from_bytes(tick.compare))
        return differs

    def on_guard(self, dropped_round: int) -> bool:
        """The newest round whose work the guard threw away.  True: it is news, and I was in it."""
        news, self.dropped_round = dropped_round > self.dropped_round, dropped_round
        return news and dropped_round == self.last_round_no

    @property
    def _round_awaited(self) -> int:
        """The round of a contribution of this version that nobody has settled."""
        mine = self.contribution
        return mine.round_no if mine is not None and mine.version == self.version else 0

    def _resolve(self, used: bool) -> None:
        """What became of my contribution is known."""
        assert self.contribution is not None
        self._resolved.append(Resolve(self.contribution.frozen.slot, used, self.fragment.number))
        self.contribution = None

    def take_resolved(self) -> list[Resolve]:
        """To be carried out before the trainer hears of a free slot."""
        resolved, self._resolved = self._resolved, []
        return resolved

    def disown(self) -> None:
        """The trainer drops its unmerged work, also what a round is using: a commit takes nothing from it any more."""
        self.contribution = self.contribution and replace(self.contribution, disowned=True)
        self.consumed = self.consumed and replace(self.consumed, disowned=True)

    # ---- the state ------------------------------------------------------------------------------------------------

    def found(self) -> list[Effect]:
        """The trainer wrote the initial values: this is version 0 now."""
        self.forget_state()
        self.round = self.consumed = None
        if self.contribution is not None:
            self._resolve(used=False)
        self.sealing = True
        return [*self.catch.founded()]

    def restored(self, version: int) -> list[Effect]:
        """A checkpoint of this version was read into the state."""
        self.forget_state()
        self.sealing = True
        return [*self.catch.founded(version)]

    def go_back(self, version: int, digest: bytes | None) -> None:
        """The run lost its newest state and is at this version again: what is newer here is void, and work on it."""
        self.round = self.consumed = None
        if self.contribution is not None:
            self._resolve(used=False)
        keep = self.whole and (self.version, self.digest) == (version, digest)
        self.catch.go_back(version, keep)
        self.log.forget(self.fragment.number)
        self._committed_round, self._late = (0, 0), None
        self.verified_version = NO_VERSION
        if not keep:
            self.lost_track = self.lost_track or self.version != NO_VERSION
            self.version, self.digest = NO_VERSION, b""
            self._void_seal = self.sealing

    def on_sealed(self, version: int, digest: bytes) -> Contribution | None:
        """The state is whole at `version`.  Returns my contribution if a commit on the way used it."""
        self.sealing = False
        if self._void_seal:
            self._void_seal = False
            return None
        self.version, self.digest = version, digest
        known = self.catch.digests.get(version)
        if known is not None and known != digest:
            self.forget_state()
            return None
        if self.contribution is not None and version > self.contribution.version:
            self._resolve(used=False)
            self.lost_track = True  # that commit was never seen: nobody here knows whether it used my work
        consumed, self.consumed = self.consumed, None
        return consumed

    def forget_state(self) -> None:
        """What I hold is not the run's state (P4): take the run's again."""
        self.version, self.digest, self.verified_version = NO_VERSION, b"", NO_VERSION
        self.catch.reset()

    def advance(self, now: float) -> list[Effect]:
        """Apply what can be applied, ask for what is missing.  Not to be called while the trainer reads the anchor."""
        resolved = self.take_resolved()
        if self.sealing:
            return [*resolved]
        effects: list[DataEffect] = self.catch.roll()
        for effect in effects:
            if isinstance(effect, Roll):
                self.log.put(self.fragment.number, effect.version, effect.chunk, effect.payload)
                self.verified_version = NO_VERSION  # torn until sealed: nothing is served from it
            elif isinstance(effect, Seal):
                self.sealing = True
        own = self._own_results()
        if not self.catch.done:
            effects += self.catch.ask(now, self._late.coming(now) if self._late is not None else frozenset())
        told = f"it gave bytes that are not the run's {SPOILED_FORGIVEN + 1} times and is not asked any more"
        notes = [Note(f"{donor}: {told}") for donor in self.catch.take_dropped()]
        if news := self.log.news():
            notes.append(Note(news))
        return [*resolved, *own, *effects, *notes]

    def _own_results(self) -> list[Effect]:
        """What a former life of mine kept on disk of the next version: one version at a time bounds the memory."""
        version = self.catch.lowest + 1
        if version == 0 or version not in self.catch.commits:
            return []
        mine, number = self.log.take_found(version, self.fragment.chunks), self.fragment.number
        return [ServeLogged(self.me, chunk, version, number) for chunk in mine]

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        """The data plane's word: for whom something waits that can't leave, and of whom bytes came in."""
        if self.round is not None:
            self.round.on_lines(unreached, arriving, now)
        elif self._late is not None:
            self._late.on_arriving(arriving, now)

    def on_timer(self, now: float) -> list[Effect]:
        return [*self.round.on_timer(now)] if self.round is not None else []

    # ---- frames ---------------------------------------------------------------------------------------------------

    def is_early(self, frame: Frame) -> bool:
        """It overtook the plan or the decision that explains it."""
        number = frame.header.round_no
        if self.round is not None and number == self.round.plan.round_no:
            return self.round.is_early(frame)
        return number > self.last_round_no and frame.header.kind in (Kind.CONTRIBUTION, Kind.RESULT)

    def on_round_frame(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        header = frame.header
        if self.round is not None and header.round_no == self.round.plan.round_no:
            verdict, moved = self.round.on_frame(sender, frame, now)
            return verdict, [*moved]
        if header.kind == Kind.RESULT and header.round_no == self._committed_round[0]:
            if self.catch.offer(self._committed_round[1], header.chunk, frame.payload, header.hash):
                if self._late is not None:
                    self._late.on_result(sender, now)
                return Verdict.ACCEPTED, []
        return Verdict.STALE, []

    def refuse(self, sender: str, round_no: int, why: Verdict) -> None:
        """What it sent in this round can't be used."""
        if self.round is not None and round_no == self.round.plan.round_no:
            self.round.refuse(sender, why)

    def serve(self, sender: str, header: Header) -> list[Effect]:
        chunk = header.chunk
        if header.kind == Kind.WANT_LOGGED:
            payload = self.log.get(self.fragment.number, header.version, chunk)
            if payload is not None:
                answer = Header(Kind.LOGGED, self._run_tag, version=header.version, chunk=chunk)
                return [SendFrame(sender, with_payload(answer, payload))]
            if self.log.on_disk:
                return [ServeLogged(sender, chunk, header.version, self.fragment.number)]
        elif header.kind == Kind.WANT_STATE and self.serves:
            return [ServeState(sender, chunk, self.version)]
        elif header.kind == Kind.WANT_MANIFEST and self.serves and header.version == self.version:
            return [ServeManifest(sender, self.fragment.first, self.version, self.fragment.number)]
        return [SendFrame(sender, bare_answer(Kind.MISSING, header))]
