"""All of farflung that needs a GPU, in steps of their own: tests, the built-in model, a trainer's freeze and load, the
step, the codecs, and peers of a run beside one process (benchmarks/learning/gpu_diloco.py).

    python benchmarks/gpu.py [--out gpu_figures] [--deadline 560] [--only NAME,NAME] [--tiny]

`make gpu` runs it.  Each step is a process with a time of its own, whose figures are in OUT/NAME.json once it is over,
and in the table OUT/table.md; what it prints is in OUT/NAME.log.  A step that fails, or for which too little is left
until the deadline, takes nothing from the others.  Exit codes: 0, all of it ran and reached its goal; 1, something
failed, fell short or was not begun; 2, there is no CUDA device, so nothing was run.  With --tiny all steps run on a
CPU, with small models: that they work, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from freezing import Gpt, StandIn, manifest_of
from torch import nn

from farflung.optim.recipes import inner_of
from farflung.peer.builtin.llama import Llama
from farflung.peer.local.memory import SharedState
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.manifest import Manifest

ROOT = Path(__file__).resolve().parents[1]
NOTHING_RAN = 2
SAY_EVERY_S = 10.0
CUDA_TESTS = ("tests/peer/trainer/test_layout.py", "tests/peer/trainer/test_tiles.py", "tests/compression")
MOST_STEP_MS, MOST_FREEZE_S, MOST_LOAD_S, MOST_EXTRA_GB, LEAST_MFU = 0.1, 0.3, 0.4, 0.3, 0.45
PEAKS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "4090": 165.0}  # TFLOP/s in bf16, by name
LAW = 1.033  # held out, four peers beside one process at 14 million parameters, by published figures
Figures = dict[str, Any]
Row = tuple[str, str, str, bool]  # what, measured, goal, reached


def ran(words: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:] + done.stderr[-4000:], flush=True)
    return done


def measured_by(words: list[str]) -> Any:
    done = ran(words)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


# ---- the steps: each gives its figures -----------------------------------------------------------------------


def environment(tiny: bool) -> Figures:
    room = os.statvfs("/dev/shm")
    found: Figures = {"torch": torch.__version__, "cuda": torch.version.cuda, "cores": os.cpu_count()}
    found |= {"when": time.strftime("%Y-%m-%d"), "shm_free_gb": room.f_bavail * room.f_frsize / 1e9}
    return found | {"device": "a CPU" if tiny else torch.cuda.get_device_name()}


def tests(tiny: bool) -> Figures:
    done = ran(["-m", "pytest", "-n", "0", "-q", "-x", "-k", "gpu or cuda or triton or device", *CUDA_TESTS])
    told = done.stdout.strip().splitlines() or ["no output"]
    return {"passed": done.returncode == 0, "told": told[-1]}


def of_the_step(tiny: bool) -> Figures:
    """The inner optimizer's step by itself and through the run, and how often that waits for the GPU."""
    device = torch.device("cpu" if tiny else "cuda")
    model = Gpt(1 if tiny else 9).to(device, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inner = torch.optim.SGD(model.parameters(), 1e-6)
    with _in_a_run(model) as loop:
        plain = timed(inner.step, device)
        RunSteps(inner, loop.after_step, loop.before_step)
        ours = timed(inner.step, device)
    return {
        "plain_ms": plain,
        "with_run_ms": ours,
        "extra_ms": ours - plain,
        "syncs": 0 if tiny else syncs_of_a_step(),
    }


@contextlib.contextmanager
def _in_a_run(model: nn.Module) -> Any:
    agent = StandIn(overlaps=True)
    loop = InnerLoop(agent, model, manifest_of("overlap", steps=1_000_000))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        agent.begin(SharedState.create(Path(folder), loop.layout.total_elements))
        loop.attach()
        yield loop


def timed(step: Callable[[], Any], device: torch.device, repeats: int = 200) -> float:
    """Milliseconds; on a GPU by its own events."""
    times = []
    for _ in range(repeats if device.type == "cuda" else 10):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def syncs_of_a_step() -> int:
    """By torch's own warnings, where no round is due."""
    with _in_a_run(nn.Linear(64, 64).cuda()) as loop:
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


def freezing(tiny: bool, layers: int = 9) -> Figures:
    where = ["--device", "cuda", "--layers", str(layers)]
    if tiny:
        where = ["--device", "cpu", "--layers", "1", "--rounds", "6"]
    return {"rows": measured_by(["benchmarks/freezing.py", "--json", "--dtype", "bf16", *where])}


def large(tiny: bool) -> Figures:
    return freezing(tiny, layers=140)


def builtin(tiny: bool) -> Figures:
    """Steps of the built-in model alone, of as many rows at once as are best, as they are and compiled."""
    device = torch.device("cpu" if tiny else "cuda")
    manifest = Manifest.from_toml(
        f'[model]\npreset = "{"tiny" if tiny else "350M"}"\n[inner]\nprecision = "bf16"', "x"
    )
    found: Figures = {"values": 0, "rows": []}
    for compiled in (False, True):
        model = Llama(manifest.model).to(device)
        found["values"] = sum(each.numel() for each in model.parameters())
        if compiled:
            for layer in model.model.layers.values():
                layer.compile(dynamic=False, backend="eager" if tiny else "inductor")
        optimizer = inner_of(manifest, model)
        for rows in (1, 2) if tiny else (4, 8, 16, 32, 64):
            row = _speed(
                model, optimizer, torch.zeros(rows, model.sizes.context + 1, dtype=torch.int64, device=device)
            )
            if row is None:
                break
            found["rows"].append({"compiled": compiled, "rows": rows, **row})
            print(found["rows"][-1], flush=True)
        del model, optimizer
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _speed(model: Llama, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Figures | None:
    """None: it does not fit."""
    device, sizes = batch.device, model.sizes

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        for _ in range(3):
            step()
        ms = timed(step, device, repeats=10)
    except torch.OutOfMemoryError:
        return None
    tokens = batch.shape[0] * sizes.context
    # Six for each weight that is a product, and the attention's own, forwards and backwards.
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    flops = tokens * (6 * weights + 6 * sizes.layers * sizes.context * sizes.heads * sizes.head_dim)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return {"tokens_per_s": 1e3 * tokens / ms, "tflops": flops / ms / 1e9, "peak_gb": peak}


def codecs(tiny: bool) -> Figures:
    if tiny:
        done = ran(["-m", "pytest", "-n", "0", "-q", "tests/compression/test_plain_codecs.py"])
    else:
        done = ran(["benchmarks/codec_cuda.py", "--values", "33554432", "--repeats", "10"])
    return {"passed": done.returncode == 0, "output": done.stdout[-4000:]}


def learning(*words: str) -> Callable[[bool], Figures]:
    def step(tiny: bool) -> Figures:
        found: Figures = measured_by(
            ["benchmarks/learning/gpu_diloco.py", "--json", *words, *(["--tiny"] if tiny else [])]
        )
        return found

    return step


@dataclass(frozen=True)
class Step:
    measure: Callable[[bool], Figures]
    limit_s: float
    least_s: float  # it is not begun with less
    rows: Callable[[Figures, Callable[[str], Figures]], list[Row]]  # of its figures, and those of others


def _of_freezing(found: Figures, _: object) -> list[Row]:
    rows: list[Row] = []
    for one in found["rows"]:
        name, share = (
            f"{one['schedule']} {one['dtype']}, {one['values'] / 1e6:.0f} million",
            max(1.0, one["values"] / 1e9),
        )
        for what, most in (("freeze", MOST_FREEZE_S * share), ("load", MOST_LOAD_S * share)):
            seconds = one[f"{what}_s"]
            rows.append((f"{what}, {name}", f"{seconds:.2f} s", f"{most:.2f} s", seconds <= most))
        extra = one["gpu_extra_bytes"] / 1e9
        rows.append((f"GPU memory, {name}", f"{extra:.2f} GB", f"{MOST_EXTRA_GB} GB", extra <= MOST_EXTRA_GB))
    return rows


def _of_builtin(found: Figures, of: Callable[[str], Figures]) -> list[Row]:
    rows: list[Row] = []
    device = of("env").get("device", "")
    peak = next((tflops for name, tflops in PEAKS.items() if name in device), 0.0)
    goal = f"{LEAST_MFU * peak:.0f} TFLOP/s" if peak else "not known for this device"
    for compiled in (False, True):
        mine = [each for each in found["rows"] if each["compiled"] == compiled]
        best = max(mine, key=lambda each: float(each["tokens_per_s"]))
        told = f"{best['tokens_per_s']:,.0f} tokens/s, {best['tflops']:.3g} TFLOP/s with {best['rows']} rows"
        name = f"{found['values'] / 1e6:.1f} million values in bf16{', compiled' if compiled else ''}"
        rows.append((name, told, goal, best["tflops"] >= LEAST_MFU * peak))
    return rows


def _of_learning(found: Figures, of: Callable[[str], Figures]) -> list[Row]:
    run, alone = found["run"], of("alone").get("alone", {})
    seconds = f"{run['seconds']:.0f} s, {len(run['losses'])} rounds"
    rows = [(f"{run['peers']} peers end with one model", seconds, "equal", bool(run["equal"]))]
    if alone:
        ratio = run["held_out"] / alone["held_out"]
        told = f"{run['held_out']:.4f} beside {alone['held_out']:.4f}: {100 * (ratio - 1):+.1f} %"
        name = f"held-out loss, {run['peers']} peers beside one process"
        rows.append((name, told, f"{100 * (LAW - 1):+.1f} %", ratio <= LAW))
    return rows


def _of_step(found: Figures, _: object) -> list[Row]:
    extra, syncs = found["extra_ms"], found["syncs"]
    beside = ("`run.step` beside the step", f"{extra:.3f} ms", f"{MOST_STEP_MS} ms", extra <= MOST_STEP_MS)
    return [beside, ("waits for the GPU in a step", str(syncs), "0", syncs == 0)]


def _passed(what: str, goal: str) -> Callable[[Figures, Callable[[str], Figures]], list[Row]]:
    return lambda found, _: [(what, found.get("told", ""), goal, found["passed"])]


STEPS: dict[str, Step] = {
    "env": Step(environment, 30, 5, lambda found, _: [("device", found["device"], "", True)]),
    "tests": Step(tests, 60, 20, _passed("tests that need CUDA", "all pass")),
    "step": Step(of_the_step, 40, 10, _of_step),
    "freezing": Step(freezing, 60, 20, _of_freezing),
    "builtin": Step(builtin, 120, 40, _of_builtin),
    "alone": Step(learning("--arm", "alone"), 180, 60, lambda *_: []),
    "four": Step(learning("--arm", "run", "--peers", "4"), 240, 90, _of_learning),
    "codecs": Step(codecs, 60, 20, _passed("codecs beside a copy on the device", "half of it")),
    "two": Step(learning("--arm", "run", "--peers", "2"), 240, 90, _of_learning),
    "one": Step(learning("--arm", "run", "--peers", "1"), 240, 90, _of_learning),
    "large": Step(large, 180, 90, _of_freezing),
}


# ---- one after the other -------------------------------------------------------------------------------------


class Figured:
    """What is known by now, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: dict[str, str] = {}  # of steps that gave no figures: why

    def of(self, name: str) -> Figures:
        path = self.folder / f"{name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def rows(self) -> list[Row]:
        found: list[Row] = []
        for name, step in STEPS.items():
            if name in self.states:
                found.append((name, self.states[name], "", False))
            elif figures := self.of(name):
                found += step.rows(figures, self.of)
        return found

    def write_table(self) -> None:
        env = self.of("env")
        head = "Which machine this was: not looked at (step env)."
        if env:
            head = f"{env['device']}, torch {env['torch']}, CUDA {env['cuda']}, {env['when']}"
        lines = [
            f"| {what} | {figure} | {goal} | {'' if good else 'short of it'} |"
            for what, figure, goal, good in self.rows()
        ]
        text = "\n".join([head, "", "| what | measured | goal | |", "|---|---|---|---|", *lines]) + "\n"
        written(self.folder / "table.md", text)


def written(path: Path, text: str) -> None:
    """Whole, and on the disk: the machine may go away in the next second."""
    aside = path.with_suffix(".part")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def attend(name: str, step: Step, figured: Figured, tiny: bool, until: float) -> None:
    """Begin it, say every few seconds that it lives, and end it where its time is over."""
    log, began = figured.folder / f"{name}.log", time.monotonic()
    until = min(until, began + step.limit_s)
    words = [
        sys.executable,
        __file__,
        "--step",
        name,
        "--out",
        str(figured.folder),
        *(["--tiny"] if tiny else []),
    ]
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
    said = began
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
        if time.monotonic() - said >= SAY_EVERY_S:
            said = time.monotonic()
            print(f"{name}: {said - began:.0f} s", flush=True)
    took = time.monotonic() - began
    with contextlib.suppress(ProcessLookupError):  # all that it has started goes with it
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if not (figured.folder / f"{name}.json").exists():
        last = (log.read_text().strip().splitlines() or ["it said nothing"])[-1][:200]
        figured.states[name] = f"cut off after {took:.0f} s" if code == -signal.SIGKILL else f"failed: {last}"
    print(f"{name}: {figured.states.get(name, 'done')}, {took:.0f} s", flush=True)


def all_of_them(asked: argparse.Namespace) -> int:
    figured, until = Figured(asked.out), time.monotonic() + asked.deadline
    asked.out.mkdir(parents=True, exist_ok=True)
    chosen = asked.only.split(",") if asked.only else list(STEPS)
    for name in chosen:
        (asked.out / f"{name}.json").unlink(missing_ok=True)
        left, least = until - time.monotonic(), 0.0 if asked.tiny else STEPS[name].least_s
        if left < least or left <= 0:
            figured.states[name] = f"not begun: {max(0.0, left):.0f} s were left, it takes {least:.0f}"
            print(f"{name}: {figured.states[name]}", flush=True)
        else:
            attend(name, STEPS[name], figured, asked.tiny, until)
        figured.write_table()
    print((asked.out / "table.md").read_text())
    return 0 if all(good for *_, good in figured.rows()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_figures"))
    parser.add_argument("--deadline", type=float, default=560.0, help="seconds for all of it")
    parser.add_argument("--only", default="", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if odd := set(filter(None, asked.only.split(","))) - STEPS.keys():
        parser.error(f"--only: {', '.join(sorted(odd))} is not known; give some of {', '.join(STEPS)}")
    if not (asked.tiny or torch.cuda.is_available()):
        print(
            "NOT RUN: no test, no benchmark and no codec was run on a GPU, because torch finds no CUDA device on this "
            f"machine (torch {torch.__version__}). Run `make gpu` on one that has it, with a torch built for it; "
            "--tiny tries its steps on a CPU.",
            file=sys.stderr,
        )
        return NOTHING_RAN
    if asked.step is None:
        return all_of_them(asked)
    logging.disable()
    if asked.tiny:
        torch.set_num_threads(1)
    written(
        asked.out / f"{asked.step}.json", json.dumps(STEPS[asked.step].measure(asked.tiny), indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
