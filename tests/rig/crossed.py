"""Worlds that cross all others: each seed draws a kind of run, and then faults of other kinds on top of it.

The generators in scenario.py are separate worlds: a run of liars has no restores, one with restores no amendments.
What breaks a promise is often the cross of two, so each layer here is drawn with its own chance and put over any kind
of run that can have it.  `_why_not` says which kinds can't.

Replay one: `python benchmarks/sweep.py --seed 7 --log`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from farflung.simulator.scenario import Scenario

# How often each is drawn.  A kind is a world of its own before anything is put over it.
KINDS: Mapping[str, int] = MappingProxyType(
    {
        "of": 5,
        "of_adamw": 2,
        "of_readers_ahead": 1,
        "of_islands": 1,
        "of_batches": 3,
        "of_stages": 3,
        "of_local_stages": 1,
        "of_dense_stages": 2,
        "of_neighbours": 1,
        "of_moves": 1,
        "of_liars": 3,
        "of_sums": 2,
        "of_one_that_holds_up": 1,
        "of_misnamed_results": 1,
        "cut_off_from_all": 1,
        "cut_off_from_one": 1,
        "of_lost_disks": 2,
    }
)
Draw = random.Random
Layer = Callable[[Scenario, Draw], Scenario]


def _amended(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, amends=draw.randint(1, 3), rounds=drawn.rounds + 3)


def _restored(drawn: Scenario, draw: Draw) -> Scenario:
    """All are killed at once and come back with checkpoints of an older version."""
    at_s = draw.uniform(3.0, 14.0)
    return replace(
        drawn,
        every_rounds=draw.choice((1, 2, 3)),
        one_store=draw.random() < 0.5,
        blackout_at_s=at_s,
        faults_until_s=max(drawn.faults_until_s, at_s + 2.0),
        go_back_after_s=draw.choice((4.0, 10.0)),
        rounds=drawn.rounds + 4,
        end_s=max(drawn.end_s, 300.0),
    )


def _disk_lost(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, loses=draw.choice(("key", "copy")), rounds=max(drawn.rounds, 4))


def _host_goes_back(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, host_after_s=30.0, end_s=max(drawn.end_s, 300.0))


def _keeps_results(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, results_on_disk=True)


def _in_groups(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, group=draw.choice((2, 3)), peers=max(drawn.peers, draw.choice((5, 6, 8))))


def _spoiled(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, hostile=draw.choice((0.2, 1.0)), hostile_until_s=drawn.faults_until_s)


def _leaving(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, leave_per_s=draw.choice((0.02, 0.1)))


def _crashing(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, trainer_crash_per_s=draw.choice((0.05, 0.2)))


def _dying(drawn: Scenario, draw: Draw) -> Scenario:
    often = draw.choice((0.002, 0.01)) * (0.2 if drawn.stages > 1 else 1.0)
    return replace(drawn, kill_per_effect=max(drawn.kill_per_effect, often))


def _bad_lines(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(
        drawn,
        drop=draw.choice((0.02, 0.1)),
        slow=draw.choice((0.05, 0.15)),
        duplicate=draw.choice((0.0, 0.1)),
    )


def _undialled(drawn: Scenario, draw: Draw) -> Scenario:
    """Some meet at the coordinator's relay, or past their routers."""
    some = draw.randint(1, max(1, drawn.peers - 1))
    return replace(
        drawn,
        undialable=some,
        relay=draw.choice(("steady", "dies")),
        routers=draw.choice(("", "easy", "mixed")),
    )


def _helped(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, helpers=1, peers=drawn.peers + 1)


def _audited(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, audit=1.0)


def _sparse(drawn: Scenario, draw: Draw) -> Scenario:
    return replace(drawn, step="sparse", codec="topk", gather_codec="sparse")


LAYERS: Mapping[str, tuple[float, Layer]] = MappingProxyType(
    {
        "amended": (0.25, _amended),
        "restored": (0.35, _restored),
        "disk lost": (0.15, _disk_lost),
        "host goes back": (0.2, _host_goes_back),
        "keeps results": (0.4, _keeps_results),
        "in groups": (0.2, _in_groups),
        "spoiled": (0.2, _spoiled),
        "leaving": (0.25, _leaving),
        "crashing": (0.25, _crashing),
        "dying": (0.3, _dying),
        "bad lines": (0.3, _bad_lines),
        "undialled": (0.2, _undialled),
        "helped": (0.1, _helped),
        "audited": (0.3, _audited),
        "sparse": (0.15, _sparse),
    }
)


def _why_not(layer: str, drawn: Scenario) -> str:
    """Why a world can't have the layer; "": it can."""
    lied = bool(drawn.liars or drawn.cheats)
    cut = bool(drawn.cut_off)
    beside = bool(drawn.apart or drawn.mute or drawn.damages or drawn.slanders)
    rules = (
        ("in groups", bool(drawn.batch), "the manifest refuses batches in groups"),
        ("in groups", lied, "its liars are drawn for flat rounds, or for groups of their own"),
        ("in groups", drawn.peers < 4, "too few for two groups"),
        ("sparse", bool(drawn.batch or drawn.group), "the manifest refuses it in batches and in groups"),
        ("sparse", lied, "liars are drawn for the codecs of their worlds"),
        ("helped", drawn.stages > 1 or lied or cut, "the last peers of these have another part to play"),
        ("spoiled", lied or cut or drawn.stages > 1, "the last peer has another part to play"),
        ("undialled", drawn.stages > 1 or lied, "seats beside each other would need ways to each other"),
        *(
            (name, lied or cut, "nothing but the lie, or the cut, may explain what an honest peer loses")
            for name in ("dying", "leaving", "restored", "disk lost", "crashing", "host goes back", "bad lines")
        ),
        *(
            (name, beside, "nothing but bad neighbours may explain what a batch loses")
            for name in ("dying", "leaving", "restored", "disk lost", "crashing", "bad lines")
        ),
    )  # fmt: skip
    return next((why for name, holds, why in rules if name == layer and holds), "")


def crossed(seed: int) -> tuple[Scenario, tuple[str, ...]]:
    """The world of a seed, and what it was crossed of: its kind, then the layers in their order."""
    draw = random.Random(f"crossed {seed}")
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    drawn: Scenario = getattr(Scenario, kind)(seed)
    names = [kind]
    for name, (often, layer) in LAYERS.items():
        if draw.random() < often and not _why_not(name, drawn):
            drawn = layer(drawn, draw)
            names.append(name)
    return drawn, tuple(names)
