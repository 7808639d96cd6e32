"""Which figures of the pages have drifted: the cheap commands behind them are run again and compared, number by number.

    python benchmarks/drift.py [WORD ...] [--list]

`WORD`: only figures whose command or page has it in its name.  Cheap means: minutes, alone on two cores, and the
numbers do not hang on how busy the machine is (losses, bytes, errors, virtual time).  Seconds and GB/s are not here;
their pages say on which day they were measured.  Exits with 1 if anything drifted; the page is then to be mended, or
the code.  tests/house/test_docs.py checks without running anything that each row still stands on its page.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"(-?\+?[\d,]*\.?\d+)"


@dataclass(frozen=True)
class Figure:
    """`row`: a line of the page, and `printed`: one of what the command prints, each with `{}` for a number that is
    compared and `{_}` for one that is not; `times`: what each printed one is multiplied by, where units differ.
    `within`: what the numbers may differ by, as a share; `least`: as they are."""

    page: str
    command: str
    row: str
    printed: str
    within: float = 0.02
    least: float = 0.0
    times: tuple[float, ...] = ()


def _idle(share: int) -> list[Figure]:
    """One row of the page for three of what is printed."""
    columns = ("blocking", "overlap", "streaming")
    cells = [" | ".join("{} %" if at == place else "{_} %" for at in range(3)) for place in range(3)]
    return [
        Figure(
            "learning.md",
            "benchmarks/learning/learning.py idle --steps 200",
            f"| {share} % of a period | {cell} |",
            f"{schedule}, {share}% of a period {{_}} {{_}}% {{_}} {{_}} {{_}} {{}}%",
            least=0.3,
        )
        for schedule, cell in zip(columns, cells, strict=True)
    ]


def _error(codec: str, path: str) -> Figure:
    """Bits and error, which do not depend on the machine; the page has the error in percent."""
    row = f"| {codec}{', compiled' * (path == 'compiled')} | {{_}} | {{_}} | {{_}} | {{_}} | {{}} | {{}} % |"
    printed = f"{codec}, {path} {{_}} {{_}} {{_}} {{_}} {{}} {{}}"
    return Figure(
        "performance.md", "benchmarks/codec.py --repeats 2", row, printed, within=0.02, times=(1, 100)
    )


def _held_out(codec: str, known: str = "") -> Figure:
    """Loss, and bytes."""
    row, printed = f"| {codec}{known} | {{}} | {{_}} % | {{}} | {{}} |", f"{codec} {{}} {{_}}% {{}} {{}}"
    return Figure("performance.md", "benchmarks/learning/codecs.py", row, printed, within=0.003)


def _slow(row: str, printed: str) -> Figure:
    """Tokens a second."""
    command = "benchmarks/learning/learning.py slow --steps 400 --time-only"
    return Figure(
        "learning.md", command, f"| {row} | {{}} |", f"{printed} {{_}} {{_}}% {{_}} {{_}} {{}}", 0.01
    )


BLOCKS, COARSE = ("int8", "int4", "int2", "topk"), ("int4", "int2", "topk")
FEEDBACK = " with error feedback"
FIGURES = [
    *(figure for share in (20, 80, 120) for figure in _idle(share)),
    _slow("four equal peers, `blocking`", "four equal peers"),
    _slow("one at 1/5, `blocking`, by steps", "one at 1/5, by steps"),
    _slow("one at 1/5, `blocking`, by the clock", "one at 1/5, by the clock"),
    _slow("one at 1/5, `overlap`, by steps", "one at 1/5, overlap"),
    *(
        _error(codec, path)
        for codec, path in (
            ("bf16", "plain"),
            ("sparse", "compiled"),
            *((each, "compiled") for each in BLOCKS),
        )
    ),
    *(_held_out(codec, FEEDBACK * (codec in COARSE)) for codec in BLOCKS),
]


def pattern_of(template: str) -> re.Pattern[str]:
    """Of a line that the template describes, whatever its spaces."""
    made = re.escape(" ".join(template.split())).replace(r"\ ", r"\s+")
    return re.compile(made.replace(r"\{_\}", NUMBER.replace("(", "(?:", 1)).replace(r"\{\}", NUMBER))


def numbers_in(text: str, template: str) -> list[float]:
    """Those of the only line that the template describes; ValueError if there is none, or more than one."""
    found = [match for line in text.splitlines() if (match := pattern_of(template).search(line))]
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines are like {template!r}, one was expected")
    return [float(number.replace(",", "")) for number in found[0].groups()]


def drift_of(figure: Figure, page: str, printed: str) -> list[str]:
    """In words; empty: the page is true."""
    try:
        told, found = numbers_in(page, figure.row), numbers_in(printed, figure.printed)
    except ValueError as error:
        return [f"docs/{figure.page}: {error}"]
    found = [number * times for number, times in zip(found, figure.times or (1.0,) * len(found), strict=True)]
    wrong = [
        f"docs/{figure.page}: {figure.row}: {there:g} there, {here:g} now"
        for there, here in zip(told, found, strict=True)
        if abs(here - there) > max(figure.least, figure.within * abs(there))
    ]
    return wrong


def printed_by(command: str) -> str:
    ran = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"python {command} ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
    return ran.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--list", action="store_true", help="name the commands and end")
    asked = parser.parse_args()
    chosen = [
        figure
        for figure in FIGURES
        if not asked.words or any(word in f"{figure.page} {figure.command}" for word in asked.words)
    ]
    drifted = []
    for command, figures in groupby(chosen, key=lambda figure: figure.command):
        of_command, began_s = list(figures), time.monotonic()
        print(f"python {command}", end="" if not asked.list else f": {len(of_command)} rows\n", flush=True)
        if asked.list:
            continue
        printed = printed_by(command)
        pages = {
            figure.page: (ROOT / "docs" / figure.page).read_text(encoding="utf-8") for figure in of_command
        }
        found = [words for figure in of_command for words in drift_of(figure, pages[figure.page], printed)]
        took_s = time.monotonic() - began_s
        print(f": {len(of_command)} rows, {len(found)} numbers drifted, {took_s:.0f} s", flush=True)
        print("".join(f"  {words}\n" for words in found), end="")
        drifted += found
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
