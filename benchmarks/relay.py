"""What the relay costs and keeps: CPU-seconds for each GB, memory, its rate, and how equally pairs share it.

    python benchmarks/relay.py [--gb 2] [--cap-mbit 100] [--pairs 3] [--seconds 8]

Two figures, each with the relay as it is shipped (a process of its own), and with DEALERs of libzmq as guests: CURVE
from end to end, and SOCKS5 as libzmq itself speaks it.  First one pair as fast as it goes, then several under a cap,
one of which has four times as many frames waiting.  Everything is on this machine, over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from dataclasses import dataclass

import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.reach.relays import Sign, Ticket, TicketScope, side_of, written
from farflung.coordinator.relay.relay_hand import RelayProcess
from farflung.coordinator.relay.relay_words import RelaySettings
from farflung.coordinator.roster.ways import pair_of
from farflung.protocol.process.sockets import Keys, Socket, curve_client, curve_raw, curve_server

RUN = TicketScope(b"r" * 16, 1)
FRAME_BYTES = 1 << 20
READY_S = 20.0


@dataclass
class Pair:
    name: bytes
    one: Socket  # sends
    other: Socket
    got_bytes: int = 0


class Rig:
    def __init__(self, bytes_per_s: float, pairs: int) -> None:
        key = Ed25519PrivateKey.generate()
        self._sign: Sign = key.sign
        public = key.public_key().public_bytes_raw()
        begin = RelaySettings(
            run_id=RUN.run_id, incarnation=1, public=public, host="127.0.0.1", port=0, bytes_per_s=bytes_per_s
        )
        self.relay = RelayProcess(begin, print)
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._keys = [(zmq.curve_keypair(), zmq.curve_keypair()) for _ in range(pairs)]
        self._names = [pair_of(curve_raw(a[0]), curve_raw(b[0])) for a, b in self._keys]
        self.relay.want(tuple(self._names))

    def __enter__(self) -> Rig:
        self._keeper.start()
        until = time.monotonic() + READY_S
        while self.relay.port is None and time.monotonic() < until:
            time.sleep(0.01)
        self.pairs = [self._pair(*keys, name) for keys, name in zip(self._keys, self._names, strict=True)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._keeper.join()
        self._context.destroy(linger=0)
        self.relay.close()

    def _keep(self) -> None:
        while not self._stop.wait(0.05):
            for _ in self.relay.receive(time.monotonic()):
                pass

    def _pair(self, mine: Keys, theirs: Keys, name: bytes) -> Pair:
        return Pair(
            name, self._end(mine, curve_raw(theirs[0]), name), self._end(theirs, curve_raw(mine[0]), name)
        )

    def _end(self, keys: Keys, other: bytes, name: bytes) -> Socket:
        socket, mine = self._context.socket(zmq.DEALER), curve_raw(keys[0])
        socket.set_hwm(4)
        options = curve_server(keys[1]) if mine < other else curve_client(keys, other)
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.setsockopt_string(zmq.SOCKS_PROXY, f"127.0.0.1:{self.relay.port}")
        ticket = Ticket(name, side_of(mine, other), int(time.monotonic()) + 600)
        socket.connect(f"tcp://{written(ticket, RUN, self._sign)}:1")
        return socket

    @property
    def cpu_s(self) -> float:
        """By the scheduler's word: ticks of the clock say too much of who wakes up with them.  It has one thread."""
        with open(f"/proc/{self.relay.pid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9

    @property
    def resident_mb(self) -> float:
        with open(f"/proc/{self.relay.pid}/status") as file:
            [line] = [each for each in file if each.startswith("VmHWM")]
        return int(line.split()[1]) / 1024


def one_pair(gb: float) -> dict[str, float]:
    payload, count = os.urandom(FRAME_BYTES), max(1, round(gb * 1e9 / FRAME_BYTES))
    with Rig(12.5e9, 1) as rig:
        [pair] = rig.pairs
        pair.other.send(b"hello")
        pair.one.recv()
        trips = []
        for _ in range(200):
            begun = time.monotonic()
            pair.other.send(b"x")
            pair.one.recv()
            pair.one.send(b"y")
            pair.other.recv()
            trips.append(time.monotonic() - begun)
        before, begun = rig.cpu_s, time.monotonic()
        sender = threading.Thread(target=lambda: [pair.one.send(payload, copy=False) for _ in range(count)])
        sender.start()
        for _ in range(count):
            pair.other.recv(copy=False)
        took_s = time.monotonic() - begun
        sender.join()
        moved = count * FRAME_BYTES / 1e9
        return {
            "gb": round(moved, 2),
            "mbit_per_s": round(8e3 * moved / took_s),
            "cpu_s_per_gb": round((rig.cpu_s - before) / moved, 3),
            "resident_mb": round(rig.resident_mb, 1),
            "round_trip_us": round(1e6 * statistics.median(trips)),
        }


def under_a_cap(mbit: float, pairs: int, seconds: float) -> dict[str, object]:
    payload = os.urandom(FRAME_BYTES // 4)
    with Rig(mbit * 1e6 / 8, pairs) as rig:
        stop = threading.Event()

        def send(pair: Pair, frames: int) -> None:
            while not stop.is_set():
                for _ in range(frames):
                    if not pair.one.poll(50, zmq.POLLOUT):
                        break
                    pair.one.send(payload, zmq.NOBLOCK)

        def receive(pair: Pair) -> None:
            while not stop.is_set():
                if pair.other.poll(50):
                    pair.got_bytes += len(pair.other.recv())

        threads = [threading.Thread(target=receive, args=(pair,)) for pair in rig.pairs]
        threads += [
            threading.Thread(target=send, args=(pair, 4 if number == 0 else 1))
            for number, pair in enumerate(rig.pairs)
        ]
        for each in threads:
            each.start()
        time.sleep(2.0)  # what was saved up while nobody was there is through, and all buffers are full
        before, cpu_s, begun = [pair.got_bytes for pair in rig.pairs], rig.cpu_s, time.monotonic()
        time.sleep(seconds)
        got = [pair.got_bytes - was for pair, was in zip(rig.pairs, before, strict=True)]
        took_s, cpu_s = time.monotonic() - begun, rig.cpu_s - cpu_s
        stop.set()
        for each in threads:
            each.join()
        return {
            "cap_mbit_per_s": mbit,
            "mbit_per_s": round(8e-6 * sum(got) / took_s, 1),
            "shares_of_equal": [round(each * pairs / sum(got), 3) for each in got],
            "cpu_s_per_gb": round(cpu_s / (sum(got) / 1e9), 3),
            "resident_mb": round(rig.resident_mb, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--cap-mbit", type=float, default=100.0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    asked = parser.parse_args()
    print(json.dumps({"one pair": one_pair(asked.gb)}))
    print(json.dumps({"under a cap": under_a_cap(asked.cap_mbit, asked.pairs, asked.seconds)}))


if __name__ == "__main__":
    main()
