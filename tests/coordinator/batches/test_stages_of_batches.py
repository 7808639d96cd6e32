"""Batches of a model in stages: one seat in one stage, each microbatch once in every stage, and who is given up."""

from __future__ import annotations

from msgspec.structs import replace

from farflung.collectives.pipeline.seats import Seat as Row
from farflung.collectives.pipeline.seats import Table
from farflung.coordinator.batches.batch_book import (
    Batch,
    BatchBook,
    BookedSeat,
    MicroSkipped,
    Seated,
    TakenBack,
    Unseated,
)
from farflung.coordinator.batches.batch_members import BatchMembers, staged_tick_of
from farflung.coordinator.batches.batches import Batches
from farflung.coordinator.batches.seat_choice import WHY_GIVEN_UP, StageLoad, chosen, loads_of
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import DataFixed
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.limits import SEATS_TOLD
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import FragmentBeat
from farflung.protocol.mode_words import BatchBeat, BatchTick, Complaint
from rig.batch_desk import Desk, Worker
from rig.made_run import BARE_BEAT

MANIFEST = Manifest.from_toml(
    '[run]\nmin_peers = 2\n[pipeline]\nbatch = 8\nstages = 2\n[merge]\npolicy = "mean"\n[outer]\nstep = "adamw"\n'
    "[round]\ndeadline_s = 10.0",
    "run.toml",
)
EVERY = tuple(range(8))


class Hall:
    """Peers of two stages: those whose names begin with a capital letter are sources."""

    def __init__(self, *peers: str) -> None:
        self.workers = {peer: Worker(peer, stage=0 if peer[0].isupper() else 1) for peer in peers}
        self.in_round: set[str] = set()
        self.flying: set[int] = set()
        self.aborted: list[int] = []
        self.met: set[frozenset[str]] = set()  # pairs, though neither can be dialled
        self.desk = Desk(Ledger(LedgerRules(8, 3, 2)), MANIFEST)
        self.desk.ledger.apply(DataFixed(samples=100, peer="Ann"))
        house = BatchMembers(
            lambda: self.workers,
            lambda peer: True,
            self.in_round.__contains__,
            self.flying.__contains__,
            self._abort,
            meet=lambda one, other: frozenset((one, other)) in self.met,
        )
        self.batches = Batches(self.desk, house)
        for peer in peers:
            self.says(peer)
        self.turn()
        for peer in peers:
            self.says(peer)

    def _abort(self, stage: int, why: str) -> None:
        self.aborted.append(stage)
        self.flying.discard(stage)
        self.in_round -= {peer for peer, worker in self.workers.items() if worker.stage == stage}

    def turn(self) -> None:
        self.batches.advance()

    def says(self, peer: str, *counted: int, ready: bool = False, **changes: object) -> BatchTick | None:
        worker = self.workers[peer]
        seat = BatchBook.of(self.desk.ledger).seat_of(peer)
        said = BatchBeat(
            0, seat.number if seat is not None else 0, 0, mask_to_bytes(mask_of(counted)), b"", True, 1.0
        )
        at = FragmentBeat(worker.stage, 0, bytes(32), 0, 0, 0, ready, ())
        worker.beat = replace(BARE_BEAT, fragments=(at,), sections=(replace(said, **changes),))
        return self.batches.on_beat(worker, worker.beat)

    def granted(self, peer: str) -> list[int]:
        tick = self.says(peer)
        return [m for first, stop in tick.granted for m in range(first, stop)] if tick is not None else []

    @property
    def unseated(self) -> list[tuple[str, str]]:
        return [(each.peer, each.reason) for each in self.desk.written if isinstance(each, Unseated)]

    @property
    def skipped(self) -> list[int]:
        return [each.micro for each in self.desk.written if isinstance(each, MicroSkipped)]


def counted_by(hall: Hall, **mine: tuple[int, ...]) -> None:
    for peer, micros in mine.items():
        hall.says(peer, *micros)


def whole(hall: Hall) -> dict[str, tuple[int, ...]]:
    """Every microbatch is counted in both stages: by Ann, and by bob and cyd."""
    for _ in range(8):
        hall.says("Ann", *hall.granted("Ann"))
    counted_by(hall, bob=EVERY[:4], cyd=EVERY[4:])
    return {"Ann": EVERY, "bob": EVERY[:4], "cyd": EVERY[4:]}


def test_a_batch_begins_when_every_stage_is_served() -> None:
    hall = Hall("Ann", "Bea")
    assert hall.batches.book.batch is None
    assert hall.batches.shares(0)[1] == (
        "a batch begins when every stage is served: stage 1: 0 of at least 1 verified peers"
    )
    hall.workers["bob"] = Worker("bob", stage=1)
    hall.says("bob")
    hall.turn()
    assert hall.batches.book.batch is not None


def test_where_nobody_is_moved_people_hear_which_stage_stays_empty() -> None:
    told = "a batch begins when every stage is served: stage 1: 0 of at least 1 verified peers"
    hall = Hall("Ann", "Bea")
    nobody_moves = MANIFEST.model_copy(
        update={"pipeline": MANIFEST.pipeline.model_copy(update={"rebalance_s": 0.0})}
    )
    hall.desk.manifest = nobody_moves
    hall.workers["Ann"].verified = False
    assert hall.batches.shares(0)[1] == f"{told}, and rebalance_s = 0 moves nobody there"


def test_only_sources_are_granted_microbatches_and_everybody_sits_in_its_stage() -> None:
    hall = Hall("Ann", "bob", "cyd")
    for _ in range(8):
        hall.says("Ann", *hall.granted("Ann"))
    assert (len(hall.granted("Ann")), hall.granted("bob"), hall.granted("cyd")) == (8, [], [])
    seats = [(each.peer, each.stage) for each in hall.desk.written if isinstance(each, Seated)]
    assert seats == [("Ann", 0), ("bob", 1), ("cyd", 1)]


def test_P11_rounds_open_when_every_stage_has_counted_and_frozen_all() -> None:
    hall = Hall("Ann", "bob", "cyd")
    for _ in range(8):
        hall.says("Ann", *hall.granted("Ann"))
    counted_by(hall, bob=EVERY[:4])
    hall.turn()
    assert hall.batches.shares(0) == ({}, "waiting for microbatches: 4 of 8 counted in stage 1")
    tick = hall.says("Ann", *EVERY)
    assert tick is not None and not tick.freeze, "stage 1 may still need it"
    counted_by(hall, cyd=EVERY[4:])
    tick = hall.says("Ann", *EVERY, ready=True)
    assert tick is not None and tick.freeze
    assert hall.batches.shares(0) == ({}, "every microbatch is counted: waiting for the sums of bob, cyd")
    hall.says("bob", *EVERY[:4], ready=True)
    hall.says("cyd", *EVERY[4:], ready=True)
    first, second = hall.batches.shares(0)[0], hall.batches.shares(1)[0]
    assert first.keys() == {"Ann"} and second.keys() == {"bob", "cyd"}


def test_P2_a_stage_whose_round_failed_opens_again_beside_those_in_flight() -> None:
    hall = Hall("Ann", "bob", "cyd")
    mine = whole(hall)
    hall.flying.add(0)  # its members say no more that they are ready: they are in the round
    hall.in_round.add("Ann")
    assert hall.batches.under_way
    hall.says("bob", *mine["bob"], ready=True)
    hall.says("cyd", *mine["cyd"], ready=True)
    assert hall.batches.shares(1)[0].keys() == {"bob", "cyd"}


def test_what_a_stage_has_counted_follows_every_word_and_every_seat() -> None:
    """It is kept from beat to beat, since a crowd asks for it a thousand times a second."""
    hall = Hall("Ann", "bob", "cyd")

    def counted(*micros: int) -> None:
        assert hall.batches.counted_in(1) == mask_of(micros)

    counted()
    hall.says("bob", 0, 1)
    counted(0, 1)
    hall.says("cyd", 2)
    counted(0, 1, 2)
    hall.says("bob", 1)  # its trainer says less now
    counted(1, 2)
    hall.says("bob", 1, 3, version=7)  # of another batch
    counted(2)
    hall.says("bob", 4)
    counted(2, 4)
    hall.workers.pop("cyd")
    hall.turn()
    counted(4)
    hall.workers["cyd"] = Worker("cyd", stage=1)
    hall.desk.now += 9.0
    hall.says("cyd")
    hall.says("cyd", 5)
    counted(4, 5)
    hall.workers["bob"].process = b"second"
    hall.turn()
    counted(5)


def test_P11_of_two_seats_that_name_one_microbatch_the_younger_is_given_up() -> None:
    hall = Hall("Ann", "bob", "cyd")
    counted_by(hall, bob=(1, 2), cyd=(2, 3))
    hall.turn()
    assert hall.unseated == [("cyd", "it counted what another one had counted")]
    assert hall.batches.counted_in(1) == 0b110


def test_what_later_stages_count_is_of_this_batch() -> None:
    hall = Hall("Ann", "bob")
    hall.says("bob", 1, 11)
    assert hall.batches.counted_in(1) == 0b10


def test_P11_the_loss_of_a_seat_costs_its_stage_alone() -> None:
    hall = Hall("Ann", "bob", "cyd")
    whole(hall)
    assert hall.batches.complete
    del hall.workers["cyd"]
    hall.turn()
    assert [peer for peer, _ in hall.unseated] == ["cyd"] and not hall.batches.complete
    assert (hall.batches.counted_in(0), hall.batches.counted_in(1)) == (0xFF, 0x0F)
    table = hall.batches.book.table
    assert table.last_loss(1) == table.number and not table.last_loss(0)


def test_P15_who_hangs_with_work_in_hand_is_given_up_and_who_waits_for_others_is_not() -> None:
    hall = Hall("Ann", "Bea", "bob", "cyd")
    hall.granted("Ann")
    for at_s in (0.0, 4.0, 4.0, 4.0):
        hall.desk.now += at_s
        hall.says("Ann", holds=0)  # all of its own are in stage 1
        hall.says("bob", holds=2, made=3)
        hall.says("cyd", holds=1, made=int(hall.desk.now))
        hall.turn()
    assert hall.unseated == [("bob", "it holds microbatches and has counted none for 10 s")]
    tick = hall.says("bob")
    assert tick is not None and tick.seat == 0


def test_P15_who_was_too_slow_for_others_serves_a_stage_that_nobody_else_does() -> None:
    hall = Hall("Ann", "bob", "cyd")
    hall.says("bob", holds=1)
    hall.desk.now += 11.0
    hall.turn()
    assert [peer for peer, _ in hall.unseated] == ["bob"]
    tick = hall.says("bob")
    assert tick is not None and not tick.seat
    del hall.workers["cyd"]
    hall.turn()
    tick = hall.says("bob")
    assert tick is not None and tick.seat


def test_a_microbatch_without_a_gradient_is_tried_by_another_of_the_stage_and_then_left_out() -> None:
    hall = Hall("Ann", "bob", "cyd")
    hall.says("bob", 1, unusable=b"\x01")
    hall.turn()
    assert hall.unseated == [("bob", "it gets no finite gradient out of one")] and not hall.skipped
    assert not any(isinstance(each, TakenBack) for each in hall.desk.written)
    hall.says("cyd", 2, unusable=b"\x01")
    hall.turn()
    assert hall.skipped == [0] and len(hall.unseated) == 1
    tick = hall.says("cyd", 2)
    assert tick is not None and tick.skipped == b"\x01"


def test_P15_a_source_owes_nothing_of_what_a_later_stage_skipped_and_is_granted_the_rest() -> None:
    hall = Hall("Ann", "bob")
    first = hall.granted("Ann")
    assert 0 < len(first) < len(EVERY)
    hall.says("bob", unusable=mask_to_bytes(mask_of(first)))
    hall.turn()
    assert hall.skipped == first
    for _ in EVERY:
        hall.says("Ann", *(micro for micro in hall.granted("Ann") if micro not in first))
    assert hall.granted("Ann") == list(EVERY)


def test_P11_sums_that_have_a_skipped_microbatch_in_them_are_void_in_every_stage() -> None:
    """A gradient overflows behind a stage that had counted it, whose round may even be in flight."""
    hall = Hall("Ann", "bob", "cyd")
    whole(hall)
    hall.flying.add(1)
    hall.in_round |= {"bob", "cyd"}
    hall.says("Ann", *EVERY[1:], unusable=b"\x01")
    hall.turn()
    assert hall.skipped == [0], "there is no other source"
    assert hall.aborted == [1] and [peer for peer, _ in hall.unseated] == ["bob"]
    assert hall.batches.counted_in(1) == 0xF0
    hall.says("cyd", 0, *EVERY[4:])  # it had been on its way
    hall.turn()
    assert hall.unseated[-1] == ("cyd", "it counted a microbatch that is skipped")


def test_a_batch_of_which_nothing_is_left_ends_the_rounds_in_flight() -> None:
    hall = Hall("Ann", "bob")
    for _ in range(8):
        hall.says("Ann", *hall.granted("Ann"))
    counted_by(hall, bob=EVERY)
    hall.flying.add(1)
    hall.in_round.add("bob")
    hall.says("Ann", unusable=b"\xff")
    hall.turn()
    assert hall.skipped == list(EVERY) and hall.aborted == [1]
    assert hall.batches.book.cursor == (0, 8) and not hall.batches.book.seats


def test_a_round_that_waited_long_and_failed_costs_nobody_its_seat() -> None:
    """Its members have not heard yet that they are to freeze again."""
    hall = Hall("Ann", "bob", "cyd")
    mine = whole(hall)
    hall.flying |= {0, 1}
    hall.in_round |= {"Ann", "bob", "cyd"}
    hall.turn()
    hall.desk.now += 500.0
    for peer, micros in mine.items():
        hall.says(peer, *micros)
    hall.turn()
    hall.flying.clear()
    hall.in_round.clear()
    hall.turn()
    assert not hall.unseated and hall.batches.complete


# ---- what is told ------------------------------------------------------------------------------------------


def test_a_member_hears_of_the_seats_beside_its_own_when_it_knows_an_older_table() -> None:
    book = BatchBook()
    for number in range(1, 6):
        book.sit_down(BookedSeat(number, f"p{number}", b"", 0, stage=number - 1))
    batch = Batch(0, 0, 0, 8, 8)
    told = staged_tick_of(book, batch, None, False, stage=1, knows=4)
    assert told.table is not None and [(row.number, row.stage) for row in told.table] == [
        (1, 0),
        (2, 1),
        (3, 2),
    ]
    assert staged_tick_of(book, batch, None, False, stage=1, knows=5).table is None


def test_of_the_seats_that_are_gone_the_newest_are_told() -> None:
    book = BatchBook()
    for number in range(1, SEATS_TOLD + 9):
        book.sit_down(BookedSeat(number, f"p{number}", b"", 0))
        if number > 2:
            book.get_up(number)
    told = staged_tick_of(book, Batch(0, 0, 0, 8, 8), None, False, stage=0, knows=0)
    assert told.table is not None and len(told.table) == SEATS_TOLD
    rows = [row.number for row in told.table]
    assert rows[:2] == [1, 2] and rows[-1] == SEATS_TOLD + 8
    assert max(row.gone for row in told.table) == book.table.last_loss(0)


def test_every_table_that_members_hear_is_one_that_they_accept() -> None:
    hall = Hall("Ann", "bob", "cyd")
    del hall.workers["cyd"]
    hall.turn()
    tick = hall.says("Ann")
    assert tick is not None and tick.table is not None
    rows = tuple(Row(r.number, r.peer, r.stage, r.share, r.since, r.gone) for r in tick.table)
    assert Table(tick.table_no, rows).last_loss(1) == tick.table_no


# ---- which stage a newcomer gets ---------------------------------------------------------------------------


def loads(*members: int, cost: tuple[float, ...] = ()) -> list[StageLoad]:
    return [StageLoad(count, (cost or (1.0,) * len(members))[stage]) for stage, count in enumerate(members)]


def test_P17_an_empty_stage_comes_first_then_what_lies_on_the_disk_then_the_emptiest() -> None:
    assert chosen((0, 1, 2), False, loads(1, 2, 0), 1) == 2
    assert chosen((0, 1), True, loads(1, 2, 0), 1) == 0, "it could not hold stage 2"
    assert chosen((1, 0, 2), True, loads(1, 2, 1), 1) == 1
    assert chosen((1, 0, 2), True, loads(1, 2, 0), 1) == 2, "the state of another stage is of no use there"
    assert chosen((0, 1, 2), False, loads(2, 1, 1), 1) == 1
    assert chosen((0, 1, 2), False, loads(2, 1, 2), 2) == 1, "a stage with too few members"
    assert chosen((2, 0, 1), True, loads(0, 0, 0), 1) == 2


def test_a_stage_that_costs_more_gets_more_members() -> None:
    assert chosen((0, 1), False, loads(2, 3, cost=(1.0, 2.0)), 1) == 1


def test_P6_a_stage_whose_state_a_single_peer_has_gets_the_next_one_however_slow_another_is() -> None:
    assert chosen((0, 1, 2), False, loads(2, 2, 1, cost=(9.0, 1.0, 1.0)), 1) == 2
    assert chosen((0, 1, 2), False, loads(1, 2, 1, cost=(1.0, 9.0, 2.0)), 1) == 2, "of two the slower one"
    assert chosen((0, 1), False, loads(2, 2, 1, cost=(9.0, 1.0, 1.0)), 1) == 0, "it could not hold stage 2"
    assert [each.cost for each in loads_of([0, 1], (), {0: [0.5, 0.7, 0.0], 1: [2.0]}, 2)] == [0.6, 2.0]
    assert [each.cost for each in loads_of([0, 1], (), {0: [0.5]}, 2)] == [1.0, 1.0], "not all are known"


# ---- neighbours that can't work with each other ----------------------------------------------------------------------


def seat_no(hall: Hall, peer: str) -> int:
    seat = BatchBook.of(hall.desk.ledger).seat_of(peer)
    return seat.number if seat is not None else 0


def complain(hall: Hall, of: str, *peers: str, damaged: bool = False, seconds: float = 20.0) -> None:
    """So long these say with every beat that they can't work with somebody, and the others say that all is well."""
    until = hall.desk.now + seconds
    while hall.desk.now < until:
        hall.desk.now += 1.0
        for peer in hall.workers:
            about = (Complaint(seat_no(hall, of), damaged),) if peer in peers and seat_no(hall, of) else ()
            hall.says(peer, complains=about)
        hall.turn()


def test_a_batch_is_not_held_up_by_a_neighbour_that_most_can_t_work_with() -> None:
    hall = Hall("Ann", "Bea", "cyd", "dan")
    complain(hall, "cyd", "Ann", "Bea", damaged=True, seconds=3.0)
    told = "what 2 of the stage beside its own should get from it is damaged"
    assert hall.unseated == hall.desk.struck == [("cyd", told)]
    complain(hall, "cyd", "Ann", "Bea", damaged=True)
    assert [peer for peer, _ in hall.unseated] == ["cyd", "cyd"], "twice, and it gets no other seat"
    assert seat_no(hall, "cyd") == 0 and seat_no(hall, "dan")


def test_P9_whoever_complains_alone_gives_up_its_own_seat_and_is_soon_left_out() -> None:
    hall = Hall("Ann", "Bea", "cyd", "dan")
    complain(hall, "cyd", "Ann", seconds=60.0)
    assert [peer for peer, _ in hall.unseated] == ["Ann", "Ann"] and not hall.desk.struck
    assert seat_no(hall, "Ann") == 0 and seat_no(hall, "cyd")
    del hall.workers["Bea"]
    complain(hall, "cyd", "Ann", seconds=4.0)
    assert seat_no(hall, "Ann"), "as long as there is somebody else"


def test_others_are_told_whom_somebody_complains_of_and_people_which_pair_is_waited_for() -> None:
    hall = Hall("Ann", "bob")
    complain(hall, "bob", "Ann")
    tick = hall.says("Ann", complains=(Complaint(seat_no(hall, "bob"), False),))
    assert tick is not None and tick.doubted == (seat_no(hall, "bob"),)
    assert not hall.unseated
    told = "; Ann and bob can't work with each other, and no other seat could stand in"
    assert hall.batches.shares(0)[1].endswith(told)
    tick = hall.says("Ann")
    assert tick is not None and tick.doubted == ()


def test_what_is_said_of_another_batch_or_seat_is_no_complaint() -> None:
    hall = Hall("Ann", "bob", "cyd")
    for _ in range(30):
        hall.desk.now += 1.0
        hall.says("Ann", complains=(Complaint(seat_no(hall, "bob"), False),), version=7)
        hall.says("bob")
        hall.says("cyd")
        hall.turn()
    assert not hall.unseated


def test_a_round_at_its_end_is_aborted_where_its_member_is_given_up() -> None:
    hall = Hall("Ann", "bob", "cyd")
    hall.flying.add(1)
    hall.in_round.add("bob")
    complain(hall, "bob", "Ann", seconds=3.0)
    assert hall.aborted == [1] and [peer for peer, _ in hall.unseated] == ["bob"]


# ---- peers that nobody can dial --------------------------------------------------------------------------------------


def test_a_batch_is_not_held_up_by_two_peers_of_a_stage_that_both_can_t_be_dialled() -> None:
    hall = Hall("Ann", "bob", "cyd", "dan")
    for _ in range(8):
        hall.says("Ann", *hall.granted("Ann"))
    counted_by(hall, bob=EVERY[:4], cyd=EVERY[4:])
    hall.workers["bob"].dialable = hall.workers["cyd"].dialable = False
    hall.turn()
    assert hall.batches.complete and not hall.unseated, "both dial dan"
    del hall.workers["dan"]
    hall.turn()
    hall.desk.now += 4.9
    hall.turn()
    assert not [peer for peer, _ in hall.unseated if peer != "dan"], "it may come back in a moment"
    hall.desk.now += 0.2
    hall.turn()
    told = WHY_GIVEN_UP
    assert hall.unseated[-1] == ("cyd", told) and not hall.batches.complete
    hall.desk.now += 10.0
    hall.says("cyd")
    hall.says("bob", *EVERY)
    hall.turn()
    assert seat_no(hall, "cyd") == 0 and hall.batches.complete, (
        "who is alone in its stage needs no line for its round"
    )
    hall.workers["dan"] = Worker("dan", stage=1, verified=False)
    hall.says("bob", *EVERY[:4])
    hall.says("cyd")
    assert not seat_no(hall, "cyd"), "who holds no state has no part in a round"
    hall.workers["dan"].verified = True
    hall.says("cyd")
    assert seat_no(hall, "cyd"), "they can meet at somebody else's"


def test_P3_who_is_in_a_round_keeps_its_seat_though_nobody_of_its_stage_can_be_dialled_any_more() -> None:
    hall = Hall("Ann", "bob", "cyd")
    hall.workers["bob"].dialable = hall.workers["cyd"].dialable = False
    hall.in_round |= {"bob", "cyd"}
    hall.flying.add(1)
    whole(hall)
    for _ in range(3):
        hall.desk.now += 5.0
        hall.turn()
    assert not hall.unseated
    hall.in_round.clear()
    hall.flying.clear()
    hall.turn()
    assert [peer for peer, _ in hall.unseated] == ["cyd"]


def test_the_oldest_seat_has_a_stage_without_a_door_for_itself() -> None:
    hall = Hall("Ann", "bob", "cyd", "dan")
    for peer in ("bob", "cyd", "dan"):
        hall.workers[peer].dialable = False
    hall.turn()
    hall.desk.now += 5.0
    hall.turn()
    assert [peer for peer, _ in hall.unseated] == ["cyd", "dan"]


def test_seats_of_a_stage_without_a_door_stay_where_one_of_them_meets_all_the_others() -> None:
    hall = Hall("Ann", "bob", "cyd", "dan")
    for peer in ("bob", "cyd", "dan"):
        hall.workers[peer].dialable = False
    hall.met = {frozenset(("cyd", "bob")), frozenset(("cyd", "dan"))}
    hall.turn()
    hall.desk.now += 5.0
    hall.turn()
    assert not hall.unseated
    hall.met.pop()
    hall.turn()
    hall.desk.now += 5.0
    hall.turn()
    assert [peer for peer, _ in hall.unseated] == ["cyd", "dan"], "the oldest has the stage for itself"


def test_a_newcomer_that_meets_the_others_of_its_stage_gets_a_seat_beside_them() -> None:
    hall = Hall("Ann", "bob")
    hall.workers["bob"].dialable = False
    hall.workers["cyd"] = Worker("cyd", stage=1, dialable=False)
    hall.says("cyd")
    hall.turn()
    hall.says("cyd")
    assert [each.peer for each in hall.batches.book.of_stage(1)] == ["bob"]
    hall.met = {frozenset(("bob", "cyd"))}
    hall.says("cyd")
    hall.turn()
    hall.says("cyd")
    assert {each.peer for each in hall.batches.book.of_stage(1)} == {"bob", "cyd"}


def test_who_does_not_hold_the_state_yet_is_no_way_for_anybody() -> None:
    hall = Hall("Ann", "bob", "cyd", "dan")
    hall.workers["bob"].dialable = hall.workers["cyd"].dialable = hall.workers["dan"].verified = False
    hall.turn()
    hall.desk.now += 5.0
    hall.turn()
    assert [peer for peer, _ in hall.unseated if peer != "dan"] == ["cyd"]


def test_whoever_can_t_be_dialled_goes_where_somebody_can_and_the_next_one_that_can_to_who_is_alone() -> None:
    def of(*reached: int, members: tuple[int, ...] = (1, 1, 1)) -> list[StageLoad]:
        return [StageLoad(count, 1.0, stage in reached) for stage, count in enumerate(members)]

    assert chosen((0, 1, 2), False, of(1, 2), 1, dialable=False) == 1
    assert chosen((0, 1), True, of(1, 2), 1, dialable=False) == 1, "its state on disk or not"
    assert chosen((0,), False, of(1, 2), 1, dialable=False) == 0, "it could hold no other"
    assert chosen((0, 1, 2), False, of(1, members=(0, 1, 1)), 1, dialable=False) == 0, (
        "nobody is there to be reached"
    )
    assert chosen((0, 1, 2), False, of(0, 1), 1) == 2
    assert chosen((0, 1, 2), True, of(0, 1), 1) == 2 and chosen((0, 1, 2), True, of(1), 1) == 0
    assert chosen((0, 1, 2), False, of(0, 1, members=(1, 0, 1)), 1) == 1, (
        "a stage that nobody holds comes first"
    )
    assert [each.reached for each in loads_of([0, 1], {1}, {}, 2)] == [False, True]


def test_people_are_told_where_two_neighbouring_stages_can_t_reach_each_other() -> None:
    hall = Hall("Ann", "bob", "cyd")
    hall.workers["Ann"].dialable = hall.workers["bob"].dialable = False
    assert hall.batches.shares(0)[1] == "waiting for microbatches: 0 of 8 counted in stage 0"
    hall.workers["cyd"].dialable = False
    hall.desk.now += 0.1  # it is looked for once a turn
    assert hall.batches.shares(0)[1].endswith(
        "; nobody of stages 0 and 1 can be dialled, and they don't meet past their routers or at a relay, so that they "
        "can't reach each other: one peer there needs an open port (farflung doctor)"
    )
    hall.met.add(frozenset(("Ann", "cyd")))
    hall.desk.now += 0.1
    assert "can be dialled" not in hall.batches.shares(0)[1], "somebody there meets somebody here"
    del hall.workers["bob"], hall.workers["cyd"]
    hall.desk.now += 0.1
    assert "can be dialled" not in hall.batches.shares(0)[1], (
        "nobody is in stage 1: that is what it waits for"
    )
