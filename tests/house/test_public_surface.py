"""The public names are exactly these, and importing farflung costs nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import farflung
from rig.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[2]


def test_the_public_names_are_exactly_these() -> None:
    assert set(farflung.__all__) == {
        "join",
        "Run",
        "TextLines",
        "TokenShards",
        "muon",
        "inner_optimizer",
        "pipeline",
        "parts_of",
        "hf_parts",
        "hf_join",
        "lightning_run",
        "Refused",
        "UserError",
        "__version__",
    }
    assert len(farflung.__all__) == 14


@pytest.mark.parametrize(
    "name",
    [
        "join",
        "Run",
        "TextLines",
        "TokenShards",
        "muon",
        "inner_optimizer",
        "pipeline",
        "parts_of",
        "hf_parts",
        "hf_join",
        "lightning_run",
        "Refused",
        "UserError",
        "__version__",
    ],
)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(farflung, name) is not None
    assert name in dir(farflung)


def test_a_misspelt_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="'jion'; it has join, Run"):
        farflung.jion  # noqa: B018  (the look-up is the test)


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert farflung.__version__ == project["version"]


def test_importing_farflung_does_not_import_torch() -> None:
    """The coordinator runs without torch, and `farflung --help` should answer at once."""
    code = "import sys, farflung; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout.strip() == "False", done.stderr
