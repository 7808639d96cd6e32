"""A mode is a folder: taken out of a copy with its tests, the rest imports, runs and passes its tests.

`Mode.tests` lists what goes with the folder, so that nothing else in tests/ may lean on it.  `make test` takes all
modes out together; the hard half takes each out alone, so that none leans on another, and runs all tests of the core
without any of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from rig.waiting import LONG_S

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import ROOT, modules

from farflung.collectives.round import member
from farflung.console.checkpoint_commands import NAMES_OF_PARTS
from farflung.console.doctor import facts
from farflung.coordinator.modes.registry import BEGINNINGS
from farflung.peer.builtin import trainer
from farflung.peer.machine import modes as at_peers
from farflung.protocol.process.exit_codes import OK, USAGE


@dataclass(frozen=True)
class Mode:
    folders: tuple[str, ...]
    tests: tuple[str, ...]  # besides tests/<folder>
    files: tuple[str, ...] = ()  # in other folders, of no use without it


MODES = {
    "admission": Mode(
        ("coordinator/admission",),
        (
            "tests/whole/test_liars.py",
            "tests/whole/test_wrong_sums_in_groups.py",
            "tests/whole/test_wrong_sums.py",
        ),
    ),
    "audits": Mode(
        ("coordinator/audits", "peer/audits"),
        (
            "tests/rig/dispute_scene.py",
            "tests/rig/sum_court.py",
            "tests/whole/test_mesh_of_liars.py",
            "tests/whole/test_wrong_sums_in_groups.py",
            "tests/whole/test_wrong_sums.py",
        ),
    ),
    "batches": Mode(
        (
            "coordinator/batches",
            "collectives/pipeline",
            "console/batches",
            "peer/batches",
            "peer/crossings",
            "peer/pipeline",
            "simulator/batches",
        ),
        (
            "tests/checkpoints/test_stages.py",
            "tests/compression/test_turned.py",
            "tests/console/test_pipeline_figures.py",
            "tests/real/test_batches.py",
            "tests/real/test_demo_pipeline.py",
            "tests/real/test_pipelines.py",
            "tests/real/test_pipeline_benchmarks.py",
            "tests/rig/batch_desk.py",
            "tests/rig/flow_frames.py",
            "tests/rig/flow_mutations.py",
            "tests/rig/flow_tail.py",
            "tests/rig/flow_world.py",
            "tests/rig/stage_agents.py",
            "tests/rig/stage_hall.py",
            "tests/rig/stage_row.py",
            "tests/rig/unsplit.py",
            "tests/whole/test_batches.py",
            "tests/whole/test_stages.py",
        ),
        (
            "benchmarks/beside.py",
            "benchmarks/beside_lab.py",
            "benchmarks/beside_ranks.py",
            "benchmarks/demo_pipeline.py",
            "benchmarks/learning/staged.py",
            "benchmarks/pipeline.py",
            "benchmarks/pipeline_lines.py",
            "benchmarks/pipeline_wan.py",
            "benchmarks/stage_bench",
            "benchmarks/stages.py",
            "examples/pipeline_model.py",
            "examples/pipeline_run.toml",
        ),
    ),
    "evaluation": Mode(
        ("coordinator/evaluation", "peer/evaluation"),
        (
            "tests/whole/test_evaluation.py",
            "tests/protocol/process/test_metrics.py",
            "tests/real/test_runs.py",
        ),
        ("benchmarks/evaluation.py",),
    ),
    "pace": Mode(("coordinator/pace", "peer/pace"), ("tests/whole/test_pace.py",)),
    "mesh": Mode(
        ("coordinator/mesh", "collectives/mesh"),
        (
            "tests/rig/made_mesh.py",
            "tests/whole/test_large_runs.py",
            "tests/whole/test_mesh.py",
            "tests/whole/test_mesh_of_liars.py",
            "tests/whole/test_wrong_sums_in_groups.py",
        ),
        ("benchmarks/mesh.py",),
    ),
    "reach": Mode(
        ("coordinator/reach", "coordinator/relay"),
        (
            "tests/collectives/test_relay_way.py",
            "tests/collectives/test_undialled.py",
            "tests/console/test_doctor.py",
            "tests/lab/test_routers.py",
            "tests/peer/line/test_offering.py",
            "tests/rig/link_ends.py",
            "tests/rig/relay_rig.py",
            "tests/rig/relayed_hall.py",
            "tests/whole/test_relayed_runs.py",
        ),
        ("console/offered_relay.py", "benchmarks/relay.py"),
    ),
    "recovery": Mode(
        ("coordinator/recovery",),
        (
            "tests/whole/test_going_back.py",
            "tests/whole/test_last_copy.py",
            "tests/whole/test_lost_holders.py",
            "tests/rig/lost_holders.py",
        ),
    ),
    "restoring": Mode(
        ("coordinator/restoring", "peer/restoring"),
        (
            "tests/coordinator/standby/test_restored_store.py",
            "tests/real/test_restored.py",
            "tests/rig/lost_run.py",
            "tests/whole/test_lost_disks.py",
        ),
    ),
    "slow lines": Mode(("coordinator/slow_lines", "peer/slow_lines"), ("tests/whole/test_slow_line.py",)),
    "standby": Mode(
        ("coordinator/standby",),
        ("tests/chaos/test_standby.py", "tests/rig/etcd_cluster.py", "tests/rig/twin_arena.py"),
    ),
}
# What shows in half a minute that the core runs; all of its tests belong to the hard half.
SHORT = ("tests/whole/test_leaving.py",)
LONG = ("tests/protocol", "tests/collectives", "tests/coordinator", "tests/peer")
NEVER_ASK = ("tests/optim", "tests/compression", "tests/checkpoints")  # for a mode: what they import says all
PYTEST = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider")
IMPORT_ALL = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"


def test_each_mode_that_can_be_taken_out_is_tried() -> None:
    assert MODES.keys() == BEGINNINGS.keys()
    for name, mode in MODES.items():
        of_it = tuple(f"farflung.{each.replace('/', '.')}." for each in mode.folders)
        begin = [each[name] for each in (BEGINNINGS, at_peers.BEGINNINGS, at_peers.HANDS) if name in each]
        begin += [member.IN_GROUPS] if name == "mesh" else []
        begin += {
            "batches": [*trainer.OTHER_WAYS, *facts.OTHER_PARTS, NAMES_OF_PARTS],
            "restoring": [at_peers.SEARCH],
            "slow lines": [at_peers.EARLY],
            "audits": [at_peers.KEPT],
        }.get(name, [])
        assert all(each.startswith(of_it) for each in begin)
        missing = [each for each in (*mode.folders, *mode.tests, *mode.files) if not (ROOT / each).exists()]
        assert not missing, f"{name} is made of what is not there: {missing}"


@pytest.mark.parametrize("name", MODES)
def test_no_other_module_of_the_product_imports_it_not_even_late_or_for_types(name: str) -> None:
    of_it = tuple(f"{each}/" for each in MODES[name].folders)
    others = [
        each for each in modules() if not each.path.startswith(of_it) and each.label not in MODES[name].files
    ]
    assert not {
        (each.label, found.name) for each in others for found in each.imports if found.path.startswith(of_it)
    }


def without(names: Collection[str], folder: Path) -> Path:
    """A copy of the product and its tests, in which these modes never were."""
    copy = folder / "farflung"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    folders = [each for name in names for each in MODES[name].folders]
    others = [each for name in names for each in (*MODES[name].tests, *MODES[name].files)]
    gone = (*folders, *(f"tests/{each}" for each in folders), *others)
    for each in filter(None, listed):
        if (
            (ROOT / each).is_file()
            and not each.startswith(tuple(f"{path}/" for path in gone))
            and each not in gone
        ):
            (copy / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / each, copy / each)
    for place in {file.parent for file in copy.rglob("*.py")}:  # or all of it would be compiled once more
        compiled = ROOT / place.relative_to(copy) / "__pycache__"
        if compiled.is_dir():
            shutil.copytree(compiled, place / "__pycache__", ignore=shutil.ignore_patterns("*.pyc.*"))
    return copy


def python(copy: Path, *arguments: str, ends: int = OK) -> str:
    """What it says; of one that is to end with another code, its complaint."""
    environ = os.environ | {"PYTHONPATH": str(copy.parent)}
    environ.pop("FARFLUNG_LONG", None)  # long runs are tried with all modes in place
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environ,
        capture_output=True,
        text=True,
        timeout=6 * LONG_S,
    )
    assert ran.returncode == ends, f"{' '.join(arguments)[:200]}\n{ran.stdout[-6000:]}{ran.stderr[-6000:]}"
    return ran.stdout if ends == OK else ran.stderr


def passes(copy: Path, *tests: str) -> None:
    what = ("-m", "not hard and not slow")
    told = python(copy, *PYTEST, *what, *tests)
    assert " passed" in told, told


def imports_and_runs(names: Collection[str], folder: Path) -> None:
    copy = without(names, folder)
    folders = tuple(f"{each}/" for name in names for each in MODES[name].folders)
    files = {each for name in names for each in MODES[name].files}
    left = [
        f"farflung.{each.path.replace('/', '.')}"
        for each in modules()
        if not each.path.startswith(folders) and each.label not in files
    ]
    assert len(left) > 240
    where = python(
        copy,
        "-c",
        f"{IMPORT_ALL}\nimport farflung.coordinator.modes.registry as it\nprint(it.__file__)",
        *left,
    )
    assert where.strip().startswith(str(copy)), "it is the copy that was tried"
    passes(copy, *SHORT)


def test_without_the_folders_of_all_modes_all_else_is_imported_and_the_core_runs(tmp_path: Path) -> None:
    imports_and_runs(MODES, tmp_path)
    told = python(tmp_path / "farflung", "-c", "from farflung import parts_of", ends=USAGE)
    assert told == (
        "farflung: farflung.parts_of: this farflung was installed without peer/pipeline: install it whole\n"
    )


@pytest.mark.hard
@pytest.mark.parametrize("name", MODES)
def test_without_its_folder_all_else_is_imported_and_the_core_runs(name: str, tmp_path: Path) -> None:
    imports_and_runs([name], tmp_path)


@pytest.mark.hard
@pytest.mark.parametrize("tests", LONG)
def test_without_any_mode_all_tests_of_the_core_pass(tests: str, tmp_path: Path) -> None:
    passes(without(MODES, tmp_path), tests)


@pytest.mark.hard
def test_without_any_mode_the_other_tests_of_the_core_are_imported(tmp_path: Path) -> None:
    told = python(without(MODES, tmp_path), *PYTEST, "--collect-only", *NEVER_ASK)
    assert " tests collected" in told
