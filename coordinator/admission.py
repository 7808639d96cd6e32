"""The door: who may become a member, and the words of a refusal.  Pure.

Called by the run machine for every knock and hello.  Challenges are remembered per caller and used once; no
wall clock takes part in any check.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec

from farflung.collectives.digests import hash_bytes
from farflung.collectives.errors import UserError
from farflung.collectives.fragments import fragments_of
from farflung.collectives.limits import PROTOCOL_VERSION
from farflung.coordinator.core import Core
from farflung.coordinator.messages import Challenge, Hello, Knock, Refuse
from farflung.coordinator.schema import first_difference
from farflung.coordinator.signing import peer_id_of, verify

_ADDRESS = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
UNPROVEN = frozenset({"challenge", "key", "signature"})  # refusals of callers that did not show who they are
CHALLENGES_PER_CALLER = 4  # a peer that knocked while nobody was there hears several, and answers the first
CHALLENGES_KEPT = 1024  # a flood of knocks pushes out old challenges, not memory


def signed_part(hello: Hello, nonce: bytes) -> bytes:
    """The bytes that a hello's signature covers: everything in it, and the challenge."""
    bare = msgspec.structs.replace(hello, signature=b"")
    return b"farflung/hello/1\0" + nonce + hash_bytes(msgspec.msgpack.encode(bare))


class Door:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._manifest = core.manifest.canonical()
        self._manifest_digest = core.manifest.digest
        self._challenges: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def knock(self, caller: bytes, knock: Knock, nonce: bytes) -> Challenge | Refuse:
        if knock.protocol != PROTOCOL_VERSION:
            return _refuse(
                "protocol",
                f"protocol version is {knock.protocol} here, {PROTOCOL_VERSION} in the run; "
                "install the same farflung version as the coordinator",
            )
        if knock.run != self._core.manifest.run.name:
            return _refuse(
                "run", f"this coordinator runs '{self._core.manifest.run.name}', not '{knock.run}'"
            )
        self._challenges[caller] = [*self._challenges.get(caller, []), nonce][-CHALLENGES_PER_CALLER:]
        self._challenges.move_to_end(caller)
        while len(self._challenges) > CHALLENGES_KEPT:
            self._challenges.popitem(last=False)
        return Challenge(nonce=nonce, run_id=self._core.run_id, manifest=self._manifest)

    def wrong_run(self, name: str) -> Refuse | None:
        here = self._core.manifest.run.name
        return None if name == here else _refuse("run", f"this coordinator runs '{here}', not '{name}'")

    def examine(self, caller: bytes, key: bytes, hello: Hello) -> Refuse | None:
        """Why this hello is refused, or None.  Uses up the caller's challenges."""
        nonces = self._challenges.pop(caller, [])
        if not nonces:
            return _refuse("challenge", "hello without a fresh challenge; knock first", retry_after_s=0.5)
        if hello.key != key:
            return _refuse("key", "the key in the hello is not the key of this connection")
        if not any(verify(hello.identity, signed_part(hello, nonce), hello.signature) for nonce in nonces):
            return _refuse("signature", "the hello is not signed by the identity it names")
        return self._unfit(hello) or self._crowded(hello)

    def _unfit(self, hello: Hello) -> Refuse | None:
        core = self._core
        if hello.protocol != PROTOCOL_VERSION:
            return _refuse(
                "protocol", f"protocol version is {hello.protocol} here, {PROTOCOL_VERSION} in the run"
            )
        if hello.run_id != core.run_id:
            return _refuse(
                "run", "this is another run under the same name: its run id differs; use its new join URL"
            )
        if hello.manifest != self._manifest_digest:
            return _refuse("manifest", "the manifest differs from the run's; read it again with a fresh join")
        if hello.address and not is_address(hello.address):
            return _refuse(
                "address", f"the address for other peers, {hello.address[:60]!r}, is not HOST:PORT"
            )
        if core.ledger.model is not None and not self._may_still_change():
            difference = first_difference(hello.model, core.ledger.model)
            if difference:
                return _refuse("model", f"the model differs from the run's: {difference}")
        try:
            fragments_of(hello.model.chunk_count, core.ledger.fragments)
        except UserError as error:
            return _refuse("model", str(error))
        return None

    def _may_still_change(self) -> bool:
        """Nothing was learned and nobody is here: a first peer that came with another model binds nobody."""
        return not self._core.ledger.learned and not self._core.members.alive

    def _crowded(self, hello: Hello) -> Refuse | None:
        core = self._core
        old = core.members.members.get(peer_id_of(hello.identity))
        if old is not None and old.alive and old.process != hello.process and old.closed_at is None:
            return _refuse(
                "already-here",
                "this identity is already in the run as another process; stop that one, or use another identity file",
                retry_after_s=core.manifest.net.dead_after_s / 2,
            )
        if old is None and len(core.members.alive) >= core.manifest.run.max_peers:
            return _refuse(
                "full", f"the run is full: {core.manifest.run.max_peers} peers", retry_after_s=30.0
            )
        return None


def is_address(text: str) -> bool:
    """HOST:PORT as other peers can dial it: what they are given goes straight to their sockets."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 1 <= int(found[1]) <= 65535


def _refuse(code: str, reason: str, retry_after_s: float = 0.0) -> Refuse:
    return Refuse(code=code, reason=reason, retry_after_s=retry_after_s)
