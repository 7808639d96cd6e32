"""A round in groups of made members: real keys, real contributions, owners and roots that sum rightly or do not.

For tests of the coordinator's audits and of proofs.  What they say goes through a real witness into a real round in
flight; nothing is on any wire.  Member m is in group m % groups, and owns chunk c in its group if it is the c-th there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from farflung.compression.plain_codecs import codec_named
from farflung.coordinator.court.proofs import merged
from farflung.coordinator.mesh.mesh import MeshSums, summed
from farflung.coordinator.rounds.reported import CommittedSums
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_rules import Groups, RoundRules, planned
from farflung.coordinator.run.digest_agreement import SignedResults
from farflung.peer.identity import Identity
from farflung.protocol.digests import combined, hash_bytes, mask_of, mask_to_bytes
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.mode_words import MeshReport
from farflung.protocol.round_words import SUM_CODEC, SUM_TAG_BYTES, Commit, Contact, Decision, GroupSums
from farflung.protocol.signed_words import (
    Results,
    SumsOfGroups,
    inputs_of,
    results_part,
    sent_part,
    sums_of_groups_part,
)
from rig.made_run import MadeRun
from rig.made_sums import ELEMENTS, RUN_ID, process_of

RULES = RoundRules(min_peers=2, scatter_grace_s=10.0, round_timeout_s=60.0, gather_codec="fp32")


@dataclass
class MadeMesh:
    """`wrong`: places (chunk, group) whose owner made something else; (chunk, -1): the root did."""

    groups: int = 2
    of_group: int = 3
    wrong: tuple[tuple[int, int], ...] = ()
    round_no: int = 1
    version: int = 0  # that the round starts from
    keys: list[Identity] = field(default_factory=list)

    def __post_init__(self) -> None:
        many = self.groups * self.of_group
        self.count = self.of_group  # chunks
        made = self.keys or [Identity.generate() for _ in range(many)]
        self.keys = sorted(made, key=lambda key: key.peer_id)
        self.members = tuple(key.peer_id for key in self.keys)
        draw = np.random.default_rng(7)
        encode = codec_named("fp32").encode
        self.payloads = {
            peer: [encode(draw.standard_normal(ELEMENTS).astype(np.float32)) for _ in range(self.count)]
            for peer in self.members
        }
        owners = tuple(
            self.groups * chunk + group for group in range(self.groups) for chunk in range(self.count)
        )
        groups = tuple(at % self.groups for at in range(many))
        numbers = self.round_no, self.version, 0
        self.plan = planned(numbers, self.members, groups, owners, ("fp32",) * many)
        self.in_groups = Groups(self.plan)
        weight = float(np.float32(1 / many))
        weights = dict.fromkeys(self.members, weight)
        mask = summed(self.in_groups, weights)
        self.decision = Decision(self.round_no, 1, tuple(weights.values()), {}, mask)
        self.sums_of = {
            (chunk, group): self._sum(chunk, group)
            for chunk in range(self.count)
            for group in range(self.groups)
        }
        self.results = [self._result(chunk) for chunk in range(self.count)]

    def _sum(self, chunk: int, group: int) -> bytes:
        weights = [self.decision.weights[0]] * self.of_group
        right = merged(SUM_CODEC, ELEMENTS, self.of_chunk(chunk, group), weights)
        return right[:-4] + bytes(4) if (chunk, group) in self.wrong else right

    def _result(self, chunk: int) -> bytes:
        right = merged("fp32", ELEMENTS, self.of_chunk(chunk), [1.0] * self.groups)
        return right[:-4] + bytes(4) if (chunk, -1) in self.wrong else right

    def of_chunk(self, chunk: int, group: int = -1) -> list[bytes]:
        """What goes into it, in the order of the sum."""
        if group < 0:
            return [self.sums_of[chunk, each] for each in range(self.groups)]
        return [self.payloads[peer][chunk] for peer in self.in_groups.members[group]]

    def maker(self, chunk: int, group: int = -1) -> str:
        return self.plan.root_of(chunk) if group < 0 else self.in_groups.owner(group, chunk)

    def key_of(self, peer: str) -> Identity:
        return self.keys[self.members.index(peer)]

    # ---- what they say ---------------------------------------------------------------------------------------------

    def sent(self, peer: str) -> Sent:
        hashes = b"".join(map(hash_bytes, self.payloads[peer]))
        bare = Sent(
            session=bytes(16), seq=1, round_no=self.round_no, hashes=hashes, tokens=8, steps=1, loss=None, used=(),
            seat=0, counted=b"", signature=b"",
        )  # fmt: skip
        return replace(bare, signature=self.key_of(peer).sign(sent_part(RUN_ID, bare)))

    def word(self, peer: str, inputs: bytes = b"") -> GroupSums:
        """What it signs of its group's sums."""
        group, chunks = self.in_groups.of[peer], self._chunks_of(peer)
        hashes = b"".join(hash_bytes(self.sums_of[chunk, group]) for chunk in chunks)
        went_in = inputs_of(hash_bytes(each) for chunk in chunks for each in self.of_chunk(chunk, group))
        bare = GroupSums(mask_to_bytes(mask_of(chunks)), hashes, inputs or went_in, b"")
        members, weights = self.in_groups.members[group], self.decision.weights[: self.of_group]
        signed = results_part(RUN_ID, Results.of_group(self.decision, members, weights, bare))
        return replace(bare, signature=self.key_of(peer).sign(signed))

    def _chunks_of(self, peer: str) -> list[int]:
        return [chunk for chunk in range(self.count) if self.in_groups.shares.get(peer, 0) >> chunk & 1]

    def report(
        self, peer: str, is_root: bool = True, used: dict[tuple[int, int], bytes] | None = None
    ) -> ProgressReport:
        """`used`: what it says that it got, where that is another sum."""
        rooted = [chunk for chunk in self._chunks_of(peer) if self.plan.root_of(chunk) == peer and is_root]
        places = [(chunk, group) for chunk in rooted for group in range(self.groups)]
        named = [hash_bytes((used or {}).get(place, self.sums_of[place])) for place in places]
        bare = ProgressReport(
            session=bytes(16), seq=1, round_no=self.round_no, decision_no=1, held={}, refused={}, cut_off=(),
            merged=mask_to_bytes(mask_of(rooted)), merged_hashes=b"".join(hash_bytes(self.results[c]) for c in rooted),
            got=b"", got_hash=combined(()), dots=None, inputs=inputs_of(named) if named else b"", signature=b"",
            lengths=b"", got_by={},
            sections=(MeshReport(self.word(peer), None, b"".join(each[:SUM_TAG_BYTES] for each in named)),),
        )  # fmt: skip
        return self.signed(peer, bare)

    def signed(self, peer: str, report: ProgressReport) -> ProgressReport:
        added = SumsOfGroups.of(self.decision, "fp32", report)
        return replace(report, signature=self.key_of(peer).sign(sums_of_groups_part(RUN_ID, added)))

    # ---- and what a coordinator has of it --------------------------------------------------------------------------

    @property
    def sums(self) -> CommittedSums:
        stand = MeshStand(self)
        for peer in self.members:
            stand.hears(peer, self.report(peer))
        assert len(stand.flight.gather.merged) == self.count
        return stand.committed

    @property
    def commit(self) -> Commit:
        hashes = b"".join(map(hash_bytes, self.results))
        return Commit(self.version + 1, self.round_no, self.members, self.decision.weights, hashes, "fp32")


class MeshStand:
    """The witness and the round in flight, who have heard what was sent and what was decided."""

    def __init__(self, made: MadeMesh) -> None:
        self.made = made
        run = MadeRun()
        run.core.run_id = RUN_ID
        self.core = run.core
        self.witness = SignedResults(run.core)
        self.flight = Round(made.plan, RULES, 0.0, sums=MeshSums())
        self.members = {}
        for key in made.keys:
            peer, process = key.peer_id, process_of(key.peer_id)
            contact = Contact(peer, peer, bytes(32), f"{peer}:1")
            self.members[peer] = member = run.core.members.admit(contact, process, process, 0.0)
            member.identity = key.public
            sent = made.sent(peer)
            assert not self.witness.problem(member, sent)
            self.flight.on_sent(peer, sent)
        self.flight.decision = made.decision

    def hears(self, peer: str, report: ProgressReport) -> None:
        self.flight.on_progress(peer, self.witness.proven(self.members[peer], self.flight, report))

    @property
    def committed(self) -> CommittedSums:
        processes = {peer: process_of(peer) for peer in self.made.members}
        return self.witness.on_commit(self.made.commit, self.flight, processes)
