"""What processes hold while they live, and what they leave behind: memory, open files, threads, shared memory.

    prints = Footprints()
    prints.look({"peer01": [pid, ...]}, now)   # every few seconds
    prints.growth()                            # how memory grew in those that lived long enough
    prints.left_behind()                       # shared memory and folders of those processes that are still there

Used by storm.py.  It only reads /proc; it asks no process anything.  By itself it watches an undisturbed run whose
rounds are as quick as they get, since what leaks, leaks with every round:

    python benchmarks/footprints.py [--minutes 15] [--peers 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rig.arena import Arena
from rig.nursery import Nursery

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
WARM_UP_S = 60.0  # a process's first minute is not counted: it imports, connects and fills its buffers
LOOK_S = 5.0
LEAST_S = 180.0  # after it: shorter lives tell nothing about a slope


@dataclass
class Life:
    """One process: when it was looked at, and what it held then."""

    name: str
    at: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)

    def after_warm_up(self, values: list[float]) -> tuple[list[float], list[float]]:
        kept = [
            (at, value) for at, value in zip(self.at, values, strict=True) if at >= self.at[0] + WARM_UP_S
        ]
        return [at for at, _ in kept], [value for _, value in kept]

    @property
    def is_long(self) -> bool:
        return self.at[-1] - self.at[0] >= WARM_UP_S + LEAST_S


@dataclass
class Footprints:
    lives: dict[int, Life] = field(default_factory=dict)

    def look(self, processes: Mapping[str, Iterable[int]], now: float) -> None:
        for name, pids in processes.items():
            for pid in pids:
                try:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    files = len(os.listdir(f"/proc/{pid}/fd"))
                except (OSError, IndexError):
                    continue  # it ended just now
                life = self.lives.setdefault(pid, Life(name))
                life.at.append(now)
                life.rss_mb.append(pages * PAGE_BYTES / 1e6)
                life.files.append(float(files))

    def growth(self) -> dict[str, object]:
        """MB and open files an hour, of every process that lived long enough: the median and the most."""
        told: dict[str, object] = {}
        for kind in sorted({kind_of(life.name) for life in self.lives.values()}):
            lives = [x for x in self.lives.values() if kind_of(x.name) == kind and x.is_long]
            if not lives:
                continue
            memory = [slope_per_hour(*life.after_warm_up(life.rss_mb)) for life in lives]
            files = [slope_per_hour(*life.after_warm_up(life.files)) for life in lives]
            told[f"{kind}: lived {LEAST_S + WARM_UP_S:g} s or more"] = str(len(lives))
            told[f"{kind}: RSS"] = f"median {statistics.median(x.rss_mb[-1] for x in lives):.0f} MB"
            told[f"{kind}: RSS growth"] = _spread(memory, "MB")
            told[f"{kind}: growth of open files"] = _spread(files, "files")
        return told

    def left_behind(self) -> list[str]:
        """After the end: shared memory and folders that carry one of their numbers."""
        homes = (Path("/dev/shm"), Path(tempfile.gettempdir()))
        return sorted(str(x) for home in homes for pid in self.lives for x in home.glob(f"farflung-{pid}-*"))

    def still_running(self) -> list[int]:
        return [pid for pid in self.lives if Path(f"/proc/{pid}").exists()]


def kind_of(name: str) -> str:
    return name.rstrip("0123456789")


def slope_per_hour(at: list[float], values: list[float]) -> float:
    """Least squares."""
    return 3600.0 * statistics.linear_regression(at, values).slope


def _spread(values: list[float], unit: str) -> str:
    return f"median {statistics.median(values):+.1f}, most {max(values):+.1f} {unit} an hour"


def watch(folder: Path, minutes: float, peers: int) -> None:
    prints = Footprints()
    with Nursery(folder) as nursery:
        arena = Arena(folder / "run", nursery, sync_every=2)
        arena.step_s = 0.005
        names = [f"peer{number:02}" for number in range(peers)]
        try:
            arena.begin(*names)
            begun = time.monotonic()
            while time.monotonic() - begun < 60 * minutes:
                time.sleep(LOOK_S)
                prints.look(arena.processes(), time.monotonic())
            commits = sum(each["event"] == "committed" for each in arena.coordinator.look())
        finally:
            arena.close()
    print(f"{commits} commits in {minutes:g} minutes; {len(prints.left_behind())} folders left behind")
    for what in sorted({life.name for life in prints.lives.values()}):
        for life in (each for each in prints.lives.values() if each.name == what):
            half = len(life.at) // 2
            rate = slope_per_hour(life.at[half:], life.rss_mb[half:])
            at = [life.rss_mb[index] for index in (0, len(life.at) // 4, half, -1)]
            told = " ".join(f"{mb:.1f}" for mb in at)
            print(
                f"{what}: {told} MB at the start, a quarter, a half and the end; then {rate:+.2f} MB an hour"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="how memory grows in a run whose rounds are quick")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--peers", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        watch(Path(place), asked.minutes, asked.peers)
