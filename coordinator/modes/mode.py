"""What a mode may say in the run machine: questions, and an answer to each that changes nothing.  Pure.

The core asks the modes that are there (registry.py), in their order; it never asks which they are.  A mode
answers with a value, writes records of its own, and speaks through the core's words alone (`write`, `note`, `tell`).
What it has to remember is its part of the ledger, a fold over records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from farflung.coordinator.door.hello_check import HelloPassed
from farflung.protocol.causes import DepartureCause
from farflung.protocol.messages import Beat, Refuse
from farflung.protocol.orders import Order, Reply
from farflung.protocol.signing import KeptCommit


class CoordinatorMode:
    """Each mode gives some of these answers; these are those of one that has nothing to say."""

    def refuses(self, passed: HelloPassed, peer: str) -> Refuse | None:
        """It fits the run and there is room; None: it may come in."""
        return None

    def on_admitted(self, passed: HelloPassed, peer: str) -> None:
        """A session of it begins: that is written."""

    def after(self, struck: Sequence[str], convicted: Sequence[tuple[str, str]]) -> None:
        """At the end of an event in which some were `struck` for what no honest member does, or `convicted`: proven to
        have lied, and how."""

    def keeps_out(self, peer: str) -> bool:
        """It does not come in again, for now."""
        return False

    def obey(self, order: Order) -> Reply | None:
        """None: an order of somebody else's.  UserError: a mistake of the host's."""
        return None

    def status_of(self, peer: str) -> Mapping[str, Any]:
        """Of a member, for people."""
        return {}

    def on_hello(self, passed: HelloPassed) -> None:
        """It may come in: what it says in its hello is heard."""

    def on_answered(self, peer: str, beat: Beat) -> None:
        """This beat was answered with a tick: what else is this member to be told?"""

    def holds(self) -> str:
        """Why no round may be opened; empty: for all this mode knows, one may."""
        return ""

    def is_keeper(self, peer: str) -> bool:
        """It keeps what the run is now, and so is told of commits in groups as a whole."""
        return False

    def kept_by(self, peer: str) -> KeptCommit | None:
        """What it is to keep of the run as it is now: that comes with the commit."""
        return None

    def voids(self, fragment: int, version: int) -> bool:
        """Whoever holds this version is not to believe it any longer."""
        return False


class SendAway(Protocol):
    """Ends a membership; `told` is said to the peer, `why` to everybody else."""

    def __call__(self, peer: str, cause: DepartureCause, told: str, why: str) -> None: ...


@dataclass(frozen=True)
class ModeTools:
    """What the machine gives a mode beside its core."""

    random: Callable[[int], bytes]
    send_away: SendAway


class FileHand(Protocol):
    """A mode's hand in the server: looks at files of the host's, and changes the mode by what it read."""

    def look(self) -> None: ...


Modes = Sequence[CoordinatorMode]
