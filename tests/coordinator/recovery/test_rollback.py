"""When the newest state is lost: how long the run waits, how far it goes back, and what its books say then.

One part of the run machine, on virtual time; whole runs that go back are in whole/test_going_back.py.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import pytest
from msgspec.structs import replace

from farflung.coordinator.ledger.leases import Range
from farflung.coordinator.ledger.records import (
    AbortedRound,
    Admitted,
    DataFixed,
    Departed,
    Genesis,
    Granted,
    RolledBack,
    Vouched,
    from_bytes,
    to_bytes,
)
from farflung.coordinator.recovery.recovery import Rollback
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.round_driver import in_this_era
from farflung.protocol.errors import DepartureCause
from farflung.protocol.manifest import CheckpointSection, Manifest, NetSection, RoundSection, RunSection
from farflung.protocol.messages import FragmentBeat, Lease
from farflung.protocol.round_words import Used
from farflung.protocol.states import Phase
from rig.made_run import NOWHERE, MadeRun, digest_of, holding, peer_of

PATIENCE_S, DEAD_AFTER_S = 100.0, 10.0


class Loser(MadeRun):
    """A run that came to some versions, saves every other one, and looks around in steps of one second."""

    def __init__(self, *versions: int, every_rounds: int = 2, go_back_after_s: float = PATIENCE_S) -> None:
        super().__init__(
            Manifest(
                run=RunSection(rounds=9),
                round=RoundSection(fragments=len(versions)),
                net=NetSection(dead_after_s=DEAD_AFTER_S),
                checkpoint=CheckpointSection(every_rounds=every_rounds, go_back_after_s=go_back_after_s),
            )
        )
        first, *others = (digest_of(0, fragment) for fragment in range(len(versions)))
        self.core.write(Genesis(digest=first, peer=peer_of("ann"), others=tuple(others)))
        for fragment, version in enumerate(versions):
            for _ in range(version):
                self.commits(fragment=fragment)
        self.effects()
        self.rollback = Rollback(self.core, self.drivers)

    def holds(self, name: str, *said: int | FragmentBeat) -> Member:
        """The peer is here and says that it holds these versions, or just what is given."""
        member = self.core.members.members.get(peer_of(name)) or self.enters(name)
        versions = holding(*(each if isinstance(each, int) else -1 for each in said))
        fragments = tuple(
            each if isinstance(each, FragmentBeat) else known
            for each, known in zip(said, versions, strict=True)
        )
        self.says(member, fragments=fragments)
        return member

    def goes_back_within(self, seconds: float, silent: Container[str] = ()) -> bool:
        """Everybody goes on saying what it said last, but for those who are `silent`."""
        until = self.core.now + seconds
        while self.core.now < until:
            self.core.now += 1.0
            for member in self.core.members.alive.values():
                member.heard.at = member.heard.at if member.peer in silent else self.core.now
            if self.rollback.check_what_is_held():
                return True
        return False

    @property
    def versions(self) -> list[int]:
        return [book.version for book in self.core.ledger.books]


# ---- when it waits -------------------------------------------------------------------------------------------


def test_it_goes_back_when_nobody_has_held_the_newest_version_for_that_long() -> None:
    run = Loser(5)
    run.holds("ann", 4)
    assert not run.rollback.check_what_is_held()
    assert not run.goes_back_within(PATIENCE_S - 1.0)
    assert run.goes_back_within(1.0)
    assert run.versions == [4]
    run.holds("ann", 4)
    assert not run.goes_back_within(3 * PATIENCE_S), "somebody holds the newest version now"


def test_P20_it_goes_back_to_nothing_that_only_a_peer_holds_which_says_nothing_any_more() -> None:
    """It may be dead, and its version lost with it: then the run would be founded anew by itself."""
    run = Loser(5)
    ann = run.holds("ann", 4)
    assert not run.goes_back_within(3 * PATIENCE_S, silent={ann.peer})
    assert run.goes_back_within(1.0) and run.versions == [4], "it has spoken again"


@pytest.mark.parametrize("stayed", [True, False])
def test_P20_whoever_made_the_newest_version_and_is_about_to_take_it_is_waited_for_a_while_longer(
    stayed: bool,
) -> None:
    """The word that it is committed may come late; to one that was away since, it comes with the welcome."""
    run = Loser(5)
    run.holds("ann" if stayed else "bob", 4)
    assert not run.goes_back_within(2.0)
    run.says(run.holds("ann", 4), phase=Phase.APPLY, fragments=holding(4))
    assert run.goes_back_within(PATIENCE_S + DEAD_AFTER_S) is not stayed
    assert run.goes_back_within(DEAD_AFTER_S) is stayed, "but not for ever"


def test_it_does_not_go_back_while_somebody_holds_the_newest_version() -> None:
    run = Loser(5)
    run.holds("ann", 4)
    assert not run.goes_back_within(PATIENCE_S - 1.0)
    bob = run.holds("bob", 5)
    assert not run.goes_back_within(PATIENCE_S)
    run.loses(bob)
    assert not run.goes_back_within(PATIENCE_S), "the patience began anew"
    assert run.goes_back_within(1.0)


def test_whenever_somebody_with_a_newer_version_comes_it_waits_for_the_next_one() -> None:
    run = Loser(5)
    run.holds("ann", 2)
    assert not run.goes_back_within(PATIENCE_S - 1.0)
    run.holds("bob", 4)
    assert not run.goes_back_within(PATIENCE_S)
    assert run.goes_back_within(1.0) and run.versions == [4]


def test_with_nobody_here_it_waits_for_ever() -> None:
    run = Loser(5)
    assert not run.goes_back_within(5 * PATIENCE_S)
    ann = run.holds("ann", 4)
    run.loses(ann)
    assert not run.goes_back_within(5 * PATIENCE_S)


def test_where_the_rules_say_so_it_never_goes_back() -> None:
    run = Loser(5, go_back_after_s=0.0)
    run.holds("ann", 4)
    assert not run.goes_back_within(1000.0)
    driver = run.drivers[0]
    told = (
        "go_back_after_s = 0: waiting for a peer that has it; the host can go back: farflung rewind run.toml"
    )
    assert run.rollback.reason(driver).endswith(told)


def test_before_anything_was_learned_there_is_nothing_to_go_back_to() -> None:
    run = Loser(0)
    run.holds("ann", -1)
    assert not run.goes_back_within(3 * PATIENCE_S)


@pytest.mark.parametrize("delivered", [True, False])
def test_a_complete_run_goes_back_only_until_somebody_left_with_its_model(delivered: bool) -> None:
    run = Loser(9)
    if delivered:
        run.core.write(Departed(peer=peer_of("zoe"), cause=DepartureCause.FINISHED, reason="finished"))
    run.holds("ann", 8)
    assert run.goes_back_within(2 * PATIENCE_S) != delivered


# ---- how far -------------------------------------------------------------------------------------------------


def test_it_goes_back_to_the_newest_version_that_anybody_living_holds() -> None:
    run = Loser(7)
    run.holds("ann", 2)
    run.holds("bob", 6)
    run.holds("cyd", 4)
    run.loses(run.holds("dan", 7))
    assert run.goes_back_within(2 * PATIENCE_S) and run.versions == [6]


def test_a_state_that_is_not_the_runs_does_not_count() -> None:
    """Neither another one under the number of an older version, nor one whose version nobody knows any more."""
    run = Loser(5)
    run.holds("bob", replace(holding(4)[0], digest=digest_of(99)))
    run.holds("cyd", replace(holding(3)[0], digest=b""))
    assert not run.goes_back_within(3 * PATIENCE_S), "nobody holds anything of this run"
    run.holds("ann", 2)
    assert run.goes_back_within(2 * PATIENCE_S) and run.versions == [2]


def test_a_newest_version_whose_digest_is_not_settled_yet_is_held() -> None:
    """Who made it just now may be the only one."""
    run = Loser(5)
    del run.core.ledger.books[0].digests[5]
    run.holds("ann", replace(NOWHERE, version=5, digest=b"\1" * 32))
    run.holds("bob", 4)
    assert not run.goes_back_within(3 * PATIENCE_S)


def test_where_all_that_is_held_of_a_fragment_never_settles_the_run_does_not_start_again_at_version_0() -> (
    None
):
    """A checkpoint was due: somebody may come with one."""
    run = Loser(5, 5)
    del run.core.ledger.books[0].digests[5]
    run.holds("ann", replace(NOWHERE, version=5, digest=b"\1" * 32), 4)
    assert not run.goes_back_within(5 * PATIENCE_S)


def test_an_unsettled_digest_of_one_fragment_is_waited_for_a_while_and_not_for_ever() -> None:
    """What it goes back to must be settled; else the fragment goes back as well."""
    run = Loser(5, 5)
    del run.core.ledger.books[0].digests[5]
    unsettled = replace(NOWHERE, version=5, digest=b"\1" * 32)
    run.holds("ann", unsettled, 4)
    run.holds("bob", 4, 4)
    assert not run.goes_back_within(PATIENCE_S + 2 * DEAD_AFTER_S)
    assert run.goes_back_within(1.0)
    assert run.versions == [4, 4]


def test_each_fragment_goes_back_to_what_is_held_of_it_and_one_that_is_held_stays() -> None:
    run = Loser(6, 5, 6)
    run.holds("ann", 6, 4, 2)
    run.holds("bob", 5, 3, 3)
    assert run.goes_back_within(2 * PATIENCE_S)
    assert run.versions == [6, 4, 3]
    assert run.records()[-1:] == [
        RolledBack(
            versions=(6, 4, 3),
            reason="nobody online had version 6, 5, 6; version 6, 4, 3 was the newest in reach",
        )
    ]


def test_it_does_not_go_back_while_another_fragments_newest_version_is_just_being_applied() -> None:
    run = Loser(5, 5)
    run.holds("ann", 4, 5)
    assert not run.goes_back_within(PATIENCE_S - 1.0)
    run.commits(fragment=1)
    assert not run.goes_back_within(DEAD_AFTER_S)
    run.holds("ann", 4, 6)
    assert run.goes_back_within(1.0)
    assert run.versions == [4, 6], "version 6 of the other fragment is not lost as well"


def test_a_fragment_that_nobody_holds_at_all_holds_the_whole_run_up() -> None:
    run = Loser(5, 5)
    run.holds("ann", 4, -1)
    assert not run.goes_back_within(5 * PATIENCE_S), "a checkpoint of it may come back"
    assert "waiting for a peer with a checkpoint (join --checkpoints)" in run.rollback.reason(run.drivers[0])


@pytest.mark.parametrize("every_rounds", [0, 5, 6])
def test_P4_a_run_that_has_learned_is_never_founded_anew_by_itself(every_rounds: int) -> None:
    """Whether somebody may have a checkpoint, or none was due yet."""
    run = Loser(5, every_rounds=every_rounds)
    run.holds("ann", -1)
    assert not run.goes_back_within(5 * PATIENCE_S)
    assert run.rollback.reason(run.drivers[0]).endswith(
        "restart from scratch: farflung rewind --from-scratch run.toml"
    )


# ---- P20: only when those who may hold more are accounted for -------------------------------------------------


def made_by(*names: str, versions: int = 5, tokens: Mapping[str, int] | None = None) -> Loser:
    """All versions were made by these, in equal parts unless `tokens` says otherwise; nobody is here any more."""
    run = Loser(0)
    for name in names:
        run.core.write(Vouched(peer=peer_of(name)))
    for _ in range(versions):
        run.commits({peer_of(name): () for name in names})
    for name, brought in (tokens or {}).items():
        run.core.ledger.books[0].holders[peer_of(name)].tokens = brought
    run.effects()
    return run


def departs(run: Loser, name: str, cause: DepartureCause) -> None:
    run.core.write(Departed(peer=peer_of(name), cause=cause, reason="a test"))


def test_P20_a_stranger_with_an_older_state_is_not_the_run_while_its_peers_are_out_of_sight() -> None:
    run = made_by("ann", "bob", "cat")
    run.holds("zoe", 4)
    assert not run.goes_back_within(20 * PATIENCE_S)
    assert run.versions == [5]
    run.holds("ann", 5)
    assert not run.goes_back_within(PATIENCE_S), "and there it is again"


def test_P20_any_number_of_strangers_counts_nothing() -> None:
    run = made_by("ann")
    for number in range(50):
        name = f"z{number:015d}"
        run.holds(name, 4)
        run.core.write(Vouched(peer=peer_of(name)))
    assert not run.goes_back_within(5 * PATIENCE_S)


def test_most_of_those_by_committed_tokens_are_here_and_hold_no_more() -> None:
    run = made_by("ann", "bob", "cat")
    run.holds("ann", 4)
    assert not run.goes_back_within(3 * PATIENCE_S), "one of three"
    run.holds("bob", -1)
    soon_s = 2 * run.core.members.liveness.dead_after_s
    assert not run.goes_back_within(soon_s - 1.0), "who was cut off with it may be about to follow"
    assert run.goes_back_within(2.0) and run.versions == [4], "two of three"


@pytest.mark.parametrize(("ann", "bob", "goes"), [(2, 1, True), (1, 1, False), (1, 2, False)])
def test_half_is_not_most_and_tokens_count_not_heads(ann: int, bob: int, goes: bool) -> None:
    run = made_by("ann", "bob", tokens={"ann": ann, "bob": bob})
    run.holds("ann", 4)
    assert run.goes_back_within(2 * PATIENCE_S) is goes


@pytest.mark.parametrize("cause", list(DepartureCause))
def test_who_said_good_bye_or_was_sent_away_is_not_waited_for(cause: DepartureCause) -> None:
    run = made_by("ann", "bob", "cat")
    run.holds("zoe", 4)
    for name in ("ann", "bob", "cat"):
        departs(run, name, cause)
    silent = (DepartureCause.CLOSED, DepartureCause.SILENT, DepartureCause.UNKNOWN)
    assert run.goes_back_within(2 * PATIENCE_S) is (cause not in silent)


def test_who_came_again_after_a_good_bye_and_showed_the_state_is_waited_for_again() -> None:
    run = made_by("ann", "bob")
    for name in ("ann", "bob"):
        departs(run, name, DepartureCause.LEFT)
    assert run.core.ledger.books[0].vouched == set(), "it has to show the state anew"
    run.core.write(Admitted(peer=peer_of("ann"), name="ann", session=bytes(16)))
    run.core.write(Vouched(peer=peer_of("ann")))
    run.holds("zoe", 4)
    assert not run.goes_back_within(5 * PATIENCE_S)


def test_who_was_here_when_a_version_was_made_may_hold_it_without_a_part_in_its_round() -> None:
    run = made_by("ann", versions=4)
    for peer, name in ((peer_of("bob"), "bob"), (peer_of("cat"), "cat")):
        run.core.write(Admitted(peer=peer, name=name, session=bytes(16)))
        run.core.write(Vouched(peer=peer))
    departs(run, "cat", DepartureCause.SILENT)
    run.commits({peer_of("ann"): ()})
    holders = run.core.ledger.books[0].holders
    assert [holders[peer_of(name)].reached for name in ("ann", "bob", "cat")] == [5, 5, 4]
    departs(run, "ann", DepartureCause.LEFT)
    run.holds("zoe", 4)
    assert run.rollback.may_hold_more(run.drivers[0], 4) == [peer_of("bob")]


def test_who_may_hold_what_outlives_the_coordinator_and_a_folded_journal() -> None:
    run = made_by("ann", "bob")
    departs(run, "bob", DepartureCause.LEFT)
    ledger = run.replayed()
    again = run.new_ledger()
    again.apply(from_bytes(to_bytes(ledger.folded(9))))
    for each in (ledger, again):
        held = {peer: (holder.reached, holder.tokens) for peer, holder in each.books[0].holders.items()}
        assert held == {peer_of("ann"): (5, 25.0), peer_of("bob"): (-1, 25.0)}


def test_the_host_is_told_once_whom_the_run_waits_for_and_what_it_can_do() -> None:
    run = made_by("ann", "bob", "cat", "dan", "eve", tokens={"dan": 1000})
    for name in ("ann", "bob", "cat", "dan", "eve"):
        run.core.ledger.peers.names[peer_of(name)] = name
    run.holds("zoe", 4)
    assert not run.goes_back_within(5 * PATIENCE_S)
    assert run.notes() == [
        "nobody online has version 5, the newest held is 4: waiting for dan, ann, bob and 2 other peers, which may "
        "have it and did not say good-bye; the host can go back without: farflung rewind run.toml"
    ]


# ---- what follows --------------------------------------------------------------------------------------------


def test_the_books_say_what_they_said_then_and_samples_used_since_are_lent_again() -> None:
    run = Loser(0, every_rounds=1)
    ann = run.holds("ann", 0)
    run.core.write(DataFixed(samples=100, peer=ann.peer))
    run.core.write(Granted(peer=ann.peer, lease=Lease(1, 0, 0, 8, 0)))
    for upto in (2, 4, 6):
        run.commits({ann.peer: (Used(1, upto),)})
    assert run.core.ledger.totals.tokens == 30
    run.holds("ann", 2)
    assert run.goes_back_within(2 * PATIENCE_S)
    ledger = run.core.ledger
    assert (ledger.version, ledger.eras.number, ledger.totals.tokens, ledger.leases.committed_samples) == (
        2,
        1,
        20,
        4,
    )
    assert ledger.leases.returned == [Range(0, 4, 8, (4,))] and ledger.leases.held == {}
    replayed = run.replayed()
    assert (replayed.version, replayed.eras.number, replayed.leases) == (2, 1, ledger.leases)


def test_nobody_is_believed_any_more_and_rounds_in_flight_are_over() -> None:
    run = Loser(5, 5)
    ann, bob = run.holds("ann", 4, 4), run.holds("bob", 4, 4)
    for member in (ann, bob):
        member.standings[0].ready_since = 1.0
    run.opens(ann, bob)
    assert run.goes_back_within(2 * PATIENCE_S)
    assert all(driver.round is None for driver in run.drivers)
    standings = [standing for member in (ann, bob) for standing in member.standings.values()]
    assert not any(each.verified or each.vouched or each.ready_since for each in standings)
    aborted, rolled_back = run.records()[-2:]
    assert isinstance(aborted, AbortedRound) and aborted.reason == "the run goes to an older state"
    assert isinstance(rolled_back, RolledBack), "after the rounds of the lost versions"


def test_beats_of_an_older_era_say_nothing_of_versions() -> None:
    """Version 5 is made again by other commits: who holds the old one must not pass for a holder of the new one."""
    run = Loser(5)
    before = run.says(run.holds("bob", 5), fragments=holding(5), step=7)
    assert in_this_era(before, run.core.ledger.eras.number) is before
    run.core.write(RolledBack(versions=(4,), reason="a test"))
    late = in_this_era(before, run.core.ledger.eras.number)
    assert late == replace(before, fragments=(NOWHERE,)), "what is not about versions is as good as before"
    again = replace(before, era=1)
    assert in_this_era(again, run.core.ledger.eras.number) is again


def test_what_members_said_before_it_went_back_does_not_count_after_it() -> None:
    run = Loser(5)
    ann, bob = run.holds("ann", 4), run.holds("bob", 2)
    assert run.goes_back_within(2 * PATIENCE_S)
    assert [member.beat.fragments for member in (ann, bob) if member.beat] == [(NOWHERE,)] * 2
    run.holds("ann", 4)
    assert run.rollback.check_what_is_held() is False


# ---- what people are told ------------------------------------------------------------------------------------


def test_a_version_is_lost_only_after_everybody_had_the_time_to_apply_it() -> None:
    run = Loser(5)
    run.holds("ann", 4)
    run.rollback.check_what_is_held()
    run.goes_back_within(DEAD_AFTER_S - 1.0)
    assert not run.rollback.is_lost(run.drivers[0])
    run.goes_back_within(1.0)
    assert run.rollback.is_lost(run.drivers[0])
    run.holds("ann", 5)
    run.rollback.check_what_is_held()
    assert not run.rollback.is_lost(run.drivers[0])


def test_who_has_to_wait_is_told_for_what() -> None:
    run = Loser(5)

    def reason() -> str:
        return run.rollback.reason(run.drivers[0])

    run.holds("ann", 4)
    run.rollback.check_what_is_held()
    lost = "nobody online has version 5: "
    assert reason() == f"{lost}the run goes back to version 4 unless a peer brings it within 100 s"
    run.holds("bob", 5)
    run.rollback.check_what_is_held()
    assert reason() == "waiting for the peers that hold version 5 to show it"
    done = Loser(9)
    done.core.write(Departed(peer=peer_of("zoe"), cause=DepartureCause.FINISHED, reason="finished"))
    assert "its model was handed out already" in done.rollback.reason(done.drivers[0])
