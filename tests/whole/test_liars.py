"""P18: members that lie about the run's state, alone and in league up to all but one, take it from nobody; those that
lie about the others' work, fewer than half, do not keep it out of the rounds.

Each seed draws how many lie and how (Scenario.of_liars).  At every event: no honest peer gives up what it calculated,
is banned, or has its digest refuted, and who lies is out within two rounds.  `python benchmarks/liars.py` runs more.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
from msgspec import structs

from farflung.coordinator.admission.admission import Banned
from farflung.coordinator.ledger.records import CommittedRound, Genesis, Opened, from_bytes
from farflung.coordinator.rounds import round
from farflung.coordinator.rounds.owners import Holders, LastHolders
from farflung.coordinator.rounds.reported import Scatter
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.run import round_driver, ticks
from farflung.protocol.messages import Beat, FromMember, ProgressReport
from farflung.protocol.signing import peer_id_of
from farflung.simulator.cut_lines import calm_slow_line
from farflung.simulator.invariants import Broken
from farflung.simulator.scenario import ABOUT_OTHERS, ABOUT_RESULTS, LIES, Scenario
from farflung.simulator.world import AMONG_LIARS, LIARS_LATE_S, World
from rig.pieces import pieces

SEEDS = 40


@pytest.mark.parametrize("first", pieces(range(0, SEEDS, 2)))
def test_P18_honest_peers_keep_their_state_and_finish_whoever_lies(first: int) -> None:
    for seed in range(first, first + 2):
        world = World(seed, Scenario.of_liars(seed))
        report = world.run()
        honest = [peer for peer in world.peers.values() if peer.peer not in world.league.members]
        assert report.outcome == "finished", f"seed {seed}: {report.outcome}"
        assert {peer.exit_code for peer in honest} == {"finished"}, f"seed {seed}"


def test_the_seeds_have_every_way_to_lie_and_leagues_of_nearly_all() -> None:
    drawn = [Scenario.of_liars(seed) for seed in range(SEEDS)]
    assert {each.lies for each in drawn} == set(LIES)
    assert max(each.liars for each in drawn if each.peers == 10) == 9


def test_P18_a_liar_that_speaks_up_when_nobody_can_prove_anything_any_more_is_out_as_soon() -> None:
    """Seed 1154, in which one that showed a list and was silent then told its lie for three rounds: the others had
    dropped what chunks were before, since the digest was settled."""
    world = World(1154, Scenario.of_liars(1154))
    assert world.scenario.lies == "hush"
    assert world.run().outcome == "finished"
    assert world.coordinator is not None
    [liar] = world.league.members
    assert world.coordinator.core.keeps_out(liar)


def test_P18_liars_that_make_rounds_among_themselves_are_those_that_min_peers_lets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of three serves false state to whoever joins.  Nobody honest is banned, and a run that needs one more than
    the liar comes to its end with everybody, as soon as the liar's turn to found it is over."""
    monkeypatch.setattr(ticks, "FOUNDER_PATIENCE_S", 20.0)
    drawn = Scenario.of_liars(681)
    for least, ends in ((1, AMONG_LIARS), (drawn.liars + 1, "finished")):
        world = World(681, replace(drawn, min_peers=least))
        assert world.run().outcome == ends
        banned = {each.peer for each in map(from_bytes, world.journal) if isinstance(each, Banned)}
        assert banned <= world.league.members


class LiarsFirst(World):
    def _late_s(self, index: int) -> float:
        return 0.0 if index >= self.scenario.peers - self.scenario.liars else LIARS_LATE_S


@pytest.mark.parametrize(
    ("way", "peers", "liars"), [("serve", 4, 1), pytest.param("keep", 5, 2, marks=pytest.mark.hard)]
)
def test_P3_liars_that_found_a_run_and_give_it_to_nobody_hold_it_up_for_their_turn_only(
    way: str, peers: int, liars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they serve is wrong, or nothing; a round needs one more than they are."""
    monkeypatch.setattr(ticks, "FOUNDER_PATIENCE_S", 20.0)
    drawn = replace(
        Scenario.of_liars(1), lies=way, peers=peers, liars=liars, late_joiners=0, min_peers=liars + 1
    )
    world = LiarsFirst(1, drawn)
    assert world.run().outcome == "finished"
    founded = [each.peer for each in map(from_bytes, world.journal) if isinstance(each, Genesis)]
    assert founded[0] in world.league.members and founded[-1] not in world.league.members


# ---- the work of others ----------------------------------------------------------------------------------------


def seeds_about(way: str, count: int) -> list[int]:
    return [seed for seed in range(400) if Scenario.of_liars(seed).lies == way][:count]


def shares_counted(way: str, count: int = 3) -> list[float]:
    """Of what honest members could contribute to commits with liars, how much is in them."""
    shares = []
    for seed in seeds_about(way, count):
        world = World(seed, Scenario.of_liars(seed))
        world.run()
        liars = world.league.members
        commits = [commit for era in world.invariants.eras for commit in era.commits.values()]
        with_liars = [commit for commit in commits if liars & set(commit.members)]
        could = sum(len(set(commit.members) - liars) for commit in with_liars)
        did = sum(len(set(commit.included) - liars) for commit in with_liars)
        shares.append(did / could if could else 1.0)
    return shares


@pytest.mark.parametrize("way", pieces(ABOUT_OTHERS))
def test_P9_fewer_than_half_do_not_keep_the_work_of_the_others_out(way: str) -> None:
    shares = shares_counted(way)
    assert min(shares) >= 0.5 and mean(shares) >= 0.7


class FastDeafOwners(World):
    """The last `deaf` peers claim lines that no home has, so the chunks are theirs, and lack what all others sent."""

    deaf = 1

    def _say(self, peer: str, message: FromMember, key: bytes) -> None:
        deaf = self.deaf_peers
        if isinstance(message, Beat):
            mbit = 10_000 if peer in deaf else 20
            up, down = mbit * 125_000, max(200, mbit) * 125_000
            message = structs.replace(message, up_bytes_per_s=up, down_bytes_per_s=down, rough=False)
        if peer in deaf and isinstance(message, ProgressReport):
            held = {whose: hashes for whose, hashes in message.held.items() if whose in deaf}
            message = structs.replace(message, held=held)
        super()._say(peer, message, key)

    @property
    def deaf_peers(self) -> set[str]:
        return {peer_id_of(key.public_key().public_bytes_raw()) for key in self._keys[-self.deaf :]}


class TwoFastDeafOwners(FastDeafOwners):
    deaf = 2


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (TwoFastDeafOwners, 1),
        pytest.param(TwoFastDeafOwners, 3, marks=pytest.mark.hard),
        pytest.param(FastDeafOwners, 1, marks=pytest.mark.hard),
        pytest.param(FastDeafOwners, 3, marks=pytest.mark.hard),
    ],
)
def test_P9_those_with_the_fastest_lines_do_not_keep_the_work_of_all_others_out(
    kind: type[FastDeafOwners], least: int
) -> None:
    """Two may for three rounds, and then own nothing for a minute."""
    calm = replace(calm_slow_line(0, faults_until_s=0.0), slow_line_s=0.0, policy="mean", codec="int8")
    world = kind(0, replace(calm, rounds=10, peers=10, chunks=20, min_peers=least, end_s=200.0))
    assert world.run().outcome == "finished"
    commits = [commit for era in world.invariants.eras for commit in era.commits.values()]
    honest = [len(set(commit.included) - world.deaf_peers) for commit in commits]
    assert len(honest) == 10 and sum(count == 10 - kind.deaf for count in honest) >= 6, honest


@pytest.mark.hard
def test_believed_owners_would_keep_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "lacks_most", lambda alone, senders: set())
    monkeypatch.setattr(round_driver, "WITHHELD_MOST", 10**9)
    assert mean(shares_counted("censor")) < 0.6
    assert mean(shares_counted("pick")) < 0.8


@pytest.mark.hard
def test_the_word_of_one_would_keep_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scatter, "_are_most_owners", lambda self, accusers, member: bool(accusers))
    assert mean(shares_counted("slander")) < 0.6


@pytest.mark.parametrize("rule", pieces(["_who_keeps_results", "needed"]))
def test_the_simulator_sees_a_run_that_a_few_could_keep_to_themselves(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {
        "needed": (Holders, lambda self, waited=False: min(2, len(self.got))),
        "_who_keeps_results": (Round, lambda self, now, alive: set()),
    }
    whose, answer = broken[rule]
    monkeypatch.setattr(whose, rule, answer)
    with pytest.raises(Broken, match="P3"):
        for seed in (21, *seeds_about("keep", 8)):  # 21 shows both, and soonest
            World(seed, Scenario.of_liars(seed)).run()


# ---- one member of a run that needs everybody --------------------------------------------------------------------


def commits_of(seed: int) -> tuple[World, list[CommittedRound]]:
    world = World(seed, Scenario.of_one_that_holds_up(seed))
    assert world.run().outcome == "finished", f"seed {seed}"
    records = map(from_bytes, world.journal)
    return world, [each for each in records if isinstance(each, CommittedRound)]


def test_P3_one_that_takes_no_results_holds_up_one_commit_of_many_where_each_round_needs_everybody() -> None:
    for seed in range(3):
        world, commits = commits_of(seed)
        rules = world.manifest.round
        bound_s = max(rules.scatter_grace_s, rules.round_timeout_s / 4)
        slow = [each for each in commits if each.seconds >= bound_s]
        assert max(each.seconds for each in slow) < 2.5 * bound_s, f"seed {seed}"
        assert len(slow) <= 2 * world.scenario.fragments and len(commits) >= 8, f"seed {seed}"
        here = set(world.peers) - world.league.members
        assert all(set(each.commit.included) >= here for each in commits[-3:]), "nobody is left out for it"


def test_without_the_bound_one_member_would_hold_up_a_run_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastHolders, "may_go_without", lambda self, late, now, patience_s: False)
    seed = next(s for s in range(20) if Scenario.of_one_that_holds_up(s).lies == "deny")
    with pytest.raises(Broken, match="P3"):
        World(seed, Scenario.of_one_that_holds_up(seed)).run()


@pytest.mark.parametrize("seed", pieces(range(5), 2))
def test_P9_an_owner_that_says_of_its_results_what_nobody_can_prove_loses_its_chunks_and_stops_nobody(
    seed: int,
) -> None:
    """Other hashes than they have, or other lengths where the gradient is clipped."""
    drawn = Scenario.of_misnamed_results(seed)
    world = World(seed, drawn)
    assert world.run().outcome == "finished" and drawn.lies in ABOUT_RESULTS
    moved = [
        each.plan
        for each in map(from_bytes, world.journal)
        if isinstance(each, Opened) and each.plan.epoch > 1
    ]
    assert moved, "nobody saw the lie: this shows nothing"
    liars = world.league.members
    assert not [plan for plan in moved if liars & {plan.members[owner] for owner in plan.owners}]
