"""The journal's records: every durable transition of a run, one type each.

Written by the run machine, made durable by the journal before anything acts on them, folded by the ledger.
Programs read a `cause`; the `reason` beside it is for people alone.  Data only.
"""

from __future__ import annotations

import functools
from typing import Union

import msgspec
from msgspec import Struct

from farflung.coordinator.modes import registry
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import AbortCause, DepartureCause, Excluded, ExclusionCause
from farflung.protocol.messages import Lease
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import Commit, Decision, Plan, Used
from farflung.protocol.signing import Amendment


class Record(Struct, frozen=True, tag_field="record", kw_only=True):
    """Those of the core are below; a mode has its own (coordinator/modes/registry.py)."""


class Started(Record, frozen=True, kw_only=True, tag="started"):
    """A coordinator process took over the run."""

    incarnation: int
    # The run's clock, and the wall clock of this machine, at that moment: see admission.py.
    clock_s: float = 0.0
    wall_s: float = 0.0
    secret: bytes = b""  # of the run, once: nobody can foresee what follows from it


class ModelFixed(Record, frozen=True, kw_only=True, tag="model"):
    """The first peer's model is the run's model."""

    model: ModelSchema
    peer: str


class DataFixed(Record, frozen=True, kw_only=True, tag="data"):
    """The data set of most members is the run's.  Leases of another one are void: nothing of it was committed."""

    samples: int
    peer: str  # the oldest member that has it
    data: bytes = b""  # its fingerprint; empty: it has none


class StreamEnded(Record, frozen=True, kw_only=True, tag="stream_ended"):
    """Those who decide about it read a data set of unknown length to its end: the length of every epoch."""

    samples: int
    peer: str  # the one whose word it took


class CutShort(Record, frozen=True, kw_only=True, tag="cut_short"):
    """The data of the peer that holds these leases ends within or before them: the rest is for others."""

    leases: tuple[int, ...]
    samples: int  # that it has
    peer: str


class Genesis(Record, frozen=True, kw_only=True, tag="genesis"):
    """Version 0 of every fragment is its founder's initial state."""

    digest: bytes  # of fragment 0
    peer: str
    founders: tuple[str, ...] = ()  # of each stage, where the model is cut into several
    others: tuple[bytes, ...] = ()  # of fragments 1, 2, ...
    shown: tuple[bytes, ...] = ()  # of each fragment: how its holders show that they hold it

    @property
    def digests(self) -> tuple[bytes, ...]:
        return (self.digest, *self.others)


class Admitted(Record, frozen=True, kw_only=True, tag="admitted"):
    peer: str
    name: str
    session: bytes
    helps: bool = False  # without a trainer: no round counts on what it contributes


class Vouched(Record, frozen=True, kw_only=True, tag="vouched"):
    """This peer has shown that it holds the run's state: what it says of the next version's digest is heard."""

    peer: str
    fragment: int = 0


class Departed(Record, frozen=True, kw_only=True, tag="departed"):
    peer: str
    cause: DepartureCause
    reason: str


class Opened(Record, frozen=True, kw_only=True, tag="opened"):
    plan: Plan


class DecidedOn(Record, frozen=True, kw_only=True, tag="decided"):
    decision: Decision
    causes: dict[str, ExclusionCause]  # why each one is out; the decision has the sentences
    merged: str = ""  # how, and what the guard did


class HowMerged(Struct, frozen=True, kw_only=True):
    """What came of comparing the contributions of a round."""

    text: str = ""  # how, for people
    clipped: dict[str, str] = {}  # who was shortened, and by which figure
    suspects: tuple[str, ...] = ()  # who was out for its direction, or far too long: their trust begins anew
    norm: float | None = None  # of the merged update, where it is known
    cosine: float | None = None  # of those that counted, where they were compared: see ledger.py


class CommittedRound(Record, frozen=True, kw_only=True, tag="committed"):
    commit: Commit
    used: dict[str, tuple[Used, ...]]
    excluded: dict[str, Excluded]
    tokens: int
    steps: int
    loss: float | None
    seconds: float
    tx_bytes: int
    merged: HowMerged = HowMerged()
    # Of a mesh: the group of each member.  Sums of groups, in bf16, were added up in the order of the groups.
    groups: tuple[int, ...] = ()
    tokens_by: dict[str, int] = {}  # what is believed of each one's tokens: `tokens` is their sum
    rate: float | None = None  # tokens for each leased sample, of the member in the middle
    counted: dict[
        str, bytes
    ] = {}  # of a synchronous batch: whose sums have which microbatches in them, as masks
    at_s: float = 0.0  # on the run's clock


class CommittedBatch(Record, frozen=True, kw_only=True, tag="committed_batch"):
    """All stages of a model go on to the next version at once: one round of each, in the order of the stages."""

    rounds: tuple[CommittedRound, ...]


class AbortedRound(Record, frozen=True, kw_only=True, tag="aborted"):
    round_no: int
    cause: AbortCause
    reason: str
    fragment: int = 0
    dropped: bool = False  # by the guard: its members start again from the version before


class DigestFixed(Record, frozen=True, kw_only=True, tag="digest"):
    version: int
    digest: bytes
    fragment: int = 0
    shown: bytes = b""  # what holders show under the version's nonce


class ShownFixed(Record, frozen=True, kw_only=True, tag="shown"):
    """What holders of a settled version show under its nonce, calculated from a chunk that was seen."""

    version: int
    fragment: int
    shown: bytes


class DigestWithdrawn(Record, frozen=True, kw_only=True, tag="withdrawn"):
    """It was proven that the committed results do not lead to this digest: it, and what followed from it, is void."""

    version: int
    fragment: int
    digest: bytes


class DigestRefuted(Record, frozen=True, kw_only=True, tag="refuted"):
    """These members named a digest that is proven wrong; `chunk` is where that was seen."""

    peers: tuple[str, ...]
    version: int
    fragment: int
    digest: bytes
    chunk: int


class RolledBack(Record, frozen=True, kw_only=True, tag="rolled_back"):
    """The newest state was lost with all who held it: the run goes on from an older version of its own.

    The versions after it are given up, and made again by other commits; `era` in the ledger counts how often.
    """

    versions: tuple[int, ...]  # of each fragment, from now on
    reason: str
    undone: bool = False  # by the host, who did not like what was learned: nothing was lost


class Granted(Record, frozen=True, kw_only=True, tag="granted"):
    peer: str
    lease: Lease


class Released(Record, frozen=True, kw_only=True, tag="released"):
    leases: tuple[int, ...]
    reason: str


class Struck(Record, frozen=True, kw_only=True, tag="struck"):
    """A member did what no honest member does."""

    peer: str
    reason: str
    at_s: float


class Amended(Record, frozen=True, kw_only=True, tag="amended"):
    """The host changed what holds from a version on."""

    amendment: Amendment
    at_s: float  # on the run's clock


class Paused(Record, frozen=True, kw_only=True, tag="paused"):
    """No rounds are opened until `Resumed`."""

    reason: str


class Resumed(Record, frozen=True, kw_only=True, tag="resumed"):
    pass


class Folded(Record, frozen=True, kw_only=True, tag="folded"):
    """Takes the place of all records up to its own position: the ledger that they made (ledger.py)."""

    position: int
    ledger: bytes
    digest: bytes  # of the ledger's bytes: damaged ones are not taken apart


OF_CORE: tuple[type[Record], ...] = (
    Started,
    ModelFixed,
    DataFixed,
    StreamEnded,
    CutShort,
    Genesis,
    Admitted,
    Vouched,
    Departed,
    Opened,
    DecidedOn,
    CommittedRound,
    CommittedBatch,
    AbortedRound,
    DigestFixed,
    ShownFixed,
    DigestWithdrawn,
    DigestRefuted,
    RolledBack,
    Granted,
    Released,
    Struck,
    Amended,
    Paused,
    Resumed,
    Folded,
)

# What `from_bytes` raises for bytes that are no record.
UNREADABLE = (msgspec.MsgspecError, TypeError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Record]:
    """Of the core's records and of those of the modes that are there; one of a mode that was taken out is refused."""
    return msgspec.msgpack.Decoder(Union[(*OF_CORE, *registry.records())])


def to_bytes(record: Record) -> bytes:
    return _encoder.encode(record)


def from_bytes(raw: bytes) -> Record:
    record = _decoder().decode(raw)
    if isinstance(record, Folded) and hash_bytes(record.ledger) != record.digest:
        raise msgspec.ValidationError("the folded ledger is damaged")
    return record


def tag_of(record: Record) -> str:
    """Which it is, for whoever may not know its type."""
    return str(record.__struct_config__.tag)
