"""A status as a run of weeks has it, made up and always the same: for what shows a run to the public.

Used by the tests of the page and by docs/make_pictures.py.
"""

from __future__ import annotations

import math
import random
from typing import Any

NAMES = (
    "amber-fox dusty-elk grey-heron lime-wren old-badger quiet-lynx red-kite sandy-hare tall-crane white-owl "
    "blue-tit brave-newt"
)
STATES = ["inner"] * 7 + ["ready", "scatter", "syncing", "inner", "inner"]
ROUNDS, VERSION = 4000, 1284


def public_status(stages: int = 0, tick: int = 0) -> dict[str, Any]:
    """Twelve peers who come from all over; with `tick` a little later."""
    chance, noise = random.Random(1), random.Random(2)
    names = NAMES.split()
    given = sorted(((chance.expovariate(1) * 2e8, name) for name in names), reverse=True)
    version = VERSION + tick
    curve = [
        [v, round(2.3 + 3.2 * math.exp(-v / 120) + 0.9 * math.exp(-v / 700) + noise.gauss(0, 0.02), 4)]
        for v in [*range(6, VERSION, 6), *range(VERSION, version + 1)]
    ]
    members = [
        {
            "name": name,
            "id": f"id-of-{name}",
            "state": state,
            "alive": name != "brave-newt",
            "why": "" if number < 9 else "it was too late for round 1300",
            "here_s": chance.expovariate(1 / 90_000) + 2.0 * tick,
            "tokens_per_s": 0.0 if state == "syncing" else chance.uniform(2e3, 9e3),
            "heard_s": 0.2,
        }
        for number, (name, state) in enumerate(zip(names, STATES, strict=True))
    ]
    status = {
        "run": "tiny-stories-1b",
        "software": "0.1.0",
        "phase": "inner",
        "version": version,
        "target": ROUNDS,
        "tokens": sum(tokens for tokens, _ in given),
        "tokens_per_s": sum(member["tokens_per_s"] for member in members),
        "loss": curve[-1][1],
        "eta_s": 3 * 86_400.0,
        "elapsed_s": 2.2 * 86_400,
        "parity": True,
        "admission": "open",
        "alive": 11,
        "taking_part": 9,
        "members": members,
        "contributors": [
            {"name": name, "id": name, "tokens": tokens, "alive": name != "brave-newt"}
            for tokens, name in given
        ],
        "curve": curve,
        "events": [{"at_s": 3.0, "text": "front door: too many connections from 192.0.2.0/24"}],
        "reason": "waiting for 203.0.113.7",
    }
    return status | (_of_stages(stages, members) if stages else {})


def _of_stages(stages: int, members: list[dict[str, Any]]) -> dict[str, Any]:
    for number, member in enumerate(members):
        member["stage"] = number % stages
    rows = [
        {
            "members": 3 - (number == 1),
            "seats": 3 - (number == 1),
            "counted": 402 - 64 * number,
            "micros_per_s": 9.4 - 4.2 * (number == 1),
            "version": VERSION,
            "narrow": "line up" if number == 1 else "",
        }
        for number in range(stages)
    ]
    return {"stages": rows, "batch": {"counted": 210, "microbatches": 512}}


def empty_status() -> dict[str, Any]:
    """Of a run that nobody has joined yet, by invitation."""
    return {
        "run": "fresh-run", "software": "0.1.0", "phase": "waiting", "version": 0, "target": 100, "tokens": 0,
        "loss": None, "members": [], "alive": 0, "taking_part": 0, "contributors": [], "curve": [],
        "admission": "token", "elapsed_s": 12.0, "least_peers": 2,
    }  # fmt: skip
