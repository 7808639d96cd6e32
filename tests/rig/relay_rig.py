"""A relay as a coordinator has it, and guests of it: for tests and benchmarks of the relay.

with RelayRig(12.5e6) as rig:
    ticket = rig.ticket(mine, theirs)         # two keys of 32 bytes
    rig.want((mine, theirs))
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.collectives.link.link import Relayed
from farflung.coordinator.reach.relays import Sign, Ticket, TicketScope, side_of, written
from farflung.coordinator.relay.relay_hand import RelayProcess
from farflung.coordinator.relay.relay_words import PairsCounted, RelaySettings
from farflung.coordinator.roster.ways import pair_of
from farflung.protocol.process.child import Spawn, started
from rig.waiting import eventually

RUN = TicketScope(b"r" * 16, 1)
GREETING, CHOSEN, JOINED = b"\x05\x01\x00", b"\x05\x00", b"\x05\x00\x00\x01" + bytes(6)
LOOK_S = 0.02
TICKET_S = 600.0


class RelayRig:
    def __init__(self, bytes_per_s: float = 1.25e9, spawn: Spawn = started) -> None:
        key = Ed25519PrivateKey.generate()
        self.sign: Sign = key.sign
        self.public = key.public_key().public_bytes_raw()
        self.relay = ""  # for which relay tickets are: the coordinator's, or that of somebody by this name
        self.at = 0  # where guests go, if not to this relay
        begin = RelaySettings(
            run_id=RUN.run_id,
            incarnation=RUN.incarnation,
            public=self.public,
            host="127.0.0.1",
            port=0,
            bytes_per_s=bytes_per_s,
        )
        self.notes: list[str] = []
        self.said: list[PairsCounted] = []
        self.process = RelayProcess(begin, self.notes.append, spawn)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper")

    def __enter__(self) -> RelayRig:
        self._keeper.start()
        eventually(lambda: self.process.port, "the relay listens")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._keeper.join()
        self.process.close()

    def _keep(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._lock:
                self.said += self.process.receive(time.monotonic())

    @property
    def port(self) -> int:
        assert self.process.port is not None
        return self.process.port

    @property
    def moved_bytes(self) -> int:
        return sum(each.moved_bytes for each in self.said)

    @property
    def refused(self) -> int:
        return sum(each.refused for each in self.said)

    def want(self, *pairs: tuple[bytes, bytes]) -> None:
        with self._lock:
            self.process.want(tuple(pair_of(*pair) for pair in pairs))

    def ticket(self, mine: bytes, theirs: bytes, lasts_s: float = TICKET_S) -> str:
        until_s = int(time.monotonic() + lasts_s)
        run = replace(RUN, relay=self.relay)
        return written(Ticket(pair_of(mine, theirs), side_of(mine, theirs), until_s), run, self.sign)

    @staticmethod
    def pair(mine: bytes, theirs: bytes) -> bytes:
        return pair_of(mine, theirs)

    def way(self, mine: bytes, theirs: bytes) -> Relayed:
        return Relayed(f"127.0.0.1:{self.port}", self.ticket(mine, theirs))

    # ---- guests without libzmq ---------------------------------------------------------------------------------

    def guest(self, name: str, patience_s: float = 20.0) -> socket.socket:
        """It has asked for this name, and nothing has come of that yet."""
        connection = socket.create_connection(("127.0.0.1", self.at or self.port), patience_s)
        connection.sendall(GREETING)
        assert connection.recv(2, socket.MSG_WAITALL) == CHOSEN
        connection.sendall(b"\x05\x01\x00\x03" + bytes((len(name),)) + name.encode() + b"\x00\x01")
        return connection

    def joined(self, mine: bytes, theirs: bytes) -> tuple[socket.socket, socket.socket]:
        ends = self.guest(self.ticket(mine, theirs)), self.guest(self.ticket(theirs, mine))
        for each in ends:
            assert each.recv(len(JOINED), socket.MSG_WAITALL) == JOINED
        return ends
