"""The status of a run, as JSON: one snapshot for people, scripts and the dashboard.  Pure.

Bounded: it must fit into one control message, so it lists the last rounds and events only.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from farflung.collectives.digests import root_of
from farflung.collectives.limits import CONTROL_BIN_BYTES
from farflung.coordinator.membership import Member

if TYPE_CHECKING:
    from farflung.coordinator.conductor import Conductor
    from farflung.coordinator.core import Core
    from farflung.coordinator.rounds import InFlight
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
    status = {
        "run": core.manifest.run.name,
        "run_id": core.run_id.hex(),
        "phase": _phase(machine),
        "reason": "the run is complete" if core.finished else _least_advanced(machine).reason,
        "version": ledger.version,
        "era": ledger.era,
        "target": core.manifest.run.rounds,
        "tokens": ledger.tokens,
        "loss": _finite(ledger.loss),
        "elapsed_s": round(now - machine.started_at, 3),
        "parity": _parity(machine),
        "digest": _one_digest([book.digests.get(book.version, b"") for book in ledger.books]).hex(),
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
    if ledger.fragments > 1:
        status["fragments"] = [_fragment(conductor) for conductor in machine.conductors]
    return status


def _one_digest(digests: list[bytes]) -> bytes:
    """Of the whole state: that of its only fragment, or one name for those of all; empty if one is not known."""
    if len(digests) == 1:
        return digests[0]
    return root_of(digests) if all(digests) else b""


def _least_advanced(machine: RunMachine) -> Conductor:
    return min(machine.conductors, key=lambda conductor: conductor.book.version)


def _oldest_round(machine: RunMachine) -> InFlight | None:
    flights = [conductor.round for conductor in machine.conductors if conductor.round is not None]
    return min(flights, key=lambda flight: flight.plan.round_no, default=None)


def _phase(machine: RunMachine) -> str:
    if machine.core.finished:
        return "finished"
    flight = _oldest_round(machine)
    if flight is not None:
        return "scatter" if flight.decision is None else "gather"
    if any(book.version and book.version not in book.digests for book in machine.core.ledger.books):
        return "apply"
    least = machine.core.manifest.run.min_peers
    return "inner" if all(len(conductor.able) >= least for conductor in machine.conductors) else "waiting"


def _parity(machine: RunMachine) -> bool | None:
    """True if all living peers at a fragment's version show one digest of it; None if nobody has shown one."""
    found = []
    for conductor in machine.conductors:
        beats = [conductor.beat_of(m) for m in machine.core.members.alive.values()]
        version = conductor.book.version
        shown = {
            beat.digest for beat in beats if beat is not None and beat.version == version and beat.digest
        }
        found += [len(shown) == 1] if shown else []
    return all(found) if found else None


def _fragment(conductor: Conductor) -> dict[str, Any]:
    flight = conductor.round
    return {
        "version": conductor.book.version,
        "digest": conductor.book.digests.get(conductor.book.version, b"").hex(),
        "round": flight.plan.round_no if flight is not None else None,
        "reason": conductor.reason,
    }


def _member(core: Core, member: Member) -> dict[str, Any]:
    beat = member.beat
    return {
        "name": member.contact.name,
        "id": member.peer,
        "state": member.state,
        "alive": member.alive,
        "participating": member.participating,
        "version": min(each.version for each in beat.fragments) if beat else -1,
        "digest": _one_digest([each.digest for each in beat.fragments]).hex() if beat else "",
        "step": beat.step if beat else 0,
        "tokens": beat.tokens if beat else 0,
        "loss": _finite(beat.loss) if beat else None,
        "tx_bytes": beat.tx_bytes if beat else 0,
        "rx_bytes": beat.rx_bytes if beat else 0,
        "tokens_per_s": round(member.rate_tokens_per_s, 1),
        "saved": beat.saved if beat else -1,
        "missed": member.missed,
        "strikes": member.strikes,
        "left_out": member.left_out[:200],
    }


def _round(machine: RunMachine, now: float) -> dict[str, Any] | None:
    flight = _oldest_round(machine)
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
    of_several = {"fragment": record.commit.fragment} if core.ledger.fragments > 1 else {}
    return of_several | {
        "version": record.commit.version,
        "round": record.commit.round_no,
        "included": [core.name(m) for m in record.commit.included],
        "excluded": [{"name": core.name(m), "reason": why} for m, why in record.excluded.items()],
        "merged": record.merged,
        "clipped": [{"name": core.name(m), "reason": why} for m, why in record.clipped.items()],
        "update_norm": _finite(record.norm),
        "seconds": round(record.seconds, 3),
        "bytes": record.tx_bytes,
        "tokens": record.tokens,
        "steps": record.steps,
        "loss": _finite(record.loss),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
