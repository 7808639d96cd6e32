"""Do the tests notice?  Breaks one rule of the protocol at a time, in a copy of the checkout, and runs its tests.

    python tests/house/mutants.py [--only WORDS] [--jobs 1] [--patience 900]

The rules stand in mutant_list.py.  A mutant is caught when a test fails with it that passes without it; it survives
when all tests that are named for it pass.  All of these belong to `make test` and `make hard`.  Prints a line for each
mutant, the survivors and the share, and exits with 1 where fewer than 95 % were caught.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutant_list import MUTANTS, Mutant

# Imported once: each pytest is forked from here.  Of farflung there must be nothing yet.
for name in ("torch", "hypothesis", "zmq", "cryptography", "pydantic", "msgspec", "fsspec", "xdist"):
    importlib.import_module(name)

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
        self._good: set[str] = set()  # tests that pass without a mutant
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
        if found[1] not in self._good and self._pytest((found[1],), patience_s)[0] != 0:
            return False, f"no test: {found[1]} fails without the mutant too"
        self._good.add(found[1])
        return True, found[1]

    def _pytest(self, tests: tuple[str, ...], patience_s: float) -> tuple[int | None, str]:
        """The exit code, None if it did not end in time; and what was said."""
        with tempfile.TemporaryFile(mode="w+") as told:
            child = os.fork()
            if child == 0:
                self._become_pytest(tests, told.fileno())
            code = _end_of(child, patience_s)
            told.seek(0)
            return code, told.read()

    def _become_pytest(self, tests: tuple[str, ...], out: int) -> None:
        """Never returns."""
        code: int = FAILED
        try:
            os.setpgid(0, 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(self.root)
            for name in [name for name in os.environ if name.startswith("FARFLUNG_")]:
                del os.environ[name]
            os.environ["FARFLUNG_LONG"] = "3"  # many seeds of a kind of world, not the first ones alone
            os.environ["PYTHONPATH"] = str(self._folder)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True  # a file that changed within a second looks as it was
            sys.path.insert(0, str(self._folder))
            code = pytest.main(["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests])
        finally:
            sys.stdout.flush()
            os._exit(code)


def _end_of(child: int, patience_s: float) -> int | None:
    """Its exit code; whatever it started ends with it."""
    end = time.monotonic() + patience_s
    status = 0
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


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
