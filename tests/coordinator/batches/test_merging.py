"""Batches with delay: the next one is begun while one is merged, who owes sums to that, and when both are void."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farflung.coordinator.batches.batches import Batches
from farflung.coordinator.batches.merging import holds_weights, missed_weights
from farflung.coordinator.batches.words import House
from farflung.coordinator.ledger.batch_book import Batch
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import BatchBegun, BatchesVoided, DataFixed, MicroSkipped, Unseated
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import BatchBeat, BatchTick, FragmentBeat
from rig.batch_desk import Desk, Worker
from rig.made_run import BARE_BEAT

RUN = (
    '[run]\nrounds = {rounds}\nmin_peers = 2\n[pipeline]\nbatch = 4\nstages = 2\ndelay = 1\n[merge]\npolicy = "mean"\n'
    '[outer]\nstep = "adamw"\n[round]\ndeadline_s = 10.0'
)
SHARES = {"Ann": (0, 1), "Bob": (2, 3), "cyd": (0, 1, 2, 3)}


class Hall:
    """Two sources and a peer of the last stage; the rounds that would merge what they count are flags here."""

    def __init__(self, rounds: int = 9) -> None:
        self.workers = {peer: Worker(peer, stage=0 if peer[0].isupper() else 1) for peer in SHARES}
        self.flying: set[int] = set()
        self.aborted: list[int] = []
        self.desk = Desk(Ledger(8, 3, 2), Manifest.from_toml(RUN.format(rounds=rounds), "run.toml"))
        self.desk.ledger.apply(DataFixed(samples=100, peer="Ann"))
        self.restart()
        self.say_all()
        self.batches.advance()
        self.say_all()
        self._share_out()

    def _share_out(self) -> None:
        """Whatever each was granted so far."""
        for peer in ("Ann", "Bob"):
            seat = self.batches.book.seat_of(peer)
            assert seat is not None
            seat.granted[:] = [(SHARES[peer][0], SHARES[peer][-1] + 1)]

    def restart(self) -> None:
        house = House(
            lambda: self.workers,
            lambda peer: True,
            lambda peer: peer in self.workers and self.workers[peer].stage in self.flying,
            self.flying.__contains__,
            self._abort,
        )
        self.batches = Batches(self.desk, house)

    def _abort(self, stage: int, why: str) -> None:
        self.aborted.append(stage)
        self.flying.discard(stage)

    @property
    def batch(self) -> Batch:
        assert self.batches.book.batch is not None
        return self.batches.book.batch

    def says(
        self,
        peer: str,
        *counted: int,
        batch: tuple[int, int] = (0, 0),
        at: int = 0,
        ready: bool = False,
        **more: object,
    ) -> BatchTick | None:
        """`batch`: from which version it goes on, at whose values; `at`: the version that the peer holds."""
        worker, seat = self.workers[peer], self.batches.book.seat_of(peer)
        number = seat.number if seat is not None else 0
        counts = mask_to_bytes(mask_of(counted))
        said = BatchBeat(batch[0], number, 0, counts, b"", True, 1.0, weights=batch[1])
        here = FragmentBeat(worker.stage, at, bytes(32), 0, 0, 0, ready, ())
        worker.beat = replace(BARE_BEAT, fragments=(here,), batch=replace(said, **more))
        return self.batches.on_beat(worker, worker.beat)

    def say_all(self, batch: tuple[int, int] = (0, 0), at: int = 0, ready: bool = False) -> None:
        for peer in self.workers:
            self.says(peer, *(SHARES[peer] if ready else ()), batch=batch, at=at, ready=ready)

    def goes_ahead(self) -> None:
        """The batch is counted whole, its sums stand frozen, and the next one is begun."""
        self.say_all(ready=True)
        self.batches.advance()
        self._share_out()
        for peer in self.workers:
            self.says(peer, batch=(1, 0), ready=True)

    def commits(self) -> None:
        book = self.batches.book
        book.commit([{p: s.counted for p, s in of_stage.items()} for of_stage in book.owed], samples=100)
        for each in self.desk.ledger.books:
            each.version += 1
        self.flying.clear()

    @property
    def begun(self) -> list[tuple[int, int, int]]:
        """(from which version, at whose values, the first sample)."""
        found = [each for each in self.desk.written if isinstance(each, BatchBegun)]
        return [(each.version, each.weights, each.start) for each in found]

    @property
    def voided(self) -> list[str]:
        return [each.reason for each in self.desk.written if isinstance(each, BatchesVoided)]

    @property
    def unseated(self) -> dict[str, str]:
        return {each.peer: each.reason for each in self.desk.written if isinstance(each, Unseated)}


def test_the_next_batch_begins_at_the_same_values_when_all_sums_stand_frozen() -> None:
    hall = Hall()
    hall.say_all(ready=True)
    hall.says("Bob", *SHARES["Bob"])
    hall.batches.advance()
    assert hall.begun == [(0, 0, 0)], "of Bob nothing stands frozen"
    hall.says("Bob", *SHARES["Bob"], ready=True)
    assert hall.batches.advance(), "members are told at once"
    assert hall.begun == [(0, 0, 0), (1, 0, 4)]
    tick = hall.says("cyd", batch=(1, 0))
    assert tick is not None and (tick.version, tick.weights, tick.start) == (1, 0, 4)


def test_no_batch_is_begun_ahead_that_no_version_would_be_made_of() -> None:
    hall = Hall(rounds=1)
    hall.say_all(ready=True)
    hall.batches.advance()
    assert hall.begun == [(0, 0, 0)] and hall.batches.shares(0)[0].keys() == {"Ann", "Bob"}


def test_P11_the_round_gets_what_was_counted_of_the_batch_before_whatever_is_counted_now() -> None:
    hall = Hall()
    seats = {peer: seat.number for peer in SHARES if (seat := hall.batches.book.seat_of(peer)) is not None}
    hall.goes_ahead()
    hall.says("Ann", 0, batch=(1, 0), ready=True)
    shares, waits = hall.batches.shares(0)
    assert not waits and shares.keys() == {"Ann", "Bob"}
    assert (shares["Ann"].seat, shares["Ann"].counted) == (seats["Ann"], mask_to_bytes(0b11))
    assert hall.batches.shares(1)[0]["cyd"].counted == mask_to_bytes(0b1111)
    assert hall.batches.counted_in(0) == 0b1, "what Ann counts now is of the next batch"


def test_P11_a_commit_is_of_the_batch_that_was_merged_and_the_next_one_goes_on() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.commits()
    assert (
        hall.batches.book.cursor == (0, 4) and hall.batch.version == 1 and hall.batches.book.merging is None
    )
    hall.say_all((1, 0), at=1, ready=True)
    hall.batches.advance()
    assert hall.begun[-1] == (2, 1, 8)


def test_a_seat_that_is_gone_in_the_next_batch_still_owes_its_sums_to_the_round() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.flying |= {0, 1}
    hall.says("Ann", 0, batch=(1, 0), trainer=1)
    hall.batches.advance()
    assert hall.unseated == {"Ann": "its trainer was lost, and its sums with it"}
    assert not hall.voided and hall.batches.shares(0)[0].keys() == {"Ann", "Bob"}


def test_P11_sums_that_are_lost_between_rounds_void_both_batches_and_their_samples_come_again() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.flying |= {0}
    gone = hall.workers.pop("Ann")
    hall.batches.advance()
    assert not hall.voided, "the round may have them by now"
    hall.flying ^= {0, 1}
    hall.batches.advance()
    assert hall.voided == ["the sums of Ann are lost: it is gone"] and hall.aborted == [1]
    hall.workers["Ann"] = gone
    hall.batches.advance()
    assert hall.begun[-1] == (0, 0, 0) and not hall.batches.book.seats, "nothing that was said counts"


def test_P11_what_another_process_or_another_stage_has_is_not_what_was_counted() -> None:
    for change, told in (
        ({"process": b"second"}, "it came back as another"),
        ({"stage": 1}, "it holds stage 1"),
    ):
        hall = Hall()
        hall.goes_ahead()
        for name, value in change.items():
            setattr(hall.workers["Ann"], name, value)
        hall.batches.advance()
        assert hall.voided and told in hall.voided[0]


def test_sums_that_nobody_shows_are_waited_for_and_then_given_up() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.says("Bob", batch=(1, 0))
    assert hall.batches.shares(0)[1] == "the batch from version 0 is whole: waiting for the sums of Bob"
    hall.batches.advance()
    hall.desk.now += 9.0
    hall.batches.advance()
    assert not hall.voided
    hall.desk.now += 1.0
    hall.batches.advance()
    assert hall.voided == ["the sums of Bob are lost: it has shown none for 10 s"]


def test_a_round_that_lost_somebodys_sums_voids_both_and_ends_the_rounds_of_other_stages() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.flying |= {1}
    hall.batches.give_up([], "it took too long")
    assert not hall.voided, "it is tried again"
    hall.batches.give_up(["Bob"], "nobody has its contribution")
    assert hall.voided == ["the sums of Bob are lost: nobody has its contribution"] and hall.aborted == [1]
    assert hall.batches.book.batch is None and hall.batches.book.cursor == (0, 0)


def test_a_coordinator_that_was_restarted_waits_for_those_who_owe_sums() -> None:
    hall = Hall()
    hall.goes_ahead()
    away = {peer: hall.workers.pop(peer) for peer in SHARES}
    hall.desk.began_at = hall.desk.now
    hall.restart()
    hall.batches.advance()
    assert not hall.voided
    hall.workers |= away
    hall.say_all((1, 0), ready=True)
    hall.batches.advance()
    assert not hall.voided and hall.batches.shares(1)[0].keys() == {"cyd"}
    del hall.workers["cyd"]
    hall.batches.advance()
    assert hall.voided, "it was here again"


def test_P3_whoever_takes_the_step_computes_on_and_whoever_fell_out_does_not() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.commits()
    for peer in SHARES:
        hall.workers[peer].verified = False  # until it shows the new version
    tick = hall.says("Ann", 0, batch=(1, 0), at=1)
    assert tick is not None and tick.granted and hall.batches.counted_in(0) == 0b1
    hall.workers["Bob"].on_its_way = False
    hall.says("Bob", 2, batch=(1, 0), at=1)
    assert hall.batches.counted_in(0) == 0b1


def test_P12_nobody_sits_down_who_has_other_values_than_the_batch() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.commits()
    hall.workers["Dan"] = Worker("Dan")
    hall.says("Dan", batch=(1, 1), at=1)
    assert hall.batches.book.seat_of("Dan") is None
    hall.says("Dan", batch=(1, 0), at=1)
    assert hall.batches.book.seat_of("Dan") is not None


def test_a_seat_whose_trainer_can_have_the_values_no_more_is_given_up() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.says("Ann", batch=(0, 0), at=0)
    hall.batches.advance()
    assert not hall.unseated, "it may load them yet"
    hall.commits()
    hall.say_all((1, 0), at=1)
    hall.says("Ann", batch=(0, 0), at=1)
    hall.batches.advance()
    assert hall.unseated == {
        "Ann": "its trainer has not the values of version 0, and nobody gives them any more"
    }
    assert not hall.voided, "Bob does its share"


def test_a_stage_without_anybody_who_has_the_values_begins_the_batch_again_at_the_newest() -> None:
    hall = Hall()
    hall.goes_ahead()
    hall.commits()
    hall.say_all((1, 0), at=1)
    hall.says("cyd", batch=(1, 1), at=1, trainer=1)
    hall.batches.advance()
    assert hall.voided == ["nobody of stage 1 has the values of version 0 any more"]
    hall.say_all((1, 1), at=1)
    hall.batches.advance()
    assert hall.begun[-1] == (1, 1, 4), "the samples before it are learned"


def test_P7_a_batch_is_not_passed_over_before_the_one_before_it_is_learned() -> None:
    hall = Hall()
    hall.goes_ahead()
    for micro in range(4):
        hall.says("cyd", batch=(1, 0), unusable=mask_to_bytes(1 << micro))
        hall.batches.advance()
    skipped = [each.micro for each in hall.desk.written if isinstance(each, MicroSkipped)]
    assert skipped == [0, 1, 2] and hall.batches.book.batch is not None
    hall.commits()
    hall.say_all((1, 0), at=1)
    hall.says("cyd", batch=(1, 0), at=1, unusable=mask_to_bytes(0b1000))
    hall.batches.advance()
    assert hall.batches.book.cursor == (0, 8), "now it is"


@pytest.mark.parametrize(
    ("said", "at", "holds", "missed"),
    [((3, 2), 2, True, False), ((3, 2), 3, True, False), ((2, 1), 2, False, False), ((3, 3), 3, False, True)],
)
def test_who_has_the_values_of_a_batch(said: tuple[int, int], at: int, holds: bool, missed: bool) -> None:
    beat = BatchBeat(said[0], 1, 0, b"", b"", True, 1.0, weights=said[1])
    here = FragmentBeat(0, at, bytes(32), 0, 0, 0, False, ())
    worker = Worker("ann", beat=replace(BARE_BEAT, fragments=(here,), batch=beat))
    batch = Batch(3, 0, 0, 8, 4, weights=2)
    assert (holds_weights(worker, batch), missed_weights(worker, batch)) == (holds, missed)
