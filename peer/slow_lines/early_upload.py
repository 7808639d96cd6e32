"""Work that a peer with a slow line sends ahead of its round: which frozen work it is, from when on it is ready.  Pure.

Where the mode begins at a peer: part of a replica.  The bytes and their owners are `SendingAhead`'s and `KeptEarly`'s;
here they are held against what the trainer has frozen.  A parcel stays what it
is while the run goes on without it: the trainer loads new versions and freezes newer work, and when a commit has used
the parcel, it keeps what came after (P6).  Until the coordinator opens a round with this peer, a parcel is no
promise, and may be dropped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from farflung.collectives.round.effects import SendFrame
from farflung.collectives.round.pieces import ChunkPiece
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import Effect, Encode, Resolve
from farflung.peer.machine.fragment_rounds import EarlyWork
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload, Trait, with_payload
from farflung.protocol.limits import FRAGMENTS_MAX
from farflung.protocol.messages import FragmentTick
from farflung.protocol.mode_words import AheadBeat, AheadPlan, AheadTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Plan, section
from farflung.protocol.run_terms import Attached

# ---- parcels -----------------------------------------------------------------------------------------------
# A contribution that is sent ahead of the round it is for: at the member whose line is slow, and at owners.
# Pure.
#
# Where one line is much slower than most, a contribution over it would hold every round up. So that member
# encodes what its trainer froze as soon as it is frozen, gives each chunk to the one who will own it
# (`AheadPlan`, the coordinator's word), and takes part in the first round that begins when all of it is
# there. Nothing is decided by that: owners keep bytes, and the member may think better of it at any time. In
# the round it names them by their hashes, and they count like any contribution.
#
# Owned by a replica of the peer machine. Must not know what is frozen, rounds, or why the coordinator chose
# this member.

# An owner that says nothing of a chunk for so long gets it again; what is still on its way the data plane keeps single.
UNANSWERED_S = 30.0
# With nothing more delivered for so long an owner is not reached: in a round that can be said, and it loses its chunks.
STUCK_S = 600.0
# Once most owners have all of theirs, the last few may take so many times what that took, and so long at least.
LAST_TIMES, LAST_LEAST_S = 2.0, 60.0


class EarlyKind(FrameKind):
    AHEAD = 29  # member -> owner: one chunk of an encoded pseudo-gradient, before the round that it is for
    AHEAD_HELD = 30, Trait.BARE  # owner -> member: "of this chunk I keep the bytes with this hash"
    AHEAD_COUNTS = 31, Trait.BARE  # member -> owner: "those bytes are my contribution to this round"


@dataclass
class Parcel:
    """One contribution on its way to those who will own its chunks."""

    number: int
    codec: str
    count: int  # of its chunks
    pieces: dict[int, ChunkPiece] = field(default_factory=dict)  # by chunk, as far as it is encoded
    held: dict[int, str] = field(default_factory=dict)  # chunk -> who said that it keeps it
    on_way: dict[int, tuple[str, float]] = field(default_factory=dict)  # chunk -> (to whom, since when)
    # So many chunks were held when it was looked at, and since when no more.
    moved: tuple[int, float] = (-1, 0.0)
    stuck: bool = False
    began_at: float = -1.0
    last: frozenset[str] = frozenset()  # owners that lack something, where most lack nothing
    last_since: float = 0.0  # it is these

    @property
    def encoded(self) -> bool:
        return len(self.pieces) == self.count


class SendingAhead:
    """At the member whose line is slow."""

    def __init__(self, me: str, run_tag: bytes, fragment: Fragment) -> None:
        self._me, self._run_tag, self._fragment = me, run_tag, fragment
        self.plan: AheadPlan | None = None
        self.parcel: Parcel | None = None
        self._parcels = 0

    @property
    def codec(self) -> str:
        """In which I am to send ahead; empty: I am not to."""
        return self.plan.codec_of(self._me) if self.plan is not None else ""

    @property
    def delivered(self) -> bool:
        """Every chunk is with the one who is to own it."""
        plan, parcel = self.plan, self.parcel
        if plan is None or parcel is None or not parcel.encoded:
            return False
        there = all(parcel.held.get(place) == plan.owner_of(place) for place in parcel.pieces)
        return there or parcel.stuck

    @property
    def order(self) -> tuple[int, ...]:
        """In which chunks are best encoded: an owner's after another's, so that no line waits for one of them."""
        assert self.plan is not None
        by_owner: dict[int, list[int]] = {}
        for place, owner in enumerate(self.plan.owners):
            by_owner.setdefault(owner, []).append(place)
        return tuple(place for row in zip_longest(*by_owner.values()) for place in row if place is not None)

    def begin(self) -> None:
        self._parcels += 1
        self.parcel = Parcel(self._parcels, self.codec, self._fragment.count)

    def on_encoded(self, number: int, payloads: Mapping[int, Payload]) -> bool:
        if self.parcel is None or self.parcel.number != number:
            return False
        pieces = {place: ChunkPiece(payload, hash_bytes(payload)) for place, payload in payloads.items()}
        self.parcel.pieces.update(pieces)
        return True

    def send(self, now: float) -> list[SendFrame]:
        """One chunk at a time to each owner: what is handed out to the data plane can't be called back."""
        plan, parcel = self.plan, self.parcel
        if plan is None or parcel is None:
            return []
        if parcel.moved[0] != len(parcel.held):
            parcel.moved = len(parcel.held), now
        parcel.stuck = now - parcel.moved[1] >= STUCK_S or self._waits_for_a_few(plan, parcel, now)
        busy = {to for to, since in parcel.on_way.values() if now - since < UNANSWERED_S}
        frames: list[SendFrame] = []
        for place, piece in parcel.pieces.items():
            owner = plan.owner_of(place)
            if parcel.held.get(place) == owner or owner in busy or owner == self._me:
                continue
            busy.add(owner)
            parcel.on_way[place] = owner, now
            header = Header(EarlyKind.AHEAD, self._run_tag, chunk=self._fragment.first + place)
            frames.append(SendFrame(owner, with_payload(header, piece.payload, piece.hash)))
        return frames

    @staticmethod
    def _waits_for_a_few(plan: AheadPlan, parcel: Parcel, now: float) -> bool:
        """For too long: an owner could say once in a while that it has one chunk more."""
        parcel.began_at = now if parcel.began_at < 0.0 else parcel.began_at
        owners = {plan.owner_of(place) for place in parcel.pieces}
        late = {plan.owner_of(at) for at in parcel.pieces if parcel.held.get(at) != plan.owner_of(at)}
        if not parcel.encoded or not late or 2 * len(late) >= len(owners):
            parcel.last = frozenset()
            return False
        if not late <= parcel.last:
            parcel.last_since = now
        parcel.last = frozenset(late)
        took_s = parcel.last_since - parcel.began_at
        return now - parcel.last_since >= max(LAST_LEAST_S, LAST_TIMES * took_s)

    def on_held(self, sender: str, header: Header) -> Verdict:
        """Somebody keeps a chunk, or says so: in the round the coordinator hears from it what it can prove."""
        place, parcel = self._fragment.index(header.chunk), self.parcel
        piece = parcel.pieces.get(place) if parcel is not None else None
        if parcel is None or piece is None or piece.hash != header.hash:
            return Verdict.STALE
        if parcel.on_way.get(place, ("", 0.0))[0] == sender:
            del parcel.on_way[place]
        parcel.held[place] = sender
        return Verdict.ACCEPTED

    def on_lacked(self, owner: str, chunk: int) -> None:
        """An owner asks for what it should have: it was restarted, and is given it again when the round is over."""
        place = self._fragment.index(chunk)
        if self.parcel is not None and self.parcel.held.get(place) == owner:
            del self.parcel.held[place]

    def names(self, plan: Plan) -> list[SendFrame]:
        """A round begins with me: which of the bytes that its owners keep are my contribution."""
        parcel = self.parcel
        if parcel is None:
            return []
        return [
            SendFrame(owner, Frame(self._naming(plan, place, parcel.pieces[place].hash)))
            for place, owner in sorted(parcel.held.items())
            if plan.owner_of(place) == owner
        ]

    def _naming(self, plan: Plan, place: int, piece_hash: bytes) -> Header:
        chunk = self._fragment.first + place
        return Header(
            EarlyKind.AHEAD_COUNTS, self._run_tag, plan.round_no, 0, plan.version, chunk, hash=piece_hash
        )


class KeptEarly:
    """At an owner: what slow members have sent ahead.  One contribution of each, and of nobody else."""

    def __init__(self, me: str, run_tag: bytes, fragment: Fragment) -> None:
        self._me, self._run_tag, self._fragment = me, run_tag, fragment
        self._pieces: dict[str, dict[int, ChunkPiece]] = {}

    @property
    def bytes(self) -> int:
        return sum(len(piece.payload) for shelf in self._pieces.values() for piece in shelf.values())

    def on_plan(self, plan: AheadPlan | None) -> None:
        """Of who sends nothing ahead any more, and of chunks that are another's, nothing is kept."""
        senders = plan.senders if plan is not None else ()
        self._pieces = {
            sender: {place: piece for place, piece in shelf.items() if plan and self._is_mine(plan, place)}
            for sender, shelf in self._pieces.items()
            if sender in senders
        }

    def keep(self, plan: AheadPlan | None, sender: str, frame: Frame) -> tuple[Verdict, list[SendFrame]]:
        """The coordinator's word bounds the memory: who may send, and which chunks."""
        if plan is None or sender not in plan.senders:
            return Verdict.UNAUTHORISED, []
        place, digest = self._fragment.index(frame.header.chunk), frame.header.hash
        if not self._is_mine(plan, place):
            return Verdict.STALE, []
        shelf = self._pieces.setdefault(sender, {})
        known = place in shelf and shelf[place].hash == digest
        shelf[place] = ChunkPiece(frame.payload, digest)
        answer = Header(EarlyKind.AHEAD_HELD, self._run_tag, chunk=frame.header.chunk, hash=digest)
        return Verdict.DUPLICATE if known else Verdict.ACCEPTED, [SendFrame(sender, Frame(answer))]

    def _is_mine(self, plan: AheadPlan, place: int) -> bool:
        return 0 <= place < len(plan.owners) and plan.owner_of(place) == self._me

    def named(self, sender: str, header: Header) -> Frame | None:
        """The contribution that a member names, as if it came now; None: it is not here, and is asked for."""
        piece = self._pieces.get(sender, {}).get(self._fragment.index(header.chunk))
        if piece is None or piece.hash != header.hash:
            return None
        as_sent = Header(Kind.CONTRIBUTION, header.run_tag, header.round_no, 0, header.version, header.chunk)
        return with_payload(as_sent, piece.payload, piece.hash)


# ---- early upload ------------------------------------------------------------------------------------------

KINDS = EarlyKind


def ahead(attached: Attached, me: str, fragment: Fragment) -> EarlyWork:
    return EarlyUpload(me, attached.known.tag, fragment)


class EarlyUpload(EarlyWork):
    def __init__(self, me: str, run_tag: bytes, fragment: Fragment) -> None:
        self._me, self._fragment = me, fragment
        self._sending = SendingAhead(me, run_tag, fragment)
        self._kept = KeptEarly(me, run_tag, fragment)
        self._frozen: Frozen | None = None  # what the parcel is made of

    # ---- the coordinator's word ---------------------------------------------------------------------------------

    def on_tick(self, tick: FragmentTick) -> None:
        told = section(AheadTick, tick.sections)
        plan = told.plan if told is not None else None
        if told is None:
            self._take(None)
        elif plan is not None and len(plan.owners) == self._fragment.count:
            self._take(plan)
        # Else it is the one that I know; or others are to know it first, and the one that I know holds until then.

    def _take(self, plan: AheadPlan | None) -> None:
        if plan != self._sending.plan:
            self._sending.plan = plan
            self._kept.on_plan(plan)

    @property
    def sections(self) -> tuple[AheadBeat, ...]:
        return (AheadBeat(self._sending.plan.number),) if self._sending.plan is not None else ()

    @property
    def is_mine(self) -> bool:
        return bool(self._sending.codec)

    @property
    def delivered(self) -> bool:
        return self._frozen is not None and self._sending.delivered

    @property
    def encode_no(self) -> int:
        """Under which the parcel is encoded, in place of a round's number; 0: there is none."""
        parcel = self._sending.parcel
        return -(parcel.number * FRAGMENTS_MAX + self._fragment.number) if parcel is not None else 0

    # ---- the parcel ---------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> Frozen | None:
        return self._frozen

    @property
    def slot(self) -> int | None:
        return self._frozen.slot if self._frozen is not None else None

    def keep_going(self, newest: Frozen | None) -> list[Effect]:
        """`newest`: what stands frozen now, in which the parcel's work is as long as no commit has used it."""
        parcel, codec = self._sending.parcel, self._sending.codec
        if parcel is not None and (newest is None or parcel.codec != codec):
            return [*self.drop()]
        if parcel is not None or newest is None or not codec:
            return []
        self._frozen = newest
        self._sending.begin()
        return [Encode(self.encode_no, newest.slot, codec, self._sending.order, self._fragment.number)]

    def on_encoded(self, round_no: int, payloads: Mapping[int, Payload]) -> bool:
        return self._sending.on_encoded(-round_no // FRAGMENTS_MAX, payloads)

    def send(self, now: float) -> list[Effect]:
        return [*self._sending.send(now)]

    def drop(self) -> list[Resolve]:
        if self._frozen is None:
            return []
        dropped = Resolve(self._frozen.slot, used=False, fragment=self._fragment.number)
        self._frozen = self._sending.parcel = None
        return [dropped]

    def forget(self, frozen: Frozen) -> None:
        if self._frozen is frozen:
            self._frozen = self._sending.parcel = None

    # ---- its round ----------------------------------------------------------------------------------------------

    def ready_for(self, plan: Plan) -> Frozen | None:
        parcel = self._sending.parcel
        if parcel is None or not parcel.encoded or parcel.codec != plan.codec_of(self._me):
            return None
        return self._frozen

    @property
    def pieces(self) -> Mapping[int, ChunkPiece]:
        return self._sending.parcel.pieces if self._sending.parcel is not None else {}

    def names(self, plan: Plan) -> list[Effect]:
        return [*self._sending.names(plan)]

    def on_lacked(self, owner: str, chunk: int) -> None:
        self._sending.on_lacked(owner, chunk)

    # ---- frames -------------------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame) -> tuple[Verdict, list[Effect]]:
        if frame.header.kind is EarlyKind.AHEAD_HELD:
            return self._sending.on_held(sender, frame.header), []
        verdict, answer = self._kept.keep(self._sending.plan, sender, frame)
        return verdict, [*answer]

    def takes(self, kind: FrameKind) -> bool:
        return isinstance(kind, EarlyKind)

    def meant(self, sender: str, frame: Frame) -> Frame | None:
        header = frame.header
        return self._kept.named(sender, header) if header.kind is EarlyKind.AHEAD_COUNTS else frame
