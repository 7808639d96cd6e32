"""How long a run stands still when the coordinator that leads it is killed, with a standby on etcd.

    python benchmarks/standby.py [--times 50] [--with-etcd] [--lease-s 3]      # about 20 s a time

Three etcd on loopback, two coordinators, two real peers with the default time-outs.  Each time the leader gets kill -9
at a moment that chance draws; the other takes over, the killed one is started again and stands by.  `--with-etcd` kills
the leader of etcd in the same moment.  Prints one line each time and a summary (docs/reliability.md); exit code 1 if a
commit that a peer had heard of was lost, or a takeover was slower than `--goal-s`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rig.arena import DEFAULT, is_kept
from rig.etcd_cluster import EtcdCluster
from rig.nursery import Nursery
from rig.twin_arena import TwinArena

PEERS = ("ann", "bob")


def heard(arena: TwinArena) -> int:
    told = [e["version"] for name in PEERS for e in arena.parties[name].look() if e["event"] == "committed"]
    return max(told, default=0)


def takeover(arena: TwinArena, with_etcd: bool) -> tuple[float, float, int]:
    """(seconds until the standby leads, until the first commit, commits that were lost)."""
    killed = arena.leads
    victim = arena.cluster.leader if with_etcd else None
    if victim is not None:
        arena.cluster.kill(victim)
    at = arena.kill(killed)
    known = heard(arena)
    leads_at = arena.led_by(arena.other, at)
    new = arena.commit(leads_at)
    if victim is not None:
        arena.cluster.start(victim)
    arena.host(killed)
    arena.stands_by(killed)
    arena.takes_part(*PEERS)
    return leads_at - at, new["at"] - at, max(0, known + 1 - new["version"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease-s", type=int, default=0, help="of the leader; the default is the program's")
    parser.add_argument("--goal-s", type=float, default=8.0)
    parser.add_argument("--with-etcd", action="store_true", help="kill the leader of etcd, too")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    took: list[tuple[float, float, int]] = []
    with tempfile.TemporaryDirectory(prefix="farflung-standby-") as place:
        folder = Path(place)
        with Nursery(folder) as nursery, EtcdCluster(folder / "etcd", 3, on_disk=True) as cluster:
            arena = TwinArena(folder, nursery, cluster, given.lease_s, **DEFAULT)
            try:
                arena.host_both()
                for name in PEERS:
                    arena.join(name)
                arena.takes_part(*PEERS)
                for number in range(given.times):
                    time.sleep(chance.uniform(0.0, 2.0))  # the moment of the death
                    took.append(takeover(arena, given.with_etcd))
                    leads_s, commit_s, lost = took[-1]
                    print(
                        f"{number + 1}: leads after {leads_s:.2f} s, commits after {commit_s:.2f} s, lost {lost}",
                        flush=True,
                    )
                is_kept(arena)
            finally:
                arena.close()
    commits = sorted(each[1] for each in took)
    lost = sum(each[2] for each in took)
    in_time = sum(each <= given.goal_s for each in commits)
    print(
        f"{len(took)} times: first commit median {statistics.median(commits):.2f} s, worst {commits[-1]:.2f} s, "
        f"{in_time} within {given.goal_s:g} s; leads after {statistics.median(each[0] for each in took):.2f} s; "
        f"commits lost {lost}; load {os.getloadavg()[0]:.1f}"
    )
    return int(lost > 0 or in_time < len(took))


if __name__ == "__main__":
    sys.exit(main())
