"""A run whose newest state is lost: when it goes back to an older one, what its books then say, and when it waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.coordinator.ledger.leases import Range
from farflung.coordinator.ledger.ledger import DIGESTS_KEPT, Ledger, LedgerRules
from farflung.coordinator.ledger.records import (
    CommittedRound,
    DataFixed,
    Departed,
    DigestFixed,
    Genesis,
    Granted,
    Record,
    RolledBack,
    from_bytes,
    to_bytes,
)
from farflung.coordinator.recovery import recovery
from farflung.protocol.errors import DepartureCause
from farflung.protocol.messages import Lease
from farflung.protocol.round_words import Commit, Used
from farflung.simulator.invariants import Broken
from farflung.simulator.world import Scenario, World, simulate
from rig.pieces import pieces, seeds

ONE_BLACKOUT = {
    "drop": 0.0,
    "duplicate": 0.0,
    "slow": 0.0,
    "kill_per_effect": 0.0,
    "cut_per_s": 0.0,
    "trainer_crash_per_s": 0.0,
    "store_fails": 0.0,
    "blackout_at_s": 14.0,  # everybody is killed; nothing else goes wrong
    "faults_until_s": 16.0,
}

CALM = ONE_BLACKOUT | {
    "blackout_at_s": 0.0,
    "faults_until_s": 0.0,
    "leave_per_s": 0.0,
    "rounds": 3,
    "min_peers": 1,
    "chunks": 12,
    "fragments": 1,
    "schedule": "blocking",
    "overlap_steps": 0,
    "every_rounds": 1,
    "one_store": True,
    "go_back_after_s": 4.0,
    "results_on_disk": True,
}


def committed(version: int, used: dict[str, tuple[Used, ...]], fragment: int = 0) -> list[Record]:
    commit = Commit(version, version, ("ann",), (1.0,), bytes(32), "fp32", fragment)
    return [
        CommittedRound(
            commit=commit,
            used=used,
            excluded={},
            tokens=10,
            steps=1,
            loss=1.0 / version,
            seconds=1.0,
            tx_bytes=0,
        ),
        DigestFixed(version=version, digest=bytes([version]) * 32, fragment=fragment),
    ]


def folded(records: list[Record], every_rounds: int = 2, fragments: int = 1) -> Ledger:
    ledger = Ledger(LedgerRules(8, 3, fragments, every_rounds))
    for record in records:
        ledger.apply(from_bytes(to_bytes(record)))
    return ledger


# ---- the books ---------------------------------------------------------------------------------------------


def test_P7_samples_that_only_lost_versions_used_are_leased_again() -> None:
    begin: list[Record] = [
        Genesis(digest=bytes(32), peer="ann"),
        DataFixed(samples=100, peer="ann"),
        Granted(peer="ann", lease=Lease(1, 0, 0, 8, 0)),
        *committed(1, {"ann": (Used(1, 4),)}),
        *committed(2, {"ann": (Used(1, 6),)}),
        Granted(peer="ann", lease=Lease(2, 0, 8, 16, 8)),
        *committed(3, {"ann": (Used(1, 8), Used(2, 12))}),
    ]
    before = folded(begin)
    assert (before.leases.committed_samples, before.totals.tokens, before.version) == (12, 30, 3)
    ledger = folded([*begin, RolledBack(versions=(2,), reason="lost")])
    assert (ledger.version, ledger.eras.number, ledger.totals.tokens, ledger.totals.loss) == (2, 1, 20, 0.5)
    assert ledger.leases.committed_samples == 6 and not ledger.leases.held
    # What was used up to version 2 stays used; the rest of lease 1, and what was granted later, comes first.
    assert ledger.leases.next_range(8) == Range(0, 6, 14, (6,)) and ledger.leases.cursor == 16
    assert ledger.leases.returned == [Range(0, 6, 16, (6,))]
    assert (
        ledger.leases.leased_samples == ledger.leases.committed_samples + ledger.leases.returned_samples == 16
    )
    assert ledger.leases.next_id == 3, "a number names one lease for ever"
    assert sorted(ledger.books[0].digests) == [0, 1, 2] and sorted(ledger.books[0].commits) == [1, 2]
    assert [each.commit.version for each in ledger.totals.rounds] == [1, 2]


def test_whatever_version_the_run_may_go_back_to_has_its_books_kept() -> None:
    for every_rounds in (0, 1, 3, 25):
        records: list[Record] = [DataFixed(samples=1000, peer="ann")]
        for version in range(1, 80):
            records.append(Granted(peer="ann", lease=Lease(version, 0, version - 1, version, version - 1)))
            records += committed(version, {"ann": (Used(version, version),)})
        ledger = folded(records, every_rounds)
        kept = ledger.books[0].digests
        assert set(kept) <= set(ledger.books[0].marks) and len(kept) <= DIGESTS_KEPT + 9
        assert every_rounds != 25 or {25, 50, 75} <= set(kept)
        for version in kept:
            back = folded([*records, RolledBack(versions=(version,), reason="lost")], every_rounds)
            assert back.leases.committed_samples == version


def test_P7_fragments_go_back_each_to_its_own_version_and_learn_again_only_what_they_lost() -> None:
    begin: list[Record] = [DataFixed(samples=10, peer="ann"), Granted(peer="ann", lease=Lease(1, 0, 0, 8, 0))]
    used = {"ann": (Used(1, 4),)}
    records = [*begin, *committed(1, used), *committed(1, {}, 1), *committed(2, used, 1)]
    assert folded(records, fragments=2).leases.committed_samples == 4
    ledger = folded([*records, RolledBack(versions=(1, 1), reason="lost")], fragments=2)
    assert [book.version for book in ledger.books] == [1, 1] and not ledger.leases.held
    assert ledger.leases.returned == [Range(0, 0, 4, (4, 0)), Range(0, 4, 8, (4, 4))]
    assert ledger.leases.committed_samples == 0


def test_it_is_remembered_that_somebody_left_with_the_finished_model() -> None:
    assert not folded([Departed(peer="ann", cause=DepartureCause.CLOSED, reason="finished")]).eras.delivered
    assert folded([Departed(peer="ann", cause=DepartureCause.FINISHED, reason="")]).eras.delivered


# ---- whole runs, in virtual time ----------------------------------------------------------------------------


@pytest.mark.usefixtures("equal_work")
def test_P4_a_run_that_loses_everybody_goes_on_from_a_checkpoint_of_its_own() -> None:
    eras = set()
    for seed in range(8, 13):
        scenario = Scenario(**ONE_BLACKOUT, rounds=10, every_rounds=2, one_store=seed % 2 == 0)  # type: ignore[arg-type]
        world = World(seed, scenario)
        assert world.run().outcome == "finished"
        assert world.coordinator is not None
        eras.add(world.coordinator.core.ledger.eras.number)
    assert eras >= {0, 1}, "some had saved their newest version, some had to go back"


@pytest.mark.parametrize("after_s", pieces([0.05, 0.1, 0.2]))
def test_P4_a_run_that_loses_everybody_while_a_commit_is_applied_goes_on_from_the_version_before(
    after_s: float,
) -> None:
    """The next version is nowhere then, and some of its results are on disks."""
    outcomes = []
    for seed in range(4):
        calm = replace(Scenario.of(seed), **CALM)  # type: ignore[arg-type]
        world = World(seed, calm)
        assert world.run().outcome == "finished"
        at = [float(line.split()[0]) for line in world.log if "CommittedRound" in line]
        if len(at) > 1:
            outcomes.append(simulate(seed, replace(calm, blackout_at_s=at[1] + after_s)).outcome)
    assert outcomes.count("finished") >= 0.7 * len(outcomes) > 2, outcomes  # else nothing was saved yet


@pytest.mark.parametrize(
    ("every_rounds", "go_back_after_s", "said"),
    [
        (0, 4.0, "for a peer with a checkpoint (join --checkpoints)"),
        pytest.param(2, 0.0, "go_back_after_s = 0: waiting", marks=pytest.mark.hard),
    ],
)
def test_P4_without_a_checkpoint_or_leave_to_go_back_it_waits_and_says_for_what(
    every_rounds: int, go_back_after_s: float, said: str
) -> None:
    reasons = []
    for seed in range(3):
        scenario = Scenario(  # type: ignore[arg-type]
            **ONE_BLACKOUT,
            rounds=8,
            every_rounds=every_rounds,
            go_back_after_s=go_back_after_s,
        )
        world = World(seed, scenario)
        if world.run().outcome != "finished":
            ticks = [peer.member.tick for peer in world.peers.values()]
            reasons += [tick.reason for tick in ticks if tick is not None]
        assert world.coordinator is not None and world.coordinator.core.ledger.eras.number == 0
    assert reasons and all(said in reason for reason in reasons)


@pytest.mark.hard
def test_P4_who_loses_everybody_before_the_first_checkpoint_waits_for_the_host_who_founds_it_anew() -> None:
    """With several fragments too; and it says so: it is another era."""
    again = 0
    for seed in range(3):
        scenario = Scenario(  # type: ignore[arg-type]
            **ONE_BLACKOUT, rounds=12, every_rounds=12, fragments=1 + seed % 3, end_s=200.0
        )
        assert World(seed, scenario).run().outcome != "finished"
        world = World(seed, replace(scenario, host_after_s=20.0))
        assert world.run().outcome == "finished"
        assert world.coordinator is not None
        again += world.coordinator.core.ledger.eras.number
    assert again


# ---- P20: a cut line is not the death of those behind it ------------------------------------------------------

EACH_CUT = 1  # seeds of one test


@pytest.mark.parametrize("batch", pieces(3))
def test_P20_no_round_is_lost_while_the_coordinator_sees_a_stranger_alone(batch: int) -> None:
    """For ten times `go_back_after_s`, with checkpoints and without.  More seeds: benchmarks/cut_lines.py."""
    for seed in seeds(batch, EACH_CUT):
        world = World(seed, Scenario.cut_off_from_all(seed))
        world.run()
        assert world.coordinator is not None


@pytest.mark.parametrize("batch", pieces(3))
def test_P20_who_was_cut_off_alone_while_the_others_went_back_harms_nobody(batch: int) -> None:
    for seed in seeds(batch, EACH_CUT):
        World(seed, Scenario.cut_off_from_one(seed)).run()


@pytest.mark.hard
def test_the_simulator_sees_a_run_that_goes_back_without_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "are_accounted_for", lambda *_: True)
    with pytest.raises(Broken, match="P20 is broken"):
        for seed in range(60):
            World(seed, Scenario.cut_off_from_all(seed)).run()


@pytest.mark.hard
def test_a_run_that_goes_back_ends_with_as_many_versions_as_any_other() -> None:
    for seed in range(10):
        report = simulate(seed, Scenario(**ONE_BLACKOUT, rounds=8, every_rounds=3))  # type: ignore[arg-type]
        assert report.outcome == "finished" and report.version == 8
