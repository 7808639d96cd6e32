"""Gateways between members and the coordinator: real sockets, the gateways in threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from farflung.coordinator.door import gateways as words
from farflung.coordinator.door.gateway import STRIKES
from farflung.coordinator.door.gateways import Gateways
from farflung.coordinator.door.listener import ListenOn
from farflung.protocol import messages
from farflung.protocol.messages import MEMBER_OUT, Gone, Tick
from farflung.protocol.mode_words import Look
from farflung.protocol.process.sockets import curve_raw
from rig.served import Caller, Running, ScriptedPeer, beat, member
from rig.waiting import PATIENCE_S, eventually


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    server = Running(tmp_path, gateways=2)
    yield server
    server.stop()


def test_members_beat_through_gateways_and_are_answered(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    peers = [ScriptedPeer(context, running.url) for _ in range(6)]
    ports = {peer.enter().member_port for peer in peers}
    assert ports <= set(running.server.gateways.ports) and len(running.server.gateways.ports) == 2
    for _ in range(3):
        assert all(isinstance(peer.beat(), Tick) for peer in peers)
    assert running.status()["alive"] == len(peers)


def test_a_member_whose_connection_to_a_gateway_ends_has_gone(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    peer = ScriptedPeer(context, running.url)
    peer.enter()
    peer.beat()
    assert peer.members is not None
    peer.members.socket.close(linger=0)
    eventually(lambda: not member(running, peer)["alive"], "the coordinator heard of it")


def test_P8_nobody_speaks_through_a_gateway_as_another_one(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    ann, eve = ScriptedPeer(context, running.url), ScriptedPeer(context, running.url)
    ann.enter()
    eve.enter()
    ann.beat()
    assert eve.members is not None
    eve.members.socket.send(messages.encode(beat(ann.welcome.session, 1000)))
    eventually(lambda: running.frames()["unauthorised"] == 1, "its own key came with it")
    assert isinstance(ann.beat(), Tick), "her session is as it was"


def test_P8_who_was_not_let_in_shakes_no_hands_at_a_gateway(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    stranger = Caller(context, running.url, running.server.gateways.ports[0])
    stranger.socket.send(messages.encode(Look()))
    eventually(lambda: running.frames()["unauthorised"] == 1, "it is counted")


def test_P8_a_gateway_cuts_off_who_sends_what_no_farflung_sends_and_the_coordinator_reads_none_of_it(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    ann, eve = ScriptedPeer(context, running.url), ScriptedPeer(context, running.url)
    ann.enter()
    eve.enter()
    eve.beat()
    assert eve.members is not None
    for _ in range(STRIKES):
        eve.members.socket.send(b"no message")
    eventually(lambda: not member(running, eve)["alive"], "it is out")
    assert running.frames()["malformed"] == STRIKES
    assert isinstance(ann.beat(), Tick)


def test_P5_a_gateway_that_dies_costs_nobody_its_session(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    """The members dial again by themselves, and the gateway is there again, at the same port."""
    peers = [ScriptedPeer(context, running.url) for _ in range(6)]
    for peer in peers:
        peer.enter()
        peer.beat()
    ports = running.server.gateways.ports
    for each in running.server.gateways:
        assert each.channel is not None
        each.channel.socket.shutdown(2)  # it ends by that, with all its connections
    starts = [each.starts for each in running.server.gateways]
    eventually(
        lambda: (
            all(each.starts > before for each, before in zip(running.server.gateways, starts, strict=True))
            and running.server.gateways.ports == ports
        ),
        "both are there again",
    )
    for peer in peers:
        assert peer.members is not None
        answered = False
        for _ in range(100):  # what was said while nobody was there is lost; the next beat makes it good
            peer._seq += 1
            peer.members.socket.send(messages.encode(beat(peer.welcome.session, peer._seq)))
            if peer.members.socket.poll(PATIENCE_S * 10):
                answer = messages.decode(peer.members.socket.recv(), frozenset(MEMBER_OUT))
                answered = isinstance(answer, Tick)
                assert not isinstance(answer, Gone)
                break
        assert answered and member(running, peer)["alive"]


def test_a_key_that_is_shut_out_is_cut_off_at_every_gateway(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    peer = ScriptedPeer(context, running.url)
    peer.enter()
    peer.beat()
    before = running.frames()["unauthorised"]
    with running.held_up():
        running.server.gateways.shut(curve_raw(peer.door.public), cut=True)
    assert peer.members is not None
    peer.members.socket.send(messages.encode(beat(peer.welcome.session, 1000)))
    eventually(lambda: running.frames()["unauthorised"] > before, "it is not read any more")


def test_a_gateway_takes_the_ports_after_those_that_were_named() -> None:
    assert ListenOn("*", 7000, 7001, 7002, gateways=2).gateway_ports == [7003, 7004]
    assert ListenOn("*", 7000, gateways=2).gateway_ports == [0, 0]


def test_what_a_gateway_does_not_take_is_dropped_at_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang; the coordinator's memory must not grow by all that is said meanwhile."""
    monkeypatch.setattr("farflung.coordinator.door.gateways.WAITING_BYTES_MOST", 1 << 20)
    begin = words.GatewaySettings(secret=bytes(40), host="127.0.0.1", port=0, heartbeat_s=1.0, fragments=1)
    made = Gateways([begin], lambda text: None, lambda module, end, memory_bytes: Hung())
    made.watch(0.0)
    (gateway,) = made
    gateway.port = 1
    taken = sum(made.send(b"\x01route", bytes(65536)) for _ in range(200))
    assert 1 << 20 <= 65536 * taken < 5 << 20
    made.close()


class Hung:
    def wait(self, timeout: float | None = None) -> int:
        return 0

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("word", [words.Heard, words.Ended, words.Say, words.Let])
def test_P8_words_of_gateways_are_bounded(word: type) -> None:
    bounds = {"lot": words.LOT_FRAMES, "routes": words.KEYS_AT_ONCE, "keys": words.KEYS_AT_ONCE}
    items = {
        words.Heard: (b"r", bytes(32), b"m"),
        words.Ended: b"r",
        words.Say: (b"r", b"m"),
        words.Let: bytes(32),
    }
    (field,) = word.__struct_fields__  # type: ignore[attr-defined]
    for count, fits in ((bounds[field], True), (bounds[field] + 1, False)):
        raw = msgspec.msgpack.encode(word(**{field: (items[word],) * count}))
        if fits:
            assert msgspec.msgpack.decode(raw, type=word)
        else:
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(raw, type=word)
