"""A pipeline as hivemind's MoE servers make one, for benchmarks/beside_lab.py; runs in hivemind's own environment.

    python benchmarks/hivemind_star.py server HOST STAGE WIDTH SEED_MADDR      # prints {"maddr": ...}, then serves
    python benchmarks/hivemind_star.py driver HOST STAGES ROWS WIDTH MICROS OPEN SEED_MADDR     # prints its figures

Each server holds one stage, an expert that computes nothing.  The driver calls one after the other for each microbatch,
there and back, with so many microbatches open at a time: all activations and gradients go over its line.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import hivemind
import torch
from hivemind.moe import Server, get_experts

HANDLERS = 4  # processes; what hivemind recommends for an expert
FOUND_WITHIN_S = 60.0


def host_of(address: str, seed: str) -> dict[str, object]:
    return {
        "host_maddrs": [f"/ip4/{address}/tcp/0"],
        "initial_peers": [seed] if seed else [],
        "use_relay": False,
    }


def serve(address: str, stage: int, width: int, seed: str) -> None:
    server = Server.create(
        expert_uids=[f"stage.{stage}"],
        expert_cls="nop",
        hidden_dim=width,
        num_handlers=HANDLERS,
        device="cpu",
        start=True,
        **host_of(address, seed),
    )
    print(json.dumps({"maddr": str(server.dht.get_visible_maddrs()[0])}), flush=True)
    server.join()


def drive(address: str, sizes: list[int], seed: str) -> None:
    stages, rows, width, micros, opened = sizes
    dht = hivemind.DHT(start=True, **host_of(address, seed))
    until, names = time.monotonic() + FOUND_WITHIN_S, [f"stage.{stage}" for stage in range(stages)]
    while None in (experts := get_experts(dht, names)):
        if time.monotonic() > until:
            raise SystemExit("the servers are not found")
        time.sleep(0.5)
    x = torch.randn(rows, width)

    def learn(_: int) -> None:
        given = y = x.clone().requires_grad_(True)
        for expert in experts:
            y = expert(y)
        y.backward(torch.ones_like(y))
        assert given.grad is not None and given.grad.shape == x.shape

    with ThreadPoolExecutor(opened) as pool:
        list(pool.map(learn, range(opened)))
        began = time.perf_counter()
        list(pool.map(learn, range(micros)))
        seconds = time.perf_counter() - began
    print(json.dumps({"per_s": micros / seconds}), flush=True)
    dht.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "server":
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        drive(sys.argv[2], [int(word) for word in sys.argv[3:8]], sys.argv[8])
