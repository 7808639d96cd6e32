"""What a peer holds of one fragment's state, and what others may have of it.  Pure.

Part of a replica (replicas.py).  The state is facts only: its version, its digest; the bytes are the shell's.  Here are
the catch-up (checkpoints/state_sync.py), what can be proven and the results that led to it.  It is in
one state of the table `STANDS` at any time, and it alone moves, in `_stands`.  A state carries what is true in it and
nowhere else: there is no digest of nothing, and no proof of a state that changes.  Must not know rounds in flight, nor
this peer's own work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.fetcher import SPOILED_FORGIVEN
from farflung.checkpoints.result_log import ResultLog
from farflung.checkpoints.state_sync import StateSync
from farflung.checkpoints.swarm import HaveAnnouncer, Holding
from farflung.collectives.round.effects import Install, Roll, Seal, SendFrame
from farflung.peer.machine.effects import (
    Effect,
    KeepBefore,
    Note,
    ProveHolding,
    Serve,
)
from farflung.protocol.digests import full_mask
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, bare_answer, with_payload
from farflung.protocol.messages import TAG_BYTES, FragmentTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.states import Transitions

# ---- state proof -------------------------------------------------------------------------------------------
# What a peer can prove of one fragment's state: that it holds it, and how it came to it. Pure.
#
# Part of a replica. A peer that rolled on from a version that the run confirmed, with committed results,
# knows what it holds, whatever anybody else says: it keeps what each chunk was before (the shell keeps the
# bytes), so that it can show that it calculated rightly, and can go back by this one version where the run
# has to. What was fetched from others proves nothing. Must not know who disagrees, nor what the coordinator
# makes of a proof.

NONCES_KEPT = 8


class StateProof:
    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._base = NO_VERSION  # the confirmed version that all since was calculated from
        # Version and digest of what the shell keeps, as long as nothing but results came on top of it.
        self.before: tuple[int, bytes] | None = None
        self._nonces: dict[int, bytes] = {}  # by version
        self._asked: tuple[int, bytes] = NO_VERSION, b""  # (version, nonce) that the shell is at, or was
        self._value = b""  # what came of that

    @property
    def calculated(self) -> bool:
        """What is held was calculated from a confirmed version, and that can be shown."""
        return self._base != NO_VERSION

    # ---- how it came to it -----------------------------------------------------------------------------------

    def rolls_on(self, version: int, digest: bytes, confirmed: bool) -> list[Effect]:
        """The first chunk is about to leave this version, which all of them share."""
        if not confirmed:
            return []  # what is kept of an older confirmed version still leads here
        self._base, self.before = version, (version, digest)
        return [KeepBefore(self._fragment.number, version)]

    def lose(self) -> None:
        """What is held is confirmed now, or came from others, or is held no more: there is nothing to show."""
        self._base = NO_VERSION

    def forget(self) -> None:
        """The state is another one, which was not calculated here: what was shown is void, and nothing leads back."""
        self.lose()
        self.before = None
        self._asked, self._value = (NO_VERSION, b""), b""

    # ---- that it holds it --------------------------------------------------------------------------------------

    def on_nonce(self, version: int, nonce: bytes) -> None:
        if nonce and version >= 0:
            self._nonces[version] = nonce
            for old in sorted(self._nonces)[:-NONCES_KEPT]:
                del self._nonces[old]

    def prove(self, version: int) -> list[Effect]:
        """The state is whole at this version, or will be when what was asked for before is done."""
        nonce = self._nonces.get(version, b"")
        if not nonce or self._asked == (version, nonce):
            return []
        self._asked, self._value = (version, nonce), b""
        return [ProveHolding(self._fragment.number, version, nonce)]

    def on_proven(self, version: int, nonce: bytes, value: bytes) -> None:
        if self._asked == (version, nonce):
            self._value = value

    def is_proving(self, version: int) -> bool:
        return self._asked[0] == version and not self._value

    def shown(self, version: int) -> bytes:
        """For a beat: which nonce, and what follows from it and the bytes."""
        asked_for, nonce = self._asked
        return nonce[:TAG_BYTES] + self._value if asked_for == version and self._value else b""


# ---- held fragment -----------------------------------------------------------------------------------------

FETCH_RETRY_S = 3.0  # a donor that gave nothing for so long: another is asked
STATE_WANTS = frozenset({Kind.WANT_STATE, Kind.WANT_MANIFEST, Kind.WANT_LOGGED, Kind.WANT_HAVE})


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """`version` and `digest` are what others are told."""

    version: int = NO_VERSION
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Empty(ReplicaState):
    """Nothing whole is here.  Pieces of it may be: they are being fetched."""


@dataclass(frozen=True, slots=True)
class Filling(ReplicaState):
    """All values are being written, by the trainer or from a disk: nothing that arrives is put among them, and nothing
    of them is given away."""

    before: ReplicaState = Empty()  # what it was, and is again if nothing was written


@dataclass(frozen=True, slots=True)
class VoidFilling(ReplicaState):
    """Values are being written of a version that the run has gone back from."""


@dataclass(frozen=True, slots=True)
class Hashing(ReplicaState):
    """All chunks are of one version, and the shell calculates its digest; until then the last one is told."""


@dataclass(frozen=True, slots=True)
class VoidHashing(ReplicaState):
    """The shell calculates the digest of a version that the run has gone back from."""


@dataclass(frozen=True, slots=True)
class Current(ReplicaState):
    """Every chunk is at `version`, and nothing is on its way into the state."""

    verified: bool = False  # the coordinator has confirmed the digest (P4)
    proof: bytes = b""  # its signature of the digest, where it gives one


@dataclass(frozen=True, slots=True)
class Rolling(ReplicaState):
    """Some chunks are at a newer version already: nothing is served from it."""


class ReplicaEvent(StrEnum):
    BEGUN = "values are being written"  # the trainer's initial ones, a checkpoint's, those that had arrived before
    WRITTEN = "all are written"
    UNWRITTEN = "not all are written"  # what is there now is no version of anything, or pieces of some
    UNTOUCHED = "none was written, and it is torn still"
    ARRIVED = "the last chunk is here"
    SEALED = "sealed"
    MOVED_ON = "a chunk moved on"
    CONFIRMED = "confirmed"  # by the coordinator
    FORGOTTEN = "not the run's or too old"
    WENT_BACK = "the run went back"
    KEPT = "went back to this"  # the run went back to exactly what is held


_ANEW = {ReplicaEvent.BEGUN: Filling, ReplicaEvent.FORGOTTEN: Empty, ReplicaEvent.WENT_BACK: Empty}

STANDS: Transitions[type[ReplicaState], ReplicaEvent] = Transitions(
    {
        Empty: {ReplicaEvent.ARRIVED: Hashing, **_ANEW},
        Filling: {
            ReplicaEvent.WRITTEN: Hashing,
            ReplicaEvent.UNWRITTEN: Empty,
            ReplicaEvent.UNTOUCHED: Rolling,
            ReplicaEvent.WENT_BACK: VoidFilling,
        },
        VoidFilling: {
            ReplicaEvent.WRITTEN: Empty,
            ReplicaEvent.UNWRITTEN: Empty,
            ReplicaEvent.WENT_BACK: VoidFilling,
        },
        Hashing: {ReplicaEvent.SEALED: Current, ReplicaEvent.WENT_BACK: VoidHashing},
        VoidHashing: {ReplicaEvent.SEALED: Empty, ReplicaEvent.WENT_BACK: VoidHashing},
        Current: {
            ReplicaEvent.CONFIRMED: Current,
            ReplicaEvent.MOVED_ON: Rolling,
            ReplicaEvent.KEPT: Current,
            **_ANEW,
        },
        Rolling: {ReplicaEvent.ARRIVED: Hashing, **_ANEW},
    }
)


class HeldFragment:
    def __init__(self, me: str, run_tag: bytes, fragment: Fragment, log: ResultLog, parts: int) -> None:
        """`log`: of all fragments together; `parts`: of a chunk's state."""
        self.fragment = fragment
        self.catch = StateSync(fragment, run_tag, FETCH_RETRY_S, parts, me)
        self.chunks = self.catch.chunks
        self.log = log
        self.grounds = StateProof(fragment)
        self._me = me
        self._stand: ReplicaState = Empty()

    def _stands(self, event: ReplicaEvent, stand: ReplicaState) -> None:
        STANDS.check(type(self._stand), event, type(stand))
        self._stand = stand

    # ---- questions --------------------------------------------------------------------------------------------

    @property
    def stand(self) -> ReplicaState:
        return self._stand

    @property
    def version(self) -> int:
        return self._stand.version

    @property
    def digest(self) -> bytes:
        return self._stand.digest

    @property
    def whole(self) -> bool:
        """Every chunk is at `version`, and nothing is on its way into the anchor."""
        return isinstance(self._stand, Current)

    @property
    def sealing(self) -> bool:
        return isinstance(self._stand, Hashing | VoidHashing)

    @property
    def filling(self) -> bool:
        """All values are being written: nothing else may change them."""
        return isinstance(self._stand, Filling | VoidFilling)

    @property
    def serves(self) -> bool:
        """It is whole, and the coordinator has confirmed its digest (P4)."""
        return isinstance(self._stand, Current) and self._stand.verified

    @property
    def is_the_runs(self) -> bool:
        """It is whole, and its digest is the one that the coordinator told; that it is held is still to be shown."""
        return self.whole and self.chunks.digests.get(self.version) == self.digest

    @property
    def proof(self) -> bytes:
        """The coordinator's signature of the digest, where it gave one."""
        return self._stand.proof if isinstance(self._stand, Current) else b""

    @property
    def before(self) -> tuple[int, bytes] | None:
        """A version and its digest that can be gone back to: from it results alone made this one, or are making the
        next."""
        return self.grounds.before if isinstance(self._stand, Current | Rolling) else None

    @property
    def before_filling(self) -> ReplicaState:
        """What stands here, or stood here until all values began to be written."""
        return self._stand.before if isinstance(self._stand, Filling) else self._stand

    # ---- the coordinator's word -------------------------------------------------------------------------------

    def on_tick(self, tick: FragmentTick) -> bool:
        """Where the run is.  True: what was held was not its state."""
        stand = self._stand
        self.grounds.on_nonce(tick.nonce_for, tick.nonce)
        if tick.verified and isinstance(stand, Current) and stand.version == tick.version:
            self._stands(ReplicaEvent.CONFIRMED, replace(stand, verified=True, proof=tick.proof))
            self.grounds.lose()
        digests, keep = dict(tick.digests), self.log.keep_versions
        self.catch.on_run_state(tick.version, digests, tick.donors, keep, tick.fellows)
        if self.chunks.lowest == NO_VERSION and not self.sealing and not self.filling:
            # Too far behind: fetched anew, chunk by chunk.  Who holds nothing whole says so, and is told commits.
            self._stands(ReplicaEvent.FORGOTTEN, Empty())
            self.grounds.forget()
        known = self.chunks.digests.get(self.version)
        differs = (
            self.version != NO_VERSION and not self.sealing and known is not None and known != self.digest
        )
        refuted = bool(tick.refuted) and tick.refuted == self.digest and self.whole
        # What was calculated from a confirmed version is kept, whatever others say, until it is proven wrong.
        differs = refuted or (differs and not self.grounds.calculated)
        if differs:
            self._forget()
        return differs

    def _forget(self) -> None:
        """What is held is not the run's state (P4): take the run's again."""
        self._stands(ReplicaEvent.FORGOTTEN, Empty())
        self.grounds.forget()
        self.catch.reset()

    # ---- all of it is written at once --------------------------------------------------------------------------

    def fill(self) -> None:
        """All values are about to be written: by the trainer, from a checkpoint, from what had arrived before a crash.
        Exactly one of the replica's `found`, `filled` and `unfilled` ends it.  What is on its way here comes too late,
        and is asked for again."""
        self._stands(ReplicaEvent.BEGUN, Filling(before=self._stand))
        self.catch.set_aside()

    def filled(self, version: int) -> list[Effect]:
        self.grounds.forget()
        if isinstance(self._stand, VoidFilling):
            self._stands(ReplicaEvent.WRITTEN, Empty())
            return []
        self._stands(ReplicaEvent.WRITTEN, Hashing())
        return [*self.catch.founded(version)]

    def unfilled(self, touched: bool, recalled: Mapping[int, tuple[int, bytes]]) -> None:
        before = self._stand.before if isinstance(self._stand, Filling) else None
        if not touched and isinstance(before, Rolling):
            self._stands(ReplicaEvent.UNTOUCHED, before)
            return
        if touched or isinstance(before, Current):
            self.grounds.forget()
            self.catch.reset()
        self._stands(ReplicaEvent.UNWRITTEN, Empty())
        if before is not None:
            self.chunks.recalled(recalled)

    def go_back(self, version: int, digest: bytes | None) -> bool:
        stand, was = self._stand, self.before
        self.grounds.forget()
        keep = isinstance(stand, Current) and (stand.version, stand.digest) == (version, digest)
        self.catch.go_back(version, keep)
        self.log.forget(self.fragment.number)
        if keep:
            self._stands(ReplicaEvent.KEPT, Current(stand.version, stand.digest))
            return False
        gone: ReplicaState = VoidHashing() if self.sealing else VoidFilling() if self.filling else Empty()
        self._stands(ReplicaEvent.WENT_BACK, gone)
        if was != (version, digest):
            return False
        self.fill()
        return True

    # ---- moving on ----------------------------------------------------------------------------------------------

    def roll(self, counted_on: int) -> tuple[list[Effect], list[Effect]]:
        """Applies what can be applied; and asks the shell for what shows afterwards that it is held.  `counted_on`: the
        version that the newest round starts from."""
        before, was_the_runs, effects = self._stand, self.is_the_runs, self.chunks.roll()
        if effects:
            self._look_whether_torn()
        came, proofs = any(isinstance(effect, Install) for effect in effects), list[Effect]()
        if came:
            self.grounds.forget()
        elif isinstance(before, Current) and not self.whole:
            confirmed = before.verified or counted_on == before.version or was_the_runs
            proofs += self.grounds.rolls_on(before.version, before.digest, confirmed)
        shows = self.grounds.prove(self.version) if self.whole else []
        for effect in effects:
            if isinstance(effect, Roll):
                self.log.put(self.fragment.number, effect.version, effect.chunk, effect.payload)
            elif isinstance(effect, Seal):
                self._stands(ReplicaEvent.ARRIVED, Hashing(self.version, self.digest))
                shows = self.grounds.prove(effect.version)
        return [*proofs, *effects], shows

    def on_sealed(self, version: int, digest: bytes) -> bool:
        """The state is whole at `version`; False: it is not the run's."""
        if isinstance(self._stand, VoidHashing):
            self._stands(ReplicaEvent.SEALED, Empty())
            return False
        self._stands(ReplicaEvent.SEALED, Current(version, digest))
        known = self.chunks.digests.get(version)
        if known is not None and known != digest and not self.grounds.calculated:
            self._forget()
            return False
        self._look_whether_torn()
        return True

    def _look_whether_torn(self) -> None:
        """A chunk may have come as the state of a newer version: until all have, nothing is served."""
        stand = self._stand
        if isinstance(stand, Current) and set(self.chunks.versions) != {stand.version}:
            self._stands(ReplicaEvent.MOVED_ON, Rolling(stand.version, stand.digest))

    def own_results(self) -> list[Effect]:
        """What a former life of this peer kept on disk of the next version: one version at a time bounds the memory."""
        version = self.chunks.lowest + 1
        if version == 0 or version not in self.chunks.commits:
            return []
        mine, number = self.log.take_found(version, self.fragment.chunks), self.fragment.number
        return [Serve(self._me, Kind.LOGGED, chunk, version, number) for chunk in mine]

    def on_piece(self, sender: str, frame: Frame) -> Verdict:
        """A donor's answer: a piece of the state, a list of hashes, a kept result, or that it has none.  What is of use
        is put into the state by `roll`, and by nothing else."""
        return Verdict.STALE if self.filling else self.catch.on_frame(sender, frame)

    def notes(self) -> list[Effect]:
        told = f"it gave bytes that are not the run's {SPOILED_FORGIVEN + 1} times and is not asked any more"
        warning = self.log.take_warning()
        dropped = [Note(f"{donor}: {told}") for donor in self.catch.fetcher.take_dropped()]
        return [*dropped, Note(warning)] if warning else [*dropped]


# ---- what others may have of it -----------------------------------------------------------------------------------


class StateSource:
    """What this peer gives to others of one fragment: all of it as a donor, or as a fellow the pieces that came.  Who
    asks checks what it gets, and believes nobody."""

    def __init__(self, held: HeldFragment, run_tag: bytes) -> None:
        self._held = held
        self._telling = HaveAnnouncer(held.fragment, run_tag)

    def gives(self, chunk: int) -> bool:
        """This piece stands here as it came, and was checked."""
        held = self._held
        return not held.whole and not held.filling and held.chunks.given_at(chunk) != NO_VERSION

    def answer(self, asker: str, header: Header, now: float) -> list[Effect]:
        """To what is in `STATE_WANTS`; WANT_HAVE is answered by `news`."""
        held, chunk, version, tag = self._held, header.chunk, header.version, header.run_tag
        fragment, log, chunks = held.fragment, held.log, held.chunks
        number = fragment.number
        if header.kind == Kind.WANT_HAVE:
            self._telling.on_want(asker, header.decision_no, now)
            return []
        if header.kind == Kind.WANT_LOGGED:
            payload = log.get(number, version, chunk)
            if payload is not None:
                logged = Header(Kind.LOGGED, tag, version=version, chunk=chunk)
                return [SendFrame(asker, with_payload(logged, payload))]
            if log.on_disk:
                return [Serve(asker, Kind.LOGGED, chunk, version, number)]
        elif header.kind == Kind.WANT_STATE and (held.serves or held.is_the_runs):
            return [Serve(asker, Kind.STATE, chunk, held.version, number)]
        elif header.kind == Kind.WANT_STATE and self.gives(chunk):
            came_at, digest = chunks.given_at(chunk), chunks.hash_of(chunk)
            return [Serve(asker, Kind.STATE, chunk, came_at, number, digest)]
        elif header.kind == Kind.WANT_MANIFEST and (hashes := chunks.hashes_at(version)):
            listed = Header(Kind.MANIFEST, tag, version=version, chunk=fragment.first)
            return [SendFrame(asker, with_payload(listed, hashes))]
        elif header.kind == Kind.WANT_MANIFEST and held.serves and version <= held.version:
            return [Serve(asker, Kind.MANIFEST, fragment.first, held.version, number)]
        return [SendFrame(asker, bare_answer(Kind.MISSING, header))]

    def news(self, now: float) -> list[Effect]:
        """For fellows that asked what is here."""
        return [*self._telling.words(self._holding, now)] if self._telling.is_due(now) else []

    @property
    def _holding(self) -> Holding:
        held = self._held
        if held.serves or held.is_the_runs:
            return Holding(held.version, full_mask(held.fragment.count))
        return Holding() if held.whole or held.filling else held.catch.arrived()
