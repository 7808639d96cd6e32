"""Which models and lines fit together in a pipeline: the part of a GPU that a home line keeps busy, by calculation.

    python benchmarks/pipeline_lines.py [--write]

A stage of a decoder with P parameters and microbatches of one sample of T positions takes 8 P T floating-point
operations, its second forward pass included.  A stage in the middle sends and receives two crossings of T x width
values meanwhile.  Nothing is measured here: it is the arithmetic of `farflung doctor`, which measures the line and
takes the seconds from the run, for machines and models that people ask about.  `--write` puts the table into
docs/pipelines.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from pages import write_between

from farflung.collectives.pipeline.seats import BorderTraffic
from farflung.console.batches.stage_advice import StageFacts, use_of
from farflung.protocol.caps import si

PAGE = Path(__file__).resolve().parents[1] / "docs" / "pipelines.md"
FLOPS_PER_S = 30e12  # of a consumer's GPU in bf16, as it is reached
POSITIONS = 2048
PASSES = 8  # floating-point operations for a parameter and a position: 2 forward, 2 again, 4 backward
LINES_MBIT = (20, 50, 200, 1000)


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    width: int
    stages: int

    @property
    def unit_s(self) -> float:
        return PASSES * self.parameters / self.stages * POSITIONS / FLOPS_PER_S

    def share(self, mbit: float, codec: str) -> float:
        """Of a GPU in a stage in the middle, behind a line of so many Mbit/s both ways."""
        crossed = BorderTraffic(POSITIONS * self.width, 0)
        held = 4 * self.parameters / self.stages
        stages = [StageFacts(2 * held, held, self.unit_s, 1, crossed) for _ in range(self.stages)]
        use = use_of(stages, 1, codec, mbit * 1e6 / 8, mbit * 1e6 / 8)
        if use is None:
            raise ValueError(f"{self.name} takes no time")
        return use.share


MODELS = (
    Model("1B, width 2048", 1.0e9, 2048, 4),
    Model("3B, width 3072", 3.2e9, 3072, 4),
    Model("7B, width 4096", 6.7e9, 4096, 8),
    Model("13B, width 5120", 13e9, 5120, 8),
    Model("70B, width 8192", 69e9, 8192, 16),
)


def table() -> str:
    lines = " | ".join(f"{mbit} Mbit/s" for mbit in LINES_MBIT)
    rows = [
        f"| model | stages | s a microbatch | memory of a stage | {lines} |",
        "|---" * (4 + len(LINES_MBIT)) + "|",
    ]
    for model in MODELS:
        shares = " | ".join(
            f"{model.share(mbit, 'int8'):.0%}, {model.share(mbit, 'int4'):.0%}" for mbit in LINES_MBIT
        )
        memory = si(8 * model.parameters / model.stages, "B")
        rows.append(f"| {model.name} | {model.stages} | {model.unit_s:.2f} | {memory} | {shares} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/pipelines.md")
    if parser.parse_args().write:
        write_between(PAGE, "lines", table())
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
