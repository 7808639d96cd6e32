"""The promises of pipelines as checks on a simulated run: P2, P7, P11 to P17 and P20 where a model is cut into stages.

Fed like the other invariants, of which it is a kind.  Who counted what, and at which states, is read off the crossings
and the sums themselves (stage_trainer.py), whatever any machine says of them.

P2, P13  all stages go on to the next version by one record, or none does, and nobody rolls before
P7, P11  every microbatch of a batch is once in the sums of every stage
P12      what stands behind a commit was made at one version of the run's state in every stage that it passed
P14      nothing is computed again but for a seat that is gone; in calm, nothing.  So of the seats that are here only
         one is ever handed a microbatch, whoever gave it back and whoever got it then (R6)
P15      what waits at a seat never exceeds the room that was given, and no honest frame is refused for room
P16      what crosses is kept until its batch is committed
P17      a seat is given once, to one peer that holds its stage, and a peer has one seat; who moves has none, leaves
         enough seats behind it, and is the only one within three looks
P20      the stages go back together, so what is lost of one is given up in all: but of one of them it must be lost
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from farflung.collectives.pipeline.effects import KeptPiece
from farflung.collectives.round.effects import Seal
from farflung.coordinator.batches.batch_book import (
    BatchBegun,
    BatchBook,
    HeldOutEnded,
    MicroSkipped,
    Moving,
    Seated,
    Unseated,
)
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import (
    CommittedBatch,
    CommittedRound,
    DataFixed,
    Genesis,
    Record,
    RolledBack,
    tag_of,
)
from farflung.peer.batches.batches import StageBatches
from farflung.peer.batches.stage_transfers import StageTransfers
from farflung.peer.local.words import MicrobatchWork
from farflung.peer.machine.effects import Encode
from farflung.peer.machine.member_session import MemberSession
from farflung.peer.trainer.effects import LoadAnchor
from farflung.protocol.digests import bits, mask_from_bytes
from farflung.protocol.frames import Payload
from farflung.protocol.manifest import Manifest
from farflung.protocol.mode_words import BatchTick
from farflung.protocol.round_words import Commit, section
from farflung.simulator.batches.stage_trainer import (
    PassedMicro,
    VirtualStageTrainer,
    held_out_loss,
    mark_of,
    state_of,
)
from farflung.simulator.invariants import Contributed, Invariants
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.trainer import Sample, VirtualTrainer

# ---- batch invariants --------------------------------------------------------------------------------------
# The promises of synchronous batches as checks on a simulated run: P11, and P7 where nothing is leased.
#
# Fed like the other invariants, of which it is a kind. It reads who counted what off the numbers themselves:
# the sums of a slot say how many microbatches are in them and which (stage_trainer.py), whatever any machine
# says of them.


class BatchInvariants(Invariants):
    def __init__(self, of: tuple[int, Manifest], *args: Any) -> None:
        """`of`: samples of an epoch, and the run's rules."""
        super().__init__(*args)
        samples, manifest = of
        self._epoch_samples, self._micro = samples, manifest.pipeline.micro
        self._clip = manifest.batch_clip
        self.together: Sequence[
            Commit
        ] = ()  # of all stages of a batch; of a model in one piece its commit alone
        self.clipped = 0  # rounds
        self._begun: BatchBegun | None = None  # that is counted
        self._skipped: set[int] = set()
        # version -> (epoch, where its batch ended), in any era; and where one ended of which nothing was left
        self._ends: dict[int, set[tuple[int, int]]] = {0: {(0, 0)}}
        self._sums: dict[tuple[str, int], tuple[int, int]] = {}  # (peer, round) -> (how many, their marks)
        self._skips: set[Sample] = set()  # that nobody learns from
        self._marks: dict[tuple[int, bytes], int] = {}  # (stage, digest) -> mark of the values
        self._scored: list[int] = []  # held-out microbatches of the newest version
        self.evaluated = 0  # versions

    def on_record(self, record: Record) -> None:
        match record:
            case BatchBegun():
                self._on_begun(record)
            case MicroSkipped(micro=micro):
                self._on_skipped(micro)
            case HeldOutEnded(version=version):
                self._on_held_out(version)
            case CommittedRound(commit=commit):
                self._once_each(record, commit)
                self._is_clipped(commit, self.together or [commit])
            case _ if tag_of(record) == "evaluated":  # of a mode, which may have been taken out
                self._is_of_its_version(record)
        super().on_record(record)

    def _states_at(self, version: int) -> tuple[int, ...]:
        """Of each stage."""
        now = self.eras[-1]
        digests = [(each.number, now.digests.get((each.number, version), b"")) for each in self._fragments]
        return tuple(self._marks.get(each, -1) for each in digests)

    def _is_of_its_version(self, record: Any) -> None:
        """The held-out loss: of all windows of which somebody could compute it, each through all stages."""
        states, micros = self._states_at(record.version), self._scored
        due = fmean(held_out_loss(states, micro) for micro in micros) if micros else None
        told = f"{record} is of microbatches {micros} at {states}: {due}"
        same = due is not None and record.loss is not None and math.isclose(record.loss, due, abs_tol=1e-5)
        self._require("P12", same and record.windows == self._micro * len(micros), told)
        self.evaluated += 1

    def _saw_sealed(self, details: tuple[VirtualPeer, Seal, bytes, int]) -> None:
        peer, seal, digest, _ = details
        self._marks[seal.fragment, digest] = state_of(peer.state.part(peer.anchor, seal.fragment))
        super()._saw_sealed(details)

    def _on_begun(self, begun: BatchBegun) -> None:
        told = f"a batch from {begun.version}, the run is at {self.version}"
        self._require("P12", begun.version == self.version, told)
        self._begun, self._skipped = begun, set()
        if begun.held_out:
            return
        ends = self._ends[begun.version]
        due = {(epoch, end) if end < self._epoch_samples else (epoch + 1, 0) for epoch, end in ends}
        told = f"the batch from version {begun.version} begins at {begun.epoch, begun.start}, not at {due}"
        self._require("P11", (begun.epoch, begun.start) in due, told)

    def _on_held_out(self, version: int) -> None:
        begun = self._begun
        is_that = begun is not None and begun.held_out and begun.version == version
        self._require("P11", is_that, f"a held-out batch from version {version} ends, and {begun} was begun")
        assert begun is not None
        self._scored = [micro for micro in range(begun.count) if micro not in self._skipped]
        self._begun = None

    def _on_skipped(self, micro: int) -> None:
        """Of a batch that is skipped to its last microbatch no version is made."""
        begun = self._begun
        assert begun is not None
        self._skipped.add(micro)
        if begun.held_out:
            return
        first = begun.start + micro * self._micro
        self._skips |= {(begun.epoch, place) for place in range(first, min(begun.stop, first + self._micro))}
        if len(self._skipped) == begun.count:
            self._ends[begun.version].add((begun.epoch, begun.stop))

    def _once_each(self, record: CommittedRound, commit: Commit) -> None:
        begun, seen = self._begun, 0
        self._require("P11", begun is not None, f"version {commit.version} is of no batch")
        assert begun is not None
        told = f"version {commit.version} is of {begun}"
        self._require("P11", commit.version == begun.version + 1 and not begun.held_out, told)
        for peer, raw in record.counted.items():
            mask = mask_from_bytes(raw)
            self._require("P11", not mask & seen, f"{peer} counted what others in the commit had counted")
            seen |= mask
            says = self._sums[peer, commit.round_no]
            marks = sum(mark_of(begun.version, micro) for micro in bits(mask))
            told = f"the sums of {peer} hold {says}, its mask says {(mask.bit_count(), marks)}"
            self._require("P11", says == (mask.bit_count(), marks), told)
        due = sum(1 << micro for micro in range(begun.count) if micro not in self._skipped)
        self._require("P11", seen == due, f"version {commit.version} is not made of its whole batch")
        missing = set(commit.included) - set(record.counted)
        self._require("P11", not missing, f"{sorted(missing)} are in the commit and counted nothing")
        self._ends.setdefault(commit.version, set()).add((begun.epoch, begun.stop))

    def _is_clipped(self, commit: Commit, together: Sequence[Commit]) -> None:
        """All stages of a batch are multiplied by one factor, which bounds the length of the whole."""
        values = [
            self.gather.decode(result, self.elements) for each in together for result in self.results_of(each)
        ]
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in values))
        due = min(1.0, self._clip / (norm + 1e-6))
        told = f"a gradient of length {norm} is multiplied by {commit.factor}, not by {due}"
        self._require("P1", math.isclose(commit.factor, due, rel_tol=1e-6), told)
        alike = {each.factor for each in together} == {commit.factor}
        self._require("P1", alike, f"stages of version {commit.version} are multiplied by different factors")
        self.clipped += due < 1.0

    def _saw_encoded(self, details: tuple[VirtualPeer, Encode, dict[int, Payload]]) -> None:
        peer, encode, payloads = details
        work, _ = peer.kept_work(encode.slot, 0)
        part = peer.member.part
        mine = part.replicas[0].rounds.contribution if part is not None else None
        if mine is None:
            return  # the round is over by now
        count, marks = (float(value) * mine.frozen.tokens for value in peer.slots[encode.slot][:2])
        self._sums[peer.peer, encode.round_no] = (round(count), round(marks))
        samples = tuple(sample for learned in work for sample in learned)
        key = (peer.peer, encode.round_no)
        made = self.contributions.setdefault(key, Contributed(round(count), samples, {}))
        made.payloads.update((index, bytes(payload)) for index, payload in payloads.items())

    def on_books(self, ledger: Ledger) -> None:
        """P7: what was learned is all that lies before the cursor, without what was skipped; nothing twice."""
        epoch, place = BatchBook.of(ledger).cursor
        before = {(e, p) for e in range(epoch) for p in range(self._epoch_samples)}
        before |= {(epoch, p) for p in range(place)}
        learned = self.samples_committed[0]
        told = f"learned {len(learned)} of the {len(before)} samples before {epoch, place}"
        self._require("P7", learned <= before <= learned | self._skips, told)
        self._fresh.clear()


# ---- stage invariants --------------------------------------------------------------------------------------

TOLD_WITHIN_S = 0.5  # after two neighbours know a table
Work = tuple[int, int, int]  # (seat or stage, version, microbatch)


class StageInvariants(BatchInvariants):
    def __init__(self, calm: bool, lines_are_good: bool, of: tuple[int, Manifest], *args: Any) -> None:
        """`calm`: no misfortune at all happens in this run; `lines_are_good`: what is sent comes, and soon.  `of`: as
        in `BatchInvariants`."""
        super().__init__(of, *args)
        self._calm, self._lines_are_good, self._rules = calm, lines_are_good, of[1].pipeline
        self.moves: list[Moving] = []
        self._last_move: Moving | None = None  # that the books know of
        # By peer: the newest table and version that its machine of microbatches knows, its own seat, and since when.
        self._knows: dict[str, tuple[int, int, int, float]] = {}
        self._paths: dict[
            tuple[str, int], dict[int, PassedMicro]
        ] = {}  # (peer, round) -> what is in its sums
        self._seats: dict[int, Seated] = {}  # the living ones
        self._last_seat = 0
        self._forwards: Counter[Work] = Counter()
        self._backwards: Counter[Work] = Counter()
        self._seats_at: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # (version, stage) -> seats
        self._handed_to: dict[Work, int] = {}  # (stage, version, microbatch) -> the seat that got it last
        self.handed = 0  # works, in all
        self.again = 0  # of these, what was computed before in the same stage

    # ---- what becomes durable --------------------------------------------------------------------------------

    def on_record(self, record: Record) -> None:
        match record:
            case CommittedBatch(rounds=rounds):
                self._on_batch(rounds)
                return
            case CommittedRound(commit=commit):
                told = f"stage {commit.fragment} was committed alone, as version {commit.version}"
                self._require("P13", False, told)
            case Seated():
                self._on_seated(record)
            case Unseated(number=number, contested=contested):
                # The coordinator mends it, and among the honest it never has to: rules R1 to R6 see to that.
                self._require("P14", not contested, f"two seats have one microbatch: {record}")
                self._require("P17", number in self._seats, f"seat {number} was given up and is nobody's")
                self._seats.pop(number, None)
            case Moving():
                self._on_moving(record)
            case RolledBack(versions=versions) if len(set(versions)) > 1:
                self._require(
                    "P13", False, f"the run goes back to other versions in other stages: {versions}"
                )
            case RolledBack() | Genesis() | DataFixed():
                self._seats.clear()  # what was counted is of no use
        super().on_record(record)

    def on_restored(self, versions: tuple[int, ...]) -> None:
        """A restored run knows of no batch, nor of moves: it begins another one, in which seats are given again."""
        super().on_restored(versions)
        self._seats.clear()
        self._last_move = None

    def _nobody_is_passed_over(self, versions: tuple[int, ...]) -> None:
        # Nothing goes on behind a cut line: one version is given up within seconds, whoever may live there.
        held = [self._of_weight_with_more(stage, version + 1) for stage, version in enumerate(versions)]
        told = f"the run goes back to {versions}, while of every stage somebody lives and holds more: {held}"
        self._require("P20", not all(held), told)

    def _on_skipped(self, micro: int) -> None:
        super()._on_skipped(micro)
        assert self._begun is not None
        # Of the batch nothing is left, and its seats are gone with it.
        if len(self._skipped) == self._begun.count and not self._begun.held_out:
            self._seats.clear()

    def _on_held_out(self, version: int) -> None:
        super()._on_held_out(version)
        self._seats.clear()

    def _on_begun(self, begun: BatchBegun) -> None:
        super()._on_begun(begun)
        versions = {self.version_of(each.number) for each in self._fragments}
        told = f"a batch from {begun.version}, stages at {versions}"
        self._require("P13", versions == {begun.version}, told)

    def _on_seated(self, seat: Seated) -> None:
        self._require("P17", seat.number > self._last_seat, f"seat {seat.number} was given before")
        self._last_seat = max(self._last_seat, seat.number)
        others = [each for each in self._seats.values() if each.peer == seat.peer]
        self._require("P17", not others, f"{seat.peer} has {others}, and gets seat {seat.number}")
        self._seats[seat.number] = seat
        for peer in self._living():
            if peer.peer == seat.peer and peer.me.process == seat.process and peer.member.part is not None:
                holds = set(peer.member.part.replicas)
                told = f"{seat.peer} has a seat in stage {seat.stage}, and holds {sorted(holds)}"
                self._require("P17", holds == {seat.stage}, told)

    def _on_moving(self, move: Moving) -> None:
        left, due = self._seats_in(move.stage), max(2, self._rules.min_per_stage)
        self._require("P17", move.to != move.stage, f"{move} leads nowhere")
        self._require(
            "P17", all(each.peer != move.peer for each in self._seats.values()), f"{move} has a seat"
        )
        here = {peer.peer for peer in self._living() if not peer.member.leaving.asked}
        stays = any(each.stage == move.to and each.peer in here for each in self._seats.values())
        if stays:
            self._require("P17", left >= due, f"{move} leaves {left} seats in stage {move.stage}")
        # To a stage that has nobody, or nobody who stays, somebody goes at once: no batch ends before.
        if (last := self._last_move) is not None and stays:
            apart_s = move.at_s - last.at_s
            told = f"{move} comes {apart_s} s after {last}"
            self._require("P17", apart_s >= 3 * self._rules.rebalance_s, told)
        self._last_move = move
        self.moves.append(move)

    def _seats_in(self, stage: int) -> int:
        return sum(each.stage == stage for each in self._seats.values())

    def _on_batch(self, rounds: tuple[CommittedRound, ...]) -> None:
        stages = [each.commit.fragment for each in rounds]
        versions = {each.commit.version for each in rounds}
        due = [each.number for each in self._fragments]
        told = f"a commit of stages {stages}, to versions {sorted(versions)}, of a model with stages {due}"
        self._require("P13", stages == due and len(versions) == 1, told)
        for each in rounds:
            self._at_one_state(each)
        for stage in due:
            self._no_more_than_its_share(stage)
        self.together = [each.commit for each in rounds]
        for each in rounds:
            super().on_record(each)

    def _at_one_state(self, record: CommittedRound) -> None:
        """P12: each microbatch in the sums passed every stage at the state that the run has there at this version."""
        commit, version = record.commit, record.commit.version - 1
        states = self._states_at(version)
        for peer, raw in record.counted.items():
            paths = self._paths.get((peer, commit.round_no), {})
            mask = mask_from_bytes(raw)
            told = (
                f"{peer} says {sorted(bits(mask))} of stage {commit.fragment}, its sums hold {sorted(paths)}"
            )
            self._require("P11", set(bits(mask)) == set(paths), told)
            for micro, path in paths.items():
                told = f"{path} is in a commit of version {commit.version}; the run's states were {states}"
                self._require("P12", path == PassedMicro(version, micro, states), told)

    def _no_more_than_its_share(self, stage: int) -> None:
        """P14.  Whoever is gone may have computed it too; of those that are here one seat has, and once."""
        begun = self._begun
        assert begun is not None
        version = begun.version
        seats = self._seats_at.pop((version, stage), set())
        for micro in range(begun.count):
            for what, works in (("forward", self._forwards), ("backward", self._backwards)):
                times = {seat: works.pop((seat, version, micro), 0) for seat in seats}
                here = {seat for seat, count in times.items() if count and seat in self._seats}
                told = f"microbatch {micro} of version {version} went {what} through stage {stage}: {times}"
                self._require("P14", len(here) <= 1 and max(times.values(), default=0) <= 1, told)
                self.again += max(0, sum(times.values()) - 1)
                if self._calm:
                    once = sum(times.values()) == 1 or micro in self._skipped
                    self._require("P14", once, f"in calm, {told}")

    # ---- what peers and their trainers do --------------------------------------------------------------------

    def _saw_handed(self, details: tuple[VirtualPeer, MicrobatchWork]) -> None:
        """A peer gives its trainer work: from now on it may be in the sums of this seat."""
        peer, hand = details
        seat = peer.seat
        part = peer.member.part
        stage = next(iter(part.replicas)) if part is not None else -1
        if not hand.held_out:
            self._seats_at[hand.version, stage].add(seat)
        if seat in self._seats and not hand.held_out:
            before = self._handed_to.get((stage, hand.version, hand.micro), seat)
            told = f"{hand} is of seat {seat} in stage {stage}, and seat {before} had it and is here"
            self._require("P14", before == seat or before not in self._seats, told)
            self._handed_to[stage, hand.version, hand.micro] = seat
        self.handed += 1
        if hand.held_out:
            return  # it counts nowhere, however often it is computed
        if hand.way != "backward":
            self._forwards[seat, hand.version, hand.micro] += 1
        if hand.way != "forward":
            self._backwards[seat, hand.version, hand.micro] += 1

    def _saw_taken(self, details: tuple[VirtualPeer, MicrobatchWork, PassedMicro]) -> None:
        peer, hand, passed = details
        same = (passed.version, passed.micro) == (hand.version, hand.micro)
        self._require("P16", same, f"{peer.peer} is handed {passed} as {hand}")

    def _saw_returned(self, details: tuple[VirtualPeer, int, int, PassedMicro, PassedMicro]) -> None:
        """The gradient that came back is of the activation that is here."""
        peer, stage, state, given, returned = details
        upto = given.through(stage, state).states[: stage + 1]
        told = f"{peer.peer} has {given} in stage {stage} at {state}, and gets {returned} back for it"
        self._require("P12", returned.states[: stage + 1] == upto, told)

    def _saw_moved(self, details: tuple[VirtualPeer]) -> None:
        super()._saw_moved(details)
        [peer] = details
        joined = peer.member.joined
        if joined is None:  # before it holds a stage, and when it was told to serve another one
            self._held = {key: held for key, held in self._held.items() if key[0] != peer.me.process}
        flow = crossings.flow if (crossings := crossings_of(joined)) is not None else None
        if flow is not None:
            knows = (flow.table.number, flow.version, flow.place.seat.number)
            if self._knows.get(peer.peer, ())[:3] != knows:
                self._knows[peer.peer] = (*knows, peer.world.now())
            told = f"{peer.peer}: {len(flow.waiting)} wait, in room for {flow.room_limit}"
            self._require("P15", len(flow.waiting) <= flow.room_limit, told)
            self._require("P15", not flow.refused_for_room, f"{peer.peer} refused an honest frame for room")

    def _saw_asked_held(self, details: tuple[VirtualPeer, str]) -> None:
        """R3: whoever has to hear what a neighbour holds of who is gone is told, newcomers too, and need not ask."""
        peer, to = details
        mine, its = self._knows.get(peer.peer), self._knows.get(to)
        here = {each.peer: each for each in self._living()}
        if not self._lines_are_good or mine is None or its is None or to not in here:
            return
        other, now = here[to], peer.world.now()
        joined = other.member.joined
        flow = crossings.flow if (crossings := crossings_of(joined)) is not None else None
        tick = peer.member.tick
        batch = section(BatchTick, tick.sections) if tick is not None else None
        doubted = batch is None or bool(batch.doubted)
        knew = its[:2] == mine[:2] and now - max(mine[3], its[3]) >= TOLD_WITHIN_S
        well = flow is not None and flow.place.seat.number == its[2] and other.machine.doorway.inside
        told = f"{peer.peer} asks {to} for what it holds of who is gone: both know table {mine[0]} for long"
        self._require("P15", not (knew and well) or doubted, told)

    def _saw_forgotten(self, details: tuple[VirtualPeer, int, set[int]]) -> None:
        """Crossings may go when their batch is committed, when the run has gone back, and with their seat."""
        peer, version, seats = details
        gone_back = peer.member.reports.era < len(self.eras) - 1
        over = version < self.version or gone_back or peer.seat not in seats
        over = over or not seats & self._seats.keys()  # all were given up, and it has not heard of it
        told = f"{peer.peer} forgets crossings of {version}, the run is at {self.version}"
        self._require("P16", over, told)

    def _saw_lacked(self, details: tuple[VirtualPeer, int, int, KeptPiece]) -> None:
        peer, version, micro, piece = details
        told = f"{peer.peer} needs the {piece} of microbatch {micro} of {version}, and has not kept it"
        self._require("P16", False, told)

    def _saw_encoded(self, details: tuple[VirtualPeer, Encode, dict[int, Payload]]) -> None:
        peer, encode, payloads = details
        part = peer.member.part
        replica = part.replicas.get(encode.fragment) if part is not None else None
        mine = replica.rounds.contribution if replica is not None else None
        if mine is None:
            return  # the round is over by now
        count, marks = (float(value) * mine.frozen.tokens for value in peer.slots[encode.slot][:2])
        key = (peer.peer, encode.round_no)
        self._sums[key] = (round(count), round(marks))
        self._paths[key] = peer.paths_of(encode.slot)
        work, _ = peer.kept_work(encode.slot, 0)
        samples = tuple(sample for learned in work for sample in learned)
        made = self.contributions.setdefault(key, Contributed(round(count), samples, {}))
        made.payloads.update((index, bytes(payload)) for index, payload in payloads.items())

    def _saw_loaded(self, details: tuple[VirtualPeer, VirtualTrainer, LoadAnchor]) -> None:
        peer, trainer, load = details
        assert isinstance(trainer, VirtualStageTrainer)
        empty = not trainer.paths and not trainer.delta(trainer.parts[0]).any()
        self._require("P6", empty, f"{peer.peer} loads version {load.version} and keeps sums of another one")

    def on_books(self, ledger: Ledger) -> None:
        """P7: of every stage, what was learned is all that lies before the cursor, without what was skipped."""
        super().on_books(ledger)
        for stage, learned in enumerate(self.samples_committed):
            told = f"stage {stage} has learned from other samples than stage 0"
            self._require("P7", learned == self.samples_committed[0], told)


def crossings_of(joined: MemberSession | None) -> StageTransfers | None:
    """Of a peer that holds a stage."""
    mode = joined.modes["batches"] if joined is not None else None
    return mode.crossings if isinstance(mode, StageBatches) else None
