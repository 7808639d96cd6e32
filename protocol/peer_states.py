"""Where a peer is: the words for it, whose words they are, and one table of how they follow each other.  Pure.

Three say where a peer is, and each has its own words, which travel as they stand here:

    Phase      the peer, in its beat: what its machine is doing         (peer/machine/reports.py)
    Goal       the coordinator, in its tick: what the peer is to do     (coordinator/run/guidance.py)
    PeerState  the coordinator's status, for people: one word of both   (coordinator/run/membership.py, console/)

`state_after` makes the third of the first two, by `PEER_STATES`.  What a member is in each fragment (verified, vouched,
quarantined) is a `Standing` of the coordinator, from which the goal follows; nobody but the coordinator sees it.
"""

from __future__ import annotations

from enum import StrEnum

from farflung.protocol.causes import DepartureCause
from farflung.protocol.transitions import Transitions


class Phase(StrEnum):
    INNER = "inner"  # it takes inner steps
    READY = "ready"  # its work is frozen, and it waits for a round
    SCATTER = "scatter"  # contributions are on their way to the chunks' owners
    GATHER = "gather"  # results are on their way to everybody
    APPLY = "apply"  # the outer step is made, and its digest calculated
    STUCK = "stuck"  # its trainer takes no steps though it could: nobody waits for it
    LEAVING = "leaving"  # it stays for the rounds that it is in, and begins no other


class Goal(StrEnum):
    FOUND = "found"  # give the run its initial state
    SYNC = "sync"  # fetch the run's state
    WAIT = "wait"  # for somebody else
    TRAIN = "train"
    ALONE = "alone"  # train, and expect no round
    FINISH = "finish"  # the run is complete


class PeerState(StrEnum):
    JOINING = "joining"
    SYNCING = "syncing"
    WAITING = "waiting"
    QUARANTINED = "quarantined"
    INNER = "inner"
    READY = "ready"
    SCATTER = "scatter"
    GATHER = "gather"
    APPLY = "apply"
    STUCK = "stuck"
    LEAVING = "leaving"
    LOST = "lost"
    LEFT = "left"
    KICKED = "kicked"
    BANNED = "banned"


class RunPhase(StrEnum):
    """Where the run is, in the status: its oldest round in flight, or what it does between rounds."""

    WAITING = "waiting"  # too few peers hold its state
    INNER = "inner"
    SCATTER = "scatter"
    GATHER = "gather"
    APPLY = "apply"
    FINISHED = "finished"


class PeerEvent(StrEnum):
    ADMITTED = "admitted"
    MUST_FOUND = "told to found"
    MUST_SYNC = "told to sync"
    MUST_WAIT = "told to wait"
    DIFFERS = "its digest differs"
    SAYS_INNER = "says inner"
    SAYS_READY = "says ready"
    SAYS_SCATTER = "says scatter"
    SAYS_GATHER = "says gather"
    SAYS_APPLY = "says apply"
    SAYS_STUCK = "says stuck"
    SAYS_LEAVING = "says leaving"
    FELL_SILENT = "fell silent"
    SAID_GOODBYE = "said good-bye"
    SENT_AWAY = "kicked by the host"
    SHUT_OUT = "banned"


# Beats are looks at a peer: between two of them it may have been anywhere, so any word may follow any other.
_WHILE_HERE = {
    PeerEvent.ADMITTED: PeerState.JOINING,  # again, as a new process or over a new connection
    PeerEvent.MUST_FOUND: PeerState.JOINING,
    PeerEvent.MUST_SYNC: PeerState.SYNCING,
    PeerEvent.MUST_WAIT: PeerState.WAITING,
    PeerEvent.DIFFERS: PeerState.QUARANTINED,
    PeerEvent.SAYS_INNER: PeerState.INNER,
    PeerEvent.SAYS_READY: PeerState.READY,
    PeerEvent.SAYS_SCATTER: PeerState.SCATTER,
    PeerEvent.SAYS_GATHER: PeerState.GATHER,
    PeerEvent.SAYS_APPLY: PeerState.APPLY,
    PeerEvent.SAYS_STUCK: PeerState.STUCK,
    PeerEvent.SAYS_LEAVING: PeerState.LEAVING,
    PeerEvent.FELL_SILENT: PeerState.LOST,
    PeerEvent.SAID_GOODBYE: PeerState.LEFT,
    PeerEvent.SENT_AWAY: PeerState.KICKED,
    PeerEvent.SHUT_OUT: PeerState.BANNED,
}
GONE = (PeerState.LOST, PeerState.LEFT, PeerState.KICKED, PeerState.BANNED)
HERE = tuple(state for state in PeerState if state not in GONE)
ARRIVING = (PeerState.JOINING, PeerState.SYNCING)  # on the way in: nothing is wrong yet
PEER_STATES: Transitions[PeerState, PeerEvent] = Transitions(
    {state: {PeerEvent.ADMITTED: PeerState.JOINING} if state in GONE else _WHILE_HERE for state in PeerState}
)

OF_DEPARTURE = {
    DepartureCause.CLOSED: PeerEvent.FELL_SILENT,
    DepartureCause.SILENT: PeerEvent.FELL_SILENT,
    DepartureCause.LEFT: PeerEvent.SAID_GOODBYE,
    DepartureCause.FINISHED: PeerEvent.SAID_GOODBYE,
    DepartureCause.MISFIT: PeerEvent.SAID_GOODBYE,
    DepartureCause.UNKNOWN: PeerEvent.SAID_GOODBYE,
    DepartureCause.KICKED: PeerEvent.SENT_AWAY,
    DepartureCause.BANNED: PeerEvent.SHUT_OUT,
}
_OF_GOAL = {
    Goal.FOUND: PeerEvent.MUST_FOUND,
    Goal.SYNC: PeerEvent.MUST_SYNC,
    Goal.WAIT: PeerEvent.MUST_WAIT,
}
_OF_PHASE = {phase.value: PeerEvent(f"says {phase}") for phase in Phase}


def state_after(state: PeerState, goal: Goal, phase: str, quarantined: bool) -> PeerState:
    """`phase`: as the beat has it.  A word that nobody knows comes from no honest peer, and says only that it lives."""
    told = _OF_PHASE.get(phase, PeerEvent.SAYS_INNER)
    event = PeerEvent.DIFFERS if quarantined else _OF_GOAL.get(goal, told)
    return PEER_STATES.after(state, event)
