"""Partitions between real processes, each in a host of its own in the lab (rows 4 and 5 of the fault matrix).

Whoever has the coordinator commits; whoever has not goes on with inner steps and commits nothing; where two peers
cannot talk, the run goes on all the same.  When the network is whole again, everybody takes part.  All timeouts are
the default ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from farflung.protocol.process.journal import Event
from rig.arena import DEFAULT, Arena, included, is_kept
from rig.lab.emulator import HostSpec, Lab
from rig.lab_arena import LabArena

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.xdist_group("chaos"),
    pytest.mark.hard,
]

Figures = Callable[..., None]
PEERS = ("ann", "bob", "cid", "dan")
HUB = "coordinator"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    reason = Lab.unavailable()
    if reason:
        pytest.skip(reason)
    with Lab([HostSpec(name, 200, 200, delay_ms=5) for name in (HUB, *PEERS)], seed=1) as made:
        yield made


@pytest.fixture(scope="module")
def arena(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with LabArena(tmp_path_factory.mktemp("run"), lab, **DEFAULT) as made:
        made.begin(*PEERS)
        yield made


def lost(arena: Arena, name: str, since: float) -> Event:
    """The coordinator gives it up."""
    peer = arena.parties[name].id
    return arena.event(
        arena.coordinator, lambda e: e["event"] == "departed" and e["peer"] == peer, f"{name} is lost", since
    )


def back(arena: Arena, *names: str, since: float) -> float:
    """Seconds until the last of them is in a commit again."""
    return max(arena.commit(since, f"{n} is back", arena.parties[n].id)["at"] for n in names) - since


def commits(arena: Arena, since: float, until: float) -> list[Event]:
    return [e for e in arena.coordinator.look() if e["event"] == "committed" and since < e["at"] < until]


def steps(arena: Arena, name: str) -> int:
    return max((int(e["step"]) for e in arena.parties[name].look() if e["event"] == "frozen"), default=0)


def test_P3_P5_a_minority_is_cut_off_and_comes_back(arena: Arena, lab: Lab, figures: Figures) -> None:
    cut_at = time.monotonic()
    for here in (HUB, "ann", "bob"):
        for there in ("cid", "dan"):
            lab.cut(here, there)
    gone = max(lost(arena, name, cut_at)["at"] for name in ("cid", "dan"))
    commit = arena.commit(gone)
    for _ in range(5):
        commit = arena.commit(commit["at"])
    before = steps(arena, "cid"), arena.parties["cid"].look()
    heard = [e["version"] for e in before[1] if e["event"] == "committed"]
    healed_at = time.monotonic()
    for here in (HUB, "ann", "bob"):
        for there in ("cid", "dan"):
            lab.heal(here, there)
    others = {arena.parties[name].id for name in ("ann", "bob")}
    made = commits(arena, gone, healed_at)
    assert made and all(included(each) <= others for each in made)
    # The first commit may have been on its way to them when the lines were cut.
    assert max(heard, default=0) < made[-1]["version"], "the minority heard nothing of what it had no part in"
    back_s = back(arena, "cid", "dan", since=healed_at)
    first = arena.commit(cut_at)
    figures(row="5", fault="minority cut off", next_commit_s=first["at"] - cut_at, back_s=back_s)
    is_kept(arena)


def test_P2_the_majority_without_the_coordinator_commits_nothing(
    arena: Arena, lab: Lab, figures: Figures
) -> None:
    """Three peers that still have each other, and one that has the coordinator: one is too few, three have no say."""
    cut_at = time.monotonic()
    for name in ("ann", "bob", "cid"):
        lab.cut(HUB, name)
    gone = max(lost(arena, name, cut_at)["at"] for name in ("ann", "bob", "cid"))
    trained = steps(arena, "ann")
    arena.until(
        lambda: "out of contact with the coordinator" in arena.parties["ann"].told(), "it goes on alone"
    )
    time.sleep(3.0)  # many rounds' time: nothing may be committed now
    healed_at = time.monotonic()
    for name in ("ann", "bob", "cid"):
        lab.heal(HUB, name)
    assert commits(arena, gone, healed_at) == []
    back_s = back(arena, *PEERS, since=healed_at)
    assert steps(arena, "ann") > trained
    figures(row="5", fault="majority cut off from the coordinator", back_s=back_s)
    is_kept(arena)


def test_a_peer_whose_words_are_lost_hears_and_is_not_heard(arena: Arena, lab: Lab, figures: Figures) -> None:
    cut_at = time.monotonic()
    lab.cut("dan", HUB, one_way=True)
    gone = lost(arena, "dan", cut_at)
    commit = arena.commit(gone["at"])
    assert arena.parties["dan"].id not in included(commit)
    healed_at = time.monotonic()
    lab.heal("dan", HUB)
    back_s = back(arena, "dan", since=healed_at)
    next_s = arena.commit(cut_at)["at"] - cut_at
    figures(row="5", fault="one way cut, to the coordinator", next_commit_s=next_s, back_s=back_s)
    is_kept(arena)


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
def test_P3_two_peers_that_cannot_talk_do_not_stop_the_run(
    arena: Arena, lab: Lab, figures: Figures, one_way: bool
) -> None:
    cut_at = time.monotonic()
    lab.cut("cid", "dan", one_way=one_way)
    commit = first = arena.commit(cut_at)
    for _ in range(10):
        commit = arena.commit(commit["at"])
    healed_at = time.monotonic()
    lab.heal("cid", "dan")
    made = commits(arena, cut_at, healed_at)
    part = sum(len(included(each)) for each in made) / (len(made) * len(PEERS))
    # What the two can't give each other goes through owners that reach both.
    assert all(len(included(each)) == len(PEERS) for each in made[2:])
    back_s = back(arena, *PEERS, since=healed_at)
    fault = f"a pair cut{', one way' if one_way else ''}"
    worst_s = max(each["seconds"] for each in made)
    figures(
        row="5",
        fault=fault,
        next_commit_s=first["at"] - cut_at,
        back_s=back_s,
        participation=part,
        worst_round_s=worst_s,
    )
    is_kept(arena)


def test_a_line_that_comes_and_goes(arena: Arena, lab: Lab, figures: Figures) -> None:
    """Away for two seconds, there for two, six times."""
    began = time.monotonic()
    for _ in range(6):
        lab.cut("dan")
        time.sleep(2.0)
        lab.heal("dan")
        time.sleep(2.0)
    ended = time.monotonic()
    others = {arena.parties[name].id for name in ("ann", "bob", "cid")}
    made = commits(arena, began, ended)
    part = sum(len(included(each) & others) for each in made) / (3 * max(1, len(made)))
    back_s = back(arena, "dan", since=ended)
    figures(row="5", fault="a line that flaps", back_s=back_s, participation=part, commits=len(made))
    assert made
    is_kept(arena)


def test_a_host_that_vanishes_without_a_word_is_found_by_its_silence(
    arena: Arena, lab: Lab, figures: Figures
) -> None:
    """Its connections stay half open at all others: no FIN and no reset ever arrives."""
    cut_at = time.monotonic()
    lab.cut("dan")
    arena.kill("dan")
    gone = lost(arena, "dan", cut_at)
    assert gone["cause"] == "silent"
    commit = arena.commit(gone["at"])
    lab.heal("dan")
    again = time.monotonic()
    arena.join("dan")
    back_s = back(arena, "dan", since=again)
    figures(
        row="4", fault="half-open connections", detected_s=gone["at"] - cut_at,
        next_commit_s=commit["at"] - cut_at, back_s=back_s,
    )  # fmt: skip
    is_kept(arena)
