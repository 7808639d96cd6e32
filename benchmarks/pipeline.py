"""What pipelines compute, beside one process that holds the whole model.

    python benchmarks/pipeline.py equal [--updates 20] [--seeds 3] [--write]

`equal`: every model in 1, 2, 3 and 4 stages with fp32 crossings; the SHA-256 of all weights and buffers must be that of
the unsplit process; then in 4 stages through coarser codecs: how far the loss is off.  Models, data and the
unsplit process are those of tests/rig/unsplit.py.  `--write` puts the figures into docs/pipelines.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from pages import write_between

from farflung.peer.pipeline.cuts import plan_stages
from farflung.peer.pipeline.part_checks import survey_parts
from rig.unsplit import GPT, LLAMA, LOUD, SEQUENTIAL, Task, train_pipeline, train_unsplit

PAGE = HERE.parent / "docs" / "pipelines.md"
STAGES = (1, 2, 3, 4)
CODECS = (("bf16", False), ("int8", False), ("int4", False), ("int4", True))  # with a turn before it?
LAST = 5  # updates whose mean loss is compared
MODELS = {
    "GPT, untied head": GPT,
    "nn.Sequential with BatchNorm and dropout": SEQUENTIAL,
    "Llama of transformers": LLAMA,
    "GPT, one channel 100 times as large": LOUD,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("equal",))
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: task for name, task in MODELS.items() if task is not LLAMA or has_transformers()}
    if len(models) < len(MODELS):
        print("transformers is not installed: no Llama in this table", file=sys.stderr)
    all_equal, text = equal(models, options.updates, options.seeds)
    print(text)
    if options.write:
        write_between(PAGE, options.what, text)
    return 0 if all_equal else 1


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
        "| model | parts | fp32 in 1, 2, 3, 4 stages | bf16 | int8 | int4 | int4 after a turn |",
        "|---|---|---|---|---|---|---|",
    ]
    all_equal = True
    for name, task in models.items():
        expected = {seed: train_unsplit(task, seed, updates) for seed in range(seeds)}
        found = [train_pipeline(task, 0, updates, auto_cuts(task, stages))[0] for stages in STAGES]
        same = [each == expected[0][0] for each in found]
        all_equal &= all(same)
        words = "equal" if all(same) else ", ".join("equal" if each else "DIFFERS" for each in same)
        apart = [f"{100 * worst_apart(task, updates, *how, expected):.3f} %" for how in CODECS]
        rows.append(
            f"| {name} | {len(task.parts(0))} | {words} ({expected[0][0][:16]}) | {' | '.join(apart)} |"
        )
    return all_equal, "\n".join(rows)


def worst_apart(
    task: Task, updates: int, codec: str, turn: bool, expected: dict[int, tuple[str, list[float]]]
) -> float:
    """Of the mean loss of the last updates, in 4 stages, over all seeds."""
    cuts = auto_cuts(task, STAGES[-1])
    apart = []
    for seed, (_, losses) in expected.items():
        _, found, _ = train_pipeline(task, seed, updates, cuts, (codec, codec), turn)
        apart.append(abs(statistics.mean(found[-LAST:]) / statistics.mean(losses[-LAST:]) - 1))
    return max(apart)


if __name__ == "__main__":
    sys.exit(main())
