"""An owner that corrupts a chunk of each round, where audits come first: python benchmarks/wrong_sums.py [SEEDS]

Simulated runs of four to six peers (peer/simulator/), half of them in a hostile world: kills, lost messages, cut lines.
In every third run a friend of the owner's audits for it, and two members merge each result again instead of one.
Printed: in how many runs it cheated, how many wrong sums were committed with honest members in the round, who was
convicted, and how many rounds its lies delayed.  Exits with 1 where a wrong sum was committed or a promise was broken.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

from farflung.coordinator.ledger.records import AbortedRound, CommittedRound, from_bytes
from farflung.peer.simulator.invariants import Broken
from farflung.peer.simulator.scenario import Scenario
from farflung.peer.simulator.world import World

CALM = Scenario(drop=0, duplicate=0, slow=0, kill_per_effect=0, cut_per_s=0, trainer_crash_per_s=0)


def scenario_of(seed: int) -> Scenario:
    drawn = Scenario.of(seed) if seed % 2 else CALM
    league = int(seed % 3 == 0)
    return replace(
        drawn,
        peers=4 + seed % 3,
        chunks=4,
        min_peers=2,
        rounds=5,
        cheats=True,
        league=league,
        audit_first=1 + league,
        host_after_s=0.0,
    )


def count(world: World) -> Counter[str]:
    records = [from_bytes(raw) for raw in world.journal]
    return Counter(
        runs=1,
        cheated=bool(world.last.cheated),
        convicted=bool(world.invariants.found),
        committed=sum(isinstance(each, CommittedRound) for each in records),
        aborted=sum(isinstance(each, AbortedRound) for each in records),
        wrong=world.invariants.wrong_committed,
    )


def main() -> int:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seen: Counter[str] = Counter()
    broken = 0
    for seed in range(seeds):
        world = World(seed, scenario_of(seed))
        try:
            world.run()
        except Broken as promise:
            broken += 1
            print(f"seed {seed}: {promise}", flush=True)
        seen += count(world)
    print(
        f"{seen['runs']} runs, {seen['committed']} versions, {seen['aborted']} rounds aborted for whatever reason"
    )
    print(f"its owner cheated in {seen['cheated']}, and was convicted by proof in {seen['convicted']}")
    print(
        f"{seen['wrong']} wrong sums were committed with an honest member in the round; {broken} runs broke a promise"
    )
    return 1 if seen["wrong"] or broken else 0


if __name__ == "__main__":
    sys.exit(main())
