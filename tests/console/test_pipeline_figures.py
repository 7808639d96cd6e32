"""The figures of benchmarks/stages.py from hand-written events; what its trainers see in sums; its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from as_script import called
from stage_bench.pipeline_bench import PipelineOptions, check
from stage_bench.pipeline_figures import BenchSetting, result_of, table
from stage_bench.sham_stage import ShamTrainer, Shape, model_of
from stages import stages

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import MicrobatchWork
from farflung.protocol.errors import UserError
from farflung.protocol.outer_numbers import AdamWNumbers

SETTING = BenchSetting(seats=(2, 2), unit_s=(0.1, 0.2), batch=4, crossing_bytes=200, cores=2)
CPU = [{"version": v, "at": 10.0 * v, "shams": 1.0 * v, "coordinator": 0.5 * v} for v in range(4)]


def mask(*micros: int) -> str:
    return sum(1 << micro for micro in micros).to_bytes(1, "little").hex()


def one_batch(version: int, at: float, second: tuple[str, str] = ("", "")) -> list[dict[str, Any]]:
    """Committed at `at`; `second`: what the two seats of stage 1 have counted."""
    ann, bob = mask(0, 1), mask(2, 3)
    cid, dan = second if any(second) else (ann, bob)
    rounds = [
        {"round": 2 * version + stage, "version": version + 1, "counted": counted}
        for stage, counted in enumerate(({"ann": ann, "bob": bob}, {"cid": cid, "dan": dan}))
    ]
    return [
        {"event": "batch", "version": version, "at": at - 0.9},
        {"event": "opened", "round": 2 * version, "at": at - 0.2},
        {"event": "opened", "round": 2 * version + 1, "at": at - 0.1},
        {"event": "committed_batch", "rounds": rounds, "at": at},
    ]


def crowd(more: int = 0, deaths: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    works = [
        {
            "stage": stage,
            "version": version,
            "made": 4 + more * stage,
            "busy_s": 0.4,
            "last_at": version + 0.6,
        }
        | {"counted_once": True}
        for stage in (0, 1)
        for version in range(3)
    ]
    return {"works": works, "cpu": CPU, "deaths": list(deaths), "thinned_at": None}


EVENTS = [*one_batch(0, 1.0), *one_batch(1, 2.0), *one_batch(2, 3.0)]


def test_the_rate_is_that_of_whole_batches_over_the_slowest_stage_that_never_waits() -> None:
    found = result_of(SETTING, EVENTS, crowd(), {})
    assert (found["batches"], found["seconds"]) == (2, [1.0, 1.0])
    assert (found["rate_per_s"], found["ideal_per_s"], found["of_ideal"]) == (4.0, 10.0, 0.4)
    assert found["phases"] == {"begin": 0.1, "count": 0.5, "tell": 0.2, "round": 0.2}
    assert found["busy"] == [0.2, 0.2] and found["extra_work"] == 0.0
    assert found["counted_once"] and found["proven_by_sums"] == 4 and found["failed_rounds"] == 0
    assert any("40.0 %" in line for line in table(found))


@pytest.mark.parametrize("second", [(mask(0, 1), mask(1, 2, 3)), (mask(0), mask(2, 3))])
def test_a_microbatch_that_a_stage_counts_twice_or_not_at_all_is_told(second: tuple[str, str]) -> None:
    events = [*one_batch(0, 1.0), *one_batch(1, 2.0, second)]
    assert not result_of(SETTING, events, crowd(), {})["counted_once"]


def test_sums_that_say_otherwise_are_believed() -> None:
    told = crowd()
    told["works"][4]["counted_once"] = False
    assert not result_of(SETTING, EVENTS, told, {})["counted_once"]


def test_what_a_death_costs_is_told_with_what_it_may_cost() -> None:
    death = {"peer": "cid", "stage": 1, "version": 1, "at": 1.5, "moment": "counting"}
    death |= {"counted": {"0": 4, "1": 1}, "share": 2}
    found = result_of(SETTING, EVENTS, crowd(2, (death,)), {})
    assert found["extra_work"] == 0.25
    # One second to find it, three microbatches for one seat of 0.2 s, a round of 0.2 s.
    expected = {"moment": "counting", "stage": 1, "share": 2, "seconds": 0.5, "allowed_s": 1.8}
    assert found["deaths"] == [expected | {"twice": 2, "twice_elsewhere": 0}]
    assert any("counting" in line for line in table(found))


def test_moves_are_told_with_the_rate_over_the_best_that_the_same_peers_could_have() -> None:
    moving = {"event": "moving", "peer": "ann", "stage": 0, "to": 1, "at": 2.1}
    seats = [{"event": "seated", "number": n, "peer": "x", "stage": n % 2, "at": 0.0} for n in range(5)]
    gone = {"event": "unseated", "number": 0, "at": 2.1}
    found = result_of(SETTING, [*seats, *EVENTS, moving, gone], crowd() | {"thinned_at": 1.1}, {})
    expected = {"best_per_s": 10.0, "of_best": [0.4, 0.4], "moves": [[0, 1, 1.0]], "seats": [2, 2]}
    assert found["moved"] == expected
    assert BenchSetting((5, 1), (0.1, 0.2), 4, 200, 2).best == 20.0
    assert any("0 to 1 after 1.0 s" in line for line in table(found))


def agent(peer: str, stage: int, kept: int) -> list[dict[str, Any]]:
    def use(at: float) -> dict[str, float]:
        words = {"control_tx": 300 * at, "control_rx": 700 * at, "kept_memory": kept, "kept_disk": 0}
        return {"tx": 250 * at, "rx": 250 * at, "cpu_s": 0.1 * at} | words

    plans = [
        {
            "event": "plan",
            "version": version,
            "fragment": stage,
            "at": 1.0 + version,
            "use": use(1.0 + version),
        }
        for version in range(3)
    ]
    return [{"event": "start", "peer": peer, "at": 0.0}, *plans]


def test_bytes_memory_and_processors_are_counted_between_two_plans() -> None:
    peers = {
        peer: agent(peer, stage, 400) for peer, stage in (("ann", 0), ("bob", 0), ("cid", 1), ("dan", 1))
    }
    found = result_of(SETTING, EVENTS, crowd(), peers)
    assert found["bytes_over_payload"] == 1.25  # 1000 bytes for four microbatches of 200
    assert found["control_bytes_per_s"] == 1000.0
    assert found["kept_over_crossings"] == [1.0, 1.0] and found["spilled_bytes"] == 0
    assert found["cores_used"] == {"agents": 0.4, "shams": 0.1, "coordinator": 0.05}
    one_died = peers | {"dan": [{"event": "start", "peer": "dan", "at": 0.5}, *agent("dan", 1, 400)]}
    assert result_of(SETTING, EVENTS, crowd(), one_died)["bytes_over_payload"] is None


@pytest.mark.parametrize(
    ("times", "once"), [({}, True), ({3: 2.0}, False), ({0: 0.0}, False), ({9: 1.0}, False)]
)
def test_a_trainer_sees_in_the_merged_result_how_often_each_microbatch_was_counted(
    tmp_path: Path, times: dict[int, float], once: bool
) -> None:
    checked = check(PipelineOptions(stages=2, seats="1", unit_ms="1", batch=8))
    shape = Shape(checked.manifest, model_of(checked.manifest, 1), checked.unit_s)
    trainer = ShamTrainer("ann", (0,), shape, shape.crossing, agent=None)  # type: ignore[arg-type]
    shared = trainer._shared = SharedState.create(
        tmp_path, 4 * shape.model.chunk_elements, ("params", "momentum", "second_moment")
    )
    numbers = checked.manifest.outer_numbers
    assert isinstance(numbers, AdamWNumbers)
    trainer.machine.stage = 0
    trainer._look_at_result(0)
    for version in (1, 2):
        merged = torch.zeros(shared.elements)
        merged[:8] = 1 / 8
        for micro, often in times.items():
            merged[micro] = often / 8
        by = numbers.at(version)
        shared.moments[0].mul_(by.keep_m).add_(merged * by.take_m)
        trainer._look_at_result(version)
        assert shape.works[0, version - 1].counted_once is once


def test_one_peer_of_the_slow_stage_is_slow_from_the_middle_of_a_batch_on_and_another_one_in_the_next() -> (
    None
):
    checked = check(PipelineOptions(stages=2, seats="2", unit_ms="8", batch=8))
    shape = Shape(checked.manifest, model_of(checked.manifest, 1), checked.unit_s, slow=("ann", "bob"))
    for version, slow in ((0, "ann"), (1, "bob"), (2, "ann")):
        hand = MicrobatchWork(
            way="both",
            version=version,
            micro=0,
            epoch=0,
            start=0,
            stop=1,
            place=0,
            given_bytes=0,
            returned_bytes=0,
        )
        shape.works[1, version].made = 3
        assert [shape.takes_s(name, 1, hand) for name in ("ann", "bob")] == [0.008, 0.008]
        shape.works[1, version].made = 4
        assert [shape.takes_s(name, 1, hand) == 0.032 for name in ("ann", "bob")] == [
            slow == "ann",
            slow == "bob",
        ]


WRONG = [
    (["--stages", "1"], "--stages: expected 2 to 64, found 1"),
    (["--seats", "4,4"], "--seats: expected one number, or one for each of 4 stages, found '4,4'"),
    (["--seats", "many"], "--seats: expected numbers with commas between them, found 'many'"),
    (["--seats", "0"], "--seats: expected 1 to 128 each, found '0'"),
    (["--seats", "40"], "--seats: expected at most 64 in all, found '40'"),
    (["--unit-ms", "0"], "--unit-ms: expected 0.1 to 60000 each, found '0'"),
    (["--batch", "5000"], "--batch: expected 1 to 4096, found 5000"),
    (["--batches", "0"], "--batches: expected 1 to 10000, found 0"),
    (["--crossing-kb", "0"], "--crossing-kb: expected 1 to 65536, found 0"),
    (["--kill-every", "-1"], "--kill-every: expected 0 to 36000, found -1"),
    (["--kill-at", "noon"], "--kill-at: expected some of counting, frozen, scatter, prepared, found 'noon'"),
    (["--kill-at", "frozen", "--kill-every", "9"], "--kill-at: expected to be given without --kill-every"),
    (["--kill-at", "frozen", "--seats", "1"], "--seats: expected at least 2 in each stage where peers die"),
    (["--kill-at", "frozen,frozen", "--batches", "1"], "--kill-at: expected at most 1 moments"),
    (["--slow-stage", "4"], "--slow-stage: expected -1 for none, or 0 to 3, found 4"),
    (["--rebalance-s", "-1"], "--rebalance-s: expected 0 to 86400, found -1"),
    (["--rebalance-s", "5", "--kill-every", "9"], "--rebalance-s: expected to be given without"),
    (["--rebalance-s", "5", "--seats", "20,1,1,1"], "--seats: expected with --rebalance-s at most 16 each"),
    (["--memory", "much"], "expected a size"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    code, told = called(stages, PipelineOptions, words), capsys.readouterr().err
    assert code == 2 and told.count("\n") == 1 and sentence in told, told


def test_one_number_is_for_every_stage() -> None:
    checked = check(PipelineOptions(stages=3, seats="2", unit_ms="5"))
    assert (checked.seats, checked.unit_s) == ((2, 2, 2), (0.005, 0.005, 0.005))
    with pytest.raises(UserError, match="--unit-ms"):
        check(PipelineOptions(stages=3, unit_ms="1,2"))
