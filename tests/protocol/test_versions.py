"""Two versions of the protocol are spoken, this and the last one: neither side hears what it does not know, nobody gets
into an older one than both sides speak, and whoever speaks neither is told what to install.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung import __version__
from farflung.coordinator.door.hello_check import Doorkeeper, Passed, RunFacts
from farflung.peer.identity import Identity
from farflung.peer.machine.getting_in import Doorway, me_of
from farflung.protocol import envelope, manifest
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.frames import Kind
from farflung.protocol.limits import LAST_PROTOCOL, PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import KINDS, Challenge, Hello, Knock, Refuse, Welcome
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Contact
from farflung.protocol.signed_words import hello_part
from rig.last_protocol import HIGHEST_FRAME_KIND, KNOWN_FIELDS, KNOWN_KINDS, LEAVE_OUT, unknown_in

MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
RUN_ID, MANIFEST = bytes(range(16)), Manifest().canonical()
CHALLENGE = Challenge(nonce=bytes(32), run_id=RUN_ID, manifest=MANIFEST, protocol=PROTOCOL_VERSION)


def structs_in(info: msgspec.inspect.Type) -> Iterator[type[msgspec.Struct]]:
    if isinstance(info, msgspec.inspect.StructType):
        yield info.cls
        for each in info.fields:
            yield from structs_in(each.type)
    for name in ("item_type", "key_type", "value_type"):
        if hasattr(info, name):
            yield from structs_in(getattr(info, name))
    for name in ("item_types", "types"):
        for each in getattr(info, name, None) or ():
            yield from structs_in(each)


PARTS = {part for kind in KINDS.values() for part in structs_in(msgspec.inspect.type_info(kind))}


# ---- what each version knows


@pytest.mark.parametrize(
    "part", sorted(PARTS, key=lambda each: each.__name__), ids=lambda each: each.__name__
)
def test_what_came_since_the_last_version_is_named_has_a_default_and_stands_last(
    part: type[msgspec.Struct],
) -> None:
    """A new field that is not in envelope.NEW_FIELDS would reach peers that refuse the whole message for it."""
    new = envelope.NEW_FIELDS.get(part, frozenset())
    if part.__name__ not in KNOWN_FIELDS:
        return  # a part of a new field or of a new kind: whoever has neither never sees it
    known = KNOWN_FIELDS[part.__name__].split()
    assert [name for name in part.__struct_fields__ if name not in new] == known
    for field in msgspec.structs.fields(part):
        assert field.name not in new or not field.required
    # Whoever has no news is told as it is: what that leaves out, the last version has to know as left out.
    assert new or not part.__struct_config__.omit_defaults or part.__name__ in LEAVE_OUT
    if part.__struct_config__.array_like:
        assert set(part.__struct_fields__[: len(known)]) == set(known)


def test_new_kinds_are_named_and_no_old_one_is_gone() -> None:
    assert KINDS.keys() - KNOWN_KINDS == envelope.NEW_KINDS and KINDS.keys() >= KNOWN_KINDS
    assert all(part.__name__ in KNOWN_FIELDS for part in envelope.NEW_FIELDS)


def test_what_is_signed_for_third_parties_has_the_same_fields_in_both_versions() -> None:
    assert not envelope.NEW_FIELDS.keys() & envelope.SIGNED


def test_frames_of_kinds_that_the_last_version_lacks_follow_only_from_words_that_it_is_not_told() -> None:
    """A frame's kind is refused where it is unknown.  Who adds one sees to it that no plan with a member of the last
    version leads to it, and says here how.

    Sums of groups: a plan has groups only where [round] group is set, and that key shuts the last version out."""
    assert {kind for kind in Kind if kind > HIGHEST_FRAME_KIND} == {Kind.SUM, Kind.WANT_SUM}
    assert manifest.NEW_KEYS["round", "group"] == PROTOCOL_VERSION


def test_a_message_in_the_last_version_is_what_that_version_would_have_said() -> None:
    raw = envelope.encode(CHALLENGE, LAST_PROTOCOL)
    assert unknown_in(raw) == [] and unknown_in(envelope.encode(CHALLENGE)) == ["challenge.protocol"]
    heard = envelope.decode(raw, frozenset({"challenge"}))
    assert heard == msgspec.structs.replace(CHALLENGE, protocol=0)


def test_news_are_left_out_of_parts_and_lists_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(envelope.NEW_FIELDS, Contact, frozenset({"address"}))
    roster = (Contact("ann", "amber-fox", bytes(32), "host:1"),)
    said = Welcome(session=bytes(16), incarnation=1, member_port=1, fragments=(0,), roster=roster)
    body = msgpack.unpackb(envelope.encode(said, LAST_PROTOCOL))["body"]
    assert [sorted(each) for each in body["roster"]] == [["key", "name", "peer"]]


def test_a_kind_that_somebody_does_not_know_is_not_said_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "NEW_KINDS", frozenset({"challenge"}))
    with pytest.raises(ValueError, match="speaks version"):
        envelope.encode(CHALLENGE, LAST_PROTOCOL)
    assert envelope.encode(CHALLENGE)


@pytest.mark.parametrize(
    ("theirs", "shared"),
    [
        (0, 0),
        (LAST_PROTOCOL - 1, 0),
        (LAST_PROTOCOL, LAST_PROTOCOL),
        (PROTOCOL_VERSION, PROTOCOL_VERSION),
        (PROTOCOL_VERSION + 1, PROTOCOL_VERSION),  # it speaks the one before its own, too
        (PROTOCOL_VERSION + 2, 0),
    ],
)
def test_the_newest_that_both_speak(theirs: int, shared: int) -> None:
    assert envelope.both_speak(theirs) == shared


# ---- at the door


def hello_in(version: int, identity: bytes = bytes(32), key: bytes = bytes(32)) -> Hello:
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

    def __init__(self, keeper: Doorkeeper) -> None:
        self.key, self.secret = bytes(range(32)), Ed25519PrivateKey.from_private_bytes(bytes(32))
        self.keeper, self.number = keeper, 0

    def knock(self, version: int) -> Challenge | Refuse:
        self.number += 1
        return self.keeper.knock(b"caller", Knock(protocol=version, run="demo"), bytes([self.number]) * 32)

    def hello(self, version: int, nonce: bytes, changed_to: int = 0) -> Passed | Refuse:
        """`changed_to`: by somebody on the way, after it was signed."""
        hello = hello_in(version, self.secret.public_key().public_bytes_raw(), self.key)
        signed = msgspec.structs.replace(hello, signature=self.secret.sign(hello_part(hello, nonce)))
        heard = msgspec.structs.replace(signed, protocol=changed_to or version)
        return self.keeper.examine(b"caller", self.key, heard)


@pytest.fixture
def keeper() -> Doorkeeper:
    return Doorkeeper(RunFacts("demo", RUN_ID, MANIFEST))


@pytest.mark.parametrize("newest", [LAST_PROTOCOL, PROTOCOL_VERSION, PROTOCOL_VERSION + 1])
def test_the_challenge_names_the_newest_version_that_both_speak_and_the_hello_is_taken_in_it(
    keeper: Doorkeeper, newest: int
) -> None:
    caller = Caller(keeper)
    challenge = caller.knock(newest)
    assert isinstance(challenge, Challenge) and challenge.protocol == min(newest, PROTOCOL_VERSION)
    passed = caller.hello(challenge.protocol, challenge.nonce)
    assert isinstance(passed, Passed) and passed.hello.protocol == challenge.protocol


@pytest.mark.parametrize("newest", [LAST_PROTOCOL - 1, PROTOCOL_VERSION + 2])
def test_whoever_speaks_neither_is_told_exactly_what_to_install(keeper: Doorkeeper, newest: int) -> None:
    refused = Caller(keeper).knock(newest)
    assert isinstance(refused, Refuse) and refused.code == "protocol"
    assert f'pip install "farflung=={__version__}"' in refused.reason
    assert (
        f"speaks version {newest}" in refused.reason
        and f"{LAST_PROTOCOL} or {PROTOCOL_VERSION}" in refused.reason
    )


@pytest.mark.parametrize(
    ("challenged", "said"), [(PROTOCOL_VERSION, LAST_PROTOCOL), (LAST_PROTOCOL, PROTOCOL_VERSION)]
)
def test_a_hello_in_another_version_than_its_challenge_is_refused(
    keeper: Doorkeeper, challenged: int, said: int
) -> None:
    """So no word of a third one, repeated at another moment, brings anybody into an older version."""
    caller = Caller(keeper)
    challenge = caller.knock(challenged)
    assert isinstance(challenge, Challenge)
    refused = caller.hello(said, challenge.nonce)
    assert isinstance(refused, Refuse) and refused.code == "protocol"


def test_a_hello_of_the_last_version_is_signed_as_it_always_was() -> None:
    """Calculated by the code of that version."""
    hello = msgspec.structs.replace(hello_in(LAST_PROTOCOL), manifest=hash_bytes(bytes(1)))
    told = "3504836d41132c64c795f722784a43a9e586aa000a059398649c58d4e78e1910"
    assert hash_bytes(hello_part(hello, bytes(32))).hex() == told


def test_the_version_is_under_the_signature(keeper: Doorkeeper) -> None:
    caller = Caller(keeper)
    challenge = caller.knock(PROTOCOL_VERSION)
    assert isinstance(challenge, Challenge)
    refused = caller.hello(PROTOCOL_VERSION, challenge.nonce, changed_to=LAST_PROTOCOL)
    assert isinstance(refused, Refuse) and refused.code == "signature"


def test_a_run_whose_rules_the_last_version_does_not_know_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "NEW_KEYS", {("round", "sync_every"): PROTOCOL_VERSION})
    usual, other = Manifest(), Manifest.from_toml("[round]\nsync_every = 7", "run.toml")
    assert b"sync_every" not in usual.canonical() and usual.oldest_protocol == LAST_PROTOCOL
    assert b'"sync_every":7' in other.canonical() and other.oldest_protocol == PROTOCOL_VERSION
    large = Manifest.from_toml("[run]\nmax_peers = 1025", "run.toml")
    assert large.oldest_protocol == PROTOCOL_VERSION
    for each in (usual, other):
        assert Manifest.from_canonical(each.canonical()).digest == each.digest
    keeper = Doorkeeper(RunFacts("demo", RUN_ID, other.canonical(), other.oldest_protocol))
    refused = Caller(keeper).knock(LAST_PROTOCOL)
    assert isinstance(refused, Refuse) and refused.code == "protocol"
    assert f"the run {PROTOCOL_VERSION}:" in refused.reason
    assert isinstance(Caller(keeper).knock(PROTOCOL_VERSION), Challenge)


def test_a_default_that_is_spelled_out_though_it_is_to_be_left_out_is_not_canonical(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spelled = Manifest().canonical()
    monkeypatch.setattr(manifest, "NEW_KEYS", {("round", "sync_every"): PROTOCOL_VERSION})
    with pytest.raises(UserError, match="canonical"):
        Manifest.from_canonical(spelled)


# ---- who knocks


def doorway(newest: int = PROTOCOL_VERSION) -> Doorway:
    return Doorway(me_of(Identity.generate(), bytes(32), bytes(16)), "demo", newest=newest)


def knock_of(door: Doorway, now: float) -> int:
    knock = door.on_timer(now)
    assert knock is not None
    return knock.protocol


def test_a_host_of_the_last_version_hears_the_last_version_and_the_newest_again_once_it_may_have_upgraded() -> (
    None
):
    door, no = doorway(), Refuse(code="protocol", reason="another version", retry_after_s=0.0)
    assert knock_of(door, 0.0) == PROTOCOL_VERSION
    assert not door.on_refuse(no, 0.1), "it speaks the last one, too"
    assert knock_of(door, 10.0) == LAST_PROTOCOL
    assert knock_of(door, 30.0) == PROTOCOL_VERSION, (
        "its knock got no answer: the host may be starting the new one"
    )
    assert not door.on_refuse(no, 30.1) and knock_of(door, 50.0) == LAST_PROTOCOL
    assert (
        door.on_challenge(msgspec.structs.replace(CHALLENGE, protocol=0)) and door.protocol == LAST_PROTOCOL
    )


def test_a_host_of_neither_is_the_end() -> None:
    door, no = doorway(), Refuse(code="protocol", reason="another version", retry_after_s=0.0)
    knock_of(door, 0.0)
    assert not door.on_refuse(no, 0.1)
    knock_of(door, 10.0)
    assert door.on_refuse(no, 10.1)


def test_a_peer_of_the_last_version_does_not_try_an_older_one() -> None:
    door, no = doorway(LAST_PROTOCOL), Refuse(code="protocol", reason="another version", retry_after_s=0.0)
    assert knock_of(door, 0.0) == LAST_PROTOCOL and door.on_refuse(no, 0.1)


@pytest.mark.parametrize("version", [LAST_PROTOCOL - 1, PROTOCOL_VERSION + 1])
def test_a_challenge_in_a_version_that_is_not_spoken_here_is_not_answered(version: int) -> None:
    door = doorway()
    knock_of(door, 0.0)
    assert not door.on_challenge(msgspec.structs.replace(CHALLENGE, protocol=version))
    assert f"version {version}" in door.other_protocol
