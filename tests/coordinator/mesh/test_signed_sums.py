"""P19 in groups: of whatever is committed it is known who made it, out of what; and who contradicts whom."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import OwnersMoved, RoundCommitted
from farflung.protocol.digests import hash_bytes, mask_to_bytes
from farflung.protocol.messages import ProgressReport
from farflung.protocol.round_words import GroupSums
from rig.made_mesh import MadeMesh, MeshStand

CHUNK = 1


def with_sums(said: ProgressReport, sums: GroupSums) -> ProgressReport:
    return replace(said, sections=(replace(said.sections[0], sums=sums),))


def owners(stand: MeshStand) -> tuple[str, list[str]]:
    """(root of the chunk, who makes the other groups' sums of it)"""
    root = stand.made.maker(CHUNK)
    return root, [peer for peer in stand.made.in_groups.column(CHUNK) if peer != root]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_result_counts_when_there_is_a_signed_word_of_all_that_it_is_made_of(
    order: tuple[int, ...],
) -> None:
    stand = MeshStand(MadeMesh(groups=3))
    root, others = owners(stand)
    speakers = [root, *others]
    for at in order[:-1]:
        stand.hears(speakers[at], stand.made.report(speakers[at]))
        assert CHUNK not in stand.flight.gather.merged
    stand.hears(speakers[order[-1]], stand.made.report(speakers[order[-1]]))
    assert stand.flight.gather.makers[CHUNK].peer == root
    sums = stand.flight.sums.used(stand.flight.gather.makers, stand.flight.decision)
    assert tuple(sums[CHUNK, group].peer for group in range(3)) == stand.made.in_groups.column(CHUNK)


def test_a_sum_that_another_signed_or_nobody_does_not_count() -> None:
    for forge in (
        lambda word, key: replace(word, signature=b""),
        lambda word, key: replace(word, signature=key),
    ):
        stand = MeshStand(MadeMesh())
        root, [other] = owners(stand)
        foreign = stand.made.word(root).signature
        stand.hears(root, stand.made.report(root))
        said = stand.made.report(other)
        stand.hears(other, with_sums(said, forge(said.sections[0].sums, foreign)))
        assert (
            CHUNK not in stand.flight.gather.merged and stand.flight.reports[other].sections[0].sums is None
        )


def test_a_sum_of_other_contributions_than_were_signed_does_not_count() -> None:
    stand = MeshStand(MadeMesh())
    root, [other] = owners(stand)
    stand.hears(root, stand.made.report(root))
    stand.hears(other, with_sums(stand.made.report(other), stand.made.word(other, inputs=hash_bytes(b"x"))))
    assert CHUNK not in stand.flight.gather.merged


def test_nobody_signs_for_the_sums_of_another_groups_chunk() -> None:
    stand = MeshStand(MadeMesh())
    root, [other] = owners(stand)
    foreign = next(peer for peer in stand.made.members if peer not in (root, other))
    stand.hears(root, stand.made.report(root))
    stand.hears(foreign, with_sums(stand.made.report(foreign), stand.made.word(other)))
    assert CHUNK not in stand.flight.gather.merged


def test_a_root_signs_for_all_bytes_of_the_hashes_that_it_names() -> None:
    stand = MeshStand(MadeMesh())
    root, [other] = owners(stand)
    stand.hears(other, stand.made.report(other))
    said = replace(stand.made.report(root), inputs=hash_bytes(b"something else"))
    stand.hears(root, stand.made.signed(root, said))
    assert CHUNK not in stand.flight.gather.merged


def test_a_root_that_names_too_few_sums_says_nothing() -> None:
    stand = MeshStand(MadeMesh())
    root, [other] = owners(stand)
    stand.hears(other, stand.made.report(other))
    said = stand.made.report(root)
    stand.hears(
        root,
        stand.made.signed(
            root, replace(said, sections=(replace(said.sections[0], tags=said.sections[0].tags[:8]),))
        ),
    )
    assert CHUNK not in stand.flight.gather.merged and not stand.flight.sums.at_odds


def test_the_first_word_of_an_owner_counts() -> None:
    """Or it could sign both, and be right whatever the root says."""
    stand = MeshStand(MadeMesh(groups=3))
    root, [other, _] = owners(stand)
    stand.hears(other, stand.made.report(other))
    stand.made.sums_of[CHUNK, stand.made.in_groups.of[other]] = b"another sum"
    stand.hears(other, stand.made.report(other))
    stand.hears(root, stand.made.report(root))
    assert stand.flight.sums.at_odds.keys() == {root, other}


def names_another(stand: MeshStand, *groups: int) -> Round:
    """The root says that of these groups it got other sums than their owners signed."""
    root, others = owners(stand)
    for peer in others:
        stand.hears(peer, stand.made.report(peer))
    used = {(CHUNK, group): b"another sum" for group in groups}
    stand.hears(root, stand.made.report(root, used=used))
    return stand.flight


def test_of_two_that_contradict_each_other_neither_owns_anything_and_all_is_merged_anew() -> None:
    """Whether the one sent another sum than it signed, or the other says so of one that did not, nobody can see."""
    stand = MeshStand(MadeMesh(groups=3))
    root, [other, third] = owners(stand)
    flight = names_another(stand, stand.made.in_groups.of[other])
    assert CHUNK not in flight.gather.merged and flight.sums.at_odds.keys() == {root, other}
    everybody = set(stand.made.members)
    moved = flight.next_step(1.0, everybody, everybody)
    assert isinstance(moved, OwnersMoved) and moved.unfit == {root, other}
    assert not {root, other} & flight.groups.shares.keys() and third in flight.groups.shares
    settled = flight.next_step(1.0, everybody, everybody)
    assert isinstance(settled, RoundCommitted) and settled.decision.decision_no == 2
    assert not flight.scatter.barred, "what they contribute counts all the same"


def test_a_root_that_says_it_of_most_is_believed_of_nobody() -> None:
    stand = MeshStand(MadeMesh(groups=3))
    root, others = owners(stand)
    flight = names_another(stand, *(stand.made.in_groups.of[peer] for peer in others))
    assert flight.sums.at_odds.keys() == {root}


def test_all_is_merged_anew_once_where_nobody_else_can_own_the_chunks() -> None:
    stand = MeshStand(MadeMesh(groups=3))
    root, [other, _] = owners(stand)
    flight = names_another(stand, stand.made.in_groups.of[other])
    assert flight.void
    flight.void = False
    stand.hears(root, replace(stand.made.report(root, used={(CHUNK, 0): b"a", (CHUNK, 1): b"b"}), seq=2))
    assert not flight.void, "they are known to contradict each other"


def test_who_is_no_root_puts_nobody_at_odds() -> None:
    stand = MeshStand(MadeMesh(groups=3))
    root, [other, third] = owners(stand)
    for peer in (root, third):
        stand.hears(peer, stand.made.report(peer))
    true = stand.made.report(other)
    sections = (replace(true.sections[0], tags=bytes(24)),)
    said = replace(true, merged=mask_to_bytes(1 << CHUNK), merged_hashes=bytes(32), sections=sections)
    stand.hears(other, stand.made.signed(other, said))
    assert not stand.flight.sums.at_odds and stand.flight.gather.makers[CHUNK].peer == root


def test_of_whom_a_result_waits_for_it_is_the_one_that_has_signed_no_sum() -> None:
    stand = MeshStand(MadeMesh())
    root, [other] = owners(stand)
    stand.hears(root, stand.made.report(root, is_root=False))
    everybody = set(stand.made.members)
    assert other in stand.flight._withheld(everybody, everybody) and stand.flight.sums.owing(
        stand.flight.groups, CHUNK, stand.flight.decision
    ) == [other]
    stand.hears(other, stand.made.report(other, is_root=False))
    assert stand.flight.sums.owing(stand.flight.groups, CHUNK, stand.flight.decision) == [root]
