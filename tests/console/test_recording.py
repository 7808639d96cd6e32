"""A finished run from its journals: the status at any moment, the replay, and the picture."""

from __future__ import annotations

import json
import struct
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farflung.console.history.history import read_folder
from farflung.console.history.picture import round_steps, write_picture
from farflung.console.history.plots import WIDTH, picture_of
from farflung.console.history.recorded_run import Recording
from farflung.console.history.replay import Replay
from farflung.console.main import app
from farflung.console.screen.health import health
from farflung.protocol.errors import UserError

ALICE, BOB = "a" * 16, "b" * 16
AHEAD_S = 500.0  # of Bob's clock


def journals() -> dict[str, list[dict[str, Any]]]:
    """Two rounds, of which Bob misses the second one and is lost after it."""
    host: list[dict[str, Any]] = []
    bob: list[dict[str, Any]] = []

    def tell(where: list[dict[str, Any]], at: float, event: str, **more: Any) -> None:
        ahead = AHEAD_S if where is bob else 0.0
        where.append({"at": at, "wall": 1000.0 + at + ahead, "pid": 1, "event": event, **more})

    tell(host, 0, "start", role="coordinator", run="demo", rules={"rounds": 2, "round_timeout_s": 60.0})
    tell(bob, 0.5, "start", role="peer", peer=BOB, name="bob", run="demo")
    for at, peer, name in ((1, ALICE, "alice"), (2, BOB, "bob")):
        tell(host, at, "admitted", peer=peer, name=name, session="00")
        tell(host, at, "note", text=f"{name} joined")
        tell(host, at + 1, "vouched", peer=peer, fragment=0)
    tell(
        host,
        10,
        "opened",
        round=1,
        epoch=1,
        version=0,
        fragment=0,
        members=[ALICE, BOB],
        owned=[1, 1],
        codecs=[],
    )
    tell(bob, 10.2, "sent", round=1, version=0, fragment=0, steps=5, tokens=100)
    tell(host, 10.5, "note", cause="opened", text="round 1 opened from version 0 with 2 peers")
    tell(host, 11, "decided", round=1, decision=1, weights=[0.5, 0.5], reasons={})
    both = {"members": [ALICE, BOB], "fragment": 0, "tokens": 200, "seconds": 2.0, "tx_bytes": 4_000_000}
    tell(host, 12, "committed", round=1, version=1, weights=[0.5, 0.5], excluded={}, loss=3.0, **both)
    tell(bob, 12, "committed", round=1, version=1, fragment=0)
    tell(bob, 12.5, "sealed", version=1, fragment=0, digest="abcd")
    tell(host, 12.6, "digest", version=1, fragment=0, digest="abcd")
    tell(
        host,
        20,
        "opened",
        round=2,
        epoch=1,
        version=1,
        fragment=0,
        members=[ALICE, BOB],
        owned=[1, 1],
        codecs=[],
    )
    late = {BOB: "it sent no hash list in time"}
    tell(host, 23, "decided", round=2, decision=1, weights=[1.0, 0.0], reasons=late)
    tell(host, 24, "committed", round=2, version=2, weights=[1.0, 0.0], excluded=late, loss=2.5, **both)
    tell(host, 30, "departed", peer=BOB, cause="silent", reason="nothing heard for 5 s")
    tell(host, 31, "note", text="bob lost: nothing heard for 5 s")
    return {"run.data/events.jsonl": host, "bob/identity.events.jsonl": bob}


def written(folder: Path, files: dict[str, list[dict[str, Any]]]) -> Path:
    for name, events in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (folder / name).write_text(lines, encoding="utf-8")
    return folder


def recorded(folder: Path) -> Recording:
    return Recording.of(*read_folder(folder).told)


def at(replay: Replay, second: float) -> dict[str, Any]:
    status = replay.status_at(second)
    return status | {"by_name": {member["name"]: member for member in status["members"]}}


def test_the_status_at_any_moment(folder: Path) -> None:
    replay = Replay(recorded(folder), 1.0)
    early = at(replay, 5.0)
    assert early["version"] == 0 and set(early["by_name"]) == {"alice", "bob"} and early["round"] is None
    sending = at(replay, 10.3)
    assert sending["phase"] == "scatter" and sending["round"]["seconds"] == pytest.approx(0.3)
    assert at(replay, 11.5)["phase"] == "gather"
    first = at(replay, 13.0)
    assert (first["version"], first["loss"], first["tokens"], first["parity"]) == (1, 3.0, 200, True)
    assert first["by_name"]["bob"]["same"] is True, (
        "Bob's clock was 500 s ahead, and his words stand in their place"
    )
    assert health(first).word == "GOING WELL"
    second = at(replay, 25.0)
    assert second["by_name"]["bob"]["why"] == "round 2: it sent no hash list in time"
    assert second["rounds"][-1]["excluded"] == [{"name": "bob", "reason": "it sent no hash list in time"}]
    last = at(replay, 31.0)
    assert (last["phase"], last["by_name"]["bob"]["state"]) == ("finished", "lost")
    assert [each["text"] for each in last["events"]] == [
        "alice joined",
        "bob joined",
        "bob lost: nothing heard for 5 s",
    ]
    assert at(replay, 5.0)["version"] == 0, "and back in time"


def test_keys_move_through_time(folder: Path) -> None:
    replay = Replay(recorded(folder), 2.0)
    replay.on_key("p")  # time stands still but for the keys
    for key, second in (("end", 31.0), ("left", 30.69), ("home", 0.0), ("left", 0.0), ("right", 0.31)):
        replay.on_key(key)
        assert replay.at_s == pytest.approx(second)
    assert "PAUSED" in str(replay.own()["text"])
    replay.on_key("p")
    replay.on_key("+")
    assert "4 x" in str(replay.own()["text"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, events in journals().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(event) for event in events]
        path.with_name(path.name + ".1").write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
        path.write_text("\n".join(lines[3:]) + '\n{"at": 3, "torn', encoding="utf-8")
    return tmp_path


def test_journals_are_read_from_a_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = written(tmp_path_factory.mktemp("plain"), journals())
    assert recorded(folder).moments == recorded(plain).moments


def test_the_picture(folder: Path) -> None:
    drawn = picture_of(recorded(folder))
    ET.fromstring(drawn)
    for words in ("demo: 2 rounds in 31 s", "loss", "who takes part", "8.0MB in all", "alice", "1: 2.5 s"):
        assert words in drawn
    assert drawn.count("not in round 2") == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda f: f / "nowhere", "there is no such folder"),
        (lambda f: f / "empty", "no event journals below it"),
        (lambda f: f / "bob", "no journal of a coordinator"),
    ],
)
def test_mistakes_are_told(folder: Path, make: Callable[[Path], Path], says: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=says):
        read_folder(make(folder))
    early = written(folder / "early", {"events.jsonl": journals()["run.data/events.jsonl"][:4]})
    with pytest.raises(UserError, match="nothing to draw"):
        picture_of(recorded(early))


def test_the_commands(folder: Path) -> None:
    call = CliRunner().invoke
    shown = call(app, ["status", "--replay", str(folder), "--at", "25"])
    assert "round 2: it sent no hash list" in shown.output, shown.output
    drawn = call(app, ["export", str(folder), "--plot", str(folder / "run.svg")])
    assert drawn.exit_code == 0 and (folder / "run.svg").read_text(encoding="utf-8").startswith("<svg")
    told = call(app, ["status", "--replay", str(folder), "--json"])
    assert json.loads(told.stdout)["phase"]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("status --replay x farflung://x", "name the join URL of a run, or --replay"),
        ("status", "name the join URL of a run, or --replay"),
        ("status farflung://x --at 2", "status: --at goes only with --replay"),
        ("status farflung://x --watch --json", "status: --json has no place beside --watch"),
        ("status farflung://x --svg x.svg --watch", "status: --svg has no place beside --watch"),
        ("export x --plot x.svg --follow", "export: --follow has no place beside --plot"),
    ],
)
def test_what_goes_not_together_is_told_before_anything_is_done(typed: str, says: str) -> None:
    assert says in str(CliRunner().invoke(app, typed.split()).exception)


def test_axes_have_round_numbers() -> None:
    assert round_steps(0, 10) == [0, 5, 10]
    assert round_steps(2.3, 4.7) == [3.0, 4.0]
    assert round_steps(1, 1) == [1]


def test_the_picture_as_png(folder: Path) -> None:
    pytest.importorskip("resvg_py", reason="resvg-py is not installed; pip install resvg-py")
    write_picture(picture_of(recorded(folder)), folder / "run.png")
    content = (folder / "run.png").read_bytes()
    assert content.startswith(b"\x89PNG") and struct.unpack(">I", content[16:20])[0] == 2 * WIDTH


def test_a_picture_that_cannot_be_made_is_told_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = picture_of(recorded(folder))
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UserError, match=r"pip install resvg-py; or a name with \.svg"):
        write_picture(drawn, folder / "run.png")
    with pytest.raises(UserError, match=r"ends with \.svg or \.png"):
        write_picture(drawn, folder / "run.gif")
