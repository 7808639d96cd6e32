"""The coordinator over real sockets on this machine: what strangers may try, and what members may rely on."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.door.front_door_process import in_thread
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.run.effects import Effect
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.server import JOURNAL_NAME, Server
from farflung.peer.identity import Identity
from farflung.protocol import envelope
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Unreachable
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import CONTROL_FRAME_BYTES, PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import NetSection
from farflung.protocol.messages import (
    MEMBER_OUT,
    AskStatus,
    Beat,
    Challenge,
    FragmentBeat,
    Gone,
    Hello,
    Knock,
    Leave,
    Message,
    Tick,
    Welcome,
)
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.process.sockets import curve_raw, curve_text
from farflung.protocol.signed_words import hello_part
from rig.waiting import PATIENCE_S, eventually

# Nobody is lost by silence: it takes longer than any wait here.
MANIFEST = Manifest(net=NetSection(heartbeat_s=1.0, dead_after_s=600.0))
MODEL = ModelSchema(
    tensors=(TensorSpec("w", (4,), "float32", "param"),),
    chunk_elements=4,
    chunk_count=1,
    first_plain_chunk=1,
    frozen=hash_bytes(b""),
)


# ---- a server in a thread, and those who talk to it -----------------------------------------------------


class Running:
    """A real server on a free port of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S), "the server did not start"

    def _serve(self) -> None:
        with Journal.open_or_create(self._folder / JOURNAL_NAME, MANIFEST, lambda: bytes(16)) as journal:
            keys = load_or_create(self._folder)
            machine = self._machine = RunMachine(MANIFEST, journal.run_id, journal.records(), os.urandom)
            with Server(machine, journal, keys, ListenOn("127.0.0.1", 0), spawn=in_thread) as server:
                self.url = JoinUrl("127.0.0.1", server.port, MANIFEST.run.name, keys.public_raw)
                self._ready.set()
                server.run_until(self._stop.is_set)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Inside it the server's loop stands still, as if it waited for a slow disk."""
        on_timer, held, go_on = self._machine.on_timer, threading.Event(), threading.Event()

        def wait(now: float) -> list[Effect]:
            held.set()
            assert go_on.wait(PATIENCE_S)
            return on_timer(now)

        self._machine.on_timer = wait  # type: ignore[method-assign]
        assert held.wait(PATIENCE_S)
        try:
            yield
        finally:
            self._machine.on_timer = on_timer  # type: ignore[method-assign]
            go_on.set()

    def status(self) -> dict[str, Any]:
        with StatusClient(self.url) as client:
            return client.fetch(PATIENCE_S)

    def frames(self) -> dict[str, int]:
        return dict(self.status()["frames"])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    server = Running(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.SyncSocket]]:
    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Caller:
    """A CURVE connection to one of the server's sockets."""

    def __init__(
        self, context: zmq.Context[zmq.SyncSocket], url: JoinUrl, port: int, key: Any = None
    ) -> None:
        self.public, self.secret = key or zmq.curve_keypair()
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_publickey, self.socket.curve_secretkey = self.public, self.secret
        self.socket.curve_serverkey = curve_text(url.key)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, message: Message, kinds: frozenset[str]) -> Message:
        self.socket.send(envelope.encode(message))
        assert self.socket.poll(PATIENCE_S * 1000), f"no answer to {message}"
        return envelope.decode(self.socket.recv(), kinds)


class ScriptedPeer:
    """Gets in by the rules, then says what a test tells it to."""

    def __init__(self, context: zmq.Context[zmq.SyncSocket], url: JoinUrl) -> None:
        self.identity = Identity.generate()
        self.process = os.urandom(16)
        self._context, self._url, self._seq = context, url, 0
        self.door = Caller(context, url, url.port)
        self.members: Caller | None = None

    def enter(self) -> Welcome:
        challenge = self.door.ask(
            Knock(protocol=PROTOCOL_VERSION, run=self._url.run), frozenset({"challenge"})
        )
        assert isinstance(challenge, Challenge)
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            run_id=challenge.run_id,
            identity=self.identity.public,
            key=curve_raw(self.door.public),
            address="",
            software="test",
            manifest=hash_bytes(challenge.manifest),
            model=MODEL,
            fragments=(0,),
            version=-1,
            digest=b"",
            process=self.process,
            token="",
            signature=b"",
        )
        signature = self.identity.sign(hello_part(hello, challenge.nonce))
        signed = msgspec.structs.replace(hello, signature=signature)
        welcome = self.door.ask(signed, frozenset({"welcome"}))
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        self.connect()
        return welcome

    def connect(self) -> None:
        key = (self.door.public, self.door.secret)
        self.members = Caller(self._context, self._url, self.welcome.member_port, key)

    def beat(self) -> Message:
        self._seq += 1
        assert self.members is not None
        return self.members.ask(beat(self.welcome.session, self._seq), frozenset(MEMBER_OUT))


def beat(session: bytes, seq: int) -> Beat:
    return Beat(
        batch=None,
        session=session,
        seq=seq,
        roster_no=0,
        fragments=(FragmentBeat(0, -1, b"", 0, 0, 0, False, ()),),
        phase="inner",
        step=0,
        tokens=0,
        loss=None,
        tx_bytes=0,
        rx_bytes=0,
        up_bytes_per_s=0,
        down_bytes_per_s=0,
        have=(),
        want=0,
        samples=0,
        rough=False,
        era=0,
        saved=-1,
        unsure=False,
        leaving=False,
        data=b"",
    )


def member(running: Running, peer: ScriptedPeer) -> dict[str, Any]:
    return next(m for m in running.status()["members"] if m["id"] == peer.identity.peer_id)


# ---- anyone -----------------------------------------------------------------------------------------------


def test_anyone_with_the_url_may_ask_for_the_status(running: Running) -> None:
    with StatusClient(running.url) as client:
        first, second = client.fetch(PATIENCE_S), client.fetch(PATIENCE_S)
    assert first["run"] == MANIFEST.run.name
    assert first["run_id"] == bytes(16).hex()
    assert second["elapsed_s"] >= first["elapsed_s"]


def test_a_server_that_does_not_hold_the_urls_key_is_not_believed(running: Running) -> None:
    public, _ = zmq.curve_keypair()
    url = JoinUrl(running.url.host, running.url.port, running.url.run, curve_raw(public))
    silence = f"127.0.0.1 port {url.port} within 0.4 s; check that"
    with StatusClient(url) as client, pytest.raises(Unreachable, match=silence):
        client.fetch(0.4)
    eventually(lambda: running.frames()["malformed"] >= 1, "it is counted")


def test_nobody_there_is_unreachable_and_coming_back_is_noticed(tmp_path: Path) -> None:
    server = Running(tmp_path)
    with StatusClient(server.url) as client:
        client.fetch(PATIENCE_S)
        server.stop()
        with pytest.raises(Unreachable):
            client.fetch(0.2)


def test_every_bad_frame_at_the_door_is_counted(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    unknown = msgspec.msgpack.encode({"kind": "open_sesame", "body": {}})
    of_members = envelope.encode(Leave(session=bytes(16), seq=1, reason=""))
    bad: list[tuple[list[bytes], str]] = [
        ([b"\xff garbage"], "malformed"),
        ([unknown], "malformed"),
        ([envelope.encode(AskStatus(run="my-run")), b"second part", b"third"], "malformed"),
        ([b""], "malformed"),
        ([of_members], "unauthorised"),
        ([bytes(CONTROL_FRAME_BYTES + 1)], "oversize"),
    ]
    for parts, verdict in bad:
        before = running.frames()[verdict]
        caller = Caller(context, running.url, running.url.port)
        caller.socket.send_multipart(parts)
        eventually(lambda v=verdict, b=before: running.frames()[v] == b + 1, f"{parts[0][:20]!r} {verdict}")


def test_a_frame_far_over_the_limit_is_cut_off_unread(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    caller = Caller(context, running.url, running.url.port)
    caller.socket.send(bytes(4 * CONTROL_FRAME_BYTES))
    assert running.status()["run"] == "my-run"
    assert running.frames()["oversize"] == 0


def test_http_and_a_client_without_encryption_get_nothing(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    with socket.create_connection(("127.0.0.1", running.url.port), timeout=PATIENCE_S) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while browser.recv(1024):
                pass  # at most a ZMTP greeting, then the end
    eventually(lambda: running.frames()["malformed"] >= 1, "the browser is counted")
    before = running.frames()["malformed"]
    plain = context.socket(zmq.DEALER)
    plain.connect(f"tcp://127.0.0.1:{running.url.port}")
    plain.send(envelope.encode(AskStatus(run="my-run")))
    eventually(lambda: running.frames()["malformed"] > before, "the plain client is counted")
    assert not plain.poll(100)


def test_who_keeps_sending_garbage_is_not_read_any_more(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    caller = Caller(context, running.url, running.url.port)
    for _ in range(3):
        caller.socket.send(b"\xff")
    caller.socket.send(envelope.encode(AskStatus(run="my-run")))
    eventually(
        lambda: running.frames()["unauthorised"] == 1, "the good frame after three bad ones is dropped"
    )
    assert running.frames()["malformed"] == 3
    assert not caller.socket.poll(50)


# ---- members ----------------------------------------------------------------------------------------------


def test_a_signed_hello_is_welcome_and_a_beat_gets_a_tick(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    peer = ScriptedPeer(context, running.url)
    welcome = peer.enter()
    assert welcome.incarnation == 1
    tick = peer.beat()
    assert isinstance(tick, Tick)
    assert tick.goal == "found"
    assert member(running, peer)["alive"]


def test_the_members_socket_is_closed_to_strangers(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    peer = ScriptedPeer(context, running.url)
    port = peer.enter().member_port
    stranger = Caller(context, running.url, port)
    stranger.socket.send(b"\xff")
    eventually(lambda: running.frames()["unauthorised"] == 1, "the stranger is refused by key")
    assert running.frames()["malformed"] == 0, "and what it sent is never read"


@pytest.mark.slow
def test_a_member_cannot_pass_for_another(running: Running, context: zmq.Context[zmq.SyncSocket]) -> None:
    """A forged beat moves neither the answers of its victim nor, when the forger leaves, the victim's end."""
    victim, thief = ScriptedPeer(context, running.url), ScriptedPeer(context, running.url)
    for each in (victim, thief):
        each.enter()
        assert isinstance(each.beat(), Tick)
    assert thief.members is not None
    thief.members.socket.send(envelope.encode(beat(victim.welcome.session, 50)))
    eventually(lambda: running.frames()["unauthorised"] == 1, "the forged beat is counted")
    assert not thief.members.socket.poll(50)
    thief.members.socket.close()
    eventually(lambda: not member(running, thief)["alive"], "the thief is lost")
    assert member(running, victim)["alive"]
    assert isinstance(victim.beat(), Tick)


def test_an_unknown_session_is_told_so(running: Running, context: zmq.Context[zmq.SyncSocket]) -> None:
    peer = ScriptedPeer(context, running.url)
    peer.enter()
    assert peer.members is not None
    gone = peer.members.ask(beat(b"?" * 16, 1), frozenset(MEMBER_OUT))
    assert isinstance(gone, Gone)
    assert not gone.final


@pytest.mark.slow
def test_a_broken_connection_is_a_death_long_before_the_heartbeat_says_so(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    peer, other = ScriptedPeer(context, running.url), ScriptedPeer(context, running.url)
    for each in (peer, other):
        each.enter()
        each.beat()
    assert peer.members is not None
    peer.members.socket.close()
    eventually(lambda: not member(running, peer)["alive"], "the member with the closed connection is lost")
    assert "connection closed" in member(running, peer)["why"]
    assert member(running, other)["alive"]


@pytest.mark.slow
def test_last_words_and_a_death_in_one_breath(running: Running) -> None:
    """A beat that is read after the news of its connection's end must not make the member look alive."""
    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    peer = ScriptedPeer(context, running.url)
    peer.enter()
    peer.beat()
    assert peer.members is not None
    with running.held_up():
        peer.members.socket.send(envelope.encode(beat(peer.welcome.session, 10)))
        peer.members.socket.close(linger=1000)
        peer.door.socket.close()
        context.term()  # returns when all is sent and both connections are closed
        time.sleep(0.1)  # the news crosses one thread more; were it late, this would test less, not fail
    eventually(lambda: not member(running, peer)["alive"], "the member is lost")


@pytest.mark.slow
def test_a_member_that_comes_back_at_once_is_not_lost(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    peer = ScriptedPeer(context, running.url)
    peer.enter()
    peer.beat()
    assert peer.members is not None
    old = peer.members
    peer.connect()
    assert isinstance(peer.beat(), Tick)
    old.socket.close()
    end = time.monotonic() + 1.5  # longer than the grace for broken connections
    while time.monotonic() < end:
        assert member(running, peer)["alive"]
    assert isinstance(peer.beat(), Tick)


@pytest.mark.slow
def test_a_member_that_sends_garbage_is_cut_off_and_lost(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    peer = ScriptedPeer(context, running.url)
    peer.enter()
    peer.beat()
    assert peer.members is not None
    for _ in range(3):
        peer.members.socket.send(b"\xff")
    eventually(lambda: not member(running, peer)["alive"], "the garbage sender is lost")
