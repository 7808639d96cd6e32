"""P7: samples are leased without overlap, acknowledged by the commits that used them, and leased again when lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import CutShort, DataFixed, Granted, Released, StreamEnded
from farflung.coordinator.run.lease_desk import (
    BACK_WITHIN_S,
    ENDS_AFTER_DEAD,
    LEASES_PER_PEER,
    RELEASE_AFTER_DEAD,
    LeaseDesk,
)
from farflung.coordinator.run.membership import Member
from farflung.protocol.errors import Excluded, ExclusionCause
from farflung.protocol.manifest import DataSection, Manifest, RoundSection, RunSection
from farflung.protocol.messages import UNKNOWN_LENGTH, Lease, Sent
from farflung.protocol.round_words import Used
from farflung.protocol.states import PeerEvent
from rig.made_run import MadeRun, holding, peer_of

SAMPLES, LEASE_SAMPLES = 100, 8
SENT_TO_16 = Sent(
    seat=0,
    counted=b"",
    session=bytes(16),
    seq=1,
    round_no=2,
    hashes=bytes(64),
    tokens=8,
    steps=8,
    loss=None,
    used=(Used(2, 16),),
    signature=b"",
)


class Lender(MadeRun):
    """A run that lends: what each beat of a member is answered with."""

    def __init__(
        self, fragments: int = 1, samples: int = SAMPLES, lease_samples: int = LEASE_SAMPLES
    ) -> None:
        data = DataSection(lease_samples=lease_samples, batch=1)
        rules = RoundSection(fragments=fragments)
        super().__init__(Manifest(data=data, round=rules, run=RunSection(rounds=1000)))
        self.lease_desk = LeaseDesk(self.core, self.drivers)
        self.patience_s = RELEASE_AFTER_DEAD * self.manifest.net.dead_after_s
        self.lease_desk.reclaim()  # nobody is awaited from before this coordinator
        if samples:
            self.core.write(DataFixed(samples=samples, peer=peer_of("ann")))

    @property
    def leases(self):  # type: ignore[no-untyped-def]
        return self.core.ledger.leases

    def beats(self, member: Member, **changes: object) -> tuple[tuple[Lease, ...] | None, tuple[int, ...]]:
        here = holding(*[book.version for book in self.core.ledger.books])
        return self.lease_desk.lease(member, self.says(member, **{"fragments": here, **changes}))

    def names(self, member: Member, samples: int, data: bytes = b"") -> str | None:
        return self.lease_desk.words.hear(member, self.says(member, samples=samples, data=data))

    def waits(self, seconds: float) -> None:
        self.core.now += seconds
        self.lease_desk.reclaim()

    def released(self) -> list[tuple[int, ...]]:
        return [record.leases for record in self.records() if isinstance(record, Released)]


def ranges(leases: tuple[Lease, ...] | None) -> list[tuple[int, int, int]]:
    assert leases is not None
    return [(each.lease, each.start, each.stop) for each in leases]


# ---- granting ------------------------------------------------------------------------------------------------


def test_a_member_is_lent_what_it_wants_in_whole_leases_and_no_sample_twice() -> None:
    run = Lender()
    ann, bob = run.enters("ann"), run.enters("bob")
    assert ranges(run.beats(ann, want=10)[0]) == [(1, 0, 10)], "more than a lease has: one lease of that size"
    assert ranges(run.beats(bob, want=1)[0]) == [(2, 10, 18)], "fewer: a whole one, as the run wants it"
    assert ranges(run.beats(ann, want=8, have=(1,))[0]) == [(1, 0, 10), (3, 18, 26)]
    granted = [record for record in run.records() if isinstance(record, Granted)]
    assert [(each.peer, each.lease.lease) for each in granted] == [
        (ann.peer, 1),
        (bob.peer, 2),
        (ann.peer, 3),
    ]


def test_what_is_on_its_way_to_a_member_is_not_lent_once_more() -> None:
    """Its next beat may have left before the answer to the last one came."""
    run = Lender()
    ann = run.enters("ann")
    first = run.beats(ann, want=8)
    assert run.beats(ann, want=8) == first, "told again, for the answer may be lost"
    assert ranges(run.beats(ann, want=12)[0]) == [(1, 0, 8), (2, 8, 20)]


def test_a_member_that_knows_its_leases_is_not_told_them_unless_it_is_unsure() -> None:
    run = Lender()
    ann = run.enters("ann")
    known, _ = run.beats(ann, want=8)
    assert run.beats(ann, have=(1,)) == (None, ())
    assert run.beats(ann, have=(1,), unsure=True) == (known, ())


@pytest.mark.parametrize("lacks", ["the data's length", "the run's state", "rounds to come"])
def test_nothing_is_lent_to_who_could_not_have_it_committed(lacks: str) -> None:
    run = Lender(samples=0 if lacks == "the data's length" else SAMPLES)
    ann = run.enters("ann", verified=lacks != "the run's state")
    if lacks == "rounds to come":
        run.core.ledger.books[0].version = run.manifest.run.rounds
    assert run.beats(ann, want=8) == (None, ())


def test_who_is_about_to_leave_keeps_what_it_has_and_is_lent_nothing_more() -> None:
    run = Lender()
    ann = run.enters("ann")
    held, _ = run.beats(ann, want=8)
    assert run.beats(ann, want=8, have=(1,), leaving=True) == (None, ())
    assert run.beats(ann, want=8, leaving=True)[0] == held
    assert len(run.leases.held) == 1


@pytest.mark.parametrize(("fragments", "most"), [(1, LEASES_PER_PEER), (64, 16)])
def test_a_member_holds_so_few_leases_that_they_fit_into_one_message(fragments: int, most: int) -> None:
    run = Lender(fragments, samples=100_000, lease_samples=1)
    ann = run.enters("ann")
    for _ in range(most + 3):
        run.beats(ann, want=1, have=tuple(run.leases.of(ann.peer)))
    assert len(run.leases.of(ann.peer)) == most


# ---- acknowledged by commits ---------------------------------------------------------------------------------


def test_a_commit_acknowledges_what_it_used_and_the_rest_stays_with_its_holder() -> None:
    run = Lender()
    ann = run.enters("ann")
    run.beats(ann, want=8)
    run.commits({ann.peer: (Used(1, 5),)})
    assert run.beats(ann, have=(1,), unsure=True)[0] == (Lease(1, 0, 0, 8, 5),)
    run.commits({ann.peer: (Used(1, 8),)})
    assert run.beats(ann, have=(1,)) == (None, (1,)), "all of it is committed: the lease is over"
    assert (run.leases.committed_samples, run.leases.held_samples) == (8, 0)


def test_who_has_not_heard_of_the_last_commit_keeps_the_leases_that_it_ended() -> None:
    """Else it would believe that its work with them is lost."""
    run = Lender()
    ann = run.enters("ann")
    run.beats(ann, want=8)
    run.commits({ann.peer: (Used(1, 8),)})
    assert run.beats(ann, have=(1,), fragments=holding(0)) == (None, ())
    run.opens(ann)
    assert run.beats(ann, have=(1,)) == (None, ()), "nor while a round may use more of its work"


# ---- lost with their holder ----------------------------------------------------------------------------------


def test_P7_what_a_peer_that_is_lost_for_good_did_not_get_committed_is_lent_to_another() -> None:
    run = Lender()
    ann, bob = run.enters("ann"), run.enters("bob")
    run.beats(ann, want=8)
    run.commits({ann.peer: (Used(1, 5),)})
    run.loses(ann)
    run.waits(0.0)
    run.waits(run.patience_s - 0.1)
    assert run.released() == [], "it may come back"
    run.waits(0.2)
    [released] = [record for record in run.records() if isinstance(record, Released)]
    assert released == Released(leases=(1,), reason="ann did not come back")
    assert ranges(run.beats(bob, want=1)[0]) == [(2, 5, 8)], "first of all, and without what is committed"
    run.waits(run.patience_s)
    assert run.released() == [], "once"


def test_P6_a_peer_that_trained_on_while_the_coordinator_was_away_has_the_time_to_knock_again() -> None:
    run = Lender()
    ann = run.enters("ann")
    run.beats(ann, want=8)
    run.loses(ann)
    run.lease_desk = LeaseDesk(run.core, run.drivers)  # started again
    run.waits(0.0)
    run.waits(BACK_WITHIN_S - 0.1)
    assert run.released() == [], "its next knock may be 10 s away"
    run.waits(0.2)
    assert run.released() == [(1,)]


def test_one_that_came_back_and_is_lost_again_has_as_long_as_any_other() -> None:
    run = Lender()
    ann = run.enters("ann")
    run.beats(ann, want=8)
    run.loses(ann)
    run.lease_desk = LeaseDesk(run.core, run.drivers)
    run.waits(0.0)
    ann = run.enters("ann", restarts=1)
    run.waits(1.0)
    run.loses(ann)
    run.waits(0.0)
    run.waits(run.patience_s + 0.1)
    assert run.released() == [(1,)]


def test_a_peer_that_comes_back_in_time_keeps_its_leases_and_the_patience_begins_anew() -> None:
    run = Lender()
    ann = run.enters("ann")
    held, _ = run.beats(ann, want=8)
    for restarts in (1, 2):
        run.loses(ann)
        run.waits(0.0)
        run.waits(run.patience_s - 0.1)
        ann = run.enters("ann", restarts=restarts)
        run.waits(1.0)
        assert run.beats(ann)[0] == held
    assert run.released() == []


def test_what_a_peer_that_took_its_leave_had_is_there_for_others_at_once() -> None:
    run = Lender()
    ann = run.enters("ann")
    run.beats(ann, want=8)
    run.loses(ann, PeerEvent.SAID_GOODBYE)
    run.waits(0.0)
    [released] = [record for record in run.records() if isinstance(record, Released)]
    assert released == Released(leases=(1,), reason="ann left")


def test_nothing_is_taken_back_while_a_round_may_still_use_it() -> None:
    run = Lender()
    ann, bob = run.enters("ann"), run.enters("bob")
    run.beats(ann, want=8)
    flight = run.opens(ann, bob)
    run.loses(ann, PeerEvent.SAID_GOODBYE)
    run.waits(10 * run.patience_s)
    assert run.released() == []
    flight.scatter.barred[ann.peer] = Excluded(ExclusionCause.LEASES, "a test")
    run.waits(0.0)
    assert run.released() == [(1,)], "its contribution can't count any more"


def test_a_restarted_process_is_told_nothing_while_the_round_counts_on_the_one_before() -> None:
    run = Lender()
    ann = run.enters("ann")
    run.beats(ann, want=8)
    flight = run.opens(ann)
    again = run.enters("ann", restarts=1)
    assert run.beats(again, want=8) == (None, ()), "the samples may yet be acknowledged"
    flight.scatter.barred[ann.peer] = Excluded(ExclusionCause.RESTARTED, "it restarted during the round")
    assert ranges(run.beats(again, want=0)[0]) == [(1, 0, 8)]


def test_a_lease_that_went_to_another_is_void_for_who_had_it() -> None:
    run = Lender()
    ann, bob = run.enters("ann"), run.enters("bob")
    run.beats(ann, want=8)
    run.loses(ann)
    run.waits(0.0)
    run.waits(run.patience_s)
    run.beats(bob, want=8)
    again = run.enters("ann", restarts=1)
    assert run.beats(again, have=(1,)) == (None, (1,))
    assert run.beats(bob, have=(2,)) == (None, ())


# ---- which data set is the run's ---------------------------------------------------------------------------------


def test_the_data_set_of_most_members_is_the_runs_and_of_two_that_of_the_oldest() -> None:
    run = Lender(samples=0)
    ann, bob, cyd = run.enters("ann"), run.enters("bob"), run.enters("cyd")
    assert run.names(ann, 0) is None and run.leases.samples == 0, "it does not say"
    assert run.names(bob, 99) is None and run.leases.samples == 99
    assert run.names(ann, 100) is None and run.leases.samples == 100, "it is older"
    assert run.names(cyd, 99) is None and run.leases.samples == 99, "two of three"
    assert run.names(cyd, 99) is None and run.names(ann, 100) is None, "nobody has to go yet"
    fixed = [(each.samples, each.peer) for each in run.records() if isinstance(each, DataFixed)]
    assert fixed == [(99, bob.peer), (100, ann.peer), (99, bob.peer)]


def test_who_has_other_data_than_most_is_lent_nothing_and_told_why() -> None:
    run = Lender(samples=0)
    ann, bob, cyd = run.enters("ann"), run.enters("bob"), run.enters("cyd")
    for member, samples in ((ann, 99), (bob, 100), (cyd, 100)):
        run.names(member, samples)
    assert run.beats(ann, want=8, samples=99) == (None, ())
    assert run.lease_desk.words.told(ann) == (
        "no samples are leased to it: data set has 99 samples here, 100 samples in the run; "
        "use the same data, in the same order"
    )
    assert run.beats(bob, want=8, samples=100)[0] is not None and run.lease_desk.words.told(bob) == ""


def test_the_first_commit_settles_the_data_and_nobodys_word_changes_it_any_more() -> None:
    """Also if all but one say so: what was learned is of the data set that was leased."""
    run = Lender(samples=0)
    ann = run.enters("ann")
    run.names(ann, 100)
    run.beats(ann, want=8, samples=100)
    run.commits({ann.peer: (Used(1, 8),)})
    for name in ("bob", "cyd", "dan"):
        refusal = run.names(run.enters(name), 99)
        assert refusal and refusal.startswith("data set has 99 samples here, 100 samples in the run")
    assert run.names(ann, 100) is None
    assert run.leases.samples == run.replayed().leases.samples == 100


def test_P7_what_was_leased_of_another_data_set_is_void_when_most_members_have_this_one() -> None:
    run = Lender(samples=0)
    ann = run.enters("ann")
    run.names(ann, 3)
    run.beats(ann, want=3, samples=3)
    bob, cyd = run.enters("bob"), run.enters("cyd")
    flight = run.opens(ann)
    assert (run.names(bob, 100), run.names(cyd, 100), run.leases.samples) == (None, None, 3)
    assert flight is run.drivers[0].round, "a round may yet commit samples of the first one"
    run.drivers[0].round = None
    run.drivers[0].participants.end()
    run.names(bob, 100)
    assert run.leases.samples == 100 and not run.leases.held
    assert run.beats(ann, have=(1,), samples=3) == (None, (1,))
    assert ranges(run.beats(bob, want=8, samples=100)[0]) == [(2, 0, 8)], "under a new number"
    assert run.leases.granted_samples == 8


def test_P7_a_member_may_not_name_another_data_set_while_it_holds_leases() -> None:
    run = Lender(samples=0)
    ann = run.enters("ann")
    run.names(ann, 100)
    assert run.names(ann, 90) is None and run.leases.samples == 90, "it holds none"
    run.beats(ann, want=8, samples=90)
    assert (
        run.names(ann, 80)
        == "data set changed during the run: data set has 80 samples here, 90 samples at first"
    )
    assert run.leases.samples == 90 and run.leases.held


def test_a_process_that_begins_again_with_other_data_is_asked_anew() -> None:
    run = Lender(samples=0)
    run.names(run.enters("ann"), 100)
    again = run.enters("ann", restarts=1)
    assert run.names(again, 99) is None and run.leases.samples == 99


def test_data_sets_of_one_length_are_told_apart_by_their_fingerprints() -> None:
    run = Lender(samples=0)
    ann, bob, cyd, dan = (run.enters(name) for name in ("ann", "bob", "cyd", "dan"))
    run.names(ann, 100, b"one" * 8)
    run.names(bob, 100, b"two" * 8)
    assert (run.leases.data, run.lease_desk.words.fits(bob)) == (b"one" * 8, False)
    run.names(cyd, 100, b"two" * 8)
    assert run.leases.data == b"two" * 8 and not run.lease_desk.words.fits(ann)
    assert run.names(dan, 100) is None and run.lease_desk.words.fits(dan), "its items are random: it has none"
    run.beats(bob, want=8, samples=100, data=b"two" * 8)
    run.commits({bob.peer: (Used(1, 8),)})
    refusal = run.names(ann, 100, b"one" * 8)
    assert refusal == (
        f"data set has fingerprint {b'oneoneon'.hex()} here, {b'twotwotw'.hex()} in the run; "
        "use the same data, in the same order"
    )
    assert run.names(dan, 100) is None and run.replayed().leases.data == b"two" * 8


# ---- the end of a stream -----------------------------------------------------------------------------------------


class Streaming(Lender):
    """Members that read a stream, and have committed something of it: so many tokens each."""

    def __init__(self, **tokens: int) -> None:
        super().__init__(samples=0)
        self.crew = {name: self.enters(name) for name in tokens}
        for member in self.crew.values():
            self.names(member, UNKNOWN_LENGTH)
        used = {}
        for member in self.crew.values():
            self.beats(member, want=8, samples=UNKNOWN_LENGTH)
            [lease] = self.leases.of(member.peer)
            used[member.peer] = (Used(lease, self.leases.held[lease].start + 1),)
        self.commits(used, tokens_by={peer_of(name): count for name, count in tokens.items()})
        self.notes()

    def ended(self) -> list[int]:
        return [record.samples for record in self.records() if isinstance(record, StreamEnded)]


def test_one_member_does_not_end_the_stream_for_all() -> None:
    """Whether it lies or its stream broke off: only it has no more samples, and it is told so."""
    run = Streaming(ann=10, bob=10, cyd=10)
    ann, bob, cyd = run.crew.values()
    assert run.names(cyd, 3) is None
    assert run.notes() == ["cyd read its data to the end: 3 samples"]
    assert run.leases.samples == UNKNOWN_LENGTH
    assert run.names(ann, UNKNOWN_LENGTH) is None and run.names(bob, UNKNOWN_LENGTH) is None
    assert ranges(run.beats(ann, want=40, samples=UNKNOWN_LENGTH, have=(1,))[0])[1:] == [(4, 24, 64)]
    told = run.lease_desk.words.told(cyd)
    assert told.startswith(
        "its stream ended after 3 samples, and the run's goes on: nothing beyond is leased to it"
    )
    assert run.lease_desk.words.told(ann) == ""


def test_P7_what_a_member_holds_beyond_its_own_end_is_for_others() -> None:
    run = Streaming(ann=10, bob=10)
    ann, bob = run.crew.values()
    run.names(bob, 11)
    run.beats(bob, want=8, samples=11, have=(2,))
    assert [each for each in run.records() if isinstance(each, CutShort)] == [
        CutShort(leases=(2,), samples=11, peer=bob.peer)
    ]
    assert run.leases.held[2].stop == 11
    assert ranges(run.beats(ann, want=5, samples=UNKNOWN_LENGTH, have=(1,))[0])[1:] == [(3, 11, 16)]
    run.commits({bob.peer: (Used(2, 11),)})
    assert run.beats(bob, want=8, samples=11, have=()) == (None, ()), "there is nothing for it"
    assert run.leases.granted_samples == 16 and run.replayed().leases == run.leases


def test_P7_what_a_round_may_still_use_is_not_given_to_others() -> None:
    run = Streaming(ann=10, bob=10)
    bob = run.crew["bob"]
    flight = run.opens(bob)
    flight.scatter.sent[bob.peer] = SENT_TO_16
    run.names(bob, 11)
    run.beats(bob, samples=11, have=(2,))
    assert run.leases.held[2].stop == 16
    run.drivers[0].round = None
    run.drivers[0].participants.end()
    run.beats(bob, samples=11, have=(2,))
    assert run.leases.held[2].stop == 11


def test_the_stream_ends_where_members_with_most_of_the_committed_tokens_found_its_end() -> None:
    run = Streaming(ann=10, bob=10, cyd=10)
    ann, bob, cyd = run.crew.values()
    run.names(bob, 50)
    assert run.ended() == []
    run.names(cyd, 49)
    assert run.ended() == [], "two ends, and neither is most members'"
    run.names(ann, 50)
    assert run.ended() == [50] and run.leases.samples == 50
    assert run.names(cyd, 49) is None and run.names(ann, 50) is None, "nobody has to go"
    assert "and the run's has 50" in run.lease_desk.words.told(cyd)


def test_the_end_that_more_found_than_another_is_not_yet_that_of_most() -> None:
    run = Streaming(ann=11, bob=10, cyd=10)
    for name, samples in (("ann", 3), ("bob", 50)):
        run.names(run.crew[name], samples)
    assert run.ended() == [], "11 of 31 tokens say 3"
    run.names(run.crew["cyd"], 50)
    assert run.ended() == [50]


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_liars_with_less_than_half_of_the_tokens_end_no_stream(liars: int) -> None:
    names = ("bob", "cyd", "dan")
    run = Streaming(ann=10 * liars, **dict.fromkeys(names[:liars], 10))
    for name in names[:liars]:
        assert run.names(run.crew[name], 3) is None
    assert run.ended() == [] and run.lease_desk.words.told(run.crew["ann"]) == ""


def test_who_never_committed_anything_has_no_say_about_the_end() -> None:
    run = Streaming(ann=10)
    for number in range(5):
        assert run.names(run.enters(f"new{number}"), 3) is None
    assert run.ended() == []


def test_before_the_first_commit_most_members_say_where_the_stream_ends() -> None:
    run = Lender(samples=0)
    ann, bob, cyd = run.enters("ann"), run.enters("bob"), run.enters("cyd")
    for member in (ann, bob, cyd):
        run.names(member, UNKNOWN_LENGTH)
    run.names(bob, 50)
    assert run.leases.samples == UNKNOWN_LENGTH
    run.names(cyd, 50)
    assert run.leases.samples == 50 and run.leases.stream


def test_who_was_alone_at_first_does_not_end_the_stream_for_those_who_come() -> None:
    run = Lender(samples=0)
    ann = run.enters("ann")
    run.names(ann, UNKNOWN_LENGTH)
    run.names(ann, 3)
    assert run.leases.samples == 3
    bob, cyd = run.enters("bob"), run.enters("cyd")
    run.names(bob, UNKNOWN_LENGTH)
    assert run.leases.samples == 3, "of two the first one"
    run.names(cyd, UNKNOWN_LENGTH)
    assert run.leases.samples == UNKNOWN_LENGTH and run.leases.stream


def test_an_end_that_was_found_too_late_moves_to_where_most_find_it_within_the_first_epoch() -> None:
    run = Streaming(ann=10, bob=5)
    ann, bob = run.crew.values()
    run.names(ann, 60)
    assert run.ended() == [60]
    run.commits({bob.peer: (Used(2, 16),)}, tokens_by={bob.peer: 10})
    run.names(bob, 50)
    assert run.ended() == [50]
    run.names(ann, 70)
    assert run.ended() == [], "and not to later"


def test_where_most_are_gone_those_who_are_left_end_the_stream_after_a_long_while() -> None:
    run = Streaming(ann=100, bob=10, cyd=10)
    ann, bob, cyd = run.crew.values()
    run.loses(ann)
    run.names(bob, 50)
    run.names(cyd, 60)
    run.waits(0.0)
    run.waits(ENDS_AFTER_DEAD * run.manifest.net.dead_after_s - 1.0)
    assert run.ended() == []
    run.waits(1.0)
    assert run.ended() == [60], "half of them had ended before, and that is not most"


def test_a_member_whose_stream_broke_off_goes_on_when_it_reads_it_anew() -> None:
    run = Streaming(ann=10, bob=10, cyd=10)
    bob, cyd = run.crew["bob"], run.crew["cyd"]
    run.names(cyd, 3)
    run.names(cyd, UNKNOWN_LENGTH)
    assert run.lease_desk.words.told(cyd) == ""
    run.names(bob, 50)
    run.names(cyd, 50)
    assert run.ended() == [50]


def test_P7_samples_beyond_the_end_that_somebody_learned_from_stay_in_the_books() -> None:
    """A liar among them, or a stream that is longer at one place: nothing is counted twice, nothing disappears."""
    run = Streaming(ann=10, bob=10, cyd=10)
    ann, bob, cyd = run.crew.values()
    run.commits({ann.peer: (Used(1, 8),)}, tokens_by={ann.peer: 1})
    run.names(bob, 4)
    run.names(cyd, 4)
    assert run.ended() == [4]
    for member in (bob, cyd):
        run.beats(member, samples=4, have=tuple(run.leases.of(member.peer)))
    leases = run.leases
    assert (leases.committed_samples, leases.held_samples, leases.waiting_samples) == (10, 0, 14)
    assert leases.granted_samples == 24 == 4 + leases.beyond_end
    assert run.replayed().leases == leases


# ---- whatever happens ------------------------------------------------------------------------------------------

NAMES = ("ann", "bob", "cyd")
deeds = st.tuples(
    st.sampled_from(["beat", "beat", "beat", "commit", "lose", "leave", "come", "wait", "restart"]),
    st.sampled_from(NAMES),
    st.integers(1, 12),
)


class Story:
    """Peers that come, work, are lost and come back, with an account of its own of who used what."""

    def __init__(self, samples: int, fragments: int) -> None:
        self.run = Lender(fragments, samples, lease_samples=4)
        self.here: dict[str, Member] = {}
        self.comings = dict.fromkeys(NAMES, 0)
        self.used: list[list[tuple[int, int]]] = [[] for _ in range(fragments)]

    def tell(self, deed: str, name: str, number: int) -> None:
        run, member = self.run, self.here.get(name)
        match deed:
            case "come" | "restart" if member is None or deed == "restart":
                self.comings[name] += 1
                self.here[name] = run.enters(name, restarts=self.comings[name])
            case "beat" if member is not None:
                known = tuple(run.leases.of(member.peer))[number % 3 :]
                run.beats(member, want=number, have=known)
            case "lose" | "leave" if member is not None:
                run.loses(
                    self.here.pop(name), PeerEvent.SAID_GOODBYE if deed == "leave" else PeerEvent.FELL_SILENT
                )
            case "wait":
                run.waits(number)
            case "commit":
                fragment = number % len(self.used)
                run.commits({peer_of(name): self.work_of(peer_of(name), number, fragment)}, fragment)

    def work_of(self, peer: str, count: int, fragment: int) -> tuple[Used, ...]:
        work = []
        for lease, held in self.run.leases.of(peer).items():
            start, upto = held.uptos[fragment], min(held.stop, held.uptos[fragment] + count)
            self.used[fragment] += [(held.epoch, sample) for sample in range(start, upto)]
            work.append(Used(lease, upto))
        assert self.run.leases.problem(peer, work, fragment) is None
        return tuple(work)

    def check(self) -> None:
        leases = self.run.leases
        out = [(h.epoch, s) for h in leases.held.values() for s in range(h.start, h.stop)]
        assert len(set(out)) == len(out), "two leases have one sample"
        granted = [(epoch, s) for epoch in range(leases.epoch) for s in range(leases.samples)]
        granted += [(leases.epoch, s) for s in range(leases.cursor)]
        for fragment, used in enumerate(self.used):
            missing = [(e, s) for e, a, b in leases.reach(fragment).missing for s in range(a, b)]
            assert sorted(used + missing) == granted, "each is learned from once, or still will be"


@settings(max_examples=100)
@given(st.integers(1, 60), st.integers(1, 3), st.lists(deeds, max_size=40))
def test_P7_whatever_peers_do_every_sample_is_with_one_of_them_or_committed_or_waits(
    samples: int, fragments: int, deeds: list[tuple[str, str, int]]
) -> None:
    story = Story(samples, fragments)
    for name in NAMES:
        story.tell("come", name, 0)
    for deed in deeds:
        story.tell(*deed)
        story.check()
    told: Ledger = story.run.replayed()
    assert told.leases == story.run.leases, "a restart restores them exactly"
    # In the end one peer is left over, and gets everything that the others did not finish.
    for name in ("bob", "cyd"):
        story.tell("lose", name, 0)
    story.run.waits(0.0)
    story.run.waits(story.run.patience_s)
    assert {held.peer for held in story.run.leases.held.values()} <= {peer_of("ann")}
    story.check()
