"""Every parser of bytes from elsewhere, for a moment: benchmarks/fuzz.py is the long run (`make fuzz`).

Each example is a few mutations of valid bytes, drawn by hypothesis, so that a failure shrinks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.records import Admitted
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.journal import Follower

NAMES = (
    "control",
    "bulk",
    "codec payloads",
    "join URL",
    "run.toml",
    "manifest",
    "journal",
    "checkpoint manifest",
    "evidence",
    "checkpoint note",
    "events",
    "metrics request",
    "status",
    "a member's frames",
    "a run's schedule",
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    yield {target.name: target for target in fuzz.all_targets(tmp_path_factory.mktemp("fuzz"))}


def test_the_list_is_whole(targets: dict[str, Any]) -> None:
    assert tuple(targets) == NAMES


@pytest.mark.parametrize("name", NAMES[:-1])  # whole runs by chance: tests/whole/test_crossed.py
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 1 << 32))
def test_damaged_bytes_end_in_words(targets: dict[str, Any], name: str, seed: int) -> None:
    target, chance, outcome = targets[name], random.Random(seed), fuzz.Outcome()
    for _ in range(3):
        raw = fuzz.mutated(chance.choice(target.seeds), chance.choice(target.seeds), chance)
        fuzz.try_one(target, raw, outcome)
    assert not outcome.crashes, outcome.crashes[0]


@pytest.mark.parametrize("name", NAMES)
def test_what_it_begins_with_is_valid(targets: dict[str, Any], name: str) -> None:
    outcome = fuzz.Outcome()
    for seed in targets[name].seeds:
        assert fuzz.try_one(targets[name], seed, outcome) == "accepted", seed[:80]


# ---- what it found ---------------------------------------------------------------------------------------------


def test_a_signed_manifest_that_claims_a_billion_chunks_is_refused_before_memory_is_taken(
    targets: dict[str, Any],
) -> None:
    target = targets["checkpoint manifest"]
    raw = target.seeds[0].replace(b'"count":1,', b'"count":1000000000,')
    assert raw != target.seeds[0]
    with pytest.raises(CheckpointError, match="too many"):
        target.call(raw)


def test_a_journal_line_of_lists_without_end_counts_as_torn(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"[" * 100_000 + b'\n{"event":"end"}\n')
    follower = Follower(path)
    assert [event["event"] for event in follower.new_events()] == ["end"]
    assert follower.torn == 1


def test_a_record_whose_text_is_no_text_is_told_and_not_a_traceback(tmp_path: Path) -> None:
    with Journal.open_or_create(tmp_path / "j", Manifest(), lambda: bytes(16)) as journal:
        journal.append([Admitted(peer="ann", name="amber-fox", session=bytes(16))])
        [(body,)] = journal._database.execute("SELECT body FROM journal")
        damaged = body.replace(b"amber", b"\xffmber")
        journal._database.execute("UPDATE journal SET body = ?", (damaged,))
        with pytest.raises(UserError, match="record 1 does not match its checksum"):
            journal.records()
