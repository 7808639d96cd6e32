"""Proof that a peer cheated, for somebody who was not there and trusts nobody: what it signed, and what shows it wrong.

Made by the run machine's judges, kept in files by coordinator/evidence_folder.py, read by the audit
(console/history/audit_evidence.py).  A proof needs no signature of the coordinator: whoever made it can have invented
nothing, since each part is signed by the one that it speaks against, or by the authors of what that one signed to have
used.  How a sum is done is handed in.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.coordinator.ledger.evidence import Said, Signature, is_signed
from farflung.protocol.digests import HASH_BYTES, bits, hash_bytes, mask_from_bytes, split_hashes
from farflung.protocol.errors import FrameError
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT, MEMBERS_PER_ROUND
from farflung.protocol.messages import Session
from farflung.protocol.round_words import Count, Hash
from farflung.protocol.signed_words import Results, inputs_of, results_part
from farflung.protocol.signing import peer_id_of, verify

SUFFIX = ".proof"
FORMAT = 1
HEAD_BYTES = 16  # of a payload; the number of its values stands in bytes 8 to 12

# (codec of the sum, values in a chunk, payloads, weights) -> the sum's payload; FrameError where there is none.
Merge = Callable[[str, int, Sequence[bytes], Sequence[float]], bytes]


class WrongSum(Struct, frozen=True, forbid_unknown_fields=True, tag="wrong_sum"):
    """An owner signed a result of one chunk that is not the sum of what it signed to have merged."""

    run_id: Session
    fragment: Count
    version: Count  # that the round made
    chunk: Annotated[int, Meta(ge=0, lt=CHUNKS_PER_FRAGMENT)]  # of the fragment
    maker: Hash  # its identity
    results: Results
    signature: Signature  # of the maker
    said: Annotated[
        tuple[Said, ...], Meta(max_length=MEMBERS_PER_ROUND)
    ]  # of each that counts, in the sum's order
    contributions: Annotated[tuple[bytes, ...], Meta(max_length=MEMBERS_PER_ROUND)]  # of the same

    @property
    def guilty(self) -> str:
        return peer_id_of(self.maker)

    @property
    def name(self) -> str:
        return f"{self.results.round_no:010d}-{self.fragment:02d}-{self.chunk:04d}-{self.guilty}{SUFFIX}"

    @property
    def told(self) -> str:
        what = f"chunk {self.chunk} of version {self.version}, fragment {self.fragment}"
        return f"{self.guilty} signed a wrong sum of {len(self.said)} contributions: {what}"

    def problem(self, merge: Merge) -> str:
        """Why this proves nothing, or empty."""
        results = self.results
        if len(results.weights) != len(results.members):
            return "it does not say who counts for how much"
        if not verify(self.maker, results_part(self.run_id, results), self.signature):
            return "the owner's signature does not fit its results"
        return self._problem_of_inputs() or self._problem_of_sum(merge)

    def _problem_of_inputs(self) -> str:
        """Are these the contributions that the owner signed to have used?"""
        results, chunks = self.results, list(bits(mask_from_bytes(self.results.chunks)))
        if self.chunk not in chunks or len(results.hashes) != HASH_BYTES * len(chunks):
            return "the owner has not signed a result of this chunk"
        if tuple(each.peer for each in self.said) != results.included or len(self.contributions) != len(
            self.said
        ):
            return "there is not one hash list and one contribution of each that counts"
        for each in self.said:
            if not is_signed(each.identity, self.run_id, each.sent) or each.sent.round_no != results.round_no:
                return f"{each.peer} has not signed this hash list for this round"
        lists = [split_hashes(each.sent.hashes) for each in self.said]
        if any(len(hashes) <= max(chunks) for hashes in lists):
            return "a hash list is too short"
        if inputs_of(hashes[chunk] for chunk in chunks for hashes in lists) != results.inputs:
            return "the owner merged other contributions than these lists name"
        for each, hashes, payload in zip(self.said, lists, self.contributions, strict=True):
            if hash_bytes(payload) != hashes[self.chunk]:
                return f"these are not the bytes that {each.peer} signed"
        return ""

    def _problem_of_sum(self, merge: Merge) -> str:
        results = self.results
        weights = [weight for weight in results.weights if weight > 0.0]
        place = list(bits(mask_from_bytes(results.chunks))).index(self.chunk)
        elements = int.from_bytes(self.contributions[0][8:12], "little") if self.contributions else 0
        try:
            made = merge(results.codec, elements, self.contributions, weights)
        except FrameError:
            return ""  # an owner that does as it should refuses these bytes, and has no result
        return "the sum is right" if hash_bytes(made) == split_hashes(results.hashes)[place] else ""


# A file has one of these; each kind has a tag of its own.
Proof = WrongSum


class ProofFile(Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    proof: Proof


def proof_to_bytes(proof: Proof) -> bytes:
    return msgspec.msgpack.encode(ProofFile(FORMAT, proof))


def proof_from_bytes(raw: bytes) -> Proof:
    """Raises what `records.UNREADABLE` names."""
    found = msgspec.msgpack.decode(raw, type=ProofFile)
    if found.format != FORMAT:
        raise msgspec.ValidationError(f"its format is {found.format}, this farflung reads {FORMAT}")
    return found.proof
