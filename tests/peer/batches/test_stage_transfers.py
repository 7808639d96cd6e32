"""Microbatches of a stage at its agent: what the trainer is handed, what is kept and sent, and when a seat is lost."""

from __future__ import annotations

import msgspec
import pytest

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import header_of
from farflung.collectives.pipeline.seats import SeatPlace
from farflung.collectives.round.effects import SendFrame
from farflung.peer.batches import stage_transfers as module
from farflung.peer.batches.effects import ForgetCrossings
from farflung.peer.batches.stage_transfers import is_crossing
from farflung.peer.crossings.shared_slots import PLACES as BELT_PLACES
from farflung.peer.local.words import WorkDone
from farflung.peer.machine.effects import Note
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, Spoiled, bare_answer
from farflung.tests.rig.stage_row import SAMPLES, TAG, StagePeer, StageRow, crossing

NAMES = ("ann", "bob", "cyd", "dan", "eve", "fay")


def row_of(*per_stage: int, count: int = 8) -> StageRow:
    row, names = StageRow(len(per_stage)), iter(NAMES)
    for stage, seats in enumerate(per_stage):
        for _ in range(seats):
            row.seat(next(names), stage)
    row.begin(0, count)
    return row


@pytest.mark.parametrize("per_stage", [(1, 1), (1, 1, 1), (2, 2, 2), (2, 1, 2)])
def test_P11_every_microbatch_goes_there_and_back_once_in_every_stage(per_stage: tuple[int, ...]) -> None:
    row = row_of(*per_stage)
    row.run()
    assert row.is_whole()
    for peer in row.peers.values():
        counts = peer.crossings._counters.as_dict()
        assert set(name for name, times in counts.items() if times) == {"accepted"}, (
            "P8, and nothing was lost"
        )


def test_a_source_is_told_which_samples_they_are_and_the_last_ones_end_with_the_batch() -> None:
    row = StageRow(2)
    ann = row.seat("ann", 0)
    row.seat("bob", 1)
    ann.slow = True
    row.begin(0, 2)
    assert [(h.way, h.micro, h.epoch, h.start, h.stop, h.place) for h in ann.hands] == [
        ("forward", 0, 1, 100, 102, 0),
        ("forward", 1, 1, 102, 103, 1),
    ]
    assert SAMPLES == 2 and mask_from_bytes(ann.crossings.beat(True).counted) == 0
    assert ann.crossings.open == 0b11, "and only so many at once"


def test_the_next_version_forgets_what_was_kept_of_the_one_before() -> None:
    row = row_of(1, 1, 1)
    row.run()
    assert all(peer.kept for peer in row.peers.values())
    row.begin(1, 4)
    row.run()
    assert row.is_whole()
    assert {key[0] for peer in row.peers.values() for key in peer.kept} == {1}


def test_sums_are_asked_for_once_all_are_counted_in_the_slot_that_is_free() -> None:
    row = row_of(1, 1, 1)
    row.run()
    row.tick(freeze=True)
    row.tick(freeze=True)
    assert [(word.version, word.slot) for word in row.freezes("bob")] == [(0, 1)]


def test_P11_a_death_in_the_middle_costs_its_share_and_nothing_else() -> None:
    row = row_of(1, 2, 1, count=12)
    bob = row.peers["bob"]
    bob.slow = True
    row.run()
    row.answer(bob)
    row.run()
    bob.up = False
    row.unseat("bob")
    row.pass_time(3)
    assert row.is_whole(), [row.counted(stage) for stage in range(3)]
    assert set(row.counted(0).values()) == set(row.counted(2).values()) == {1}


def test_P11_a_seat_that_is_gone_takes_its_sums_along_and_the_next_one_begins_with_nothing() -> None:
    row = row_of(1, 2, 1, count=12)
    bob = row.peers["bob"]
    row.run()
    assert bob.sums
    row.unseat("bob")
    row.tick()
    assert (bob.crossings.seat, bob.crossings.counted, bob.kept) == (0, 0, {}), "it has heard so"
    row.pass_time(2)
    row.seat("bob", 1)
    row.pass_time(2)
    assert row.is_whole()


@pytest.mark.parametrize("how", ["its trainer dies", "it loads the same version again", "an older one"])
def test_P11_sums_that_are_gone_end_the_seat_and_the_beat_says_so(how: str) -> None:
    row = row_of(1, 1, 1)
    bob = row.peers["bob"]
    row.begin(1, 8)
    row.run()
    old = bob.crossings.seat
    if how == "its trainer dies":
        bob.crossings.lose_sums()
    bob.crossings.on_load(0 if how == "an older one" else 1)
    bob.crossings.on_loaded()
    said = bob.crossings.beat(True)
    assert (said.trainer, said.seat, said.counted, said.want) == (1, 0, b"", True)
    row.tick()
    assert bob.crossings.seat == 0 and not bob.hands, "the old seat is told still, and is of no use"
    bob.sums.clear()
    row.unseat("bob")
    row.seat("bob", 1)
    row.pass_time(3)
    assert row.is_whole() and bob.crossings.seat > old


def test_P11_nobody_works_in_a_seat_that_the_table_shows_gone_or_anothers() -> None:
    row = row_of(1, 2)
    bob, seat = row.peers["bob"], row.number_of("bob")
    row.run()
    due = row.due(bob)
    row.unseat("bob")
    told = msgspec.structs.replace(row.due(bob), seat=seat)  # of a coordinator that contradicts itself
    assert bob.crossings.on_tick(told) and bob.crossings.seat == 0
    zoe = StageRow(2).seat("zoe", 1)
    zoe.crossings.on_load(0)
    zoe.crossings.on_loaded()
    zoe.crossings.on_tick(
        msgspec.structs.replace(due, table=told.table, table_no=told.table_no, seat=row.number_of("cyd"))
    )
    zoe.crossings.words(None, 0, 0.0)
    assert not zoe.crossings.is_open, "that seat is cyd's"


def test_P11_what_was_made_for_sums_that_are_gone_counts_nowhere() -> None:
    """It is under way while the trainer is told to load again, and names a microbatch that the new seat works on."""
    row = row_of(1, 1, 1)
    cyd = row.peers["cyd"]
    row.begin(1, 8)
    cyd.slow = True
    row.run()
    late = cyd.hands[0]
    row.unseat("cyd")
    number = max(row.table.seats) + 1
    row.table = row.table.seated(number, "cyd", 2)
    assert cyd.crossings.on_tick(row.due(cyd))
    cyd.crossings.forget()
    cyd.crossings.on_load(1)  # it was told to, and has not
    word = made_of(late)
    assert cyd.crossings.place_of(word) is None
    assert cyd.crossings.on_made(word, crossing(0, True), 0.0) == [] and cyd.crossings.counted == 0
    assert not [e for e in cyd.crossings.words(None, 0, 0.0) if not isinstance(e, ForgetCrossings)]


def test_P11_a_word_of_an_older_version_is_not_of_the_microbatch_that_has_its_number_now() -> None:
    row = row_of(1, 1)
    bob = row.peers["bob"]
    bob.slow = True
    row.run()
    late = bob.hands[0]
    row.begin(1, 8)
    row.run()
    now = next(hand for hand in bob.hands if (hand.way, hand.micro) == (late.way, late.micro))
    assert bob.crossings.place_of(made_of(late)) is None
    assert bob.crossings.place_of(made_of(now)) == now.place


def test_P12_nothing_is_handed_out_for_sums_of_the_version_before() -> None:
    """The trainer has loaded the next one, and the tick that speaks of it is still to come."""
    row = row_of(1, 1)
    ann, bob = row.peers["ann"], row.peers["bob"]
    ann.slow = True
    row.run()
    bob.crossings.on_load(1)
    bob.crossings.on_loaded()
    row.answer(ann)
    row.run()
    assert bob.kept and not bob.hands and not bob.sums


def test_a_table_that_is_older_than_the_one_that_is_known_says_nothing() -> None:
    row = row_of(1, 1)
    bob = row.peers["bob"]
    old = msgspec.structs.replace(row.due(bob), table=(), table_no=row.table.number - 1)
    assert not bob.crossings.on_tick(old)
    assert bob.crossings.table_no == row.table.number


def test_the_line_is_for_crossings_until_the_sums_are_frozen() -> None:
    row = row_of(1, 1)
    row.run()
    row.tick()
    assert all(peer.crossings.is_open for peer in row.peers.values())
    row.tick(freeze=True)
    assert not any(peer.crossings.is_open for peer in row.peers.values())


def test_P11_a_seat_stays_void_though_its_trainer_is_lost_twice_before_the_next_word() -> None:
    row = row_of(1, 1)
    bob = row.peers["bob"]
    row.run()
    bob.crossings.lose_sums()
    bob.crossings.lose_sums()
    row.load(bob)
    row.tick()
    assert bob.crossings.seat == 0 and not bob.hands


def test_a_new_seat_sends_nothing_to_whom_it_can_t_reach() -> None:
    row, (ann, bob, cyd) = StageRow(2), NAMES[:3]
    row.seat(ann, 0), row.seat(bob, 1), row.seat(cyd, 1)
    row.peers[ann].crossings.on_lines({bob})
    row.begin(0, 8)
    row.run()
    assert row.is_whole() and not row.peers[bob].kept


def test_P8_frames_that_wait_in_a_seat_that_is_lost_end_in_a_counter() -> None:
    row = row_of(1, 1)
    bob = row.peers["bob"]
    row.run()
    for micro in range(3):  # of a seat that no table shows yet
        early = header_of(CrossingKind.HELD, TAG, 9, row.table.number + 1, 0, micro)
        assert bob.crossings.on_frame("zoe", Frame(early), 0.0) == []
    assert bob.crossings.early_count == 3 and bob.crossings._counters.as_dict()["stale"] == 0
    bob.crossings.lose_sums()
    assert bob.crossings.early_count == 0 and bob.crossings._counters.as_dict()["stale"] == 3


def made_of(hand: object) -> WorkDone:
    return WorkDone(
        way=hand.way,  # type: ignore[attr-defined]
        version=hand.version,  # type: ignore[attr-defined]
        micro=hand.micro,  # type: ignore[attr-defined]
        bytes_made=100,
        tokens=4,
        loss=1.0,
        problem="",
    )


def test_what_gives_nothing_is_said_to_people_and_to_the_coordinator() -> None:
    row = row_of(1, 1)
    bob = row.peers["bob"]
    bob.slow = True
    row.run()
    stuck = bob.hands[0].micro
    row.answer(bob, problem="its loss is nan")
    assert any(isinstance(each, Note) and "its loss is nan" in each.text for each in bob.told)
    assert mask_from_bytes(bob.crossings.beat(True).unusable) == 1 << stuck
    bob.slow = False
    row.run()
    assert stuck not in row.counted(1) and len(row.counted(1)) == row.count - 1


def test_what_the_batch_goes_without_is_computed_awaited_and_asked_for_by_nobody() -> None:
    row = row_of(1, 1, 1, count=16)
    bob, cyd = row.peers["bob"], row.peers["cyd"]
    cyd.slow = True
    row.run()
    for _ in range(8):  # as many as the window of the source lets in: none of them comes back
        if cyd.hands:
            row.answer(cyd, problem="its loss is nan")
            row.run()
    row.skipped = mask_from_bytes(cyd.crossings.beat(True).unusable)
    assert row.skipped and bob.crossings.counted == 0
    cyd.slow = False
    row.pass_time(1)
    assert row.is_whole(), [row.counted(stage) for stage in range(3)]
    row.frames.clear()
    asked = [e for _ in range(8) for peer in row.peers.values() for e in timed(row, peer)]
    assert not [e for e in asked if e.frame.header.kind == CrossingKind.WANT_GRADIENT]


def timed(row: StageRow, peer: StagePeer) -> list[SendFrame]:
    row.now += 5.0
    return [each for each in peer.crossings.on_timer(row.now) if isinstance(each, SendFrame)]


def test_who_holds_work_and_makes_none_shows_in_its_beat() -> None:
    row = row_of(1, 1)
    bob = row.peers["bob"]
    bob.slow = True
    row.run()
    said = bob.crossings.beat(True)
    assert (said.holds, said.made) == (4, 0), "two in hand, and two that wait for them"
    row.answer(bob)
    row.run()
    said = bob.crossings.beat(True)
    assert said.made == 1 and said.holds >= 3


def test_P8_what_the_own_trainer_made_is_compared_with_the_border_before_anybody_gets_it() -> None:
    row = row_of(1, 1)
    ann = row.peers["ann"]
    ann.slow = True
    row.run()
    row.answer(ann, payload=crossing(1.0, backwards=True))
    row.answer(ann, payload=crossing(float("nan"), backwards=False))
    assert not row.frames and ann.crossings.beat(True).unusable == b"\x03"
    assert sum("does not fit the border" in each.text for each in ann.told if isinstance(each, Note)) == 2


def test_P8_a_crossing_that_is_none_is_refused_and_asked_for_again() -> None:
    row = row_of(1, 1)
    ann, bob = row.peers["ann"], row.peers["bob"]
    ann.slow = True
    row.run()
    bad = crossing(float("inf"), backwards=False)
    row.answer(ann)
    sender, _, frame = row.frames.popleft()
    spoiled = type(frame)(frame.header, bad)
    row.carry_out(bob, bob.crossings.on_frame(sender, spoiled, 0.0))
    counts = bob.crossings._counters.as_dict()
    assert counts["malformed"] == 1 and not bob.kept
    row.carry_out(bob, bob.crossings.on_spoiled(sender, Spoiled(Verdict.BAD_HASH, frame.header), 0.0))
    assert [f.header.kind for _, _, f in row.frames] == [CrossingKind.WANT_ACTIVATION] * 2
    assert any(isinstance(each, Note) and "damaged again" in each.text for each in bob.told)
    ann.slow = False
    row.run()
    assert row.is_whole()


def test_what_is_counted_is_told_when_there_is_nothing_more_to_do_and_not_at_every_microbatch() -> None:
    row = row_of(1, 1)
    bob = row.peers["bob"]
    bob.crossings.on_told(0.0)
    row.run()
    assert bob.crossings.has_news(0.0), "it is the whole batch, for which everybody waits"
    bob.crossings.on_told(0.0)
    assert not bob.crossings.has_news(9.0)


def test_one_of_several_seats_tells_more_often_while_a_batch_is_young() -> None:
    """It can't know whether the others have the rest: the last word is late by a part of the batch; beats are few."""
    for told_at, early, late in ((0.0, 0.014, 0.016), (0.4, 0.52, 0.54), (8.0, 8.2, 8.3)):
        row = row_of(1, 2)
        bob = row.peers["bob"]
        bob.crossings.on_told(told_at)
        row.run()
        assert 0 < bob.crossings.counted.bit_count() < 8, "cyd has the rest"
        assert not bob.crossings.has_news(early) and bob.crossings.has_news(late)


def test_a_trainer_that_waits_for_the_stage_behind_has_no_news_of_a_part() -> None:
    row = row_of(1, 1, 1)
    bob, cyd = row.peers["bob"], row.peers["cyd"]
    cyd.slow = True
    row.run()
    row.answer(cyd)
    row.run()
    assert bob.crossings.counted and not bob.crossings.open, "it is idle, and one is counted"
    assert not bob.crossings.has_news(9.0), "no batch ends by it"
    cyd.slow = False
    while cyd.hands:
        row.answer(cyd)
        row.run()
    assert row.is_whole() and bob.crossings.has_news(9.0)


def test_crossings_are_told_from_other_questions() -> None:
    later = header_of(Kind.LATER, TAG, 3, 1, 0, 5, int(CrossingKind.WANT_GRADIENT))
    of_state = bare_answer(Kind.LATER, Header(Kind.WANT_STATE, TAG, version=3, chunk=2)).header
    assert is_crossing(later) and not is_crossing(of_state)
    assert is_crossing(header_of(CrossingKind.ROOM, TAG, 3, 1, 0, 5)) and not is_crossing(
        Header(Kind.STATE, TAG)
    )


def test_frames_for_a_peer_without_a_seat_end_in_a_counter() -> None:
    row = row_of(1, 1)
    ann, lone = row.peers["ann"], StageRow(2).seat("zoe", 1)
    row.run()
    ann.slow = True
    row.begin(1, 4)
    row.answer(ann)
    sender, _, frame = row.frames.popleft()
    assert lone.crossings.on_frame(sender, frame, 0.0) == []
    counts = lone.crossings._counters.as_dict()
    assert counts["stale"] + lone.crossings.early_count == 1


def test_r3_what_neighbours_tell_a_newcomer_before_it_hears_of_its_seat_is_kept_for_it() -> None:
    """Else it would have to ask, and nobody of its stage would compute for a second what is there already."""
    row = row_of(2, 1)
    row.run()
    row.unseat("bob")
    eve, cyd = row.seat("eve", 0), row.peers["cyd"]
    assert not cyd.crossings.on_tick(row.due(cyd))
    row.carry_out(cyd, cyd.crossings.words(None, 1, row.now))
    row.run()
    assert eve.crossings.flow is None and eve.crossings.early_count == 2
    row.tick()
    row.run()
    assert eve.crossings.early_count == 0 and eve.crossings.flow is not None
    assert row.number_of("cyd") in eve.crossings.flow._heard
    assert eve.crossings._counters.as_dict()["stale"] == 0


def test_P8_whoever_floods_a_peer_without_a_seat_fills_no_memory() -> None:
    lone, most = StageRow(2).seat("zoe", 1), 2 * module.EARLY_FRAMES
    for micro in range(most):
        assert (
            lone.crossings.on_frame("ann", Frame(header_of(CrossingKind.HELD, TAG, 9, 7, 0, micro)), 0.0)
            == []
        )
    assert lone.crossings.early_count == module.EARLY_FRAMES
    assert lone.crossings._counters.as_dict()["stale"] == most - module.EARLY_FRAMES


def test_the_belt_has_a_place_for_all_that_a_trainer_has_in_hand() -> None:
    assert module.PLACES == BELT_PLACES == SeatPlace.__dataclass_fields__["hands_most"].default
