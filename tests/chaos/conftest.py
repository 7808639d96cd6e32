"""Runs that are there to be broken: tests/rig/arena.py, one for all tests of a file, judged by the audit after each.

FARFLUNG_LONG=1 walks everything; without it a small choice is made.  FARFLUNG_FIGURES=FILE: one JSON line for each
measured case, for benchmarks/reliability.py.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rig.arena import Arena
from rig.nursery import Nursery

STANDING = ("ann", "bob", "cid")


@pytest.fixture(scope="module")  # not longer: these runs train, and other tests want the cores
def build(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Arena]]:
    """A run with a coordinator; what is left of it at the end is ended."""
    made: list[Arena] = []

    def one(**rules: Any) -> Arena:
        made.append(Arena(tmp_path_factory.mktemp("run"), nursery, **rules))
        return made[-1]

    try:
        yield one
    finally:
        for arena in made:
            arena.close()


@pytest.fixture(scope="module")
def standing(build: Callable[..., Arena]) -> Arena:
    """Three peers that are not broken on purpose; each test brings its victim."""
    made = build()
    made.begin(*STANDING)
    return made


@pytest.fixture
def arena(standing: Arena) -> Arena:
    """Whole at the beginning of each test, however the one before ended."""
    for party in standing.parties.values():
        party.signal(signal.SIGCONT)
        if party.alive and party.name not in (*STANDING, "coordinator"):
            standing.kill(party.name)
    for name in STANDING:
        if not standing.parties[name].alive:
            standing.join(name)
    if not standing.coordinator.alive:
        standing.coordinate()
    return standing


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`figures(row=..., kind=value, ...)`: measured, never asserted."""

    def tell(**values: object) -> None:
        if place := os.environ.get("FARFLUNG_FIGURES"):
            with open(place, "a", encoding="utf-8") as file:
                file.write(json.dumps({"test": request.node.name, **values}) + "\n")

    return tell
