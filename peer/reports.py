"""What a peer says to the coordinator: builds its messages, numbers them, repeats what was not seen.  Pure.

Part of the peer machine.  One `Reporter` lives as long as the peer; a session lives as long as the
coordinator knows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from farflung.collectives.digests import bits, mask_of, mask_to_bytes
from farflung.collectives.round import MemberRound
from farflung.coordinator.messages import Beat, Leave, ProgressReport, Sent, Tick
from farflung.peer.effects import ToCoordinator
from farflung.peer.local_messages import Frozen
from farflung.peer.participation import Participation
from farflung.peer.training import Training

PROGRESS_EVERY_S = 0.25  # how often a partial progress is told; a complete one is told at once


@dataclass
class Vitals:
    """Figures that the shell keeps up to date; they are reported, and decide nothing."""

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    tx_bytes: int = 0
    rx_bytes: int = 0
    up_bytes_per_s: int = 0
    down_bytes_per_s: int = 0


class Reporter:
    def __init__(self) -> None:
        self.session = b""
        self.vitals = Vitals()
        self.roster_no = 0
        self._seq = 0
        self._sent: Sent | None = None
        self._progress: ProgressReport | None = None
        self._progress_at = 0.0
        self._told_complete = (False, False)

    def begin_session(self, session: bytes) -> None:
        self.session, self._seq, self.roster_no = session, 0, 0

    def begin_round(self) -> None:
        self._sent = self._progress = None
        self._told_complete = (False, False)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    # ---- rounds ----------------------------------------------------------------------------------------

    def sent(self, round_no: int, hashes: bytes, frozen: Frozen | None) -> ToCoordinator:
        """My hash list; without `frozen`: I have nothing to contribute."""
        self._sent = Sent(
            session=self.session,
            seq=self._next(),
            round_no=round_no,
            hashes=hashes,
            tokens=frozen.tokens if frozen else 0,
            steps=frozen.steps if frozen else 0,
            loss=frozen.loss if frozen else None,
            used=frozen.used if frozen else (),
        )
        return ToCoordinator(self._sent)

    def maybe_progress(self, flight: MemberRound, now: float) -> list[ToCoordinator]:
        """My progress, if it is news: at once when something became complete, else now and then."""
        complete = flight.complete
        if complete == self._told_complete and now - self._progress_at < PROGRESS_EVERY_S:
            return []
        report = self._build_progress(flight)
        self._told_complete, self._progress_at = complete, now
        if (
            self._progress is not None
            and msgspec.structs.replace(report, seq=self._progress.seq) == self._progress
        ):
            return []
        self._progress = report
        return [ToCoordinator(report)]

    def _build_progress(self, flight: MemberRound) -> ProgressReport:
        progress = flight.progress()
        merged = mask_of(progress.merged)
        return ProgressReport(
            session=self.session,
            seq=self._next(),
            round_no=flight.plan.round_no,
            decision_no=flight.decision.decision_no if flight.decision is not None else 0,
            held={member: (mask_to_bytes(mask), digest) for member, (mask, digest) in progress.held.items()},
            refused=progress.refused,
            cut_off=progress.cut_off,
            merged=mask_to_bytes(merged),
            merged_hashes=b"".join(progress.merged[chunk] for chunk in bits(merged)),
            got=mask_to_bytes(progress.got[0]),
            got_hash=progress.got[1],
        )

    def repeat(self, tick: Tick, flight: MemberRound | None) -> list[ToCoordinator]:
        """What the coordinator shows not to have seen is said again, under a new number."""
        again: list[ToCoordinator] = []
        if flight is None or tick.round_no != flight.plan.round_no:
            return again
        if self._sent is not None and not tick.sent_seen:
            self._sent = msgspec.structs.replace(self._sent, session=self.session, seq=self._next())
            again.append(ToCoordinator(self._sent))
        if self._progress is not None and tick.progress_seen < self._progress.seq:
            self._progress = msgspec.structs.replace(self._progress, session=self.session, seq=self._next())
            again.append(ToCoordinator(self._progress))
        return again

    # ---- beats -----------------------------------------------------------------------------------------

    def beat(self, part: Participation, training: Training) -> ToCoordinator:
        flight, vitals = part.round, self.vitals
        return ToCoordinator(
            Beat(
                session=self.session,
                seq=self._next(),
                roster_no=self.roster_no,
                version=part.version,
                digest=part.digest,
                round_no=flight.plan.round_no if flight else 0,
                epoch=flight.plan.epoch if flight else 0,
                decision_no=flight.decision.decision_no if flight and flight.decision else 0,
                phase=phase_of(part, training),
                ready=training.frozen is not None and flight is None and not part.sealing,
                step=vitals.step,
                tokens=vitals.tokens,
                loss=vitals.loss,
                tx_bytes=vitals.tx_bytes,
                rx_bytes=vitals.rx_bytes,
                up_bytes_per_s=vitals.up_bytes_per_s,
                down_bytes_per_s=vitals.down_bytes_per_s,
                need=part.catch.needs_commits,
                have=tuple(sorted(training.known_leases)),
                want=training.want,
                samples=training.samples,
            )
        )

    def leave(self, reason: str) -> ToCoordinator:
        return ToCoordinator(Leave(session=self.session, seq=self._next(), reason=reason))


def phase_of(part: Participation, training: Training) -> str:
    """Where this peer is, in one word for people."""
    if part.sealing:
        return "apply"
    if part.round is not None:
        return "scatter" if part.round.decision is None else "gather"
    return "ready" if training.frozen is not None and not training.running else "inner"
