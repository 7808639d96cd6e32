"""One round in groups at one member: where it differs from a flat one (collectives/round/member.py).  Pure.

Owners of a group sum what its members contribute, and pass the sum on to the chunk's root.  That makes the result of
all groups' sums and gives it to the other owners, and each of those to its group.  A root compares sums as owners
compare contributions, and encodes nothing of them before the coordinator has seen what came of it.  What an owner
contributes to a chunk of its own is kept by another one too (mesh_backups.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from farflung.collectives.mesh.mesh_backups import moved
from farflung.collectives.mesh.mesh_columns import GroupSumsHere, MeshColumns
from farflung.collectives.round.effects import Calculated, DataEffect, Merge, MergeGroup, WeighSums
from farflung.collectives.round.member import MemberRound
from farflung.collectives.round.pieces import ChunkPiece, Counted, Progress
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload
from farflung.protocol.round_words import SUM_TAG_BYTES, Decision, Plan
from farflung.protocol.signed_words import inputs_of
from farflung.protocol.verdicts import Verdict


class MeshRound(MemberRound):
    roles_of = MeshColumns
    roles: MeshColumns
    _freed = False  # results of groups' sums may be encoded at last

    @cached_property
    def groups(self) -> GroupSumsHere:
        return GroupSumsHere()

    # ---- the coordinator's words -------------------------------------------------------------------

    def _on_spares(self, before: Plan) -> list[DataEffect]:
        mine = [chunk for chunk in self.pieces.owned if chunk in self.pieces.mine]
        return [effect for chunk in moved(before, self.plan, mine) for effect in self._deliver(chunk)]

    def _on_roots(self, before: Plan, kept: int) -> list[DataEffect]:
        """Sums of chunks that I still own go elsewhere now."""
        effects, was = list[DataEffect](), MeshColumns(self.me, before)
        for chunk in self.pieces.owned:
            root = self.roles.root(chunk)
            if chunk not in was.rows or root == was.root(chunk):
                continue
            if not kept >> chunk & 1:
                self.pieces.results.pop(chunk, None)
                self.pieces.merged.pop(chunk, None)
            elif root == self.me and chunk in self.pieces.results:
                effects += self._spread(chunk, self.pieces.results[chunk])
            effects += self._pass_sum_on(chunk)
        return effects

    def _begin(self, decision: Decision) -> None:
        super()._begin(decision)
        self.groups.begin(decision)

    def on_may_encode(self, decision_no: int) -> None:
        self._freed = self.groups.on_may_encode(decision_no) or self._freed

    # ---- arithmetic --------------------------------------------------------------------------------

    def on_calculated(self, effect: Calculated, made: object) -> list[DataEffect]:
        if isinstance(effect, WeighSums):
            assert isinstance(made, tuple)
            self.groups.on_weighed(effect.decision_no, effect.chunk - self.first_chunk, effect.members, made)
            return []  # what came of it is told with the progress
        if isinstance(effect, MergeGroup):
            assert isinstance(made, bytes)
            return self._on_summed(effect.decision_no, effect.chunk, made)
        return super().on_calculated(effect, made)

    def _on_summed(self, decision_no: int, chunk: int, payload: Payload) -> list[DataEffect]:
        """What my group adds to the result."""
        if not self._is_newest(decision_no):
            return []
        index = chunk - self.first_chunk
        self._merging.discard(index)
        self.groups.put(index, self.roles.group, ChunkPiece(payload, hash_bytes(payload)))
        return self._pass_sum_on(index) + self._merge_ready(index)

    def _pass_sum_on(self, chunk: int) -> list[DataEffect]:
        """To the root, if that is somebody else."""
        piece, root = self._own_sum(chunk), self.roles.root(chunk)
        if piece is None or root == self.me or self.plan.owner_of(chunk) != self.me:
            return []
        return self._answer(root, Kind.SUM, chunk, piece)

    def _own_sum(self, chunk: int) -> ChunkPiece | None:
        """Of my group."""
        return self.groups.get(chunk, self.roles.group)

    def _look_again(self) -> list[DataEffect]:
        effects = super()._look_again()
        if self._freed:
            self._freed, effects = False, [*effects, *self._merge_ready()]
        return effects

    def _make(self, chunk: int, counted: Counted, decision: Decision) -> list[DataEffect]:
        """The first sum, of my group; and the second one, at the root, of all groups."""
        # Also where the result is here: it waits for my word of my group's sum, the one before me left none.
        if counted and self._own_sum(chunk) is None:
            return self._merge(chunk, counted, decision, MergeGroup)
        return [] if chunk in self.pieces.results else self._merge_sums(chunk, decision)

    def _merge_sums(self, chunk: int, decision: Decision) -> list[DataEffect]:
        """At the root, once they are here."""
        if self.roles.root(chunk) != self.me or self.groups.missing(chunk, decision):
            return []
        if self.groups.held_back:
            return [*self.groups.weigh(self.plan, chunk, self.first_chunk, decision)]
        self._merging.add(chunk)
        payloads = tuple(piece.payload for piece in self.groups.in_order(chunk, decision))
        number, place = self.plan.round_no, self.first_chunk + chunk
        # Weighed they are already.
        return [Merge(number, decision.decision_no, place, payloads, (1.0,) * len(payloads))]

    # ---- frames ------------------------------------------------------------------------------------

    def is_early(self, sender: str, frame: Frame) -> bool:
        header, index = frame.header, frame.header.chunk - self.first_chunk
        if header.kind == Kind.SUM and 0 <= index < len(self.plan.owners) and not self.roles.makes(index):
            return header.decision_no >= self._deciding.number
        return super().is_early(sender, frame)

    def _on_other(self, sender: str, frame: Frame, now: float) -> tuple[Verdict, list[DataEffect]]:
        if frame.header.kind != Kind.SUM:
            return super()._on_other(sender, frame, now)
        chunk = frame.header.chunk - self.first_chunk
        if not self._is_newest(frame.header.decision_no):
            return Verdict.STALE, []
        group = self.roles.group_of(sender, chunk)
        if group is None or not self.roles.makes(chunk):
            return Verdict.STALE, []
        self._asking.on_heard(sender, now)
        if sender in self.faults.owners:
            return Verdict.UNAUTHORISED, []
        if not self.groups.put(chunk, group, ChunkPiece(frame.payload, frame.header.hash)):
            return Verdict.DUPLICATE, []
        return Verdict.ACCEPTED, self._merge_ready(chunk)

    def _wants_of(self, member: str) -> list[Header]:
        """Of an owner in another group: its group's sums where I am the root, results where it is."""
        if member in self.plan.members:
            return super()._wants_of(member)
        if self.decision is None or member in self.faults.owners:
            return []
        lacking = [
            chunk
            for chunk in self.roles.summed_by(member)
            if self.roles.group_of(member, chunk) in self.groups.missing(chunk, self.decision)
        ]
        sums = [self._header(Kind.WANT_SUM, chunk) for chunk in lacking if chunk not in self.pieces.results]
        rooted = [chunk for chunk in self.roles.rooted_at(member) if chunk not in self.pieces.results]
        return sums + [self._header(Kind.WANT_RESULT, chunk) for chunk in rooted]

    def _on_given(self, chunk: int) -> list[DataEffect]:
        """What comes to an owner is for its group."""
        mine = self.plan.owner_of(chunk) == self.me
        passed_on = self._spread(chunk, self.pieces.results[chunk]) if mine else []
        return [*passed_on, *super()._on_given(chunk)]

    def _made(self, kind: FrameKind, chunk: int) -> ChunkPiece | None:
        return self._own_sum(chunk) if kind == Kind.SUM else super()._made(kind, chunk)

    def _is_summed(self, chunk: int) -> bool:
        return self._own_sum(chunk) is not None

    # ---- reports -----------------------------------------------------------------------------------

    @property
    def sums(self) -> Mapping[int, ChunkPiece]:
        return self.groups.of_group(self.roles.group, self.pieces.owned)

    def _is_compared(self) -> bool:
        return super()._is_compared() and self.groups.are_complete(self.roles, self.pieces.owned)

    def progress(self) -> Progress:
        flat, sums = super().progress(), self.sums
        added = self.groups.hashes_in(flat.merged, self.decision)
        return replace(
            flat,
            inputs=inputs_of(added) if added else flat.inputs,
            sums={chunk: piece.hash for chunk, piece in sums.items()},
            sum_inputs=self._inputs(sums),
            sum_dots=self.groups.dots(self.roles.rooted),
            sum_tags=b"".join(each[:SUM_TAG_BYTES] for each in added),
        )
