"""What each beat is answered with: where the run is, what its member is to do and why, and whatever it lacks.

One part of the run machine, on virtual time; beats that travel are in test_machine.py.
"""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from farflung.coordinator.ledger.records import (
    Admitted,
    DataFixed,
    Genesis,
    Paused,
    RolledBack,
    Struck,
    Vouched,
)
from farflung.coordinator.roster.partial_view import FELLOWS_TOLD, in_turn_from
from farflung.coordinator.run.lease_desk import LeaseDesk
from farflung.coordinator.run.membership import ROSTER_ENTRIES_PER_S, Member
from farflung.coordinator.run.ticks import (
    DIGESTS_TOLD,
    DONORS_CROWD_S,
    DONORS_TOLD,
    DONORS_TURN_S,
    FINISH_GRACE_S,
    FIRST_ROUND_S,
    FOUNDER_LEAST_BYTES_S,
    FOUNDER_PATIENCE_S,
    SAVED_TOLD,
    TickBuilder,
)
from farflung.protocol.manifest import CheckpointSection, Manifest, RoundSection, RunSection
from farflung.protocol.messages import Committed, Decided, FragmentTick, Message, OpenRound, Tick
from farflung.protocol.round_words import CROWD, Decision
from farflung.protocol.run_terms import Terms
from farflung.protocol.states import Goal, PeerState
from rig.court_scene import MODEL
from rig.made_run import NOWHERE, MadeRun, digest_of, holding, peer_of
from rig.showing import let_all_be_shown, shown_under, value_of

ROUNDS = 20
OTHER = digest_of(99)  # of a state that is not the run's


class Guide(MadeRun):
    """A run at these versions, one for each fragment.  None: nobody has founded version 0 yet."""

    def __init__(self, *versions: int | None) -> None:
        rules = RoundSection(fragments=len(versions))
        super().__init__(
            Manifest(run=RunSection(rounds=ROUNDS), round=rules, checkpoint=CheckpointSection(every_rounds=2))
        )
        lease_desk = LeaseDesk(self.core, self.drivers)
        self.tick_builder = TickBuilder(self.core, self.drivers, lease_desk)
        if None not in versions:
            first, *others = (digest_of(0, fragment) for fragment in range(len(versions)))
            self.core.write(Genesis(digest=first, peer=peer_of("ann"), others=tuple(others)))
            let_all_be_shown(self.core.ledger)
        for fragment, version in enumerate(versions):
            for _ in range(version or 0):
                self.commits(fragment=fragment)
        self.effects()

    def comes(self, name: str, dialable: bool = True) -> Member:
        member = self.enters(name, verified=False)
        if dialable:
            member.place.claimed = f"{name}:1"
            assert self.core.members.on_dialled(member.peer, member.session, reached=True)
        return member

    def hears(self, member: Member, *versions: int, **changes: object) -> list[Message]:
        """All that the member is told, when it says that it holds these versions of the run's."""
        self.effects()
        said = {"fragments": holding(*versions)} if versions else {}
        assert self.tick_builder.on_beat(member, self.says(member, **{**said, **changes})) is None
        return self.told(member)

    def tick(self, member: Member, *versions: int, **changes: object) -> Tick:
        found = self.hears(member, *versions, **changes)
        return next(each for each in found if isinstance(each, Tick))

    def part(self, member: Member, *versions: int, **changes: object) -> FragmentTick:
        """What the tick says of fragment 0."""
        return self.tick(member, *versions, **changes).fragments[0]

    def goal(self, member: Member, *versions: int, **changes: object) -> tuple[str, str]:
        tick = self.tick(member, *versions, **changes)
        return tick.goal, tick.reason


def kinds(messages: list[Message]) -> list[type]:
    return [type(each) for each in messages]


# ---- version 0 is founded ------------------------------------------------------------------------------------


def test_the_oldest_founds_version_0_and_the_others_wait_and_then_fetch_it() -> None:
    run = Guide(None)
    ann, bob = run.comes("ann"), run.comes("bob")
    assert run.goal(bob, -1) == (Goal.WAIT, "ann gives the run its initial state")
    assert run.goal(ann, -1) == (Goal.FOUND, "it gives the run its initial state")
    assert run.goal(ann, 0) == (Goal.TRAIN, "it founded version 0")
    assert run.goal(bob, -1) == (Goal.SYNC, "it holds no version yet, the run is at 0")
    assert run.goal(bob, 0) == (Goal.TRAIN, "starting"), "the driver says what is waited for"
    assert [each for each in run.written if not isinstance(each, Admitted)] == [
        Genesis(
            digest=digest_of(0),
            peer=ann.peer,
            others=(),
            shown=(value_of(run.core.ledger, 0, 0, digest_of(0)),),
        ),
        Vouched(peer=ann.peer, fragment=0),
        Vouched(peer=bob.peer, fragment=0),
    ]


def test_when_the_founder_is_lost_before_anything_was_learned_the_next_one_founds_anew() -> None:
    run = Guide(None)
    ann, bob = run.comes("ann"), run.comes("bob")
    run.tick(ann, 0)
    flight = run.opens(ann, bob)
    run.loses(ann)
    bobs = replace(NOWHERE, version=0, digest=OTHER)
    tick = run.tick(bob, -1)
    assert (tick.goal, tick.fragments[0].digests) == (Goal.FOUND, ()), "nobody holds the old one"
    assert run.goal(bob, fragments=(bobs,)) == (Goal.TRAIN, "it founded version 0")
    assert run.core.ledger.books[0].digests == {0: OTHER}
    assert run.drivers[0].round is not flight, "a round from the old version 0 is over"
    assert run.part(bob, fragments=(bobs,)).digests == ((0, OTHER),)


def test_version_0_is_founded_anew_when_its_last_holder_says_that_it_holds_it_no_more() -> None:
    run = Guide(None)
    ann, bob = run.comes("ann"), run.comes("bob")
    run.tick(ann, 0)
    assert run.goal(bob, -1)[0] == Goal.SYNC
    assert run.goal(ann, -1) == (Goal.FOUND, "it gives the run its initial state")
    run.tick(ann, 0)
    run.tick(bob, 0)
    run.loses(ann)
    assert run.goal(bob, 0)[0] == Goal.TRAIN, "another one holds it"
    run.comes("cyd")
    assert run.goal(bob, -1)[0] == Goal.FOUND


def test_version_0_is_founded_when_the_oldest_holds_it_of_every_fragment() -> None:
    run = Guide(None, None)
    ann = run.comes("ann")
    assert run.goal(ann, 0, -1)[0] == Goal.FOUND
    assert run.goal(ann, 0, 0) == (Goal.TRAIN, "it founded version 0")
    assert [book.digests for book in run.core.ledger.books] == [{0: digest_of(0, at)} for at in range(2)]


def test_P3_who_is_to_found_the_run_and_does_not_has_its_turn_and_then_the_next_one_founds_it() -> None:
    run = Guide(None)
    ann, bob = run.comes("ann"), run.comes("bob")
    assert run.goal(ann, -1)[0] == Goal.FOUND
    run.core.now += FOUNDER_PATIENCE_S - 0.1
    assert run.goal(bob, -1)[0] == Goal.WAIT
    run.core.now += 0.1
    assert run.goal(bob, -1)[0] == Goal.FOUND
    assert run.goal(ann, -1)[0] == Goal.WAIT
    run.core.now += FOUNDER_PATIENCE_S
    run.tick(bob, -1)
    assert run.goal(ann, -1)[0] == Goal.FOUND, "all had their turn"
    run.core.now += FOUNDER_PATIENCE_S
    assert run.goal(bob, -1)[0] == Goal.WAIT, "the next one is longer"
    run.core.now += FOUNDER_PATIENCE_S
    assert run.goal(bob, -1)[0] == Goal.FOUND


def test_P3_who_founds_the_run_and_gives_it_to_nobody_has_its_turn() -> None:
    run = Guide(None)
    ann, bob = run.comes("ann"), run.comes("bob")
    run.tick(ann, 0)
    run.tick(bob, -1)
    run.core.now += FOUNDER_PATIENCE_S
    assert run.goal(bob, -1)[0] == Goal.FOUND
    bobs = replace(NOWHERE, version=0, digest=OTHER)
    assert ann.standings[0].verified
    assert run.goal(bob, fragments=(bobs,)) == (Goal.TRAIN, "it founded version 0")
    assert not ann.standings[0].verified, "no round may open with what she holds before she was heard again"
    assert run.goal(ann, 0)[0] == Goal.SYNC
    assert run.core.ledger.books[0].digests == {0: OTHER}
    assert not any(isinstance(each, Struck) for each in run.written), "it may have been slow"


def test_P3_who_gets_the_initial_state_again_and_again_makes_nobody_s_turn_longer() -> None:
    """A liar with a friend: it says that it holds it, and then that it does not, and so on."""
    run = Guide(None)
    ann, bob, cid, _ = map(run.comes, ("ann", "bob", "cid", "dan"))
    for _ in range(4):
        run.tick(ann, 0)
        run.tick(bob, 0)
        assert run.goal(cid, -1)[0] == Goal.SYNC
        run.core.now += FOUNDER_PATIENCE_S / 4
        run.tick(bob, -1)
    run.core.now += 0.1
    assert run.goal(cid, -1) == (Goal.WAIT, "bob gives the run its initial state")
    run.core.now += FOUNDER_PATIENCE_S + 1
    run.tick(bob, -1)
    assert run.goal(cid, -1)[0] == Goal.FOUND


def test_a_founder_stays_while_others_get_its_state_and_for_as_long_as_that_takes() -> None:
    run = Guide(None)
    ann, bob, cid, dan = map(run.comes, ("ann", "bob", "cid", "dan"))
    run.tick(ann, 0)
    run.core.ledger.model = MODEL
    each_s = 4 * MODEL.chunk_count * MODEL.chunk_elements / FOUNDER_LEAST_BYTES_S
    run.core.now += FOUNDER_PATIENCE_S + 3 * each_s - 0.1
    assert run.goal(cid, -1)[0] == Goal.SYNC, "three wait for it"
    run.tick(bob, 0)
    run.core.now += 0.2
    assert run.goal(cid, -1)[0] == Goal.SYNC, "bob got it"
    run.core.now += FOUNDER_PATIENCE_S + 2 * each_s
    assert run.goal(cid, -1)[0] == Goal.FOUND
    assert run.goal(dan, -1)[0] == Goal.WAIT
    run.tick(ann, 0)
    run.core.now += FOUNDER_PATIENCE_S / 2
    run.tick(bob, 0)
    run.core.now += FOUNDER_PATIENCE_S / 2
    assert run.goal(cid, -1)[0] == Goal.FOUND, "those whose turn was over do not get in its way"


@pytest.mark.parametrize("least", [1, 3])
def test_P6_who_gets_no_state_costs_most_of_a_run_nothing_of_its_first_round(least: int) -> None:
    """A broken line, or a liar: the others have the state, train, and have not made a round yet."""
    run = Guide(None)
    run.core.terms = Terms(run.core.manifest.model_copy(update={"run": RunSection(min_peers=least)}))
    ann, bob, cid = map(run.comes, ("ann", "bob", "cid"))
    run.tick(ann, 0)
    run.tick(bob, 0)
    run.tick(cid, -1)
    run.core.now += FOUNDER_PATIENCE_S
    if least > 2:
        assert run.goal(cid, -1)[0] == Goal.FOUND, "without it there is no round"
        return
    assert (run.goal(cid, -1)[0], run.goal(ann, 0)[0]) == (Goal.SYNC, Goal.TRAIN)
    run.core.now += FIRST_ROUND_S - FOUNDER_PATIENCE_S
    assert run.goal(cid, -1)[0] == Goal.FOUND


def test_whose_turn_was_over_begins_like_all_others_when_the_run_has_learned_something() -> None:
    run = Guide(None)
    ann, bob = run.comes("ann"), run.comes("bob")
    run.tick(ann, -1)
    run.core.now += FOUNDER_PATIENCE_S
    run.tick(bob, 0)
    assert run.goal(ann, -1)[0] == Goal.SYNC
    run.commits()
    run.tick(bob, 1)
    run.core.ledger.books[0].version = 0  # the host went back to the beginning
    run.core.ledger.books[0].digests.clear()
    assert run.goal(ann, -1)[0] == Goal.FOUND, "the oldest"


def test_of_who_comes_and_goes_nothing_is_kept_for_founding_once_the_run_has_learned() -> None:
    """Strangers with ever new identities must not make it grow."""
    run = Guide(1)
    for number in range(20):
        run.hears(run.comes(f"guest{number}"), -1)
    assert not run.tick_builder.version_zero._unheard


def test_P20_what_was_learned_takes_every_turn_away() -> None:
    run = Guide(1)
    ann, bob = run.comes("ann"), run.comes("bob")
    run.tick(ann, 1)
    run.tick(bob, -1)
    run.core.now += 10 * FOUNDER_PATIENCE_S
    assert run.goal(bob, -1)[0] == Goal.SYNC


# ---- where a member is, and what it is to do -----------------------------------------------------------------


def test_who_holds_the_newest_version_trains_and_its_voice_counts_from_now_on() -> None:
    run = Guide(3)
    ann = run.comes("ann")
    run.hears(ann, 3)
    standing = ann.standings[0]
    assert (standing.verified, standing.vouched, ann.told.state) == (True, True, PeerState.INNER)
    assert run.core.ledger.books[0].vouched == {ann.peer}


@pytest.mark.parametrize("nonce_of", [None, 2])
def test_P4_who_names_the_runs_digest_and_shows_nothing_is_not_taken_to_hold_it(nonce_of: int | None) -> None:
    """Every tick tells the digest: an echo of it, or what was shown of an older version, proves nothing."""
    run = Guide(3)
    ann = run.comes("ann")
    beat = run.says(ann, fragments=holding(3))
    nonce = run.core.ledger.nonce_of(0, nonce_of) if nonce_of is not None else b""
    shown = shown_under(nonce, digest_of(3)) if nonce else b""
    said = replace(beat.fragments[0], shown=shown)
    assert said.digest == run.core.ledger.books[0].digests[3]
    assert run.tick_builder.on_beat(ann, replace(beat, fragments=(said,))) is None
    assert not ann.standings[0].verified and ann.peer not in run.core.ledger.books[0].vouched
    assert run.tick_builder.on_beat(ann, beat) is None
    assert ann.standings[0].verified


def test_who_holds_an_older_version_of_the_runs_is_vouched_for_and_not_verified() -> None:
    run = Guide(3)
    ann, bob = run.comes("ann"), run.comes("bob")
    run.hears(ann, 3)
    assert run.goal(bob, 2) == (Goal.SYNC, "it holds version 2, the run is at 3")
    assert (bob.standings[0].verified, bob.standings[0].vouched) == (False, True)


def test_who_lacks_a_version_that_nobody_has_waits_and_is_told_for_what() -> None:
    run = Guide(3)
    ann = run.comes("ann")
    # It was just committed, and whoever made it is at it: that is no reason to speak of going back.
    assert run.goal(ann, 2) == (Goal.SYNC, "it holds version 2, the run is at 3")
    run.core.now += run.manifest.net.dead_after_s
    assert run.goal(ann, 2)[0] == Goal.WAIT
    assert run.goal(ann, 2) == (Goal.WAIT, "nobody online has version 3: waiting for a peer that has it")
    assert ann.told.state == PeerState.WAITING


def test_a_member_that_knows_more_than_the_journal_waits_for_the_newer_journal() -> None:
    run = Guide(3)
    goal, reason = run.goal(run.comes("ann"), 4)
    assert (goal, reason) == (
        Goal.WAIT,
        "it holds version 4, the journal ends at 3: restore the newer journal",
    )


def test_a_version_whose_digest_is_not_settled_is_trained_from() -> None:
    run = Guide(3)
    del run.core.ledger.books[0].digests[3]
    ann = run.comes("ann")
    assert run.goal(ann, 3) == (Goal.TRAIN, "waiting for the digest of version 3 to be settled")
    assert not ann.verified


def test_a_member_is_told_of_its_least_advanced_fragment() -> None:
    run = Guide(3, 5)
    ann, bob = run.comes("ann"), run.comes("bob")
    assert run.goal(ann, 3, 5)[0] == Goal.TRAIN
    assert run.goal(bob, 3, 4) == (Goal.SYNC, "it holds version 4 of fragment 1, the run is at 5")
    run.loses(ann)
    assert run.goal(bob, 2, -1)[0] == Goal.WAIT


def test_what_a_member_says_in_an_older_era_counts_for_nothing() -> None:
    run = Guide(3)
    run.core.write(RolledBack(versions=(2,), reason="lost"))
    let_all_be_shown(run.core.ledger)
    ann = run.comes("ann")
    assert run.tick(ann, 2, era=0).era == 1 and not ann.verified
    assert run.goal(ann, 2, era=1)[0] == Goal.TRAIN and ann.verified


def test_a_held_run_says_alone_when_no_round_is_in_flight() -> None:
    run = Guide(3)
    ann, bob = run.comes("ann"), run.comes("bob")
    run.core.write(Paused(reason="the host sleeps"))
    assert run.goal(ann, 3) == (
        Goal.ALONE,
        "the host paused the run (the host sleeps); training goes on alone",
    )
    assert run.goal(bob, 2)[0] == Goal.SYNC, "who holds an older state takes the newest all the same"
    run.opens(ann)
    assert run.goal(ann, 3)[0] == Goal.TRAIN, "the round in flight is waited for"


def test_whose_data_set_is_another_one_must_go() -> None:
    run = Guide(3)
    run.core.write(DataFixed(samples=100, peer=peer_of("ann")))
    run.core.ledger.leases.settled = True
    bob = run.comes("bob")
    why = run.tick_builder.on_beat(bob, run.says(bob, samples=99))
    assert why and why.startswith("data set has 99 samples here, 100 samples in the run; use the same data")
    assert run.told(bob) == []


def test_the_tick_answers_this_beat_and_says_when_it_was_heard() -> None:
    run = Guide(0)
    ann = run.comes("ann")
    run.core.now = 12.5
    tick = run.tick(ann, 0, seq=7)
    assert (tick.answers, tick.heard_s) == (7, 12.5)


def test_since_when_a_member_is_ready_is_measured_from_the_first_beat_that_says_so() -> None:
    run = Guide(1)
    ann = run.comes("ann")
    ready = (replace(holding(1)[0], ready=True),)
    since = []
    for fragments in (ready, ready, holding(1), ready, (replace(ready[0], digest=OTHER),)):
        run.core.now += 1.0
        run.hears(ann, fragments=fragments)
        since.append(ann.standings[0].ready_since)
    assert since == [1.0, 1.0, None, 4.0, None]


# ---- the end -------------------------------------------------------------------------------------------------


def test_who_is_done_stays_a_while_for_those_that_are_not() -> None:
    run = Guide(ROUNDS)
    ann, bob, cyd = run.comes("ann"), run.comes("bob"), run.comes("cyd")
    run.drivers[0]._committed_at = run.core.now = 100.0
    run.hears(bob, ROUNDS - 1)
    told = f"fetching version {ROUNDS}"
    assert run.goal(ann, ROUNDS) == (Goal.WAIT, f"the run is complete; 2 peers are still {told}")
    run.loses(cyd)
    assert run.goal(ann, ROUNDS) == (Goal.WAIT, f"the run is complete; 1 peer is still {told}")
    assert run.goal(bob, ROUNDS - 1)[0] == Goal.SYNC
    run.core.now += FINISH_GRACE_S - 0.1
    assert run.goal(ann, ROUNDS)[0] == Goal.WAIT
    run.core.now += 0.1
    assert run.goal(ann, ROUNDS) == (Goal.FINISH, f"the run is complete: {ROUNDS} rounds committed")


def test_with_everybody_at_the_last_version_nobody_waits() -> None:
    run = Guide(ROUNDS)
    ann, bob = run.comes("ann"), run.comes("bob")
    assert run.goal(ann, ROUNDS)[0] == Goal.WAIT, "bob has said nothing yet"
    assert run.goal(bob, ROUNDS)[0] == Goal.FINISH
    assert run.goal(ann, ROUNDS)[0] == Goal.FINISH


# ---- P4: a digest that differs -------------------------------------------------------------------------------


def test_P4_whose_digest_differs_is_quarantined_struck_once_and_takes_the_runs_state_again() -> None:
    run = Guide(3)
    ann, eve = run.comes("ann"), run.comes("eve")
    run.hears(ann, 3)
    differs = replace(NOWHERE, version=3, digest=OTHER)
    for _ in range(2):
        goal, reason = run.goal(eve, fragments=(differs,))
        assert (goal, reason) == (
            Goal.SYNC,
            "its state differs from the run's; it takes the run's state again",
        )
        assert (eve.quarantined, eve.verified, eve.told.state) == (True, False, PeerState.QUARANTINED)
    assert run.core.offences.struck == [eve.peer], "one thing went wrong"
    assert run.goal(eve, 3)[0] == Goal.TRAIN
    assert not eve.quarantined and eve.told.state == PeerState.INNER


def test_P4_a_strike_names_the_reason_and_people_hear_of_the_quarantine() -> None:
    run = Guide(3)
    eve = run.comes("eve")
    run.tick_builder.on_beat(eve, run.says(eve, fragments=(replace(NOWHERE, version=2, digest=OTHER),)))
    assert [event for _, event in run.core.events] == [
        "eve is quarantined: its digest differs from the run's",
        "eve gets a strike: its state differs from the run's",
    ]
    struck = [record for record in run.records() if isinstance(record, Struck)]
    assert [(each.peer, each.reason) for each in struck] == [(eve.peer, "its state differs from the run's")]


def test_another_version_0_is_nobodys_fault() -> None:
    """It may be of an earlier beginning of this run."""
    run = Guide(1)
    eve = run.comes("eve")
    run.hears(eve, fragments=(replace(NOWHERE, version=0, digest=OTHER),))
    assert eve.quarantined and run.core.offences.struck == []


def test_P4_a_difference_in_several_fragments_is_one_strike() -> None:
    run = Guide(3, 3)
    eve = run.comes("eve")
    run.hears(eve, fragments=tuple(replace(NOWHERE, fragment=at, version=3, digest=OTHER) for at in range(2)))
    assert run.core.offences.struck == [eve.peer]


# ---- what is repeated when a beat lacks it -------------------------------------------------------------------


def test_the_plan_is_repeated_to_who_is_not_in_the_round_or_in_an_older_epoch_of_it() -> None:
    run = Guide(1)
    ann, bob = run.comes("ann"), run.comes("bob")
    flight = run.opens(ann)
    number = flight.plan.round_no
    for heard, repeated in (((0, 0), True), ((number, 0), True), ((number, 1), False)):
        said = replace(holding(1)[0], round_no=heard[0], epoch=heard[1])
        found = run.hears(ann, fragments=(said,))[1:]
        assert kinds(found) == ([OpenRound] if repeated else [])
        assert not repeated or found[0].plan == flight.plan  # type: ignore[union-attr]
    assert kinds(run.hears(bob, 1)) == [Tick], "the round is without it"


def test_the_decision_is_repeated_to_who_has_an_older_one() -> None:
    run = Guide(1)
    ann = run.comes("ann")
    flight = run.opens(ann)
    number = flight.plan.round_no
    flight.decision = Decision(number, 2, (1.0,), {})
    there = replace(holding(1)[0], round_no=number, epoch=1)
    assert kinds(run.hears(ann, fragments=(replace(there, decision_no=1),))) == [Tick, Decided]
    assert kinds(run.hears(ann, fragments=(replace(there, decision_no=2),))) == [Tick]
    assert kinds(run.hears(ann, fragments=holding(1))) == [Tick, OpenRound, Decided]


@pytest.mark.parametrize("version", [-1, 0])
def test_a_round_is_not_told_to_who_can_not_be_in_it_now(version: int) -> None:
    run = Guide(1)
    ann = run.comes("ann")
    run.opens(ann)
    assert kinds(run.hears(ann, version)) == [Tick]


def test_P7_a_round_is_not_told_to_another_process_than_the_one_that_it_counts_on() -> None:
    run = Guide(1)
    run.opens(run.comes("ann"))
    again = run.enters("ann", restarts=1)
    found = run.hears(again, 1)
    assert kinds(found) == [Tick] and isinstance(found[0], Tick)
    assert found[0].fragments[0].round_no == 0


def test_the_tick_says_which_round_counts_on_the_member_and_what_was_heard_of_it() -> None:
    run = Guide(1)
    ann, bob = run.comes("ann"), run.comes("bob")
    flight = run.opens(ann)
    ann.standings[0].progress_seen = 5
    part = run.part(ann, 1)
    assert (part.round_no, part.sent_seen, part.progress_seen) == (flight.plan.round_no, False, 5)
    assert run.part(bob, 1).round_no == 0


def test_commits_that_a_member_lacks_are_told_to_who_can_use_them() -> None:
    run = Guide(3)
    ann, eve = run.comes("ann"), run.comes("eve")

    def commits(member: Member, version: int, digest: bytes) -> list[int]:
        said = replace(NOWHERE, version=version, digest=digest, need=(2, 3, 9))
        found = run.hears(member, fragments=(said,))
        return [each.commit.version for each in found if isinstance(each, Committed)]

    assert commits(ann, 1, digest_of(1)) == [2, 3], "nobody knows a version 9"
    assert commits(ann, -1, b"") == [2, 3], "it holds nothing: there is nothing that could go wrong"
    assert commits(eve, 1, OTHER) == [], "it would roll results onto a state that is not the run's"


# ---- donors --------------------------------------------------------------------------------------------------


def test_donors_are_who_is_verified_and_never_the_asker() -> None:
    run = Guide(3)
    ann, bob, cyd = run.comes("ann"), run.comes("bob"), run.comes("cyd")
    run.hears(bob, 3)
    run.hears(cyd, 2)
    assert run.part(ann, -1).donors == (bob.peer,)
    run.hears(ann, 3)
    assert run.part(bob, 3).donors == (ann.peer,)
    assert run.part(cyd, -1).donors == (ann.peer, bob.peer)
    run.loses(bob)
    assert run.part(cyd, -1).donors == (ann.peer,)


def test_who_made_the_newest_version_is_asked_before_it_has_shown_it() -> None:
    run = Guide(2)
    run.commits({peer_of("bob"): (), peer_of("cyd"): ()})
    ann, bob, cyd = run.comes("ann"), run.comes("bob"), run.comes("cyd")
    run.hears(bob, 2)
    run.hears(cyd, 1)
    dan = run.comes("dan")
    run.hears(dan, 2)
    assert run.part(ann, -1).donors == (bob.peer,), "cyd came back with too little, dan did not make it"


def test_who_can_not_be_dialled_asks_those_that_can() -> None:
    run = Guide(3)
    ann, bob = run.comes("ann"), run.comes("bob", dialable=False)
    run.hears(ann, 3)
    run.hears(bob, 3)
    cyd, dan = run.comes("cyd", dialable=False), run.comes("dan")
    assert run.part(cyd, -1).donors == (ann.peer,)
    assert run.part(dan, -1).donors == (ann.peer, bob.peer)


def test_where_all_donors_can_not_be_dialled_and_nor_can_the_asker_it_waits() -> None:
    run = Guide(3)
    run.hears(run.comes("ann", dialable=False), 3)
    assert run.goal(run.comes("bob", dialable=False), -1)[0] == Goal.WAIT
    assert run.goal(run.comes("cyd"), -1)[0] == Goal.SYNC


def test_no_more_donors_are_told_than_a_tick_has_room_for() -> None:
    run = Guide(3)
    members = [run.comes(f"{number:02}") for number in range(DONORS_TOLD + 3)]
    for member in members:
        run.hears(member, 3)
    asker = members[0]
    told = run.part(asker, 3).donors
    assert len(told) == DONORS_TOLD and asker.peer not in told


def test_where_not_all_donors_are_told_others_are_told_later_or_ids_that_come_first_could_starve_a_joiner() -> (
    None
):
    run = Guide(3)
    members = [run.comes(f"m{number:02}") for number in range(2 * DONORS_TOLD + 5)]
    for member in members:
        run.hears(member, 3)
    asker = run.comes("zoe")
    named: set[str] = set()
    for turn in range(4):
        run.core.now = turn * DONORS_TURN_S
        told = run.part(asker, -1).donors
        assert len(told) == DONORS_TOLD
        named |= set(told)
    assert named == {member.peer for member in members}


def test_a_crowd_of_newcomers_does_not_ask_the_same_few_donors() -> None:
    run = Guide(3)
    members = [run.comes(f"{number:03}a") for number in range(150)]
    for member in members:
        run.hears(member, 3)
    newcomers = [run.comes(f"{number:03}b") for number in range(150)]
    run.core.now += DONORS_CROWD_S
    asked = Counter(peer for newcomer in newcomers for peer in run.part(newcomer, -1).donors)
    fewest, most = min(asked.values()), max(asked.values())
    assert set(asked) == {member.peer for member in members} and most <= 1.5 * fewest


def test_who_has_a_thin_line_is_not_asked_where_others_have_it_too() -> None:
    """It would still carry that when the next round begins, and the round waits for what it sends there."""
    run = Guide(3)
    members = [run.comes(f"{number:02}") for number in range(12)]
    for member in members:
        thin = member in members[:3]
        run.hears(member, 3, up_bytes_per_s=1_250_000 if thin else 6_000_000, rough=False)
    fit = tuple(member.peer for member in run.core.members.alive.values() if member not in members[:3])
    assert set(run.part(run.comes("zoe"), -1).donors) == set(fit)
    assert set(run.part(run.comes("yan", dialable=False), -1).donors) == set(fit)


def test_a_few_donors_are_always_the_same() -> None:
    run = Guide(3)
    for name in ("ann", "bob"):
        run.hears(run.comes(name), 3)
    asker = run.comes("zoe")
    first = run.part(asker, -1).donors
    run.core.now += DONORS_TURN_S
    assert run.part(asker, -1).donors == first, "what is on its way from them is not asked for again"


def test_in_a_crowd_the_list_of_donors_may_be_a_little_old() -> None:
    run = Guide(3)
    members = [run.comes(f"{number:02}") for number in range(CROWD + 1)]
    asker = run.comes("zz")
    run.hears(members[0], 3)
    assert run.part(asker, -1).donors == (members[0].peer,)
    run.hears(members[1], 3)
    assert run.part(asker, -1).donors == (members[0].peer,)
    run.core.now += DONORS_CROWD_S
    assert run.part(asker, -1).donors == (members[0].peer, members[1].peer)


# ---- fellows: others that fetch the state --------------------------------------------------------------------


def test_who_fetches_the_state_is_told_who_else_does_and_nobody_that_has_it_is() -> None:
    run = Guide(3)
    ann, bob, cyd = run.comes("ann"), run.comes("bob"), run.comes("cyd")
    run.hears(ann, 3)
    run.hears(bob, -1)
    assert run.part(cyd, -1).fellows == (bob.peer,)
    assert run.part(bob, -1).fellows == (cyd.peer,)
    assert run.part(ann, 3).fellows == (), "she lacks nothing, and is asked as a donor"
    run.hears(bob, 3)
    assert run.part(cyd, -1).fellows == () and run.part(cyd, -1).donors == (ann.peer, bob.peer)


def test_of_two_fellows_one_can_be_dialled() -> None:
    run = Guide(3)
    run.hears(run.comes("ann"), 3)
    bob, cyd = run.comes("bob", dialable=False), run.comes("cyd", dialable=False)
    dan = run.comes("dan")
    assert run.part(bob, -1).fellows == (dan.peer,)
    assert set(run.part(dan, -1).fellows) == {bob.peer, cyd.peer}


def test_in_a_crowd_each_is_told_as_many_as_are_told_of_it_and_pieces_reach_all_in_few_steps() -> None:
    peers = [f"peer {number:04}" for number in range(1000)]
    told = {peer: in_turn_from(peers, peer)[:FELLOWS_TOLD] for peer in peers}
    assert {len(names) for names in told.values()} == {FELLOWS_TOLD}
    assert set(Counter(name for names in told.values() for name in names).values()) == {FELLOWS_TOLD}
    reached, steps = {peers[0]}, 0
    while len(reached) < len(peers):
        reached |= {other for peer in reached for other in told[peer]}
        steps += 1
    assert steps <= 10
    few = peers[:FELLOWS_TOLD]
    assert all(set(in_turn_from(few, peer)) == set(few) - {peer} for peer in few), (
        "where all can be told, all are"
    )


# ---- digests and proofs --------------------------------------------------------------------------------------


def test_a_member_is_told_the_newest_digests_and_one_with_nothing_also_those_of_checkpoints() -> None:
    newest = 14
    run = Guide(newest)
    ann = run.comes("ann")
    recent = tuple((v, digest_of(v)) for v in range(newest - DIGESTS_TOLD + 1, newest + 1))
    assert run.part(ann, newest).digests == recent
    saved = tuple((v, digest_of(v)) for v in range(2, newest - DIGESTS_TOLD + 1, 2))
    assert run.part(ann, -1).digests == saved[-SAVED_TOLD:] + recent


def test_of_a_version_that_belongs_into_a_checkpoint_its_holder_is_given_a_proof() -> None:
    for version, proven in ((3, False), (4, True)):
        run = Guide(version)
        signed: list[bytes] = []
        run.core.prove = lambda statement, signed=signed: (signed.append(statement), b"signed")[1]  # type: ignore[misc]
        ann, bob = run.comes("ann"), run.comes("bob")
        assert [run.part(ann, version).proof for _ in range(2)] == [b"signed" if proven else b""] * 2
        assert run.part(bob, -1).proof == b"", "it does not hold it"
        assert len(signed) == proven, "once"


# ---- the roster ----------------------------------------------------------------------------------------------


def test_the_roster_is_told_once_and_again_when_somebody_comes_or_goes() -> None:
    run = Guide(0)
    ann = run.comes("ann")
    tick = run.tick(ann, 0)
    assert tick.roster == (ann.contact,)
    assert run.tick(ann, 0, roster_no=tick.roster_no).roster is None
    bob = run.comes("bob")
    first = tick.roster_no
    tick = run.tick(ann, 0, roster_no=first)
    assert (tick.roster, tick.roster_since, tick.roster_gone) == ((bob.contact,), first, ())
    run.loses(bob)
    tick = run.tick(ann, 0, roster_no=tick.roster_no)
    assert (tick.roster, tick.roster_gone) == ((), (bob.peer,))
    tick = run.tick(ann, 0, roster_no=first)
    assert (tick.roster, tick.roster_since, tick.roster_gone) == ((), first, (bob.peer,))


def test_in_a_crowd_the_roster_is_told_with_pauses() -> None:
    run = Guide(0)
    members = [run.comes(f"{number:02}") for number in range(CROWD)]
    ann = members[0]
    assert run.tick(ann, 0).roster is not None and run.tick(ann, 0).roster is not None, "no crowd: no pause"
    members.append(run.comes("zz"))
    pause_s = len(members) / ROSTER_ENTRIES_PER_S
    run.core.now += pause_s - 0.01
    assert run.tick(ann, 0).roster is None
    run.core.now += 0.01
    assert run.tick(ann, 0).roster == run.core.members.roster()
    assert run.tick(ann, 0).roster is None
    assert run.tick(members[1], 0).roster is not None, "each one has its own pause"


# ---- everybody is looked at again ----------------------------------------------------------------------------


def test_when_a_digest_is_settled_everybody_is_told_at_once() -> None:
    run = Guide(2)
    ann, bob, cyd = run.comes("ann"), run.comes("bob"), run.comes("cyd")
    run.hears(ann, 2)
    run.hears(bob, 2)
    run.commits()
    for member in (ann, bob):
        run.says(member, fragments=holding(3))
    run.effects()
    run.tick_builder.recheck_all()
    ticks = [each.peer for each in run.effects() if isinstance(getattr(each, "message", None), Tick)]
    assert ticks == [ann.peer, bob.peer], "cyd has said nothing that could be answered"
    assert ann.verified and bob.verified and not cyd.verified


def test_in_a_crowd_only_those_that_rounds_are_made_of_are_told_at_once() -> None:
    run = Guide(2)
    members = [run.comes(f"{number:02}") for number in range(CROWD + 1)]
    for member in members:
        run.says(member, fragments=holding(2))
    run.commits({members[3].peer: ()})
    run.opens(members[5])
    run.effects()
    run.tick_builder.recheck_all()
    ticks = {each.peer for each in run.effects() if isinstance(getattr(each, "message", None), Tick)}
    assert ticks == {members[3].peer, members[5].peer}
