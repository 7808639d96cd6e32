"""What a member holds in a round, what it can prove of it, and who does what with which chunk.  Pure data.

Made by the round at a member (member.py) and by whoever keeps or asks for contributions; the reporter tells the
coordinator what is in `Progress`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations_with_replacement, zip_longest
from typing import Protocol

from msgspec import Struct

from farflung.collectives.round.effects import Weigh
from farflung.protocol.digests import bits, combined, full_mask, mask_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Kind, Payload
from farflung.protocol.round_words import Plan
from farflung.protocol.signed_words import inputs_of

# ---- dot products ------------------------------------------------------------------------------------------
# What an owner knows of the dot products of its chunks: which to compute next, and what to report. Pure.
#
# Part of the round at a member (member.py). A chunk is weighed as soon as every contribution to it is here,
# so that the sums are ready when the coordinator decides. Where contributions fail to come, the coordinator
# names whom it wants compared, and the chunks are weighed with those. Members are bits of a mask, in the
# plan's order.


class HasPayload(Protocol):
    @property
    def payload(self) -> Payload: ...


class Dots(Struct, frozen=True):
    """The sums over chunks of <x_i, x_j> for members i <= j, row by row."""

    members: int  # mask
    chunks: int  # mask
    products: tuple[float, ...]


class Weighing:
    def __init__(self, everybody: int, active: bool) -> None:
        self.active = active  # contributions are compared in this run, and the decision is not made yet
        self.changed = False  # whom to compare, or what I own: every chunk is to be looked at again
        self._asked = 0  # the coordinator's word: whom to compare; 0: it has not asked
        self._everybody = everybody
        self._known: dict[int, Dots] = {}  # by chunk
        self._busy: dict[int, int] = {}  # chunk -> members

    def on_asked(self, members: int) -> None:
        self.changed = self.changed or members != self._asked
        self._asked = members & self._everybody

    def due(self, chunk: int, held: int, refused: int = 0) -> int:
        """With whom the chunk is to be weighed now; 0: not now.  `held`: whose contributions are here."""
        wanted = self._wanted(refused)
        if not self.active or not wanted or wanted & ~held:
            return 0
        known = self._known[chunk].members if chunk in self._known else 0
        return wanted if wanted & ~known and wanted & ~self._busy.get(chunk, 0) else 0

    def weigh_all(
        self, plan: Plan, shelves: Mapping[int, Mapping[str, HasPayload]], refused: int, first_chunk: int
    ) -> Iterator[Weigh]:
        """Compare what is here, chunk by chunk, where nothing is missing for it."""
        for chunk, shelf in shelves.items() if self.active else ():
            mask = self.due(chunk, mask_of(plan.members.index(member) for member in shelf), refused)
            if mask:
                self.begin(chunk, mask)
                payloads = tuple(shelf[plan.members[index]].payload for index in bits(mask))
                yield Weigh(plan.round_no, first_chunk + chunk, mask, payloads)

    def begin(self, chunk: int, members: int) -> None:
        self._busy[chunk] = members

    def on_weighed(self, chunk: int, members: int, products: tuple[float, ...]) -> None:
        self._known[chunk] = Dots(members, 1 << chunk, products)
        if self._busy.get(chunk) == members:
            del self._busy[chunk]

    def is_complete(self, chunks: Collection[int], refused: int = 0) -> bool:
        """Nothing (more) is to be compared here."""
        if not self.active:
            return True
        if len(self._known) < len(chunks):  # asked after every frame
            return False
        wanted = self._wanted(refused)
        return all(chunk in self._known and not wanted & ~self._known[chunk].members for chunk in chunks)

    def report(self, chunks: Collection[int], refused: int = 0) -> Dots | None:
        """The sums over all my chunks, once each has been weighed."""
        if not self.active or not chunks or not self.is_complete(chunks, refused):
            return None
        wanted = self._wanted(refused)
        parts = [_only(self._known[chunk], wanted) for chunk in sorted(chunks)]
        return Dots(wanted, mask_of(chunks), tuple(map(sum, zip(*parts, strict=True))))

    def _wanted(self, refused: int) -> int:
        return self._asked or self._everybody & ~refused


def _only(dots: Dots, members: int) -> tuple[float, ...]:
    """The products of some of the members."""
    if dots.members == members:
        return dots.products
    return tuple(p for (i, j), p in by_pair(dots) if members >> i & 1 and members >> j & 1)


def by_pair(dots: Dots) -> Iterable[tuple[tuple[int, int], float]]:
    return zip(combinations_with_replacement(bits(dots.members), 2), dots.products, strict=True)


# ---- pieces ------------------------------------------------------------------------------------------------

IN_GROUP = frozenset({Kind.CONTRIBUTION, Kind.WANT_CONTRIBUTION})  # contributions never leave it


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    payload: Payload
    hash: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """What this member can prove to hold; the coordinator compares the combined hashes."""

    held: dict[str, tuple[int, bytes]]  # member -> (mask of chunks, combined hash)
    refused: dict[str, Verdict]  # members that sent something unusable, and what it was
    cut_off: tuple[str, ...]  # members that I can't reach, or that give nothing (usable) however often I ask
    merged: dict[int, bytes]  # chunk -> hash of the result that I made
    inputs: bytes  # one name for all contributions that went into these
    got: tuple[int, bytes]  # (mask, combined hash) of results
    dots: Dots | None  # of all my chunks, before the decision
    lengths: bytes  # of the results that I made, in their order, where the gradient is clipped
    got_by: dict[str, bytes]  # owner -> combined hash of its results, where the commit does not come
    # In groups:
    # My chunk -> hash of what I made of my group's contributions to it.
    sums: dict[int, bytes] = field(default_factory=dict)
    sum_inputs: bytes = b""  # one name for these
    sum_dots: Dots | None = None  # of the sums of groups, for all chunks that I am the root of
    sum_tags: bytes = b""  # of the sums that went into `merged`: the first bytes of their hashes


Counted = Sequence[tuple[str, float]]  # whose contributions are included, and their weights


@dataclass(frozen=True)
class Roles:
    """As one plan has them, of a flat round: an owner's sum is the result."""

    me: str
    plan: Plan

    def fits(self, chunks: int) -> bool:
        """The plan is one of so many chunks in which I have a part."""
        return self.me in self.plan.members and len(self.plan.owners) == chunks

    @cached_property
    def near(self) -> Sequence[str]:
        """Everybody that I exchange frames with."""
        return self.plan.members

    def makes(self, chunk: int) -> bool:
        """I make its result."""
        return self.plan.owner_of(chunk) == self.me

    def giver(self, chunk: int) -> str:
        """From whom I get its result."""
        return self.plan.owner_of(chunk)

    def receivers(self, chunk: int) -> Sequence[str]:
        """Who gets its result from me."""
        return self.plan.members

    def takes(self, sender: str, chunk: int) -> bool:
        """A contribution to it is for me."""
        return self.plan.owner_of(chunk) == self.me

    def keeper(self, chunk: int) -> str | None:
        """Who else keeps what I contribute to it, a chunk of my own."""
        return None

    def kept_elsewhere(self, before: Plan) -> list[int]:
        """Ownership moved: chunks of mine that have another keeper now."""
        return []


def encoding_order(plan: Plan, me: str) -> list[int]:
    """In which my chunks are best encoded: the lines of all others carry something from the first moment on.

    Each member begins with the one after it, or all of them would begin with the same; my own chunks are last.
    """
    at = plan.members.index(me)
    others = [plan.chunks_of(member) for member in plan.members[at + 1 :] + plan.members[:at]]
    sent = [chunk for row in zip_longest(*others) for chunk in row if chunk is not None]
    return [*sent, *plan.chunks_of(me)]


def by_owner(plan: Plan, got: Mapping[int, bytes]) -> dict[str, bytes]:
    """The proof of what I hold, owner by owner: one of them that tells other hashes than its results have spoils the
    whole one, and it must show which."""
    by: dict[str, dict[int, bytes]] = {}
    for chunk, named in got.items():
        by.setdefault(plan.owner_of(chunk), {})[chunk] = named
    return {owner: combined(named.items()) for owner, named in by.items()}


class RoundPieces:
    """What a member has of a round, and what it can prove of that.  Chunks are counted within the round's fragment."""

    def __init__(self, me: str, plan: Plan, measures: bool) -> None:
        """`measures`: the gradient is clipped, so that a result counts as held once its length is known too."""
        self._me, self._plan, self.measures = me, plan, measures
        self.owned = plan.chunks_of(me)
        self.mine: dict[int, ChunkPiece] = {}  # my contribution, as far as it is encoded
        self.held: dict[int, dict[str, ChunkPiece]] = {}  # chunk -> member -> contribution
        self.shelved = 0  # contributions to chunks that I own
        self.results: dict[int, ChunkPiece] = {}
        self.merged: dict[int, bytes] = {}  # what I made myself, by its hash
        # Chunk -> (a result's hash, its length): by both together I prove to hold it.
        self.lengths: dict[int, tuple[bytes, bytes]] = {}

    def move(self, plan: Plan, kept: int) -> list[int]:
        """Ownership moved: which chunks are elsewhere now.  `kept`: of results that are proven."""
        before, self._plan, self.owned = self._plan, plan, plan.chunks_of(self._me)
        # A living owner loses chunks too, when others can't reach it: what it holds of them counts no more.
        self.shelved = sum(len(self.held.get(chunk, ())) for chunk in self.owned)
        elsewhere = [c for c in range(len(plan.owners)) if before.owner_of(c) != plan.owner_of(c)]
        for chunk in elsewhere:
            self.merged.pop(chunk, None)
            if not kept >> chunk & 1:
                self.results.pop(chunk, None)  # nobody has proven these bytes: they are made again
        return elsewhere

    def shelve(self, chunk: int, member: str, piece: ChunkPiece) -> bool:
        """False: its contribution to this chunk is here."""
        shelf = self.held.setdefault(chunk, {})
        if member in shelf:
            return False
        shelf[member] = piece
        self.shelved += self._plan.owner_of(chunk) == self._me
        return True

    def forget_results(self) -> None:
        self.results.clear()
        self.merged.clear()

    @property
    def encoded(self) -> bool:
        return len(self.mine) == len(self._plan.owners)

    def hashes(self) -> bytes:
        """Of all my chunks, once they are encoded."""
        return b"".join(self.mine[chunk].hash for chunk in range(len(self._plan.owners)))

    def missing_results(self) -> list[int]:
        return list(bits(full_mask(len(self._plan.owners)) & ~mask_of(self.results)))

    @property
    def measured(self) -> dict[int, ChunkPiece]:
        """Results that I can prove to hold."""
        if not self.measures:
            return self.results
        known = self.lengths
        return {c: piece for c, piece in self.results.items() if known.get(c, (b"",))[0] == piece.hash}

    def length_of(self, chunk: int) -> bytes:
        return self.lengths[chunk][1] if self.measures else b""

    def inputs(self, chunks: Collection[int], counted: Counted) -> bytes:
        """One name for the contributions of these members to these chunks; empty where there is no chunk."""
        if not chunks:
            return b""
        return inputs_of(self.held[chunk][member].hash for chunk in sorted(chunks) for member, _ in counted)

    def proofs(self) -> dict[str, tuple[int, bytes]]:
        """Of the contributions to my chunks, and of what I keep of others' to their own: member -> (mask, hash)."""
        held = {}
        for member in self._plan.members:
            pieces = {
                chunk: shelf[member].hash
                for chunk, shelf in self.held.items()
                if member in shelf and self._plan.owner_of(chunk) in (self._me, member)
            }
            if pieces:
                held[member] = (mask_of(pieces), combined(pieces.items()))
        return held
