"""A router that opens ports when it is asked by PCP or NAT-PMP: for tests, on loopback or in a home's router.

    with FakeRouter(knows=("pcp",)) as router: ...           # on loopback, at `router.port`
    python -m rig.fake_router LISTEN OUTSIDE                 # in a router's namespace: it forwards by nft

It keeps what it was asked for in `ports`: inside -> (host, outside, lifetime).
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

PORT = 5351
OUTSIDE = "203.0.113.9"
PCP, PMP = "pcp", "nat-pmp"

Forward = Callable[[str, int, int], None]  # (to whom, its port, the port outside; 0: no more)


@dataclass
class FakeRouter:
    knows: Collection[str] = (PCP, PMP)
    outside: str = OUTSIDE
    result: int = 0  # of each question for a port: not 0 is no
    other_port: int = 0  # it gives this one, whatever is suggested
    silent: bool = False
    lifetime_s: int = 0  # 0: what is asked for
    listen: tuple[str, int] = ("127.0.0.1", 0)
    forward: Forward = lambda host, inside, outside: None
    ports: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    heard: int = 0

    def __post_init__(self) -> None:
        self._line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._line.bind(self.listen)
        self._over = False
        self._thread = threading.Thread(target=self.serve, daemon=True)

    @property
    def port(self) -> int:
        return int(self._line.getsockname()[1])

    def __enter__(self) -> FakeRouter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._line.getsockname())
        self._thread.join()
        self._line.close()

    def serve(self) -> None:
        while not self._over:
            raw, guest = self._line.recvfrom(2048)
            self.heard += 1
            answer = b"" if self.silent else self._answer(raw, guest[0])
            if answer:
                self._line.sendto(answer, guest)

    def _answer(self, raw: bytes, guest: str) -> bytes:
        if raw[:1] == b"\x02":
            return self._pcp(raw, guest) if PCP in self.knows else struct.pack(">BBHI", 0, 0x81, 1, 7)
        if PMP not in self.knows:
            return b""
        if raw == b"\x00\x00":
            return struct.pack(">BBHI4s", 0, 0x80, 0, 7, socket.inet_aton(self.outside))
        if len(raw) == 12 and raw[1] == 2:
            _, _, _, inside, wanted, lifetime_s = struct.unpack(">BBHHHI", raw)
            if self.result:
                return struct.pack(">BBHIHHI", 0, 0x82, self.result, 7, inside, 0, 0)
            given, kept_s = self._map(guest, inside, wanted, lifetime_s)
            return struct.pack(">BBHIHHI", 0, 0x82, 0, 7, inside, given, kept_s)
        return b""

    def _pcp(self, raw: bytes, guest: str) -> bytes:
        lifetime_s = int.from_bytes(raw[4:8], "big")
        nonce, protocol, inside, wanted = struct.unpack(">12sB3xHH", raw[24:44])
        given, kept_s = (0, 0) if self.result else self._map(guest, inside, wanted, lifetime_s)
        head = struct.pack(">BBBBII12x", 2, 0x81, 0, self.result, kept_s, 7)
        host = bytes(10) + b"\xff\xff" + socket.inet_aton(self.outside)
        return head + struct.pack(">12sB3xHH16s", nonce, protocol, inside, given, host)

    def _map(self, guest: str, inside: int, wanted: int, lifetime_s: int) -> tuple[int, int]:
        if not lifetime_s:
            if self.ports.pop(inside, None) is not None:
                self.forward(guest, inside, 0)
            return 0, 0
        given, kept_s = self.other_port or wanted, self.lifetime_s or lifetime_s
        if inside not in self.ports:
            self.forward(guest, inside, given)
        self.ports[inside] = guest, given, kept_s
        return given, kept_s


def by_nft(host: str, inside: int, outside: int) -> None:
    rules = (
        [
            "add chain ip nat pre { type nat hook prerouting priority -100; }",
            f'add rule ip nat pre iifname "wan" tcp dport {outside} dnat to {host}:{inside}',
            "insert rule ip filter forward ct status dnat accept",
        ]
        if outside
        else ["flush chain ip nat pre"]
    )
    subprocess.run(["nft", "-f", "-"], input="\n".join(rules), text=True, check=True)


if __name__ == "__main__":
    FakeRouter(outside=sys.argv[2], listen=(sys.argv[1], PORT), forward=by_nft).serve()
