"""What modes say on the control plane: their own messages, and the sections that they add to those of the core.

Of each mode in turn.  Types and bounds only; the rules are in the modes' folders.  messages.py lists all of them, and
nothing else of the core names one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from farflung.protocol.errors import RelayCause
from farflung.protocol.limits import (
    ADDRESS_CHARS,
    AUDITED_AT_ONCE,
    CHUNKS_PER_FRAGMENT,
    CONTROL_BIN_BYTES,
    FIGURE_CHARS,
    FIGURES_MOST,
    FRAGMENTS_MAX,
    MEETS_AT_ONCE,
    MEMBERS_PER_ROUND,
    MICROS_PER_BATCH,
    NATS_MOST,
    SEATS_TOLD,
    SHELVED_TAG_BYTES,
    SHELVED_TOLD,
    TEXT_GIVEN,
    TEXT_MADE,
    WAYS_MOST,
    WHEREABOUTS_BYTES,
    WINDOWS_MOST,
)
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import (
    THE_RESULT,
    Commit,
    Count,
    Digest,
    DotProducts,
    FragmentNo,
    FromMemberBase,
    GroupSums,
    Hash,
    HashList,
    Mask,
    MessageBase,
    ModeSection,
    PeerName,
    ShortReason,
    ShortText,
    SumOf,
    ToMemberBase,
    Version,
)
from farflung.protocol.signing import Amendments, KeptCommit

# ---- audits -----------------------------------------------------------------------------------------------
# Chunks of committed rounds are drawn, and others than their owners merge them again.


class ChunkVerdict(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What came of merging one chunk again."""

    chunk: Count  # of the fragment
    wrong: bool  # it gives other bytes than were committed
    # Who did not give what goes in, so that nothing is known.
    missing: Annotated[tuple[PeerName, ...], Meta(max_length=MEMBERS_PER_ROUND)] = ()


class DrawnChunk(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A chunk that was drawn after its commit, for somebody else than its owner to merge again."""

    chunk: Count  # of the fragment
    result: Hash  # as its maker signed it
    # Of all that goes in, as each author signed it, in the order of the message's members.
    hashes: Annotated[bytes, Meta(max_length=MEMBERS_PER_ROUND * 32)]


class Audited(FromMemberBase, frozen=True, kw_only=True):
    """The answer to `AuditChunks`, in one message or several."""

    round_no: Count
    chunks: Annotated[tuple[ChunkVerdict, ...], Meta(max_length=AUDITED_AT_ONCE)]
    group: SumOf = THE_RESULT  # of the question


class AuditChunks(ToMemberBase, frozen=True, kw_only=True):
    """Fetch from their authors what goes into these chunks, merge it again, and say what came of it."""

    round_no: Count
    version: Count  # that the round started from
    fragment: FragmentNo
    # Those that count, in the order of the sum.
    members: Annotated[tuple[PeerName, ...], Meta(min_length=1, max_length=MEMBERS_PER_ROUND)]
    weights: Annotated[tuple[float, ...], Meta(max_length=MEMBERS_PER_ROUND)]
    codecs: Annotated[tuple[ShortText, ...], Meta(max_length=MEMBERS_PER_ROUND)]
    chunks: Annotated[tuple[DrawnChunk, ...], Meta(max_length=AUDITED_AT_ONCE)]
    # Of a mesh: what this group adds up, of its contributions; else the result, and
    group: SumOf = THE_RESULT
    of_sums: bool = False  # that is made of groups' sums; the members are who made these


# ---- batches ----------------------------------------------------------------------------------------------
# Where a member is with the batch, its seat, its share, its stage.


class Complaint(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Of a neighbour with whom I can't work now."""

    seat: Annotated[int, Meta(ge=1, lt=1 << 32)]
    damaged: bool  # what comes from it is; else it answers nothing


class BatchBeat(ModeSection, frozen=True, tag="batch"):
    """Where I am with the synchronous batch."""

    counts: ClassVar[bool] = True

    version: Version  # that my sums are made from
    seat: Count  # whose sums they are; 0: I have none
    trainer: Count  # my how-manieth trainer: with another one the sums are gone
    counted: Mask  # microbatches that are in the sums
    unusable: Mask  # those out of which I get no gradient
    want: bool  # I could compute some
    unit_s: Annotated[float, Meta(ge=0, le=1e9)]  # busy seconds for one; 0: not known
    table_no: Count = 0  # the newest table of seats that I know
    # In a stage of several: how many microbatches wait for my trainer or are in its hands, and how many works it has
    # made for this seat.  Who holds some and makes none hangs; what waits for others is not counted.
    holds: Count = 0
    made: Count = 0
    # Of seats in the stages beside mine, as I see them now.
    complains: Annotated[tuple[Complaint, ...], Meta(max_length=MEMBERS_PER_ROUND)] = ()
    # Of a held-out batch, where the model ends: the float32 of what is `counted`, in that order, nats a token.
    losses: Annotated[bytes, Meta(max_length=4 * WINDOWS_MOST)] = b""


class SeatRow(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A line of the table of seats: see collectives/pipeline/seats.py."""

    number: Annotated[int, Meta(ge=1, lt=1 << 32)]
    peer: PeerName
    stage: FragmentNo
    share: Annotated[float, Meta(gt=0, le=1e9)]
    since: Annotated[int, Meta(ge=1, lt=1 << 32)]
    gone: Annotated[int, Meta(ge=0, lt=1 << 32)]  # 0: it is here


class BatchTick(ModeSection, frozen=True, tag="batch"):
    """The synchronous batch that is due, and my place in it."""

    version: Count  # that it is learned from
    epoch: Count
    start: Count  # samples [start, stop) of the epoch's order
    stop: Count
    count: Annotated[int, Meta(ge=1, le=MICROS_PER_BATCH)]  # of microbatches
    seat: Count  # mine; 0: none.  Sums of any other are of no use
    # [first, stop) of all microbatches that are mine, the counted ones too.
    granted: Annotated[tuple[tuple[int, int], ...], Meta(max_length=MICROS_PER_BATCH // 2)]
    freeze: bool  # all are counted: give the sums
    # Where a model is cut into stages: of what is granted, the mask of what another seat had before,
    again: Mask = b""
    # and the table of seats in my stage and in those beside it, if it is newer than mine.
    table_no: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    table: Annotated[tuple[SeatRow, ...], Meta(max_length=SEATS_TOLD)] | None = None
    # Nobody gets a finite gradient out of these: nobody computes, sends or counts them any more.
    skipped: Mask = b""
    # Somebody complains of these seats: does whoever has to do with them get on with them?
    doubted: Annotated[tuple[Count, ...], Meta(max_length=MEMBERS_PER_ROUND)] = ()
    held_out: bool = False  # its samples are windows of [eval]: their losses are told, and nothing is learned


class ServeTick(ModeSection, frozen=True, tag="serve"):
    """Another stage of the model than it holds is this member's to serve from now on."""

    stage: Annotated[int, Meta(ge=0, lt=FRAGMENTS_MAX)]


# ---- evaluation -------------------------------------------------------------------------------------------
# The held-out loss of a version, of which each member computes some windows.


class ScoreTick(ModeSection, frozen=True, tag="score"):
    """Compute the loss of these windows at these versions; told until the answer is there, or comes too late."""

    number: Count  # of the order
    versions: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=FRAGMENTS_MAX)]  # of each fragment
    windows: Annotated[bytes, Meta(min_length=1, max_length=WINDOWS_MOST // 8)]  # a mask
    text: bool = False  # and go on with the text that the first window begins with


class ScoreBeat(ModeSection, frozen=True, tag="score"):
    """The answer.  Who may lie: everybody, about each number; others compute the same windows."""

    number: Count  # of the order
    # The float32 of each window's nats a token, in their order; none where `why_not` says why.
    nats: Annotated[bytes, Meta(max_length=4 * WINDOWS_MOST)] = b""
    data: Digest = b""  # the fingerprint of what was read
    why_not: ShortReason = ""  # a `ScoreCause`
    text: Annotated[tuple[Count, ...], Meta(max_length=TEXT_GIVEN + TEXT_MADE)] = ()  # token ids


def text_lengths(context: int, row: int) -> tuple[int, int]:
    """Ids that are given, of a row of so many, and that a model of this context goes on with at most."""
    given = min(TEXT_GIVEN, max(1, min(context, row) // 2))
    return given, min(TEXT_MADE, context - given)


def losses_of(raw: bytes, count: int) -> tuple[float, ...] | None:
    """None: these are not so many losses."""
    if len(raw) != 4 * count:
        return None
    found = struct.unpack(f"<{count}f", raw)
    return found if all(0.0 <= each <= NATS_MOST for each in found) else None


# What a script measures itself.
FIGURE_NAME: Final = rf"\A[A-Za-z0-9_./-]{{1,{FIGURE_CHARS}}}\Z"
Figures = Annotated[
    tuple[tuple[Annotated[str, Meta(pattern=FIGURE_NAME)], float], ...], Meta(max_length=FIGURES_MOST)
]


class FiguresBeat(ModeSection, frozen=True, tag="figures"):
    """The newest value of each, by my word: shown beside my name, and nothing follows from it."""

    figures: Figures


# ---- pace -------------------------------------------------------------------------------------------------
# Those that are slower than most end their periods when the others wait.


class PaceBeat(ModeSection, frozen=True, tag="pace"):
    """These fragments I have frozen before I had taken all steps of the period, so I set nobody the pace."""

    early: Annotated[tuple[FragmentNo, ...], Meta(min_length=1, max_length=FRAGMENTS_MAX)]


class CallTick(ModeSection, frozen=True, tag="call"):
    """Rounds that wait for its receiver: of which fragments, from which version of each, and for how long by now."""

    rounds: Annotated[
        tuple[tuple[FragmentNo, Count, Annotated[float, Meta(ge=0)]], ...],
        Meta(min_length=1, max_length=FRAGMENTS_MAX),
    ]


# ---- mesh -------------------------------------------------------------------------------------------------
# Rounds in groups, whose sums come together at a root for each chunk.


class MeshReport(ModeSection, frozen=True, tag="mesh"):
    sums: GroupSums | None = None  # my group's
    # Of groups' sums, for all chunks that I am the root of.
    dots: DotProducts | None = None
    # Of the sums that went into what was merged here, chunk by chunk, the first bytes of their hashes.
    tags: HashList = b""


class EncodeTick(ModeSection, frozen=True, tag="mesh"):
    """Where sums of groups are compared."""

    decision_no: Count  # results of this decision may be encoded


# ---- reach ------------------------------------------------------------------------------------------------
# How members meet that can't dial each other, past their routers or at a relay.

# Of two sessions: coordinator/roster/ways.py.
PairName = Annotated[bytes, Meta(min_length=16, max_length=16)]
Others = Annotated[tuple[PeerName, ...], Meta(max_length=WAYS_MOST)]


class RelayOffer(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The relay beside a member, by that member's word.  Whether anything comes through is tried, its rate is believed
    up to a bound, and what it counted is shown to people."""

    port: Annotated[int, Meta(ge=0, le=65535)]  # 0: it does not listen
    bytes_per_s: Count
    number: Count  # of the newest order that it follows; 0: of none
    pairs: Count = 0  # joined there now
    waiting: Count = 0
    moved_bytes: Count = 0
    refused: Count = 0
    why_not: ShortReason = ""  # a `RelayCause`: it does not listen

    @property
    def told(self) -> str:
        """Why it does not, for people."""
        return RelayCause.of(self.why_not).told if self.why_not else ""


class RelayOrder(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """To a member that offers a relay: for whom it is."""

    number: Annotated[int, Meta(ge=1, lt=1 << 62)]
    incarnation: Count  # of the coordinator, whose tickets are good
    public: Hash  # the key that signs them
    pairs: Annotated[tuple[PairName, ...], Meta(max_length=WAYS_MOST)]  # all that may meet there from now on
    why_not: ShortReason = ""  # nobody is sent there


# How often both sides of a `Meet` connect, and how long after one another.
MEET_TRIES, MEET_EVERY_S = 3, 1.0


class Meet(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Whom I can't dial and who can't dial me: from that instant on, each of us connects to the other."""

    peer: PeerName
    # HOST:PORT from which its own connections to the coordinator come, as seen there.
    endpoint: Annotated[str, Meta(max_length=ADDRESS_CHARS)]
    at_s: Annotated[float, Meta(ge=0)]  # on the coordinator's clock, as `heard_s` of a tick


class Look(MessageBase, frozen=True, kw_only=True):
    """See from where this connection comes: it is another one than that of my beats.  Its key says whose it is."""


class ReachBeat(ModeSection, frozen=True, tag="reach"):
    # A connection stands that we made by meeting; it counts where both say so.
    punched: Others = ()
    relay: RelayOffer | None = None  # that I offer
    unmet: Others = ()  # at the relay told


class ReachTick(ModeSection, frozen=True, tag="reach"):
    look: bool = False  # show me from where your line's port is seen: see `Look`
    # With whom to connect at which instant; told again until all tries are over.
    meets: Annotated[tuple[Meet, ...], Meta(max_length=MEETS_AT_ONCE)] = ()
    relay: RelayOrder | None = None  # for the one that I offer, until my beat shows that I know it


# ---- recovery ---------------------------------------------------------------------------------------------
# Which older versions of the run are left on members' disks.


class Shelved(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A version that a peer can bring without anybody's help: a checkpoint that lies whole on its disk or in its store,
    or its own state as it was before the last round.

    By its word alone, which may be a lie or out of date: it counts for something once the state is read and shown."""

    version: Count
    first: Annotated[int, Meta(ge=0, lt=FRAGMENTS_MAX)]  # fragment
    # The first bytes of the digests of that fragment and those behind it: the same version of another era is another
    # state.
    tags: Annotated[bytes, Meta(min_length=SHELVED_TAG_BYTES, max_length=SHELVED_TAG_BYTES * FRAGMENTS_MAX)]

    @staticmethod
    def of(version: int, first: int, digests: Sequence[bytes]) -> Shelved:
        return Shelved(version, first, b"".join(digest[:SHELVED_TAG_BYTES] for digest in digests))

    def is_of(self, fragment: int, digest: bytes) -> bool:
        """This digest of the fragment."""
        at = (fragment - self.first) * SHELVED_TAG_BYTES
        return at >= 0 and self.tags[at : at + SHELVED_TAG_BYTES] == digest[:SHELVED_TAG_BYTES] != b""


ShelvedList = Annotated[tuple[Shelved, ...], Meta(max_length=SHELVED_TOLD)]


class ShelfBeat(ModeSection, frozen=True, tag="shelf"):
    """Versions that I can bring without anybody's help, beside those that I hold."""

    shelf: ShelvedList


# ---- restoring --------------------------------------------------------------------------------------------
# What members keep for a coordinator that loses its disk, and give to the next one.


class AskKept(MessageBase, frozen=True, kw_only=True):
    """From a coordinator that puts its run together again: what is the newest that you keep below this?"""

    nonce: Hash
    below: Count


class KeptReceipts(MessageBase, frozen=True, kw_only=True):
    """The answer, signed over the nonce by who gives it; what is kept has the run's own signature."""

    identity: Hash
    kept: KeptCommit | None  # none older, or none at all
    commits: Annotated[tuple[Commit, ...], Meta(max_length=64)] = ()  # that it names
    model: ModelSchema | None = None
    manifest: Annotated[bytes, Meta(max_length=CONTROL_BIN_BYTES)] = b""  # that the run began with
    amendments: Amendments = ()
    signature: Annotated[bytes, Meta(max_length=64)] = b""


class Keep(ToMemberBase, frozen=True, kw_only=True):
    """For whom its beat shows to lack it."""

    kept: KeptCommit


class KeptBeat(ModeSection, frozen=True, tag="kept"):
    number: Count  # of the newest head that I keep


# ---- slow lines -------------------------------------------------------------------------------------------
# Whose work is sent ahead of its round, and to whom.


class AheadPlan(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Who sends its contributions ahead of the rounds they are for, because its line is slow; to whom, and how encoded.

    `number` is a name of all the rest: equal plans have equal ones, also those of a coordinator that was restarted.
    """

    number: Annotated[int, Meta(ge=1, lt=1 << 62)]
    senders: Annotated[tuple[PeerName, ...], Meta(min_length=1, max_length=MEMBERS_PER_ROUND)]
    # Of each sender's contribution.
    codecs: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MEMBERS_PER_ROUND)]
    members: Annotated[tuple[PeerName, ...], Meta(min_length=1, max_length=MEMBERS_PER_ROUND)]  # who may own
    # index of a chunk within the fragment -> index in members
    owners: Annotated[tuple[int, ...], Meta(max_length=CHUNKS_PER_FRAGMENT)]

    def codec_of(self, sender: str) -> str:
        """Empty: it sends nothing ahead."""
        return self.codecs[self.senders.index(sender)] if sender in self.senders else ""

    def owner_of(self, place: int) -> str:
        return self.members[self.owners[place]]


class AheadBeat(ModeSection, frozen=True, tag="ahead"):
    number: Count  # of the newest `AheadPlan` that I know


class AheadTick(ModeSection, frozen=True, tag="ahead"):
    """To a member that has a part in such a plan."""

    number: Count  # of the plan
    plan: AheadPlan | None = None  # if its beat shows that it does not know it


# ---- standby ----------------------------------------------------------------------------------------------
# A second coordinator waits for the end of the one that leads.


class StandsBy(MessageBase, frozen=True, kw_only=True):
    """Whoever knocks here, or asks for the status: another coordinator leads this run, and this one waits for its end.

    Who may lie: nobody but who holds the run's key.
    """

    # Of the one that leads, signed by the run's key: see Whereabouts in join_url.py.  Empty: nobody leads just now.
    whereabouts: Annotated[bytes, Meta(max_length=WHEREABOUTS_BYTES)]
