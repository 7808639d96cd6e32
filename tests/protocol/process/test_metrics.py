"""/metrics and /healthz: a format that strict readers take, names that the docs list, and clients that do no harm."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farflung.compression.codec import check_payload, payload_bytes
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run_metrics import run_metrics
from farflung.coordinator.server import JOURNAL_NAME, Server
from farflung.peer.agent.metrics import of_peer
from farflung.peer.identity import Identity
from farflung.peer.machine.handshake import PeerConfig, me_of
from farflung.peer.machine.machine import PeerMachine
from farflung.protocol.errors import Counters, UserError
from farflung.protocol.limits import METRICS_CONNECTIONS, METRICS_REQUEST_BYTES
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import metrics as module
from farflung.protocol.process.metrics import Exporter, Family, gauge, of_process, parse_address, text_of
from rig.waiting import PATIENCE_S, eventually

OPERATE = Path(__file__).resolve().parents[3] / "docs" / "operate.md"
_SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)'
)


def parsed(text: str) -> dict[str, dict[str, float]]:
    """{name: {labels: value}}; whatever the format does not allow fails the test."""
    assert text.endswith("\n")
    found: dict[str, dict[str, float]] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            assert what in ("HELP", "TYPE") and rest
            if what == "TYPE":
                assert name not in kinds and name not in found, f"{name} stands in two places"
                kinds[name] = rest
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, f"not a sample: {line!r}"
        name, labels, value = match[1], match[2] or "", float(match[3])
        assert kinds[name] in ("gauge", "counter"), f"{name} has no type"
        assert (kinds[name] == "counter") == name.endswith("_total"), f"{name} is a {kinds[name]}"
        assert list(found.get(name, {name: 0}))[-1] is not None and list(kinds)[-1] == name, f"{name} is torn"
        assert labels not in found.setdefault(name, {}), f"{name} twice with {labels!r}"
        found[name][labels] = value
    return found


def machine() -> RunMachine:
    made = RunMachine(Manifest(), bytes(16), [], lambda size: bytes(size))
    made.start(0.0, 4000)
    return made


def metrics_of(made: RunMachine, slowest_turn_s: float) -> bytes:
    return run_metrics(made.core, made.drivers, COUNTS, slowest_turn_s)


COUNTS = {"arrived": 7, "undelivered": 1, "counters": Counters().as_dict()}


def of_the_peer() -> list[Family]:
    peer = PeerMachine(
        PeerConfig(me_of(Identity.generate(), bytes(32), bytes(16)), "demo", check_payload, payload_bytes),
        lambda: 0.0,
    )
    return [*of_process("1", "demo", "peer"), *of_peer(peer, Counters().as_dict(), 0.25)]


# ---- the text ------------------------------------------------------------------------------------------------


def test_a_strict_reader_takes_what_coordinator_and_peers_tell() -> None:
    run = parsed(metrics_of(machine(), 0.5).decode())
    assert run["farflung_loop_turn_seconds_max"] == {"": 0.5}
    assert run["farflung_frames_arrived_total"] == {"": 7.0}
    assert run["farflung_frames_total"]['verdict="malformed"'] == 0.0
    peer = parsed(text_of(of_the_peer()))
    assert peer["farflung_version"] == {"": -1.0}
    assert peer["farflung_answer_seconds"] == {"": 0.25}


def test_labels_and_numbers_that_want_care() -> None:
    odd = 'a"b\\c\nd'
    text = text_of([gauge("x", "what\nfor", float("nan"), of=odd), gauge("y", "y", None)])
    assert (
        text == '# HELP farflung_x what\\nfor\n# TYPE farflung_x gauge\nfarflung_x{of="a\\"b\\\\c\\nd"} NaN\n'
    )
    parsed(text)


def test_the_docs_name_every_metric_and_no_other() -> None:
    run = {family for family in parsed(metrics_of(machine(), 0.0).decode())}
    last = {f"farflung_last_round_{what}" for what in ("seconds", "members", "excluded", "bytes")}
    held_out = {f"farflung_held_out_{what}" for what in ("version", "loss", "bits_per_byte", "outvoted")}
    known = (
        run
        | last
        | held_out
        | {family.name for family in of_the_peer()}
        | {"farflung_loss", "farflung_members_by_state"}
    )
    told = set(re.findall(r"`((?:farflung|process)_[a-z_]+)", OPERATE.read_text(encoding="utf-8")))
    assert told == known


# ---- the port ------------------------------------------------------------------------------------------------


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exporter]:
    # This machine may stand still for longer than a loop should.
    monkeypatch.setattr(module, "STALE_S", 3600.0)
    with Exporter("0") as made:
        made.tell(b"farflung_x 1\n")
        yield made


def connect(exporter: Exporter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", exporter.port), PATIENCE_S)


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except ConnectionResetError:  # it had not read everything
        return True


def ask(exporter: Exporter, request: bytes) -> tuple[int, bytes]:
    with connect(exporter) as one:
        one.sendall(request)
        answer = b""
        while part := one.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(re.search(rb"Content-Length: (\d+)", head)[1]) == len(body) or b"HEAD" in request  # type: ignore[index]
    return int(head.split()[1]), body


def test_what_the_port_answers(exporter: Exporter) -> None:
    assert exporter.host == "127.0.0.1"
    assert ask(exporter, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") == (200, b"farflung_x 1\n")
    assert ask(exporter, b"GET /metrics?a=b HTTP/1.0\n\n") == (200, b"farflung_x 1\n")
    assert ask(exporter, b"HEAD /metrics HTTP/1.1\r\n\r\n") == (200, b"")
    assert ask(exporter, b"GET /healthz HTTP/1.1\r\n\r\n") == (200, b"ok\n")
    assert ask(exporter, b"GET /etc/passwd HTTP/1.1\r\n\r\n")[0] == 404
    assert ask(exporter, b"POST /metrics HTTP/1.1\r\n\r\n")[0] == 405
    assert ask(exporter, b"\x16\x03\x01 hello\r\n\r\n")[0] == 400


def test_a_request_over_the_limit_is_refused(exporter: Exporter) -> None:
    assert ask(exporter, b"GET /" + b"x" * (METRICS_REQUEST_BYTES - 5))[0] == 431


def test_health_is_that_the_loop_turns(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_S", 0.0)
    assert ask(exporter, b"GET /healthz HTTP/1.1\r\n\r\n")[0] == 503


def test_who_says_nothing_or_too_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METRICS_REQUEST_S", 0.0)
    with Exporter("0") as exporter, connect(exporter) as one:
        one.sendall(b"GET /met")
        assert is_closed(one)


def test_more_connections_than_allowed_push_out_the_oldest(exporter: Exporter) -> None:
    idle = [connect(exporter) for _ in range(METRICS_CONNECTIONS + 8)]
    for one in idle[::2]:
        one.sendall(b"GET /metr")
    assert ask(exporter, b"GET /metrics HTTP/1.1\r\n\r\n") == (200, b"farflung_x 1\n")
    assert is_closed(idle[0])
    for one in idle:
        one.close()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("9464", ("127.0.0.1", 9464)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:9464", ("::1", 9464))],
)
def test_addresses(text: str, wanted: tuple[str, int]) -> None:
    assert parse_address(text) == wanted


@pytest.mark.parametrize("text", ["", "host", "host:", "1:99999", "1:-1", "1:٣"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="expected PORT or HOST:PORT"):
        parse_address(text)


def test_a_port_that_is_taken_is_told(exporter: Exporter) -> None:
    with pytest.raises(UserError, match="cannot listen"), Exporter(str(exporter.port)):
        pass


# ---- with a run ----------------------------------------------------------------------------------------------


def test_clients_of_the_metrics_port_do_not_hold_the_coordinator_up(tmp_path: Path) -> None:
    """They never send a whole request and never read; the server's loop turns and tells new figures."""
    stop = threading.Event()
    with Journal.open_or_create(tmp_path / JOURNAL_NAME, Manifest(), lambda: bytes(16)) as journal:
        run = RunMachine(Manifest(), journal.run_id, [], os.urandom)
        with (
            Server(run, journal, load_or_create(tmp_path), ListenOn("127.0.0.1", 0)) as server,
            Exporter("0") as port,
        ):
            server.exporter = port
            hostile = [connect(port) for _ in range(METRICS_CONNECTIONS)]
            for number, one in enumerate(hostile):
                one.sendall(bytes(range(250)) * 4 if number % 2 else b"GET /metrics HTTP/1.1\r\n")
            thread = threading.Thread(target=server.run_until, args=(stop.is_set,))
            thread.start()
            try:
                text = eventually(lambda: figures(port), "the loop tells its figures")
            finally:
                stop.set()
                thread.join(PATIENCE_S)
                for one in hostile:
                    one.close()
    assert parsed(text)["farflung_members"] == {"": 0.0}


def figures(port: Exporter) -> str:
    code, body = ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    return body.decode() if code == 200 else ""
