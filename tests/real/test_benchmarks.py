"""Benchmarks of lines and of joining still run: each for a moment, with as little as shows something."""

from __future__ import annotations

import contextlib
import json
import sys

import fast_join
import line_speed
import pytest

from rig.nursery import Nursery

pytestmark = pytest.mark.slow


def test_a_line_carries_a_vector_each_time() -> None:
    went = line_speed.measure(mb=8, chunk_mb=1, times=2)
    assert len(went) == 2
    assert all(min(each.gbit_per_s, each.sender_cpu_s, each.receiver_cpu_s) > 0 for each in went)


@pytest.mark.hard
def test_joins_into_rounds_without_pauses_are_counted(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fast_join, "Nursery", lambda folder: contextlib.nullcontext(nursery))
    monkeypatch.setattr(sys, "argv", ["fast_join.py", "--joins", "2", "--values", "65536", "--json"])
    assert fast_join.main() == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made) == 2 and all(each["rounds"] >= 1 for each in made)
