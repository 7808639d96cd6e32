"""An auditor's part: merges drawn chunks of committed rounds again, and says whether their sums are right.  Pure.

Part of the peer machine.  The coordinator names the chunks, the weights, and the hashes of all contributions, as their
authors signed them; the authors keep their bytes for two more commits.  In a mesh that may be what a group adds to a
result, or the result, and what goes in are then the sums of groups, which their makers keep as long.  An audit waits
for rounds, takes one chunk at a time and asks few authors at once, so that it costs a line little.  What it found is
said again whenever it is asked.
Chunks of the round in flight go first, a few at a time: nothing is committed before they are merged again.

Nobody believes an accusation: whoever makes one keeps the contributions, until the coordinator has seen them and has
done the sum itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from farflung.collectives.round.effects import MergeAgain, SendFrame
from farflung.collectives.round.kept import question_of
from farflung.collectives.round.pieces import WANT_FOR
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.lanes import Participation
from farflung.protocol.digests import HASH_BYTES, hash_at, hash_bytes
from farflung.protocol.frames import Frame, Kind, Payload
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT
from farflung.protocol.messages import AuditChunks, Show, What
from farflung.protocol.round_words import ChunkVerdict, DrawnChunk
from farflung.protocol.verdicts import Verdict

ASK_AT_ONCE = 8  # authors
ASK_AGAIN_S = 1.0
PATIENCE_S = 12.0  # without a byte of those that are asked: they do not give it
FIRST_PATIENCE_S = 5.0  # the same, where a round waits for it
FIRST_AT_ONCE = 8  # chunks of rounds in flight
SEEN_LATELY_S = 10.0  # an accusation of which nothing was asked for so long makes room for the next one
BUSY_EVERY_S = 5.0  # a chunk now and then in a run whose rounds never end
ACCUSED_KEPT_S = 60.0  # contributions behind an accusation wait so long to be seen
VERDICTS_KEPT = CHUNKS_PER_FRAGMENT

# (round, what came of chunks, of which group they were) -> the message.
Tell = Callable[[int, tuple[ChunkVerdict, ...], int], Effect]
Key = tuple[int, int, int]  # round, group or the result, chunk
SHOWN = {What.CONTRIBUTION: Kind.CONTRIBUTION, What.SUM: Kind.SUM}


@dataclass(eq=False)
class Task:
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
    def name(self) -> tuple[Key, int]:
        """Before a commit another result may come in the same place."""
        return self.key, self.drawn.question

    @property
    def kind(self) -> Kind:
        """Of the frames that bring what goes in."""
        return Kind.SUM if self.audit.of_sums else Kind.CONTRIBUTION

    def is_of(self, kind: Kind, round_no: int, number: int) -> bool:
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

    task: Task
    until: float  # they are kept
    seen_at: float  # when something of it was asked for last


class Auditing:
    def __init__(self, me: str, run_tag: bytes, part: Participation, tell: Tell) -> None:
        self._me, self._run_tag, self._part, self._tell = me, run_tag, part, tell
        self._queue: deque[Task] = deque()
        self._at_work: dict[Key, Task] = {}
        self._accused: Accused | None = None
        self._verdicts: OrderedDict[tuple[Key, int], ChunkVerdict] = OrderedDict()
        self._begun_at = float("-inf")

    # ---- the coordinator's words ----------------------------------------------------------------------------

    def on_audit(self, audit: AuditChunks, now: float) -> list[Effect]:
        lane = self._part.lanes.get(audit.fragment)
        count = len(audit.members)
        if lane is None or not len(audit.weights) == len(audit.codecs) == count:
            return []
        again: list[ChunkVerdict] = []
        for drawn in audit.chunks:
            if drawn.chunk >= lane.fragment.count or len(drawn.hashes) != count * HASH_BYTES:
                continue
            task = Task(audit, drawn, lane.fragment.first + drawn.chunk)
            known = self._verdicts.get(task.name)
            if known is not None and self._stands(task, known):
                again.append(known)
            elif len(self._queue) < CHUNKS_PER_FRAGMENT:
                self._take_up(task)
        told = [self._tell(audit.round_no, tuple(again), audit.group)] if again else []
        return [*told, *self.on_timer(now)]

    def _stands(self, task: Task, known: ChunkVerdict) -> bool:
        """An accusation that can't be shown any more is not repeated: it is made anew.  And whoever did not give its
        contribution to a round in flight may give it now."""
        if known.wrong:
            return self._accused is not None and self._accused.task.name == task.name
        return not (known.missing and self._is_first(task))

    def _take_up(self, task: Task) -> None:
        """Of a chunk of one round the newest word counts."""
        if any(each.name == task.name for each in [*self._at_work.values(), *self._queue]):
            return
        self._queue = deque(each for each in self._queue if each.key != task.key)
        self._at_work.pop(task.key, None)
        self._queue.append(task)

    def _is_first(self, task: Task) -> bool:
        """Its round is in flight, and waits for it."""
        return self._part.lanes[task.audit.fragment].is_in_flight(task.audit.round_no)

    def contribution(self, show: Show, now: float) -> Payload | None:
        """Of a peer to a chunk, or what it added up of it, for the coordinator: mine, or one behind my accusation."""
        lane, kind = self._part.lane_of_chunk(show.chunk), SHOWN[show.what]
        if lane is not None and show.peer == self._me:
            if (mine := lane.my_piece(show.round_no, show.chunk, kind)) is not None:
                return mine.payload
        accused = self._accused
        if accused is None or not accused.task.is_of(kind, show.round_no, show.chunk):
            return None
        accused.until, accused.seen_at = now + ACCUSED_KEPT_S, now  # it takes its time over a thin line
        return accused.task.shelf.get(show.peer)

    # ---- time ------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[Effect]:
        if self._accused is not None and now >= self._accused.until:
            self._accused = None
        self._drop_the_void()
        self._begin_some(now)
        return [effect for task in list(self._at_work.values()) for effect in self._go_on(task, now)]

    def _drop_the_void(self) -> None:
        """Rounds that waited for it and are over."""
        over = [each for each in [*self._queue, *self._at_work.values()] if each.drawn.question]
        for task in [each for each in over if not self._is_first(each)]:
            self._at_work.pop(task.key, None)
            if task in self._queue:
                self._queue.remove(task)

    def _begin_some(self, now: float) -> None:
        for task in [each for each in self._queue if self._is_first(each)]:
            if sum(map(self._is_first, self._at_work.values())) < FIRST_AT_ONCE:
                self._queue.remove(task)
                self._begin(task, now)
        if not self._queue or self._at_work or self._accused is not None:
            return
        if self._part.expects_bytes and now - self._begun_at < BUSY_EVERY_S:
            return
        if not self._is_first(self._queue[0]):
            self._begun_at = now
        self._begin(self._queue.popleft(), now)

    def _begin(self, task: Task, now: float) -> None:
        self._at_work[task.key] = task
        task.news_at = now
        self._take_my_own(task)

    def _go_on(self, task: Task, now: float) -> list[Effect]:
        """Ask for what is missing, merge what is here, or give up."""
        if task.merging or task.key not in self._at_work:
            return []
        lacking = task.missing
        if not lacking:
            return self._merge(task, now)
        patience_s = FIRST_PATIENCE_S if self._is_first(task) else PATIENCE_S
        if task.refused or now - task.news_at >= patience_s:
            silent = [peer for peer in lacking if peer in task.asked_at]
            return self._end(task, False, tuple(sorted(task.refused)) or tuple(silent))
        due = [
            peer
            for peer in lacking[:ASK_AT_ONCE]
            if now - task.asked_at.get(peer, -ASK_AGAIN_S) >= ASK_AGAIN_S
        ]
        task.asked_at.update(dict.fromkeys(due, now))
        audit = task.audit
        question = question_of(self._run_tag, audit.round_no, audit.version, task.number, WANT_FOR[task.kind])
        return [SendFrame(peer, question) for peer in due]

    def on_arriving(self, peers: set[str], now: float) -> None:
        """Bytes of them come in: what is asked for may be among them, and is not asked for again."""
        for task in self._at_work.values():
            for peer in peers.intersection(task.missing):
                task.news_at = task.asked_at[peer] = now

    def _take_my_own(self, task: Task) -> None:
        mine = self._part.lanes[task.audit.fragment].my_piece(task.audit.round_no, task.number, task.kind)
        if self._me not in task.audit.members:
            return
        if mine is not None and mine.hash == task.hash_of(self._me):
            task.shelf[self._me] = mine.payload
        else:
            task.refused.add(self._me)  # it was sent by a former life of mine

    # ---- what arrives -------------------------------------------------------------------------------------------

    def takes(self, sender: str, frame: Frame, now: float) -> bool:
        """A frame for a chunk in hand; its payload matched its own hash."""
        header = frame.header
        of = header.kind, header.round_no, header.chunk
        task = next((each for each in self._at_work.values() if each.is_of(*of)), None)
        if task is None or task.merging or sender not in task.audit.members or sender in task.shelf:
            return False  # somebody else here may have asked for it
        if header.hash != task.hash_of(sender):
            task.refused.add(sender)
            self._part.counters.count(Verdict.BAD_HASH)
        else:
            task.shelf[sender], task.news_at = frame.payload, now
            self._part.counters.count(Verdict.ACCEPTED)
        return True

    def _merge(self, task: Task, now: float) -> list[Effect]:
        audit = task.audit
        for codec, payload in zip(audit.codecs, task.payloads, strict=True):
            if not self._part.is_payload(codec, payload):
                # An honest owner refuses it: nothing that holds it is a right sum.
                return self._accuse(task, now)
        task.merging = True
        number = task.drawn.question
        payloads, weights = task.payloads, audit.weights
        return [MergeAgain(audit.round_no, number, task.number, payloads, weights, audit.group)]

    def on_merged(self, effect: MergeAgain, made: object, now: float) -> list[Effect]:
        task = self._at_work.get((effect.round_no, effect.group, effect.chunk))
        if task is None or task.drawn.question != effect.decision_no or not isinstance(made, bytes):
            return []
        if hash_bytes(made) == task.drawn.result:
            return [*self._end(task, False), *self.on_timer(now)]
        return [*self._accuse(task, now), *self.on_timer(now)]

    def _accuse(self, task: Task, now: float) -> list[Effect]:
        if self._accused is not None and now - self._accused.seen_at < SEEN_LATELY_S:
            # One accusation at a time is kept to be shown; it is asked of me again.
            del self._at_work[task.key]
            return []
        self._accused = Accused(task, now + ACCUSED_KEPT_S, now)
        return self._end(task, True)

    def _end(self, task: Task, wrong: bool, missing: tuple[str, ...] = ()) -> list[Effect]:
        self._at_work.pop(task.key, None)
        verdict = ChunkVerdict(task.drawn.chunk, wrong, missing, task.drawn.question)
        self._verdicts[task.name] = verdict
        while len(self._verdicts) > VERDICTS_KEPT:
            self._verdicts.popitem(last=False)
        return [self._tell(task.audit.round_no, (verdict,), task.audit.group)]
