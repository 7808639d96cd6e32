"""An archiver's part: fetches what the members of committed rounds had sent, each signed by its author.  Pure.

Part of the peer machine, in a peer whose owner asked for it.  It holds its own contribution, and those to the chunks
that it owned; the authors keep the rest for two more commits.  A few authors at once are asked, each for its signed
list and then for the chunks that are missing here, and for one at a time while a round needs the line.  What has come
by then, whole or not, is handed to the shell.

Nobody is believed: a list counts if its author signed it for this run and round, a chunk if its hash stands there.
Whether the contributions make the committed sum is for whoever reads the archive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from farflung.collectives.round.effects import SendFrame
from farflung.collectives.round.kept import question_of
from farflung.collectives.round.member import MemberRound
from farflung.collectives.round.pieces import Piece
from farflung.peer.machine.effects import Effect, KeepContribution
from farflung.peer.machine.lanes import Participation
from farflung.protocol.digests import HASH_BYTES, split_hashes
from farflung.protocol.frames import Frame, Kind, Payload
from farflung.protocol.limits import ROUNDS_KEPT
from farflung.protocol.manifest import Manifest
from farflung.protocol.moments import Known
from farflung.protocol.round_words import Commit
from farflung.protocol.signed_words import Said, is_signed
from farflung.protocol.verdicts import Verdict

AUTHORS_AT_ONCE = 4  # that is in memory what so many have sent
ASK_AT_ONCE = 4  # chunks of each; in a round one
ASK_AGAIN_S = 0.6  # an author puts a question off for half a second, while a round needs its line
PATIENCE_S = 4.0  # without a byte of the author that is asked: it does not give it
_LIST = -1  # beside the chunks: what its author signed


def may_gather(manifest: Manifest) -> bool:
    """There is something to be kept, and it can be replayed: authors keep theirs for audits, a replay needs a start.

    Of rounds in groups few hear of all members, and nobody who replays knows who was in which group.
    """
    kept = manifest.merge.audit > 0 and not manifest.round.group
    return kept and manifest.checkpoint.every_rounds > 0


@dataclass(eq=False)
class Task:
    """What one member sent in one committed round of a fragment."""

    commit: Commit
    era: int
    author: str
    first_chunk: int
    held: Mapping[int, Piece]  # by chunk of the fragment: what is here, if its hash is on the list
    said: Said | None = None
    hashes: tuple[bytes, ...] = ()
    pieces: dict[int, Payload] = field(default_factory=dict)
    asked_at: dict[int, float] = field(default_factory=dict)
    news_at: float = 0.0

    def is_of(self, author: str, round_no: int) -> bool:
        return self.author == author and self.commit.round_no == round_no

    @property
    def count(self) -> int:
        return len(self.commit.hashes) // HASH_BYTES

    @property
    def lacking(self) -> list[int]:
        if self.said is None:
            return [_LIST]
        return [chunk for chunk in range(self.count) if chunk not in self.pieces]

    def take_list(self, raw: Payload, run_id: bytes) -> bool:
        """False if its author did not sign that for this round."""
        try:
            said = msgspec.msgpack.decode(raw, type=Said)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        fits = said.peer == self.author and said.sent.round_no == self.commit.round_no
        if not fits or len(said.sent.hashes) != len(self.commit.hashes):
            return False
        if not is_signed(said.identity, run_id, said.sent):
            return False
        self.said, self.hashes = said, tuple(split_hashes(said.sent.hashes))
        for chunk, piece in self.held.items():
            if piece.hash == self.hashes[chunk]:
                self.pieces[chunk] = piece.payload
        return True


class Gathering:
    def __init__(self, me: str, known: Known, part: Participation, wanted: bool) -> None:
        """`wanted`: by this peer's owner; else nothing is ever fetched."""
        self._me, self._known, self._part, self._wanted = me, known, part, wanted
        self._queue: deque[Task] = deque()
        self._newest: dict[int, int] = {}  # by fragment: version
        self._at_work: list[Task] = []

    def on_commit(self, commit: Commit, era: int, flight: MemberRound | None, now: float) -> list[Effect]:
        """`flight`: the round that I was in until now, if any.  My lane has heard of the commit."""
        if not self._wanted or commit.version <= self._newest.get(commit.fragment, -1):
            return []
        self._newest[commit.fragment] = commit.version
        effects = self._end_the_old(commit)
        lane = self._part.lanes[commit.fragment]
        shelves: Mapping[int, Mapping[str, Piece]] = {}
        if flight is not None and flight.plan.round_no == commit.round_no:
            shelves = flight.held
        for author in self._in_turn(commit.included):
            held = {chunk: shelf[author] for chunk, shelf in shelves.items() if author in shelf}
            task = Task(commit, era, author, lane.fragment.first, held)
            if author != self._me:
                self._queue.append(task)
            elif (mine := lane.kept.signed_list(commit.round_no)) is not None:
                numbers = {chunk - lane.fragment.first: chunk for chunk in lane.fragment.chunks}
                found = {place: lane.kept.piece(commit.round_no, chunk) for place, chunk in numbers.items()}
                task.held = {place: piece for place, piece in found.items() if piece is not None}
                task.take_list(mine.payload, self._known.run_id)
                effects += self._kept(task)
        return effects + self.on_timer(now)

    def _in_turn(self, authors: tuple[str, ...]) -> list[str]:
        """Several archivers do not all begin with the same author."""
        return [each for each in authors if each >= self._me] + [each for each in authors if each < self._me]

    def _end_the_old(self, commit: Commit) -> list[Effect]:
        """What their authors do not keep any more."""
        effects: list[Effect] = []
        for task in [*self._at_work, *self._queue]:
            old = task.commit.version <= commit.version - ROUNDS_KEPT
            if task.commit.fragment == commit.fragment and old:
                effects += self._end(task)
        return effects

    def go_back(self) -> None:
        """The run is at another version: newer commits are void, and so is what was sent in them."""
        self._queue.clear()
        self._newest.clear()
        self._at_work.clear()

    def finish(self) -> list[Effect]:
        """This peer goes: what is here so far."""
        return [effect for task in [*self._at_work, *self._queue] for effect in self._end(task)]

    def _end(self, task: Task) -> list[Effect]:
        (self._at_work if task in self._at_work else self._queue).remove(task)
        return self._kept(task)

    @staticmethod
    def _kept(task: Task) -> list[Effect]:
        if task.said is None or not task.pieces:
            return []
        payloads = tuple(task.pieces.get(chunk, b"") for chunk in range(task.count))
        return [KeepContribution(task.era, task.commit, task.said, payloads)]

    # ---- time ------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for task in list(self._at_work):
            if not task.lacking or now - task.news_at >= PATIENCE_S:
                effects += self._end(task)
        while self._queue and len(self._at_work) < AUTHORS_AT_ONCE:
            self._at_work.append(self._queue.popleft())
            self._at_work[-1].news_at = now
        return effects + [effect for task in self._at_work for effect in self._ask(task, now)]

    def _ask(self, task: Task, now: float) -> list[Effect]:
        open_since = now - ASK_AGAIN_S
        at_once = 1 if self._part.expects_bytes else ASK_AT_ONCE
        due = [
            chunk for chunk in task.lacking[:at_once] if task.asked_at.get(chunk, open_since) <= open_since
        ]
        task.asked_at.update(dict.fromkeys(due, now))
        return [SendFrame(task.author, self._question(task, chunk)) for chunk in due]

    def _question(self, task: Task, chunk: int) -> Frame:
        kind = Kind.WANT_SENT if chunk == _LIST else Kind.WANT_CONTRIBUTION
        number = task.first_chunk + max(0, chunk)
        return question_of(self._known.tag, task.commit.round_no, task.commit.version - 1, number, kind)

    def on_arriving(self, peers: set[str], now: float) -> None:
        """Bytes of them come in: what is asked for may be among them, and is not asked for again."""
        for task in self._at_work:
            if task.author in peers:
                task.news_at = now
                task.asked_at.update(dict.fromkeys(task.asked_at, now))

    # ---- what arrives ------------------------------------------------------------------------------------------

    def takes(self, sender: str, frame: Frame, now: float) -> bool:
        """A frame for a task in hand; its payload matched its own hash."""
        header = frame.header
        task = next((each for each in self._at_work if each.is_of(sender, header.round_no)), None)
        if task is None:
            return False
        chunk = header.chunk - task.first_chunk
        if not 0 <= chunk < task.count:
            return False
        if header.kind == Kind.SENT:
            return self._takes_list(task, frame, now)
        if header.kind != Kind.CONTRIBUTION or task.said is None:
            return False
        if chunk in task.pieces:
            self._part.counters.count(Verdict.DUPLICATE)
        elif header.hash != task.hashes[chunk]:
            self._give_up(task)
        else:
            task.pieces[chunk], task.news_at = frame.payload, now
            self._part.counters.count(Verdict.ACCEPTED)
        return True

    def _takes_list(self, task: Task, frame: Frame, now: float) -> bool:
        if task.said is not None:
            self._part.counters.count(Verdict.DUPLICATE)
        elif task.take_list(frame.payload, self._known.run_id):
            task.news_at = now
            self._part.counters.count(Verdict.ACCEPTED)
        else:
            self._give_up(task)
        return True

    def _give_up(self, task: Task) -> None:
        """It gives what it did not sign: it is not asked any more for this round."""
        self._part.counters.count(Verdict.BAD_HASH)
        task.news_at = float("-inf")
