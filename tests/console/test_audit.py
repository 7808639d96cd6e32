"""The audit finds what it is there for: a kept run passes, and each promise broken in the journals is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farflung.console.history import history
from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from farflung.console.main import app
from farflung.protocol.errors import UserError
from farflung.protocol.process.journal import Follower

Event = dict[str, Any]
Files = dict[str, list[Event]]
RULES = {
    "min_peers": 1, "rounds": 9, "fragments": 1, "deadline_s": 5.0,
    "round_timeout_s": 20.0, "heartbeat_s": 0.5, "dead_after_s": 2.0,
}  # fmt: skip
COUNTERS = dict.fromkeys(
    ("accepted", "duplicate", "stale", "unauthorised", "bad hash", "oversize", "malformed"), 0
)


def start(role: str, **more: Any) -> Event:
    return {"event": "start", "role": role, "boot": "b", "run": "r", **more}


def frames(arrived: int, **more: Any) -> Event:
    return {"event": "frames", "arrived": arrived, "counters": COUNTERS | {"accepted": arrived}, **more}


def opened(number: int) -> Event:
    return {"event": "opened", "round": number, "epoch": 1, "version": number - 1, "fragment": 0,
            "members": ["ann", "bob"], "owned": [1, 1], "codecs": ["fp32", "fp32"]}  # fmt: skip


def committed(
    number: int, used: dict[str, list[list[int]]], weights: tuple[float, float] = (0.5, 0.5)
) -> Event:
    return {"event": "committed", "round": number, "version": number, "fragment": 0, "members": ["ann", "bob"],
            "weights": list(weights), "result": f"r{number}", "used": used, "tokens": 80, "steps": 20,
            "excluded": {} if weights[1] else {"bob": "its connection closed"}, "seconds": 0.2}  # fmt: skip


def digest(version: int) -> Event:
    return {"event": "digest", "version": version, "fragment": 0, "digest": f"d{version}"}


def granted(lease: int, peer: str, begin: int) -> Event:
    return {"event": "granted", "peer": peer, "lease": lease, "epoch": 0, "start": begin, "stop": begin + 80,
            "upto": begin}  # fmt: skip


def coordinator() -> list[Event]:
    """Two rounds, a restart in the third, a member lost in the fourth."""
    life = start("coordinator", run_id="00", rules=RULES)
    return numbered([
        {**life, "incarnation": 1, "versions": [0], "era": 0},
        {"event": "started", "incarnation": 1}, {"event": "genesis", "peer": "ann", "digests": ["d0"]},
        *({"event": "admitted", "peer": peer, "name": peer, "session": "00"} for peer in ("ann", "bob")),
        granted(1, "ann", 0), granted(2, "bob", 80),
        opened(1), committed(1, {"ann": [[1, 40]], "bob": [[2, 120]]}), digest(1),
        opened(2), committed(2, {"ann": [[1, 80]], "bob": [[2, 160]]}), digest(2),
        granted(3, "ann", 160), granted(4, "bob", 240),
        opened(3), frames(20),
        {**life, "incarnation": 2, "versions": [2], "era": 0},
        {"event": "started", "incarnation": 2},
        {"event": "aborted", "round": 3, "fragment": 0, "cause": "coordinator_restarted",
         "reason": "the coordinator restarted"},
        opened(4),
        {"event": "departed", "peer": "bob", "cause": "connection_closed", "reason": "its connection closed"},
        committed(4, {"ann": [[3, 240]]}, (1.0, 0.0)) | {"version": 3}, digest(3),
        {"event": "departed", "peer": "ann", "cause": "left", "reason": "stopped by its user"},
        frames(30), *({"event": "note", "text": "bye"} for _ in range(5)),
    ])  # fmt: skip


def numbered(events: list[Event]) -> list[Event]:
    place = 0
    for each in events:
        if each["event"] not in ("start", "frames", "note"):
            place += 1
            each["pos"] = place
    return events


def round_of(number: int, version: int, steps: int, step: int, keep: str) -> list[Event]:
    """One round at a peer: what it froze, sent, heard, applied and loaded."""
    where = {"fragment": 0, "version": version}
    work = {"steps": steps, "tokens": 4 * steps}
    return [
        {"event": "frozen", "fragment": 0, "slot": 0, "step": step, **work},
        {"event": "sent", "round": number, "version": version - 1, "fragment": 0, "era": 0,
         "digest": f"d{version - 1}", **work},
        {"event": "committed", "round": number, **where, "result": f"r{number}"},
        {"event": "sealed", "era": 0, "digest": f"d{version}", **where},
        {"event": "load", "keep": keep, **where, **(work if keep == "rest" else {"steps": 0, "tokens": 0})},
    ]  # fmt: skip


def peer(name: str) -> list[Event]:
    first = {"event": "load", "fragment": 0, "version": 0, "keep": "drop", "steps": 0, "tokens": 0}
    events = [
        start("peer", peer=name, name=name, process="00", upload_limits=["8 Mbit/s"]),
        {"event": "entered", "session": "00", "incarnation": 1},
        {"event": "trainer", "what": "attached", "trainer_pid": 1},
        {"event": "sealed", "fragment": 0, "version": 0, "era": 0, "digest": "d0"}, first,
        frames(0, tx=0, rx=0, waiting=0),
        *round_of(1, 1, 10, 10, "rest"), *round_of(2, 2, 10, 20, "rest"),
    ]  # fmt: skip
    if name == "bob":
        return events
    # Round 3 was aborted: its ten steps go into round 4, with the next ten.
    return [
        *events,
        {"event": "frozen", "fragment": 0, "slot": 0, "steps": 10, "tokens": 40, "step": 30},
        {
            "event": "aborted",
            "round": 3,
            "cause": "coordinator_restarted",
            "reason": "the coordinator restarted",
        },
        *round_of(4, 3, 20, 40, "rest"),
        {"event": "serves", "to": "cid", "version": 3, "fragment": 0, "era": 0, "digest": "d3"},
        frames(10, tx=5_000_000, rx=0, waiting=0),
        {"event": "end", "code": "left", "reason": "stopped by its user"},
    ]


def a_run() -> Files:
    return {
        "run.data/events.jsonl": coordinator(),
        "ann.events.jsonl": peer("ann"),
        "bob.events.jsonl": peer("bob"),
    }


def write(folder: Path, files: Files) -> Path:
    """One second a line at the coordinator; a peer's life lies within the coordinator's."""
    for name, events in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        span = 100.0 / len(events)
        pid, lines = 0, []
        for place, event in enumerate(events):
            pid += event["event"] == "start"
            at = place * span if "data" in name else 5 + 0.8 * place * span
            stamp = {"at": at, "wall": 0.0, "pid": hash(name) % 1000 * 10 + pid}
            lines.append(json.dumps(stamp | event))
        path.write_text("\n".join(lines) + "\n")
    return folder


def broken(folder: Path, files: Files) -> dict[str, list[str]]:
    report = audit(read_folder(write(folder, files)))
    return {finding.promise: finding.broken for finding in report.findings if finding.broken}


def the(files: Files, name: str, event: str, number: int = 0) -> Event:
    name = "run.data/events.jsonl" if name == "coordinator" else f"{name}.events.jsonl"
    return [each for each in files[name] if each["event"] == event][number]


def test_a_run_that_keeps_its_promises_passes(tmp_path: Path) -> None:
    report = audit(read_folder(write(tmp_path, a_run())))
    assert report.kept, "\n".join(report.lines())
    assert all(finding.checked for finding in report.findings), "\n".join(report.lines())
    assert [finding.promise for finding in report.findings] == [f"P{number}" for number in range(1, 11)]


def led_in_turn() -> Files:
    """Anna leads, then Berta, then Anna again: each begins with what the other wrote since, as it finds it."""
    files = a_run()
    told = files.pop("run.data/events.jsonl")
    [_, second] = [place for place, each in enumerate(told) if each["event"] == "start"]
    anna, berta = told[:second], told[second:]
    once_more = berta[0] | {"incarnation": 3, "versions": [3]}
    last = {"event": "started", "incarnation": 3, "pos": 1 + max(each.get("pos", 0) for each in told)}
    files["anna.data/events.jsonl"] = [*anna, once_more, *late(berta), last]
    files["berta.data/events.jsonl"] = [berta[0], *late(anna), *berta[1:]]
    return files


def late(events: list[Event]) -> list[Event]:
    return [{**each, "late": True} for each in events if "pos" in each]


def test_a_run_that_two_coordinators_led_in_turn_is_one_story(tmp_path: Path) -> None:
    history = read_folder(write(tmp_path, led_in_turn()))
    report = audit(history)
    assert report.kept, "\n".join(report.lines())
    assert [each.start["incarnation"] for each in history.coordinators] == [1, 2, 3]
    assert [each["pos"] for each in history.records] == sorted({each["pos"] for each in history.records})


def test_a_coordinator_that_ended_before_it_began_stands_before_the_one_that_had_its_number(
    tmp_path: Path,
) -> None:
    """Stopped between its start and its first record: the next one, wherever it is, has the same incarnation."""
    files = led_in_turn()
    stopped = files["anna.data/events.jsonl"][0]
    files["berta.data/events.jsonl"].insert(0, stopped)
    report = audit(read_folder(write(tmp_path, files)))
    assert report.kept, "\n".join(report.lines())


def test_a_commit_that_the_next_coordinator_does_not_know_is_found(tmp_path: Path) -> None:
    files = led_in_turn()
    files["berta.data/events.jsonl"][0] = files["berta.data/events.jsonl"][0] | {"versions": [1]}
    assert "P5" in broken(tmp_path, files)


def test_a_run_that_goes_on_while_it_is_judged_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Journals are read one after another: what a peer heard of may be newer than what was read of the coordinator."""
    journal = write(tmp_path, a_run()) / "run.data" / "events.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    second = next(at for at, line in enumerate(lines) if '"committed"' in line and '"round": 2' in line)
    journal.write_text("".join(lines[:second]))

    class WhileTheRunGoesOn(Follower):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.is_bobs = path.name.startswith("bob")

        def new_events(self) -> Iterator[Event]:
            if self.is_bobs:
                journal.write_text("".join(lines))
            return super().new_events()

    monkeypatch.setattr(history, "Follower", WhileTheRunGoesOn)
    report = audit(read_folder(tmp_path))
    assert report.kept, "\n".join(report.lines())


def set_to(name: str, event: str, number: int = 0, **values: Any) -> Callable[[Files], None]:
    return lambda files: the(files, name, event, number).update(values)


def drop(name: str, event: str, number: int = 0) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for events in files.values():
            if the(files, name, event, number) in events:
                events.remove(the(files, name, event, number))
                return

    return change


def twice(files: Files) -> None:
    events = files["run.data/events.jsonl"]
    place = next(i for i, each in enumerate(events) if each["event"] == "committed")
    events.insert(place, copy.deepcopy(events[place]))
    numbered(events)


def lose_a_commit(files: Files) -> None:
    """As if the coordinator had been restored from an old copy of its folder."""
    events = files["run.data/events.jsonl"]
    second = [each for each in events if each.get("round") == 2]
    files["run.data/events.jsonl"] = numbered([e for e in events if e not in second and e != digest(2)])


def start_again_from_before(files: Files) -> None:
    the(files, "coordinator", "start", 1)["versions"] = [1]


def no_survivor(files: Files) -> None:
    commit = the(files, "coordinator", "committed", 2)
    commit.clear()
    commit.update({"event": "aborted", "round": 4, "fragment": 0, "reason": "too slow", "pos": 0})
    files["run.data/events.jsonl"].remove(the(files, "coordinator", "digest", 2))
    numbered(files["run.data/events.jsonl"])
    files["ann.events.jsonl"] = [
        e for e in files["ann.events.jsonl"] if e.get("version") != 3 and e.get("round") != 4
    ]


def above_the_cap(files: Files) -> None:
    commit = the(files, "coordinator", "committed")
    commit |= {"members": ["ann", "bob", "cyd"], "weights": [0.9, 0.05, 0.05]}


def no_good_bye(files: Files) -> None:
    """The coordinator found out by itself, and later."""
    events = files["run.data/events.jsonl"]
    lost = the(files, "coordinator", "departed", 1)
    events.remove(lost)
    events.insert(-1, lost | {"cause": "connection_closed", "reason": "its connection closed"})
    files["run.data/events.jsonl"] = numbered(events)


DOCTORED: list[tuple[str, str, Callable[[Files], None]]] = [
    ("P1", "another digest at one peer", set_to("bob", "sealed", 2, digest="other")),
    ("P1", "all agree on a digest that is not the run's", set_to("coordinator", "digest", 1, digest="other")),
    ("P2", "a version committed twice", twice),
    ("P2", "a peer heard of another result", set_to("ann", "committed", 1, result="other")),
    ("P2", "a version applied that nobody committed", set_to("bob", "sealed", 2, version=7)),
    ("P3", "a round that one death aborts", no_survivor),
    ("P4", "a contribution from another state", set_to("ann", "sent", 1, digest="other")),
    ("P4", "another state served", set_to("ann", "serves", digest="other")),
    ("P5", "a commit that peers know is gone", lose_a_commit),
    ("P5", "started at an older version", start_again_from_before),
    ("P5", "two lives under one number", set_to("coordinator", "started", 1, incarnation=1)),
    ("P5", "a record is missing", drop("coordinator", "granted", 2)),
    ("P6", "steps lost after an aborted round", set_to("ann", "frozen", 3, steps=10)),
    ("P6", "work kept that a commit has used", set_to("ann", "load", 2, keep="all")),
    ("P6", "work given up that no commit used", set_to("coordinator", "committed", 1, weights=[0.0, 1.0])),
    ("P7", "a lease of samples that somebody holds", set_to("coordinator", "granted", 3, start=200)),
    ("P7", "samples committed a second time", set_to("coordinator", "granted", 2, start=40, upto=40)),
    ("P7", "somebody else's lease", set_to("coordinator", "committed", 0, used={"ann": [[2, 120]]})),
    ("P8", "a frame in no counter", set_to("ann", "frames", 1, arrived=11)),
    ("P8", "a control frame in no counter", set_to("coordinator", "frames", arrived=21)),
    ("P9", "a weight above its cap", above_the_cap),
    ("P9", "left out without a reason", set_to("coordinator", "committed", 2, excluded={})),
    ("P10", "left without a word", no_good_bye),
    ("P10", "over its cap", set_to("ann", "frames", 1, tx=5_000_000_000)),
]  # fmt: skip


@pytest.mark.parametrize(("promise", "what", "change"), DOCTORED, ids=[f"{p}-{w}" for p, w, _ in DOCTORED])
def test_each_check_can_fail(
    tmp_path: Path, promise: str, what: str, change: Callable[[Files], None]
) -> None:
    files = a_run()
    change(files)
    assert promise in broken(tmp_path, files), what


@pytest.mark.parametrize("helps", [True, False])
def test_who_helps_leaves_a_round_nothing_to_go_on_with(tmp_path: Path, helps: bool) -> None:
    files = a_run()
    no_survivor(files)
    the(files, "coordinator", "start")["rules"] = RULES | {"min_peers": 2}
    the(files, "coordinator", "opened", 3)["members"] = ["ann", "bob", "cid"]
    the(files, "coordinator", "opened", 3)["owned"] = [1, 1, 1]
    who = {"event": "admitted", "peer": "cid", "name": "cid", "session": "00", "helps": helps}
    events = files["run.data/events.jsonl"]
    events.insert(events.index(the(files, "coordinator", "opened")), who)
    numbered(events)
    assert ("P3" in broken(tmp_path, files)) is not helps


@pytest.mark.parametrize(("apart_at", "own"), [(12.0, False), (25.0, True)])
def test_a_coordinator_that_nobody_hears_is_one_fault_more_than_a_death(
    tmp_path: Path, apart_at: float, own: bool
) -> None:
    """As one that is stopped for longer than a round may take."""
    files = a_run()
    no_survivor(files)
    the(files, "coordinator", "opened", 3)["wall"] = 10.0
    the(files, "coordinator", "aborted", 1)["wall"] = 20.0
    ann = files["ann.events.jsonl"]
    ann.insert(len(ann) - 1, {"event": "apart", "wall": apart_at})
    assert ("P3" in broken(tmp_path, files)) is own


def test_a_round_that_takes_too_long_is_told(tmp_path: Path) -> None:
    files = a_run()
    write(tmp_path, files)
    path = tmp_path / "run.data/events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for each in events:
        each["at"] *= 20
    path.write_text("\n".join(map(json.dumps, events)) + "\n")
    findings = {f.promise: f for f in audit(read_folder(tmp_path)).findings}
    assert any("took" in text for text in findings["P3"].broken)


def test_going_back_is_a_new_era_and_no_broken_promise(tmp_path: Path) -> None:
    files = a_run()
    again = committed(5, {"ann": [[5, 80]]}, (1.0, 0.0)) | {"version": 2}
    more = [{"event": "rolled_back", "versions": [1], "reason": "nobody held anything newer"},
            granted(5, "ann", 40) | {"stop": 80}, opened(5) | {"version": 1}, again,
            digest(2) | {"digest": "e2"}]  # fmt: skip
    files["run.data/events.jsonl"] = numbered([*coordinator()[:-7], *more, *coordinator()[-7:]])
    files["ann.events.jsonl"][-1:-1] = [
        {"event": "sealed", "fragment": 0, "version": 2, "era": 1, "digest": "e2"}
    ]
    assert broken(tmp_path, files) == {}
    files["ann.events.jsonl"][-2]["digest"] = "d2"  # what version 2 was before
    assert "P1" in broken(tmp_path, files)


def lagging_bob() -> Files:
    """Round 2's results reach bob together with those of round 4, of which he was no part: he loads once for both."""
    files = a_run()
    events = files["bob.events.jsonl"]
    events[-2:] = [
        {"event": "committed", "round": 4, "fragment": 0, "version": 3, "result": "r4"},
        {"event": "sealed", "era": 0, "digest": "d3", "fragment": 0, "version": 3},
        events[-1] | {"version": 3},
    ]
    return files


def test_P6_one_load_may_answer_for_two_versions(tmp_path: Path) -> None:
    kept, lost = tmp_path / "kept", tmp_path / "lost"
    kept.mkdir(), lost.mkdir()
    assert broken(kept, lagging_bob()) == {}
    files = lagging_bob()
    the(files, "bob", "load", 2)["keep"] = "all"
    assert "P6" in broken(lost, files)


def test_the_command_prints_a_line_for_each_promise_and_fails_if_one_is_broken(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir(), bad.mkdir()
    write(good, a_run())
    files = a_run()
    twice(files)
    write(bad, files)
    shown = CliRunner().invoke(app, ["audit", str(good)])
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == [f"P{n}" for n in range(1, 11)]
    failed = CliRunner().invoke(app, ["audit", str(bad)])
    assert failed.exit_code == 1 and "P2  BROKEN" in failed.stdout


def test_what_is_no_run_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_folder(tmp_path / "nothing")
    with pytest.raises(UserError, match="no journal of a coordinator"):
        read_folder(write(tmp_path, {"ann.events.jsonl": peer("ann")}))
    write(tmp_path, a_run())
    other = [each | ({"run_id": "11"} if each["event"] == "start" else {}) for each in coordinator()]
    write(tmp_path, {"other.data/events.jsonl": other})
    with pytest.raises(UserError, match="journals of more than one run"):
        read_folder(tmp_path)
