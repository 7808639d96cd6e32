"""How many connections members may have at one socket, and which ones make room."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import zmq

from farflung.coordinator.door import listener
from farflung.coordinator.door.keys import load_or_create
from farflung.coordinator.door.listener import Listener
from farflung.protocol.process import networks
from farflung.protocol.process.descriptors import ROOM_MOST, room_for_connections
from farflung.protocol.process.networks import LINES_OF_KEY, Lines

EVERYBODY = 100


def speaking(room: int, *keys: bytes) -> Lines:
    """Lines 0, 1, ... that have spoken."""
    found = Lines(room)
    for line, key in enumerate(keys):
        assert found.comes(line, "") == []
        assert found.heard(line, b"%d" % line, key) == []
    return found


def test_of_one_key_the_longest_silent_line_makes_room() -> None:
    some = speaking(EVERYBODY, *[b"eve"] * LINES_OF_KEY, b"ann")
    some.heard(0, b"0", b"eve")
    some.comes(9, "")
    assert some.heard(9, b"9", b"eve") == [1], "line 0 spoke after it did"
    assert some.heard(9, b"9", b"eve") == some.heard(1, b"1", b"eve") == [], (
        "last words of the one that is cut"
    )
    assert len(some) == LINES_OF_KEY + 1
    assert some.ends(1) == b"1", "who hears of its end is to know whose it was"
    some.comes(10, "")
    assert some.heard(10, b"10", b"eve") == [2]


def test_silent_lines_make_room_in_all_and_in_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest comes in, so that whoever dials again is not kept out by those that only hold on."""
    monkeypatch.setattr(networks, "HALF_OPEN", 4)
    monkeypatch.setattr(networks, "HALF_OPEN_OF_NETWORK", 2)
    some = speaking(EVERYBODY, b"ann")
    assert some.comes(1, "a") == some.comes(2, "a") == []
    assert some.comes(3, "a") == [1], "too many of one network"
    assert some.comes(4, "b") == some.comes(5, "c") == []
    assert some.comes(6, "d") == [2], "too many in all"
    some.heard(3, b"3", b"bob")
    assert some.comes(7, "d") == [], "who has spoken is none of them"
    some.ends(7)
    assert some.comes(8, "d") == []
    assert some.silent() == [4, 5, 6, 8]


def test_lines_of_this_machine_are_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "HALF_OPEN_OF_NETWORK", 2)
    some = Lines(EVERYBODY)
    assert [some.comes(line, "") for line in range(10)] == [[]] * 10


def test_where_there_is_no_room_silent_lines_make_it_and_then_those_of_the_same_key() -> None:
    some = speaking(4, b"ann", b"ann", b"bob")
    assert some.comes(3, "") == []
    assert some.comes(4, "") == [3]
    assert some.heard(4, b"4", b"cyd") == []
    assert some.comes(5, "") == [], "nobody is silent: it may be a member that dials again"
    assert some.heard(5, b"5", b"ann") == [0], "it is"
    assert some.comes(6, "") == []
    assert some.heard(6, b"6", b"dan") == [6], "one that is new is one too many"
    assert len(some) == 4


def test_a_key_that_must_go_goes_then_if_it_is_not_let_in_again() -> None:
    some = speaking(EVERYBODY, b"ann", b"eve", b"eve")
    some.comes(3, "")
    some.send_away(b"eve", 60.0)
    some.send_away(b"eve", 1.0)
    some.send_away(b"eve", 60.0)
    some.send_away(b"ann", 1.0)
    assert some.due(0.9, lambda key: False) == []
    assert some.due(1.0, lambda key: key == b"ann") == [1, 2]
    assert some.due(99.0, lambda key: False) == [], "once"
    assert some.silent() == [3]


def test_a_number_that_is_used_again_is_whose_name_came_last() -> None:
    """A frame of the connection that had it before may be read after the news of the new one."""
    some = speaking(EVERYBODY, b"eve")
    some.comes(0, "")
    assert some.silent() == [0] and some.heard(0, b"old", b"eve") == []
    some.heard(0, b"new", b"ann")
    for line in range(1, 1 + LINES_OF_KEY):
        some.comes(line, "")
        assert some.heard(line, b"%d" % line, b"eve") == [], "that one is none of hers any more"
    for line in range(1, 1 + LINES_OF_KEY):
        some.ends(line)
    some.send_away(b"eve", 0.0)
    assert some.due(1.0, lambda key: False) == []
    assert some.ends(0) == b"new" and some.ends(0) == b""
    assert some.heard(0, b"new", b"ann") == [], "last words"
    assert len(some) == 0


@pytest.mark.parametrize(("most", "room"), [(1024, 704), (100, 50), (-1, ROOM_MOST - 320)])
def test_members_take_no_descriptor_that_the_rest_needs(
    monkeypatch: pytest.MonkeyPatch, most: int, room: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (most, most))
    assert room_for_connections() == room


def test_the_end_of_a_connection_is_not_told_of_the_one_that_has_its_number_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be open, and in nobody's books."""
    news = [(zmq.EVENT_ACCEPTED, 9000), (zmq.EVENT_DISCONNECTED, 9000), (zmq.EVENT_ACCEPTED, 9000)]

    def next_news(monitor: object, flags: int) -> dict[str, int]:
        if not news:
            raise zmq.Again
        event, value = news.pop(0)
        return {"event": event, "value": value}

    came: list[int] = []

    def on_accepted(descriptor: int) -> list[int]:
        came.append(descriptor)
        return []

    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    socket = Listener(context, "members", load_or_create(tmp_path), "127.0.0.1", 0, on_accepted)
    monkeypatch.setattr(listener, "recv_monitor_message", next_news)
    ended, _ = socket.take_ended()
    assert (came, ended) == ([9000, 9000], []) and socket.is_open(9000)
    news.append((zmq.EVENT_DISCONNECTED, 9000))
    assert socket.take_ended()[0] == [9000]
    socket.close(0)
    context.destroy(linger=0)
