"""Fuzzes the same parsers as fuzz.py, guided by which of their lines and comparisons an input reaches (atheris).

    python benchmarks/fuzz_guided.py                       # a minute of each parser
    python benchmarks/fuzz_guided.py --seconds 600 bulk    # one of them, for longer
    python benchmarks/fuzz_guided.py --corpus DIR          # goes on from inputs that were found before

libFuzzer ends its process, so each parser has one of its own.  An input that raises anything but what its target allows
is a crash: it is written beside the corpus, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve()
LONGEST_BYTES = 1 << 16
NAMES = (
    "control",
    "bulk",
    "codec payloads",
    "join URL",
    "journal",
    "checkpoint manifest",
    "a member's frames",
    "a run's schedule",
)


def guide(name: str, corpus: Path, seconds: int) -> None:
    """In a process of its own; does not return."""
    import atheris

    with atheris.instrument_imports(
        include=[
            "farflung.protocol",
            "farflung.coordinator",
            "farflung.checkpoints",
            "farflung.collectives.round",
            "farflung.peer.machine",
        ]
    ):
        import fuzz
    with tempfile.TemporaryDirectory() as folder:
        target = next(each for each in fuzz.all_targets(Path(folder)) if each.name == name)
        for number, seed in enumerate(target.seeds):
            (corpus / f"seed{number:03}").write_bytes(seed)

        def one(raw: bytes) -> None:
            try:
                target.call(raw)
            except target.allowed:
                pass

        words = [
            sys.argv[0],
            str(corpus),
            f"-max_total_time={seconds}",
            f"-max_len={LONGEST_BYTES}",
            f"-artifact_prefix={corpus.parent}/crash of {name} ",
            "-print_final_stats=1",
            "-timeout=10",
            "-rss_limit_mb=4096",
        ]
        atheris.Setup(words, one)
        atheris.Fuzz()


def fuzzed(name: str, folder: Path, seconds: int) -> tuple[int, str]:
    """Exit code, and how many inputs were tried."""
    corpus = folder / name
    corpus.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE), "--seconds", str(seconds), "--one", name, "--corpus", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300)
    told = [
        line.rsplit(":", 1)[1]
        for line in done.stderr.splitlines()
        if line.startswith("stat::number_of_executed")
    ]
    tried = told[0].strip() if told else "0"
    print(
        f"| {name} | {int(tried):,} | {len(list(corpus.iterdir()))} | {'ok' if not done.returncode else 'CRASH'} |",
        flush=True,
    )
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
    return done.returncode, tried


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="parts of the names of those wanted [all]")
    parser.add_argument("--seconds", type=int, default=60, help="of each parser")
    parser.add_argument("--corpus", type=Path, default=None)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.corpus or Path(scratch)
        if asked.one:
            guide(asked.one, folder / asked.one, asked.seconds)
        print("| parser | inputs | corpus | |\n|---|---|---|---|")
        wanted = [n for n in NAMES if not asked.targets or any(word in n for word in asked.targets)]
        return int(any(fuzzed(name, folder, asked.seconds)[0] for name in wanted))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
