"""Declared states: a table of which event leads from which state to which, and the one of where a peer is.  Pure.

A table is checked at every move and drawn into docs/states.md (docs/make_states.py).  A room that has declared
states uses it: a fragment at a peer (held_fragment.py and fragment_rounds.py in peer/machine), and below a peer as
people see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from farflung.protocol.errors import DepartureCause

S = TypeVar("S")
E = TypeVar("E")


class IllegalMove(RuntimeError):
    """A mistake in the program: an event came in a state for which no table has it."""


class Transitions(Generic[S, E]):
    """`table`: {state: {event: state}}; what is not in it is illegal."""

    def __init__(self, table: Mapping[S, Mapping[E, S]]) -> None:
        unknown = {after for moves in table.values() for after in moves.values()} - table.keys()
        if unknown:
            raise ValueError(f"states without a row of their own: {sorted(map(str, unknown))}")
        self.table = table

    def after(self, state: S, event: E) -> S:
        after = self.table[state].get(event)
        if after is None:
            raise IllegalMove(f"{event} in the state {_name(state)}")
        return after

    def check(self, state: S, event: E, after: S) -> None:
        """For states that carry data, which the one who moves makes: is it the state that the table says?"""
        due = self.after(state, event)
        if after != due:
            raise IllegalMove(
                f"{event} in the state {_name(state)} leads to {_name(due)}, not to {_name(after)}"
            )

    # ---- drawing ----------------------------------------------------------------------------------------------

    def drawn(
        self,
        start: S,
        name: Callable[[S], str],
        event_name: Callable[[E], str] = str,
        boxes: Mapping[str, Sequence[S]] | None = None,
    ) -> str:
        """As a Mermaid diagram: one arrow for each two states, with all the events that lead along it.

        `boxes`: states with the same row, drawn as one box; its arrows are those of each state in it.
        """
        boxes = boxes or {}
        lines = ["stateDiagram-v2", f"    [*] --> {name(start)}"]
        boxed: set[S] = set()
        for box, states in boxes.items():
            if any(self.table[state] != self.table[states[0]] for state in states):
                raise ValueError(f"the states of {box} have different rows")
            boxed |= set(states)
            lines += [f"    state {box} {{", *(f"        {name(state)}" for state in states), "    }"]
        rows = [(box, self.table[states[0]]) for box, states in boxes.items()]
        rows += [(name(state), row) for state, row in self.table.items() if state not in boxed]
        for before, row in rows:
            arrows: dict[S, list[str]] = {}
            for event, after in row.items():
                arrows.setdefault(after, []).append(event_name(event))
            lines += [f"    {before} --> {name(after)}: {', '.join(told)}" for after, told in arrows.items()]
        return "\n".join(lines)


def _name(state: object) -> str:
    return state.__name__ if isinstance(state, type) else str(state)


# ---- where a peer is -----------------------------------------------------------------------------------------------
#
# Three say where a peer is, and each has its own words, which travel as they stand here:
#
#     Phase      the peer, in its beat: what its machine is doing         (peer/machine/heartbeat.py)
#     Goal       the coordinator, in its tick: what the peer is to do     (coordinator/run/ticks.py)
#     PeerState  the coordinator's status, for people: one word of both   (coordinator/run/membership.py, console/)
#
# `state_after` makes the third of the first two, by `PEER_STATES`.  What a member is in each fragment (verified,
# vouched, quarantined) is a `Standing` of the coordinator, from which the goal follows; nobody else sees it.


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
