"""Why do I wait, since when, and what ends it: the first screen of `join` says it, at 80x24, in full."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farflung.console.screen import embedded
from farflung.console.screen.dashboard import PLAIN, details, render
from farflung.console.screen.health import why_waiting
from farflung.console.screen.view import HELP, View
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process.log_lines import json_line

ROOT = Path(__file__).parents[2]
SAMPLE: dict[str, Any] = json.loads((ROOT / "docs" / "sample_status.json").read_text(encoding="utf-8"))
ME = "flnihqmbtjjxfwxb"
UNASKED: dict[str, Any] = {"unasked": True}


def run(state: str = "inner", **changed: Any) -> dict[str, Any]:
    """A run with me in it, and one other."""
    me, other = ({**member, "alive": True, "why": "", "state": state} for member in SAMPLE["members"][:2])
    return SAMPLE | {"round": None, "phase": "inner", "members": [me, other]} | changed


def own(wait: str | None = "", why: str = "", **more: object) -> dict[str, object]:
    said = {"wait": wait, "why": why} if wait is not None else {}
    return {"since": 100.0, "me": ME, "name": "amber-fox"} | said | more


FULL = (
    "not admitted yet: this identity is already in the run as another process; stop that one, or use another identity "
    "file"
)
LOST = (
    "nobody online has version 44: waiting for one that does, or for one with a checkpoint (join --checkpoints); "
    "the host can found the run anew: farflung rewind --from-scratch"
)
STAGED = [
    ("python starts", UNASKED, own(None), "starting Python, for 12 s"),
    ("torch is loaded", UNASKED, own("loading", "loading torch"), "loading torch, for 12 s; then it asks"),
    ("the trainer starts", run(), own("trainer", "starting the trainer: torch, its model and its data"),
     "starting the trainer: torch, its model and its data, for 12 s; then it asks to be let in"),
    ("nobody answers", UNASKED, own("knocking", "no answer from the coordinator yet; it is asked again"),
     "no answer from the coordinator yet; it is asked again, for 12 s"),
    ("not let in", run(), own("refused", FULL), f"{FULL}, for 12 s; it asks again by itself"),
    ("the first one", run(members=[]), own("founding", "giving the run its first weights"),
     "giving the run its first weights, for 12 s; then the first round begins"),
    ("it downloads", run("syncing"), own("fetching", "downloading the model: 43%"),
     "downloading the model: 43%, for 12 s; then it trains"),
    ("nobody has it", run("waiting"), own("told", LOST), f"{LOST}, for 12 s"),
    ("the host paused", run(), own("told", "the host paused the run (dinner); training goes on alone"),
     "the host paused the run (dinner); training goes on alone, for 12 s"),
    ("too few are here", run("ready", phase="waiting", least_peers=3), own(),
     "waiting for min_peers (2 of 3 here), for 12 s; another peer that joins ends it"),
    ("no data", run(), own("data", "no data is leased to this peer yet; the coordinator is asked again"),
     "no data is leased to this peer yet; the coordinator is asked again, for 12 s"),
    ("the others are slow", run("ready", reason="inner steps: 1 of 2 ready, at most 40.0 s more"),
     own("round", "something older"),
     "step 650, waiting for the next round: inner steps: 1 of 2 ready, at most 40.0 s more, for 12 s"),
    ("it is left out", run(members=[SAMPLE["members"][0] | {"why": "its digest differs"}], least_peers=1), own(),
     "not in the rounds: its digest differs, for 12 s"),
]  # fmt: skip


def screen(status: dict[str, Any], shown: dict[str, object], view: View = PLAIN) -> list[str]:
    console = Console(width=80, height=24, file=io.StringIO(), legacy_windows=False)
    with console.capture() as captured:
        console.print(render(status, 80, 24, view, shown), end="")
    return captured.get().splitlines()


def own_panel(lines: list[str]) -> str:
    assert lines[0].startswith("╭─ you")
    end = next(number for number, line in enumerate(lines) if line.startswith("╰"))
    return " ".join(line.strip("│ ") for line in lines[1:end])


@pytest.mark.parametrize(
    ("status", "told", "says"), [row[1:] for row in STAGED], ids=[row[0] for row in STAGED]
)
def test_each_wait_is_on_the_screen_in_full(
    status: dict[str, Any], told: dict[str, object], says: str
) -> None:
    line = why_waiting(status, told, 112.0)
    assert line.startswith(says)
    lines = screen(status, {"title": "you: amber-fox", "waiting": line, "log": []})
    assert len(lines) <= 24 and all(len(each) <= 80 for each in lines)
    assert own_panel(lines) == line, "cut off"


def test_a_peer_that_trains_waits_for_nothing() -> None:
    for state in ("inner", "scatter", "gather", "apply"):
        assert why_waiting(run(state), own(), 112.0) == ""
    assert why_waiting(run() | {"unanswered_s": 9.0}, own(), 112.0) == ""
    assert why_waiting({}, own(), 112.0) == ""


def test_somebody_elses_row_under_my_id_is_not_me() -> None:
    """A second process of one identity, which is not let in, sees the first one's row."""
    status = run("waiting")
    assert "not admitted" in why_waiting(status, own("refused", FULL), 112.0)
    picture = "\n".join(screen(status, {"title": "you", "waiting": FULL, "log": []}))
    assert "waits " not in picture.split("╰")[0]


def test_the_line_comes_from_what_the_child_says_and_its_clock_from_when_it_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = embedded.Log(tmp_path / "log")
    child = subprocess.Popen([sys.executable, "-c", ""])
    source = embedded.OwnProcess(child, log, JoinUrl("127.0.0.1", 1, "r", b"k" * 32))
    clock = [1000.0]
    monkeypatch.setattr(embedded.time, "time", lambda: clock[0])

    def says(at: float, wait: str, why: str) -> None:
        monkeypatch.setattr("farflung.protocol.process.log_lines.time.time", lambda: at)
        with log.path.open("a", encoding="utf-8") as file:
            file.write(json_line("peer", "info", why, wait=wait, why=why) + "\n")
        monkeypatch.setattr("farflung.protocol.process.log_lines.time.time", lambda: clock[0])

    def shown(at: float) -> str:
        clock[0] = at
        source.status()
        return str(source.own()["waiting"])

    log.path.touch()
    for second in (1.0, 2.0):
        source._shares.count(
            {"state": "waiting"}, second
        )  # what its time goes into stands beside it, and is no line
    try:
        assert shown(1000.0) == "starting Python, for 0.0 s" and shown(1003.0) == "starting Python, for 3.0 s"
        says(1004.0, "loading", "loading torch")
        assert shown(1006.0).startswith("loading torch, for 2.0 s")
        says(1010.0, "fetching", "downloading the model: 1%")
        assert shown(1011.0).startswith("downloading the model: 1%, for 1.0 s")
        says(1020.0, "fetching", "downloading the model: 50%")
        assert shown(1030.0).startswith("downloading the model: 50%, for 20 s"), "it is the same wait"
        says(1031.0, "", "")
        assert shown(1032.0) == ""
        source._status = run("ready", phase="waiting", least_peers=3)
        source._told["me"] = ME
        assert shown(1040.0).startswith("waiting for min_peers (2 of 3 here), for 0.0 s")
        assert shown(1047.0).startswith("waiting for min_peers (2 of 3 here), for 7.0 s")
    finally:
        source.close()
        child.wait()


def test_the_help_at_80x24_is_not_cut() -> None:
    lines = screen(run(), {"title": "you", "text": "", "log": []}, View(page="help"))
    first = next(number for number, line in enumerate(lines) if line.startswith("╭─ help"))
    inside = [line.strip("│ ") for line in lines[first + 1 : -2] if line.strip("│ ")]
    assert inside == list(HELP) and len(lines) <= 24


def test_a_connection_that_carried_next_to_nothing_has_no_figure() -> None:
    def said(status: dict[str, Any]) -> str:
        return next(str(line) for line in details(status["members"][0], status) if "received" in str(line))

    status = run()
    assert said(status).startswith("sends 2.4MB/s of 2.5MB/s, gets 2.2MB/s of 12.0MB/s; ")
    status["members"][0] |= {"tx_bytes_per_s": 0, "up_bytes_per_s": 573}
    assert said(status).startswith("sends 0B/s, gets 2.2MB/s of 12.0MB/s; ")
    status["members"] = status["members"][:1]
    assert said(status).startswith("no other peer is here to exchange data with; ")
