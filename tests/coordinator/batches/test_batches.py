"""Synchronous batches at the coordinator: who is seated, what is granted, when a round may open, who is given up."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from farflung.coordinator.batches.batch_book import BatchBook, MicroSkipped, TakenBack, Unseated
from farflung.coordinator.batches.batch_members import BatchMembers
from farflung.coordinator.batches.batches import SEAT_EVERY_S, Batches
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import DataFixed
from farflung.coordinator.modes.registry import LossMode
from farflung.coordinator.rounds.round_policy import SeatShare
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import FragmentBeat, Sent
from farflung.protocol.mode_words import BatchBeat, BatchTick
from rig.batch_desk import Desk, Worker
from rig.made_run import BARE_BEAT

MANIFEST = Manifest.from_toml(
    '[pipeline]\nbatch = 8\nmicro = 2\n[merge]\npolicy = "mean"\n[round]\ndeadline_s = 10.0', "run.toml"
)
NOTHING_YET = BatchBeat(0, 0, 0, b"", b"", True, 1.0)


def at(version: int, ready: bool = False) -> FragmentBeat:
    return FragmentBeat(0, version, bytes(32), 0, 0, 0, ready, ())


class Scores(LossMode):
    """Wants the losses of one version."""

    def __init__(self) -> None:
        self.due, self.losses = False, list[Mapping[str, Mapping[int, float]]]()

    def is_evaluated_next(self) -> bool:
        return self.due

    def on_losses(self, losses: Mapping[str, Mapping[int, float]]) -> None:
        self.losses.append(losses)
        self.due = False


class Hall:
    """Peers that count microbatches, and what they are told."""

    def __init__(self, *peers: str) -> None:
        self.workers = {peer: Worker(peer) for peer in peers}
        self.in_round: set[str] = set()
        self.flying: set[int] = set()
        self.aborted: list[int] = []
        self.scores = Scores()
        self.desk = Desk(Ledger(LedgerRules(8, 3)), MANIFEST)
        self.desk.ledger.apply(DataFixed(samples=100, peer="ann"))
        self.restart()
        for peer in peers:
            self.says(peer)
        self.batches.advance()

    def restart(self) -> None:
        house = BatchMembers(
            lambda: self.workers,
            lambda peer: True,
            lambda peer: peer in self.in_round,
            self.flying.__contains__,
            self.aborts,
            losses_for=lambda: [self.scores],
        )
        self.batches = Batches(self.desk, house)

    def aborts(self, stage: int, why: str) -> None:
        self.aborted.append(stage)
        self.flying.discard(stage)
        self.in_round -= {peer for peer, worker in self.workers.items() if worker.stage == stage}

    def says(self, peer: str, *counted: int, ready: bool = False, **changes: object) -> BatchTick | None:
        worker = self.workers[peer]
        seat = BatchBook.of(self.desk.ledger).seat_of(peer)
        said = replace(
            NOTHING_YET,
            seat=seat.number if seat is not None else 0,
            counted=mask_to_bytes(mask_of(counted)),
        )
        said = replace(said, **changes)
        worker.beat = replace(BARE_BEAT, fragments=(at(0, ready),), sections=(said,))
        return self.batches.on_beat(worker, worker.beat)

    def says_losses(self, peer: str, *counted: int, **changes: object) -> BatchTick | None:
        """Of a held-out batch: of each microbatch its number."""
        return self.says(peer, *counted, losses=struct.pack(f"<{len(counted)}f", *counted), **changes)

    def granted(self, peer: str) -> list[int]:
        tick = self.says(peer)
        return [m for first, stop in tick.granted for m in range(first, stop)] if tick is not None else []

    @property
    def unseated(self) -> list[str]:
        return [record.peer for record in self.desk.written if isinstance(record, Unseated)]


def full(hall: Hall) -> dict[str, list[int]]:
    """Everything is granted and counted, and the sums stand frozen."""
    mine: dict[str, list[int]] = {peer: [] for peer in hall.workers}
    for _ in range(9):
        for peer in hall.workers:
            tick = hall.says(peer, *mine[peer])
            assert tick is not None
            mine[peer] = [m for first, stop in tick.granted for m in range(first, stop)]
    for peer in hall.workers:
        hall.says(peer, *mine[peer], ready=True)
    return mine


def test_a_batch_begins_and_its_microbatches_are_granted_to_one_seat_each() -> None:
    hall = Hall("ann", "bob")
    assert hall.batches.book.batch is not None
    assert (hall.granted("ann"), hall.granted("bob")) == ([0, 1], [2, 3])
    ann = hall.says("ann", 0, 1)
    assert ann is not None and ann.granted == ((0, 2), (4, 6)) and not ann.freeze


# ---- held-out batches


def evaluated(*peers: str) -> Hall:
    """The next batch is of 17 windows: eight microbatches of two, and one of the last."""
    hall = Hall(*peers)
    hall.batches.book.start_at((0, 6))
    hall.desk.manifest = MANIFEST.model_copy(
        update={"eval": MANIFEST.eval.model_copy(update={"source": "python-stdlib", "windows": 17})}
    )
    hall.scores.due = True
    hall.desk.now += SEAT_EVERY_S
    hall.batches.advance()
    return hall


def compute_all(hall: Hall) -> dict[str, list[int]]:
    mine: dict[str, list[int]] = {peer: [] for peer in hall.workers}
    for _ in range(9):
        for peer in hall.workers:
            tick = hall.says_losses(peer, *mine[peer])
            assert tick is not None and tick.held_out and not tick.freeze
            mine[peer] = [m for first, stop in tick.granted for m in range(first, stop)]
    for peer in hall.workers:
        tick = hall.says_losses(peer, *mine[peer])
        assert tick is not None and not tick.freeze, "nothing of it is ever learned"
    return mine


def test_P11_a_held_out_batch_gives_a_loss_of_each_window_and_no_round() -> None:
    hall = evaluated("ann", "bob")
    batch = hall.batches.book.batch
    assert batch is not None and (batch.version, batch.stop, batch.count) == (0, 17, 9)
    assert hall.batches.shares() == (
        {},
        "the loss of version 0 is computed: 0 of 9 held-out microbatches",
    )
    mine = compute_all(hall)
    assert sorted(mine["ann"] + mine["bob"]) == list(range(9))
    for peer, micros in mine.items():
        hall.says_losses(peer, *micros, ready=True)
    assert hall.batches.shares()[0] == {}, "whatever stands frozen"
    hall.batches.advance()
    [losses] = hall.scores.losses
    assert {window for each in losses.values() for window in each} == set(range(17))
    assert losses.keys() == {"ann", "bob"}
    assert all(each[window] == window // 2 for each in losses.values() for window in each)


def test_P11_after_a_held_out_batch_another_one_begins_from_the_same_version_in_other_seats() -> None:
    """Where it was before: what trainers have in their sums by then counts nowhere."""
    hall = evaluated("ann", "bob")
    compute_all(hall)
    before = {seat.number for seat in hall.batches.book.seats.values()}
    hall.batches.advance()
    batch = hall.batches.book.batch
    assert batch is not None and (batch.version, batch.start, batch.held_out) == (0, 6, False)
    assert hall.says("ann", 0, 1, seat=min(before)) is not None, "it has not heard of that"
    assert hall.batches.counted == 0
    after = {seat.number for seat in hall.batches.book.seats.values()}
    assert after and min(after) > max(before)


def test_P11_a_journal_that_commits_a_held_out_batch_is_refused() -> None:
    hall = evaluated("ann")
    with pytest.raises(ValueError, match="a batch that was not begun"):
        hall.batches.book.commit([{"ann": mask_to_bytes((1 << 9) - 1)}], 100)


def test_whoever_is_lost_in_a_held_out_batch_takes_its_losses_with_it() -> None:
    hall = evaluated("ann", "bob")
    compute_all(hall)
    del hall.workers["bob"]
    hall.batches.advance()
    assert hall.scores.losses == [] and hall.unseated == ["bob"]
    compute_all(hall)
    hall.batches.advance()
    [losses] = hall.scores.losses
    assert losses.keys() == {"ann"} and len(losses["ann"]) == 17


@pytest.mark.parametrize(
    "odd", [b"", b"x", struct.pack("<9f", *[math.nan] * 9), struct.pack("<9f", *[-1.0] * 9)], ids=len
)
def test_P9_what_is_no_loss_counts_for_none(odd: bytes) -> None:
    hall = evaluated("ann")
    compute_all(hall)
    hall.says("ann", *range(9), losses=odd)
    hall.batches.advance()
    assert hall.scores.losses == [{}]


@pytest.mark.parametrize("readable", [range(1, 9), ()], ids=["most", "none"])
def test_windows_that_nobody_can_read_are_left_out_and_cost_no_samples(readable: Sequence[int]) -> None:
    hall = evaluated("ann")
    notes = len(hall.desk.notes)
    bad = set(range(9)) - set(readable)
    while not hall.scores.losses:
        open_ = [each for each in hall.granted("ann") if each not in bad]
        hall.says_losses("ann", *open_, unusable=mask_to_bytes(mask_of(bad)))
        hall.batches.advance()
    [losses] = hall.scores.losses
    assert {window // 2 for each in losses.values() for window in each} == set(readable)
    assert hall.batches.book.skipped_samples == 0 and len(hall.desk.notes) == notes, "not one for each"
    assert hall.batches.book.batch is not None and not hall.batches.book.batch.held_out


def test_a_text_that_two_can_not_read_others_read_for_them() -> None:
    hall = evaluated("ann", "bob", "cyd")
    mine: list[int] = []
    while not hall.scores.losses:
        for peer in ("ann", "bob"):
            hall.says_losses(peer, unusable=mask_to_bytes((1 << 9) - 1))
        tick = hall.says_losses("cyd", *mine)
        assert tick is not None
        mine = [m for first, stop in tick.granted for m in range(first, stop)]
        hall.batches.advance()
    [losses] = hall.scores.losses
    assert losses.keys() == {"cyd"} and len(losses["cyd"]) == 17


def test_a_complete_run_begins_a_held_out_batch_and_no_other() -> None:
    hall = Hall("ann")
    hall.batches.book.start_at((0, 6))
    hall.desk.finished, hall.scores.due = True, True
    hall.batches.advance()
    assert hall.batches.book.batch is not None and hall.batches.book.batch.held_out
    hall.batches.book.end_held_out()
    hall.scores.due = False
    hall.batches.advance()
    assert hall.batches.book.batch is None


def test_P11_a_round_opens_with_every_microbatch_and_whoever_counted_any() -> None:
    hall = Hall("ann", "bob", "cyd")
    hall.says("ann")
    hall.says("bob")
    assert hall.batches.shares() == ({}, "waiting for microbatches: 0 of 8 counted")
    del hall.workers["cyd"]
    mine = full(hall)
    shares, waits = hall.batches.shares()
    assert not waits and shares.keys() == {"ann", "bob"}
    assert sorted(mine["ann"] + mine["bob"]) == list(range(8))
    tick = hall.says("ann", *mine["ann"])
    assert tick is not None and tick.freeze
    assert hall.batches.shares()[1] == "every microbatch is counted: waiting for the sums of ann"


def test_P11_what_was_counted_of_one_batch_is_not_counted_of_the_next() -> None:
    """Its seats stay, and nobody has said a word since the commit."""
    hall = Hall("ann", "bob")
    shares = {peer: mask_to_bytes(mask_of(micros)) for peer, micros in full(hall).items()}
    hall.batches.book.commit([shares], samples=100)
    del hall.workers["bob"]
    hall.batches.advance()
    assert not hall.desk.notes, "what bob had counted is in a commit: nobody computes it again"
    batch = hall.batches.book.batch
    assert batch is not None and batch.start == 16 and not hall.batches.complete
    assert hall.batches.shares() == ({}, "waiting for microbatches: 0 of 8 counted")


def test_P11_what_a_gone_seat_had_counted_is_granted_again_and_its_word_counts_no_more() -> None:
    hall = Hall("ann", "bob")
    mine = full(hall)
    gone = hall.workers.pop("ann")
    assert hall.batches.advance() and hall.unseated == ["ann"]
    assert not hall.batches.complete and hall.batches.book.free == mask_of(mine["ann"])
    assert f"ann had counted {len(mine['ann'])} microbatches" in hall.desk.notes[-1]
    hall.workers["ann"] = gone
    tick = hall.says("ann", *mine["ann"], seat=1)
    assert tick is not None and tick.seat == 0, "a peer that changes seats all the time fills no journal"
    hall.desk.now += 1.0
    old = hall.says("ann", *mine["ann"], seat=1)  # the same process, which has not heard of it
    assert old is not None and old.seat == 3, "another seat: its sums are void"
    assert not hall.batches.complete


def test_a_seat_whose_sums_a_round_may_use_is_not_given_up_before_the_round_is_over() -> None:
    hall = Hall("ann", "bob")
    full(hall)
    del hall.workers["ann"]
    hall.flying.add(0)
    hall.in_round = {"ann", "bob"}
    hall.batches.advance()
    assert not hall.unseated
    hall.flying.clear()
    hall.in_round = set()
    hall.batches.advance()
    assert hall.unseated == ["ann"]


@pytest.mark.parametrize("change", ["process", "trainer"])
def test_another_process_or_trainer_is_another_seat(change: str) -> None:
    hall = Hall("ann", "bob")
    full(hall)
    if change == "process":
        hall.workers["ann"].process = b"second"
        hall.says("ann")
    else:
        hall.says("ann", trainer=1)
    hall.batches.advance()
    assert hall.unseated == ["ann"]


def test_P5_a_restarted_coordinator_waits_for_those_who_hold_seats() -> None:
    hall = Hall("ann", "bob")
    full(hall)
    away = hall.workers.pop("ann")
    hall.desk.began_at = hall.desk.now
    hall.restart()
    hall.batches.advance()
    assert not hall.unseated
    hall.workers["ann"] = away
    tick = hall.says("ann", 0, 1)
    assert tick is not None and tick.seat == 1, "it keeps its seat and its sums"
    del hall.workers["ann"]
    hall.batches.advance()
    assert hall.unseated == ["ann"], "it was here, and is gone now"


def test_who_holds_work_and_counts_none_loses_it_to_others_and_gets_none_back_in_this_batch() -> None:
    hall = Hall("ann", "bob")
    for peer in ("ann", "bob", "ann", "bob"):  # once it knows its seat, it says how long one takes it
        hall.granted(peer)
    hall.desk.now += 9.0
    hall.says("bob", 2)
    hall.batches.advance()
    assert not hall.unseated
    hall.desk.now += 2.0
    hall.batches.advance()
    assert hall.unseated == ["ann"]
    tick = hall.says("ann")
    assert tick is not None and tick.seat == 0
    assert hall.granted("ann") == []


def test_whoever_is_alone_is_waited_for() -> None:
    hall = Hall("ann")
    hall.granted("ann")
    hall.desk.now += 1000.0
    hall.batches.advance()
    assert not hall.unseated, "nobody else could do it"


def test_a_microbatch_without_a_gradient_is_tried_by_another_and_then_left_out() -> None:
    hall = Hall("ann", "bob")
    hall.granted("ann")
    bad = mask_to_bytes(0b01)
    hall.says("ann", 1, unusable=bad)
    hall.batches.advance()
    assert [type(r) for r in hall.desk.written[-1:]] == [TakenBack]
    assert 0 not in [m for a, b in hall.says("ann", 1, unusable=bad).granted for m in range(a, b)]  # type: ignore[union-attr]
    assert 0 in hall.granted("bob")
    hall.says("ann", 1)
    assert 0 not in hall.granted("ann"), "whatever it says later"
    hall.says("bob", unusable=bad)
    hall.batches.advance()
    skipped = [record for record in hall.desk.written if isinstance(record, MicroSkipped)]
    assert [(each.micro, each.samples) for each in skipped] == [(0, 2)]
    assert "ann, bob got no finite gradient" in skipped[0].reason


def test_batches_of_which_nothing_is_left_are_told_until_one_is_learned_from() -> None:
    hall = Hall("ann")
    batch = hall.batches.book.batch
    assert batch is not None and hall.batches.told()["passed_over"] == 0
    while hall.batches.book.batch is batch:
        bad = sum(1 << micro for micro in hall.granted("ann"))
        hall.says("ann", unusable=mask_to_bytes(bad))
        hall.batches.advance()
    assert hall.batches.told()["passed_over"] == 1
    hall.batches._times.look(batch.version + 1, False, hall.desk.now)
    assert hall.batches.told()["passed_over"] == 0


def test_who_is_not_at_the_runs_state_or_leaves_gets_no_work() -> None:
    hall = Hall("ann", "bob")
    hall.workers["bob"].verified = False
    assert hall.granted("bob") == []
    hall.workers["bob"].verified, hall.workers["bob"].leaving = True, True
    assert hall.granted("bob") == []


def test_P11_a_word_that_names_other_microbatches_than_were_counted_is_none() -> None:
    hall = Hall("ann")
    share = SeatShare(1, mask_to_bytes(0b11))
    sent = Sent(
        session=bytes(16), seq=1, round_no=1, hashes=bytes(32), tokens=1, steps=1, loss=None, used=(),
        seat=1, counted=mask_to_bytes(0b11), signature=b"",
    )  # fmt: skip
    assert not hall.batches.problem(share, sent)
    other = hall.batches.problem(share, replace(sent, counted=mask_to_bytes(0b111)))
    assert other == "seat 1 names 3 microbatches, seat 1 had counted 2"
    assert hall.batches.problem(share, replace(sent, seat=2))


def test_what_is_not_granted_is_not_counted() -> None:
    hall = Hall("ann", "bob")
    hall.granted("ann")
    hall.says("ann", 0, 1, 2, 3, 4, 5, 6, 7)
    assert hall.batches.counted == 0b11
