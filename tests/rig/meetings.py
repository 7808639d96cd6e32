"""Two links that meet again and again past their routers (routers.py), without the rest of a run.

    python -m rig.meetings host PORT COUNT APART_S # at the host: tells each the other's address, and the instant
    python -m rig.meetings end HOST PORT COUNT     # in a home: prints what came of each instant, a line of JSON

`met_in(homes, count)` runs all three.  An end is a real link, with a new port and key each time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import zmq

from farflung.collectives.link.link import Appointment
from farflung.collectives.link.zmq_link import ZmqLink
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.process.sockets import curve_raw
from farflung.protocol.round_words import Contact
from rig.routers import HOST, Homes, rig_path

PORT = 7000
LEAD_S = 0.3
PATIENCE_S = 4.0
_TAG = b"run-tag!"


def met_in(homes: Homes, count: int, apart_s: float = 0.0) -> list[dict[str, Any]]:
    """What each end says of each time: `seconds` from the instant until a frame had come, None where none did.

    `apart_s`: by so much the instants of both differ, as if they read their clocks wrongly."""
    script = [sys.executable, "-m", "rig.meetings"]
    env = os.environ | {"PYTHONPATH": rig_path()}
    homes.popen(HOST, [*script, "host", str(PORT), str(count), str(apart_s)], env=env)
    ends = [
        homes.popen(
            name,
            [*script, "end", homes.host_address, str(PORT), str(count)],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for name in homes.names
    ]
    said = [end.communicate(timeout=30 + count * (PATIENCE_S + 1))[0] for end in ends]
    return [json.loads(line) for each in said for line in each.splitlines()]


def host(port: int, count: int, apart_s: float) -> None:
    with socket.create_server(("0.0.0.0", port)) as server:
        for _ in range(count):
            guests = [server.accept() for _ in range(2)]
            words = [json.loads(guest.makefile().readline()) for guest, _ in guests]
            at = time.monotonic() + LEAD_S  # all of them are on one machine, and have one clock
            for (guest, _), (_, other), word in zip(guests, reversed(guests), reversed(words), strict=True):
                told = {"endpoint": f"{other[0]}:{other[1]}", "key": word["key"], "at": at}
                at += apart_s  # of the second one
                guest.sendall((json.dumps(told) + "\n").encode())
            for guest, _ in guests:
                guest.close()


def meet_once(address: tuple[str, int]) -> dict[str, Any]:
    keys = zmq.curve_keypair()
    link = ZmqLink(keys)
    link.expect("me", _TAG, 1 << 16)
    with socket.socket() as shown:
        shown.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shown.bind(("0.0.0.0", link.meeting_port("0.0.0.0")))
        while shown.connect_ex(address):
            time.sleep(0.05)  # it is about to listen
        shown.sendall((json.dumps({"key": curve_raw(keys[0]).hex()}) + "\n").encode())
        told = json.loads(shown.makefile().readline())
    link.set_contacts([Contact("other", "other", bytes.fromhex(told["key"]), "")])
    link.set_appointments({"other": Appointment(told["endpoint"], told["at"])})
    link.send("other", with_payload(Header(Kind.CONTRIBUTION, _TAG, round_no=1), b"here I am"))
    came: float | None = None
    ends_at = told["at"] + PATIENCE_S
    while time.monotonic() < ends_at:
        poller = zmq.Poller()
        for each, events in link.sockets():
            poller.register(each, events)
        poller.poll(1000 * min(0.02, link.idle_s()))
        for _, frame in link.receive():
            if isinstance(frame, Frame) and came is None:
                came = time.monotonic()
                ends_at = min(ends_at, came + 0.3)  # what I sent is to arrive, too
        link.on_tick()
        link.flush()
    tries = link.lines["other"].tries
    link.close()
    return {"seconds": None if came is None else round(came - told["at"], 3), "tries": tries}


if __name__ == "__main__":
    if sys.argv[1] == "host":
        host(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        for _ in range(int(sys.argv[4])):
            print(json.dumps(meet_once((sys.argv[2], int(sys.argv[3])))), flush=True)
