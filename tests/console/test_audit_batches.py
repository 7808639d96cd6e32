"""P11 by the records alone: a run that kept it passes, and each way to break it is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farflung.console.history.audit_batches import check_batches, has_batches
from farflung.console.history.finding import Finding
from farflung.coordinator.ledger.record_events import event_of
from farflung.coordinator.ledger.records import Record
from farflung.peer.simulator.world import Scenario, World

Event = dict[str, Any]


class Told:
    """What the check reads of a history."""

    rules = {"fragments": 1}

    def __init__(self, records: list[Event]) -> None:
        self.records = records
        self.coordinators = [self]
        self.start = {"versions": [0]}


class Noting(World):
    """A run whose records are events as well."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Scenario.of_batches(seed))
        self.events_told: list[Event] = []

    def _write(self, record: Record) -> None:
        kind, fields = event_of(record)
        self.events_told.append({"event": kind, **fields})
        super()._write(record)


def found(records: list[Event]) -> Finding:
    told: Any = Told(records)
    assert has_batches(told)
    return check_batches(told)


@pytest.fixture(scope="module")
def records() -> list[Event]:
    """A run with three commits at least, in which seats were given up."""
    for seed in range(200):
        run = Noting(seed)
        run.run()
        kinds = [each["event"] for each in run.events_told]
        if kinds.count("committed") >= 3 and "unseated" in kinds and "rolled_back" not in kinds:
            if any(len(each["counted"]) > 1 for each in run.events_told if each["event"] == "committed"):
                return run.events_told
    raise AssertionError("no seed shows it")


def test_a_run_that_kept_it_passes(records: list[Event]) -> None:
    finding = found(records)
    assert not finding.broken and finding.checked > 20


def twice(records: list[Event]) -> None:
    commit = next(e for e in records if e["event"] == "committed" and len(e["counted"]) > 1)
    first, second = list(commit["counted"])[:2]
    commit["counted"][second] = commit["counted"][first]


def too_few(records: list[Event]) -> None:
    commit = next(e for e in records if e["event"] == "committed" and len(e["counted"]) > 1)
    commit["counted"].popitem()


def granted_twice(records: list[Event]) -> None:
    place = next(at for at, e in enumerate(records) if e["event"] == "granted_micros")
    records.insert(place, dict(records[place]))


def seat_again(records: list[Event]) -> None:
    seated = [e for e in records if e["event"] == "seated"]
    seated[-1]["number"] = seated[0]["number"]


def gap(records: list[Event]) -> None:
    batches = [e for e in records if e["event"] == "batch"]
    batches[1]["start"] += 1


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (twice, "counted what others had counted"),
        (too_few, "is not made of its whole batch"),
        (granted_twice, "another has them"),
        (seat_again, "was given a second time"),
        (gap, "does not begin where the last ended"),
    ],
)
def test_each_way_to_break_it_is_named(
    records: list[Event], breaks: Callable[[list[Event]], None], told: str
) -> None:
    doctored = [
        {**each, **({"counted": dict(each["counted"])} if "counted" in each else {})} for each in records
    ]
    breaks(doctored)
    assert any(told in text for text in found(doctored).broken)
