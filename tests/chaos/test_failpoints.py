"""Every failpoint, once with SIGKILL and once with SIGSTOP for 3 s, in real processes over encrypted loopback.

Whatever breaks: the others commit, what was broken comes back and takes part, and the audit finds all promises kept.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from farflung.protocol.process.failpoints import AGENT, COORDINATOR, JOURNAL, KEEPING, POINTS, TRAINER
from rig.arena import STOP_S, Arena, included, is_kept

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.xdist_group("chaos")]

QUICK = ("commit.after_fsync",)
SPECIAL = {
    "found.before_word", "genesis.before_fsync", "genesis.after_fsync",
    "depart.before_fsync", "depart.after_fsync",
    "abort.before_fsync", "abort.after_fsync", "abort.mid_announce",
    "go_back.before_fsync", "go_back.after_fsync", "restore.before",
    "serve.manifest", "serve.mid", "serve.logged", "leave.before_word",
}  # fmt: skip
IN_STAGES = {"counting.made"}  # of models that are cut into some: tests/real/test_pipelines.py
Figures = Callable[..., None]


def chosen(points: Iterable[str]) -> list[Any]:
    natural = [point for point in points if point not in SPECIAL | IN_STAGES]
    return [pytest.param(point, marks=[] if point in QUICK else pytest.mark.hard) for point in natural]


def wake(arena: Arena, name: str, broken_at: float) -> float:
    """Three seconds after it was stopped."""
    arena.until(lambda: arena.parties[name].is_stopped, f"{name} is stopped")
    time.sleep(max(0.0, broken_at + STOP_S - time.monotonic()))
    arena.parties[name].signal(signal.SIGCONT)
    return time.monotonic()


def test_every_point_is_walked() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(here.count(f'"{point}') >= 2 or here.count(f"{point}=") for point in SPECIAL)
    # tests/checkpoints/test_kept_state.py walks those of KEEPING, and tests/real/test_last_copy.py.
    assert set(POINTS) == set(COORDINATOR) | set(JOURNAL) | set(AGENT) | set(KEEPING) | set(TRAINER)
    kept = (Path(__file__).parents[1] / "coordinator" / "ledger" / "test_journal_kept.py").read_text(
        encoding="utf-8"
    )
    assert all(f'"{point}"' in kept for point in JOURNAL)
    assert set(POINTS) >= SPECIAL | IN_STAGES
    pipelines = (Path(__file__).parents[1] / "real" / "test_pipelines.py").read_text(encoding="utf-8")
    assert all(f'"{point}' in pipelines for point in IN_STAGES)


# ---- points that every life passes -------------------------------------------------------------------------


@pytest.mark.parametrize("point", chosen(AGENT))
def test_a_peer_breaks(arena: Arena, figures: Figures, point: str) -> None:
    began = time.monotonic()
    arena.join("dan", f"{point}=kill")
    broken = arena.broken("dan", point, began)
    commit = arena.commit(broken["at"])
    figures(point=point, action="kill", next_commit_s=commit["at"] - broken["at"])
    arena.reap("dan")

    began = time.monotonic()
    arena.join("dan", f"{point}=stop")
    broken = arena.broken("dan", point, began)
    commit = arena.commit(broken["at"])
    woken = wake(arena, "dan", broken["at"])
    back = arena.commit(woken, "it takes part again", arena.parties["dan"].id)
    delays = {"next_commit_s": commit["at"] - broken["at"], "back_s": back["at"] - woken}
    figures(point=point, action="stop", **delays)
    arena.kill("dan")
    is_kept(arena)


@pytest.mark.parametrize("point", chosen(TRAINER))
def test_a_trainer_breaks(arena: Arena, figures: Figures, point: str) -> None:
    began = time.monotonic()
    dan = arena.join("dan", f"{point}=kill@{5 if point == 'trainer.step' else 1}")
    gone = arena.event(
        dan, lambda e: e["event"] == "trainer" and e["what"] == "gone", "its end is seen", began
    )
    commit = arena.commit(gone["at"])
    back = arena.commit(gone["at"], "it takes part", dan.id)
    delays = {"next_commit_s": commit["at"] - gone["at"], "back_s": back["at"] - gone["at"]}
    figures(point=point, action="kill", **delays)
    arena.kill("dan")

    arena.join("dan", f"{point}=stop")
    arena.until(lambda: arena.stopped(), "its trainer is stopped")
    began = time.monotonic()
    commit = arena.commit(began)
    time.sleep(max(0.0, began + STOP_S - time.monotonic()))
    for pid in arena.stopped():
        os.kill(pid, signal.SIGCONT)
    woken = time.monotonic()
    back = arena.commit(woken, "it takes part again", dan.id)
    figures(point=point, action="stop", next_commit_s=commit["at"] - began, back_s=back["at"] - woken)
    arena.kill("dan")
    is_kept(arena)


@pytest.mark.parametrize("point", chosen(COORDINATOR))
def test_the_coordinator_breaks(arena: Arena, figures: Figures, point: str) -> None:
    began = restart(arena, f"{point}=kill")
    needs_samples(arena, point)
    broken = arena.broken("coordinator", point, began)
    arena.reap("coordinator")
    began = time.monotonic()
    arena.coordinate(f"{point}=stop")
    needs_samples(arena, point)
    broken_again = arena.broken("coordinator", point, began)
    figures(point=point, action="kill", again_s=broken_again["at"] - broken["at"])
    woken = wake(arena, "coordinator", broken_again["at"])
    commit = arena.commit(woken)
    figures(point=point, action="stop", next_commit_s=commit["at"] - woken)
    arena.takes_part("ann", "bob", "cid", since=woken)
    is_kept(arena)


def needs_samples(arena: Arena, point: str) -> None:
    """Those who were ever here have theirs for the next minutes; somebody new wants some at once."""
    if point.startswith("lease."):
        arena.join(f"new{len(arena.parties)}")


def restart(arena: Arena, failpoints: str = "") -> float:
    """Killed wherever it is, and started again at once."""
    arena.kill("coordinator")
    began = time.monotonic()
    arena.coordinate(failpoints)
    return began


# ---- points that need a situation --------------------------------------------------------------------------


def broken_coordinator(arena: Arena, point: str, since: float, then: str | None = "") -> float:
    """It was killed at the point; start it again, unless `then` is None."""
    at = float(arena.broken("coordinator", point, since)["at"])
    arena.reap("coordinator")
    if then is not None:
        arena.coordinate(then)
    return at


@pytest.mark.hard
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_run_begins(build: Callable[..., Arena], action: str) -> None:
    arena = build()
    both = "genesis.before_fsync=stop,genesis.after_fsync=stop"
    began = time.monotonic()
    arena.coordinate("genesis.before_fsync=kill" if action == "kill" else both)
    arena.join("ann", f"found.before_word={action}")
    founding = arena.broken("ann", "found.before_word", began)
    if action == "kill":
        arena.reap("ann")
        arena.join("ann")
    arena.join("bob")
    if action == "kill":
        broken_coordinator(arena, "genesis.before_fsync", began, "genesis.after_fsync=kill")
        broken_coordinator(arena, "genesis.after_fsync", began)
    else:
        wake(arena, "ann", founding["at"])
        wake(arena, "coordinator", arena.broken("coordinator", "genesis.before_fsync", began)["at"])
        wake(arena, "coordinator", arena.broken("coordinator", "genesis.after_fsync", began)["at"])
    arena.takes_part("ann", "bob")
    is_kept(arena)
    arena.close()


@pytest.mark.hard
@pytest.mark.parametrize("point", ["depart.before_fsync", "depart.after_fsync"])
def test_the_coordinator_breaks_when_a_peer_is_lost(arena: Arena, point: str) -> None:
    for action in ("kill", "stop"):
        arena.join("dan")
        arena.takes_part("dan")
        began = restart(arena, f"{point}={action}")
        arena.takes_part("dan", since=began)
        arena.kill("dan")
        broken = arena.broken("coordinator", point, began)
        if action == "stop":
            wake(arena, "coordinator", broken["at"])
        else:
            broken_coordinator(arena, point, began)
        arena.takes_part("ann", "bob", "cid")
        is_kept(arena)


@pytest.mark.hard
def test_the_coordinator_breaks_while_it_aborts_what_it_left(arena: Arena) -> None:
    began = restart(arena, "open.after_fsync=kill")
    broken_coordinator(arena, "open.after_fsync", began, "abort.before_fsync=kill")
    broken_coordinator(arena, "abort.before_fsync", began, "abort.after_fsync=kill")
    broken_coordinator(arena, "abort.after_fsync", began, "open.after_fsync=kill")
    at = broken_coordinator(arena, "open.after_fsync", time.monotonic(), None)
    arena.coordinate("abort.before_fsync=stop,abort.after_fsync=stop")
    for point in ("abort.before_fsync", "abort.after_fsync"):
        at = arena.broken("coordinator", point, at)["at"]
        wake(arena, "coordinator", at)
    arena.takes_part("ann", "bob", "cid")
    is_kept(arena)


@pytest.mark.hard
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_the_coordinator_breaks_while_it_tells_of_an_abort(arena: Arena, action: str) -> None:
    """One member stops in the middle of a round, two others with it: too few are left."""
    began = restart(arena, f"abort.mid_announce={action}")
    arena.takes_part("ann", "bob", "cid")
    arena.join("dan", "scatter.mid=stop")
    stopped = arena.broken("dan", "scatter.mid", began)["at"]
    for name in ("bob", "cid"):
        arena.parties[name].signal(signal.SIGSTOP)
    broken = arena.broken("coordinator", "abort.mid_announce", stopped)
    for name in ("bob", "cid", "dan"):
        arena.parties[name].signal(signal.SIGCONT)
    if action == "stop":
        wake(arena, "coordinator", broken["at"])
    else:
        broken_coordinator(arena, "abort.mid_announce", began)
    arena.takes_part("ann", "bob", "cid", "dan")
    arena.kill("dan")
    is_kept(arena)


@pytest.mark.hard
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_everybody_dies_and_the_way_back_breaks(arena: Arena, figures: Figures, action: str) -> None:
    """P4: the run is what its newest checkpoint says, whoever reads it."""
    began = time.monotonic()
    dan = arena.join("dan")
    saved = arena.event(dan, lambda e: e["event"] == "saved", "a checkpoint is complete", began)["version"]
    arena.event(
        arena.coordinator, lambda e: e["event"] == "committed" and e["version"] % 5 == 2 and e["version"] > saved,
        "it is not the newest", began,
    )  # fmt: skip
    for name in ("ann", "bob", "cid", "dan"):
        arena.parties[name].signal(signal.SIGKILL)
    blackout = time.monotonic()
    for name in ("ann", "bob", "cid", "dan"):
        arena.reap(name)
    both = "go_back.before_fsync=stop,go_back.after_fsync=stop"
    restart(arena, "go_back.before_fsync=kill" if action == "kill" else both)
    arena.join("dan", f"restore.before={action}")
    reading = arena.broken("dan", "restore.before", blackout)
    # It goes back when those who may hold more are here, and do not.
    others = ("ann", "bob", "cid")
    if action == "kill":
        arena.reap("dan")
        for name in ("dan", *others):
            arena.join(name)
        broken_coordinator(arena, "go_back.before_fsync", blackout, "go_back.after_fsync=kill")
        broken_coordinator(arena, "go_back.after_fsync", blackout)
    else:
        wake(arena, "dan", reading["at"])
        for name in others:
            arena.join(name)
        for point in ("go_back.before_fsync", "go_back.after_fsync"):
            wake(arena, "coordinator", arena.broken("coordinator", point, blackout)["at"])
    arena.takes_part("ann", "bob", "cid", "dan", since=blackout)
    arena.kill("dan")
    is_kept(arena)


@pytest.mark.hard
@pytest.mark.parametrize("point", ["serve.manifest", "serve.mid", "serve.logged"])
def test_a_donor_breaks(arena: Arena, figures: Figures, point: str) -> None:
    for action in ("kill", "stop"):
        began = time.monotonic()
        dan = arena.join("dan", f"{point}={action}")
        arena.takes_part("dan")
        for number in range(40):  # each asks whom chance puts first among four
            if point == "serve.logged":
                arena.parties["cid"].signal(signal.SIGSTOP)
                time.sleep(1.9)  # dead to the others after 1.5 s, and only a few versions behind
                arena.parties["cid"].signal(signal.SIGCONT)
                arena.takes_part("cid")
            else:
                guest = f"guest-{point}-{action}-{number}"
                arena.join(guest)
                arena.takes_part(guest)  # whatever becomes of its donor
                arena.kill(guest)
            if any(each["event"] == "failpoint" and each["at"] > began for each in dan.look()):
                break
        broken = arena.broken("dan", point, began)
        if action == "stop":
            woken = wake(arena, "dan", broken["at"])
            arena.takes_part("dan", since=woken)
        arena.kill("dan")
    is_kept(arena)


@pytest.mark.hard
def test_a_peer_breaks_while_it_leaves(arena: Arena) -> None:
    for action in ("kill", "stop"):
        began = time.monotonic()
        dan = arena.join("dan", f"leave.before_word={action}")
        arena.takes_part("dan")
        dan.signal(signal.SIGINT)
        broken = arena.broken("dan", "leave.before_word", began)
        arena.commit(broken["at"])
        if action == "stop":
            wake(arena, "dan", broken["at"])
            assert dan.process is not None and dan.process.wait(60) == 0
        arena.reap("dan")
    is_kept(arena)


@pytest.mark.hard
def test_who_was_broken_last_is_not_in_the_run(arena: Arena) -> None:
    """The walk is over: the three others are all there is, and take part."""
    commit = arena.commit(time.monotonic())
    names = ("ann", "bob", "cid")
    assert included(commit) <= {arena.parties[name].id for name in names}
    arena.takes_part(*names)
