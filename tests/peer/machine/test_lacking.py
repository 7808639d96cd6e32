"""A peer that lacks a mode says before it joins which runs it can't be in."""

from __future__ import annotations

import pytest

from farflung.peer.machine import modes
from farflung.protocol.manifest import Manifest

BATCHES = '[pipeline]\nbatch = 64\n[merge]\npolicy = "mean"'
GROUPS = "[round]\ngroup = 8"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        (
            BATCHES,
            "the run learns in batches, and this peer was installed without them: install farflung whole",
        ),
        (
            GROUPS,
            "the run has rounds in groups, and this peer was installed without mesh: install farflung whole",
        ),
    ],
)
def test_a_run_that_needs_a_mode_that_is_not_there(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "module_of", lambda name: None)
    assert modes.missing(Manifest.from_toml(text, "run.toml")) == said


@pytest.mark.mode("batches")
@pytest.mark.mode("mesh")
@pytest.mark.parametrize("text", ["", BATCHES, GROUPS])
def test_with_all_modes_there_it_can_be_in_any_run(text: str) -> None:
    assert modes.missing(Manifest.from_toml(text, "run.toml")) == ""
