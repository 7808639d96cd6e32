"""A coordinator that lacks a mode refuses what needs it, and says what it lacks."""

from __future__ import annotations

import pytest

from farflung.coordinator.modes import registry
from farflung.coordinator.run.effects import Note
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import MergeSection


@pytest.fixture
def none_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "found", lambda name: None)


@pytest.mark.usefixtures("none_there")
def test_what_a_host_wants_of_a_mode_that_is_not_there_is_refused() -> None:
    said = r"\[merge\] audit = 0.5 of run.toml: this coordinator was installed without audits"
    with pytest.raises(UserError, match=said):
        RunMachine(Manifest(merge=MergeSection(audit=0.5)), bytes(16), [], bytes)


@pytest.mark.usefixtures("none_there")
def test_what_is_as_by_default_or_off_is_not_refused_and_the_host_hears_what_is_lacking() -> None:
    for manifest in (Manifest(), Manifest(merge=MergeSection(audit=0.0))):
        machine = RunMachine(manifest, bytes(16), [], bytes)
        [note] = [each for each in machine.start(0.0, 1) if isinstance(each, Note)]
        assert note.text == (
            f"this coordinator was installed without {', '.join(registry.BEGINNINGS)} (docs/architecture.md)"
        )


def test_a_coordinator_that_has_all_modes_says_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "found", lambda name: registry)
    assert registry.lacking() == ""
