"""P9 in a mesh: directions judged within a group, lengths among all, and the sums of groups in their turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from farflung.coordinator.mesh.mesh import ComparingSums
from farflung.coordinator.rounds.reported import ComparingMembers
from farflung.coordinator.rounds.round_rules import Groups
from farflung.coordinator.rounds.weights import Compared, OwnerShare, captured, screened_in_groups
from farflung.protocol.digests import mask_to_bytes
from farflung.protocol.round_words import Decision, DotProducts, Plan

SIZE, GROUPS, OF_GROUP = 1200, 5, 6
OWNERS = 4
NAMES = [[f"{group}{member}" for member in range(OF_GROUP)] for group in range(GROUPS)]


def honest(common: float = 0.5) -> torch.Tensor:
    """[groups, members, SIZE]"""
    draw = torch.Generator().manual_seed(1)
    shared = torch.randn(SIZE, generator=draw)
    own = torch.randn(GROUPS, OF_GROUP, SIZE, generator=draw)
    lengths = 0.9 + 0.3 * torch.rand(GROUPS, OF_GROUP, 1, generator=draw)
    return (shared * common**0.5 + own * (1 - common) ** 0.5) * lengths


def told(vectors_nc: torch.Tensor, names: Sequence[str]) -> Compared:
    parts = vectors_nc.double().split(SIZE // OWNERS, 1)
    return Compared(names, [OwnerShare(3, (part @ part.T).numpy()) for part in parts])


def screening_of(vectors: torch.Tensor, clip: float = 1.0):  # type: ignore[no-untyped-def]
    return screened_in_groups([told(each, names) for each, names in zip(vectors, NAMES, strict=True)], clip)


def sums_of(vectors: torch.Tensor) -> tuple[Compared, list[float]]:
    return told(vectors.sum(1), [str(group) for group in range(GROUPS)]), vectors.norm(dim=2).sum(1).tolist()


def test_P9_when_nobody_lies_nobody_is_out_at_either_level() -> None:
    for common in (0.9, 0.3, 0.1):
        vectors = honest(common)
        screening = screening_of(vectors)
        assert not screening.out and not any(factor < 0.7 for factor in screening.factors.values())
        out, norm = captured(*sums_of(vectors))
        assert out == {} and norm == pytest.approx(float(vectors.sum((0, 1)).norm()), rel=1e-3)


def test_P9_who_turns_round_in_one_group_is_out_and_the_group_is_not() -> None:
    vectors = honest()
    vectors[2, :2] *= -1.0
    assert set(screening_of(vectors).out) == {"20", "21"}
    vectors[2, :2] = 0.0  # as they are summed
    assert captured(*sums_of(vectors))[0] == {}


def test_P9_most_of_a_group_are_not_the_measure_of_length() -> None:
    vectors = honest()
    vectors[2, :4] *= 1000.0
    screening = screening_of(vectors)
    assert {name for name, factor in screening.factors.items() if factor < 2e-3} == {"20", "21", "22", "23"}
    assert min(factor for factor in screening.factors.values() if factor > 2e-3) > 0.7


def test_P9_a_group_whose_sum_points_elsewhere_is_out_as_a_whole() -> None:
    vectors = honest()
    vectors[2, :4] *= -1.0
    assert set(screening_of(vectors).out) == {"24", "25"}, "the honest ones, as seen from there"
    vectors[2, 4:] = 0.0
    out, _ = captured(*sums_of(vectors))
    assert set(out) == {"2"} and "median cosine -0." in out["2"]


def test_P9_owners_who_say_that_their_groups_members_are_short_have_it_out_as_a_whole() -> None:
    vectors = honest()
    vectors[2] *= 1000.0
    sums, claimed = sums_of(vectors)
    assert captured(sums, claimed)[0] == {}, "what they said is so: it was shortened"
    for said in (claimed[2] / 1000.0, 0.0):
        out, _ = captured(sums, [*claimed[:2], said, *claimed[3:]])
        assert set(out) == {"2"} and "lengths allow" in out["2"]


def test_P9_of_three_groups_nobody_knows_which_one_lies() -> None:
    vectors = honest()
    vectors[2] *= -1.0
    sums, claimed = sums_of(vectors)
    three = [0, 1, 2]
    few = Compared(
        [sums.names[at] for at in three], [OwnerShare(s.chunks, s.products[:3, :3]) for s in sums.shares]
    )
    assert captured(few, claimed[:3])[0] == {}


def test_what_contributions_have_in_common_is_of_pairs_that_were_compared() -> None:
    vectors = honest(0.5)
    screening = screening_of(vectors)
    everybody = [name for names in NAMES for name in names]
    within = [
        float(np.mean(np.corrcoef(each.double().numpy())[~np.eye(OF_GROUP, dtype=bool)])) for each in vectors
    ]
    assert screening.cosine(everybody) == pytest.approx(np.mean(within), abs=0.05)
    assert screening.cosine([names[0] for names in NAMES]) is None, "nobody compared these"
    assert screening.norm_of(dict.fromkeys(everybody, 1.0)) is None


# ---- whose word is waited for -------------------------------------------------------------------------------

PLAN = Plan(
    1, 1, 0, tuple("abcdef"), (0, 1, 0, 3, 4, 4), ("fp32",) * 6, groups=(0, 0, 0, 1, 1, 1), roots=(0, 1, 0)
)


def said(members: int, chunks: int, *products: float) -> DotProducts:
    return DotProducts(mask_to_bytes(members), mask_to_bytes(chunks), products)


def test_owners_are_asked_for_their_own_group_alone() -> None:
    groups = Groups(PLAN)
    comparing = ComparingMembers(groups)
    assert comparing.lacking(tuple("acde"), groups) == ["a", "b", "d", "e"] and comparing.asks_anew()
    assert comparing.asked_of("b") == b"\x05" and comparing.asked_of("f") == b"\x03"
    assert not comparing.asks_anew()
    comparing.on_report("a", said(0b101, 0b101, 1.0, 0.5, 1.0))
    comparing.on_report("b", said(0b111, 0b010, 1.0, 0.5, 0.5, 1.0, 0.5, 1.0))
    comparing.on_report("d", said(0b011, 0b001, 4.0, 2.0, 4.0))
    assert comparing.lacking(tuple("acde"), groups) == ["e"]
    comparing.on_report("e", said(0b011, 0b110, 4.0, 5.0, 4.0))
    assert "e" in comparing.impossible and comparing.lacking(tuple("acde"), groups) == ["e"]
    comparing.on_report("e", said(0b011, 0b110, 4.0, 2.0, 4.0))
    first, second = comparing.compared(tuple("acde"), groups)
    assert (first.names, second.names) == (["a", "c"], ["d", "e"])
    assert [share.products.tolist() for share in second.shares] == [[[4.0, 2.0], [2.0, 4.0]]] * 2


def test_nothing_may_be_encoded_before_every_root_has_compared_the_sums_of_the_decision_that_stands() -> None:
    sums, roots = ComparingSums(), Groups(PLAN).roots
    assert roots == {"a": 0b101, "e": 0b010}
    decision = Decision(1, 2, (1.0,) * 6, {}, b"\x03", True)
    sums.begin(decision, 2)
    assert sums.held_back and sums.may_encode == 0
    sums.on_report("a", 1, said(0b11, 0b101, 1.0, 0.5, 1.0))
    assert sums.lacking(roots) == ["a", "e"], "those were other sums"
    sums.on_report("a", 2, said(0b11, 0b001, 1.0, 0.5, 1.0))
    sums.on_report("e", 2, said(0b11, 0b010, 1.0, 0.5, 1.0))
    assert sums.lacking(roots) == ["a"], "of one of its chunks"
    sums.on_report("a", 2, said(0b11, 0b101, 1.0, 0.5, 1.0))
    assert sums.lacking(roots) == [] and sums.compared(roots).names == ["0", "1"]
    sums.free()
    assert not sums.held_back and sums.may_encode == 2
    sums.begin(Decision(1, 3, (1.0,) * 6, {}, b"\x03"), 2)
    assert not sums.held_back and sums.may_encode == 0, "nobody waits for a word"
