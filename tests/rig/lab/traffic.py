"""Traffic between hosts of a lab: a TCP stream and a UDP echo, to be run inside the hosts.

    traffic.py sink PORT                     takes streams; a line `{"from", "bytes", "seconds"}` as each one ends
    traffic.py source ADDRESS PORT SECONDS [SKIP]
    traffic.py echo PORT                     sends every datagram back
    traffic.py ping ADDRESS PORT COUNT       a line `{"rtt_ms": [...]}`; null for an answer that took over half a second

The sink counts from SKIP seconds after the first byte, so that slow start is left out. Both servers print `ready`.
Used by benchmarks/lab_measure.py and by tests/lab/; it knows nothing of the lab.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time

HEADER = struct.Struct("!d")
PIECE_BYTES = 1 << 20
PING_TIMEOUT_S = 0.5


def say(value: object) -> None:
    print(value if isinstance(value, str) else json.dumps(value), flush=True)


def sink(port: int) -> None:
    with socket.create_server(("", port)) as server:
        say("ready")
        while True:
            stream, (address, _) = server.accept()
            threading.Thread(target=count, args=(stream, address), daemon=True).start()


def count(stream: socket.socket, address: str) -> None:
    (skip_s,) = HEADER.unpack(stream.recv(HEADER.size, socket.MSG_WAITALL))
    space = memoryview(bytearray(PIECE_BYTES))
    started_s = time.monotonic()
    since_s = last_s = started_s
    total_bytes = 0
    while got := stream.recv_into(space):
        last_s = time.monotonic()
        if last_s - started_s < skip_s:
            since_s = last_s
        else:
            total_bytes += got
    say({"from": address, "bytes": total_bytes, "seconds": last_s - since_s})


def source(address: str, port: int, seconds: float, skip_s: float) -> None:
    piece = bytes(PIECE_BYTES)
    with socket.create_connection((address, port)) as stream:
        stream.sendall(HEADER.pack(skip_s))
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            stream.send(piece)


def echo(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", port))
        say("ready")
        while True:
            server.sendto(*server.recvfrom(2048))


def ping(address: str, port: int, times: int) -> None:
    rtt_ms: list[float | None] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(PING_TIMEOUT_S)
        asking.connect((address, port))
        for number in range(times):
            started_s = time.monotonic()
            asking.send(b"%d" % number)
            try:
                while asking.recv(64) != b"%d" % number:
                    pass  # an answer that came too late
                rtt_ms.append(1e3 * (time.monotonic() - started_s))
            except TimeoutError:
                rtt_ms.append(None)
    say({"rtt_ms": rtt_ms})


def main(what: str, *words: str) -> None:
    if what == "sink":
        sink(int(words[0]))
    elif what == "source":
        source(words[0], int(words[1]), float(words[2]), float(words[3]) if len(words) > 3 else 0.0)
    elif what == "echo":
        echo(int(words[0]))
    elif what == "ping":
        ping(words[0], int(words[1]), int(words[2]))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
