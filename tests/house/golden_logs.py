"""Golden logs of the simulator: what some 700 seeded runs wrote down, as one hash each.

A change that only moves code leaves every one of them as it is.  Used by test_golden_logs.py, and by hand:

    python tests/house/golden_logs.py            # compares all of them; says which seeds differ
    python tests/house/golden_logs.py --write    # after a change of behaviour that was meant

Flat runs, most with faults; 40 of each mode; and outcomes: of runs without faults what was committed and what the
state was then, which stays as it is when other frames, or other effects, lead there.
The hashes lie in golden_logs.txt, one line a run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from farflung.coordinator.ledger.records import CommittedBatch, CommittedRound, DigestFixed, from_bytes
from farflung.protocol.round_words import Commit
from farflung.simulator.world import Scenario, World

FILE = Path(__file__).with_name("golden_logs.txt")
PLAIN = tuple(f"plain {seed}" for seed in range(300))
HOSTILE = tuple(f"hostile {seed}" for seed in range(60))
MODES: Mapping[str, Callable[[int], Scenario]] = MappingProxyType(
    {
        "batches": Scenario.of_batches,
        "stages": Scenario.of_stages,
        "local-stages": Scenario.of_local_stages,
        "moves": Scenario.of_moves,
        "groups": Scenario.of_sums,
        "liars": Scenario.of_liars,
        "lost-disks": Scenario.of_lost_disks,
    }
)
OF_MODES = tuple(f"{mode} {seed}" for mode in MODES for seed in range(40))
OUTCOMES = tuple(f"outcome {seed}" for seed in range(100))
ALL = PLAIN + HOSTILE + OF_MODES + OUTCOMES


def hash_of(name: str) -> str:
    """Of one run's log: `plain SEED`; `hostile SEED`, in which one member spoils half of its frames; `MODE SEED`.  Of
    `outcome SEED` that of its commits."""
    kind, _, number = name.partition(" ")
    seed = int(number)
    scenario = MODES.get(kind, Scenario.of)(seed)
    if kind == "hostile":
        scenario = replace(
            scenario, peers=max(4, scenario.peers), hostile=0.5, hostile_until_s=scenario.end_s
        )
    if kind == "outcome":
        scenario = scenario.without_chance()
    world = World(seed, scenario)
    log = world.run().log
    told = commits_of(world) if kind == "outcome" else log
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def commits_of(world: World) -> list[str]:
    """Of each version what went into it and came out of it, in an order that time has no part in."""
    found = []
    for record in map(from_bytes, world.journal):
        match record:
            case CommittedRound(commit=each):
                found.append(_of_commit(each))
            case CommittedBatch(rounds=rounds):
                found += [_of_commit(each.commit) for each in rounds]
            case DigestFixed(fragment=fragment, version=version, digest=digest):
                found.append(f"{fragment} {version} is {digest.hex()}")
    return sorted(found)


def _of_commit(commit: Commit) -> str:
    weights = " ".join(
        f"{who}:{weight!r}" for who, weight in zip(commit.members, commit.weights, strict=True)
    )
    return f"{commit.fragment} {commit.version} of {weights}, times {commit.factor!r}: {commit.hashes.hex()}"


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
