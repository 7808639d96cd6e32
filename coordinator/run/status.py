"""The status of a run, as JSON: one snapshot for people, scripts and the dashboard.  Pure.

Bounded: it must fit into one control message, so it lists the last rounds and events only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from farflung import __version__
from farflung.coordinator.ledger.leases import Leases
from farflung.coordinator.ledger.ledger import Useful, useful_members
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.weights import LEAST_MEMBERS
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.digests import root_of
from farflung.protocol.errors import Counters
from farflung.protocol.limits import CONTROL_BIN_BYTES
from farflung.protocol.messages import UNKNOWN_LENGTH
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.protocol.states import Phase, RunPhase

# ---- member status -----------------------------------------------------------------------------------------
# One member as people see it: where it is, what it does, and why it does not take part. Pure.
#
# Must not know how a status is shown.

WHY_CHARS = 200


def member_status(
    core: Core, drivers: Sequence[RoundDriver], flight: Round | None, member: Member
) -> dict[str, Any]:
    """`flight`: the oldest round, the one that the status tells of."""
    beat, pace = member.beat, member.pace
    version = min(each.version for each in beat.fragments) if beat else -1
    shown = {
        "name": member.contact.name,
        "id": member.peer,
        "state": member.told.state,
        "alive": member.alive,
        "helps": member.helps,
        "participating": member.participating,
        "why": why_not(core, drivers, member)[:WHY_CHARS],
        "version": version,
        "behind": max(0, core.ledger.version - version) if version >= 0 else None,
        "digest": one_digest([each.digest for each in beat.fragments]).hex() if beat else "",
        "same": _same_digest(drivers, member),
        "step": beat.step if beat else 0,
        "tokens": beat.tokens if beat else 0,
        "loss": finite(beat.loss) if beat else None,
        "tx_bytes": beat.tx_bytes if beat else 0,
        "rx_bytes": beat.rx_bytes if beat else 0,
        "tokens_per_s": round(pace.tokens_per_s, 1) if member.alive else 0.0,
        "tx_bytes_per_s": round(pace.tx_bytes_per_s) if member.alive else 0,
        "rx_bytes_per_s": round(pace.rx_bytes_per_s) if member.alive else 0,
        "up_bytes_per_s": beat.up_bytes_per_s if beat else 0,
        "down_bytes_per_s": beat.down_bytes_per_s if beat else 0,
        "heard_s": round(core.now - member.heard.at, 1),
        "here_s": round(core.now - member.place.since) if member.alive else 0,
        "reachable": bool(member.contact.address),
        "way": core.members.ways.way_of(member) if member.alive else "",
        "why_this_way": core.members.ways.why_this_way(member)[:WHY_CHARS] if member.alive else "",
        "saved": beat.saved if beat else -1,
        "missed": member.missed,
        **{key: shown for mode in core.modes for key, shown in mode.status_of(member.peer).items()},
        "left_out": member.told.left_out[:WHY_CHARS],
    }
    if len(drivers) > len(member.standings):
        shown["stage"] = member.stage
    return shown | (_in_round(flight, member.peer) if flight is not None else {})


def _in_round(flight: Round, peer: str) -> dict[str, Any]:
    """How far a member of the round is: nothing for others."""
    if peer not in flight.plan.members:
        return {}
    sent, got = flight.done_by(peer)
    out = (flight.scatter.barred if flight.decision is None else flight.excluded).get(peer)
    told = {"out": out.text[:WHY_CHARS], "out_cause": out.cause} if out is not None else {}
    return {"sent": round(sent, 3), "got": round(got, 3)} | told


def why_not(core: Core, drivers: Sequence[RoundDriver], member: Member) -> str:
    """Why the next round will not have this member in it, or the last one had not; empty if it takes part."""
    if not member.alive:
        return member.told.gone_because
    if member.beat is None:
        return "it has only just arrived"
    if min(each.version for each in member.beat.fragments) < 0:
        return "it has none of the run's state yet"
    if member.quarantined:
        return "its state differs from the run's; it takes the run's state again"
    held = [driver for driver in drivers if driver.fragment in member.standings]
    lacking = [c for c in held if not (c.standing(member).verified or c.is_arriving(member))]
    if lacking:
        return member.told.reason
    if member.beat.phase == Phase.STUCK:
        return "its trainer takes no steps any more"
    if member.missed:
        return member.told.left_out or "it came too late for the last round"
    return member.told.advice


def one_digest(digests: list[bytes]) -> bytes:
    """Of the whole state: that of its only fragment, or one name for those of all; empty if one is not known."""
    if len(digests) == 1:
        return digests[0]
    return root_of(digests) if all(digests) else b""


def _same_digest(drivers: Sequence[RoundDriver], member: Member) -> bool | None:
    """Does it hold the run's state, bit for bit, at its own version?  None: that cannot be said."""
    found = []
    for driver in drivers:
        if driver.fragment not in member.standings:
            continue
        beat = driver.beat_of(member)
        known = driver.book.digests.get(beat.version) if beat is not None else None
        if beat is None or known is None or not beat.digest:
            return None
        found.append(beat.digest == known)
    return all(found)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---- status ------------------------------------------------------------------------------------------------

CONTRIBUTORS_SHOWN = 50
MEMBERS_MOST = CONTROL_BIN_BYTES // 256  # hardly as many ever fit
NOTHING_LOST: Mapping[int, str] = {}


def status_json(
    core: Core,
    drivers: Sequence[RoundDriver],
    frames: Counters,
    now: float,
    lost: Mapping[int, str] = NOTHING_LOST,
) -> bytes:
    status = build_status(core, drivers, frames, now, lost)
    raw = _dump(status)
    while len(raw) > CONTROL_BIN_BYTES:
        # Many members and long reasons: the oldest history goes first, then the members at the end (the lost ones).
        if status["rounds"] or status["events"]:
            status["rounds"], status["events"] = status["rounds"][len(status["rounds"]) // 2 + 1 :], []
        else:
            shown = len(status["members"])
            cut = max(1, shown - shown * CONTROL_BIN_BYTES // len(raw) * 15 // 16)
            status["members_not_shown"] += cut
            status["members"] = status["members"][:-cut]
        raw = _dump(status)
    return raw


def _dump(status: dict[str, Any]) -> bytes:
    return json.dumps(status, separators=(",", ":"), allow_nan=False).encode()


def build_status(
    core: Core,
    drivers: Sequence[RoundDriver],
    frames: Counters,
    now: float,
    lost: Mapping[int, str] = NOTHING_LOST,
) -> dict[str, Any]:
    """`frames`: those of members and strangers, by what became of them.  `lost`: fragments whose newest version nobody
    holds, each with the reason."""
    ledger = core.ledger
    flight = _oldest_round(drivers)
    members = sorted(core.members.members.values(), key=lambda m: (not m.alive, m.joined_no))
    status = {
        "software": __version__,
        "run": core.manifest.run.name,
        "run_id": core.run_id.hex(),
        "phase": _phase(core, drivers),
        "reason": _reason(core, drivers, lost),
        "phase_left_s": _phase_left_s(core, drivers, flight),
        "version": ledger.version,
        "era": ledger.eras.number,
        "target": core.manifest.run.rounds,
        "tokens": ledger.totals.tokens,
        "loss": finite(ledger.totals.loss),
        "tokens_per_s": _tokens_per_s(core),
        "useful_members": _useful_members(core).told(),
        "eta_s": _eta_s(core, drivers, now),
        "least_peers": core.manifest.run.min_peers,
        "model_bytes": 4 * model.chunk_count * model.chunk_elements if (model := ledger.model) else None,
        "amendments": [
            {"number": each.number, "version": each.version, "changes": each.changed}
            for each in core.ledger.amendments
        ],
        "period_steps": core.manifest.periods.at(ledger.version),
        "steps_before": core.terms.steps_before(ledger.version),
        "elapsed_s": round(core.clock_at(now), 3),
        "unjudged": _unjudged(core, drivers),
        "parity": _parity(drivers),
        "digest": one_digest([book.digests.get(book.version, b"") for book in ledger.books]).hex(),
        "members": [member_status(core, drivers, flight, m) for m in members[:MEMBERS_MOST]],
        "members_not_shown": len(members[MEMBERS_MOST:]),
        **_for_the_public(core, drivers),
        "round": _round(flight, now),
        "rounds": [_past_round(core, record) for record in ledger.totals.rounds],
        "events": [{"at_s": round(core.clock_at(at), 2), "text": text} for at, text in core.events],
        "leases": _leases(ledger.leases),
        **core.members.ways.status(core.ledger.peers.names),
        "frames": frames.as_dict(),
    }
    for mode in core.modes:
        status |= mode.status()
    if core.manifest.pipeline.stages > 1:
        rows = [row for mode in core.modes if (row := mode.status_of_fragments())]
        of_modes = [{k: v for row in rows for k, v in row[each.fragment].items()} for each in drivers]
        status["stages"] = [
            _fragment(each, lost) | _stage(each) | more for each, more in zip(drivers, of_modes, strict=True)
        ]
    elif ledger.rules.fragments > 1:
        status["fragments"] = [_fragment(driver, lost) for driver in drivers]
    return status


def _useful_members(core: Core) -> Useful:
    """Of the fragment that knows most rounds: another one's members learn the same at the same moments."""
    cosines = max((list(book.figures.cosines.values()) for book in core.ledger.books), key=len)
    if not cosines and core.manifest.merge.policy != "robust":
        return Useful(
            None, 0, None, 0, 'not known: members are compared with [merge] policy = "robust" alone'
        )
    return useful_members(cosines)


def _for_the_public(core: Core, drivers: Sequence[RoundDriver]) -> dict[str, Any]:
    """What stays whole where there are too many members to list: how many, who gave most, and all of the curve."""
    alive, names = core.members.alive, core.ledger.peers.names
    return {
        "admission": core.manifest.admission.mode,
        # No built-in trainer can take part: peers bring the run's own script.
        "needs_script": not (core.manifest.model.kind and core.manifest.data.source),
        "alive": len(alive),
        "taking_part": sum(not (member.helps or why_not(core, drivers, member)) for member in alive.values()),
        "helping": sum(member.helps for member in alive.values()),
        "contributors": [
            {"name": names.get(peer, peer), "id": peer, "tokens": tokens, "alive": peer in alive}
            for peer, tokens in core.ledger.peers.tokens.most_common(CONTRIBUTORS_SHOWN)
        ],
        "curve": core.ledger.totals.curve.told(),
    }


def _tokens_per_s(core: Core) -> float:
    """Every stage of a model learns from the same tokens: they count once."""
    alive = core.members.alive.values()
    return round(sum(m.pace.tokens_per_s for m in alive if BOOKS_FRAGMENT in m.standings), 1)


def _leases(leases: Leases) -> dict[str, Any]:
    """leased = committed + held + returned, always: a sample that was returned and leased again counts each time."""
    return {
        "samples": leases.samples if leases.samples != UNKNOWN_LENGTH else None,  # of an epoch
        "epoch": leases.epoch,
        "leased": leases.leased_samples,
        "committed": leases.committed_samples,
        "held": leases.held_samples,
        "returned": leases.returned_samples,
        "waiting": leases.waiting_samples,  # of the returned: not leased again yet
    }


def _least_advanced(drivers: Sequence[RoundDriver]) -> RoundDriver:
    return min(drivers, key=lambda driver: driver.book.version)


def _oldest_round(drivers: Sequence[RoundDriver]) -> Round | None:
    flights = [driver.round for driver in drivers if driver.round is not None]
    return min(flights, key=lambda flight: flight.plan.round_no, default=None)


def _phase(core: Core, drivers: Sequence[RoundDriver]) -> RunPhase:
    if core.finished:
        return RunPhase.FINISHED
    flight = _oldest_round(drivers)
    if flight is not None:
        return RunPhase.SCATTER if flight.decision is None else RunPhase.GATHER
    if any(
        each.holders and each.book.version and each.book.version not in each.book.digests for each in drivers
    ):
        return RunPhase.APPLY  # where nobody is, nobody is at it
    pipeline = core.manifest.pipeline
    least = pipeline.min_per_stage if pipeline.stages > 1 else core.manifest.run.min_peers
    enough = all(len(driver.able) >= least for driver in drivers)
    if pipeline.stages > 1 and not all(each.policy.is_begun for each in drivers):
        enough &= sum(len(driver.able) for driver in drivers) >= core.manifest.run.min_peers
    return RunPhase.INNER if enough else RunPhase.WAITING


def _eta_s(core: Core, drivers: Sequence[RoundDriver], now: float) -> float | None:
    """None while there is nobody by whose pace it could be told."""
    waits = core.held or _phase(core, drivers) == RunPhase.WAITING
    return None if waits else _rounded(core.pace.left_s(core.manifest.run.rounds, now))


def _reason(core: Core, drivers: Sequence[RoundDriver], lost: Mapping[int, str]) -> str:
    if core.finished:
        return "the run is complete"
    if lost:
        first, *more = sorted(lost)
        return lost[first] + (f"; the same{' and'.join(map(core.of, more))}" if more else "")
    behind = [each for each in drivers if each.prepared is None]  # the others wait for these
    return _least_advanced(behind or drivers).reason


def _phase_left_s(core: Core, drivers: Sequence[RoundDriver], flight: Round | None) -> float | None:
    """Until somebody is left out: the end of scatter, of the round, or of the wait for those not ready."""
    now = core.now
    if core.finished:
        return None
    if flight is None:
        left = [opens_in_s(driver) for driver in drivers]
        return _rounded(min((each for each in left if each is not None), default=None))
    ends_at = flight.scatter.grace_ends_at if flight.decision is None else flight.ends_at
    return _rounded(max(0.0, ends_at - now))


def opens_in_s(driver: RoundDriver) -> float | None:
    """After so long the next round opens without those that are not ready."""
    rules = driver.core.manifest
    if driver.round is not None or driver.policy.names_members:
        return None  # it waits for everybody who has a share
    since = [driver.standing(member).ready_since for member in driver.able]
    ready = [at for at in since if at is not None]
    if len(ready) < rules.run.min_peers:
        return None
    return max(0.0, min(ready) + rules.round.deadline_s - driver.core.now)


def _unjudged(core: Core, drivers: Sequence[RoundDriver]) -> str:
    """Why what members contribute is taken as it comes; empty: it is compared."""
    able = {member.peer for driver in drivers for member in driver.able}
    trusted = able & set(core.manifest.admission.trusted)
    if core.manifest.merge.policy != "robust":
        return "nobody is judged: the run merges by the plain mean"
    if 0 < len(able) < LEAST_MEMBERS and not trusted:
        return (
            f"nobody is judged: with fewer than {LEAST_MEMBERS} members there is no majority to compare with; "
            "[admission] trusted names peers that judge the others"
        )
    return ""


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _parity(drivers: Sequence[RoundDriver]) -> bool | None:
    """True if all living peers at a fragment's version show one digest of it; None if nobody has shown one."""
    found = []
    for driver in drivers:
        beats = [driver.beat_of(m) for m in driver.holders]
        version = driver.book.version
        shown = {
            beat.digest for beat in beats if beat is not None and beat.version == version and beat.digest
        }
        found += [len(shown) == 1] if shown else []
    return all(found) if found else None


def _fragment(driver: RoundDriver, lost: Mapping[int, str]) -> dict[str, Any]:
    flight = driver.round
    return {
        "version": driver.book.version,
        "digest": driver.book.digests.get(driver.book.version, b"").hex(),
        "round": flight.plan.round_no if flight is not None else None,
        "reason": lost.get(driver.fragment, driver.reason),
    }


def _stage(driver: RoundDriver) -> dict[str, Any]:
    """Of a model in several: who holds it."""
    return {
        "members": len(driver.holders),
        "verified": len(driver.able),
        "prepared": driver.prepared is not None,
    }


def _round(flight: Round | None, now: float) -> dict[str, Any] | None:
    if flight is None:
        return None
    whole, held, merged, got = flight.fractions()
    return {
        "number": flight.plan.round_no,
        "epoch": flight.plan.epoch,
        "members": len(flight.plan.members),
        "seconds": round(now - flight.opened_at, 3),
        "deadline_s": flight.rules.round_timeout_s,
        "grace_s": flight.rules.scatter_grace_s,
        "scattered": whole,
        "held": round(held, 4),
        "merged": round(merged, 4),
        "got": round(got, 4),
    }


def _past_round(core: Core, record: Any) -> dict[str, Any]:
    of_several = {"fragment": record.commit.fragment} if core.ledger.rules.fragments > 1 else {}
    return of_several | {
        "version": record.commit.version,
        "round": record.commit.round_no,
        "included": [core.name(m) for m in record.commit.included],
        "excluded": [
            {"name": core.name(m), "cause": why.cause, "reason": why.text}
            for m, why in record.excluded.items()
        ],
        "merged": record.merged.text,
        "clipped": [{"name": core.name(m), "reason": why} for m, why in record.merged.clipped.items()],
        "update_norm": finite(record.merged.norm),
        "seconds": round(record.seconds, 3),
        "bytes": record.tx_bytes,
        "tokens": record.tokens,
        "steps": record.steps,
        "loss": finite(record.loss),
    }
