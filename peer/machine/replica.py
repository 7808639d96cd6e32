"""One fragment as one peer has it: what it holds of its state, and its part in rounds.  Pure.

Held by the participation, one for each fragment; the replicas know nothing of each other.  Whoever asks, asks the part
that knows: `held` (held_fragment.py) or `rounds` (fragment_rounds.py), of which neither knows the other.  Here is what
concerns both: a round starts from the version that is held, and its commit leads to the next; results that come late
are put into the state; and what is written over the state may be older than what the work was merged into.
"""

from __future__ import annotations

from collections.abc import Mapping

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.result_log import ResultLog
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.fragment_rounds import FragmentRounds, RoundTerms, WorkSettled
from farflung.peer.machine.held_fragment import HeldFragment, Rolling, StateSource
from farflung.peer.machine.replica_modes import ReplicaModes
from farflung.protocol.frames import Frame, Kind
from farflung.protocol.messages import FragmentTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.outer_numbers import MOMENTUM_PARTS
from farflung.protocol.round_words import Commit, Plan
from farflung.protocol.verdicts import Verdict


class Replica:
    def __init__(
        self,
        me: str,
        run_tag: bytes,
        fragment: Fragment,
        log: ResultLog,
        terms: RoundTerms | None = None,
        modes: ReplicaModes | None = None,
        parts: int = MOMENTUM_PARTS,
    ) -> None:
        """`log`: of all fragments together; `parts`: of a chunk's state."""
        self.fragment = fragment
        self.held = HeldFragment(me, run_tag, fragment, log, parts)
        self.rounds = FragmentRounds(me, run_tag, fragment, terms or RoundTerms(), modes or ReplicaModes())
        self.source = StateSource(self.held, run_tag)

    @property
    def idle(self) -> bool:
        """Nothing is going on that would end in a new version here."""
        return self.rounds.is_idle and not self.held.sealing and self.held.chunks.done

    # ---- the coordinator's words --------------------------------------------------------------------------------

    def on_plan(self, plan: Plan, frozen: Frozen | None, now: float) -> list[Effect]:
        is_here = plan.version == self.held.version and not self.held.sealing
        return self.rounds.on_plan(plan, frozen, now, is_here)

    def on_commit(self, commit: Commit, now: float, nonce: bytes = b"") -> None:
        held = self.held
        held.grounds.on_nonce(commit.version, nonce)
        if commit.version <= held.version:
            return
        held.chunks.on_commit(commit)
        for index, piece in self.rounds.on_commit(commit, now).items():
            held.chunks.offer(commit.version, self.fragment.first + index, piece.payload, piece.hash)

    def on_tick(self, tick: FragmentTick) -> bool:
        """Where the run is.  True: what was held was not its state."""
        differs = self.held.on_tick(tick)
        self.rounds.on_tick(tick, self.held.version)
        return differs

    # ---- the state is another one -------------------------------------------------------------------------------

    def found(self) -> list[Effect]:
        """The trainer has written the initial values, or they were read: this is version 0 now."""
        self.rounds.end()
        return self.filled(0)

    def filled(self, version: int) -> list[Effect]:
        """Every value is that of this version now."""
        self._lose_track_if_torn()
        self.rounds.drop_ahead()
        return self.held.filled(version)

    def unfilled(self, touched: bool, recalled: Mapping[int, tuple[int, bytes]] | None = None) -> None:
        """It came to nothing.  `touched`: some values were written, so that what is there now is no version at all; but
        for pieces that were fetched before a crash and stand there again, chunk -> (version, its digest or empty)."""
        if touched:
            self._lose_track_if_torn()
        self.held.unfilled(touched, recalled or {})

    def _lose_track_if_torn(self) -> None:
        """What was written over was on its way to a newer version."""
        if isinstance(self.held.before_filling, Rolling):
            self.rounds.lose_track()

    def go_back(self, version: int, digest: bytes | None) -> bool:
        """The run lost its newest state and is at this version again: what is newer here is void, and work on it.
        True: before the last round just this version was held, and it is to be written here now."""
        had = self.held.before_filling.version != NO_VERSION
        is_kept_before = self.held.go_back(version, digest)
        self.rounds.go_back(lost=had and not self.held.whole)
        return is_kept_before

    def on_sealed(self, version: int, digest: bytes) -> WorkSettled | None:
        """The state is whole at `version`; None if it is not the run's."""
        return self.rounds.on_sealed(version) if self.held.on_sealed(version, digest) else None

    # ---- moving on ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Effect]:
        """Apply what can be applied, ask for what is missing.  Not to be called while the trainer reads the anchor."""
        held, rounds = self.held, self.rounds
        resolved = rounds.take_resolved()
        if held.sealing or held.filling:
            return [*resolved]
        rolled, shows = held.roll(rounds.planned_at)
        own, ahead = held.own_results(), rounds.ahead.send(now) if rounds.is_idle else []
        asks = held.catch.ask(now, rounds.last_commit.coming(now)) if not held.chunks.done else []
        news = self.source.news(now)
        return [*resolved, *own, *ahead, *rolled, *asks, *news, *shows, *held.notes()]

    def on_round_frame(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[Effect]]:
        header, last, chunks = frame.header, self.rounds.last_commit, self.held.chunks
        is_late = header.kind == Kind.RESULT and header.round_no == last.round_no
        if is_late and self.rounds.flight_of(header.round_no) is None:
            if chunks.offer(last.version, header.chunk, frame.payload, header.hash):
                return Verdict.ACCEPTED, [*last.late.on_result(sender, frame, now)] if last.late else []
        return self.rounds.on_frame(sender, frame, now)
