"""A decision that is foreseen, at the members of a round: results leave by it, and nothing stands before it is made."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from farflung.collectives.round.effects import DataEffect, Merge, SendFrame, Weigh
from farflung.collectives.round.member import Deciding, DecisionNews, MemberRound
from farflung.protocol.digests import full_mask, hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.round_words import Decision, Plan

TAG, QUIET_S = bytes(8), 1.0
ALL = ("ann", "bob", "cyd")
PLAN = Plan(1, 1, 0, ALL, (0, 1, 2), ("fp32",) * 3)
FORESEEN = Decision(1, 1, (0.5, 0.25, 0.25), {}, foreseen=True)
MADE = Decision(1, 1, (0.5, 0.25, 0.25), {})
OTHER = Decision(1, 2, (0.5, 0.5, 0.0), {"cyd": "it was late"})


class Ann:
    """Owns chunk 0, and compares contributions."""

    def __init__(self, decision: Decision | None = FORESEEN) -> None:
        self.round = MemberRound("ann", PLAN, TAG, QUIET_S, 0.0, compare=True)
        self.did: list[DataEffect] = []
        self.do(self.round.on_encoded({chunk: b"mine%d" % chunk for chunk in range(3)}))
        if decision is not None:
            self.do(self.round.on_decision(decision, 0.0))

    def do(self, effects: Sequence[DataEffect]) -> None:
        self.did += effects

    def takes(self, did: type) -> list[DataEffect]:
        found = [each for each in self.did if type(each) is did]
        self.did = [each for each in self.did if type(each) is not did]
        return found

    def gets(self, sender: str, kind: Kind, chunk: int, number: int = 0, now: float = 0.0) -> Verdict:
        payload = b"%s's %d" % (sender.encode(), chunk)
        header = Header(kind, TAG, round_no=1, decision_no=number, version=0, chunk=chunk)
        frame = with_payload(header, payload, hash_bytes(payload))
        verdict, effects = self.round.on_frame(sender, frame, now)
        self.do(effects)
        return verdict

    def merges(self) -> None:
        self.gets("bob", Kind.CONTRIBUTION, 0)
        self.gets("cyd", Kind.CONTRIBUTION, 0)
        [merge] = self.takes(Merge)
        assert isinstance(merge, Merge) and merge.decision_no == 1
        self.do(self.round.owner.on_calculated(merge, b"the sum"))

    def asks(self, now: float) -> set[tuple[str, Kind]]:
        self.takes(SendFrame)
        self.do(self.round.on_timer(now))
        return {
            (each.to, each.frame.header.kind) for each in self.takes(SendFrame) if isinstance(each, SendFrame)
        }

    @property
    def sends(self) -> list[tuple[str, Kind, int]]:
        sent = [each for each in self.did if isinstance(each, SendFrame)]
        return [(each.to, each.frame.header.kind, each.frame.header.decision_no) for each in sent]


# ---- which word is news


def test_the_words_of_a_decision() -> None:
    deciding = Deciding()
    assert (deciding.number, deciding.made_no) == (0, 0)
    assert deciding.hear(FORESEEN) is DecisionNews.OTHER and (deciding.number, deciding.made_no) == (1, 0)
    assert deciding.hear(FORESEEN) is DecisionNews.NONE
    assert deciding.hear(MADE) is DecisionNews.STANDS and (deciding.number, deciding.made_no) == (1, 1)
    assert deciding.hear(MADE) is DecisionNews.NONE
    assert deciding.hear(FORESEEN) is DecisionNews.NONE and deciding.is_made, "it is late"
    assert deciding.hear(OTHER) is DecisionNews.OTHER and deciding.made_no == 2
    assert deciding.hear(MADE) is DecisionNews.NONE


def test_the_same_number_with_other_weights_makes_nothing_stand() -> None:
    deciding = Deciding()
    deciding.hear(FORESEEN)
    assert deciding.hear(replace(MADE, weights=(0.25, 0.25, 0.5))) is DecisionNews.OTHER


# ---- at an owner


def test_an_owner_gives_its_result_away_and_goes_on_comparing() -> None:
    ann = Ann()
    ann.merges()
    assert [(to, number) for to, kind, number in ann.sends if kind is Kind.RESULT] == [("bob", 1), ("cyd", 1)]
    [weigh] = ann.takes(Weigh)
    assert isinstance(weigh, Weigh) and weigh.members == full_mask(3) and ann.round.progress().dots is None
    ann.round.owner.on_calculated(weigh, (1.0,) * 6)
    progress = ann.round.progress()
    assert progress.dots is not None and progress.merged == {0: hash_bytes(b"the sum")}
    assert ann.round.deciding.made_no == 0


def test_an_owner_that_hears_of_it_late_still_compares() -> None:
    ann = Ann(None)
    ann.gets("bob", Kind.CONTRIBUTION, 0)
    ann.do(ann.round.on_decision(FORESEEN, 0.0))
    ann.gets("cyd", Kind.CONTRIBUTION, 0)
    assert len(ann.takes(Weigh)) == len(ann.takes(Merge)) == 1


def test_what_was_made_stands_when_the_decision_is_made() -> None:
    ann = Ann()
    ann.merges()
    assert ann.gets("bob", Kind.RESULT, 1, number=1) is Verdict.ACCEPTED
    ann.did.clear()
    ann.do(ann.round.on_decision(MADE, 1.0))
    assert not ann.did and ann.round.pieces.results.keys() == {0, 1} and ann.round.pieces.merged.keys() == {0}
    assert ann.round.deciding.made_no == 1 and not ann.round.owner.weighing.active


def test_what_was_made_by_other_weights_is_worth_nothing_and_made_again() -> None:
    ann = Ann()
    ann.merges()
    ann.gets("bob", Kind.RESULT, 1, number=1)
    ann.did.clear()
    ann.do(ann.round.on_decision(OTHER, 1.0))
    assert not ann.round.pieces.results and not ann.round.pieces.merged
    [merge] = ann.takes(Merge)
    assert isinstance(merge, Merge) and (merge.decision_no, merge.weights) == (2, (0.5, 0.5))
    assert ann.gets("bob", Kind.RESULT, 1, number=1) is Verdict.STALE


def test_a_sum_that_was_on_its_way_when_the_weights_changed_is_not_given_away() -> None:
    ann = Ann()
    ann.gets("bob", Kind.CONTRIBUTION, 0)
    ann.gets("cyd", Kind.CONTRIBUTION, 0)
    [merge] = ann.takes(Merge)
    ann.do(ann.round.on_decision(OTHER, 1.0))
    ann.did.clear()
    assert isinstance(merge, Merge)
    ann.do(ann.round.owner.on_calculated(merge, b"the sum"))
    assert not ann.did and not ann.round.pieces.results


# ---- what is asked for


def test_nobody_is_asked_for_a_result_before_it_is_decided() -> None:
    """It may wait for somebody else's contribution: whoever is asked in vain loses its chunks."""
    ann = Ann()
    assert ann.asks(QUIET_S) == {("bob", Kind.WANT_CONTRIBUTION), ("cyd", Kind.WANT_CONTRIBUTION)}
    ann.merges()
    assert ann.asks(20 * QUIET_S) == set()
    ann.do(ann.round.on_decision(MADE, 20 * QUIET_S))
    assert ann.asks(20.5 * QUIET_S) == set(), "from then on it has its time"
    assert ann.asks(40 * QUIET_S) == {("bob", Kind.WANT_RESULT), ("cyd", Kind.WANT_RESULT)}


def test_who_is_expected_to_be_out_is_asked_for_its_contribution_all_the_same() -> None:
    """Nobody knows yet: its work may count."""
    ann = Ann(replace(OTHER, foreseen=True, decision_no=1))
    ann.gets("bob", Kind.CONTRIBUTION, 0)
    [merge] = ann.takes(Merge)
    assert isinstance(merge, Merge)
    ann.do(ann.round.owner.on_calculated(merge, b"the sum"))
    assert ("cyd", Kind.WANT_CONTRIBUTION) in ann.asks(20 * QUIET_S)


def test_who_sends_now_is_who_owes_a_contribution_or_a_result() -> None:
    ann = Ann()
    assert ann.round.owing == {"bob", "cyd"}
    ann.merges()
    assert ann.round.owing == {"bob", "cyd"}
    ann.gets("bob", Kind.RESULT, 1, number=1)
    assert ann.round.owing == {"cyd"}
    ann.gets("cyd", Kind.RESULT, 2, number=1)
    assert ann.round.owing == set()


def test_a_result_that_overtook_the_word_of_what_is_foreseen_is_kept_for_a_moment() -> None:
    ann = Ann(None)
    frame = Frame(Header(Kind.RESULT, TAG, round_no=1, decision_no=1, version=0, chunk=1))
    assert ann.round.is_early("bob", frame)
    ann.do(ann.round.on_decision(FORESEEN, 0.0))
    assert not ann.round.is_early("bob", frame)


def test_a_commit_that_does_not_come_is_no_wonder_before_the_decision() -> None:
    ann = Ann()
    ann.merges()
    ann.gets("bob", Kind.RESULT, 1, number=1)
    ann.gets("cyd", Kind.RESULT, 2, number=1)
    ann.round.on_timer(1.0)
    ann.round.on_timer(9.0)
    assert not ann.round.progress().got_by
    ann.round.on_decision(MADE, 9.0)
    ann.round.on_timer(9.5)
    ann.round.on_timer(19.0)
    assert ann.round.progress().got_by
