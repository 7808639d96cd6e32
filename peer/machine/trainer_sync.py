"""Between the replicas and the trainer: what a new version, a failed round or a lost lease means for its work.  Pure.

Part of the peer machine.  For each fragment it holds the replica (what the run does with it) against the work (what
the trainer has of it), and decides when a trainer that waits may go on.
"""

from __future__ import annotations

from collections.abc import Set

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.peer.machine.checkpoint_policy import Undoing
from farflung.peer.machine.effects import Effect, Note, TellTrainer
from farflung.peer.machine.replica import Replica
from farflung.peer.machine.replicas import Replicas
from farflung.peer.machine.trainer_proxy import FragmentWork, TrainerProxy
from farflung.protocol.messages import FragmentTick, Tick
from farflung.protocol.states import Goal


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
        void = self.on_void(tuple(self._training.known_leases))
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
            return [*effects, *training.forget_leases(), told, *training.drop_work(fragment, version)]
        consumed = settled.consumed
        if consumed is not None:
            used = {used.lease: used.upto for used in consumed.frozen.used}
            effects += training.on_commit_used(fragment, used)
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
        if not self._training.known_leases & set(void):
            return []
        versions: dict[int, int] = {}
        for number, replica in self._part.replicas.items():
            replica.rounds.disown()
            versions[number] = replica.held.version if replica.held.whole else NO_VERSION
        return [*self.free_slots(), *self._training.on_void(void, versions)]

    # ---- a trainer that waits -------------------------------------------------------------------------------------

    def go_on_alone(self) -> list[Effect]:
        """P5: without the coordinator, or when it holds all rounds, inner steps go on."""
        return [*self.free_slots(), *self._training.resume()] if self._training.waiting else []

    def go_on(self) -> list[Effect]:
        """The trainer waits until every fragment's round is over; but not for rounds that are not on.

        Once it has loaded some fragment, another one for which there is no round (it failed, or too few peers were
        ready) keeps its frozen work for the next one.  To wait for that would let peers take turns in waiting for
        each other for ever.  A trainer whose schedule lets it train during rounds waits for none that is not on.
        """
        replicas = self._part.replicas.values()
        if not self._training.rules.waits:
            idle = {replica.fragment.number: replica.idle for replica in replicas}
            return [*self.free_slots(), *self._training.resume_where(idle)] if self._training.waiting else []
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
