"""A table of states: which event leads from which state to which, and how the table is drawn.  Pure.

Used by whoever has declared states: a fragment's lane (peer/machine/lane_states.py) and a peer as people see it
(protocol/peer_states.py).  The tables are drawn into docs/architecture.md by docs/make_states.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
            raise IllegalMove(f"{event} in the state {state}")
        return after

    def check(self, state: S, event: E, after: S) -> None:
        """For states that carry data, which the one who moves makes: is it the state that the table says?"""
        due = self.after(state, event)
        if after != due:
            raise IllegalMove(f"{event} in the state {state} leads to {due}, not to {after}")

    # ---- drawing ----------------------------------------------------------------------------------------------

    def drawn(self, start: S, name: Callable[[S], str], event_name: Callable[[E], str]) -> str:
        """As a Mermaid diagram: one arrow for each two states, with all the events that lead along it.

        States with the same row are drawn as one box with several names.
        """
        names = {state: name(state) for state in self._alike()}
        for state, others in self._alike().items():
            names[state] = "_or_".join(name(each) for each in others)
        arrows: dict[tuple[S, S], list[str]] = {}
        first_of = {each: state for state, others in self._alike().items() for each in others}
        for state in self._alike():
            for event, after in self.table[state].items():
                alone = len(self._alike()[first_of[after]]) == 1
                told = event_name(event) if alone else f"{event_name(event)} ({name(after)})"
                arrows.setdefault((state, first_of[after]), []).append(told)
        lines = ["stateDiagram-v2", f"    [*] --> {names[first_of[start]]}"]
        for (before, after), events in arrows.items():
            lines.append(f"    {names[before]} --> {names[after]}: {', '.join(events)}")
        return "\n".join(lines)

    def _alike(self) -> dict[S, list[S]]:
        """The first of all states with the same row, and the whole list of them."""
        found: dict[S, list[S]] = {}
        for state, moves in self.table.items():
            first = next((each for each in found if self.table[each] == moves), state)
            found.setdefault(first, []).append(state)
        return found
