"""Why does this peer not train just now?  One cause and one sentence, from the machine as it stands.  Pure.

Asked by the agent at every tick; it passes on what its machine notes, too.  Where the cause changes a line says so in
the log, and the same line carries it, as facts, to the screen of `farflung join`.  What holds up a round is the
coordinator's to say, and comes with its status; what is here is what a peer knows best itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.peer.machine.handshake import HandshakeState
from farflung.protocol.states import Goal

if TYPE_CHECKING:
    from farflung.peer.machine.machine import PeerMachine
    from farflung.peer.machine.replicas import Replicas


class WaitCause(StrEnum):
    """Travels to the screen as it stands here."""

    NONE = ""  # it trains, or helps
    LOADING = "loading"  # torch, in the agent: nothing else runs yet
    TRAINER = "trainer"
    KNOCKING = "knocking"
    REFUSED = "refused"
    ENTERING = "entering"
    FOUNDING = "founding"
    FETCHING = "fetching"
    BEHIND = "behind"  # it holds an older version of the run's state, and takes the results since
    READING = "reading"
    TOLD = "told"  # by the coordinator, in its words
    DATA = "data"
    ROUND = "round"
    LEAVING = "leaving"


class NamedWait(NamedTuple):
    cause: WaitCause
    text: str


# A cause that is over sooner is not worth a line.
USUAL_S = 1.0
PATIENCE_S = {
    WaitCause.NONE: 0.0,
    WaitCause.REFUSED: 0.0,
    WaitCause.FETCHING: 0.0,
    WaitCause.DATA: 3.0,
    WaitCause.BEHIND: 30.0,
    WaitCause.ROUND: 30.0,
}
LOADING = NamedWait(WaitCause.LOADING, "loading torch")
_NUMBERS = re.compile(r"[0-9.]+")


def fetching(share: float) -> str:
    return f"downloading the model: {share:.0%}"


def wait_of(machine: PeerMachine, share: float = 0.0) -> NamedWait:
    """`share`: of the run's state that is fetched."""
    member = machine.member
    if member.leaving.asked:
        return NamedWait(WaitCause.LEAVING, f"leaving when this round is over: {member.leaving.reason}")
    if not machine.doorway.inside:
        return _outside(machine)
    tick, training = member.tick, member.training
    if tick is None:
        return NamedWait(WaitCause.ENTERING, "let in; waiting for the coordinator's first word")
    match tick.goal:
        case Goal.FOUND:
            return NamedWait(WaitCause.FOUNDING, "giving the run its first weights")
        case Goal.WAIT | Goal.ALONE if member.joined is not None and member.joined.disk.reads:
            return NamedWait(WaitCause.READING, "reading the run's state from a disk")
        case Goal.SYNC if member.joined is not None and _holds_all(member.joined.part):
            return NamedWait(WaitCause.BEHIND, tick.reason)
        case Goal.SYNC:
            return NamedWait(WaitCause.FETCHING, fetching(share))
        case Goal.WAIT | Goal.ALONE:
            return NamedWait(WaitCause.TOLD, tick.reason)
    if machine.doorway.helps:
        return NamedWait(WaitCause.NONE, "helping")
    if not training.attached:
        return NamedWait(WaitCause.TRAINER, "starting the trainer: torch, its model and its data")
    if training.waits_for_round:
        return NamedWait(WaitCause.ROUND, f"waiting for the next round: {tick.reason}")
    if training.leases.want and not training.loading:
        return NamedWait(WaitCause.DATA, "no data is leased to this peer yet; the coordinator is asked again")
    return NamedWait(WaitCause.NONE, "training")


def _holds_all(part: Replicas) -> bool:
    held = [each.held.version for each in part.replicas.values()]
    return bool(held) and NO_VERSION not in held


def _outside(machine: PeerMachine) -> NamedWait:
    doorway = machine.doorway
    if doorway.refused:
        return NamedWait(WaitCause.REFUSED, f"not admitted yet: {doorway.refused}")
    if machine.member.joined is not None and doorway.stand != HandshakeState.GREETING:
        return NamedWait(
            WaitCause.KNOCKING, "no answer from the coordinator; training goes on, and it is asked again"
        )
    if doorway.stand == HandshakeState.KNOCKING and machine.known is None:
        return NamedWait(WaitCause.KNOCKING, "no answer from the coordinator yet; it is asked again")
    if machine.offer is None:
        if machine.doorway.helps:
            return NamedWait(WaitCause.TRAINER, "waiting for a peer that trains: it brings the run's model")
        return NamedWait(WaitCause.TRAINER, "starting the trainer: torch, its model and its data")
    return NamedWait(WaitCause.ENTERING, "asking to be let in")


class Waits:
    """What of it is worth a line, and when: each wait once, and not what is over at once."""

    def __init__(self, said: NamedWait = LOADING) -> None:
        self._said = _same(said)
        self._seen, self._since = said.cause, 0.0

    def look(self, wait: NamedWait, now: float) -> NamedWait | None:
        """The line that is due."""
        if wait.cause != self._seen:
            self._seen, self._since = wait.cause, now
        if _same(wait) == self._said or now - self._since < PATIENCE_S.get(wait.cause, USUAL_S):
            return None
        self._said = _same(wait)
        return wait

    def says(self, wait: NamedWait) -> bool:
        """It is said just now by others' doing.  False: it was said before."""
        news = _same(wait) != self._said
        self._said = _same(wait)
        return news


def _same(wait: NamedWait) -> NamedWait:
    """Without what counts up or down in it: that alone is no news."""
    told = wait.cause in (WaitCause.REFUSED, WaitCause.TOLD, WaitCause.BEHIND)
    return NamedWait(wait.cause, _NUMBERS.sub("", wait.text) if told else "")


def facts_of(wait: NamedWait) -> dict[str, str]:
    """For programs: `wait` names the cause, `why` is the sentence; both are empty while nothing is waited for."""
    return {"wait": wait.cause.value, "why": wait.text if wait.cause else ""}


class WaitLines:
    def __init__(self, say: Callable[..., None]) -> None:
        """`say`: a line, as protocol/process/log_lines.py has it."""
        self._say = say
        self._waits = Waits()

    def turn(self, machine: PeerMachine, share: float, now: float) -> None:
        due = self._waits.look(wait_of(machine, share), now)
        if due is not None:
            self._say(due.text, **facts_of(due))

    def note(self, text: str, routine: bool, machine: PeerMachine) -> None:
        """What the machine notes may be the wait itself, and is said once then, however often it is noted."""
        wait = wait_of(machine)
        if wait.text != text:
            self._say(text, routine=routine)
        elif self._waits.says(wait):
            self._say(text, **facts_of(wait))
