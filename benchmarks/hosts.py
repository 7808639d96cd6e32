"""Where the processes of a benchmark run: this machine's loopback, or a lab of hosts that are far apart.

Used by allreduce.py.  Both kinds have the same methods, so that a benchmark says only what runs on which host.

    with hosts_for(4, Line.parse("200,100")) as hosts:
        hosts.start(0, ["command", "and", "its", "words"])
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rig.lab.emulator import Host, HostSpec, Lab

EXPECTED = "--lab: expected RATE_MBIT,ROUND_TRIP_MS or DOWN/UP,ROUND_TRIP_MS, such as 200,100 or 500/100,100"


@dataclass(frozen=True)
class Line:
    """Each host's line; rates of 0 are this machine's loopback."""

    down_mbit: float = 0.0
    up_mbit: float = 0.0
    rtt_ms: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Line:
        rates, _, rtt = text.partition(",")
        down, _, up = rates.partition("/")
        try:
            return cls(float(down), float(up or down), float(rtt or 0))
        except ValueError:
            raise SystemExit(f"{EXPECTED}; found {text!r}") from None

    def __str__(self) -> str:
        both = (
            f"{self.down_mbit:g}"
            if self.down_mbit == self.up_mbit
            else f"{self.down_mbit:g}/{self.up_mbit:g}"
        )
        return f"{both},{self.rtt_ms:g}"

    def host(self, name: str) -> HostSpec:
        """A round trip between two hosts passes four half lines."""
        return HostSpec(name, up_mbit=self.up_mbit, down_mbit=self.down_mbit, delay_ms=self.rtt_ms / 4)

    def ideal_s(self, peers: int, payload_bytes: float) -> float | None:
        """Each peer sends, and receives, 2 (n - 1) / n of the payload; nothing travels faster than the slower way."""
        rate = min(self.down_mbit, self.up_mbit) * 1e6
        return 8 * 2 * (peers - 1) / peers * payload_bytes / rate if rate else None


class Loopback:
    """All hosts are this machine."""

    device = "lo"

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def start(self, host: int, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, **_how(self.device))


class InLab:
    device = "net0"

    def __init__(self, lab: Lab) -> None:
        self._hosts: list[Host] = list(lab.hosts.values())

    def address(self, host: int) -> str:
        return self._hosts[host].address

    def start(self, host: int, command: list[str]) -> subprocess.Popen[str]:
        return self._hosts[host].popen(command, **_how(self.device))


Hosts = Loopback | InLab


@contextlib.contextmanager
def hosts_for(count: int, line: Line) -> Iterator[Hosts]:
    if not line.up_mbit:
        yield Loopback()
        return
    with Lab([line.host(f"host-{number}") for number in range(count)], seed=1) as lab:
        yield InLab(lab)


def _how(device: str) -> dict[str, object]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return pipes | {"env": os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device}}
