"""P1-P4, P6, P7 where nobody can be dialled, or nearly nobody: everything passes the relay, and the relay dies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from farflung.collectives.round.effects import SendFrame
from farflung.coordinator.ledger.records import CommittedRound, Opened, from_bytes
from farflung.protocol.frames import Kind
from farflung.protocol.signing import peer_id_of
from farflung.simulator import virtual_relay
from farflung.simulator.invariants import Broken
from farflung.simulator.world import Scenario, World
from rig.pieces import pieces, seeds

CALM = Scenario(drop=0, duplicate=0, slow=0, kill_per_effect=0, cut_per_s=0, trainer_crash_per_s=0)

LINE_BYTES_PER_S = 1000


@pytest.mark.parametrize("peers", [2, 5])
def test_peers_that_nobody_can_dial_make_commits_over_the_relay_and_none_without_it(peers: int) -> None:
    scenario = replace(CALM, peers=peers, undialable=peers, min_peers=2, end_s=30.0)
    with pytest.raises(Broken, match="not finished"):
        World(1, scenario).run()
    world = World(1, replace(scenario, relay="steady", end_s=120.0))
    report = world.run()
    assert report.outcome == "finished" and world.relay.passed > 0
    assert len(world.relay.pairs) <= peers * (peers - 1) / 2


class EqualLines(World):
    def start_peer(self, index: int) -> None:
        super().start_peer(index)
        for peer in self.peers.values():
            peer.member.reports.vitals.up_bytes_per_s = LINE_BYTES_PER_S


def owners_beside_the_dialled_one(seed: int) -> set[str]:
    """In the rounds that the one of four is in that can be dialled: who else owned something."""
    world = EqualLines(seed, replace(CALM, peers=4, undialable=3, relay="steady"))
    assert world.run().outcome == "finished"
    plans = [record.plan for raw in world.journal if isinstance(record := from_bytes(raw), Opened)]
    [dialled] = [peer for peer, each in world.peers.items() if each.address]
    with_it = [plan for plan in plans if dialled in plan.members]
    assert with_it
    return {plan.members[at] for plan in with_it for at in plan.owners} - {dialled}


def test_whoever_can_be_dialled_owns_everything_in_its_rounds_where_the_relay_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual_relay, "BYTES_PER_S", LINE_BYTES_PER_S / 20)
    assert owners_beside_the_dialled_one(0) == set()


def test_whoever_meets_others_at_a_quick_relay_owns_beside_the_one_that_can_be_dialled() -> None:
    assert len(owners_beside_the_dialled_one(0)) >= 2


class Watched(World):
    """Counts what is sent to the peer that comes late."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        super().__init__(seed, scenario)
        self.sent: Counter[Kind] = Counter()
        self.late = peer_id_of(self._keys[-1].public_key().public_bytes_raw())

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        if effect.to == self.late:
            self.sent[effect.frame.header.kind] += 1
        super()._send_frame(source, effect)


def test_P4_a_newcomer_behind_the_relay_begins_with_a_checkpoint_and_the_relay_carries_results_only() -> None:
    usual = replace(CALM, peers=3, undialable=3, relay="steady", late_joiners=1, rounds=20, step="adamw")
    without = Watched(0, usual)
    assert without.run().outcome == "finished" and without.sent[Kind.STATE] > 0
    world = Watched(0, replace(usual, every_rounds=1, one_store=True, store_fails=0.0))
    assert world.run().outcome == "finished"
    assert world.sent[Kind.STATE] == 0 and world.sent[Kind.RESULT] > 0, world.sent


@pytest.mark.parametrize("batch", pieces(2))
def test_P4_no_promise_is_broken_where_newcomers_behind_a_relay_begin_with_checkpoints(batch: int) -> None:
    passed = 0
    for seed in seeds(batch, 3):
        usual = Scenario.of(seed)
        scenario = replace(usual, undialable=usual.peers, relay="dies", every_rounds=1, one_store=True)
        world = World(seed, scenario)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}: Scenario.of(seed), nobody dialable, the relay dies, a shared store")
            raise
        passed += world.relay.passed
    assert passed > 0


@pytest.mark.parametrize("batch", pieces(2))
def test_no_promise_is_broken_while_the_relay_dies_again_and_again(batch: int) -> None:
    outcomes, deaths, passed = [], 0, 0
    for seed in seeds(batch, 4):
        usual = Scenario.of(seed)
        undialable = usual.peers - seed % 2  # nobody, or one can be dialled
        world = World(seed, replace(usual, undialable=undialable, relay="dies"))
        try:
            outcomes.append(world.run().outcome)
        except Exception as error:
            error.add_note(f"seed {seed}: Scenario.of(seed) with undialable={undialable}, relay='dies'")
            raise
        deaths, passed = deaths + world.relay.deaths, passed + world.relay.passed
    assert outcomes.count("finished") >= 0.5 * len(outcomes), outcomes
    assert deaths > 0 and passed > 0


@pytest.mark.parametrize("batch", pieces(2))
def test_no_promise_is_broken_by_a_relay_that_lies_about_bytes(batch: int) -> None:
    """Both ends hang up and meet again: what was on its way is asked for anew."""
    outcomes, spoiled = [], 0
    for seed in seeds(batch, 3):
        usual = Scenario.of(seed)
        world = World(seed, replace(usual, undialable=usual.peers - seed % 2, relay="lies"))
        try:
            outcomes.append(world.run().outcome)
        except Exception as error:
            error.add_note(f"seed {seed}: Scenario.of(seed), nobody or one dialable, relay='lies'")
            raise
        spoiled += world.relay.spoiled
    assert outcomes.count("finished") >= 0.5 * len(outcomes), outcomes
    assert spoiled > 0


@pytest.mark.usefixtures("equal_work")
@pytest.mark.parametrize("peers", pieces([4, 3, 5]))
def test_two_whose_bytes_to_each_other_a_relay_withholds_are_soon_in_every_round_all_the_same(
    peers: int,
) -> None:
    """At first one of them, or both, may be left out; then only those own chunks who get something of everybody."""
    usual = replace(CALM, peers=peers, undialable=peers, relay="withholds", deadline_s=20.0)
    world = World(1, replace(usual, rounds=16, end_s=400.0))
    assert world.run().outcome == "finished" and world.relay.held > 0
    commits = [r.commit for raw in world.journal if isinstance(r := from_bytes(raw), CommittedRound)]
    assert all(world.relay.withheld <= set(commit.included) for commit in commits[8:])


def test_peers_that_meet_past_their_routers_need_no_relay() -> None:
    world = World(1, replace(CALM, peers=3, undialable=3, routers="easy", faults_until_s=0.0))
    assert world.run().outcome == "finished" and world.routers.connected > 1
    assert world.routers.passed > 0 and not world.relay.passed


@pytest.mark.hard
def test_peers_that_roam_have_the_relay_and_meet_again_where_they_are_then() -> None:
    usual = replace(CALM, peers=3, undialable=3, routers="easy", relay="steady")
    met_again = 0
    for seed in range(3):
        world = World(seed, replace(usual, roams_every_s=20.0, faults_until_s=30.0, rounds=80, end_s=600.0))
        assert world.run().outcome == "finished" and world.relay.passed > 0
        assert not world.routers.missed, "nobody is sent to where somebody was before"
        met_again += world.routers.newest_at > 60.0
    assert met_again


def test_past_a_hard_router_the_relay_is_left_for_its_pairs() -> None:
    world = World(
        2, replace(CALM, peers=3, undialable=3, routers="mixed", relay="steady", faults_until_s=0.0)
    )
    assert world.run().outcome == "finished"
    assert world.routers.passed > 0 and world.relay.passed > 0


@pytest.mark.parametrize("batch", pieces(2))
def test_no_promise_is_broken_while_ways_change_again_and_again(batch: int) -> None:
    outcomes, connected, passed = [], 0, 0
    for seed in seeds(batch, 6):
        usual = Scenario.of(seed)
        routers, relay = ("easy", "mixed")[seed % 2], ("dies", "steady", "dies")[seed % 3]
        ways = {"routers": routers, "relay": relay, "roams_every_s": (0.0, 4.0)[seed // 2 % 2]}
        world = World(seed, replace(usual, undialable=usual.peers, **ways))  # type: ignore[arg-type]
        try:
            outcomes.append(world.run().outcome)
        except Exception as error:
            error.add_note(f"seed {seed}: Scenario.of(seed), nobody dialable, {ways}")
            raise
        connected, passed = connected + world.routers.connected, passed + world.routers.passed
    assert outcomes.count("finished") >= 0.5 * len(outcomes), outcomes
    assert connected > 0 and passed > 0


@pytest.mark.usefixtures("equal_work")
@pytest.mark.parametrize("offers", pieces(["drops", "dies", "steady"], 2))
def test_relays_that_peers_offer_carry_what_the_host_has_no_relay_for(offers: str) -> None:
    passed = dropped = 0
    for seed in (2, 3):  # which lose no fragment with all its holders
        usual = Scenario.of(seed)
        world = World(seed, replace(usual, undialable=max(2, usual.peers - 2), offered=offers))
        try:
            assert world.run().outcome in ("finished", "stuck") and world.offers.tried
        except Exception as error:
            error.add_note(f"seed {seed}: offers={offers}")
            raise
        passed, dropped = passed + world.offers.passed, dropped + world.offers.dropped
    assert passed > 0 and (dropped > 0) == (offers == "drops")


@pytest.mark.parametrize("relay", pieces(["dies", "steady"]))
def test_P11_P12_microbatches_pass_relays_and_routers_where_no_stage_can_be_dialled(relay: str) -> None:
    outcomes, passed = [], 0
    for seed in range(0 if relay == "steady" else 100, 3 if relay == "steady" else 103):
        usual = Scenario.of_stages(seed)
        routers = ("", "mixed", "easy")[seed % 3]
        world = World(seed, replace(usual, undialable=usual.peers, routers=routers, relay=relay, end_s=300.0))
        try:
            outcomes.append(world.run().outcome)
        except Exception as error:
            error.add_note(f"seed {seed}: Scenario.of_stages(seed), nobody dialable, {routers=}, {relay=}")
            raise
        passed += world.relay.passed
    assert outcomes.count("finished") >= 0.5 * len(outcomes), outcomes
    assert passed > 0


def test_neighbouring_stages_without_any_way_wait_and_say_so() -> None:
    usual = Scenario.of_stages(15)
    with pytest.raises(
        Broken, match="at a relay, so that they can't reach each other: one peer there needs an"
    ):
        World(15, replace(usual, undialable=usual.peers, end_s=30.0)).run()
