"""A committed round of made members: real keys, real contributions in fp32, and owners that sum rightly or do not.

For tests of the coordinator's audits and of proofs.  Chunk c is owned by member c; nothing is on any wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from farflung.compression.plain_codecs import codec_named
from farflung.coordinator.court.proofs import WrongSum, merged
from farflung.coordinator.rounds.reported import CommittedSums, MadeResult
from farflung.peer.identity import Identity
from farflung.protocol.digests import hash_bytes, mask_to_bytes
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.round_words import Commit, Decision, Plan
from farflung.protocol.signed_words import Results, SignedList, inputs_of, results_part, sent_part

RUN_ID = bytes(range(16))
ELEMENTS = 4


def process_of(peer: str) -> bytes:
    return hash_bytes(peer.encode())[:16]


@dataclass
class MadeSums:
    """`wrong`: chunks whose owners made something else of the contributions."""

    count: int = 3
    wrong: tuple[int, ...] = ()
    round_no: int = 1
    version: int = 0  # that the round starts from
    keys: list[Identity] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = sorted(
            self.keys or [Identity.generate() for _ in range(self.count)], key=lambda key: key.peer_id
        )
        self.members = tuple(key.peer_id for key in self.keys)
        draw = np.random.default_rng(7)
        self.payloads = {
            key.peer_id: [
                codec_named("fp32").encode(draw.standard_normal(ELEMENTS).astype(np.float32))
                for _ in range(self.count)
            ]
            for key in self.keys
        }
        self.weights = tuple(float(np.float32(1 / self.count)) for _ in self.members)
        owners = tuple(range(self.count))
        self.plan = Plan(self.round_no, 1, self.version, self.members, owners, ("fp32",) * self.count)
        self.decision = Decision(self.round_no, 1, self.weights, {})
        self.results = [self._result(chunk) for chunk in range(self.count)]

    def _result(self, chunk: int) -> bytes:
        right = merged("fp32", ELEMENTS, self.of_chunk(chunk), self.weights)
        return right[:-4] + bytes(4) if chunk in self.wrong else right

    def of_chunk(self, chunk: int) -> list[bytes]:
        """The contributions to it, in the order of the sum."""
        return [self.payloads[peer][chunk] for peer in self.members]

    def said(self, key: Identity) -> SignedList:
        hashes = b"".join(hash_bytes(payload) for payload in self.payloads[key.peer_id])
        bare = Sent(
            seat=0, counted=b"",
            session=bytes(16), seq=1, round_no=self.round_no, hashes=hashes, tokens=8, steps=1, loss=None, used=(),
            signature=b"",
        )  # fmt: skip
        return SignedList(key.public, replace(bare, signature=key.sign(sent_part(RUN_ID, bare))))

    def report(self, chunk: int) -> ProgressReport:
        """The owner's signed word of its one chunk."""
        inputs = inputs_of(hash_bytes(payload) for payload in self.of_chunk(chunk))
        bare = ProgressReport(
lengths=b"", got_by={},
            session=bytes(16), seq=1, round_no=self.round_no, decision_no=1, held={}, refused={}, cut_off=(),
            merged=mask_to_bytes(1 << chunk), merged_hashes=hash_bytes(self.results[chunk]), got=b"",
            got_hash=bytes(32), dots=None, inputs=inputs, signature=b"",
        )  # fmt: skip
        statement = results_part(RUN_ID, Results.of(self.plan, self.decision, "fp32", bare))
        return replace(bare, signature=self.keys[chunk].sign(statement))

    @property
    def commit(self) -> Commit:
        hashes = b"".join(map(hash_bytes, self.results))
        return Commit(self.version + 1, self.round_no, self.members, self.weights, hashes, "fp32")

    @property
    def sums(self) -> CommittedSums:
        return CommittedSums(
            self.plan,
            self.decision,
            self.commit,
            {key.peer_id: self.said(key) for key in self.keys},
            {chunk: MadeResult(self.members[chunk], self.report(chunk)) for chunk in range(self.count)},
            {key.peer_id: key.public for key in self.keys},
            {peer: process_of(peer) for peer in self.members},
        )

    def proof(self, chunk: int) -> WrongSum:
        report, sums = self.report(chunk), self.sums
        return WrongSum(
            RUN_ID,
            0,
            self.version + 1,
            chunk,
            self.keys[chunk].public,
            Results.of(self.plan, self.decision, "fp32", report),
            report.signature,
            tuple(sums.said[peer] for peer in self.members),
            tuple(self.of_chunk(chunk)),
        )
