"""The states of a fragment at a peer: what it holds, and what part it has in a round.  Pure; types and two tables.

A replica (replica.py) is in one state of each table at any time, and it alone moves, by `STANDS` and `ROLES`.  A
state carries what is true in it and nowhere else: there is no digest of nothing, and no proof of a state that
changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from farflung.checkpoints.state_sync import NO_VERSION
from farflung.collectives.round.member import MemberRound
from farflung.collectives.round.result_requests import LateResults
from farflung.peer.local.words import Frozen
from farflung.protocol.states import Transitions

# ---- what it holds of the outer state ---------------------------------------------------------------------------


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


# ---- its part in a round ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contribution:
    """What I sent in a round, until I know whether a commit used it."""

    round_no: int
    version: int  # that the round started from: only the next version's commit can have used it
    frozen: Frozen
    # The trainer has dropped this work: nothing of it is left that a commit could take.
    disowned: bool = False


@dataclass(frozen=True)
class LastCommit:
    """The newest commit: its late results still help."""

    round_no: int = 0
    version: int = 0
    late: LateResults | None = None  # if I was in its round


@dataclass(frozen=True)
class WorkSettled:
    """What the seal of a version says of my work."""

    consumed: Contribution | None  # a commit on the way used it
    lost_track: bool  # a commit was missed: nobody here knows whether it used my work


@dataclass(frozen=True, slots=True)
class Idle:
    """In no round, and nothing is open of an earlier one."""


@dataclass(frozen=True, slots=True)
class Owning:
    """In a round to which I contribute nothing: I own, merge and receive."""

    round: MemberRound


@dataclass(frozen=True, slots=True)
class Contributing:
    round: MemberRound
    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Unsure:
    """The run is further than the round: whether its commit, which I have not seen, used my work is not known."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Merged:
    """A commit used my work; that is settled with the trainer when the version is sealed."""

    contribution: Contribution


Role = Idle | Owning | Contributing | Unsure | Merged
RoleKind = type[Idle] | type[Owning] | type[Contributing] | type[Unsure] | type[Merged]


class RoleEvent(StrEnum):
    OPENED = "a round opened"
    CONTRIBUTED = "work was frozen for it"
    WITHDRAWN = "the work is not finite"
    DISOWNED = "the trainer dropped the work"
    ENDED = "over without my work"
    USED = "a commit used it"
    MISSED = "a later commit came"
    OVERTAKEN = "sealed without its commit"
    SETTLED = "its version is sealed"


ROLES: Transitions[RoleKind, RoleEvent] = Transitions(
    {
        Idle: {RoleEvent.OPENED: Owning},
        Owning: {RoleEvent.CONTRIBUTED: Contributing, RoleEvent.ENDED: Idle},
        Contributing: {
            RoleEvent.WITHDRAWN: Owning,
            RoleEvent.DISOWNED: Contributing,
            RoleEvent.ENDED: Idle,
            RoleEvent.USED: Merged,
            RoleEvent.MISSED: Unsure,
            RoleEvent.OVERTAKEN: Owning,
        },
        Unsure: {
            RoleEvent.DISOWNED: Unsure,
            RoleEvent.ENDED: Idle,
            RoleEvent.USED: Merged,
            RoleEvent.OVERTAKEN: Idle,
        },
        Merged: {RoleEvent.DISOWNED: Merged, RoleEvent.ENDED: Idle, RoleEvent.SETTLED: Idle},
    }
)
