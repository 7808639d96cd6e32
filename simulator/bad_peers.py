"""Peers of a simulated run that break rules, and pairs of them that can't reach each other.

`Neighbours` are those of a pipeline: peers that are mute, damage what they send, or slander others.  The world asks
for every frame and every word of a peer; all of it lasts from a moment on until the run ends.  `LastPeer` damages
frames, changes what it has learned, makes wrong sums, lies about those of others, or keeps to itself what auditors ask
for.  The world asks whenever that peer sends something or has calculated something.  Nothing here draws anything in a
run without such peers.  Must not know the clock, the network, or what anybody makes of it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from farflung.collectives.round.effects import Merge, MergeGroup, SendFrame
from farflung.compression.codec import codec_of
from farflung.compression.plain_codecs import HEADER_BYTES
from farflung.coordinator.ledger.ledger import Ledger
from farflung.peer.machine.replicas import Replicas
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Kind, Payload
from farflung.protocol.messages import Audited, Beat, Complaint, FromMember
from farflung.protocol.round_words import ChunkVerdict
from farflung.simulator.scenario import Scenario

# ---- hostile -----------------------------------------------------------------------------------------------
# How a hostile peer of the simulator damages the frames that it sends, or what it has learned.
#
# Called by the simulator, which feeds the outcome to the receiver as the data plane would. Knows frames as
# bytes; the randomness is the caller's, so that a seed replays.

LARGEST_BYTES = 1 << 20  # more than any frame of the simulator
_LENGTH_AT, _HASH_AT, _CHUNK_AT = 44, 48, 40  # in the header; see protocol/frames.py

Parts = tuple[bytes, bytes]


def damaged(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """As a bad line or memory does it: one bit.  A frame without a payload is left as it is."""
    return _flipped(header, payload, draw) if payload else (header, payload)


def _flipped(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    at = draw.randrange(len(payload))
    return header, payload[:at] + bytes([payload[at] ^ 1 << draw.randrange(8)]) + payload[at + 1 :]


def _cut(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    return header, payload[: draw.randrange(len(payload))]


def _too_long(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return header, bytes(LARGEST_BYTES + 1)


def _garbage(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    return draw.randbytes(len(header)), payload


def _of_another_run(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return header[:8] + b"another!" + header[16:], payload


def _for_another_chunk(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """A frame that is whole and true, but for the chunk that it names."""
    return header[:_CHUNK_AT] + struct.pack("<I", draw.randrange(5)) + header[_LENGTH_AT:], payload


def _other_values(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return other_values(header, payload)


def other_values(header: bytes, payload: bytes) -> Parts:
    """Another payload of the same form under its own hash: only what others know of it gives it away."""
    return _with_payload(header, payload[:-1] + bytes([payload[-1] ^ 1]))


def all_is_here(header: bytes, payload: bytes) -> Parts:
    """Of the word which pieces somebody has: all of them."""
    return _with_payload(header, b"\xff" * len(payload))


def _with_payload(header: bytes, payload: bytes) -> Parts:
    return header[:_HASH_AT] + hash_bytes(payload) + header[_HASH_AT + 32 :], payload


def _not_finite(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return _with_payload(header, payload[:16] + b"\xff" * (len(payload) - 16))


_WAYS: tuple[Callable[[bytes, bytes, random.Random], Parts], ...] = (
    _flipped,
    _cut,
    _too_long,
    _garbage,
    _of_another_run,
    _for_another_chunk,
    _other_values,
    _not_finite,
)


def forged(payloads: Mapping[int, Payload], elements: int, how: str) -> dict[int, Payload]:
    """A contribution as a malicious peer makes it, in a form that is right: "1000x", "flip" or "nan"."""
    return {chunk: _forged(payload, elements, how) for chunk, payload in payloads.items()}


def _forged(payload: Payload, elements: int, how: str) -> Payload:
    if how == "nan":
        return bytes(payload)[:HEADER_BYTES] + b"\xff" * (len(payload) - HEADER_BYTES)
    codec = codec_of(payload)
    return codec.encode(codec.decode(payload, elements).mul_({"1000x": 1000.0, "flip": -1.0}[how]))


def forged_sum(payload: bytes) -> bytes:
    """A result that is a result in every way, but not the sum: the lowest bit of its first value is another one."""
    return payload[:HEADER_BYTES] + bytes([payload[HEADER_BYTES] ^ 1]) + payload[HEADER_BYTES + 1 :]


def lied(audited: Audited, wrong: bool) -> Audited:
    """What an auditor found, as a liar tells it."""
    chunks = tuple(ChunkVerdict(each.chunk, wrong) for each in audited.chunks)
    return msgspec.structs.replace(audited, chunks=chunks)


def spoil(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """Header and payload as a hostile peer sends them.  A frame without a payload stays as it is."""
    return draw.choice(_WAYS)(header, payload, draw) if payload else (header, payload)


# ---- bad peers ---------------------------------------------------------------------------------------------

# A peer whose hand for crossings hangs still says that there is room: that was somebody else's work.
_STILL_SAID = "ROOM"


@dataclass
class Neighbours:
    scenario: Scenario
    peers: Sequence[str]  # in order
    random: random.Random
    ledger: Callable[[], Ledger | None]  # of the coordinator, which knows who sits where
    now: Callable[[], float]

    def __post_init__(self) -> None:
        name, drawn = self.peers.__getitem__, self.scenario
        self._apart = {frozenset(map(name, pair)) for pair in drawn.apart}
        self._mute, self._damages = set(map(name, drawn.mute)), set(map(name, drawn.damages))
        self.slanderers = set(map(name, drawn.slanders))

    @property
    def _began(self) -> bool:
        return self.now() >= self.scenario.bad_from_s

    def holds_back(self, source: str, effect: SendFrame) -> bool:
        """It never leaves."""
        if not self._began:
            return False
        if frozenset((source, effect.to)) in self._apart:
            return True
        kind = effect.frame.header.kind
        about = kind.crossing or kind in (Kind.LATER, Kind.MISSING)
        return source in self._mute and about and kind.name != _STILL_SAID

    def spoils(self, source: str, effect: SendFrame, header: bytes, payload: bytes, calm: bool) -> Parts:
        if not effect.frame.header.kind.crossing:
            return header, payload
        by_line = not calm and self.random.random() < self.scenario.damaged
        if by_line or (source in self._damages and self._began):
            return damaged(header, payload, self.random)
        return header, payload

    def says(self, source: str, message: FromMember) -> FromMember:
        """A slanderer complains of one neighbour, or of all of them."""
        ledger = self.ledger()
        lies = source in self.slanderers and self._began
        if not lies or not isinstance(message, Beat) or ledger is None:
            return message
        book = ledger.parts["batches"]
        mine = book.seat_of(source)
        if message.batch is None or mine is None:
            return message
        near = [seat.number for seat in book.seats.values() if abs(seat.stage - mine.stage) == 1]
        few = near if self.scenario.chunks % 2 else near[:1]
        said = tuple(Complaint(number, self.scenario.batch == 12) for number in few)
        return replace(message, batch=replace(message.batch, complains=said))


@dataclass
class LastPeer:
    scenario: Scenario
    peer: str
    random: random.Random
    elements: int  # of a chunk
    cheated: dict[int, int] = field(default_factory=dict)  # by round, the chunk that is made wrong
    wrong: set[bytes] = field(default_factory=set)  # hashes of the sums that it made wrong
    wrong_sums: dict[bytes, bytes] = field(default_factory=dict)  # of groups: by the hash of the right one
    told_by_auditors: list[Audited] = field(default_factory=list)

    @property
    def hostile(self) -> str:
        """Its name, where it damages its frames."""
        return self.peer if self.scenario.hostile > 0.0 else ""

    def spoils(self, source: str, header: bytes, payload: bytes, now: float) -> Parts:
        if source == self.hostile and now < self.scenario.hostile_until_s:  # else a seed keeps its course
            if self.random.random() < self.scenario.hostile:
                return spoil(header, payload, self.random)
        return header, payload

    def forges(self, source: str, payloads: dict[int, Payload]) -> dict[int, Payload]:
        how = self.scenario.forges if source == self.peer else ""
        return forged(payloads, self.elements, how) if how else payloads

    def forges_sum(self, source: str, effect: Merge, made: bytes) -> bytes:
        """One chunk of each round that it owns any of: of a mesh the result, or what its group adds to it."""
        of_group = isinstance(effect, MergeGroup)
        if not self.scenario.cheats or source != self.peer or of_group != self.scenario.cheats_in_group:
            return made
        if self.cheated.setdefault(effect.round_no, effect.chunk) != effect.chunk:
            return made
        wrong = forged_sum(made)
        self.wrong.add(hash_bytes(wrong))
        if of_group:
            self.wrong_sums[hash_bytes(made)] = wrong
        return wrong

    def says(self, message: FromMember, lies: bool) -> FromMember | None:
        """What an auditor says; `lies`: it is of the league.  None: it keeps silent."""
        if isinstance(message, Audited) and lies:
            if self.scenario.mutes:
                return None
            message = lied(message, wrong=self.scenario.accuses)
        if isinstance(message, Audited):
            self.told_by_auditors.append(message)
        return message

    def withholds(self, source: str, effect: SendFrame, part: Replicas | None) -> bool:
        """Owners get its contribution, and auditors do not."""
        if not self.scenario.withholds or source != self.peer:
            return False
        header = effect.frame.header
        replica = part.replica_of_chunk(header.chunk) if part is not None else None
        if header.kind != Kind.CONTRIBUTION or replica is None:
            return False
        plan = replica.rounds.flight.plan if replica.rounds.flight is not None else None
        if plan is None or plan.round_no != header.round_no:
            return True
        return plan.owner_of(header.chunk - replica.fragment.first) != effect.to
