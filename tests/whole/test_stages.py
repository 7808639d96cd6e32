"""Pipelines in bad worlds: P2, P7, P11 to P17 and P20 over whole runs of the production machines.

One of them by hand: `python -m farflung.simulator.world SEED stages`, or `local stages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from farflung.collectives.pipeline.effects import Effect as FlowEffect
from farflung.collectives.pipeline.microbatches import Queue
from farflung.collectives.pipeline.neighbours import CreditsGiven
from farflung.collectives.pipeline.seats import Table
from farflung.collectives.pipeline.stage_scheduler import StageScheduler
from farflung.collectives.pipeline.work_stealing import WorkStealing
from farflung.coordinator.batches.batch_book import Unseated
from farflung.coordinator.ledger.records import Struck, from_bytes
from farflung.peer.batches.effects import ForgetCrossings
from farflung.peer.batches.stage_transfers import StageTransfers
from farflung.peer.machine.effects import Effect
from farflung.peer.pipeline.machines.summing_machine import LocalStep
from farflung.peer.pipeline.machines.summing_machine import SumsEffect as Due
from farflung.simulator.batches.stage_invariants import StageInvariants, crossings_of
from farflung.simulator.batches.stage_trainer import NOT_PASSED, VirtualStageTrainer
from farflung.simulator.invariants import Broken
from farflung.simulator.world import Scenario, SimulationReport, World
from rig.lost_holders import OnePlace
from rig.pieces import pieces, seeds

EACH = 6  # seeds of one test
DENSE_SEEDS, SLOW_SEEDS, MUON_SEEDS = 2, 2, 4


# A stage that nobody but an undialable peer served; a stage at its end whose trainer was lost, and with it what another
# stage had to ask for; two stages that went back to different versions; a peer that came back to another stage than its
# state on disk; one that found every stage empty, since the coordinator had just restarted; an only holder that counted
# as too slow for others; a host who asked for a version that not all stages had; a stage of which nobody there had the
# state, while a peer that served another one by then had written a checkpoint of it; one that stayed empty since nobody
# is moved, before anything was learned.
REGRESSIONS = (16, 14, 56, 49, 105, 113, 297, 362, 20037)


def run_seed(seed: int, local: bool = False) -> tuple[World, SimulationReport]:
    world = World(seed, Scenario.of_local_stages(seed) if local else Scenario.of_stages(seed))
    try:
        return world, world.run()
    except Exception as error:
        error.add_note(f"{'local ' if local else ''}stages of seed {seed}")
        raise


@pytest.mark.parametrize("seed", pieces(REGRESSIONS, 2))
def test_what_broke_a_promise_once_does_not_again(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("part", pieces(4))
def test_P11_every_microbatch_counts_once_in_every_stage_whoever_dies(part: int) -> None:
    runs = [run_seed(seed) for seed in seeds(part, EACH)]
    finished = sum(report.outcome == "finished" for _, report in runs)
    assert finished >= 0.8 * len(runs), f"only {finished} of {len(runs)} runs came to their end"
    assert sum(report.kills for _, report in runs) > 0, "nobody died: this shows nothing"
    seen = [world.invariants for world, _ in runs]
    assert sum(each.again for each in seen if isinstance(each, StageInvariants)), "nothing was done again"
    assert sum(each.clipped for each in seen if isinstance(each, StageInvariants)), "no gradient was clipped"


@pytest.mark.parametrize("part", pieces(2))
def test_P1_P11_so_it_is_where_the_outer_step_takes_matrices(part: int) -> None:
    """Also of one stage: chunks with two rows of a matrix, whose state is rolled on, fetched, disputed and replayed."""
    kills = 0
    for seed in range(part, MUON_SEEDS, 2):
        for drawn in (Scenario.of_batches(seed), Scenario.of_stages(seed)):
            kills += World(seed, replace(drawn, step="muon")).run().kills
    assert kills > 0, "nobody died: this shows nothing"


@pytest.mark.hard
def test_P7_P11_stages_that_step_by_themselves_learn_from_every_sample_once_whoever_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a dead peer's steps moved is gone with it, and its microbatches are computed again."""
    steps, done = [0], VirtualStageTrainer._do

    def counting(trainer: VirtualStageTrainer, effect: Due) -> None:
        steps[0] += isinstance(effect, LocalStep)
        done(trainer, effect)

    monkeypatch.setattr(VirtualStageTrainer, "_do", counting)
    runs = [run_seed(seed, local=True) for seed in range(EACH)]
    finished = sum(report.outcome == "finished" for _, report in runs)
    assert finished >= 0.8 * len(runs), f"only {finished} of {len(runs)} runs came to their end"
    assert sum(report.kills for _, report in runs) > 0, "nobody died: this shows nothing"
    seen = [world.invariants for world, _ in runs]
    assert sum(each.again for each in seen if isinstance(each, StageInvariants)), "nothing was done again"
    bounds = {(world.scenario.local_micros, most) for world, _ in runs for most in bounds_of(world)}
    assert steps[0] > sum(len(world.invariants.commits) for world, _ in runs), "nobody took a step of its own"
    assert bounds and all(micros == most for micros, most in bounds), "more is on its way than in a step"


def bounds_of(world: World) -> set[int]:
    joined = [peer.member.joined for peer in world.peers.values()]
    flows = [crossings.flow for each in joined if (crossings := crossings_of(each)) is not None]
    return {flow.place.open_most for flow in flows if flow is not None}


def test_P14_P15_in_calm_every_batch_commits_and_nothing_is_computed_twice() -> None:
    for seed in (11, 19):
        world, report = run_seed(seed)
        assert world.scenario.is_calm and report.kills == 0 and report.outcome == "finished"
        assert isinstance(world.invariants, StageInvariants)
        if not world.scenario.poison_every:  # else another seat tries what one gets no gradient out of
            assert not world.invariants.again


def test_P11_P15_seats_of_all_stages_go_and_come_within_every_batch() -> None:
    """So dense that R2 to R5 decide in nearly every run: the next test breaks two of them."""
    again = kills = 0
    for seed in range(DENSE_SEEDS):
        world = World(seed, Scenario.of_dense_stages(seed))
        report = world.run()
        assert report.outcome == "finished" and isinstance(world.invariants, StageInvariants)
        kills += report.kills
        again += world.invariants.again
    assert kills > 2 * DENSE_SEEDS and again > DENSE_SEEDS, "hardly anybody died: this shows nothing"


@pytest.mark.parametrize("lost", [True, False])
def test_P20_stages_go_back_together_once_one_of_them_is_lost_and_not_before(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The only holder of a stage dies; those of the others live.
    if lost:
        world = OnePlace(5)
        assert world.run().outcome == "finished" and world.went_back == 1
        return
    monkeypatch.setattr(StageInvariants, "_of_weight_with_more", lambda seen, stage, version: {f"of {stage}"})
    with pytest.raises(
        Broken, match=r"P20 is broken: .* \((\d), \1, \1\), while of every stage somebody lives"
    ):
        for seed in (5, *range(5)):  # 5 shows it
            OnePlace(seed).run()


@pytest.mark.parametrize(
    ("where", "rule", "broken", "promise"),
    [
        (StageScheduler, "_all_have_told", lambda flow, now: True, "P14"),  # R4: nobody waits for HELD
        (
            Table,
            "last_change",
            Table.last_loss,
            "P15",
        ),  # R3: newcomers are not told what is held, and have to ask
    ],
    ids=["R4", "R3"],
)
def test_a_rule_of_crossings_that_is_broken_shows_within_a_hundred_whole_runs(
    where: type, rule: str, broken: object, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, rule, broken)
    with pytest.raises(Broken, match=f"{promise} is broken"):
        for seed in range(100):
            World(seed, Scenario.of_dense_stages(seed)).run()


def with_slow_seats(seed: int) -> Scenario:
    """The same, with one peer in each stage that is four times as slow as the others; every second seed is calm."""
    dense = Scenario.of_dense_stages(seed)
    firsts = [dense.offers.index(offer) for offer in dense.offers]
    paces = tuple(12.0 if first == at else 3.0 for at, first in enumerate(firsts))
    if seed % 2:
        return replace(dense, slow_peers=paces)
    lines = replace(dense, drop=0.0, duplicate=0.0, slow=0.0, cut_per_s=0.0, faults_until_s=0.0)
    return replace(lines, slow_peers=paces, deaths_per_s=0.0, trainer_crash_per_s=0.0)


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often somebody who was asked to give a microbatch back has done so, or not."""
    told: Counter[bool] = Counter()
    gives_back = WorkStealing.gives_back

    def counts(self: WorkStealing, micro: int, seat: int, offer: int, now: float) -> bool:
        given = gives_back(self, micro, seat, offer, now)
        told[given] += 1
        return given

    monkeypatch.setattr(WorkStealing, "gives_back", counts)
    return told


def test_P11_P14_what_a_slow_seat_has_not_begun_counts_once_wherever_it_goes(
    given_back: Counter[bool],
) -> None:
    kills = 0
    for seed in range(SLOW_SEEDS):
        world = World(seed, with_slow_seats(seed))
        report = world.run()
        assert report.outcome == "finished" and isinstance(world.invariants, StageInvariants), seed
        kills += report.kills
        assert world.scenario.is_calm == (seed % 2 == 0)
        if world.scenario.is_calm:
            assert not world.invariants.again
    assert kills > SLOW_SEEDS and given_back[True] > 0, given_back


def takes_back_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    to_ask = WorkStealing.to_ask

    def takes(self: WorkStealing, idle: int, now: float) -> tuple[int, int] | None:
        asked = to_ask(self, idle, now)
        if asked is not None:
            record = self._micros[asked[1]]
            record.next, record.sent = 0, False
        return asked

    monkeypatch.setattr(WorkStealing, "to_ask", takes)


def gives_back_what_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "behind", lambda self, micro: 0)


@pytest.mark.parametrize("breaks", [takes_back_without_a_word, gives_back_what_is_begun])
def test_R6_whoever_breaks_it_is_found_within_a_hundred_whole_runs(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with pytest.raises(Broken, match="P1[14] is broken"):
        for seed in range(100):
            World(seed, with_slow_seats(seed)).run()


def works_on_old_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer of a stage loads, and computes with what it had before."""
    load = VirtualStageTrainer._do

    def do_all_but(self: VirtualStageTrainer, effect: object) -> None:
        before = self._state
        load(self, effect)  # type: ignore[arg-type]
        self._state = before if before != NOT_PASSED else self._state

    monkeypatch.setattr(VirtualStageTrainer, "_do", do_all_but)


def gives_room_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    more = CreditsGiven.more
    monkeypatch.setattr(CreditsGiven, "more", lambda self, waiting: more(self, waiting - 9))


def forgets_what_may_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = StageTransfers._as_mine

    def too_many(self: StageTransfers, said: FlowEffect, now: float) -> list[Effect]:
        found = turned(self, said, now)
        return [ForgetCrossings(e.version + 1) if isinstance(e, ForgetCrossings) else e for e in found]

    monkeypatch.setattr(StageTransfers, "_as_mine", too_many)


@pytest.mark.parametrize(
    ("breaks", "promise"),
    [(works_on_old_values, "P12"), (gives_room_without_limit, "P15"), (forgets_what_may_be_needed, "P16")],
)
def test_whoever_breaks_a_promise_of_pipelines_is_found_by_that_promise(
    breaks: Callable[[pytest.MonkeyPatch], None], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with pytest.raises(Broken, match=f"{promise} is broken"):
        for seed in (1, 0, *range(2, 10)):
            World(seed, Scenario.of_dense_stages(seed)).run()


@pytest.mark.parametrize(("kind", "seed"), [("apart", 4), ("mute", 5), ("damages", 6), ("slanders", 7)])
def test_P15_no_batch_is_held_up_for_ever_by_neighbours_that_can_t_work_with_each_other(
    kind: str, seed: int
) -> None:
    """For the rest of the run nothing gets better: seats are given up until what is left gets on."""
    scenario = Scenario.of_neighbours(seed)
    assert getattr(scenario, kind), "it has no such neighbour: this shows nothing"
    world = World(seed, scenario)
    assert world.run().outcome == "finished"
    written = [from_bytes(raw) for raw in world.journal]
    bad = {world.neighbours.peers[at] for at in (*scenario.damages, *scenario.slanders)}
    struck = {each.peer for each in written if isinstance(each, Struck)}
    assert struck <= bad, "an honest peer gets a strike"
    gone = [each for each in written if isinstance(each, Unseated) and "stage beside its own" in each.reason]
    assert gone, "nobody gave a seat up: this shows nothing"
    if kind == "slanders":
        assert {each.peer for each in gone} <= bad, "a slanderer cost an honest peer its seat"


@pytest.mark.hard
def test_P17_peers_move_to_where_the_run_is_slow_again_and_again_and_every_batch_counts_once() -> None:
    moves = 0
    for seed in (1, 2, 3, 4, 6, 15, 16, 17, 22, 25):
        world = World(seed, Scenario.of_moves(seed))
        try:
            report = world.run()
        except Exception as error:
            error.add_note(f"moves of seed {seed}")
            raise
        assert report.outcome == "finished" and isinstance(world.invariants, StageInvariants)
        moves += len(world.invariants.moves)
        if world.scenario.is_calm:
            assert not world.invariants.again, "who moves has nothing in its sums"
    assert moves >= 15, f"{moves} moves in ten worlds: this shows too little"


def test_a_stage_that_is_left_empty_is_filled_by_a_peer_of_another_one() -> None:
    """In one of these seeds nobody has a seat there when the move is written down."""
    for seed in (312, *range(313, 330)):  # 312 shows it
        world, report = run_seed(seed)
        assert isinstance(world.invariants, StageInvariants)
        if any(" has 0 of at least " in move.reason for move in world.invariants.moves):
            assert report.outcome == "finished"
            return
    pytest.fail("no stage was left empty")
