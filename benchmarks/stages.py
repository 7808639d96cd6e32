"""Batches of a model in stages, with real agents, lines and coordinator on this machine: how near to the ideal.

    python benchmarks/stages.py --stages 4 --seats 4 --unit-ms 15,20,20,40 --batch 1500
    python benchmarks/stages.py --kill-every 30 --return-after 3      # a peer dies, and comes back
    python benchmarks/stages.py --help

The trainers take a given time for a microbatch and compute nothing (stage_bench/).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from as_script import called
from stage_bench.pipeline_bench import PipelineOptions, bench_pipeline
from stage_bench.pipeline_figures import table


def stages(**words: object) -> None:
    """Time the batches of a model in stages on this machine, with trainers that take a given time."""
    asked = PipelineOptions(**words)  # type: ignore[arg-type]
    result = bench_pipeline(asked)
    print(json.dumps(result) if asked.json else "\n".join(table(result)), flush=True)


if __name__ == "__main__":
    sys.exit(called(stages, PipelineOptions))
