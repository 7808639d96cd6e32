"""P11 by the records alone: a run that kept it passes, and each way to break it is named."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from farflung.console.history.audit import check_batches, has_batches
from farflung.console.history.history import Finding, each_round
from farflung.console.history.plots import picture_of
from farflung.console.history.recorded_run import Recording, stage_stories
from farflung.coordinator.ledger.record_events import event_of
from farflung.coordinator.ledger.records import Record
from farflung.simulator.world import Scenario, World
from rig.stage_hall import StageHall

Event = dict[str, Any]


class Told:
    """What the check reads of a history."""

    def __init__(self, records: list[Event], stages: int) -> None:
        self.records = records
        self.coordinators = [self]
        self.rules = {"fragments": stages, "stages": stages}
        self.start = {"versions": [0] * stages}


class Noting(World):
    """A run whose records are events as well."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Scenario.of_batches(seed))
        self.events_told: list[Event] = []

    def _write(self, record: Record) -> None:
        kind, fields = event_of(record)
        self.events_told.append({"event": kind, **fields})
        super()._write(record)


def found(records: list[Event], stages: int = 1) -> Finding:
    told: Any = Told(records, stages)
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


# ---- several stages ----------------------------------------------------------------------------------------


def of_stages() -> list[Event]:
    """Two batches of a model in three stages, as an audit reads them."""
    hall = StageHall(3)
    hall.join("ann", "bob", "cyd", "dan", "eve", "fay")
    hall.found()
    hall.one_batch()
    hall.one_batch()
    told = (event_of(record) for record in hall.records)
    return list(each_round({"event": kind, **fields} for kind, fields in told))


def test_P11_P13_a_run_in_stages_that_kept_it_passes() -> None:
    finding = found(of_stages(), 3)
    assert not finding.broken and finding.checked > 20


def lacks_one(records: list[Event]) -> None:
    commits = [e for e in records if e["event"] == "committed" and e["fragment"] == 2]
    commits[0]["counted"].popitem()


def alone(records: list[Event]) -> None:
    next(e for e in records if e["event"] == "committed").pop("of_batch")


def granted_behind(records: list[Event]) -> None:
    behind = next(e["number"] for e in records if e["event"] == "seated" and e["stage"] == 1)
    granted = [e for e in records if e["event"] == "granted_micros"]
    granted[-1]["seat"] = behind


def of_another_stage(records: list[Event]) -> None:
    first, second = (
        e for e in records if e["event"] == "committed" and e["version"] == 1 and e["fragment"] < 2
    )
    first["counted"], second["counted"] = second["counted"], first["counted"]


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (lacks_one, "version 1 of stage 2 is not made of its whole batch"),
        (alone, "is not committed in all stages at once"),
        (granted_behind, "which is not of the first stage"),
        (of_another_stage, "counted what was not granted to it"),
    ],
)
def test_P11_P13_each_way_to_break_it_in_stages_is_named(
    breaks: Callable[[list[Event]], None], told: str
) -> None:
    records = of_stages()
    breaks(records)
    assert any(told in text for text in found(records, 3).broken)


def test_each_stage_is_told_in_a_row_with_its_seats_and_what_it_counted() -> None:
    records = of_stages()
    stories = stage_stories((float(place), each) for place, each in enumerate(records))
    assert [story.line() for story in stories] == [
        f"stage {number}: 2 seats at most, 0 given up in a batch; 16 microbatches in 2 commits"
        for number in range(3)
    ]
    place = next(n for n, each in enumerate(records) if each["event"] == "committed")
    lost = {"event": "unseated", "number": next(e["number"] for e in records if e["event"] == "seated")}
    doctored = [*records[:place], lost, *records[place:]]
    first = stage_stories((float(n), each) for n, each in enumerate(doctored))[0]
    assert (first.given_up, first.stairs[-1]) == (1, (float(place), 1))
    assert (
        stage_stories((0.0, each) for each in records if each.get("stage", 0) == 0 and "of_batch" not in each)
        == []
    )


def test_the_picture_of_a_run_in_stages_shows_the_seats_of_each() -> None:
    events = [{"wall": 100.0 + place, **each} for place, each in enumerate(of_stages())]
    drawn = picture_of(Recording.of(events, {}))
    ET.fromstring(drawn)
    assert "3 stages; given up in a batch: 0" in drawn and "stage 2" in drawn


# ---- held-out batches


class Evaluating(Noting):
    def __init__(self, seed: int) -> None:
        calm = replace(Scenario.of_evaluated(seed, stages=False), rounds=6, poison_every=0)
        World.__init__(self, seed, calm)
        self.events_told = []


@pytest.mark.mode("evaluation")
def test_P11_held_out_batches_are_of_no_version_and_the_next_one_begins_where_the_last_ended() -> None:
    run = Evaluating(3)
    run.run()
    kept = run.events_told
    begun = [each for each in kept if each["event"] == "batch"]
    assert [each["held_out"] for each in begun].count(True) == 2 and begun[-2]["held_out"] is False
    assert not found(kept).broken
    begun[-2]["held_out"] = True
    assert any("is made of a held-out batch" in told for told in found(kept).broken)
    begun[-2]["held_out"] = begun[-1]["held_out"] = False
    told = " ".join(found(kept).broken)
    assert "ends, and there was none" in told and "does not begin where the last ended" in told
