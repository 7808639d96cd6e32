"""A mode is a folder: taken out of a copy with its tests, the rest imports, runs and passes its tests.

`Mode.tests` lists what goes with the folder, so that nothing else in tests/ may lean on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rig.waiting import LONG_S

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import ROOT, modules

from farflung.coordinator.modes.registry import BEGINNINGS


@dataclass(frozen=True)
class Mode:
    folders: tuple[str, ...]
    tests: tuple[str, ...]  # besides tests/<folder>


MODES = {
    "admission": Mode(
        ("coordinator/admission",),
        (
            "tests/whole/test_liars.py",
            "tests/whole/test_wrong_sums_in_groups.py",
            "tests/whole/test_wrong_sums.py",
        ),
    ),
    "restoring": Mode(
        ("coordinator/restoring",),
        (
            "tests/coordinator/standby/test_restored_store.py",
            "tests/real/test_restored.py",
            "tests/rig/lost_run.py",
            "tests/whole/test_lost_disks.py",
        ),
    ),
    "standby": Mode(
        ("coordinator/standby",),
        ("tests/chaos/test_standby.py", "tests/rig/etcd_cluster.py", "tests/rig/twin_arena.py"),
    ),
}
# What shows in half a minute that the core runs; all of its tests belong to the hard half.
SHORT = ("tests/coordinator/run/test_machine.py", "tests/whole/test_churn.py")
LONG = ("tests/protocol", "tests/coordinator", "tests/peer/machine", "tests/whole/test_simulator.py")
IMPORT_ALL = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"


def test_each_mode_that_can_be_taken_out_is_tried() -> None:
    assert MODES.keys() == BEGINNINGS.keys()
    for name, mode in MODES.items():
        assert BEGINNINGS[name].startswith(
            tuple(f"farflung.{each.replace('/', '.')}." for each in mode.folders)
        )
        missing = [each for each in (*mode.folders, *mode.tests) if not (ROOT / each).exists()]
        assert not missing, f"{name} is made of what is not there: {missing}"


def without(mode: Mode, folder: Path) -> Path:
    """A copy of the product and its tests, in which the mode never was."""
    copy = folder / "farflung"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    gone = (*mode.folders, *(f"tests/{each}" for each in mode.folders), *mode.tests)
    for each in filter(None, listed):
        if (
            (ROOT / each).is_file()
            and not each.startswith(tuple(f"{path}/" for path in gone))
            and each not in gone
        ):
            (copy / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / each, copy / each)
    return copy


def python(copy: Path, *arguments: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environ,
        capture_output=True,
        text=True,
        timeout=6 * LONG_S,
    )
    assert ran.returncode == 0, f"{' '.join(arguments)[:200]}\n{ran.stdout[-6000:]}{ran.stderr[-6000:]}"
    return ran.stdout


def passes(copy: Path, *tests: str) -> None:
    told = python(copy, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not hard", *tests)
    assert " passed" in told, told


@pytest.mark.parametrize("name", MODES)
def test_without_its_folder_all_else_is_imported_and_the_core_runs(name: str, tmp_path: Path) -> None:
    copy = without(MODES[name], tmp_path)
    left = [
        f"farflung.{each.path.replace('/', '.')}"
        for each in modules()
        if not each.path.startswith(MODES[name].folders)
    ]
    assert len(left) > 300
    where = python(
        copy,
        "-c",
        f"{IMPORT_ALL}\nimport farflung.coordinator.modes.registry as it\nprint(it.__file__)",
        *left,
    )
    assert where.strip().startswith(str(copy)), "it is the copy that was tried"
    passes(copy, *SHORT)


@pytest.mark.hard
@pytest.mark.parametrize("name", MODES)
def test_without_its_folder_all_tests_of_the_core_pass(name: str, tmp_path: Path) -> None:
    passes(without(MODES[name], tmp_path), *LONG)
