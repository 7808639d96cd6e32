"""P6 beside P9: no rule against liars gives up, shortens or suspects honest work that had long to grow."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from farflung.coordinator.ledger.ledger import FragmentBook
from farflung.coordinator.rounds.round_rules import NEW_ROUNDS, rules_for
from farflung.coordinator.rounds.weights import (
    SPAN_MOST,
    SPAN_TIMES,
    MergeRules,
    OwnerShare,
    Screening,
    WorkClaim,
    believed,
    longer,
    screened,
    weighted,
)
from farflung.protocol.manifest import Manifest
from rig.made_run import MadeRun, peer_of

NAMES = ("ann", "bob", "cat", "dan", "eve", "fay")
USUAL = {"ann": 500, "bob": 500, "cat": 500, "dan": 2000, "eve": 500, "fay": 500}
EVERY_S, NORM = 10.0, 1.0


def book(commits: int = 8) -> FragmentBook:
    """So many commits, a round every ten seconds; `fay` never took part."""
    made = FragmentBook(version=commits)
    members = NAMES[:5]
    for version in range(1, commits + 1):
        made.figures.work[version] = (version * EVERY_S, {name: USUAL[name] for name in members})
        made.figures.norms[version] = (NORM, sum(USUAL[name] for name in members) / len(members))
    made.last_in = dict.fromkeys(members, commits)
    return made


def rules(of: FragmentBook, away_s: float) -> MergeRules:
    return rules_for(Manifest(), of, NAMES, (), of.version * EVERY_S + away_s).merge


def lengths(tokens: dict[str, int]) -> dict[str, float]:
    """Of honest work: as much longer as it is more than usual."""
    return {name: NORM * count / USUAL[name] for name, count in tokens.items()}


def screening(norms: dict[str, float], longer_by: dict[str, float], cosine: float = 0.8) -> Screening:
    size = np.array(list(norms.values()))
    products = np.where(np.eye(len(size)) > 0, 1.0, cosine) * np.outer(size, size)
    return screened(list(norms), [OwnerShare(4, products)], 1.0, longer=longer_by)


def test_P6_twelve_rounds_without_a_coordinator_and_one_reboot_give_nothing_up() -> None:
    """As in a storm: one that trained on alone, one that has just been started again."""
    merge = rules(book(), 12 * EVERY_S)
    for members in [c for n in (2, 3, 4, 5) for c in combinations(NAMES[:5], n)]:
        for rebooted in members:
            tokens = {name: (1 if name == rebooted else 12) * USUAL[name] for name in members}
            told = believed({name: WorkClaim(count, count // 10) for name, count in tokens.items()}, merge)
            assert told.tokens == tokens and not told.why, "all of it counts"
            work = {name: longer(name, count, merge) for name, count in tokens.items()}
            seen = screening(lengths(tokens), work)
            assert not seen.out and not seen.clipped and not seen.suspects(0.1)
            made = weighted(tokens, merge, seen)
            assert not made.refusal and not made.told
            assert made.weights == weighted(tokens, merge, None).weights, "nobody counts for less"


def test_P6_who_was_cut_off_for_some_rounds_brings_what_it_did_meanwhile() -> None:
    of = book()
    of.last_in["ann"] = of.version - 5
    merge = rules(of, EVERY_S)
    tokens = USUAL | {"ann": 6 * USUAL["ann"]}
    del tokens["fay"]
    work = {name: longer(name, count, merge) for name, count in tokens.items()}
    assert work == dict.fromkeys(tokens, 1.0) | {"ann": 6.0}
    seen = screening(lengths(tokens), work)
    assert not seen.clipped and not weighted(tokens, merge, seen).refusal


def test_P6_a_quick_machine_is_measured_by_what_is_usual_of_it() -> None:
    merge = rules(book(), 12 * EVERY_S)
    assert longer("dan", 12 * 2000, merge) == 12.0
    assert longer("bob", 50 * 500, merge) == SPAN_TIMES * 12, "that is more than the time was for"


@pytest.mark.parametrize("tokens", [500, 6000, 10**9])
def test_P9_in_calm_nobody_is_longer_by_its_word(tokens: int) -> None:
    for away_s in (0.0, EVERY_S):
        merge = rules(book(), away_s)
        assert {longer(name, tokens, merge) for name in NAMES} == {1.0}


def test_P9_after_an_outage_nobody_is_longer_than_the_time_was_for() -> None:
    for rounds in (3, 12, 1000):
        merge = rules(book(), rounds * EVERY_S)
        most = SPAN_TIMES * min(rounds + 1, SPAN_MOST)
        assert all(longer(name, 10**9, merge) <= most for name in NAMES)


def test_P9_one_liar_lifts_the_guard_by_its_own_part_alone() -> None:
    merge = rules(book(), 12 * EVERY_S)
    tokens = {"ann": 500, "bob": 500, "cat": 500, "eve": 10**9}
    spare = {name: 1.0 for name in tokens}
    weights = weighted(tokens, merge, None).weights
    most = merge.guard * (1.0 - weights["eve"] + weights["eve"] * SPAN_TIMES * 12)
    for norm, refused in ((0.99 * most, False), (1.01 * most, True)):
        alike = screening(dict.fromkeys(tokens, norm), spare, cosine=1.0)
        assert bool(weighted(tokens, merge, alike).refusal) == refused


def test_P9_a_newcomer_is_believed_for_the_time_since_the_newest_commit() -> None:
    merge = rules(book(), EVERY_S)
    assert merge.spans["fay"] == 1.0 and merge.rounds["fay"] == NEW_ROUNDS + 1
    assert longer("fay", 10**9, merge) == 1.0
    assert longer("fay", 12 * 800, rules(book(), 12 * EVERY_S)) == 12.0, "by what is usual in the run"


def test_a_run_without_a_past_knows_no_outage() -> None:
    young = book(2)
    assert longer("ann", 6000, rules(young, 1000.0)) == 1.0
    assert longer("ann", 6000, rules(FragmentBook(), 1000.0)) == 1.0


def test_P6_what_is_learned_while_a_round_stands_still_is_of_the_time_since_it_opened() -> None:
    """A coordinator that was stopped in the middle of a round commits it at last, and members had trained on."""
    run = MadeRun()
    ann = peer_of("ann")
    for _ in range(8):
        run.core.now += EVERY_S
        run.commits({ann: ()}, tokens_by={ann: 500})
    run.core.now += 12 * EVERY_S
    run.commits({ann: ()}, tokens_by={ann: 500}, seconds=12 * EVERY_S)
    run.core.now += 1.0
    merge = rules_for(Manifest(), run.core.ledger.books[0], (ann,), (), run.core.now).merge
    assert longer(ann, 12 * 500, merge) == 12.0
