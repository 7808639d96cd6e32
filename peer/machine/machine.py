"""The peer's machines: `(event, now) -> effects`.  The agent and the simulator drive the same classes.

`PeerMachine`: the door, the coordinator, the trainer, and time
    on_door      the door's answer           on_control   the coordinator's word
    on_local     the trainer's word          on_attach    the first trainer's model, or that of a later one
    on_timer     time passed
and its `MemberMachine`: what other peers, finished arithmetic and disks bring
    on_frame     a bulk frame of a peer      on_encoded, on_calculated, on_sealed     finished arithmetic
    on_disk      what disks have to say      take_leave   the user wants to go; `leave`: at once

They join five parts: the doorway (getting in), the training (the trainer's state), the participation (a replica of
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
from farflung.peer.machine.handshake import (
    NO_HELP,
    CoordinatorPlaces,
    Handshake,
    HandshakeState,
    Leaving,
    Me,
    Offer,
    PeerConfig,
)
from farflung.peer.machine.heartbeat import BeatTimes, HeartbeatBuilder
from farflung.peer.machine.member_session import MemberSession, without_start
from farflung.peer.machine.modes import TrainerSaid, missing, places_of, training_of
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
    Tick,
    ToDoor,
    ToMember,
    Welcome,
)
from farflung.protocol.mode_words import AskKept, ReachTick, ServeTick, StandsBy
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import section
from farflung.protocol.run_terms import Attached, Known
from farflung.protocol.states import Goal


class MemberMachine:
    """What a member does, in contact with the coordinator or out of it: what other peers, finished arithmetic and disks
    bring it, what follows from any event, and how it leaves.  Before it is `joined` it can only
    leave, and frames that come are counted."""

    def __init__(self, me: Me, doorway: Handshake, seeking: CoordinatorPlaces) -> None:
        self._doorway, self._seeking = doorway, seeking
        self.reports = HeartbeatBuilder(me.sign)
        self.training = TrainerProxy()
        self.counters = Counters()
        self.beats = BeatTimes()
        self.leaving = Leaving()
        self.joined: MemberSession | None = None
        self.tick: Tick | None = None  # the newest one, in contact
        self.now = 0.0  # of the event that came last

    def begin_anew(self, training: TrainerProxy) -> None:
        """As a newcomer does: nothing of the run is held any more."""
        self.joined, self.tick, self.training = None, None, training
        self.reports = HeartbeatBuilder.of_newcomer(self.reports)

    @property
    def part(self) -> Replicas | None:
        return self.joined.part if self.joined is not None else None

    def digest_of(self, chunk: int, version: int) -> bytes:
        """The run's digest of this version of the chunk's fragment, as far as it is known."""
        replica = self.joined.part.replica_of_chunk(chunk) if self.joined is not None else None
        return replica.held.chunks.digests.get(version, b"") if replica is not None else b""

    # ---- other peers ---------------------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[do.Effect]:
        self.now = now
        if self.joined is None:
            self.counters.count(Verdict.STALE)
            return []
        part = self.joined.part
        if (answer := self._seeking.on_frame(sender, frame, self.counters, now)) is not None:
            return answer
        if (answer := self.joined.first(lambda mode: mode.on_frame(sender, frame, now))) is not None:
            return answer
        return part.on_frame(sender, frame, now) + self.move_on(part.replica_of_chunk(frame.header.chunk))

    def on_spoiled(self, sender: str, spoiled: Spoiled, now: float) -> list[do.Effect]:
        """A bulk frame of a peer arrived damaged (P8)."""
        self.now, joined = now, self.joined
        if joined is None:
            return []
        if (answer := joined.first(lambda mode: mode.on_spoiled(sender, spoiled, now))) is not None:
            return answer
        return joined.part.on_spoiled(sender, spoiled) + self.move_on()

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        """The data plane's word, at every tick: for whom something waits that can't leave, of whom bytes came in."""
        if self.joined is not None:
            self.joined.on_lines(unreached, arriving, now)

    # ---- finished arithmetic ---------------------------------------------------------------------------------

    def on_encoded(
        self, round_no: int, payloads: Mapping[int, Payload], problem: str, now: float
    ) -> list[do.Effect]:
        """Some chunks of the fragment.  `problem`: why it can't be contributed (it is not finite), else empty."""
        self.now, joined = now, self.joined
        replica = joined.part.replica_of_round(round_no) if joined is not None else None
        if joined is None or replica is None:
            return []
        made = joined.on_encoded(replica, round_no, payloads, problem, self.reports)
        return made or [] if problem or made is None else [*made, *self.move_on(replica)]

    def on_calculated(self, effect: Calculated, made: object, now: float) -> list[do.Effect]:
        self.now, joined = now, self.joined
        if joined is None:
            return []
        if (answer := joined.first(lambda mode: mode.on_calculated(effect, made, now))) is not None:
            return answer
        replica = joined.part.replica_of_round(effect.round_no)
        if replica is None or replica.rounds.flight is None:
            return []
        return [*replica.rounds.flight.owner.on_calculated(effect, made), *self.move_on(replica)]

    def on_sealed(self, fragment: int, version: int, digest: bytes, now: float) -> list[do.Effect]:
        self.now, joined = now, self.joined
        if joined is None:
            return []
        if wrong := joined.founding.contradiction(joined.part.replicas[fragment], version, digest):
            return self.leave(wrong, LeaveCause.START)
        effects = joined.exchange.on_sealed(fragment, version, digest)
        # That it is held is told with it, where the nonce for that is known: it is calculated in a moment.
        held = joined.part.replicas[fragment].held
        told = [] if held.whole and held.grounds.is_proving(held.version) else self.tell_news()
        return effects + told + self.move_on()

    def on_holding_proven(self, proof: do.ProveHolding, value: bytes, now: float) -> list[do.Effect]:
        """What only a holder of the version can calculate."""
        self.now, joined = now, self.joined
        if joined is None:
            return []
        joined.part.replicas[proof.fragment].held.grounds.on_proven(proof.version, proof.nonce, value)
        return self.tell_news() + self.move_on()

    def on_shown(self, show: Show, raw: bytes | None, now: float) -> list[do.Effect]:
        """The bytes that the coordinator asked for; None: they are not here."""
        self.now = now
        return [*self.reports.shown(show, raw)] if self._doorway.inside else []

    # ---- disks -----------------------------------------------------------------------------------------------

    def on_disk(self, word: DiskWord, now: float) -> list[do.Effect]:
        if (joined := self.joined) is None:
            return []
        effects = joined.disk.on_word(word, self.tick, now)
        if isinstance(word, StateWord):
            self.now = now
            effects += self.move_on()
        return effects + self.tell_news() if isinstance(word, ShelfListed) else effects

    def on_begun(self, problem: str, is_final: bool, now: float) -> list[do.Effect]:
        """What run.toml names for a beginning stands in the state; or the problem, `is_final` if it will stay."""
        self.now, joined = now, self.joined
        if joined is None:
            return []
        leaves, effects = joined.on_begun(problem, is_final, now)
        return self.leave(leaves, LeaveCause.START) if leaves else effects + self.move_on()

    # ---- leaving ------------------------------------------------------------------------------------------

    def take_leave(self, reason: str, now: float, code: LeaveCause = LeaveCause.LEFT) -> list[do.Effect]:
        """In good order: after the rounds in flight, if they end soon."""
        self.now = now
        if self.leaving.exited or self.leaving.asked:
            return []
        self.reports.leaving = True
        self.leaving.ask(reason, code, now, self.training.stays_for_round)
        if self.may_go():
            return self.leave(reason, code)
        return [do.Note(f"leaving when this round is over: {reason}"), *self.beat()]

    def may_go(self) -> bool:
        return self.leaving.may_go(self.part, self._doorway.inside, self.now, self.training.owes)

    def leave(self, reason: str, code: LeaveCause = LeaveCause.LEFT) -> list[do.Effect]:
        """`reason`: for this peer's owner, and for nobody else."""
        if self.leaving.exited:
            return []
        goodbye = [self.reports.leave(code)] if self._doorway.inside else []
        told = self.joined.disk.parting(self.tick) if self.joined and code != LeaveCause.FINISHED else []
        return [*goodbye, *told, *self.leaving.exit(code, reason)]

    # ---- what follows from any event ---------------------------------------------------------------------------

    def move_on(self, only: Replica | None = None) -> list[do.Effect]:
        """`only`: nothing has changed in the other replicas."""
        if (joined := self.joined) is None or self.leaving.exited:
            return []
        effects: list[do.Effect] = []
        for replica in joined.replicas if only is None else [only]:
            if not self.training.works[replica.fragment.number].loading:
                effects += replica.advance(self.now)
            if replica.rounds.flight is not None and self._doorway.inside:
                effects += joined.tell_progress(replica.rounds.flight, self.reports, self.now)
        if self._doorway.inside and only is None:
            effects += [*joined.exchange.send_ahead(), *joined.exchange.go_on()]
            effects += joined.exchange.tell_work(self.now)
        return effects

    def tell_news(self) -> list[do.Effect]:
        usual_s = self.joined.net.heartbeat_s if self.joined is not None else 0.0
        return [] if self.beats.news_may_wait(usual_s) else self.beat()

    def beat(self) -> list[do.Effect]:
        if not self._doorway.inside or self.joined is None:
            return []
        self.beats.said(self.now)
        self.training.on_told(self.now)
        self.reports.vitals.shelf = self.joined.disk.shelf.told(self.joined.replicas)
        kept = self._seeking.kept.number if self._seeking.kept is not None else 0
        known = self.joined.amending.count, kept
        of_modes = tuple(each for mode in self.joined.modes.values() for each in mode.sections)
        return [self.reports.beat(self.joined.part, self.training, *known, of_modes)]


def _looks(tick: Tick | None) -> bool:
    """Its receiver is to show its port."""
    told = section(ReachTick, tick.sections) if tick is not None else None
    return told is not None and told.look


class PeerMachine:
    """Three moments: it knocks; it knows the run (`known`); a trainer came, and it has a part in it (`joined`)."""

    def __init__(self, config: PeerConfig, jitter: Callable[[], float]) -> None:
        self.doorway = Handshake(config.me, config.run, config.helps, config.kept)
        self.seeking = places_of(config, self.doorway.hurry)
        self.member = MemberMachine(config.me, self.doorway, self.seeking)
        self.known: Known | None = None
        self.offer: Offer | None = None
        self._config = config
        self._jitter = jitter  # 0..1: spreads the peers' reconnections
        self._vacating = self._vacant = False  # I gave a stage up; and my trainer has not begun anew

    # ---- the door ------------------------------------------------------------------------------------------

    def on_door(self, message: ToDoor, now: float) -> list[do.Effect]:
        self.member.now, joined = now, self.member.joined
        match message:
            case Challenge():
                return self._on_challenge(message, now)
            case Welcome():
                return self._on_welcome(message, now)
            case Refuse() if not self.doorway.inside:
                final = self.doorway.on_refuse(message, now)
                note = do.Note(f"not admitted yet: {message.reason}")
                return self.member.leaving.exit(message.code, message.reason) if final else [note]
            case StandsBy():
                self.doorway.on_standby(now)
                return self.seeking.on_found(message.whereabouts, now)
            case AskKept():
                return self.seeking.give_back(message, joined.about if joined else None)
            case _:
                return self.doorway.outdated(message)

    def _on_challenge(self, challenge: Challenge, now: float) -> list[do.Effect]:
        leaving = self.member.leaving
        if not self.doorway.on_challenge(challenge):
            why = self.doorway.other_protocol
            return leaving.exit("protocol", why) if why else []
        effects: list[do.Effect] = []
        if self.known is None:
            self.known = Known(Manifest.from_canonical(challenge.manifest), challenge.run_id)
            if self._config.helps and self.known.manifest.pipeline.stages > 1:
                return leaving.exit("no-helpers", NO_HELP)
            if problem := missing(self.known.manifest):
                return leaving.exit("protocol", problem)
            self.member.training = training_of(self.known.manifest)
            if problem := without_start(self.known.manifest.start, self._config.start):
                return leaving.exit(LeaveCause.START, problem)
            effects = self.on_trainer_waiting()
        if self._config.helps and self.offer is None:
            return effects + self.doorway.help_with(challenge, now)
        return effects + self._greet(now)

    def _greet(self, now: float) -> list[do.Effect]:
        offer, joined = self.offer, self.member.joined
        if self.doorway.stand != HandshakeState.READING or offer is None:
            return []
        held = joined.replicas[0].held if joined is not None else None
        version, digest = (held.version, held.digest) if held is not None else (NO_VERSION, b"")
        return [do.ToDoor(self.doorway.greet(offer, version, digest, now, self.seeking.kept))]

    def _on_welcome(self, welcome: Welcome, now: float) -> list[do.Effect]:
        was_inside = self.doorway.inside
        held = self.offer.attached.as_holder_of(welcome.fragments) if self.offer is not None else None
        if self.offer is None or held is None or not self.doorway.on_welcome(welcome):
            return self.doorway.outdated(welcome)
        if self.member.joined is not None:
            left = [do.LeaveMembers()] if was_inside else []
            return [*left, *self._enter(self.member.joined, welcome, now)]
        joined = self._join(replace(self.offer, attached=held))
        with_trainer = joined.exchange.on_attach() if joined.training.attached else []
        return [*joined.begun(), *with_trainer, *self._enter(joined, welcome, now)]

    def _join(self, offer: Offer) -> MemberSession:
        """`offer`: of what is held from now on, and offered whenever I come back."""
        member = self.member
        joined = MemberSession.of(
            offer, member.training, self._config, member.reports, self._jitter, member.counters
        )
        self.offer, member.joined, member.training = offer, joined, joined.training
        return joined

    def _enter(self, joined: MemberSession, welcome: Welcome, now: float) -> list[do.Effect]:
        self.member.reports.begin_session(welcome.session, joined.attached.known)
        self.member.beats.begin(now)
        joined.part.came_back()
        found = self.seeking.on_welcome(welcome, now)
        return [do.EnterMembers(welcome.member_port), *found, *self.member.beat()]

    def _lose_contact(self, joined: MemberSession, why: str, now: float) -> list[do.Effect]:
        self.doorway.leave(now, self._jitter() * joined.net.heartbeat_s)
        self.seeking.on_lost(joined.attached.known.tag, now)
        self.member.tick = None
        return [do.LeaveMembers(), do.Note(f"out of contact with the coordinator ({why}); training goes on")]

    # ---- the coordinator -----------------------------------------------------------------------------------

    def on_control(self, message: ToMember, now: float) -> list[do.Effect]:
        member, joined = self.member, self.member.joined
        member.now = now
        if joined is None or not self.doorway.inside or message.session != member.reports.session:
            return []
        if isinstance(message, Gone):
            if message.final:
                return member.leaving.exit("refused", message.reason)
            return self._lose_contact(joined, message.reason, now)
        if message.seq <= (newest := member.beats.newest):
            member.counters.count(Verdict.DUPLICATE if message.seq == newest else Verdict.STALE)
            return []
        member.beats.heard(message, now)
        kept = self.seeking.keep(message, joined.about)
        if (unheard := joined.amending.why_not(message)) is not None:
            return [*kept, *unheard, *member.beat()]  # the answer tells what I have to know first
        match message:
            case Tick():
                effects = self._on_tick(message, joined, now)
            case OpenRound(plan=plan):
                effects = joined.on_plan(plan, member.reports, now)
            case Decided(decision=decision):
                effects = joined.part.on_decision(decision, now)
            case Committed():
                joined.on_commit(message, now)
                effects = []
            case Show():
                effects = joined.on_show(message, member.reports, now)
            case Aborted():
                effects = joined.on_aborted(message)
                effects += member.beat() if member.beats.are_rare(joined.net.heartbeat_s) else []
            case _:
                effects = joined.first(lambda mode: mode.on_word(message, now)) or []
        return kept + effects + member.move_on()

    def _on_tick(self, tick: Tick, joined: MemberSession, now: float) -> list[do.Effect]:
        member, part, exchange = self.member, joined.part, joined.exchange
        if [word.fragment for word in tick.fragments] != list(part.replicas):
            return []
        before, member.tick = member.tick, tick
        advised = before.advice if before is not None else ""
        effects: list[do.Effect] = [do.Note(tick.advice)] if tick.advice not in ("", advised) else []
        effects += joined.amending.on_tick(tick, joined.disk.saving)
        effects += joined.why_waiting(tick)
        if tick.roster is not None:
            effects += self.seeking.on_roster(tick, now)
            member.reports.roster_no = self.seeking.roster_no
        if tick.era > member.reports.era:
            joined.training.forward = None
            effects += [*joined.go_back(tick, member.reports), *member.beat()]
        if _looks(tick) and not _looks(before):
            # An instant comes soon, on the coordinator's clock.  The first beat of a session waits until its connection
            # stands, so that its answer tells that clock wrongly: the answer to this one is better, and is here before.
            effects += member.beat()
        # A list, so that every replica hears its word.
        serve = section(ServeTick, tick.sections)
        if serve is not None and not member.leaving.asked:
            if serve.stage in set(joined.offer.fits) - set(part.replicas):
                return [*effects, *self._change_stage(serve.stage, joined, now)]
        if any([replica.on_tick(word) for replica, word in part.words(tick.fragments)]):
            effects.append(do.Note("local weights don't match the run's digest; downloading them again"))
        effects += joined.disk.due_saves(tick.era, now)
        effects += joined.disk.begin_reading(tick, now)
        if tick.leases is not None:
            effects += joined.training.leases.on_told(tick.leases)
        effects += exchange.on_tick(tick)
        for mode in joined.modes.values():
            effects += mode.on_tick(tick, now)
        if tick.goal == Goal.FINISH and exchange.is_complete(tick.fragments):
            effects += exchange.finish()
            if not joined.training.attached:
                effects += member.leave("the run is complete", LeaveCause.FINISHED)
        for replica, word in part.words(tick.fragments):
            effects += member.reports.repeat(word, replica.rounds.flight)
        return effects

    def _change_stage(self, to: int, joined: MemberSession, now: float) -> list[do.Effect]:
        """The coordinator needs me in another stage: what I hold of mine goes, and I come in as a newcomer does."""
        member = self.member
        member.counters.count(Verdict.STALE, joined.early_count)
        effects: list[do.Effect] = [
            do.Note(f"I {joined.moves_to(to)}"),
            member.reports.leave(LeaveCause.MOVES),
            do.LeaveMembers(),
            do.Vacate(),
        ]
        self.doorway.leave(now, 0.0)
        self.offer, self._vacating, self._vacant = None, True, True
        member.begin_anew(training_of(joined.attached.known.manifest))
        return effects

    def on_vacated(self, now: float) -> list[do.Effect]:
        """Nothing is left here of the stage that I held: the trainer, too, begins anew."""
        self.member.now, self._vacating = now, False
        return [do.TellTrainer(Anew())]

    # ---- the trainer -----------------------------------------------------------------------------------------

    def on_local(self, message: FromTrainer, now: float, payload: Payload = b"") -> list[do.Effect]:
        """`payload`: what lay in the belt where a stage's trainer made something (`place_of`)."""
        member, joined = self.member, self.member.joined
        member.now = now
        if self._vacant and not isinstance(message, Attach | Bye):
            return []  # it speaks of the stage that I held
        match message:
            case Attach(model=model):
                return self.on_attach(model, "", now)
            case Provided():
                return joined.on_provided() if joined is not None else []
            case Loaded(fragment=fragment):
                member.training.on_loaded(fragment)
                effects: list[do.Effect] = []
            case Frozen():
                member.training.on_frozen(message)
                effects = [] if message.more else member.tell_news()
            case NeedSamples():
                effects = [*member.training.leases.on_need(message), *member.beat()]
            case Computed(forward=forward):
                effects = member.tell_news() if member.training.on_computed(forward) else []
            case Bye(reason=reason):
                return member.take_leave(reason, now, message.cause)
            case _:
                said = joined.first(lambda mode: mode.on_trainer(message, payload, now)) if joined else None
                heard = said or TrainerSaid([])
                effects = [*heard.effects, *(member.beat() if heard.beat else [])]
        return effects + member.move_on()

    def place_of(self, word: WorkDone) -> int | None:
        """In which place of the belt lies what the trainer made; None: it was made for sums that are gone."""
        joined = self.member.joined
        return joined.first(lambda mode: mode.place_of(word)) if joined is not None else None

    def on_trainer_waiting(self) -> list[do.Effect]:
        """A trainer process connected and wants to know what the run is."""
        if self.known is None:
            return []
        run, me, joined = self.known.manifest.canonical(), self._config.me, self.member.joined
        changed = joined.amending.words() if joined is not None else []
        return [do.TellTrainer(Begin(manifest=run, peer=me.peer, name=me.name)), *changed]

    def on_attach(
        self, model: ModelSchema, address: str, now: float, stages: tuple[int, ...] = ()
    ) -> list[do.Effect]:
        """`address`: where other peers dial me, if they can; the first one stays.  `stages`: of a model that is cut,
        those that this trainer could hold, the one whose state lies on the disk first."""
        self.member.now, joined = now, self.member.joined
        if self.known is None or self._vacating:
            return []  # it can't know what the run is, or it is told in a moment to begin anew
        offer = Offer(Attached(self.known, model, stages), address, fits=stages)
        if problem := offer.problem or (joined.misfit(offer) if joined is not None else ""):
            return [do.TellTrainer(Stop(code="misfit", reason=problem))]
        self._vacant = False
        if joined is not None:
            joined.founding.on_trainer_gone(joined.replicas)
        elif stages:
            self.offer = offer
            self.member.training.on_attach()
            return self._greet(now)  # what it is to hold comes with the welcome
        joined = joined or self._join(offer)
        held: list[do.Effect] = [do.Hold(joined.attached)] if stages else []
        trained = joined.exchange.on_attach() if not self._config.helps else []
        return [*held, *trained, *self._greet(now)]

    def on_trainer_gone(self, now: float) -> list[do.Effect]:
        self.member.now, joined = now, self.member.joined
        self.member.training.on_gone()
        if joined is not None:
            joined.founding.on_trainer_gone(joined.replicas)
        return []

    # ---- time ------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[do.Effect]:
        member, joined = self.member, self.member.joined
        member.now = now
        if member.leaving.exited:
            return []
        if member.may_go():
            return member.leave(member.leaving.reason, member.leaving.code)
        if joined is None or not self.doorway.inside:
            if gave_up := self.doorway.unreachable(now):
                return member.leaving.exit("unreachable", gave_up)
            knock = self.doorway.on_timer(now)
            effects: list[do.Effect] = [do.ToDoor(knock)] if knock is not None else []
            if joined is not None:
                effects += joined.exchange.go_on_alone()
                effects += [*joined.on_timer(now, inside=False), *self.seeking.on_timer(now)]
            return effects
        usual_s, in_round = joined.net.heartbeat_s, joined.is_in_round
        if member.beats.is_lost(usual_s, joined.net.dead_after_s, in_round, now):
            return self._lose_contact(joined, f"silent for {joined.net.dead_after_s:g} s", now)
        effects = joined.on_timer(now, inside=True)
        if member.beats.is_due(usual_s, in_round, now) or joined.has_news(now) or member.reports.has_news:
            effects += member.beat()
        return effects + member.move_on()
