"""Worlds that cross all others, with knobs turned and true frames at bad moments: no promise is broken in any of them.

More: `python benchmarks/sweep.py` tries 20,000 seeds, and says how to replay one that broke a promise.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from sweep import swept

from farflung.simulator.scenario import Scenario
from rig.crossed import KINDS, LAYERS, crossed
from rig.knobs import KNOBS, ROOM, turned
from rig.pieces import pieces
from rig.replays import ReplayingWorld

IN_TEST, IN_HARD = 3, 20  # seeds a piece


def finished_of(seeds: range) -> int:
    outcomes = []
    for seed in seeds:
        one = swept(seed)
        assert not one.broken, (
            f"seed {seed} [{' + '.join(one.layers)}] {one.broken}; benchmarks/sweep.py --seed {seed} --log shows it"
        )
        outcomes.append(one.outcome)
    return outcomes.count("finished")


@pytest.mark.parametrize("piece", pieces(range(4), 2))
def test_no_promise_is_broken_where_worlds_cross(piece: int) -> None:
    assert finished_of(range(piece * IN_TEST, (piece + 1) * IN_TEST)) >= IN_TEST // 2


@pytest.mark.mode("restoring")
def test_P14_a_disk_that_is_lost_in_mid_batch_with_no_commit_of_it_costs_no_seat() -> None:
    """Its last grants were lost with it, and members had counted by them."""
    assert finished_of(range(31462, 31463)) == 1


def test_P7_who_comes_back_with_work_on_samples_of_others_gets_none_of_it_committed() -> None:
    """It knew a lease no more that one fragment had lost track of, before it heard that this was somebody else's."""
    assert finished_of(range(91228, 91229)) == 1


def test_P3_ten_that_need_each_other_do_not_wait_in_different_fragments() -> None:
    """Some were called for one fragment alone, froze it, and waited for its round; the other had none without them."""
    assert finished_of(range(95396, 95397)) == 1


def test_P20_the_first_that_is_back_does_not_give_up_what_the_next_one_holds() -> None:
    """It had more than half of all tokens, and the run went back half a second before the other one came."""
    assert finished_of(range(98110, 98111)) == 1


@pytest.mark.hard
@pytest.mark.parametrize("piece", pieces(3))
def test_no_promise_is_broken_where_more_worlds_cross(piece: int) -> None:
    first = 1000 + piece * IN_HARD
    assert finished_of(range(first, first + IN_HARD)) >= 0.8 * IN_HARD


# A blackout, and peers that come back with checkpoints of an older version while one member still sends pieces of the
# newest: nothing that it sends belongs into a state that is being read.
RESTORES = Scenario(
    peers=3,
    chunks=3,
    rounds=14,
    min_peers=2,
    store_fails=0.0,
    every_rounds=2,
    go_back_after_s=4.0,
    end_s=300.0,
).without_chance()


@pytest.mark.parametrize("seed", [2, 7, 12])
def test_P1_true_pieces_that_nobody_asked_for_poison_no_restore(seed: int) -> None:
    """Each of these seeds broke P1 or P3 as long as pieces that came were installed while a checkpoint was read in."""
    at_s = 14.0 + 0.37 * seed
    world = ReplayingWorld(seed, replace(RESTORES, blackout_at_s=at_s, faults_until_s=at_s + 46.0))
    world.aimed = 1.0
    assert world.run().outcome == "finished"
    assert world.replayed > 100


def test_every_kind_and_every_layer_is_drawn() -> None:
    drawn = Counter(name for seed in range(400) for name in crossed(seed)[1])
    assert set(KINDS) | set(LAYERS) <= set(drawn)


def test_knobs_are_put_back() -> None:
    def values() -> list[object]:
        return [getattr(importlib.import_module(ROOM + name), constant) for name, constant, _ in KNOBS]

    usual, changed = values(), set()
    for seed in range(40):
        with turned(seed) as knobs:
            changed |= set(knobs)
            now = values()
        assert sum(a != b for a, b in zip(usual, now, strict=True)) == len(knobs)
        assert values() == usual
    assert len(changed) == len(KNOBS)


def test_a_knob_is_read_where_it_stands_alone() -> None:
    """Who imports the constant by its name would go on with the usual value."""
    root = Path(importlib.import_module("farflung").__file__ or "").parent
    texts = [
        path.read_text()
        for path in root.rglob("*.py")
        if not {"tests", ".venv"} & set(path.relative_to(root).parts)
    ]
    some_knob = re.compile(rf"\b({'|'.join(constant for _, constant, _ in KNOBS)})\b")
    imported = {
        (node.module, each.name)
        for text in filter(some_knob.search, texts)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    assert not [(name, constant) for name, constant, _ in KNOBS if (ROOM + name, constant) in imported]
