"""What a peer can prove of one fragment's state: that it holds it, and how it came to it.  Pure.

Part of a replica.  A peer that rolled on from a version that the run confirmed, with committed results, knows what it
holds, whatever anybody else says: it keeps what each chunk was before (the shell keeps the bytes), so that it can show
that it calculated rightly, and can go back by this one version where the run has to.  What was fetched from others
proves nothing.  Must not know who disagrees, nor what the coordinator makes of a proof.
"""

from __future__ import annotations

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.peer.machine.effects import Effect, KeepBefore, ProveHolding
from farflung.protocol.messages import TAG_BYTES
from farflung.protocol.model_schema import Fragment

NONCES_KEPT = 8


class StateProof:
    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._base = NO_VERSION  # the confirmed version that all since was calculated from
        # Version and digest of what the shell keeps, as long as nothing but results came on top of it.
        self.before: tuple[int, bytes] | None = None
        self._nonces: dict[int, bytes] = {}  # by version
        self._asked: tuple[int, bytes] = NO_VERSION, b""  # (version, nonce) that the shell is at, or was
        self._value = b""  # what came of that

    @property
    def calculated(self) -> bool:
        """What is held was calculated from a confirmed version, and that can be shown."""
        return self._base != NO_VERSION

    # ---- how it came to it -----------------------------------------------------------------------------------

    def rolls_on(self, version: int, digest: bytes, confirmed: bool) -> list[Effect]:
        """The first chunk is about to leave this version, which all of them share."""
        if not confirmed:
            return []  # what is kept of an older confirmed version still leads here
        self._base, self.before = version, (version, digest)
        return [KeepBefore(self._fragment.number, version)]

    def lose(self) -> None:
        """What is held is confirmed now, or came from others, or is held no more: there is nothing to show."""
        self._base = NO_VERSION

    def forget(self) -> None:
        """The state is another one, which was not calculated here: what was shown is void, and nothing leads back."""
        self.lose()
        self.before = None
        self._asked, self._value = (NO_VERSION, b""), b""

    # ---- that it holds it --------------------------------------------------------------------------------------

    def on_nonce(self, version: int, nonce: bytes) -> None:
        if nonce and version >= 0:
            self._nonces[version] = nonce
            for old in sorted(self._nonces)[:-NONCES_KEPT]:
                del self._nonces[old]

    def prove(self, version: int) -> list[Effect]:
        """The state is whole at this version, or will be when what was asked for before is done."""
        nonce = self._nonces.get(version, b"")
        if not nonce or self._asked == (version, nonce):
            return []
        self._asked, self._value = (version, nonce), b""
        return [ProveHolding(self._fragment.number, version, nonce)]

    def on_proven(self, version: int, nonce: bytes, value: bytes) -> None:
        if self._asked == (version, nonce):
            self._value = value

    def is_proving(self, version: int) -> bool:
        return self._asked[0] == version and not self._value

    def shown(self, version: int) -> bytes:
        """For a beat: which nonce, and what follows from it and the bytes."""
        asked_for, nonce = self._asked
        return nonce[:TAG_BYTES] + self._value if asked_for == version and self._value else b""
