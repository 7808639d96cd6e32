"""A joiner fetches the state of one donor's optimizer: whom it asks, what it believes, when it ends.  Pure.

Owned by heir.py, the agent's hand.  Unlike the run's state this is one peer's own, which nobody else can vouch
for: the donor signs how long it is and what hash it has, and what comes must be that.  Donors are asked in turn
until one describes what it has; from then on it is that one alone.  Whatever goes wrong, and when the time is over,
the joiner starts with a fresh optimizer: `problem` says why.  Must not know files, sockets or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from farflung.collectives.effects import SendFrame
from farflung.collectives.frames import Frame, Header, Kind
from farflung.collectives.verdicts import Verdict
from farflung.coordinator.signing import peer_id_of, verify

ASKED_AT_ONCE = 4
ASK_AGAIN_S = 2.0  # for the description, while its copy may be just being made
ANSWER_S = 10.0  # without a word for so long, a donor counts as gone
DESCRIPTION = 1  # decision_no of a frame that describes; a piece has 0
DESCRIPTION_BYTES = 1024


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a donor says of the copy of its optimizer's state."""

    size: int
    digest: bytes  # blake3 of the whole
    public: bytes  # the donor's key, from which its id follows
    signature: bytes = b""

    def statement(self, run_id: bytes) -> bytes:
        """What is signed: in this run, a state of my optimizer is so long and has this hash."""
        return b"farflung/inner/1\0" + run_id + self.size.to_bytes(8, "big") + self.digest


def described(raw: bytes) -> Description | None:
    if len(raw) > DESCRIPTION_BYTES:
        return None
    try:
        return msgspec.msgpack.decode(raw, type=Description)
    except msgspec.MsgspecError:
        return None


@dataclass(frozen=True)
class Wanted:
    run_id: bytes
    most_bytes: int
    piece_bytes: int
    until: float


@dataclass(frozen=True)
class Piece:
    """To be written at its place."""

    at: int
    payload: bytes | bytearray | memoryview


class Inheriting:
    def __init__(self, wanted: Wanted, donors: tuple[str, ...], now: float) -> None:
        self.wanted = wanted
        self.description: Description | None = None
        self.problem = "" if donors else "no other peer holds the run's state"
        self._donors = list(donors)
        self._number = 0  # of the donor's copy
        self._heard_at = now
        self._asked: dict[int, float] = {}  # piece -> when
        self._next = 0  # pieces from here on were never asked for
        self._missing = 0  # pieces that are not here yet
        self._again: list[int] = []
        self._may_ask_at = now

    @property
    def donor(self) -> str:
        return self._donors[0] if self._donors else ""

    @property
    def is_whole(self) -> bool:
        return self.description is not None and not self._missing and not self.problem

    @property
    def over(self) -> bool:
        return bool(self.problem) or self.is_whole

    # ---- asking --------------------------------------------------------------------------------------------

    def ask(self, now: float) -> list[SendFrame]:
        if self.over:
            return []
        if now >= self.wanted.until:
            self.problem = "it did not come in time"
            return []
        if now - self._heard_at >= ANSWER_S:
            self._refused("it fell silent", now)
            if self.over:
                return []
        if self.description is not None:
            wants = self._wants(now)
        elif now >= self._may_ask_at:
            wants, self._may_ask_at = [0], now + ASK_AGAIN_S
        else:
            wants = []
        return [self._question(piece) for piece in wants]

    def _wants(self, now: float) -> list[int]:
        self._again += [piece for piece, at in self._asked.items() if now - at >= ANSWER_S]
        for piece in self._again:
            self._asked.pop(piece, None)
        wants = []
        while len(self._asked) < ASKED_AT_ONCE:
            if self._again:
                piece = self._again.pop()
            elif self._next < self._pieces:
                piece, self._next = self._next, self._next + 1
            else:
                break
            self._asked[piece] = now
            wants.append(piece)
        return wants

    def _question(self, piece: int) -> SendFrame:
        tag = self.wanted.run_id[:8]
        return SendFrame(self.donor, Frame(Header(Kind.WANT_INNER, tag, version=self._number, chunk=piece)))

    # ---- answers -------------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, Piece | None]:
        """INNER, MISSING or LATER; the payload matched the hash in its own header."""
        header = frame.header
        if sender != self.donor or self.over:
            return Verdict.STALE, None
        self._heard_at = now
        if header.kind == Kind.LATER:
            if header.chunk in self._asked:
                self._asked[header.chunk] = now
            return Verdict.ACCEPTED, None
        if header.kind == Kind.MISSING:
            self._refused("it has none to give now", now)
            return Verdict.ACCEPTED, None
        if header.decision_no == DESCRIPTION:
            return self._on_description(sender, frame), None
        return self._on_piece(frame)

    def on_spoiled(self, sender: str, now: float) -> None:
        if sender == self.donor and not self.over:
            self._refused("its bytes came damaged", now)

    def _on_description(self, sender: str, frame: Frame) -> Verdict:
        if self.description is not None:
            return Verdict.DUPLICATE
        found = described(bytes(frame.payload[: DESCRIPTION_BYTES + 1]))
        if found is None or not self._is_signed_by(sender, found):
            self.problem = "what it says of it is not signed by it"
            return Verdict.MALFORMED
        if not 0 < found.size <= self.wanted.most_bytes:
            self.problem = f"it has {found.size} bytes, and mine can take {self.wanted.most_bytes} at most"
            return Verdict.OVERSIZE
        self.description, self._number = found, frame.header.version
        self._missing = self._pieces
        return Verdict.ACCEPTED

    def _is_signed_by(self, sender: str, found: Description) -> bool:
        statement = found.statement(self.wanted.run_id) if found.size >= 0 else b""
        return peer_id_of(found.public) == sender and verify(found.public, statement, found.signature)

    def _on_piece(self, frame: Frame) -> tuple[Verdict, Piece | None]:
        header, size = frame.header, self.wanted.piece_bytes
        if self.description is None or header.version != self._number or header.chunk >= self._next:
            return Verdict.STALE, None
        if header.chunk not in self._asked:
            return Verdict.DUPLICATE, None
        at = header.chunk * size
        if len(frame.payload) != min(size, self.description.size - at):
            self.problem = "a piece of it has another length than the donor said"
            return Verdict.MALFORMED, None
        del self._asked[header.chunk]
        self._missing -= 1
        return Verdict.ACCEPTED, Piece(at, frame.payload)

    @property
    def _pieces(self) -> int:
        assert self.description is not None
        return -(-self.description.size // self.wanted.piece_bytes)

    def _refused(self, why: str, now: float) -> None:
        """Before anything was described, the next donor is asked; after that there is no other."""
        if self.description is None and len(self._donors) > 1:
            del self._donors[0]
            self._heard_at = self._may_ask_at = now
        else:
            self.problem = why
