"""The life of a child process: one that dies, hangs, can't listen, says too much, or loses its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from farflung.protocol.errors import UserError
from farflung.protocol.process import child
from farflung.protocol.process.child import (
    HANGS_AFTER_S,
    WORDS_PER_TURN,
    CannotListen,
    Channel,
    Handle,
    Listening,
    Spawn,
    pair,
    started,
)
from rig.in_thread import InThread
from rig.trial_child import Echo, TrialChild, TrialSettings
from rig.waiting import PATIENCE_S, eventually, is_running

TESTS = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _children_find_the_rig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


class Mute:
    """A child that never says a word; `code`: it has died of that."""

    def __init__(self, end: socket.socket, code: int | None = None) -> None:
        self.end, self.code = end.dup(), code

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        return self.code or 0

    def kill(self) -> None:
        self.end.close()


def mute(module: str, end: socket.socket, memory_bytes: int) -> Handle:
    return Mute(end)


def kept(news: list[str], does: str = "", spawn: Spawn = started) -> TrialChild:
    return TrialChild(TrialSettings(port=0, does=does), news.append, spawn)


# ---- the channel ---------------------------------------------------------------------------------------------


def test_a_channel_bounds_and_types_its_words() -> None:
    ours, theirs = pair()
    channel, other = Channel(ours, TrialChild.heard), Channel(theirs, TrialChild.heard)
    assert channel.send(Listening(port=7)) and list(other.receive()) == [Listening(port=7)]
    sent = 0
    while channel.send(Echo(text="said")):
        sent += 1
    assert sent > 10 and not channel.closed, "a full channel never blocks"
    theirs.close()
    assert not channel.send(Echo()) and channel.closed
    ours.close()


@pytest.mark.parametrize("raw", [b"\xff no word", b"\x81\xa4word\xa5begin", b"", bytes(1 << 19)])
def test_P8_what_is_no_word_of_the_other_sides_ends_the_channel(raw: bytes) -> None:
    ours, theirs = pair()
    theirs.send(raw)
    channel = Channel(ours, TrialChild.heard)
    assert list(channel.receive()) == [] and channel.closed
    theirs.close()
    ours.close()


def test_P8_a_child_says_no_word_of_its_parents() -> None:
    ours, theirs = pair()
    Channel(theirs, TrialChild.heard).send(TrialSettings(port=1))
    channel = Channel(ours, TrialChild.heard)
    assert list(channel.receive()) == [] and channel.closed
    theirs.close()
    ours.close()


# ---- on a clock that is moved by hand ------------------------------------------------------------------------


def test_one_that_hangs_is_started_again_and_each_time_it_gets_longer() -> None:
    """Where the machine starves, each start of another one starves it more."""
    news: list[str] = []
    kid = kept(news, spawn=mute)
    kid.start(0.0)
    assert list(kid.receive(119.0)) == [] and kid.starts == 1, "Python alone may take a minute to start"
    assert list(kid.receive(120.0)) == [] and "trial: did not start in 120 s" in news[0]
    assert list(kid.receive(120.1)) == [] and kid.starts == 1, "not at once"
    now = 121.0
    for patience_s in (20.0, 40.0, 80.0, 160.0, 160.0):
        list(kid.receive(now))
        assert isinstance(kid._handle, Mute)
        kid._handle.end.setblocking(False)
        Channel(kid._handle.end, TrialChild.heard).send(Listening(port=7))
        list(kid.receive(now))
        count = kid.starts
        list(kid.receive(now + patience_s - 0.1))
        assert kid.starts == count and kid.port == 7
        now += patience_s
        list(kid.receive(now))
        assert kid.port is None and f"said nothing for {patience_s:g} s" in news[-1]
        now += 40.0
    kid.close()


def test_one_that_lived_well_is_started_again_at_once_and_is_waited_for_no_longer_than_before() -> None:
    news: list[str] = []
    kid = kept(news, spawn=mute)
    kid.start(0.0)
    for _ in range(4):
        kid._handle.code = -9  # type: ignore[union-attr]
        now = kid._started_at + 1.0
        assert kid.watch(now) and not kid.watch(kid._again_at)
    assert "killed by SIGKILL; it is started again in 3.2 s" in news[-1]
    kid._handle.code = -40  # type: ignore[union-attr]
    assert kid.watch(kid._started_at + 61.0)
    assert "killed by signal 40; it is started again in 0.2 s" in news[-1]
    kid.close()


def test_one_that_dies_while_it_starts_is_started_again() -> None:
    news: list[str] = []

    def spawn(module: str, end: socket.socket, memory_bytes: int) -> Handle:
        return Mute(end, -9) if kid.starts < 2 else InThread(module, end, memory_bytes)

    kid = kept(news, spawn=spawn)
    kid.open()
    try:
        assert kid.port == 7 and kid.starts == 3
        assert sum("killed by SIGKILL" in each for each in news) == 2
    finally:
        kid.close()


def test_one_that_never_starts_ends_its_parent_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "BACKOFF_MAX_S", 0.01)
    kid = kept([], spawn=lambda module, end, memory_bytes: Mute(end, 1))
    with pytest.raises(UserError, match="the trial did not start, 8 times; its last words are above"):
        kid.open()


def test_a_parent_that_waits_for_it_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STARTS_WITHIN_S", 0.01)
    news: list[str] = []
    with pytest.raises(UserError, match="asked to stop before the trial was open"):
        kept(news, spawn=mute).open(lambda: bool(news))
    assert news == ["trial: not open yet: it starts slowly; is this machine very busy?"]


# ---- real ones -----------------------------------------------------------------------------------------------


def test_one_that_is_killed_is_there_again_at_the_same_port() -> None:
    news: list[str] = []
    kid = kept(news)
    kid.open()
    try:
        first, generation = kid.pid, kid.generation
        assert first is not None and kid.port == 7
        assert kid.send(Echo(text="hear"))
        eventually(lambda: Echo(text="hear") in list(kid.receive(time.monotonic())), "it answers")
        os.kill(first, signal.SIGKILL)

        def is_back() -> bool:
            list(kid.receive(time.monotonic()))
            return kid.port is not None and kid.pid not in (None, first)

        eventually(is_back, "another one is there")
        assert kid.begin.port == 7 and kid.generation > generation and kid.starts == 2
        told = "trial: killed by SIGKILL; it is started again in 0.4 s"
        assert news == [told, "trial: open again on port 7"]
    finally:
        kid.close()
    assert kid.pid is None and kid.port is None and kid.channel is None


def test_one_that_cannot_listen_says_why() -> None:
    kid = kept([], "cannot listen")
    with pytest.raises(UserError, match="port 1 is taken"):
        kid.open()
    assert kid.pid is None


def test_one_that_dies_is_told_with_its_exit_code() -> None:
    news: list[str] = []
    kid = kept(news, "dies")
    kid.start(time.monotonic())
    eventually(lambda: kid.watch(time.monotonic()), "it is seen")
    assert news == ["trial: ended with exit code 3; it is started again in 0.4 s"] and kid.pid is None


def test_one_that_says_nothing_is_ended() -> None:
    news: list[str] = []
    kid = kept(news, "says nothing")
    now = time.monotonic()
    kid.start(now)
    pid = kid.pid
    assert pid is not None and is_running(pid)
    assert kid.watch(now + 120.0) and not is_running(pid)


def test_P8_one_that_floods_its_parent_is_heard_a_bounded_number_at_a_time() -> None:
    kid = kept([], "says too much")
    kid.open()
    try:
        for _ in range(20):
            assert len(list(kid.hear(time.monotonic()))) <= WORDS_PER_TURN
            assert len(list(kid.hear(time.monotonic(), 4))) <= 4
        pid = kid.pid
    finally:
        kid.close()
    assert pid is not None and not is_running(pid)


def test_P8_one_that_says_what_is_too_long_is_not_heard_any_more() -> None:
    news: list[str] = []
    kid = kept(news, "says what is too long")
    kid.open()
    try:
        pid = kid.pid

        def is_over() -> bool:
            list(kid.hear(time.monotonic()))
            return kid.watch(time.monotonic())

        eventually(is_over, "it is ended")
        assert pid is not None and not is_running(pid)
        assert news == ["trial: hung up; it is started again in 0.4 s"]
    finally:
        kid.close()


def test_P8_a_port_that_is_said_twice_is_the_first() -> None:
    news: list[str] = []
    kid = kept(news, spawn=mute)
    kid.start(0.0)
    assert isinstance(kid._handle, Mute)
    channel = Channel(kid._handle.end, TrialChild.heard)
    for word in (Listening(port=7), Listening(port=8)):
        channel.send(word)
    list(kid.hear(1.0))
    assert kid.port == kid.begin.port == 7 and not news
    assert not kid.watch(1.0 + HANGS_AFTER_S - 0.1) and kid.watch(1.0 + HANGS_AFTER_S)


def test_P8_one_that_cannot_listen_or_says_what_is_no_word_is_not_heard_after_that() -> None:
    for last, heard in (
        (msgspec.msgpack.encode(CannotListen(reason="no")), [CannotListen(reason="no")]),
        (b"\xff", []),
    ):
        kid = kept([], spawn=mute)
        kid.start(0.0)
        assert isinstance(kid._handle, Mute)
        for raw in (last, *[msgspec.msgpack.encode(CannotListen(reason="again"))] * 3):
            kid._handle.end.send(raw)
        generation = kid.generation
        assert list(kid.receive(1.0)) == heard
        assert kid.generation == generation + 1, "nobody waits for more"
        assert list(kid.receive(1.1)) == []
        assert kid.watch(2.0)


def test_it_ends_with_a_parent_that_is_killed() -> None:
    words = (
        "import time; from rig.trial_child import *; kid = TrialChild(TrialSettings(port=0), print); kid.open();"
        " print(kid.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert is_running(pid)
        finally:
            parent.kill()
            parent.wait(PATIENCE_S)
    eventually(lambda: not is_running(pid), "nobody is left")


def test_it_is_capped_and_leaves_ctrl_c_to_its_parent() -> None:
    kid = kept([])
    kid.open()
    try:
        limits = Path(f"/proc/{kid.pid}/limits").read_text()
        assert f"Max address space         {1 << 30}" in limits
        assert kid.pid is not None
        os.kill(kid.pid, signal.SIGINT)
        kid.send(Echo(text="still there"))
        eventually(lambda: list(kid.receive(time.monotonic())), "it answers")
        assert kid.starts == 1
    finally:
        kid.close()
