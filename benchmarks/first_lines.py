"""How soon a command says something: from its start to its first line, and to the line that people wait for.

    python benchmarks/first_lines.py              # on this machine as it is
    python benchmarks/first_lines.py --busy 6     # beside six processes that do nothing but compute

Each command is a process of its own, started as a person starts it; `join` runs in a small run of its own, whose first
peer it is.  The figure is the median of --repeats; what counts against the goal of a second is the first line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PATIENCE_S = 300.0
IN_THE_RUN = r"\b[1-9] alive"
RUN_TOML = """
[run]
name = "first-lines"
rounds = 1000
min_peers = 1
[model]
layers = 1
width = 16
heads = 2
context = 16
"""


@dataclass
class Spoken:
    """What one command said, and when after its start."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    first_cpu_s: float = 0.0  # that its process had used by the first line: what load does not change

    @property
    def first_s(self) -> float:
        return self.lines[0][0]

    def until(self, words: str) -> float:
        """`words`: a regular expression."""
        return next(at for at, line in self.lines if re.search(words, line))


@dataclass
class Speaker:
    """A command whose words come in through one pipe, stdout and stderr alike."""

    words: list[str]
    folder: Path
    spoken: Spoken = field(default_factory=Spoken)

    def __enter__(self) -> Speaker:
        environment = os.environ | {"FARFLUNG_HOME": str(self.folder / "home"), "PYTHONUNBUFFERED": "1"}
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "farflung", *self.words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # who has started processes ends them
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    @property
    def _pipe(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def hear(self, words: str | None = None) -> Spoken:
        """Until a line has these words, a regular expression; None: until it ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while time.monotonic() - self._began < PATIENCE_S:
                if not selector.select(1.0):
                    continue
                line = self._pipe.readline()
                if not line:
                    if words is None:
                        return self.spoken
                    raise SystemExit(
                        f"farflung {self.words[0]} ended without '{words}':\n"
                        + "".join(said for _, said in self.spoken.lines)
                    )
                if not self.spoken.lines:
                    self.spoken.first_cpu_s = cpu_of(self.process.pid)
                self.spoken.lines.append((time.monotonic() - self._began, line))
                if words is not None and re.search(words, line):
                    return self.spoken
        raise SystemExit(f"farflung {self.words[0]}: no '{words}' within {PATIENCE_S:g} s")


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_round(folder: Path) -> dict[str, float]:
    """Every command once; seconds by what was waited for."""
    (folder / "run.toml").write_text(RUN_TOML, encoding="utf-8")
    took: dict[str, float] = {}

    def whole(name: str, words: list[str]) -> None:
        with Speaker(words, folder) as command:
            took[name] = command.hear().first_s
            took[f"{name}, CPU"] = command.spoken.first_cpu_s

    whole("farflung --help: first line", ["--help"])
    whole("farflung init: first line", ["init", str(folder / "new.toml")])
    words = ["coordinate", "--plain", "--listen", "127.0.0.1:0", str(folder / "run.toml")]
    with Speaker(words, folder) as coordinator:
        said = coordinator.hear('join "farflung://')
        url = said.lines[-1][1].split('"')[1]
        took["farflung coordinate: first line"] = said.first_s
        took["farflung coordinate: first line, CPU"] = said.first_cpu_s
        took["farflung coordinate: the join URL"] = said.until("farflung://")
        whole("farflung status: first line", ["status", url])
        whole("farflung doctor: first line", ["doctor", url])
        with Speaker(["join", "--plain", url], folder) as peer:
            said = peer.hear("version 0 is here")
            took["farflung join: first line"] = said.first_s
            took["farflung join: first line, CPU"] = said.first_cpu_s
            took["farflung join: the agent is there"] = said.until("this peer is ")
            took["farflung join: in the run, the first peer"] = said.until("version 0 is here")
    with Speaker(["demo"], folder) as demo:
        said = demo.hear(IN_THE_RUN)
        took["farflung demo: first line"] = said.first_s
        took["farflung demo: a peer is in the run"] = said.until(IN_THE_RUN)
        took["farflung demo: longest silence until then"] = max(
            later - earlier for (earlier, _), (later, _) in zip(said.lines, said.lines[1:], strict=False)
        )
    return took


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def main(measure: Callable[[Path], dict[str, float]] = one_round) -> int:
    parser = argparse.ArgumentParser(description="how soon a command says something")
    parser.add_argument("--busy", type=int, default=0, help="so many processes compute beside it")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    rounds = []
    with busy(asked.busy):
        for _ in range(asked.repeats):
            with tempfile.TemporaryDirectory(prefix="farflung-first-") as folder:
                rounds.append(measure(Path(folder)))
    load = f"{asked.busy} busy processes on {os.cpu_count()} cores, {asked.repeats} times"
    print(f"| {load} | seconds, median | most |\n|---|---|---|")
    for name in rounds[0]:
        took = [each[name] for each in rounds]
        print(f"| {name} | {statistics.median(took):.2f} | {max(took):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
