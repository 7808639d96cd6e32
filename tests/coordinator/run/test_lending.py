"""P7: samples are leased without overlap, acknowledged by the commits that used them, and leased again when lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import DataFixed, Granted, Released, StreamEnded
from farflung.coordinator.run.lending import LEASES_PER_PEER, RELEASE_AFTER_DEAD, Lending
from farflung.coordinator.run.membership import Member
from farflung.protocol.causes import Excluded, ExclusionCause
from farflung.protocol.manifest import DataSection, Manifest, RoundSection, RunSection
from farflung.protocol.messages import UNKNOWN_LENGTH, Lease
from farflung.protocol.round_words import Used
from farflung.protocol.states import PeerEvent
from rig.made_run import MadeRun, holding, peer_of

SAMPLES, LEASE_SAMPLES = 100, 8


class Lender(MadeRun):
    """A run that lends: what each beat of a member is answered with."""

    def __init__(
        self, fragments: int = 1, samples: int = SAMPLES, lease_samples: int = LEASE_SAMPLES
    ) -> None:
        data = DataSection(lease_samples=lease_samples, batch=1)
        rules = RoundSection(fragments=fragments)
        super().__init__(Manifest(data=data, round=rules, run=RunSection(rounds=1000)))
        self.lending = Lending(self.core, self.conductors)
        self.patience_s = RELEASE_AFTER_DEAD * self.manifest.net.dead_after_s
        if samples:
            self.core.write(DataFixed(samples=samples, peer=peer_of("ann")))

    @property
    def leases(self):  # type: ignore[no-untyped-def]
        return self.core.ledger.leases

    def beats(self, member: Member, **changes: object) -> tuple[tuple[Lease, ...] | None, tuple[int, ...]]:
        here = holding(*[book.version for book in self.core.ledger.books])
        return self.lending.lease(member, self.says(member, **{"fragments": here, **changes}))

    def names_size(self, member: Member, samples: int) -> str | None:
        return self.lending.take_size(member, self.says(member, samples=samples))

    def waits(self, seconds: float) -> None:
        self.core.now += seconds
        self.lending.reclaim()

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
    flight.barred[ann.peer] = Excluded(ExclusionCause.LEASES, "a test")
    run.waits(0.0)
    assert run.released() == [(1,)], "its contribution can't count any more"


def test_a_restarted_process_is_told_nothing_while_the_round_counts_on_the_one_before() -> None:
    run = Lender()
    ann = run.enters("ann")
    run.beats(ann, want=8)
    flight = run.opens(ann)
    again = run.enters("ann", restarts=1)
    assert run.beats(again, want=8) == (None, ()), "the samples may yet be acknowledged"
    flight.barred[ann.peer] = Excluded(ExclusionCause.RESTARTED, "it restarted during the round")
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


# ---- the length of the data ------------------------------------------------------------------------------------


def test_the_first_peers_data_is_the_runs_and_is_fixed_once() -> None:
    run = Lender(samples=0)
    ann, bob = run.enters("ann"), run.enters("bob")
    assert run.names_size(ann, 0) is None and run.leases.samples == 0, "it does not say"
    assert run.names_size(ann, 100) is None
    assert run.names_size(bob, 100) is None and run.names_size(ann, 100) is None
    assert [each for each in run.records() if isinstance(each, DataFixed)] == [
        DataFixed(samples=100, peer=ann.peer)
    ]


def test_who_has_other_data_must_go_and_is_told_both_lengths() -> None:
    run = Lender(samples=0)
    ann, bob = run.enters("ann"), run.enters("bob")
    run.names_size(ann, 100)
    assert run.names_size(bob, 99) == "data set has 99 samples here, 100 in the run; use the same data"
    run.loses(ann)
    assert run.names_size(bob, 99) is None, "nothing was learned, and nobody else is here"
    assert run.leases.samples == 99
    run.commits()
    assert run.names_size(bob, 98) == "data set has 98 samples here, 99 in the run; use the same data"


def test_a_stream_has_the_length_that_the_first_to_read_it_to_its_end_says() -> None:
    run = Lender(samples=0)
    ann, bob = run.enters("ann"), run.enters("bob")
    assert run.names_size(ann, UNKNOWN_LENGTH) is None and run.names_size(bob, UNKNOWN_LENGTH) is None
    run.notes()
    assert run.names_size(bob, 50) is None
    assert run.notes() == ["bob read the data to its end: an epoch has 50 samples"]
    assert run.leases.samples == 50
    assert run.names_size(ann, UNKNOWN_LENGTH) is None, "it has not come so far"
    assert run.names_size(ann, 50) is None
    assert not any(isinstance(record, StreamEnded) for record in run.records())


def test_of_two_ends_of_a_stream_the_first_one_counts_and_the_second_has_to_go() -> None:
    """Today: nobody else is asked whether it is so."""
    run = Lender(samples=0)
    ann, bob = run.enters("ann"), run.enters("bob")
    run.names_size(ann, UNKNOWN_LENGTH)
    run.names_size(bob, 50)
    refusal = "data set has 60 samples here, 50 in the run; use the same data"
    assert run.names_size(ann, 60) == refusal
    assert run.leases.samples == 50


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
