"""Golden logs of the simulator: what 360 seeded runs wrote down, as one hash each.

A change that only moves code leaves every one of them as it is.  Used by test_golden_logs.py, and by hand:

    python tests/house/golden_logs.py            # compares all of them; says which seeds differ
    python tests/house/golden_logs.py --write    # after a change of behaviour that was meant

The hashes lie in golden_logs.txt, one line a run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from farflung.peer.simulator.world import Scenario, World

FILE = Path(__file__).with_name("golden_logs.txt")
PLAIN = tuple(f"plain {seed}" for seed in range(300))
HOSTILE = tuple(f"hostile {seed}" for seed in range(60))
ALL = PLAIN + HOSTILE


def hash_of(name: str) -> str:
    """Of one run's log: `plain SEED`, or `hostile SEED`, in which one member spoils half of its frames."""
    kind, _, number = name.partition(" ")
    seed = int(number)
    scenario = Scenario.of(seed)
    if kind == "hostile":
        scenario = replace(
            scenario, peers=max(4, scenario.peers), hostile=0.5, hostile_until_s=scenario.end_s
        )
    log = World(seed, scenario).run().log
    return hashlib.sha256("\n".join(log).encode()).hexdigest()


def recorded() -> dict[str, str]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {name: digest for name, _, digest in (line.rpartition(" ") for line in lines)}


def changed(names: Iterable[str]) -> list[str]:
    """Those of these runs whose log is not the recorded one."""
    torch.set_num_threads(1)  # vectors of a dozen values: more threads only wait for each other
    golden = recorded()
    return [name for name in names if hash_of(name) != golden.get(name)]


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        torch.set_num_threads(1)
        FILE.write_text("".join(f"{name} {hash_of(name)}\n" for name in ALL), encoding="utf-8")
        print(f"{len(ALL)} logs recorded")
        return 0
    different = changed(ALL)
    print(f"{len(ALL) - len(different)} logs as recorded, {len(different)} differ")
    print("\n".join(different))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
