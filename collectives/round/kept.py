"""What a member sent in the rounds that were committed last: kept, so that others can merge a chunk of it again.  Pure.

Owned by the part that a peer has in one fragment, which tells it of every commit.  Any member may ask for a piece, or
for the signed list of all of them; who does so is an auditor or an archiver, and waits.  So a question during a round
is put off once, and nobody is given a piece more often than it needs it: a question of 96 bytes must not draw
megabytes without end.

It costs the bytes of `ROUNDS_KEPT` encoded contributions, which lie in a file (peer/state), and nothing where the run
audits nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from farflung.collectives.round.effects import DataEffect, SendFrame
from farflung.collectives.round.pieces import Piece
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.verdicts import Verdict

ASKED_AGAIN_S = 0.5  # sooner nobody asks again
GIVEN_MOST = 3  # times, of one piece to one member: what was on its way may be lost

_Question = tuple[str, int, int, Kind]  # (who asks, round, chunk, for what)


class KeptContributions:
    def __init__(self, run_tag: bytes, first_chunk: int, rounds_most: int) -> None:
        self._run_tag = run_tag
        self._first_chunk = first_chunk
        self._rounds_most = rounds_most
        self._rounds: dict[int, Mapping[int, Piece]] = {}  # by round: chunk of the fragment -> what I sent
        self._lists: dict[int, Piece] = {}  # by round: what I signed of it (`Said`)
        self._asked_at: dict[_Question, float] = {}
        self._given: Counter[_Question] = Counter()

    @property
    def size_bytes(self) -> int:
        return sum(len(piece.payload) for pieces in self._rounds.values() for piece in pieces.values())

    def on_commit(self, round_no: int, mine: Mapping[int, Piece]) -> None:
        """`mine`: what I sent in that round, if anything; with every commit what is older grows too old.

        A commit may be told twice, and the second time the round is over here and has nothing to show.
        """
        if not self._rounds.get(round_no):
            self._rounds[round_no] = mine
        for old in list(self._rounds)[: -self._rounds_most or None]:
            del self._rounds[old]
            self._lists.pop(old, None)
        for question in [each for each in self._asked_at if each[1] not in self._rounds]:
            del self._asked_at[question]
            self._given.pop(question, None)

    def on_signed(self, round_no: int, said: bytes) -> None:
        """`said`: my signed list of what I sent in that round; empty if I sent nothing."""
        if said and self._rounds.get(round_no):
            self._lists[round_no] = Piece(said, hash_bytes(said))

    def piece(self, round_no: int, chunk: int) -> Piece | None:
        return self._rounds.get(round_no, {}).get(chunk - self._first_chunk)

    def signed_list(self, round_no: int) -> Piece | None:
        return self._lists.get(round_no)

    def on_want(
        self, sender: str, header: Header, in_round: bool, now: float
    ) -> tuple[Verdict, list[DataEffect]]:
        """An auditor asks.  Whoever is not answered asks again, or says that it could not get it."""
        wants_list = header.kind == Kind.WANT_SENT
        piece = self.signed_list(header.round_no) if wants_list else self.piece(header.round_no, header.chunk)
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
        kind = Kind.SENT if wants_list else Kind.CONTRIBUTION
        answer = Header(kind, self._run_tag, header.round_no, 0, header.version, header.chunk)
        return Verdict.ACCEPTED, [SendFrame(sender, with_payload(answer, piece.payload, piece.hash))]


def question_of(
    run_tag: bytes, round_no: int, version: int, chunk: int, kind: Kind = Kind.WANT_CONTRIBUTION
) -> Frame:
    """What an auditor asks the author of a contribution."""
    return Frame(Header(kind, run_tag, round_no, 0, version, chunk))
