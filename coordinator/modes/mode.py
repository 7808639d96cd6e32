"""What a mode may say in the run machine: seven questions, and an answer to each that changes nothing.  Pure.

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
from farflung.protocol.messages import Refuse
from farflung.protocol.orders import Order, Reply


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

    def find_ways(self, together: Callable[[str, str], bool]) -> bool:
        """Time passed, or somebody came, or was dialled.  `together`: is there a round that both are in?  True: members
        are to hear of other ways to each other."""
        return False

    def status_of(self, peer: str) -> Mapping[str, Any]:
        """Of a member, for people."""
        return {}


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
