"""The simulator's golden logs: a change that only moves code changes none of them.

Here fifteen flat runs, one of each mode and five outcomes, in `make hard` every twelfth of a mode;
`python tests/house/golden_logs.py` compares all of them, and says how to record them again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import golden_logs

SHARDS = 4


@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_simulator_writes_down_what_it_always_did(shard: int) -> None:
    flat = golden_logs.PLAIN + golden_logs.HOSTILE
    _are_as_recorded(flat[24 * shard :: 24 * SHARDS])


def test_one_run_of_each_mode_does_what_it_always_did() -> None:
    _are_as_recorded(golden_logs.OF_MODES[::40])


def test_runs_without_faults_commit_what_they_always_did() -> None:
    _are_as_recorded(golden_logs.OUTCOMES[::20])


@pytest.mark.hard
def test_every_twelfth_run_of_each_mode_does_what_it_always_did() -> None:
    _are_as_recorded(golden_logs.OF_MODES[::12] + golden_logs.OUTCOMES[::12])


def _are_as_recorded(names: tuple[str, ...]) -> None:
    different = golden_logs.changed(names)
    assert not different, f"after a change of behaviour that was meant: record them again; {different}"


def test_every_golden_log_is_of_a_run_that_is_known() -> None:
    assert set(golden_logs.recorded()) == set(golden_logs.ALL)
