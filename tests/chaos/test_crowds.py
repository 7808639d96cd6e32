"""Many who join at the same moment: the peers that train go on, and everybody gets in.

Shams (tests/rig/shams.py) say a real peer's words over real connections and hold no model, so there can be hundreds;
sixteen real peers, of which four may fetch the model at the same time, are what two cores carry.  All timeouts are the
default ones: two cores that start sixteen peers may not look like a death.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rig import light_trainer, shams
from rig.arena import CHUNK_KB, DEFAULT, Arena, is_kept

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.xdist_group("chaos"),
    pytest.mark.hard,
]

Figures = Callable[..., None]
STANDING = ("ann", "bob", "cid")
SHAMS, PEERS, PEERS_AT_ONCE = 200, 16, 4
PATIENCE_S = 180.0
GO_BACK_AFTER_S = 30.0


@contextmanager
def crowd(arena: Arena, count: int) -> Iterator[Callable[[str], dict[str, Any]]]:
    """So many shams in one process; what is yielded says a word to it and, for "tell", hears the answer."""
    place = arena.folder / "model.msgpack"
    light_trainer.write_schema(place, CHUNK_KB)
    words = [sys.executable, str(Path(shams.__file__)), arena.url, str(count), "0"]
    environ = os.environ | {shams.VARIABLE: str(place)}
    with subprocess.Popen(
        words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def say(word: str) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
            heard: dict[str, Any] = json.loads(process.stdout.readline()) if word == "tell" else {}
            return heard

        assert json.loads(process.stdout.readline()) == {"ready": True}
        try:
            yield say
        finally:
            process.kill()


def widest_gap(arena: Arena, since: float, until: float) -> float:
    """The longest time without a commit."""
    events = arena.coordinator.look()
    at = [e["at"] for e in events if e["event"] == "committed" and since <= e["at"] <= until]
    return max(b - a for a, b in itertools.pairwise([since, *at, until]))


def standing(build: Callable[..., Arena], **rules: object) -> Arena:
    arena = build(**DEFAULT, go_back_after_s=GO_BACK_AFTER_S, **rules)
    arena.begin(*STANDING)
    return arena


def nobody_was_lost(arena: Arena, since: float) -> None:
    ids = {arena.parties[name].id for name in STANDING}
    lost = [e for e in arena.coordinator.look() if e["event"] == "departed" and e["at"] >= since]
    assert not [e for e in lost if e["peer"] in ids], "a peer that trains was given up"


def test_two_hundred_join_at_once(build: Callable[..., Arena], figures: Figures) -> None:
    arena = standing(build, joins_at_once=1024, max_peers=256)
    with crowd(arena, SHAMS) as say:
        began = time.monotonic()
        say("begin")
        arena.until(lambda: len(say("tell")["welcome_s"]) >= SHAMS, "all shams are in", PATIENCE_S)
        there = time.monotonic()
        told = sorted(say("tell")["welcome_s"])
        arena.takes_part(*STANDING, since=there)
        nobody_was_lost(arena, began)
    gone = time.monotonic()
    arena.takes_part(*STANDING, since=gone)
    figures(
        row="23", fault=f"{SHAMS} shams join at once", median_s=told[len(told) // 2], worst_s=told[-1],
        longest_without_a_commit_s=widest_gap(arena, began, there),
    )  # fmt: skip
    is_kept(arena)
    arena.close()


def test_sixteen_peers_join_at_once(build: Callable[..., Arena], figures: Figures) -> None:
    """Four fetch the model at the same time, the others wait for their turn."""
    arena = standing(build, joins_at_once=PEERS_AT_ONCE)
    names = [f"new{number:02}" for number in range(PEERS)]
    began = time.monotonic()
    for name in names:
        arena.join(name)
    for name in names:
        arena.until(lambda party=arena.parties[name]: party.id, f"{name} is there")  # type: ignore[misc]
        arena.commit(began, f"{name} takes part", arena.parties[name].id)
    there = time.monotonic()
    nobody_was_lost(arena, began)
    figures(
        row="23", fault=f"{PEERS} peers join at once", back_s=there - began,
        longest_without_a_commit_s=widest_gap(arena, began, there),
    )  # fmt: skip
    is_kept(arena)
    arena.close()
