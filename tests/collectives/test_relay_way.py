"""Two links that can't dial each other meet at a relay, which they believe nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from farflung.collectives.link import undialled
from farflung.collectives.link.link import Relayed
from farflung.collectives.link.relay_way import RelayState, RelayWay
from rig.in_thread import InThread
from rig.link_ends import PAYLOAD_MAX, End, frame, until, ways
from rig.relay_rig import CHOSEN, JOINED, RelayRig
from rig.waiting import eventually


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    found = End("ann"), End("bob")
    try:
        yield found
    finally:
        for each in found:
            each.link.close()


@pytest.fixture
def rig(ends: tuple[End, End]) -> Iterator[RelayRig]:
    with RelayRig() as found:
        found.want((ends[0].key, ends[1].key))
        yield found


def meet(ends: tuple[End, End], ways: tuple[Relayed, Relayed]) -> None:
    for mine, theirs, way in zip(ends, reversed(ends), ways, strict=True):
        mine.link.set_contacts([ends[0].contact, ends[1].contact])
        mine.link.set_ways({theirs.name: way})


def test_frames_pass_both_ways_and_are_counted_by_the_kernel(ends: tuple[End, End], rig: RelayRig) -> None:
    ann, bob = ends
    meet(ends, ways(rig, ends))
    big = os.urandom(PAYLOAD_MAX)
    for chunk in range(8):
        assert ann.link.send("bob", frame(chunk, big))
    bob.link.send("ann", frame(0, b"back"))
    until(ends, lambda: len(bob.got) == 8 and ann.got, "everything has come")
    assert all(sender == "ann" and bytes(got.payload) == big for sender, got in bob.got)
    assert ann.got[0][0] == "bob"
    until(ends, lambda: ann.link.moved().sent_bytes >= 8 * PAYLOAD_MAX, "what left over the relay has left")
    assert bob.link.moved().received_bytes >= 8 * PAYLOAD_MAX
    assert ann.link.lines["bob"].is_up and not ann.link.unreached()


def test_the_relay_killed_and_back_they_meet_again_and_nothing_crashes(
    ends: tuple[End, End], rig: RelayRig
) -> None:
    ann, bob = ends
    meet(ends, ways(rig, ends))
    ann.link.send("bob", frame(0, b"before"))
    until(ends, lambda: bob.got, "they meet")
    pid = rig.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(ends, lambda: not ann.link.lines["bob"].is_up, "it is seen")
    ann.link.send("bob", frame(1, b"meanwhile"))
    until(ends, lambda: len(bob.got) == 2, "they meet again")
    assert bytes(bob.got[1][1].payload) == b"meanwhile"


def test_a_refused_ticket_is_no_end_of_anything(ends: tuple[End, End], rig: RelayRig) -> None:
    """libzmq's own SOCKS would abort this process when the socket is closed."""
    ann, bob = ends
    refused = rig.way(b"x" * 32, b"y" * 32)
    meet(ends, (refused, refused))
    ann.link.send("bob", frame(0, b"waits"))
    until(ends, lambda: rig.refused >= 3, "it is tried again and again")
    meet(ends, ways(rig, ends))
    until(ends, lambda: bob.got, "with a good one, what waited is there")


def test_a_renewed_ticket_breaks_nothing(ends: tuple[End, End], rig: RelayRig) -> None:
    ann, bob = ends
    meet(ends, ways(rig, ends))
    ann.link.send("bob", frame(0, b"first"))
    until(ends, lambda: bob.got, "they meet")
    taken = ann.link.lines["bob"].relay_way
    meet(ends, ways(rig, ends))
    ann.link.send("bob", frame(1, b"second"))
    until(ends, lambda: len(bob.got) == 2, "it goes on")
    assert ann.link.lines["bob"].relay_way is taken, "the connection stands"
    ann.link.set_ways({})
    assert ann.link.lines["bob"].relay_way is None and not ann.link.lines["bob"].opened


@pytest.mark.parametrize("serves", [True, False])
def test_whoever_the_relay_brings_instead_hears_nothing_and_is_not_heard(rig: RelayRig, serves: bool) -> None:
    """`serves`: of the two, Ann is CURVE's server, as follows from their keys."""
    ann = End("ann")
    bob, eve = (_with_key("bob", lambda key: (ann.key < key) == serves) for _ in range(2))
    try:
        # A relay that lies: with this ticket it lets somebody in who is not Bob.
        rig.want((ann.key, bob.key))
        theirs = rig.way(bob.key, ann.key)
        ann.link.set_contacts([ann.contact, bob.contact])
        ann.link.set_ways({"bob": rig.way(ann.key, bob.key)})
        eve.link._me = "eve"
        eve.link.set_contacts([ann.contact])
        eve.link.set_ways({"ann": theirs})
        ann.link.send("bob", frame(0, b"secret"))
        eve.link.send("ann", frame(0, b"forged"))
        until((ann, eve), lambda: rig.moved_bytes > 200, "they were joined")
        for _ in range(200):
            ann.turn(), eve.turn()
        assert not ann.got and not eve.got and not ann.link.lines["bob"].is_up
        assert len(ann.link.lines["bob"].waiting) > 0, "it did not leave"
    finally:
        for each in (ann, bob, eve):
            each.link.close()


def _with_key(name: str, fits: Callable[[bytes], bool]) -> End:
    while not fits((found := End(name)).key):
        found.link.close()
    return found


# What a relay may do to bytes that it can't read, besides holding them back.
LIES: dict[str, Callable[[bytes], bytes]] = {
    "changes": lambda data: data[:-1] + bytes((data[-1] ^ 1,)),
    "repeats": lambda data: data + data,
    "leaves out": lambda data: data[: len(data) // 2],
    "adds": lambda data: data + bytes(100),
}


class Liar:
    """Between a peer and the relay: once, after so many bytes, it does something to those that pass."""

    def __init__(self, port: int, every: int, lie: Callable[[bytes], bytes]) -> None:
        self._to, self._every, self._lie = port, every, lie
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.lies = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                relay = socket.create_connection(("127.0.0.1", self._to))
                for source, target, lies in ((guest, relay, False), (relay, guest, True)):
                    threading.Thread(target=self._carry, args=(source, target, lies), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, lies: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if lies and passed + len(data) > self._every and not self.lies:
                    data = self._lie(data)
                    self.lies += 1
                passed += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("lie", LIES)
def test_a_relay_that_lies_about_bytes_loses_a_connection_and_no_frame_arrives_changed(
    ends: tuple[End, End], rig: RelayRig, lie: str
) -> None:
    ann, bob = ends
    liar = Liar(rig.port, 300_000, LIES[lie])
    try:
        mine, theirs = ways(rig, ends)
        meet(ends, (mine, Relayed(f"127.0.0.1:{liar.port}", theirs.ticket)))
        big = os.urandom(200_000)
        for chunk in range(4):
            ann.link.send("bob", frame(chunk, big))

        def whole() -> bool:
            here = {got.header.chunk for _, got in bob.got}
            if not ann.link.lines["bob"].waits and len(here) < 4:  # what was lost is asked for again
                for chunk in set(range(4)) - here:
                    ann.link.send("bob", frame(chunk, big))
            return len(here) == 4

        until(ends, whole, "everything has come in the end")
        assert liar.lies == 1 and bob.spoiled == 0
        assert all(bytes(got.payload) == big for _, got in bob.got)
    finally:
        liar.close()


@pytest.mark.parametrize("answer", [b"", b"\x05\xff", b"HTTP/1.0 400\r\n", CHOSEN + b"\x05\x01" + bytes(8)])
def test_whatever_a_relay_answers_a_way_ends_in_words(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        way = RelayWay(Relayed(f"127.0.0.1:{server.getsockname()[1]}", "ticket"), 0.0)
        guest, _ = server.accept()
        guest.sendall(answer)
        guest.shutdown(socket.SHUT_WR)
        eventually(lambda: (way.turn(0.0), way.stand == RelayState.OVER)[1], "it is over")
        assert way.why_over and list(way.sockets()) == []
        way.close()
        guest.close()


def test_a_relay_that_says_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        way = RelayWay(Relayed(f"127.0.0.1:{server.getsockname()[1]}", "ticket"), 0.0)
        eventually(lambda: (way.turn(1.0), way.stand == RelayState.GREETED)[1], "it has greeted")
        way.turn(60.0)
        assert way.stand == RelayState.OVER and "nothing" in way.why_over
    nobody = RelayWay(Relayed("127.0.0.1:1", "ticket"), 0.0)
    eventually(lambda: (nobody.turn(0.0), nobody.stand == RelayState.OVER)[1], "nobody is there")
    assert "no way to the relay" in nobody.why_over


def test_no_byte_after_the_answer_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        way = RelayWay(Relayed(f"127.0.0.1:{server.getsockname()[1]}", "ticket"), 0.0)
        guest, _ = server.accept()
        guest.sendall(CHOSEN + JOINED + b"the first bytes of the other side")
        eventually(lambda: (way.turn(0.0), way.stand == RelayState.JOINED)[1], "joined")
        local = socket.socket(socket.AF_UNIX)
        local.connect("\0" + way.endpoint.removeprefix("ipc://@"))
        local.setblocking(False)

        def came() -> bytes:
            way.turn(0.0)
            with contextlib.suppress(BlockingIOError):
                return local.recv(100)
            return b""

        assert eventually(came, "they are there") == b"the first bytes of the other side"
        way.close()
        local.close()
        guest.close()


def test_told_another_relay_both_go_there_though_the_first_one_still_passes_bytes(
    ends: tuple[End, End], rig: RelayRig
) -> None:
    ann, bob = ends
    with RelayRig(spawn=InThread) as another:
        another.want((ann.key, bob.key))
        meet(ends, ways(rig, ends))
        ann.link.send("bob", frame(0, b"by the first"))
        until(ends, lambda: len(bob.got) == 1, "it has come")
        mine, theirs = ways(another, ends)
        ann.link.set_ways({"bob": mine})
        bob.link.set_ways({"ann": theirs})
        until(ends, lambda: ann.link.lines["bob"].is_up and bob.link.lines["ann"].is_up, "they met again")
        ann.link.send("bob", frame(1, b"by the second"))
        until(ends, lambda: len(bob.got) == 2, "it has come, too")
        until(ends, lambda: another.moved_bytes > 0, "over the other relay")
        until(ends, lambda: rig.said[-1].pairs == 0, "nothing stands at the first one")


def test_whom_a_relay_brings_to_nobody_is_told_after_a_while_and_anew_of_each_relay(
    ends: tuple[End, End], rig: RelayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = ends
    monkeypatch.setattr(undialled, "UNMET_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mine, theirs = ways(rig, ends)
        ann.link.set_contacts([ann.contact, bob.contact])
        ann.link.set_ways({"bob": Relayed(f"127.0.0.1:{silent.getsockname()[1]}", mine.ticket)})
        assert ann.link.unmet() == set(), "it was told just now"
        assert ann.link.unmet() == {"bob"}
        meet(ends, (mine, theirs))
        until(ends, lambda: not ann.link.unmet() and ann.link.lines["bob"].is_up, "they met")
        ann.link.set_ways({})
        assert ann.link.unmet() == set()
