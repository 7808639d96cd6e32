"""A relay that somebody offers is tried: bytes must come through, and come through as they were."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from farflung.coordinator.relay import relay_hand
from farflung.coordinator.relay.relay_hand import Trials
from farflung.coordinator.relay.socks import CHOSEN, JOINED
from farflung.coordinator.roster.ways import Trial
from rig.in_thread import InThread
from rig.relay_rig import RelayRig
from rig.waiting import eventually

ONE, OTHER = b"1" * 32, b"2" * 32


def outcome(trial: Trial) -> str:
    shell = Trials()
    shell.begin(trial, time.monotonic())
    found: list[tuple[Trial, str]] = []

    def over() -> bool:
        found.extend(shell.turn(time.monotonic()))
        return bool(found)

    eventually(over, "the trial ends")
    shell.close()
    assert found[0][0] == trial
    return found[0][1]


def trial_at(port: int, *tickets: str) -> Trial:
    mine, theirs = tickets or ("a" * 115, "b" * 115)
    return Trial("peer", ONE, "127.0.0.1", port, (mine, theirs))


def test_bytes_come_through_a_relay_that_knows_its_pair() -> None:
    with RelayRig(spawn=InThread) as rig:
        tickets = rig.ticket(ONE, OTHER), rig.ticket(OTHER, ONE)
        assert "refused" in outcome(trial_at(rig.port, *tickets)), "nobody told it of this pair"
        rig.want((ONE, OTHER))
        eventually(lambda: outcome(trial_at(rig.port, *tickets)) == "", "it has heard of it")


def test_where_nobody_listens_there_is_no_relay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "Connection refused" in outcome(trial_at(port))


class Impostor:
    """Takes both tickets, and does something else than a relay."""

    def __init__(self, does: str) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._does = does
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._thread.join()

    def _serve(self) -> None:
        guests = [self._server.accept()[0] for _ in range(2)]
        for guest in guests:
            guest.recv(3, socket.MSG_WAITALL)
            guest.sendall(CHOSEN)
        for guest in guests:
            guest.recv(5 + 115 + 2, socket.MSG_WAITALL)
            guest.sendall(JOINED)
        came = [guest.recv(4096, socket.MSG_WAITALL) for guest in guests]
        if self._does == "echoes":
            for guest, data in zip(guests, came, strict=True):
                guest.sendall(data)
        elif self._does == "damages":
            for guest, data in zip(guests, reversed(came), strict=True):
                guest.sendall(data[:-1] + bytes((data[-1] ^ 1,)))
        for guest in guests:
            with contextlib.suppress(OSError), guest:
                guest.recv(1)  # until the trial is over


@pytest.mark.parametrize(
    ("does", "why"),
    [("echoes", "not what went in"), ("damages", "not what went in"), ("drops", "no bytes came through")],
)
def test_whoever_only_looks_like_a_relay_is_none(
    does: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_hand, "TRIAL_S", 0.5 if does == "drops" else 60.0)
    with Impostor(does) as impostor:
        assert why in outcome(trial_at(impostor.port))


def test_so_many_at_once_and_the_others_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_hand, "TRIAL_S", 0.2)
    shell, over = Trials(), []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        for _ in range(relay_hand.AT_ONCE + 3):
            shell.begin(trial_at(port), time.monotonic())
        assert len(shell._open) == relay_hand.AT_ONCE
        eventually(lambda: over.extend(shell.turn(time.monotonic())) or len(over) == 11, "all are over")
    assert not shell._open and not shell._queue
