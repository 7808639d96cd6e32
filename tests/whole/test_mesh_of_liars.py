"""P9 in groups: the machines of the program in the simulator, with members that turn round what they have learned.

Groups are drawn anew for each version, so who lies is chosen in the round itself: so many members of one group.  The
invariants hold every commit to the sum that its weights say, as in test_mesh.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.coordinator.ledger.records import AbortedRound, CommittedRound, DecidedOn, from_bytes
from farflung.coordinator.rounds.weights import LEAST_MEMBERS
from farflung.protocol.errors import ExclusionCause
from farflung.protocol.frames import Payload
from farflung.simulator.bad_peers import forged
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import COORDINATOR, World
from rig.pieces import pieces

NO_FAULTS = dict.fromkeys(
    ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s", "audit"), 0.0
)
ROOM = Scenario(peers=16, group=4, chunks=8, rounds=2, min_peers=16, faults_until_s=1.0, **NO_FAULTS)


class LiarsInOneGroup(World):
    """So many of one group of each round."""

    liars, group, how = 1, 1, "flip"

    def start_peer(self, index: int) -> None:
        self.last.forges = self.lie  # type: ignore[method-assign]
        super().start_peer(index)

    def survives(self, party: str) -> bool:
        return party == COORDINATOR or super().survives(party)

    def lie(self, peer: str, payloads: dict[int, Payload]) -> dict[int, Payload]:
        part = self.peers[peer].member.part
        flight = part.replicas[0].rounds.flight if part is not None else None
        if flight is None or flight.plan.column is None or not self._lies(peer, flight.plan):
            return payloads
        return forged(payloads, self.model.chunk_elements, self.how)

    def _lies(self, peer: str, plan: object) -> bool:
        return plan.column.group == self.group and peer in plan.members[: self.liars]  # type: ignore[attr-defined]

    def of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [record for record in map(from_bytes, self.journal) if isinstance(record, kind)]

    def in_group(self, record: CommittedRound, group: int) -> list[str]:
        return [m for m, its in zip(record.commit.members, record.groups, strict=True) if its == group]


def run_of(
    world: type[LiarsInOneGroup], seed: int, scenario: Scenario
) -> tuple[LiarsInOneGroup, list[CommittedRound]]:
    made = world(seed, scenario)
    assert made.run().outcome == "finished"
    return made, made.of(CommittedRound)


@pytest.mark.usefixtures("equal_work")
def test_P9_in_a_mesh_a_liar_is_out_and_its_group_is_not() -> None:
    world, commits = run_of(LiarsInOneGroup, 1, ROOM)
    for record in commits:
        [out] = record.excluded
        assert out == world.in_group(record, 1)[0]
        assert record.excluded[out].cause is ExclusionCause.DIRECTION and record.merged.suspects == (out,)
        assert len(record.commit.included) == 15
        assert record.merged.norm is not None and 2.0 < record.merged.norm < 5.0, "as without the liar"
        assert record.merged.cosine is not None and record.merged.cosine > 0.4


class LongInOneGroup(LiarsInOneGroup):
    liars, how = 3, "1000x"


@pytest.mark.usefixtures("equal_work")
def test_P9_in_a_mesh_lengths_are_those_that_most_members_of_all_groups_have() -> None:
    """Three of four in one group are a thousand times too long: among themselves they would be the usual."""
    world, commits = run_of(LongInOneGroup, 1, ROOM)
    for record in commits:
        long = set(world.in_group(record, 1)[:3])
        assert set(record.merged.clipped) == long == set(record.merged.suspects) and not record.excluded
        assert record.merged.norm is not None and 2.0 < record.merged.norm < 5.0


class MostOfOneGroup(LiarsInOneGroup):
    liars = 3


@pytest.mark.usefixtures("equal_work")
def test_P9_a_group_whose_majority_lies_is_out_as_a_whole_and_nobody_of_it_is_suspected() -> None:
    world, commits = run_of(MostOfOneGroup, 1, ROOM)
    for record in commits:
        captured = world.in_group(record, 1)
        assert set(record.excluded) == set(captured)
        assert {why.cause for why in record.excluded.values()} == {ExclusionCause.CAPTURED}
        assert record.merged.suspects == () and len(record.commit.included) == 12
        assert sum(record.commit.weights) == pytest.approx(1.0, abs=0.01)
        assert record.merged.norm is not None and 2.0 < record.merged.norm < 5.0
    assert len(world.of(DecidedOn)) == 2 * len(commits), "each is decided anew, once"


@pytest.mark.parametrize("seed", pieces(6, 2))
def test_P9_a_captured_group_is_out_whoever_dies(seed: int) -> None:
    scenario = replace(
        ROOM, min_peers=6, kill_per_effect=0.002, faults_until_s=200.0, drop=0.02, duplicate=0.02
    )
    world, commits = run_of(MostOfOneGroup, seed, scenario)
    for record in commits:
        liars, summed = (
            set(world.in_group(record, 1)[:3]),
            dict(zip(record.commit.members, record.groups, strict=True)),
        )
        others = {summed[member] for member in record.commit.included} - {1}
        if len(others) >= LEAST_MEMBERS - 1:  # of fewer groups nobody knows which one lies
            assert not liars & set(record.commit.included)
    assert world.kills


class AllTooLong(LiarsInOneGroup):
    """Everybody, in the first round from the last version: for the guard."""

    how = "1000x"

    def _lies(self, peer: str, plan: object) -> bool:
        return plan.version == 4 and not self.of(AbortedRound)  # type: ignore[attr-defined]


def test_P9_in_a_mesh_the_guard_sees_the_norm_of_all_groups_sum() -> None:
    world, commits = run_of(AllTooLong, 1, replace(ROOM, rounds=6, end_s=200.0))
    [refused] = [record for record in world.of(AbortedRound) if record.dropped]
    assert "the merged update has norm" in refused.reason
    assert len(commits) == 6 and all(
        record.merged.norm is not None and record.merged.norm < 10.0 for record in commits
    )
