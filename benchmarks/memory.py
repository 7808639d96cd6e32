"""The tables of docs/memory.md: what taking part needs in memory, on paper, for every way of doing it.

    python benchmarks/memory.py            # prints them
    python benchmarks/memory.py --write    # puts them into docs/memory.md

Nothing is measured here.  The arithmetic is peer/footprint.py's, which tests hold to what small runs take.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pages import write_between

from farflung.peer.footprint import (
    FootprintRow,
    MemoryNeed,
    MemoryRules,
    ModelSize,
    need_of,
    of_helper,
    of_peer,
    of_stage,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
SIZES = (("1B", 1.0e9), ("7B", 6.74e9), ("10B", 10.2e9))
STAGES = 4


class Mode(NamedTuple):
    name: str
    rows: Callable[[float], list[FootprintRow]]  # of a model with so many values


def modes() -> list[Mode]:
    int8 = MemoryRules(2)
    overlap = MemoryRules(2, codec="auto", goes_on=True)
    # What is summed over a batch goes out as it is.
    batch = MemoryRules(3, codec="fp32", gather_codec="fp32", is_batch=True)
    local = MemoryRules(2, is_batch=True, is_local=True)

    def bf16(values: float) -> ModelSize:
        return ModelSize(values, value_bytes=2, optimizer_bytes=4, on_gpu=True)

    def fp32(values: float) -> ModelSize:
        return ModelSize(values, on_gpu=True)

    return [
        Mode("`blocking`, int8, a bf16 model", lambda n: of_peer(int8, bf16(n))),
        Mode("... with `[merge] audit = 0`", lambda n: of_peer(MemoryRules(2, is_audited=False), bf16(n))),
        Mode("... with `results` on disk", lambda n: of_peer(MemoryRules(2, results_on_disk=True), bf16(n))),
        Mode("`blocking`, int8, an fp32 model", lambda n: of_peer(int8, fp32(n))),
        Mode("... without a GPU", lambda n: of_peer(int8, ModelSize(n))),
        Mode("... fp32 both ways", lambda n: of_peer(MemoryRules(2, "fp32", "fp32"), fp32(n))),
        Mode('... `step = "adamw"` or `"muon"`', lambda n: of_peer(MemoryRules(3), fp32(n))),
        Mode("`overlap` or `streaming`, auto, bf16", lambda n: of_peer(overlap, bf16(n))),
        Mode("`overlap`, int4, bf16", lambda n: of_peer(MemoryRules(2, "int4", "int4", True), bf16(n))),
        Mode("8 ranks, FSDP2, `blocking` int8, fp32", lambda n: of_peer(int8, fp32(n), 8)),
        Mode("8 ranks, FSDP2, `overlap` auto, bf16", lambda n: of_peer(overlap, bf16(n), 8)),
        Mode("8 ranks, DDP, `blocking` int8, bf16", lambda n: of_peer(int8, bf16(n), 8, sharded=False)),
        Mode(f"a stage of {STAGES}, batches, fp32", lambda n: stage(batch, n / STAGES)),
        Mode(f"a stage of {STAGES}, local steps", lambda n: stage(local, n / STAGES)),
        Mode("`farflung assist`, int8", lambda n: of_helper(int8, n)),
    ]


def stage(rules: MemoryRules, values: float) -> list[FootprintRow]:
    return of_stage(rules, 8 * values, values, values)


def table() -> str:
    heads = [f"{name}: {place}" for name, _ in SIZES for place in ("GPU", "host")]
    lines = [
        "| mode | GPU, bytes a parameter | host | disk | " + " | ".join(heads) + " |",
        "|---|" + "---|" * (3 + len(heads)),
    ]
    for mode in modes():
        needs = [need_of(mode.rows(values)) for _, values in SIZES]
        each = _bytes_of(needs[0], SIZES[0][1])
        cells = [f"{size / 1e9:.0f} GB" if size else "" for need in needs for size in need[:2]]
        lines.append(f"| {mode.name} | {each} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _bytes_of(need: MemoryNeed, values: float) -> str:
    sizes = need.gpu_bytes, need.host_bytes, need.disk_bytes
    return " | ".join(f"{size / values:.1f}" if size else "" for size in sizes)


def breakdown() -> str:
    """Of the first mode and of the one that keeps most."""
    lines = [
        "| what | whose | where | `blocking` int8, bf16 | `overlap` auto, bf16 |",
        "|---|---|---|---|---|",
    ]
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for column, mode in enumerate((modes()[0], modes()[7])):
        for row in mode.rows(SIZES[0][1]):
            key = row.what, row.owner, row.place, row.only_when
            found.setdefault(key, [0.0, 0.0])[column] = row.size_bytes / SIZES[0][1]
    for (what, owner, place, only_when), sizes in found.items():
        name = f"{what} ({only_when})" if only_when else what
        cells = " | ".join(f"{size:.1f}" if size else "" for size in sizes)
        lines.append(f"| {name} | {owner} | {place} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/memory.md")
    found = {"modes": table(), "things": breakdown()}
    if parser.parse_args().write:
        for mark, text in found.items():
            write_between(PAGE, mark, text)
    else:
        print("\n\n".join(found.values()))


if __name__ == "__main__":
    main()
