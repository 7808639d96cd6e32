"""What the parts of the run machine share: what is written counts at once, what is said comes after it, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from farflung.coordinator.ledger.records import CommittedRound, HowMerged, Paused, Resumed, Started, Struck
from farflung.coordinator.modes.registry import CoordinatorMode
from farflung.coordinator.run.core import EVENTS_SHOWN, Offences
from farflung.coordinator.run.effects import Forbid, Note, Tell, Write
from farflung.protocol.manifest import Manifest, RoundSection, RunSection
from farflung.protocol.messages import Aborted
from rig.made_run import MadeRun, peer_of


def test_what_is_written_counts_at_once_and_leaves_before_what_follows_from_it() -> None:
    run = MadeRun()
    run.core.write(Paused(reason="a test"))
    assert run.core.ledger.paused == Paused(reason="a test"), "folded before anything leaves"
    run.core.do(Forbid(b"key"))
    run.core.note("paused")
    run.core.write(Resumed())
    assert run.core.take_effects() == [
        Write(Paused(reason="a test")), Forbid(b"key"), Note("paused"), Write(Resumed()),
    ]  # fmt: skip
    assert run.core.take_effects() == [], "each leaves once"


def test_P9_the_trust_of_a_suspect_begins_anew() -> None:
    run = MadeRun()
    ann, bob = peer_of("ann"), peer_of("bob")
    for _ in range(3):
        run.commits({ann: (), bob: ()})
    book = run.core.ledger.books[0]
    assert (book.trust[ann], book.trust[bob]) == (3, 3)
    commit = replace(book.commits[book.version], version=book.version + 1, round_no=9)
    run.core.write(
        CommittedRound(
            commit=commit,
            used={},
            excluded={},
            tokens=10,
            steps=1,
            loss=1.0,
            seconds=1.0,
            tx_bytes=0,
            merged=HowMerged(suspects=(bob,)),
        )
    )
    assert (book.trust[ann], book.trust[bob]) == (4, 0), "though its work was in, shortened"


def test_each_member_is_told_things_in_numbered_order_of_its_own() -> None:
    run = MadeRun()
    ann, bob = run.enters("ann"), run.enters("bob")
    run.effects()
    for member in (ann, ann, bob, ann):
        run.core.tell(member, Aborted, round_no=1, reason="")
    told = [each for each in run.effects() if isinstance(each, Tell)]
    assert [(each.peer, each.message.seq) for each in told] == [
        (ann.peer, 1), (ann.peer, 2), (bob.peer, 1), (ann.peer, 3),
    ]  # fmt: skip
    assert {each.session for each in told if each.peer == ann.peer} == {ann.session}
    assert all(each.message.session == each.session for each in told)


# ---- texts for people ----------------------------------------------------------------------------------------


def test_peers_that_are_known_have_names_and_texts_stay_as_they_were_told() -> None:
    run = MadeRun()
    run.enters("ann")
    ann, stranger = peer_of("ann"), peer_of("zoe")
    assert (run.core.name(ann), run.core.name(stranger)) == ("ann", stranger)
    run.core.note(f"a host's own words about {ann}")
    assert run.core.events[-1][1] == f"a host's own words about {ann}", "nobody looks for ids in a sentence"


def test_news_go_to_the_log_and_the_dashboard_and_routine_to_the_log_alone() -> None:
    run = MadeRun()
    run.enters("ann")
    run.effects()
    run.core.now = 7.0
    run.core.note(f"{run.core.name(peer_of('ann'))} joined")
    run.core.log(f"{run.core.name(peer_of('ann'))} can be dialled")
    assert run.effects() == [Note("ann joined"), Note("ann can be dialled", routine=True)]
    assert list(run.core.events) == [(7.0, "ann joined")]


def test_the_dashboard_keeps_the_newest_events_alone() -> None:
    run = MadeRun()
    for number in range(EVENTS_SHOWN + 5):
        run.core.note(f"event {number}")
    assert [text for _, text in run.core.events] == [f"event {n}" for n in range(5, EVENTS_SHOWN + 5)]


def test_a_fragment_is_named_only_where_there_are_several() -> None:
    assert MadeRun().core.of(0) == ""
    assert MadeRun(Manifest(round=RoundSection(fragments=2))).core.of(1) == " of fragment 1"


# ---- the run's clock -----------------------------------------------------------------------------------------


def test_the_runs_clock_counts_from_where_the_run_was_when_this_coordinator_started() -> None:
    run = MadeRun()
    run.core.now = run.core.began_at = 5000.0  # the machine was up for that long
    run.core.write(Started(incarnation=2, clock_s=60.0, wall_s=0.0))
    assert run.core.clock_s == 60.0
    run.core.now += 2.5
    assert run.core.clock_s == 62.5


def test_moments_of_this_coordinator_are_told_on_the_runs_clock() -> None:
    """So the time on the screen, and that of events, goes on where the coordinator before was."""
    run = MadeRun()
    run.core.now = run.core.began_at = 5000.0
    run.core.write(Started(incarnation=2, clock_s=2100.0, wall_s=0.0))
    run.core.now = 5010.0
    assert run.core.clock_at(5004.0) == 2104.0 and run.core.clock_s == 2110.0


def test_the_runs_clock_is_never_behind_what_was_written_by_it() -> None:
    run = MadeRun()
    run.core.write(Struck(peer=peer_of("ann"), reason="", at_s=90.0))
    run.core.now = 30.0
    assert run.core.clock_s == 90.0
    run.core.now = 91.0
    assert run.core.clock_s == 91.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6)), max_size=20))
def test_whatever_clocks_do_what_is_written_by_the_runs_clock_is_in_order(
    story: list[tuple[bool, float]],
) -> None:
    """Also over restarts of the coordinator, on machines whose clocks begin anywhere."""
    run, readings = MadeRun(), [0.0]
    for restarts, at in story:
        run.core.now = at
        if restarts:
            run.core.began_at = at
            run.core.write(Started(incarnation=1, clock_s=run.core.ledger.clock.at_start(0.0), wall_s=0.0))
        run.core.strike(peer_of("ann"), "a test")
        readings.append(run.core.clock_s)
    assert readings == sorted(readings)
    struck = [record.at_s for record in run.records() if isinstance(record, Struck)]
    assert struck == sorted(struck)


# ---- strikes -------------------------------------------------------------------------------------------------


class Heard(CoordinatorMode):
    def __init__(self) -> None:
        self.after_events: list[tuple[list[str], list[tuple[str, str]]]] = []

    def after(self, struck: Sequence[str], convicted: Sequence[tuple[str, str]]) -> None:
        self.after_events.append(([*struck], [*convicted]))


def test_a_strike_is_written_and_said_and_then_taken_once() -> None:
    run = MadeRun()
    run.enters("ann")
    run.effects()
    run.core.now, ann = 12.0, peer_of("ann")
    run.core.strike(ann, "it lies" + "." * 300)
    run.core.strike(ann, "again")
    first, _, second, _ = run.effects()
    assert first == Write(Struck(peer=ann, reason="it lies" + "." * 193, at_s=12.0)), "long reasons are cut"
    assert second == Write(Struck(peer=ann, reason="again", at_s=12.0))
    assert [text for _, text in run.core.events][1] == "ann gets a strike: again"
    heard = Heard()
    run.core.modes = (heard,)
    run.core.convict(ann, "proven")
    run.core.follow_up()
    run.core.follow_up()
    assert heard.after_events == [([ann, ann], [(ann, "proven")])], "once"
    run.core.convict(ann, "proven once more")
    run.core.follow_up()
    assert heard.after_events[1:] == [([], [(ann, "proven once more")])], "without a strike"
    assert run.core.offences == Offences()


class Waits(CoordinatorMode):
    def __init__(self, why: str) -> None:
        self.why = why

    def why_wait(self, fragment: int, is_given: bool) -> str:
        return self.why

    def lost(self) -> Mapping[int, str]:
        return {0: self.why} if self.why else {}

    def saved_by(self, fragment: int) -> frozenset[str]:
        return frozenset({f"{self.why}{fragment}"})


def test_a_member_waits_for_what_a_mode_says_and_else_for_a_peer_that_has_it() -> None:
    run = MadeRun()
    of_nobody = "nobody online has version 0: waiting for a peer that has it"
    for modes in ((), (CoordinatorMode(),), (Waits(""),)):
        run.core.modes = modes
        assert (run.core.why_wait(0, is_given=True), run.core.why_wait(0, is_given=False)) == ("", of_nobody)
        assert run.core.lost() == {}
    run.core.modes = (Waits(""), Waits("first"), Waits("second"))
    assert {run.core.why_wait(0, given) for given in (False, True)} == {"first"}, "given or not"
    assert run.core.lost() == {0: "second"} and run.core.saved_by(2) == {"2", "first2", "second2"}


# ---- whether a round may be opened ---------------------------------------------------------------------------


def test_it_is_said_why_no_round_may_be_opened() -> None:
    run = MadeRun()
    assert run.core.held == ""
    run.core.write(Paused(reason=""))
    assert run.core.held == "the host paused the run; training goes on alone"
    run.core.write(Paused(reason="the disk is full"))
    assert run.core.held == "the host paused the run (the disk is full); training goes on alone"
    run.core.draining = True
    assert "about to end" in run.core.held, "who resumes a run that is to end opens no round"
    run.core.draining = False
    run.core.write(Resumed())
    assert run.core.held == ""


def test_a_run_is_finished_when_its_least_advanced_fragment_is() -> None:
    run = MadeRun(Manifest(run=RunSection(rounds=2), round=RoundSection(fragments=2)))
    for fragment in (0, 0, 0, 1):
        run.commits(fragment=fragment)
        assert not run.core.finished
    run.commits(fragment=1)
    assert run.core.finished
