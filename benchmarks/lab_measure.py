"""What the lab can carry and how exactly, on this machine, as a table.

    python benchmarks/lab_measure.py [--seconds 6] [--only stream,all-to-all,loss] [--json]

`stream`: one TCP stream over equal lines, its rate as a share of the line's, headers counted in both. `all-to-all`:
four hosts, each with a stream to every other, at 200 Mbit/s up and down. `loss`: the share of a stream's packets
that were lost. `router` is the processor time that the router took: per gigabyte carried, and as a share of one core.
`late` is the longest time by which it was late with a packet; if that is many milliseconds, the machine was busy and
the other figures mean little.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from rig.lab.emulator import Host, HostSpec, Lab

TRAFFIC = [sys.executable, "-S", str(TESTS / "rig" / "lab" / "traffic.py")]
PORT = "7000"
SKIP_S = 3.0  # slow start over a long line
STREAMS = ((10, 0), (10, 100), (200, 0), (200, 100), (1000, 0), (1000, 100))  # (Mbit/s, round trip in ms)


@dataclass
class Row:
    what: str
    asked: str
    got: str
    share: float
    router_s_per_gb: float
    router_cores: float
    late_ms: float


class Watch:
    """The router's effort and what all hosts received, between its making and `row`."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._from_s = lab, time.monotonic()
        self._cpu_s, self._bytes = lab.effort().cpu_s, self._received_bytes()

    def _received_bytes(self) -> int:
        return sum(down.delivered_bytes for _, down in self._lab.counters().values())

    def row(self, what: str, asked: str, got: str, share: float) -> Row:
        seconds, effort = time.monotonic() - self._from_s, self._lab.effort()
        used_s, gigabytes = effort.cpu_s - self._cpu_s, (self._received_bytes() - self._bytes) / 1e9
        late_ms = 1e3 * effort.worst_late_s
        return Row(what, asked, got, share, used_s / gigabytes, used_s / seconds, late_ms)


def serve(host: Host, what: str) -> subprocess.Popen[str]:
    server: subprocess.Popen[str] = host.popen([*TRAFFIC, what, PORT], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return server


def send(host: Host, to: Host, seconds: float) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = host.popen(
        [*TRAFFIC, "source", to.address, PORT, str(SKIP_S + seconds), str(SKIP_S)]
    )
    return process


def rate_mbit(server: subprocess.Popen[str]) -> float:
    """Of the next stream that ends, with the headers: 1500 bytes on the line carry 1448."""
    assert server.stdout is not None
    told = json.loads(server.stdout.readline())
    return float(told["bytes"] * 1500 / 1448 * 8 / 1e6 / told["seconds"])


def stream(mbit: float, rtt_ms: float, seconds: float) -> Row:
    hosts = [HostSpec(name, mbit, mbit, delay_ms=rtt_ms / 4) for name in "ab"]
    with Lab(hosts, seed=1) as lab:
        server, watch = serve(lab.hosts["b"], "sink"), Watch(lab)
        send(lab.hosts["a"], lab.hosts["b"], seconds).wait()
        got = rate_mbit(server)
        return watch.row("stream", f"{mbit:.0f} Mbit/s, {rtt_ms:.0f} ms", f"{got:.1f} Mbit/s", got / mbit)


def all_to_all(hosts: int, mbit: float, rtt_ms: float, seconds: float) -> Row:
    """The share is of what the downloads of all hosts together can take."""
    specs = [HostSpec(f"h{number}", mbit, mbit, delay_ms=rtt_ms / 4) for number in range(hosts)]
    with Lab(specs, seed=1) as lab:
        all_hosts = list(lab.hosts.values())
        servers, watch = [serve(host, "sink") for host in all_hosts], Watch(lab)
        senders = [send(one, other, seconds) for one in all_hosts for other in all_hosts if one is not other]
        for sender in senders:
            sender.wait()
        got = sum(rate_mbit(server) for server in servers for _ in range(hosts - 1))
        asked = f"{hosts} x {mbit:.0f} Mbit/s, {rtt_ms:.0f} ms"
        return watch.row("all-to-all", asked, f"{got:.0f} Mbit/s", got / (hosts * mbit))


def loss(share: float) -> Row:
    """Only the sender's line loses packets, and a stream that repeats what it lost keeps it busy."""
    with Lab([HostSpec("a", loss=share), HostSpec("b")], seed=1) as lab:
        serve(lab.hosts["b"], "sink")
        watch = Watch(lab)
        send(lab.hosts["a"], lab.hosts["b"], SKIP_S).wait()
        up, _ = lab.counters()["a"]
        got = up.lost / (up.lost + up.delivered + up.dropped)
        return watch.row("loss", f"{share:.2%}", f"{got:.2%} of {up.lost + up.delivered}", got / share)


def show(rows: list[Row]) -> None:
    line = "{:<11}{:<22}{:>18}{:>9}{:>15}{:>14}{:>9}"
    print(line.format("what", "asked", "got", "share", "router s/GB", "router cores", "late ms"))
    for row in rows:
        router = f"{row.router_s_per_gb:.2f}", f"{row.router_cores:.2f}", f"{row.late_ms:.1f}"
        print(line.format(row.what, row.asked, row.got, f"{row.share:.1%}", *router))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each stream is measured")
    parser.add_argument("--only", default="stream,all-to-all,loss", help="which figures, with commas")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    options = parser.parse_args()
    reason = Lab.unavailable()
    if reason:
        raise SystemExit(reason)
    wanted, rows = options.only.split(","), []
    if "stream" in wanted:
        rows += [stream(mbit, rtt_ms, options.seconds) for mbit, rtt_ms in STREAMS]
    if "all-to-all" in wanted:
        rows += [all_to_all(4, 200, rtt_ms, options.seconds) for rtt_ms in (20, 100)]
    if "loss" in wanted:
        rows += [loss(share) for share in (0.001, 0.01)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows)


if __name__ == "__main__":
    main()
