"""All of farflung that needs a GPU, by one command: tests, a trainer's freeze and load, the step, the codecs, and
four peers of a run beside one process (examples/gpu_diloco.py).

    python benchmarks/gpu.py [--out gpu_figures] [--layers 9 140]

`make gpu` runs it.  It writes OUT.json, with all that was found, and OUT.md, a table for docs/gpu.md.  Exit codes: 0,
all of it ran and reached its goal; 1, something failed or fell short; 2, there is no CUDA device, so nothing was run.
140 layers are a thousand million parameters.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from freezing import Gpt, StandIn, manifest_of
from torch import nn

from farflung.peer.local.memory import SharedState
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.run_optimizer import RunSteps

ROOT = Path(__file__).resolve().parents[1]
NOTHING_RAN = 2
TESTS = ("tests/peer/trainer/test_layout.py", "tests/peer/trainer/test_tiles.py", "tests/compression")
NOT_IN_IT = (
    "several GPUs of one peer",
    "a whole round of two peers with a GPU each (four that share one are)",
    "how long a GPU is idle with `overlap`",
)
MOST_STEP_MS, MOST_FREEZE_S, MOST_LOAD_S, MOST_EXTRA_GB = 0.1, 0.3, 0.4, 0.3


def ran(words: list[str]) -> subprocess.CompletedProcess[str]:
    print("$", *words[1:], flush=True)
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:] + done.stderr[-2000:], flush=True)
    return done


def step_ms(layers: int) -> dict[str, float]:
    """The inner optimizer's step by itself and through the run, by the GPU's events; and what a run adds in memory."""
    model = Gpt(layers).to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inner = torch.optim.SGD(model.parameters(), 1e-6)
    agent = StandIn(overlaps=True)
    loop = InnerLoop(agent, model, manifest_of("overlap", steps=1_000_000))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        before = torch.cuda.memory_allocated()
        agent.begin(SharedState.create(Path(folder), loop.layout.total_elements))
        loop.attach()
        extra = torch.cuda.memory_allocated() - before
        plain = timed(inner.step)
        RunSteps(inner, loop.after_step, loop.before_step)
        ours = timed(inner.step)
    return {"plain_ms": plain, "with_run_ms": ours, "extra_ms": ours - plain, "held_gb": extra / 1e9}


def timed(step: Callable[[], Any], repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def syncs_of_a_step() -> int:
    """How often `run.step` makes the script wait for the GPU, by torch's own warnings, where no round is due."""
    model = nn.Linear(64, 64).cuda()
    agent = StandIn(overlaps=True)
    loop = InnerLoop(agent, model, manifest_of("overlap", steps=1_000_000))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        agent.begin(SharedState.create(Path(folder), loop.layout.total_elements))
        loop.attach()
        loop.after_step()  # reads what is read now and then
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                loop.before_step()
                loop.after_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in seen)


def rows_of(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What was measured, the figure, the goal, and whether it is reached."""
    rows = [
        ("tests that need CUDA", found["tests"]["told"], "all pass", found["tests"]["passed"]),
        (
            "codecs beside a copy on the device",
            found["codecs"]["told"],
            "half of it",
            found["codecs"]["passed"],
        ),
    ]
    run = found["run"]
    told = "{:.3f} and {:.3f} of one process".format(*run["held_out"]) if run else "it failed"
    rows.append(
        ("four peers of 85 million, int8, held out", told, "equal on all peers", bool(run.get("equal")))
    )
    step = found["step"]
    rows.append(
        (
            "`run.step` beside the step",
            f"{step['extra_ms']:.3f} ms",
            f"{MOST_STEP_MS} ms",
            step["extra_ms"] <= MOST_STEP_MS,
        )
    )
    rows.append(("waits for the GPU in a step", str(found["syncs"]), "0", found["syncs"] == 0))
    for one in found["freezing"]:
        name = f"{one['schedule']} {one['dtype']}, {one['values'] / 1e6:.0f} million"
        share = max(1.0, one["values"] / 1e9)
        rows.append(
            (
                f"freeze, {name}",
                f"{one['freeze_s']:.2f} s",
                f"{MOST_FREEZE_S * share:.2f} s",
                one["freeze_s"] <= MOST_FREEZE_S * share,
            )
        )
        rows.append(
            (
                f"load, {name}",
                f"{one['load_s']:.2f} s",
                f"{MOST_LOAD_S * share:.2f} s",
                one["load_s"] <= MOST_LOAD_S * share,
            )
        )
        extra = one["gpu_extra_bytes"] / 1e9
        rows.append((f"GPU memory, {name}", f"{extra:.2f} GB", f"{MOST_EXTRA_GB} GB", extra <= MOST_EXTRA_GB))
    return rows


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['device']}, torch {found['torch']}, driver's CUDA {found['cuda']}",
        "",
        "| what | measured | goal | |",
        "|---|---|---|---|",
        *(
            f"| {what} | {figure} | {goal} | {'' if good else 'short of it'} |"
            for what, figure, goal, good in rows_of(found)
        ),
        "",
        "Not measured by this command: " + "; ".join(NOT_IN_IT) + ".",
    ]
    return "\n".join(lines) + "\n"


def measure(layers: list[int]) -> dict[str, Any]:
    tests = ran(["python", "-m", "pytest", "-n", "0", "-q", "-k", "gpu or cuda or triton or device", *TESTS])
    codecs = ran(["python", "benchmarks/codec_cuda.py"])
    run = ran(["python", "examples/gpu_diloco.py", "--json"])
    freezing: list[dict[str, Any]] = []
    for each in layers:
        words = ["--device", "cuda", "--json", "--layers", str(each)]
        done = ran(["python", "benchmarks/freezing.py", *words])
        done.check_returncode()
        freezing += json.loads(done.stdout)
    told = tests.stdout.strip().splitlines() or ["no output"]
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "when": time.strftime("%Y-%m-%d"),
        "tests": {"passed": tests.returncode == 0, "told": told[-1]},
        "codecs": {
            "passed": codecs.returncode == 0,
            "told": f"exit code {codecs.returncode}",
            "output": codecs.stdout,
        },
        "run": json.loads(run.stdout) if run.returncode == 0 else {},
        "step": step_ms(9),
        "syncs": syncs_of_a_step(),
        "freezing": freezing,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="gpu_figures")
    parser.add_argument("--layers", type=int, nargs="+", default=[9, 140])
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "NOT RUN: no test, no benchmark and no codec was run on a GPU, because torch finds no CUDA device on this "
            f"machine (torch {torch.__version__}). Run `make gpu` on one that has it, with a torch built for it.",
            file=sys.stderr,
        )
        return NOTHING_RAN
    logging.disable()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    found = measure(asked.layers)
    Path(f"{asked.out}.json").write_text(json.dumps(found, indent=1) + "\n")
    Path(f"{asked.out}.md").write_text(table(found))
    print(table(found))
    return 0 if all(good for *_, good in rows_of(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
