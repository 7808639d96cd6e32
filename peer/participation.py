"""A peer's part in rounds and commits: contribute, own, apply, serve.  Pure.

Part of the peer machine.  It owns the round in flight (collectives/round.py), the catch-up
(checkpoints/transfer.py) and the result log, and routes bulk frames between them.  What it holds of the
outer state is facts only: the version, the digest, the chunk hashes; the bytes are the shell's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from farflung.checkpoints.result_log import ResultLog
from farflung.checkpoints.transfer import NO_VERSION, CatchUp
from farflung.collectives.effects import DataEffect, Roll, Seal, SendFrame
from farflung.collectives.errors import FrameError
from farflung.collectives.frames import Frame, Header, Kind, Payload, with_payload
from farflung.collectives.plan import Commit, Decision, Plan
from farflung.collectives.round import MemberRound
from farflung.collectives.verdicts import Counters, Verdict
from farflung.compression.codec import codec_named
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.schema import ModelSchema
from farflung.peer.effects import Effect, Encode, Resolve, ServeManifest, ServeState
from farflung.peer.local_messages import Frozen

QUIET_S = 1.0  # without news for so long, what is missing is asked for
FETCH_RETRY_S = 3.0  # a donor that gave nothing for so long: another is asked
EARLY_KEPT = 64  # frames that overtook their plan or decision: kept for a moment, the oldest goes first
_ROUND_KINDS = frozenset({Kind.CONTRIBUTION, Kind.RESULT, Kind.WANT_CONTRIBUTION, Kind.WANT_RESULT})


@dataclass(frozen=True)
class Contribution:
    """What I sent in a round, until I know whether a commit used it."""

    round_no: int
    version: int  # that the round started from: only the next version's commit can have used it
    frozen: Frozen


class Participation:
    def __init__(self, me: str, run_tag: bytes, model: ModelSchema, manifest: Manifest) -> None:
        self.me = me
        self.catch = CatchUp(model.chunk_count, run_tag, retry_s=FETCH_RETRY_S)
        self.log = ResultLog(manifest.round.keep_results)
        self.round: MemberRound | None = None
        self.contribution: Contribution | None = None
        self.consumed: Contribution | None = None  # a commit used it; settled when that version is sealed
        self.version = NO_VERSION
        self.digest = b""
        self.sealing = False
        self.lost_track = False
        self.verified_version = NO_VERSION  # the version at which the coordinator confirmed my digest (P4)
        self.last_round_no = 0
        self.counters = Counters()
        self._run_tag = run_tag
        self._elements = model.chunk_elements
        self._gather = codec_named(manifest.round.gather_codec)
        self._resolved: list[Resolve] = []
        self._early: deque[tuple[str, Frame]] = deque()
        self._committed_round = (0, 0)  # (round_no, version) of the newest commit: late results still help

    # ---- the coordinator's words about rounds ---------------------------------------------------------------

    def on_plan(self, plan: Plan, frozen: Frozen | None, now: float) -> list[Effect]:
        if self.round is not None and plan.round_no == self.round.plan.round_no:
            effects: list[Effect] = [*self.round.on_plan(plan, now)]
            return effects + self._replay_early(now)
        stale = plan.round_no <= self.last_round_no or plan.version != self.version or self.sealing
        if stale or self.me not in plan.members or frozen is None:
            return []
        self.last_round_no = plan.round_no
        self.round = MemberRound(self.me, plan, self._run_tag, QUIET_S, now)
        self.contribution = Contribution(plan.round_no, plan.version, frozen)
        return [Encode(plan.round_no, frozen.slot, plan.codec_of(self.me)), *self._replay_early(now)]

    def on_decision(self, decision: Decision, now: float) -> list[Effect]:
        if self.round is None or decision.round_no != self.round.plan.round_no:
            return []
        effects: list[Effect] = [*self.round.on_decision(decision, now)]
        return effects + self._replay_early(now)

    def on_commit(self, commit: Commit) -> None:
        if commit.version <= self.version:
            return
        self.catch.on_commit(commit)
        self._committed_round = (commit.round_no, commit.version)
        mine = self.contribution
        if mine is not None and commit.version == mine.version + 1:
            used = mine.round_no == commit.round_no and self.me in commit.included
            self.consumed = mine if used else self.consumed
            self._resolve(used)
        if self.round is not None and commit.version > self.round.plan.version:
            if commit.round_no == self.round.plan.round_no:
                for chunk, piece in self.round.results.items():
                    self.catch.offer(commit.version, chunk, piece.payload)
            self._end_round()

    def on_aborted(self, round_no: int) -> None:
        """The round is over without a commit.  What I sent is worth nothing, what I learned stays (P6)."""
        if self.round is not None and self.round.plan.round_no == round_no:
            self._end_round()
        if self.contribution is not None and self.contribution.round_no == round_no:
            self._resolve(used=False)

    def _resolve(self, used: bool) -> None:
        """What became of my contribution is known."""
        assert self.contribution is not None
        self._resolved.append(Resolve(self.contribution.frozen.slot, used))
        self.contribution = None

    def take_resolved(self) -> list[Resolve]:
        """To be carried out before the trainer hears of a free slot."""
        resolved, self._resolved = self._resolved, []
        return resolved

    @property
    def expects_bytes(self) -> bool:
        """Others have something for me: what arrives then shows what my line can take in."""
        return self.round is not None or not self.catch.done

    def _end_round(self) -> None:
        self.round = None

    # ---- finished arithmetic ----------------------------------------------------------------------------------

    def on_encoded(self, round_no: int, payloads: list[Payload]) -> list[Effect]:
        if self.round is None or self.round.plan.round_no != round_no:
            return []
        return [*self.round.on_encoded(payloads)]

    def on_merged(self, round_no: int, decision_no: int, chunk: int, payload: Payload) -> list[Effect]:
        if self.round is None or self.round.plan.round_no != round_no:
            return []
        return [*self.round.on_merged(decision_no, chunk, payload)]

    def on_sealed(self, version: int, digest: bytes) -> Contribution | None:
        """The state is whole at `version`.  Returns my contribution if a commit on the way used it."""
        self.sealing = False
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

    # ---- moving on ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Effect]:
        """Apply what can be applied, ask for what is missing.  Not to be called while the trainer reads the anchor."""
        resolved = self.take_resolved()
        if self.sealing:
            return [*resolved]
        effects: list[DataEffect] = self.catch.roll()
        for effect in effects:
            if isinstance(effect, Roll):
                self.log.put(effect.version, effect.chunk, effect.payload)
                self.verified_version = NO_VERSION  # torn until sealed: nothing is served from it
            elif isinstance(effect, Seal):
                self.sealing = True
        if not self.catch.done:
            effects += self.catch.ask(now)
        return [*resolved, *effects]

    def on_timer(self, now: float) -> list[Effect]:
        return [*self.round.on_timer(now)] if self.round is not None else []

    # ---- frames ---------------------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[Effect]:
        """A frame of a known peer whose payload matches its hash.  It ends in exactly one counter."""
        kind = frame.header.kind
        if kind in _ROUND_KINDS and self._is_early(frame):
            self._keep_early(sender, frame)
            return []
        if not self._is_usable(sender, frame):
            return []
        if kind in _ROUND_KINDS:
            verdict, effects = self._on_round_frame(sender, frame, now)
        elif kind in (Kind.WANT_STATE, Kind.WANT_MANIFEST, Kind.WANT_LOGGED):
            verdict, effects = Verdict.ACCEPTED, self._serve(sender, frame.header)
        elif frame.header.round_no:
            verdict, effects = Verdict.ACCEPTED, []  # MISSING in a round: the next quiet spell asks again
            if self.round is not None and frame.header.round_no == self.round.plan.round_no:
                self.round.on_missing(sender, now)
        else:
            verdict, moved = self.catch.on_frame(sender, frame)
            effects = [*moved]
        self.counters.count(verdict)
        return effects

    def on_spoiled(self, sender: str, header: Header) -> list[Effect]:
        """A frame that does not match its hash.  The data plane counted it."""
        if self.round is None or header.round_no != self.round.plan.round_no:
            return []
        return [*self.round.on_spoiled(sender, header)]

    def _is_usable(self, sender: str, frame: Frame) -> bool:
        """Values in the codec that is due and finite, before anybody counts on them (P8, P9)."""
        kind = frame.header.kind
        this_round = self.round is not None and frame.header.round_no == self.round.plan.round_no
        if kind == Kind.CONTRIBUTION:
            if self.round is None or not this_round or sender not in self.round.plan.members:
                return True  # the round's own verdict says what it is
            codec = codec_named(self.round.plan.codec_of(sender))
        elif kind in (Kind.RESULT, Kind.LOGGED):
            codec = self._gather
        else:
            return True
        try:
            codec.check(frame.payload, self._elements)
        except FrameError as error:
            self.counters.count(error.verdict)
            if self.round is not None and this_round and kind == Kind.CONTRIBUTION:
                self.round.refuse(sender)
            return False
        return True

    def _on_round_frame(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        header = frame.header
        if self.round is not None and header.round_no == self.round.plan.round_no:
            verdict, moved = self.round.on_frame(sender, frame, now)
            return verdict, [*moved]
        if header.kind == Kind.RESULT and header.round_no == self._committed_round[0]:
            chunk, version = header.chunk, self._committed_round[1]
            if chunk < len(self.catch.versions) and self.catch.offer(version, chunk, frame.payload):
                return Verdict.ACCEPTED, []
        return Verdict.STALE, []

    def _serve(self, sender: str, header: Header) -> list[Effect]:
        chunk = header.chunk
        whole = self.catch.lowest == self.version and not self.sealing
        serving = whole and self.verified_version == self.version != NO_VERSION
        if header.kind == Kind.WANT_LOGGED:
            payload = self.log.get(header.version, chunk)
            if payload is not None:
                answer = Header(Kind.LOGGED, self._run_tag, version=header.version, chunk=chunk)
                return [SendFrame(sender, with_payload(answer, payload))]
        elif header.kind == Kind.WANT_STATE and serving and chunk < len(self.catch.versions):
            return [ServeState(sender, chunk, self.version)]
        elif header.kind == Kind.WANT_MANIFEST and serving and header.version == self.version:
            return [ServeManifest(sender, self.version)]
        missing = Header(
            Kind.MISSING, self._run_tag, decision_no=int(header.kind), version=header.version, chunk=chunk
        )
        return [SendFrame(sender, Frame(missing))]

    # ---- frames that overtook their explanation ----------------------------------------------------------------------

    def _is_early(self, frame: Frame) -> bool:
        number = frame.header.round_no
        if self.round is not None and number == self.round.plan.round_no:
            return self.round.is_early(frame)
        return number > self.last_round_no and frame.header.kind in (Kind.CONTRIBUTION, Kind.RESULT)

    def _keep_early(self, sender: str, frame: Frame) -> None:
        self._early.append((sender, frame))
        if len(self._early) > EARLY_KEPT:
            self._early.popleft()
            self.counters.count(Verdict.STALE)

    def _replay_early(self, now: float) -> list[Effect]:
        waiting, self._early = self._early, deque()
        effects: list[Effect] = []
        for sender, frame in waiting:
            effects += self.on_frame(sender, frame, now)
        return effects
