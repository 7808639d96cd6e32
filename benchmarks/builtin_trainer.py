"""The built-in trainer in a run beside a plain loop of PyTorch with the same model: the ratio of tokens a second.

    python benchmarks/builtin_trainer.py [--preset 15M] [--batch 2] [--steps 40] [--rounds 3] [--precision fp32]

In turn, `--repeats` times: `farflung join` alone in a run on this machine (one thread, `overlap`, a round of `--steps`
steps), of which `--rounds` rounds are timed after the first; and a process that takes as many steps with the same
weights, optimizer, batches and clipping, and nothing else.  What the trainer is slower by is the run: handing over what
was learned, taking what was merged, leases, and the agent's work on the other core.
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

TOML = """
run = {{ name = "builtin", rounds = {rounds} }}
model = {{ preset = "{preset}" }}
data = {{ batch = {batch}, lease_samples = {lease} }}
inner = {{ precision = "{precision}" }}
outer = {{ schedule = "overlap" }}
round = {{ sync_every = {steps} }}
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "FARFLUNG_THREADS": "1"}
PLAIN = """
import sys, time, torch
from torch.utils.data import DataLoader
from farflung.optim.recipes import inner_of
from farflung.peer.builtin.corpus import windows_of
from farflung.peer.builtin.llama import Llama
from farflung.protocol.manifest import Manifest
torch.set_num_threads(1)
manifest = Manifest.from_toml(open(sys.argv[1]).read(), "run.toml")
steps, warm = int(sys.argv[2]), int(sys.argv[3])
model = Llama(manifest.model, manifest.run.seed)
optimizer = inner_of(manifest, model)
loader = DataLoader(windows_of(manifest), manifest.data.batch, shuffle=True, drop_last=True)
for number, batch in enumerate(loader):
    if number == warm:
        begun = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=manifest.inner.precision == "bf16"):
        loss = model.loss(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), manifest.inner.clip)
    optimizer.step()
    optimizer.zero_grad()
    if number == warm + steps - 1:
        break
print((time.perf_counter() - begun) / steps)
"""


def in_a_run(toml: Path, folder: Path, steps: int, rounds: int) -> float:
    """Seconds a step, by the commits that the coordinator wrote down."""
    home = {**os.environ, **ONE_THREAD, "FARFLUNG_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "farflung"]
    listen = ["--listen", "127.0.0.1:0", "--exit-when-done", "--json"]
    host = subprocess.Popen(
        [*command, "coordinate", str(toml), *listen],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=home,
        cwd=folder,
    )
    assert host.stdout is not None
    url = json.loads(host.stdout.readline())["url"]
    peer = subprocess.run([*command, "join", url], env=home, cwd=folder, stderr=subprocess.DEVNULL)
    if peer.returncode or host.wait():
        sys.exit("the run failed")
    said = map(json.loads, (folder / "run.data" / "events.jsonl").read_text().splitlines())
    commits = [each["at"] for each in said if each["event"] == "committed"]
    # The first rounds have the beginning in them, and the last one nothing to train during it.
    taken = commits[1 : rounds + 2]
    return (taken[-1] - taken[0]) / (steps * (len(taken) - 1))


def plain(toml: Path, steps: int, warm: int) -> float:
    told = subprocess.run(
        [sys.executable, "-c", PLAIN, str(toml), str(steps), str(warm)],
        capture_output=True, text=True, check=True, env={**os.environ, **ONE_THREAD},
    )  # fmt: skip
    return float(told.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="15M")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="fp32")
    asked = parser.parse_args()
    ratios = []
    for number in range(asked.repeats):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            toml = folder / "run.toml"
            toml.write_text(
                TOML.format(**vars(asked) | {"rounds": asked.rounds + 4, "lease": 16 * asked.batch})
            )
            of_run = in_a_run(toml, folder, asked.steps, asked.rounds)
            alone = plain(toml, asked.steps * asked.rounds, 5)
        ratios.append(alone / of_run)
        print(f"{number}: {of_run:.4f} s a step in a run, {alone:.4f} alone: {ratios[-1]:.3f}", flush=True)
    print(f"median of {asked.repeats}: {statistics.median(ratios):.3f} of a plain loop's tokens a second")


if __name__ == "__main__":
    main()
