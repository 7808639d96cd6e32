"""Who can't be reached owns nothing, and a round goes on without them (P3); who sends damaged frames is out (P8)."""

from __future__ import annotations

from msgspec.structs import replace

from farflung.collectives.round.member import IN_VAIN, MemberRound
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import OwnersMoved
from farflung.coordinator.rounds.round_rules import RoundRules
from farflung.coordinator.run.membership import DIAL_AGAIN_S, DOUBT_S, Membership
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, Spoiled
from farflung.protocol.messages import ProgressReport
from farflung.protocol.round_words import Contact, Decision, Plan

ALL = ("ann", "bob", "cyd", "dan")
FP32 = ("fp32",) * 4
RULES = RoundRules(2, 1.0, 60.0, "fp32")
TAG = bytes(8)


def complaint(about: tuple[str, ...]) -> ProgressReport:
    return ProgressReport(
lengths=b"", got_by={},
        session=bytes(16), seq=1, round_no=1, decision_no=0, held={}, refused={}, cut_off=about,
        merged=b"", merged_hashes=b"", got=b"", got_hash=bytes(32), dots=None, inputs=b"", signature=b"",
    )  # fmt: skip


def in_flight(members: tuple[str, ...] = ALL) -> Round:
    owners = tuple(range(len(members)))
    return Round(Plan(1, 1, 0, members, owners, ("fp32",) * len(members)), RULES, opened_at=0.0)


# ---- the coordinator's side -----------------------------------------------------------------------------------


def test_P3_an_owner_that_one_member_cannot_reach_hands_its_chunks_on() -> None:
    flight = in_flight()
    flight.on_progress("ann", complaint(("dan",)))
    step = flight.next_step(0.1, set(ALL), set(ALL))
    assert isinstance(step, OwnersMoved) and step.unfit == {"dan"}
    assert 3 not in step.plan.owners and step.plan.epoch == 2
    assert "can't be reached" in step.reason
    assert not isinstance(flight.next_step(0.2, set(ALL), set(ALL)), OwnersMoved), (
        "the same complaint moves nothing twice"
    )


def test_P3_both_ends_of_a_broken_pair_own_nothing_and_the_others_carry_the_round() -> None:
    flight = in_flight()
    flight.on_progress("ann", complaint(("bob",)))
    flight.on_progress("bob", complaint(("ann",)))
    step = flight.next_step(0.1, set(ALL), set(ALL))
    assert isinstance(step, OwnersMoved) and set(step.plan.owners) == {2, 3}


def test_P9_who_complains_of_most_others_is_itself_cut_off_and_moves_nothing() -> None:
    flight = in_flight()
    flight.on_progress("ann", complaint(("bob", "cyd")))
    assert not isinstance(flight.next_step(0.1, set(ALL), set(ALL)), OwnersMoved)


def test_P3_of_two_peers_the_one_that_can_be_reached_owns_everything() -> None:
    flight = in_flight(("ann", "bob"))
    flight.on_progress("ann", complaint(("bob",)))
    step = flight.next_step(0.1, {"ann", "bob"}, {"ann", "bob"})
    assert isinstance(step, OwnersMoved) and set(step.plan.owners) == {0}


def test_where_nobody_is_left_to_own_chunks_complaints_change_nothing() -> None:
    flight = in_flight(("ann", "bob"))
    flight.on_progress("ann", complaint(("bob",)))
    flight.on_progress("bob", complaint(("ann",)))
    assert not isinstance(flight.next_step(0.1, {"ann", "bob"}, {"ann", "bob"}), OwnersMoved)


def test_an_address_counts_once_it_was_reached_and_is_tried_again_later() -> None:
    members = Membership(dead_after_s=10.0)
    ann = members.admit(Contact("ann", "ann", bytes(32), "host:1"), b"s" * 16, b"p" * 16, now=0.0)
    assert members.addresses.to_dial(0.0) == [ann] and members.addresses.to_dial(1.0) == []
    assert members.can_own(1.0) == set() and members.roster()[0].address == ""
    assert not members.on_dialled("ann", b"s" * 16, reached=False)
    assert members.addresses.to_dial(DIAL_AGAIN_S) == [ann]
    assert not members.on_dialled("ann", b"another session!", reached=True)
    before = members.everybody.number
    assert members.on_dialled("ann", b"s" * 16, reached=True)
    assert members.can_own(1.0) == {"ann"} and members.roster()[0].address == "host:1"
    assert members.everybody.number == before + 1, "the others hear of it"
    assert members.addresses.to_dial(10 * DIAL_AGAIN_S) == []
    members.addresses.doubt({"ann", "nobody"}, now=5.0)
    assert members.can_own(5.0 + DOUBT_S - 1) == set() and members.can_own(5.0 + DOUBT_S) == {"ann"}


# ---- the member's side ----------------------------------------------------------------------------------------


def member(name: str = "ann") -> MemberRound:
    return MemberRound(name, Plan(1, 1, 0, ALL, (0, 1, 2, 3), FP32), TAG, 1.0, now=0.0)


def damaged(kind: Kind, chunk: int) -> Spoiled:
    return Spoiled(Verdict.BAD_HASH, Header(kind, TAG, round_no=1, decision_no=1, chunk=chunk, length=4))


def test_P8_a_damaged_contribution_is_asked_for_once_more_and_then_its_sender_is_out() -> None:
    ann = member()
    [again] = ann.on_spoiled("bob", damaged(Kind.CONTRIBUTION, 0))
    assert again.to == "bob" and again.frame.header.kind == Kind.WANT_CONTRIBUTION  # type: ignore[union-attr]
    assert ann.progress().refused == {}
    assert ann.on_spoiled("bob", damaged(Kind.CONTRIBUTION, 0)) == []
    assert ann.progress().refused == {"bob": Verdict.BAD_HASH} and ann.progress().cut_off == ("bob",)
    assert ann.on_spoiled("eve", damaged(Kind.CONTRIBUTION, 0)) == [], "no member of the round"


def test_P8_an_owner_whose_results_come_damaged_twice_should_own_nothing() -> None:
    ann = member()
    ann.on_decision(Decision(1, 1, (0.25,) * 4, {}), now=0.0)
    [again] = ann.on_spoiled("cyd", damaged(Kind.RESULT, 2))
    assert again.frame.header.kind == Kind.WANT_RESULT  # type: ignore[union-attr]
    ann.on_spoiled("cyd", damaged(Kind.RESULT, 2))
    assert "cyd" in ann.progress().cut_off


def test_P3_who_never_answers_is_named_and_who_answers_that_it_is_not_ready_is_not() -> None:
    ann = member()
    now = 0.0
    for _ in range(40):
        now += 1.0
        ann.asking.on_heard("bob", now)
        ann.on_timer(now)
    assert ann.progress().cut_off == ("cyd", "dan")
    assert IN_VAIN > 1


def test_what_the_data_plane_cannot_reach_is_named_as_long_as_that_lasts() -> None:
    ann = member()
    ann.on_lines({"dan", "a former member"}, set(), 0.0)
    assert ann.progress().cut_off == ("dan",)
    ann.on_lines(set(), set(), 0.0)
    assert ann.progress().cut_off == ()


def test_P3_an_owner_that_loses_its_chunks_alive_does_not_count_them_as_its_own() -> None:
    ann = member()
    ann.on_encoded({0: b"0", 1: b"1", 2: b"2", 3: b"3"})
    for sender in ("bob", "cyd"):
        ann.on_frame(sender, Frame(Header(Kind.CONTRIBUTION, TAG, round_no=1, chunk=0), b"x"), now=0.0)
    moved = Plan(1, 2, 0, ALL, (1, 1, 2, 3), FP32)
    ann.on_plan(moved, now=0.0)
    assert ann.complete[0], "it owns nothing now"
    ann.on_plan(replace(moved, epoch=3, owners=(0, 0, 2, 3)), now=0.0)
    assert not ann.complete[0] and ann.progress().held["bob"][0] == 1
