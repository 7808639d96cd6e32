"""What exactly a signature of a member covers: a hello, a hash list, merged chunks, a digest that it claims.  Pure.

Called by whoever signs (the peer) and whoever checks (the front door, the witness, the audit).
Must not hold a private key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from farflung.protocol.digests import bits, hash_bytes, mask_from_bytes
from farflung.protocol.messages import Hello, ProgressReport, Sent
from farflung.protocol.mode_words import KeptReceipts
from farflung.protocol.round_words import SUM_CODEC, Decision, GroupSums, Hash, Plan
from farflung.protocol.signing import peer_id_of, verify

Signature = Annotated[bytes, Meta(max_length=64)]


def hello_part(hello: Hello, nonce: bytes) -> bytes:
    """The bytes that a hello's signature covers: everything in it, and the challenge."""
    return b"farflung/hello/1\0" + nonce + bare_hash(hello)


def sent_part(run_id: bytes, sent: Sent) -> bytes:
    """The bytes that the signature of a hash list covers: all of it, and the run."""
    return b"farflung/sent/1\0" + run_id + bare_hash(sent)


def kept_part(kept: KeptReceipts, nonce: bytes) -> bytes:
    """The bytes that a peer signs when it shows what it keeps: so nobody answers for another one."""
    return b"farflung/shows-kept/1\0" + nonce + bare_hash(kept)


class SignedList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one member signed: a hash list that convinces somebody who was not there."""

    identity: Hash
    sent: Sent

    @property
    def peer(self) -> str:
        return peer_id_of(self.identity)


def is_signed(identity: bytes, run_id: bytes, sent: Sent) -> bool:
    return verify(identity, sent_part(run_id, sent), sent.signature)


def claim_part(run_id: bytes, era: int, fragment: int, version: int, digest: bytes) -> bytes:
    """The bytes that a member signs when it shows the hashes behind a digest: I calculated this state."""
    numbers = b"".join(number.to_bytes(8, "big") for number in (era, fragment, version))
    return b"farflung/claim/1\0" + run_id + numbers + digest


class Results(msgspec.Struct, frozen=True):
    """What an owner says of the chunks that it merged: out of these contributions, so weighed, came these bytes.

    All that determines the sum is in it.  So whoever has the contributions can show that it is wrong, and nobody can
    show that of a sum that is right: not with other weights, nor with contributions that the owner did not have.
    """

    round_no: int
    decision_no: int
    members: tuple[str, ...]
    weights: tuple[float, ...]  # as decided; 0.0: it is out
    codec: str  # of the results
    chunks: bytes  # mask
    hashes: bytes  # of the results
    inputs: bytes  # see `inputs_of`

    @classmethod
    def of(cls, plan: Plan, decision: Decision, codec: str, report: ProgressReport) -> Results:
        return cls(
            decision.round_no,
            decision.decision_no,
            plan.members,
            decision.weights,
            codec,
            report.merged,
            report.merged_hashes,
            report.inputs,
        )

    @classmethod
    def of_group(
        cls, decision: Decision, group: tuple[str, ...], weights: tuple[float, ...], sums: GroupSums
    ) -> Results:
        """What it adds up of its group, as if that were all, in the codec in which sums travel."""
        made = sums.chunks, sums.hashes, sums.inputs
        return cls(decision.round_no, decision.decision_no, group, weights, SUM_CODEC, *made)

    @property
    def included(self) -> tuple[str, ...]:
        return tuple(m for m, weight in zip(self.members, self.weights, strict=True) if weight > 0.0)


class SumsOfGroups(msgspec.Struct, frozen=True):
    """What the root of a mesh says of chunks: out of these groups' sums, added up in their order, came these bytes.

    Which sums these were stands in it by their hashes, so nobody else's signature is needed to show that it is wrong.
    """

    round_no: int
    decision_no: int
    groups: tuple[int, ...]  # that count
    codec: str  # of the results
    chunks: bytes  # mask
    hashes: bytes  # of the results
    inputs: bytes  # see `inputs_of`: chunk by chunk, of each group that counts

    @classmethod
    def of(cls, decision: Decision, codec: str, report: ProgressReport) -> SumsOfGroups:
        made = report.merged, report.merged_hashes, report.inputs
        groups = tuple(bits(mask_from_bytes(decision.summed or b"")))
        return cls(decision.round_no, decision.decision_no, groups, codec, *made)


def sums_of_groups_part(run_id: bytes, results: SumsOfGroups) -> bytes:
    """The bytes that a root's signature of its results covers."""
    return b"farflung/sums-of-groups/1\0" + run_id + hash_bytes(msgspec.msgpack.encode(results))


def results_part(run_id: bytes, results: Results) -> bytes:
    """The bytes that an owner's signature of its results covers."""
    return b"farflung/results/1\0" + run_id + hash_bytes(msgspec.msgpack.encode(results))


def inputs_of(hashes: Iterable[bytes]) -> bytes:
    """One name for the contributions to some chunks: their hashes chunk by chunk, each in the order of the sum."""
    return hash_bytes(b"".join(hashes))


def bare_hash(signed: msgspec.Struct) -> bytes:
    """Of a message without its own signature."""
    return hash_bytes(msgspec.msgpack.encode(msgspec.structs.replace(signed, signature=b"")))
