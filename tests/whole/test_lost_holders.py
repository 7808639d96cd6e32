"""Pipelines whose peers are killed for good: P3 without a host, with one batch lost at most.

More seeds by hand, with figures: `PYTHONPATH=tests python tests/rig/lost_holders.py 0 200`.
"""

from __future__ import annotations

import pytest

from farflung.peer.machine.held_fragment import HeldFragment
from farflung.peer.state.outer_state import OuterState
from rig.lost_holders import GOES_ON_S, BeforeLost, OnePlace, Seen, run_of
from rig.pieces import pieces, seeds

EACH = 20  # seeds of one test
LOST_TWICE = 164  # with one seat a stage


def goes_on(seats: int, seeds: range) -> list[Seen]:
    found = []
    for seed in seeds:
        world, report = run_of(seed, seats)
        seen = world.seen
        assert report.outcome == "finished", (seed, report.outcome)
        assert max(seen.waits_s, default=0.0) <= GOES_ON_S, (seed, seen.waits_s)
        assert max(seen.given_up, default=0) <= 1, (seed, seen.given_up)
        found.append(seen)
    return found


@pytest.mark.parametrize("seats", [1, 2])
def test_P3_a_pipeline_goes_on_by_itself_whoever_dies_for_good_and_whenever(seats: int) -> None:
    found = goes_on(seats, range(1, 2))
    assert sum(len(seen.waits_s) for seen in found) > 1, "hardly anybody died: this shows nothing"


@pytest.mark.hard
@pytest.mark.parametrize("seats", [1, 2])
@pytest.mark.parametrize("part", pieces(1))
def test_P3_so_it_is_over_many_runs(seats: int, part: int) -> None:
    """In one run both peers of a stage, one after the other, die before either has written a checkpoint: two versions
    are lost, and the run goes on after `go_back_after_s`."""
    late, given_up = [], 0
    for seed in seeds(part, EACH):
        world, report = run_of(seed, seats)
        given_up += len(world.seen.given_up)
        assert report.outcome == "finished", (seed, report.outcome)
        if max(world.seen.waits_s, default=0.0) > GOES_ON_S or max(world.seen.given_up, default=0) > 1:
            late.append(seed)
    assert set(late) <= ({LOST_TWICE} if seats == 1 else set())
    assert given_up, "no newest version was lost with its holder: this shows nothing"


@pytest.mark.parametrize("keeps", [True, False])
def test_P13_whoever_keeps_no_checkpoint_goes_back_by_what_it_was_before_the_last_round(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keeps:
        monkeypatch.setattr(HeldFragment, "before", None)
    worlds = [OnePlace(seed) for seed in (5, 11)]  # in which the newest version is lost with its holder
    outcomes = [world.run().outcome == "finished" for world in worlds]
    assert all(world.kills for world in worlds)
    if keeps:
        assert all(outcomes) and any(world.went_back for world in worlds)
    else:
        assert not all(outcomes), "nothing was lost that the others lacked: this shows nothing"


def test_P13_who_lost_what_it_was_before_and_who_is_new_take_it_from_those_who_went_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From then on it is the run's newest version, which every member serves: no older one has to be asked for."""
    undone: list[tuple[OuterState, bool]] = []
    undo = OuterState.undo

    def told(state: OuterState, fragment: int, chunk: int, version: int) -> bool:
        whole = undo(state, fragment, chunk, version)
        if fragment == 0:
            undone.append((state, whole))
        return whole

    monkeypatch.setattr(OuterState, "undo", told)
    world = BeforeLost(5)
    assert world.run().outcome == "finished" and world.went_back == 1
    first, second, new = world.of_first
    assert undone == [(first.state, True), (second.state, False)] and new.peer not in world.at_return
    held = {peer.member.part.replicas[0].held.digest for peer in (first, second, new) if peer.member.part}
    assert len(held) == 1 and b"" not in held
