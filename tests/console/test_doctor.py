"""The doctor: what it thinks of a machine, and what a stranger may measure at the door."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farflung.console.doctor import facts as facts_module
from farflung.console.doctor.advice import (
    FAIL,
    OK,
    WARN,
    CheckpointPlace,
    LineToCoordinator,
    MachineFacts,
    RelayFacts,
    SeenPort,
    examine,
    nat_kind,
    round_bytes,
)
from farflung.console.doctor.facts import ask_each, by_who_answers, look, why_not_writable
from farflung.console.inspect_commands import run_doctor
from farflung.console.screen.gpu import gpus_in
from farflung.coordinator.door import dialer
from farflung.coordinator.door.dialer import Caller, Prober, Target
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.server import JOURNAL_NAME, Server
from farflung.peer.settings import OwnConfig
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.manifest import Manifest, OuterSection, RoundSection, RunSection
from farflung.protocol.messages import Message, Probe, Probed, Refuse
from farflung.protocol.process import exit_codes
from rig.in_thread import InThread
from rig.relay_rig import RelayRig
from rig.waiting import PATIENCE_S

GIB = 1 << 30
GPU = "NVIDIA H100, 87, 34000, 81559, 580.1, 61"
FINE = MachineFacts(
    farflung="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    cuda="",
    gpus=gpus_in(GPU.replace("87, 34000", "3, 400")),
    cores=8,
    memory_bytes=64 * GIB,
    shared_bytes=32 * GIB,
    home="/home/a",
    disk_bytes=100 * GIB,
    manifest=Manifest(run=RunSection(max_peers=4), round=RoundSection(codec="int8", gather_codec="int8")),
    run_software="0.1.0",
    alive=3,
    model_bytes=600 * 10**6,
    line=LineToCoordinator(0.040, 12.5e6, 50e6, "203.0.113.9", 0.2, False),
    local_address="203.0.113.9",
    dialled=("203.0.113.9:4000", "yes"),
)

assert FINE.line is not None
ALONE = {"line": None, "dialled": None}


def verdicts(**changed: Any) -> dict[str, tuple[str, str, str]]:
    found = examine(dataclasses.replace(FINE, **changed))
    return {finding.name: (finding.verdict, finding.text, finding.todo) for finding in found}


def test_a_good_machine_gets_ok_on_every_line() -> None:
    assert {verdict for verdict, _, _ in verdicts().values()} == {OK}
    assert "about 36 s with 4 peers" not in verdicts()["a round here"][1]  # 2 x 113 MB at 12.5 MB/s
    assert "about 18 s with 4 peers" in verdicts()["a round here"][1]


def test_a_second_moment_needs_memory_too() -> None:
    assert "3.0GB needed" in verdicts()["shared memory"][1]
    adamw = Manifest(outer=OuterSection(step="adamw"))
    assert "3.6GB needed" in verdicts(manifest=adamw)["shared memory"][1]
    assert (
        "1.8GB shared" in verdicts()["memory"][1] and "2.4GB shared" in verdicts(manifest=adamw)["memory"][1]
    )


@pytest.mark.parametrize(
    ("name", "verdict", "says", "changed"),
    [
        ("versions", FAIL, "torch not installed", {"torch": ""}),
        ("versions", FAIL, "2.13.0; there is no mesh here", {"lacking": "there is no mesh here: install it"}),
        ("versions", WARN, "the coordinator has farflung 0.2.0", {"run_software": "0.2.0"}),
        ("GPU", WARN, "on the CPU, slowly", {"gpus": []}),
        ("GPU", FAIL, "torch cannot use it: built without CUDA", {"cuda": "built without CUDA"}),
        ("GPU", WARN, "60.0GB of 85.5GB used", {"gpus": gpus_in(GPU.replace("34000", "57220"))}),
        ("CPU", WARN, "1 core", {"cores": 1}),
        ("memory", FAIL, "3.8GB of host memory (1.8GB shared,", {"memory_bytes": 2 * GIB}),
        ("memory", WARN, "3.8GB of host memory", {"memory_bytes": 45 * 10**8}),
        ("memory", FAIL, "about 6.2GB of memory needed (", {"memory_bytes": 2 * GIB, "gpus": []}),
        ("memory", FAIL, "GPU memory", {"model_bytes": 24 * 10**9}),
        ("shared memory", WARN, "3.0GB needed", {"shared_bytes": GIB}),
        ("shared memory", WARN, "can't be written: read-only", {"shared_problem": "read-only file system"}),
        ("disk", FAIL, "/home/a can't be written: no space", {"disk_problem": "no space left on device"}),
        ("disk", FAIL, "8.0kB free at /home/a", {"disk_bytes": 8000}),
        ("disk", WARN, "free at /home/a", {"disk_bytes": GIB // 2}),
        ("disk", WARN, "1.7GB needed for what the state was before", {"disk_bytes": 11 * 10**8}),
        ("coordinator", FAIL, "no answer", {"unreachable": "no answer"} | ALONE),
        ("coordinator", FAIL, "protocol version is 2", {"refused": "protocol version is 2"} | ALONE),
        ("clock", WARN, "2 min ahead of", {"line": dataclasses.replace(FINE.line, clock_ahead_s=130.0)}),
        ("coordinator", WARN, "900 ms", {"line": dataclasses.replace(FINE.line, rtt_s=0.9)}),
        ("reachable", WARN, "nobody can dial 10.0.0.2:4000 (behind a NAT)",
         {"dialled": ("10.0.0.2:4000", "no"), "local_address": "10.0.0.2"}),
        ("reachable", OK, "not asked for", {"wants_dialling": False, "dialled": None}),
        ("relay", WARN, "run has none: off", {"relay": RelayFacts(why_not="off"), "dialled": ("10.0.0.2:4000", "no")}),
        ("relay", OK, "this run has none: off", {"relay": RelayFacts(why_not="off")}),
        ("relay", WARN, "port 7 of the coordinator does not answer: timed out",
         {"relay": RelayFacts(7, 6e6, silent="timed out"), "dialled": None, "wants_dialling": False}),
        ("relay", OK, "1 of a peer, 20.0Mbit/s; none of the host's: off",
         {"relay": RelayFacts(why_not="off", offered=(2.5e6,)), "dialled": ("10.0.0.2:4000", "no")}),
        ("relay", OK, "48.0Mbit/s for all who use it, and 2 of peers, 40.0Mbit/s;",
         {"relay": RelayFacts(7, 6e6, offered=(2.5e6, 2.5e6)), "dialled": None, "wants_dialling": False}),
        ("relay", OK, "answers on port 7, 48.0Mbit/s for all who use it; it is what",
         {"relay": RelayFacts(7, 6e6), "dialled": None, "wants_dialling": False}),
        ("a round here", FAIL, "the run gives 120 s", {"line": dataclasses.replace(FINE.line, up_bytes_per_s=1e6)}),
        ("a round here", FAIL, "the run gives 120 s", {"limits": (1e6, None)}),
        ("a round here", WARN, "others wait 10 s", {"line": dataclasses.replace(FINE.line, up_bytes_per_s=6e6)}),
        ("a round here", OK, "unknown until the first peer has joined", {"model_bytes": None}),
        ("the run", FAIL, "4 of at most 4", {"alive": 4}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_to_do(
    name: str, verdict: str, says: str, changed: dict[str, Any]
) -> None:
    found = verdicts(**changed)[name]
    assert found[0] == verdict and says in found[1], found
    assert verdict != FAIL or found[2], "who fails is told what to do"


def test_what_can_be_said_of_a_nat() -> None:
    assert nat_kind("192.0.2.1", "192.0.2.1") == "no NAT on the way"
    assert nat_kind("192.168.1.5", "203.0.113.1") == "behind a NAT"
    assert nat_kind("100.64.3.4", "203.0.113.1") == "behind the NAT of a provider"
    assert nat_kind("", "") == "not known"


def test_bytes_of_a_round() -> None:
    assert round_bytes(4e6, "fp32", "fp32", 2) == 4e6  # half of each way's 8 MB
    assert round_bytes(4e6, "fp32", "fp32", 1) == 0


def test_what_nvidia_smi_says() -> None:
    (gpu,) = gpus_in(GPU + "\n")
    assert (gpu.name, gpu.used, gpu.celsius, gpu.memory_bytes) == ("NVIDIA H100", 0.87, 61.0, 81559 << 20)
    (odd,) = gpus_in("Some GPU, [N/A], 1, 2, 3, [N/A]")
    assert odd.used is None and gpus_in("nonsense") == []


# ---- at the door ----------------------------------------------------------------------------------------------------


class Dials:
    def __init__(self) -> None:
        self.asked: list[Target] = []

    def dial(self, target: Target) -> None:
        self.asked.append(target)


@pytest.fixture
def hall() -> tuple[Prober, Dials, list[Message]]:
    dials, said = Dials(), []
    return Prober(dials, lambda caller, message: said.append(message)), dials, said  # type: ignore[arg-type]


def probe(address: str = "", want: int = 0) -> Probe:
    return Probe(padding=b"", want=want, address=address, key=bytes(32))


def test_only_the_caller_itself_is_dialled(hall: tuple[Prober, Dials, list[Message]]) -> None:
    door, dials, said = hall
    door.on_probe(
        Caller(b"a", "203.0.113.9"), Probe(padding=b"", want=0, address="203.0.113.9:22", key=b"short"), 0.0
    )
    for address in ("192.0.2.7:22", "localhost:22", "203.0.113.9:0", "nonsense", "[::1]:22"):
        door.on_probe(Caller(b"a", "::ffff:203.0.113.9"), probe(address), 0.0)
    assert not dials.asked and all("not tried" in message.dialled for message in said)  # type: ignore[union-attr]
    door.on_probe(Caller(b"a", "::ffff:203.0.113.9"), probe("203.0.113.9:4000"), 0.0)
    assert [target.address for target in dials.asked] == ["203.0.113.9:4000"]
    assert door.on_verdict(dials.asked[0], True)
    assert isinstance(said[-1], Probed) and said[-1].dialled == "yes"
    assert not door.on_verdict(Target("peer", b"s", "x:1", bytes(32)), True), (
        "a member's verdict goes on to the run"
    )


def test_strangers_move_no_more_than_their_share(hall: tuple[Prober, Dials, list[Message]]) -> None:
    door, _, said = hall
    size = 190_000
    for _ in range(2 * dialer.BURST_BYTES // size):
        door.on_probe(Caller(b"a", ""), probe(want=size), 0.0)
    given = sum(len(message.padding) for message in said if isinstance(message, Probed))
    assert given <= dialer.BURST_BYTES and isinstance(said[-1], Refuse)
    door.on_probe(Caller(b"a", ""), probe(want=size), 1.0)
    assert isinstance(said[-1], Probed), "a second later there is some more"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[JoinUrl]:
    keys, manifest = load_or_create(tmp_path), Manifest()
    stop, ready = threading.Event(), threading.Event()
    found: list[JoinUrl] = []

    def serve() -> None:
        with Journal.open_or_create(tmp_path / JOURNAL_NAME, manifest, lambda: bytes(16)) as journal:
            machine = RunMachine(manifest, journal.run_id, [], lambda size: bytes(size))
            with Server(machine, journal, keys, ListenOn("127.0.0.1", 0), spawn=InThread) as server:
                found.append(JoinUrl("127.0.0.1", server.port, manifest.run.name, keys.public_raw))
                ready.set()
                server.run_until(stop.is_set)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    yield found[0]
    stop.set()
    thread.join(PATIENCE_S)


def test_every_address_of_the_url_is_asked_and_one_that_answers_is_looked_at_first(url: JoinUrl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it lets people in, and says nothing
        several = JoinUrl.at((Address(*mute.getsockname()), *url.addresses), url.run, url.key)
        places = ask_each(several, 2.0)
        assert [bool(each.problem) for each in places] == [True, False]
        assert by_who_answers(several, places).addresses == tuple(reversed(several.addresses))
    other_run = dataclasses.replace(url, run="another")
    assert "runs" in ask_each(other_run, PATIENCE_S)[0].problem
    assert not ask_each(url, PATIENCE_S)[0].problem


def test_addresses_that_do_not_answer_are_named() -> None:
    good, dead = (
        CheckpointPlace("a.example:29800", ""),
        CheckpointPlace("[2001:db8::1]:29800", "nobody answers there"),
    )
    assert "addresses" not in verdicts(places=(good,))
    assert verdicts(places=(good, good))["addresses"][0] == OK
    verdict, text, todo = verdicts(places=(good, dead))["addresses"]
    assert verdict == WARN and "1 of 2 answer; [2001:db8::1]:29800: nobody answers there" in text and todo
    assert verdicts(places=(dead, dead), **ALONE)["addresses"][0] == FAIL


@pytest.mark.slow
def test_a_real_coordinator_is_asked_and_dials_back(
    url: JoinUrl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for patience in (
        "coordinator.door.dialer.DIAL_S",
        "console.doctor.facts.DIAL_S",
        "console.doctor.facts.PATIENCE_S",
    ):
        monkeypatch.setattr(f"farflung.{patience}", PATIENCE_S)
    assert run_doctor(url, OwnConfig(), as_json=True) == exit_codes.OK
    told = json.loads(capsys.readouterr().out)
    said = {each["name"]: each for each in told["findings"]}
    assert told["ok"] and "the coordinator dialled 127.0.0.1:" in said["reachable"]["text"]
    assert "bit/s up" in said["line"]["text"]


def test_nobody_there_is_a_failure_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.console.doctor.facts.PATIENCE_S", 0.2)
    assert (
        run_doctor(JoinUrl("127.0.0.1", 9, "my-run", bytes(32)), OwnConfig(), as_json=False)
        == exit_codes.BLOCKED
    )
    out = capsys.readouterr().out
    assert "FAIL coordinator" in out and "this machine cannot take part yet: coordinator" in out


HERE, THERE = "203.0.113.9:40001", "203.0.113.9:51007"


@pytest.mark.parametrize(
    ("seen", "verdict", "words"),
    [
        (SeenPort(40001, HERE, HERE), OK, "one port for all connections"),
        (SeenPort(40001, HERE, THERE), WARN, "another port for each connection"),
        (SeenPort(40001, HERE, ""), OK, "the same as here, so probably"),
        (SeenPort(40002, HERE, ""), OK, "it is not known whether"),
        (SeenPort(40001, "203.0.113.9:443", "203.0.113.9:443"), WARN, "below 1024"),
        (SeenPort(40001, "", ""), WARN, "did not say"),
    ],
)
def test_the_doctor_says_whether_others_can_meet_this_machine(
    seen: SeenPort, verdict: str, words: str
) -> None:
    found = verdicts(seen=seen, dialled=("192.168.1.2:4000", "no"))["router"]
    assert found[0] == verdict and words in found[1]


def test_a_hard_router_is_no_warning_to_whoever_can_be_dialled() -> None:
    assert verdicts(seen=SeenPort(40001, HERE, THERE))["router"][0] == OK
    assert "router" not in verdicts()


def test_both_sockets_of_a_real_coordinator_see_the_port(url: JoinUrl) -> None:
    with RelayRig() as rig:
        seen = look(url, rig.port)
        assert seen == SeenPort(
            seen.local_port, f"127.0.0.1:{seen.local_port}", f"127.0.0.1:{seen.local_port}"
        )
        assert look(url, 0).by_relay == ""
        port = rig.port
    assert look(url, port).by_relay == "", "there is none any more"


def test_where_files_live_a_file_is_written_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_writable(tmp_path) == "" and not list(tmp_path.iterdir())
    assert why_not_writable(tmp_path / "missing") == "no such file or directory"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(facts_module.os, "fsync", full)
    assert why_not_writable(tmp_path) == "no space left on device" and not list(tmp_path.iterdir())
