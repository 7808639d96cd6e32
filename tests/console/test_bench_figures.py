"""The figures of `farflung bench` from hand-written event logs, the event log itself, and wrong options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farflung.console.bench.bench import BenchOptions, check, usual_chunk_kb
from farflung.console.bench.figures import Killed, result_of, table
from farflung.protocol.errors import UserError
from farflung.protocol.process.journal import EventLog, Follower, read_events

MEMBERS = ["ann", "bob"]


def use(at: float) -> dict[str, float]:
    return {"tx": 100 * at, "rx": 200 * at, "cpu_s": at / 2, "loop_s": at / 8, "arithmetic_s": at / 4}


def one_round(version: int, at: float, slow: float, digest: str = "d") -> list[dict[str, Any]]:
    """Phases of 1, 2, ... 7 times `slow` seconds."""
    number = version + 1
    events: list[dict[str, Any]] = [
        {"event": "plan", "version": version, "fragment": 0, "members": MEMBERS, "use": use(at)}
    ]
    events += [{"event": event} for event in ("encoded", "held", "decided", "results", "committed")]
    events[3]["weights"] = [0.5, 0.5]
    for event in events:
        event["round"] = number
    events += [{"event": "rolled", "version": number, "fragment": 0}]
    events += [{"event": "sealed", "version": number, "fragment": 0, "digest": f"{digest}{number}"}]
    passed = 0.0
    for index, event in enumerate(events):
        passed += index * slow
        event["at"] = at + passed
    return events


def report(slow: float = 0.001, anchor: str = "a", digest: str = "d", rounds: int = 3) -> dict[str, Any]:
    events = [e for v in range(rounds) for e in one_round(v, 10.0 * (v + 1), slow, digest)]
    last = {"event": "end", "at": 100.0, "use": use(10.0 * (rounds + 1)), "peak_rss_bytes": 5_000_000}
    return {"peer": "ann", "events": [*events, last], "anchor": anchor}


def test_a_round_lasts_as_long_as_its_slowest_peer_and_the_first_only_warms_up() -> None:
    result = result_of([report(0.001), report(0.01) | {"rel_error": 0.5}], None)
    assert result["seconds"] == [0.21, 0.21] and result["median_seconds"] == 0.21
    assert result["warmup_seconds"] == 0.21 and result["wall_seconds"] == [10.0]
    assert result["phases"]["encode"] == 0.0055 and result["phases"]["seal"] == 0.0385
    assert (result["tx_bytes_per_peer"], result["rx_bytes_per_peer"]) == (1000.0, 2000.0)
    assert result["cpu_seconds_per_peer"] == 5.0 and result["peak_rss_mb"] == 5.0
    assert result["rel_error"] == 0.5 and result["identical"]
    shown = {"peers": 2, "mb": 1, "codec": "fp32", "gather_codec": "fp32"} | result
    assert any("same bytes everywhere" in line and "yes" in line for line in table(shown))


def test_control_answers_count_from_the_first_measured_round_on() -> None:
    told = report()
    told["events"] += [{"event": "tick", "at": 5.0 + n / 10, "seconds": n / 1000} for n in range(300)]
    told["events"].append({"event": "apart", "at": 25.0})
    result = result_of([told], None)
    # The first measured round begins at 20.0, so 0.150 to 0.299 s count.
    assert result["control"] == {"beats": 150, "median_s": 0.2245, "p99_s": 0.298, "most_s": 0.299}
    assert result["lost_contact"] == 1


def test_other_bytes_or_another_digest_are_not_identical() -> None:
    assert not result_of([report(), report(anchor="b")], None)["identical"]
    assert not result_of([report(), report(digest="e")], None)["identical"]


def test_the_round_with_a_death_is_told_apart() -> None:
    result = result_of([report(rounds=4), report(rounds=4)], Killed(0.5, 2, 0.55))
    assert len(result["seconds"]) == 2
    killed = {"asked": 0.5, "at": 0.55, "round": 2, "seconds": 0.021, "survivors": 2, "included": 2}
    assert result["killed"] == killed


def test_a_round_that_was_aborted_is_counted_and_not_timed() -> None:
    both = [report(rounds=3), report(rounds=3)]
    for one in both:
        one["events"] = [e for e in one["events"] if e["event"] != "committed" or e["round"] != 2]
    result = result_of(both, None)
    assert len(result["seconds"]) == 1 and result["aborted_rounds"] == 1


def test_a_commit_may_come_before_the_last_result() -> None:
    both = [report(), report()]
    for one in both:
        one["events"] = [e for e in one["events"] if e["event"] != "results"]
    phases = result_of(both, None)["phases"]
    assert phases["commit"] == 0.0 and phases["gather"] == 0.009


def test_a_log_is_read_while_it_grows_and_a_torn_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "events"
    follower = Follower(path)
    assert list(follower.new_events()) == []
    log = EventLog(path)
    log.write("plan", round=1)
    assert [e["event"] for e in follower.new_events()] == ["plan"]
    with path.open("ab") as file:
        file.write(json.dumps({"at": 1, "event": "torn"}).encode()[:-3])
    assert list(follower.new_events()) == []
    with path.open("ab") as file:
        file.write(b'n"}\n')
    assert [e["event"] for e in follower.new_events()] == ["torn"]
    log.close()
    log.write("after the end")
    assert len(read_events(path)) == 2


def test_without_a_file_nothing_is_written_and_a_bad_one_is_a_mistake(tmp_path: Path) -> None:
    log = EventLog(None)
    log.write("plan")
    assert not log.is_on
    with pytest.raises(UserError, match="cannot write the event journal: No such file"):
        EventLog(tmp_path / "no" / "such")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"peers": 1}, "--peers: expected 2 to 128, found 1"),
        ({"mb": 0}, "--mb: expected 1 to 100000, found 0"),
        ({"rounds": 0}, "--rounds: expected"),
        ({"codec": "zip"}, '--codec: expected "fp32" or'),
        ({"mb": 1000, "chunk_kb": 1}, "--chunk-kb: expected at least 239 for 1000 MB, found 1"),
        ({"kill_at": 2.5}, "--kill-at: expected 0 to 2"),
        ({"kill_at": 1.0, "serve": "127.0.0.1:7000"}, "--kill-at: expected to be given with --join"),
    ],
)
def test_wrong_options_are_told_in_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        check(BenchOptions(**wrong))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_round_of_several_fragments_lasts_from_the_first_plan_to_the_last_applied_result() -> None:
    reports = [report() for _ in MEMBERS]
    for one in reports:
        later = [
            dict(e)
            | {"at": e["at"] + 0.25, "fragment": 1}
            | ({"round": e["round"] + 100} if "round" in e else {})
            for e in one["events"]
            if e["event"] not in ("start", "end")
        ]
        one["events"] = sorted([*one["events"], *later], key=lambda e: e["at"])
    alone, both = result_of([report() for _ in MEMBERS], None), result_of(reports, None)
    assert both["identical"]
    assert both["seconds"] == pytest.approx([seconds + 0.25 for seconds in alone["seconds"]])


def test_pieces_are_neither_few_nor_too_many() -> None:
    assert [usual_chunk_kb(mb) for mb in (1, 10, 100, 5000)] == [30, 305, 1024, 1193]
    for mb in (1, 10, 100, 5000, 100_000):
        if usual_chunk_kb(mb) <= 16384:
            check(BenchOptions(mb=mb, chunk_kb=usual_chunk_kb(mb)))
