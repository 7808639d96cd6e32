"""A peer's part in the run: a replica for each fragment it holds, and the way of every bulk frame into its replica.
Pure.

Part of the peer machine.  A frame names its chunk, and a chunk belongs to one fragment.  Frames that overtook the
plan or decision that explains them wait here for a moment.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.member import MemberRound
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.fragment_rounds import (
    FragmentRounds,
    ReplicaModes,
    RoundTerms,
    WorkSettled,
    fragment_of,
)
from farflung.peer.machine.held_fragment import STATE_WANTS, HeldFragment, Rolling, StateSource
from farflung.protocol.errors import Counters, FrameError, Verdict
from farflung.protocol.frames import SERVED_KINDS, Frame, Kind, Payload, Spoiled
from farflung.protocol.limits import BULK_HEADER_BYTES
from farflung.protocol.messages import FragmentTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.outer_numbers import MOMENTUM_PARTS
from farflung.protocol.round_words import Commit, Decision, Plan
from farflung.protocol.run_terms import Attached

# ---- replica -----------------------------------------------------------------------------------------------
# One fragment as one peer has it: what it holds of its state, and its part in rounds. Pure.
#
# Held by the participation, one for each fragment; the replicas know nothing of each other. Whoever asks,
# asks the part that knows: `held` (held_fragment.py) or `rounds` (fragment_rounds.py), of which neither knows
# the other. Here is what concerns both: a round starts from the version that is held, and its commit leads to
# the next; results that come late are put into the state; and what is written over the state may be older
# than what the work was merged into.


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


# ---- replicas ----------------------------------------------------------------------------------------------

EARLY_KEPT = 256  # frames that overtook their plan or decision: kept for a moment
EARLY_BYTES = 64 * 1024 * 1024


# (codec, payload, elements): FrameError unless the payload is so many finite values in that codec.
CheckPayload = Callable[[str, Payload, int], None]


class Replicas:
    def __init__(
        self,
        me: str,
        attached: Attached,
        log: ResultLog,
        check: CheckPayload,
        counters: Counters | None = None,
        modes: Callable[[Attached, str, Fragment], ReplicaModes] | None = None,
    ) -> None:
        """UserError if the model has fewer chunks than the run has fragments.  `counters`: of all frames (P8)."""
        manifest, tag = attached.known.manifest, attached.known.tag
        terms = RoundTerms(
            compare=manifest.merge.policy == "robust",
            measure=manifest.batch_clip < math.inf,
        )
        self.replicas: dict[int, Replica] = {}  # by fragment
        for each in attached.held:
            of_modes = modes(attached, me, each) if modes else None
            self.replicas[each.number] = Replica(me, tag, each, log, terms, of_modes, attached.form.parts)
        self.counters = Counters() if counters is None else counters
        self._elements = attached.model.chunk_elements
        self._replica_of_chunk = {
            chunk: replica for replica in self.replicas.values() for chunk in replica.fragment.chunks
        }
        self._check = check
        self._gather = manifest.round.gather_codec
        self._early: deque[tuple[str, Frame]] = deque()
        self._first_here: set[int] = set()  # fragments

    # ---- replicas ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the least advanced fragment."""
        return min(replica.held.version for replica in self.replicas.values())

    @property
    def oldest_round_no(self) -> int:
        """Rounds before it are over in every fragment."""
        return min(replica.rounds.last_no for replica in self.replicas.values())

    def replica_of_round(self, round_no: int) -> Replica | None:
        """The replica in which this round is in flight, or for whose next round something is encoded."""
        if (fragment := fragment_of(round_no)) is not None:
            return self.replicas.get(fragment)
        for replica in self.replicas.values():
            if replica.rounds.flight_of(round_no) is not None:
                return replica
        return None

    def replica_of_chunk(self, chunk: int) -> Replica | None:
        return self._replica_of_chunk.get(chunk)

    def is_behind(self, ticks: tuple[FragmentTick, ...]) -> bool:
        """A peer one version behind is just applying it: no news, and with many fragments it is so all the time."""
        return any(not 0 <= tick.version - replica.held.version <= 1 for replica, tick in self.words(ticks))

    def words(self, ticks: tuple[FragmentTick, ...]) -> list[tuple[Replica, FragmentTick]]:
        """What a tick says of each fragment that is held here."""
        return [(self.replicas[tick.fragment], tick) for tick in ticks]

    def came_back(self) -> None:
        """The coordinator has let me in again; others may have closed their lines to me meanwhile."""
        for replica in self.replicas.values():
            replica.held.catch.fetcher.came_back()

    # ---- rounds -----------------------------------------------------------------------------------------------

    def on_plan(self, plan: Plan, frozen: Frozen | None, now: float) -> list[Effect]:
        effects = self.replicas[plan.fragment].on_plan(plan, frozen, now)
        return effects + self._replay_early(now)

    def on_decision(self, decision: Decision, now: float) -> list[Effect]:
        replica = self.replica_of_round(decision.round_no)
        if replica is None:
            return []
        effects = flight.on_decision(decision, now) if (flight := replica.rounds.flight) is not None else []
        return [*effects, *self._replay_early(now)]

    def first_here(self) -> list[Replica]:
        """Those that are at version 0, as the run has it, and were not before; each is told of once."""
        found = [each for each in self.replicas.values() if each.held.version == 0 and each.held.is_the_runs]
        news = [replica for replica in found if replica.fragment.number not in self._first_here]
        self._first_here |= {replica.fragment.number for replica in news}
        return news

    def on_aborted(self, round_no: int) -> None:
        for replica in self.replicas.values():
            replica.rounds.on_aborted(round_no)

    def on_timer(self, now: float) -> list[Effect]:
        return [effect for flight in self.flights for effect in flight.on_timer(now)]

    # ---- frames -------------------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[Effect]:
        """A frame of a known peer whose payload matches its hash.  It ends in exactly one counter."""
        replica = self.replica_of_chunk(frame.header.chunk)
        if replica is None:
            self.counters.count(Verdict.MALFORMED)
            return []
        meant = replica.rounds.ahead.meant(sender, frame)
        if meant is None:
            self.counters.count(Verdict.STALE)  # what is missing is asked for, as ever
            return []
        frame, kind = meant, meant.header.kind
        if kind.of_round and replica.rounds.is_early(sender, frame):
            self._keep_early(sender, frame)
            return []
        if not self._is_usable(sender, frame, replica):
            return []
        effects: list[Effect] = []
        if kind.of_round:
            verdict, effects = replica.on_round_frame(sender, frame, now)
        elif replica.rounds.ahead.takes(kind):
            verdict, effects = replica.rounds.ahead.on_frame(sender, frame)
        elif kind in STATE_WANTS:
            verdict, effects = Verdict.ACCEPTED, replica.source.answer(sender, frame.header, now)
        elif frame.header.round_no and kind is not Kind.MISSING:
            # No round knows such frames, and nobody's patience is renewed by them.
            verdict = Verdict.MALFORMED
        elif frame.header.round_no:
            verdict = Verdict.ACCEPTED  # the next quiet spell asks again
            if (flight := replica.rounds.flight_of(frame.header.round_no)) is not None:
                flight.asking.on_heard(sender, now)
        else:
            verdict = replica.held.on_piece(sender, frame)
        self.counters.count(verdict)
        return effects

    def on_spoiled(self, sender: str, spoiled: Spoiled) -> list[Effect]:
        """A frame that is not what it should be.  The data plane counted it; its sender answers for it (P8)."""
        header = spoiled.header
        if header is not None and header.kind in SERVED_KINDS:
            replica = self.replica_of_chunk(header.chunk)
            if replica is not None:
                replica.held.catch.fetcher.on_spoiled(sender, header)
        number = header.round_no if header is not None else 0
        effects: list[Effect] = []
        for flight in self.flights:  # what names no round speaks against its sender in all that are in flight
            if number in (0, flight.plan.round_no):
                effects += flight.on_spoiled(sender, spoiled)
        return effects

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        for replica in self.replicas.values():
            replica.rounds.on_lines(unreached, arriving, now)

    @property
    def flights(self) -> list[MemberRound]:
        """The rounds in flight."""
        each = (replica.rounds.flight for replica in self.replicas.values())
        return [flight for flight in each if flight is not None]

    @property
    def others_in_round(self) -> int:
        """Of the round with most members, if there is one."""
        return max((len(flight.plan.members) - 1 for flight in self.flights), default=0)

    @property
    def owing_in_round(self) -> int:
        """Members whose bytes are due here.  Between its phases a round brings nothing."""
        return len(set().union(*(flight.owing for flight in self.flights)))

    @property
    def early_count(self) -> int:
        """Frames that wait for their explanation, and end in a counter when it comes."""
        return len(self._early)

    @property
    def expects_bytes(self) -> bool:
        """Others have something for me: what arrives then shows what my line can take in."""
        return bool(self.flights) or not all(each.held.chunks.done for each in self.replicas.values())

    def is_payload(self, codec: str, payload: Payload) -> bool:
        """So many finite values in that codec."""
        try:
            self._check(codec, payload, self._elements)
        except FrameError:
            return False
        return True

    def _is_usable(self, sender: str, frame: Frame, replica: Replica) -> bool:
        """Values in the codec that is due and finite, before anybody counts on them (P8, P9)."""
        kind, flight = frame.header.kind, replica.rounds.flight_of(frame.header.round_no)
        codec = flight.codec_of(kind, sender) if flight is not None else ""
        if kind in (Kind.RESULT, Kind.LOGGED):
            codec = self._gather
        if not codec:
            return True  # there are no values in it; or the round's own verdict says what it is
        try:
            self._check(codec, frame.payload, self._elements)
        except FrameError as error:
            self.counters.count(error.verdict)
            if kind == Kind.LOGGED:
                replica.held.catch.fetcher.on_spoiled(sender, frame.header)
            elif flight is not None:
                flight.refuse(sender, error.verdict)
            return False
        return True

    # ---- frames that overtook their explanation ----------------------------------------------------------------------

    def _keep_early(self, sender: str, frame: Frame) -> None:
        """The sender with most bytes here loses its oldest frame first: a flood pushes out nobody else's."""
        self._early.append((sender, frame))
        held: Counter[str] = Counter()
        for each, kept in self._early:
            held[each] += BULK_HEADER_BYTES + len(kept.payload)
        while len(self._early) > EARLY_KEPT or held.total() > EARLY_BYTES:
            greedy = max(sorted(held), key=lambda each: held[each])
            place = next(at for at, (each, _) in enumerate(self._early) if each == greedy)
            held[greedy] -= BULK_HEADER_BYTES + len(self._early[place][1].payload)
            del self._early[place]
            self.counters.count(Verdict.STALE)

    def _replay_early(self, now: float) -> list[Effect]:
        waiting, self._early = self._early, deque()
        effects: list[Effect] = []
        for sender, frame in waiting:
            effects += self.on_frame(sender, frame, now)
        return effects
