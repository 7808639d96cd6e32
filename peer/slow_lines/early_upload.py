"""Work that a peer with a slow line sends ahead of its round: which frozen work it is, from when on it is ready.  Pure.

Where the mode begins at a peer: part of a replica.  The bytes and their owners are `SendingAhead`'s and `KeptEarly`'s
(peer/slow_lines/parcels.py); here they are held against what the trainer has frozen.  A parcel stays what it
is while the run goes on without it: the trainer loads new versions and freezes newer work, and when a commit has used
the parcel, it keeps what came after (P6).  Until the coordinator opens a round with this peer, a parcel is no
promise, and may be dropped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping

from farflung.collectives.round.pieces import ChunkPiece
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import Effect, Encode, Resolve
from farflung.peer.machine.replica_modes import EarlyWork
from farflung.peer.slow_lines.parcels import EarlyKind, KeptEarly, SendingAhead
from farflung.protocol.frames import Frame, FrameKind, Payload
from farflung.protocol.limits import FRAGMENTS_MAX
from farflung.protocol.messages import FragmentTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import AheadPlan, Plan
from farflung.protocol.run_terms import Attached
from farflung.protocol.verdicts import Verdict

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
        plan = tick.ahead
        if not tick.ahead_no:
            self._take(None)
        elif plan is not None and len(plan.owners) == self._fragment.count:
            self._take(plan)
        # Else it is the one that I know; or others are to know it first, and the one that I know holds until then.

    def _take(self, plan: AheadPlan | None) -> None:
        if plan != self._sending.plan:
            self._sending.plan = plan
            self._kept.on_plan(plan)

    @property
    def number(self) -> int:
        return self._sending.plan.number if self._sending.plan is not None else 0

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
