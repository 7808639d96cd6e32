"""What `farflung simulate` foresees, beside the real program over the lab's lines: seconds and bytes of a round.

    python benchmarks/predicted.py [WORLD ...] [--rounds 3]

Each world is one run of the real program in network namespaces (docs/lab.md) and one in virtual time, with equal
run.toml, model size and lines; medians over the rounds after the first.  `plain`: plain sockets, unencrypted, that move
as many bytes all to all (wan.py).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import replace

import torch
from torch import nn
from wan import RTT_MS, Asked, Setting, equal, rounds_of_plain_sockets, run, setting

from farflung.peer.trainer.api import connect
from farflung.protocol.manifest import Manifest
from farflung.simulator.laboratory.laboratory import Laboratory, SimulatedRun
from farflung.simulator.laboratory.places import ReplicaPlace

STEP_S = 0.001  # the lab's trainers have no model: their values stand ready


USUAL = ("20/5, int8", "20/5, sparse", "50/50, int8")


def worlds(asked: Asked) -> dict[str, Setting]:
    home, large = (setting(asked, equal(asked, 4, 20, 5), mb) for mb in (40, 400))
    sparse = [replace(each, options=replace(each.options, codec="topk")) for each in (home, large)]
    lines = dict(zip(USUAL, (home, sparse[0], setting(asked, equal(asked, 4, 50), 100)), strict=True))
    return lines | {"large, int8": large, "large, sparse": sparse[1]}


def script() -> None:
    connection = connect()
    shape = connection.manifest.model
    table = nn.ParameterDict({"synthetic": nn.Parameter(torch.zeros(shape.context, shape.width))})
    with connection.join(table, torch.optim.SGD(table.parameters(), lr=1.0)) as joined:
        while not joined.finished:
            table["synthetic"].grad = torch.randn(shape.context, shape.width) * 1e-3
            joined.step(tokens=1)


def foreseen(of: Setting) -> SimulatedRun:
    manifest: Manifest = of.manifest
    each_step = manifest.round.model_copy(update={"sync_every": 1, "period_s": 0.0})
    manifest = manifest.model_copy(update={"round": each_step})
    places = [
        ReplicaPlace(
            step_s=STEP_S, up=f"{spec.up_mbit} Mbit/s", down=f"{spec.down_mbit} Mbit/s", delay_ms=RTT_MS / 4
        )
        for spec in of.hosts
    ]
    return Laboratory(manifest, script, places, lambda _: None).learn()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "worlds", nargs="*", help="left out: those of 10 and 25 million values; large: 100 million"
    )
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'world':16} {'seconds':>9} {'foreseen':>9} {'':>7} {'plain':>7} {'MB/peer':>9} {'foreseen':>9}")
    for name, of in worlds(Asked(asked.rounds, None, None, "", False, "int8")).items():
        if name not in (asked.worlds or USUAL):
            continue
        real, done = run(of).result, foreseen(of).rounds
        seconds = statistics.median(b.at_s - a.at_s - STEP_S for a, b in itertools.pairwise(done))
        sent = statistics.median(each.sent_bytes for each in done[1:]) / 1e6
        measured, sent_really = real["median_seconds"], real["tx_bytes_per_peer"] / 1e6
        plain = (
            f"{statistics.median(rounds_of_plain_sockets(of)):7.2f}"
            if of.options.codec != "topk"
            else f"{'':7}"
        )
        times = f"{measured:9.2f} {seconds:9.2f} {seconds / measured - 1:+7.1%} {plain}"
        print(f"{name:16} {times} {sent_really:9.2f} {sent:9.2f} {sent / sent_really - 1:+7.1%}", flush=True)


if __name__ == "__main__":
    main()
