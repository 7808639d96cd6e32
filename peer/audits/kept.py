"""What a member gave to the rounds that were committed last: kept, so that others can merge a chunk of it again.  Pure.

That is what it contributed, and in a mesh what it added up of its group.  Each replica has one, which hears of every
commit.  Any member may ask for a piece; who does so is an auditor, and waits.
So a question during a round is put off once, and nobody is given a piece more often than it needs it: a question of
96 bytes must not draw megabytes without end.

It costs the bytes of `ROUNDS_KEPT` encoded contributions, which lie in a file (peer/state), in a mesh as often the
sums of the member's own chunks in memory, and nothing where the run audits nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from farflung.collectives.round.effects import SendFrame
from farflung.collectives.round.member import MemberRound
from farflung.collectives.round.pieces import ChunkPiece
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.replica_modes import Given, KeptWork
from farflung.protocol.frames import ANSWER_TO, Frame, FrameKind, Header, Kind, with_payload
from farflung.protocol.limits import ROUNDS_KEPT
from farflung.protocol.model_schema import Fragment
from farflung.protocol.run_terms import Attached
from farflung.protocol.verdicts import Verdict

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
        given = (pieces for each in self._rounds.values() for pieces in (each.contribution, each.sums))
        return sum(len(piece.payload) for pieces in given for piece in pieces.values())

    def on_commit(self, round_no: int, given: Given, counts: bool = True) -> None:
        """With every commit what is older grows too old.  One may be told twice, and the second time the round is over
        here and has nothing to show.
        """
        if given.round_no != round_no:
            given = Given(round_no)
        elif not counts:
            given = replace(given, contribution={})
        before = self._rounds.get(round_no)
        if before is None or not (before.contribution or before.sums):
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
        kind = ANSWER_TO[header.kind]
        piece = self.piece(header.round_no, header.chunk, kind)
        if piece is None:
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
