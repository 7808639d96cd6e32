"""What a peer says to the coordinator: builds its messages, numbers them, repeats what was not seen.  Pure.

Part of the peer machine.  One `HeartbeatBuilder` lives as long as the peer; a session lives as long as the
coordinator knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from farflung.collectives.round.member import MemberRound
from farflung.collectives.round.pieces import Dots, Progress
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import ToCoordinator
from farflung.peer.machine.replicas import Replica, Replicas
from farflung.peer.machine.trainer_proxy import FragmentWork, TrainerProxy
from farflung.protocol.digests import bits, mask_of, mask_to_bytes, root_of, split_hashes
from farflung.protocol.errors import LeaveCause
from farflung.protocol.limits import PART_BYTES, PARTS_AT_ONCE
from farflung.protocol.messages import (
    Beat,
    FragmentBeat,
    FragmentTick,
    Leave,
    OfBeat,
    OpenRound,
    ProgressReport,
    Sent,
    Show,
    Shown,
    Tick,
    ToMember,
    What,
)
from farflung.protocol.mode_words import (
    Audited,
    ChunkVerdict,
    KeptBeat,
    MeshReport,
    ReachBeat,
    ShelfBeat,
    ShelvedList,
)
from farflung.protocol.round_words import THE_RESULT, AnySection, DotProducts, GroupSums, Plan
from farflung.protocol.run_terms import Known
from farflung.protocol.signed_words import (
    Results,
    SumsOfGroups,
    claim_part,
    results_part,
    sent_part,
    sums_of_groups_part,
)
from farflung.protocol.states import Phase

PROGRESS_EVERY_S = 0.25  # how often a partial progress is told; a complete one is told at once
# In groups, where many tell theirs: until the decision only what is complete counts, and then what enough members hold.
# Nothing is complete any more where somebody died: so the last eighth is told as often as what comes after it.
SCATTER_EVERY_S, GATHER_EVERY_S = 2.0, 0.5
LAST_PART = 1 / 8
RARE = 2.0  # times as long as usual from beat to beat: what is new may wait for the next one


@dataclass
class Vitals:
    """Figures that the shell keeps up to date; they are reported, and decide nothing."""

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    tx_bytes: int = 0
    rx_bytes: int = 0
    up_bytes_per_s: int = 0
    down_bytes_per_s: int = 0
    rough: bool = True  # these two
    stuck: bool = False  # the trainer takes no steps though it could
    saved: int = -1  # newest version of which a checkpoint was written
    shelf: ShelvedList = ()  # what it can bring without anybody's help
    reach: ReachBeat = field(default_factory=ReachBeat)  # by which ways it reaches others, beside dialling


@dataclass
class ReportedRound:
    """What was said in one fragment's newest round."""

    sent: Sent | None = None
    progress: ProgressReport | None = None
    progress_at: float = 0.0
    told_complete: tuple[bool, bool, bool] = (False, False, False)
    # What I signed last of my results and of my group's sums, and the signature.
    signed: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)


class HeartbeatBuilder:
    def __init__(self, sign: Callable[[bytes], bytes]) -> None:
        """`sign`: with this peer's identity key."""
        self._sign = sign
        self.session = b""
        self.run_id = b""
        self._gather_codec = ""  # of results
        self.vitals = Vitals()
        self.roster_no = 0
        self.era = 0  # what is asked for now is meant in it: the run may go back while the shell is at it
        self.leaving = False
        self.lacks_start = False  # what the run begins with is nothing that may be read here
        self._seq = 0
        self._told_punched: tuple[str, ...] = ()
        self._said: dict[int, ReportedRound] = {}  # by fragment

    @staticmethod
    def of_newcomer(before: HeartbeatBuilder) -> HeartbeatBuilder:
        """Of the same peer, which holds nothing of the run any more: only what is told of its line stays."""
        reports = HeartbeatBuilder(before._sign)
        reports.vitals = replace(before.vitals, saved=-1, shelf=(), stuck=False)
        return reports

    def begin_session(self, session: bytes, known: Known) -> None:
        self.session, self.run_id, self._seq, self.roster_no = session, known.run_id, 0, 0
        self._gather_codec = known.manifest.round.gather_codec

    @property
    def has_news(self) -> bool:
        """Of ways to others, on which rounds wait."""
        return self.vitals.reach.punched != self._told_punched

    def begin_round(self, fragment: int) -> None:
        self._said[fragment] = ReportedRound()

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _signed(self, sent: Sent) -> Sent:
        return msgspec.structs.replace(sent, signature=self._sign(sent_part(self.run_id, sent)))

    # ---- rounds ----------------------------------------------------------------------------------------

    def sent(self, plan: Plan, hashes: bytes, frozen: Frozen | None) -> ToCoordinator:
        """My hash list; without `frozen`: I have nothing to contribute."""
        sent = Sent(
            session=self.session,
            seq=self._next(),
            round_no=plan.round_no,
            hashes=hashes,
            tokens=frozen.tokens if frozen else 0,
            steps=frozen.steps if frozen else 0,
            loss=frozen.loss if frozen else None,
            used=frozen.used if frozen else (),
            seat=frozen.seat if frozen else 0,
            counted=frozen.counted if frozen else b"",
            signature=b"",
        )
        sent = self._signed(sent)
        self._said[plan.fragment].sent = sent
        return ToCoordinator(sent)

    def maybe_progress(self, flight: MemberRound, now: float) -> list[ToCoordinator]:
        """My progress, if it is news: at once when something became complete, else now and then."""
        said, complete = self._said[flight.plan.fragment], flight.complete
        if complete == said.told_complete and now - said.progress_at < _every_s(flight):
            return []
        report = self._build_progress(flight)
        said.told_complete, said.progress_at = complete, now
        before = said.progress
        if before is not None and msgspec.structs.replace(report, seq=before.seq) == before:
            return []
        said.progress = report
        return [ToCoordinator(self._news_in(report, before) if flight.plan.column else report)]

    def _news_in(self, report: ProgressReport, before: ProgressReport | None) -> ProgressReport:
        """Without what I told to hold before.  Words of one session come in order, or it ends."""
        if before is None or before.session != self.session or before.held.keys() - report.held.keys():
            return report
        new = {member: held for member, held in report.held.items() if before.held.get(member) != held}
        return msgspec.structs.replace(report, held=new, held_since=before.seq)

    def _build_progress(self, flight: MemberRound) -> ProgressReport:
        progress, decision = flight.progress(), flight.deciding.newest
        merged = mask_of(progress.merged)
        report = ProgressReport(
            session=self.session,
            seq=self._next(),
            round_no=flight.plan.round_no,
            decision_no=flight.deciding.number,
            held={member: (mask_to_bytes(mask), digest) for member, (mask, digest) in progress.held.items()},
            refused=progress.refused,
            cut_off=progress.cut_off,
            merged=mask_to_bytes(merged),
            merged_hashes=b"".join(progress.merged[chunk] for chunk in bits(merged)),
            got=mask_to_bytes(progress.got[0]),
            got_hash=progress.got[1],
            dots=_told(progress.dots),
            inputs=progress.inputs,
            signature=b"",
            lengths=progress.lengths,
            got_by=progress.got_by,
            sections=_unless_bare(
                MeshReport(self._sums(flight, progress), _told(progress.sum_dots), progress.sum_tags)
            ),
        )
        if decision is None or not progress.merged:
            return report
        if flight.plan.column:
            added = SumsOfGroups.of(decision, self._gather_codec, report)
            statement = sums_of_groups_part(self.run_id, added)
        else:
            results = Results.of(flight.plan, decision, self._gather_codec, report)
            statement = results_part(self.run_id, results)
        signature = self._signature(flight.plan.fragment, "results", statement)
        return msgspec.structs.replace(report, signature=signature)

    def _sums(self, flight: MemberRound, progress: Progress) -> GroupSums | None:
        """What I added up of my group, signed."""
        decision, group = flight.deciding.newest, flight.plan.members  # by my own view of both
        if decision is None or not progress.sums:
            return None
        made = mask_of(progress.sums)
        hashes = b"".join(progress.sums[chunk] for chunk in bits(made))
        bare = GroupSums(mask_to_bytes(made), hashes, progress.sum_inputs, b"")
        made_of = Results.of_group(decision, group, decision.weights, bare)
        statement = results_part(self.run_id, made_of)
        signature = self._signature(flight.plan.fragment, "sums", statement)
        return msgspec.structs.replace(bare, signature=signature)

    def _signature(self, fragment: int, of: str, statement: bytes) -> bytes:
        """Of my results or sums: made once for each set of them, however often it is told."""
        signed = self._said[fragment].signed
        if signed.get(of, (b"", b""))[0] != statement:
            signed[of] = statement, self._sign(statement)
        return signed[of][1]

    def repeat(self, tick: FragmentTick, flight: MemberRound | None) -> list[ToCoordinator]:
        """What the coordinator shows not to have seen is said again, under a new number."""
        again: list[ToCoordinator] = []
        if flight is None or tick.round_no != flight.plan.round_no:
            return again
        said = self._said[flight.plan.fragment]
        if said.sent is not None and not tick.sent_seen:
            said.sent = self._signed(
                msgspec.structs.replace(said.sent, session=self.session, seq=self._next())
            )
            again.append(ToCoordinator(said.sent))
        if said.progress is not None and tick.progress_seen < said.progress.seq:
            said.progress = msgspec.structs.replace(said.progress, session=self.session, seq=self._next())
            again.append(ToCoordinator(said.progress))
        return again

    def audited(
        self, round_no: int, chunks: tuple[ChunkVerdict, ...], group: int = THE_RESULT
    ) -> ToCoordinator:
        """`group`: whose sums these are."""
        return ToCoordinator(
            Audited(session=self.session, seq=self._next(), round_no=round_no, chunks=chunks, group=group)
        )

    # ---- what the coordinator asks to see -----------------------------------------------------------------

    def shown(self, show: Show, raw: bytes | None) -> list[ToCoordinator]:
        """The parts of the answer.  A list of hashes is signed: it claims a state."""
        signature = b""
        if show.what is What.HASHES and raw:
            digest = root_of(split_hashes(raw))
            signature = self._sign(claim_part(self.run_id, self.era, show.fragment, show.version, digest))
        return [
            ToCoordinator(
                Shown(
                    session=self.session,
                    seq=self._next(),
                    question=show.question,
                    start=start,
                    total=len(raw or b""),
                    part=part,
                    signature=signature,
                )
            )
            for start, part in _parts(show, raw or b"")
        ]

    # ---- beats -----------------------------------------------------------------------------------------

    def beat(
        self,
        part: Replicas,
        training: TrainerProxy,
        amended: int = 0,
        kept: int = 0,
        of_modes: tuple[OfBeat, ...] = (),
    ) -> ToCoordinator:
        """`amended`: how many amendments are known; `kept`: the number of the newest head that is kept."""
        vitals = self.vitals
        begins_more = not self.leaving or training.stays_for_round
        begins_more = begins_more and not training.leases.in_doubt
        self._told_punched = vitals.reach.punched
        shelf = (ShelfBeat(vitals.shelf),) if vitals.shelf else ()
        kept_no = (KeptBeat(kept),) if kept else ()
        return ToCoordinator(
            Beat(
                session=self.session,
                seq=self._next(),
                roster_no=self.roster_no,
                fragments=tuple(
                    _fragment_beat(replica, training.works[number], begins_more)
                    for number, replica in part.replicas.items()
                ),
                phase=self._phase(part, training),
                step=vitals.step,
                tokens=vitals.tokens,
                loss=vitals.loss,
                tx_bytes=vitals.tx_bytes,
                rx_bytes=vitals.rx_bytes,
                up_bytes_per_s=vitals.up_bytes_per_s,
                down_bytes_per_s=vitals.down_bytes_per_s,
                rough=vitals.rough,
                have=tuple(sorted(training.leases.known)),
                unsure=training.leases.unsure,
                want=training.leases.want,
                samples=training.leases.samples,
                era=self.era,
                saved=vitals.saved,
                leaving=self.leaving,
                data=training.leases.data,
                amended=amended,
                lacks_start=self.lacks_start,
                forward=training.forward,
                sections=(*of_modes, *_unless_bare(vitals.reach), *shelf, *kept_no),
            )
        )

    def _phase(self, part: Replicas, training: TrainerProxy) -> Phase:
        if self.vitals.stuck:
            return Phase.STUCK
        return Phase.LEAVING if self.leaving else phase_of(part, training)

    def leave(self, cause: LeaveCause) -> ToCoordinator:
        """No sentence: it might say what lies on this machine, and its owner alone is told that."""
        return ToCoordinator(Leave(session=self.session, seq=self._next(), reason=cause.value))


class BeatTimes:
    """When my next beat is due, what may wait for it, and how long the coordinator may say nothing: it answers each of
    them."""

    def __init__(self) -> None:
        self._said_at = self._heard_at = 0.0
        self.newest = 0  # the number of the newest word in this session
        # In no round and in one, by the newest tick of each sort; 0: as the run's terms say.
        self._told_s = self._told_in_round_s = self._told_at = 0.0
        self._answered = 0  # the newest beat of mine of which I know the answer
        # Until the coordinator knows that I hold the newest version: as a newcomer, and as a member of its round.
        self._is_awaited = True

    def begin(self, now: float) -> None:
        """A session."""
        self._heard_at, self._told_s, self._told_in_round_s = now, 0.0, 0.0
        self._is_awaited, self._answered, self.newest = True, 0, 0

    def said(self, now: float) -> None:
        self._said_at = now

    def heard(self, message: ToMember, now: float) -> None:
        self._heard_at, self.newest = now, message.seq
        if isinstance(message, Tick) and any(each.round_no for each in message.fragments):
            self._told_in_round_s = message.beat_s
        elif isinstance(message, Tick):
            self._told_s = message.beat_s
            if message.answers != self._answered:  # else it is the answer once more, with news
                self._answered, self._told_at = message.answers, now
            self._is_awaited &= not all(each.verified for each in message.fragments)
        self._is_awaited |= isinstance(message, OpenRound)

    def news_may_wait(self, usual_s: float) -> bool:
        """For the next beat.  In a run so large that beats are rare all have a new version after each commit, and are
        ready some time later: if they said so at once, each would beat three times for one."""
        return self.are_rare(usual_s) and not self._is_awaited

    def are_rare(self, usual_s: float) -> bool:
        return self._told_s >= RARE * usual_s

    def is_due(self, usual_s: float, in_round: bool, now: float) -> bool:
        """Whoever is in a round is looked after more closely.  What is told in a large run is my turn among others,
        from the first answer to my beat on: one that comes late was given after turns that are as much later."""
        every_s = self._every_s(usual_s, in_round)
        is_turn = every_s > usual_s and not in_round
        return now >= (max(self._said_at, self._told_at) if is_turn else self._said_at) + every_s

    def is_lost(self, usual_s: float, patience_s: float, in_round: bool, now: float) -> bool:
        """`patience_s`: where beats are as usual."""
        late_s = self._every_s(usual_s, in_round) - usual_s
        return now - self._heard_at >= patience_s + late_s

    def _every_s(self, usual_s: float, in_round: bool) -> float:
        return max(usual_s, self._told_in_round_s if in_round else self._told_s)


def _every_s(flight: MemberRound) -> float:
    if not flight.plan.column:
        return PROGRESS_EVERY_S
    here, due, *_ = flight.counts
    scatters = flight.deciding.newest is None and due - here > LAST_PART * due
    return SCATTER_EVERY_S if scatters else GATHER_EVERY_S


def _unless_bare(section: AnySection) -> tuple[AnySection, ...]:
    """What says nothing is left out."""
    return (section,) if section != type(section)() else ()


def _parts(show: Show, raw: bytes) -> list[tuple[int, bytes]]:
    """From where the question begins, so many at once; one that is empty says that there is nothing."""
    if not raw:
        return [(0, b"")]
    end = min(len(raw), show.start + PARTS_AT_ONCE * PART_BYTES)
    return [(at, raw[at : min(at + PART_BYTES, end)]) for at in range(show.start, end, PART_BYTES)]


def _told(dots: Dots | None) -> DotProducts | None:
    if dots is None:
        return None
    return DotProducts(mask_to_bytes(dots.members), mask_to_bytes(dots.chunks), dots.products)


def _fragment_beat(replica: Replica, work: FragmentWork, begins_more: bool) -> FragmentBeat:
    held, rounds, flight = replica.held, replica.rounds, replica.rounds.flight
    # Whose line is slow is ready when its work is with its owners: nobody waits for it, and so it never makes them.
    done = rounds.ahead.delivered if rounds.ahead.is_mine else work.frozen is not None
    return FragmentBeat(
        fragment=replica.fragment.number,
        version=held.version,
        digest=held.digest,
        round_no=flight.plan.round_no if flight else 0,
        epoch=flight.plan.epoch if flight else 0,
        # What is foreseen is not told again: this stands.
        decision_no=flight.deciding.made_no if flight else 0,
        ready=done and flight is None and not held.sealing and begins_more,
        need=held.chunks.needs_commits,
        dropped=rounds.dropped_no,
        shown=held.grounds.shown(held.version) if held.whole else b"",
        sections=rounds.ahead.sections,
    )


def phase_of(part: Replicas, training: TrainerProxy) -> Phase:
    """What this peer is doing, of all its fragments together."""
    if flights := part.flights:
        return Phase.SCATTER if any(not flight.deciding.made_no for flight in flights) else Phase.GATHER
    if any(replica.held.sealing for replica in part.replicas.values()):
        return Phase.APPLY
    frozen = any(work.frozen is not None and not work.running for work in training.works.values())
    return Phase.READY if frozen and training.rules.waits else Phase.INNER
