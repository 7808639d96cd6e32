"""The peer's machine: `(event, now) -> effects`.  The agent and the simulator drive the same class.

    on_door      the door's answer           on_control   the coordinator's word
    on_frame     a bulk frame of a peer      on_local     the trainer's word
    on_encoded, on_calculated, on_sealed     finished arithmetic; on_restored, on_recalled: state was read
    on_timer     time passed                 take_leave   the user wants to go; `leave`: at once

It joins four parts: the doorway (getting in), the training (the trainer's state), the participation (a lane of
rounds and state for each fragment) and the exchange between the last two.  Pure: no clock, no sockets, no tensors.
Effects must be carried out in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from farflung.checkpoints.catch_up import NO_VERSION
from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.effects import Merge, Weigh
from farflung.peer.local.words import (
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
from farflung.peer.machine import effects as do
from farflung.peer.machine.checkpoint_policy import Held, Recalling, Restoring, Saving
from farflung.peer.machine.exchange import Exchange
from farflung.peer.machine.getting_in import Doorway, Me, Stand
from farflung.peer.machine.lane import Lane
from farflung.peer.machine.lanes import Participation
from farflung.peer.machine.reports import Reporter
from farflung.peer.machine.trainer_view import Training
from farflung.protocol.frames import Frame, Payload, Spoiled
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import (
    FINISHED,
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
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.peer_states import Goal
from farflung.protocol.round_words import Plan
from farflung.protocol.verdicts import Verdict


class PeerMachine:
    def __init__(self, me: Me, run: str, jitter: Callable[[], float]) -> None:
        self.me = me
        self.reports = Reporter(me.sign)
        self.doorway = Doorway(me, run)
        self.training = Training()
        self.part: Participation | None = None
        self.exchange: Exchange | None = None
        self.manifest: Manifest | None = None
        self.model: ModelSchema | None = None
        self.tick: Tick | None = None
        self.saving, self.restoring = Saving(), Restoring()
        self.recalling, self.leaving, self.log = Recalling(), Leaving(), ResultLog()
        self._jitter = jitter  # 0..1: spreads the peers' reconnections
        self._heard_at = self._beat_at = self._now = 0.0
        self._in_seq, self._providing, self.exited = 0, False, False

    # ---- the door ------------------------------------------------------------------------------------------

    def on_door(self, message: ToDoor, now: float) -> list[do.Effect]:
        self._now = now
        match message:
            case Challenge():
                return self._on_challenge(message)
            case Welcome() if self.doorway.on_welcome(message):
                return self._enter(message)
            case Refuse() if not self.doorway.inside:
                if self.doorway.on_refuse(message, now):
                    return self._exit(message.code, message.reason)
                return [do.Note(f"not let in yet: {message.reason}")]
            case _:
                return self.doorway.outdated(message)

    def _on_challenge(self, challenge: Challenge) -> list[do.Effect]:
        if not self.doorway.on_challenge(challenge):
            return []
        effects: list[do.Effect] = []
        if self.manifest is None:
            self.manifest = Manifest.from_canonical(challenge.manifest)
            self.training = Training.of(self.manifest)
            self.doorway.manifest_digest = self.manifest.digest
            self.saving.begin(self.manifest, self.doorway.run_id)
            effects = self._begin()
        return effects + self._greet()

    def _begin(self) -> list[do.Effect]:
        """Tell a waiting trainer what the run is, so that it can say what its model is."""
        assert self.manifest is not None
        return [do.Tell(Begin(manifest=self.manifest.canonical(), peer=self.me.peer, name=self.me.name))]

    def _greet(self) -> list[do.Effect]:
        if self.doorway.stand != Stand.READING or self.part is None or self.model is None:
            return []
        first = self.part.lanes[0]
        return [do.ToDoor(self.doorway.greet(self.model, first.version, first.digest, self._now))]

    def _enter(self, welcome: Welcome) -> list[do.Effect]:
        self.reports.begin_session(welcome.session, self.doorway.run_id)
        self._in_seq, self._heard_at = 0, self._now
        return [do.EnterMembers(welcome.member_port), do.Contacts(welcome.roster), *self._beat()]

    def _lose_contact(self, why: str) -> list[do.Effect]:
        assert self.manifest is not None
        self.doorway.leave(self._now, self._jitter() * self.manifest.net.heartbeat_s)
        self.tick = None
        return [do.LeaveMembers(), do.Note(f"out of contact with the coordinator ({why}); training goes on")]

    # ---- the coordinator -----------------------------------------------------------------------------------

    def on_control(self, message: ToMember, now: float) -> list[do.Effect]:
        self._now = now
        part = self.part
        if part is None or not self.doorway.inside or message.session != self.reports.session:
            return []
        if isinstance(message, Gone):
            why = message.reason
            return self._exit("refused", why) if message.final else self._lose_contact(why)
        if message.seq <= self._in_seq:
            part.counters.count(Verdict.DUPLICATE if message.seq == self._in_seq else Verdict.STALE)
            return []
        self._in_seq, self._heard_at = message.seq, now
        match message:
            case Tick():
                effects = self._on_tick(message, part)
            case OpenRound(plan=plan):
                effects = self._on_plan(plan, part)
            case Decided(decision=decision):
                effects = part.on_decision(decision, now)
            case Committed(commit=commit):
                if commit.fragment < len(part.lanes):
                    part.lanes[commit.fragment].on_commit(commit, now)
                effects = []
            case Aborted(round_no=round_no):
                part.on_aborted(round_no)
                effects = []
        return effects + self._move_on()

    def _on_plan(self, plan: Plan, part: Participation) -> list[do.Effect]:
        if plan.fragment >= len(part.lanes):
            return []
        lane = part.lanes[plan.fragment]
        before = lane.round
        effects = part.on_plan(plan, self.training.works[plan.fragment].frozen, self._now)
        if lane.round is not before:
            self.reports.begin_round(plan.fragment)
            if lane.contribution is None:
                effects = [self.reports.sent(plan, b"", None), *effects]
            effects += self.training.on_opened(plan.fragment, uses=lane.contribution is not None)
        return effects

    def _on_tick(self, tick: Tick, part: Participation) -> list[do.Effect]:
        if len(tick.fragments) != len(part.lanes):
            return []
        told, self.tick = (self.tick.reason if self.tick is not None else ""), tick
        effects: list[do.Effect] = []
        if tick.goal in (Goal.SYNC, Goal.WAIT, Goal.ALONE) and tick.reason != told:
            if tick.goal != Goal.SYNC or part.is_behind(tick.fragments):
                effects.append(do.Note(tick.reason))
        if tick.roster is not None:
            self.reports.roster_no = tick.roster_no
            effects.append(do.Contacts(tick.roster))
        if tick.era > self.reports.era:
            effects += self._go_back(tick)
        # A list, so that every lane hears its word.
        if any([lane.on_tick(word) for lane, word in zip(part.lanes, tick.fragments, strict=True)]):
            effects.append(do.Note("my state differs from the run's: I take the run's again"))
        effects += self._found(tick, part)
        effects += self.saving.look(part.lanes, tick.era)
        effects += self.recalling.look(tick, part.lanes)
        if not self.recalling.busy:
            effects += self.restoring.look(tick, part.lanes, self.training.loading, self._now)
        if tick.leases is not None:
            effects += self.training.on_leases(tick.leases)
        assert self.exchange is not None
        effects += self.exchange.on_tick(tick)
        if tick.goal == Goal.FINISH and self.exchange.is_complete(tick.fragments):
            effects += self.exchange.finish()
            if not self.training.attached:
                effects += self.leave(FINISHED, FINISHED)
        for lane, word in zip(part.lanes, tick.fragments, strict=True):
            effects += self.reports.repeat(word, lane.round)
        return effects

    def _go_back(self, tick: Tick) -> list[do.Effect]:
        """The run lost its newest state: what I hold of later versions, and learned from them, is void."""
        assert self.exchange is not None
        self.reports.era = tick.era
        self.saving.forget()
        return [*self.exchange.go_back(tick.fragments), *self._beat()]

    def _found(self, tick: Tick, part: Participation) -> list[do.Effect]:
        busy = self._providing or any(lane.sealing for lane in part.lanes)
        founded = all(lane.version != NO_VERSION for lane in part.lanes)
        if tick.goal != Goal.FOUND or founded or busy or not self.training.attached:
            return []
        self._providing = True
        return [do.Tell(Provide())]

    def _on_provided(self) -> list[do.Effect]:
        if self.exchange is None or not self._providing:
            return []  # the word of a trainer that is gone
        self._providing = False
        return self.exchange.on_provided()

    # ---- other peers ---------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[do.Effect]:
        self._now = now
        if self.part is None:
            return []
        lane = self.part.lane_of_chunk(frame.header.chunk)
        return self.part.on_frame(sender, frame, now) + self._move_on(lane)

    def on_spoiled(self, sender: str, spoiled: Spoiled, now: float) -> list[do.Effect]:
        """A bulk frame of a peer arrived damaged (P8)."""
        self._now = now
        return self.part.on_spoiled(sender, spoiled) + self._move_on() if self.part is not None else []

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        """The data plane's word, at every tick: for whom something waits that can't leave, of whom bytes came in."""
        if self.part is not None:
            self.part.on_lines(unreached, arriving, now)

    # ---- finished arithmetic ---------------------------------------------------------------------------------

    def on_encoded(
        self, round_no: int, payloads: Mapping[int, Payload], problem: str, now: float
    ) -> list[do.Effect]:
        """Some chunks of the fragment.  `problem`: why it can't be contributed (it is not finite), else empty."""
        self._now = now
        lane = self.part.lane_of_round(round_no) if self.part is not None else None
        if lane is None or lane.round is None or lane.contribution is None or self.exchange is None:
            return []
        plan, frozen = lane.round.plan, lane.contribution.frozen
        if problem:
            return [
                do.Note(f"nothing contributed to round {round_no}: {problem}; I start again from the anchor"),
                self.reports.sent(plan, b"", None),
                *self.exchange.on_unusable(lane),
            ]
        moved = lane.round.on_encoded(payloads)
        # The hash list first: owners' reports can only be checked against it.
        told = [self.reports.sent(plan, lane.round.hashes(), frozen)] if lane.round.encoded else []
        return [*told, *moved, *self._move_on(lane)]

    def on_calculated(self, effect: Merge | Weigh, made: object, now: float) -> list[do.Effect]:
        self._now = now
        lane = self.part.lane_of_round(effect.round_no) if self.part is not None else None
        if lane is None or lane.round is None:
            return []
        return [*lane.round.on_calculated(effect, made), *self._move_on(lane)]

    def on_sealed(self, fragment: int, version: int, digest: bytes, now: float) -> list[do.Effect]:
        self._now = now
        assert self.exchange is not None
        return self.exchange.on_sealed(fragment, version, digest) + self._beat() + self._move_on()

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def on_restored(self, version: int, problems: list[str], now: float) -> list[do.Effect]:
        """The state is that of a checkpoint; or NO_VERSION: none was found that is whole and of this run."""
        self._now = now
        assert self.exchange is not None
        notes: list[do.Effect] = [do.Note(each) for each in problems]
        good = self.restoring.on_end(version, now, self.reports.era)
        return notes + (self.exchange.on_restored(version) if good else []) + self._move_on()

    def on_recalled(self, held: Held, now: float) -> list[do.Effect]:
        """These pieces of the run's state, which had arrived before a crash, stand in it again."""
        self._now = now
        assert self.part is not None
        return self.recalling.on_end(held, self.part.lanes, self.reports.era) + self._move_on()

    # ---- the trainer -----------------------------------------------------------------------------------------

    def on_local(self, message: FromTrainer, now: float) -> list[do.Effect]:
        self._now = now
        match message:
            case Attach(model=model):
                return self._on_attach(model)
            case Provided():
                return self._on_provided()
            case Loaded(fragment=fragment):
                self.training.on_loaded(fragment)
                effects: list[do.Effect] = []
            case Frozen():
                self.training.on_frozen(message)
                effects = [] if message.more else self._beat()
            case Need():
                self.training.on_need(message)
                effects = self._beat()
            case Bye(reason=reason):
                return self.take_leave(reason, now, message.code)
        return effects + self._move_on()

    def on_trainer_waiting(self) -> list[do.Effect]:
        """A trainer process connected and wants to know what the run is."""
        return self._begin() if self.manifest is not None else []

    def _on_attach(self, model: ModelSchema) -> list[do.Effect]:
        assert self.manifest is not None
        if self.model is not None and model != self.model:
            return [do.Tell(Stop(code="model", reason="the trainer came back with another model"))]
        if self.part is None or self.exchange is None:
            self.model = model
            self.part = Participation(self.me.peer, self.doorway.run_id[:8], model, self.manifest, self.log)
            self.exchange = Exchange(self.part, self.training)
        self._providing = False
        return [*self.exchange.on_attach(), *self._greet()]

    def on_trainer_gone(self, now: float) -> list[do.Effect]:
        self._now = now
        self.training.on_gone()
        self._providing = False
        return []

    def take_leave(self, reason: str, now: float, code: str = "left") -> list[do.Effect]:
        """In good order: after the rounds in flight, if they end soon."""
        self._now = now
        if self.exited or self.leaving.asked:
            return []
        self.reports.leaving = True
        self.leaving.ask(reason, code, now)
        if self.leaving.may_go(self.part, self.doorway.inside, now):
            return self.leave(reason, code)
        return [do.Note(f"leaving when this round is over: {reason}"), *self._beat()]

    def leave(self, reason: str, code: str = "left") -> list[do.Effect]:
        if self.exited:
            return []
        goodbye = [self.reports.leave(reason)] if self.doorway.inside else []
        return [*goodbye, *self._exit(code, reason)]

    def _exit(self, code: str, reason: str) -> list[do.Effect]:
        self.exited = True
        return [do.Tell(Stop(code=code, reason=reason)), do.Exit(code, reason)]

    # ---- time ------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[do.Effect]:
        self._now = now
        if self.exited:
            return []
        if self.leaving.may_go(self.part, self.doorway.inside, now):
            return self.leave(self.leaving.reason, self.leaving.code)
        if not self.doorway.inside:
            if gave_up := self.doorway.unreachable(now):
                return self._exit("unreachable", gave_up)
            knock = self.doorway.on_timer(now)
            effects: list[do.Effect] = [do.ToDoor(knock)] if knock is not None else []
            if self.part is not None and self.exchange is not None:
                effects += [*self.exchange.go_on_alone(), *self.part.on_timer(now)]
            return effects
        assert self.manifest is not None and self.part is not None
        if now - self._heard_at >= self.manifest.net.dead_after_s:
            return self._lose_contact(f"silent for {self.manifest.net.dead_after_s:g} s")
        effects = self.part.on_timer(now)
        if now >= self._beat_at:
            effects += self._beat()
        return effects + self._move_on()

    # ---- what follows from any event ---------------------------------------------------------------------------

    def _move_on(self, only: Lane | None = None) -> list[do.Effect]:
        """`only`: nothing has changed in the other lanes."""
        if (part := self.part) is None or self.exited:
            return []
        effects: list[do.Effect] = []
        for lane in part.lanes if only is None else [only]:
            busy = self._providing or self.restoring.busy or self.recalling.busy
            if not self.training.works[lane.fragment.number].loading and not busy:
                effects += lane.advance(self._now)
            if lane.round is not None and self.doorway.inside:
                effects += self.reports.maybe_progress(lane.round, self._now)
        if self.doorway.inside and only is None and self.exchange is not None:
            effects += self.exchange.go_on()
        return effects

    def _beat(self) -> list[do.Effect]:
        if not self.doorway.inside or self.part is None or self.manifest is None:
            return []
        self._beat_at = self._now + self.manifest.net.heartbeat_s
        return [self.reports.beat(self.part, self.training)]


# ---- taking one's leave -------------------------------------------------------------------------------
#
# To stay costs the others nothing: what a leaving peer contributed is used, and what it owns is merged
# where it is. It says in its beats that it is leaving, so nobody counts on it for another round or waits
# for it. A peer that is asked twice, or whose round takes too long, goes at once: the coordinator then
# moves its chunks to others.


STAY_S = 8.0  # less than a script waits for its agent, and than containers get between SIGTERM and SIGKILL


class Leaving:
    def __init__(self) -> None:
        self.reason = self.code = ""
        self._until = 0.0

    @property
    def asked(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str, code: str, now: float) -> None:
        self.reason, self.code = reason or "it left", code
        self._until = now + STAY_S

    def may_go(self, part: Participation | None, inside: bool, now: float) -> bool:
        """Nothing is left to stay for."""
        return self.asked and (part is None or not part.in_round or not inside or now >= self._until)
