"""The sentences of a round: who takes part, who owns what, who counted how much, what was committed.

Written by the coordinator, read by every member; with the names of the codecs that they speak of, which the coordinator
knows without torch, and what owners sign of their groups' sums.  At the end what all messages are made of.  Types
only: no decisions, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from farflung.protocol.digests import hash_bytes
from farflung.protocol.extensions import CODEC, loaded
from farflung.protocol.limits import (
    ADDRESS_CHARS,
    CHUNKS_PER_FRAGMENT,
    FRAGMENTS_MAX,
    GROUPS_MOST,
    HOST_CHARS,
    MEMBERS_PER_MESH,
    MEMBERS_PER_ROUND,
    TICKET_CHARS,
    TOKENS_MAX,
)

# A run of more members is a crowd: its rosters, lists and status go out in parts, and not everybody dials everybody.
CROWD = 64

WEIGHT_CAP = 4.0  # no member counts for more than so many times the median tokens

AUTO = "auto"
LADDER = ("int8", "int4", "int2", "topk")  # codecs, fine to coarse
# On the wire; a test holds it to the codecs themselves, which the coordinator can't import (it has no torch).
BITS_PER_VALUE = {
    "fp32": 32.0,
    "bf16": 16.0,
    "int8": 8.0625,
    "int4": 4.25,
    "int2": 2.25,
    "topk": 0.1602,
    "sparse": 0.8281,
}
_MANY = 1 << 20  # values, of which a codec of a package is asked how long they are


def bits_per_value(codec: str) -> float:
    """UserError for a codec that nobody here knows."""
    if codec in BITS_PER_VALUE:
        return BITS_PER_VALUE[codec]
    length: int = loaded(CODEC, codec).body_bytes(_MANY)
    return 8 * length / _MANY


# A codec of results alone: what it leaves out each contributor sends again.
SPARSE = "sparse"

PeerName = Annotated[str, Meta(max_length=64)]
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
HashList = Annotated[bytes, Meta(max_length=CHUNKS_PER_FRAGMENT * 32)]
Mask = Annotated[bytes, Meta(max_length=CHUNKS_PER_FRAGMENT // 8)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Reason = Annotated[str, Meta(max_length=2000)]
ShortReason = Annotated[str, Meta(max_length=200)]
Group = Annotated[int, Meta(ge=0, lt=GROUPS_MOST)]
# Of what a group of a mesh adds up: half of fp32, and a rounding far below that of a result.
SUM_CODEC = "bf16"


class MeshColumn(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Of a mesh, for one member: by whom the chunks that it owns are added up in the other groups, and where the sums
    of all groups come together."""

    group: Group  # the member's own
    groups: Annotated[int, Meta(ge=2, le=GROUPS_MOST)]
    peers: Annotated[tuple[PeerName, ...], Meta(max_length=MEMBERS_PER_MESH)]
    # For each of its chunks in order, and of each group: an index in `peers`.
    owners: Annotated[tuple[int, ...], Meta(max_length=CHUNKS_PER_FRAGMENT * GROUPS_MOST)]
    roots: Annotated[tuple[Group, ...], Meta(max_length=CHUNKS_PER_FRAGMENT)]  # for each of its chunks


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """OPEN.  `epoch` grows each time ownership moves within the round; bytes already sent stay good."""

    round_no: Count
    epoch: Count
    version: Count  # the version that the round starts from
    # Sorted: the sum's order.
    members: Annotated[tuple[str, ...], Meta(min_length=1, max_length=MEMBERS_PER_MESH)]
    # index of a chunk within the fragment -> index in members; of a mesh as a whole: one such row for each group
    owners: Annotated[tuple[int, ...], Meta(max_length=CHUNKS_PER_FRAGMENT * GROUPS_MOST)]
    # Of each member's contribution.
    codecs: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MEMBERS_PER_MESH)]
    fragment: Count = 0
    # Chunks that moved to a member whose result for them is proven: it answers for those bytes.  Results of all other
    # chunks that moved are made again, since whoever made them may have told others otherwise.
    kept: Mask = b""
    # Of a mesh as a whole, which the coordinator and its journal have: the group of each member, and for each chunk the
    # group whose owner adds up the sums of all groups.
    groups: Annotated[tuple[Group, ...], Meta(max_length=MEMBERS_PER_MESH)] | UnsetType = UNSET
    roots: Annotated[tuple[Group, ...], Meta(max_length=CHUNKS_PER_FRAGMENT)] | UnsetType = UNSET
    # Of a mesh, as one member hears of it: all else here is then of its group alone.
    column: MeshColumn | UnsetType = UNSET

    @property
    def count(self) -> int:
        """Chunks of the fragment."""
        return len(self.roots) if self.roots else len(self.owners)

    def root_of(self, place: int) -> str:
        """Who encodes the result: its owner, or in a mesh as a whole the one of the root's group."""
        return self.owner_of(self.roots[place] * self.count + place if self.roots else place)

    def codec_of(self, peer: str) -> str:
        return self.codecs[self.members.index(peer)]

    def chunks_of(self, peer: str) -> list[int]:
        """By their index within the fragment."""
        if peer not in self.members:
            return []
        index, count = self.members.index(peer), self.count
        return [place % count for place, owner in enumerate(self.owners) if owner == index]

    def owner_of(self, place: int) -> str:
        return self.members[self.owners[place]]


class Decision(Struct, frozen=True, forbid_unknown_fields=True):
    """DECIDE.  One weight per member for the WHOLE fragment; 0.0 means out, `reasons` says why."""

    round_no: Count
    # Grows when a death after DECIDE made an included contribution unobtainable, or what was foreseen did not come.
    decision_no: Count
    weights: Annotated[tuple[float, ...], Meta(max_length=MEMBERS_PER_MESH)]
    reasons: dict[str, Reason]
    # Of a mesh: the groups of which somebody is included, as a mask.  All else that a member hears is of its group.
    summed: Annotated[bytes, Meta(max_length=GROUPS_MOST // 8)] | UnsetType = UNSET
    # Of a mesh whose contributions are compared: so are the sums of its groups, and nothing is encoded before a tick
    # says so (`FragmentTick.encode_no`).
    weigh_sums: bool | UnsetType = UNSET
    # It is what the round will most likely come to, told before anybody knows whether every contribution is whole:
    # results may leave by it, and owners go on comparing.  Nothing stands before the same number comes without this.
    foreseen: bool | UnsetType = UNSET

    def included(self, members: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(m for m, weight in zip(members, self.weights, strict=True) if weight > 0.0)


class Commit(Struct, frozen=True, forbid_unknown_fields=True):
    """COMMIT.  The durable record that version `version` of a fragment exists, and of what it is made."""

    version: Count  # the version that the round made
    round_no: Count
    members: Annotated[tuple[str, ...], Meta(max_length=MEMBERS_PER_MESH)]
    weights: Annotated[tuple[float, ...], Meta(max_length=MEMBERS_PER_MESH)]
    hashes: HashList  # of the encoded results, chunk by chunk of the fragment
    codec: Annotated[str, Meta(max_length=64)]  # of the results
    fragment: Count = 0
    # The results are multiplied by it before the step; below 1 where the gradient of a batch is clipped.  In fp32.
    factor: Annotated[float, Meta(ge=0, le=1)] = 1.0

    @property
    def included(self) -> tuple[str, ...]:
        return tuple(m for m, weight in zip(self.members, self.weights, strict=True) if weight > 0.0)


class Used(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Samples [start, upto) of one lease went into a contribution."""

    lease: Count
    upto: Count


class Contact(Struct, frozen=True, forbid_unknown_fields=True):
    """How one peer's data plane is reached.  An empty address: it can't be dialled and dials others."""

    peer: Annotated[str, Meta(max_length=64)]
    name: PeerName
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]  # CURVE public key of its session
    address: Annotated[str, Meta(max_length=ADDRESS_CHARS)]


class RelayRoute(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How I reach somebody whom I can't dial and who can't dial me: we meet at a relay."""

    peer: PeerName
    port: Annotated[int, Meta(ge=1, le=65535)]
    ticket: Annotated[str, Meta(max_length=TICKET_CHARS)]  # mine: a name to ask the relay for, by SOCKS5
    host: Annotated[str, Meta(max_length=HOST_CHARS)] = (
        ""  # in numbers; empty: the coordinator's, where I see it
    )


FORWARD_NUMBERS = 16


class Forward(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a peer's model computes from made-up input of a form, by its own word: see peer/checks/forward_check.py."""

    version: Count  # of its weights
    form: Annotated[bytes, Meta(min_length=8, max_length=8)]
    coarse: bool  # its weights are of two bytes each
    numbers: Annotated[tuple[float, ...], Meta(min_length=FORWARD_NUMBERS, max_length=FORWARD_NUMBERS)]


class DotProducts(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """<x_i, x_j> for members i <= j of the mask, row by row, summed over chunks."""

    members: Annotated[bytes, Meta(max_length=MEMBERS_PER_ROUND // 8)]
    chunks: Mask
    products: Annotated[tuple[float, ...], Meta(max_length=MEMBERS_PER_ROUND * (MEMBERS_PER_ROUND + 1) // 2)]


def result_name(commit: Commit) -> str:
    """One short name for all result hashes of a commit."""
    return hash_bytes(commit.hashes).hex()[:32]


# ---- sums that somebody else does again

THE_RESULT = -1  # in the place of a group: not what one of them adds up, but the result itself
# Of a sum's hash: enough to tell which of the words that were signed is meant.  All of it is in what the root signs.
SUM_TAG_BYTES = 8
SumOf = Annotated[int, Meta(ge=THE_RESULT, lt=GROUPS_MOST)]  # a group, or the result


class GroupSums(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Of a mesh: what an owner made of its group's contributions, signed as `Results` in the codec of sums.

    Who may lie: its owner, about sums that nobody has done again; not about what went in, which the coordinator knows.
    """

    chunks: Mask  # of the fragment
    hashes: HashList  # of their sums
    inputs: Annotated[bytes, Meta(max_length=32)]  # see `inputs_of`
    signature: Annotated[bytes, Meta(max_length=64)]


# ---- what messages are made of -----------------------------------------------------------------------------
# A mode adds to a message of the core what is its own: a section, whose type stands in mode_words.py. messages.py
# lists which sections each message may have; anything else in their place is malformed, as in any other field. Of
# several of one kind the first counts.

Bytes32 = Hash
Digest = Annotated[bytes, Meta(max_length=32)]  # empty: not known
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
FragmentNo = Annotated[int, Meta(ge=0, lt=FRAGMENTS_MAX)]
Version = Annotated[int, Meta(ge=-1, lt=1 << 62)]  # -1: holds no state
Session = Annotated[bytes, Meta(min_length=16, max_length=16)]
ShortText = Annotated[str, Meta(max_length=256)]
SECTIONS_MOST = 8


class MessageBase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class FromMemberBase(MessageBase, frozen=True, kw_only=True):
    session: Session
    seq: Count


class ToMemberBase(MessageBase, frozen=True, kw_only=True):
    session: Session
    seq: Count


class ModeSection(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Of a mode, in a message of the core; its tag names it on the wire."""

    counts: ClassVar[bool] = False  # of a beat: what is new in it may let a round begin, or end


AnySection = TypeVar("AnySection", bound=ModeSection)


def section(kind: type[AnySection], sections: Iterable[ModeSection]) -> AnySection | None:
    """None: the message has none of this kind."""
    return next((each for each in sections if isinstance(each, kind)), None)
