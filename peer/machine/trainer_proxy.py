"""The agent's view of its trainer: what is loaded, what is frozen, which data is leased.  Pure.

Part of the peer machine.  It decides when the trainer loads a new anchor and how much of its own work it
keeps (P6), when it goes on without the network (P5), and which samples it may use (P7: `LeasesHeld`).  What
concerns one fragment is in `FragmentWork`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import msgspec

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.optim.schedule import ScheduleRules
from farflung.peer.local.words import (
    Finish,
    Frozen,
    Keep,
    LeasesNow,
    LoadState,
    NeedSamples,
    ResumeSteps,
    RoundOpened,
)
from farflung.peer.machine.checkpoint_policy import Undoing
from farflung.peer.machine.effects import Effect, Note, TellTrainer
from farflung.peer.machine.replicas import Replica, Replicas
from farflung.protocol.messages import FragmentTick, Lease, Tick
from farflung.protocol.round_words import Forward, Used
from farflung.protocol.states import Goal

DONE_KEPT = 1024
BLOCKING = ScheduleRules("blocking", period_steps=1)


class TrainerProxy:
    stays_for_round = (
        False  # what it has made is of no use later: a peer that leaves stays for the round of it
    )

    def __init__(self, rules: ScheduleRules = BLOCKING, held: Iterable[int] | None = None) -> None:
        """`held`: fragments; None: all of them."""
        self.rules = rules
        numbers = range(rules.fragments) if held is None else held
        self.works = {number: FragmentWork(number) for number in numbers}  # by fragment
        self.attached = False
        self.moved_on = False  # some fragment was loaded since the last freeze
        self.leases = LeasesHeld(self.works, lambda: self.attached)
        # What its model computes, at the newest version of which it said so.
        self.forward: Forward | None = None
        self.away = False  # it does something for a mode instead
        self._finish_told = False

    # ---- the trainer comes and goes -----------------------------------------------------------------------

    def on_attach(self) -> None:
        self.attached = True
        self._finish_told = self.away = False
        self.leases.want = 0
        for work in self.works.values():
            work.on_gone()

    def on_gone(self) -> None:
        self.attached = False
        for work in self.works.values():
            work.on_gone()

    @property
    def loading(self) -> bool:
        return any(work.loading for work in self.works.values())

    @property
    def waiting(self) -> bool:
        """At the barrier: some frozen work has not been answered yet."""
        return self.attached and any(work.waiting for work in self.works.values())

    @property
    def waits_for_round(self) -> bool:
        """It takes no steps because of that."""
        return self.waiting

    @property
    def owes(self) -> bool:
        """Others count on what it has made, and it is in no round yet."""
        return False

    @property
    def stepping(self) -> bool:
        """It is to load what it was told to, or to take inner steps: it waits neither for a round nor for data."""
        busy = self.attached and not self.waiting and not self.leases.want and not self.away
        return busy and all(not work.fresh for work in self.works.values())

    def offered(self, fragment: int) -> Frozen | None:
        """What a round of the fragment may use."""
        return None if self.leases.in_doubt else self.works[fragment].frozen

    # ---- loading ------------------------------------------------------------------------------------------

    def load(self, fragment: int, version: int, consumed: Frozen | None) -> list[Effect]:
        """The anchor is at a new version (or the trainer is fresh).  `consumed`: what a commit used."""
        work = self.works[fragment]
        if consumed is not None:
            work.frozen = None
        return self._tell_load(work.load(version, consumed)) if self.attached else []

    def drop_work(self, fragment: int, version: int) -> list[Effect]:
        """The unmerged work of a fragment goes: it was not finite, or nobody knows whether it was used."""
        self.works[fragment].frozen = None
        return self._tell_load(self.works[fragment].drop(version)) if self.attached else []

    def on_void(self, void: tuple[int, ...], versions: Mapping[int, int]) -> list[Effect]:
        """Samples that I took for mine were given to somebody else: the work behind them goes, in all fragments."""
        return self._drop_all(versions) if self.leases.on_void(set(void)) else []

    def _drop_all(self, versions: Mapping[int, int]) -> list[Effect]:
        """`versions`: of each fragment; where none is here, the next load will be a first one."""
        effects: list[Effect] = []
        for fragment, version in versions.items():
            if version == NO_VERSION:
                self.works[fragment].forget()
            else:
                effects += self.drop_work(fragment, version)
        return effects

    def _tell_load(self, load: LoadState) -> list[Effect]:
        self.moved_on = True
        # A trainer that starts from the anchor or from a slot must know where to go on reading.
        restarts = load.keep in ("drop", "restore")
        return [*(self.leases.tell() if restarts else []), TellTrainer(load)]

    def on_loaded(self, fragment: int) -> None:
        self.works[fragment].on_loaded()

    # ---- freezing -----------------------------------------------------------------------------------------

    def on_frozen(self, frozen: Frozen) -> None:
        self.moved_on = False
        news = tuple(used for used in frozen.used if not self.leases.is_committed(frozen.fragment, used))
        self.works[frozen.fragment].on_frozen(msgspec.structs.replace(frozen, used=news))

    def on_unusable(self) -> None:
        """What stands frozen is not finite."""

    def resume(self, fragments: Iterable[int]) -> list[Effect]:
        """Each of them whose trainer waits for a word goes on."""
        works = [self.works[number] for number in fragments if self.attached]
        return [TellTrainer(work.resume()) for work in works if work.waiting]

    def on_opened(self, fragment: int, uses: bool) -> list[Effect]:
        """A round of the fragment began; `uses`: what stands frozen goes into it."""
        if not (self.attached and self.rules.told_of_rounds):
            return []
        return [TellTrainer(self.works[fragment].opened(uses and not self.rules.waits))]

    def finish(self, versions: Mapping[int, int]) -> list[Effect]:
        if not self.attached or self.loading or self._finish_told:
            return []
        self._finish_told = True
        # The script's model is then the run's, without the steps that no round will use any more.
        drops = [effect.message for effect in self._drop_all(versions) if isinstance(effect, TellTrainer)]
        loads = tuple(word for word in drops if isinstance(word, LoadState))
        return [TellTrainer(Finish(version=min(versions.values()), loads=loads))]

    def on_computed(self, forward: Forward) -> bool:
        """Said before it loads what it is told to by now, it may be of another era.  Whether it is the first."""
        is_first = self.forward is None
        if not self.loading:
            self.forward = forward
        return is_first and not self.loading

    def on_told(self, now: float) -> None:
        """A beat has said all this."""


# ---- leases ------------------------------------------------------------------------------------------------


class LeasesHeld:
    """Which samples the trainer may use, and how far each fragment's work on them is committed (P7)."""

    def __init__(self, works: Mapping[int, FragmentWork], listens: Callable[[], bool]) -> None:
        """`listens`: a trainer is there."""
        self._works, self._listens = works, listens
        self.held: dict[int, Lease] = {}
        self.samples = 0
        self.data = b""  # the fingerprint of the data set
        self.want = 0
        self.unsure = False  # nobody here knows how far the leases are acknowledged: the coordinator is asked
        # Leases that were forgotten though other fragments may owe work on them: the coordinator says which are void.
        self._doubtful: set[int] = set()
        # Leases that every fragment has learned from to their end.
        self._done: deque[int] = deque(maxlen=DONE_KEPT)

    def on_need(self, need: NeedSamples) -> list[Effect]:
        self.samples, self.want, self.data = need.samples, need.want, need.data
        return self._cut_off()

    def _cut_off(self) -> list[Effect]:
        """What is leased beyond the end of this peer's data is for others: the coordinator cuts it as well, as soon
        as a beat says the same."""
        cut = {i: _cut(lease, self.samples) for i, lease in self.held.items() if lease.stop > self.samples}
        if not self.samples or not cut:
            return []
        self.held |= cut
        for lease_id, lease in cut.items():
            if min(lease.reached(len(self._works))) >= lease.stop:
                del self.held[lease_id]
                self._done.append(lease_id)
        return self.tell()

    def on_told(self, leases: tuple[Lease, ...]) -> list[Effect]:
        """The coordinator's list of all that is leased to me.

        A lease that is not in it any more stays until a commit acknowledges it or the coordinator voids it: work
        behind it may be unmerged, and only `on_void` knows that this work must go.
        """
        fresh = {lease.lease: lease for lease in leases if lease.lease not in self.held}
        if not (fresh or self.unsure):
            return []
        self.unsure = False
        self.want = max(0, self.want - sum(lease.stop - lease.upto for lease in fresh.values()))
        self.held |= fresh
        self._doubtful -= self.held.keys()
        return self._cut_off() or self.tell()

    def forget(self) -> list[Effect]:
        """Nobody here knows how far they were acknowledged: the coordinator tells them again, as they are now."""
        if len(self._works) > 1:
            self._doubtful |= self.held.keys()
        self.held.clear()
        self.unsure = True
        return self.tell()

    def on_commit(self, fragment: int, used: dict[int, int]) -> list[Effect]:
        """A commit acknowledged my samples for this fragment: the trainer must not name them again."""
        for lease_id, upto in used.items():
            lease = self.held.get(lease_id)
            if lease is not None:
                uptos = list(lease.reached(len(self._works)))
                uptos[fragment] = max(uptos[fragment], upto)
                self.held[lease_id] = _moved(lease, uptos)
                if min(uptos) >= lease.stop:
                    del self.held[lease_id]
                    self._done.append(lease_id)
        return self.tell() if used and not self._works[fragment].fresh else []

    def on_void(self, void: Set[int]) -> bool:
        """False: I knew of none of them."""
        mine = self.known & void
        for lease_id in mine:
            self.held.pop(lease_id, None)
        self._doubtful -= mine
        return bool(mine)

    @property
    def in_doubt(self) -> bool:
        """Samples behind unmerged work may be somebody else's by now.  A trainer that has read them to the end names
        them no more, so that the coordinator could not see that it must not take that work."""
        return bool(self._doubtful)

    @property
    def known(self) -> set[int]:
        """Leases that I think are mine, and those behind work that stands frozen or may be owed."""
        return (
            self.held.keys()
            | self._doubtful
            | {u.lease for work in self._works.values() for u in _used(work)}
        )

    def tell(self) -> list[Effect]:
        """Where each fragment's work goes on: behind what is committed, and behind what stands frozen."""
        if not self._listens():
            return []
        frozen = [{used.lease: used.upto for used in _used(work)} for work in self._works.values()]
        told = []
        for _, lease in sorted(self.held.items()):
            reached = lease.reached(len(self._works))
            uptos = [max(upto, by.get(lease.lease, 0)) for upto, by in zip(reached, frozen, strict=True)]
            told.append(_moved(lease, uptos))
        return [TellTrainer(LeasesNow(leases=tuple(told), unsure=self.unsure))]

    def is_committed(self, fragment: int, used: Used) -> bool:
        """A trainer that was restarted, or has not heard of the last commit yet, names it all the same."""
        lease = self.held.get(used.lease)
        known = lease is not None and lease.reached(len(self._works))[fragment] >= used.upto
        return known or used.lease in self._done


def _used(work: FragmentWork) -> tuple[Used, ...]:
    return work.frozen.used if work.frozen is not None else ()


def _cut(lease: Lease, samples: int) -> Lease:
    stop = max(lease.start, min(lease.stop, samples))
    return msgspec.structs.replace(
        lease, stop=stop, upto=min(lease.upto, stop), uptos=tuple(min(upto, stop) for upto in lease.uptos)
    )


def _moved(lease: Lease, uptos: Sequence[int]) -> Lease:
    return Lease.at(lease.lease, lease.epoch, lease.start, lease.stop, tuple(uptos))


# ---- one fragment at the trainer ----------------------------------------------------------------------


class FragmentWork:
    def __init__(self, fragment: int) -> None:
        self.fragment = fragment
        self.fresh = True  # the trainer has loaded nothing since it attached
        self.running = False  # taking inner steps, not waiting at the barrier for this fragment
        self.frozen: Frozen | None = None  # unmerged work that stands in a slot
        # The slot that a round is using, until its commit or abort is known.
        self._sent_slot: int | None = None
        self._loads = 0  # told and not yet answered
        self._is_forgotten = False  # what the trainer has of it, until it loads something in its place

    @property
    def loading(self) -> bool:
        """The trainer may be reading the anchor: it must not be written."""
        return self._loads > 0

    @property
    def waiting(self) -> bool:
        """The trainer must be told how to go on: it stands at the barrier for this fragment, or will at its next
        freeze."""
        return self.frozen is not None and not self.running and not self.loading

    def on_slot_sent(self, slot: int | None) -> None:
        """None: no round is using one."""
        self._sent_slot = slot

    def on_gone(self) -> None:
        """It died.  Work that stands in a slot is still good; the rest died with it."""
        self.running, self._loads = False, 0
        self.fresh = True

    def forget(self) -> None:
        """Nothing is kept: the next load is a first one."""
        self.frozen, self.fresh, self._is_forgotten = None, True, True

    def load(self, version: int, consumed: Frozen | None) -> LoadState:
        """The anchor is at a new version (or the trainer is fresh).  `consumed`: what a commit used."""
        if self.fresh:
            return self._load(version, "restore" if self.frozen is not None else "drop", self.frozen)
        return self._load(version, "all" if consumed is None else "rest", consumed)

    def drop(self, version: int) -> LoadState:
        self.frozen = None
        return self._load(version, "drop", None)

    def _load(self, version: int, keep: Keep, work: Frozen | None) -> LoadState:
        """`work`: what a commit used (rest), or what the trainer takes as its own (restore)."""
        self.fresh, self.running, self._is_forgotten = False, True, False
        self._loads += 1
        return LoadState(
            version=version,
            keep=keep,
            slot=work.slot if work else 0,
            tokens=work.tokens if work else 0,
            steps=work.steps if work else 0,
            spare=self.spare,
            fragment=self.fragment,
        )

    def on_loaded(self) -> None:
        self._loads = max(0, self._loads - 1)  # one of a trainer that is gone may still come

    def on_frozen(self, frozen: Frozen) -> None:
        if self.loading or self._is_forgotten:
            # It crossed the Load.  What it speaks of may be merged or dropped by now, and its slot may be the one
            # that the Load names as spare.  The trainer goes on, and its next freeze holds all that it still owes.
            # Or its work was forgotten, while no state was here to load in its place: that load is still to come.
            return
        self.frozen = frozen
        self.running = False

    def resume(self) -> ResumeSteps:
        self.running = True
        return ResumeSteps(spare=self.spare, fragment=self.fragment)

    def opened(self, hold: bool) -> RoundOpened:
        """`hold`: the round uses what stands frozen, and the trainer, which goes on, is not to freeze again before it
        knows the end."""
        self.running = self.running and not hold
        return RoundOpened(fragment=self.fragment, hold=hold)

    @property
    def spare(self) -> int:
        """A slot that holds neither the newest frozen work nor what a round is using."""
        taken = {self._sent_slot, self.frozen.slot if self.frozen is not None else None}
        return min({0, 1, 2} - taken)


# ---- is the trainer alive, or only its process? -------------------------------------------------------
#
# Asked by the agent at every tick.
# A trainer that should be taking inner steps and takes none for long is stuck: a deadlock, a GPU that
# hangs, a process that was stopped. How long is long follows from what its steps have taken so far; the
# first one may have to compile the model. A trainer that waits for a round or for data is not judged.


FIRST_S = 900.0  # for the first step
LEAST_S = 120.0  # for any other: an evaluation or a checkpoint of the script's own takes a while
TIMES_LONGEST = 10.0  # what the longest pause between two steps so far is multiplied by


class Pulse:
    def __init__(self, patience_s: float | None = None) -> None:
        """`patience_s`: said by the volunteer; None: as above."""
        self._patience_s = patience_s
        self._step: int | None = None
        self._moved_at: float | None = None  # None: it was not to take steps when it was looked at last
        self._longest_s = 0.0
        self._has_stepped = False

    def check_stuck(self, now: float, step: int, running: bool) -> bool:
        """True while it is stuck.  `running`: it is to take inner steps and has what it needs for them."""
        if not running:
            self._moved_at = None
        elif self._moved_at is None:
            self._moved_at = now
        elif step != self._step:
            if self._has_stepped:
                self._longest_s = max(self._longest_s, now - self._moved_at)
            self._moved_at, self._has_stepped = now, True
        self._step = step
        return self._moved_at is not None and now - self._moved_at >= self.patience_s

    @property
    def patience_s(self) -> float:
        if self._patience_s is not None:
            return self._patience_s
        return max(LEAST_S, TIMES_LONGEST * self._longest_s) if self._has_stepped else FIRST_S

    def on_new_trainer(self) -> None:
        self._moved_at, self._has_stepped, self._step = None, False, None


# ---- trainer sync ------------------------------------------------------------------------------------------
# Between the replicas and the trainer: what a new version, a failed round or a lost lease means for its work.
# Pure.
#
# Part of the peer machine. For each fragment it holds the replica (what the run does with it) against the
# work (what the trainer has of it), and decides when a trainer that waits may go on.


class TrainerSync:
    def __init__(self, part: Replicas, training: TrainerProxy) -> None:
        self._part = part
        self._training = training

    @property
    def _pairs(self) -> list[tuple[Replica, FragmentWork]]:
        return [(replica, self._training.works[number]) for number, replica in self._part.replicas.items()]

    def free_slots(self) -> list[Effect]:
        """Before the trainer is told where to freeze next: settle what is over, and name the slots still in use."""
        effects: list[Effect] = []
        for replica, work in self._pairs:
            effects += replica.rounds.take_resolved()
            work.on_slot_sent(replica.rounds.sent_slot)
            leaves = replica.rounds.ahead.is_mine and replica.rounds.ahead.frozen is not None
            if leaves and work.waiting and self._training.attached:
                effects.append(TellTrainer(work.resume()))
        return effects

    # ---- the trainer comes, founds, finishes --------------------------------------------------------------------

    def on_attach(self) -> list[Effect]:
        self._training.on_attach()
        effects = self.free_slots()
        for replica in self._part.replicas.values():
            if replica.held.whole:
                effects += self._training.load(replica.fragment.number, replica.held.version, None)
        return effects

    def on_provided(self) -> list[Effect]:
        """The trainer has written its model's values into the anchor."""
        effects: list[Effect] = []
        for replica, work in self._pairs:
            work.forget()
            effects += replica.found()
        return effects

    def on_restored(
        self, version: int, fragments: Set[int], how: str = "read the checkpoint of"
    ) -> list[Effect]:
        """The state of these fragments is that of a checkpoint, or of before the last round."""
        part = "" if fragments >= self._part.replicas.keys() else f", fragment {_and(fragments)} alone"
        effects: list[Effect] = [Note(f"{how} version {version}{part}")]
        for replica, work in self._pairs:
            if replica.fragment.number in fragments:
                work.forget()
                effects += replica.filled(version)
        return effects

    def go_back(
        self, ticks: tuple[FragmentTick, ...], because: str, undoing: Undoing, era: int
    ) -> list[Effect]:
        """The run is at another version again: a peer that holds exactly that keeps it, and its work on samples of its
        own; one that has made one version more of it goes back by that."""
        # Not to who has just come.
        news = any(replica.held.version != NO_VERSION for replica in self._part.replicas.values())
        back: dict[int, int] = {}
        for replica, tick in self._part.words(ticks):
            if replica.go_back(tick.version, dict(tick.digests).get(tick.version)):
                back[replica.fragment.number] = tick.version
        for number in undoing.begin(back, era):
            self._part.replicas[number].unfilled(touched=False)
        versions = ", ".join(str(tick.version) for tick in ticks)
        told = Note(f"a new era of the run begins at version {versions}: {because}")
        # No lease from before counts any more: their samples are lent again, to anybody.
        void = self.on_void(tuple(self._training.leases.known))
        return [*([told] if news else []), *self.free_slots(), *void]

    def is_complete(self, ticks: tuple[FragmentTick, ...]) -> bool:
        """Every fragment is here as the run has it."""
        return all(
            replica.held.version == tick.version and not replica.held.sealing
            for replica, tick in self._part.words(ticks)
        )

    def finish(self) -> list[Effect]:
        return self._training.finish(
            {number: replica.held.version for number, replica in self._part.replicas.items()}
        )

    # ---- what becomes of its work --------------------------------------------------------------------------------

    def on_sealed(self, fragment: int, version: int, digest: bytes) -> list[Effect]:
        replica, training = self._part.replicas[fragment], self._training
        settled = replica.on_sealed(version, digest)
        effects = self.free_slots()
        if settled is None:
            return effects  # it turned out not to be the run's
        if settled.lost_track:
            told = Note("away for too long to know whether my last contribution counted: it is dropped")
            return [*effects, *training.leases.forget(), told, *training.drop_work(fragment, version)]
        consumed = settled.consumed
        if consumed is not None:
            used = {used.lease: used.upto for used in consumed.frozen.used}
            effects += training.leases.on_commit(fragment, used)
        taken = consumed.frozen if consumed is not None and not consumed.disowned else None
        return effects + training.load(fragment, version, taken)

    def on_unusable(self, replica: Replica) -> list[Effect]:
        """What stands frozen is not finite: the fragment starts again from the anchor."""
        replica.rounds.on_unusable()
        self._training.on_unusable()
        return [*self.free_slots(), *self._training.drop_work(replica.fragment.number, replica.held.version)]

    def on_tick(self, tick: Tick) -> list[Effect]:
        """Where the run is: what that means for the trainer's work."""
        effects = self.free_slots()
        for replica, word in self._part.words(tick.fragments):
            if replica.rounds.on_guard(word.dropped):
                effects += self._start_again(replica, word.dropped)
        if tick.goal == Goal.ALONE and all(replica.idle for replica in self._part.replicas.values()):
            effects += self.go_on_alone()
        return effects + self.on_void(tick.void)

    def tell_work(self, now: float) -> list[Effect]:
        """What the trainer is to do, where it does not find that out itself."""
        return []

    def _start_again(self, replica: Replica, round_no: int) -> list[Effect]:
        """The guard did not take the update of a round that I was in: its work must not come again."""
        number, version = replica.fragment.number, replica.held.version
        told = Note(f"round {round_no} made an update of unusual size; restored version {version}")
        replica.rounds.disown()
        if replica.held.whole:
            return [told, *self.free_slots(), *self._training.drop_work(number, version)]
        self._training.works[number].forget()
        return [told]

    def on_void(self, void: tuple[int, ...]) -> list[Effect]:
        """Samples behind the work were given to somebody else."""
        if not self._training.leases.known & set(void):
            return []
        versions: dict[int, int] = {}
        for number, replica in self._part.replicas.items():
            replica.rounds.disown()
            versions[number] = replica.held.version if replica.held.whole else NO_VERSION
        return [*self.free_slots(), *self._training.on_void(void, versions)]

    # ---- a trainer that waits -------------------------------------------------------------------------------------

    def go_on_alone(self) -> list[Effect]:
        """P5: without the coordinator, or when it holds all rounds, inner steps go on."""
        training = self._training
        return [*self.free_slots(), *training.resume(training.works)] if training.waiting else []

    def go_on(self) -> list[Effect]:
        """The trainer waits until every fragment's round is over; but not for rounds that are not on.

        Once it has loaded some fragment, another one for which there is no round (it failed, or too few peers were
        ready) keeps its frozen work for the next one.  To wait for that would let peers take turns in waiting for
        each other for ever.  A trainer whose schedule lets it train during rounds waits for none that is not on.
        """
        replicas = self._part.replicas.values()
        if not self._training.rules.waits:
            idle = [replica.fragment.number for replica in replicas if replica.idle]
            return [*self.free_slots(), *self._training.resume(idle)] if self._training.waiting else []
        if not (self._training.moved_on and self._training.waiting):
            return []
        return self.go_on_alone() if all(replica.idle for replica in replicas) else []

    def send_ahead(self) -> list[Effect]:
        """Where my line is slow, what stands frozen leaves before its round begins, and my trainer goes on."""
        effects: list[Effect] = []
        for replica, work in self._pairs:
            begun = replica.rounds.ahead.keep_going(work.frozen) if replica.rounds.is_idle else []
            effects += [*replica.rounds.take_resolved(), *begun] if begun else []
            work.on_slot_sent(replica.rounds.sent_slot)
        return effects


def _and(fragments: Set[int]) -> str:
    return ", ".join(str(number) for number in sorted(fragments))
