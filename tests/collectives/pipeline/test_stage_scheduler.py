"""The machine of microbatches, frame by frame: what it does, and what it refuses of liars and latecomers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import (
    FlowDirection,
    FlowNote,
    Forget,
    GiveWork,
    KeepCrossingPiece,
    KeptPiece,
    NoteReason,
    SeatLost,
    SendCrossingFrame,
    SendKept,
    WorkMade,
    mark_of,
    table_of,
)
from farflung.collectives.pipeline.neighbours import SHUNNED_S, Shunned
from farflung.collectives.pipeline.stage_frames import EarlyFrames
from farflung.collectives.pipeline.stage_scheduler import StageScheduler
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, Spoiled, with_payload
from rig.flow_frames import COUNT, TABLE, TAG, T, flow_of, frame_of, give, handed, passed_on, said

# ---- one microbatch, there and back --------------------------------------------------------------------------------


def test_a_microbatch_goes_there_and_back() -> None:
    flow = flow_of()
    verdict, effects = give(flow, frame_of(CrossingKind.ACTIVATION, 1, 7, payload=b"in"))
    assert verdict == "accepted" and KeepCrossingPiece(0, 7, KeptPiece.INPUT, b"in") in effects
    assert handed(effects) == [(FlowDirection.FORWARD, 7)]
    assert said(flow.on_made(WorkMade(FlowDirection.FORWARD, 0, 7, b"out"), 0.0)) == []  # nobody has room
    _, effects = give(flow, frame_of(CrossingKind.ROOM, 5, 1))
    assert said(effects) == [("p5", CrossingKind.ACTIVATION, 7)]
    verdict, effects = give(flow, frame_of(CrossingKind.GRADIENT, 5, 7, payload=b"grad"))
    assert verdict == "accepted" and handed(effects) == [(FlowDirection.BACKWARD, 7)] and not flow.counted
    effects = flow.on_made(WorkMade(FlowDirection.BACKWARD, 0, 7, b"given"), 0.0)
    assert said(effects) == [("p1", CrossingKind.GRADIENT, 7)] and flow.counted == 1 << 7
    assert give(flow, frame_of(CrossingKind.GRADIENT, 5, 7))[0] == "duplicate"
    verdict, effects = give(flow, frame_of(CrossingKind.ACTIVATION, 1, 7))
    assert verdict == "duplicate" and said(effects) == [("p1", CrossingKind.GRADIENT, 7)]


def test_the_last_stage_does_both_at_once_and_a_source_reads_what_it_was_granted() -> None:
    last, source = flow_of(5), flow_of(1)
    assert handed(give(last, frame_of(CrossingKind.ACTIVATION, 3, 2))[1]) == [(FlowDirection.BOTH, 2)]
    assert said(last.on_made(WorkMade(FlowDirection.BOTH, 0, 2, b"given"), 0.0)) == [
        ("p3", CrossingKind.GRADIENT, 2)
    ]
    assert handed(source.on_grants(0, 0b1100, 0, T, 0.0)) == [
        (FlowDirection.FORWARD, 2),
        (FlowDirection.FORWARD, 3),
    ]
    assert source.on_grants(0, 0b1100, 0, T, 0.0) == []  # told with every tick


def test_grants_of_another_version_or_a_later_table_or_no_source_are_let_be() -> None:
    assert flow_of(1).on_grants(1, 1, 0, T, 0.0) == flow_of(1).on_grants(0, 1, 0, T + 1, 0.0) == []
    assert flow_of(3).on_grants(0, 1, 0, T, 0.0) == []
    assert flow_of(1).on_grants(0, 1 << COUNT, 0, T, 0.0) == []  # beyond the batch


def test_gradients_go_to_the_trainer_before_activations_and_only_a_few_at_a_time() -> None:
    flow = flow_of()
    first = passed_on(flow, 0)
    for micro, prev in ((1, 1), (2, 2), (3, 2)):
        give(flow, frame_of(CrossingKind.ACTIVATION, prev, micro))
    _, effects = give(flow, frame_of(CrossingKind.GRADIENT, first, 0))
    assert handed(effects) == []  # it has two
    assert handed(flow.on_made(WorkMade(FlowDirection.FORWARD, 0, 1, b"out"), 0.0)) == [
        (FlowDirection.BACKWARD, 0)
    ]
    assert handed(flow.on_made(WorkMade(FlowDirection.BACKWARD, 0, 0, b"given"), 0.0)) == [
        (FlowDirection.FORWARD, 3)
    ]


def test_what_the_trainer_was_not_asked_for_is_let_be() -> None:
    flow = flow_of()
    give(flow, frame_of(CrossingKind.ACTIVATION, 1, 0))
    assert (
        flow.on_made(WorkMade(FlowDirection.BACKWARD, 0, 0), 0.0)
        == flow.on_made(WorkMade(FlowDirection.FORWARD, 1, 0), 0.0)
        == []
    )
    assert flow.on_made(WorkMade(FlowDirection.FORWARD, 0, 3), 0.0) == [] and not flow.counted


def test_a_microbatch_that_the_trainer_gets_nothing_out_of_is_told_and_not_tried_again() -> None:
    flow = flow_of()
    give(flow, frame_of(CrossingKind.ACTIVATION, 1, 0))
    assert FlowNote(NoteReason.UNUSABLE, 3, 0) in flow.on_made(
        WorkMade(FlowDirection.FORWARD, 0, 0, problem="out of memory"), 0.0
    )
    assert handed(give(flow, frame_of(CrossingKind.ACTIVATION, 1, 0))[1]) == []


def test_a_new_version_forgets_all_and_the_old_ones_frames_are_stale() -> None:
    flow = flow_of()
    passed_on(flow)
    assert Forget(0) in flow.on_version(1, COUNT, 0.0) and flow.on_version(0, COUNT, 0.0) == []
    assert give(flow, frame_of(CrossingKind.GRADIENT, 5))[0] == "stale"
    assert flow.counted == 0 and flow.on_made(WorkMade(FlowDirection.BACKWARD, 0, 0), 0.0) == []


# ---- R2 to R5 ------------------------------------------------------------------------------------------------------


def test_r2_what_went_to_who_is_gone_goes_to_another_and_a_gradient_stays_good() -> None:
    flow = flow_of()
    gone = passed_on(flow)
    give(flow, frame_of(CrossingKind.GRADIENT, gone, 0, payload=b"grad"))
    effects = flow.on_seats(TABLE.unseated(gone), 0.0)
    (again,) = [e for e in effects if isinstance(e, SendKept)]
    assert again.to == f"p{11 - gone}" and mark_of(again.header) == 1 and again.piece == KeptPiece.OUTPUT
    effects = flow.on_made(WorkMade(FlowDirection.BACKWARD, 0, 0, b"given"), 0.0)
    assert flow.counted == 1 and said(effects) == [("p1", CrossingKind.GRADIENT, 0)]
    verdict, effects = give(flow, frame_of(CrossingKind.GRADIENT, 11 - gone, 0, table=T + 1))
    assert verdict == "accepted" and handed(effects) == []  # and nothing is kept in place of the first one
    assert not [e for e in effects if isinstance(e, KeepCrossingPiece)]


def test_r3_all_of_the_stage_before_hear_exactly_what_the_gone_one_had_here() -> None:
    flow = flow_of()
    passed_on(flow, 4, prev=1)
    give(flow, frame_of(CrossingKind.ACTIVATION, 2, 9))
    assert said(flow.on_seats(TABLE.seated(7, "p7", 0), 0.0)) == []  # nobody went yet
    table = TABLE.seated(7, "p7", 0).unseated(1)
    effects = flow.on_seats(table, 0.0)
    held = {
        e.to: e.frame
        for e in effects
        if isinstance(e, SendCrossingFrame) and e.frame.header.kind == CrossingKind.HELD
    }
    assert set(held) == {"p2", "p7"}
    assert {mask_from_bytes(bytes(frame.payload)) for frame in held.values()} == {1 << 4}
    assert {table_of(frame.header) for frame in held.values()} == {table.number}
    late = flow.on_seats(table.seated(8, "p8", 0), 0.0)
    assert {to for to, kind, _ in said(late) if kind == CrossingKind.HELD} == {"p2", "p7", "p8"}


def again_after_a_loss(seat: int = 3) -> StageScheduler:
    """Seat 4, of the same stage, is gone; microbatch 0 comes marked `again`."""
    flow = flow_of(seat)
    flow.on_seats(TABLE.unseated(4), 0.0)
    give(flow, frame_of(CrossingKind.ACTIVATION, 1, 0, mark=1, table=T + 1))
    return flow


def test_r4_what_is_marked_again_waits_for_held_of_all_and_is_then_computed() -> None:
    flow = again_after_a_loss()
    assert handed(give(flow, frame_of(CrossingKind.HELD, 5, table=T + 1, payload=b"\0"))[1]) == []
    assert (
        handed(give(flow, frame_of(CrossingKind.HELD, 6, table=T, payload=b"\0"))[1]) == []
    )  # older than the loss
    assert handed(give(flow, frame_of(CrossingKind.HELD, 6, table=T + 1, payload=b"\0"))[1]) == [
        (FlowDirection.FORWARD, 0)
    ]


def test_r4_whoever_has_it_is_asked_for_the_gradient_and_nothing_is_computed_forward() -> None:
    flow = again_after_a_loss()
    _, effects = give(flow, frame_of(CrossingKind.HELD, 6, table=T + 1, payload=b"\1"))
    assert said(effects) == [("p6", CrossingKind.WANT_GRADIENT, 0)] and handed(effects) == []
    _, effects = give(flow, frame_of(CrossingKind.GRADIENT, 6, 0, table=T + 1))
    assert handed(effects) == [(FlowDirection.BACKWARD, 0)]


def test_r4_nobody_waits_for_who_came_after_the_loss_or_for_an_empty_stage() -> None:
    flow = again_after_a_loss()
    table = TABLE.unseated(4).unseated(5)
    flow.on_seats(table, 0.0)
    assert handed(flow.on_seats(table.unseated(6).seated(7, "p7", 2), 0.0)) == [(FlowDirection.FORWARD, 0)]
    flow = again_after_a_loss()
    assert handed(flow.on_seats(table.unseated(6), 0.0)) == [(FlowDirection.FORWARD, 0)]
    assert flow.on_seats(table, 0.0) == []  # an older table


def test_who_does_not_say_held_is_asked_and_named_in_the_end() -> None:
    flow = again_after_a_loss()
    asked, notes = [], []
    for second in range(1, 40):
        effects = flow.on_timer(float(second))
        asked += [to for to, kind, _ in said(effects) if kind == CrossingKind.WANT_HELD]
        notes += [e for e in effects if isinstance(e, FlowNote)]
    assert set(asked) == {"p5", "p6"} and notes == [
        FlowNote(NoteReason.SILENT, 5, 0),
        FlowNote(NoteReason.SILENT, 6, 0),
    ]
    assert flow.complaints == {5: False, 6: False}
    give(flow, frame_of(CrossingKind.ROOM, 5, 99), now=40.0)
    assert 5 in silent_at(flow, 40.0), "that there is room answers nothing"
    give(flow, frame_of(CrossingKind.HELD, 5, payload=b"\0"), now=41.0)
    assert silent_at(flow, 41.0) == {6}


def silent_at(flow: StageScheduler, now: float) -> set[int]:
    flow.on_timer(now)
    return {seat for seat, damaged in flow.complaints.items() if not damaged}


def test_a_neighbour_that_answers_nothing_is_complained_of_within_ten_seconds() -> None:
    flow = flow_of()
    seat = passed_on(flow)
    for at in range(60):
        give(flow, frame_of(CrossingKind.ROOM, seat, 10 + at), now=float(at))  # that answers nothing
        if silent_at(flow, float(at)):
            break
    assert 5 <= at <= 10 and flow.complaints == {seat: False}
    give(flow, frame_of(Kind.LATER, seat, 0, mark=CrossingKind.WANT_GRADIENT), now=at + 1.0)
    assert silent_at(flow, at + 1.0) == set(), "it is on it: that takes as long as it takes"


def test_a_neighbour_that_keeps_one_thing_to_itself_is_complained_of_too() -> None:
    flow = flow_of()
    first, second = passed_on(flow, 0, 1), passed_on(flow, 1, 2)
    give(flow, frame_of(CrossingKind.ROOM, first, 9))
    others = 2
    for now in range(1, 60):
        silent = silent_at(flow, float(now))
        if silent:
            break
        # Of all else it answers at once.
        give(flow, frame_of(Kind.LATER, first, others, mark=CrossingKind.WANT_GRADIENT), now=float(now))
        give(flow, frame_of(Kind.LATER, second, 1, mark=CrossingKind.WANT_GRADIENT), now=float(now))
    assert silent == {first} and now <= 30


def test_whether_one_gets_on_with_a_doubted_neighbour_is_found_out_by_asking() -> None:
    flow = flow_of()
    flow.on_doubted([1, 4, 5, 77], 0.0)
    asked = said(flow.on_timer(1.0))
    assert asked == [("p5", CrossingKind.WANT_HELD, 0)], "of the stage behind mine, and nobody else"
    assert 5 in silent_at(flow, 3.0) | silent_at(flow, 9.0)
    give(flow, frame_of(CrossingKind.HELD, 5, payload=b"\0"), now=9.5)
    assert silent_at(flow, 9.5) == set() and said(flow.on_timer(20.0)) == []


def test_two_damaged_crossings_in_a_row_are_a_complaint_until_a_good_one_comes() -> None:
    flow = flow_of()
    header = frame_of(CrossingKind.ACTIVATION, 1, 5).header
    flow.on_spoiled("p1", Spoiled(Verdict.BAD_HASH, header), 0.0)
    assert flow.complaints == {}
    give(flow, frame_of(CrossingKind.ACTIVATION, 1, 6, payload=b"bad"))
    assert flow.complaints == {1: True}, "whether by its hash or by what is in it"
    give(flow, frame_of(CrossingKind.ACTIVATION, 1, 7))
    assert flow.complaints == {}
    for _ in range(2):
        flow.on_spoiled("p1", Spoiled(Verdict.BAD_HASH, header), 0.0)
    assert flow.complaints == {1: True}
    flow.on_version(1, COUNT, 0.0)
    assert flow.complaints == {}, "of this batch"
    for _ in range(2):
        flow.on_spoiled(
            "p1", Spoiled(Verdict.BAD_HASH, frame_of(CrossingKind.ACTIVATION, 1, 5, version=1).header), 0.0
        )
    flow.on_seats(TABLE.unseated(1), 0.0)
    assert flow.complaints == {}, "and of those who are here"


def test_whoever_was_complained_of_is_shunned_for_a_while_since_the_last_complaint() -> None:
    shunned = Shunned()
    shunned.on_complaints(["bob", "cyd"], 0.0)
    shunned.on_complaints(["cyd"], 30.0)
    assert shunned.now(SHUNNED_S - 1) == {"bob", "cyd"} and shunned.now(SHUNNED_S) == {"cyd"}
    assert shunned.now(SHUNNED_S + 30.0) == frozenset()


def test_who_is_shunned_gets_nothing_new_and_no_room_as_long_as_there_are_others() -> None:
    flow = flow_of(version=-1)
    flow.on_lines(set(), frozenset({"p5", "p1"}), 0.0)
    told = flow.on_version(0, COUNT, 0.0)
    rooms = [
        e.to for e in told if isinstance(e, SendCrossingFrame) and e.frame.header.kind == CrossingKind.ROOM
    ]
    assert set(rooms) == {"p2"}
    assert {passed_on(flow, micro, 2) for micro in (0, 1)} == {6}
    flow.on_lines(set(), frozenset({"p5", "p6"}), 0.0)
    assert 5 in {passed_on(flow, micro, 2) for micro in (2, 3)}, "better than nobody"
    flow.on_lines({"p6"}, frozenset({"p5"}), 0.0)
    assert passed_on(flow, 4, 2) == 5
    flow.on_lines(set(), frozenset({"p2"}), 0.0)
    assert give(flow, frame_of(CrossingKind.ACTIVATION, 2, 9))[0] == "accepted", "what it was given it keeps"
    alone = flow_of(version=-1, table=TABLE.unseated(4))
    alone.on_lines(set(), frozenset({"p1"}), 0.0)
    told = alone.on_version(0, COUNT, 0.0)
    assert "p1" in {e.to for e in told if isinstance(e, SendCrossingFrame)}, "it has nobody else to send to"


def test_r5_who_reads_that_its_seat_is_gone_stops() -> None:
    flow = flow_of()
    passed_on(flow)
    assert flow.on_seats(TABLE.unseated(3), 0.0) == [SeatLost(3)] and flow.over
    assert give(flow, frame_of(CrossingKind.GRADIENT, 5))[0] == "stale"
    assert flow.on_timer(99.0) == flow.on_version(1, COUNT, 0.0) == []
    assert flow.on_seats(TABLE.unseated(3).unseated(5), 0.0) == []


# ---- who may lie ---------------------------------------------------------------------------------------------------

GONE = TABLE.unseated(1)


@pytest.mark.parametrize(
    ("frame", "sender", "verdict"),
    [
        (frame_of(CrossingKind.ACTIVATION, 2), "p1", "unauthorised"),  # another one's seat
        (frame_of(CrossingKind.ACTIVATION, 4), "", "unauthorised"),  # my own stage
        (frame_of(CrossingKind.ACTIVATION, 5), "", "unauthorised"),  # the stage after
        (frame_of(CrossingKind.GRADIENT, 2), "", "unauthorised"),  # the stage before
        (frame_of(CrossingKind.HELD, 2), "", "unauthorised"),
        (frame_of(CrossingKind.ROOM, 2, 5), "", "unauthorised"),
        (frame_of(CrossingKind.WANT_GRADIENT, 5), "", "unauthorised"),
        (frame_of(CrossingKind.WANT_ACTIVATION, 5), "", "unauthorised"),  # it was sent none
        (frame_of(Kind.LATER, 2, mark=CrossingKind.WANT_GRADIENT), "", "unauthorised"),
        (frame_of(Kind.MISSING, 5, mark=CrossingKind.WANT_HELD), "", "unauthorised"),
        (frame_of(Kind.STATE, 5), "", "unauthorised"),  # no crossing at all
        (frame_of(CrossingKind.ACTIVATION, 1), "", "stale"),  # it is gone
        (frame_of(CrossingKind.ACTIVATION, 9), "", "stale"),  # nobody has that seat, by a table that I know
        (frame_of(CrossingKind.ACTIVATION, 9, table=T + 9), "", "early"),
        (frame_of(CrossingKind.ACTIVATION, 2, version=2), "", "stale"),
        (frame_of(CrossingKind.ACTIVATION, 2, version=1), "", "early"),
        (frame_of(CrossingKind.HELD, 5, table=T + 9), "", "early"),
        (
            frame_of(CrossingKind.ACTIVATION, 2, table=2),
            "",
            "stale",
        ),  # from before my seat: meant for another one
        (frame_of(CrossingKind.ACTIVATION, 2, COUNT), "", "malformed"),  # beyond the batch
        (frame_of(CrossingKind.ACTIVATION, 2, payload=b"bad"), "", "malformed"),
        (frame_of(CrossingKind.HELD, 5, payload=b"\xff\xff\xff"), "", "malformed"),
        (frame_of(CrossingKind.HELD, 5, payload=bytes(4096)), "", "malformed"),
        (frame_of(CrossingKind.GRADIENT, 5), "", "unauthorised"),  # for nothing that it was sent
        (frame_of(Kind.MISSING, 5, mark=CrossingKind.WANT_GRADIENT), "", "stale"),
    ],
)
def test_a_frame_that_has_no_business_here_ends_in_one_counter(
    frame: Frame, sender: str, verdict: str
) -> None:
    flow = flow_of()
    flow.on_seats(GONE, 0.0)
    found, effects = give(flow, frame, sender)
    assert found == verdict
    assert handed(effects) == [] and not [e for e in effects if isinstance(e, KeepCrossingPiece)]


def test_who_sends_more_than_it_has_room_for_is_refused() -> None:
    flow = flow_of()
    verdicts = [give(flow, frame_of(CrossingKind.ACTIVATION, 1, micro))[0] for micro in range(COUNT)]
    took = verdicts.count("accepted")
    assert 1 <= took <= flow.room_limit and verdicts == ["accepted"] * took + ["unauthorised"] * (
        COUNT - took
    )
    assert flow.refused_for_room == COUNT - took and len(flow.waiting) <= flow.room_limit
    assert (
        give(flow, frame_of(CrossingKind.ACTIVATION, 2, 15))[0] == "accepted"
    )  # the other sender's room is its own


def test_two_living_seats_that_claim_one_microbatch_are_told_and_the_first_one_stays() -> None:
    flow = flow_of()
    give(flow, frame_of(CrossingKind.ACTIVATION, 1, 0))
    for kind in (CrossingKind.ACTIVATION, CrossingKind.WANT_GRADIENT):
        verdict, effects = give(flow, frame_of(kind, 2, 0))
        assert (
            verdict == "unauthorised"
            and FlowNote(NoteReason.CONTESTED, 2, 0) in effects
            and said(effects) == []
        )
    flow = again_after_a_loss()
    give(flow, frame_of(CrossingKind.HELD, 5, table=T + 1, payload=b"\1"))
    assert (
        FlowNote(NoteReason.CONTESTED, 6, 0)
        in give(flow, frame_of(CrossingKind.HELD, 6, table=T + 1, payload=b"\1"))[1]
    )
    assert give(flow, frame_of(CrossingKind.GRADIENT, 6, 0, table=T + 1))[0] == "unauthorised"


def test_damaged_frames_are_asked_for_again_and_the_second_one_is_told() -> None:
    flow = flow_of()
    header = frame_of(CrossingKind.ACTIVATION, 1, 5).header
    assert said(flow.on_spoiled("p1", Spoiled(Verdict.BAD_HASH, header), 0.0)) == [
        ("p1", CrossingKind.WANT_ACTIVATION, 5)
    ]
    effects = flow.on_spoiled("p1", Spoiled(Verdict.BAD_HASH, header), 0.0)
    assert FlowNote(NoteReason.DAMAGED, 1, 5) in effects
    # Not its seat: it says nothing.
    assert flow.on_spoiled("p2", Spoiled(Verdict.BAD_HASH, header), 0.0) == []
    assert flow.on_spoiled("p1", Spoiled(Verdict.MALFORMED, None), 0.0) == []


def test_who_misses_an_activation_gets_it_and_not_twice_at_once() -> None:
    flow = flow_of()
    seat = passed_on(flow)
    missing = frame_of(Kind.MISSING, seat, 0, mark=CrossingKind.WANT_GRADIENT)
    assert said(give(flow, missing, now=1.0)[1]) == [(f"p{seat}", CrossingKind.ACTIVATION, 0)]
    assert give(flow, missing, now=1.1) == ("duplicate", [])
    assert said(give(flow, missing, now=3.0)[1]) == [(f"p{seat}", CrossingKind.ACTIVATION, 0)]


def test_questions_are_answered_by_what_is_true() -> None:
    flow = flow_of()
    assert said(give(flow, frame_of(CrossingKind.WANT_GRADIENT, 1, 0))[1]) == [("p1", Kind.MISSING, 0)]
    seat = passed_on(flow)
    assert said(give(flow, frame_of(CrossingKind.WANT_GRADIENT, 1, 0))[1]) == [("p1", Kind.LATER, 0)]
    assert said(give(flow, frame_of(CrossingKind.WANT_ACTIVATION, seat, 0))[1]) == [
        (f"p{seat}", CrossingKind.ACTIVATION, 0)
    ]
    assert said(give(flow, frame_of(CrossingKind.WANT_HELD, 1))[1]) == [("p1", CrossingKind.HELD, 0)]


def test_who_cant_be_reached_gets_nothing_new() -> None:
    flow = flow_of()
    flow.on_lines({"p5"}, frozenset(), 0.0)
    assert {passed_on(flow, micro, prev) for micro, prev in ((0, 1), (1, 2))} == {6}


def test_early_frames_are_kept_in_bounds_and_each_ends_in_a_counter() -> None:
    early = EarlyFrames(frames=4, bytes_most=10_000)
    assert [early.keep("flood", frame_of(CrossingKind.ROOM, 1)) for _ in range(4)] == [0] * 4
    assert early.keep("quiet", frame_of(CrossingKind.ROOM, 2)) == 1
    assert [sender for sender, _ in early.take_all()] == ["flood"] * 3 + ["quiet"] and len(early) == 0
    assert early.keep("quiet", frame_of(CrossingKind.ACTIVATION, 2, payload=bytes(6000))) == 0
    assert early.keep("flood", frame_of(CrossingKind.ACTIVATION, 1, payload=bytes(7000))) == 1
    assert [sender for sender, _ in early.take_all()] == ["quiet"]


headers = st.builds(
    Header,
    st.sampled_from([*CrossingKind, Kind.LATER, Kind.MISSING, Kind.RESULT]),
    st.just(TAG),
    decision_no=st.builds(lambda seat, table: seat << 32 | table, st.integers(0, 9), st.integers(0, T + 3)),
    version=st.integers(0, 3),
    chunk=st.builds(lambda mark, micro: mark << 16 | micro, st.integers(0, 30), st.integers(0, COUNT + 1)),
)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(headers, st.integers(1, 7), st.binary(max_size=3)), max_size=25),
    st.sampled_from((1, 3, 5)),
)
def test_any_frames_whatever_end_in_one_counter_each(
    sent: list[tuple[Header, int, bytes]], seat: int
) -> None:
    """Also those of the next version and of tables to come; and none makes the machine fall over."""
    flow = flow_of(seat, version=-1)
    for at, (header, sender, payload) in enumerate(sent):
        flow.on_frame(f"p{sender}", with_payload(header, payload), float(at))
        flow.on_timer(float(at))
        if at == 8:
            flow.on_version(0, COUNT, 8.0)
            flow.on_grants(0, 0xFF, 0x0F, T, 8.0)
        if at == 16:
            flow.on_seats(TABLE.unseated(4).seated(7, "p7", 1), 16.0)
    assert flow.counters.total + flow.early_count == len(sent)
    assert len(flow.waiting) <= flow.room_limit


def test_a_source_opens_no_more_than_its_window_holds_and_another_one_for_each_that_is_back() -> None:
    flow = flow_of(1)
    window = 6  # twice the stages
    handed = [e.micro for e in flow.on_grants(0, (1 << COUNT) - 1, 0, T, 0.0) if isinstance(e, GiveWork)]
    done = 0
    while handed:
        micro, done = handed.pop(0), done + 1
        effects = flow.on_made(WorkMade(FlowDirection.FORWARD, 0, micro, b"act"), 0.0)
        handed += [e.micro for e in effects if isinstance(e, GiveWork)]
    assert done == window and not flow.is_done
    # One of them is given up: there is a place in the window.
    effects = flow.on_skipped(0, 1, 0.0)
    assert [e.micro for e in effects if isinstance(e, GiveWork)] == [window]
    flow.on_skipped(0, (1 << COUNT) - 1, 0.0)
    assert flow.is_done
