"""P19 in groups: a result, and what a group adds to it, are merged again, and each convicts its own maker."""

from __future__ import annotations

import pytest

from farflung.coordinator.audits.audits import FoundCheating
from farflung.coordinator.ledger.records import Struck
from farflung.protocol.errors import Verdict
from farflung.protocol.messages import What
from farflung.protocol.mode_words import AuditChunks, ChunkVerdict
from farflung.protocol.round_words import THE_RESULT
from farflung.protocol.states import OF_DEPARTURE
from rig.made_mesh import MadeMesh
from rig.made_sums import RUN_ID
from rig.sum_court import SumCourt

SUM, RESULT = (1, 0), (1, THE_RESULT)  # (chunk, of which group)


def court_of(*wrong: tuple[int, int], audit: float = 1.0) -> SumCourt:
    court = SumCourt(MadeMesh(wrong=wrong), audit)
    court.commits()
    return court


def accuses(court: SumCourt, place: tuple[int, int]) -> str:
    """Its auditor says that it is wrong, and shows what went in as it was."""
    chunk, group = place
    made, auditor = court.made, court.places()[place]
    assert isinstance(made, MadeMesh)
    court.says(auditor, ChunkVerdict(chunk, True), group=group)
    authors = made.in_groups.column(chunk) if group < 0 else made.in_groups.members[group]
    court.shows(auditor, dict(zip(authors, made.of_chunk(chunk, group), strict=True)))
    return auditor


def test_results_and_what_groups_add_to_them_are_drawn_and_given_to_whoever_is_near_and_did_not_make_them() -> (
    None
):
    court = court_of()
    made, places = court.made, court.places()
    assert isinstance(made, MadeMesh)
    assert places.keys() == {(chunk, group) for chunk in range(3) for group in (THE_RESULT, 0, 1)}
    for (chunk, group), auditor in places.items():
        assert auditor != made.maker(chunk, group)
        near = made.in_groups.column(chunk) if group < 0 else made.in_groups.members[group]
        assert auditor in near


def test_an_auditor_is_told_what_goes_in_and_by_which_weights() -> None:
    court = court_of()
    made = court.made
    assert isinstance(made, MadeMesh)
    for told in (each.message for each in court.told if isinstance(each.message, AuditChunks)):
        if told.of_sums:
            assert told.group == THE_RESULT and told.weights == (1.0, 1.0) and told.codecs == ("bf16", "bf16")
            assert all(told.members == tuple(made.in_groups.column(drawn.chunk)) for drawn in told.chunks)
        else:
            assert told.members == made.in_groups.members[told.group] and told.codecs == ("fp32",) * 3
            assert told.weights == made.decision.weights[:3]


@pytest.mark.parametrize("place", [SUM, RESULT])
def test_a_wrong_sum_convicts_who_made_it_and_nobody_else(place: tuple[int, int]) -> None:
    court = court_of(place)
    auditor, maker = accuses(court, place), court.made.maker(*place)  # type: ignore[union-attr]
    asked = {show.what for show in court.asked(auditor)}
    assert asked == {What.SUM if place == RESULT else What.CONTRIBUTION}
    assert court.of(FoundCheating) == court.out == [maker] and not court.of(Struck)
    [kept] = court.proofs
    assert kept.proof.guilty == maker and kept.proof.run_id == RUN_ID and not kept.proof.problem()


def test_the_root_of_a_group_that_lied_added_up_rightly() -> None:
    """What it got was signed: that it was wrong is not the root's fault."""
    court = court_of(SUM)
    auditor = accuses(court, RESULT)
    assert court.of(Struck) == [auditor] and not court.out


@pytest.mark.parametrize("place", [SUM, RESULT])
def test_who_calls_a_right_one_wrong_gets_a_strike(place: tuple[int, int]) -> None:
    court = court_of()
    auditor = accuses(court, place)
    assert court.of(Struck) == [auditor] and not court.out and not court.proofs


def test_a_word_is_about_the_sum_that_was_asked_about() -> None:
    court = court_of()
    auditor = court.places()[RESULT]
    assert court.says(auditor, ChunkVerdict(1, True), group=0) is Verdict.STALE
    assert court.says(auditor, ChunkVerdict(1, False)) is Verdict.ACCEPTED


def test_where_nobody_near_is_left_somebody_else_of_the_round_audits() -> None:
    court = court_of()
    made = court.made
    assert isinstance(made, MadeMesh)
    root = made.maker(*RESULT)
    for peer in set(made.in_groups.column(1)) - {root}:
        court.core.members.lose(court.members[peer], OF_DEPARTURE["silent"])
    court.told.clear()
    court.passes(1.0)
    assert court.places()[RESULT] not in made.in_groups.column(1)


def test_who_gives_its_sum_to_nobody_is_asked_and_struck_if_it_does_not_show_it() -> None:
    court = SumCourt(MadeMesh(groups=4))
    court.commits()
    made = court.made
    assert isinstance(made, MadeMesh)
    author = next(peer for peer in made.in_groups.column(1) if peer != made.maker(*RESULT))
    for _ in range(2):
        court.says(court.places()[RESULT], ChunkVerdict(1, False, (author,)))
    assert [show.what for show in court.asked(author)] == [What.SUM]
    court.shows(author, {author: None})
    assert court.of(Struck) == [author]
