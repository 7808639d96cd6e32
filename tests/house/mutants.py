"""Do the tests notice?  Breaks one rule of the protocol at a time, in a copy of the checkout, and runs its tests.

    python tests/house/mutants.py [--only WORDS] [--jobs 1] [--patience 900]

The rules stand in mutant_list.py.  A mutant is caught when a test fails with it that passes without it; it survives
when all tests that are named for it pass.  All of these belong to `make test`.  Prints a line for each mutant, the
survivors and the share, and exits with 1 where fewer than 95 % were caught.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LEAST = 0.95
PATIENCE_S = 900.0
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
FAILED = 1  # pytest's exit code
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) ([^\s[]+)", re.M)  # with all its parameters


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    caught: bool
    by: str  # the test that failed, or what happened instead
    took_s: float


class Copy:
    """A checkout of its own, under the name farflung: what is imported and tested there is what lies there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.root = folder / "farflung"
        shutil.copytree(ROOT, self.root, ignore=LEFT_OUT)

    def judge(self, mutant: Mutant, patience_s: float) -> Outcome:
        path, began = self.root / mutant.file, time.monotonic()
        right = path.read_text(encoding="utf-8")
        path.write_text(right.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            code, told = self._pytest(mutant.tests, patience_s)
        finally:
            path.write_text(right, encoding="utf-8")
        caught, by = self._verdict(code, told, patience_s)
        return Outcome(mutant, caught, by, time.monotonic() - began)

    def _verdict(self, code: int | None, told: str, patience_s: float) -> tuple[bool, str]:
        if code == 0:
            return False, "nobody"
        if code is None:
            return True, f"it did not end within {patience_s:g} s"
        found = FIRST_FAILURE.search(told)
        if code != FAILED or found is None:
            return False, f"no test: pytest ended with {code}: {told[-300:]}"
        if self._pytest((found[1],), patience_s)[0] != 0:
            return False, f"no test: {found[1]} fails without the mutant too"
        return True, found[1]

    def _pytest(self, tests: tuple[str, ...], patience_s: float) -> tuple[int | None, str]:
        """The exit code, None if it did not end in time; and what was said."""
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
        environ = {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [*words, *tests],
                cwd=self.root,
                env={**_environ(), **environ},
                capture_output=True,
                text=True,
                timeout=patience_s,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout + done.stderr


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FARFLUNG_")}


def run_all(mutants: tuple[Mutant, ...], jobs: int, patience_s: float) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder, str(number))))

        def one(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return copy.judge(mutant, patience_s)
            finally:
                copies.put(copy)

        outcomes = []
        with ThreadPoolExecutor(jobs) as pool:
            for each in pool.map(one, mutants):
                outcomes.append(each)
                word = "caught  " if each.caught else "SURVIVED"
                print(f"{word} {each.took_s:6.1f} s  {each.mutant.name}  [{each.by}]", flush=True)
        return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with these words in their name or file")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, help="seconds for the tests of a mutant"
    )
    options = parser.parse_args()
    chosen = tuple(m for m in MUTANTS if options.only in m.name or options.only in m.file)
    if not chosen:
        print(f"no mutant has {options.only!r} in its name or file")
        return 2
    outcomes = run_all(chosen, options.jobs, options.patience)
    survivors = [each for each in outcomes if not each.caught]
    for each in survivors:
        print(f"survived: {each.mutant.name}: {each.mutant.file}: {each.mutant.old!r} -> {each.mutant.new!r}")
    share = 1.0 - len(survivors) / len(outcomes)
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants were caught: {share:.1%}")
    return 0 if share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
