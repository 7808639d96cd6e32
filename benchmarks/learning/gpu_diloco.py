"""One GPU as several peers of a run (int8, 50 steps a round), beside one process that learns from as many samples.

    python benchmarks/learning/gpu_diloco.py          14 million parameters, 2,400 steps of 128 windows, on a GPU
    python benchmarks/learning/gpu_diloco.py --tiny   a small one, on a CPU too: that it works, and nothing about a GPU

`--peers N`: so many peers (4); `--arm run` or `--arm alone`: only these, or only the one process.  It prints both loss
curves; with --json, one line for programs.  `--out FOLDER` keeps what each process wrote, a line a round.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SCRIPT = str(Path(__file__).with_name("gpu_diloco_peer.py"))
NOTHING_RAN = 2
ROUNDS, BATCH, RATE, EVERY = {"tiny": 3, "gpu": 48}, {"tiny": 16, "gpu": 128}, {"tiny": 3e-3, "gpu": 1e-3}, 50
RUN = """run = {{ name = "gpu-diloco", rounds = {rounds}, min_peers = {peers} }}
model = {{ kind = "" }}
data = {{ source = "", batch = {batch} }}
inner = {{ lr = {rate}, warmup_steps = {warm}, schedule = "cosine" }}
outer = {{ lr = 0.7, momentum = {momentum} }}
round = {{ sync_every = {every}, codec = "int8", gather_codec = "int8", deadline_s = 600.0 }}"""


def toml_of(size: str, peers: int, folder: Path) -> Path:
    path, rounds = folder / f"run-{peers}.toml", ROUNDS[size]
    numbers = {
        "rounds": rounds,
        "peers": peers,
        "batch": BATCH[size] // peers,
        "rate": RATE[size],
        "every": EVERY,
    }
    # By as few rounds the momentum of thousands would go on long after the rate is down.
    path.write_text(RUN.format(**numbers, warm=rounds * EVERY // 20, momentum=0.6 if rounds > 20 else 0.3))
    return path


def watched(processes: list[subprocess.Popen]) -> None:
    """Until all have ended; all are ended once one of them fails: the others would wait for it."""
    while any(each.poll() is None for each in processes):
        if any(each.poll() for each in processes):
            break
        time.sleep(0.2)
    for each in processes:
        if each.poll() is None:
            each.terminate()
    if any([each.wait() for each in processes]):
        sys.exit("a process of the run failed; its last words are above")


def of_run(size: str, peers: int, folder: Path) -> dict:
    words = [
        "coordinate",
        "--listen",
        "127.0.0.1:0",
        "--exit-when-done",
        "--json",
        str(toml_of(size, peers, folder)),
    ]
    host = subprocess.Popen([sys.executable, "-m", "farflung", *words], stdout=subprocess.PIPE, text=True)
    if not (line := host.stdout.readline()):
        sys.exit("the coordinator did not start; its last words are above")
    url, outs = (
        json.loads(line)["url"],
        [folder / f"peer-{number}-of-{peers}.json" for number in range(peers)],
    )
    toml = str(folder / f"run-{peers}.toml")
    words = [[size, toml, str(out), url, str(out.with_suffix(".pem"))] for out in outs]
    watched([host, *(subprocess.Popen([sys.executable, SCRIPT, *each]) for each in words)])
    found = [json.loads(out.read_text()) for out in outs]
    equal = len({each["held_out"] for each in found}) == 1
    # A slower peer takes fewer steps, and may have no loss of the last ones.
    rows = itertools.zip_longest(*(one["losses"] for one in found))
    losses = [statistics.fmean(loss for loss in row if loss is not None) for row in rows]
    return {**found[0], "losses": losses, "peers": peers, "equal": equal}


def alone(size: str, peers: int, folder: Path) -> dict:
    toml, out = toml_of(size, peers, folder), folder / "alone.json"
    watched([subprocess.Popen([sys.executable, SCRIPT, size, str(toml), str(out)])])
    return json.loads(out.read_text())


def measured(size: str, peers: int, arm: str, folder: Path) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    steps = {"steps": ROUNDS[size] * EVERY, "batch": BATCH[size]}
    run = of_run(size, peers, folder) if arm != "alone" else {}
    one = alone(size, peers, folder) if arm != "run" else {}
    return {**steps, "run": run, "alone": one}


def lines_of(found: dict) -> list[str]:
    run, one = found["run"], found["alone"]
    any_of_them = run or one
    on = "on a GPU" if any_of_them["device"] == "cuda" else "on a CPU; NOTHING HERE WAS MEASURED ON A GPU"
    arms = [(f"{run['peers']} peers", run)] * bool(run) + [("one process", one)] * bool(one)
    lines = [f"{any_of_them['values'] / 1e6:.1f} million parameters, {on}"]
    lines.append("step  " + "  ".join(f"{name:>12}" for name, _ in arms))
    for number, losses in enumerate(zip(*(arm["losses"] for _, arm in arms), strict=True), 1):
        lines.append(f"{number * EVERY:4}  " + "  ".join(f"{loss:12.3f}" for loss in losses))
    lines.append("held out: " + ", ".join(f"{arm['held_out']:.4f} ({name})" for name, arm in arms))
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--arm", choices=["both", "run", "alone"], default="both")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not (asked.tiny or torch.cuda.is_available()):
        print("NOT RUN: torch finds no CUDA device here; --tiny runs on a CPU", file=sys.stderr)
        sys.exit(NOTHING_RAN)
    with tempfile.TemporaryDirectory() as place:
        found = measured("tiny" if asked.tiny else "gpu", asked.peers, asked.arm, asked.out or Path(place))
    print(json.dumps(found) if asked.json else "\n".join(lines_of(found)))
