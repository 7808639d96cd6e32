"""The modes that can be taken out, and what each brings.

A mode is a folder.  The core never imports it: it asks here for the module in which the mode begins, and goes on
without it where the folder is gone.  This list, in its order, is all that the core knows of modes; there is nothing to
register and nothing to discover.  tests/house/test_modes.py takes each folder out of a copy and runs the rest.

What such a module may have: `LedgerPart`, a class that folds records (coordinator/ledger/ledger.py); `RECORDS`,
the types of its records; `made`, which makes its part of the run machine, or None where the run has no use
for it; `stands_by` and `ask_peers` (coordinator/run_lead.py), and `asking`, which is the latter without a socket
(simulator/cut_lines.py). Elsewhere it may have a `hand` in the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Protocol

from farflung.coordinator.court.questions import MemberAnswer
from farflung.coordinator.door.hello_check import HelloPassed
from farflung.coordinator.rounds.reported import CommittedSums
from farflung.coordinator.rounds.round_policy import RoundPolicy
from farflung.protocol.errors import DepartureCause, UserError, Verdict
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Beat, FromMember, Hello, OfTick, Order, Refuse, Reply
from farflung.protocol.process.mode_folders import module_of
from farflung.protocol.signing import KeptCommit

# Name -> the module in which it begins.
BEGINNINGS: Final = {
    "admission": "farflung.coordinator.admission.admission",
    "audits": "farflung.coordinator.audits.audits",
    "batches": "farflung.coordinator.batches.batch_mode",
    "evaluation": "farflung.coordinator.evaluation.evaluation",
    "mesh": "farflung.coordinator.mesh.mesh",
    "pace": "farflung.coordinator.pace.pace",
    "reach": "farflung.coordinator.reach.reach",
    "recovery": "farflung.coordinator.recovery.recovery",
    "restoring": "farflung.coordinator.restoring.restoring_door",
    "slow lines": "farflung.coordinator.slow_lines.slow_lines",
    "standby": "farflung.coordinator.standby.standby",
}
# Name -> the module with its `hand` in the server (`ServerHand`).
HANDS: Final = {
    "admission": "farflung.coordinator.admission.allowlist",
    "reach": "farflung.coordinator.relay.relay_hand",
}
# Name -> the section of run.toml that is the mode's.
SECTIONS: Final = {"admission": "admission"}
# Name -> (section, key) of run.toml by which the host asks for something of the mode's, and what asks for nothing.
KEYS: Final = {
    "audits": ("merge", "audit", 0.0),
    "batches": ("pipeline", "batch", 0),
    "evaluation": ("eval", "source", ""),
    "mesh": ("round", "group", 0),
    "reach": ("net", "relay", "off"),
}


def check(manifest: Manifest) -> None:
    """UserError: the host wants something of a mode that was taken out.  A run that is to be by invitation must not be
    open because of that.  What it asks for by default alone is no reason."""
    for mode, section in SECTIONS.items():
        wanted = getattr(manifest, section)
        if found(mode) is None and wanted != type(wanted)():
            raise UserError(
                f"[{section}] of run.toml is not as by default, and this coordinator was installed without {mode}: "
                "leave that section out, or install it whole"
            )
    for mode, (section, key, nothing) in KEYS.items():
        part = getattr(manifest, section)
        asked = getattr(part, key)
        if found(mode) is None and asked not in (nothing, getattr(type(part)(), key)):
            raise UserError(
                f"[{section}] {key} = {asked!r} of run.toml: this coordinator was installed without {mode}: "
                f"leave that out, say {nothing!r}, or install it whole"
            )


def lacking() -> str:
    """For people: the modes that were taken out; empty: none."""
    names = [mode for mode in BEGINNINGS if found(mode) is None]
    return (
        f"this coordinator was installed without {', '.join(names)} (docs/architecture.md)" if names else ""
    )


def found(mode: str) -> ModuleType | None:
    """None: its folder was taken out."""
    return module_of(BEGINNINGS[mode])


def hands() -> dict[str, Any]:
    """Of each mode that is there and has one."""
    return {name: module.hand for name, path in HANDS.items() if (module := module_of(path)) is not None}


def having(what: str) -> dict[str, Any]:
    """Of each mode that is there and has it."""
    here = {name: module for name in BEGINNINGS if (module := found(name)) is not None}
    return {name: getattr(module, what) for name, module in here.items() if hasattr(module, what)}


def records() -> tuple[type[Any], ...]:
    """The types of the records of all modes that are there."""
    return tuple(kind for kinds in having("RECORDS").values() for kind in kinds)


# ---- mode --------------------------------------------------------------------------------------------------
# What a mode may say in the run machine: questions, and an answer to each that changes nothing. Pure.
#
# The core asks the modes that are there, in their order; it never asks which they are. A mode
# answers with a value, writes records of its own, and speaks through the core's words alone (`write`, `note`,
# `tell`). What it has to remember is its part of the ledger, a fold over records.


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

    def tell(self, peer: str, beat: Beat) -> Sequence[OfTick]:
        """This beat is answered: what the tick says for this mode."""
        return ()

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

    def busy_with(self, fragment: int) -> str:
        """For what members of a run that is complete stay a while, for people; empty: for nothing of this mode's."""
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


class LossMode(CoordinatorMode):
    """A mode that another one computes losses for."""

    def is_evaluated_next(self) -> bool:
        """The held-out loss of the newest version is due, and the members find it together, before they go on."""
        raise NotImplementedError

    def on_losses(self, losses: Mapping[str, Mapping[int, float]]) -> None:
        """They have: by peer, the nats a token of each window of [eval]."""
        raise NotImplementedError


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


class Dice:
    """What nobody can foresee, out of random bytes."""

    def __init__(self, random: Callable[[int], bytes]) -> None:
        self._random = random

    def below(self, count: int) -> int:
        return int.from_bytes(self._random(8), "little") * count >> 64

    def draw(self, count: int, share: float) -> list[int]:
        """Some of so many places, each one as likely as any other; how many is the share on average."""
        due = share * count
        many = int(due) + (self.below(1 << 32) < (due - int(due)) * (1 << 32))
        return sorted(self._drawn(count, many))

    def _drawn(self, count: int, many: int) -> list[int]:
        places = list(range(count))
        for at in range(many):
            other = at + self.below(count - at)
            places[at], places[other] = places[other], places[at]
        return places[:many]

    def shuffled(self, places: Sequence[str]) -> list[str]:
        return [places[at] for at in self._drawn(len(places), len(places))]


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
        """One of a mode's: of this one, or of another one, which has its own hand."""

    def close(self) -> None: ...


Modes = Sequence[CoordinatorMode]
