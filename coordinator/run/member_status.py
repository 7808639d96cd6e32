"""One member as people see it: where it is, what it does, and why it does not take part.  Pure.

Called by status.py for each member.  Must not know how a status is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from farflung.coordinator.rounds.round import Round
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.digests import root_of
from farflung.protocol.states import Phase

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
        "state": member.state,
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
        "heard_s": round(core.now - member.heard_at, 1),
        "here_s": round(core.now - member.admitted_at) if member.alive else 0,
        "reachable": bool(member.contact.address),
        "way": core.members.ways.way_of(member) if member.alive else "",
        "why_this_way": core.members.ways.why_this_way(member)[:WHY_CHARS] if member.alive else "",
        "saved": beat.saved if beat else -1,
        "missed": member.missed,
        **{key: shown for mode in core.modes for key, shown in mode.status_of(member.peer).items()},
        "left_out": member.left_out[:WHY_CHARS],
    }
    if len(drivers) > len(member.standings):
        shown["stage"] = member.stage
    return shown | (_in_round(flight, member.peer) if flight is not None else {})


def _in_round(flight: Round, peer: str) -> dict[str, Any]:
    """How far a member of the round is: nothing for others."""
    if peer not in flight.plan.members:
        return {}
    sent, got = flight.done_by(peer)
    out = (flight.barred if flight.decision is None else flight.excluded).get(peer)
    told = {"out": out.text[:WHY_CHARS], "out_cause": out.cause} if out is not None else {}
    return {"sent": round(sent, 3), "got": round(got, 3)} | told


def why_not(core: Core, drivers: Sequence[RoundDriver], member: Member) -> str:
    """Why the next round will not have this member in it, or the last one had not; empty if it takes part."""
    if not member.alive:
        return member.gone_because
    if member.beat is None:
        return "it has only just arrived"
    if min(each.version for each in member.beat.fragments) < 0:
        return "it has none of the run's state yet"
    if member.quarantined:
        return "its state differs from the run's; it takes the run's state again"
    held = [driver for driver in drivers if driver.fragment in member.standings]
    lacking = [c for c in held if not (c.standing(member).verified or c.is_arriving(member))]
    if lacking:
        return member.told
    if member.beat.phase == Phase.STUCK:
        return "its trainer takes no steps any more"
    return (member.left_out or "it came too late for the last round") if member.missed else member.advice


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
