"""The peer machine's parts from the moment on when a trainer has said what its model is.  Pure.

Made once by the machine (machine.py), which sends every event to the part that it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.member import MemberRound
from farflung.peer.local.words import Provide
from farflung.peer.machine import effects as do
from farflung.peer.machine.checkpoint_policy import (
    Keeping,
    Recalling,
    RestoringOwn,
    Saving,
    Shelf,
    Undoing,
    WhyWaiting,
    is_empty,
)
from farflung.peer.machine.disk_words import (
    CheckpointWritten,
    DiskWord,
    PiecesRecalled,
    Reached,
    ResultsFound,
    ResultsLost,
    ShelfListed,
    StateRead,
    Undone,
)
from farflung.peer.machine.effects import BeginFrom, Effect, Note, TellTrainer
from farflung.peer.machine.fragment_rounds import fragment_of
from farflung.peer.machine.handshake import AmendmentNews, Offer, PeerConfig
from farflung.peer.machine.heartbeat import HeartbeatBuilder, Vitals
from farflung.peer.machine.held_fragment import Filling
from farflung.peer.machine.modes import PeerMode, SessionTools, of_replica, parts
from farflung.peer.machine.replicas import Replica, Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy, TrainerSync
from farflung.protocol.errors import Counters
from farflung.protocol.frames import Payload
from farflung.protocol.manifest import NetSection, StartSection
from farflung.protocol.messages import Aborted, Committed, Show, Tick, What
from farflung.protocol.mode_words import KeptReceipts
from farflung.protocol.round_words import Plan
from farflung.protocol.run_terms import Attached
from farflung.protocol.states import Goal

# ---- founding ----------------------------------------------------------------------------------------------
# Where version 0 comes from: the trainer's own values, or what `[start] from` of run.toml names. Pure.
#
# Part of the peer machine. A founder is told to give the run its initial state. Everybody else may have the
# same values: a model that is built from the run's seed by the same code begins with the run's version 0, and
# what the run begins with may be read by all. Whether it is the run's, its hashes say: what is sealed then is
# the run's state or is forgotten (Replica.on_sealed). So nothing of it is fetched, and nobody is believed.
#
# What [start] names has one content, by the hash that all agreed on. So whoever has read it and finds that
# the run has another version 0 knows that its founder lied, and does not train on that.
#
# The run's host chose [start], and what is read goes to all others. So a path is opened on the word of this
# peer's owner alone (`--start`), whatever the coordinator tells it to do; and what is wrong with what was
# read, its owner is told, and nobody else.

READ_AGAIN_S = 30.0  # the place did not answer; meanwhile somebody else may found the run


def without_start(start: StartSection, own: str) -> str:
    """Why the owner's place is of no use; empty: it is.  Silence would train something else than was meant."""
    if not own or start.source:
        return ""
    return (
        f"--start {own}: this run does not begin with a checkpoint or a file ([start] of its run.toml is empty); leave "
        "it out"
    )


class Founding:
    def __init__(self, start: StartSection, is_empty: Callable[[Replica], bool], own: str = "") -> None:
        """`own`: where this peer's owner has what the run begins with; empty: nowhere."""
        self._start, self._is_empty, self._own = start, is_empty, own
        self._told = False  # what founding would take
        self._tried: tuple[bytes, ...] = ()  # digests of the version 0 that was tried last
        self._provides = False  # the trainer writes its values
        self.reads = False  # what [start] names is on its way into the state
        self._is_read = False  # what stands in the state as version 0 is what [start] names
        self._founds = False  # told to, when it began to read
        self._again_at = 0.0

    @property
    def lacks_it(self) -> bool:
        """What the run begins with is nothing that may be read here."""
        return bool(self._start.source) and not self._own and not self._start.for_all

    def due(self, tick: Tick, replicas: Sequence[Replica], now: float) -> list[Effect]:
        """Asked at every tick, with a trainer that is there."""
        if any(replica.held.sealing or replica.held.filling for replica in replicas):
            return []
        if all(replica.held.version != NO_VERSION for replica in replicas):
            return []
        founds = tick.goal == Goal.FOUND
        if self._start.source:
            return self._read(tick, replicas, founds, now)
        if not founds and not self._may_begin_so(tick, replicas):
            return []
        self._provides = True
        _fill(replicas)
        return [TellTrainer(Provide())]

    def _read(self, tick: Tick, replicas: Sequence[Replica], founds: bool, now: float) -> list[Effect]:
        if self.lacks_it:
            return self._tell_once() if founds else []
        others = not founds and self._may_begin_so(tick, replicas)
        if now < self._again_at or not (founds or others):
            return []
        self.reads, self._is_read, self._founds = True, False, founds
        _fill(replicas)
        start = self._start.model_copy(update={"source": self._own or self._start.source})
        told = Note(f"reads what the run begins with: {start.source}")
        return [told, BeginFrom(start, as_nobody=not self._own)]

    def _tell_once(self) -> list[Effect]:
        told, self._told = self._told, True
        return [] if told else [Note(f"I can't found this run, and wait for {self._start.founder}")]

    def _may_begin_so(self, tick: Tick, replicas: Iterable[Replica]) -> bool:
        """Once for each version 0 that this run has."""
        told = tuple(dict(word.digests).get(0, b"") for word in tick.fragments)
        begins = tick.goal == Goal.SYNC and all(word.version == 0 for word in tick.fragments)
        # What has arrived already may be more than my own values are good for: they would overwrite it.
        if not begins or not all(told) or told == self._tried or not all(map(self._is_empty, replicas)):
            return False
        self._tried = told
        return True

    # ---- the trainer's values

    def on_trainer_gone(self, replicas: Iterable[Replica]) -> None:
        """It may have written some of them."""
        if self.on_provided():
            _unfilled(replicas)

    def on_provided(self) -> bool:
        """They are there; False: the word of a trainer that is gone."""
        provided, self._provides = self._provides, False
        return provided

    # ---- what [start] names

    def on_read(
        self, problem: str, is_final: bool, replicas: Iterable[Replica], now: float
    ) -> tuple[str, list[Effect]]:
        """Why to leave, if there is a reason; else what to say.  `is_final`: it will be no better next time."""
        # What was read in an era that is over does not count.
        self.reads, self._is_read = (
            False,
            not problem and all(isinstance(each.held.stand, Filling) for each in replicas),
        )
        if not problem:
            return "", []
        _unfilled(replicas)
        if self._founds and is_final:
            return f"this run can't begin so: {problem}", []
        self._again_at = now + READ_AGAIN_S
        return "", [Note(f"can't begin with it now: {problem}")]

    def contradiction(self, replica: Replica, version: int, digest: bytes) -> str:
        """Of what is sealed as this version: why it proves that the run does not begin with what [start] names."""
        known = replica.held.chunks.digests.get(0)
        if not self._is_read or version != 0 or known is None or known == digest:
            return ""
        return (
            f"the run's version 0 (digest {known.hex()[:16]}) is not what [start] names ({digest.hex()[:16]}): "
            "who founded it began with something else; tell its host"
        )


def _fill(replicas: Iterable[Replica]) -> None:
    for replica in replicas:
        replica.held.fill()


def _unfilled(replicas: Iterable[Replica]) -> None:
    """Whatever came of it: the state was cleared first, or a trainer was at it."""
    for replica in replicas:
        replica.unfilled(touched=True)


# ---- member session ----------------------------------------------------------------------------------------

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Beside:
    """The parts of a session to which what is read means something."""

    part: Replicas
    training: TrainerProxy
    exchange: TrainerSync
    log: ResultLog
    founding: Founding
    vitals: Vitals


class StateOnDisk:
    """What this peer reads from disks and writes to them: checkpoints, its own copy of the newest version, pieces that
    had arrived before a crash, and what each chunk was before the last round.

    When something of that is due each class of checkpoint_policy.py says for itself; here they are asked in turn, and
    what the shell says of disks finds whom it concerns.
    """

    def __init__(self, attached: Attached, config: PeerConfig, beside: Beside) -> None:
        self._attached, self._beside = attached, beside
        self.saving = Saving(attached.known, config.saves, config.pinned)
        self.keeping = Keeping(config.me.peer, config.keeps_in, _results_of_a_state(attached, config))
        self.restoring = RestoringOwn(config.saves, _worth_rolling_on(attached, config))
        self.recalling = Recalling(config.recalls)
        self.shelf, self.undoing = Shelf(), Undoing()

    @property
    def _replicas(self) -> list[Replica]:
        return list(self._beside.part.replicas.values())

    @property
    def reads(self) -> bool:
        """What is read here, or hashed, may be the run's newest state: the coordinator has not heard of it yet."""
        return self.recalling.is_open or any(
            each.held.filling or each.held.sealing for each in self._replicas
        )

    # ---- what is due -----------------------------------------------------------------------------------------

    def begin_era(self, tick: Tick) -> None:
        self.saving.begin_era(tick.fragments, self._replicas)
        self.keeping.begin_era(tick.era)
        self._beside.vitals.saved = self.saving.saved

    def due_saves(self, era: int, now: float) -> list[do.Effect]:
        return [*self.saving.due_saves(self._replicas, era), *self.keeping.due(self._replicas, now)]

    def begin_reading(self, tick: Tick, now: float) -> list[do.Effect]:
        """Of what may be the run's state already, somewhere else than at another peer."""
        if tick.roster is not None:
            self.restoring.on_ways(tick.ways)
        here: list[do.Effect] = []
        for each in self._beside.part.first_here():
            of = self._attached.of_part(each.fragment.number)
            here.append(do.Note(f"version 0{of} is here, digest {each.held.digest.hex()[:8]}", routine=True))
        loading = self._beside.training.loading
        # A replica that one of them fills is none that another may fill.
        effects = [*self.saving.due_list(), *here, *self.undoing.take_due(loading)]
        effects += [*self.recalling.due_recall(tick, self._replicas), *self._found(tick, now)]
        return effects + self.restoring.due_restore(tick, self._replicas, loading, now)

    def _found(self, tick: Tick, now: float) -> list[do.Effect]:
        """My trainer's own values, or what [start] names, may be the run's version 0, or become it: that is worth a try
        before anything is fetched."""
        training, founding = self._beside.training, self._beside.founding
        return founding.due(tick, self._replicas, now) if training.attached and not training.loading else []

    def parting(self, tick: Tick | None) -> list[do.Effect]:
        """What it means that this peer goes, where nobody else holds what it holds."""
        last = {word.fragment: not word.donors for word in tick.fragments} if tick is not None else {}
        mine = [replica.held.version for replica in self._replicas if last.get(replica.fragment.number)]
        return self.keeping.parting(max(mine, default=NO_VERSION), self._attached.stages)

    # ---- what the shell says -----------------------------------------------------------------------------------

    def on_word(self, word: DiskWord, tick: Tick | None, now: float) -> list[do.Effect]:
        match word:
            case StateRead():
                return self._on_read(word, now)
            case Undone():
                return self._on_undone(word)
            case PiecesRecalled(held):
                recalled = self.recalling.on_end(held, self._replicas)
                return recalled + (self.begin_reading(tick, now) if tick is not None else [])
            case CheckpointWritten(version, problem):
                effects = self.saving.on_saved(version, problem)
                self._beside.vitals.saved = self.saving.saved
                return effects
            case ShelfListed(place, found):
                self.shelf.put(place, found)
                return []
            case ResultsFound(chunks):
                self._beside.log.on_found(chunks)
                return []
            case ResultsLost(why):
                lost = self._beside.log.on_disk_lost()
                told = f"results of past rounds are kept in memory, not on disk any more: {why}"
                return [do.Note(told)] if lost else []
            case _:
                if isinstance(word, Reached) and word.ahead:
                    self._beside.log.on_found({word.version + 1: set(word.ahead)})
                return self.keeping.on_kept(word, now)

    def _on_read(self, word: StateRead, now: float) -> list[do.Effect]:
        notes: list[do.Effect] = [do.Note(each) for each in word.problems]
        read = self.restoring.on_end(word.version, now)
        for number, unread in self.restoring.unread.items():
            self.shelf.strike(number, unread)
        if word.version != NO_VERSION and read:
            return notes + self._beside.exchange.on_restored(word.version, read)
        for number in read:
            self._beside.part.replicas[number].unfilled(word.touched)
        return notes

    def _on_undone(self, undone: Undone) -> list[do.Effect]:
        """The fragment is what it was before the last round; or something of that is not there."""
        if not self.undoing.on_undone(undone):
            return []
        if undone.whole:
            exchange = self._beside.exchange
            return exchange.on_restored(undone.version, {undone.fragment}, "went back by one round to")
        self._beside.part.replicas[undone.fragment].unfilled(touched=True)
        return []


def _worth_rolling_on(attached: Attached, config: PeerConfig) -> int:
    """Over so many versions results can be had, and are fewer bytes than the state."""
    return min(attached.known.manifest.round.keep_results, _results_of_a_state(attached, config))


def _results_of_a_state(attached: Attached, config: PeerConfig) -> int:
    """So many are fewer bytes than one state."""
    codec = attached.known.manifest.round.gather_codec
    return (attached.form.size_bytes - 1) // config.payload_bytes(codec, attached.model.chunk_elements)


@dataclass(frozen=True)
class MemberSession:
    """The machine's parts from the moment on when a trainer has said what its model is."""

    offer: Offer  # of that which is held
    training: TrainerProxy
    part: Replicas
    modes: Mapping[str, PeerMode]  # by name, in the order in which they are asked
    exchange: TrainerSync
    log: ResultLog
    disk: StateOnDisk
    waiting: WhyWaiting
    founding: Founding
    amending: AmendmentNews

    @staticmethod
    def of(
        offer: Offer,
        training: TrainerProxy,
        config: PeerConfig,
        reports: HeartbeatBuilder,
        chance: Callable[[], float],
        counters: Counters,
    ) -> MemberSession:
        """`offer`: of what is held from now on.  `chance`: 0..1, for ties.  `counters`: of all frames, ever (P8)."""
        attached, me = offer.attached, config.me.peer
        known = attached.known
        log = ResultLog(known.manifest.round.keep_results, config.results_limit_bytes, config.results_on_disk)
        part = Replicas(me, attached, log, config.check, counters, of_replica)
        modes = parts(SessionTools(offer, training, part, config, reports, chance))
        training = next((each.training for each in modes.values() if each.training is not None), training)
        of_mode = next((each.exchange for each in modes.values() if each.exchange is not None), None)
        exchange = of_mode or TrainerSync(part, training)
        founding = Founding(known.manifest.start, is_empty, config.start)
        reports.lacks_start = founding.lacks_it
        return MemberSession(
            offer,
            training,
            part,
            modes,
            exchange,
            log,
            StateOnDisk(attached, config, Beside(part, training, exchange, log, founding, reports.vitals)),
            WhyWaiting(),
            founding,
            AmendmentNews(known, config.pinned),
        )

    @property
    def attached(self) -> Attached:
        return self.offer.attached

    def begun(self) -> list[do.Effect]:
        """The coordinator has named the stage."""
        attached = self.attached
        [stage], [fragment] = attached.stages, attached.held
        mine, whole = (
            fragment.count * attached.form.size_bytes,
            attached.model.chunk_count * attached.form.size_bytes,
        )
        told = f"I hold stage {stage} of {len(attached.fragments)}: {mine / 1e6:.1f} of {whole / 1e6:.1f} MB of state"
        return [do.Note(told), do.Hold(attached)]

    def moves_to(self, stage: int) -> str:
        """For people, behind whoever it is of."""
        [mine] = self.attached.stages
        return f"moves from stage {mine} to stage {stage}, which is short"

    def misfit(self, again: Offer) -> str:
        """Why a later trainer can't take the place of the first one; empty: it can."""
        mine = self.offer
        if again.attached.model != mine.attached.model:
            return "the trainer came back with another model"
        lacking = set(mine.attached.stages) - set(again.attached.stages)
        if lacking:
            held, could = mine.attached.stages, again.attached.stages
            return f"the trainer that came back has room for stages {list(could)}, and this peer holds {list(held)}"
        return ""

    @property
    def replicas(self) -> list[Replica]:
        return list(self.part.replicas.values())

    def about(self) -> KeptReceipts:
        """What a coordinator that has lost its disk asks of the run, besides what it signed."""
        known, terms = self.attached.known, self.amending.terms
        run = known.manifest.canonical()
        return KeptReceipts(
            identity=bytes(32),
            kept=None,
            model=self.attached.model,
            manifest=run,
            amendments=terms.amendments,
        )

    @property
    def net(self) -> NetSection:
        return self.attached.known.manifest.net

    def on_timer(self, now: float, inside: bool) -> list[do.Effect]:
        """`inside`: in contact with the coordinator; some things go on without it, too."""
        effects = self.part.on_timer(now)
        for mode in self.modes.values():
            effects += mode.on_timer(now, inside)
        return effects

    @property
    def is_in_round(self) -> bool:
        return bool(self.part.flights)

    def has_news(self, now: float) -> bool:
        """The coordinator is to hear from me before the next beat is due."""
        return any(mode.has_news(now) for mode in self.modes.values())

    @property
    def takes_line(self) -> bool:
        """What I send now goes before all answers to others."""
        return any(mode.takes_line for mode in self.modes.values())

    @property
    def early_count(self) -> int:
        """Frames that wait for their explanation, and end in a counter when it comes."""
        return self.part.early_count + sum(mode.early_count for mode in self.modes.values())

    def first(self, asked: Callable[[PeerMode], Answer | None]) -> Answer | None:
        """Of the mode whose it is; None: it is the core's."""
        return next((said for mode in self.modes.values() if (said := asked(mode)) is not None), None)

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        self.part.on_lines(unreached, arriving, now)
        for mode in self.modes.values():
            mode.on_lines(unreached, arriving, now)

    # ---- words of rounds -------------------------------------------------------------------------------------

    def on_plan(self, plan: Plan, reports: HeartbeatBuilder, now: float) -> list[do.Effect]:
        if plan.fragment not in self.part.replicas:
            return []
        rounds = self.part.replicas[plan.fragment].rounds
        before = rounds.flight
        effects = self.part.on_plan(plan, self.training.offered(plan.fragment), now)
        if rounds.flight is not before:
            reports.begin_round(plan.fragment)
            if rounds.contribution is None:
                effects = [reports.sent(plan, b"", None), *effects]
            elif (
                rounds.flight is not None and rounds.flight.pieces.encoded
            ):  # and on its way since before the round
                told = reports.sent(plan, rounds.flight.pieces.hashes(), rounds.contribution.frozen)
                effects = [told, *effects]
            effects += self.training.on_opened(plan.fragment, uses=rounds.contribution is not None)
        return effects

    def on_commit(self, committed: Committed, now: float) -> None:
        replica = self.part.replicas.get(committed.commit.fragment)
        if replica is not None:
            replica.on_commit(committed.commit, now, committed.nonce)

    def on_aborted(self, aborted: Aborted) -> list[do.Effect]:
        """Who is in no round any more may be in the next one."""
        mine = self.part.replica_of_round(aborted.round_no)
        self.part.on_aborted(aborted.round_no)
        if mine is None:
            return []
        told = f"round {aborted.round_no} was aborted: {aborted.reason}"
        return [do.Note(told, routine=bool(self.attached.stages))]

    def on_encoded(
        self,
        replica: Replica,
        round_no: int,
        made: Mapping[int, Payload],
        problem: str,
        reports: HeartbeatBuilder,
    ) -> list[do.Effect] | None:
        """Some chunks of the fragment.  `problem`: why it can't be contributed (it is not finite), else empty.

        None: nobody waits for them any more."""
        flight, mine, version = replica.rounds.flight, replica.rounds.contribution, replica.held.version
        if fragment_of(round_no) is not None:
            if not replica.rounds.ahead.on_encoded(round_no, made):
                return None
            if not problem:
                return []
            told: do.Effect = do.Note(
                f"nothing is sent ahead of the next round, {problem}: it starts again from version {version}"
            )
            replica.rounds.disown()
            return [told, *self.exchange.on_unusable(replica)]
        if flight is None or mine is None:
            return None
        if problem:
            told = do.Note(
                f"round {round_no} goes on without this peer, {problem}: it starts again from version {version}"
            )
            return [told, reports.sent(flight.plan, b"", None), *self.exchange.on_unusable(replica)]
        moved = flight.on_encoded(made)
        # The hash list first: owners' reports can only be checked against it.
        sent = (
            [reports.sent(flight.plan, flight.pieces.hashes(), mine.frozen)] if flight.pieces.encoded else []
        )
        return [*sent, *moved]

    def on_show(self, show: Show, reports: HeartbeatBuilder, now: float) -> list[do.Effect]:
        if show.what in (What.CONTRIBUTION, What.SUM):
            kept = self.first(lambda mode: mode.shown(show, now))
            return [*reports.shown(show, bytes(kept) if kept is not None else None)]
        if show.fragment not in self.part.replicas:
            return [*reports.shown(show, None)]
        logged = self.part.replicas[show.fragment].held.log.get(show.fragment, show.version, show.chunk)
        return [do.FetchShown(show, logged if show.what is What.RESULT else None)]

    def tell_progress(self, flight: MemberRound, reports: HeartbeatBuilder, now: float) -> list[do.Effect]:
        waits, effects = self.disk.keeping.hold_back(flight, now)
        return effects if waits else [*reports.maybe_progress(flight, now)]

    def go_back(self, tick: Tick, reports: HeartbeatBuilder) -> list[do.Effect]:
        """The run is at another version, made by other commits: what I hold of later ones, and learned from them, is
        void."""
        reports.era = tick.era
        self.disk.begin_era(tick)
        return self.exchange.go_back(tick.fragments, tick.era_because, self.disk.undoing, tick.era)

    def why_waiting(self, tick: Tick) -> list[do.Effect]:
        """Once, and not while this peer itself may end it."""
        if self.disk.reads or not (news := self.waiting.hear(tick.reason)):
            return []
        waits = tick.goal in (Goal.WAIT, Goal.ALONE)
        behind = tick.goal == Goal.SYNC and self.part.is_behind(tick.fragments)
        return [do.Note(news)] if waits or behind else []

    # ---- where version 0 comes from ----------------------------------------------------------------------------

    def on_provided(self) -> list[do.Effect]:
        return self.exchange.on_provided() if self.founding.on_provided() else []

    def on_begun(self, problem: str, is_final: bool, now: float) -> tuple[str, list[do.Effect]]:
        """What [start] names stands in the state; or why not, and why to leave if nothing can come of it."""
        if not self.founding.reads:
            return "", []  # it was asked for by whoever held another stage here
        leaves, effects = self.founding.on_read(problem, is_final, self.replicas, now)
        return leaves, effects + ([] if problem else self.exchange.on_provided())
