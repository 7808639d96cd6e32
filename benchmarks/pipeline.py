"""What pipelines compute, and how fast, beside others.

    python benchmarks/pipeline.py equal [--updates 20] [--seeds 3] [--write]
    python benchmarks/pipeline.py beside [--runs 3] [--batches 4] [--micros 8 64] [--write]
    python benchmarks/pipeline.py beside --lab [--hivemind-python PATH] [--write]
    python benchmarks/pipeline.py wan [--batch 200] [--batches 3] [--mbit 100] [--rtt-ms 50] [--write]

`equal`: beside one process that holds the whole model: every model in 1, 2, 3 and 4 stages with fp32 crossings; the
SHA-256 of all weights and buffers must be that of the unsplit process; then in 4 stages through coarser codecs: how far
the loss is off.  Models, data and the unsplit process are those of tests/rig/unsplit.py.  `beside`: beside
torch.distributed.pipelining on this machine, and what becomes of each when somebody is killed (beside.py); with `--lab`
beside hivemind's MoE servers over far lines (beside_lab.py).  `wan`: how well far stages use their lines, in the lab
(pipeline_wan.py).  `--write` puts the figures into docs/pipelines.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
import beside
import beside_lab
import pipeline_wan
from pages import write_between

from farflung.peer.pipeline.parts import survey_parts
from farflung.peer.pipeline.whole import plan_stages
from rig.nursery import Nursery
from rig.unsplit import BUILT_IN, LLAMA, LOUD, SEQUENTIAL, Task, train_pipeline, train_unsplit

PAGE = HERE.parent / "docs" / "pipelines.md"
STAGES = (1, 2, 3, 4)
CODECS = ("bf16", "int8", "int4")
LAST = 5  # updates whose mean loss is compared
MODELS = {
    "the built-in Llama, untied": BUILT_IN,
    "nn.Sequential with BatchNorm and dropout": SEQUENTIAL,
    "Llama of transformers": LLAMA,
    "the built-in Llama, one channel 100 times as large": LOUD,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="what", required=True)
    takes = {"equal": takes_equal, "beside": takes_beside, "wan": takes_wan}
    for name, take in takes.items():
        mode = modes.add_parser(name)
        mode.add_argument("--write", action="store_true", help="into docs/pipelines.md")
        mode.set_defaults(mark=name)  # in the page
        take(mode)
    options = parser.parse_args()
    torch.set_num_threads(1)
    all_well, text = options.run(options)
    print(text)
    if options.write:
        write_between(PAGE, options.mark, text)
    return 0 if all_well else 1


def takes_equal(mode: argparse.ArgumentParser) -> None:
    mode.add_argument("--updates", type=int, default=20)
    mode.add_argument("--seeds", type=int, default=3)

    def run(options: argparse.Namespace) -> tuple[bool, str]:
        models = {name: task for name, task in MODELS.items() if task is not LLAMA or has_transformers()}
        if len(models) < len(MODELS):
            print("transformers is not installed: no Llama in this table", file=sys.stderr)
        return equal(models, options.updates, options.seeds)

    mode.set_defaults(run=run)


def takes_beside(mode: argparse.ArgumentParser) -> None:
    usual = beside.Asked()
    mode.add_argument("--runs", type=int, default=usual.runs, help="turns of each")
    mode.add_argument("--batches", type=int, default=usual.batches, help="of a turn; one more warms up")
    mode.add_argument("--micros", type=int, nargs="+", default=list(usual.micros), help="of a batch")

    mode.add_argument(
        "--hangs-s", type=float, default=usual.hangs_s, help="whoever does not end by then hangs"
    )
    mode.add_argument(
        "--pause-ms", type=float, default=usual.pause_ms, help="that stages wait in one more row; 0: no row"
    )
    mode.add_argument("--no-deaths", action="store_true", help="nobody is killed after it")
    mode.add_argument("--lab", action="store_true", help="beside hivemind over far lines instead")
    mode.add_argument("--hivemind-python", help="of an environment with hivemind 1.1, for --lab")

    def run(options: argparse.Namespace) -> tuple[bool, str]:
        if options.lab:
            options.mark = "beside in the lab"
            far = beside_lab.Asked(options.hivemind_python)
            with tempfile.TemporaryDirectory() as folder, Nursery(Path(folder)) as nursery:
                return beside_lab.beside_lab(far, nursery)
        asked = beside.Asked(
            options.runs,
            options.batches,
            tuple(options.micros),
            hangs_s=options.hangs_s,
            deaths=not options.no_deaths,
            pause_ms=options.pause_ms,
        )
        with tempfile.TemporaryDirectory() as folder, Nursery(Path(folder)) as nursery:
            return beside.beside(asked, nursery)

    mode.set_defaults(run=run)


def takes_wan(mode: argparse.ArgumentParser) -> None:
    usual = pipeline_wan.Asked()
    mode.add_argument("--batch", type=int, default=usual.batch, help="microbatches")
    mode.add_argument(
        "--batches", type=int, default=usual.batches, help="that are measured; one more warms up"
    )
    mode.add_argument("--mbit", type=float, default=usual.mbit)
    mode.add_argument("--rtt-ms", type=float, default=usual.rtt_ms)

    def run(options: argparse.Namespace) -> tuple[bool, str]:
        asked = pipeline_wan.Asked(options.mbit, options.rtt_ms, options.batch, options.batches)
        with tempfile.TemporaryDirectory() as folder, Nursery(Path(folder)) as nursery:
            return pipeline_wan.wan(asked, nursery)

    mode.set_defaults(run=run)


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def auto_cuts(task: Task, stages: int) -> list[int]:
    parts = task.parts(0)
    micro, given = next(task.batch(0, 0))
    item = {"x": given[0][0], "labels": micro.riders["labels"][0]}
    facts = survey_parts(parts, item, ("x",), task.loss)
    return [stage.first for stage in plan_stages(facts, stages, "auto")[1:]]


def equal(models: dict[str, Task], updates: int, seeds: int) -> tuple[bool, str]:
    rows = [
        "| model | parts | fp32 in 1, 2, 3, 4 stages | bf16 | int8 | int4 |",
        "|---|---|---|---|---|---|",
    ]
    all_equal = True
    for name, task in models.items():
        expected = {seed: train_unsplit(task, seed, updates) for seed in range(seeds)}
        found = [train_pipeline(task, 0, updates, auto_cuts(task, stages))[0] for stages in STAGES]
        same = [each == expected[0][0] for each in found]
        all_equal &= all(same)
        words = "equal" if all(same) else ", ".join("equal" if each else "DIFFERS" for each in same)
        apart = [f"{100 * worst_apart(task, updates, codec, expected):.3f} %" for codec in CODECS]
        rows.append(
            f"| {name} | {len(task.parts(0))} | {words} ({expected[0][0][:16]}) | {' | '.join(apart)} |"
        )
    return all_equal, "\n".join(rows)


def worst_apart(task: Task, updates: int, codec: str, expected: dict[int, tuple[str, list[float]]]) -> float:
    """Of the mean loss of the last updates, in 4 stages, over all seeds."""
    cuts = auto_cuts(task, STAGES[-1])
    apart = []
    for seed, (_, losses) in expected.items():
        _, found, _ = train_pipeline(task, seed, updates, cuts, (codec, codec))
        apart.append(abs(statistics.mean(found[-LAST:]) / statistics.mean(losses[-LAST:]) - 1))
    return max(apart)


if __name__ == "__main__":
    sys.exit(main())
