"""The lock beside a peer's key: who holds it is named, one that leaves is waited for, and it dies with its process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from farflung.peer import identity
from farflung.peer.identity import LEAVING_S, MOMENT_S, InUse, LockHolder, path_of, patience_s, refusal
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process.log_lines import Teller

URL = JoinUrl("h", 1, "demo", bytes(range(32)))
SAY = Teller("test")
HOLDS = """
import sys, time
from pathlib import Path
from farflung.peer.identity import InUse
from farflung.protocol.process.log_lines import Teller
held = InUse.take(Path(sys.argv[1]), int(sys.argv[2]), Teller("other"))
print("held", flush=True)
sys.stdin.readline()
held.leave()
print("leaving", flush=True)
sys.stdin.readline()
"""


def holder_of(path: Path, pid: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDS, str(path), str(pid or os.getpid())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def goes_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def test_the_second_process_is_told_the_pid_of_the_first_and_a_killed_one_leaves_nothing(
    tmp_path: Path,
) -> None:
    path = path_of(tmp_path / "identity.pem", URL)
    child = holder_of(path)
    try:
        with pytest.raises(UserError) as caught:
            InUse.take(path, 1, SAY)
        assert str(caught.value) == (
            f"another process on this machine (pid {os.getpid()}) already uses this identity in this run; stop it or "
            "pass --identity other.pem"
        )
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    held = InUse.take(path, 77, SAY)
    assert LockHolder.parse(path.read_text()) == LockHolder(77, socket.gethostname(), leaving=False)
    assert path.stat().st_mode & 0o777 == 0o600
    held.free()
    held.free()  # does no harm
    held.leave()
    InUse.take(path, 78, SAY).free()


def test_one_that_is_leaving_is_waited_for_and_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = path_of(tmp_path / "identity.pem", URL)
    child = holder_of(path)
    goes_on(child)
    assert child.stdout is not None and child.stdout.readline() == "leaving\n"
    end = threading.Timer(MOMENT_S + 0.3, goes_on, [child])
    end.start()
    InUse.take(path, 1, SAY).free()
    child.wait()
    assert capsys.readouterr().err == (
        f"farflung: waiting for this peer's former process (pid {os.getpid()}), which is leaving the run\n"
    )


@pytest.mark.parametrize(
    "holder, lives, worth_s",
    [
        (LockHolder(5, "here", leaving=False), True, MOMENT_S),
        (LockHolder(5, "here", leaving=True), True, LEAVING_S),
        (
            LockHolder(5, "here", leaving=False),
            False,
            LEAVING_S,
        ),  # its script is dead, and its agent sees that
        (LockHolder(5, "there", leaving=False), False, MOMENT_S),  # that process is none of this machine's
        (LockHolder(0, "", leaving=False), False, MOMENT_S),  # it has not written it yet
    ],
)
def test_how_long_a_holder_is_waited_for(holder: LockHolder, lives: bool, worth_s: float) -> None:
    assert patience_s(holder, "here", lambda pid: lives) == worth_s


def test_the_refusal_names_the_machine_where_it_is_another_one() -> None:
    assert refusal(LockHolder(5, "there", leaving=False), "here").startswith(
        "a process on there (pid 5) already"
    )
    assert refusal(LockHolder(0, "", leaving=False), "here").startswith(
        "another process on this machine already"
    )
    assert LockHolder.parse("") == LockHolder.parse("?") == LockHolder(0, "", leaving=False)


def test_the_lock_is_one_of_a_key_and_a_run_whatever_leads_to_the_key(tmp_path: Path) -> None:
    key, link = tmp_path / "a.pem", tmp_path / "elsewhere" / "b.pem"
    link.parent.mkdir()
    link.symlink_to(key)
    assert path_of(key, URL) == path_of(link, URL)
    assert path_of(key, URL) == path_of(key, JoinUrl("moved", 9, "demo", URL.key))
    others = {path_of(tmp_path / "b.pem", URL), path_of(key, JoinUrl("h", 1, "demo-2", URL.key))}
    assert path_of(key, URL) not in others and len(others) == 2


def test_a_folder_that_can_not_be_written_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(identity.os, "open", read_only)
    held = InUse.take(tmp_path / "x.lock", 1, SAY)
    held.leave()
    held.free()


def test_something_else_in_its_place_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"x.lock: cannot use this file"):
        InUse.take(path, 1, SAY)
    assert not (tmp_path / "elsewhere").exists()
