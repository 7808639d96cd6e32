"""The peer's machine: `(event, now) -> effects`.  The agent and the simulator drive the same class.

    on_door      the door's answer           on_control   the coordinator's word
    on_frame     a bulk frame of a peer      on_local     the trainer's word
    on_encoded, on_calculated, on_sealed     finished arithmetic
    on_disk      what disks have to say      on_attach    the first trainer's model, or that of a later one
    on_timer     time passed                 take_leave   the user wants to go; `leave`: at once

It joins five parts: the doorway (getting in), the training (the trainer's state), the participation (a replica of
rounds and state for each fragment), the exchange between the last two, and the crossings of a stage.  A peer that can
hold some stages of a model has its part in the run from its welcome on, which names one of them.
Pure: no clock, no sockets, no tensors.  Effects must be carried out in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.collectives.round.effects import Calculated
from farflung.peer.local.words import (
    Anew,
    Attach,
    Begin,
    Bye,
    Computed,
    FromTrainer,
    Frozen,
    Loaded,
    NeedSamples,
    Provided,
    Stop,
    WorkDone,
)
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import DiskWord, ShelfListed, StateWord
from farflung.peer.machine.handshake import NO_HELP, Handshake, HandshakeState, Leaving, Offer, PeerConfig
from farflung.peer.machine.heartbeat import BeatTimes, HeartbeatBuilder
from farflung.peer.machine.member_session import Answer, MemberSession, without_start
from farflung.peer.machine.modes import PeerMode, TrainerSaid, missing, places_of, training_of
from farflung.peer.machine.replicas import Replica, Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.protocol.errors import Counters, LeaveCause, Verdict
from farflung.protocol.frames import Frame, Payload, Spoiled
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import (
    Aborted,
    Challenge,
    Committed,
    Decided,
    Gone,
    OpenRound,
    Refuse,
    Show,
    StandsBy,
    Tick,
    ToDoor,
    ToMember,
    Welcome,
)
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.run_terms import Attached, Known
from farflung.protocol.signing import AskKept
from farflung.protocol.states import Goal


class PeerMachine:
    """Three moments: it knocks; it knows the run (`known`); a trainer came, and it has a part in it (`joined`)."""

    def __init__(self, config: PeerConfig, jitter: Callable[[], float]) -> None:
        self.me = config.me
        self.reports = HeartbeatBuilder(config.me.sign)
        self.doorway = Handshake(config.me, config.run, config.helps, config.kept)
        self.seeking = places_of(config, self.doorway.hurry)
        self.training = TrainerProxy()
        self.leaving = Leaving()
        self.counters = Counters()
        self.known: Known | None = None
        self.offer: Offer | None = None
        self.joined: MemberSession | None = None
        self.tick: Tick | None = None
        self._config = config
        self._jitter = jitter  # 0..1: spreads the peers' reconnections
        self._in_seq, self.exited, self._now, self._beats = 0, False, 0.0, BeatTimes()
        self._vacating = self._vacant = False  # I gave a stage up; and my trainer has not begun anew

    @property
    def part(self) -> Replicas | None:
        return self.joined.part if self.joined is not None else None

    @property
    def era(self) -> int:
        """What is asked for now is meant in it: the run may go back while the shell is at it."""
        return self.reports.era

    @property
    def logged_bytes(self) -> int:
        return self.joined.log.bytes if self.joined is not None else 0

    @property
    def early_count(self) -> int:
        return self.joined.early_count if self.joined is not None else 0

    def digest_of(self, chunk: int, version: int) -> bytes:
        """The run's digest of this version of the chunk's fragment, as far as it is known."""
        replica = self.joined.part.replica_of_chunk(chunk) if self.joined is not None else None
        return replica.held.chunks.digests.get(version, b"") if replica is not None else b""

    # ---- the door ------------------------------------------------------------------------------------------

    def on_door(self, message: ToDoor, now: float) -> list[do.Effect]:
        self._now = now
        match message:
            case Challenge():
                return self._on_challenge(message)
            case Welcome():
                return self._on_welcome(message)
            case Refuse() if not self.doorway.inside:
                final = self.doorway.on_refuse(message, now)
                note = do.Note(f"not admitted yet: {message.reason}")
                return self._exit(message.code, message.reason) if final else [note]
            case StandsBy():
                self.doorway.on_standby(now)
                return self.seeking.on_found(message.whereabouts, now)
            case AskKept():
                return self.seeking.give_back(message, self.joined.about if self.joined else None)
            case _:
                return self.doorway.outdated(message)

    def _on_challenge(self, challenge: Challenge) -> list[do.Effect]:
        if not self.doorway.on_challenge(challenge):
            why = self.doorway.other_protocol
            return self._exit("protocol", why) if why else []
        effects: list[do.Effect] = []
        if self.known is None:
            self.known = Known(Manifest.from_canonical(challenge.manifest), challenge.run_id)
            if self._config.helps and self.known.manifest.pipeline.stages > 1:
                return self._exit("no-helpers", NO_HELP)
            if problem := missing(self.known.manifest):
                return self._exit("protocol", problem)
            self.training = training_of(self.known.manifest)
            if problem := without_start(self.known.manifest.start, self._config.start):
                return self._exit(LeaveCause.START, problem)
            effects = self.on_trainer_waiting()
        if self._config.helps and self.offer is None:
            return effects + self.doorway.help_with(challenge, self._now)
        return effects + self._greet()

    def _greet(self) -> list[do.Effect]:
        offer = self.offer
        if self.doorway.stand != HandshakeState.READING or offer is None:
            return []
        held = self.joined.replicas[0].held if self.joined is not None else None
        version, digest = (held.version, held.digest) if held is not None else (NO_VERSION, b"")
        return [do.ToDoor(self.doorway.greet(offer, version, digest, self._now, self.seeking.kept))]

    def _on_welcome(self, welcome: Welcome) -> list[do.Effect]:
        held = self.offer.attached.as_holder_of(welcome.fragments) if self.offer is not None else None
        if self.offer is None or held is None or not self.doorway.on_welcome(welcome):
            return self.doorway.outdated(welcome)
        if self.joined is not None:
            return self._enter(self.joined, welcome)
        joined = self._join(replace(self.offer, attached=held))
        with_trainer = joined.exchange.on_attach() if self.training.attached else []
        return [*joined.begun(), *with_trainer, *self._enter(joined, welcome)]

    def _join(self, offer: Offer) -> MemberSession:
        """`offer`: of what is held from now on, and offered whenever I come back."""
        joined = MemberSession.of(
            offer, self.training, self._config, self.reports, self._jitter, self.counters
        )
        self.offer, self.joined, self.training = offer, joined, joined.training
        return joined

    def _enter(self, joined: MemberSession, welcome: Welcome) -> list[do.Effect]:
        self.reports.begin_session(welcome.session, joined.attached.known)
        self._in_seq = self._beats.begin(self._now)
        joined.part.came_back()
        found = self.seeking.on_welcome(welcome, self._now)
        return [do.EnterMembers(welcome.member_port), *found, *self._beat()]

    def _lose_contact(self, joined: MemberSession, why: str) -> list[do.Effect]:
        self.doorway.leave(self._now, self._jitter() * joined.net.heartbeat_s)
        self.seeking.on_lost(joined.attached.known.tag, self._now)
        self.tick = None
        return [do.LeaveMembers(), do.Note(f"out of contact with the coordinator ({why}); training goes on")]

    # ---- the coordinator -----------------------------------------------------------------------------------

    def on_control(self, message: ToMember, now: float) -> list[do.Effect]:
        self._now = now
        joined = self.joined
        if joined is None or not self.doorway.inside or message.session != self.reports.session:
            return []
        if isinstance(message, Gone):
            why = message.reason
            return self._exit("refused", why) if message.final else self._lose_contact(joined, why)
        part = joined.part
        if message.seq <= self._in_seq:
            self.counters.count(Verdict.DUPLICATE if message.seq == self._in_seq else Verdict.STALE)
            return []
        self._in_seq = self._beats.heard(message, now)
        kept = self.seeking.keep(message, joined.about)
        if (unheard := joined.amending.why_not(message)) is not None:
            return [*kept, *unheard, *self._beat()]  # the answer tells what I have to know first
        match message:
            case Tick():
                effects = self._on_tick(message, joined)
            case OpenRound(plan=plan):
                effects = joined.on_plan(plan, self.reports, now)
            case Decided(decision=decision):
                effects = part.on_decision(decision, now)
            case Committed():
                joined.on_commit(message, now)
                effects = []
            case Show():
                effects = joined.on_show(message, self.reports, now)
            case Aborted():
                effects = joined.on_aborted(message)
                effects += self._beat() if self._beats.are_rare(joined.net.heartbeat_s) else []
            case _:
                effects = joined.first(lambda mode: mode.on_word(message, now)) or []
        return kept + effects + self._move_on()

    def _on_tick(self, tick: Tick, joined: MemberSession) -> list[do.Effect]:
        part, exchange = joined.part, joined.exchange
        if [word.fragment for word in tick.fragments] != list(part.replicas):
            return []
        before, self.tick = self.tick, tick
        advised = before.advice if before is not None else ""
        effects: list[do.Effect] = [do.Note(tick.advice)] if tick.advice not in ("", advised) else []
        effects += joined.amending.on_tick(tick, joined.disk.saving)
        effects += joined.why_waiting(tick)
        if tick.roster is not None:
            effects += self.seeking.on_roster(tick, self._now)
            self.reports.roster_no = self.seeking.roster_no
        if tick.era > self.reports.era:
            self.training.forward = None
            effects += [*joined.go_back(tick, self.reports), *self._beat()]
        if tick.look and not (before is not None and before.look):
            # An instant comes soon, on the coordinator's clock.  The first beat of a session waits until its connection
            # stands, so that its answer tells that clock wrongly: the answer to this one is better, and is here before.
            effects += self._beat()
        # A list, so that every replica hears its word.
        if tick.serve in set(joined.offer.fits) - set(part.replicas) and not self.leaving.asked:
            return [*effects, *self._change_stage(tick.serve, joined)]
        if any([replica.on_tick(word) for replica, word in part.words(tick.fragments)]):
            effects.append(do.Note("local weights don't match the run's digest; downloading them again"))
        effects += joined.disk.due_saves(tick.era, self._now)
        effects += joined.disk.begin_reading(tick, self._now)
        if tick.leases is not None:
            effects += self.training.on_leases(tick.leases)
        effects += exchange.on_tick(tick)
        if tick.goal == Goal.FINISH and exchange.is_complete(tick.fragments):
            effects += exchange.finish()
            if not self.training.attached:
                effects += self.leave("the run is complete", LeaveCause.FINISHED)
        for replica, word in part.words(tick.fragments):
            effects += self.reports.repeat(word, replica.rounds.flight)
        return effects

    def _change_stage(self, to: int, joined: MemberSession) -> list[do.Effect]:
        """The coordinator needs me in another stage: what I hold of mine goes, and I come in as a newcomer does."""
        self.counters.count(Verdict.STALE, joined.early_count)
        told = joined.moves_to(to)
        effects: list[do.Effect] = [
            do.Note(f"I {told}"),
            self.reports.leave(LeaveCause.MOVES),
            do.LeaveMembers(),
        ]
        effects.append(do.Vacate())
        self.doorway.leave(self._now, 0.0)
        self.joined, self.offer, self.tick, self._vacating, self._vacant = None, None, None, True, True
        self.training = training_of(joined.attached.known.manifest)
        self.reports = HeartbeatBuilder.of_newcomer(self.reports)
        return effects

    def on_vacated(self, now: float) -> list[do.Effect]:
        """Nothing is left here of the stage that I held: the trainer, too, begins anew."""
        self._now, self._vacating = now, False
        return [do.TellTrainer(Anew())]

    def on_begun(self, problem: str, is_final: bool, now: float) -> list[do.Effect]:
        """What run.toml names for a beginning stands in the state; or the problem, `is_final` if it will stay."""
        self._now, joined = now, self.joined
        if joined is None:
            return []
        leaves, effects = joined.on_begun(problem, is_final, now)
        return self.leave(leaves, LeaveCause.START) if leaves else effects + self._move_on()

    # ---- other peers ---------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[do.Effect]:
        self._now = now
        if self.joined is None:
            self.counters.count(Verdict.STALE)
            return []
        part = self.joined.part
        if (answer := self.seeking.on_frame(sender, frame, self.counters, now)) is not None:
            return answer
        if (answer := self.joined.first(lambda mode: mode.on_frame(sender, frame, now))) is not None:
            return answer
        return part.on_frame(sender, frame, now) + self._move_on(part.replica_of_chunk(frame.header.chunk))

    def on_spoiled(self, sender: str, spoiled: Spoiled, now: float) -> list[do.Effect]:
        """A bulk frame of a peer arrived damaged (P8)."""
        self._now, joined = now, self.joined
        if joined is None:
            return []
        if (answer := joined.first(lambda mode: mode.on_spoiled(sender, spoiled, now))) is not None:
            return answer
        return joined.part.on_spoiled(sender, spoiled) + self._move_on()

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        """The data plane's word, at every tick: for whom something waits that can't leave, of whom bytes came in."""
        if self.joined is not None:
            self.joined.on_lines(unreached, arriving, now)

    # ---- finished arithmetic ---------------------------------------------------------------------------------

    def on_encoded(
        self, round_no: int, payloads: Mapping[int, Payload], problem: str, now: float
    ) -> list[do.Effect]:
        """Some chunks of the fragment.  `problem`: why it can't be contributed (it is not finite), else empty."""
        self._now = now
        joined = self.joined
        replica = joined.part.replica_of_round(round_no) if joined is not None else None
        if joined is None or replica is None:
            return []
        made = joined.on_encoded(replica, round_no, payloads, problem, self.reports)
        return made or [] if problem or made is None else [*made, *self._move_on(replica)]

    def on_calculated(self, effect: Calculated, made: object, now: float) -> list[do.Effect]:
        self._now = now
        joined = self.joined
        if joined is None:
            return []
        if (answer := joined.first(lambda mode: mode.on_calculated(effect, made, now))) is not None:
            return answer
        replica = joined.part.replica_of_round(effect.round_no)
        if replica is None or replica.rounds.flight is None:
            return []
        return [*replica.rounds.flight.owner.on_calculated(effect, made), *self._move_on(replica)]

    def on_sealed(self, fragment: int, version: int, digest: bytes, now: float) -> list[do.Effect]:
        self._now, joined = now, self.joined
        if joined is None:
            return []
        if wrong := joined.founding.contradiction(joined.part.replicas[fragment], version, digest):
            return self.leave(wrong, LeaveCause.START)
        effects = joined.exchange.on_sealed(fragment, version, digest)
        # That it is held is told with it, where the nonce for that is known: it is calculated in a moment.
        held = joined.part.replicas[fragment].held
        told = [] if held.whole and held.grounds.is_proving(held.version) else self._tell_news()
        return effects + told + self._move_on()

    def on_holding_proven(self, proof: do.ProveHolding, value: bytes, now: float) -> list[do.Effect]:
        """What only a holder of the version can calculate."""
        self._now, joined = now, self.joined
        if joined is None:
            return []
        joined.part.replicas[proof.fragment].held.grounds.on_proven(proof.version, proof.nonce, value)
        return self._tell_news() + self._move_on()

    def on_shown(self, show: Show, raw: bytes | None, now: float) -> list[do.Effect]:
        """The bytes that the coordinator asked for; None: they are not here."""
        self._now = now
        return [*self.reports.shown(show, raw)] if self.doorway.inside else []

    # ---- disks -----------------------------------------------------------------------------------------------

    def on_disk(self, word: DiskWord, now: float) -> list[do.Effect]:
        if (joined := self.joined) is None:
            return []
        effects = joined.disk.on_word(word, self.tick, now)
        if isinstance(word, StateWord):
            self._now = now
            effects += self._move_on()
        return effects + self._tell_news() if isinstance(word, ShelfListed) else effects

    # ---- the trainer -----------------------------------------------------------------------------------------

    def on_local(self, message: FromTrainer, now: float, payload: Payload = b"") -> list[do.Effect]:
        """`payload`: what lay in the belt where a stage's trainer made something (`place_of`)."""
        self._now = now
        if self._vacant and not isinstance(message, Attach | Bye):
            return []  # it speaks of the stage that I held
        match message:
            case Attach(model=model):
                return self.on_attach(model, "", now)
            case Provided():
                return self.joined.on_provided() if self.joined is not None else []
            case Loaded(fragment=fragment):
                self.training.on_loaded(fragment)
                effects: list[do.Effect] = []
            case Frozen():
                self.training.on_frozen(message)
                effects = [] if message.more else self._tell_news()
            case NeedSamples():
                effects = [*self.training.on_need(message), *self._beat()]
            case Computed(forward=forward):
                effects = self._tell_news() if self.training.on_computed(forward) else []
            case Bye(reason=reason):
                return self.take_leave(reason, now, message.cause)
            case _:
                heard = self._of_mode(lambda mode: mode.on_trainer(message, payload, now)) or TrainerSaid([])
                effects = [*heard.effects, *(self._beat() if heard.beat else [])]
        return effects + self._move_on()

    def place_of(self, word: WorkDone) -> int | None:
        """In which place of the belt lies what the trainer made; None: it was made for sums that are gone."""
        return self._of_mode(lambda mode: mode.place_of(word))

    def _of_mode(self, asked: Callable[[PeerMode], Answer | None]) -> Answer | None:
        return self.joined.first(asked) if self.joined is not None else None

    def on_trainer_waiting(self) -> list[do.Effect]:
        """A trainer process connected and wants to know what the run is."""
        if self.known is None:
            return []
        run = self.known.manifest.canonical()
        changed = self.joined.amending.words() if self.joined is not None else []
        return [do.TellTrainer(Begin(manifest=run, peer=self.me.peer, name=self.me.name)), *changed]

    def on_attach(
        self,
        model: ModelSchema,
        address: str,
        now: float,
        stages: tuple[int, ...] = (),
    ) -> list[do.Effect]:
        """`address`: where other peers dial me, if they can; the first one stays.  `stages`: of a model that is cut,
        those that this trainer could hold, the one whose state lies on the disk first."""
        self._now = now
        if self.known is None or self._vacating:
            return []  # it can't know what the run is, or it is told in a moment to begin anew
        offer = Offer(Attached(self.known, model, stages), address, fits=stages)
        if problem := offer.problem or (self.joined.misfit(offer) if self.joined is not None else ""):
            return [do.TellTrainer(Stop(code="misfit", reason=problem))]
        self._vacant = False
        if self.joined is not None:
            self.joined.founding.on_trainer_gone(self.joined.replicas)
        if self.joined is None and stages:
            self.offer = offer
            self.training.on_attach()
            return self._greet()  # what it is to hold comes with the welcome
        joined = self.joined or self._join(offer)
        held: list[do.Effect] = [do.Hold(joined.attached)] if stages else []
        trained = joined.exchange.on_attach() if not self._config.helps else []
        return [*held, *trained, *self._greet()]

    def on_trainer_gone(self, now: float) -> list[do.Effect]:
        self._now = now
        self.training.on_gone()
        if self.joined is not None:
            self.joined.founding.on_trainer_gone(self.joined.replicas)
        return []

    def take_leave(self, reason: str, now: float, code: LeaveCause = LeaveCause.LEFT) -> list[do.Effect]:
        """In good order: after the rounds in flight, if they end soon."""
        self._now = now
        if self.exited or self.leaving.asked:
            return []
        self.reports.leaving = True
        self.leaving.ask(reason, code, now, self.training.stays_for_round)
        if self._may_go():
            return self.leave(reason, code)
        return [do.Note(f"leaving when this round is over: {reason}"), *self._beat()]

    def _may_go(self) -> bool:
        return self.leaving.may_go(self.part, self.doorway.inside, self._now, self.training.owes)

    def leave(self, reason: str, code: LeaveCause = LeaveCause.LEFT) -> list[do.Effect]:
        """`reason`: for this peer's owner, and for nobody else."""
        if self.exited:
            return []
        goodbye = [self.reports.leave(code)] if self.doorway.inside else []
        told = (
            self.joined.disk.parting(self.tick)
            if self.joined is not None and code != LeaveCause.FINISHED
            else []
        )
        return [*goodbye, *told, *self._exit(code, reason)]

    def _exit(self, code: str, reason: str) -> list[do.Effect]:
        self.exited = True
        return [do.TellTrainer(Stop(code=code, reason=reason)), do.Exit(code, reason)]

    # ---- time ------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[do.Effect]:
        self._now = now
        if self.exited:
            return []
        if self._may_go():
            return self.leave(self.leaving.reason, self.leaving.code)
        joined = self.joined
        if joined is None or not self.doorway.inside:
            if gave_up := self.doorway.unreachable(now):
                return self._exit("unreachable", gave_up)
            knock = self.doorway.on_timer(now)
            effects: list[do.Effect] = [do.ToDoor(knock)] if knock is not None else []
            if joined is not None:
                effects += joined.exchange.go_on_alone()
                effects += [*joined.on_timer(now, inside=False), *self.seeking.on_timer(now)]
            return effects
        usual_s, in_round = joined.net.heartbeat_s, joined.is_in_round
        if self._beats.is_lost(usual_s, joined.net.dead_after_s, in_round, now):
            return self._lose_contact(joined, f"silent for {joined.net.dead_after_s:g} s")
        effects = joined.on_timer(now, inside=True)
        if self._beats.is_due(usual_s, in_round, now) or joined.has_news(now) or self.reports.has_news:
            effects += self._beat()
        return effects + self._move_on()

    # ---- what follows from any event ---------------------------------------------------------------------------

    def _move_on(self, only: Replica | None = None) -> list[do.Effect]:
        """`only`: nothing has changed in the other replicas."""
        if (joined := self.joined) is None or self.exited:
            return []
        effects: list[do.Effect] = []
        for replica in joined.replicas if only is None else [only]:
            if not self.training.works[replica.fragment.number].loading:
                effects += replica.advance(self._now)
            if replica.rounds.flight is not None and self.doorway.inside:
                effects += joined.tell_progress(replica.rounds.flight, self.reports, self._now)
        if self.doorway.inside and only is None:
            effects += [*joined.exchange.send_ahead(), *joined.exchange.go_on()]
            effects += joined.exchange.tell_work(self._now)
        return effects

    def _tell_news(self) -> list[do.Effect]:
        usual_s = self.joined.net.heartbeat_s if self.joined is not None else 0.0
        return [] if self._beats.news_may_wait(usual_s) else self._beat()

    def _beat(self) -> list[do.Effect]:
        if not self.doorway.inside or self.joined is None:
            return []
        self._beats.said(self._now)
        self.training.on_told(self._now)
        self.reports.vitals.shelf = self.joined.disk.shelf.told(self.joined.replicas)
        kept = self.seeking.kept.number if self.seeking.kept is not None else 0
        known = self.joined.amending.count, kept
        return [self.reports.beat(self.joined.part, self.training, *known)]
