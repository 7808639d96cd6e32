"""A coordinator that lacks a mode refuses what needs it, and says what it lacks."""

from __future__ import annotations

import pytest

from farflung.coordinator.modes import registry
from farflung.coordinator.run.effects import Note
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest, MergeSection


@pytest.fixture
def none_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "found", lambda name: None)


@pytest.mark.usefixtures("none_there")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[merge]\naudit = 0.5",
            r"\[merge\] audit = 0.5 of run.toml: .* installed without audits: leave that out",
        ),
        ("[round]\ngroup = 8", r"\[round\] group = 8 of run.toml: .* installed without mesh: leave that out"),
        (
            '[pipeline]\nbatch = 64\n[merge]\npolicy = "mean"',
            r"\[pipeline\] batch = 64 of run.toml: .* installed without batches: leave that out, say 0",
        ),
    ],
)
def test_what_a_host_wants_of_a_mode_that_is_not_there_is_refused(text: str, said: str) -> None:
    manifest = Manifest.from_toml(text, "run.toml")
    with pytest.raises(UserError, match=said):
        RunMachine(manifest, bytes(16), [], bytes)


@pytest.mark.mode("batches")
@pytest.mark.mode("mesh")
@pytest.mark.mode("slow lines")
def test_one_policy_goes_for_a_run_and_of_slow_lines_there_is_none_beside_batches_or_groups() -> None:
    """Two modes that say who is in a round, or who owns what, can't both be right."""
    found = {}
    for text in ("", "[round]\ngroup = 8", '[pipeline]\nbatch = 64\n[merge]\npolicy = "mean"'):
        machine = RunMachine(Manifest.from_toml(text, "run.toml"), bytes(16), [], bytes)
        found[text] = {(type(each.policy).__name__, type(each.lines).__name__) for each in machine.drivers}
    assert list(found.values()) == [
        {("SlowLinesPolicy", "EarlyUploads")},
        {("MeshPolicy", "LineShares")},
        {("BatchPolicy", "LineShares")},
    ]


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
