"""No figure of the house rises: see figures.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import MODES, ceilings, crossings, measured, mode_of, ways_of_a_delta
from rooms import modules

pytestmark = pytest.mark.xdist_group("house: sources")


def test_no_figure_rises() -> None:
    found, held = measured(), ceilings()
    assert found.keys() == held.keys()
    nothing = [name for name, value in found.items() if not value]
    assert nothing == ["imports from core to mode"], "else what is measured as nothing is not measured"
    risen = [f"{name}: {found[name]}, at most {most}" for name, most in held.items() if found[name] > most]
    assert not risen, "; ".join(risen) + "  (figures.json says what holds)"


def test_the_modes_are_there() -> None:
    paths = {module.path for module in modules()} | {module.room for module in modules()}
    assert not [part for parts in MODES.values() for part in parts if part not in paths]
    assert mode_of("coordinator/batches/rebalancing") == "batches" and not mode_of("coordinator/run/machine")


def test_the_ways_go_where_a_delta_goes() -> None:
    merge, load = ways_of_a_delta()
    assert "collectives/round/member.py" in merge and "peer/machine/machine.py" in merge
    assert set(merge) < set(load) and "coordinator/rounds/round.py" in load
    assert not crossings(), "the core imports no mode"
