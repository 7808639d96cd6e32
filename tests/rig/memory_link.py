"""A link (collectives/link/link.py) within one process: for tests of whoever uses a link, without ZeroMQ.

`Wire` stands for the network.  Each link has a plain socket as its doorbell, so that a poller wakes up.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import zmq

from farflung.collectives.link.frame_queue import Backlog, Intake, Rank, Sharing
from farflung.collectives.link.link import Appointment, FrameCounts, MovedBytes, Pollable, Relayed
from farflung.collectives.link.rates import Pacer
from farflung.protocol.frames import CORE_KINDS, Frame, Kinds, Payload, Spoiled
from farflung.protocol.round_words import Contact

INBOX_FRAMES = 16  # more than that waits at its sender
FRAMES_PER_TURN = 8
NEWS_BYTES = 16384
UNREACHED_AFTER_S = 2.5
AGAIN_S = 0.005


class Wire:
    def __init__(self) -> None:
        self.listening: dict[str, MemoryLink] = {}  # by address
        self.dialled: dict[bytes, MemoryLink] = {}  # who can't be dialled and has dialled the others, by key

    def way_to(self, contact: Contact) -> MemoryLink | None:
        link = self.listening.get(contact.address) if contact.address else self.dialled.get(contact.key)
        return link if link is not None and link.key == contact.key else None


class MemoryLink:
    def __init__(self, wire: Wire, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.upload, self.download = Pacer(None), Pacer(None)
        self._wire, self._clock = wire, clock
        self._intake, self._sharing = Intake(), Sharing()
        self._me = self._address = ""
        self._contacts: dict[str, Contact] = {}
        self._backlogs: dict[str, Backlog] = {}
        self._stuck_since: dict[str, float] = {}
        self._inbox: deque[tuple[bytes, tuple[Payload, ...]]] = deque()
        self._came: dict[str, int] = {}
        self._door, self._bell = socket.socketpair()
        self._door.setblocking(False)
        self._bell.setblocking(False)

    @property
    def counts(self) -> FrameCounts:
        return self._intake.counts

    def listen(self, host: str, port: int) -> int:
        port = port or 1 + len(self._wire.listening)
        self._address = f"{host}:{port}"
        self._wire.listening[self._address] = self
        return port

    def expect(self, me: str, run_tag: bytes, payload_max: int, kinds: Kinds = CORE_KINDS) -> None:
        self._me = me
        self._intake.expect(run_tag, payload_max, kinds)

    def set_ways(self, ways: Mapping[str, Relayed]) -> None:
        """The wire joins everybody with everybody."""

    def meeting_port(self, host: str) -> int:
        return 0

    def set_appointments(self, appointments: Mapping[str, Appointment]) -> None:
        """As with ways."""

    def punched(self) -> frozenset[str]:
        return frozenset()

    def set_contacts(self, roster: Iterable[Contact]) -> None:
        before, self._contacts = self._contacts, {each.peer: each for each in roster if each.peer != self._me}
        kept = {
            peer for peer, each in self._contacts.items() if peer in before and before[peer].key == each.key
        }
        self._backlogs = {p: self._backlogs[p] if p in kept else Backlog() for p in self._contacts}
        self._stuck_since = {peer: at for peer, at in self._stuck_since.items() if peer in kept}
        self._wire.dialled[self.key] = self

    def limit(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        self.upload.set_rate(self._clock(), up_bytes_per_s)
        self.download.set_rate(self._clock(), down_bytes_per_s)

    def close(self) -> None:
        self._backlogs.clear()
        self._contacts.clear()
        self._inbox.clear()
        self._wire.listening.pop(self._address, None)
        self._wire.dialled.pop(self.key, None)
        self._door.close()
        self._bell.close()

    def sockets(self) -> Iterator[tuple[Pollable, int]]:
        if not self.download.wait_s(self._clock()):
            yield self._door, zmq.POLLIN

    def idle_s(self) -> float:
        now = self._clock()
        if self._inbox:
            return self.download.wait_s(now)
        return max(AGAIN_S, self.upload.wait_s(now)) if self.peers_waiting() else 60.0

    def on_tick(self) -> None:
        self.flush()

    def send(self, peer: str, frame: Frame) -> bool:
        if peer not in self._contacts:
            return False
        self._backlogs[peer].put(frame.header.pack(), frame)
        self.flush()
        return True

    def flush(self) -> None:
        able = deque(peer for peer, backlog in self._backlogs.items() if len(backlog))
        while able and not self.upload.wait_s(self._clock()) > 0:  # a frame of each in turn
            words, crossings, bulk = (
                [peer for peer in able if self._backlogs[peer].has(rank)] for rank in Rank
            )
            rank = Rank.WORD if words else self._sharing.next(bool(crossings), bool(bulk))
            peer = (words or (crossings if rank == Rank.CROSSING else bulk))[0]
            able.remove(peer)
            if self._let_go(peer, rank) and len(self._backlogs[peer]):
                able.append(peer)

    def _let_go(self, peer: str, rank: Rank) -> bool:
        now, first = self._clock(), self._backlogs[peer].first(rank)
        if first is None:
            return False
        other = self._wire.way_to(self._contacts[peer])
        if other is None:
            self._stuck_since.setdefault(peer, now)
            return False
        self._stuck_since.pop(peer, None)
        if not other.deliver(self.key, first.header, first.payload):
            return False
        self._backlogs[peer].drop_first(rank)
        self._sharing.took(rank, first.size)
        self.upload.take(now, first.size)
        self.counts.sent_bytes += first.size
        return True

    def forget_rounds_before(self, round_no: int) -> None:
        for backlog in self._backlogs.values():
            backlog.forget_rounds_before(round_no)

    def deliver(self, key: bytes, *parts: Payload) -> bool:
        """From whoever has proven this key."""
        if len(self._inbox) >= INBOX_FRAMES:
            return False
        self._inbox.append((key, parts))
        with contextlib.suppress(BlockingIOError):
            self._bell.send(b"!")
        return True

    def receive(self) -> Iterator[tuple[str, Frame | Spoiled]]:
        with contextlib.suppress(BlockingIOError):
            self._door.recv(4096)
        names = {each.key: peer for peer, each in self._contacts.items()}
        for _ in range(min(FRAMES_PER_TURN, len(self._inbox))):
            if self.download.wait_s(self._clock()) > 0:
                return
            key, parts = self._inbox.popleft()
            size = sum(map(len, parts))
            self.download.take(self._clock(), size)
            self._intake.on_bytes(size)
            if key not in names:
                self._intake.stranger()
                continue
            self._came[names[key]] = self._came.get(names[key], 0) + size
            whole = len(parts) == 2
            yield (
                names[key],
                self._intake.frame_of(bytes(parts[0]), parts[1]) if whole else self._intake.unreadable(),
            )

    def unmet(self) -> set[str]:
        return set()  # it has no relays

    def unreached(self) -> set[str]:
        return {peer for peer, at in self._stuck_since.items() if self._clock() - at >= UNREACHED_AFTER_S}

    def arriving(self) -> set[str]:
        named = {peer for peer, size in self._came.items() if size >= NEWS_BYTES}
        self._came = {peer: size for peer, size in self._came.items() if peer not in named}
        return named

    def answers_waiting(self, peer: str) -> int:
        return self._backlogs[peer].answers if peer in self._backlogs else 0

    def peers_waiting(self) -> int:
        return sum(len(each) > 0 for each in self._backlogs.values())

    def waiting_bytes(self) -> int:
        return self.peers_waiting()

    def moved(self) -> MovedBytes:
        return MovedBytes(self.counts.sent_bytes, self.counts.arrived_bytes)

    def probe(self) -> None:
        pass

    def probed_bytes_per_s(self) -> float | None:
        return None
