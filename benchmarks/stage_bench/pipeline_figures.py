"""From event logs, and from what the sham trainers did, to the figures of benchmarks/stages.py.  Pure.

Called by benchmarks/stage_bench/pipeline_bench.py.  Must not know processes or files.

A batch lasts from the commit before it to its own.  The first one only warms up and is left out.

    begin     commit before to the batch's first word     count   to the last microbatch that went into anybody's sums
    tell      to the first round that opens               round   to the commit

The ideal is the rate of the slowest stage if its trainers never waited, for anybody or for a round.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]  # of an event journal

PHASES = ("begin", "count", "tell", "round")
DETECTED_S = 1.0  # within which somebody is to be found gone


@dataclass(frozen=True)
class BenchSetting:
    """What was asked for."""

    seats: tuple[int, ...]
    unit_s: tuple[float, ...]
    batch: int
    crossing_bytes: int  # there and back, over one border
    cores: int

    @property
    def ideal(self) -> float:
        """Microbatches a second."""
        return min(seats / unit for seats, unit in zip(self.seats, self.unit_s, strict=True))

    @property
    def best(self) -> float:
        """The same, if the same peers sat where they are needed most."""
        seats = [1] * len(self.seats)
        for _ in range(sum(self.seats) - len(seats)):
            slowest = min(range(len(seats)), key=lambda stage: seats[stage] / self.unit_s[stage])
            seats[slowest] += 1
        return min(count / unit for count, unit in zip(seats, self.unit_s, strict=True))

    def borders_of(self, stage: int) -> int:
        return (stage > 0) + (stage < len(self.seats) - 1)


@dataclass(frozen=True)
class MeasuredBatch:
    """One that was committed."""

    version: int  # that it was learned from
    seconds: float
    phases: dict[str, float]
    counted: tuple[dict[str, int], ...]  # of each stage, by peer: a mask
    made: tuple[int, ...]  # of each stage: microbatches that went into anybody's sums
    busy_s: tuple[float, ...]
    counted_once: tuple[bool | None, ...]


def batches_of(
    setting: BenchSetting, events: Sequence[Event], works: Sequence[Mapping[str, Any]]
) -> list[MeasuredBatch]:
    """`events`: of the coordinator; `works`: of the crowd.  Without the first one."""
    commits = [event for event in events if event["event"] == "committed_batch"]
    begun = {event["version"]: event["at"] for event in events if event["event"] == "batch"}
    done = {(work["stage"], work["version"]): work for work in works}
    stages = range(len(setting.seats))
    batches = []
    for before, commit in itertools.pairwise(commits):
        version = commit["rounds"][0]["version"] - 1
        of = [done.get((stage, version), {}) for stage in stages]
        last_round = {made["round"] for made in commit["rounds"]}
        opened = [e["at"] for e in events if e["event"] == "opened" and e["round"] in last_round]
        ends = (begun[version], max(one.get("last_at", 0.0) for one in of), min(opened), commit["at"])
        phases, at = {}, before["at"]
        for phase, end in zip(PHASES, ends, strict=True):
            phases[phase], at = max(0.0, end - at), max(at, end)
        batches.append(
            MeasuredBatch(
                version,
                commit["at"] - before["at"],
                phases,
                tuple(
                    {peer: _mask(raw) for peer, raw in made["counted"].items()} for made in commit["rounds"]
                ),
                tuple(one.get("made", 0) for one in of),
                tuple(one.get("busy_s", 0.0) for one in of),
                tuple(one.get("counted_once") for one in of),
            )
        )
    return batches


def _mask(raw: str) -> int:
    return int.from_bytes(bytes.fromhex(raw), "little")


def counts_once(setting: BenchSetting, batch: MeasuredBatch) -> bool:
    """By what the coordinator committed, and by the merged sums of each stage, where anybody could tell."""
    whole = (1 << setting.batch) - 1
    for of_stage in batch.counted:
        union = total = 0
        for mask in of_stage.values():
            union, total = union | mask, total + mask.bit_count()
        if union != whole or total != setting.batch:
            return False
    return all(once is not False for once in batch.counted_once)


def result_of(
    setting: BenchSetting,
    events: Sequence[Event],
    crowd: Mapping[str, Any],
    peers: Mapping[str, Sequence[Event]],
) -> dict[str, Any]:
    """`crowd`: what it told at its end; `peers`: the agents' events by name."""
    batches = batches_of(setting, events, crowd["works"])
    seconds = sum(batch.seconds for batch in batches)
    rate = setting.batch * len(batches) / seconds if seconds else 0.0
    made = sum(sum(batch.made) for batch in batches)
    due = setting.batch * len(setting.seats) * len(batches)
    busy = [sum(batch.busy_s[stage] for batch in batches) for stage in range(len(setting.seats))]
    result: dict[str, Any] = {
        "seats": list(setting.seats),
        "unit_ms": [round(1000 * unit, 3) for unit in setting.unit_s],
        "batch": setting.batch,
        "batches": len(batches),
        "ideal_per_s": round(setting.ideal, 3),
        "rate_per_s": round(rate, 3),
        "of_ideal": round(rate / setting.ideal, 4),
        "seconds": [round(batch.seconds, 3) for batch in batches],
        "phases": {p: round(statistics.median(b.phases[p] for b in batches), 3) for p in PHASES}
        if batches
        else {},
        "busy": [
            round(spent / (seats * seconds), 4) if seconds else 0.0
            for spent, seats in zip(busy, setting.seats, strict=True)
        ],
        "extra_work": round(made / due - 1.0, 5) if due else None,
        "counted_once": bool(batches) and all(counts_once(setting, batch) for batch in batches),
        "proven_by_sums": sum(once is True for batch in batches for once in batch.counted_once),
        "failed_rounds": sum(1 for event in events if event["event"] == "aborted"),
        "deaths": deaths_of(setting, events, crowd["deaths"], batches),
    }
    if crowd["thinned_at"] is not None:
        result["moved"] = moved_of(setting, events, crowd["thinned_at"], batches)
    return result | used_of(setting, batches, peers, crowd["cpu"])


def moved_of(
    setting: BenchSetting, events: Sequence[Event], thinned_at: float, batches: Sequence[MeasuredBatch]
) -> dict[str, Any]:
    """Who moved to where when, and how near the best the run was in each batch."""
    moves = [event for event in events if event["event"] == "moving" and event["at"] > thinned_at]
    seats: dict[int, int] = {}
    until = max(event["at"] for event in events if event["event"] == "committed_batch")
    for event in events:
        if event["event"] == "seated" and event["at"] <= until:
            seats[event["number"]] = event["stage"]
        elif event["event"] == "unseated" and event["at"] <= until:
            seats.pop(event["number"], None)
    return {
        "best_per_s": round(setting.best, 3),
        "of_best": [round(setting.batch / batch.seconds / setting.best, 4) for batch in batches],
        "moves": [[move["stage"], move["to"], round(move["at"] - thinned_at, 2)] for move in moves],
        "seats": [list(seats.values()).count(stage) for stage in range(len(setting.seats))],
    }


def deaths_of(
    setting: BenchSetting,
    events: Sequence[Event],
    deaths: Sequence[Mapping[str, Any]],
    batches: Sequence[MeasuredBatch],
) -> list[dict[str, Any]]:
    """What each cost: to the next commit, and how long that may take."""
    commits = [event["at"] for event in events if event["event"] == "committed_batch"]
    round_s = statistics.median(batch.phases["round"] for batch in batches) if batches else 0.0
    by_version = {batch.version: batch for batch in batches}
    told = []
    for death in deaths:
        after = [at for at in commits if at > death["at"]]
        batch = by_version.get(death["version"])
        if not after or batch is None:
            continue
        left_s = [
            (setting.batch - int(death["counted"][str(stage)]))
            / ((seats - (stage == death["stage"])) / setting.unit_s[stage])
            for stage, seats in enumerate(setting.seats)
        ]
        twice = [made - setting.batch for stage, made in enumerate(batch.made) if stage != death["stage"]]
        told.append(
            {
                "moment": death["moment"],
                "stage": death["stage"],
                "share": death["share"],
                "seconds": round(after[0] - death["at"], 3),
                # Found gone, what is not counted then at the rates of who is left, and one more round.
                "allowed_s": round(DETECTED_S + max(left_s) + round_s, 3),
                "twice": batch.made[death["stage"]] - setting.batch,
                "twice_elsewhere": sum(twice),
            }
        )
    return told


def used_of(
    setting: BenchSetting,
    batches: Sequence[MeasuredBatch],
    peers: Mapping[str, Sequence[Event]],
    cpu: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Between the first plan that is measured and the last: of peers that lived through all of it."""
    versions = {batch.version for batch in batches}
    tx = control = cpu_s = seconds = 0.0
    kept: list[float] = []
    spilled = lived = 0
    of_peer = [
        {name: mask.bit_count() for stage in batch.counted for name, mask in stage.items()}
        for batch in batches
    ]
    counted = {batch.version: by for batch, by in zip(batches, of_peer, strict=True)}
    for events in peers.values():
        starts = [event for event in events if event["event"] == "start"]
        plans = [event for event in events if event["event"] == "plan" and event["version"] in versions]
        if len(starts) != 1 or len(plans) < 2:
            continue
        first, last = plans[0], plans[-1]
        lived += 1
        seconds = max(seconds, last["at"] - first["at"])
        tx += last["use"]["tx"] - first["use"]["tx"]
        cpu_s += last["use"]["cpu_s"] - first["use"]["cpu_s"]
        both = sum(last["use"][key] - first["use"][key] for key in ("control_tx", "control_rx"))
        control = max(control, both / (last["at"] - first["at"]))
        for plan in plans:
            due = counted[plan["version"]].get(starts[0]["peer"], 0) * setting.borders_of(plan["fragment"])
            if due:
                kept.append(
                    (plan["use"]["kept_memory"] + plan["use"]["kept_disk"]) / (due * setting.crossing_bytes)
                )
            spilled = max(spilled, plan["use"]["kept_disk"])
    whole = lived == sum(setting.seats)
    crossed = setting.crossing_bytes * (len(setting.seats) - 1) * setting.batch * max(0, len(batches) - 1)
    beside = [at for at in cpu if at["version"] in versions]
    others = {
        who: beside[-1][who] - beside[0][who] if len(beside) > 1 else 0.0 for who in ("shams", "coordinator")
    }
    wall_s = beside[-1]["at"] - beside[0]["at"] if len(beside) > 1 else 0.0
    shares = {"agents": cpu_s / seconds if seconds else 0.0}
    shares |= {who: spent / wall_s if wall_s else 0.0 for who, spent in others.items()}
    return {
        # Of all bytes of the data plane, rounds too, over the crossings' payloads.
        "bytes_over_payload": round(tx / crossed, 4) if whole and crossed else None,
        "control_bytes_per_s": round(control, 1) if lived else None,
        "kept_over_crossings": [round(min(kept), 4), round(max(kept), 4)] if kept else None,
        "spilled_bytes": spilled,
        "cores": setting.cores,
        "cores_used": {who: round(share, 3) for who, share in shares.items()},
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """For people."""
    used, moved = result["cores_used"], result.get("moved")
    busy = ", ".join(f"{100 * share:.0f} %" for share in result["busy"])
    rows = [
        (
            "rate over the ideal" if moved is None else "rate over that of the first seats",
            f"{100 * result['of_ideal']:.1f} %  ({result['rate_per_s']} of {result['ideal_per_s']}/s)",
        ),
        ("seconds a batch", f"{result['seconds']}"),
        ("  of which", ", ".join(f"{name} {value}" for name, value in result["phases"].items())),
        ("trainers busy, by stage", busy if moved is None else "not told: seats moved"),
        ("work done twice", f"{100 * (result['extra_work'] or 0.0):.2f} %"),
        ("every microbatch counts once", "yes" if result["counted_once"] else "NO"),
        ("rounds that failed", f"{result['failed_rounds']}"),
        ("bytes over payload of crossings", f"{result['bytes_over_payload'] or 'not known: peers died'}"),
        ("words with coordinator", f"{result['control_bytes_per_s']} bytes/s a member, the most"),
        (
            "kept over crossings",
            f"{result['kept_over_crossings']}, {result['spilled_bytes'] / 1e6:.1f} MB on disk",
        ),
        (
            f"CPU: of {result['cores']} cores",
            ", ".join(f"{who} {share:.2f}" for who, share in used.items()),
        ),
    ]
    if moved is not None:
        rows.append(("rate over the best, by batch", f"{moved['of_best']}; best {moved['best_per_s']}/s"))
        moves = ", ".join(f"{of} to {to} after {at} s" for of, to, at in moved["moves"])
        rows.append(("moves from stage to stage", f"{moves or 'none'}; seats at the end {moved['seats']}"))
    for death in result["deaths"]:
        what = f"death in stage {death['stage']}" + (f", {death['moment']}" if death["moment"] else "")
        rows.append(
            (
                what,
                f"{death['seconds']} s to the commit, allowed {death['allowed_s']}; computed again: {death['twice']} "
                f"of a share of {death['share']}, {death['twice_elsewhere']} in other stages",
            )
        )
    head = f"stages of {result['seats']} seats, {result['unit_ms']} ms a microbatch, batches of {result['batch']}"
    return [head, *(f"  {name:32}{value}" for name, value in rows)]
