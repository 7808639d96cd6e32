"""P19: which chunks are merged again and by whom, and what follows from what auditors say, the liars among them."""

from __future__ import annotations

import random
from collections import Counter
from statistics import median

import pytest
from msgspec.structs import replace

from farflung.coordinator.audits import audits
from farflung.coordinator.audits.audits import Dice, FoundCheating
from farflung.coordinator.ledger.records import Struck
from farflung.protocol.errors import Verdict
from farflung.protocol.limits import PART_BYTES
from farflung.protocol.manifest import MergeSection
from farflung.protocol.messages import What
from farflung.protocol.mode_words import AuditChunks, ChunkVerdict
from farflung.protocol.states import OF_DEPARTURE
from rig.made_sums import RUN_ID, MadeSums
from rig.sum_court import SumCourt


def right(chunk: int) -> ChunkVerdict:
    return ChunkVerdict(chunk, False)


def wrong(chunk: int) -> ChunkVerdict:
    return ChunkVerdict(chunk, True)


# ---- drawing ---------------------------------------------------------------------------------------------------


def dice(seed: int) -> Dice:
    return Dice(random.Random(seed).randbytes)


def test_the_share_is_drawn_on_average_and_every_chunk_is_as_likely() -> None:
    draws = [dice(seed).draw(50, 0.05) for seed in range(2000)]
    assert {len(each) for each in draws} == {2, 3}, "two and a half of fifty"
    assert sum(map(len, draws)) / len(draws) == pytest.approx(2.5, abs=0.05)
    seen = Counter(chunk for each in draws for chunk in each)
    assert set(seen) == set(range(50)) and min(seen.values()) > 60 and max(seen.values()) < 145
    assert all(len(set(each)) == len(each) for each in draws)


def test_all_or_nothing_is_drawn_where_the_host_says_so() -> None:
    assert dice(1).draw(7, 1.0) == list(range(7)) and dice(1).draw(7, 0.0) == []


def test_one_corrupted_chunk_of_a_thousand_in_each_round_is_found_within_20_rounds() -> None:
    """The median over many runs at the default share, where auditors are honest: the figure of docs/security.md."""
    share = MergeSection().audit
    rounds = []
    for seed in range(400):
        drawn, corrupted = dice(seed), dice(seed + 1_000_000)
        rounds.append(next(at for at in range(1, 10_000) if corrupted.below(1000) in drawn.draw(1000, share)))
    assert median(rounds) <= 20
    assert share / 2 < 0.02, (
        "of n contributions to a chunk n - 1 are fetched; a round carries 2 (n - 1) for each"
    )


def test_an_auditor_is_another_one_than_the_maker_and_is_told_all_that_it_needs() -> None:
    for seed in range(20):
        court = SumCourt(MadeSums(), seed=seed)
        court.commits()
        audits = court.audits()
        assert audits.keys() == {0, 1, 2}
        assert all(auditor != court.made.members[chunk] for chunk, auditor in audits.items())
    told = next(t.message for t in court.told if isinstance(t.message, AuditChunks))
    assert told.members == court.made.members and told.weights == court.made.weights
    assert all(len(drawn.hashes) == 3 * 32 for drawn in told.chunks)


def test_nothing_is_drawn_where_the_host_wants_none() -> None:
    court = SumCourt(MadeSums(), audit=0.0)
    court.commits()
    assert not court.told


def test_an_auditor_that_is_lost_or_deaf_is_replaced_or_told_again() -> None:
    court = SumCourt(MadeSums())
    court.commits()
    first = court.audits()[0]
    court.told.clear()
    court.passes(6.0)
    assert court.audits()[0] == first, "told again"
    court.core.members.lose(court.members[first], OF_DEPARTURE["silent"])
    court.told.clear()
    court.passes(1.0)
    assert court.audits()[0] not in (first, court.made.members[0])


def test_an_audit_ends_when_authors_do_not_keep_their_contributions_any_more() -> None:
    court = SumCourt(MadeSums())
    court.commits()
    court.core.ledger.books[0].version += 2
    court.passes(6.0)
    assert not list(court.auditing.open)


# ---- accusations -----------------------------------------------------------------------------------------------


def test_a_wrong_sum_is_proven_and_its_maker_is_banned() -> None:
    court = SumCourt(MadeSums(wrong=(1,)))
    court.commits()
    auditor = court.audits()[1]
    court.says(auditor, wrong(1))
    assert {show.peer for show in court.asked(auditor)} == set(court.made.members)
    assert all(show.what is What.CONTRIBUTION for show in court.asked(auditor))
    court.shows(auditor, dict(zip(court.made.members, court.made.of_chunk(1), strict=True)))
    maker = court.made.members[1]
    assert court.of(FoundCheating) == court.out == [maker] and not court.of(Struck)
    [kept] = court.proofs
    assert kept.proof.guilty == maker and kept.proof.run_id == RUN_ID
    assert not court.members[maker].alive


def test_who_calls_a_right_sum_wrong_gets_a_strike_and_the_owner_stays() -> None:
    court = SumCourt(MadeSums())
    court.commits()
    auditor = court.audits()[1]
    court.says(auditor, wrong(1))
    court.shows(auditor, dict(zip(court.made.members, court.made.of_chunk(1), strict=True)))
    assert court.of(Struck) == [auditor] and not court.out and not court.proofs


def test_an_accuser_that_shows_other_bytes_or_none_gets_a_strike() -> None:
    for shown in (b"other bytes", None):
        court = SumCourt(MadeSums())
        court.commits()
        auditor = court.audits()[1]
        court.says(auditor, wrong(1))
        court.shows(auditor, dict.fromkeys(court.made.members, shown))
        assert court.of(Struck) == [auditor] and not court.out


def test_an_accuser_that_came_back_as_another_process_or_was_moved_owes_nothing() -> None:
    """What it had merged again is not there any more."""
    for how in ("restarts", "moves"):
        for passes in (False, True):
            court = SumCourt(MadeSums())
            court.commits()
            auditor = court.audits()[1]
            court.says(auditor, wrong(1))
            if how == "restarts":
                court.members[auditor].process = b"another process!"
            else:
                court.members[auditor].standings[1] = court.members[auditor].standings.pop(0)
            if passes:
                court.passes(1.0)
                assert not court.core.questions.asked
            else:
                court.shows(auditor, dict.fromkeys(court.made.members))
            assert not court.of(Struck) and not court.out


def test_an_accuser_that_is_lost_leaves_nothing_behind() -> None:
    court = SumCourt(MadeSums())
    court.commits()
    auditor = court.audits()[1]
    court.says(auditor, wrong(1))
    court.core.members.lose(court.members[auditor], OF_DEPARTURE["silent"])
    court.passes(1.0)
    assert not court.of(Struck) and not court.core.questions.asked


def test_the_heir_of_a_lost_owner_does_not_answer_for_its_sum() -> None:
    """Who merged a chunk is who signed it first: whoever passes the bytes on later stays."""
    court = SumCourt(MadeSums(wrong=(1,)))
    court.commits()
    auditor, maker = court.audits()[1], court.made.members[1]
    court.core.members.lose(court.members[maker], OF_DEPARTURE["silent"])
    court.says(auditor, wrong(1))
    court.shows(auditor, dict(zip(court.made.members, court.made.of_chunk(1), strict=True)))
    assert court.out == [maker], "also where it is gone"


def test_contributions_that_take_too_much_memory_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "PROOF_BYTES_MOST", 100)
    court = SumCourt(MadeSums(wrong=(1,)))
    court.commits()
    auditor = court.audits()[1]
    court.says(auditor, wrong(1))
    assert not court.asked(auditor)


# ---- words that count for nothing ------------------------------------------------------------------------------


def test_only_who_was_asked_is_heard_and_of_what_it_was_asked() -> None:
    court = SumCourt(MadeSums())
    court.commits()
    auditor = court.audits()[1]
    stranger = next(peer for peer in court.made.members if peer not in (auditor, court.made.members[1]))
    assert court.says(stranger, wrong(1)) is Verdict.STALE or court.audits()[1] == stranger
    assert court.says(court.made.members[1], right(1)) is Verdict.STALE, "the maker does not audit itself"
    assert court.says(auditor, wrong(1), round_no=77) is Verdict.STALE
    assert court.says(auditor, wrong(99)) is Verdict.STALE
    assert not court.asked(stranger) and not court.of(Struck)


def test_an_audit_is_over_when_it_is_said_to_be_right() -> None:
    court = SumCourt(MadeSums())
    court.commits()
    auditor = court.audits()[1]
    assert court.says(auditor, right(1)) is Verdict.ACCEPTED
    assert court.says(auditor, wrong(1)) is Verdict.STALE, "it can't think better of it"


def test_an_accuser_has_one_open_case_at_a_time() -> None:
    court = SumCourt(MadeSums(count=6))
    court.commits()
    by: dict[str, list[int]] = {}
    for chunk, auditor in court.audits().items():
        by.setdefault(auditor, []).append(chunk)
    auditor, chunks = max(by.items(), key=lambda each: len(each[1]))
    assert len(chunks) > 1
    court.says(auditor, *map(wrong, chunks))
    assert {show.chunk for show in court.asked(auditor)} == {chunks[0]}


# ---- contributions that nobody gets ------------------------------------------------------------------------------


def lacks(court: SumCourt, chunk: int, author: str, times: int = 2) -> None:
    """So many auditors say that they do not get what this author gave."""
    for _ in range(times):
        court.says(court.audits()[chunk], ChunkVerdict(chunk, False, (author,)))


def all_show(court: SumCourt, chunk: int, but: str = "") -> None:
    for peer, payload in zip(court.made.members, court.made.of_chunk(chunk), strict=True):
        if peer != but:
            court.shows(peer, {peer: payload})


def test_what_auditors_do_not_get_its_authors_show_and_the_sum_is_done_here() -> None:
    """An owner that hides its own contribution from auditors is convicted as any other."""
    court = SumCourt(MadeSums(count=5, wrong=(0,)))
    court.commits()
    owner = court.made.members[0]
    lacks(court, 0, owner)
    for peer in court.made.members:
        assert [(show.peer, show.chunk) for show in court.asked(peer)] == [(peer, 0)], "each for its own"
    all_show(court, 0)
    assert court.of(FoundCheating) == court.out == [owner] and not court.of(Struck)
    [kept] = court.proofs
    assert kept.proof.guilty == owner and not kept.proof.problem()


def test_whoever_hides_for_its_friend_is_asked_as_well_also_where_no_two_hide_from_the_same() -> None:
    court = SumCourt(MadeSums(count=5, wrong=(0,)))
    court.commits()
    lacks(court, 0, court.made.members[3], 1)
    lacks(court, 0, court.made.members[4], 1)
    all_show(court, 0)
    assert court.out == [court.made.members[0]]


def test_who_gives_its_contribution_to_nobody_is_struck_once_a_round() -> None:
    court = SumCourt(MadeSums(count=5))
    court.commits()
    author = court.made.members[4]
    for chunk in (0, 1):
        lacks(court, chunk, author)
        court.shows(author, {author: None})
    assert court.of(Struck) == [author]


def test_a_sum_that_is_right_costs_nobody_anything_whatever_auditors_in_league_say() -> None:
    court = SumCourt(MadeSums(count=5))
    court.commits()
    lacks(court, 0, court.made.members[4])
    all_show(court, 0)
    assert not court.of(Struck) and not court.out and not court.auditing.cases.is_open(0)


def test_who_came_back_as_another_process_owes_nothing_and_is_not_asked() -> None:
    court = SumCourt(MadeSums(count=5))
    court.commits()
    author = court.made.members[4]
    court.members[author].process = b"another process!"
    lacks(court, 0, author)
    assert not any(map(court.asked, court.made.members)) and not court.of(Struck)


def test_who_was_moved_to_another_stage_owes_nothing_and_is_not_asked() -> None:
    """It is the same process, which gave up what it had of the stage that it left."""
    court = SumCourt(MadeSums(count=5))
    court.commits()
    author = court.made.members[4]
    standings = court.members[author].standings
    standings[1] = standings.pop(0)
    lacks(court, 0, author)
    assert not any(map(court.asked, court.made.members)) and not court.of(Struck)


def test_who_is_lost_while_it_is_asked_owes_nothing_and_no_question_stays_behind() -> None:
    court = SumCourt(MadeSums(count=5))
    court.commits()
    author = court.made.members[4]
    lacks(court, 0, author)
    court.core.members.lose(court.members[author], OF_DEPARTURE["silent"])
    court.passes(1.0)
    assert not court.auditing.cases.is_open(0) and not court.core.questions.asked and not court.of(Struck)


def test_who_is_asked_too_late_owes_nothing_and_who_has_begun_to_show_goes_on() -> None:
    """Else it could show part by part until nobody has to keep anything any more."""
    for begins in (False, True):
        court = SumCourt(MadeSums(count=5))
        court.core.ledger.model = replace(court.core.ledger.model, chunk_elements=1 << 20)
        court.commits()
        author = court.made.members[4]
        lacks(court, 0, author)
        all_show(court, 0, but=author)
        if begins:
            court.begins(author, total=2 * PART_BYTES)
        court.core.ledger.books[0].version += 2
        court.passes(21.0)
        court.sees()
        assert court.of(Struck) == ([author] if begins else [])


def test_one_look_at_a_time_and_the_next_one_follows() -> None:
    court = SumCourt(MadeSums(count=5, wrong=(1,)))
    court.commits()
    author = court.made.members[4]
    for chunk in (0, 1):
        lacks(court, chunk, author)
    assert {show.chunk for show in court.asked(author)} == {0}
    all_show(court, 0)
    court.told.clear()
    court.passes(1.0)
    assert {show.chunk for show in court.asked(author)} == {1}
    all_show(court, 1)
    assert court.out == [court.made.members[1]]


def test_after_going_back_nobody_owes_what_it_sent() -> None:
    court = SumCourt(MadeSums(count=5))
    court.commits()
    lacks(court, 0, court.made.members[4])
    court.core.ledger.books[0].version -= 1
    court.passes(1.0)
    assert not court.auditing.cases.is_open(0) and not court.of(Struck)


def test_one_auditor_that_gets_nothing_is_followed_by_another_one() -> None:
    court = SumCourt(MadeSums(count=5))
    court.commits()
    first = court.audits()[0]
    lacks(court, 0, court.made.members[4], 1)
    assert court.audits()[0] != first and not court.asked(court.made.members[4])


def test_where_the_next_commit_has_come_there_is_no_time_for_another_auditor() -> None:
    court = SumCourt(MadeSums(count=5, wrong=(0,)))
    court.commits()
    court.core.ledger.books[0].version += 1
    lacks(court, 0, court.made.members[4], 1)
    all_show(court, 0)
    assert court.out == [court.made.members[0]]


def test_of_two_the_only_auditor_is_heard_and_a_right_sum_costs_nothing() -> None:
    for wrong_ones in ((), (0,)):
        court = SumCourt(MadeSums(count=2, wrong=wrong_ones))
        court.commits()
        maker, auditor = court.made.members
        court.says(auditor, ChunkVerdict(0, False, (maker,)))
        all_show(court, 0)
        assert court.out == [maker][: len(wrong_ones)] and not court.of(Struck)


# ---- the end of a run --------------------------------------------------------------------------------------------


def test_it_is_busy_until_the_last_auditor_has_spoken_or_the_case_is_over() -> None:
    court = SumCourt(MadeSums(wrong=(1,)))
    assert not court.auditing.is_busy_with(0)
    court.commits()
    audits = court.audits()
    court.says(audits[0], right(0))
    court.says(audits[2], right(2))
    assert court.auditing.is_busy_with(0) and not court.auditing.is_busy_with(1)
    court.says(audits[1], wrong(1))
    assert court.auditing.is_busy_with(0), "the contributions are to be shown yet"
    court.shows(audits[1], dict(zip(court.made.members, court.made.of_chunk(1), strict=True)))
    assert not court.auditing.is_busy_with(0)
