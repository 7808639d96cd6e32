"""A joiner that takes the state of a donor's optimizer: real processes, as a user starts them."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(not os.environ.get("FARFLUNG_LONG"), reason="four trainers; FARFLUNG_LONG=1 runs it"),
]


def test_a_joiner_takes_a_donors_optimizer_and_another_one_begins_fresh(stage: Any) -> None:
    stage.write_run(rounds=1000)
    stage.coordinate()
    stage.join("ann")
    stage.join("bob")
    stage.until(lambda s: s["version"] >= 2, "two rounds")
    stage.join("cid", "--optimizer-from-donor", "60")
    stage.until(lambda s: "optimizer" in stage.log("cid"), "a word about cid's optimizer")
    assert "goes on with the optimizer's state of" in stage.log("cid")
    assert "copied" in stage.log("ann") + stage.log("bob")
    stage.join("dan", "--optimizer-from-donor", "0")
    stage.until(lambda s: sum(m["participating"] for m in s["members"]) == 4, "dan takes part")
    assert "optimizer" not in stage.log("dan")
