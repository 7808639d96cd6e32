"""The coordinator over real sockets on this machine: what strangers may try, and what members may rely on."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from farflung.console.screen.status_client import StatusClient
from farflung.protocol import messages
from farflung.protocol.errors import Unreachable
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import CONTROL_FRAME_BYTES
from farflung.protocol.messages import (
    MEMBER_OUT,
    AskStatus,
    Gone,
    Leave,
    Tick,
)
from farflung.protocol.process.sockets import curve_raw
from rig.served import MANIFEST, Caller, Running, ScriptedPeer, beat, member
from rig.waiting import PATIENCE_S, eventually


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    server = Running(tmp_path)
    yield server
    server.stop()


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
    of_members = messages.encode(Leave(session=bytes(16), seq=1, reason=""))
    bad: list[tuple[list[bytes], str]] = [
        ([b"\xff garbage"], "malformed"),
        ([unknown], "malformed"),
        ([messages.encode(AskStatus(run="my-run")), b"second part", b"third"], "malformed"),
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
    plain.send(messages.encode(AskStatus(run="my-run")))
    eventually(lambda: running.frames()["malformed"] > before, "the plain client is counted")
    assert not plain.poll(100)


def test_who_keeps_sending_garbage_is_not_read_any_more(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    caller = Caller(context, running.url, running.url.port)
    for _ in range(3):
        caller.socket.send(b"\xff")
    caller.socket.send(messages.encode(AskStatus(run="my-run")))
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
    thief.members.socket.send(messages.encode(beat(victim.welcome.session, 50)))
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
        peer.members.socket.send(messages.encode(beat(peer.welcome.session, 10)))
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
