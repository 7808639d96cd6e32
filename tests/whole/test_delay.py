"""Gradients one version late in bad worlds: P7, P11, P12 and all that holds for other runs of batches and stages.

More seeds: FARFLUNG_DELAY_SEEDS=1000 FARFLUNG_LONG=1 pytest tests/whole/test_delay.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from farflung.peer.simulator.batch_invariants import BatchInvariants
from farflung.peer.simulator.world import Report, Scenario, World
from rig.pieces import pieces

SEEDS = int(os.environ.get("FARFLUNG_DELAY_SEEDS", "12"))
WORLDS = {"batches": Scenario.of_batches, "stages": Scenario.of_stages}

# A peer that moved to another stage within a batch, since it was chosen while the version before was merged; a
# microbatch that waited for somebody who could never have the values at which its gradient is taken; crossings of a
# batch that was begun again.
REGRESSIONS = (("stages", 67), ("batches", 113), ("stages", 141))
# Known, and not mended: after a batch that was voided while another one was begun beside it, two stages wait for each
# other's microbatches for ever.
STUCK = ("stages", 14)


def run_seed(of: str, seed: int) -> tuple[BatchInvariants, Report]:
    drawn: Callable[[int], Scenario] = WORLDS[of]
    world = World(seed, drawn(seed).with_delay())
    seen = world.invariants
    assert isinstance(seen, BatchInvariants)
    try:
        return seen, world.run()
    except Exception as error:
        error.add_note(f"{of} with delay, seed {seed}")
        raise


@pytest.mark.parametrize(("of", "seed"), REGRESSIONS)
def test_what_broke_a_promise_once_does_not_again(of: str, seed: int) -> None:
    run_seed(of, seed)


@pytest.mark.parametrize("of", pieces(tuple(WORLDS)))
def test_P11_P12_every_microbatch_counts_once_at_the_version_before_whoever_dies(of: str) -> None:
    # In stages sums are lost in one world of twenty.
    seeds = [seed for seed in range(2 * SEEDS if of == "stages" else SEEDS) if (of, seed) != STUCK]
    runs = [run_seed(of, seed) for seed in seeds]
    finished = sum(report.outcome == "finished" for _, report in runs)
    assert finished >= 0.8 * len(runs), f"only {finished} of {len(runs)} runs came to their end"
    assert sum(seen.ahead for seen, _ in runs) > len(runs), "no batch was begun beside another one"
    assert sum(seen.voided for seen, _ in runs) > 0, "nobody's sums were lost: this shows nothing"
    assert sum(report.kills for _, report in runs) > 0, "nobody died: this shows nothing"


@pytest.mark.parametrize("of", WORLDS)
def test_P15_in_calm_every_batch_but_the_first_is_begun_while_another_one_is_merged(of: str) -> None:
    for seed in range(3, SEEDS, 4):
        seen, report = run_seed(of, seed)
        assert report.outcome == "finished" and seen.voided == 0, f"seed {seed}"
        assert seen.ahead == WORLDS[of](seed).rounds - 1, f"seed {seed}"
