"""All that peers and coordinator say to each other on the control plane.  Types and bounds only.

Messages are snapshots, or name the older word from which they differ: a lost one is made good by the next beat, and a
late or repeated one does no harm.  Beats, ticks and reports leave out what is as usual.  Every member message carries
session and a growing `seq`; so does every answer.  Read together with round_words.py, whose types appear here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, cast

import msgpack
import msgspec
from msgspec import Meta, Struct, field

from farflung.protocol import limits
from farflung.protocol.digests import LENGTH_BYTES
from farflung.protocol.errors import FrameError, LeaveCause, Verdict
from farflung.protocol.limits import (
    ADDRESS_CHARS,
    BEAT_LONGEST_S,
    CHUNKS_PER_FRAGMENT,
    CONTROL_BIN_BYTES,
    FRAGMENTS_MAX,
    MEMBERS_PER_ROUND,
    PART_BYTES,
    ROSTER_GONE_MOST,
    ROSTER_MOST,
    WAYS_MOST,
    WHEREABOUTS_BYTES,
)
from farflung.protocol.mode_words import (
    AheadBeat,
    AheadTick,
    AskKept,
    AuditChunks,
    Audited,
    BatchBeat,
    BatchTick,
    CallTick,
    EncodeTick,
    FiguresBeat,
    Keep,
    KeptBeat,
    KeptReceipts,
    Look,
    MeshReport,
    PaceBeat,
    ReachBeat,
    ReachTick,
    ScoreBeat,
    ScoreTick,
    ServeTick,
    ShelfBeat,
    StandsBy,
)
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import (
    SECTIONS_MOST,
    Bytes32,
    Commit,
    Contact,
    Count,
    Decision,
    Digest,
    DotProducts,
    Forward,
    FragmentNo,
    FromMemberBase,
    HashList,
    Mask,
    MessageBase,
    PeerName,
    Plan,
    Reason,
    RelayRoute,
    Session,
    ShortText,
    Tokens,
    ToMemberBase,
    Used,
    Version,
)
from farflung.protocol.signing import PROOF_BYTES, Amendments, KeptCommit, SignedHead

LeaseIds = Annotated[tuple[int, ...], Meta(max_length=256)]
Useds = Annotated[tuple[Used, ...], Meta(max_length=256)]
UNKNOWN_LENGTH = (1 << 62) - 1  # samples of a stream that nobody has read to its end yet
Nonce = Annotated[bytes, Meta(max_length=32)]  # empty: none is told
TAG_BYTES = 8  # of a nonce, to tell which one was meant
ShownTag = Annotated[bytes, Meta(max_length=TAG_BYTES + 32)]
# What modes may add to these, one of each.
OfBeat = BatchBeat | PaceBeat | ScoreBeat | FiguresBeat | ReachBeat | ShelfBeat | KeptBeat
OfFragmentBeat = AheadBeat
OfTick = BatchTick | ServeTick | CallTick | ScoreTick | ReachTick
OfFragmentTick = AheadTick | EncodeTick
OfProgress = MeshReport
_OneOfEach = Meta(max_length=SECTIONS_MOST)


# ---- at the door: anyone may speak here ------------------------------------------------------------


class Knock(MessageBase, frozen=True, kw_only=True):
    protocol: Count  # the version that I speak
    run: PeerName
    helps: bool = False  # I come without a trainer, and have to be told what the run's model is


class Challenge(MessageBase, frozen=True, kw_only=True):
    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]
    run_id: Session
    manifest: Annotated[bytes, Meta(max_length=CONTROL_BIN_BYTES)]
    model: ModelSchema | None = None  # to who comes without a trainer; None: nobody brought it yet
    protocol: Count


class Hello(MessageBase, frozen=True, kw_only=True):
    """Who I am, signed over the challenge; binds the CURVE key of this session to the identity."""

    protocol: Count
    run_id: Session
    identity: Bytes32
    key: Bytes32
    address: Annotated[str, Meta(max_length=ADDRESS_CHARS)]
    software: ShortText
    manifest: Bytes32
    model: ModelSchema
    # Which fragments it holds, in order.  Where a model is cut into stages: those that it could hold, the one that it
    # held last first; of which its welcome names one.
    fragments: Annotated[tuple[FragmentNo, ...], Meta(min_length=1, max_length=FRAGMENTS_MAX)]
    version: Version  # of the first of these; the first beat tells of all
    digest: Digest
    process: Session  # random per agent process: a restart is not a reconnection
    token: ShortText  # of an invitation; empty: none
    signature: Annotated[bytes, Meta(max_length=64)]
    # Where a model is cut: all stages that it could hold, also when it holds one of them.
    fits: Annotated[tuple[FragmentNo, ...], Meta(max_length=FRAGMENTS_MAX)] = ()
    helps: bool = False  # I have no trainer: I own chunks and give state, and contribute nothing
    kept: SignedHead | None = (
        None  # the newest that I keep: a coordinator that started on an old copy hears of it
    )


class Welcome(MessageBase, frozen=True, kw_only=True):
    session: Session
    incarnation: Count
    member_port: Annotated[int, Meta(ge=1, le=65535)]
    # Which fragments it holds from now on: all of its hello, or one stage of them.
    fragments: Annotated[tuple[FragmentNo, ...], Meta(min_length=1, max_length=FRAGMENTS_MAX)]
    # Whom to dial already: the first tick comes several round trips later.  Empty in a crowd: the tick tells it.
    roster: Annotated[tuple[Contact, ...], Meta(max_length=ROSTER_MOST)]
    # Where the coordinator is to be found, by its own word: see Whereabouts in join_url.py.
    whereabouts: Annotated[bytes, Meta(max_length=WHEREABOUTS_BYTES)]


class Refuse(MessageBase, frozen=True, kw_only=True):
    code: Annotated[str, Meta(max_length=32)]
    reason: Reason
    retry_after_s: float


class AskStatus(MessageBase, frozen=True, kw_only=True):
    run: PeerName


class StatusReply(MessageBase, frozen=True, kw_only=True):
    status: Annotated[bytes, Meta(max_length=CONTROL_BIN_BYTES)]  # JSON


class Probe(MessageBase, frozen=True, kw_only=True):
    """How is the line to here, and can I be dialled?  Asked by `farflung doctor` before anybody joins."""

    padding: Annotated[bytes, Meta(max_length=CONTROL_BIN_BYTES)]
    want: Annotated[int, Meta(ge=0, le=CONTROL_BIN_BYTES)]  # bytes of padding in the answer
    address: Annotated[str, Meta(max_length=ADDRESS_CHARS)]  # to dial, with this key; empty: do not
    key: Annotated[bytes, Meta(max_length=32)]
    look: bool = False  # I am a member, and come from the port from which I meet others


class Probed(MessageBase, frozen=True, kw_only=True):
    came_from: Annotated[str, Meta(max_length=128)]  # the caller's address as it is seen here
    wall_s: float  # this machine's clock, seconds since 1970
    padding: Annotated[bytes, Meta(max_length=CONTROL_BIN_BYTES)]
    dialled: ShortText  # yes, no, or why it was not tried; empty: not asked
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # of the caller, as it is seen here; 0: not known


# ---- from a member ---------------------------------------------------------------------------------


class FragmentBeat(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where I am with one fragment."""

    fragment: FragmentNo
    version: Version
    digest: Digest
    round_no: Count  # of the round I am in, 0 if none
    epoch: Count
    decision_no: Count
    ready: bool
    need: Annotated[tuple[int, ...], Meta(max_length=8)]  # commits I lack, by version
    dropped: Count = 0  # the newest round of which I know that the guard threw its work away
    shown: ShownTag = b""  # that I hold this version: see `proof_of_holding`
    sections: Annotated[tuple[OfFragmentBeat, ...], _OneOfEach] = ()


class Beat(FromMemberBase, frozen=True, kw_only=True, omit_defaults=True):
    """Where I am.  Everything that the coordinator may have to repeat follows from it."""

    roster_no: Count
    # Of each fragment that I hold, in the order of my hello.
    fragments: Annotated[tuple[FragmentBeat, ...], Meta(min_length=1, max_length=FRAGMENTS_MAX)]
    phase: Annotated[str, Meta(max_length=16)]  # a Phase of protocol/states.py
    step: Count
    tokens: Tokens
    loss: float | None = None
    tx_bytes: Count
    rx_bytes: Count
    up_bytes_per_s: Count  # what its line can carry, as far as it has seen; 0: not known
    down_bytes_per_s: Count
    have: LeaseIds = ()
    want: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # samples I would like to lease beyond these
    samples: Count  # size of my data set, 0 if the run does not lease mine; UNKNOWN_LENGTH: it is a stream
    rough: bool  # the rate up comes from no round yet: from a probe, from limits, or it is at least so much
    era: Count  # what I say of versions is meant in this era: see RolledBack in coordinator/ledger/records.py
    saved: Version  # the newest version of which I wrote a checkpoint
    unsure: bool = False  # tell me all my leases, whatever I have: I lost track of how far they are committed
    leaving: bool = False  # I stay for the rounds that I am in, and begin no other
    data: Digest = b""  # the fingerprint of my data set; empty: it has none
    amended: Count = 0  # amendments that I know
    lacks_start: bool = False  # I can't found the run: my owner has not named what it begins with
    forward: Forward | None = None  # what my trainer's model computes
    sections: Annotated[tuple[OfBeat, ...], _OneOfEach] = ()

    def of(self, fragment: int) -> FragmentBeat | None:
        """None of a fragment that its sender does not hold."""
        # Asked of every member in every turn: of a peer that holds all, the place is the number.
        if fragment < len(self.fragments) and self.fragments[fragment].fragment == fragment:
            return self.fragments[fragment]
        return next((each for each in self.fragments if each.fragment == fragment), None)


class Sent(FromMemberBase, frozen=True, kw_only=True):
    """SCATTER: what my contribution is and what went into it."""

    round_no: Count
    hashes: HashList
    tokens: Tokens
    steps: Count
    loss: float | None
    used: Useds
    seat: Count  # of a synchronous batch: whose sums these are, and
    counted: Mask  # which microbatches are in them
    signature: Annotated[bytes, Meta(max_length=64)]  # of its author, over the rest: signed_words.py


class ProgressReport(FromMemberBase, frozen=True, kw_only=True, omit_defaults=True):
    """DECIDE and GATHER: what I can prove to hold."""

    round_no: Count
    decision_no: Count
    held: Annotated[dict[str, tuple[Mask, Bytes32]], Meta(max_length=MEMBERS_PER_ROUND)]
    # Whose bytes are of no use, and why (P9).
    refused: Annotated[dict[PeerName, Verdict], Meta(max_length=MEMBERS_PER_ROUND)] = field(
        default_factory=dict
    )
    cut_off: Annotated[tuple[PeerName, ...], Meta(max_length=MEMBERS_PER_ROUND)] = ()  # should own nothing
    merged: Mask = b""
    merged_hashes: HashList = b""
    got: Mask
    got_hash: Bytes32
    dots: DotProducts | None = None  # of all chunks that I own, before the decision
    inputs: Digest = b""  # which contributions went into what was merged here, and my signature of both
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    # Where a gradient is clipped: of each merged result its length (digests.py), proven by who holds it.
    lengths: Annotated[bytes, Meta(max_length=LENGTH_BYTES * CHUNKS_PER_FRAGMENT)] = b""
    # The same as `got_hash` for each owner's results alone, where every result is here and the commit does not come.
    got_by: Annotated[dict[PeerName, Bytes32], Meta(max_length=MEMBERS_PER_ROUND)] = field(
        default_factory=dict
    )
    held_since: Count = 0  # `held` is only what came since that report of mine; 0: it is all
    sections: Annotated[tuple[OfProgress, ...], _OneOfEach] = ()


class Shown(FromMemberBase, frozen=True, kw_only=True):
    """A part of the bytes that the coordinator asked for, from `start` on."""

    question: Count
    start: Count
    total: Count  # bytes of the whole; 0: I do not have it
    part: Annotated[bytes, Meta(max_length=PART_BYTES)]
    signature: Annotated[bytes, Meta(max_length=64)]  # where it claims something: signed_words.py


class Leave(FromMemberBase, frozen=True, kw_only=True):
    reason: Reason  # a `LeaveCause`

    @property
    def cause(self) -> LeaveCause:
        return LeaveCause.of(self.reason)


# ---- to a member -----------------------------------------------------------------------------------


class Lease(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Samples [start, stop) of one epoch's order; those before `upto` are committed already, in every fragment."""

    lease: Count
    epoch: Count
    start: Count
    stop: Count
    upto: Count
    uptos: Annotated[tuple[Count, ...], Meta(max_length=FRAGMENTS_MAX)] = ()  # where the fragments differ

    @classmethod
    def at(cls, lease: int, epoch: int, start: int, stop: int, uptos: tuple[int, ...]) -> Lease:
        upto = min(uptos)
        return cls(lease, epoch, start, stop, upto, uptos if max(uptos) > upto else ())

    def reached(self, fragments: int) -> tuple[int, ...]:
        """How far each fragment has learned from it."""
        return self.uptos if len(self.uptos) == fragments else (self.upto,) * fragments


class FragmentTick(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where the run is with one fragment."""

    fragment: FragmentNo
    version: Count
    digests: Annotated[tuple[tuple[int, Bytes32], ...], Meta(max_length=16)]  # recent versions' digests
    verified: bool
    donors: Annotated[tuple[str, ...], Meta(max_length=16)]
    round_no: Count  # the round in flight that counts on me, 0 if none
    sent_seen: bool
    progress_seen: Count  # seq of the newest progress report I acted on
    compare: Annotated[bytes, Meta(max_length=MEMBERS_PER_ROUND // 8)] = b""  # whom owners are to, if not all
    dropped: Count = 0  # the newest round whose work the guard threw away
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)] = b""  # that the run has this digest, signed
    nonce_for: Version = -1  # hold this version? then show it under this nonce
    nonce: Nonce = b""
    refuted: Digest = b""  # who says that it holds this does not hold the run's state: that was proven
    # Who catches up as I do: what they have of the state they give on.
    fellows: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    sections: Annotated[tuple[OfFragmentTick, ...], _OneOfEach] = ()


class Tick(ToMemberBase, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a beat: where the run is and what to do now."""

    answers: Count  # the beat's seq
    # When it came, on the coordinator's clock: shows how full the way there is.
    heard_s: Annotated[float, Meta(ge=0)]
    # Of each fragment that its receiver holds.
    fragments: Annotated[tuple[FragmentTick, ...], Meta(min_length=1, max_length=FRAGMENTS_MAX)]
    goal: Annotated[str, Meta(max_length=16)]  # a Goal of protocol/states.py, of the least advanced fragment
    reason: Reason
    roster_no: Count
    roster: Annotated[tuple[Contact, ...], Meta(max_length=ROSTER_MOST)] | None = None
    leases: Annotated[tuple[Lease, ...], Meta(max_length=256)] | None = None
    void: LeaseIds = ()
    era: Count  # how often the run went back to an older state: what peers say of an older era is void
    advice: Reason = ""  # what its owner should know, whatever it is to do
    era_because: Reason = ""  # why it began, if my beat was of another one
    # With a roster: how those are reached whom I can't dial and who can't dial me.
    ways: Annotated[tuple[RelayRoute, ...], Meta(max_length=WAYS_MOST)] = ()
    amendments: Amendments = ()  # of the run's terms, after those that my beat says that I know
    # So long after each beat the next one is due, in rounds if one counts on me, else outside of them; 0: by the terms.
    beat_s: Annotated[float, Meta(ge=0, le=BEAT_LONGEST_S)] = 0.0
    # 0: the roster is whole.  Else it is what is new or other since the roster of that number, and whom there was since
    # then and is no more: good for every roster from that number on.
    roster_since: Count = 0
    roster_gone: Annotated[tuple[PeerName, ...], Meta(max_length=ROSTER_GONE_MOST)] = ()
    sections: Annotated[tuple[OfTick, ...], _OneOfEach] = ()


class OpenRound(ToMemberBase, frozen=True, kw_only=True):
    plan: Plan
    amended: Count = 0  # the amendment that holds in it: whoever does not know it takes no part yet


class Decided(ToMemberBase, frozen=True, kw_only=True):
    decision: Decision


class Committed(ToMemberBase, frozen=True, kw_only=True):
    commit: Commit
    nonce: Nonce  # under which to show that one holds the version that it makes
    amended: Count = 0  # the amendment that held in its round
    kept: KeptCommit | None = None  # in one message: nobody goes on with a commit that it can't prove


class Aborted(ToMemberBase, frozen=True, kw_only=True):
    round_no: Count
    reason: Reason


class What(StrEnum):
    """What the coordinator may ask a member to show, when members contradict each other."""

    HASHES = "hashes"  # of the fragment's chunks at that version, one after the other
    BEFORE = "before"  # the chunk as it was when its state was last confirmed: that version in 8 bytes, then the state
    STATE = "state"  # the chunk at that version
    RESULT = "result"  # of the chunk, which made that version
    CONTRIBUTION = "contribution"  # of that peer to that round, one chunk
    SUM = "sum"  # the same of a mesh: what that peer added up of its group


class Show(ToMemberBase, frozen=True, kw_only=True):
    """Prove it: the only bytes of a model that a coordinator ever sees are one chunk's, in a dispute."""

    question: Count
    what: What
    fragment: FragmentNo
    version: Count
    chunk: Count  # of the model
    start: Count  # from this byte on; those before it have come
    round_no: Count  # of a contribution or a sum, else 0
    peer: PeerName  # whose contribution or sum


class Gone(ToMemberBase, frozen=True, kw_only=True):
    """This session is over; say hello again (or not: `final`)."""

    reason: Reason
    final: bool


DOOR_IN: dict[str, type[Struct]] = {
    "knock": Knock,
    "hello": Hello,
    "ask_status": AskStatus,
    "probe": Probe,
    "kept": KeptReceipts,
}
DOOR_OUT: dict[str, type[Struct]] = {
    "challenge": Challenge,
    "welcome": Welcome,
    "refuse": Refuse,
    "stands_by": StandsBy,
    "status": StatusReply,
    "probed": Probed,
    "ask_kept": AskKept,
}
MEMBER_IN: dict[str, type[Struct]] = {
    "beat": Beat,
    "sent": Sent,
    "progress": ProgressReport,
    "shown": Shown,
    "audited": Audited,
    "leave": Leave,
    "look": Look,
}
MEMBER_OUT: dict[str, type[Struct]] = {
    "tick": Tick,
    "open": OpenRound,
    "decided": Decided,
    "committed": Committed,
    "aborted": Aborted,
    "show": Show,
    "audit": AuditChunks,
    "gone": Gone,
    "keep": Keep,
}

KINDS: dict[str, type[Struct]] = {**DOOR_IN, **DOOR_OUT, **MEMBER_IN, **MEMBER_OUT}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}

FromMember = Beat | Sent | ProgressReport | Shown | Audited | Leave
ToMember = Tick | OpenRound | Decided | Committed | Aborted | Show | AuditChunks | Gone | Keep
FromDoor = Knock | Hello | AskStatus | Probe | KeptReceipts
ToDoor = Challenge | Welcome | Refuse | StandsBy | StatusReply | Probed | AskKept
Message = FromMember | Look | ToMember | FromDoor | ToDoor


def kind_of(message: Message) -> str:
    return _KIND_OF[type(message)]


# ---- envelope ----------------------------------------------------------------------------------------------
# The control envelope: one msgpack map per message, bounded and typed.
#
# `encode` and `decode` are used by the coordinator, the peers and the simulator. Parsing is msgpack's own,
# with explicit limits; types are checked by msgspec against the schemas above. Nothing is executed,
# no extension types are known, and every failure is a FrameError that names its counter (P8).

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    raw = _encoder.encode({"kind": kind_of(message), "body": message})
    if len(raw) > limits.CONTROL_FRAME_BYTES:
        raise ValueError(
            f"{kind_of(message)} message of {len(raw)} bytes is over {limits.CONTROL_FRAME_BYTES}"
        )
    return raw


def decode(raw: bytes, allowed: frozenset[str]) -> Message:
    """One message of an allowed kind, or a FrameError."""
    if len(raw) > limits.CONTROL_FRAME_BYTES:
        raise FrameError(
            Verdict.OVERSIZE, f"control frame of {len(raw)} bytes, at most {limits.CONTROL_FRAME_BYTES}"
        )
    envelope = _unpack(raw)
    if not isinstance(envelope, dict) or envelope.keys() != {"kind", "body"}:
        raise FrameError(Verdict.MALFORMED, "control frame is not a map of kind and body")
    kind = envelope["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise FrameError(Verdict.MALFORMED, f"unknown kind {str(kind)[:40]!r}")
    if kind not in allowed:
        raise FrameError(Verdict.UNAUTHORISED, f"{kind} is not accepted here")
    try:
        return cast(Message, msgspec.convert(envelope["body"], KINDS[kind], strict=True))
    except msgspec.ValidationError as error:
        raise FrameError(Verdict.MALFORMED, f"{kind}: {error}") from None


def _unpack(raw: bytes) -> Any:
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_str_len=limits.CONTROL_STR_BYTES,
            max_bin_len=limits.CONTROL_BIN_BYTES,
            max_array_len=limits.CONTROL_ARRAY_LEN,
            max_map_len=limits.CONTROL_MAP_LEN,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise FrameError(
            Verdict.MALFORMED, f"not msgpack within the limits: {type(error).__name__}"
        ) from None


# ---- orders ------------------------------------------------------------------------------------------------
# The words between a run's operator and its coordinator: orders, and the reply.
#
# Sent over the operator's socket (coordinator/operator_socket.py) by console/operator_commands.py; obeyed in
# coordinator/run/operator_orders.py and by modes. Data only.

Text = Annotated[str, Meta(max_length=500)]
Lasts = Annotated[float, Meta(gt=0, le=100 * 365 * 86400.0)]


class _Order(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do"):
    pass


class Invite(_Order, frozen=True, kw_only=True, tag="invite"):
    uses: Annotated[int, Meta(ge=1, le=10_000)]
    lasts_s: Lasts
    note: Text = ""


class Invites(_Order, frozen=True, kw_only=True, tag="invites"):
    pass


class Revoke(_Order, frozen=True, kw_only=True, tag="revoke"):
    which: Text  # the invitation's id or the beginning of it, its note, or the join URL that has it
    reason: Text
    guests: bool = False  # those that came in by it have to go, and need another one


class Kick(_Order, frozen=True, kw_only=True, tag="kick"):
    who: Text
    reason: Text


class Ban(_Order, frozen=True, kw_only=True, tag="ban"):
    who: Text
    reason: Text
    lasts_s: Lasts
    network: bool = False  # everybody else from its /24 or /48, too


class Unban(_Order, frozen=True, kw_only=True, tag="unban"):
    who: Text


class Bans(_Order, frozen=True, kw_only=True, tag="bans"):
    pass


class Pause(_Order, frozen=True, kw_only=True, tag="pause"):
    reason: Text


class Resume(_Order, frozen=True, kw_only=True, tag="resume"):
    pass


class Drain(_Order, frozen=True, kw_only=True, tag="drain"):
    pass


class Amend(_Order, frozen=True, kw_only=True, tag="amend"):
    """What may change while the run goes on is to be as in this run.toml."""

    manifest: Annotated[bytes, Meta(max_length=40 * 1024)]  # all of it, as JSON
    at: Annotated[int, Meta(ge=0)] | None = None  # in rounds from this version on; None: from the next one


class GoBack(_Order, frozen=True, kw_only=True, tag="go_back"):
    """To the newest version that somebody here holds or has a checkpoint of, without those who are away."""

    to: Annotated[int, Meta(ge=0)] | None = None  # 0: found the run anew, where nothing is left of it
    reason: Text = ""
    sure: bool = False  # else the answer says what would be lost, and nothing is done


class Rewind(_Order, frozen=True, kw_only=True, tag="rewind"):
    """Undo the rounds after this version for good."""

    to: Annotated[int, Meta(ge=0)]
    reason: Text = ""
    sure: bool = False


Order = (
    Invite | Invites | Revoke | Kick | Ban | Unban | Bans | Amend | Pause | Resume | Drain | GoBack | Rewind
)


class Reply(Struct, frozen=True, kw_only=True):
    """What was done, in words; `found`: the same for programs."""

    ok: bool = True
    text: str = ""
    found: dict[str, Any] = {}
