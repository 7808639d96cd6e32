"""`farflung coordinate --web`: the page of a real coordinator, and what becomes of it when one of the two dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from farflung.console.web.page_keeper import PageKeeper
from farflung.protocol.errors import UserError
from farflung.protocol.limits import WEB_MEMORY_BYTES
from farflung.protocol.process import exit_codes
from rig.waiting import PATIENCE_S, eventually, is_running

pytestmark = pytest.mark.slow
RUN_TOML = '[run]\nname = "seen-by-all"\nrounds = 9\n[admission]\nmode = "{mode}"\n'


@dataclass
class Hosted:
    process: subprocess.Popen[bytes]
    log: Path
    page: str
    url: str

    def get(self) -> str:
        with urllib.request.urlopen(self.page, timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    def shows(self, word: str) -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return word in self.get()
        return False

    def page_processes(self) -> list[int]:
        """Those whose command says so.  A thread starts them, so each thread's children are looked at."""
        found = []
        for listed in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it ended just now
                for pid in map(int, listed.read_text().split()):
                    if b"page_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return found


@contextlib.contextmanager
def hosted(folder: Path, mode: str = "open") -> Iterator[Hosted]:
    (folder / "run.toml").write_text(RUN_TOML.format(mode=mode))
    log, out = folder / "log", folder / "out"
    command = [sys.executable, "-m", "farflung", "coordinate", "--plain", "--listen", "127.0.0.1:0"]
    command += ["--web", "127.0.0.1:0", "run.toml"]
    with log.open("wb") as errors, out.open("wb") as told:
        process = subprocess.Popen(command, cwd=folder, stdout=told, stderr=errors)
    try:
        found = eventually(lambda: re.search(r"http://\S+", log.read_text()), "it says where its page is")
        url = eventually(lambda: out.read_text().strip(), "it says its URL")
        yield Hosted(process, log, found[0], url)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_the_page_of_a_run_shows_it_and_survives_the_death_of_its_process(tmp_path: Path) -> None:
    with hosted(tmp_path) as run:
        eventually(lambda: run.shows("Round 0 of 9"), "the page shows the run")
        html = run.get()
        assert "seen-by-all" in html and "Round 0 of 9" in html
        assert f"farflung join &quot;{run.url}&quot;" in html
        [first] = run.page_processes()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: run.page_processes() not in ([], [first]), "another one has its place")
        eventually(lambda: run.shows("Round 0 of 9"), "the page shows the run again")
        assert "the page: its process was killed by signal 9; the run is not affected" in run.log.read_text()
        [last] = run.page_processes()
        run.process.terminate()
        assert run.process.wait(PATIENCE_S) == 0
        assert not is_running(last)


def test_the_page_goes_with_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    with hosted(tmp_path, "token") as run:
        eventually(lambda: run.shows("by invitation"), "the page shows the run")
        assert "farflung://" not in run.get()
        [pid] = run.page_processes()
        run.process.kill()
        run.process.wait()
        eventually(lambda: not is_running(pid), "nobody serves a page of nothing")


@pytest.mark.hard
def test_a_coordinator_that_stands_still_is_told(tmp_path: Path) -> None:
    with hosted(tmp_path) as run:
        eventually(lambda: run.shows("Round 0 of 9"), "the page shows the run")
        run.process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: run.shows("The coordinator is away"), "the page says so, and is there")
        finally:
            run.process.send_signal(signal.SIGCONT)
        eventually(lambda: run.shows("Round 0 of 9"), "and then it is back")


def test_a_taken_port_is_said_before_the_run_begins(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML.format(mode="open"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "farflung", "coordinate", "--plain", "--web", str(port), "run.toml"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == exit_codes.USAGE
    assert f"--web: cannot listen on 127.0.0.1 port {port}" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run.data").exists()


@pytest.mark.parametrize("address", ["here", "127.0.0.1:", "127.0.0.1:70000", "1:2:x"])
def test_where_a_page_cannot_be(address: str) -> None:
    with pytest.raises(UserError, match="--web"):
        PageKeeper(address)


def test_its_process_has_no_more_memory_than_it_may(tmp_path: Path) -> None:
    with hosted(tmp_path) as run:
        eventually(lambda: run.shows("Round 0 of 9"), "the page shows the run")
        [pid] = run.page_processes()
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(rf"^Max address space +{WEB_MEMORY_BYTES} +{WEB_MEMORY_BYTES} ", limits, re.M)
