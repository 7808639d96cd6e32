"""The trainer's machine: when work is frozen, when what is loaded, what is kept, which samples are read.  Pure.

Owns: the counts of unmerged work, the stand, the schedule, the leases, results that wait for their time.
Called by its shells: the inner loop (which blocks and works on a model) and the simulator's trainer.  Every rank of an
island may run one of its own: equal events make equal effects.
Must not know: tensors, clocks, sockets, processes, rounds, how the outer step works.

    event                                        what it decides
    attach, on_message, on_agent_gone            what to load, whether a wait is over, the end
    before_step, on_step                         which fragments learn from a step; the counts
    outlook, count_tokens                        when ranks must have heard of each other, and of what they learned
    on_heard, after the words that came          which fragments are frozen now, or waited for
    on_want, hand_out                            which samples come next, how many to ask for
    on_silence, on_waited                        whether a wait is worth a word; what was no part of a step

Words may come at any time: a shell tells them when they arrive, or all of them between `on_step` and `on_heard`.
Tokens of a step may be told later than it, but before any word that comes after it.

Training waits only here.  With the blocking schedule: from the moment fragments are frozen until the agent has said of
each how to go on.  With the others only where a fragment is to be frozen again and the round that uses its last freeze
is not over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from farflung.optim.schedule import LEAD, RunPlace, Schedule, ScheduleRules, rules_of
from farflung.peer.data.leased_data import LeaseBook, LoaderPace, ReadPace, Span
from farflung.peer.island.parts import MOST_STEPS, Outlook
from farflung.peer.local.words import (
    Attach,
    Finish,
    Frozen,
    LeasesNow,
    Loaded,
    LoadState,
    NeedSamples,
    Provide,
    Provided,
    ResumeSteps,
    RoundCalled,
    RoundOpened,
    Score,
    Scored,
    Shared,
    Stop,
    ToTrainer,
)
from farflung.peer.local.words import RunAmendments as TermsWord
from farflung.peer.trainer.effects import (
    ComputeScore,
    CopyFragments,
    Effect,
    EndWithRefusal,
    ForgetLoss,
    Freeze,
    GoAhead,
    GoOn,
    LoadAnchor,
    OpenShared,
    PutBack,
    ReadSamples,
    RunOver,
    SayFrozen,
    SayWord,
    TrainerState,
    WaitBefore,
    Warn,
    WriteAnchor,
)
from farflung.protocol.errors import ScoreCause
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import BOOKS_FRAGMENT, ModelSchema
from farflung.protocol.run_terms import Terms

NOT_LOADED = -1
PATIENCE_S = 30.0  # between two warnings of one kind
GOOD_ENDS = frozenset({"finished", "left"})  # codes of `Stop` after which the script may go on alone

_ENDS = frozenset({TrainerState.OVER, TrainerState.REFUSED})
MOVES: dict[TrainerState, frozenset[TrainerState]] = {
    TrainerState.ATTACHING: _ENDS | {TrainerState.STEPPING},
    TrainerState.STEPPING: _ENDS | {TrainerState.WITHOUT_DATA, TrainerState.HELD_UP},
    TrainerState.WITHOUT_DATA: _ENDS | {TrainerState.STEPPING},
    TrainerState.HELD_UP: _ENDS | {TrainerState.AT_BARRIER},
    TrainerState.AT_BARRIER: _ENDS | {TrainerState.STEPPING},
    TrainerState.OVER: frozenset({TrainerState.REFUSED}),
    TrainerState.REFUSED: frozenset(),
}
# For the agent's words; to be without data is no such wait.
WAITS = frozenset({TrainerState.ATTACHING, TrainerState.HELD_UP, TrainerState.AT_BARRIER})

NO_LEASED_DATA = (
    "this script has asked for no sample by run.batches: unless it reads other data than every other peer, all of them "
    "train on the same samples; let its loop, or its Trainer's data loader, read run.batches(dataset) (docs/train.md)"
)
_REMINDERS = {
    TrainerState.ATTACHING: "still waiting for the model weights; the agent's log has the reason",
    TrainerState.HELD_UP: "training waits: a round takes longer than a period; raise sync_every or period_s",
    TrainerState.WITHOUT_DATA: "waiting for data: no samples are leased to this peer; the agent says why",
}


@dataclass(frozen=True, slots=True)
class _Uncounted:
    """A step whose tokens are not known yet."""

    learners: list[int]
    handed_out: int  # tokens


@dataclass(slots=True)
class UnmergedWork:
    """The unmerged work of one fragment, in counts.  One commit may use one fragment's work and not another's (P6)."""

    fragment: int
    version: int = NOT_LOADED
    tokens: int = 0
    steps: int = 0
    spare: int = 0  # the slot to freeze into; the agent names it, since it knows which ones are in use
    blocked: bool = False  # frozen, and the agent has not said how to go on

    def load(self, load: LoadState) -> None:
        """What the counts are after it: see `Keep` in words.py."""
        match load.keep:
            case "all":
                pass
            case "rest":
                self.tokens = max(0, self.tokens - load.tokens)
                self.steps = max(0, self.steps - load.steps)
            case "drop":
                self.tokens, self.steps = 0, 0
            case "restore":
                self.tokens, self.steps = load.tokens, load.steps
        self.version, self.spare, self.blocked = load.version, load.spare, False


class TrainerMachine:
    def __init__(self, rules: ScheduleRules, lease_samples: int, now: float = 0.0) -> None:
        self.rules = rules
        self.accounts = [UnmergedWork(number) for number in range(rules.fragments)]
        self.leases = LeaseBook(rules.fragments)
        self._pace, self._loaders = LoaderPace(0), 0
        self._reads = ReadPace()
        self.stand = TrainerState.ATTACHING
        self.finished = False
        self.step_count = self.all_tokens = 0
        self._uncounted: deque[_Uncounted] = deque()
        self._samples_out = self._samples_of_step = 0  # handed out since the last step, and before it
        self.waited_s = 0.0  # for rounds, all in all
        self.terms: Terms | None = None  # where the host has changed any
        self._lease_samples = lease_samples
        self._schedule = Schedule(rules, now)
        self._place = RunPlace(rules)
        self._held: dict[int, LoadState] = {}  # results that are here before their time, by fragment
        self._due: list[int] = []  # to be frozen as soon as the agent has answered their last freeze
        self._stopped_at = now  # of the wait for a round, where it waits
        self._remind_at = {TrainerState.ATTACHING: now + PATIENCE_S, TrainerState.HELD_UP: now}
        self._samples = 0  # of an epoch, as it was said last; 0: nothing was asked for
        self._told_of_own_data = False
        self._remembered: tuple[int, ...] = ()  # of these fragments the shell has copies from before the step
        # Fragments whose last freeze was not finite, as the agent will find.
        self._passed_over: set[int] = set()
        self._refusal: EndWithRefusal | None = None

    @property
    def version(self) -> int:
        """Of the least advanced fragment in the model."""
        return min(account.version for account in self.accounts)

    @property
    def waits(self) -> bool:
        """No step may be taken before the agent has said something."""
        return self.stand in WAITS

    @property
    def run_step(self) -> int:
        """The run's own step, as far as this peer can see it."""
        return self._place.step

    def _see_the_run(self) -> None:
        if self.stand not in WAITS:
            self._place.see(self.accounts[BOOKS_FRAGMENT].version, self._schedule.place)

    # ---- getting in, and the end

    def attach(self, model: ModelSchema, pid: int) -> list[Effect]:
        """Say what the model is, and wait until the run's state is in it."""
        return [SayWord(Attach(model=model, pid=pid)), WaitBefore(TrainerState.ATTACHING)]

    def on_agent_gone(self, problem: str) -> list[Effect]:
        """After its last words."""
        return self._refuse("agent", problem)

    def _on_stop(self, stop: Stop, now: float) -> list[Effect]:
        # A trainer that is stopped before the run's state is in its model has nothing to go on with.
        if stop.code in GOOD_ENDS and self.stand is not TrainerState.ATTACHING:
            return self._end(now, stopped=True)
        return self._refuse(stop.code, stop.reason)

    def _refuse(self, code: str, reason: str) -> list[Effect]:
        self._move(TrainerState.REFUSED)
        self._refusal = EndWithRefusal(code, reason)
        return [self._refusal]

    def _end(self, now: float, stopped: bool) -> list[Effect]:
        self.finished = True
        if self.stand in (TrainerState.HELD_UP, TrainerState.AT_BARRIER):
            self.waited_s += now - self._stopped_at
        # There the end comes with the run's state, which is worth having.
        if self.stand is not TrainerState.ATTACHING:
            self._move(TrainerState.OVER)
        return [RunOver(stopped)]

    # ---- the agent's words

    def on_message(self, word: ToTrainer, now: float) -> list[Effect]:
        if self.stand is TrainerState.REFUSED:
            return []
        assert not self._uncounted, "a word was heard before the tokens of the steps before it"
        before, reminder = self.stand, self.on_silence(now)
        effects = [*reminder, *self._hear(word, now), *self._settle(now)]
        return effects + self._wait_if_it_begins(before)

    def on_silence(self, now: float) -> list[Effect]:
        """The agent has said nothing for a while, or says something only now."""
        if self.stand not in _REMINDERS or now < self._remind_at[self.stand]:
            return []
        self._remind_at[self.stand] = now + PATIENCE_S
        return [Warn(_REMINDERS[self.stand])]

    def _hear(self, word: ToTrainer, now: float) -> list[Effect]:
        match word:
            case Shared():
                return [OpenShared(word)]
            case TermsWord(first=first, amendments=amendments):
                self.terms = Terms.of(Manifest.from_canonical(first), amendments)
                self._follow_terms()
            case Provide():
                return [WriteAnchor(), SayWord(Provided())]
            case LoadState():
                return self._on_load(word, now)
            case RoundOpened(fragment=fragment, hold=hold):
                self.accounts[fragment].blocked |= hold
                self._schedule.on_opened(fragment, now)
            case RoundCalled(fragment=fragment, version=version, waited_s=waited_s):
                if self.accounts[fragment].version == version and not self.accounts[fragment].blocked:
                    self._schedule.on_called(fragment, waited_s, now)
            case ResumeSteps(spare=spare, fragment=fragment):
                self.accounts[fragment].spare, self.accounts[fragment].blocked = spare, False
            case LeasesNow(leases=leases, unsure=unsure):
                self.leases.on_leases(leases, unsure)
            case Score(number=number, versions=versions):
                if tuple(account.version for account in self.accounts) != versions:
                    return [SayWord(Scored(number=number, why_not=ScoreCause.PASSED))]
                return [ComputeScore(word)]
            case Finish():
                loaded = [effect for load in word.loads for effect in self._on_load(load, now)]
                return [*loaded, *self._end(now, stopped=False)]
            case Stop():
                return self._on_stop(word, now)
            case _:
                pass  # Begin, once more: the agent tells it to every trainer that waits
        return []

    def _on_load(self, load: LoadState, now: float) -> list[Effect]:
        effects = self._load_held([load.fragment], now)
        early = load.keep in ("all", "rest") and not self._schedule.may_take(load.fragment)
        if early and self.stand in (TrainerState.STEPPING, TrainerState.WITHOUT_DATA):
            self._held[load.fragment] = load
            return effects
        return effects + self._load(load, now)

    def _load_held(self, fragments: Iterable[int], now: float) -> list[Effect]:
        loads = [self._held.pop(fragment) for fragment in fragments if fragment in self._held]
        return [effect for load in loads for effect in self._load(load, now)]

    def _follow_terms(self) -> None:
        """Those of the round that starts from this version; a period that has begun ends by them, too.  How a result is
        taken stays as it was."""
        version = max(0, self.accounts[BOOKS_FRAGMENT].version)
        if self.terms is not None:
            now = rules_of(self.terms.at(version))
            self.rules = replace(now, overlap_steps=self.rules.overlap_steps, mix=self.rules.mix)
            self._place.follow(self.rules, self.terms.steps_before)
        self._schedule.follow(self.rules, version)

    def _load(self, load: LoadState, now: float) -> list[Effect]:
        account = self.accounts[load.fragment]
        account.load(load)
        restarts = load.keep in ("drop", "restore")
        self._schedule.on_loaded(load.fragment, now, restarts)
        self._follow_terms()
        if load.fragment == BOOKS_FRAGMENT:
            self._place.on_load(restarts)
        if restarts and load.fragment not in self._passed_over:
            self.leases.restart(load.fragment)
        self._passed_over.discard(load.fragment)
        begins = restarts and load.fragment == BOOKS_FRAGMENT
        if begins:
            self._schedule.restart(now)
        taken = LoadAnchor(
            fragment=load.fragment,
            version=load.version,
            keep=load.keep,
            slot=load.slot,
            steps=account.steps,
            used_steps=load.steps if load.keep == "rest" else 0,
            mix=self.rules.mix if load.keep == "rest" else 0.0,
        )
        loaded = SayWord(Loaded(version=load.version, fragment=load.fragment))
        return [taken, *([ForgetLoss()] if begins else []), loaded]

    # ---- inner steps

    def before_step(self) -> list[Effect]:
        """Before every optimizer step.  Rarely, not all fragments may learn from it (see LeaseBook.learners)."""
        self._remembered = () if self.finished else self._others(self.leases.learners())
        return [CopyFragments(self._remembered)] if self._remembered else []

    def _others(self, learners: list[int]) -> tuple[int, ...]:
        return tuple(account.fragment for account in self.accounts if account.fragment not in learners)

    def outlook(self, now: float) -> Outlook:
        """Before `on_step`: when all ranks must have heard what there is to hear."""
        wanted = 2 * max(self._samples_out, self._samples_of_step)
        # Where little is leased, a word that was not heard would make the next batch short.
        is_due = self._schedule.may_end(now) or self.leases.unread < wanted
        most = MOST_STEPS if self.rules.period_s else max(1, self._schedule.period // LEAD)
        return Outlook(is_due, most, self._schedule.due_at)

    def on_step(self, now: float, tokens: Iterable[int | None] = (None,)) -> list[Effect]:
        """After every optimizer step.  `tokens`: as in `count_tokens`, of the steps of which they are known by now."""
        if self.stand in _ENDS or self.finished:
            return []
        if self.stand is TrainerState.WITHOUT_DATA:
            self._move(TrainerState.STEPPING)  # the script has data of its own
        odd = self._look_at_the_loader()
        self.step_count += 1
        learners = self.leases.learners()
        for number in learners:
            self.accounts[number].steps += 1
        self._uncounted.append(_Uncounted(learners, self.leases.step_tokens))
        self._samples_of_step, self._samples_out = self._samples_out, 0
        others = tuple(each for each in self._others(learners) if each in self._remembered)
        undone: list[Effect] = [PutBack(others)] if others else []
        self._remembered = ()
        self._schedule.count_step(now)
        self.leases.on_step()
        self.count_tokens(tokens)
        return undone + odd

    def count_tokens(self, tokens: Iterable[int | None]) -> None:
        """Of the oldest steps that are not counted yet: by the script; None counts what was handed out for it."""
        for said in tokens:
            step = self._uncounted.popleft()
            # A step that nobody counted counts as one token, so that weights still follow the work done.
            found = said if said is not None else max(1, step.handed_out)
            self.all_tokens += found
            for number in step.learners:
                self.accounts[number].tokens += found

    def on_not_finite(self) -> None:
        """What was learned since the last loads is not finite, and the shell has put the model back to those.

        No sample of it is read again: one of them may be what did it, and would do it to every peer, one by one.
        """
        self._passed_over = {account.fragment for account in self.accounts if account.blocked}
        for account in self.accounts:
            account.tokens, account.steps = 0, 0

    def on_heard(self, now: float) -> list[Effect]:
        """A step is counted, and all that the agent had said by then is told: freeze what is due."""
        if (known := self._cannot_go_on()) is not None:
            return known
        effects = self._load_held([f for f in self._held if self._schedule.may_take(f)], now)
        self._due = self._schedule.take_due(now)
        effects += self._load_held(self._due, now)
        if not self._due:
            self._see_the_run()
            return [*effects, GoOn()]
        self._stopped_at = now
        self._move(TrainerState.HELD_UP)
        effects += self._settle(now)
        if self.stand is TrainerState.HELD_UP:
            # No step will come for a while to take what is here; and the agent waits for the answers.
            effects += [*self._load_held(list(self._held), now), *self.on_silence(now)]
        return effects + self._wait_if_it_begins(TrainerState.STEPPING)

    def _cannot_go_on(self) -> list[Effect] | None:
        """What a script hears that goes on after the end, or after it broke off a wait; None: it can."""
        if self._refusal is not None:
            return [self._refusal]
        if self.finished:
            return []
        return [WaitBefore(self.stand)] if self.waits else None

    def _settle(self, now: float) -> list[Effect]:
        """On as far as it may go: to the freeze, and to the next step."""
        effects: list[Effect] = []
        if self.stand is TrainerState.HELD_UP and not any(
            self.accounts[number].blocked for number in self._due
        ):
            effects += self._freeze()
        if self._may_step():
            if self.stand is TrainerState.AT_BARRIER:
                self.waited_s += now - self._stopped_at
            self._move(TrainerState.OVER if self.finished else TrainerState.STEPPING)
            self._schedule.on_waited(now)
            effects += [] if self.finished else [GoOn()]
        self._see_the_run()
        return effects

    def _may_step(self) -> bool:
        if self.stand is TrainerState.ATTACHING:
            return self.version != NOT_LOADED
        free = not self.rules.waits or not any(account.blocked for account in self.accounts)
        return self.stand is TrainerState.AT_BARRIER and free

    def _freeze(self) -> list[Effect]:
        # The work of some may have been dropped meanwhile.
        assert not self._uncounted, "work is frozen whose tokens are not known"
        due, self._due = [self.accounts[number] for number in self._due if self.accounts[number].steps], []
        self._passed_over.difference_update(account.fragment for account in due)
        self._move(TrainerState.AT_BARRIER)
        effects: list[Effect] = []
        for account in due:
            effects.append(Freeze(account.fragment, account.spare))
            if self.rules.goes_ahead:
                effects.append(GoAhead(account.fragment, account.spare))
            account.blocked = True
        if due:
            effects.append(SayFrozen(tuple(self._frozen(each, more=each is not due[-1]) for each in due)))
            effects += self._tell_of_own_data()
        if any(account.fragment == BOOKS_FRAGMENT for account in due):
            self._place.on_freeze()
            effects.append(ForgetLoss())
        return effects

    def _tell_of_own_data(self) -> list[Effect]:
        """Once, with the first work that came from nothing that is leased."""
        if self._samples or self._told_of_own_data:
            return []
        self._told_of_own_data = True
        return [Warn(NO_LEASED_DATA)]

    def _frozen(self, account: UnmergedWork, more: bool) -> Frozen:
        return Frozen(
            slot=account.spare,
            tokens=account.tokens,
            steps=account.steps,
            used=self.leases.used(account.fragment),
            loss=None,
            fragment=account.fragment,
            step=self.step_count,
            more=more,
            early=account.fragment in self._schedule.early,
        )

    def _wait_if_it_begins(self, before: TrainerState) -> list[Effect]:
        return [WaitBefore(self.stand)] if self.waits and self.stand is not before else []

    def _move(self, stand: TrainerState) -> None:
        if stand is not self.stand:
            assert stand in MOVES[self.stand], f"from {self.stand} to {stand}"
            self.stand = stand

    # ---- data

    def on_want(self, samples: int, batch: int, now: float, data: bytes = b"") -> list[Effect]:
        """The script wants the next batch: `ReadSamples`, or `WaitBefore`; to be said again after each word that comes.

        `samples`: of an epoch, as far as it is known by now; `data`: the fingerprint of the data set.  Nothing where
        the run is over.
        """
        if (known := self._cannot_go_on()) is not None:
            return known
        found_end = samples != self._samples and self._samples > 0
        if samples != self._samples:
            self._samples = samples
            self.leases.on_end(samples)
            self.leases.ask_anew()  # the end of a stream was found: what was asked for may lie beyond it
        # At least a sixteenth of a round's samples: the number of leases that wait for a commit stays small.
        unit = max(self._lease_samples, batch * self._schedule.period // 16)
        want = self.leases.ask(batch, self._reads.unit(unit, self.leases.known(samples)))
        asked: list[Effect] = []
        if want or found_end:
            asked.append(SayWord(NeedSamples(samples=samples, want=want, data=data)))
        spans = self.leases.next_batch(batch)
        if spans:
            self._reads.on_read(batch, now)
            self._move(TrainerState.STEPPING)
            return [*asked, ReadSamples(spans[0], spans[1:])]
        loads = self._load_held(list(self._held), now)  # no step would come to take them
        if self.stand is TrainerState.WITHOUT_DATA:
            return asked + loads
        self._move(TrainerState.WITHOUT_DATA)
        self._remind_at[TrainerState.WITHOUT_DATA] = now + PATIENCE_S
        return [*asked, *loads, WaitBefore(TrainerState.WITHOUT_DATA)]

    def hand_out(self, spans: tuple[Span, ...], tokens: int) -> None:
        """A batch is in the script's hands: its next step learns from it, or one after that (`read_ahead`)."""
        self.leases.hand_out(spans, tokens)
        self._samples_out += sum(span.stop - span.start for span in spans)
        self._pace.on_hand_out()

    def read_ahead(self, batches: int) -> int:
        """A loader begins that holds so many batches back when it gives one out.  Its number, for `take_back`."""
        self.leases.take_back()  # there is one at a time: what the last one held back is in no step
        self.leases.read_ahead(batches)
        self._pace = LoaderPace(batches)
        self._loaders += 1
        return self._loaders

    def take_back(self, loader: int) -> None:
        """The loader is gone.  What it held back was in no step, and is read again."""
        if loader == self._loaders:
            self.leases.take_back()
            self._pace = LoaderPace(0)

    def _look_at_the_loader(self) -> list[Effect]:
        told = self._pace.on_step(self.leases.handed_out)
        self.leases.read_ahead(self._pace.ahead)
        return [Warn(told)] if told else []

    def on_waited(self, now: float) -> None:
        """The script stood still for data until now: that was no part of a step."""
        self._schedule.on_waited(now)
