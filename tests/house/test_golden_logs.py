"""The simulator's golden logs: a change that only moves code changes none of them.

Here every ninth run; `python tests/house/golden_logs.py` compares all 360, and says how to record them anew.
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
    different = golden_logs.changed(golden_logs.ALL[9 * shard :: 9 * SHARDS])
    assert not different, f"after a change of behaviour that was meant: record them anew; {different}"


def test_every_golden_log_is_of_a_run_that_is_known() -> None:
    assert set(golden_logs.recorded()) == set(golden_logs.ALL)
