"""From the event logs of all peers to the figures of `farflung bench`.  Pure.

Called by console/bench/bench.py.  Must not know processes or files.

A peer's round lasts from the plan to the last applied result; a round lasts as long as its slowest peer's.  The
first round only warms up (memory is touched for the first time, connections are made) and is told apart.

    encode    plan to encoded          scatter   to held: all contributions that I own are here
    decide    to decided               gather    to results: every result is here
    commit    to committed             apply     to rolled: every result is applied
    seal      to sealed: the digest, from hashes that were made with apply; not part of the round's seconds

With several fragments a round is that of all of them, from the first plan to the last applied result; the phases
are then sums over the fragments, and overlap.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]  # of an event journal

PHASES = ("encode", "scatter", "decide", "gather", "commit", "apply", "seal")
_ENDS = ("encoded", "held", "decided", "results", "committed", "rolled", "sealed")


@dataclass(frozen=True)
class PeerRound:
    """One round as one peer saw it."""

    version: int  # that it started from
    members: int
    included: int
    at_s: float
    seconds: float
    phases: dict[str, float]
    use: dict[str, float]  # from this plan to the next, or to the end
    digests: dict[int, str]  # by fragment


@dataclass
class Killed:
    """What is known of the peer that was killed on purpose."""

    asked: float  # 0 to 1 of the scatter, 1 to 2 of the gather
    version: int = -1
    at: float = -1.0  # what it had when it died, by its own last line


@dataclass
class Peer:
    rounds: dict[int, PeerRound] = field(default_factory=dict)
    aborted: int = 0
    answered_s: list[float] = field(default_factory=list)  # from each beat to its tick, after the first round
    apart: int = 0  # how often it lost the coordinator, or the coordinator gave it up
    peak_rss_bytes: int = 0


def peer_of(events: list[Event]) -> Peer:
    peer = Peer()
    plans = [e for e in events if e["event"] == "plan"]
    uses = [*(p["use"] for p in plans[1:]), next((e["use"] for e in events if e["event"] == "end"), None)]
    for plan, use in zip(plans, uses, strict=True):
        made = _round(plan, use or plan["use"], events)
        if made is None:
            peer.aborted += 1
        else:
            before = peer.rounds.get(made.version)
            peer.rounds[made.version] = made if before is None else _together(before, made)
    begun_at = plans[1]["at"] if len(plans) > 1 else float("inf")
    ticks = [e for e in events if e["event"] == "tick"]
    peer.answered_s = [e["seconds"] for e in ticks if e["at"] >= begun_at]
    peer.apart = sum(1 for e in events if e["event"] == "apart")
    peer.peak_rss_bytes = next((e["peak_rss_bytes"] for e in events if e["event"] == "end"), 0)
    return peer


def _round(plan: Event, use: dict[str, float], events: list[Event]) -> PeerRound | None:
    """None for a round that was never applied here."""
    of_round = {"round": plan["round"]}
    of_version = {"version": plan["version"] + 1, "fragment": plan["fragment"]}
    found: dict[str, Event] = {}
    for event in events:
        key = of_version if event["event"] in ("rolled", "sealed") else of_round
        if event["event"] in _ENDS and key.items() <= event.items():
            found[event["event"]] = event  # the last one counts: of decisions, the one that stood
    if not {"encoded", "decided", "committed", "rolled", "sealed"} <= found.keys():
        return None
    phases, before = {}, plan["at"]
    for phase, end in zip(PHASES, _ENDS, strict=True):
        # A commit may come before the last contribution (of one left out) or result (two others hold it).
        later = [found[e]["at"] for e in _ENDS[_ENDS.index(end) :] if e in found]
        at = max(before, min(later))
        phases[phase], before = at - before, at
    weights = found["decided"]["weights"]
    return PeerRound(
        plan["version"],
        len(plan["members"]),
        sum(1 for w in weights if w > 0),
        plan["at"],
        found["rolled"]["at"] - plan["at"],
        phases,
        {key: use[key] - plan["use"][key] for key in use},
        {plan["fragment"]: found["sealed"]["digest"]},
    )


def _together(one: PeerRound, other: PeerRound) -> PeerRound:
    """Rounds of two fragments from the same version: from the first plan to the last applied result."""
    first, last = min(one.at_s, other.at_s), max(one.at_s + one.seconds, other.at_s + other.seconds)
    return PeerRound(
        one.version,
        one.members,
        min(one.included, other.included),
        first,
        last - first,
        {phase: one.phases[phase] + other.phases[phase] for phase in PHASES},
        {key: one.use[key] + other.use[key] for key in one.use},
        one.digests | other.digests,
    )


def result_of(reports: list[dict[str, Any]], killed: Killed | None) -> dict[str, Any]:
    """`reports`: what each peer's trainer wrote at the end (`BenchTrainer.figures`)."""
    peers = [peer_of(report["events"]) for report in reports]
    common = sorted(set.intersection(*(set(p.rounds) for p in peers))) if peers else []
    told_apart = {0, killed.version if killed is not None else 0}
    measured = [[p.rounds[v] for p in peers] for v in common if v not in told_apart]
    flat = [one for row in measured for one in row]
    seconds = [max(one.seconds for one in row) for row in measured]
    result: dict[str, Any] = {
        "seconds": _rounded(seconds),
        "median_seconds": _rounded(statistics.median(seconds)) if seconds else None,
        "wall_seconds": _rounded(_gaps(peers, common)),
        "warmup_seconds": _slowest(peers, 0),
        "phases": {phase: _median([one.phases[phase] for one in flat]) for phase in PHASES},
        "tx_bytes_per_peer": _mean([one.use["tx"] for one in flat]),
        "rx_bytes_per_peer": _mean([one.use["rx"] for one in flat]),
        "cpu_seconds_per_peer": _mean([one.use["cpu_s"] for one in flat]),
        "cpu_loop_seconds": _mean([one.use["loop_s"] for one in flat]),
        "cpu_arithmetic_seconds": _mean([one.use["arithmetic_s"] for one in flat]),
        "peak_rss_mb": _rounded(max((p.peak_rss_bytes for p in peers), default=0) / 1e6),
        "rel_error": next((r["rel_error"] for r in reports if "rel_error" in r), None),
        "identical": bool(reports) and is_identical(peers, [r["anchor"] for r in reports]),
        "aborted_rounds": max((p.aborted for p in peers), default=0),
        "control": control_of([s for p in peers for s in p.answered_s]),
        "lost_contact": sum(p.apart for p in peers),
    }
    if killed is not None:
        row = [p.rounds[killed.version] for p in peers if killed.version in p.rounds]
        result["killed"] = {
            "asked": killed.asked,
            "at": _rounded(killed.at),
            "round": killed.version,  # 0 is the warm-up
            "seconds": _rounded(max(one.seconds for one in row)) if row else None,
            "survivors": len(reports),
            "included": row[0].included if row else None,
        }
    return result


def control_of(answered_s: list[float]) -> dict[str, float | int | None]:
    """How long the coordinator's answers took while the line was busy."""
    if not answered_s:
        return {"beats": 0, "median_s": None, "p99_s": None, "most_s": None}
    in_order = sorted(answered_s)
    p99 = in_order[min(len(in_order) - 1, len(in_order) * 99 // 100)]
    figures = {"median_s": statistics.median(in_order), "p99_s": p99, "most_s": in_order[-1]}
    return {"beats": len(in_order)} | {name: round(value, 4) for name, value in figures.items()}


def is_identical(peers: list[Peer], anchors: list[str]) -> bool:
    """One digest at every version, and the same bytes in everybody's memory at the end."""
    digests: dict[tuple[int, int], set[str]] = {}
    for peer in peers:
        for version, one in peer.rounds.items():
            for fragment, digest in one.digests.items():
                digests.setdefault((version, fragment), set()).add(digest)
    return len(set(anchors)) == 1 and bool(digests) and all(len(found) == 1 for found in digests.values())


def _gaps(peers: list[Peer], versions: list[int]) -> list[float]:
    """From one plan to the next, as the slowest saw it; the warm-up's is left out."""
    pairs = [(a, b) for a, b in itertools.pairwise(versions) if a > 0]
    return [max(p.rounds[b].at_s - p.rounds[a].at_s for p in peers) for a, b in pairs]


def _slowest(peers: list[Peer], version: int) -> float | None:
    found = [p.rounds[version].seconds for p in peers if version in p.rounds]
    return round(max(found), 4) if found else None


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def _mean(values: list[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def _rounded(value: Any) -> Any:
    return [round(one, 4) for one in value] if isinstance(value, list) else round(value, 4)


def table(result: dict[str, Any]) -> list[str]:
    """For people."""
    mb, killed = result["mb"], result.get("killed")
    head = f"{result['peers']} peers, {mb} MB each, {result['codec']} / {result['gather_codec']}"
    rows = [
        ("seconds a round", f"{result['median_seconds']}  {result['seconds']}"),
        ("  of which", ", ".join(f"{k} {v}" for k, v in result["phases"].items() if k != "seal")),
        ("then, to seal the state", f"{result['phases']['seal']}"),
        (
            "sent / received, MB a peer",
            f"{_mb(result['tx_bytes_per_peer'])} / {_mb(result['rx_bytes_per_peer'])}",
        ),
        ("CPU seconds a peer", f"{result['cpu_seconds_per_peer']}"),
        ("peak memory, MB", f"{result['peak_rss_mb']:.0f}"),
        (
            "control answers, median / p99 s",
            f"{result['control']['median_s']} / {result['control']['p99_s']}",
        ),
        ("error of the mean", "not checked" if result["rel_error"] is None else f"{result['rel_error']:.2e}"),
        ("same bytes everywhere", "yes" if result["identical"] else "NO"),
    ]
    if killed is not None:
        text = f"{killed['seconds']} s; {killed['survivors']} peers live on, {killed['included']} are in it"
        rows.append((f"round with a death at {killed['at']}", text))
    return [head, *(f"  {name:32}{value}" for name, value in rows)]


def _mb(count: float | None) -> str:
    return "?" if count is None else f"{count / 1e6:.1f}"
