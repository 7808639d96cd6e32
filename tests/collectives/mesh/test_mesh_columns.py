"""What an owner of a mesh has to do with other groups: whose sums it waits for, in which order it adds them up."""

from __future__ import annotations

import itertools

import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from farflung.collectives.mesh.mesh_round import (
    GroupSumsHere,
    MergeGroup,
    MeshColumns,
    MeshKind,
    MeshRound,
    groups_in,
)
from farflung.collectives.round.effects import SendFrame
from farflung.collectives.round.pieces import ChunkPiece
from farflung.coordinator.mesh.mesh import decision_view, view
from farflung.coordinator.rounds.round_rules import Groups
from farflung.protocol.digests import hash_bytes, mask_of, mask_to_bytes
from farflung.protocol.frames import Kind
from farflung.protocol.round_words import Decision, MeshColumn, Plan
from rig.made_mesh import MadeMesh


def decision(*groups: int) -> Decision:
    return Decision(1, 1, (1.0,), {}, mask_to_bytes(mask_of(groups)))


@pytest.mark.parametrize("arrive", list(itertools.permutations((0, 2, 5))))
def test_P1_sums_are_added_up_in_the_order_of_their_groups_however_they_arrive(
    arrive: tuple[int, ...],
) -> None:
    sums = GroupSumsHere()
    for group in arrive:
        assert sums.missing(7, decision(0, 2, 5)) == sorted({*arrive} - {*sums_here(sums)})
        assert sums.put(7, group, ChunkPiece(b"%d" % group, bytes(32)))
        assert not sums.put(7, group, ChunkPiece(b"another", bytes(32))), "the first one counts"
    assert [piece.payload for piece in sums.in_order(7, decision(0, 2, 5))] == [b"0", b"2", b"5"]
    assert [piece.payload for piece in sums.in_order(7, decision(2, 5))] == [b"2", b"5"], (
        "a group that is out"
    )
    assert groups_in(decision()) == [] and groups_in(Decision(1, 1, (1.0,), {})) == []


def test_P9_where_sums_are_compared_nothing_is_encoded_before_the_coordinator_has_seen_what_came_of_it() -> (
    None
):
    of_three = Decision(1, 4, (1.0,), {}, mask_to_bytes(0b101), True)
    sums, seen = GroupSumsHere(), plan(UNSET)
    sums.begin(of_three)
    sums.put(7, 0, ChunkPiece(b"first", bytes(32)))
    assert sums.held_back and sums.weigh(seen, 7, 100, of_three) == []
    sums.put(7, 2, ChunkPiece(b"second", bytes(32)))
    [weigh] = sums.weigh(seen, 7, 100, of_three)
    assert (weigh.chunk, weigh.members, weigh.payloads) == (107, 0b101, (b"first", b"second"))
    assert sums.weigh(seen, 7, 100, of_three) == [], "it is being done"
    sums.on_weighed(3, 7, 0b101, (1.0, 1.0, 1.0))
    assert sums.dots([7]) is None, "those were sums of another decision"
    sums.on_weighed(4, 7, 0b101, (1.0, 0.5, 2.0))
    told = sums.dots([7])
    assert told is not None and (told.members, told.chunks, told.products) == (0b101, 1 << 7, (1.0, 0.5, 2.0))
    assert not sums.on_may_encode(3) and sums.held_back
    assert sums.on_may_encode(4) and not sums.held_back and sums.dots([7]) is None
    sums.begin(Decision(1, 5, (1.0,), {}, mask_to_bytes(0b001), True))
    assert sums.held_back, "a new decision is compared anew"
    assert sums_here(sums) == [], "and what was made by the one before is worth nothing"


def sums_here(sums: GroupSumsHere) -> list[int]:
    return [group for group in range(8) if sums.get(7, group) is not None]


def plan(column: MeshColumn | UnsetType) -> Plan:
    """Ann owns chunks 0 and 2, Bob chunk 1."""
    return Plan(1, 1, 0, ("ann", "bob"), (0, 1, 0), ("fp32", "fp32"), column=column)


def test_a_root_gets_the_sums_of_its_chunk_and_gives_the_result_to_those_who_made_them() -> None:
    column = MeshColumn(1, 3, ("ann", "cid", "dan", "eve"), (1, 0, 2, 3, 0, 2), (1, 0))
    ann = MeshColumns("ann", plan(column))
    assert ann.fits(3) and ann.peers == {"cid", "dan", "eve"}
    assert (ann.root(0), ann.others(0)) == ("ann", ["cid", "dan"])
    assert (ann.root(2), ann.others(2), ann.rooted_at("eve")) == ("eve", [], [2])
    assert ann.summed_by("cid") == ann.summed_by("dan") == [0] and ann.summed_by("eve") == []
    assert ann.group_of("dan", 0) == 2 and ann.group_of("dan", 1) is None


def test_in_a_flat_round_everybody_is_the_root_of_what_it_owns() -> None:
    ann = MeshColumns("ann", plan(UNSET))
    assert ann.fits(3) and not ann.fits(4) and not MeshColumns("cid", plan(UNSET)).fits(3)
    assert (ann.group, ann.root(0), ann.others(0), ann.peers) == (0, "ann", [], frozenset())


@pytest.mark.parametrize(
    "column",
    [
        MeshColumn(1, 3, ("ann", "cid"), (0, 1, 0), (1, 0)),  # a row short
        MeshColumn(1, 3, ("ann", "cid"), (0, 1, 0, 0, 1, 2), (1, 0)),  # somebody who is not named
        MeshColumn(1, 3, ("ann", "cid"), (0, 1, 0, 0, 1, 1), (1, 3)),  # a root in no group
        MeshColumn(3, 3, ("ann", "cid"), (0, 1, 0, 0, 1, 1), (1, 0)),  # in no group oneself
        MeshColumn(1, 3, ("ann", "cid"), (0, 1, 0, 0, 1, 1), (1,)),  # a root short
    ],
)
def test_P8_a_column_that_does_not_fit_its_plan_is_none(column: MeshColumn) -> None:
    assert not MeshColumns("ann", plan(column)).fits(3)


def test_when_a_root_is_lost_its_owners_send_their_sums_to_the_heir_at_once() -> None:
    """Nobody has to ask for them first."""
    made = MadeMesh(groups=3)
    root, chunk = made.maker(1), 1
    me = next(peer for peer in made.in_groups.column(chunk) if peer != root)
    group = made.in_groups.of[me]
    flight = MeshRound(me, view(made.in_groups, me, 1), bytes(8), 1.0, 0.0)
    flight.on_decision(decision_view(made.in_groups, made.decision, me), 0.0)
    flight.owner.groups.put(chunk, group, ChunkPiece(b"mine", hash_bytes(b"mine")))
    of_root = made.in_groups.of[root]
    heir = next(peer for peer in made.in_groups.members[of_root] if peer != root)
    owners = list(made.plan.owners)
    owners[of_root * made.count + chunk] = made.members.index(heir)
    moved = Groups(replace(made.plan, owners=tuple(owners), epoch=2))
    sent = [each for each in flight.on_plan(view(moved, me, 2), 1.0) if isinstance(each, SendFrame)]
    assert [(each.to, each.frame.header.kind, each.frame.payload) for each in sent] == [
        (heir, MeshKind.SUM, b"mine")
    ]


def test_an_heir_adds_up_its_group_also_where_the_result_has_come_already() -> None:
    """The owner before it may have left no word of its sum, and without one nobody counts the result."""
    made = MadeMesh(groups=2)
    root, chunk = made.maker(1), 1
    me = next(peer for peer in made.in_groups.column(chunk) if peer != root)
    flight = MeshRound(me, view(made.in_groups, me, 1), bytes(8), 1.0, 0.0)
    flight.on_decision(decision_view(made.in_groups, made.decision, me), 0.0)
    flight.pieces.results[chunk] = ChunkPiece(b"of the root", hash_bytes(b"of the root"))
    asked = [each for each in flight.on_timer(9.0) if isinstance(each, SendFrame)]
    assert {each.to for each in asked if each.frame.header.kind == Kind.WANT_CONTRIBUTION} >= set(
        made.in_groups.members[made.in_groups.of[me]]
    ) - {me}
    pieces = [ChunkPiece(made.payloads[peer][chunk], bytes(32)) for peer in flight.plan.members]
    flight.pieces.held[chunk] = dict(zip(flight.plan.members, pieces, strict=True))
    [merge] = flight.on_encoded({})
    assert isinstance(merge, MergeGroup) and merge.chunk == chunk
    flight.owner.on_calculated(merge, b"summed")
    assert flight.progress().sums == {chunk: hash_bytes(b"summed")} and not flight.on_encoded({})
