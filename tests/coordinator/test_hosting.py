"""Starting and stopping a coordinator: the process, its key, its ports, and when it may go home."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from farflung.console.main import _offered_relay
from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.door.front_door_process import FROM_DOOR
from farflung.coordinator.door.gateways import FROM_GATEWAY
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.hosting import QuietEnd, _places, _whereabouts
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.records import CommittedRound, Started
from farflung.coordinator.modes import registry
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run_files import read_manifest
from farflung.coordinator.run_lead import StoreOptions, held
from farflung.coordinator.server import JOURNAL_NAME, Server
from farflung.peer.settings import OwnConfig
from farflung.protocol.errors import UserError, Verdict
from farflung.protocol.join_url import Address, JoinUrl, whereabouts_of
from farflung.protocol.manifest import Manifest, RunSection
from farflung.protocol.process.child import CannotListen, Channel, packed, pair
from farflung.protocol.process.sockets import curve_text
from farflung.protocol.round_words import Commit
from farflung.protocol.signing import curve_key_of, proves, statement_of
from rig.in_thread import InThread
from rig.waiting import PATIENCE_S

ROUNDS = 5
MANIFEST = Manifest(run=RunSection(rounds=ROUNDS))

SERVE = """
import sys
from pathlib import Path
from farflung.coordinator.hosting import Hosting, serve
folder = Path(sys.argv[1])
asked = Hosting(folder / "run.toml", folder / "data", "127.0.0.1:0", (), bool(sys.argv[2:]))
serve(asked, lambda url: print(url, flush=True))
"""


@contextlib.contextmanager
def coordinator(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], JoinUrl]]:
    """A coordinator process; killed at the end if it still runs."""
    (folder / "run.toml").write_text(f"run.rounds = {ROUNDS}")
    command = [sys.executable, "-c", SERVE, str(folder), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, JoinUrl.parse(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def fetch(url: JoinUrl) -> dict[str, Any]:
    with StatusClient(url) as client:
        return client.fetch(PATIENCE_S)


def begun(data: Path, version: int) -> bytes:
    """Makes a journal that has come so far; returns its run id."""
    data.mkdir()
    hashes = b"h" * 32
    commit = Commit(version=version, round_no=4, members=("p",), weights=(1.0,), hashes=hashes, codec="fp32")
    record = CommittedRound(
        commit=commit, used={}, excluded={}, tokens=7, steps=1, loss=1.0, seconds=1.0, tx_bytes=1
    )
    with Journal.open_or_create(data / JOURNAL_NAME, MANIFEST, lambda: os.urandom(16)) as journal:
        journal.append([Started(incarnation=1), record])
        return journal.run_id


@pytest.mark.slow
def test_kill_9_and_restart_is_the_same_run_further_on(tmp_path: Path) -> None:
    run_id = begun(tmp_path / "data", 3)
    keys = []
    for _ in range(2):
        with coordinator(tmp_path) as (process, url):
            status = fetch(url)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert (status["version"], status["tokens"], status["run_id"]) == (3, 7, run_id.hex())
        keys.append(url.key)
    assert keys[0] == keys[1], "a restart must not make the join URL useless"
    with Journal.open_or_create(tmp_path / "data" / JOURNAL_NAME, MANIFEST, bytes) as journal:
        starts = [each.incarnation for each in journal.records() if isinstance(each, Started)]
    assert starts == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with coordinator(tmp_path) as (process, url):
        fetch(url)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
    Journal.open_or_create(tmp_path / "data" / JOURNAL_NAME, MANIFEST, bytes).close()


@pytest.mark.slow
def test_a_finished_runs_coordinator_goes_home_if_asked_to(tmp_path: Path) -> None:
    begun(tmp_path / "data", ROUNDS)
    with coordinator(tmp_path, "exit when done") as (process, _):
        assert process.wait(PATIENCE_S) == 0


def test_a_store_is_refused_in_one_line_where_the_standby_was_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "found", lambda name: None)
    asked = StoreOptions(
        tmp_path, MANIFEST, ListenOn.parse("127.0.0.1:0"), "etcd://h/run", False, lambda port: ()
    )
    with pytest.raises(UserError, match=r"--store: this installation has no standby; go on without --store"):
        held(asked, lambda: False)
    assert not list(tmp_path.iterdir())


def test_a_relay_to_offer_is_refused_in_one_line_where_reach_was_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "found", lambda name: None)
    assert _offered_relay(OwnConfig(), print) is None
    with pytest.raises(UserError, match="--relay: this installation has no reach; go on without --relay"):
        _offered_relay(OwnConfig(relay="9 Mbit/s"), print)


@pytest.mark.parametrize("store", [None, "etcd://h/run"])
def test_a_run_is_asked_of_nobody_and_restored_is_refused_in_one_line_where_that_was_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str | None
) -> None:
    data = tmp_path / "data"
    begun(data, ROUNDS)
    before = {path: path.read_bytes() for path in data.iterdir()}
    monkeypatch.setattr(registry, "found", lambda name: None)
    listen = ListenOn.parse("127.0.0.1:0")
    asked = StoreOptions(data, MANIFEST, listen, store, True, lambda port: ())
    why = (
        r"--restored: this installation cannot ask peers for a run; install farflung whole, or go on without"
    )
    with pytest.raises(UserError, match=why), held(asked, lambda: False):
        pytest.fail("it leads")
    assert {path: path.read_bytes() for path in data.iterdir()} == before


def test_a_journal_that_cannot_be_written_stops_the_server_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with Journal.open_or_create(tmp_path / "j", MANIFEST, lambda: bytes(16)) as journal:
        machine = RunMachine(MANIFEST, journal.run_id, [], os.urandom)
        monkeypatch.setattr(journal, "append", full)
        with (
            pytest.raises(
                UserError, match="cannot be written: database or disk is full; what was committed is"
            ),
            Server(machine, journal, load_or_create(tmp_path), ListenOn("127.0.0.1", 0), spawn=InThread),
        ):
            pass


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    journal = Journal.open_or_create(tmp_path / "j", MANIFEST, lambda: bytes(16))
    machine = RunMachine(MANIFEST, journal.run_id, [], os.urandom)
    with socket.create_server(("127.0.0.1", 0)) as taken, journal:
        port = taken.getsockname()[1]
        server = Server(
            machine, journal, load_or_create(tmp_path), ListenOn("127.0.0.1", port), spawn=InThread
        )
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1 port {port}: Address"), server:
            pass
        assert journal.records() == [], "it never started"


# ---- the small parts --------------------------------------------------------------------------------------


def read_with(path: Path, *changes: str) -> Manifest:
    return read_manifest(path, changes)


def test_a_key_set_on_the_command_line_is_as_if_the_file_said_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[round]\nsync_every = 7\ncodec = "int8"\n[inner]\nbetas = [0.8, 0.9]\n')
    changed = read_with(
        path, "round.sync_every=50", "run.name=other-run", "inner.betas=[0.9, 0.99]", "outer.lr = 0.5",
        'data.source="python-stdlib"',
    )  # fmt: skip
    assert (changed.round.sync_every, changed.round.codec) == (50, "int8")
    assert changed.run.name == "other-run" and changed.inner.betas == (0.9, 0.99) and changed.outer.lr == 0.5
    text = (
        '[run]\nname = "other-run"\n[round]\nsync_every = 50\ncodec = "int8"\n'
        "[inner]\nbetas = [0.9, 0.99]\n[outer]\nlr = 0.5\n"
    )
    assert changed.digest == Manifest.from_toml(text, "x").digest != read_with(path).digest
    assert read_with(path, "round.sync_every=50", "round.sync_every=60").round.sync_every == 60, (
        "the last one"
    )


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("round.sync_every=0", "[round] sync_every: expected"),
        ("round.sync_evry=50", '[round] sync_evry: unknown key; did you mean "sync_every"?'),
        ("inner.sync_every=50", "[inner] sync_every: unknown key; it belongs in [round]"),
        ("rounds.sync_every=50", "[rounds]: unknown section"),
        ("round.codec=zip", "[round] codec: expected"),
        ("round.sync_every=[1", "[round] sync_every: expected"),
        ("inner.lr=nan", "[inner] lr: expected"),
    ],
)
def test_a_mistake_there_reads_like_one_in_the_file(tmp_path: Path, change: str, rule: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(UserError) as told:
        read_with(path, change)
    assert str(told.value).startswith(f"{path} with --set {change}: {rule}")


@pytest.mark.parametrize(
    "change",
    ["sync_every=50", "round.sync_every", "round.=5", ".x=5", "a.b.c=5", "r d.x=1", "round.x=1\ny=2"],
)
def test_what_is_no_change_is_told(tmp_path: Path, change: str) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(UserError, match="--set"):
        read_with(tmp_path / "run.toml", change)


def test_a_key_set_over_what_is_no_table_is_the_files_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("round = 5")
    with pytest.raises(UserError, match=r"\[round\]: expected a table"):
        read_with(tmp_path / "run.toml", "round.sync_every=50")


def test_the_command_line_hands_changes_on(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    words = [
        "coordinate",
        "--plain",
        "--set",
        "round.sync_every=50",
        "--set",
        "round.fragments=0",
        "run.toml",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "farflung", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "[round] fragments: expected" in done.stderr
    assert "--set round.sync_every=50" in done.stderr and "Traceback" not in done.stderr


def test_a_finished_run_waits_for_its_members_but_not_for_ever() -> None:
    end = QuietEnd()
    assert not end.is_over(False, 0, 100.0)
    assert not end.is_over(True, 1, 101.0)
    assert not end.is_over(True, 0, 102.0)
    assert not end.is_over(True, 1, 103.0)
    assert not end.is_over(True, 0, 104.0)
    assert end.is_over(True, 0, 106.0)
    late = QuietEnd()
    assert not late.is_over(True, 5, 0.0)
    assert not late.is_over(True, 5, 59.9)
    assert late.is_over(True, 5, 60.0)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("*:7000", ListenOn("*", 7000)),
        (":7000", ListenOn("*", 7000)),
        ("10.0.0.1:7000:7001", ListenOn("10.0.0.1", 7000, 7001)),
        ("*:1:2:3", ListenOn("*", 1, 2, 3)),
        ("[::1]:0", ListenOn("::1", 0)),
    ],
)
def test_where_to_listen(text: str, parsed: ListenOn) -> None:
    assert ListenOn.parse(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "host", "7000", "host:port", "h:1:2:3:4", "h:70000", "[::1", "[::1]x:1", "h:-1"]
)
def test_where_not_to_listen(text: str) -> None:
    with pytest.raises(UserError, match="expected HOST:PORT"):
        ListenOn.parse(text)


def test_where_peers_dial(tmp_path: Path) -> None:
    told = ("a.example", "10.0.0.1:7", "2001:db8::7", "[2001:db8::7]:8")
    places = (Address("a.example", 29800), Address("10.0.0.1", 7), Address("2001:db8::7", 29800))
    assert _places(told, 29800) == (*places, Address("2001:db8::7", 8))
    assert _places(("a", "a:29800"), 29800) == (Address("a", 29800),)
    with pytest.raises(UserError, match="--public: 5 addresses, at most 4"):
        _places(("a", "b", "c", "d", "e"), 1)
    for wrong in ("", "a b", "a:0", "a:b", "[::zz]", "tcp://a:1"):
        with pytest.raises(UserError, match="--public"):
            _places((wrong,), 1)
    keys = load_or_create(tmp_path)
    machine = RunMachine(MANIFEST, bytes(16), [Started(incarnation=4)], os.urandom)
    said = whereabouts_of(
        _whereabouts(machine, JoinUrl.at(places, "demo", keys.public_raw), keys), keys.public_raw
    )
    assert said is not None and (said.places, said.incarnation, said.expires_s) == (places, 4, 0)
    with pytest.raises(UserError, match="too long"):
        _places_signed = tuple(Address("h" * 250 + str(at), 1) for at in range(4))
        _whereabouts(machine, JoinUrl.at(_places_signed, "demo", keys.public_raw), keys)


def test_whoever_listens_everywhere_offers_both_families() -> None:
    [only] = ListenOn.parse("0.0.0.0:1").hosts_for_others()
    assert ":" not in only
    both = ListenOn.parse("*:1").hosts_for_others()
    assert both[0] == only and len(both) <= 2 and all(":" in each for each in both[1:])
    assert ListenOn.parse("10.0.0.1:1").hosts_for_others() == ("10.0.0.1",)


def test_a_word_between_the_processes_that_is_no_text_ends_their_channel() -> None:
    """The front door talks to strangers: whoever takes it over must not end the coordinator."""
    ours, theirs = pair()
    channel = Channel(ours, FROM_DOOR)
    theirs.send(packed(CannotListen(reason="abc")).replace(b"abc", b"\xe4bc"))
    assert list(channel.receive()) == [] and channel.closed
    ours.close()
    theirs.close()


@pytest.mark.parametrize("counters", [{"no verdict": 1}, {"stale": -1}, {"stale": 1 << 32}, {"stale": "1"}])
@pytest.mark.parametrize("heard", [FROM_DOOR, FROM_GATEWAY])
def test_P8_what_a_door_or_a_gateway_counted_is_believed_only_of_verdicts(
    heard: msgspec.msgpack.Decoder[Any], counters: dict[str, Any]
) -> None:
    ours, theirs = pair()
    said = {"word": "counted", "arrived": 1, "counters": {"stale": 1}, "connections": 0}
    for each in (said, said | {"counters": counters}):
        theirs.send(packed(each))
    channel = Channel(ours, heard)
    assert [word.counters for word in channel.receive()] == [{Verdict.STALE: 1}] and channel.closed
    ours.close()
    theirs.close()


def test_the_key_is_kept_and_private(tmp_path: Path) -> None:
    made = load_or_create(tmp_path)
    path = tmp_path / "coordinator.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create(tmp_path) == made
    assert curve_text(made.public_raw) == made.public
    assert made.secret.decode() not in repr(made)
    assert [each.name for each in tmp_path.iterdir()] == ["coordinator.key"]


def test_the_keys_url_tells_what_its_run_has_signed(tmp_path: Path) -> None:
    keys = load_or_create(tmp_path)
    statement = statement_of(bytes(16), 0, 1, 20, bytes(32))
    proof = keys.prove(statement)
    assert proves(proof, statement) and curve_key_of(proof[:32]) == keys.public_raw
    assert not proves(proof, statement_of(bytes(16), 0, 1, 21, bytes(32)))
    assert not proves(proof[:-1], statement) and not proves(b"", statement)
    for odd in (b"", b"\xff" * 32, (1).to_bytes(32, "little")):
        assert curve_key_of(odd) == b""


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    load_or_create(tmp_path)
    (tmp_path / "coordinator.key").chmod(0o640)
    with pytest.raises(UserError, match=r"others may read this private key \(mode 0640\); run: chmod 600"):
        load_or_create(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 40, zmq.curve_keypair()[1], b"a b" * 13 + b"a", b"ed25519:" + b"\xff" * 40],
    ids=["empty", "short", "no text", "without a seed", "no key", "no key with a head"],
)
def test_a_damaged_key_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "coordinator.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match="damaged, expected one line of 48 characters; put back a copy"):
        load_or_create(tmp_path)
    assert path.read_bytes() == content
