"""Whether a member holds the state that it says it holds, where nobody's word settles that.  Pure.

Holders of a version show a keyed hash of the chunk that its nonce names: whoever does not have the bytes can't name it.
What the right one is follows from the members that made the version.  Where those are gone, or somebody shows another
one, the member shows the list of hashes (its root is the settled digest) and that one chunk, and the hash is calculated
here.  Used by the settling of the run machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.coordinator.court.questions import MemberAnswer, Questions, WantedProof
from farflung.protocol.digests import (
    HASH_BYTES,
    drawn_chunk,
    hash_bytes,
    keyed_hash,
    root_of,
    split_hashes,
)
from farflung.protocol.messages import TAG_BYTES, What
from farflung.protocol.model_schema import Fragment


def shown_value(said: bytes, nonce: bytes) -> bytes:
    """What a beat shows under this nonce; empty if it shows nothing, or something under another one."""
    fits = len(said) == TAG_BYTES + HASH_BYTES and said[:TAG_BYTES] == nonce[:TAG_BYTES]
    return said[TAG_BYTES:] if fits else b""


@dataclass(frozen=True)
class HoldingClaim:
    """What a member says that it holds."""

    peer: str
    fragment: Fragment
    version: int
    digest: bytes  # settled
    nonce: bytes
    state_bytes: int  # of a chunk


class HoldingProof:
    def __init__(self, held: HoldingClaim, questions: Questions, now: float) -> None:
        self.held = held
        self.value = b""  # what its holders show, once it is known
        self.unproven = ""  # why it did not prove that it holds it
        self._questions = questions
        self._hashes: list[bytes] = []
        fragment, most = held.fragment, HASH_BYTES * held.fragment.count
        wanted = WantedProof(What.HASHES, fragment.number, held.version, fragment.first, most)
        self._number = questions.ask(held.peer, wanted, now)

    @property
    def over(self) -> bool:
        return bool(self.value or self.unproven)

    def close(self) -> None:
        self._questions.drop(self._number)

    def on_answer(self, answer: MemberAnswer, now: float) -> bool:
        """True if it was an answer to a question of this check."""
        if answer.number != self._number or answer.of != self.held.peer:
            return False
        if answer.raw is None:
            self.unproven = f"it did not show that it holds version {self.held.version}: {answer.why_none}"
        elif answer.wanted.what is What.HASHES:
            self._on_hashes(answer.raw, now)
        else:
            self._on_state(answer.raw)
        return True

    def _on_hashes(self, raw: bytes, now: float) -> None:
        held = self.held
        hashes = split_hashes(raw)
        if len(hashes) != held.fragment.count or root_of(hashes) != held.digest:
            self.unproven = f"the hashes that it shows of version {held.version} are not the run's"
            return
        self._hashes = hashes
        chunk = held.fragment.first + drawn_chunk(held.nonce, held.fragment.count)
        wanted = WantedProof(What.STATE, held.fragment.number, held.version, chunk, held.state_bytes)
        self._number = self._questions.ask(held.peer, wanted, now)

    def _on_state(self, raw: bytes) -> None:
        held = self.held
        if hash_bytes(raw) != self._hashes[drawn_chunk(held.nonce, held.fragment.count)]:
            self.unproven = f"the chunk that it shows of version {held.version} is not the run's"
        else:
            self.value = keyed_hash(held.nonce, raw)
