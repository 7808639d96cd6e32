"""How good the line to the coordinator is: the way there and back, and bytes per second in both directions.

Called by `farflung doctor`.  What it measures is the line to that one machine, and at most what that machine gives to
strangers: a line may carry more.
"""

from __future__ import annotations

import statistics
import time

from farflung.console.doctor.advice import LineToCoordinator
from farflung.console.screen.status_client import StatusClient
from farflung.protocol.errors import Refused
from farflung.protocol.limits import CONTROL_BIN_BYTES
from farflung.protocol.messages import Probe, Probed

PINGS = 5
PIECE_BYTES = CONTROL_BIN_BYTES - 1024
FIRST_PIECES, MORE_PIECES = 4, 24
LONG_ENOUGH_S = 0.5  # a transfer that took so long says something
PATIENCE_S = 20.0  # for one piece: 10 kB/s


def measure(client: StatusClient) -> LineToCoordinator:
    """Takes some seconds on a slow line."""
    took, probed = [], Probed(came_from="", wall_s=0.0, padding=b"", dialled="")
    for _ in range(PINGS):
        begun = time.monotonic()
        probed = client.ask(_probe(0, 0), Probed, PATIENCE_S)
        took.append(time.monotonic() - begun)
    ahead_s = time.time() - probed.wall_s - min(took) / 2
    up, up_bounded = _rate(client, up=True)
    down, down_bounded = _rate(client, up=False)
    return LineToCoordinator(
        statistics.median(took),
        up,
        down,
        probed.came_from.removeprefix("::ffff:"),
        ahead_s,
        up_bounded or down_bounded,
    )


def _rate(client: StatusClient, up: bool) -> tuple[float, bool]:
    """(bytes per second, whether the coordinator had no more to give)."""
    rate, took_s = 0.0, 0.0
    for pieces in (FIRST_PIECES, MORE_PIECES):
        begun = time.monotonic()
        question = _probe(PIECE_BYTES, 0) if up else _probe(0, PIECE_BYTES)
        try:
            client.ask_all([question] * pieces, Probed, PATIENCE_S)
        except Refused:
            if rate == 0.0:
                raise
            client.forget()  # answers to the other pieces may still come
            return rate, True
        took_s = time.monotonic() - begun
        rate = pieces * PIECE_BYTES / took_s
        if took_s >= LONG_ENOUGH_S:
            break
    return rate, took_s < LONG_ENOUGH_S  # so fast that the machines, not the line, were measured


def _probe(padding_bytes: int, want_bytes: int) -> Probe:
    return Probe(padding=bytes(padding_bytes), want=want_bytes, address="", key=b"")
