"""Tells each member where the run is and what to do: the answer to every beat.  Pure.

One of the parts of the run machine.  It judges the state that a member reports (P4), chooses the founder of
version 0, repeats whatever the beat shows to be missing, and leases data (P7).
"""

from __future__ import annotations

from farflung.coordinator.conductor import Conductor
from farflung.coordinator.core import Core
from farflung.coordinator.membership import Member
from farflung.coordinator.messages import Beat, Committed, Decided, Lease, OpenRound, Tick
from farflung.coordinator.records import DataFixed, Genesis, Granted, Released, Vouched

RELEASE_AFTER_DEAD = (
    2.0  # times dead_after_s: how long a lost peer's leases wait for it before others get them
)
LEASES_PER_PEER = 64
DIGESTS_TOLD = 8
DONORS_TOLD = 16
RATE_SPAN_S = 2.0
FINISH_GRACE_S = 60.0  # how long those who are done wait for those who are not


class Guidance:
    def __init__(self, core: Core, conductor: Conductor) -> None:
        self._core = core
        self._conductor = conductor
        self._absent_since: dict[str, float] = {}

    # ---- a beat --------------------------------------------------------------------------------------

    def on_beat(self, member: Member, beat: Beat) -> str | None:
        """Take a beat in and answer it.  Returns why the member must go, if it must."""
        core = self._core
        self._measure(member, beat)
        member.beat = beat
        refusal = self._take_data_size(member, beat)
        if refusal:
            return refusal
        goal, reason = self._judge(member)
        member.state = self._state_for_people(member, goal)
        if not (beat.ready and member.verified):
            member.ready_since = None
        elif member.ready_since is None:
            member.ready_since = core.now
        leases, void = self._lease(member, beat)
        flight = self._conductor.round
        counted = flight is not None and self._conductor.counts_on(member)
        core.tell(
            member,
            Tick,
            version=core.ledger.version,
            digests=self._digests(),
            goal=goal,
            verified=member.verified,
            reason=reason,
            roster_no=core.members.roster_no,
            roster=core.members.roster() if beat.roster_no != core.members.roster_no else None,
            donors=self._donors(member),
            leases=leases,
            void=void,
            round_no=flight.plan.round_no if flight is not None and counted else 0,
            sent_seen=flight is not None and member.peer in flight.sent,
            progress_seen=member.progress_seen,
        )
        self._repeat_what_is_missing(member, beat, counted)
        return None

    def _digests(self) -> tuple[tuple[int, bytes], ...]:
        """Recent versions' digests; none while version 0 is being founded (again): nobody holds the old one."""
        ledger = self._core.ledger
        if ledger.version == 0 and not self._genesis_is_held():
            return ()
        return tuple(sorted(ledger.digests.items())[-DIGESTS_TOLD:])

    def _measure(self, member: Member, beat: Beat) -> None:
        """Tokens per second, over spans long enough to mean something: beats come in bursts around a round."""
        seconds = self._core.now - member.rated_at
        if member.beat is None or seconds >= RATE_SPAN_S:
            if member.beat is not None:
                rate = max(0, beat.tokens - member.rated_tokens) / seconds
                member.rate_tokens_per_s += 0.3 * (rate - member.rate_tokens_per_s)
            member.rated_at, member.rated_tokens = self._core.now, beat.tokens

    def _repeat_what_is_missing(self, member: Member, beat: Beat, counted: bool) -> None:
        core, flight = self._core, self._conductor.round
        for version in beat.need:
            if version in core.ledger.commits and (member.vouched or beat.version < 0):
                core.tell(member, Committed, commit=core.ledger.commits[version])
        if flight is not None and counted and beat.version == flight.plan.version:
            same_round = beat.round_no == flight.plan.round_no
            if not same_round or beat.epoch < flight.plan.epoch:
                core.tell(member, OpenRound, plan=flight.plan)
            if flight.decision is not None and (
                not same_round or beat.decision_no < flight.decision.decision_no
            ):
                core.tell(member, Decided, decision=flight.decision)

    # ---- judging a member's state ----------------------------------------------------------------------

    def recheck_all(self) -> None:
        """The digest of the version has just been settled: tell every member at once."""
        for member in self._core.members.alive.values():
            if member.beat is not None:
                self.on_beat(member, member.beat)

    def _judge(self, member: Member) -> tuple[str, str]:
        """(goal, reason).  Sets `verified`, `vouched`, `quarantined`."""
        core, beat = self._core, member.beat
        assert beat is not None
        version = core.ledger.version
        known = core.ledger.digests.get(beat.version)
        if beat.version >= 0 and known is not None and beat.digest == known:
            self._vouch(member)
        member.verified = beat.version == version and known is not None and beat.digest == known
        if version == 0 and not self._genesis_is_held():
            return self._found(member, beat)
        if beat.version > version:
            return (
                "wait",
                f"it holds version {beat.version}, the journal ends at {version}: restore the newer journal",
            )
        if beat.version >= 0 and known is not None and beat.digest != known:
            self._quarantine(member)
            return self._sync(member, "its state differs from the run's; it takes the run's state again")
        if member.verified:
            member.quarantined = False
            if core.finished:
                return self._finish(version)
            return "train", self._conductor.reason
        if beat.version == version:
            return "train", f"waiting for the digest of version {version} to be settled"
        return self._sync(member, f"it holds version {beat.version}, the run is at {version}")

    def _finish(self, version: int) -> tuple[str, str]:
        """Who has the last version stays a while for those who are still fetching it."""
        behind = [m for m in self._core.members.alive.values() if not m.verified]
        if behind and self._conductor.since_commit_s < FINISH_GRACE_S:
            return "wait", f"the run is complete; {len(behind)} peers are still fetching version {version}"
        return "finish", f"the run is complete: {version} rounds committed"

    def _sync(self, member: Member, reason: str) -> tuple[str, str]:
        if self._donors(member):
            return "sync", reason
        return (
            "wait",
            f"no living peer holds version {self._core.ledger.version}: only one that has it in memory can go on",
        )

    def _quarantine(self, member: Member) -> None:
        if not member.quarantined:
            member.quarantined = True
            member.strikes += 1
            self._core.note(f"{member.contact.name} is quarantined: its digest differs from the run's")

    def _genesis_is_held(self) -> bool:
        genesis = self._core.ledger.digests.get(0)
        return genesis is not None and any(
            m.beat is not None and m.beat.version == 0 and m.beat.digest == genesis
            for m in self._core.members.alive.values()
        )

    def _found(self, member: Member, beat: Beat) -> tuple[str, str]:
        """Nothing has been learned yet and nobody holds version 0: the oldest living peer founds it."""
        oldest = min(self._core.members.alive.values(), key=lambda m: m.joined_no)
        if member is not oldest:
            return "wait", f"{oldest.contact.name} gives the run its initial state"
        if beat.version != 0 or not beat.digest:
            return "found", "it gives the run its initial state"
        if self._conductor.round is not None:
            self._conductor.abort("version 0 is founded anew")
        self._core.write(Genesis(digest=beat.digest, peer=member.peer))
        self._core.note(f"{member.contact.name} founded version 0")
        member.verified = True
        self._vouch(member)
        return "train", "it founded version 0"

    def _vouch(self, member: Member) -> None:
        member.vouched = True
        if member.peer not in self._core.ledger.vouched:
            self._core.write(Vouched(peer=member.peer))

    def _donors(self, member: Member) -> tuple[str, ...]:
        """Whom to ask: peers verified at the version, and those that hold the last round's results."""
        core = self._core
        version = core.ledger.version
        commit = core.ledger.commits.get(version)
        makers = commit.members if commit is not None else ()
        donors = [
            peer
            for peer, other in core.members.alive.items()
            if (other.verified or peer in makers)
            and other is not member
            and core.members.can_talk(member, other)
        ]
        return tuple(sorted(donors)[:DONORS_TOLD])

    @staticmethod
    def _state_for_people(member: Member, goal: str) -> str:
        assert member.beat is not None
        if member.quarantined:
            return "quarantined"
        return {"sync": "syncing", "found": "joining", "wait": "waiting"}.get(goal, member.beat.phase)

    # ---- data leases -----------------------------------------------------------------------------------

    def _take_data_size(self, member: Member, beat: Beat) -> str | None:
        core = self._core
        alone = core.ledger.version == 0 and core.members.alive.keys() == {member.peer}
        if (
            beat.samples
            and beat.samples != core.ledger.leases.samples
            and (not core.ledger.leases.samples or alone)
        ):
            core.write(DataFixed(samples=beat.samples, peer=member.peer))
        run_samples = core.ledger.leases.samples
        if beat.samples and beat.samples != run_samples:
            return f"data set has {beat.samples} samples here, {run_samples} in the run; use the same data"
        return None

    def _lease(self, member: Member, beat: Beat) -> tuple[tuple[Lease, ...] | None, tuple[int, ...]]:
        """(all leases of the member if it does not know them yet, those it must not use any more)."""
        core = self._core
        leases = core.ledger.leases
        flight = self._conductor.round
        in_flight = flight is not None and member.peer in flight.plan.members
        if in_flight and not self._conductor.counts_on(member):
            return (
                None,
                (),
            )  # what its former self contributed may yet be acknowledged: nothing is handed out twice
        if beat.want and leases.samples and member.verified and not core.finished:
            self._grant(member, beat)
        mine = leases.of(member.peer)
        void = (
            leases.foreign(member.peer, beat.have)
            if beat.version == core.ledger.version and not in_flight
            else ()
        )
        if mine.keys() <= set(beat.have):
            return None, void
        return tuple(held.as_lease(i) for i, held in sorted(mine.items())), void

    def _grant(self, member: Member, beat: Beat) -> None:
        leases = self._core.ledger.leases
        mine = leases.of(member.peer)
        on_the_way = sum(h.stop - h.upto for i, h in mine.items() if i not in beat.have)
        while on_the_way < beat.want and len(mine) < LEASES_PER_PEER:
            epoch, start, stop = leases.next_range(beat.want)
            lease = Lease(leases.next_id, epoch, start, stop, start)
            self._core.write(Granted(peer=member.peer, lease=lease))
            mine = leases.of(member.peer)
            on_the_way += stop - start

    def reclaim_leases(self) -> None:
        """What lost peers did not get committed goes back to the pool, after a while."""
        core = self._core
        holders = {held.peer for held in core.ledger.leases.held.values()}
        flight = self._conductor.round
        busy = set(flight.plan.members) if flight is not None else set()
        absent = sorted(p for p in holders if p not in core.members.alive and p not in busy)
        self._absent_since = {p: self._absent_since.get(p, core.now) for p in absent}
        patience_s = RELEASE_AFTER_DEAD * core.members.dead_after_s
        for peer, since in self._absent_since.items():
            if core.now - since >= patience_s:
                core.write(
                    Released(
                        leases=tuple(core.ledger.leases.of(peer)),
                        reason=f"{core.name(peer)} did not come back",
                    )
                )
