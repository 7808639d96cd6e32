"""docs/security.md says what is so: each limit has the code's value, each claim its test; and limits that no other
test goes over."""

from __future__ import annotations

import contextlib
import importlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from farflung.checkpoints import checkpoint_manifest as checkpoint
from farflung.coordinator.door import allowance, dialer
from farflung.coordinator.door import listener as door
from farflung.coordinator.door.allowance import Allowance
from farflung.coordinator.door.dialer import Dialer, Target
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import Listener, ListenOn
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run.membership import LOST_KEPT, Membership
from farflung.coordinator.server import JOURNAL_NAME, Server
from farflung.protocol.errors import CheckpointError, UserError, Verdict
from farflung.protocol.limits import MAX_PEERS, MESSAGES_BURST_S, MESSAGES_LEAST_PER_S, MESSAGES_PER_BEAT
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.sockets import CONTROL_SERVER, ZapHandler
from farflung.protocol.round_words import Contact
from farflung.protocol.states import PeerEvent
from rig.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
LIMITS = re.findall(
    r"^\| (\w+) \| ([^|]+) \| ([\d.]+) \| `([\w/]+\.py)` `(\w+)` \| `([^`]+)` \|$", PAGE, re.M
)
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.SyncSocket]]:
    made: zmq.Context[zmq.SyncSocket] = zmq.Context()
    yield made
    made.destroy(linger=0)


# ---- the page --------------------------------------------------------------------------------------------------


def test_every_limit_of_the_page_is_the_codes() -> None:
    section = PAGE.partition("## Limits")[2].partition("\n## ")[0]
    assert len(LIMITS) == section.count("\n| ") - 1 > 30, "a row that cannot be read"
    for _, _, value, file, name, _ in LIMITS:
        module = importlib.import_module("farflung." + file.removesuffix(".py").replace("/", "."))
        assert float(getattr(module, name)) == float(value), f"{file} {name}"


def test_every_bound_of_the_table_in_the_code_is_on_the_page() -> None:
    limits = importlib.import_module("farflung.protocol.limits")
    named = {name for *_, file, name, _ in LIMITS if file == "protocol/limits.py"}
    assert {name for name in vars(limits) if name.isupper()} == named | {"PROTOCOL_VERSION"}


def test_every_test_that_the_page_names_is_there() -> None:
    assert len(TESTS) > 40
    for file, name in TESTS:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


# ---- limits that no other test goes over -----------------------------------------------------------------------


def test_messages_over_the_allowance_are_refused_until_it_has_filled_again() -> None:
    rate = MESSAGES_LEAST_PER_S * 2 + MESSAGES_PER_BEAT / 0.5
    two = Allowance(heartbeat_s=0.5, fragments=2)
    most = round(rate * MESSAGES_BURST_S)
    assert [two.takes(b"mal", 0.0) for _ in range(most + 5)] == [True] * most + [False] * 5
    assert two.takes(b"ann", 0.0), "each key has its own"
    assert [two.takes(b"mal", 0.1) for _ in range(round(rate / 10) + 1)].count(True) == round(rate / 10)


def test_keys_made_for_nothing_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "KEYS_KEPT", 10)
    many = Allowance(1.0, 1)
    for number in range(100):
        assert many.takes(b"%d" % number, 0.0)
    assert len(many._quota._left) == 10


class Room:
    """A server whose loop is turned by hand, and a member's socket that anyone may use."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal.open_or_create(folder / JOURNAL_NAME, Manifest(), lambda: bytes(16))
        self.machine = RunMachine(Manifest(), self.journal.run_id, [], lambda size: bytes(size))
        self.server = Server(self.machine, self.journal, load_or_create(folder), ListenOn("127.0.0.1", 0))

    def frame(self, payload: bytes = b"\xff") -> None:
        self.server._on_member_frame(door.Arrival(b"route", b"k" * 32, 7, payload))


def test_a_member_that_floods_is_not_parsed_and_then_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "MESSAGES_LEAST_PER_S", 1)
    monkeypatch.setattr(allowance, "MESSAGES_BURST_S", 0.5)
    monkeypatch.setattr("farflung.coordinator.server.STRIKES", 100)
    room = Room(tmp_path)
    with room.server, monkeypatch.context() as still:
        # Between two frames no time passes, on whatever machine.
        still.setattr("farflung.coordinator.server.time", SimpleNamespace(monotonic=lambda: 1000.0))
        most = round(room.server._allowance.burst)
        for _ in range(4 * most + 20):
            room.frame()
        counts = room.machine.counters.as_dict()
    assert counts[Verdict.MALFORMED] <= most + 2, "the rest is not even looked at"
    assert counts[Verdict.OVERSIZE] >= 3 * most
    assert room.server._strikes[b"k" * 32] >= counts[Verdict.MALFORMED] + 3


def test_one_turn_reads_a_bounded_number_of_messages(
    tmp_path: Path, context: zmq.Context[zmq.SyncSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "FRAMES_PER_TURN", 3)
    keys = load_or_create(tmp_path)
    zap = ZapHandler(context)
    zap.set_policy("door", lambda key: True)
    listener = Listener(context, "door", keys, "127.0.0.1", 0)
    caller = context.socket(zmq.DEALER)
    caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()
    caller.curve_serverkey = keys.public
    caller.connect(f"tcp://127.0.0.1:{listener.port}")
    for _ in range(5):
        caller.send(b"x")
    assert zap.socket.poll(PATIENCE_S * 1000)
    zap.serve_waiting()
    came: list[int] = []
    while sum(came) < 5:
        assert listener.readable[0].poll(PATIENCE_S * 1000)
        came.append(len(list(listener.arrivals())))
    assert max(came) <= 3
    listener.close(0)


def test_a_connection_that_says_nothing_is_closed(
    tmp_path: Path, context: zmq.Context[zmq.SyncSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "CONTROL_SERVER", {**CONTROL_SERVER, zmq.HANDSHAKE_IVL: 200})
    listener = Listener(context, "door", load_or_create(tmp_path), "127.0.0.1", 0)
    idle = socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S)
    with idle, contextlib.suppress(ConnectionResetError):
        while idle.recv(1024):
            pass  # its greeting, and then the end
    listener.close(0)


def test_a_crowd_is_dialled_so_many_at_a_time(
    context: zmq.Context[zmq.SyncSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialer, "AT_ONCE", 2)
    calls = Dialer(context, zmq.curve_keypair(), clock=lambda: 0.0)
    for number in range(5):
        calls.dial(Target(str(number), bytes(16), "127.0.0.1:1", bytes(32)))
    assert list(calls.verdicts()) == []
    assert len(calls._open) == 2 and len(calls._queue) == 3
    calls.close()


def test_a_run_takes_no_more_members_than_its_host_allows() -> None:
    with pytest.raises(UserError, match="max_peers"):
        Manifest.from_toml(f"[run]\nmax_peers = {MAX_PEERS + 1}\n", "run.toml")


def test_lost_members_are_forgotten() -> None:
    members = Membership(dead_after_s=5.0)
    for number in range(3 * LOST_KEPT):
        name = f"peer-{number}"
        members.lose(
            members.admit(Contact(name, name, bytes(32), ""), bytes(16), bytes(16), float(number)),
            PeerEvent.FELL_SILENT,
        )
    assert len(members.members) == LOST_KEPT and "peer-95" in members.members


def test_a_manifest_over_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MANIFEST_BYTES_MAX", 100)
    with pytest.raises(CheckpointError, match="at most 100 are read"):
        checkpoint.parse(b"{" * 101, "here")
