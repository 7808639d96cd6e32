"""What a mode may say in the run machine: questions, and an answer to each that changes nothing.  Pure.

The core asks the modes that are there (registry.py), in their order; it never asks which they are.  A mode
answers with a value, writes records of its own, and speaks through the core's words alone (`write`, `note`, `tell`).
What it has to remember is its part of the ledger, a fold over records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

from farflung.coordinator.court.questions import MemberAnswer
from farflung.coordinator.door.hello_check import HelloPassed
from farflung.coordinator.rounds.committed_sums import CommittedSums
from farflung.coordinator.rounds.round_policy import RoundPolicy
from farflung.protocol.causes import DepartureCause
from farflung.protocol.messages import Beat, FromMember, Hello, Refuse
from farflung.protocol.orders import Order, Reply
from farflung.protocol.signing import KeptCommit
from farflung.protocol.verdicts import Verdict


class CoordinatorMode:
    """Each mode gives some of these answers; these are those of one that has nothing to say."""

    whole_roster = False  # every member has to hear of all others, however many there are

    # ---- the coordinator itself ------------------------------------------------------------------------

    def on_start(self, restored: bool) -> str:
        """It starts, `restored`: from a copy of the journal.  What people are to hear of that."""
        return ""

    # ---- who comes in, and who has to go ---------------------------------------------------------------

    def refuses(self, passed: HelloPassed, peer: str) -> Refuse | None:
        """It fits the run and there is room; None: it may come in."""
        return None

    def on_hello(self, passed: HelloPassed) -> None:
        """It may come in: what it says in its hello is heard."""

    def on_admitted(self, passed: HelloPassed, peer: str) -> None:
        """A session of it begins: that is written."""

    def after(self, struck: Sequence[str], convicted: Sequence[tuple[str, str]]) -> None:
        """At the end of an event in which some were `struck` for what no honest member does, or `convicted`: proven to
        have lied, and how."""

    def keeps_out(self, peer: str) -> bool:
        """It does not come in again, for now."""
        return False

    def fragments_of(self, hello: Hello, peer: str) -> tuple[int, ...] | None:
        """Which of the fragments that it offers it is to hold from now on; None: this mode does not mind."""
        return None

    # ---- what members say, and hear --------------------------------------------------------------------

    def hear(self, peer: str, beat: Beat) -> None:
        """What a member says of itself, before the core takes it in."""

    def on_message(self, peer: str, message: FromMember) -> Verdict | None:
        """What a member says to this mode.  None: it is for somebody else."""
        return None

    def on_answer(self, answer: MemberAnswer) -> bool:
        """What a member shows.  False: this mode did not ask for it."""
        return False

    def tell(self, peer: str, beat: Beat) -> Mapping[str, Any]:
        """This beat is answered: what the tick says for this mode, by its fields."""
        return {}

    def on_answered(self, peer: str, beat: Beat) -> None:
        """This beat was answered with a tick: what else is this member to be told?"""

    def find_ways(self, together: Callable[[str, str], bool]) -> bool:
        """Time passed, or somebody came, or was dialled.  `together`: is there a round that both are in?  True: members
        are to hear of other ways to each other."""
        return False

    def judge(self, fragment: int, undefended: bool) -> DigestCase | None:
        """Members contradict each other about the newest version; or it is `undefended`: those who are here name
        another digest than was settled.  None: this mode can't tell who is right."""
        return None

    # ---- rounds, versions, and what is left of them ----------------------------------------------------

    def policy(self, fragment: int) -> RoundPolicy | None:
        """By which rules the rounds of this fragment are opened, if not by the core's; asked once."""
        return None

    def on_turn(self) -> bool:
        """Rounds were moved on as far as they go.  True: members are told at once where the run is now."""
        return False

    def holds(self) -> str:
        """Why no round may be opened; empty: for all this mode knows, one may."""
        return ""

    def on_committed(self, sums: CommittedSums) -> None:
        """A round was committed, which is written; `sums`: who signed for what it is made of."""

    def is_busy_with(self, fragment: int) -> bool:
        """Members of a run that is complete stay a while for what this mode has begun."""
        return False

    def is_keeper(self, peer: str) -> bool:
        """It keeps what the run is now, and so is told of commits in groups as a whole."""
        return False

    def kept_by(self, peer: str) -> KeptCommit | None:
        """What it is to keep of the run as it is now: that comes with the commit."""
        return None

    def voids(self, fragment: int, version: int) -> bool:
        """Whoever holds this version is not to believe it any longer."""
        return False

    def saved_by(self, fragment: int) -> AbstractSet[str]:
        """Peers that have some version of it on disk, by what they say."""
        return frozenset()

    def why_wait(self, fragment: int, is_given: bool) -> str:
        """Why a member that lacks this fragment's newest version has to wait, for people; empty: it has no reason.
        `is_given`: another member would give it."""
        return ""

    def lost(self) -> Mapping[int, str]:
        """Fragments whose newest version nobody has, and what can be done."""
        return {}

    # ---- time, and people ------------------------------------------------------------------------------

    def on_timer(self) -> bool:
        """Time passed.  True: members are told at once where the run is now."""
        return False

    def obey(self, order: Order) -> Reply | None:
        """None: an order of somebody else's.  UserError: a mistake of the host's."""
        return None

    def status(self) -> Mapping[str, Any]:
        """Of the run, for people."""
        return {}

    def status_of_fragments(self) -> Sequence[Mapping[str, Any]]:
        """Of each fragment in its order, for people; empty: nothing."""
        return ()

    def status_of(self, peer: str) -> Mapping[str, Any]:
        """Of a member, for people."""
        return {}


class DigestCase(Protocol):
    """Finds out which digest of a version is wrong."""

    unproven: dict[str, str]  # members that do not hold what they named, and why that is so
    groundless: dict[str, str]  # members that can't show how they came to it
    silent: set[str]  # of these: those that did not even say so

    def step(self, claims: Mapping[bytes, list[str]], now: float) -> bool:
        """`claims`: who names which digest, of members that are here.  True when it is over."""
        ...

    def on_answer(self, answer: MemberAnswer) -> bool:
        """True if it was an answer to a question of this case."""
        ...

    def keep(self, digest: bytes, peers: tuple[str, ...]) -> None:
        """It is wrong, and these named it: what proves that is kept."""
        ...

    def close(self) -> None: ...

    @property
    def wrong(self) -> dict[bytes, int]:
        """Digests that are proven wrong, each in which chunk of the model."""
        ...

    @property
    def undecidable(self) -> bool:
        """Once it is over: nobody could show what came before."""
        ...

    @property
    def drew(self) -> bool:
        """Chunks of a digest that nobody here contradicts;"""
        ...

    @property
    def stands(self) -> bool:
        """all of these have been calculated."""
        ...

    @property
    def told(self) -> str:
        """For people: where it stands."""
        ...


class SendAway(Protocol):
    """Ends a membership; `told` is said to the peer, `why` to everybody else."""

    def __call__(self, peer: str, cause: DepartureCause, told: str, why: str) -> None: ...


@dataclass(frozen=True)
class ModeTools:
    """What the machine gives a mode beside its core."""

    random: Callable[[int], bytes]
    send_away: SendAway
    follow_ways: Callable[[], None]  # to each other: they may be others than before
    settle: Callable[[], None]  # moves all rounds on
    fits: Callable[[str], bool]  # the peer has the run's data


class ServerHand:
    """A mode's hand in the server: each does some of this."""

    def look(self) -> None:
        """At files of the host's, and changes the mode by what it read."""

    def begin(self, public: bytes, host: str, port: int) -> None:
        """The run has begun.  `public`: the key that signs for it; `host`, `port`: where the mode may listen."""

    def turn(self, now: float, wall_s: float) -> Sequence[Any]:
        """At every tick; the effects of what the mode heard by it."""
        return ()

    def act(self, effect: Any, now: float) -> None:
        """One of the mode's own."""

    def close(self) -> None: ...


Modes = Sequence[CoordinatorMode]
