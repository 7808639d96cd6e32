"""The simulator's trainer of one stage: the real machine in virtual time, on crossings and sums that can be read.

What crosses a border says through which states its microbatch has passed: version, microbatch, and of each stage a
mark of the very values that the trainer there had loaded.  What a stage adds to its sums is an exact 1 and the mark of
the microbatch, as in a batch trainer; the path of each one that is in them is kept beside them, and dropped with them.
What is computed, written and dropped is decided by the machine alone.  In mode "local" a step moves what is in the sums
to what is learned, and that alone is written: a microbatch that no step took is missing in its round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farflung.collectives.pipeline.crossing import border_after, pack, parse
from farflung.collectives.pipeline.effects import KeptPiece, micro_of
from farflung.collectives.round.effects import SendFrame
from farflung.compression.codec import codec_named
from farflung.peer.batches.effects import ForgetCrossings, HandOver, KeepCrossing, SendCrossing
from farflung.peer.local.words import Anew, Begin, Bye, MicrobatchWork, NeedSamples, ToTrainer
from farflung.peer.machine.effects import ModeEffect
from farflung.peer.pipeline.machines.stage_machine import NO_STAGE, StageMachine, local_steps_of
from farflung.peer.pipeline.machines.summing_machine import (
    Accumulate,
    BatchMachine,
    DropSums,
    LocalStep,
    StageWork,
    SumsEffect,
    WriteLearned,
    WriteSums,
)
from farflung.peer.trainer import effects as do
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Payload, with_payload
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.trainer import Learned, TrainerHost, TrainerSurroundings, VirtualPart, VirtualTrainer

# ---- batch trainer -----------------------------------------------------------------------------------------
# The simulator's trainer of synchronous batches: the real machine in virtual time, on sums that can be
# counted.
#
# Of each microbatch the first element of the sums grows by exactly 1 and the second by a mark that only this
# microbatch of this version has: what stands in a slot says who counted what. What is computed, written and
# dropped is decided by the machine alone.


HELD_OUT_MARK = 2048  # larger than any other: in a commit it would be seen
HELD_OUT_EPOCH = -1  # nobody learns from it


def mark_of(version: int, micro: int) -> int:
    return 1 + micro + 64 * (version % 16)


def held_out_loss(states: Sequence[int], micro: int) -> float:
    """Of these states alone, one of each stage: others have another loss."""
    return 2.0 + sum(states) % 997 / 997 + 0.1 * micro


def tokens_of(micro: int) -> int:
    """They differ, so that weights do."""
    return 8 + micro % 5


def is_poisoned(start: int, every: int) -> bool:
    """Nobody gets a gradient out of the microbatch that begins with this sample."""
    return every > 0 and start % every == every - 2


class VirtualBatchTrainer(VirtualTrainer):
    batch_machine: type[BatchMachine] = BatchMachine

    def __init__(
        self, host: TrainerHost, world: TrainerSurroundings, rules: object, poison_every: int = 0
    ) -> None:
        self._poison_every = poison_every
        self.host, self.world, self.alive = host, world, True
        manifest = host.manifest
        self.batches = self.batch_machine(manifest.pipeline.micro)
        self.parts = [VirtualPart(0, slice(0, host.anchor.numel()))]
        self._sums = torch.zeros_like(host.anchor)
        self._waiting: list[ToTrainer] = []  # that came while a microbatch was computed
        self._busy = False

    @property
    def waited_s(self) -> float:
        return 0.0

    def delta(self, part: VirtualPart) -> torch.Tensor:
        return self._sums

    def on_message(self, message: ToTrainer) -> None:
        if not self.alive:
            return
        if isinstance(message, Begin):
            samples, data = self.dataset_samples, self.fingerprint
            self._carry_out(self.batches.attach(self.host.model, 0, samples, data))
        elif self._busy:
            self._waiting.append(message)
        else:
            self._carry_out(self.batches.on_message(message))
            self._go_on()

    def _go_on(self) -> None:
        if not self.batches.finished:
            self._carry_out(self.batches.next())

    def _carry_out(self, effects: Sequence[SumsEffect]) -> None:
        for effect in effects:
            self._do(effect)

    def _do(self, effect: SumsEffect) -> None:
        match effect:
            case do.SayWord(word):
                self.host.from_trainer(word)
            case do.WriteAnchor():
                self.host.anchor.copy_(self.first_values())
                self.host.state.restart_moments()
            case do.LoadAnchor():
                self.world.observe("loaded", (self.host, self, effect))
            case DropSums():
                self._sums.zero_()
                self.parts[0].work.clear()
            case Accumulate():
                self._busy = True
                self.world.after(self.step_s(), lambda: self._computed(effect))
            case WriteSums(slot, tokens):
                self.host.slots[slot].copy_(self._sums / max(1, tokens))
                self.host.keep_work(slot, 0, (list(self.parts[0].work), 0.0))
            case do.RunOver(stopped):
                self.alive = not stopped
                if not stopped:
                    self.host.from_trainer(Bye(reason="finished"))
            case do.EndWithRefusal():
                self.alive = False
            case _:
                pass  # OpenShared, Warn, Wait: there is no memory to open, and nobody waits in virtual time

    def _computed(self, made: Accumulate) -> None:
        if not self.alive:
            return
        self._busy = False
        if is_poisoned(made.start, self._poison_every):
            self._carry_out(self.batches.on_unusable("its loss is nan"))
        else:
            self.accumulate(made)
            self.world.observe("step", self.host)
            loss = held_out_loss([state_of(self.host.anchor)], made.micro) if made.held_out else 1.0
            self._carry_out(self.batches.on_counted(tokens_of(made.micro), loss))
        waiting, self._waiting = self._waiting, []
        for word in waiting:
            if self.alive:
                self._carry_out(self.batches.on_message(word))
        if self.alive:
            self._go_on()

    def accumulate(self, made: Accumulate) -> None:
        self._sums += 0.25
        self._sums[0] += 0.75
        self._sums[1] += mark_of(made.version, made.micro) + HELD_OUT_MARK * made.held_out - 0.25
        epoch = HELD_OUT_EPOCH if made.held_out else made.epoch
        learned: Learned = tuple((epoch, place) for place in range(made.start, made.stop))
        self.parts[0].work.append(learned)


# ---- stage trainer -----------------------------------------------------------------------------------------

NOT_PASSED = -1
BACKWARD_UNITS = 2  # a backward pass takes so many times as long


@dataclass(frozen=True)
class PassedMicro:
    """The way of one microbatch, as what crosses a border says it; all numbers are exact in fp32."""

    version: int
    micro: int
    states: tuple[int, ...]  # of each stage; NOT_PASSED: it was not there

    def through(self, stage: int, state: int) -> PassedMicro:
        states = (*self.states[:stage], state, *self.states[stage + 1 :])
        return PassedMicro(self.version, self.micro, states)

    def values(self, samples: int) -> torch.Tensor:
        """One tensor, whose samples are all alike."""
        return torch.tensor([self.version, self.micro, *self.states], dtype=torch.float32).repeat(samples)

    @staticmethod
    def of(values: torch.Tensor, stages: int) -> PassedMicro:
        version, micro, *states = (int(value) for value in values[: stages + 2])
        return PassedMicro(version, micro, tuple(states))


def state_of(values: torch.Tensor) -> int:
    """A mark of a stage's values."""
    return int.from_bytes(hash_bytes(values.numpy().tobytes())[:3], "little") >> 1


class VirtualStageTrainer(VirtualBatchTrainer):
    stage_machine: type[StageMachine] = StageMachine

    def __init__(
        self, host: TrainerHost, world: TrainerSurroundings, rules: object, poison_every: int = 0
    ) -> None:
        super().__init__(host, world, rules, poison_every)
        self.works = self.stage_machine(local_steps_of(host.manifest))
        self._stages = len(host.model.stages)
        rules = host.manifest.pipeline
        lengths = lambda codec, elements: codec_named(codec).payload_bytes(elements)  # noqa: E731
        self._border = border_after(0, host.model, rules, lengths)  # all are alike
        self._state = NOT_PASSED
        self.paths: dict[
            int, PassedMicro
        ] = {}  # of each microbatch in the sums, or taken out of them by a step
        self._learned, self._learned_tokens = torch.zeros_like(self._sums), 0  # by steps since the load

    def delta(self, part: VirtualPart) -> torch.Tensor:
        return self._sums + self._learned

    def on_message(self, message: ToTrainer) -> None:
        if not self.alive:
            return
        if self._busy:
            self._waiting.append(message)
        else:
            self._hear(message)
            self._go_on()

    def _hear(self, message: ToTrainer) -> None:
        if isinstance(message, Begin | Anew):  # `Begin` may be told twice; a stage is built once
            if self.works.stage != NO_STAGE and isinstance(message, Begin):
                return
            self.works = self.stage_machine(local_steps_of(self.host.manifest))
            self.paths.clear()
            need = NeedSamples(samples=self.dataset_samples, want=0, data=self.fingerprint)
            largest = max(self._border.most_bytes(backwards) for backwards in (False, True))
            self._carry_out(self.works.attach(self.host.model, 0, self.host.offers, largest, need))
        else:
            self._carry_out(self.works.on_message(message))

    def _go_on(self) -> None:
        if not self.works.finished and not self._busy:
            self._carry_out(self.works.next())

    def _do(self, effect: SumsEffect) -> None:
        match effect:
            case StageWork(word):
                self._busy = True
                units = BACKWARD_UNITS if word.way == "backward" else 1
                self.world.after(
                    self.host.pace * units * self.world.delay("unit"), lambda: self._worked(word)
                )
            case do.OpenShared():
                self._sums, self._learned = (torch.zeros_like(self.host.anchor) for _ in range(2))
            case do.LoadAnchor():
                values = self.host.state.part(self.host.anchor, self.works.stage)
                self._state = state_of(values)
                super()._do(effect)
            case DropSums():
                self.paths.clear()
                self._learned_tokens = 0
                self._learned.zero_()
                super()._do(effect)
            case LocalStep(tokens=tokens):
                self._learned += self._sums
                self._learned_tokens += tokens
                self._sums.zero_()
            case WriteLearned(slot):
                self.host.slots[slot].copy_(self._learned / max(1, self._learned_tokens))
                self._keep(slot)
            case WriteSums(slot, _):
                super()._do(effect)
                self._keep(slot)
            case _:
                super()._do(effect)

    def _keep(self, slot: int) -> None:
        """Beside what is written, what it is made of."""
        self.host.keep_work(slot, 0, (list(self.parts[0].work), 0.0))
        self.host.keep_paths(slot, dict(self.paths))

    def _worked(self, hand: MicrobatchWork) -> None:
        if not self.alive:
            return
        self._busy = False
        last = self.works.stage == self._stages - 1
        if last and is_poisoned(hand.start, self._poison_every):
            self._carry_out(self.works.on_unusable("its loss is nan"))
        else:
            self._carry_out(self._made(hand))
        waiting, self._waiting = self._waiting, []
        for word in waiting:
            if self.alive:
                self._hear(word)
        if self.alive:
            self._go_on()

    def _made(self, hand: MicrobatchWork) -> list[SumsEffect]:
        stage, belt = self.works.stage, self.host.belt
        nowhere = PassedMicro(hand.version, hand.micro, (NOT_PASSED,) * self._stages)
        given = self._taken(hand, 0, hand.given_bytes) if stage else nowhere
        if hand.way == "backward":
            returned = self._taken(hand, 1, hand.returned_bytes)
            self.world.observe("returned", (self.host, stage, self._state, given, returned))
            given = returned
        path = given.through(stage, self._state)
        backwards = hand.way != "forward"
        made = b"" if stage == 0 and backwards else self._crossing(hand, path, backwards)
        belt[3 * hand.place + 2] = made
        if backwards:
            self._add(hand, path)
            self.world.observe("step", self.host)
        loss = held_out_loss(path.states, hand.micro) if hand.held_out and hand.way == "both" else 1.0
        return self.works.on_made(len(made), tokens_of(hand.micro), loss)

    def _crossing(self, hand: MicrobatchWork, path: PassedMicro, backwards: bool) -> bytes:
        samples = hand.stop - hand.start
        data = codec_named(self._border.codec).encode(path.values(samples))
        return pack(self._border, backwards, samples, tokens_of(hand.micro), [data])

    def _taken(self, hand: MicrobatchWork, slot: int, size_bytes: int) -> PassedMicro:
        """What lies in a slot of the belt, as a crossing of this very microbatch."""
        raw = self.host.belt[3 * hand.place + slot][:size_bytes]
        [piece] = parse(self._border, backwards=slot == 1, payload=raw).pieces
        values = codec_named(piece.codec).decode(piece.data, math.prod(piece.dims))
        passed = PassedMicro.of(values, self._stages)
        self.world.observe("taken", (self.host, hand, passed))
        return passed

    def _add(self, hand: MicrobatchWork, path: PassedMicro) -> None:
        self._sums += 0.25
        self._sums[0] += 0.75
        self._sums[1] += mark_of(hand.version, hand.micro) + HELD_OUT_MARK * hand.held_out - 0.25
        self.paths[hand.micro] = path
        # The samples are read at the source; what a stage learns from is the whole microbatch all the same.
        epoch = HELD_OUT_EPOCH if hand.held_out else hand.epoch
        learned: Learned = tuple((epoch, place) for place in range(hand.start, hand.stop))
        self.parts[0].work.append(learned)


# ---- virtual crossings -------------------------------------------------------------------------------------
# A simulated peer's hand for crossings: what peer/crossings is for the agent, in memory and told to the
# invariants.
#
# Held by a `VirtualPeer` of a run whose model is cut into stages, and by no other.


class VirtualCrossings:
    def __init__(self, peer: VirtualPeer) -> None:
        self._peer, self._world = peer, peer.world
        # By version and microbatch; with the seat for which it is kept.
        self._kept: dict[tuple[int, int, KeptPiece], tuple[int, Payload]] = {}

    def carry_out(self, effect: ModeEffect) -> None:
        peer = self._peer
        match effect:
            case KeepCrossing(version=version, micro=micro, piece=piece, payload=payload):
                self._kept[version, micro, piece] = (peer.seat, payload)
            case ForgetCrossings(version=version):
                seats = {seat for key, (seat, _) in self._kept.items() if key[0] <= version}
                self._world.observe("forgotten", (peer, version, seats))
                self._kept = {key: kept for key, kept in self._kept.items() if key[0] > version}
            case SendCrossing(to=to, header=header, piece=piece):
                payload = self._get(header.version, micro_of(header), piece)
                self._world.to_peer(peer.peer, SendFrame(to, with_payload(header, payload)))
            case HandOver():
                self._hand_over(effect)
            case _:
                raise TypeError(f"no hand for {type(effect).__name__}")

    def _hand_over(self, effect: HandOver) -> None:
        hand, peer = effect.hand, self._peer
        self._world.observe("handed", (peer, hand))
        for slot, piece, size in (
            (0, KeptPiece.INPUT, hand.given_bytes),
            (1, KeptPiece.RETURNED, hand.returned_bytes),
        ):
            if size:
                peer.belt[3 * hand.place + slot] = bytes(self._get(hand.version, hand.micro, piece))
        peer.to_trainer(hand)

    def clear(self) -> None:
        """The stage that was held is given up."""
        self._kept.clear()

    def _get(self, version: int, micro: int, piece: KeptPiece) -> Payload:
        kept = self._kept.get((version, micro, piece))
        if kept is None:
            self._world.observe("lacked", (self._peer, version, micro, piece))
            raise RuntimeError(f"{self._peer.peer} has not kept {piece} of {micro}")
        return kept[1]
