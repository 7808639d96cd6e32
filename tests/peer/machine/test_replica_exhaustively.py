"""Every order of everything that can happen to a replica of two chunks, until nothing new comes of it.

The real replica and its catch-up are explored breadth first: every frame, true ones of both eras and of every
version, at every moment; every way of filling, to its end or not; the run that commits and goes back.  What must
never be is raised by the cell itself (tests/rig/replica_world.py).  And from wherever it got, honest donors bring it
to the run's version.
"""

from __future__ import annotations

import pytest

from farflung.peer.machine.held_fragment import STANDS, Current
from rig.pieces import with_time_for
from rig.replica_world import Broken, Cell

# Events in a row.  With FARFLUNG_LONG=2 as many as lead anywhere new.
EACH_TIME, IN_HARD = 4, with_time_for([99], in_ci=[7])[-1]


Story = tuple[str, ...]


def explored(depth: int) -> list[tuple[Cell, Story]]:
    """One cell for each situation that so many events lead to, and by which."""
    news: list[tuple[Cell, Story]] = [(Cell(), ("a newcomer",)), (Cell.of_a_founder(), ("a founder",))]
    seen, found = {cell.key for cell, _ in news}, [*news]
    while news and depth:
        before, depth = news, depth - 1
        news = list[tuple[Cell, Story]]()
        for cell, path in before:
            again = cell.copies()
            for name, happens in cell.events():
                after = again()
                try:
                    happens(after)
                except Exception as error:
                    raise Broken(f"{' | '.join([*path, name])}: {error}") from error
                if after.key not in seen:
                    seen.add(after.key)
                    news.append((after, (*path, name)))
        found += news
    return found


def comes_home(cell: Cell) -> bool:
    """Nothing else happens, and who is asked answers truly."""
    for _ in range(30):
        if (
            isinstance(cell.replica.held.stand, Current)
            and cell.replica.held.version == cell.version
            and cell.replica.held.serves
        ):
            return True
        cell.goes_on_honestly()
    return False


@pytest.mark.parametrize("depth", [EACH_TIME, pytest.param(IN_HARD, marks=pytest.mark.hard)])
def test_P1_P4_P8_nothing_that_can_happen_makes_a_mixture_and_P3_all_come_home(depth: int) -> None:
    found = explored(depth)
    assert {type(cell.replica.held.stand) for cell, _ in found} == set(STANDS.table)
    for cell, path in found:
        assert comes_home(cell), f"never whole: {' | '.join(path)}"
