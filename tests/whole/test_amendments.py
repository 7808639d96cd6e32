"""Seeded runs in a hostile world whose host changes their terms: P1 to P7 hold, and everybody follows.

A failing seed replays with `python -m farflung.simulator.world SEED amendments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from farflung.optim.outer import OuterStep
from farflung.optim.recipes import outer_of, outer_steps_of
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.handshake import AmendmentNews
from farflung.protocol.run_terms import Terms
from farflung.protocol.signing import Amendment
from farflung.simulator import peer
from farflung.simulator.invariants import Broken
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World
from rig.pieces import pieces, seeds

EACH = 4  # seeds of one test


def run(seed: int) -> tuple[str, int]:
    """What came of it, and how many amendments were made."""
    world = World(seed, Scenario.of_amendments(seed))
    try:
        outcome = world.run().outcome
    except Exception as error:
        error.add_note(f"seed {seed}; replay: python -m farflung.simulator.world {seed} amendments")
        raise
    return outcome, world.coordinator.core.terms.count if world.coordinator is not None else 0


@pytest.mark.parametrize("batch", pieces(4))
def test_no_promise_is_broken_where_the_host_changes_the_terms(batch: int) -> None:
    told = [run(seed) for seed in seeds(batch, EACH)]
    finished = [count for outcome, count in told if outcome == "finished"]
    assert 2 * len(finished) >= len(told)
    assert 2 * sum(1 for count in finished if count) >= len(finished), "most hosts get to say something"


def hard_of_hearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody takes an amendment in when it has been told for the sixth time."""
    heard, on_told = dict[int, int](), AmendmentNews.on_told

    def told(self: AmendmentNews, amendments: Sequence[Amendment]) -> list[Effect]:
        heard[id(self)] = heard.get(id(self), 0) + bool(amendments)
        return on_told(self, amendments) if heard[id(self)] % 6 == 0 else []

    monkeypatch.setattr(AmendmentNews, "on_told", told)


def test_whoever_hears_late_of_an_amendment_takes_part_late(monkeypatch: pytest.MonkeyPatch) -> None:
    hard_of_hearing(monkeypatch)
    run(1)


def test_the_simulator_sees_a_peer_that_applies_before_it_knows_by_which_terms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hard_of_hearing(monkeypatch)
    monkeypatch.setattr(AmendmentNews, "why_not", lambda self, message: None)
    with pytest.raises(Broken, match="P1"):
        for seed in range(60):
            run(seed)


@pytest.mark.parametrize(
    "instead",
    [
        lambda terms: lambda version: outer_of(terms.newest),  # also versions that were begun before
        lambda terms: lambda version: outer_steps_of(terms)(max(1, version - 1)),  # one version late
    ],
)
def test_the_simulator_sees_a_peer_that_makes_a_version_by_other_terms(
    instead: Callable[[Terms], Callable[[int], OuterStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second one does: all together would agree."""
    calls = [0]

    def sometimes(terms: Terms) -> Callable[[int], OuterStep]:
        calls[0] += 1
        return (instead if calls[0] % 2 else outer_steps_of)(terms)

    monkeypatch.setattr(peer, "outer_steps_of", sometimes)
    with pytest.raises(Broken, match="P1"):
        for seed in range(60):
            run(seed)
