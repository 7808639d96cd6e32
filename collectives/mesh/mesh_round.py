"""One round in groups at one member: where it differs from a flat one (collectives/round/member.py).  Pure.

Owners of a group sum what its members contribute, and pass the sum on to the chunk's root.  That makes the result of
all groups' sums and gives it to the other owners, and each of those to its group.  A root compares sums as owners
compare contributions, and encodes nothing of them before the coordinator has seen what came of it.  What an owner
contributes to a chunk of its own is kept by another one too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from farflung.collectives.round.effects import Calculated, DataEffect, Merge, Weigh
from farflung.collectives.round.member import Judged, MemberRound, Owner
from farflung.collectives.round.pieces import ChunkPiece, Counted, Dots, Progress, Roles, Weighing
from farflung.protocol.digests import bits, hash_bytes, mask_from_bytes, mask_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Trait
from farflung.protocol.mode_words import EncodeTick
from farflung.protocol.round_words import SUM_CODEC, SUM_TAG_BYTES, Decision, ModeSection, Plan, section
from farflung.protocol.signed_words import inputs_of

# ---- words -------------------------------------------------------------------------------------------------


class MeshKind(FrameKind):
    SUM = 36, Trait.OF_ROUND  # owner -> root: what my group's contributions to one chunk add up to
    WANT_SUM = 37, Trait.BARE | Trait.OF_ROUND


KINDS = MeshKind


@dataclass(frozen=True, slots=True)
class MergeGroup(Merge):
    """What a group adds to the result, encoded as sums travel."""

    codec: str = SUM_CODEC


@dataclass(frozen=True, slots=True)
class WeighSums(Weigh):
    """The dot products of the sums that groups add to one chunk, at its root: `members` are groups."""

    decision_no: int


# ---- mesh backups ------------------------------------------------------------------------------------------
# Who else has what an owner of a mesh contributes to its own chunks. Pure.
#
# Everybody sends its contribution to owners; what an owner itself adds to its own chunks would be nowhere
# else. When it died after the decision, one contribution could not be had any more, all weights changed, and
# a thousand members made all sums and results anew. So each of these pieces goes to another owner of the
# group, too, after everything else; that one shows the coordinator that it has it, and is the heir
# (coordinator/rounds/owners.py). It costs the line of an owner its share of one contribution, where
# groups have many members a few percent; in a flat round of four it would be a third, so there nobody does
# it.
#
# Used by the round at a member. Must not know frames. Only the sender asks who it is: whoever
# gets such a piece takes it for what it is, one piece of each chunk that others own at most.


def spare_of(plan: Plan, chunk: int) -> str | None:
    """Who should have what the owner of this chunk adds to it; None: nobody.

    Drawn for each chunk by how much a peer owns, since that says what its line carries.  When one of the others dies,
    only what it was to keep goes to somebody else.
    """
    counts = Counter(plan.owners)
    del counts[plan.owners[chunk]]
    return min((plan.members[at] for at in counts), key=lambda peer: _turn(plan, peer, chunk), default=None)


def keeps(plan: Plan, sender: str, chunk: int) -> bool:
    """What it sends is its own part of a chunk that it owns."""
    return plan.owner_of(chunk) == sender


def moved(before: Plan, after: Plan, chunks: list[int]) -> list[int]:
    """Of these, which their owner had before: those that somebody else keeps from now on."""
    stay = [chunk for chunk in chunks if before.owner_of(chunk) == after.owner_of(chunk)]
    return [chunk for chunk in stay if spare_of(before, chunk) != spare_of(after, chunk)]


def _turn(plan: Plan, peer: str, chunk: int) -> float:
    drawn = int.from_bytes(hash_bytes(chunk.to_bytes(4, "little"), peer.encode())[:8], "little")
    return -math.log((drawn + 1) / (2**64 + 1)) / len(plan.chunks_of(peer))


# ---- mesh columns ------------------------------------------------------------------------------------------
# What an owner of a mesh has to do with other groups: whose sums it waits for, to whom its own go. Pure.
#
# Part of the round at a member (member.py). Each of my chunks has an owner in every group. One of them is the
# root: the others send it what their groups add up to, it encodes the result of all and sends it to them, and
# each gives that to its group. In a flat round I am the root of all that I own, there is one group, and its
# sum is the result.
#
# A sum is known by the group that it is of. It is worth as much as the decision that it was made by: a new
# one makes all sums void. Where contributions are compared, so are these sums, at the root, and nothing is
# encoded of them before the coordinator has seen what came of it. Must not know frames, patience or
# arithmetic.


@dataclass(frozen=True)
class MeshColumns(Roles):
    """Of my chunks, as one plan has them."""

    @property
    def group(self) -> int:
        return self.plan.column.group if self.plan.column else 0

    @cached_property
    def rows(self) -> dict[int, tuple[list[str], int]]:
        """Chunk of mine -> (its owner in each group, its root's group)."""
        column = self.plan.column
        if not column:
            return {}
        chunks, count = self.plan.chunks_of(self.me), column.groups
        rows = [column.owners[at * count : (at + 1) * count] for at in range(len(chunks))]
        return {
            chunk: ([column.peers[place] for place in row], root)
            for chunk, row, root in zip(chunks, rows, column.roots, strict=True)
        }

    def fits(self, chunks: int) -> bool:
        """And the plan's column is one of what I own there."""
        column = self.plan.column
        if not column or not super().fits(chunks):
            return super().fits(chunks)
        mine = len(self.plan.chunks_of(self.me))
        whole = len(column.roots) == mine and len(column.owners) == mine * column.groups
        places = all(0 <= place < len(column.peers) for place in column.owners)
        return whole and places and all(root < column.groups for root in (*column.roots, column.group))

    @cached_property
    def peers(self) -> frozenset[str]:
        """Everybody in other groups that I have to do with."""
        return frozenset(peer for owners, _ in self.rows.values() for peer in owners) - {self.me}

    @cached_property
    def rooted(self) -> list[int]:
        """Chunks of mine that I encode the result of."""
        return [chunk for chunk in self.plan.chunks_of(self.me) if self.root(chunk) == self.me]

    def root(self, chunk: int) -> str:
        """Of a chunk of mine."""
        if chunk not in self.rows:
            return self.me
        owners, root = self.rows[chunk]
        return owners[root]

    def others(self, chunk: int) -> list[str]:
        """Its owners in the other groups, if I am its root: they get the result from me."""
        if chunk not in self.rows or self.root(chunk) != self.me:
            return []
        return [peer for peer in self.rows[chunk][0] if peer != self.me]

    def group_of(self, peer: str, chunk: int) -> int | None:
        """Of which it owns this chunk of mine."""
        owners = self.rows[chunk][0] if chunk in self.rows else []
        return owners.index(peer) if peer in owners else None

    def rooted_at(self, peer: str) -> list[int]:
        """Chunks of mine whose result comes from there."""
        return [chunk for chunk in self.rows if peer != self.me and self.root(chunk) == peer]

    def summed_by(self, peer: str) -> list[int]:
        """Chunks of mine of which I am the root, and of which it makes its group's sum."""
        if peer == self.me or peer not in self.peers:
            return []
        mine = (chunk for chunk in self.rows if self.root(chunk) == self.me)
        return [chunk for chunk in mine if self.group_of(peer, chunk) is not None]

    # ---- roles --------------------------------------------------------------------------------------

    @cached_property
    def near(self) -> Sequence[str]:
        return [*self.plan.members, *sorted(self.peers)]

    def makes(self, chunk: int) -> bool:
        return super().makes(chunk) and self.root(chunk) == self.me

    def giver(self, chunk: int) -> str:
        owner = self.plan.owner_of(chunk)
        return owner if owner != self.me else self.root(chunk)

    def receivers(self, chunk: int) -> Sequence[str]:
        return (*self.others(chunk), *self.plan.members)

    def takes(self, sender: str, chunk: int) -> bool:
        return super().takes(sender, chunk) or keeps(self.plan, sender, chunk)

    def keeper(self, chunk: int) -> str | None:
        return spare_of(self.plan, chunk)

    def kept_elsewhere(self, before: Plan) -> list[int]:
        return moved(before, self.plan, self.plan.chunks_of(self.me))


class GroupSumsHere:
    """The sums of groups that are here, chunk by chunk."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, ChunkPiece]] = {}
        self._counted: list[int] = []  # groups
        self._weighing = Weighing(0, False)
        self._decision_no = self._may_encode = (
            0  # the decision that they were made by, and the one that stands
        )

    def begin(self, decision: Decision) -> None:
        self._of.clear()
        self._decision_no, self._counted = decision.decision_no, groups_in(decision)
        self._weighing = Weighing(mask_of(self._counted), decision.weigh_sums is True)
        self.on_may_encode(self._may_encode)

    # ---- comparing them -----------------------------------------------------------------------------

    @property
    def held_back(self) -> bool:
        return self._weighing.active

    def on_may_encode(self, decision_no: int) -> bool:
        """True: so they may, from now on."""
        self._may_encode = decision_no
        freed = self.held_back and decision_no == self._decision_no
        self._weighing.active = self.held_back and not freed
        return freed

    def weigh(self, plan: Plan, chunk: int, first_chunk: int, decision: Decision) -> list[WeighSums]:
        """Of one chunk, once they are all here."""
        groups = self._weighing.due(chunk, mask_of(self._of.get(chunk, ())))
        if not groups:
            return []
        self._weighing.begin(chunk, groups)
        payloads = tuple(piece.payload for piece in self.in_order(chunk, decision))
        return [WeighSums(plan.round_no, first_chunk + chunk, groups, payloads, decision.decision_no)]

    def on_weighed(self, decision_no: int, chunk: int, groups: int, products: tuple[float, ...]) -> None:
        if decision_no == self._decision_no:
            self._weighing.on_weighed(chunk, groups, products)

    def dots(self, rooted: list[int]) -> Dots | None:
        return self._weighing.report(rooted)

    # ---- which are here -----------------------------------------------------------------------------

    def put(self, chunk: int, group: int, piece: ChunkPiece) -> bool:
        """False if it was here."""
        of_chunk = self._of.setdefault(chunk, {})
        if group in of_chunk:
            return False
        of_chunk[group] = piece
        return True

    def get(self, chunk: int, group: int) -> ChunkPiece | None:
        return self._of.get(chunk, {}).get(group)

    def are_complete(self, columns: MeshColumns, chunks: Sequence[int]) -> bool:
        """All are compared that I am the root of, and my group's are made, if it counts: results wait for both."""
        group = columns.group
        made = group not in self._counted or all(group in self._of.get(chunk, ()) for chunk in chunks)
        return made and self._weighing.is_complete(columns.rooted)

    def of_group(self, group: int, chunks: Sequence[int]) -> dict[int, ChunkPiece]:
        found = ((chunk, self.get(chunk, group)) for chunk in chunks)
        return {chunk: piece for chunk, piece in found if piece is not None}

    def hashes_in(self, chunks: Iterable[int], decision: Decision | None) -> list[bytes]:
        """Of all that go into the results of these chunks, in the order of what a root signs."""
        if decision is None:
            return []
        return [piece.hash for chunk in sorted(chunks) for piece in self.in_order(chunk, decision)]

    def missing(self, chunk: int, decision: Decision) -> list[int]:
        """Groups that count, and whose sum is not here."""
        return [group for group in groups_in(decision) if group not in self._of.get(chunk, {})]

    def in_order(self, chunk: int, decision: Decision) -> list[ChunkPiece]:
        return [self._of[chunk][group] for group in groups_in(decision)]


def groups_in(decision: Decision) -> list[int]:
    """Those that somebody is included of, in the order of the sum."""
    return list(bits(mask_from_bytes(decision.summed or b"")))


# ---- group owner -------------------------------------------------------------------------------------------


class GroupOwner(Owner):
    """It adds up its group, and at a root all groups."""

    roles: MeshColumns
    summed = MeshKind.SUM
    _freed = False  # results of groups' sums may be encoded at last

    @cached_property
    def groups(self) -> GroupSumsHere:
        return GroupSumsHere()

    # ---- the coordinator's words -------------------------------------------------------------------

    def begin(self, decision: Decision) -> list[DataEffect]:
        self.groups.begin(decision)
        return super().begin(decision)

    def on_sections(self, told: Sequence[ModeSection]) -> None:
        said = section(EncodeTick, told)
        self._freed = self.groups.on_may_encode(said.decision_no if said is not None else 0) or self._freed

    def on_roots(self, before: Plan, kept: int) -> list[DataEffect]:
        """Sums of chunks that I still own go elsewhere now."""
        effects, was = list[DataEffect](), MeshColumns(self.roles.me, before)
        for chunk in self._pieces.owned:
            root = self.roles.root(chunk)
            if chunk not in was.rows or root == was.root(chunk):
                continue
            if not kept >> chunk & 1:
                self._pieces.results.pop(chunk, None)
                self._pieces.merged.pop(chunk, None)
            elif root == self.roles.me and chunk in self._pieces.results:
                effects += self._sender.spread(chunk)
            effects += self._pass_sum_on(chunk)
        return effects

    # ---- arithmetic --------------------------------------------------------------------------------

    def on_calculated(self, effect: Calculated, made: object) -> list[DataEffect]:
        chunk = effect.chunk - self._sender.first_chunk
        if isinstance(effect, WeighSums):
            assert isinstance(made, tuple)
            self.groups.on_weighed(effect.decision_no, chunk, effect.members, made)
            return []  # what came of it is told with the progress
        if not isinstance(effect, MergeGroup):
            return super().on_calculated(effect, made)
        assert isinstance(made, bytes)
        if not self._deciding.is_newest(effect.decision_no):
            return []
        self._merging.discard(chunk)
        self.groups.put(chunk, self.roles.group, ChunkPiece(made, hash_bytes(made)))
        return self._pass_sum_on(chunk) + self.merge_ready(chunk)

    def _pass_sum_on(self, chunk: int) -> list[DataEffect]:
        """What my group adds to the result goes to the root, if that is somebody else."""
        piece, root, me = self.sum_of(chunk), self.roles.root(chunk), self.roles.me
        if piece is None or root == me or self.roles.plan.owner_of(chunk) != me:
            return []
        return [self._sender.answer(root, MeshKind.SUM, chunk, piece)]

    def look_again(self) -> list[DataEffect]:
        effects = super().look_again()
        if self._freed:
            self._freed, effects = False, [*effects, *self.merge_ready()]
        return effects

    def _make(self, chunk: int, counted: Counted, decision: Decision) -> list[DataEffect]:
        """The first sum, of my group; and the second one, at the root, of all groups."""
        # Also where the result is here: it waits for my word of my group's sum, the one before me left none.
        if counted and not self.is_summed(chunk):
            return self._merge(chunk, counted, decision, MergeGroup)
        return [] if chunk in self._pieces.results else self._merge_sums(chunk, decision)

    def _merge_sums(self, chunk: int, decision: Decision) -> list[DataEffect]:
        """At the root, once they are here."""
        if self.roles.root(chunk) != self.roles.me or self.groups.missing(chunk, decision):
            return []
        plan, first_chunk = self.roles.plan, self._sender.first_chunk
        if self.groups.held_back:
            return [*self.groups.weigh(plan, chunk, first_chunk, decision)]
        self._merging.add(chunk)
        payloads = tuple(piece.payload for piece in self.groups.in_order(chunk, decision))
        numbers = plan.round_no, decision.decision_no, first_chunk + chunk
        return [Merge(*numbers, payloads, (1.0,) * len(payloads))]  # weighed they are already

    # ---- what came of it ---------------------------------------------------------------------------

    def is_summed(self, chunk: int) -> bool:
        return self.sum_of(chunk) is not None

    def is_compared(self) -> bool:
        return super().is_compared() and self.groups.are_complete(self.roles, self._pieces.owned)

    def sum_of(self, chunk: int) -> ChunkPiece | None:
        """What I added up of it for its root."""
        return self.groups.get(chunk, self.roles.group)

    @property
    def sums(self) -> Mapping[int, ChunkPiece]:
        """The same, of all chunks that I own."""
        return self.groups.of_group(self.roles.group, self._pieces.owned)


# ---- mesh round --------------------------------------------------------------------------------------------


class MeshRound(MemberRound):
    roles_of = MeshColumns
    owner_class = GroupOwner
    roles: MeshColumns
    owner: GroupOwner

    # ---- frames ------------------------------------------------------------------------------------

    def is_early(self, sender: str, frame: Frame) -> bool:
        header, index = frame.header, frame.header.chunk - self.first_chunk
        if header.kind == MeshKind.SUM and 0 <= index < len(self.plan.owners) and not self.roles.makes(index):
            return header.decision_no >= self.deciding.number
        return super().is_early(sender, frame)

    def _on_other(self, sender: str, chunk: int, frame: Frame, now: float) -> Judged:
        if frame.header.kind == MeshKind.WANT_SUM and sender == self.roles.root(chunk):
            return self._on_want(sender, chunk, frame.header, now)
        if frame.header.kind != MeshKind.SUM:
            return super()._on_other(sender, chunk, frame, now)
        if not self.deciding.is_newest(frame.header.decision_no):
            return Verdict.STALE, []
        group = self.roles.group_of(sender, chunk)
        if group is None or not self.roles.makes(chunk):
            return Verdict.STALE, []
        self.asking.on_heard(sender, now)
        if sender in self.faults.owners:
            return Verdict.UNAUTHORISED, []
        if not self.owner.groups.put(chunk, group, ChunkPiece(frame.payload, frame.header.hash)):
            return Verdict.DUPLICATE, []
        return Verdict.ACCEPTED, self.owner.merge_ready(chunk)

    def _piece(self, kind: FrameKind, chunk: int) -> ChunkPiece | None:
        return self.owner.sum_of(chunk) if kind == MeshKind.SUM else super()._piece(kind, chunk)

    def _wants_of(self, member: str) -> list[Header]:
        """Of an owner in another group: its group's sums where I am the root, results where it is."""
        if member in self.plan.members:
            return super()._wants_of(member)
        decision = self.deciding.newest
        if decision is None or member in self.faults.owners:
            return []
        missing, group_of = self.owner.groups.missing, self.roles.group_of
        lacking = (c for c in self.roles.summed_by(member) if group_of(member, c) in missing(c, decision))
        wants: list[tuple[FrameKind, int]] = [(MeshKind.WANT_SUM, chunk) for chunk in lacking]
        wants += [(Kind.WANT_RESULT, chunk) for chunk in self.roles.rooted_at(member)]
        return [self._sender.header(*want) for want in wants if want[1] not in self.pieces.results]

    # ---- reports -----------------------------------------------------------------------------------

    @property
    def given(self) -> Mapping[FrameKind, Mapping[int, ChunkPiece]]:
        return {**super().given, MeshKind.SUM: self.owner.sums}

    def codec_of(self, kind: FrameKind, sender: str) -> str:
        return SUM_CODEC if kind == MeshKind.SUM else super().codec_of(kind, sender)

    def progress(self) -> Progress:
        flat, sums = super().progress(), self.owner.sums
        added = self.owner.groups.hashes_in(flat.merged, self.deciding.newest)
        return replace(
            flat,
            inputs=inputs_of(added) if added else flat.inputs,
            sums={chunk: piece.hash for chunk, piece in sums.items()},
            sum_inputs=self.pieces.inputs(sums, self.deciding.counted(self.plan.members)),
            sum_dots=self.owner.groups.dots(self.roles.rooted),
            sum_tags=b"".join(each[:SUM_TAG_BYTES] for each in added),
        )
