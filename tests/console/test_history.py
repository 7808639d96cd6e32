"""A run's history: whose line is whose, in which order, and what does not belong to the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farflung.console.history.history import History, read_folder
from farflung.protocol.errors import UserError

Event = dict[str, Any]


def line(event: str, pid: int = 1, **fields: Any) -> Event:
    return {"at": 0.0, "wall": 0.0, "pid": pid, "event": event, **fields}


def host(pid: int = 1, run_id: str = "00", **fields: Any) -> Event:
    return line("start", pid, role="coordinator", run="demo", run_id=run_id, **fields)


def agent(peer: str, pid: int = 1, run: str = "demo") -> Event:
    return line("start", pid, role="peer", run=run, peer=peer)


def add(path: Path, *events: Event) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_two_processes_in_one_file_are_told_apart(tmp_path: Path) -> None:
    add(tmp_path / "events.jsonl", host(1), host(2), line("a", 1), line("b", 2), line("c", 3), line("d", 1))
    first, second = read_folder(tmp_path).coordinators
    assert [each["event"] for each in first.events] == ["start", "a", "d"]
    assert [each["event"] for each in second.events] == ["start", "b"], "and c has no beginning"


def test_a_start_that_is_said_again_begins_nothing(tmp_path: Path) -> None:
    add(tmp_path / "events.jsonl", host(), line("a"), host(again=True), line("b"), host(), line("c"))
    kinds = [[each["event"] for each in life.events] for life in read_folder(tmp_path).coordinators]
    assert kinds == [["start", "a", "start", "b"], ["start", "c"]]


def test_agents_of_another_run_are_left_out(tmp_path: Path) -> None:
    add(tmp_path / "events.jsonl", host())
    add(
        tmp_path / "x.events.jsonl",
        agent("bob"),
        agent("ann", 2),
        agent("bob", 3),
        agent("eve", 4, run="other"),
    )
    assert [peer for peer, _ in read_folder(tmp_path).lives] == ["bob", "bob", "ann"]


def test_news_come_once_and_the_agents_first(tmp_path: Path) -> None:
    """What a peer tells of a round must be known when the commit is told, in whatever order the files are."""
    history = History(tmp_path, keep=False)
    assert history.new_events() == [] and "no journal of a coordinator" in str(history.no_run)
    add(tmp_path / "events.jsonl", host(), line("committed") | {"wall": 2.0}, line("opened") | {"wall": 1.0})
    add(tmp_path / "x.events.jsonl", agent("bob"), line("sent") | {"wall": 99.0})
    told = [event["event"] for _, event in history.new_events()]
    assert told == ["start", "sent", "start", "opened", "committed"]
    assert history.new_events() == []
    add(tmp_path / "x.events.jsonl", line("sealed"))
    assert [(life.peer, event["event"]) for life, event in history.new_events()] == [("bob", "sealed")]
    assert [len(life.events) for life in history.agents] == [1], "events are handed on, not kept"


def test_a_folder_has_one_run(tmp_path: Path) -> None:
    add(tmp_path / "events.jsonl", host(), host(2, run_id="11"))
    with pytest.raises(UserError, match="more than one run"):
        read_folder(tmp_path)
