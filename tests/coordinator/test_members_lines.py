"""Members' connections as a whole, at the coordinator's own socket and at a gateway: no member takes what all need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from farflung.coordinator.operator_socket import ask
from farflung.coordinator.run.effects import Forbid
from farflung.protocol import messages
from farflung.protocol.messages import Ban, Tick
from farflung.protocol.mode_words import Look
from farflung.protocol.process import networks
from farflung.protocol.process.networks import LEFT_OPEN_S, LINES_OF_KEY
from farflung.protocol.process.sockets import curve_raw
from rig.served import Caller, Running, ScriptedPeer, beat, member
from rig.waiting import eventually

LOOK = messages.encode(Look())
ESTABLISHED = "01"


@pytest.fixture(params=[0, 1], ids=["own socket", "gateway"])
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    server = Running(tmp_path, gateways=request.param)
    yield server
    server.stop()


def here(context: zmq.Context[zmq.SyncSocket], running: Running) -> ScriptedPeer:
    """A peer that is in, and has beaten once."""
    peer = ScriptedPeer(context, running.url)
    peer.enter()
    peer.beat()
    return peer


def more_lines(
    context: zmq.Context[zmq.SyncSocket], running: Running, peer: ScriptedPeer, count: int, say: bytes = b""
) -> list[Caller]:
    """With the key of a peer; each is dialled once.  `say`: over each of them."""
    key = (peer.door.public, peer.door.secret)
    found = [Caller(context, running.url, peer.welcome.member_port, key, once=True) for _ in range(count)]
    for each in found if say else ():
        each.socket.send(say)
    return found


def open_at(port: int) -> int:
    """Connections to a port of this machine, by the system's own books."""
    count = 0
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_ = row.split()
            count += int(local.rpartition(":")[2], 16) == port and state == ESTABLISHED
    return count


def test_P8_one_key_has_few_connections_and_the_newest_are_those(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    ann, eve = here(context, running), here(context, running)
    port = eve.welcome.member_port
    more = more_lines(context, running, eve, 20, LOOK)
    eventually(lambda: running.frames()["accepted"] >= 22, "all were heard")
    told = "hers, the newest of the other's, and the oldest one, which was dialled again and says nothing"
    eventually(lambda: open_at(port) == 1 + LINES_OF_KEY + 1, told)
    newest = more_lines(context, running, eve, 1)[0]
    newest.socket.send(messages.encode(beat(eve.welcome.session, 50)))
    assert newest.socket.poll(10_000), "who dials again is answered"
    assert isinstance(ann.beat(), Tick)
    del more


def test_P8_who_dials_again_and_again_is_answered_each_time(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    """Its line breaks, and the coordinator does not know that the older ones are dead."""
    peer = here(context, running)
    kept = []
    for _ in range(3 * LINES_OF_KEY):
        kept.append(peer.members)
        peer.connect()
        assert isinstance(peer.beat(), Tick)
    assert member(running, peer)["alive"]


@pytest.mark.mode("admission")
def test_P8_after_a_ban_no_connection_of_its_key_is_left_whether_it_spoke_or_not(
    running: Running, context: zmq.Context[zmq.SyncSocket], tmp_path: Path
) -> None:
    ann, eve = here(context, running), here(context, running)
    port = eve.welcome.member_port
    more = more_lines(context, running, eve, 2, LOOK) + more_lines(context, running, eve, 15)
    eventually(lambda: open_at(port) == 19, "all are open")
    assert ask(tmp_path, Ban(who=eve.identity.peer_id, reason="test", lasts_s=600.0)).ok
    eventually(lambda: open_at(port) == 1, "hers is left")
    assert isinstance(ann.beat(), Tick)
    del more


def test_P8_after_three_strikes_no_connection_of_its_key_is_left(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    ann, eve = here(context, running), here(context, running)
    port = eve.welcome.member_port
    more = more_lines(context, running, eve, 2, LOOK) + more_lines(context, running, eve, 5)
    eventually(lambda: open_at(port) == 9, "all are open")
    for _ in range(3):
        more[0].socket.send(b"\xff")
    eventually(lambda: open_at(port) == 1, "hers is left")
    assert isinstance(ann.beat(), Tick)


@pytest.fixture
def few_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "HALF_OPEN", 20)


@pytest.mark.usefixtures("few_silent")  # before the server is there
def test_P8_silent_connections_make_room_and_others_come_in(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    ann, eve = here(context, running), here(context, running)
    port = eve.welcome.member_port
    more = more_lines(context, running, eve, 100)
    eventually(lambda: open_at(port) <= 2 + 20, "the oldest make room")
    bob = here(context, running)
    assert isinstance(ann.beat(), Tick) and isinstance(bob.beat(), Tick) and isinstance(eve.beat(), Tick)
    del more


def test_P8_who_speaks_with_a_key_that_may_not_come_in_any_more_is_hung_up_on(
    running: Running, context: zmq.Context[zmq.SyncSocket]
) -> None:
    ann, eve = here(context, running), here(context, running)
    port = eve.welcome.member_port
    assert open_at(port) == 2
    with running.held_up():
        running.server._execute([Forbid(curve_raw(eve.door.public))])
    eve.beat()  # the answer leaves after the news that it is out
    eve.beat()
    eventually(lambda: open_at(port) == 1, "hers is left", LEFT_OPEN_S / 2)
    assert isinstance(ann.beat(), Tick)
