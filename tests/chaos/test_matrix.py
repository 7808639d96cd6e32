"""Rows of the fault matrix that are no failpoint alone: real processes, real faults, judged by the audit.

docs/reliability.md has the whole matrix, with the tests that cover the other rows.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from rig.arena import DEFAULT, Arena, included, is_kept
from rig.pieces import TIMES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.xdist_group("chaos"),
    pytest.mark.hard,
]

Figures = Callable[..., None]
KILLS = 10 * TIMES
SEED = int(os.environ.get("FARFLUNG_SEED", "1"))


# ---- peers -------------------------------------------------------------------------------------------------


def test_a_loop_that_is_stuck_counts_as_dead_though_its_sockets_live(arena: Arena, figures: Figures) -> None:
    began = time.monotonic()
    dan = arena.join("dan", "gather.mid=sleep:4")
    broken = arena.broken("dan", "gather.mid", began)
    commit = arena.commit(broken["at"])
    gone = arena.event(
        arena.coordinator,
        lambda e: e["event"] == "departed" and e["peer"] == dan.id,
        "it is lost",
        broken["at"],
    )
    back = arena.commit(gone["at"], "it takes part again", dan.id)
    seen = {"next_commit_s": commit["at"] - broken["at"], "detected_s": gone["at"] - broken["at"]}
    figures(row="2", fault="loop stuck for 4 s", **seen, back_s=back["at"] - broken["at"])
    assert gone["cause"] == "silent", "its connection was never closed"
    arena.kill("dan")
    is_kept(arena)


@pytest.mark.parametrize("point", ["scatter.mid", "gather.mid"])
def test_with_default_timeouts_a_peer_that_stops_is_found_by_its_silence(
    build: Callable[..., Arena], figures: Figures, point: str
) -> None:
    """Killed it would show by its connections; a stopped one keeps them all."""
    arena = build(**DEFAULT)
    arena.begin("ann", "bob", "cid")
    began = time.monotonic()
    dan = arena.join("dan", f"{point}=stop")
    broken = arena.broken("dan", point, began)
    gone = arena.event(
        arena.coordinator,
        lambda e: e["event"] == "departed" and e["peer"] == dan.id,
        "it is lost",
        broken["at"],
    )
    commit = arena.commit(gone["at"])
    assert gone["cause"] == "silent" and dan.id not in included(commit)
    dan.signal(signal.SIGCONT)
    back = arena.commit(commit["at"], "it takes part again", dan.id)
    figures(
        row="2", fault=f"stopped at {point}, default timeouts", detected_s=gone["at"] - broken["at"],
        next_commit_s=commit["at"] - broken["at"], back_s=back["at"] - commit["at"],
    )  # fmt: skip
    is_kept(arena)
    arena.close()


def test_a_trainer_that_is_stuck_is_started_again(arena: Arena, figures: Figures) -> None:
    dan = arena.join("dan", FARFLUNG_STUCK_AFTER="3")
    arena.takes_part("dan")
    began = time.monotonic()
    os.kill(arena.trainer_of("dan"), signal.SIGSTOP)
    stuck = arena.event(dan, lambda e: e["event"] == "trainer" and e["what"] == "stuck", "it is seen", began)
    gone = arena.event(dan, lambda e: e["event"] == "trainer" and e["what"] == "gone", "it is killed", began)
    back = arena.commit(gone["at"], "its next trainer takes part", dan.id)
    figures(row="2", fault="trainer stuck", detected_s=stuck["at"] - began, back_s=back["at"] - gone["at"])
    assert "no step for 3 s" in dan.told()
    arena.kill("dan")
    is_kept(arena)


def test_a_slow_peer_takes_part_with_what_it_has_and_holds_up_nobody_for_long(
    build: Callable[..., Arena], figures: Figures
) -> None:
    arena = build(deadline_s=0.5)
    arena.begin("ann", "bob", "cid")
    before = gaps(arena, 20)
    arena.step_s = 0.1
    slow = arena.join("dan")
    arena.takes_part("dan")
    after = gaps(arena, 20)
    last = [e for e in arena.coordinator.look() if e["event"] == "committed"][-20:]
    part = sum(slow.id in included(each) for each in last) / len(last)
    figures(row="3", fault="a peer ten times slower", round_s=after, undisturbed_s=before, participation=part)
    assert part > 0
    is_kept(arena)
    arena.close()


def gaps(arena: Arena, count: int) -> float:
    """Median seconds from commit to commit, of so many that are still to come."""
    since, found = time.monotonic(), []

    def enough() -> bool:
        found[:] = [
            e["at"] for e in arena.coordinator.look() if e["event"] == "committed" and e["at"] > since
        ]
        return len(found) > count

    arena.until(enough, f"{count} commits")
    between = sorted(b - a for a, b in itertools.pairwise(found))
    return between[len(between) // 2]


@pytest.mark.parametrize("how", ["corrupt", "corrupt@1+"])
def test_damaged_contributions(arena: Arena, figures: Figures, how: str) -> None:
    """One is asked for again; who sends nothing else is left out, and the record says why."""
    began = time.monotonic()
    dan = arena.join("dan", f"scatter.mid={how}")
    broken = arena.broken("dan", "scatter.mid", began)
    commit = arena.commit(broken["at"])
    figures(row="8", fault=f"contribution damaged: {how}", next_commit_s=commit["at"] - broken["at"])
    if how == "corrupt":
        assert dan.id in included(commit)
    else:
        left_out = arena.event(
            arena.coordinator,
            lambda e: e["event"] == "committed" and dan.id in e["excluded"],
            "it is out",
            began,
        )
        assert "do not match their hash" in left_out["excluded"][dan.id]
    arena.kill("dan")
    is_kept(arena)


def test_the_disk_of_a_peer_is_full_while_it_saves(arena: Arena) -> None:
    began = time.monotonic()
    dan = arena.join("dan", "checkpoint.mid_write=raise:ENOSPC@1+")
    arena.broken("dan", "checkpoint.mid_write", began)
    told = arena.event(
        dan, lambda e: e["event"] == "note" and "no checkpoint of version" in e["text"], "it says so", began
    )
    assert "No space left on device" in told["text"] and "training goes on" in told["text"]
    arena.takes_part("dan")
    arena.kill("dan")
    is_kept(arena)


def test_the_same_key_started_twice(arena: Arena) -> None:
    dan = arena.join("dan")
    arena.takes_part("dan")
    twin = arena.join("twin", identity="dan")
    arena.reap("twin")
    assert twin.process is not None and twin.process.returncode == 2
    assert "already uses this identity" in twin.told()
    arena.takes_part("dan", "ann")
    admitted = [e for e in arena.coordinator.look() if e["event"] == "admitted" and e["peer"] == dan.id]
    arena.kill("dan")
    since = time.monotonic()
    arena.join("twin", identity="dan")
    arena.commit(since, "the second one is let in when the first is gone", dan.id)
    again = [e for e in arena.coordinator.look() if e["event"] == "admitted" and e["peer"] == dan.id]
    assert len(again) == len(admitted) + 1
    arena.kill("twin")
    is_kept(arena)


def test_clocks_that_are_ten_minutes_off_change_nothing(arena: Arena) -> None:
    arena.kill("coordinator")
    arena.coordinate(FARFLUNG_CLOCK_OFF_S="-600")
    arena.join("dan", FARFLUNG_CLOCK_OFF_S="600")
    arena.takes_part("ann", "bob", "cid", "dan")
    own = abs(arena.parties["dan"].look()[-1]["wall"] - time.time())
    assert own > 500, "its clock is wrong"
    arena.kill("dan")
    arena.kill("coordinator")
    arena.coordinate()
    arena.takes_part("ann", "bob", "cid")
    is_kept(arena)


def test_a_third_of_the_peers_is_replaced_again_and_again(
    build: Callable[..., Arena], figures: Figures
) -> None:
    arena, draw = build(), random.Random(SEED)
    names = ["ann", "bob", "cid", "dan", "eve", "fay"]
    arena.begin(*names)
    began = time.monotonic()
    for _ in range(min(10, 4 * TIMES)):
        gone = draw.sample(names, 2)
        at = max(arena.kill(name) for name in gone)
        arena.commit(at)
        for name in gone:
            arena.join(name)
        arena.takes_part(*gone, since=at)
    opened = {e["round"] for e in arena.coordinator.look() if e["event"] == "opened" and e["at"] > began}
    done = [e for e in arena.coordinator.look() if e["event"] == "committed" and e["at"] > began]
    figures(row="22", fault="2 of 6 peers killed, again and again", commit_rate=len(done) / len(opened))
    is_kept(arena)
    arena.close()


# ---- the coordinator ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("away_s", [0.0, 5.0, 60.0])
def test_the_coordinator_is_killed_and_comes_back(arena: Arena, figures: Figures, away_s: float) -> None:
    arena.takes_part("ann", "bob", "cid")
    steps = {name: steps_of(arena, name) for name in ("ann", "bob", "cid")}
    at = arena.kill("coordinator")
    time.sleep(away_s)
    arena.coordinate()
    arena.takes_part("ann", "bob", "cid", since=at)
    commit = arena.commit(at)
    idle = max(idle_s(arena, name, at) for name in steps)
    figures(row="6", fault=f"coordinator away for {away_s:g} s", next_commit_s=commit["at"] - at, idle_s=idle)
    assert all(steps_of(arena, name) > before for name, before in steps.items())
    is_kept(arena)


def steps_of(arena: Arena, name: str) -> int:
    return max(each["step"] for each in arena.parties[name].look() if each["event"] == "frozen")


def idle_s(arena: Arena, name: str, since: float) -> float:
    """The longest wait of its trainer at the barrier after a moment."""
    longest, frozen_at = 0.0, None
    for each in arena.parties[name].look():
        if each["event"] == "frozen":
            frozen_at = each["at"]
        elif each["event"] in ("load", "resume") and frozen_at is not None:
            longest = max(longest, each["at"] - frozen_at) if each["at"] >= since else longest
            frozen_at = None
    return longest


def test_the_coordinator_is_killed_again_and_again_and_loses_no_commit(
    arena: Arena, figures: Figures
) -> None:
    draw, began = random.Random(SEED), time.monotonic()
    downs = []
    for _ in range(KILLS):
        time.sleep(draw.uniform(0.0, 1.0))  # the moment is the fault: anywhere in a round
        at = arena.kill("coordinator")
        arena.coordinate()
        downs.append(arena.commit(at)["at"] - at)
    arena.takes_part("ann", "bob", "cid")
    idle = max(idle_s(arena, name, began) for name in ("ann", "bob", "cid"))
    downs.sort()
    heard = {
        e["round"]
        for n in ("ann", "bob", "cid")
        for e in arena.parties[n].look()
        if e["event"] == "committed"
    }
    known = {e["round"] for e in arena.coordinator.look() if e["event"] == "committed"}
    figures(
        row="6", fault=f"coordinator killed {KILLS} times (seed {SEED})", lost_commits=len(heard - known),
        median_s=downs[len(downs) // 2], worst_s=downs[-1], idle_s=idle,
    )  # fmt: skip
    assert heard <= known
    is_kept(arena)


def test_the_disk_of_the_coordinator_is_full(arena: Arena) -> None:
    arena.kill("coordinator")
    began = time.monotonic()
    broken = arena.coordinate("journal.mid_write=raise:ENOSPC@9")
    arena.broken("coordinator", "journal.mid_write", began)
    assert broken.process is not None and broken.process.wait(60) == 2
    assert "cannot be written" in broken.told() and "No space left on device" in broken.told()
    arena.coordinate()
    arena.takes_part("ann", "bob", "cid")
    is_kept(arena)


def test_a_second_coordinator_of_the_same_run_is_refused(arena: Arena) -> None:
    code, told = arena.call("second", "coordinate", str(arena.folder / "run.toml"), "--listen", "127.0.0.1:0")
    assert code == 2 and "another coordinator (process" in told
    arena.takes_part("ann", "bob", "cid")


@pytest.mark.mode("restoring")
def test_the_coordinator_is_restored_from_an_old_copy(build: Callable[..., Arena]) -> None:
    """It may not make a second history: peers hold more than it knows, and give it back."""
    arena = build()
    arena.begin("ann", "bob")
    data, old = arena.folder / "run.data", arena.folder / "old"
    arena.kill("coordinator")
    shutil.copytree(data, old, ignore=shutil.ignore_patterns("*.sock"))
    arena.coordinate()
    later = arena.commit(time.monotonic())["version"]
    heard = lambda e: e["event"] == "committed" and e["version"] >= later  # noqa: E731
    arena.event(arena.parties["ann"], heard, "a peer holds what the copy lacks", 0.0)
    arena.kill("coordinator")
    shutil.rmtree(data)
    shutil.copytree(old, data)
    began = time.monotonic()
    arena.coordinate(restored=True)
    arena.takes_part("ann", "bob", since=began)
    made = [e["version"] for e in arena.coordinator.look() if e["event"] == "committed" and e["at"] > began]
    assert made and min(made) > later, "a version that exists was made a second time"
    arena.close()
