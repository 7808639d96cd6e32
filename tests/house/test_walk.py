"""The walk for newcomers works word for word: docs/walk.md, its commands run in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rig.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[2]
LINES_MOST = 60
# What a checkout already has, or what only looks.
DONE = {"make install", ".venv/bin/python tests/house/figures.py"}


def commands() -> list[str]:
    text = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def test_the_walk_is_short() -> None:
    assert len((ROOT / "docs" / "walk.md").read_text(encoding="utf-8").splitlines()) <= LINES_MOST


@pytest.mark.slow
@pytest.mark.hard
def test_each_command_of_the_walk_does_what_the_page_says(tmp_path: Path) -> None:
    there = tmp_path / "farflung"
    shutil.copytree(
        ROOT, there, ignore=shutil.ignore_patterns(".git", ".venv", "dist", ".*_cache", "*.pyc.*")
    )
    git = ["git", "-C", str(there), "-c", "user.name=walk", "-c", "user.email=walk@localhost"]
    for words in (["init", "-q"], ["add", "coordinator"], ["commit", "-q", "-m", "as it is"]):
        subprocess.run([*git, *words], check=True)
    (there / ".venv").symlink_to(ROOT / ".venv")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    environ.pop("PYTEST_XDIST_WORKER", None)
    for command in commands():
        if command in DONE:
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=there, env=environ, capture_output=True, text=True, timeout=LONG_S
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert any(command.startswith("! ") for command in commands()), "a rule is broken on the way"
