"""P6 and P7 at the trainer's machine under any order of events, and proof that a broken rule of it would be seen."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_player import MODEL

from farflung.optim.schedule import Rules
from farflung.peer.local.words import (
    Frozen,
    LeasesNow,
    Load,
    Need,
    Opened,
    Resume,
    ToTrainer,
)
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.machine import WAITS, TrainerMachine
from farflung.protocol.messages import Lease

TOKENS = 10  # of each step

SCHEDULES = (
    Rules("blocking", 3, fragments=2),
    Rules("overlap", 3, fragments=2, overlap_steps=2),
    Rules("streaming", 4, fragments=3, overlap_steps=1),
    Rules("overlap", 2),
)

Samples = tuple[int, ...]


# ---- a truthful agent, and a model that is a list of the steps that are in it ---------------------------------------


class Pair:
    """The machine, a shell that writes down which samples are in each fragment's unmerged work, and a small agent."""

    def __init__(self, rules: Rules, machine: type[TrainerMachine] = TrainerMachine) -> None:
        self.rules, self.fragments = rules, range(rules.fragments)
        self.kind = machine
        self.now = 0.0
        self.leases: dict[int, Lease] = {}  # with what is committed of each
        self.next_lease = 0
        self.asked = False
        self.frozen: list[Frozen | None] = [None for _ in self.fragments]
        self.slots: dict[tuple[int, int], list[Samples]] = {}  # by (fragment, slot)
        self.committed: list[list[int]] = [[] for _ in self.fragments]
        self.versions = [0 for _ in self.fragments]
        self.start()

    def start(self) -> None:
        """A trainer begins: what stands frozen is its own."""
        self.machine = self.kind(self.rules, lease_samples=6, now=self.now)
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
                case do.Say(Need()):
                    self.asked = True
                case do.GoOn():
                    assert not self.machine.waits
        for account in self.machine.accounts:
            assert account.steps >= 0 and account.tokens >= 0

    def step(self) -> None:
        if self.machine.stand in WAITS:
            return
        for effect in self.wanted():
            if isinstance(effect, do.Read):
                span = effect.span
                self.machine.hand_out(span, 1)
                self.do(self.machine.before_step())
                for work in self.work:
                    work.append(tuple(range(span.start, span.stop)))
                self.now += 1.0
                self.do(self.machine.on_step(self.now, TOKENS))
                self.do(self.machine.on_heard(self.now))

    def wanted(self) -> list[do.Effect]:
        effects = self.machine.on_want(1000, 2, self.now)
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
        told = []
        for lease in self.leases.values():
            reached = list(lease.reached(len(self.fragments)))
            for fragment, frozen in enumerate(self.frozen):
                for used in frozen.used if frozen is not None else ():
                    reached[fragment] = max(reached[fragment], used.upto if used.lease == lease.lease else 0)
            if min(reached) < lease.stop or min(lease.reached(len(self.fragments))) < lease.stop:
                told.append(Lease.at(lease.lease, 0, lease.start, lease.stop, tuple(reached)))
        self.hear(LeasesNow(leases=tuple(told)))

    def load(self, fragment: int, keep: str) -> None:
        frozen = self.frozen[fragment] if keep in ("rest", "restore") else None
        numbers = (frozen.slot, frozen.tokens, frozen.steps) if frozen is not None else (0, 0, 0)
        stands = self.frozen[fragment] if keep != "rest" else None
        slot, tokens, steps = numbers
        spare = self.spare(stands)
        version = self.versions[fragment]
        self.hear(
            Load(
                version=version,
                keep=keep,
                slot=slot,
                tokens=tokens,
                steps=steps,
                spare=spare,
                fragment=fragment,
            )  # type: ignore[arg-type]
        )

    def spare(self, frozen: Frozen | None) -> int:
        return 0 if frozen is None else (frozen.slot + 1) % 3

    # ---- what may happen, by name

    def grant(self, fragment: int) -> None:
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
        self.frozen[fragment] = None

    def miss(self, fragment: int) -> None:
        """A commit was made without this peer."""
        self.versions[fragment] += 1
        self.load(fragment, "all")

    def fail(self, fragment: int) -> None:
        """A round failed, or none is to be."""
        self.hear(Resume(spare=self.spare(self.frozen[fragment]), fragment=fragment))

    def open(self, fragment: int) -> None:
        self.hear(Opened(hold=self.frozen[fragment] is not None and not self.rules.waits, fragment=fragment))

    def drop(self, fragment: int) -> None:
        self.frozen[fragment] = None
        self.tell_leases()
        self.load(fragment, "drop")

    def restart(self, fragment: int) -> None:
        self.start()

    def steps(self, fragment: int) -> None:
        for _ in range(fragment + 1):
            self.step()


HAPPENS = ("steps", "steps", "steps", "grant", "grant", "commit", "miss", "fail", "open", "drop", "restart")
EVENTS = st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 2)), max_size=60)


def play(rules: Rules, events: list[tuple[str, int]], machine: type[TrainerMachine] = TrainerMachine) -> None:
    pair = Pair(rules, machine)
    for name, fragment in events:
        getattr(pair, name)(fragment % rules.fragments)
        for account in pair.machine.accounts:
            # What came early is loaded later; all that the agent was told of stands frozen.
            frozen = pair.frozen[account.fragment] is not None or account.fragment in pair.machine._held
            assert frozen or not account.blocked, "blocked, and nothing of it is frozen"


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SCHEDULES), EVENTS)
def test_P6_P7_in_any_order_each_step_and_each_sample_is_counted_once_for_each_fragment(
    rules: Rules, events: list[tuple[str, int]]
) -> None:
    play(rules, events)
