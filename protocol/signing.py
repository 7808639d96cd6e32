"""Owns what a public key means: the id and the name of its peer, whether a signature is good, and what a run signs.

Called by the coordinator on every hello, by peer/identity.py, which holds the private half, and by readers of
checkpoints.  The coordinator has one secret for both of its keys: the CURVE key in the join URL follows from its
ed25519 key (as in libsodium's crypto_sign_ed25519_pk_to_curve25519), so a URL tells what its run has signed.
Must not know files, messages or sockets; all functions are pure, and none raises on hostile bytes.
"""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from farflung.protocol.limits import AMENDMENT_BYTES, AMENDMENTS_MOST, KEPT_BOOKS_BYTES
from farflung.protocol.round_words import Commit, Count, Hash

_ID_BYTES = 10  # 80 bits: 16 letters of base32 without padding


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# 64 of each, so that six bits of the hash choose one.  Order and spelling are part of every peer's name.
ADJECTIVES = _words(
    "amber ample azure bold brave brisk bronze calm clever copper coral cosmic crisp dapper daring dusty "
    "eager early fair fleet fond frosty gentle glad golden grand green happy hardy hazel honest humble "
    "indigo ivory jade jolly keen kind lively lucky lunar mellow merry mighty misty modest nimble noble "
    "olive patient plucky polar proud quick quiet rapid rosy royal rustic silver spry steady sunny velvet"
)
ANIMALS = _words(
    "badger bat bear beaver bison camel cat cod condor coot crab crane crow deer dingo dove "
    "eagle eel egret elk falcon ferret finch fox gecko goat goose gull hare hawk heron hound "
    "ibex ibis jackal jay kiwi koala lark lemur lion llama lynx magpie marten mole moose newt "
    "ocelot orca otter owl panda pika puffin quail rabbit raven robin seal stork tapir trout wren"
)


def peer_id_of(public: bytes) -> str:
    """The 16 lower-case letters and digits by which a peer is known."""
    return base64.b32encode(_hash(public)[:_ID_BYTES]).decode("ascii").lower()


def name_of(public: bytes) -> str:
    """A name for people, such as `amber-fox`.  Not unique: rules must use the id."""
    first, second = _hash(public)[_ID_BYTES : _ID_BYTES + 2]
    return f"{ADJECTIVES[first % 64]}-{ANIMALS[second % 64]}"


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """True if the holder of the key signed exactly this message; damaged keys and signatures are False."""
    # Slow to load, and needed by nobody who only reads a join URL.
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


# ---- a state of the run, signed by its coordinator ----------------------------------------------------------------

PROOF_BYTES = 32 + 64  # the ed25519 key and the signature
_P = 2**255 - 19


def statement_of(run_id: bytes, era: int, fragment: int, version: int, digest: bytes) -> bytes:
    """What the coordinator signs: in this run, this version of this fragment has this digest."""
    numbers = b"".join(number.to_bytes(8, "big") for number in (era, fragment, version))
    return b"farflung/state/1\0" + run_id + numbers + digest


def proves(proof: bytes, statement: bytes) -> bool:
    return len(proof) == PROOF_BYTES and verify(proof[:32], statement, proof[32:])


def curve_key_of(public: bytes) -> bytes:
    """The CURVE key of whoever holds this ed25519 key: u = (1 + y) / (1 - y); empty if there is none."""
    y = int.from_bytes(public, "little") % 2**255
    if len(public) != 32 or y >= _P or (1 - y) % _P == 0:
        return b""
    return ((1 + y) * pow(1 - y, -1, _P) % _P).to_bytes(32, "little")


# ---- what its host changes while it goes on: see Terms in protocol/run_terms.py


class Amendment(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    number: Annotated[int, Meta(ge=1, le=AMENDMENTS_MOST)]
    version: Count  # it holds in rounds that start from it, or from a later one
    era: Count  # and in this era or a later one
    changes: Annotated[bytes, Meta(max_length=AMENDMENT_BYTES)]  # JSON: section -> key -> value
    before: Hash  # the digest of the terms that it changes
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)] = b""  # the key of the run, and its signature

    def statement(self, run_id: bytes) -> bytes:
        """What the host signs."""
        numbers = b"".join(each.to_bytes(8, "big") for each in (self.number, self.version, self.era))
        return b"farflung/amendment/1\0" + run_id + numbers + self.before + self.changes

    @property
    def changed(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads(self.changes)
        return found

    def __str__(self) -> str:
        told = (
            f"[{section}] {key} = {json.dumps(value)}"
            for section, keys in self.changed.items()
            for key, value in keys.items()
        )
        return ", ".join(told)


Amendments = Annotated[tuple[Amendment, ...], Meta(max_length=AMENDMENTS_MOST)]


def is_hosts(amendment: Amendment, run_id: bytes, pinned: bytes) -> bool:
    """`pinned`: the key in the run's join URL."""
    proof = amendment.proof
    return proves(proof, amendment.statement(run_id)) and curve_key_of(proof[:32]) == pinned


# ---- what peers keep for a coordinator that loses its disk: see coordinator/restoring/kept_books.py


class SignedHead(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The run after one more step of its history: a commit, a beginning, a way back.  Signed over all of it."""

    run_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    manifest: Hash  # the digest of what the run began with
    number: Annotated[int, Meta(ge=1, lt=1 << 62)]  # of the step
    before: Hash  # a name of all steps before it
    after: Hash  # and with it
    incarnation: Count  # of the coordinator that made it durable
    era: Count
    versions: Annotated[tuple[Count, ...], Meta(max_length=64)]  # of each fragment
    commits: Annotated[
        tuple[Hash, ...], Meta(max_length=64)
    ]  # of what was committed with it: see `name_of_commit`
    books: Hash  # of all else that follows from it
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)] = b""  # the key of the run, and its signature

    @property
    def statement(self) -> bytes:
        bare = msgspec.structs.replace(self, proof=b"")
        return b"farflung/kept/1\0" + blake3(msgspec.msgpack.encode(bare)).digest()

    @property
    def order(self) -> tuple[int, int]:
        """Of two heads the greater one is the run: peers follow the newest coordinator."""
        return self.incarnation, self.number

    def is_by(self, key: bytes) -> bool:
        """`key`: ed25519."""
        return self.proof[:32] == key and proves(self.proof, self.statement)


class KeptCommit(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    head: SignedHead
    # For the coordinator alone.  They grow with the members: of many some keep them, the others the head.
    books: Annotated[bytes, Meta(max_length=KEPT_BOOKS_BYTES)]

    @property
    def is_whole(self) -> bool:
        return blake3(self.books).digest() == self.head.books

    @property
    def without_books(self) -> KeptCommit:
        return msgspec.structs.replace(self, books=b"")


def name_of_commit(commit: Commit) -> bytes:
    """By which a head names it."""
    return blake3(msgspec.msgpack.encode(commit)).digest()


def _hash(public: bytes) -> bytes:
    return blake3(public).digest()
