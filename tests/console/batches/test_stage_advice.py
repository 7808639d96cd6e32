"""The doctor before a run in stages: which of them fit a machine, and whether its line pays."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from console.test_doctor import FINE, GIB

from farflung.collectives.pipeline.seats import BorderTraffic
from farflung.console.batches.stage_advice import (
    StageFacts,
    StagePart,
    fitting,
    made,
    memory_words,
    stages_in,
    use_of,
)
from farflung.console.doctor.advice import FAIL, OK, WARN, LineToCoordinator, MachineFacts, examine
from farflung.peer.footprint import FreeMemory, MemoryRules, need_of, of_stage
from farflung.peer.pipeline.api import fitting_stages
from farflung.protocol.manifest import Manifest, MergeSection, OuterSection, PipelineSection

LINE = 200e6 / 8
PARAMETERS = 252e6
BILLION = tuple(  # in four stages, of microbatches of 1 x 2048 positions
    StageFacts(8 * PARAMETERS, 4 * PARAMETERS, 0.138, 4, BorderTraffic(2048 * 2048 if n < 3 else 0, 0))
    for n in range(4)
)
INT8 = "int8"


def manifest(**pipeline: Any) -> Manifest:
    return Manifest(
        outer=OuterSection(step="adamw"),
        merge=MergeSection(policy="mean"),
        pipeline=PipelineSection(stages=4, batch=1024, **pipeline),
    )


def facts(stages: tuple[StageFacts, ...] = BILLION, **changed: Any) -> MachineFacts:
    line = LineToCoordinator(0.05, LINE, LINE, "203.0.113.9", 0.2, False)
    begins = {"manifest": manifest(), "line": line, "model_bytes": 4 * 10**9}
    found = dataclasses.replace(FINE, **{**begins, **changed})
    assert found.manifest is not None
    return dataclasses.replace(found, part=StagePart(found.manifest.pipeline, stages))


def verdicts(**changed: Any) -> dict[str, tuple[str, str, str]]:
    return {found.name: (found.verdict, found.text, found.todo) for found in examine(facts(**changed))}


def test_a_line_that_feeds_a_part_of_a_gpu_is_told_in_one_sentence() -> None:
    verdict, text, todo = verdicts()["a stage here"]
    assert verdict == WARN
    assert text == (
        "your upload carries 3.0 microbatches/s of stage 1, the stage's peers compute 7.2/s each: 41% of a GPU here "
        "would work (in stage 0 82%)"
    )
    assert todo == "int4 would make it 77%: [pipeline] codec of the run's run.toml"
    four_bits = verdicts(manifest=manifest(codec="int4"))["a stage here"]
    assert four_bits[0] == OK and "77% of a GPU" in four_bits[1] and not four_bits[2]


def test_a_wider_model_asks_less_of_the_line() -> None:
    """Work grows with the square of the width, bytes with the width."""
    wide = tuple(
        dataclasses.replace(each, unit_s=4 * 0.138, gives=BorderTraffic(2048 * 4096, 0)) for each in BILLION
    )
    use = use_of(wide, 1, INT8, LINE, LINE)
    assert use is not None and use.share == pytest.approx(0.816, abs=0.001)


def test_own_limits_and_the_slower_way_count() -> None:
    assert "20% of a GPU" in verdicts(limits=(LINE / 2, None))["a stage here"][1]
    assert "your download carries" in verdicts(limits=(None, LINE / 2))["a stage here"][1]


def test_before_anybody_measured_the_line_is_told_and_before_anybody_came_nothing() -> None:
    unmeasured = tuple(dataclasses.replace(each, unit_s=None) for each in BILLION)
    assert verdicts(stages=unmeasured)["a stage here"][:2] == (
        OK,
        "your upload carries 3.0 microbatches/s of stage 1 in int8; nobody has measured yet how long a peer "
        "computes one",
    )
    assert "the first peer brings the model" in verdicts(stages=())["a stage here"][1]
    assert "unknown until the first peer has joined" in verdicts(stages=())["a round here"][1]


def test_a_stage_not_the_model_must_fit() -> None:
    small = {"memory_bytes": 9 * GIB}
    verdict, text, _ = verdicts(**small)["memory"]
    assert verdict == OK and text.startswith("all 4 stages fit: the largest of them needs 2.0GB (and 9.1GB")
    verdict, text, todo = verdicts(memory_bytes=8 * GIB)["memory"]
    assert verdict == FAIL and text.startswith(
        "no stage fits: the smallest needs 2.0GB (and 9.1GB of the host's)"
    )
    assert "more [pipeline] stages" in todo
    assert "6.0GB needed" in verdicts()["shared memory"][1], "of a stage"
    assert (
        "1.6GB each way" in verdicts()["a round here"][1] and "with 5 peers" in verdicts()["a round here"][1]
    )


@pytest.mark.parametrize("gpu", [None, 1.9e9, 2.1e9, 9e9])
@pytest.mark.parametrize("host", [4e9, 9.2e9, 11.2e9, 26e9, 40e9])
def test_it_says_what_the_script_would_say(gpu: float | None, host: float) -> None:
    stages = (
        *BILLION,
        dataclasses.replace(BILLION[0], compute_bytes=16 * PARAMETERS, state_bytes=8 * PARAMETERS),
    )
    rules, room = MemoryRules.of(manifest()), FreeMemory(gpu, host)
    sizes = [(each.compute_bytes, each.state_bytes / 4, each.state_bytes / 4) for each in stages]
    needs = [need_of(of_stage(rules, *size)) for size in sizes]
    fit = [number for number, need in enumerate(needs) if need.within(room)]
    assert fitting(stages, room, rules) == fit
    assert memory_words(stages, room, rules)[0] == fit
    if fit:
        assert fitting_stages(needs, room) == tuple(fit)


def test_stages_are_read_from_a_status_that_nobody_promised_to_be_right() -> None:
    row = {
        "compute_bytes": 64,
        "state_bytes": 32,
        "unit_s": 0.5,
        "seats": 2,
        "gives": {"values": 9, "raw_bytes": 4},
    }
    assert stages_in({"stages": [row]}) == (StageFacts(64, 32, 0.5, 2, BorderTraffic(9, 4)),)
    assert stages_in({}) == () == stages_in({"stages": [{"seats": 1}]})
    odd = {"state_bytes": 1, "unit_s": "x", "gives": [7], "seats": None}
    assert stages_in({"stages": [odd]}) == (StageFacts(0, 1, None, 0, BorderTraffic(0, 0)),)


def test_of_a_model_in_one_piece_it_has_nothing_to_say() -> None:
    assert made(Manifest(), {}) is None
    part = made(manifest(), {})
    assert part is not None and part.stages == ()


def test_the_table_of_models_and_lines_is_what_the_doctor_computes() -> None:
    """docs/pipelines.md; `python benchmarks/pipeline_lines.py --write` puts it there."""
    folder = Path(__file__).resolve().parents[3]
    ran = subprocess.run(
        [sys.executable, str(folder / "benchmarks" / "pipeline_lines.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    page = (folder / "docs" / "pipelines.md").read_text(encoding="utf-8")
    assert ran.stdout.strip() in page and "| 40%, 77% |" in ran.stdout
