"""Seats that follow the work: which peer moves to which stage, when it goes, and what a liar gains by it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from farflung.collectives.pipeline.seats import Traffic
from farflung.coordinator.batches.batch_book import (
    BELIEVED,
    BatchBegun,
    BatchBook,
    Mate,
    Moving,
    SeatRates,
    Unseated,
    news_of_shares,
)
from farflung.coordinator.batches.batch_members import AWAIT_DEAD, BatchMembers
from farflung.coordinator.batches.batches import Batches
from farflung.coordinator.batches.rebalancing import ARRIVES_WITHIN_S, PAYS_WITHIN_S, RESTS_S
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import DataFixed
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import FragmentBeat
from farflung.protocol.mode_words import BatchBeat
from farflung.protocol.model_schema import ModelSchema, StageSpec
from rig.batch_desk import Desk, Worker
from rig.made_run import BARE_BEAT

LOOK_S = 5.0
RUN = (
    "[run]\nmin_peers = 1\n[pipeline]\nbatch = 8\nstages = {stages}\nrebalance_s = 5.0\nmin_per_stage = {least}\n"
    '[merge]\npolicy = "mean"\n[outer]\nstep = "adamw"\n[round]\ndeadline_s = 1000.0\n'
)


@dataclass
class Hall:
    """A run whose peers are simply there: a's serve stage 0, b's stage 1, and so on; all could hold any."""

    least: int = 1
    stages: int = 2
    workers: dict[str, Worker] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)  # whose trainer is not there
    line: tuple[int, bool] = (0, False)  # bytes a second, and whether that is rough

    def __post_init__(self) -> None:
        run = RUN.format(least=self.least, stages=self.stages)
        self.desk = Desk(Ledger(LedgerRules(8, 3, self.stages)), Manifest.from_toml(run, "run.toml"))
        self.desk.ledger.apply(DataFixed(samples=1000, peer="a1"))
        self.saved: set[str] = set()
        self.in_round: set[str] = set()
        self.met: set[frozenset[str]] = set()  # pairs, though neither can be dialled
        house = BatchMembers(
            lambda: self.workers,
            lambda peer: True,
            self.in_round.__contains__,
            lambda stage: False,
            lambda stage, why: None,
            lambda stage: self.saved,
            lambda one, other: frozenset((one, other)) in self.met,
        )
        self.batches = Batches(self.desk, house)

    @staticmethod
    def of(*counts: int, least: int = 1) -> Hall:
        hall = Hall(least, len(counts))
        for stage, count in enumerate(counts):
            for number in range(count):
                hall.comes(f"{'abc'[stage]}{number + 1}", stage)
        hall.says()
        hall.turn()
        hall.says()
        return hall

    def comes(self, peer: str, stage: int) -> None:
        self.workers[peer] = Worker(peer, stage=stage, fits=tuple(range(self.stages)))

    def says(self) -> None:
        for peer, worker in self.workers.items():
            seat = BatchBook.of(self.desk.ledger).seat_of(peer)
            version = self.desk.ledger.version
            number, unit_s = seat.number if seat is not None else 0, self.units.get(peer, 1.0)
            said = BatchBeat(version, number, 0, b"", b"", peer not in self.idle, unit_s)
            at = FragmentBeat(worker.stage, version, bytes(32), 0, 0, 0, False, ())
            line, rough = self.line
            beat = replace(BARE_BEAT, up_bytes_per_s=line, down_bytes_per_s=line, rough=rough)
            worker.beat = replace(beat, fragments=(at,), sections=(said,))
            self.batches.on_beat(worker, worker.beat)

    def turn(self) -> None:
        self.batches.advance()

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.desk.now += LOOK_S
            self.says()
            self.turn()
        self.turn()

    def next_batch(self) -> None:
        """The one that is under way is committed, and the next one begins."""
        book = BatchBook.of(self.desk.ledger)
        for each in self.desk.ledger.books:
            each.version += 1
        book.batch = None
        self.turn()
        self.says()

    def arrives(self, peer: str, stage: int) -> None:
        self.comes(peer, stage)
        self.says()
        self.turn()

    @property
    def moved(self) -> list[tuple[str, int, int]]:
        return [(each.peer, each.stage, each.to) for each in self.desk.written if isinstance(each, Moving)]

    @property
    def unseated(self) -> list[str]:
        return [each.peer for each in self.desk.written if isinstance(each, Unseated)]


def test_an_empty_stage_is_filled_at_once_when_two_looks_have_found_it_empty() -> None:
    hall = Hall.of(2, 1)
    del hall.workers["b1"]
    hall.turn()
    hall.look()
    assert not hall.moved, "whoever was there may come back"
    hall.look()
    assert hall.moved == [("a1", 0, 1)] and hall.batches.book.seat_of("a1") is None
    assert hall.batches.moves.goes_to("a1") == 1 and hall.batches.moves.goes_to("a2") is None


def test_P17_after_a_restart_nobody_fills_a_stage_whose_members_are_still_coming_back() -> None:
    hall = Hall.of(2, 1)
    for book in hall.desk.ledger.books:
        book.version = 1  # a stage that nobody serves is looked at without waiting for the next look
    del hall.workers["b1"]
    hall.batches = Batches(hall.desk, hall.batches.house)
    hall.desk.began_at = hall.desk.now
    waits_s = AWAIT_DEAD * hall.desk.manifest.net.dead_after_s
    for _ in range(int(waits_s) - 1):
        hall.desk.now += 1.0
        hall.says()
        hall.turn()
    assert hall.batches.book.of_stage(1) and not hall.moved and hall.batches.moves.told == ""
    hall.look(4)
    assert not hall.batches.book.of_stage(1) and [each[1:] for each in hall.moved] == [(0, 1)]


def test_who_wrote_a_checkpoint_of_the_empty_stage_fills_it() -> None:
    hall = Hall.of(3, 1)
    hall.saved = {"a3"}
    del hall.workers["b1"]
    hall.look(3)
    assert hall.moved == [("a3", 0, 1)]


def test_P17_the_last_one_of_a_stage_does_not_leave_it_for_an_empty_one() -> None:
    hall = Hall.of(1, 1)
    del hall.workers["b1"]
    hall.look(6)
    assert not hall.moved and not hall.desk.notes
    hall = Hall.of(2, 2, least=2)
    del hall.workers["b1"]
    hall.look(6)
    assert not hall.moved and not hall.desk.notes


def test_nobody_moves_to_a_stage_that_somebody_came_to_meanwhile() -> None:
    hall = Hall.of(2, 2, least=1)
    for peer in ("b1", "b2"):
        del hall.workers[peer]
    hall.look()
    hall.arrives("b3", 1)
    hall.look(2)
    assert not hall.moved


def test_P14_who_moves_works_on_until_its_batch_is_committed_and_others_hold_the_next_version() -> None:
    hall = Hall.of(3, 1)
    hall.look()
    assert hall.batches.moves.under_way is not None, "a stage with a single seat is helped at the first look"
    hall.look(3)
    assert not hall.moved and not hall.unseated
    for peer in ("a2", "a3"):
        hall.workers[peer].verified = False  # they are just applying it
    hall.next_batch()
    assert hall.unseated == ["a1"] and not hall.moved
    hall.look()
    assert not hall.moved
    for peer in ("a2", "a3"):
        hall.workers[peer].verified = True
    hall.turn()
    assert hall.moved == [("a1", 0, 1)]
    hall.look()
    assert hall.batches.book.batch is not None and hall.batches.book.seat_of("a2") is not None
    assert hall.batches.book.seat_of("a1") is None, "it gets no other seat in its old stage"


def test_P17_one_at_a_time_and_nobody_for_three_looks_after_it() -> None:
    hall = Hall.of(5, 1)
    hall.look()
    hall.next_batch()
    assert hall.moved == [("a1", 0, 1)]
    hall.comes("a1", 1)
    hall.says()
    assert hall.batches.book.seat_of("a1") is not None, "at once"
    hall.arrives("a1", 1)
    hall.turn()
    assert hall.desk.notes[-1] == "a1 serves stage 1 now" and hall.batches.moves.under_way is None
    del hall.workers["b1"]  # the stage has a single seat again
    hall.turn()
    for _ in range(2):
        hall.look()
        assert hall.batches.moves.under_way is None
        again = Batches(hall.desk, hall.batches.house)  # a restart: when somebody went is durable
        again.advance()
        hall.desk.now += LOOK_S / 10
        again.moves._look_at = hall.desk.now
        again.advance()
        assert again.moves.under_way is None
    hall.look()
    assert hall.batches.moves.under_way is not None


def test_the_slowest_stage_gets_a_peer_if_that_gains_enough_at_two_looks() -> None:
    hall = Hall.of(4, 2)
    hall.units = {"b1": 1.0, "b2": 1.0}
    hall.look()
    assert hall.batches.moves.under_way is None, "at one look"
    hall.look()
    assert hall.batches.moves.under_way is not None
    hall.next_batch()
    assert hall.moved == [("a1", 0, 1)]
    [record] = [each for each in hall.desk.written if isinstance(each, Moving)]
    assert record.reason == "it is the slowest, and does 3.00 instead of 2.00 microbatches/s then"


@pytest.mark.parametrize(("first", "second"), [(3, 3), (4, 3), (2, 2)])
def test_a_run_that_is_in_balance_stays_as_it_is(first: int, second: int) -> None:
    hall = Hall.of(first, second)
    hall.look(6)
    assert hall.batches.moves.under_way is None


def test_P17_a_stage_of_two_gives_nobody_away_for_a_gain() -> None:
    hall = Hall.of(2, 3)
    hall.units = {f"b{number}": 20.0 for number in (1, 2, 3)}
    hall.look(4)
    assert hall.batches.moves.under_way is None


def test_only_who_said_that_the_stage_fits_it_moves_and_not_the_only_one_that_can_be_dialled() -> None:
    hall = Hall.of(4, 2)
    hall.workers["a1"].fits = (0,)
    for peer in ("a3", "a4"):
        hall.workers[peer].dialable = False
    hall.workers["b1"].dialable = hall.workers["b2"].dialable = False
    hall.workers["a2"].fits = (0,)
    hall.look(3)
    assert hall.batches.moves.under_way is None, "a3 and a4 would reach nobody there"
    hall.workers["a2"].fits = (0, 1)
    hall.look(2)
    assert hall.batches.moves.under_way is not None and hall.batches.moves.under_way.peer == "a2"


def test_who_can_t_be_dialled_moves_where_somebody_can_and_the_only_door_of_a_stage_stays() -> None:
    hall = Hall.of(3, 1)
    for peer in ("a2", "a3"):
        hall.workers[peer].dialable = False
    hall.look()
    assert hall.batches.moves.under_way is not None and hall.batches.moves.under_way.peer == "a2"
    for door in (False, True):
        hall = Hall.of(3, 1, 1)
        hall.workers["a1"].dialable, hall.workers["c1"].dialable = False, door
        for peer in ("a2", "a3"):
            hall.workers[peer].fits = (0,)
        del hall.workers["b1"]
        hall.look(3)
        assert bool(hall.moved) is door, "of a stage that is empty both neighbours have to have a door"


@pytest.mark.parametrize(
    ("undialled", "goes"), [(("b2",), True), (("b2", "a1"), False), (("b2", "b3"), False)]
)
def test_the_only_door_of_a_stage_fills_an_empty_one_if_those_who_stay_reach_each_other_and_their_neighbours(
    undialled: tuple[str, ...], goes: bool
) -> None:
    """B2 dials a1 and, in the stage that was empty, b1."""
    hall = Hall.of(1, 3, 1)
    for peer in undialled:
        hall.workers[peer].dialable = False
    for peer in ("a1", "b2", "b3"):
        hall.workers[peer].fits = (int(peer[0] == "b"),)
    if "b3" not in undialled:
        del hall.workers["b3"]
    del hall.workers["c1"]
    hall.look(4)
    assert hall.moved == ([("b1", 1, 2)] if goes else [])


def test_who_can_t_be_dialled_moves_where_it_meets_all_who_are_there() -> None:
    for met in ((), ("b1",), ("b1", "b2")):
        hall = Hall.of(4, 2)
        hall.met = {frozenset(("b1", "b2")), *(frozenset(("a4", mate)) for mate in met)}
        for peer in ("a1", "a2", "a3"):
            hall.workers[peer].fits = (0,)
        for peer in ("a4", "b1", "b2"):
            hall.workers[peer].dialable = False
        hall.look(3)
        move = hall.batches.moves.under_way
        assert (move and move.peer) == ("a4" if len(met) == 2 else None)


def test_an_empty_stage_gets_whoever_is_missed_least_of_the_stage_with_the_most() -> None:
    hall = Hall.of(2, 3, 1)
    hall.units = {"a1": 0.1, "a2": 0.1, "b2": 3.0}
    del hall.workers["c1"]
    hall.look(3)
    assert hall.moved == [("b2", 1, 2)]


def test_nobody_moves_for_a_gain_that_does_not_pay_for_the_fetch() -> None:
    stages = tuple(StageSpec(stage, stage, 1000, 0) for stage in range(2))
    model = ModelSchema((), 4, 2000, 2000, bytes(32), stages)
    for line, rough, moves in ((10, False, False), (10, True, True), (1000, False, True)):
        hall = Hall.of(4, 2)
        hall.desk.ledger.model = model
        hall.line = line, rough
        hall.look(2)
        assert (hall.batches.moves.under_way is not None) is moves, "48 kB, for half as much again"


def test_whoever_fetches_a_large_state_for_long_is_on_its_way_and_nobody_follows_it() -> None:
    stages = tuple(StageSpec(stage, stage, 1000, 0) for stage in range(2))
    for elements, follows in ((4, True), (4000, False)):
        hall = Hall.of(5, 1)
        hall.desk.ledger.model = ModelSchema((), elements, 2000, 2000, bytes(32), stages)
        hall.look()
        hall.next_batch()
        hall.comes("a1", 1)
        hall.workers["a1"].verified = False
        hall.look(round(PAYS_WITHIN_S / LOOK_S) + 8)
        assert (hall.batches.moves.under_way is not None) is follows, f"{elements} values in a chunk"


def test_nobody_moves_while_the_run_is_paused_or_a_stage_has_not_measured_anything() -> None:
    hall = Hall.of(3, 1)
    hall.desk.held = "paused"
    hall.look(3)
    assert hall.batches.moves.under_way is None
    hall = Hall.of(4, 2)
    hall.units = {"b1": 0.0, "b2": 0.0}
    hall.look(3)
    assert hall.batches.moves.under_way is None


def test_P14_who_is_in_a_round_does_not_go_before_that_is_over() -> None:
    hall = Hall.of(3, 1)
    hall.look()
    hall.in_round.add("a1")
    hall.next_batch()
    assert not hall.moved and not hall.unseated
    hall.in_round.clear()
    hall.turn()
    assert hall.moved == [("a1", 0, 1)]


def test_a_move_is_off_where_its_reason_is_gone_before_the_batch_is_over() -> None:
    hall = Hall.of(3, 2, least=2)
    del hall.workers["b2"]
    hall.look(2)
    assert hall.batches.moves.under_way is not None
    hall.arrives("b3", 1)
    hall.next_batch()
    assert not hall.moved and hall.batches.moves.under_way is None
    hall = Hall.of(3, 1)
    hall.look()
    assert hall.batches.moves.under_way is not None
    del hall.workers["a3"]
    hall.next_batch()
    assert not hall.moved and "a1" not in hall.unseated, "two seats stay"


def test_P14_a_seat_whose_peer_is_about_to_leave_ends_the_batch_and_nobody_comes_before() -> None:
    hall = Hall.of(3, 1)
    hall.workers["b1"].leaving = True  # it stays until its sums are safe
    hall.look(3)
    assert hall.batches.moves.under_way is not None and not hall.moved and not hall.unseated
    hall.next_batch()
    assert hall.moved == [("a1", 0, 1)]


def test_nobody_helps_a_single_one_while_a_stage_is_empty_that_nobody_can_fill() -> None:
    hall = Hall.of(4, 1, 1)
    for worker in hall.workers.values():
        worker.fits = (0, 1)
    del hall.workers["c1"]
    for _ in range(6):
        hall.look()
        assert hall.batches.moves.under_way is None


def test_a_move_that_fails_is_over_and_leaves_the_run_as_if_the_peer_had_left() -> None:
    hall = Hall.of(3, 1)
    hall.look()
    hall.next_batch()
    assert hall.moved == [("a1", 0, 1)]
    del hall.workers["a1"]
    hall.desk.now += ARRIVES_WITHIN_S + 1
    hall.turn()
    assert hall.batches.moves.under_way is None
    assert hall.desk.notes[-1] == "a1 has not come to serve stage 1"
    hall = Hall.of(3, 1)
    hall.look()
    hall.next_batch()
    hall.comes("a1", 1)
    hall.workers["a1"].verified = False  # its fetch does not end
    hall.desk.now += ARRIVES_WITHIN_S + 1
    hall.turn()
    assert hall.batches.moves.under_way is not None
    hall.desk.now += PAYS_WITHIN_S
    hall.turn()
    assert hall.batches.moves.under_way is None


def test_who_leaves_before_it_goes_moves_nowhere() -> None:
    hall = Hall.of(3, 1)
    hall.look()
    hall.workers["a1"].leaving = True
    hall.next_batch()
    assert not hall.moved and hall.batches.moves.under_way is None


# ---- who lies about serving a stage, or about being about to -----------------------------------------------


def test_P9_who_says_that_a_stage_fits_it_and_never_goes_is_sent_once_an_hour_at_most() -> None:
    hall = Hall.of(3, 1)
    del hall.workers["b1"]
    hall.look(2)
    assert hall.moved == [("a1", 0, 1)]
    hall.look(round(ARRIVES_WITHIN_S / LOOK_S) + 4)
    assert hall.moved[1:] == [("a2", 0, 1)], "the stage is empty: somebody else is sent"
    hall.arrives("a2", 1)
    hall.comes("a4", 0)
    hall.comes("a5", 0)
    hall.look(8)
    hall.next_batch()
    assert hall.moved[2:] == [("a3", 0, 1)], "and for a single one, too"
    hall.arrives("a3", 1)
    hall.workers.pop("a2")
    hall.look(8)
    hall.next_batch()
    assert hall.moved[3:] == [("a4", 0, 1)]
    hall.arrives("a4", 1)
    hall.workers.pop("a4")
    for peer in ("a6", "a7"):
        hall.comes(peer, 0)
    hall.desk.now += RESTS_S
    hall.look(4)
    hall.next_batch()
    assert hall.moved[4:] == [("a1", 0, 1)], "it may have had bad luck"


def test_P9_the_only_one_that_could_fill_a_stage_is_sent_again() -> None:
    hall = Hall.of(3, 1)
    for peer in ("a2", "a3"):
        hall.workers[peer].fits = (0,)
    del hall.workers["b1"]
    hall.look(2)
    hall.look(round(ARRIVES_WITHIN_S / LOOK_S) + 4)
    assert hall.moved == [("a1", 0, 1)] * 2


def test_P15_no_move_is_waited_for_while_another_stage_is_empty() -> None:
    """A batch in which nobody serves a stage never ends, and with it no wait for its end."""
    for gone in (False, True):
        hall = Hall.of(4, 1, 2)
        hall.look()
        if gone:
            hall.next_batch()
        assert hall.moved == [("a1", 0, 1)] * gone and hall.batches.moves.under_way is not None
        for peer in ("c1", "c2"):
            del hall.workers[peer]
        hall.look()
        assert hall.batches.moves.under_way is not None, "they may come back"
        hall.look(6)
        assert hall.moved[gone:] in ([("a2", 0, 2)], [("a1", 0, 2)])


def test_P15_a_peer_that_others_keep_from_moving_gets_its_seat_back() -> None:
    """They flip: holding the state when the move is chosen, and not when it is to go."""
    hall = Hall.of(3, 1)
    hall.look()
    for peer in ("a2", "a3"):
        hall.workers[peer].verified = False
    hall.next_batch()
    hall.look(2)
    assert hall.unseated == ["a1"] and not hall.moved
    hall.look(round(ARRIVES_WITHIN_S / LOOK_S))
    assert hall.batches.moves.under_way is None and hall.batches.book.seat_of("a1") is not None
    for peer in ("a2", "a3"):
        hall.workers[peer].verified = True
    hall.look(8)
    assert hall.batches.moves.under_way is not None and hall.batches.moves.under_way.peer == "a2", "once each"


def test_P17_a_seat_whose_peer_holds_no_state_is_none_that_is_left_behind() -> None:
    hall = Hall.of(3, 1)
    hall.next_batch()
    hall.workers["a3"].verified = False
    hall.look(8)
    assert hall.batches.moves.under_way is None and not hall.moved
    hall.workers["a2"].verified = False
    del hall.workers["b1"]
    hall.look(8)
    assert not hall.moved and not hall.unseated[1:], "a1 is the only one of its stage that works"


def test_P17_a_seat_whose_trainer_is_not_there_is_none_that_is_left_behind() -> None:
    hall = Hall.of(3, 1)
    hall.idle = {"a3"}
    hall.look(4)
    assert hall.batches.moves.under_way is None


def test_P17_a_move_that_the_stage_can_t_spare_any_more_is_off() -> None:
    hall = Hall.of(3, 1)
    hall.look()
    assert hall.batches.moves.under_way is not None
    del hall.workers["a3"]
    hall.turn()
    hall.turn()
    hall.next_batch()
    assert not hall.moved and hall.batches.moves.under_way is None


def test_nobody_moves_out_of_a_round() -> None:
    hall = Hall.of(3, 1)
    hall.look()
    hall.in_round.add("a1")
    hall.next_batch()
    assert not hall.moved
    hall.in_round.clear()
    hall.turn()
    assert hall.moved == [("a1", 0, 1)]


def test_who_is_about_to_leave_holds_nothing_for_those_who_stay() -> None:
    """Its stage keeps two who hold what was committed, and one of them goes."""
    hall = Hall.of(4, 1)
    hall.look()
    for peer in ("a2", "a3"):
        hall.workers[peer].leaving = True
    hall.next_batch()
    assert not hall.moved, "a4 alone would have it"
    assert hall.batches.moves.rates().sums == [2.0, 1.0], "nor does it compute for them"
    hall.workers["a3"].leaving = False
    hall.turn()
    assert hall.moved == [("a1", 0, 1)]


def test_who_has_come_to_its_new_stage_is_not_on_its_way_out_of_it() -> None:
    hall = Hall.of(3, 1)
    hall.look()
    hall.next_batch()
    assert hall.batches.moves.is_due("a1") and not hall.batches.moves.is_due("a2")
    hall.comes("a1", 1)
    assert not hall.batches.moves.is_due("a1")


def test_a_stage_below_min_per_stage_is_filled_and_nobody_moves_if_somebody_came_meanwhile() -> None:
    hall = Hall.of(3, 2, least=2)
    del hall.workers["b2"]
    hall.look(2)
    assert hall.batches.moves.under_way is not None and hall.batches.moves.under_way.fills
    assert (
        hall.batches.moves.told == "a1 is to move from stage 0 to stage 1: stage 1 has 1 of at least 2 peers"
    )
    hall.arrives("b3", 1)
    hall.next_batch()
    assert not hall.moved and hall.batches.moves.under_way is None


def test_the_stage_with_the_fewest_peers_is_filled_first() -> None:
    hall = Hall.of(4, 3, 3, least=2)
    for peer in ("b2", "b3", "c1", "c2", "c3"):
        del hall.workers[peer]
    hall.look(3)
    assert hall.moved == [("a1", 0, 2)]


def test_P17_a_stage_of_two_gives_nobody_to_one_with_a_single_seat() -> None:
    hall = Hall.of(2, 1, 3)
    for peer in ("c1", "c2", "c3"):
        hall.workers[peer].fits = (2,)
    hall.units = {"b1": 9.0}
    hall.look(4)
    assert not hall.desk.notes, "nobody is even told to"


def test_P15_the_only_one_that_can_be_dialled_stays() -> None:
    hall = Hall.of(4, 2)
    for peer in ("a2", "a3", "a4", "b1", "b2"):
        hall.workers[peer].dialable = False
    hall.look(4)
    assert hall.batches.moves.under_way is None, "its stage would have nobody, and the others nobody to go to"


def test_nobody_moves_for_a_gain_that_was_not_measured() -> None:
    hall = Hall.of(4, 2)
    hall.units = {f"b{number}": 0.0 for number in (1, 2)}
    hall.look(4)
    assert hall.batches.moves.under_way is None


def test_before_anything_was_learned_nobody_holds_any_state_and_all_count() -> None:
    hall = Hall.of(3, 1)
    hall.workers["b1"].verified, hall.saved = False, {"a1"}
    del hall.workers["a3"]  # or a stage with a single seat would get one of three
    hall.look(round(PAYS_WITHIN_S / LOOK_S) + 4)
    assert not hall.moved and hall.batches.moves.under_way is None


def test_P15_who_holds_no_state_of_its_stage_for_half_an_hour_does_not_count_as_serving_it() -> None:
    for saved in (set[str](), {"a2"}):
        hall = Hall.of(3, 1)
        hall.next_batch()
        hall.workers["b1"].verified = False
        hall.look(round(PAYS_WITHIN_S / LOOK_S))
        assert not hall.moved
        hall.saved = saved
        hall.look(4)
        assert hall.moved == [("a2", 0, 1)] * len(saved), "nobody else could get the state there"


@pytest.mark.parametrize(
    ("saved", "moved"), [(set[str](), []), ({"a2"}, [("a2", 0, 1)]), ({"a2", "b3"}, []), ({"gone"}, [])]
)
def test_P15_a_state_that_nobody_of_its_stage_has_is_fetched_by_who_wrote_a_checkpoint_of_it_elsewhere(
    saved: set[str], moved: list[tuple[str, int, int]]
) -> None:
    hall = Hall.of(3, 2)
    hall.next_batch()
    hall.saved = saved
    hall.look(3)
    assert not hall.moved, "the state is there"
    del hall.workers["b1"], hall.workers["b2"]
    hall.turn()
    hall.comes("b3", 1)
    hall.workers["b3"].verified = False
    hall.look()
    assert not hall.moved, "whoever had it may be back soon"
    hall.look(3)
    assert hall.moved == moved
    if moved:
        assert any("nobody in stage 1 has its state" in told for told in hall.desk.notes)


def test_nobody_moves_for_less_than_run_toml_asks_for() -> None:
    hall = Hall.of(4, 3)
    hall.units = {
        f"b{number}": 3 / 2.75 for number in (1, 2, 3)
    }  # 2.75/s: 3/s after a move, 1.09 times as much
    hall.look(4)
    assert hall.batches.moves.under_way is None
    hall.units = {f"b{number}": 3 / 2.5 for number in (1, 2, 3)}
    hall.look(4)
    assert hall.batches.moves.under_way is not None


def test_nobody_moves_who_would_fetch_longer_than_the_move_gains() -> None:
    stage = StageSpec(0, 0, 1000, 0)
    model = ModelSchema((), 1000, 2000, 2000, bytes(32), stages=(stage, stage))
    hall = Hall.of(4, 2)
    hall.desk.ledger.model = model
    hall.line = 12_000_000 // 1000, False  # the state takes 1,000 s; half of 1,800 s are gained
    hall.look(4)
    assert hall.batches.moves.under_way is None
    hall.line = 12_000_000 // 800, False
    hall.look(4)
    assert hall.batches.moves.under_way is not None


def test_that_one_moves_after_whose_move_the_slowest_stage_is_the_fastest() -> None:
    hall = Hall.of(5, 2)
    hall.units = {"a1": 2.0}
    hall.look(2)
    assert hall.batches.moves.under_way is not None and hall.batches.moves.under_way.peer == "a2"


def test_a_rough_rate_blames_no_line() -> None:
    hall = Hall.of(1, 1)
    hall.line = 7, False
    hall.says()
    assert [(each.up_bytes_per_s, each.down_bytes_per_s) for each in hall.batches.moves.rates().crew] == [
        (7, 7)
    ] * 2
    hall.line = 7, True
    hall.says()
    assert [(each.up_bytes_per_s, each.down_bytes_per_s) for each in hall.batches.moves.rates().crew] == [
        (0, 0)
    ] * 2


# ---- rates and shares --------------------------------------------------------------------------------------

NO_LINES = [Traffic(0, 0), Traffic(0, 0)]


def test_a_liar_counts_for_four_of_the_usual_at_most() -> None:
    crew = [Mate("a", 0, 1.0), Mate("b", 0, 1.0), Mate("liar", 0, 1e-9), Mate("c", 1, 1.0)]
    rates = SeatRates(crew, NO_LINES)
    assert rates.sums == [1.0 + 1.0 + 4.0, 1.0]
    assert rates.shares() == {"a": 1.0, "b": 1.0, "liar": 4.0, "c": 1.0}
    lines = [Mate("a", 0, 1.0, 10.0, 10.0), Mate("b", 0, 1.0, 10.0, 10.0), Mate("liar", 0, 1.0, 1e12, 1e12)]
    rates = SeatRates(lines, [Traffic(100, 100)])
    assert [rates.of(mate, 0) for mate in lines] == [0.1, 0.1, pytest.approx(0.4)]


@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1e9), st.integers(0, 1 << 61)), max_size=6))
@example([(0, 5e-324, 1), (1, 1.0, 1)])
@example([(0, 1e9, 1), (1, 5e-324, 1 << 61)])
def test_P9_whatever_members_say_of_themselves_has_finite_rates_and_shares(
    said: list[tuple[int, float, int]],
) -> None:
    crew = [Mate(f"p{n}", stage, unit_s, line, line) for n, (stage, unit_s, line) in enumerate(said)]
    rates = SeatRates(crew, [Traffic(100, 7), Traffic(7, 100)])
    assert all(0 <= each < math.inf for each in rates.sums)
    assert all(1 / BELIEVED - 0.001 <= share <= BELIEVED for share in rates.shares().values())
    assert all(0 <= rates.after(mate, 1 - mate.stage) + 1e-6 < math.inf for mate in crew)


def test_P9_a_seat_that_says_it_takes_no_time_at_all_stops_no_batch_and_no_status() -> None:
    hall = Hall.of(1, 2)
    hall.units = {"a1": 5e-324}
    hall.look()
    hall.next_batch()
    assert hall.batches.book.batch is not None
    assert json.dumps(hall.batches.told_of_stages(), allow_nan=False)


def test_a_share_is_a_quarter_of_the_usual_at_least() -> None:
    rates = SeatRates([Mate("a", 0, 1.0), Mate("b", 0, 1.0), Mate("slow", 0, 100.0)], [Traffic(0, 0)])
    assert rates.shares() == {"a": 1.0, "b": 1.0, "slow": 0.25}


def test_a_slow_peer_stays_slow_in_another_stage_and_costs_differ_by_stage() -> None:
    crew = [Mate("a", 0, 1.0), Mate("b", 0, 2.0), Mate("c", 0, 1.0), Mate("d", 1, 3.0)]
    rates = SeatRates(crew, NO_LINES)
    assert rates.of(crew[0], 1) == pytest.approx(1 / 3) and rates.of(crew[1], 1) == pytest.approx(1 / 6)
    assert rates.after(crew[0], 1) == pytest.approx(min(1.5, 2 / 3))


def test_before_every_stage_has_measured_something_peers_count_alike() -> None:
    rates = SeatRates([Mate("a", 0, 5.0), Mate("b", 0, 1.0), Mate("c", 1)], NO_LINES)
    assert not rates.measured and rates.sums == [2.0, 1.0]
    slow = [Mate("a", 0, 5.0, 1.0, 1.0), Mate("c", 1)]
    assert SeatRates(slow, [Traffic(100, 100)] * 2).sums == [1.0, 1.0], "a line that takes 100 s, too"


def test_shares_are_told_with_the_next_batch_and_only_when_they_have_changed_by_much() -> None:
    assert news_of_shares({"a": 1.0, "b": 1.0}, {"a": 1.2, "b": 0.9, "new": 4.0}) == {}
    assert news_of_shares({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.5}) == {"a": 1.0, "b": 0.5}
    hall = Hall.of(2, 3)
    hall.units = {"b3": 4.0}
    hall.says()
    number = hall.batches.book.table_no
    hall.next_batch()
    begun = [each for each in hall.desk.written if isinstance(each, BatchBegun)][-1]
    rows = {row.peer: row.share for row in hall.batches.book.rows}
    assert rows == {"a1": 1.0, "a2": 1.0, "b1": 1.0, "b2": 1.0, "b3": 0.25} and begun.shares
    assert hall.batches.book.table_no == number + 1, "one table for both"
    hall.next_batch()
    assert not [each for each in hall.desk.written if isinstance(each, BatchBegun)][-1].shares
