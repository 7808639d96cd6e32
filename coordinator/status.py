"""The status of a run, as JSON: one snapshot for people, scripts and the dashboard.  Pure.

Bounded: it must fit into one control message, so it lists the last rounds and events only.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from farflung.collectives.limits import CONTROL_BIN_BYTES
from farflung.coordinator.membership import Member

if TYPE_CHECKING:
    from farflung.coordinator.core import Core
    from farflung.coordinator.run import RunMachine


def status_json(machine: RunMachine, now: float) -> bytes:
    status = build_status(machine, now)
    raw = _dump(status)
    while len(raw) > CONTROL_BIN_BYTES:
        # Many members and long reasons: the oldest history goes first, then the members at the end (the lost ones).
        if status["rounds"] or status["events"]:
            status["rounds"], status["events"] = status["rounds"][len(status["rounds"]) // 2 + 1 :], []
        else:
            cut = len(status["members"]) // 8 + 1
            status["members_not_shown"] += cut
            status["members"] = status["members"][:-cut]
        raw = _dump(status)
    return raw


def _dump(status: dict[str, Any]) -> bytes:
    return json.dumps(status, separators=(",", ":"), allow_nan=False).encode()


def build_status(machine: RunMachine, now: float) -> dict[str, Any]:
    core, ledger = machine.core, machine.core.ledger
    members = sorted(core.members.members.values(), key=lambda m: (not m.alive, m.joined_no))
    digest = ledger.digests.get(ledger.version, b"")
    return {
        "run": core.manifest.run.name,
        "run_id": core.run_id.hex(),
        "phase": _phase(machine),
        "reason": "the run is complete" if core.finished else machine.conductor.reason,
        "version": ledger.version,
        "target": core.manifest.run.rounds,
        "tokens": ledger.tokens,
        "loss": _finite(ledger.loss),
        "elapsed_s": round(now - machine.started_at, 3),
        "parity": _parity(core),
        "digest": digest.hex(),
        "members": [_member(core, m) for m in members],
        "members_not_shown": 0,
        "round": _round(machine, now),
        "rounds": [_past_round(core, record) for record in ledger.rounds],
        "events": [{"at_s": round(at - machine.started_at, 2), "text": text} for at, text in core.events],
        "leases": {
            "samples": ledger.leases.samples,
            "leased": ledger.leases.leased_samples,
            "committed": ledger.leases.committed_samples,
            "returned": ledger.leases.returned_samples,
        },
        "frames": machine.counters.as_dict(),
    }


def _phase(machine: RunMachine) -> str:
    if machine.core.finished:
        return "finished"
    flight = machine.conductor.round
    if flight is not None:
        return "scatter" if flight.decision is None else "gather"
    able = [m for m in machine.core.members.alive.values() if m.verified]
    if machine.core.ledger.version and machine.core.ledger.version not in machine.core.ledger.digests:
        return "apply"
    return "inner" if len(able) >= machine.core.manifest.run.min_peers else "waiting"


def _parity(core: Core) -> bool | None:
    """True if all living peers at the run's version show one digest; None if nobody has shown one."""
    version = core.ledger.version
    shown = {
        m.beat.digest
        for m in core.members.alive.values()
        if m.beat is not None and m.beat.version == version and m.beat.digest
    }
    return len(shown) == 1 if shown else None


def _member(core: Core, member: Member) -> dict[str, Any]:
    beat = member.beat
    return {
        "name": member.contact.name,
        "id": member.peer,
        "state": member.state,
        "alive": member.alive,
        "participating": member.participating,
        "version": beat.version if beat else -1,
        "digest": beat.digest.hex() if beat else "",
        "step": beat.step if beat else 0,
        "tokens": beat.tokens if beat else 0,
        "loss": _finite(beat.loss) if beat else None,
        "tx_bytes": beat.tx_bytes if beat else 0,
        "rx_bytes": beat.rx_bytes if beat else 0,
        "tokens_per_s": round(member.rate_tokens_per_s, 1),
        "missed": member.missed,
        "strikes": member.strikes,
    }


def _round(machine: RunMachine, now: float) -> dict[str, Any] | None:
    flight = machine.conductor.round
    if flight is None:
        return None
    whole, held, merged, got = flight.fractions()
    return {
        "number": flight.plan.round_no,
        "epoch": flight.plan.epoch,
        "members": len(flight.plan.members),
        "seconds": round(now - flight.opened_at, 3),
        "deadline_s": flight.rules.round_timeout_s,
        "scattered": whole,
        "held": round(held, 4),
        "merged": round(merged, 4),
        "got": round(got, 4),
    }


def _past_round(core: Core, record: Any) -> dict[str, Any]:
    return {
        "version": record.commit.version,
        "round": record.commit.round_no,
        "included": [core.name(m) for m in record.commit.included],
        "excluded": [{"name": core.name(m), "reason": why} for m, why in record.excluded.items()],
        "seconds": round(record.seconds, 3),
        "bytes": record.tx_bytes,
        "tokens": record.tokens,
        "steps": record.steps,
        "loss": _finite(record.loss),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
