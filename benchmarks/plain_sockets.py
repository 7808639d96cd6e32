"""One node of an all-to-all over plain TCP sockets, unencrypted: what wan.py puts beside our rounds.

    python benchmarks/plain_sockets.py NUMBER ROUNDS PIECE_BYTES ADDRESS...

Started by wan.py on each host of a lab.  A scatter and then a gather, again and again: a piece to each of the others,
and one from each.  A node begins its gather when all of its scatter is here, as an owner of chunks does; it adds
nothing up, encodes nothing, and asks nobody whether it may.  One connection for each pair, kept from round to round.
Prints when each round began and ended, by the machine's clock, as JSON.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor

PORT = 7001
PATIENCE_S = 300.0
READY = b"!"


class Pair:
    """The connection to one other node; what is to leave leaves in order, beside what arrives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._leaving: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send)
        self._sender.start()

    def _send(self) -> None:
        while what := self._leaving.get():
            self._connection.sendall(what)

    def close(self) -> None:
        """When all has left."""
        self._leaving.put(b"")
        self._sender.join()

    def send(self, what: bytes) -> None:
        self._leaving.put(what)

    def receive(self, into: memoryview) -> None:
        while into:
            count = self._connection.recv_into(into)
            if not count:
                raise OSError("another node is gone")
            into = into[count:]


def connected(number: int, addresses: list[str]) -> dict[int, Pair]:
    """To all others: this node dials those before it, and those after it dial this one."""
    listener = socket.create_server((addresses[number], PORT))
    pairs: dict[int, Pair] = {}
    for other in range(number):
        connection = dial(addresses[other])
        connection.sendall(bytes([number]))
        pairs[other] = Pair(connection)
    while len(pairs) < len(addresses) - 1:
        connection, _ = listener.accept()
        pairs[connection.recv(1)[0]] = Pair(connection)
    return pairs


def dial(address: str) -> socket.socket:
    """The other one may not listen yet."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=None)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def all_to_all(readers: Executor, pairs: dict[int, Pair], piece: bytes, room: dict[int, bytearray]) -> None:
    arriving = [readers.submit(pair.receive, memoryview(room[other])) for other, pair in pairs.items()]
    for pair in pairs.values():
        pair.send(piece)
    for each in arriving:
        each.result()


def together(number: int, pairs: dict[int, Pair]) -> None:
    """Nobody goes on before all are here; the first node says when."""
    if number:
        pairs[0].send(READY)
        pairs[0].receive(memoryview(bytearray(1)))
        return
    for pair in pairs.values():
        pair.receive(memoryview(bytearray(1)))
    for pair in pairs.values():
        pair.send(READY)


def main() -> None:
    number, rounds, size = (int(word) for word in sys.argv[1:4])
    pairs = connected(number, sys.argv[4:])
    piece, room = bytes(size), {other: bytearray(size) for other in pairs}
    spans = []
    with ThreadPoolExecutor(len(pairs)) as readers:
        for _ in range(rounds):
            together(number, pairs)
            begin = time.monotonic()
            all_to_all(readers, pairs, piece, room)
            all_to_all(readers, pairs, piece, room)
            spans.append((begin, time.monotonic()))
    together(number, pairs)
    for pair in pairs.values():
        pair.close()
    print(json.dumps(spans))


if __name__ == "__main__":
    main()
