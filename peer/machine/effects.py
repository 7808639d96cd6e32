"""What the peer's machine asks its shell (the agent, or the simulator) to do, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from farflung.collectives.round.effects import DataEffect
from farflung.peer.local.words import ToTrainer
from farflung.protocol.frames import Kind, Payload
from farflung.protocol.join_url import Address
from farflung.protocol.manifest import StartSection
from farflung.protocol.messages import FromDoor, FromMember, Show
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import Contact, RelayRoute
from farflung.protocol.run_terms import Attached, Terms

Digests = tuple[tuple[int, bytes], ...]  # (version, digest)


@dataclass(frozen=True, slots=True)
class ToDoor:
    message: FromDoor


@dataclass(frozen=True, slots=True)
class LookAt:
    """Where the coordinator may be, in order of preference: knock there from now on."""

    places: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class LookElsewhere:
    """Whoever answered at the door last is not the coordinator that I follow: try other addresses before that one."""


@dataclass(frozen=True, slots=True)
class Remember:
    """For the next life of this peer, as the coordinator signed it.  What is empty stays as it is."""

    whereabouts: bytes = b""  # the list of its addresses
    commits: bytes = b""  # the run's newest steps


@dataclass(frozen=True, slots=True)
class EnterMembers:
    """The coordinator let me in: connect to its members' port."""

    port: int


@dataclass(frozen=True, slots=True)
class LeaveMembers:
    pass


@dataclass(frozen=True, slots=True)
class ToCoordinator:
    message: FromMember


@dataclass(frozen=True, slots=True)
class Contacts:
    """Everybody in the run: whose frames are accepted, and where they can be dialled."""

    roster: tuple[Contact, ...]
    ways: tuple[RelayRoute, ...] = ()  # to those of them that can't be dialled, if I can't be either


@dataclass(frozen=True, slots=True)
class TellTrainer:
    message: ToTrainer


@dataclass(frozen=True, slots=True)
class Hold:
    """The coordinator has named the stage that I hold: make the memory for it, and tell the trainer where it is."""

    attached: Attached


@dataclass(frozen=True, slots=True)
class Vacate:
    """The stage that I hold is given up: end what is being done for it, let go of its memory, and say `on_vacated`."""


class ModeEffect:
    """Of a mode: its own hand carries it out."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode a fragment's pseudo-gradient in a delta slot, and tell of some chunks as soon as they are made."""

    round_no: int
    slot: int
    codec: str
    order: tuple[int, ...]  # of the chunks, each by its index within the fragment
    fragment: int = 0


@dataclass(frozen=True, slots=True)
class Resolve:
    """What was encoded from `slot` is decided: a commit used it, or it will come again with the next."""

    slot: int
    used: bool
    fragment: int = 0


@dataclass(frozen=True, slots=True)
class Serve:
    """Send to somebody who catches up, by `kind`:

    STATE     one chunk of the outer state as it is now: it is at `version`.  `hash`: of a state that is not whole here.
              This chunk came at `version`, was checked, and is still that; it is read later, and may be something else
              by then, as where a trainer writes the first values of a run that is founded anew: what does not have this
              hash is not given.
    MANIFEST  the hashes of the fragment's chunks; `chunk` is its first one and names it
    LOGGED    a result that is kept on disk, if it is; `to` may be me: then it answers a question of my own
    """

    to: str
    kind: Kind  # one of SERVED_KINDS
    chunk: int
    version: int
    fragment: int
    hash: bytes = b""


@dataclass(frozen=True, slots=True)
class KeepBefore:
    """Chunks of this fragment are about to change: keep what they are at `version`, until the next `KeepBefore`."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Undo:
    """Make of each chunk of this fragment what it was at `version`, which was kept last: the run goes back to it.  The
    answer is `Undone`."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class ProveHolding:
    """Calculate what only a holder of this version can, under the nonce; the state is at it when this is due."""

    fragment: int
    version: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class FetchShown:
    """The coordinator wants to see this.  `logged`: the result that it asks for, where it is at hand."""

    show: Show
    logged: Payload | None = None


@dataclass(frozen=True, slots=True)
class SaveFragment:
    """The state of a fragment, as it is now, belongs into the checkpoint of this version: copy it, and go on."""

    version: int
    fragment: int
    digest: bytes
    round_no: int  # of the round that made it, 0 if not known
    era: int
    proof: bytes = b""  # the coordinator's signature of the digest; empty if it gives none


@dataclass(frozen=True, slots=True)
class DropSave:
    """The checkpoint that was begun can't become whole: some fragment went past its version."""

    version: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Nobody serves the state of these fragments: read them from the newest checkpoint that is a version of the run.

    The fragments that are not named stay as they are."""

    lacking: dict[int, Digests]  # fragment -> its versions, as the run knows them


@dataclass(frozen=True, slots=True)
class ListShelf:
    """Which versions of the run lie whole where checkpoints are?  The answer is `Found`."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Put back into the state what a former life of mine left on my disk: the newest version that it had, or what had
    arrived of one."""

    era: int
    known: Mapping[
        int, tuple[int, Digests]
    ]  # fragment -> the version that the run is at, and what it knows of others


@dataclass(frozen=True, slots=True)
class KeepBase:
    """The state of a fragment, as it is now, goes to my own disk: copy it, and go on."""

    era: int
    fragment: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class KeepAhead:
    """Results of a round that is not committed: put them on my disk, and say `AheadKept`."""

    era: int
    fragment: int
    version: int  # that they make
    round_no: int
    decision_no: int
    payloads: Mapping[int, Payload]


@dataclass(frozen=True, slots=True)
class BeginFrom:
    """Read into the state what the run begins with."""

    start: StartSection  # `source`: where it is read
    as_nobody: bool  # on the run's word; else this peer's owner has named the place


@dataclass(frozen=True, slots=True)
class Assist:
    """Hold the state of this model, and open the line to the others: no trainer will come."""

    model: ModelSchema


@dataclass(frozen=True, slots=True)
class Follow:
    """From now on each version is made, and the line is limited, as these say."""

    terms: Terms


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    routine: bool = False  # it comes again and again: people hear of it now and then


@dataclass(frozen=True, slots=True)
class Exit:
    """The peer is done: `code` is "finished", "left", or a refusal's code."""

    code: str
    reason: str


BesideRounds = (
    SaveFragment | DropSave | KeepBase | KeepAhead | Restore | ListShelf | Recall | BeginFrom | Follow
)

Effect = (
    ToDoor
    | LookAt
    | LookElsewhere
    | Remember
    | EnterMembers
    | LeaveMembers
    | ToCoordinator
    | Contacts
    | TellTrainer
    | Hold
    | Vacate
    | ModeEffect
    | Encode
    | Resolve
    | Serve
    | KeepBefore
    | Undo
    | ProveHolding
    | FetchShown
    | SaveFragment
    | DropSave
    | KeepBase
    | KeepAhead
    | Restore
    | ListShelf
    | Recall
    | BeginFrom
    | Follow
    | Assist
    | Note
    | Exit
    | DataEffect
)
