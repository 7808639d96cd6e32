"""One peer of hivemind's averager, for benchmarks/allreduce.py; runs in hivemind's own environment.

    python benchmarks/hivemind_worker.py PEERS MB ROUNDS CODEC RANK HOST SEED_MADDR

The first peer (no seed) prints {"maddr": ...} at once; every peer prints its figures as the last line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import NoCompression, Uniform8BitQuantization
from hivemind.utils import get_dht_time

CODECS = {"none": NoCompression, "8-bit": Uniform8BitQuantization}
ROUND_S = 600.0


def cpu_seconds() -> float:
    """Of this process and its children: hivemind averages in one of them, and its daemon is another."""
    return sum(ticks(pid) for pid in family(os.getpid())) / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    children = [
        int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()
    ]
    return [pid] + [one for child in children for one in family(child)]


def ticks(pid: int) -> int:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return int(user) + int(system)


def main() -> None:
    peers, mb, rounds, codec, rank, host, seed = sys.argv[1:]
    torch.set_num_threads(1)
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{host}/tcp/0"], initial_peers=[seed] if seed else [], start=True, use_relay=False
    )
    if not seed:
        print(json.dumps({"maddr": str(dht.get_visible_maddrs()[0])}), flush=True)
    count = int(peers)
    values = 250_000 * int(mb)
    mine = torch.randn(values, generator=torch.Generator().manual_seed(int(rank)))
    averager = DecentralizedAverager(
        [mine.clone()],
        dht,
        prefix="bench",
        start=True,
        target_group_size=count,
        min_group_size=count,
        min_matchmaking_time=1.0,
        request_timeout=0.5,
        compression=CODECS[codec](),
        bandwidth=1.0,
    )
    seconds, cpu_at = [], 0.0
    for number in range(int(rounds) + 1):
        with averager.get_tensors() as tensors:
            tensors[0].copy_(mine)
        cpu_at = cpu_seconds() if number == 1 else cpu_at
        # Finding each other takes a second or more and is not what is measured: only the exchange is.
        control = averager.step(
            wait=False, require_trigger=True, timeout=ROUND_S, scheduled_time=get_dht_time() + 3.0
        )
        while control.stage.name in ("IDLE", "LOOKING_FOR_GROUP"):
            time.sleep(0.005)
        start = time.perf_counter()
        control.allow_allreduce()
        control.result(ROUND_S)
        seconds.append(time.perf_counter() - start)
    with averager.get_tensors() as tensors:
        merged = tensors[0].double()
    exact = torch.zeros(values, dtype=torch.float64)
    for other in range(count):
        exact += torch.randn(values, generator=torch.Generator().manual_seed(other))
    exact /= count
    error = float((merged - exact).norm() / exact.norm())
    cpu_s = (cpu_seconds() - cpu_at) / int(rounds)
    print(json.dumps({"seconds": seconds[1:], "cpu_s": cpu_s, "error": error}), flush=True)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
