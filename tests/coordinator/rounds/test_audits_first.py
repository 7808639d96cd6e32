"""P19 before the commit: who merges what again, when everybody is asked, and what it takes to be passed."""

from __future__ import annotations

from farflung.coordinator.rounds.audits_first import TELL_AGAIN_S, Able, AuditsFirst
from farflung.protocol.digests import hash_bytes

ANN, BOB, CYD, DAN, EVE = "ann", "bob", "cyd", "dan", "eve"
PATIENCE_S = 10.0


def result(chunk: int, what: str = "sum") -> bytes:
    return hash_bytes(f"{what} {chunk}".encode())


class Round:
    """Ann made chunk 0, bob chunk 1; the dice draw the first one that is left, unless a test says otherwise."""

    def __init__(self, *members: str, auditors: int = 1, drawn: int = 0) -> None:
        self.members = list(members)
        self.now = 0.0
        self.audits = AuditsFirst(auditors, len(members) - 1, PATIENCE_S, lambda count: min(drawn, count - 1))
        self.results = {chunk: result(chunk) for chunk in range(1)}
        self.here = set(members)
        self.undialable: set[str] = set()
        self.out: set[str] = set()
        self.decision_no = 1

    def look(self) -> list[tuple[str, int]]:
        included = frozenset(self.here - self.out)
        able = Able(included, frozenset(self.here & self.out), frozenset(self.here - self.undialable))
        made = {chunk: (self.members[chunk], digest) for chunk, digest in self.results.items()}
        return self.audits.look(self.decision_no, made, able, self.now)

    def passes(self, seconds: float) -> list[tuple[str, int]]:
        self.now += seconds
        return self.look()

    def hears(self, auditor: str, chunk: int = 0, question: int = 0) -> bool:
        return self.audits.hears(auditor, chunk, question or self.audits.question_of(chunk))

    def right(self, *auditors: str, chunk: int = 0) -> None:
        for auditor in auditors:
            assert self.hears(auditor, chunk)
            self.audits.on_right(auditor, chunk)

    def missing(self, auditor: str, *authors: str) -> None:
        assert self.hears(auditor)
        self.audits.on_missing(auditor, 0, authors)

    @property
    def lacking(self) -> list[int]:
        return self.audits.lacking(self.results)


def test_one_other_member_merges_a_result_again_and_then_nothing_is_lacking() -> None:
    room = Round(ANN, BOB, CYD, drawn=1)
    assert room.look() == [(CYD, 0)] and room.lacking == [0]
    room.right(CYD)
    assert room.lacking == [] and room.passes(60.0) == []


def test_a_result_of_which_nobody_was_told_is_lacking() -> None:
    room = Round(ANN, BOB)
    assert room.lacking == [0], "before anybody was asked"
    room.look()
    room.right(BOB)
    assert room.lacking == []
    room.results[0] = result(0, "another sum")
    assert room.lacking == [0], "its owner was lost, and the heir made other bytes"


def test_the_maker_never_audits_itself_and_of_two_the_other_one_does() -> None:
    room = Round(ANN, BOB)
    assert room.look() == [(BOB, 0)]
    assert not room.hears(ANN)


def test_as_many_as_the_host_wants_have_to_find_it_right_and_no_more_than_there_are() -> None:
    room = Round(ANN, BOB, CYD, DAN, auditors=2)
    assert room.look() == [(BOB, 0), (CYD, 0)]
    room.right(BOB)
    assert room.lacking == [0]
    room.right(CYD)
    assert room.lacking == []
    small = Round(ANN, BOB, auditors=60)
    small.look()
    small.right(BOB)
    assert small.lacking == []


def test_who_can_be_dialled_comes_first_and_who_is_out_by_the_decision_last() -> None:
    room = Round(ANN, BOB, CYD, DAN)
    room.undialable, room.out = {BOB}, {DAN}
    assert room.look() == [(CYD, 0)]
    room.here = {ANN, BOB, DAN}
    assert room.look() == [(BOB, 0)]
    room.here = {ANN, DAN}
    assert room.look() == [(DAN, 0)]


def test_who_can_not_be_dialled_audits_where_the_others_are_too_few() -> None:
    room = Round(ANN, BOB, CYD, DAN, auditors=2)
    room.undialable = {CYD, DAN}
    assert room.look() == [(BOB, 0), (CYD, 0)]


def test_an_answer_to_another_decision_or_of_another_one_is_none() -> None:
    room = Round(ANN, BOB, CYD)
    room.look()
    before = room.audits.question_of(0)
    room.decision_no = 2
    assert room.look() == [(BOB, 0)], "the same bytes may be wrong under other weights"
    assert not room.hears(BOB, question=before)
    assert not room.hears(CYD) and not room.hears(BOB, chunk=7, question=1)
    assert room.hears(BOB)


def test_an_auditor_that_is_lost_is_replaced_and_one_that_heard_nothing_is_told_again() -> None:
    room = Round(ANN, BOB, CYD)
    room.look()
    assert room.passes(TELL_AGAIN_S) == [(BOB, 0)]
    room.here.discard(BOB)
    assert room.look() == [(CYD, 0)]


def test_after_long_silence_everybody_is_asked_and_more_than_half_have_to_find_it_right() -> None:
    room = Round(ANN, BOB, CYD, DAN, EVE)
    room.look()
    told = room.passes(PATIENCE_S)
    assert {auditor for auditor, _ in told} == {BOB, CYD, DAN, EVE}
    room.right(CYD, DAN)
    assert room.lacking == [0], "two of four may be a league that waited for this"
    room.right(EVE)
    assert room.lacking == []


def test_who_said_nothing_to_the_end_is_named_and_who_spoke_is_not() -> None:
    room = Round(ANN, BOB, CYD)
    room.look()
    room.passes(PATIENCE_S)
    room.missing(CYD, ANN)
    assert room.audits.silent(room.results, room.now) == {BOB}
    assert not room.audits.silent({}, room.now), "nothing is lacking"
    room.here.discard(BOB)
    room.look()
    assert not room.audits.silent(room.results, room.now), "it is not here"


def test_an_author_that_gives_auditors_nothing_is_out_when_most_of_them_say_so() -> None:
    room = Round(ANN, BOB, CYD, DAN)
    room.look()
    room.missing(BOB, ANN)
    assert {auditor for auditor, _ in room.look()} == {CYD, DAN}, "one word opens the question to all"
    assert room.audits.withholding() == {}
    room.missing(CYD, ANN)
    assert room.audits.withholding() == {ANN: 2}
    assert room.audits.withholding() == {}, "told once"


def test_one_of_several_can_not_have_an_honest_author_left_out() -> None:
    room = Round(ANN, BOB, CYD, DAN)
    room.look()
    room.missing(BOB, CYD)
    room.look()
    room.right(CYD, DAN)
    assert room.audits.withholding() == {} and room.lacking == []


def test_whoever_gets_it_later_takes_its_word_back() -> None:
    room = Round(ANN, BOB, CYD)
    room.look()
    room.missing(BOB, ANN)
    room.look()
    room.right(BOB)
    room.missing(CYD, ANN)
    assert room.audits.withholding() == {}
    room.right(CYD)
    assert room.lacking == []


def test_nobody_names_itself_and_nobody_who_has_no_part() -> None:
    room = Round(ANN, BOB)
    room.look()
    room.missing(BOB, BOB, "a stranger")
    assert room.audits.withholding() == {}


def test_a_refuted_accuser_is_not_heard_in_this_round_any_more() -> None:
    room = Round(ANN, BOB, CYD)
    room.results[1] = result(1)
    room.look()
    question = room.audits.question_of(0)
    assert room.hears(BOB)
    room.audits.on_wrong(BOB, 0)
    room.audits.on_refuted(BOB, 0, question, computed=False)
    assert room.look() == [(CYD, 0)]
    room.audits.on_right(BOB, 0)
    assert 0 in room.lacking
    room.right(CYD)
    assert 0 not in room.lacking


def test_a_sum_that_the_coordinator_did_itself_needs_nobody() -> None:
    room = Round(ANN, BOB, CYD)
    room.look()
    question = room.audits.question_of(0)
    room.audits.on_wrong(BOB, 0)
    room.audits.on_refuted(BOB, 0, question, computed=True)
    assert room.lacking == []


def test_an_accuser_can_not_find_it_right_as_well() -> None:
    room = Round(ANN, BOB)
    room.look()
    room.audits.on_wrong(BOB, 0)
    room.right(BOB)
    assert room.lacking == [0]


def test_where_nobody_is_left_who_could_it_is_said() -> None:
    room = Round(ANN, BOB)
    room.look()
    assert room.audits.orphans(room.results) == []
    room.here.discard(BOB)
    room.look()
    assert room.audits.orphans(room.results) == [0]
    room.here.add(BOB)
    room.look()
    room.right(BOB)
    room.here.discard(BOB)
    room.look()
    assert room.audits.orphans(room.results) == [] and room.lacking == [], (
        "it had found it right before it was lost"
    )


def test_who_is_lost_makes_those_who_have_to_find_it_right_no_fewer() -> None:
    room = Round(ANN, BOB, CYD, auditors=2)
    room.look()
    room.right(CYD)
    room.here.discard(BOB)
    room.look()
    assert room.lacking == room.audits.orphans(room.results) == [0], "cyd may be a friend of ann's"
