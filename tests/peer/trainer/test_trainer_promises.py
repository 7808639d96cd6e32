"""P6 and P7 at the trainer's machine under any order of events, and proof that a broken rule of it would be seen."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.optim.schedule import ScheduleRules
from farflung.peer.data.leased_data import Span
from farflung.peer.local.words import (
    Finish,
    Frozen,
    Keep,
    LeasesNow,
    LoadState,
    NeedSamples,
    Provide,
    ResumeSteps,
    RoundOpened,
    Stop,
    ToTrainer,
)
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.machine import WAITS, TrainerMachine
from farflung.protocol.messages import Lease
from farflung.simulator.invariants import Broken
from farflung.simulator.trainer import VirtualTrainer
from farflung.simulator.world import Scenario, World
from rig.pieces import pieces
from rig.trainer_player import MODEL

TOKENS = 10  # of each step

SCHEDULES = (
    ScheduleRules("blocking", 3, fragments=2),
    ScheduleRules("overlap", 3, fragments=2, overlap_steps=2),
    ScheduleRules("streaming", 4, fragments=3, overlap_steps=1),
    ScheduleRules("overlap", 2),
)

Samples = tuple[int, ...]


# ---- a truthful agent, and a model that is a list of the steps that are in it ---------------------------------------


class Loader(NamedTuple):
    group: int = 1  # batches in a step
    ahead: int = 0  # batches that are held back when one is given out
    samples: int = 2  # in a batch: leases have six


PLAIN = Loader()


class Pair:
    """The machine, a shell that writes down which samples are in each fragment's unmerged work, and a small agent."""

    def __init__(
        self, rules: ScheduleRules, machine: type[TrainerMachine] = TrainerMachine, loader: Loader = PLAIN
    ) -> None:
        self.rules, self.fragments = rules, range(rules.fragments)
        self.loader = loader
        self.kind = machine
        self.now = 0.0
        self.leases: dict[int, Lease] = {}  # with what is committed of each
        self.next_lease = 0
        self.asked = self.unsure = False
        self.frozen: list[Frozen | None] = [None for _ in self.fragments]
        self.slots: dict[tuple[int, int], list[Samples]] = {}  # by (fragment, slot)
        self.committed: list[list[int]] = [[] for _ in self.fragments]
        self.versions = [0 for _ in self.fragments]
        self.start()

    def start(self) -> None:
        """A trainer begins: what stands frozen is its own."""
        self.machine = self.kind(self.rules, lease_samples=6, now=self.now)
        self.machine.read_ahead(self.loader.ahead)
        self.batches: list[tuple[Span, ...]] = []  # handed out, in no step yet
        self.work: list[list[Samples]] = [[] for _ in self.fragments]
        self.do(self.machine.attach(MODEL, pid=1))
        self.tell_leases()
        for fragment in self.fragments:
            self.load(fragment, "restore" if self.frozen[fragment] is not None else "drop")

    # ---- the shell

    def do(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.LoadAnchor(fragment=fragment, keep=keep, slot=slot, used_steps=used):
                    work = self.work[fragment]
                    kept = {
                        "all": work,
                        "rest": work[used:],
                        "drop": [],
                        "restore": self.slots.get((fragment, slot)),
                    }
                    self.work[fragment] = list(kept[keep] or [])
                    assert len(self.work[fragment]) == effect.steps, (
                        "P6: the counts are of what is in the model"
                    )
                case do.Freeze(fragment, slot):
                    self.slots[fragment, slot] = list(self.work[fragment])
                case do.PutBack(fragments):
                    for fragment in fragments:
                        self.work[fragment].pop()
                case do.SayFrozen(words):
                    for word in words:
                        self.on_frozen(word)
                case do.SayWord(NeedSamples()):
                    self.asked = True
                case do.GoOn():
                    assert not self.machine.waits
        for account in self.machine.accounts:
            assert account.steps >= 0 and account.tokens >= 0

    def step(self) -> None:
        if self.machine.stand in WAITS:
            return
        while len(self.batches) < self.loader.group + self.loader.ahead:
            found = [
                (effect.span, *effect.more) for effect in self.wanted() if isinstance(effect, do.ReadSamples)
            ]
            if not found:
                return
            self.machine.hand_out(found[0], 1)
            self.batches += found
        seen, self.batches = self.batches[: self.loader.group], self.batches[self.loader.group :]
        spans = [span for batch in seen for span in batch]
        self.do(self.machine.before_step())
        for work in self.work:
            work.append(tuple(sample for span in spans for sample in range(span.start, span.stop)))
        self.now += 1.0
        self.do(self.machine.on_step(self.now, [TOKENS]))
        self.do(self.machine.on_heard(self.now))

    def wanted(self) -> list[do.Effect]:
        effects = self.machine.on_want(1000, self.loader.samples, self.now)
        self.do(effects)
        return effects

    # ---- the agent

    def on_frozen(self, word: Frozen) -> None:
        work = self.slots[word.fragment, word.slot]
        assert (word.steps, word.tokens) == (len(work), TOKENS * len(work)), "P6"
        learned = sorted([sample for step in work for sample in step] + self.committed[word.fragment])
        named = {each.lease: each.upto for each in word.used}
        reached = [
            sample
            for number, lease in self.leases.items()
            for sample in range(
                lease.start, max(named.get(number, 0), lease.reached(len(self.fragments))[word.fragment])
            )
        ]
        assert learned == sorted(reached), "P7: the word names what was learned, each sample once"
        self.frozen[word.fragment] = word

    def hear(self, word: ToTrainer) -> None:
        self.do(self.machine.on_message(word, self.now))

    def tell_leases(self) -> None:
        if self.unsure:
            self.hear(LeasesNow(leases=(), unsure=True))
            return
        told = []
        for lease in self.leases.values():
            reached = list(lease.reached(len(self.fragments)))
            for fragment, frozen in enumerate(self.frozen):
                for used in frozen.used if frozen is not None else ():
                    reached[fragment] = max(reached[fragment], used.upto if used.lease == lease.lease else 0)
            if min(reached) < lease.stop or min(lease.reached(len(self.fragments))) < lease.stop:
                told.append(Lease.at(lease.lease, 0, lease.start, lease.stop, tuple(reached)))
        self.hear(LeasesNow(leases=tuple(told)))

    def load(self, fragment: int, keep: Keep) -> None:
        frozen = self.frozen[fragment] if keep in ("rest", "restore") else None
        if keep in ("rest", "drop"):
            self.frozen[fragment] = None
        load = LoadState(
            version=self.versions[fragment],
            keep=keep,
            slot=frozen.slot if frozen is not None else 0,
            tokens=frozen.tokens if frozen is not None else 0,
            steps=frozen.steps if frozen is not None else 0,
            spare=self.spare(self.frozen[fragment]),
            fragment=fragment,
        )
        self.hear(load)  # by which it may freeze anew

    def spare(self, frozen: Frozen | None) -> int:
        return 0 if frozen is None else (frozen.slot + 1) % 3

    # ---- what may happen, by name

    def forget(self, fragment: int) -> None:
        """The agent begins again: it does not know whose the leases are, until the coordinator says so."""
        self.unsure = True
        self.tell_leases()

    def grant(self, fragment: int) -> None:
        if self.unsure:
            self.unsure = False
            self.tell_leases()
        if self.asked and len(self.leases) < 50:
            start = 6 * self.next_lease
            self.leases[self.next_lease] = Lease.at(
                self.next_lease, 0, start, start + 6, (start,) * len(self.fragments)
            )
            self.next_lease, self.asked = self.next_lease + 1, False
            self.tell_leases()

    def commit(self, fragment: int) -> None:
        """A commit used what stands frozen."""
        frozen = self.frozen[fragment]
        if frozen is None:
            return
        self.committed[fragment] += [s for step in self.slots[fragment, frozen.slot] for s in step]
        assert len(set(self.committed[fragment])) == len(self.committed[fragment]), (
            "P7: a sample went in twice"
        )
        for used in frozen.used:
            lease = self.leases[used.lease]
            reached = list(lease.reached(len(self.fragments)))
            reached[fragment] = max(reached[fragment], used.upto)
            self.leases[used.lease] = Lease.at(lease.lease, 0, lease.start, lease.stop, tuple(reached))
        self.tell_leases()
        self.versions[fragment] += 1
        self.load(fragment, "rest")

    def miss(self, fragment: int) -> None:
        """A commit was made without this peer."""
        self.versions[fragment] += 1
        self.load(fragment, "all")

    def fail(self, fragment: int) -> None:
        """A round failed, or none is to be."""
        self.hear(ResumeSteps(spare=self.spare(self.frozen[fragment]), fragment=fragment))

    def open(self, fragment: int) -> None:
        self.hear(
            RoundOpened(hold=self.frozen[fragment] is not None and not self.rules.waits, fragment=fragment)
        )

    def drop(self, fragment: int) -> None:
        self.frozen[fragment] = None
        self.tell_leases()
        self.load(fragment, "drop")

    def restart(self, fragment: int) -> None:
        self.start()

    def steps(self, fragment: int) -> None:
        for _ in range(fragment + 1):
            self.step()


HAPPENS = (
    "steps",
    "steps",
    "steps",
    "grant",
    "grant",
    "commit",
    "miss",
    "fail",
    "open",
    "drop",
    "restart",
    "forget",
)
EVENTS = st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 2)), max_size=60)


def play(
    rules: ScheduleRules,
    events: list[tuple[str, int]],
    machine: type[TrainerMachine] = TrainerMachine,
    loader: Loader = PLAIN,
) -> Pair:
    pair = Pair(rules, machine, loader)
    for name, fragment in events:
        getattr(pair, name)(fragment % rules.fragments)
        for account in pair.machine.accounts:
            # What came early is loaded later; all that the agent was told of stands frozen.
            frozen = pair.frozen[account.fragment] is not None or account.fragment in pair.machine._held
            assert frozen or not account.blocked, "blocked, and nothing of it is frozen"
    return pair


LOADERS = st.builds(Loader, st.integers(1, 3), st.integers(0, 3), st.sampled_from((2, 4, 9)))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SCHEDULES), EVENTS, LOADERS)
def test_P6_P7_in_any_order_each_step_and_each_sample_is_counted_once_for_each_fragment(
    rules: ScheduleRules, events: list[tuple[str, int]], loader: Loader
) -> None:
    play(rules, events, loader=loader)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SCHEDULES), EVENTS, LOADERS)
def test_P7_whatever_a_loader_holds_back_every_sample_is_learned_in_the_end(
    rules: ScheduleRules, events: list[tuple[str, int]], loader: Loader
) -> None:
    """Batches that it holds back may be of no use any more; those that are missing come behind them."""
    pair = play(rules, events, loader=loader)
    wanted = 6 * pair.next_lease

    def all_is_learned() -> bool:
        return all(set(range(wanted)) <= set(learned) for learned in pair.committed)

    for _ in range(200):
        if all_is_learned():
            break
        for fragment in pair.fragments:
            pair.grant(fragment)
            pair.steps(fragment)
            pair.commit(fragment)
            pair.fail(fragment)
    assert all_is_learned()


@pytest.mark.mode("audits")
@pytest.mark.parametrize("piece", pieces(3))
def test_P7_in_any_run_batches_may_go_on_in_the_next_lease(piece: int) -> None:
    joined = []

    class Joins(VirtualTrainer):
        joins_leases = True
        samples_per_step = 3

        def _take(self, spans: tuple[Span, ...]) -> None:
            joined.append(len(spans) > 1)
            super()._take(spans)

    class JoiningWorld(World):
        trainer_class = Joins

    torch.set_num_threads(1)
    for seed in range(4 * piece, 4 * piece + 4):
        JoiningWorld(seed, Scenario.of(seed)).run()
        JoiningWorld(seed, Scenario.of_readers_ahead(seed)).run()
    assert sum(joined) > 20


WORDS: st.SearchStrategy[ToTrainer] = st.one_of(
    st.builds(
        LoadState,
        version=st.integers(0, 3),
        keep=st.sampled_from(("drop", "all", "rest", "restore")),
        slot=st.integers(0, 2),
        tokens=st.integers(0, 99),
        steps=st.integers(0, 9),
        spare=st.integers(0, 2),
        fragment=st.integers(0, 1),
    ),
    st.builds(ResumeSteps, spare=st.integers(0, 2), fragment=st.integers(0, 1)),
    st.builds(RoundOpened, hold=st.booleans(), fragment=st.integers(0, 1)),
    st.builds(LeasesNow, leases=st.just((Lease(1, 0, 0, 6, 2),)) | st.just(()), unsure=st.booleans()),
    st.just(Provide()),
    st.just(Finish(version=1)),
    st.builds(Stop, code=st.sampled_from(("left", "refused")), reason=st.just("asked")),
)
CALLS = st.lists(WORDS | st.sampled_from(("step", "want", "silence")), max_size=50)


def told(machine: TrainerMachine, call: ToTrainer | str, now: float) -> list[do.Effect]:
    match call:
        case "step":
            machine.before_step()
            return [*machine.on_step(now), *machine.on_heard(now)]
        case "want":
            return machine.on_want(100, 2, now)
        case "silence":
            return machine.on_silence(now)
        case _:
            return machine.on_message(call, now)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([rules for rules in SCHEDULES if rules.fragments == 2]), CALLS)
def test_no_order_of_words_leads_out_of_the_declared_moves_or_below_zero(
    rules: ScheduleRules, calls: list[ToTrainer | str]
) -> None:
    """Also words that no agent says, and steps of a script that was told to wait.  A twin that is told the same
    answers the same, as each rank of an island must."""
    machine, twin = (TrainerMachine(rules, lease_samples=4) for _ in range(2))
    for each in (machine, twin):
        each.attach(MODEL, pid=1)
    for now, call in enumerate(calls):
        waited = machine.waits
        effects = told(machine, call, now)
        assert told(twin, call, now) == effects
        frozen = any(isinstance(effect, do.Freeze) for effect in effects)
        assert not (waited and frozen and call == "step"), "a step that was not to be taken froze something"
        assert not (machine.waits and any(isinstance(effect, do.GoOn) for effect in effects))
        assert all(account.steps >= 0 and account.tokens >= 0 for account in machine.accounts)


# ---- mutations: each breaks one rule of the machine, and a seed of the simulator, or the play above, must notice -----


class KeepsWhatWasMerged(TrainerMachine):
    """Takes a commit that used its work for one that was made without it."""

    def _load(self, load, now):  # type: ignore[no-untyped-def]
        return super()._load(msgspec.structs.replace(load, keep="all") if load.keep == "rest" else load, now)


class GivesUpWhatWasNotMerged(TrainerMachine):
    """Starts from the anchor after a commit that was made without it."""

    def _load(self, load, now):  # type: ignore[no-untyped-def]
        return super()._load(msgspec.structs.replace(load, keep="drop") if load.keep == "all" else load, now)


class CountsUsedStepsOn(TrainerMachine):
    """Forgets to take the steps that a commit used off its count."""

    def _load(self, load, now):  # type: ignore[no-untyped-def]
        before = self.accounts[load.fragment].steps
        effects = super()._load(load, now)
        if load.keep == "rest":
            self.accounts[load.fragment].steps = before
            effects[0] = dataclasses.replace(effects[0], steps=before)
        return effects


class RestoresNothing(TrainerMachine):
    """A trainer that begins again does not take over what stands in the slot."""

    def _load(self, load, now):  # type: ignore[no-untyped-def]
        fresh = msgspec.structs.replace(load, keep="drop", steps=0, tokens=0)
        return super()._load(fresh if load.keep == "restore" else load, now)


class LearnsTwice(TrainerMachine):
    """Lets every fragment learn from every step, also from samples that it has learned."""

    def before_step(self):  # type: ignore[no-untyped-def]
        return []

    def on_step(self, now, tokens=(None,)):  # type: ignore[no-untyped-def]
        others = {account.fragment for account in self.accounts} - set(self.leases.learners())
        for number in others:
            self.accounts[number].steps += 1
            self.accounts[number].tokens += sum(each or 1 for each in tokens)
        return super().on_step(now, tokens)


class PutsNothingBack(TrainerMachine):
    """Does not count a step in the fragments that must not learn from it, but leaves it in the model."""

    def on_step(self, now, tokens=(None,)):  # type: ignore[no-untyped-def]
        return [e for e in super().on_step(now, tokens) if not isinstance(e, do.PutBack)]


class ReadsNothingAgain(TrainerMachine):
    """Names the samples of work that was dropped as if it still had them."""

    def _load(self, load, now):  # type: ignore[no-untyped-def]
        self.leases.restart, kept = (lambda fragment: None), self.leases.restart
        effects = super()._load(load, now)
        self.leases.restart = kept
        return effects


class FreezesWhatIsInUse(TrainerMachine):
    """Does not wait for the round that uses the last freeze."""

    def _hear(self, word, now):  # type: ignore[no-untyped-def]
        effects = super()._hear(word, now)
        for account in self.accounts:
            account.blocked = False
        return effects


class ReadsWhatMayBeOthers(TrainerMachine):
    """Takes a list of leases for the whole truth that its agent is not sure of."""

    def _hear(self, word, now):  # type: ignore[no-untyped-def]
        if isinstance(word, LeasesNow):
            word = msgspec.structs.replace(word, unsure=False)
        return super()._hear(word, now)


class HoldsBackForEver(TrainerMachine):
    """Never takes what came before its time."""

    def _load_held(self, fragments, now):  # type: ignore[no-untyped-def]
        return []


class KeepsItsLastSteps(TrainerMachine):
    """Ends with what it has learned since the last freeze, which no round will use."""

    def _hear(self, word, now):  # type: ignore[no-untyped-def]
        if isinstance(word, Finish):
            word = msgspec.structs.replace(word, loads=())
        return super()._hear(word, now)


class CountsWhatIsHeldBack(TrainerMachine):
    """Takes what a loader has asked for as learned from."""

    def read_ahead(self, batches):  # type: ignore[no-untyped-def]
        return super().read_ahead(0)


def seen_by_the_simulator(
    mutant: type[TrainerMachine],
    scenario_of: Callable[[int], Scenario] = Scenario.of,
    soonest: int = 0,
) -> str:
    class Mutated(VirtualTrainer):
        machine_class = mutant

    class MutatedWorld(World):
        trainer_class = Mutated

    torch.set_num_threads(1)  # vectors of a dozen values: more threads only wait for each other
    for seed in (soonest, *range(200)):
        try:
            MutatedWorld(seed, scenario_of(seed)).run()
        except Broken as seen:
            return str(seen)
    return ""


def overlapping(seed: int) -> Scenario:
    """A calm run of a few rounds, whose trainers train on while these are in flight."""
    calm = dataclasses.replace(Scenario.of(seed), faults_until_s=0.0, rounds=3, min_peers=1, chunks=12)
    return dataclasses.replace(calm, schedule="overlap", overlap_steps=2)


def seen_in_play(machine: type[TrainerMachine], loader: Loader = PLAIN) -> str:
    draw = random.Random(1)
    for _ in range(400):
        rules = draw.choice(SCHEDULES)
        try:
            play(rules, [(draw.choice(HAPPENS), draw.randrange(3)) for _ in range(60)], machine, loader)
        except AssertionError as seen:
            return str(seen)
    return ""


# Who breaks what, and a seed that has been seen to show it: it is tried first.
MUTANTS = [
    (KeepsWhatWasMerged, "P7", 0),
    (GivesUpWhatWasNotMerged, "P6", 0),
    (CountsUsedStepsOn, "P6", 0),
    (RestoresNothing, ("P6", "P7"), 13),  # it owes what stands in the slot, or learns it again
    (LearnsTwice, "P7", 0),
    (PutsNothingBack, ("P6", "P7"), 0),  # the sums of its delta or its samples, whichever a seed meets first
    (ReadsNothingAgain, "P7", 0),
    (FreezesWhatIsInUse, "P6", 2),
    (HoldsBackForEver, "P3", 0),
]


@pytest.mark.mode("audits")
@pytest.mark.parametrize(("mutant", "promise", "soonest"), MUTANTS)
def test_the_simulator_sees_a_broken_rule_of_the_trainers_machine(
    mutant: type[TrainerMachine], promise: str | tuple[str, ...], soonest: int
) -> None:
    assert seen_by_the_simulator(mutant, soonest=soonest).startswith(promise)


@pytest.mark.mode("audits")
def test_the_simulator_sees_a_step_of_its_own_in_a_trainers_last_model() -> None:
    assert seen_by_the_simulator(KeepsItsLastSteps, overlapping, soonest=49).startswith("P1")


# An agent that is not sure whose a lease is hears it within a second: in 1,146 runs of five bad worlds the simulator
# saw nobody read too soon.
TOO_RARE = (ReadsWhatMayBeOthers,)


@pytest.mark.parametrize("mutant", [*(mutant for mutant, _, _ in MUTANTS), *TOO_RARE])
def test_so_does_the_play_with_a_truthful_agent(mutant: type[TrainerMachine]) -> None:
    assert seen_in_play(mutant)


def test_both_see_that_what_a_loader_holds_back_counts_as_learned_from() -> None:
    assert seen_by_the_simulator(CountsWhatIsHeldBack, Scenario.of_readers_ahead).startswith("P7")
    assert seen_in_play(CountsWhatIsHeldBack, Loader(ahead=1)).startswith("P7")


def test_the_play_finds_no_fault_with_the_machine_itself() -> None:
    assert not seen_in_play(TrainerMachine)
