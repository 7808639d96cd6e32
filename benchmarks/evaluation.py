"""What a run's held-out loss costs its peers: the share of their time, and the seconds of one evaluation.

    python benchmarks/evaluation.py [--peers 1] [--preset 15M] [--batch 4] [--steps 40] [--rounds 9]

A coordinator and so many built-in peers on this machine, one thread each, with sixteen windows and `every_rounds` left
to "auto".  By the peers' own journals: the seconds in which a trainer computed windows, with the copying of its model
there and back, over the time from the first commit to the last; without the last version's evaluation, after which
nobody trains.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOML = """
run = {{ name = "evaluated", rounds = {rounds}, min_peers = {peers} }}
model = {{ preset = "{preset}" }}
data = {{ batch = {batch}, lease_samples = {lease} }}
eval = {{ source = "python-stdlib", windows = 16 }}
round = {{ sync_every = {steps} }}
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "FARFLUNG_THREADS": "1"}


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder: Path, asked: argparse.Namespace) -> None:
    toml = folder / "run.toml"
    toml.write_text(TOML.format(**vars(asked), lease=16 * asked.batch))
    environment = {**os.environ, **ONE_THREAD, "FARFLUNG_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "farflung"]
    host = subprocess.Popen(
        [*command, "coordinate", str(toml), "--listen", "127.0.0.1:0", "--exit-when-done", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=folder,
    )  # fmt: skip
    assert host.stdout is not None
    url = json.loads(host.stdout.readline())["url"]
    peers = []
    for number in range(asked.peers):
        (folder / str(number)).mkdir()
        words = [*command, "join", url, "--identity", str(folder / str(number) / "key.pem")]
        peers.append(subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment, cwd=folder))
    codes = [each.wait() for each in [*peers, host]]
    if any(codes):
        sys.exit(f"the run failed: exit codes {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=int, default=1)
    parser.add_argument("--preset", default="15M")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run(folder, asked)
        of_run = events(folder / "run.data" / "events.jsonl")
        commits = [each["wall"] for each in of_run if each["event"] == "committed"]
        evaluated = [each for each in of_run if each["event"] == "evaluated"]
        shares, taken, windows = [], [], []
        for journal in sorted(folder.glob("*/*.jsonl")):
            if journal.parent.name == "run.data":
                continue
            scored = [
                each for each in events(journal) if each["event"] == "scored" and each["wall"] < commits[-1]
            ]
            taken += [each["seconds"] for each in scored]
            windows += [each["windows"] for each in scored]
            shares.append(sum(each["seconds"] for each in scored) / (commits[-1] - commits[0]))
    if not taken:
        sys.exit("nothing was evaluated before the last version: more --rounds")
    print(
        f"versions {[each['version'] for each in evaluated]}: losses {[round(each['loss'], 4) for each in evaluated]}"
    )
    print(
        f"{asked.peers} peers, {asked.preset}: {statistics.mean(windows):.1f} of 16 windows each took "
        f"{statistics.median(taken):.2f} s; {100 * statistics.mean(shares):.2f} % of the time (goal: 1 %)"
    )


if __name__ == "__main__":
    main()
