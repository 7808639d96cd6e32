"""An auditor's part: merges drawn chunks of committed rounds again, and says whether their sums are right.  Pure.

Where the mode begins at a peer.  The coordinator names the chunks, the weights, and the hashes of all contributions,
as their authors signed them; the authors keep their bytes for two more commits.  In a mesh that may be what a group
adds to a result, or the result, and what goes in are then the sums of groups, which their makers keep as long.  An
audit waits for rounds, but not if it is of the one that was just committed; it takes one chunk at a time and asks few
authors at once, so that it costs a line little.  What it found is said again whenever it is asked.

Nobody believes an accusation: whoever makes one keeps the contributions, until the coordinator has seen them and has
done the sum itself.  What it looks at of my own is kept as long: a thin line takes longer than two commits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from farflung.collectives.round.effects import Calculated, Merge, SendFrame
from farflung.collectives.round.member import MemberRound, shape
from farflung.collectives.round.pieces import ChunkPiece
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.fragment_rounds import Given, KeptWork
from farflung.peer.machine.modes import PeerMode, SessionTools
from farflung.peer.machine.replicas import Replica, Replicas
from farflung.protocol.digests import HASH_BYTES, hash_at, hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload, with_payload
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT, ROUNDS_KEPT
from farflung.protocol.messages import Show, ToMember, What
from farflung.protocol.mode_words import AuditChunks, ChunkVerdict, DrawnChunk
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import SUM_CODEC, THE_RESULT
from farflung.protocol.run_terms import Attached

# ---- kept --------------------------------------------------------------------------------------------------
# What a member gave to the rounds that were committed last: kept, so that others can merge a chunk of it
# again. Pure.
#
# That is what it contributed, and in a mesh what it added up of its group. Each replica has one, which hears
# of every commit. Any member may ask for a piece; who does so is an auditor, and waits. So a question during
# a round is put off once, and nobody is given a piece more often than it needs it: a question of 96 bytes
# must not draw megabytes without end.
#
# It costs the bytes of `ROUNDS_KEPT` encoded contributions, which lie in a file (peer/state), in a mesh as
# often the sums of the member's own chunks in memory, and nothing where the run audits nothing.

ASKED_AGAIN_S = 0.5  # sooner nobody asks again
GIVEN_MOST = 3  # times, of one piece to one member: what was on its way may be lost

_Question = tuple[str, int, int, FrameKind]  # (who asks, round, chunk, for what)


def kept(attached: Attached, me: str, fragment: Fragment) -> KeptWork:
    rounds = ROUNDS_KEPT if attached.known.manifest.merge.audit else 0
    return KeptContributions(attached.known.tag, fragment.first, rounds)


class KeptContributions(KeptWork):
    def __init__(self, run_tag: bytes, first_chunk: int, rounds_most: int) -> None:
        self._run_tag = run_tag
        self._first_chunk = first_chunk
        self._rounds_most = rounds_most
        self._rounds: dict[int, Given] = {}
        self._asked_at: dict[_Question, float] = {}
        self._given: Counter[_Question] = Counter()

    @property
    def size_bytes(self) -> int:
        given = (pieces for each in self._rounds.values() for pieces in each.pieces.values())
        return sum(len(piece.payload) for pieces in given for piece in pieces.values())

    def on_commit(self, round_no: int, given: Given, counts: bool = True) -> None:
        """With every commit what is older grows too old.  One may be told twice, and the second time the round is over
        here and has nothing to show.
        """
        if given.round_no != round_no:
            given = Given(round_no)
        elif not counts:
            given = replace(given, pieces={**given.pieces, Kind.CONTRIBUTION: {}})
        before = self._rounds.get(round_no)
        if before is None or not any(before.pieces.values()):
            self._rounds[round_no] = given
        for old in list(self._rounds)[: -self._rounds_most or None]:
            del self._rounds[old]
        for question in [each for each in self._asked_at if each[1] not in self._rounds]:
            del self._asked_at[question]
            self._given.pop(question, None)

    def piece(
        self,
        round_no: int,
        chunk: int,
        kind: FrameKind = Kind.CONTRIBUTION,
        flight: MemberRound | None = None,
    ) -> ChunkPiece | None:
        """What was given of this chunk of the model to that round: to `flight`, or to one that is over."""
        if flight is not None and flight.plan.round_no == round_no:
            return Given.to(flight).of(kind).get(chunk - self._first_chunk)
        return self._rounds.get(round_no, Given()).of(kind).get(chunk - self._first_chunk)

    def on_want(
        self, sender: str, header: Header, in_round: bool, now: float
    ) -> tuple[Verdict, list[Effect]]:
        """An auditor asks.  Whoever is not answered asks again, or says that it could not get it."""
        kind = header.kind.answer
        piece = self.piece(header.round_no, header.chunk, kind) if kind is not None else None
        if kind is None or piece is None:
            return Verdict.STALE, []
        question = (sender, header.round_no, header.chunk, header.kind)
        first = question not in self._asked_at
        soon = not first and now - self._asked_at[question] < ASKED_AGAIN_S
        if soon or self._given[question] >= GIVEN_MOST:
            return Verdict.DUPLICATE, []
        self._asked_at[question] = now
        if first and in_round:
            return Verdict.ACCEPTED, []  # the round goes first
        self._given[question] += 1
        answer = Header(kind, self._run_tag, header.round_no, 0, header.version, header.chunk)
        return Verdict.ACCEPTED, [SendFrame(sender, with_payload(answer, piece.payload, piece.hash))]


def question_of(
    run_tag: bytes, round_no: int, version: int, chunk: int, kind: FrameKind = Kind.WANT_CONTRIBUTION
) -> Frame:
    """What an auditor asks its author."""
    return Frame(Header(kind, run_tag, round_no, 0, version, chunk))


# ---- auditor -----------------------------------------------------------------------------------------------

ASK_AT_ONCE = 8  # authors
ASK_AGAIN_S = 1.0
PATIENCE_S = 12.0  # without a byte of those that are asked: they do not give it
BUSY_EVERY_S = 5.0  # a chunk now and then in a run whose rounds never end
ACCUSED_KEPT_S = 60.0  # contributions behind an accusation wait so long to be seen
VERDICTS_KEPT = CHUNKS_PER_FRAGMENT

# (round, what came of chunks, of which group they were) -> the message.
Tell = Callable[[int, tuple[ChunkVerdict, ...], int], Effect]
Key = tuple[int, int, int]  # round, group or the result, chunk


def kind_of(of_sums: bool) -> FrameKind:
    """Of the frames that bring what goes into a sum: `of_sums`, that is what groups of a mesh add up."""
    found = shape(in_groups=of_sums) or MemberRound  # without that mode no such audit is asked for
    return found.owner_class.summed


@dataclass(frozen=True, slots=True)
class MergeAgain(Merge):
    """By an auditor, of a round that is over: for the hash of it."""

    group: int = THE_RESULT  # of a mesh: what this group adds to the result


@dataclass
class AuditTask:
    """One drawn chunk."""

    audit: AuditChunks
    drawn: DrawnChunk
    number: int  # of the chunk, in the model
    shelf: dict[str, Payload] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)  # they say that they have it not, or gave other bytes
    asked_at: dict[str, float] = field(default_factory=dict)
    news_at: float = 0.0
    merging: bool = False

    @property
    def key(self) -> Key:
        return self.audit.round_no, self.audit.group, self.number

    @property
    def kind(self) -> FrameKind:
        """Of the frames that bring what goes in."""
        return kind_of(self.audit.of_sums)

    def is_of(self, kind: FrameKind, round_no: int, number: int) -> bool:
        return (self.kind, self.audit.round_no, self.number) == (kind, round_no, number)

    @property
    def missing(self) -> list[str]:
        return [peer for peer in self.audit.members if peer not in self.shelf]

    @property
    def payloads(self) -> tuple[Payload, ...]:
        return tuple(self.shelf[peer] for peer in self.audit.members)

    def hash_of(self, peer: str) -> bytes:
        return hash_at(self.drawn.hashes, self.audit.members.index(peer))


@dataclass
class Accused:
    """What I called wrong, with the contributions that show it."""

    task: AuditTask
    until: float  # they are kept


def _my_piece(replica: Replica, round_no: int, chunk: int, kind: FrameKind) -> ChunkPiece | None:
    """What this peer gave of this chunk of the model to that round, as far as it still has it."""
    kept, flight = replica.rounds.kept, replica.rounds.flight
    return kept.piece(round_no, chunk, kind, flight) if isinstance(kept, KeptContributions) else None


def made(tools: SessionTools) -> PeerMode:
    """Whether the run is audited is the coordinator's to say: it may ask for the first time in a while."""
    me, tag = tools.config.me.peer, tools.offer.attached.known.tag
    return Auditor(me, tag, tools.part, tools.reports.audited)


class Auditor(PeerMode):
    def __init__(self, me: str, run_tag: bytes, part: Replicas, tell: Tell) -> None:
        self._me, self._run_tag, self._part, self._tell = me, run_tag, part, tell
        self._queue: deque[AuditTask] = deque()
        self._at_work: AuditTask | None = None
        self._accused: Accused | None = None
        self._showing: dict[tuple[FrameKind, int, int], bytes] = {}  # of mine: kind, round, chunk
        self._showing_until = 0.0  # the coordinator looks at it
        self._verdicts: OrderedDict[Key, ChunkVerdict] = OrderedDict()
        self._begun_at = float("-inf")

    # ---- the coordinator's words ----------------------------------------------------------------------------

    def on_word(self, word: ToMember, now: float) -> list[Effect] | None:
        return self.on_audit(word, now) if isinstance(word, AuditChunks) else None

    def on_audit(self, audit: AuditChunks, now: float) -> list[Effect]:
        replica = self._part.replicas.get(audit.fragment)
        count = len(audit.members)
        if replica is None or not len(audit.weights) == len(audit.codecs) == count:
            return []
        again: list[ChunkVerdict] = []
        for drawn in audit.chunks:
            if drawn.chunk >= replica.fragment.count or len(drawn.hashes) != count * HASH_BYTES:
                continue
            task = AuditTask(audit, drawn, replica.fragment.first + drawn.chunk)
            known = self._verdicts.get(task.key)
            if known is not None and self._stands(task, known):
                again.append(known)
            elif len(self._queue) < CHUNKS_PER_FRAGMENT and not self._is_known(task):
                self._queue.append(task)
        told = [self._tell(audit.round_no, tuple(again), audit.group)] if again else []
        return [*told, *self.turn(now)]

    def _stands(self, task: AuditTask, known: ChunkVerdict) -> bool:
        """An accusation that can't be shown any more is not repeated: it is made anew."""
        return not known.wrong or (self._accused is not None and self._accused.task.key == task.key)

    def _is_known(self, task: AuditTask) -> bool:
        at_work = [self._at_work] if self._at_work is not None else []
        return any(each.key == task.key for each in [*at_work, *self._queue])

    def shown(self, show: Show, now: float) -> Payload | None:
        """What a peer gave of a chunk, or added up of it: mine, or one behind my accusation."""
        kind = kind_of(show.what is What.SUM)
        if show.peer == self._me and (mine := self._my_own(show, kind, now)) is not None:
            return mine
        accused = self._accused
        if accused is None or not accused.task.is_of(kind, show.round_no, show.chunk):
            return None
        accused.until = now + ACCUSED_KEPT_S  # it takes its time over a thin line
        return accused.task.shelf.get(show.peer)

    def _my_own(self, show: Show, kind: FrameKind, now: float) -> Payload | None:
        what = kind, show.round_no, show.chunk
        if what not in self._showing:
            replica = self._part.replica_of_chunk(show.chunk)
            kept = _my_piece(replica, show.round_no, show.chunk, kind) if replica is not None else None
            if kept is None:
                return None
            self._showing = {what: bytes(kept.payload)}
        self._showing_until = now + ACCUSED_KEPT_S
        return self._showing[what]

    # ---- time ------------------------------------------------------------------------------------------------

    def on_timer(self, now: float, inside: bool) -> list[Effect]:
        return self.turn(now) if inside else []

    def turn(self, now: float) -> list[Effect]:
        if self._accused is not None and now >= self._accused.until:
            self._accused = None
        if now >= self._showing_until:
            self._showing = {}
        if self._at_work is None:
            self._begin(now)
        return self._go_on(self._at_work, now) if self._at_work is not None else []

    def _begin(self, now: float) -> None:
        if not self._queue or self._accused is not None:
            return
        audit = self._queue[0].audit
        flight = self._part.replicas[audit.fragment].rounds.flight_of(audit.round_no)
        # Right after the commit its authors surely have their bytes: where rounds are short, they have not 5 s later.
        if self._part.expects_bytes and flight is None and now - self._begun_at < BUSY_EVERY_S:
            return
        self._at_work = task = self._queue.popleft()
        self._begun_at = task.news_at = now
        self._take_my_own(task)

    def _go_on(self, task: AuditTask, now: float) -> list[Effect]:
        """Ask for what is missing, merge what is here, or give up."""
        if task.merging:
            return []
        lacking = task.missing
        if not lacking:
            return self._merge(task, now)
        if task.refused or now - task.news_at >= PATIENCE_S:
            silent = [peer for peer in lacking if peer in task.asked_at]
            return self._end(task, False, tuple(sorted(task.refused)) or tuple(silent))
        due = [
            peer
            for peer in lacking[:ASK_AT_ONCE]
            if now - task.asked_at.get(peer, -ASK_AGAIN_S) >= ASK_AGAIN_S
        ]
        task.asked_at.update(dict.fromkeys(due, now))
        audit = task.audit
        kind = task.kind.question
        assert kind is not None
        question = question_of(self._run_tag, audit.round_no, audit.version, task.number, kind)
        return [SendFrame(peer, question) for peer in due]

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        """Bytes of them come in: what is asked for may be among them, and is not asked for again."""
        task = self._at_work
        if task is not None:
            for peer in arriving.intersection(task.missing):
                task.news_at = task.asked_at[peer] = now

    def _take_my_own(self, task: AuditTask) -> None:
        replica = self._part.replicas[task.audit.fragment]
        mine = _my_piece(replica, task.audit.round_no, task.number, task.kind)
        if self._me not in task.audit.members:
            return
        if mine is not None and mine.hash == task.hash_of(self._me):
            task.shelf[self._me] = mine.payload
        else:
            task.refused.add(self._me)  # it was sent by a former life of mine

    # ---- what arrives -------------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[Effect] | None:
        return self.turn(now) if self.takes(sender, frame, now) else None

    def takes(self, sender: str, frame: Frame, now: float) -> bool:
        """A frame for the chunk in hand; its payload matched its own hash."""
        header, task = frame.header, self._at_work
        if task is None or not task.is_of(header.kind, header.round_no, header.chunk):
            return False
        if task.merging or sender not in task.audit.members or sender in task.shelf:
            return False  # somebody else here may have asked for it
        if header.hash != task.hash_of(sender):
            task.refused.add(sender)
            self._part.counters.count(Verdict.BAD_HASH)
        else:
            task.shelf[sender], task.news_at = frame.payload, now
            self._part.counters.count(Verdict.ACCEPTED)
        return True

    def _merge(self, task: AuditTask, now: float) -> list[Effect]:
        audit = task.audit
        for codec, payload in zip(audit.codecs, task.payloads, strict=True):
            if not self._part.is_payload(codec, payload):
                # An honest owner refuses it: nothing that holds it is a right sum.
                return self._accuse(task, now)
        task.merging = True
        codec = SUM_CODEC if audit.group != THE_RESULT else ""
        return [MergeAgain(audit.round_no, 0, task.number, task.payloads, audit.weights, codec, audit.group)]

    def on_calculated(self, effect: Calculated, made: object, now: float) -> list[Effect] | None:
        return self.on_merged(effect, made, now) if isinstance(effect, MergeAgain) else None

    def on_merged(self, effect: MergeAgain, made: object, now: float) -> list[Effect]:
        task, key = self._at_work, (effect.round_no, effect.group, effect.chunk)
        if task is None or task.key != key or not isinstance(made, bytes):
            return []
        if hash_bytes(made) == task.drawn.result:
            return [*self._end(task, False), *self.turn(now)]
        return [*self._accuse(task, now), *self.turn(now)]

    def _accuse(self, task: AuditTask, now: float) -> list[Effect]:
        self._accused = Accused(task, now + ACCUSED_KEPT_S)
        return self._end(task, True)

    def _end(self, task: AuditTask, wrong: bool, missing: tuple[str, ...] = ()) -> list[Effect]:
        self._at_work = None
        verdict = ChunkVerdict(task.drawn.chunk, wrong, missing)
        self._verdicts[task.key] = verdict
        while len(self._verdicts) > VERDICTS_KEPT:
            self._verdicts.popitem(last=False)
        return [self._tell(task.audit.round_no, (verdict,), task.audit.group)]
