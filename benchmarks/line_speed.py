"""What one line carries where nothing limits it: two links over loopback, encrypted, each with a core to itself.

    python benchmarks/line_speed.py [--mb 400] [--chunk-mb 4] [--times 5] [--json]

Two processes with the agent's real link (collectives/link/): one gives the other frames with chunks of a vector in
fp32, as a scatter does, and both check what they are asked to check in a round: the sender hashes each chunk, and the
receiver opens it and compares.  Nothing is encoded or summed.  `per core`: payload over the processor's seconds of the
busier one of the two.  The median over the times is what counts; the first one makes the connection.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import zmq

from farflung.collectives.link.zmq_link import ZmqLink
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.process.sockets import curve_raw
from farflung.protocol.round_words import Contact

TAG, HOST = b"run-tag!", "127.0.0.1"
SENDER, RECEIVER = "sender", "receiver"
TURN_MS, TICK_S = 50, 0.1
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Went:
    """One vector, over the line."""

    seconds: float
    gbit_per_s: float
    sender_cpu_s: float
    receiver_cpu_s: float
    gbit_per_core_s: float


class End:
    """One of the two, with a loop as the agent has it."""

    def __init__(self, name: str, other: str, told: Connection, payload_max: int) -> None:
        keys = zmq.curve_keypair()
        self.link = ZmqLink(keys)
        self.link.expect(name, TAG, payload_max)
        port = self.link.listen(HOST, 0)
        mine = Contact(name, name, curve_raw(keys[0]), f"{HOST}:{port}")
        told.send(mine)
        self.link.set_contacts([mine, told.recv()])
        self.other = other
        self._tick_at = 0.0

    def turn(self) -> list[Frame]:
        poller = zmq.Poller()
        for each, events in self.link.sockets():
            poller.register(each, events)
        poller.poll(TURN_MS)
        # A damaged one is no frame, and the vector never whole: that is seen as lateness.
        came = [each for _, each in self.link.receive() if isinstance(each, Frame)]
        self.link.flush()
        if (now := time.monotonic()) >= self._tick_at:
            self._tick_at = now + TICK_S
            self.link.on_tick()
        return came


def receive(told: Connection, mb: int, chunk_mb: int, times: int) -> None:
    """The receiver's process: says after each vector what it cost it."""
    end = End(RECEIVER, SENDER, told, chunk_mb << 20)
    for _ in range(times):
        cpu_s, left = time.process_time(), mb << 20
        while left > 0:
            left -= sum(len(frame.payload) for frame in end.turn())
        told.send(time.process_time() - cpu_s)
    told.recv()  # so that nothing is closed under the sender
    end.link.close()


def give(end: End, told: Connection, vector: memoryview, chunk_bytes: int, round_no: int) -> Went:
    began, cpu_s = time.monotonic(), time.process_time()
    for chunk, first in enumerate(range(0, len(vector), chunk_bytes)):
        header = Header(Kind.CONTRIBUTION, TAG, round_no=round_no, chunk=chunk)
        end.link.send(end.other, with_payload(header, vector[first : first + chunk_bytes]))
        end.link.flush()
    while not told.poll():
        end.turn()
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"of {len(vector)} bytes not all were there after {PATIENCE_S:g} s")
    seconds, mine_s, its_s = time.monotonic() - began, time.process_time() - cpu_s, float(told.recv())
    gbit = 8e-9 * len(vector)
    return Went(seconds, gbit / seconds, mine_s, its_s, gbit / max(mine_s, its_s))


def measure(mb: int, chunk_mb: int, times: int) -> list[Went]:
    spawn = multiprocessing.get_context("spawn")
    told, its = spawn.Pipe()
    other = spawn.Process(target=receive, args=(its, mb, chunk_mb, 1 + times))
    other.start()
    try:
        end = End(SENDER, RECEIVER, told, chunk_mb << 20)
        vector = memoryview(bytes(range(256)) * (mb << 12))
        went = [give(end, told, vector, chunk_mb << 20, number) for number in range(1, 2 + times)]
        told.send(None)
        end.link.close()
        other.join(PATIENCE_S)
    finally:
        if other.is_alive():
            other.kill()
    return went[1:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--chunk-mb", type=int, default=4)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    went = measure(asked.mb, asked.chunk_mb, asked.times)
    if asked.json:
        print(json.dumps([asdict(each) for each in went]))
        return 0
    for each in went:
        print(
            f"{each.seconds:.2f} s, {each.gbit_per_s:.1f} Gbit/s; CPU {each.sender_cpu_s:.2f} and"
            f" {each.receiver_cpu_s:.2f} s, {each.gbit_per_core_s:.1f} Gbit/s per core"
        )
    middle = [
        statistics.median(getattr(each, of) for each in went) for of in ("gbit_per_s", "gbit_per_core_s")
    ]
    print(f"median {middle[0]:.1f} Gbit/s, {middle[1]:.1f} per core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
