"""In a round of groups a member tells what it holds by what came since its report before."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farflung.protocol.digests import combined, hash_bytes, mask_of, mask_to_bytes
from farflung.protocol.messages import ProgressReport
from rig.made_mesh import MadeMesh, MeshStand


@pytest.fixture
def stand() -> MeshStand:
    stand = MeshStand(MadeMesh())
    stand.flight.decision = None
    return stand


def holds(stand: MeshStand, owner: str, *members: str) -> dict[str, tuple[bytes, bytes]]:
    made = stand.made
    chunks = [chunk for chunk in range(made.count) if made.in_groups.shares[owner] >> chunk & 1]
    mask = mask_to_bytes(mask_of(chunks))
    return {m: (mask, combined((c, hash_bytes(made.payloads[m][c])) for c in chunks)) for m in members}


def report(seq: int, held: dict[str, tuple[bytes, bytes]], since: int = 0) -> ProgressReport:
    return ProgressReport(
        session=bytes(16), seq=seq, round_no=1, decision_no=0, held=held, got=b"", got_hash=bytes(32), held_since=since
    )  # fmt: skip


def scene(stand: MeshStand) -> tuple[str, list[str]]:
    owner = next(iter(stand.made.in_groups.shares_in[0]))
    return owner, list(stand.made.in_groups.members[0])


def test_what_was_told_before_still_counts(stand: MeshStand) -> None:
    owner, group = scene(stand)
    assert stand.flight.on_progress(owner, report(5, holds(stand, owner, group[0])))
    assert stand.flight.on_progress(owner, report(7, holds(stand, owner, group[1]), since=5))
    assert stand.flight.scatter.held[owner].keys() == {group[0], group[1]}
    assert stand.flight.reports[owner].held.keys() == {group[0], group[1]}, (
        "for lists of hashes that come later"
    )
    assert (
        stand.flight.on_progress(owner, report(9, {}, since=7)) and len(stand.flight.scatter.held[owner]) == 2
    )
    whole = holds(stand, owner, group[0])
    assert stand.flight.on_progress(owner, report(11, whole)) and stand.flight.reports[owner].held == whole


@pytest.mark.parametrize("since", [4, 6, 1 << 40])
def test_a_difference_from_a_report_that_never_came_is_not_taken_and_not_seen(
    stand: MeshStand, since: int
) -> None:
    owner, group = scene(stand)
    new = report(8, holds(stand, owner, group[1]), since)
    assert not stand.flight.on_progress(owner, new) and owner not in stand.flight.reports
    stand.flight.on_progress(owner, report(5, holds(stand, owner, group[0])))
    assert stand.flight.on_progress(owner, new) == (since <= 5)
    other = replace(new, session=bytes([1]) * 16, held_since=5)
    assert not stand.flight.on_progress(owner, other), "numbers begin anew with each session"


def test_who_was_lost_and_is_back_has_all_of_it_proven_again(stand: MeshStand) -> None:
    owner, group = scene(stand)
    stand.flight.on_progress(owner, report(5, holds(stand, owner, group[0])))
    stand.flight.scatter.held.pop(owner)
    stand.flight.on_progress(owner, report(6, holds(stand, owner, group[1]), since=5))
    assert stand.flight.scatter.held[owner].keys() == {group[0], group[1]}
