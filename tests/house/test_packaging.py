"""The wheel holds exactly the package, and works where there is no checkout.

An editable install hides mistakes: a room missing in pyproject.toml works in the checkout and nowhere else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rig.waiting import LONG_S

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import FOLDERS, ROOT

# Both tests need the same wheel: one process of pytest-xdist builds it once.
pytestmark = pytest.mark.xdist_group("packaging")


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because building writes into the tree; tests are in the copy, to see them left out."""
    folder = tmp_path_factory.mktemp("wheel")
    leave_out = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "*.sqlite*", "build", "dist", "runs"
    )
    shutil.copytree(ROOT, folder / "tree", ignore=leave_out)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "wheel", "--quiet", *offline, "--wheel-dir", "..", ".", cwd=folder / "tree")
    (built,) = folder.glob("farflung-*.whl")
    return built


def test_the_wheel_holds_exactly_the_package(wheel: Path) -> None:
    expected = {"farflung/__init__.py", "farflung/__main__.py", "farflung/py.typed"}
    for room in FOLDERS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", ".c", ".css", ".js") and "__pycache__" not in path.parts:
                expected.add(f"farflung/{path.relative_to(ROOT).as_posix()}")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_installed_wheel_works_far_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(
        *pip,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
        cwd=tmp_path,
    )

    # gzip and bz2 import the standard `compression` on Python 3.14: ours must not be in the way.
    code = "import farflung, gzip, bz2; print(farflung.__file__)"
    imported = run(sys.executable, "-c", code, cwd=elsewhere, PYTHONPATH=str(target)).strip()
    assert Path(imported) == target / "farflung" / "__init__.py", "the wheel was not what got imported"

    assert "join" in run(sys.executable, "-m", "farflung", "--help", cwd=elsewhere, PYTHONPATH=str(target))
