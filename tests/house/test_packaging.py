"""The wheel holds exactly the package, and works where there is no checkout.

An editable install hides mistakes: a room missing in pyproject.toml works in the checkout and nowhere else.
"""

from __future__ import annotations

import json
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
    """Built from a copy, because building writes into the tree; tests are in the copy, to see them left out.

    `make package` names the one that it has made."""
    if made := os.environ.get("FARFLUNG_WHEEL"):
        return Path(made)
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


@pytest.mark.hard
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


@pytest.mark.hard
def test_what_the_wheel_installs_makes_a_round_in_an_environment_of_its_own(
    wheel: Path, tmp_path: Path
) -> None:
    """The command that `pip`, `pipx` and `uvx` put on the PATH; what farflung needs is taken from this environment."""
    home, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", str(home), cwd=tmp_path)
    python = str(home / "bin" / "python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = Path(run(python, "-c", where, cwd=tmp_path).strip())
    below = run(sys.executable, "-c", where, cwd=tmp_path).strip()
    (theirs / "below.pth").write_text(below + "\n")  # its own .pth files are not read: no editable farflung
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel), cwd=tmp_path)
    farflung = str(home / "bin" / "farflung")
    where = "import farflung; print(farflung.__file__)"
    imported = run(python, "-c", where, cwd=elsewhere, PYTHONPATH="").strip()
    assert Path(imported) == theirs / "farflung" / "__init__.py"

    (elsewhere / "run.toml").write_text(
        '[run]\nname = "wheel"\nrounds = 1\n[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n'
        "[round]\nsync_every = 5\n"
    )
    words = [farflung, "coordinate", "--exit-when-done", "--json", "--listen", "127.0.0.1:0", "run.toml"]
    own = os.environ | {"PYTHONPATH": "", "FARFLUNG_HOME": str(tmp_path / "key"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, cwd=elsewhere, env=own, stdout=subprocess.PIPE, text=True) as coordinator:
        try:
            assert coordinator.stdout is not None
            url = json.loads(coordinator.stdout.readline())["url"]
            alone = {"PYTHONPATH": "", "FARFLUNG_HOME": own["FARFLUNG_HOME"], "OMP_NUM_THREADS": "1"}
            run(farflung, "join", "--out", "model.safetensors", url, cwd=elsewhere, **alone)
            assert coordinator.wait(LONG_S) == 0
        finally:
            coordinator.kill()
    assert (elsewhere / "model.safetensors").stat().st_size > 1000
