"""A round as groups: drawn from a hash, seen by each member as its own group, and heirs where owners are lost."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from farflung.collectives.mesh.mesh_round import MeshColumns
from farflung.coordinator.mesh.mesh import MeshSums, drawn, most_of_round, touched, view
from farflung.coordinator.rounds.owners import ProvenHoldings, inherited
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import Failed, OwnersMoved, RoundCommitted, RoundWaits
from farflung.coordinator.rounds.round_rules import Groups, RoundRules, planned
from farflung.coordinator.rounds.shares import MemberRates
from farflung.protocol.digests import bits
from farflung.protocol.limits import GROUPS_MOST, MEMBERS_PER_MESH, MEMBERS_PER_ROUND
from farflung.protocol.round_words import Plan, Reason
from rig.made_mesh import MadeMesh, MeshStand

CHUNKS = 6
NOTHING = ProvenHoldings(set(), lambda member, chunk: False, lambda member, owner, chunk: False)


def peers_of(count: int) -> list[str]:
    return [f"p{number:04d}" for number in range(count)]


def mesh(count: int = 12, size: int = 4) -> Plan:
    peers = peers_of(count)
    groups = drawn(peers, set(peers), size, b"seed")
    rows: list[int] = []
    for group in range(max(groups) + 1):
        places = [at for at, its in enumerate(groups) if its == group]
        rows += [places[chunk % len(places)] for chunk in range(CHUNKS)]
    return planned((1, 0, 0), peers, groups, tuple(rows), ("fp32",) * count)


@given(st.integers(1, 300), st.integers(2, 32), st.integers(0, 300), st.binary(max_size=8))
def test_groups_are_about_equal_and_each_has_owners(count: int, size: int, owners: int, seed: bytes) -> None:
    peers = peers_of(count)
    able = set(peers[:owners])
    groups = drawn(peers, able, size, seed)
    if not groups:
        assert count <= size or len(able) < 4
        return
    sizes = [groups.count(group) for group in range(max(groups) + 1)]
    assert 2 <= len(sizes) <= GROUPS_MOST and max(sizes) - min(sizes) <= 1
    dealt = [
        sum(its == group for its, peer in zip(groups, peers, strict=True) if peer in able)
        for group in range(len(sizes))
    ]
    assert min(dealt) >= 2


def test_a_round_in_groups_has_no_more_members_than_a_plan_can_name() -> None:
    assert most_of_round(16, 2000) == MEMBERS_PER_MESH
    assert most_of_round(16, 3) == most_of_round(0, 2000) == MEMBERS_PER_ROUND, "all in one group"


def test_nobody_chooses_its_group() -> None:
    peers = peers_of(64)
    draws = {drawn(peers, set(peers), 8, bytes([seed])) for seed in range(20)}
    assert len(draws) == 20


def test_a_member_hears_of_its_group_and_of_its_columns() -> None:
    plan = mesh()
    groups = Groups(plan)
    for member in plan.members:
        seen = view(groups, member, plan.epoch)
        columns = MeshColumns(member, seen)
        assert seen.members == groups.members[groups.of[member]]
        assert columns.fits(CHUNKS)
        for chunk in range(CHUNKS):
            assert seen.owner_of(chunk) == groups.owner(groups.of[member], chunk)
        for chunk in seen.chunks_of(member):
            assert columns.root(chunk) == plan.root_of(chunk)
            others = set(groups.column(chunk)) - {member}
            assert set(columns.others(chunk)) == (others if plan.root_of(chunk) == member else set())


def test_a_column_of_other_chunks_fits_nobody() -> None:
    plan = mesh()
    groups = Groups(plan)
    seen = view(groups, plan.members[0], 1)
    assert not MeshColumns(plan.members[0], seen).fits(CHUNKS + 1)
    assert not MeshColumns("a stranger", seen).fits(CHUNKS)
    other = next(m for m in seen.members if len(seen.chunks_of(m)) != len(seen.chunks_of(plan.members[0])))
    assert not MeshColumns(other, seen).fits(CHUNKS)


def test_who_keeps_what_a_lost_owner_added_to_a_chunk_inherits_it_whatever_its_line() -> None:
    """Else that contribution is out after the decision, and everybody makes everything anew."""
    plan = mesh(16, 4)
    groups = Groups(plan)
    lost, *_, thin = dict.fromkeys(groups.owner(0, chunk) for chunk in range(CHUNKS))
    alive = set(plan.members) - {lost}
    [first, *others] = bits(groups.shares[lost])
    shown = ProvenHoldings(
        set(), NOTHING.result, lambda member, owner, chunk: (member, owner, chunk) == (thin, lost, first)
    )
    lines = [MemberRates(1e6 if member == thin else 1e7, 1e8) for member in plan.members]
    made = inherited(groups, alive, alive, set(), shown, set(), lines)
    assert made is not None and others
    after = Groups(
        planned((1, 0, 0), plan.members, tuple(plan.groups or ()), tuple(made.owners), plan.codecs)
    )
    assert after.owner(0, first) == thin
    assert all(after.owner(0, chunk) != thin for chunk in others)


def test_an_heir_is_in_the_same_group_and_only_who_has_to_hears() -> None:
    plan = mesh(16, 4)
    groups = Groups(plan)
    lost = groups.owner(0, 0)
    alive = set(plan.members) - {lost}
    made = inherited(groups, alive, alive, set(), NOTHING, set())
    assert made is not None and made.lost == {lost} and not made.ended
    after = planned((1, 0, 0), plan.members, tuple(plan.groups or ()), tuple(made.owners), plan.codecs)
    moved = Groups(after)
    share = groups.shares[lost]
    for chunk in range(CHUNKS):
        assert moved.owner(0, chunk) in groups.members[0]
        assert (moved.owner(0, chunk) != groups.owner(0, chunk)) == bool(share >> chunk & 1)
    heard = touched(plan, after)
    moved_chunks = [chunk for chunk in range(CHUNKS) if share >> chunk & 1]
    elsewhere = {
        moved.owner(group, chunk) for group in range(1, len(groups.members)) for chunk in moved_chunks
    }
    assert elsewhere and heard == set(groups.members[0]) | elsewhere, (
        "its group, and the owners of its chunks"
    )
    assert heard < set(plan.members)


def test_whomever_a_round_of_many_waits_for_each_member_can_be_told_why() -> None:
    """At 256 members a tick that named all of them was longer than any peer takes: each hung up."""
    plan, longest = mesh(300, 16), get_args(Reason)[1].max_length
    rules = RoundRules(2, 10.0, 60.0, "int8")
    flight = Round(plan, rules, 0.0, name=lambda peer: peer.ljust(64, "x"), sums=MeshSums())
    everybody = set(plan.members)
    waits, ends = (flight.next_step(now, everybody, everybody) for now in (1.0, 61.0))
    assert isinstance(waits, RoundWaits) and "and 292 others" in waits.reason
    assert isinstance(ends, Failed) and len(waits.reason) <= len(ends.reason) <= longest


def test_who_inherits_carries_what_its_line_can_carry() -> None:
    """In the place of a lost owner a thin line got most chunks, since it owned fewest."""
    plan = mesh(16, 4)
    groups = Groups(plan)
    lost, *_, thin = dict.fromkeys(groups.owner(0, chunk) for chunk in range(CHUNKS))
    alive = set(plan.members) - {lost}
    lines = [MemberRates(1e6 if member == thin else 1e7, 1e8) for member in plan.members]
    made = inherited(groups, alive, alive, set(), NOTHING, set(), lines)
    assert made is not None and made.lost == {lost} and groups.shares[lost].bit_count() > 1
    after = planned((1, 0, 0), plan.members, tuple(plan.groups or ()), tuple(made.owners), plan.codecs)
    assert Groups(after).shares[thin] == groups.shares[thin], "nothing more"


def test_with_its_root_gone_a_result_stands_where_another_owner_holds_it() -> None:
    plan = mesh()
    groups = Groups(plan)
    root = plan.root_of(0)
    other = next(group for group in range(len(groups.members)) if group != groups.of[root])
    holder = groups.owner(other, 0)
    alive = set(plan.members) - {root}
    held = ProvenHoldings({0}, lambda member, chunk: (member, chunk) == (holder, 0), NOTHING.spare)
    made = inherited(groups, alive, alive, set(), held, set())
    assert made is not None
    assert made.roots[0] == other and made.kept & 1 and 0 not in made.anew
    gone = inherited(groups, alive, alive, set(), ProvenHoldings({0}, NOTHING.result, NOTHING.spare), set())
    assert gone is not None and 0 in gone.anew and not gone.kept & 1


def test_a_group_without_anybody_left_ends_and_its_roots_move() -> None:
    plan = mesh()
    groups = Groups(plan)
    alive = set(plan.members) - set(groups.members[1])
    made = inherited(groups, alive, alive, set(), NOTHING, set())
    assert made is not None and made.ended == {1}
    assert 1 not in made.roots


def test_a_group_that_ends_after_the_decision_has_no_part_in_what_is_merged_anew() -> None:
    made = MadeMesh(groups=3)
    flight, gone = MeshStand(made).flight, set(made.in_groups.members[1])
    alive = set(made.members) - gone
    assert isinstance(flight.next_step(1.0, alive, alive), OwnersMoved)
    step = flight.next_step(1.0, alive, alive)
    assert isinstance(step, RoundCommitted)
    assert {
        peer for peer, weight in zip(made.members, step.decision.weights, strict=True) if not weight
    } == gone
