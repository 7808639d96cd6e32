"""What a person got wrong is one line and an exit code, said once, and torch is not loaded for it.

Real commands.  `-s` prints how long each took.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from farflung.peer.identity import InUse, path_of
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process import exit_codes
from farflung.protocol.process.log_lines import Teller
from farflung.protocol.process.sockets import curve_raw
from rig import a_door
from rig.waiting import LONG_S

# Found by every process of Python below that folder's, before anything else: also by a trainer that is started.
LEAVES_A_TRACE = """
import os, sys
class Trace:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            open(os.path.join(os.path.dirname(__file__), "loaded"), "a").write("torch\\n")
        return None
sys.meta_path.insert(0, Trace)
"""
SCRIPT = """
import sys
from farflung.peer.trainer.agent_process import AgentProcess
from farflung.protocol.process.log_lines import mistakes_in_one_line
mistakes_in_one_line()
AgentProcess.start_or_find(sys.argv[1], {})
"""


@pytest.fixture
def door() -> Iterator[JoinUrl]:
    with a_door.door(a_door.CHALLENGE) as url:
        yield url


class Volunteer:
    def __init__(self, folder: Path) -> None:
        self.home, self._traces = folder / "home", folder / "traces"
        self._traces.mkdir()
        (self._traces / "sitecustomize.py").write_text(LEAVES_A_TRACE)

    @property
    def loaded_torch(self) -> bool:
        return (self._traces / "loaded").exists()

    def runs(self, *words: str) -> tuple[int, str]:
        """The exit code, and the one line."""
        environment = os.environ | {"FARFLUNG_HOME": str(self.home), "PYTHONPATH": str(self._traces)}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=LONG_S, env=environment
        )
        print(f"{time.monotonic() - began:5.2f} s  {done.returncode:3d}  {done.stderr.strip()}")
        assert done.stderr.count("\n") == 1 and not done.stdout, done.stderr + done.stdout
        assert not self.loaded_torch, done.stderr
        return done.returncode, done.stderr

    def joins(self, *words: str) -> tuple[int, str]:
        return self.runs("-m", "farflung", "join", "--plain", *words)


@pytest.fixture
def volunteer(tmp_path: Path) -> Volunteer:
    return Volunteer(tmp_path)


def test_the_trace_is_left_where_torch_is_loaded(volunteer: Volunteer) -> None:
    with pytest.raises(AssertionError):
        volunteer.runs("-c", "import importlib.util; importlib.util.find_spec('torch')")
    assert volunteer.loaded_torch


def test_a_mistake_in_words_or_files_is_one_line(volunteer: Volunteer, door: JoinUrl) -> None:
    url = str(door)
    code, told = volunteer.joins("http://x")
    assert code == exit_codes.USAGE and "does not start with farflung://" in told
    for words in (("--script", "missing.py", url), (url, "--script", "missing.py", "--", "--lr", "3")):
        code, told = volunteer.joins(*words)
        assert code == exit_codes.USAGE and "--script missing.py: there is no such file" in told
    volunteer.home.mkdir()
    settings = volunteer.home / "config.toml"
    settings.write_text('uplod_limit = "20 Mbit/s"\n')
    code, told = volunteer.joins(url)
    assert code == exit_codes.USAGE and str(settings) in told and "upload_limit" in told
    settings.write_text("")
    (volunteer.home / "identity.pem").write_text("no key")
    (volunteer.home / "identity.pem").chmod(0o600)
    code, told = volunteer.joins(url)
    assert code == exit_codes.USAGE and "not a private key in PEM form" in told


def test_a_dead_port_and_a_wrong_key_are_one_line(volunteer: Volunteer, door: JoinUrl) -> None:
    dead = str(JoinUrl("127.0.0.1", 1, "demo", door.key))
    wrong = str(JoinUrl(door.host, door.port, "demo", curve_raw(zmq.curve_keypair()[0])))
    for url, says in ((dead, "connection refused"), (wrong, "does not accept the key of this join URL")):
        for words in (["join", "--plain"], ["assist", "--plain"]):
            code, told = volunteer.runs("-m", "farflung", *words, url)
            assert code == exit_codes.UNREACHABLE and says in told
    script = volunteer.home.parent / "script.py"
    script.write_text(SCRIPT)
    code, told = volunteer.runs(str(script), dead)
    assert code == exit_codes.UNREACHABLE and "connection refused" in told


def test_an_identity_that_another_process_uses_is_one_line_with_its_pid(
    volunteer: Volunteer, door: JoinUrl
) -> None:
    held = InUse.take(path_of(volunteer.home / "identity.pem", door), os.getpid(), Teller("test"))
    agent = ["--url", str(door), "--folder", str(volunteer.home), "--parent", "1", "--settings", "{}"]
    script = volunteer.home / "script.py"
    script.write_text(SCRIPT)
    for words in (
        ["-m", "farflung", "join", "--plain", str(door)],
        [str(script), str(door)],
        ["-m", "farflung.peer.agent.main", *agent],
    ):
        code, told = volunteer.runs(*words)
        assert code == exit_codes.USAGE
        assert f"another process on this machine (pid {os.getpid()}) already uses this identity" in told
    held.free()
