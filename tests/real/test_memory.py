"""What real processes hold in memory is what is on paper (peer/footprint.py): two sizes of a model, and the slope."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farflung.peer.footprint import MemoryRules, need_of, of_agent, of_shared

pytestmark = [pytest.mark.slow, pytest.mark.hard]

SMALL_MB, LARGE_MB = 24, 96
# The paper counts all of the contributions that others may send; of two peers each holds the half of the other's.
PAYLOADS, PAYLOADS_OF_TWO = 3, 2.5  # with one round's results kept, as the bench has it
# Copies on their way into a socket come and go, and a loaded machine lets them wait.
LESS, MORE = 0.9, 1.25


@pytest.mark.forked_peers
def test_an_agents_peak_grows_with_the_model_as_the_paper_says(stage: Any) -> None:
    peaks = []
    for mb in (SMALL_MB, LARGE_MB):
        size = ["--mb", str(mb), "--codec", "int8"]
        done = stage.call("bench", "allreduce", "--peers", "2", "--rounds", "6", *size, "--json")
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout)["peak_rss_mb"])
    a_value_bytes = 4 * (peaks[1] - peaks[0]) / (LARGE_MB - SMALL_MB)
    rules = MemoryRules(state_parts=2, keep_results=1)
    state = need_of(row for row in of_shared(rules, 1.0) if not row.what.startswith("slots")).host_bytes
    payloads = need_of(of_agent(rules, 1.0)).host_bytes
    due = state + payloads * PAYLOADS_OF_TWO / PAYLOADS
    assert LESS * due < a_value_bytes < MORE * due, peaks
