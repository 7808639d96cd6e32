"""A peer's part in the run: a replica for each fragment it holds, and the way of every bulk frame into its replica.
Pure.

Part of the peer machine.  A frame names its chunk, and a chunk belongs to one fragment.  Frames that overtook the
plan or decision that explains them wait here for a moment.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.effects import SendFrame
from farflung.peer.local.words import Frozen
from farflung.peer.machine.early_work import EarlyWork, fragment_of
from farflung.peer.machine.effects import Effect, ServeLogged, ServeManifest, ServePiece, ServeState
from farflung.peer.machine.replica import Replica, ReplicaRules
from farflung.protocol.errors import FrameError
from farflung.protocol.frames import (
    SERVED_KINDS,
    Frame,
    Header,
    Kind,
    Payload,
    Spoiled,
    bare_answer,
    with_payload,
)
from farflung.protocol.limits import BULK_HEADER_BYTES, ROUNDS_KEPT
from farflung.protocol.messages import FragmentTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import SUM_CODEC, Decision, Plan
from farflung.protocol.run_terms import Attached
from farflung.protocol.verdicts import Counters, Verdict

EARLY_KEPT = 256  # frames that overtook their plan or decision: kept for a moment
EARLY_BYTES = 64 * 1024 * 1024
_QUESTIONS = {Kind.WANT_CONTRIBUTION, Kind.WANT_RESULT, Kind.WANT_SUM}
_ROUND_KINDS = frozenset({Kind.CONTRIBUTION, Kind.RESULT, Kind.SUM} | _QUESTIONS)


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
        early: Callable[[Attached, str, Fragment], EarlyWork] | None = None,
    ) -> None:
        """UserError if the model has fewer chunks than the run has fragments.  `counters`: of all frames (P8);
        `early`: of a mode."""
        manifest, tag = attached.known.manifest, attached.known.tag
        rules = ReplicaRules(
            compare=manifest.merge.policy == "robust",
            measure=manifest.batch_clip < math.inf,
            rounds_kept=ROUNDS_KEPT if manifest.merge.audit else 0,
            state_parts=attached.form.parts,
        )
        self.replicas = {
            each.number: Replica(me, tag, each, log, rules, early(attached, me, each) if early else None)
            for each in attached.held
        }  # by fragment
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
        return min(replica.version for replica in self.replicas.values())

    @property
    def oldest_round_no(self) -> int:
        """Rounds before it are over in every fragment."""
        return min(replica.last_round_no for replica in self.replicas.values())

    def replica_of_round(self, round_no: int) -> Replica | None:
        """The replica in which this round is in flight, or for whose next round something is encoded."""
        if (fragment := fragment_of(round_no)) is not None:
            return self.replicas.get(fragment)
        for replica in self.replicas.values():
            if replica.round is not None and replica.round.plan.round_no == round_no:
                return replica
        return None

    def replica_of_chunk(self, chunk: int) -> Replica | None:
        return self._replica_of_chunk.get(chunk)

    def is_behind(self, ticks: tuple[FragmentTick, ...]) -> bool:
        """A peer one version behind is just applying it: no news, and with many fragments it is so all the time."""
        return any(not 0 <= tick.version - replica.version <= 1 for replica, tick in self.words(ticks))

    def words(self, ticks: tuple[FragmentTick, ...]) -> list[tuple[Replica, FragmentTick]]:
        """What a tick says of each fragment that is held here."""
        return [(self.replicas[tick.fragment], tick) for tick in ticks]

    def came_back(self) -> None:
        """The coordinator has let me in again; others may have closed their lines to me meanwhile."""
        for replica in self.replicas.values():
            replica.catch.came_back()

    # ---- rounds -----------------------------------------------------------------------------------------------

    def on_plan(self, plan: Plan, frozen: Frozen | None, now: float) -> list[Effect]:
        effects = self.replicas[plan.fragment].on_plan(plan, frozen, now)
        return effects + self._replay_early(now)

    def on_decision(self, decision: Decision, now: float) -> list[Effect]:
        replica = self.replica_of_round(decision.round_no)
        if replica is None:
            return []
        effects = replica.on_decision(decision, now)
        return effects + self._replay_early(now)

    def first_here(self) -> list[Replica]:
        """Those that are at version 0, as the run has it, and were not before; each is told of once."""
        found = [
            replica for replica in self.replicas.values() if replica.version == 0 and replica.is_the_runs
        ]
        news = [replica for replica in found if replica.fragment.number not in self._first_here]
        self._first_here |= {replica.fragment.number for replica in news}
        return news

    def on_aborted(self, round_no: int) -> None:
        for replica in self.replicas.values():
            replica.on_aborted(round_no)

    def on_timer(self, now: float) -> list[Effect]:
        return [effect for replica in self.replicas.values() for effect in replica.on_timer(now)]

    # ---- frames -------------------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[Effect]:
        """A frame of a known peer whose payload matches its hash.  It ends in exactly one counter."""
        replica = self.replica_of_chunk(frame.header.chunk)
        if replica is None:
            self.counters.count(Verdict.MALFORMED)
            return []
        meant = replica.ahead.meant(sender, frame)
        if meant is None:
            self.counters.count(Verdict.STALE)  # what is missing is asked for, as ever
            return []
        frame, kind = meant, meant.header.kind
        if kind in _ROUND_KINDS and replica.is_early(sender, frame):
            self._keep_early(sender, frame)
            return []
        if not self._is_usable(sender, frame, replica):
            return []
        effects: list[Effect] = []
        if kind in _ROUND_KINDS:
            verdict, effects = replica.on_round_frame(sender, frame, now)
        elif replica.ahead.takes(kind):
            verdict, effects = replica.ahead.on_frame(sender, frame)
        elif kind in (Kind.WANT_STATE, Kind.WANT_MANIFEST, Kind.WANT_LOGGED):
            verdict, effects = Verdict.ACCEPTED, answer(replica, sender, frame.header)
        elif kind is Kind.WANT_HAVE:
            verdict = Verdict.ACCEPTED
            replica.on_want_have(sender, frame.header, now)
        elif frame.header.round_no and kind is not Kind.MISSING:
            # No round knows such frames, and nobody's patience is renewed by them.
            verdict = Verdict.MALFORMED
        elif frame.header.round_no:
            verdict = Verdict.ACCEPTED  # the next quiet spell asks again
            if replica.round is not None and frame.header.round_no == replica.round.plan.round_no:
                replica.round.on_missing(sender, now)
        else:
            verdict = replica.on_piece(sender, frame)
        self.counters.count(verdict)
        return effects

    def on_spoiled(self, sender: str, spoiled: Spoiled) -> list[Effect]:
        """A frame that is not what it should be.  The data plane counted it; its sender answers for it (P8)."""
        header = spoiled.header
        if header is not None and header.kind in SERVED_KINDS:
            replica = self.replica_of_chunk(header.chunk)
            if replica is not None:
                replica.catch.on_spoiled(sender, header)
        number = header.round_no if header is not None else 0
        effects: list[Effect] = []
        # What names no round speaks against its sender in all that are in flight.
        for replica in self.replicas.values():
            if replica.round is not None and number in (0, replica.round.plan.round_no):
                effects += replica.round.on_spoiled(sender, spoiled)
        return effects

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        for replica in self.replicas.values():
            replica.on_lines(unreached, arriving, now)

    @property
    def in_round(self) -> bool:
        return any(replica.round is not None for replica in self.replicas.values())

    @property
    def others_in_round(self) -> int:
        """Of the round with most members, if there is one."""
        return max(
            (
                len(replica.round.plan.members) - 1
                for replica in self.replicas.values()
                if replica.round is not None
            ),
            default=0,
        )

    @property
    def owing_in_round(self) -> int:
        """Members whose bytes are due here.  Between its phases a round brings nothing."""
        return len(
            set().union(
                *(replica.round.owing for replica in self.replicas.values() if replica.round is not None)
            )
        )

    @property
    def early_count(self) -> int:
        """Frames that wait for their explanation, and end in a counter when it comes."""
        return len(self._early)

    @property
    def expects_bytes(self) -> bool:
        """Others have something for me: what arrives then shows what my line can take in."""
        return any(replica.round is not None or not replica.catch.done for replica in self.replicas.values())

    def is_payload(self, codec: str, payload: Payload) -> bool:
        """So many finite values in that codec."""
        try:
            self._check(codec, payload, self._elements)
        except FrameError:
            return False
        return True

    def _is_usable(self, sender: str, frame: Frame, replica: Replica) -> bool:
        """Values in the codec that is due and finite, before anybody counts on them (P8, P9)."""
        kind = frame.header.kind
        if kind == Kind.CONTRIBUTION:
            plan = replica.round.plan if replica.round is not None else None
            if plan is None or frame.header.round_no != plan.round_no or sender not in plan.members:
                return True  # the round's own verdict says what it is
            codec = plan.codec_of(sender)
        elif kind in (Kind.RESULT, Kind.LOGGED):
            codec = self._gather
        elif kind == Kind.SUM:
            codec = SUM_CODEC
        else:
            return True
        try:
            self._check(codec, frame.payload, self._elements)
        except FrameError as error:
            self.counters.count(error.verdict)
            if kind == Kind.LOGGED:
                replica.catch.on_spoiled(sender, frame.header)
            else:
                replica.refuse(sender, frame.header.round_no, error.verdict)
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


def answer(replica: Replica, asker: str, header: Header) -> list[Effect]:
    """To WANT_STATE, WANT_MANIFEST or WANT_LOGGED.  Who asks checks all of it, and believes nobody."""
    chunk, tag, fragment = header.chunk, header.run_tag, replica.fragment
    if header.kind == Kind.WANT_LOGGED:
        payload = replica.log.get(fragment.number, header.version, chunk)
        if payload is not None:
            logged = Header(Kind.LOGGED, tag, version=header.version, chunk=chunk)
            return [SendFrame(asker, with_payload(logged, payload))]
        if replica.log.on_disk:
            return [ServeLogged(asker, chunk, header.version, fragment.number)]
    elif header.kind == Kind.WANT_STATE and (replica.serves or replica.is_the_runs):
        return [ServeState(asker, chunk, replica.version)]
    elif header.kind == Kind.WANT_STATE and replica.gives(chunk):
        return [ServePiece(asker, chunk, replica.catch.given_at(chunk), replica.catch.hash_of(chunk))]
    elif header.kind == Kind.WANT_MANIFEST and (hashes := replica.catch.hashes_at(header.version)):
        listed = Header(Kind.MANIFEST, tag, version=header.version, chunk=fragment.first)
        return [SendFrame(asker, with_payload(listed, hashes))]
    elif header.kind == Kind.WANT_MANIFEST and replica.serves and header.version <= replica.version:
        return [ServeManifest(asker, fragment.first, replica.version, fragment.number)]
    return [SendFrame(asker, bare_answer(Kind.MISSING, header))]
