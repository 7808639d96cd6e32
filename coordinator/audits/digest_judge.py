"""Judges the digests that members contradict each other about: calculated and proven, never voted.  Pure.

Part of the mode.  One chunk of the version in question is calculated here (dispute.py), from what members show; whoever
named a digest that is proven wrong is out, be it nine of ten, and what proves it is kept for whoever was not there.
Without the mode what was settled stands, else what most hold (coordinator/run/digest_agreement.py).
"""

from __future__ import annotations

from collections.abc import Collection

from farflung.coordinator.audits.dispute import Dispute, DisputedVersion
from farflung.coordinator.court.plain_steps import ChunkRules
from farflung.coordinator.court.proofs import FalseClaim, step_factors, step_rules
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import KeepProof
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import drawn_chunk, hash_bytes
from farflung.protocol.model_schema import Fragment
from farflung.protocol.signed_words import claim_part
from farflung.protocol.signing import verify

CHUNKS_DRAWN = 8  # that a state is looked at in which nobody defends the settled one
RESULT_SLACK_BYTES = 4096  # a payload's head, over the largest codec


class DigestJudge(Dispute):
    """Of the newest version of one fragment."""

    def __init__(self, core: Core, fragment: int, undefended: bool) -> None:
        """`undefended`: nobody is left who names the settled digest, and those who are here name another one."""
        model, book = core.ledger.model, core.ledger.books[fragment]
        if model is None:
            raise RuntimeError("a version of a model that nobody has named")
        self._core, self._number = core, fragment
        of = model.fragments(core.ledger.fragments)[fragment]
        self._rules = rules = ChunkRules.of(core.terms.first, model, core.terms)
        case = DisputedVersion(
            of,
            book.version,
            rules.form.size_bytes,
            rules.form.part_bytes + RESULT_SLACK_BYTES,
            {version: digest for version, digest in book.digests.items() if version < book.version},
            book.commits,
            rules.after,
            lambda peer, digest, signature: self._is_signed(
                core.members.members.get(peer), digest, signature
            ),
            _drawn(core.ledger.nonce_of(fragment, book.version), of) if undefended else (),
        )
        super().__init__(case, core.questions)

    def _is_signed(self, member: Member | None, digest: bytes, signature: bytes) -> bool:
        core, version = self._core, self.case.version
        claim = claim_part(core.run_id, core.ledger.era, self._number, version, digest)
        return member is not None and verify(member.identity, claim, signature)

    def keep(self, digest: bytes, peers: Collection[str]) -> None:
        """For whoever was not there: what was claimed, and what it should have been."""
        proof, core, rules = self.refuted[digest], self._core, self._rules
        maker, version = core.members.members.get(proof.claim.by), self.case.version
        if maker is None or maker.peer not in peers:
            return  # it has gone, and its key with it; or it was told what it signed
        of_base = rules.outer_of(proof.chunk, proof.base + 1)
        if any(rules.outer_of(proof.chunk, v) != of_base for v in range(proof.base + 2, version + 1)):
            return  # such a file holds one step for all its versions, and the host changed it in between
        claim = FalseClaim(
            run_id=core.run_id,
            era=core.ledger.era,
            fragment=self._number,
            version=version,
            chunk=self.case.fragment.index(proof.chunk),
            maker=maker.identity,
            claimed=b"".join(proof.claim.hashes),
            claim=proof.claim.signature,
            base=proof.base,
            base_hashes=b"".join(proof.base_hashes),
            before=proof.before,
            results=proof.results,
            rules=step_rules(rules, proof.chunk, version),
            factors=step_factors(rules, proof.chunk, proof.factors),
        )
        core.do(KeepProof(claim, tuple(peers)))


def _drawn(nonce: bytes, fragment: Fragment) -> tuple[int, ...]:
    found = {drawn_chunk(hash_bytes(nonce, bytes([at])), fragment.count) for at in range(CHUNKS_DRAWN)}
    return tuple(fragment.first + index for index in sorted(found))
