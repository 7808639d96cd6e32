"""The terminal: only what changed is sent, keys work, and everything is put back at the end."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Group
from rich.text import Text

from farflung.console.screen import embedded
from farflung.console.screen.dashboard import render
from farflung.console.screen.live import Terminal, has_terminal
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process.log_lines import json_line
from rig.waiting import PATIENCE_S, Patience


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "5")


@pytest.mark.usefixtures("small")
def test_only_lines_that_changed_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    def sent() -> str:
        return capsys.readouterr().out

    terminal = Terminal(reads_keys=False)
    with terminal:
        assert sent().startswith("\x1b[?1049h")
        terminal.draw(Group(Text("one"), Text("two")))
        assert "one" in sent()
        terminal.draw(Group(Text("one"), Text("TWO")))
        news = sent()
        assert "TWO" in news and "one" not in news and "\x1b[2J" not in news
        terminal.draw(Group(Text("one"), Text("TWO")))
        assert sent() == "", "nothing new, nothing sent"
        terminal.draw(Group(Text("shorter")))
        assert "shorter" in sent()
    assert sent() == "\x1b[?25h\x1b[?1049l"


@pytest.mark.usefixtures("small")
def test_a_url_flows_over_the_lines_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    url = "farflung://train.example.org:29800/demo?k=" + "k" * 43
    picture = render({}, 80, 24, own={"url": url, "title": "you host this run", "log": []})
    Terminal(reads_keys=False).draw(picture)
    assert f'farflung join "{url}"' in capsys.readouterr().out


def test_no_terminal_no_screen() -> None:
    assert not has_terminal(sys.stdout)
    assert not embedded.wanted(plain=False) and not embedded.wanted(plain=True)


def test_the_screen_of_a_peer_finds_out_which_one_it_is_by_a_field_and_not_by_words(tmp_path: Path) -> None:
    log = embedded.Log(tmp_path / "log")
    lines = [
        "loading data",
        json_line("peer", "info", "some other words", peer="abcdefghij234567", name="amber-fox", wait=""),
    ]
    lines.append("step 1")
    log.path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    child = subprocess.Popen([sys.executable, "-c", ""])
    source = embedded.OwnProcess(child, log, JoinUrl("127.0.0.1", 1, "r", b"k" * 32))
    try:
        assert source.status() is None
        assert source.own()["log"] == ["loading data", "farflung: some other words", "step 1"]
        source._status = {"members": [{"id": "abcdefghij234567", "name": "amber-fox", "state": "inner"}]}
        own = source.own()
        assert own["title"] == "you: amber-fox" and own["waiting"] == "" and "tokens/s" in str(own["text"])
    finally:
        source.close()
        child.wait(PATIENCE_S)


def start_in_a_terminal(words: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """A process whose controlling terminal is a new one of 80 x 24; and the other end of that."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))

    def take_it() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None), environment.pop("LINES", None)
    command = [sys.executable, "-m", "farflung", *words]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_it, env=environment
    )
    os.close(theirs)
    return process, ours


def read_until(terminal: int, wanted: bytes) -> bytes:
    seen, patience = b"", Patience()
    while wanted not in seen:
        assert not patience.is_over, seen.decode("utf-8", "replace")[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the process has ended
                break
    assert wanted in seen, seen.decode("utf-8", "replace")[-2000:]
    return seen


@pytest.mark.slow
def test_a_replay_in_a_real_terminal(tmp_path: Path) -> None:
    start = {"wall": 1.0, "event": "start", "role": "coordinator", "run": "demo", "rules": {"rounds": 2}}
    come = {"wall": 500.0, "event": "admitted", "peer": "a" * 16, "name": "amber-fox"}
    lines = [json.dumps(each) for each in (start, come)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    process, terminal = start_in_a_terminal(["status", "--watch", "--replay", str(tmp_path)])
    try:
        read_until(terminal, b"no peers yet")
        os.write(terminal, b"\x1b[F")  # End
        read_until(terminal, b"amber-fox")
        os.write(terminal, b"?")
        read_until(terminal, b"takes part")
        os.write(terminal, b"q")
        read_until(terminal, b"\x1b[?1049l")
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
