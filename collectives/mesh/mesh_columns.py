"""What an owner of a mesh has to do with other groups: whose sums it waits for, to whom its own go.  Pure.

Part of the round at a member (member.py).  Each of my chunks has an owner in every group.  One of them is the root:
the others send it what their groups add up to, it encodes the result of all and sends it to them, and each gives that
to its group.  In a flat round I am the root of all that I own, there is one group, and its sum is the result.

A sum is known by the group that it is of.  It is worth as much as the decision that it was made by: a new one makes
all sums void.  Where contributions are compared, so are these sums, at the root, and nothing is encoded of them before
the coordinator has seen what came of it.  Must not know frames, patience or arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from farflung.collectives.mesh.mesh_backups import keeps, spare_of
from farflung.collectives.round.dot_products import Dots, Weighing
from farflung.collectives.round.effects import WeighSums
from farflung.collectives.round.pieces import ChunkPiece, Roles
from farflung.protocol.digests import bits, mask_from_bytes, mask_of
from farflung.protocol.frames import FrameKind, Kind
from farflung.protocol.round_words import Decision, Plan


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

    def may_ask(self, sender: str, kind: FrameKind, chunk: int) -> bool:
        return kind != Kind.WANT_SUM or sender == self.root(chunk)


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
