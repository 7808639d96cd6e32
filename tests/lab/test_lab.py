"""Real hosts: namespaces, devices, the router, and that nothing of them is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rig.lab.emulator
from farflung.protocol.errors import UserError
from rig.lab.emulator import Host, HostSpec, Lab
from rig.waiting import LONG_S, eventually, is_running

TESTS = Path(__file__).resolve().parents[1]
TRAFFIC = [sys.executable, "-S", str(TESTS / "rig" / "lab" / "traffic.py")]
SLEEP = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
TAKE = """
import hashlib, socket
server, seen = socket.create_server(("", 7004)), hashlib.sha256()
print("ready", flush=True)
stream, _ = server.accept()
while data := stream.recv(1 << 16):
    seen.update(data)
print(seen.hexdigest())
"""
GIVE = """
import hashlib, random, socket, sys
data = random.Random(1).randbytes(4 << 20)
socket.create_connection((sys.argv[1], 7004)).sendall(data)
print(hashlib.sha256(data).hexdigest())
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("lab")]


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    reason = Lab.unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def far() -> Iterator[Lab]:
    """100 ms round trip, 200 Mbit/s."""
    with Lab([HostSpec(name, 200, 200, delay_ms=25) for name in "ab"], seed=1) as lab:
        yield lab


def start(host: Host, *words: str) -> subprocess.Popen[str]:
    """A server; it is ready when this returns."""
    process: subprocess.Popen[str] = host.popen([*TRAFFIC, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def ask(host: Host, *words: str) -> list[float | None]:
    """Round trips in ms."""
    process = host.popen([*TRAFFIC, "ping", *words], stdout=subprocess.PIPE, text=True)
    told, _ = process.communicate(timeout=LONG_S)
    answers: list[float | None] = json.loads(told)["rtt_ms"]
    return answers


def is_reached(lab: Lab, port: str) -> bool:
    """Sooner or later: an answer that takes over half a second counts as lost."""
    return bool(
        eventually(lambda: any(ask(lab.hosts["a"], lab.hosts["b"].address, port, "3")), "an answer comes")
    )


def namespace_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def test_a_round_trip_takes_twice_the_sum_of_the_delays(far: Lab) -> None:
    start(far.hosts["b"], "echo", "7001")
    answers: list[float] = []

    def comes_in_time() -> bool:
        """Sooner or later: on a busy machine the router is late."""
        answers.extend(filter(None, ask(far.hosts["a"], far.hosts["b"].address, "7001", "5")))
        return min(answers, default=1000.0) < 150

    eventually(comes_in_time, "an answer that nothing held up")
    assert min(answers) >= 100


def test_one_stream_gets_the_rate_and_not_more(far: Lab) -> None:
    """A few tries, because the machine may be busy: the router and both ends must run for two seconds on end."""
    sink = start(far.hosts["b"], "sink", "7002")
    assert sink.stdout is not None
    rates_mbit: list[float] = []
    while len(rates_mbit) < 4 and not any(172 < rate < 280 for rate in rates_mbit):
        words = ["source", far.hosts["b"].address, "7002", "2.5", "1.2"]
        assert far.hosts["a"].popen([*TRAFFIC, *words]).wait(LONG_S) == 0
        told = json.loads(sink.stdout.readline())
        rates_mbit.append(told["bytes"] * 8e-6 / max(told["seconds"], 1e-3))
    # 193 is the most that headers leave; a sink that could not run for a while reads a hoard at once.
    assert any(172 < rate < 280 for rate in rates_mbit) or min(rates_mbit) < 172, rates_mbit


def test_a_cut_stops_traffic_and_healing_resumes_it(far: Lab) -> None:
    start(far.hosts["b"], "echo", "7003")
    for names in (("a",), ("b",), ("a", "b")):
        assert is_reached(far, "7003")
        far.cut(*names)
        assert ask(far.hosts["a"], far.hosts["b"].address, "7003", "1") == [None]
        far.heal(*names)
    assert is_reached(far, "7003")


@pytest.mark.parametrize("router", ["compiled, if there is a compiler", "python"])
def test_single_packets_of_large_ones_are_lost_and_the_stream_is_whole(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece with wrong numbers would spoil the bytes, or stop the stream for good."""
    if router == "python":
        monkeypatch.setattr(rig.lab.emulator, "compiled", lambda: "")
    with Lab([HostSpec("a", loss=0.01, delay_ms=1), HostSpec("b", 50, 50)], seed=3) as net:
        a, b = net.hosts.values()
        taker = b.popen([sys.executable, "-S", "-c", TAKE], stdout=subprocess.PIPE, text=True)
        assert taker.stdout is not None and taker.stdout.readline() == "ready\n"
        giver = a.popen([sys.executable, "-S", "-c", GIVE, b.address], stdout=subprocess.PIPE, text=True)
        assert giver.communicate(timeout=LONG_S)[0] == taker.communicate(timeout=LONG_S)[0] != ""
        up, _ = net.counters()["a"]
        assert up.lost > 5
        assert up.delivered > 2500


def test_rates_change_while_it_runs(far: Lab) -> None:
    before = far.hosts["a"].spec
    far.set_rate("a", up_mbit=1)
    assert (far.hosts["a"].spec.up_mbit, far.hosts["a"].spec.down_mbit) == (1, 200)
    start(far.hosts["b"], "echo", "7005")
    assert is_reached(far, "7005")
    far.set_rate("a", up_mbit=before.up_mbit)
    with pytest.raises(UserError, match="rates must be above 0"):
        far.set_rate("a", up_mbit=-1)


def test_the_end_leaves_no_process_and_frees_the_namespaces() -> None:
    with pytest.raises(KeyboardInterrupt), Lab([HostSpec("a"), HostSpec("b")]) as lab:
        router = lab._router
        script = "import subprocess,sys;subprocess.Popen(sys.argv[1:]).wait()"
        parent = lab.hosts["a"].popen(
            [sys.executable, "-c", script, *SLEEP], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        namespace = namespace_of(parent.pid)
        inside = [int(name) for name in os.listdir("/proc") if name.isdigit() and is_in(int(name), namespace)]
        assert len(inside) == 2  # the process and its child
        raise KeyboardInterrupt
    assert router is not None and router.returncode == 0
    assert parent.returncode == -signal.SIGKILL
    assert not any(is_running(pid) for pid in inside)
    assert not lab._namespace_fds
    with pytest.raises(RuntimeError, match="not up"):
        lab.hosts["a"].popen(["true"])


def is_in(pid: int, namespace: int) -> bool:
    try:
        return namespace_of(pid) == namespace
    except OSError:
        return False


def test_when_the_owner_is_killed_everything_ends() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from rig.lab.emulator import HostSpec, Lab\n"
        "lab = Lab([HostSpec('a')]).__enter__()\n"
        f"child = lab.hosts['a'].popen({SLEEP!r}, stdout=-1)\n"
        "child.stdout.readline()\n"
        "print(lab._router.pid, child.pid, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        files = [os.pidfd_open(pid) for pid in pids]
        owner.kill()
    for pid, file in zip(pids, files, strict=True):
        assert ended_within(file, LONG_S), f"process {pid} outlived the lab's owner"
        os.close(file)


def ended_within(pid_file: int, seconds: float) -> bool:
    return bool(select.select([pid_file], [], [], seconds)[0])


def test_mistakes_are_told_in_one_line() -> None:
    for spec, words in (
        (HostSpec("a", up_mbit=0), "rates must be above 0"),
        (HostSpec("a", loss=2), "loss is from 0 to 1"),
        (HostSpec("a", queue_kb=1), "2 kB or more"),
    ):
        with pytest.raises(UserError, match=words):
            Lab([spec])
    with pytest.raises(UserError, match="name of its own"):
        Lab([HostSpec("a"), HostSpec("a")])
