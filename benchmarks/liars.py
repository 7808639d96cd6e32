"""Members that lie about the run's state, over many seeds: python benchmarks/liars.py [SEEDS] [FIRST]

Of 3, 5 or 10 simulated peers some lie, in one of the ways of simulator/bad_peers.py: any number but one about the
state, fewer than half about the work of others.  Printed: by way and size of the league, how many runs ended well; how
many rounds a lie was told until its teller was out; and of the rounds with liars, in how many honest work counted.
A run whose `min_peers` lets liars make its last rounds among themselves, and keep them, is counted by itself: nobody
honest lost or swapped its state in it, or was banned (docs/security.md, "Rounds of liars alone").
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from statistics import mean, median

from farflung.coordinator.admission.admission import Banned
from farflung.coordinator.ledger.records import CommittedRound, from_bytes
from farflung.simulator.invariants import Broken
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import AMONG_LIARS, World


def main() -> int:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    ended: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    told_for: dict[str, list[int]] = defaultdict(list)
    counted: dict[str, list[float]] = defaultdict(list)
    bad = among_liars = 0
    for seed in range(first, first + seeds):
        scenario = Scenario.of_liars(seed)
        row = scenario.lies, f"{scenario.liars} of {scenario.peers}"
        try:
            world = World(seed, scenario)
            outcome = world.run().outcome
            told_for[scenario.lies] += rounds_told(world)
            counted[scenario.lies] += honest_shares(world)
        except Broken as broken:
            outcome = str(broken)
        if outcome == AMONG_LIARS:
            among_liars += 1
            print(f"seed {seed}: {' '.join(row)}: {outcome}", flush=True)
        elif outcome != "finished":
            bad += 1
            print(f"seed {seed}: {' '.join(row)}: {outcome}", flush=True)
        ended[row][outcome] += 1
    for (way, league), outcomes in sorted(ended.items()):
        print(f"{way:7} {league:8} {outcomes['finished']} of {outcomes.total()} finished")
    for way, rounds in sorted(told_for.items()):
        if rounds:
            print(
                f"{way:7} out after {median(rounds):g} rounds (median), {max(rounds)} at most, of {len(rounds)} liars"
            )
    for way, shares in sorted(counted.items()):
        if shares:
            print(
                f"{way:7} honest work in {100 * mean(shares):.1f} % of its rounds, {100 * min(shares):.0f} % at least"
            )
    print(
        f"{among_liars} of {seeds} runs ended with rounds of liars alone, which min_peers = 1 lets them make"
    )
    print(f"{bad} of {seeds} seeds bad")
    return 1 if bad else 0


def honest_shares(world: World) -> list[float]:
    """Of all that honest members could contribute to commits with liars, how much is in them; [] if there are none."""
    commits = [commit for era in world.invariants.eras for commit in era.commits.values()]
    liars = world.league.members
    with_liars = [commit for commit in commits if liars & set(commit.members)]
    could = sum(len(set(commit.members) - liars) for commit in with_liars)
    return [sum(len(set(commit.included) - liars) for commit in with_liars) / could] if could else []


def rounds_told(world: World) -> list[int]:
    """For each liar that was banned: committed rounds from its first lie until then."""
    versions: Counter[int] = Counter()
    found = []
    for record in map(from_bytes, world.journal):
        if isinstance(record, CommittedRound):
            versions[record.commit.fragment] = record.commit.version
        elif isinstance(record, Banned):
            lies = [(f, v) for (peer, f), v in world.league.lied.items() if peer == record.peer]
            found += [max(0, min(versions[fragment] - version for fragment, version in lies))] if lies else []
    return found


if __name__ == "__main__":
    sys.exit(main())
