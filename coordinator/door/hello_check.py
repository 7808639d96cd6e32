"""The doorkeeper: hears strangers, and passes on whoever proves who it is and that it speaks of this run.  Pure.

It knows what is fixed about a run and nothing of how the run is: whether somebody who is passed on may come in is
the admission's business.  Challenges are remembered per caller and used once; no clock takes part in any check.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

from farflung import __version__
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.messages import Challenge, Hello, Knock, Refuse
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.signed_words import hello_part
from farflung.protocol.signing import verify

_ADDRESS = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
UNPROVEN = frozenset({"challenge", "key", "signature"})  # refusals of callers that did not show who they are
CHALLENGES_PER_CALLER = 4  # a peer that knocked while nobody was there hears several, and answers the first
CHALLENGES_KEPT = 1024  # a flood of knocks pushes out old challenges, not memory


def refuse(code: str, reason: str, retry_after_s: float = 0.0) -> Refuse:
    return Refuse(code=code, reason=reason, retry_after_s=retry_after_s)


@dataclass(frozen=True)
class DoorFacts:
    """What is fixed about a run."""

    name: str
    run_id: bytes
    manifest: bytes  # canonical


@dataclass(frozen=True)
class HelloPassed:
    """A hello that its identity signed over this challenge, from a connection with the key that it names."""

    hello: Hello
    nonce: bytes
    came_from: str = ""  # the address of the connection


class Doorkeeper:
    def __init__(self, facts: DoorFacts) -> None:
        self._facts = facts
        self._manifest_digest = hash_bytes(facts.manifest)
        self.model: ModelSchema | None = None  # the run's, once somebody has brought it
        self._challenges: OrderedDict[bytes, list[bytes]] = OrderedDict()  # by caller

    def knock(self, caller: bytes, knock: Knock, nonce: bytes) -> Challenge | Refuse:
        if knock.protocol != PROTOCOL_VERSION:
            return other_protocol(knock.protocol)
        if (wrong := self.wrong_run(knock.run)) is not None:
            return wrong
        mine = [*self._challenges.get(caller, []), nonce]
        self._challenges[caller] = mine[-CHALLENGES_PER_CALLER:]
        self._challenges.move_to_end(caller)
        while len(self._challenges) > CHALLENGES_KEPT:
            self._challenges.popitem(last=False)
        model = self.model if knock.helps else None
        facts = self._facts
        return Challenge(
            nonce=nonce, run_id=facts.run_id, manifest=facts.manifest, model=model, protocol=PROTOCOL_VERSION
        )

    def wrong_run(self, name: str) -> Refuse | None:
        here = self._facts.name
        return None if name == here else refuse("run", f"this coordinator runs '{here}', not '{name}'")

    def examine(self, caller: bytes, key: bytes, hello: Hello, came_from: str = "") -> Refuse | HelloPassed:
        """Uses up the caller's challenges."""
        asked = self._challenges.pop(caller, [])
        if not asked:
            return refuse("challenge", "hello without a fresh challenge; knock first", retry_after_s=0.5)
        if hello.key != key:
            return refuse("key", "the key in the hello is not the key of this connection")
        proven = [nonce for nonce in asked if is_signed(hello, nonce)]
        if not proven and len(asked) == CHALLENGES_PER_CALLER:
            # It may be an honest answer to one that is forgotten.
            told = f"the hello answers none of the last {len(asked)} challenges; knock again"
            return refuse("challenge", told, retry_after_s=0.5)
        if not proven:
            return refuse("signature", "the hello is not signed by the identity it names")
        return self._unfit(hello) or HelloPassed(hello, proven[0], came_from)

    def _unfit(self, hello: Hello) -> Refuse | None:
        if hello.protocol != PROTOCOL_VERSION:
            return other_protocol(hello.protocol)
        if hello.run_id != self._facts.run_id:
            return refuse(
                "run", "this is another run under the same name: its run id differs; use its new join URL"
            )
        if hello.manifest != self._manifest_digest:
            return refuse("manifest", "the manifest differs from the run's; read it again with a fresh join")
        if hello.address and not is_address(hello.address):
            return refuse("address", f"the address for other peers, {hello.address[:60]!r}, is not HOST:PORT")
        return None


def other_protocol(theirs: int) -> Refuse:
    told = f"this peer speaks version {theirs} of the protocol, and the run {PROTOCOL_VERSION}"
    return refuse("protocol", f'{told}: pip install "farflung=={__version__}" and start it again')


def is_signed(hello: Hello, nonce: bytes) -> bool:
    return verify(hello.identity, hello_part(hello, nonce), hello.signature)


def is_address(text: str) -> bool:
    """HOST:PORT as other peers can dial it: what they are given goes straight to their sockets."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 1 <= int(found[1]) <= 65535
