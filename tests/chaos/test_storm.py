"""A storm of real processes: everything is killed and stopped, again and again, and the audit is the gate.

`python benchmarks/storm.py --harsh` is the same for a quarter of an hour.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from rig.arena import Arena, is_kept
from rig.pieces import with_time_for
from rig.storms import ENDS_ALLOWED, HARSH, Storm

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.xdist_group("chaos"), pytest.mark.hard]

SECONDS = 75.0
NAMES = ("ann", "bob", "cid", "dee")


@pytest.mark.parametrize("seed", with_time_for([5], in_ci=[1]))
def test_no_promise_is_broken_in_a_storm(build: Callable[..., Arena], seed: int) -> None:
    arena = build(sync_every=20)
    arena.begin(*NAMES)
    storm = Storm(arena, random.Random(seed), list(NAMES), HARSH)
    over = storm.rage(SECONDS)
    arena.takes_part(*NAMES, since=over)
    shared = set(Path("/dev/shm").glob("farflung-*"))
    numbers = {pid for pids in arena.processes().values() for pid in pids}
    arena.close()
    assert storm.killed["coordinator killed"] >= 3 and len(storm.faults) >= 10, storm.killed
    assert not storm.tracebacks(), storm.tracebacks()[:3]
    assert not storm.dropped(), "the guard threw honest work away"
    assert not [each for each in storm.ended if int(each.split(": ")[1]) not in ENDS_ALLOWED], storm.ended
    left = [each for each in shared if each.exists() and any(f"-{pid}-" in each.name for pid in numbers)]
    assert not left
    is_kept(arena)
