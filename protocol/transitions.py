"""A table of states: which event leads from which state to which, and how the table is drawn.  Pure.

Used by whoever has declared states: a fragment's lane (peer/machine/lane_states.py) and a peer as people see it
(protocol/peer_states.py).  The tables are drawn into docs/architecture.md by docs/make_states.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

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
