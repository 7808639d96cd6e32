"""P9: what is believed of tokens, and what newcomers count.  The cap, the clip and the guard: test_outliers.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.coordinator.rounds.weights import (
    PACE_MOST,
    RATE_MOST,
    RATE_RISE,
    MergeRules,
    WorkClaim,
    believed,
    weighted,
)
from farflung.protocol.round_words import WEIGHT_CAP

PLAIN = MergeRules()


def test_P9_newcomers_count_for_their_trust_alone() -> None:
    """The rule of the ramp is tested in test_round_driver.py: here, that a round's weights follow it."""
    tokens = {"old": 100, "new": 100, "ramping": 100}
    rules = MergeRules(trust={"old": 1.0, "new": 0.1, "ramping": 0.5})
    weights = weighted(tokens, rules, None).weights
    assert weights["new"] == pytest.approx(0.1 * weights["old"])
    assert weights["ramping"] == pytest.approx(0.5 * weights["old"])
    assert sum(weights.values()) == pytest.approx(1.0)


def test_P9_a_thousand_times_the_tokens_are_not_believed_where_samples_are_leased() -> None:
    claims = {"ann": WorkClaim(80, 8), "bob": WorkClaim(85, 8), "liar": WorkClaim(80_000, 8)}
    found = believed(claims, PLAIN)
    assert found.tokens == {"ann": 80, "bob": 85, "liar": int(RATE_MOST * 85 / 8 * 8)}
    assert found.why.keys() == {"liar"}
    assert found.why["liar"].startswith(
        "340 of the 80000 tokens that it claims count: for each of its 8 samples 4 times"
    )
    weights = weighted(found.tokens, PLAIN, None).weights
    assert weights["liar"] <= WEIGHT_CAP * weights["bob"] * (1 + 1e-6)


def test_P9_in_a_league_up_to_all_but_one_the_runs_own_past_is_what_counts() -> None:
    claims = {"ann": WorkClaim(80, 8)} | {f"liar{number}": WorkClaim(80_000, 8) for number in range(9)}
    found = believed(claims, MergeRules(usual_rate=10.0))
    assert found.tokens["ann"] == 80 and found.rate == RATE_RISE * 10, "a league among itself sets no usual"
    assert {found.tokens[f"liar{number}"] for number in range(9)} == {int(RATE_MOST * 80)}


def test_P9_who_names_no_samples_where_the_others_do_counts_no_more_than_the_one_in_the_middle() -> None:
    claims = {
        "ann": WorkClaim(80, 8),
        "bob": WorkClaim(100, 8),
        "cyd": WorkClaim(120, 8),
        "liar": WorkClaim(80_000),
    }
    assert believed(claims, PLAIN).tokens["liar"] == 100
    assert believed(claims, MergeRules(rounds={"liar": 3})).tokens["liar"] == 300, "it was left out twice"


def test_P9_where_no_data_is_leased_absurd_claims_are_cut_by_what_others_do_in_that_time() -> None:
    found = believed({"ann": WorkClaim(100), "bob": WorkClaim(1000), "liar": WorkClaim(10**9)}, PLAIN)
    assert found.tokens == {"ann": 100, "bob": 1000, "liar": int(PACE_MOST * 1000)}
    assert "more than 32 times as many as the member in the middle" in found.why["liar"]
    late = believed(
        {"ann": WorkClaim(100), "bob": WorkClaim(100), "slow": WorkClaim(6000)},
        MergeRules(rounds={"slow": 2}),
    )
    assert late.tokens["slow"] == 6000, "two rounds' work of a fast one"


def test_P9_of_two_members_the_lower_word_counts_and_one_alone_is_believed() -> None:
    assert (
        believed({"ann": WorkClaim(80, 8), "liar": WorkClaim(80_000, 8)}, PLAIN).tokens["liar"]
        == RATE_MOST * 80
    )
    alone = believed({"ann": WorkClaim(80_000, 8)}, PLAIN)
    assert alone.tokens == {"ann": 80_000} and not alone.why
    assert believed({"ann": WorkClaim(80_000, 8)}, MergeRules(usual_rate=10.0)).tokens == {"ann": 320}


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(8, 12)), min_size=1, max_size=8))
def test_honest_members_of_any_speed_are_believed_in_full(members: list[tuple[int, int]]) -> None:
    """Forty times as fast as another, at ten tokens a sample or so: what each says is what it gets."""
    speeds = sorted(speed for speed, _ in members)
    middle = speeds[(len(speeds) - 1) // 2]
    claims = {
        str(number): WorkClaim(speed * rate, speed)
        for number, (speed, rate) in enumerate(members)
        if speed * rate <= PACE_MOST * middle * 8
    }
    found = believed(claims, MergeRules(usual_rate=10.0))
    assert found.tokens == {name: claim.tokens for name, claim in claims.items()} and not found.why


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.builds(WorkClaim, st.integers(0, 10**12), st.integers(0, 100)),
        min_size=1,
    ),
    st.floats(0.0, 100.0),
)
def test_nobody_counts_for_more_than_it_says_nor_for_nothing_where_it_says_something(
    claims: dict[str, WorkClaim], usual: float
) -> None:
    found = believed(claims, MergeRules(usual_rate=usual))
    assert found.tokens.keys() == claims.keys()
    for name, claim in claims.items():
        assert min(1, claim.tokens) <= found.tokens[name] <= claim.tokens
        assert (name in found.why) == (found.tokens[name] < claim.tokens)
