"""One version of the protocol is spoken: whoever speaks another one is told so at the door, and what to do."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung import __version__
from farflung.coordinator.door.hello_check import DoorFacts, Doorkeeper, HelloPassed
from farflung.peer.identity import Identity
from farflung.peer.machine.handshake import Handshake, me_of
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Challenge, Hello, Knock, Refuse
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.signed_words import hello_part

MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
RUN_ID, MANIFEST = bytes(range(16)), Manifest().canonical()
CHALLENGE = Challenge(nonce=bytes(32), run_id=RUN_ID, manifest=MANIFEST, protocol=PROTOCOL_VERSION)
OTHERS = (0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1)


def hello_in(version: int, identity: bytes, key: bytes) -> Hello:
    return Hello(
        protocol=version,
        run_id=RUN_ID,
        identity=identity,
        key=key,
        address="",
        software="test",
        manifest=hash_bytes(MANIFEST),
        model=MODEL,
        fragments=(0,),
        version=-1,
        digest=b"",
        process=bytes(16),
        token="",
        signature=b"",
    )


class Caller:
    """One who knocks at a doorkeeper, and answers its newest challenge."""

    def __init__(self) -> None:
        self.key, self.secret = bytes(range(32)), Ed25519PrivateKey.from_private_bytes(bytes(32))
        self.keeper = Doorkeeper(DoorFacts("demo", RUN_ID, MANIFEST))

    def knock(self, version: int) -> Challenge | Refuse:
        return self.keeper.knock(b"caller", Knock(protocol=version, run="demo"), bytes(32))

    def hello(self, version: int, changed_to: int | None = None) -> HelloPassed | Refuse:
        """`changed_to`: by somebody on the way, after it was signed."""
        hello = hello_in(version, self.secret.public_key().public_bytes_raw(), self.key)
        signed = msgspec.structs.replace(hello, signature=self.secret.sign(hello_part(hello, bytes(32))))
        heard = msgspec.structs.replace(signed, protocol=version if changed_to is None else changed_to)
        return self.keeper.examine(b"caller", self.key, heard)


def is_told_what_to_do(answer: object, version: int) -> bool:
    assert isinstance(answer, Refuse) and answer.code == "protocol"
    assert f'pip install "farflung=={__version__}"' in answer.reason and "\n" not in answer.reason
    return f"speaks version {version} of the protocol, and the run {PROTOCOL_VERSION}:" in answer.reason


def test_who_speaks_the_same_version_is_challenged_in_it_and_passes() -> None:
    caller = Caller()
    challenge = caller.knock(PROTOCOL_VERSION)
    assert isinstance(challenge, Challenge) and challenge.protocol == PROTOCOL_VERSION
    assert isinstance(caller.hello(PROTOCOL_VERSION), HelloPassed)


@pytest.mark.parametrize("version", OTHERS)
def test_who_speaks_another_version_is_told_exactly_what_to_install(version: int) -> None:
    assert is_told_what_to_do(Caller().knock(version), version)


@pytest.mark.parametrize("version", OTHERS)
def test_a_hello_in_another_version_than_its_knock_is_refused(version: int) -> None:
    caller = Caller()
    caller.knock(PROTOCOL_VERSION)
    assert is_told_what_to_do(caller.hello(version), version)


@pytest.mark.parametrize("version", OTHERS)
def test_the_version_is_under_the_signature(version: int) -> None:
    caller = Caller()
    caller.knock(PROTOCOL_VERSION)
    refused = caller.hello(PROTOCOL_VERSION, changed_to=version)
    assert isinstance(refused, Refuse) and refused.code == "signature"


# ---- who knocks


def doorway() -> Handshake:
    return Handshake(me_of(Identity.generate(), bytes(32), bytes(16)), "demo")


def test_a_host_that_speaks_another_version_is_the_end() -> None:
    door = doorway()
    knock = door.on_timer(0.0)
    assert knock is not None and knock.protocol == PROTOCOL_VERSION
    assert door.on_refuse(Refuse(code="protocol", reason="another version", retry_after_s=0.0), 0.1)
    assert door.refused == "another version"


@pytest.mark.parametrize("version", OTHERS)
def test_a_challenge_in_another_version_is_not_answered(version: int) -> None:
    door = doorway()
    door.on_timer(0.0)
    assert not door.on_challenge(msgspec.structs.replace(CHALLENGE, protocol=version))
    assert f"speaks version {version} of the protocol" in door.other_protocol
    assert f"here {PROTOCOL_VERSION}: ask its host" in door.other_protocol
