"""A run of the simulator that comes to its end, or says of which seed it is that does not."""

from __future__ import annotations

from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World


def finished(seed: int, scenario: Scenario) -> World:
    world = World(seed, scenario)
    try:
        report = world.run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    assert report.outcome == "finished", report.outcome
    return world
