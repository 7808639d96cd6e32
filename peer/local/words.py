"""What trainer and agent of one peer say to each other, on one machine.  Types only.

Bulk goes through shared memory: the anchor and its moments (agent writes), three delta slots (trainer writes) and
a page of progress counters.  Three, so that there is always one to freeze into besides the newest pseudo-gradient and
the one that a round is using: the agent names it (`spare`).  A slot costs memory only once it is written.  Each
fragment uses its own region of the three, as if it were alone: one may stand in slot 0, its neighbour in slot 2.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from farflung.protocol.errors import LeaveCause
from farflung.protocol.messages import Lease
from farflung.protocol.mode_words import Figures
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import Forward, Used
from farflung.protocol.signing import Amendments

# What a trainer keeps of its own work when it loads the anchor:
#   drop     nothing: it starts from the anchor
#   all      everything not yet merged (its contribution was not in the commit, P6)
#   rest     only what came after the slot that the commit used
#   restore  it is a fresh trainer: it takes the slot's delta as its own unmerged work
Keep = Literal["drop", "all", "rest", "restore"]
# Of a stage's work: see collectives/pipeline/effects.py.
Way = Literal["forward", "backward", "both"]


class _Local(Struct, frozen=True, kw_only=True, tag_field="say", forbid_unknown_fields=True):
    pass


# ---- trainer to agent


class Attach(_Local, frozen=True, kw_only=True, tag="attach"):
    model: ModelSchema
    pid: int
    # Where the model is cut into stages: those that fit this machine, and of one work the most bytes that go in or out.
    stages: tuple[int, ...] = ()
    crossing_bytes: int = 0


class Provided(_Local, frozen=True, kw_only=True, tag="provided"):
    """The model's initial values are in the anchor."""


class Loaded(_Local, frozen=True, kw_only=True, tag="loaded"):
    version: int
    fragment: int = 0


class Frozen(_Local, frozen=True, kw_only=True, tag="frozen"):
    """A fragment's pseudo-gradient stands in `slot`; the numbers count all of it that no commit has used yet."""

    slot: int
    tokens: int
    steps: int
    used: tuple[Used, ...]  # samples that this fragment has learned from
    loss: float | None
    fragment: int = 0
    step: int = 0  # the trainer's count of all its steps
    more: bool = False  # another fragment was frozen at the same step, and its word follows
    early: bool = False  # before the period had its steps
    # Of a synchronous batch: the microbatches whose gradients are in it, and the seat that counted them, which the
    # agent puts in.
    counted: bytes = b""
    seat: int = 0


class NeedSamples(_Local, frozen=True, kw_only=True, tag="need"):
    samples: int  # size of the data set, or UNKNOWN_LENGTH
    want: int  # samples wanted beyond what is leased now
    data: bytes = b""  # the fingerprint of the data set; empty: it has none


class MicrobatchCounted(_Local, frozen=True, kw_only=True, tag="counted"):
    """The gradient of a microbatch is in the sums of the batch from this version."""

    version: int
    micro: int
    tokens: int
    loss: float | None


class Unusable(_Local, frozen=True, kw_only=True, tag="unusable"):
    """A microbatch gives no gradient: its loss or its gradient is not finite.  It is not in the sums."""

    version: int
    micro: int
    problem: str


class WorkDone(_Local, frozen=True, kw_only=True, tag="made"):
    """What came of a `MicrobatchWork`.  Backward and both: the gradient is in the sums of the batch from this
    version."""

    way: Way
    version: int
    micro: int
    bytes_made: int  # in the slot for it; 0 where nothing goes on
    tokens: int
    loss: float | None
    problem: str  # why there is nothing; empty: all is well


class Computed(_Local, frozen=True, kw_only=True, tag="computed"):
    """What the model, which holds a version and nothing else, computes."""

    forward: Forward


class Logged(_Local, frozen=True, kw_only=True, tag="logged"):
    """The newest value of each of the script's own figures."""

    figures: Figures


class Scored(_Local, frozen=True, kw_only=True, tag="scored"):
    """What came of a `Score`."""

    number: int
    nats: bytes = (
        b""  # the float32 of each window's nats a token, in their order; none where `why_not` says why
    )
    data: bytes = b""  # the fingerprint of what was read
    why_not: str = ""  # a `ScoreCause`
    text: tuple[int, ...] = ()  # token ids, where one was wanted and can be written
    seconds: float = 0.0  # that it took, in which nothing was learned


FINISHED = "finished"  # the reason of a trainer that has the finished model: no sentence


class Bye(_Local, frozen=True, kw_only=True, tag="bye"):
    reason: str

    @property
    def cause(self) -> LeaveCause:
        """The trainer has the finished model, or goes before the end."""
        return LeaveCause.FINISHED if self.reason == FINISHED else LeaveCause.LEFT


# ---- agent to trainer


class Begin(_Local, frozen=True, kw_only=True, tag="begin"):
    manifest: bytes
    peer: str
    name: str


class RunAmendments(_Local, frozen=True, kw_only=True, tag="terms"):
    """What the run's host has changed since it began, from which versions on."""

    first: bytes  # the manifest
    amendments: Amendments


class Anew(_Local, frozen=True, kw_only=True, tag="anew"):
    """This peer is to hold another stage: forget the one that you have, and attach as at the beginning."""


class Shared(_Local, frozen=True, kw_only=True, tag="shared"):
    anchor: str
    moments: tuple[str, ...]
    slots: tuple[str, str, str]
    progress: str
    elements: int
    stage: int = 0  # the trainer holds this one, whose values these are
    belt: str = ""  # crossings pass through it; empty: the model is in one piece
    beside: str = ""  # how names begin of what a trainer keeps on the peer's disk; empty: nothing


class Provide(_Local, frozen=True, kw_only=True, tag="provide"):
    """Found the run: write the model's values into the anchor."""


class LoadState(_Local, frozen=True, kw_only=True, tag="load"):
    version: int
    keep: Keep
    slot: int
    tokens: int  # rest: how much the commit used; restore: how much stands in the slot
    steps: int
    spare: int  # the slot to freeze into next
    fragment: int = 0


class ResumeSteps(_Local, frozen=True, kw_only=True, tag="resume"):
    """This fragment is no reason to wait: go on with inner steps."""

    spare: int
    fragment: int = 0


class RoundOpened(_Local, frozen=True, kw_only=True, tag="opened"):
    """A round of this fragment has begun: what all peers see at the same time.  Told where training goes on during
    rounds, and where periods are measured by the clock."""

    hold: bool  # it uses the frozen work: no further freeze before the next Load or Resume
    fragment: int = 0


class RoundCalled(_Local, frozen=True, kw_only=True, tag="called"):
    """The round of this fragment that goes from this version is waited for, so long by now: the period ends after this
    step."""

    version: int
    waited_s: float
    fragment: int = 0


class LeasesNow(_Local, frozen=True, kw_only=True, tag="leases"):
    leases: tuple[Lease, ...]  # `upto`, `uptos`: where to go on reading
    unsure: bool = False  # what is missing may be mine all the same: the coordinator will say


class Grants(_Local, frozen=True, kw_only=True, tag="grants"):
    """All microbatches of the batch from this version that are this trainer's to compute, those that it has counted
    too: the whole list each time.  Microbatch m is the samples [start + m * micro, start + (m + 1) * micro) of the
    epoch's order, as far as they lie before `stop`; `micro` is of the manifest."""

    version: int
    epoch: int
    start: int
    stop: int
    count: int  # microbatches in the batch
    ranges: tuple[tuple[int, int], ...]  # [first, stop) of microbatches
    held_out: bool = False  # of windows of [eval], in place of samples: for their losses alone


class FreezeSums(_Local, frozen=True, kw_only=True, tag="freeze"):
    """Every microbatch of the batch is counted: write the sums, divided by the tokens in them, into the slot, keep
    them, and say `Frozen`.  They may be wanted once more: if a share is lost, more microbatches are granted."""

    version: int
    slot: int


class MicrobatchWork(_Local, frozen=True, kw_only=True, tag="hand"):
    """Work on one microbatch of the batch from this version, in a model that is cut into stages.

    Bytes pass through slots of the belt, each as long as `Attach.crossing_bytes` says: work with place p has the slots
    3 p (what came from the stage before), 3 p + 1 (the gradient that came back) and 3 p + 2 (for what is made).  They
    are the trainer's until it says `WorkDone`.  A source reads its samples itself.
    """

    way: Way
    version: int
    micro: int
    epoch: int
    start: int  # samples of the epoch's order: those of this microbatch
    stop: int
    place: int
    given_bytes: int  # 0: none
    returned_bytes: int
    held_out: bool = False  # as in `Grants`


class Score(_Local, frozen=True, kw_only=True, tag="score"):
    """Compute the loss of these windows of the held-out text with the anchor, which is at these versions."""

    number: int
    versions: tuple[int, ...]  # of each fragment
    windows: bytes  # a mask
    text: bool = False  # and go on with the text that the first of them begins with


class Finish(_Local, frozen=True, kw_only=True, tag="finish"):
    """The run is over.  All fragments are loaded with the word itself: no step may come in between."""

    version: int
    loads: tuple[LoadState, ...] = ()


class Stop(_Local, frozen=True, kw_only=True, tag="stop"):
    code: str
    reason: str


FromTrainer = (
    Attach
    | Provided
    | Loaded
    | Frozen
    | NeedSamples
    | MicrobatchCounted
    | Unusable
    | WorkDone
    | Computed
    | Logged
    | Scored
    | Bye
)
ToTrainer = (
    Begin
    | RunAmendments
    | Anew
    | Shared
    | Provide
    | LoadState
    | ResumeSteps
    | RoundOpened
    | RoundCalled
    | LeasesNow
    | Grants
    | FreezeSums
    | MicrobatchWork
    | Score
    | Finish
    | Stop
)

# ---- to commands of the same user


class PeerHere(_Local, frozen=True, kw_only=True, tag="here"):
    """A peer that runs on this machine, and where the run's state lies."""

    run: str
    key: bytes  # the coordinator's
    manifest: bytes
    model: ModelSchema
    shared: Shared


_encoder = msgspec.msgpack.Encoder()
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)


def to_bytes(message: FromTrainer | ToTrainer | PeerHere) -> bytes:
    return _encoder.encode(message)


def from_trainer(raw: bytes) -> FromTrainer:
    return _from_trainer.decode(raw)


def to_trainer(raw: bytes) -> ToTrainer:
    return _to_trainer.decode(raw)


def peer_here(raw: bytes) -> PeerHere | None:
    """None: of another version of farflung."""
    try:
        return msgspec.msgpack.decode(raw, type=PeerHere)
    except msgspec.MsgspecError:
        return None
