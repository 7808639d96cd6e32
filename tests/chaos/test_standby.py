"""A coordinator that leads dies, or is cut from the store, or one of etcd dies, or both: the standby takes over, no
commit that a peer heard of is lost, and the audit judges the journals of both coordinators and all peers as one run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farflung.protocol.process import exit_codes
from rig.arena import is_kept
from rig.etcd_cluster import EtcdCluster, needs_etcd
from rig.nursery import Nursery
from rig.twin_arena import TwinArena

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.xdist_group("chaos"),
    pytest.mark.hard,
    needs_etcd,
]
Figures = Callable[..., None]
PEERS = ("ann", "bob")


@pytest.fixture(scope="module")
def standing(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwinArena]:
    folder: Path = tmp_path_factory.mktemp("run")
    with EtcdCluster(folder / "etcd", 3) as cluster:
        made = TwinArena(folder, nursery, cluster)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def arena(standing: TwinArena) -> TwinArena:
    """Whole at the beginning of each test, however the one before ended."""
    running = [
        name for name in ("anna", "berta") if name in standing.parties and standing.parties[name].alive
    ]
    for name in running:
        standing.parties[name].signal(signal.SIGCONT)
        standing.parties[name].signal(signal.SIGTERM)
        standing.reap(name)
    standing.leads = "anna"
    standing.wires.clear()
    standing.host_both(wired=True)
    for name in PEERS:
        if name not in standing.parties or not standing.parties[name].alive:
            standing.join(name)
    standing.takes_part(*PEERS)
    return standing


def heard(arena: TwinArena) -> int:
    """The newest version of which any peer heard that it was committed: nothing older may ever be lost."""
    told = [e["version"] for name in PEERS for e in arena.parties[name].look() if e["event"] == "committed"]
    return max(told, default=0)


def taken_over(arena: TwinArena, since: float, row: str, figures: Figures) -> None:
    """By berta, who goes on where anna was."""
    known = heard(arena)
    leads_at = arena.led_by("berta", since)
    commit = arena.commit(leads_at)
    figures(row="6", fault=row, leads_s=leads_at - since, next_commit_s=commit["at"] - since)
    assert commit["version"] > known, "what a peer had heard of is there"
    arena.takes_part(*PEERS, since=leads_at)
    is_kept(arena)


def test_P5_the_leader_is_killed(arena: TwinArena, figures: Figures) -> None:
    taken_over(arena, arena.kill("anna"), "leader killed, standby on etcd", figures)
    arena.host("anna")
    arena.stands_by("anna")


def test_P5_the_leader_is_cut_from_the_store(arena: TwinArena, figures: Figures) -> None:
    began = time.monotonic()
    arena.cut("anna")
    process = arena.parties["anna"].process
    assert process is not None
    arena.until(lambda: process.poll() is not None, "it ends")
    assert process.wait() == exit_codes.DEPOSED and "leads no longer" in arena.parties["anna"].told()
    taken_over(arena, began, "leader cut from etcd", figures)


def test_P5_the_leader_stands_still_and_wakes_up_deposed(arena: TwinArena, figures: Figures) -> None:
    began = time.monotonic()
    arena.parties["anna"].signal(signal.SIGSTOP)
    taken_over(arena, began, "leader stopped, standby on etcd", figures)
    arena.parties["anna"].signal(signal.SIGCONT)
    process = arena.parties["anna"].process
    assert process is not None
    arena.until(lambda: process.poll() is not None, "it ends")
    assert process.wait() == exit_codes.DEPOSED
    arena.commit(time.monotonic())
    is_kept(arena)


def test_P5_one_etcd_of_three_is_killed(arena: TwinArena, figures: Figures) -> None:
    """Its own leader.  The coordinator goes on, or, where that took longer than its lease, the standby does."""
    began, victim, known = time.monotonic(), arena.cluster.leader, heard(arena)
    arena.cluster.kill(victim)

    def anybody() -> bool:
        for name in ("anna", "berta"):
            told = [
                e for e in arena.parties[name].look() if e["event"] == "committed" and e["at"] > began + 1
            ]
            if told and "late" not in told[-1] and told[-1]["version"] > known:
                arena.leads = name
                return True
        return False

    arena.until(anybody, "a commit")
    figures(row="6", fault="one etcd of three killed", next_commit_s=time.monotonic() - began)
    arena.cluster.start(victim)
    arena.takes_part(*PEERS)
    is_kept(arena)


def test_P5_the_leader_and_one_etcd_are_killed(arena: TwinArena, figures: Figures) -> None:
    victim = arena.cluster.leader
    arena.cluster.kill(victim)
    taken_over(arena, arena.kill("anna"), "leader and one etcd killed", figures)
    arena.cluster.start(victim)
