"""R6: what a seat has not begun goes to another one by its consent, whatever is lost, late, doubled or a lie."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import (
    AGAIN,
    FOR_GOOD,
    Effect,
    FlowDirection,
    GiveWork,
    SendCrossingFrame,
    SendKept,
    WorkMade,
    mark_of,
)
from farflung.collectives.pipeline.stage_scheduler import StageScheduler
from farflung.collectives.pipeline.work_stealing import GIVES_EVERY_S, QUIET_S
from farflung.protocol.frames import Frame, Kind
from rig.flow_frames import COUNT, TABLE, T, flow_of, frame_of, give, passed_on, said

SOON = 100  # hundredths of a second
# In stage 1, which has seats 3 and 4: seats 1 and 2 send to it.
SLOW, SENDER, OTHER = 3, 1, 2


def with_room(seat: int, unit_s: float) -> StageScheduler:
    """It was fast once, so that many may wait."""
    flow = flow_of(seat)
    flow.on_unit(0.1)
    flow.on_timer(0.0)
    flow.on_unit(unit_s)
    return flow


def slow_one(count: int = 6, unit_s: float = 4.0, mark: int = 0) -> StageScheduler:
    """So many came of one sender; the first two are in the trainer's hands."""
    flow = with_room(SLOW, unit_s)
    for micro in range(count):
        give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, micro, mark))
    return flow


def want_back(micro: int, offer: int = SOON, seat: int = SENDER, table: int = T) -> Frame:
    return frame_of(CrossingKind.WANT_BACK, seat, micro, offer, table)


def marks_of(effects: list[Effect], kind: Kind) -> list[tuple[str, int]]:
    """To whom a frame of this kind goes, and its mark."""
    sent = [(e.to, e.frame.header) for e in effects if isinstance(e, SendCrossingFrame)]
    sent += [(e.to, e.header) for e in effects if isinstance(e, SendKept)]
    return [(to, mark_of(header)) for to, header in sent if header.kind == kind]


# ---- at the one that has it ----------------------------------------------------------------------------------------


def test_what_is_not_begun_is_given_back_and_nothing_is_done_about_it_any_more() -> None:
    flow = slow_one()
    assert said(give(flow, want_back(5), now=9.0)[1]) == [("p1", CrossingKind.GIVEN_BACK, 5)]
    assert flow.waiting == {0, 1, 2, 3, 4} and flow.held_for_trainer == 5
    done: list[int] = []
    works = [0, 1]
    while works:
        done.append(works.pop(0))
        effects = flow.on_made(WorkMade(FlowDirection.FORWARD, 0, done[-1], b"out"), 10.0)
        works += [e.micro for e in effects if isinstance(e, GiveWork)]
    assert done == [0, 1, 2, 3, 4]


def test_what_the_trainer_has_in_hand_or_has_made_stays() -> None:
    flow = slow_one()
    assert [said(give(flow, want_back(micro), now=9.0)[1]) for micro in (0, 1)] == [[], []]
    flow.on_made(WorkMade(FlowDirection.FORWARD, 0, 0, b"out"), 9.0)
    assert said(give(flow, want_back(0), now=19.0)[1]) == []
    assert said(give(flow, want_back(2), now=29.0)[1]) == []  # it has that one in hand now
    assert said(give(flow, want_back(3), now=39.0)[1]) == [("p1", CrossingKind.GIVEN_BACK, 3)]


def test_it_stays_where_it_would_not_be_done_in_half_of_the_time_elsewhere() -> None:
    for offer, back in ((1199, True), (1200, True), (1201, False), (65535, False)):
        flow = slow_one(count=6, unit_s=4.0)  # so it is done here in 24 s
        assert bool(said(give(flow, want_back(5, offer), now=0.0)[1])) == back, offer
    flow = slow_one(unit_s=0.0)  # of whom nobody knows how slow it is, it does not either
    assert said(give(flow, want_back(5), now=0.0)[1]) == []


def test_a_trainer_that_sits_over_one_is_as_slow_as_that() -> None:
    flow = slow_one(count=4, unit_s=0.1)
    assert said(give(flow, want_back(3), now=0.2)[1]) == []
    assert said(give(flow, want_back(3), now=30.0)[1]) == [("p1", CrossingKind.GIVEN_BACK, 3)]


def test_several_who_ask_at_once_mean_the_same_idle_seat() -> None:
    flow = slow_one()
    given = [bool(said(give(flow, want_back(micro), now=now)[1])) for micro, now in ((5, 0.0), (4, 0.1))]
    assert given == [True, False]
    assert said(give(flow, want_back(4), now=GIVES_EVERY_S)[1])


def test_only_who_sent_it_is_given_it_back() -> None:
    flow = slow_one()
    assert give(flow, want_back(5, seat=OTHER)) == ("accepted", [])
    assert give(flow, frame_of(CrossingKind.WANT_BACK, 5, 5, SOON))[0] == "unauthorised"  # of the next stage
    assert give(flow, want_back(COUNT))[0] == "malformed"
    assert flow.waiting == set(range(6))


def test_what_was_given_back_is_not_taken_again_and_that_is_said_once_more() -> None:
    flow = slow_one()
    give(flow, want_back(5))
    assert said(give(flow, want_back(5), now=5.0)[1]) == [("p1", CrossingKind.GIVEN_BACK, 5)]
    assert said(give(flow, frame_of(CrossingKind.WANT_GRADIENT, SENDER, 5), now=5.0)[1]) == [
        ("p1", CrossingKind.GIVEN_BACK, 5)
    ]
    verdict, effects = give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, 5), now=5.0)
    assert verdict == "stale" and said(effects) == [("p1", CrossingKind.GIVEN_BACK, 5)]
    assert 5 not in flow.waiting


def test_the_second_sending_is_taken_and_stays() -> None:
    flow = slow_one()
    give(flow, want_back(5))
    lost = frame_of(CrossingKind.WANT_GRADIENT, SENDER, 5, FOR_GOOD)
    assert said(give(flow, lost)[1]) == [("p1", Kind.MISSING, 5)]  # not the first sending: that helps
    assert give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, 5, FOR_GOOD))[0] == "accepted"
    assert 5 in flow.waiting and not flow.refused_for_room
    assert said(give(flow, want_back(5), now=9.0)[1]) == []
    assert said(give(flow, frame_of(CrossingKind.WANT_GRADIENT, SENDER, 5))[1]) == [("p1", Kind.LATER, 5)]
    assert give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, 5))[0] == "duplicate"


def test_another_holder_of_the_stage_before_may_send_what_was_given_back_to_one_that_is_gone() -> None:
    flow = slow_one()
    give(flow, want_back(5))
    flow.on_seats(TABLE.unseated(SENDER), 1.0)
    again = frame_of(CrossingKind.ACTIVATION, OTHER, 5, AGAIN, table=T + 1)
    assert give(flow, again)[0] == "accepted" and 5 in flow.waiting


def test_what_held_has_named_stays() -> None:
    """All of the stage before may know it to be here, and one of them may ask for it later."""
    flow = slow_one()
    flow.on_seats(TABLE.unseated(SENDER), 1.0)
    assert said(give(flow, frame_of(CrossingKind.WANT_GRADIENT, OTHER, 5, table=T + 1))[1]) == [
        ("p2", Kind.LATER, 5)
    ]
    assert said(give(flow, want_back(5, seat=OTHER, table=T + 1), now=9.0)[1]) == []


def test_what_the_next_stage_has_already_stays() -> None:
    flow = flow_of(SLOW)
    flow.on_unit(4.0)
    flow.on_seats(TABLE.unseated(4), 1.0)
    give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, 0, AGAIN, table=T + 1))  # waits for HELD
    assert said(give(flow, want_back(0, table=T + 1), now=9.0)[1]) == []
    give(flow, frame_of(CrossingKind.HELD, 5, table=T + 1, payload=b"\1"))
    assert said(give(flow, want_back(0, table=T + 1), now=19.0)[1]) == []


def test_room_that_is_free_again_is_the_senders() -> None:
    flow = flow_of(SLOW)
    flow.on_unit(4.0)
    micro = 0
    while give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, micro))[0] == "accepted":
        micro += 1
    before = flow.refused_for_room
    assert said(give(flow, want_back(micro - 1))[1])
    assert give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, micro))[0] == "accepted"
    assert give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, micro - 1, FOR_GOOD))[0] == "unauthorised"
    assert flow.refused_for_room == before + 1 and len(flow.waiting) <= flow.room_limit


# ---- at the one with nothing to do -----------------------------------------------------------------------------------


def test_whoever_has_next_to_nothing_to_do_says_so_to_those_that_may_send() -> None:
    flow = flow_of(SLOW)
    assert marks_of(flow.on_timer(9.0), CrossingKind.IDLE) == []  # nobody knows how fast it is
    flow.on_unit(1.5)
    assert marks_of(flow.on_timer(10.0), CrossingKind.IDLE) == [("p1", 150), ("p2", 150)]
    assert marks_of(flow.on_timer(10.1), CrossingKind.IDLE) == []
    give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, 0), now=20.0)
    assert marks_of(flow.on_timer(20.0 + QUIET_S / 2), CrossingKind.IDLE) == []  # that one came just now
    assert marks_of(flow.on_timer(21.0), CrossingKind.IDLE)[0] == ("p1", 300)
    give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, 1), now=22.0)
    assert marks_of(flow.on_timer(29.0), CrossingKind.IDLE) == []


def test_a_source_is_given_nothing_by_neighbours_and_does_not_ask() -> None:
    flow = flow_of(1)
    flow.on_unit(1.5)
    assert flow.on_timer(10.0) == []


# ---- at the sender -------------------------------------------------------------------------------------------------


def sent_three() -> tuple[StageScheduler, int, int]:
    """(a member of stage 1 that sent microbatches 0 and 2 to a seat of stage 2, and 1 to the other one; these two)."""
    flow = flow_of(SLOW)
    seats = [passed_on(flow, micro) for micro in range(3)]
    assert seats[0] == seats[2] != seats[1]
    give(flow, frame_of(CrossingKind.GRADIENT, seats[1], 1))
    return flow, seats[0], seats[1]


def idle(seat: int, offer: int = SOON) -> Frame:
    return frame_of(CrossingKind.IDLE, seat, mark=offer)


def test_the_newest_that_another_seat_keeps_is_asked_back_for_the_idle_one() -> None:
    flow, slow, fast = sent_three()
    verdict, effects = give(flow, idle(fast), now=1.0)
    assert verdict == "accepted" and said(effects) == [(f"p{slow}", CrossingKind.WANT_BACK, 2)]
    assert marks_of(effects, CrossingKind.WANT_BACK) == [(f"p{slow}", SOON)]
    assert said(give(flow, idle(fast), now=1.5)[1]) == []  # the answer may be on its way
    assert said(give(flow, idle(fast), now=2.5)[1]) == [(f"p{slow}", CrossingKind.WANT_BACK, 2)]
    assert said(give(flow, idle(slow), now=2.5)[1]) == []  # of the other seat nothing is awaited


def test_nothing_goes_elsewhere_before_the_word_of_who_has_it() -> None:
    flow, slow, fast = sent_three()
    assert (CrossingKind.ACTIVATION, 2) not in [
        (kind, micro) for _, kind, micro in said(give(flow, idle(fast))[1])
    ]
    later = frame_of(Kind.LATER, slow, 2, mark=CrossingKind.WANT_GRADIENT)
    assert said(give(flow, later, now=9.0)[1]) == []
    assert give(flow, frame_of(CrossingKind.GRADIENT, slow, 2), now=9.5)[0] == "accepted"  # it had begun it


def test_what_is_given_back_goes_to_the_idle_one_for_good() -> None:
    flow, slow, fast = sent_three()
    give(flow, idle(fast), now=1.0)
    back = frame_of(CrossingKind.GIVEN_BACK, slow, 2)
    verdict, effects = give(flow, back, now=1.2)
    assert verdict == "accepted" and marks_of(effects, CrossingKind.ACTIVATION) == [(f"p{fast}", FOR_GOOD)]
    assert give(flow, back, now=1.3) == ("duplicate", [])
    late = frame_of(CrossingKind.WANT_ACTIVATION, slow, 2)
    assert give(flow, late, now=1.3) == ("stale", [])  # it asked for that one before
    # Whoever gave it back and made it all the same: nobody wants that.
    assert give(flow, frame_of(CrossingKind.GRADIENT, slow, 2))[0] == "unauthorised"
    assert give(flow, frame_of(CrossingKind.GRADIENT, fast, 2))[0] == "accepted"
    assert said(give(flow, idle(slow), now=9.0)[1]) == []  # and from there it is not taken again


@pytest.mark.parametrize("asked", [False, True])
def test_who_was_not_asked_gives_nothing_back_and_who_counted_it_neither(asked: bool) -> None:
    flow, slow, fast = sent_three()
    if asked:
        give(flow, idle(fast), now=1.0)
        give(flow, frame_of(CrossingKind.GRADIENT, slow, 2), now=1.1)
    verdict, effects = give(flow, frame_of(CrossingKind.GIVEN_BACK, slow, 2), now=1.2)
    assert verdict == "unauthorised" and said(effects) == []
    assert give(flow, frame_of(CrossingKind.GIVEN_BACK, fast, 2))[0] == "unauthorised"
    assert give(flow, frame_of(CrossingKind.GIVEN_BACK, slow, 9))[0] == "unauthorised"


def test_a_seat_that_goes_before_its_word_comes_is_as_any_that_goes() -> None:
    flow, slow, fast = sent_three()
    give(flow, idle(fast), now=1.0)
    effects = flow.on_seats(TABLE.unseated(slow), 2.0)
    assert (f"p{fast}", AGAIN) in marks_of(effects, CrossingKind.ACTIVATION)
    assert give(flow, frame_of(CrossingKind.GIVEN_BACK, slow, 2), now=2.1)[0] == "stale"


def test_when_the_idle_one_goes_it_goes_to_who_gave_it_back_for_good() -> None:
    flow, slow, fast = sent_three()
    give(flow, idle(fast), now=1.0)
    give(flow, frame_of(CrossingKind.GIVEN_BACK, slow, 2), now=1.2)
    effects = flow.on_seats(TABLE.unseated(fast), 2.0)
    assert (f"p{slow}", AGAIN | FOR_GOOD) in marks_of(effects, CrossingKind.ACTIVATION)
    # A late word about the first sending says nothing about this one.
    assert give(flow, frame_of(CrossingKind.GIVEN_BACK, slow, 2), now=2.1) == ("duplicate", [])
    asked = [mark for _, mark in marks_of(flow.on_timer(60.0), CrossingKind.WANT_GRADIENT)]
    assert FOR_GOOD in asked


def test_nothing_is_asked_back_for_who_has_no_room() -> None:
    flow = flow_of(SLOW)
    for seat, room in ((5, 1), (6, 9)):
        give(flow, frame_of(CrossingKind.ROOM, seat, room))
    seats = {}
    for micro in range(3):
        give(flow, frame_of(CrossingKind.ACTIVATION, SENDER, micro))
        effects = flow.on_made(WorkMade(FlowDirection.FORWARD, 0, micro, b"out"), 0.0)
        [(to, _, _)] = said(effects)
        seats[micro] = to
    assert list(seats.values()).count("p5") == 1
    assert said(give(flow, idle(5), now=5.0)[1]) == []
    assert said(give(flow, idle(6), now=5.0)[1]) == [
        ("p5", CrossingKind.WANT_BACK, next(m for m in seats if seats[m] == "p5"))
    ]


# ---- two sides of a border, and a line between them ------------------------------------------------------------------


@settings(max_examples=100)
@given(st.data())
def test_whatever_order_the_words_come_in_one_of_two_seats_has_it(data: st.DataObject) -> None:
    """A sender and its slow receiver; each word is late, doubled or lost.  It is never computed at both."""
    sender, slow, fast = sent_three()
    receiver = with_room(slow, unit_s=4.0)
    under_way: list[tuple[StageScheduler, Frame]] = []
    elsewhere = computed = 0

    def carry(effects: list[Effect]) -> None:
        nonlocal elsewhere, computed
        for e in effects:
            if isinstance(e, SendCrossingFrame | SendKept) and isinstance(e, SendCrossingFrame):
                mine = {f"p{SLOW}": sender, f"p{slow}": receiver}.get(e.to)
                if mine is not None:
                    under_way.append((mine, e.frame))
            elif isinstance(e, SendKept) and e.header.kind == CrossingKind.ACTIVATION:
                if e.to == f"p{slow}":
                    under_way.append(
                        (receiver, frame_of(CrossingKind.ACTIVATION, SLOW, e.header.chunk & 0xFFFF))
                    )
                elsewhere += e.to == f"p{fast}" and e.header.chunk & 0xFFFF == 2
            elif isinstance(e, GiveWork):
                computed += e.micro == 2 and e.way == FlowDirection.BOTH

    for micro in (0, 3, 2):
        carry(receiver.on_frame(f"p{SLOW}", frame_of(CrossingKind.ACTIVATION, SLOW, micro), 0.0))
    under_way.append((receiver, frame_of(CrossingKind.ACTIVATION, SLOW, 2)))  # a copy of it, which comes late
    for now in range(1, 25):
        do = data.draw(st.sampled_from(("come", "come", "twice", "lost", "idle", "made", "time")))
        if do in ("come", "twice", "lost") and under_way:
            at = data.draw(st.integers(0, len(under_way) - 1))
            to, frame = under_way[at] if do == "twice" else under_way.pop(at)
            if do != "lost":
                carry(to.on_frame(f"p{SLOW if to is receiver else slow}", frame, float(now)))
        elif do == "made":
            for way, micro in sorted(receiver._queue.in_hand)[:1]:
                carry(receiver.on_made(WorkMade(way, 0, micro, b"grad"), float(now)))
        elif do == "time":
            carry([*sender.on_timer(float(now)), *receiver.on_timer(float(now))])
        else:
            carry(sender.on_frame(f"p{fast}", idle(fast), float(now)))
        assert not (elsewhere and computed)
