"""The peer's machine: `(event, now) -> effects`.  The agent and the simulator drive the same class.

    on_door      the door's answer           on_control   the coordinator's word
    on_frame     a bulk frame of a peer      on_local     the trainer's word
    on_encoded, on_merged, on_sealed         finished arithmetic
    on_timer     time passed                 leave        the user wants to go

It joins three parts: the doorway (getting in), the training (the trainer's state) and the participation
(rounds and state).  Pure: no clock, no sockets, no tensors.  Effects must be carried out in order.
"""

from __future__ import annotations

from collections.abc import Callable

from farflung.checkpoints.transfer import NO_VERSION
from farflung.collectives.frames import Frame, Header, Payload
from farflung.collectives.verdicts import Verdict
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.messages import (
    Aborted,
    Challenge,
    Committed,
    Decided,
    Gone,
    OpenRound,
    Refuse,
    Tick,
    ToDoor,
    ToMember,
    Welcome,
)
from farflung.coordinator.schema import ModelSchema
from farflung.peer import effects as do
from farflung.peer.doorway import Doorway, Me, Stand
from farflung.peer.local_messages import (
    Attach,
    Begin,
    Bye,
    FromTrainer,
    Frozen,
    Loaded,
    Need,
    Provide,
    Provided,
    Stop,
)
from farflung.peer.participation import Participation
from farflung.peer.reports import Reporter
from farflung.peer.training import Training

UNREACHABLE_AFTER_S = 60.0  # a first answer must come within this; who was in once waits for ever
UNREACHABLE_HINT = (
    "check that the coordinator is running, that a firewall lets its port through, and that the join URL is the one "
    "it printed last"
)


class PeerMachine:
    def __init__(self, me: Me, run: str, jitter: Callable[[], float]) -> None:
        self.me = me
        self.reports = Reporter()
        self.doorway = Doorway(me, run)
        self.training = Training()
        self.part: Participation | None = None
        self.manifest: Manifest | None = None
        self.model: ModelSchema | None = None
        self.tick: Tick | None = None
        self.exited = False
        self._jitter = jitter  # 0..1: spreads the peers' reconnections
        self._in_seq = 0
        self._heard_at = 0.0
        self._beat_at = 0.0
        self._providing = False
        self._now = 0.0

    # ---- the door ------------------------------------------------------------------------------------------

    def on_door(self, message: ToDoor, now: float) -> list[do.Effect]:
        self._now = now
        match message:
            case Challenge():
                return self._on_challenge(message)
            case Welcome() if self.doorway.on_welcome(message):
                return self._enter(message)
            case Refuse():
                if self.doorway.on_refuse(message, now):
                    return self._exit(message.code, message.reason)
                return [do.Note(f"not let in yet: {message.reason}")]
            case _:
                return []

    def _on_challenge(self, challenge: Challenge) -> list[do.Effect]:
        if not self.doorway.on_challenge(challenge):
            return []
        effects: list[do.Effect] = []
        if self.manifest is None:
            self.manifest = Manifest.from_canonical(challenge.manifest)
            self.doorway.manifest_digest = self.manifest.digest
            effects = self._begin()
        return effects + self._greet()

    def _begin(self) -> list[do.Effect]:
        """Tell a waiting trainer what the run is, so that it can say what its model is."""
        assert self.manifest is not None
        begin = Begin(manifest=self.manifest.canonical(), peer=self.me.peer, name=self.me.name)
        return [do.Tell(begin)]

    def _greet(self) -> list[do.Effect]:
        if self.doorway.stand != Stand.READING or self.part is None or self.model is None:
            return []
        return [do.ToDoor(self.doorway.greet(self.model, self.part.version, self.part.digest, self._now))]

    def _enter(self, welcome: Welcome) -> list[do.Effect]:
        self.reports.begin_session(welcome.session)
        self._in_seq = 0
        self._heard_at = self._now
        return [do.EnterMembers(welcome.member_port), *self._beat()]

    def _lose_contact(self, why: str) -> list[do.Effect]:
        assert self.manifest is not None
        self.doorway.leave(self._now, self._jitter() * self.manifest.net.heartbeat_s)
        self.tick = None
        return [do.LeaveMembers(), do.Note(f"out of contact with the coordinator ({why}); training goes on")]

    # ---- the coordinator -----------------------------------------------------------------------------------

    def on_control(self, message: ToMember, now: float) -> list[do.Effect]:
        self._now = now
        part = self.part
        if part is None or self.doorway.stand != Stand.INSIDE or message.session != self.reports.session:
            return []
        if isinstance(message, Gone):
            if message.final:
                return self._exit("refused", message.reason)
            return self._lose_contact(message.reason)
        if message.seq <= self._in_seq:
            part.counters.count(Verdict.DUPLICATE if message.seq == self._in_seq else Verdict.STALE)
            return []
        self._in_seq, self._heard_at = message.seq, now
        match message:
            case Tick():
                effects = self._on_tick(message, part)
            case OpenRound(plan=plan):
                before = part.round
                effects = part.on_plan(plan, self.training.frozen, now)
                if part.round is not before:
                    self.reports.begin_round()
            case Decided(decision=decision):
                effects = part.on_decision(decision, now)
            case Committed(commit=commit):
                part.on_commit(commit)
                effects = []
            case Aborted(round_no=round_no):
                part.on_aborted(round_no)
                effects = []
        return effects + self._move_on()

    def _on_tick(self, tick: Tick, part: Participation) -> list[do.Effect]:
        assert self.manifest is not None
        told = self.tick.reason if self.tick is not None else ""
        self.tick = tick
        effects: list[do.Effect] = []
        if tick.goal in ("sync", "wait") and tick.reason != told:
            effects.append(do.Note(tick.reason))
        if tick.roster is not None:
            self.reports.roster_no = tick.roster_no
            effects.append(do.Contacts(tick.roster))
        part.verified_version = (
            part.version if tick.verified and part.version == tick.version else part.verified_version
        )
        part.catch.on_run_state(
            tick.version, dict(tick.digests), tick.donors, self.manifest.round.keep_results
        )
        known = part.catch.digests.get(part.version)
        if part.version != NO_VERSION and not part.sealing and known is not None and known != part.digest:
            part.forget_state()
            effects.append(do.Note("my state differs from the run's: I take the run's again"))
        self._drop_dead_round(tick, part)
        effects += self._found(tick, part)
        if tick.leases is not None:
            effects += self.training.on_leases(tick.leases)
        self._name_sent_slot()
        effects += self.training.on_void(tick.void, part.version)
        if tick.goal == "finish" and part.version == tick.version and not part.sealing:
            effects += self.training.finish(part.version)
            if not self.training.attached:
                effects += self.leave("finished")
        return [*effects, *self.reports.repeat(tick, part.round)]

    def _drop_dead_round(self, tick: Tick, part: Participation) -> None:
        """The run is still at my version and counts on me in no round, or in another: mine was aborted."""
        if tick.version == part.version:
            if part.round is not None and part.round.plan.round_no != tick.round_no:
                part.on_aborted(part.round.plan.round_no)
            mine = part.contribution
            if mine is not None and mine.version == tick.version and mine.round_no != tick.round_no:
                part.on_aborted(mine.round_no)

    def _found(self, tick: Tick, part: Participation) -> list[do.Effect]:
        if (
            tick.goal != "found"
            or part.version != NO_VERSION
            or self._providing
            or not self.training.attached
        ):
            return []
        self._providing = True
        return [do.Tell(Provide())]

    # ---- other peers ---------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[do.Effect]:
        self._now = now
        if self.part is None:
            return []
        return self.part.on_frame(sender, frame, now) + self._move_on()

    def on_spoiled(self, sender: str, header: Header, now: float) -> list[do.Effect]:
        """A bulk frame of a peer arrived damaged (P8)."""
        self._now = now
        return self.part.on_spoiled(sender, header) + self._move_on() if self.part is not None else []

    def on_unreached(self, peers: set[str]) -> None:
        """The data plane's word, at every tick: for whom something waits that can't leave."""
        if self.part is not None and self.part.round is not None:
            self.part.round.unreached = peers

    # ---- finished arithmetic ---------------------------------------------------------------------------------

    def on_encoded(self, round_no: int, payloads: list[Payload], problem: str, now: float) -> list[do.Effect]:
        """`problem`: why the pseudo-gradient can't be contributed (it is not finite), else empty."""
        self._now = now
        part = self.part
        if (
            part is None
            or part.round is None
            or part.round.plan.round_no != round_no
            or part.contribution is None
        ):
            return []
        frozen = part.contribution.frozen
        if problem:
            part.contribution = None
            self._name_sent_slot()
            return [
                do.Note(f"nothing contributed to round {round_no}: {problem}; I start again from the anchor"),
                self.reports.sent(round_no, b"", None),
                *self.training.drop_work(part.version),
            ]
        moved = part.on_encoded(round_no, payloads)
        hashes = b"".join(piece.hash for piece in part.round.mine)
        # The hash list first: owners' reports can only be checked against it.
        return [self.reports.sent(round_no, hashes, frozen), *moved, *self._move_on()]

    def on_merged(
        self, round_no: int, decision_no: int, chunk: int, payload: Payload, now: float
    ) -> list[do.Effect]:
        self._now = now
        if self.part is None:
            return []
        return self.part.on_merged(round_no, decision_no, chunk, payload) + self._move_on()

    def on_sealed(self, version: int, digest: bytes, now: float) -> list[do.Effect]:
        self._now = now
        part = self.part
        assert part is not None
        consumed = part.on_sealed(version, digest)
        effects: list[do.Effect] = [*part.take_resolved()]
        self._name_sent_slot()
        if part.version == version and part.lost_track:
            part.lost_track = False
            effects.append(
                do.Note("away for too long to know whether my last contribution counted: it is dropped")
            )
            effects += self.training.drop_work(version)
        elif part.version == version:
            if consumed is not None:
                effects += self.training.on_commit_used({u.lease: u.upto for u in consumed.frozen.used})
            effects += self.training.load(version, consumed.frozen if consumed is not None else None)
        return effects + self._beat() + self._move_on()

    # ---- the trainer -----------------------------------------------------------------------------------------

    def on_local(self, message: FromTrainer, now: float) -> list[do.Effect]:
        self._now = now
        match message:
            case Attach(model=model):
                return self._on_attach(model)
            case Provided():
                self._providing = False
                assert self.part is not None
                self.part.sealing = True
                return [*self.part.catch.founded()]
            case Loaded():
                self.training.on_loaded()
                effects: list[do.Effect] = []
            case Frozen():
                self.training.on_frozen(message)
                effects = self._beat()
            case Need():
                self.training.on_need(message)
                effects = self._beat()
            case Bye(reason=reason):
                return self.leave(reason)
        return effects + self._move_on()

    def on_trainer_waiting(self) -> list[do.Effect]:
        """A trainer process connected and wants to know what the run is."""
        return self._begin() if self.manifest is not None else []

    def _on_attach(self, model: ModelSchema) -> list[do.Effect]:
        assert self.manifest is not None
        if self.model is not None and model != self.model:
            return [
                do.Tell(Stop(code="model", reason="the trainer came back with another model than before"))
            ]
        if self.part is None:
            self.model = model
            self.part = Participation(self.me.peer, self.doorway.run_id[:8], model, self.manifest)
        self._providing = False
        self.training.on_attach()
        self._name_sent_slot()
        effects = self._greet()
        if self.part.version == self.part.catch.lowest != NO_VERSION and not self.part.sealing:
            effects += self.training.load(self.part.version, None)
        return effects

    def on_trainer_gone(self, now: float) -> list[do.Effect]:
        self._now = now
        self.training.on_gone()
        self._providing = False
        return []

    def leave(self, reason: str) -> list[do.Effect]:
        effects: list[do.Effect] = []
        if self.doorway.stand == Stand.INSIDE:
            effects.append(self.reports.leave(reason))
        self.exited = True
        code = "finished" if reason == "finished" else "left"
        return [*effects, do.Tell(Stop(code=code, reason=reason)), do.Exit(code, reason)]

    def _exit(self, code: str, reason: str) -> list[do.Effect]:
        self.exited = True
        return [do.Tell(Stop(code=code, reason=reason)), do.Exit(code, reason)]

    # ---- time ------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[do.Effect]:
        self._now = now
        if self.exited:
            return []
        if self.doorway.stand != Stand.INSIDE:
            if self.doorway.silent_s(now) >= UNREACHABLE_AFTER_S:
                return self._exit(
                    "unreachable", f"nobody answered within {UNREACHABLE_AFTER_S:g} s; {UNREACHABLE_HINT}"
                )
            knock = self.doorway.on_timer(now)
            effects: list[do.Effect] = [do.ToDoor(knock)] if knock is not None else []
            return effects + self._keep_training() + (self.part.on_timer(now) if self.part else [])
        assert self.manifest is not None and self.part is not None
        if now - self._heard_at >= self.manifest.net.dead_after_s:
            return self._lose_contact(f"silent for {self.manifest.net.dead_after_s:g} s")
        effects = self.part.on_timer(now)
        if now >= self._beat_at:
            effects += self._beat()
        return effects + self._move_on()

    def _keep_training(self) -> list[do.Effect]:
        """P5: without the coordinator, inner steps go on."""
        training = self.training
        if training.frozen is None or training.running or training.loading or not training.attached:
            return []
        self._name_sent_slot()
        return training.resume()

    def _name_sent_slot(self) -> None:
        """Before the trainer is told where to freeze next: which slot a round is using."""
        mine = (self.part.contribution or self.part.consumed) if self.part is not None else None
        self.training.sent_slot = mine.frozen.slot if mine is not None else None

    # ---- what follows from any event ---------------------------------------------------------------------------

    def _move_on(self) -> list[do.Effect]:
        part = self.part
        if part is None or self.exited:
            return []
        effects: list[do.Effect] = []
        if not self.training.loading and not self._providing:
            effects += part.advance(self._now)
        if part.round is not None and self.doorway.stand == Stand.INSIDE:
            effects += self.reports.maybe_progress(part.round, self._now)
        return effects

    def _beat(self) -> list[do.Effect]:
        if self.doorway.stand != Stand.INSIDE or self.part is None or self.manifest is None:
            return []
        self._beat_at = self._now + self.manifest.net.heartbeat_s
        return [self.reports.beat(self.part, self.training)]
