"""Evidence: which peer said that it sent which bytes, in a form that convinces somebody who was not there.

Each hash list (`Sent`) is signed by its author's identity key, with the run, the session and the round in it.  A
driver's `Witness` checks that when it comes, and hands the lists over with the commit that they led to; the
coordinator signs both together and keeps them (coordinator/run_files.py).  The audit reads them
(console/history/audit_evidence.py). What a hash list means, and who is right, is not judged here.  Pure.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from farflung.protocol.digests import split_hashes
from farflung.protocol.limits import MEMBERS_PER_MESH
from farflung.protocol.round_words import Commit, Hash, Session
from farflung.protocol.signed_words import Signature, SignedList, bare_hash, is_signed
from farflung.protocol.signing import verify

SUFFIX = ".evidence"
FORMAT = 1


class Evidence(Struct, frozen=True, forbid_unknown_fields=True):
    """Of one commit."""

    format: int
    run_id: Session
    commit: Commit
    said: Annotated[tuple[SignedList, ...], Meta(max_length=MEMBERS_PER_MESH)]
    key: Hash  # the coordinator's, ed25519
    signature: Signature = b""

    @property
    def name(self) -> str:
        commit = self.commit
        return f"{commit.round_no:010d}-{commit.fragment:02d}-{commit.version:010d}{SUFFIX}"

    def problem(self) -> str:
        """Why this proves nothing, or empty."""
        if self.format != FORMAT:
            return f"its format is {self.format}, this farflung reads {FORMAT}"
        if not verify(self.key, self.signed_part(), self.signature):
            return "the coordinator's signature does not fit the content"
        for said in self.said:
            if not is_signed(said.identity, self.run_id, said.sent):
                return f"the signature of {said.peer} does not fit its hash list"
            if said.sent.round_no != self.commit.round_no:
                return f"the hash list of {said.peer} is of another round"
        missing = set(self.commit.included) - {said.peer for said in self.said}
        return f"there is no hash list of {', '.join(sorted(missing))}" if missing else ""

    def signed_part(self) -> bytes:
        return b"farflung/evidence/1\0" + bare_hash(self)

    def who_sent(self, digest: bytes) -> list[tuple[str, int]]:
        """(peer, chunk of the fragment) of everybody who said that it sent bytes of this hash."""
        return [
            (said.peer, chunk)
            for said in self.said
            for chunk, told in enumerate(split_hashes(said.sent.hashes))
            if told == digest
        ]
