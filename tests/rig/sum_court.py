"""Where sums are judged: a run whose members made one commit, flat or in groups, and whoever is asked to audit it.

For tests of the coordinator's audits.  The parts are the real ones; members say and show what a test lets them.
"""

from __future__ import annotations

from collections.abc import Sequence

from farflung.coordinator.audits.audits import AuditDesk
from farflung.coordinator.ledger.records import CommittedRound, Record
from farflung.coordinator.modes.registry import CoordinatorMode
from farflung.coordinator.run.effects import KeepProof, Tell, Write
from farflung.coordinator.run.membership import Member
from farflung.protocol.errors import Verdict
from farflung.protocol.limits import PART_BYTES
from farflung.protocol.manifest import Manifest, MergeSection
from farflung.protocol.messages import Show, Shown
from farflung.protocol.mode_words import AuditChunks, Audited, ChunkVerdict
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import THE_RESULT, Contact
from farflung.protocol.states import PeerEvent
from rig.made_mesh import MadeMesh
from rig.made_run import MadeRun
from rig.made_sums import ELEMENTS, MadeSums, process_of


class Bailiff(CoordinatorMode):
    """Sends away whoever is convicted, for good."""

    def __init__(self, court: SumCourt) -> None:
        self._court = court

    def after(self, struck: Sequence[str], convicted: Sequence[tuple[str, str]]) -> None:
        members = self._court.core.members
        for peer, _ in convicted:
            self._court.out.append(peer)
            if peer in members.alive:
                members.lose(members.alive[peer], PeerEvent.SHUT_OUT)

    def keeps_out(self, peer: str) -> bool:
        return peer in self._court.out


class SumCourt:
    """A run whose members made one commit; each chunk is drawn, unless a test says otherwise."""

    def __init__(self, made: MadeSums | MadeMesh, audit: float = 1.0, seed: int = 0) -> None:
        self.made = made
        self.run = MadeRun(Manifest(merge=MergeSection(audit=audit)))
        self.core = self.run.core
        self.core.ledger.model = ModelSchema(
            (TensorSpec("w", (made.count, ELEMENTS), "float32", "param"),),
            ELEMENTS,
            made.count,
            made.count,
            bytes(32),
        )
        self._drawn = seed
        self.out: list[str] = []  # who was convicted
        self.core.modes = (Bailiff(self),)
        self.auditing = AuditDesk(self.core, self._random)
        self.members = {peer: self._enters(peer) for peer in made.members}
        self.run.effects()
        self.told: list[Tell] = []
        self.records: list[Record] = []
        self.proofs: list[KeepProof] = []

    def _random(self, count: int) -> bytes:
        self._drawn += 1
        return int.to_bytes(self._drawn * 0x9E3779B97F4A7C15 % (1 << 64), 8, "little")[:count]

    def _enters(self, peer: str) -> Member:
        contact = Contact(peer, peer, bytes(32), f"{peer}:1")
        process = process_of(peer)
        member = self.core.members.admit(contact, process, process, self.core.now)
        self.core.members.on_dialled(peer, process, True)
        member.standings[0].verified = member.standings[0].vouched = True
        return member

    def commits(self) -> None:
        commit = self.made.commit
        used = {peer: () for peer in self.made.members}
        self.core.write(
            CommittedRound(
                commit=commit, used=used, excluded={}, tokens=1, steps=1, loss=None, seconds=1.0, tx_bytes=0
            )
        )
        self.auditing.on_commit(self.made.sums)
        self.sees()

    def sees(self) -> None:
        """What follows at once: answers are judged, questions go out."""
        for answer in self.core.questions.take_answers():
            self.auditing.cases.on_answer(answer)
        self.core.follow_up()
        for peer, fields in self.core.questions.due(set(self.core.members.alive), self.core.now):
            self.core.tell(self.core.members.alive[peer], Show, **fields)
        for effect in self.run.effects():
            if isinstance(effect, Tell):
                self.told.append(effect)
            elif isinstance(effect, Write):
                self.records.append(effect.record)
            elif isinstance(effect, KeepProof):
                self.proofs.append(effect)

    def audits(self) -> dict[int, str]:
        """Chunk -> who is to merge it again, by what was told last."""
        found = {}
        for tell in self.told:
            if isinstance(tell.message, AuditChunks):
                found |= {drawn.chunk: tell.peer for drawn in tell.message.chunks}
        return found

    def places(self) -> dict[tuple[int, int], str]:
        """The same in a mesh: by (chunk, group)."""
        told = (each for each in self.told if isinstance(each.message, AuditChunks))
        return {(drawn.chunk, t.message.group): t.peer for t in told for drawn in t.message.chunks}  # type: ignore[union-attr]

    def says(self, peer: str, *verdicts: ChunkVerdict, round_no: int = 1, group: int = THE_RESULT) -> Verdict:
        said = Audited(session=bytes(16), seq=1, round_no=round_no, chunks=verdicts, group=group)
        verdict = self.auditing.on_audited(self.members[peer], said)
        self.sees()
        return verdict

    def asked(self, peer: str) -> list[Show]:
        return [t.message for t in self.told if t.peer == peer and isinstance(t.message, Show)]

    def shows(self, peer: str, bytes_of: dict[str, bytes | None]) -> None:
        """It answers every question, by whose contribution it is."""
        for show in self.asked(peer):
            raw = bytes_of.get(show.peer) or b""
            part = Shown(
                session=bytes(16), seq=1, question=show.question, start=0, total=len(raw), part=raw[:PART_BYTES],
                signature=b"",
            )  # fmt: skip
            self.core.questions.on_shown(peer, part, self.core.now)
        self.sees()

    def begins(self, peer: str, total: int) -> None:
        """It shows the first part of so many bytes, and no more."""
        [show] = self.asked(peer)
        part = Shown(
            session=bytes(16), seq=1, question=show.question, start=0, total=total, part=bytes(PART_BYTES),
            signature=b"",
        )  # fmt: skip
        self.core.questions.on_shown(peer, part, self.core.now)

    def passes(self, seconds: float) -> None:
        self.core.now += seconds
        self.auditing.on_timer()
        self.sees()

    def of(self, kind: type[Record]) -> list[str]:
        return [record.peer for record in self.records if isinstance(record, kind)]
