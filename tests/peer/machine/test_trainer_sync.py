"""What a new version, a failed round or a lost lease means for the trainer's work, and when it goes on."""

from __future__ import annotations

from farflung.collectives.round.effects import Seal
from farflung.peer.local.words import Finish, LoadState, ResumeSteps
from farflung.peer.machine.checkpoint_policy import Undoing
from farflung.peer.machine.effects import Effect, Note, Resolve
from farflung.peer.machine.fragment_rounds import Idle, Merged, Owning
from farflung.peer.machine.heartbeat import HeartbeatBuilder
from farflung.peer.machine.held_fragment import Current, Empty
from farflung.protocol.messages import Beat, Lease
from farflung.protocol.round_words import Used
from farflung.protocol.states import Goal
from rig.made_part import MadePart, commit_of, digest_of, notes, told, word_of

AT_0 = (word_of(0, 0), word_of(1, 0))
LEASES = (Lease(1, 0, 0, 8, 0), Lease(2, 0, 8, 16, 8))


class Ann(MadePart):
    """Both fragments at version 0, and a trainer that has loaded them."""

    def __init__(self, schedule: str = "blocking") -> None:
        super().__init__(schedule)
        self.founds()

    def contributes(self, fragment: int = 0, used: tuple[Used, ...] = ()) -> None:
        self.freezes(fragment, used=used)
        self.opens(fragment)

    def loses_track(self, fragment: int) -> list[Effect]:
        """Version 9 comes as state, without the commits up to it."""
        replica = self.replica(fragment)
        replica.on_commit(commit_of(fragment, round_no=3, version=3), 0.0)
        replica.on_tick(word_of(fragment, 9, donors=("bob",), verified=False))
        replica.held.fill()
        replica.unfilled(True, {chunk: (9, b"") for chunk in replica.fragment.chunks})
        replica.advance(0.0)
        return self.exchange.on_sealed(fragment, 9, digest_of(fragment, 9))

    def is_ready(self, fragment: int) -> bool:
        beat = HeartbeatBuilder(lambda said: bytes(64)).beat(self.part, self.training).message
        assert isinstance(beat, Beat)
        return any(said.fragment == fragment and said.ready for said in beat.fragments)


def loads(effects: list[Effect]) -> list[tuple[int, int, str]]:
    """(fragment, version, what the trainer keeps)."""
    return [(each.fragment, each.version, each.keep) for each in told(effects) if isinstance(each, LoadState)]


# ---- the trainer comes, founds, finishes ---------------------------------------------------------------------


def test_a_trainer_that_comes_loads_every_fragment_that_is_whole() -> None:
    ann = Ann()
    assert loads(ann.exchange.on_attach()) == [(0, 0, "drop"), (1, 0, "drop")]
    ann.replica(1).go_back(3, None)
    assert loads(ann.exchange.on_attach()) == [(0, 0, "drop")], "the other one is to be fetched first"


def test_P6_a_trainer_that_comes_takes_over_what_stands_frozen() -> None:
    ann = Ann()
    ann.freezes(1)
    ann.training.on_gone()
    assert loads(ann.exchange.on_attach()) == [(0, 0, "drop"), (1, 0, "restore")]


def test_what_the_trainer_provides_is_version_0_of_every_fragment() -> None:
    ann = MadePart()
    for replica in ann.part.replicas.values():
        replica.held.fill()
    assert ann.exchange.on_provided() == [Seal(0, 0), Seal(0, 1)]
    assert all(replica.held.sealing for replica in ann.part.replicas.values())


def test_a_checkpoint_that_was_read_is_hashed_and_no_older_work_goes_on_from_it() -> None:
    ann = Ann()
    ann.freezes(0)
    for fragment in (0, 1):
        ann.replica(fragment).go_back(6, None)
        ann.replica(fragment).held.fill()
    effects = ann.exchange.on_restored(6, {0, 1})
    assert effects == [Note("read the checkpoint of version 6"), Seal(6, 0), Seal(6, 1)]
    assert ann.training.works[0].frozen is None
    assert loads(ann.exchange.on_sealed(0, 6, digest_of(0, 6))) == [(0, 6, "drop")]


def test_P3_of_a_fragment_that_was_not_read_nothing_changes() -> None:
    ann = Ann()
    ann.freezes(1)
    ann.replica(0).go_back(6, None)
    ann.replica(0).held.fill()
    told = "read the checkpoint of version 6, fragment 0 alone"
    assert ann.exchange.on_restored(6, {0}) == [Note(told), Seal(6, 0)]
    assert (
        ann.replica(1).held.whole
        and ann.replica(1).held.version == 0
        and ann.training.works[1].frozen is not None
    )


def test_it_is_complete_when_every_fragment_is_here_as_the_run_has_it() -> None:
    ann = Ann()
    assert ann.exchange.is_complete(AT_0)
    assert not ann.exchange.is_complete((word_of(0, 0), word_of(1, 1)))
    ann.applies(commit_of(1))
    assert not ann.exchange.is_complete(AT_0), "the next version is just being hashed"
    ann.exchange.on_sealed(1, 1, digest_of(1, 1))
    assert ann.exchange.is_complete((word_of(0, 0), word_of(1, 1)))


def test_at_the_end_the_trainer_drops_what_no_round_will_use_and_hears_it_once() -> None:
    ann = Ann()
    ann.freezes(0)
    effects = ann.exchange.finish()
    (said,) = told(effects)
    assert isinstance(said, Finish) and said.version == 0, "one word: no step comes in between"
    assert [(load.fragment, load.version, load.keep) for load in said.loads] == [
        (0, 0, "drop"),
        (1, 0, "drop"),
    ]
    assert ann.training.works[0].frozen is None and ann.training.loading
    assert ann.exchange.finish() == []


# ---- a new version -------------------------------------------------------------------------------------------


def test_P6_a_version_without_my_work_leaves_it_to_me() -> None:
    ann = Ann()
    ann.contributes(0)
    ann.applies(commit_of(0, with_ann=False))
    assert loads(ann.exchange.on_sealed(0, 1, digest_of(0, 1))) == [(0, 1, "all")]
    assert ann.training.works[0].frozen is not None


def test_P7_a_version_with_my_work_takes_it_and_acknowledges_its_samples() -> None:
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.contributes(0, used=(Used(1, 6),))
    ann.applies(commit_of(0))
    effects = ann.exchange.on_sealed(0, 1, digest_of(0, 1))
    assert loads(effects) == [(0, 1, "rest")]
    assert ann.training.works[0].frozen is None
    assert ann.training.leases.held[1] == Lease.at(1, 0, 0, 8, (6, 0)), (
        "fragment 1 has learned nothing from it"
    )


def test_work_that_a_version_used_after_the_trainer_dropped_it_is_not_taken_from_its_new_work() -> None:
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.contributes(0, used=(Used(1, 6),))
    ann.replica(0).rounds.disown()
    ann.applies(commit_of(0))
    ann.freezes(0, slot=2)
    effects = ann.exchange.on_sealed(0, 1, digest_of(0, 1))
    assert loads(effects) == [(0, 1, "all")] and ann.training.works[0].frozen is not None
    assert ann.training.leases.held[1] == Lease.at(1, 0, 0, 8, (6, 0)), (
        "its samples are acknowledged all the same"
    )


def test_P7_whoever_missed_a_commit_drops_its_work_and_asks_which_samples_are_its_own() -> None:
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.contributes(0, used=(Used(1, 6),))
    effects = ann.loses_track(0)
    assert loads(effects) == [(0, 9, "drop")]
    assert notes(effects) == ["away for too long to know whether my last contribution counted: it is dropped"]
    assert ann.training.leases.unsure and not ann.training.leases.held
    assert effects[0] == Resolve(1, False, 0)


def test_P4_a_version_that_came_from_others_and_is_not_the_runs_is_not_loaded() -> None:
    ann = MadePart()
    ann.training.attached = True
    ann.replica(0).on_tick(word_of(0, 1, donors=("bob",), verified=False))
    ann.replica(0).held.fill()
    ann.replica(0).unfilled(True, {chunk: (1, b"") for chunk in ann.replica(0).fragment.chunks})
    ann.replica(0).advance(0.0)
    ann.replica(0).on_tick(word_of(0, 1, digests=((1, b"x" * 32),), verified=False))
    assert ann.exchange.on_sealed(0, 1, digest_of(0, 1)) == []
    assert isinstance(ann.replica(0).held.stand, Empty)


def test_P18_a_version_that_she_calculated_is_loaded_whatever_digest_she_is_told() -> None:
    ann = Ann()
    ann.applies(commit_of(0))
    ann.replica(0).on_tick(word_of(0, 1, digests=((1, b"x" * 32),), verified=False))
    assert loads(ann.exchange.on_sealed(0, 1, digest_of(0, 1))) == [(0, 1, "all")]
    assert isinstance(ann.replica(0).held.stand, Current)


def test_a_new_version_of_one_fragment_leaves_the_other_one_alone() -> None:
    ann = Ann()
    ann.contributes(1)
    ann.applies(commit_of(0))
    assert loads(ann.exchange.on_sealed(0, 1, digest_of(0, 1))) == [(0, 1, "all")]
    assert ann.replica(1).rounds.contribution is not None and ann.training.works[1].frozen is not None


# ---- slots ---------------------------------------------------------------------------------------------------


def test_the_trainer_is_told_of_no_slot_that_a_round_is_using() -> None:
    ann = Ann()
    ann.freezes(0, slot=0)
    ann.opens(0)
    ann.freezes(0, slot=1)
    resumed = [each.spare for each in told(ann.exchange.go_on_alone()) if isinstance(each, ResumeSteps)]
    assert resumed == [2], "0 is in the round, 1 stands frozen"


def test_P6_an_aborted_rounds_slot_is_free_and_resolved_before_the_trainer_hears_of_it() -> None:
    ann = Ann()
    ann.freezes(0, slot=0)
    ann.opens(0)
    ann.freezes(0, slot=1)
    ann.part.on_aborted(1)
    resolve, resume = ann.exchange.go_on_alone()
    assert resolve == Resolve(0, False, 0)
    assert told([resume]) == [ResumeSteps(spare=0, fragment=0)]


# ---- work that goes ------------------------------------------------------------------------------------------


def test_work_that_is_not_finite_is_dropped_and_the_fragment_starts_from_the_anchor() -> None:
    ann = Ann()
    ann.contributes(0)
    assert loads(ann.exchange.on_unusable(ann.replica(0))) == [(0, 0, "drop")]
    assert isinstance(ann.replica(0).rounds.role, Owning) and ann.training.works[0].frozen is None


def test_when_the_guard_threw_away_a_round_that_i_was_in_its_work_does_not_come_again() -> None:
    ann = Ann()
    ann.contributes(0)
    ann.part.on_aborted(1)
    dropped = (word_of(0, 0, dropped=1), word_of(1, 0))
    effects = ann.tick(*dropped)
    assert notes(effects) == ["round 1 made an update of unusual size; restored version 0"]
    assert loads(effects) == [(0, 0, "drop")] and ann.training.works[0].frozen is None
    assert ann.tick(*dropped) == [], "once"


def test_a_round_that_the_guard_threw_away_without_me_is_nothing_to_me() -> None:
    ann = Ann()
    ann.freezes(0)
    assert ann.tick(word_of(0, 0, dropped=1), word_of(1, 0)) == []
    assert ann.training.works[0].frozen is not None


def test_after_the_guard_whoever_holds_nothing_whole_loads_when_it_does() -> None:
    ann = Ann()
    ann.contributes(0)
    ann.applies(commit_of(0))
    effects = ann.tick(word_of(0, 1, dropped=1), word_of(1, 0))
    assert len(notes(effects)) == 1 and told(effects) == []
    role = ann.replica(0).rounds.role
    assert isinstance(role, Merged) and role.contribution.disowned
    assert loads(ann.exchange.on_sealed(0, 1, digest_of(0, 1))) == [(0, 1, "drop")]


def test_P7_when_samples_behind_the_work_were_given_to_others_it_goes_in_all_fragments() -> None:
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.contributes(0, used=(Used(1, 6),))
    ann.freezes(1)
    effects = ann.tick(*AT_0, void=(1,))
    assert loads(effects) == [(0, 0, "drop"), (1, 0, "drop")]
    assert list(ann.training.leases.held) == [2]
    assert ann.replica(0).rounds.contribution is not None and ann.replica(0).rounds.contribution.disowned


def test_P7_in_a_fragment_that_is_not_here_the_work_goes_without_a_load() -> None:
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.freezes(1, used=(Used(1, 6),))
    ann.replica(1).go_back(3, None)
    assert loads(ann.exchange.on_void((1,))) == [(0, 0, "drop")]
    assert ann.training.works[1].frozen is None and ann.training.works[1].fresh


def test_P7_while_a_version_is_hashed_the_anchor_is_not_loaded_for_a_void_lease() -> None:
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.applies(commit_of(0))
    assert loads(ann.exchange.on_void((1,))) == [(1, 0, "drop")]
    assert loads(ann.exchange.on_sealed(0, 1, digest_of(0, 1))) == [(0, 1, "drop")]


def test_a_void_lease_that_nobody_here_knows_changes_nothing() -> None:
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.contributes(0)
    assert ann.exchange.on_void((9,)) == []
    assert ann.replica(0).rounds.contribution is not None and not ann.replica(0).rounds.contribution.disowned


def test_P7_while_samples_behind_the_work_may_be_somebody_elses_no_round_gets_it() -> None:
    """Fragment 1 lost track, and the trainer does not name the lease any more that fragment 0 owes work on: the
    coordinator could not see that its samples went to others."""
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.contributes(1, used=(Used(1, 8),))
    ann.freezes(0, used=(Used(1, 8),))
    assert ann.is_ready(0) and ann.training.offered(0) is not None
    assert loads(ann.loses_track(1)) == [(1, 9, "drop")]
    assert not ann.is_ready(0) and ann.training.offered(0) is None
    ann.training.leases.on_told(LEASES[1:])
    ann.freezes(0, used=(Used(2, 12),))
    assert not ann.is_ready(0), "of lease 1 it has heard nothing"
    ann.opens(0)
    assert ann.replica(0).rounds.contribution is None, "the coordinator had counted on it already"
    ann.part.on_aborted(1)
    dropped = ann.tick(word_of(0, 0), word_of(1, 9), void=(1,))
    assert loads(dropped) == [(0, 0, "drop"), (1, 9, "drop")]
    ann.training.on_loaded(0)
    ann.freezes(0, used=(Used(2, 12),))
    assert ann.is_ready(0) and ann.training.offered(0) is not None


def test_P6_work_on_samples_that_are_told_to_be_its_own_still_is_for_the_next_round() -> None:
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.contributes(1, used=(Used(1, 8),))
    ann.freezes(0, used=(Used(1, 8),))
    ann.loses_track(1)
    ann.training.leases.on_told(LEASES)
    assert ann.is_ready(0) and ann.training.offered(0) is not None


# ---- the run goes back ---------------------------------------------------------------------------------------


def test_when_the_run_goes_back_to_what_is_held_the_work_on_it_stays() -> None:
    ann = Ann()
    ann.freezes(0)
    digests = [((0, digest_of(number, 0)),) for number in (0, 1)]
    words = (word_of(0, 0, digests=digests[0]), word_of(1, 0, digests=digests[1]))
    effects = ann.exchange.go_back(words, "it was lost", Undoing(), 1)
    assert effects == [Note("a new era of the run begins at version 0, 0: it was lost")]
    assert [replica.held.version for replica in ann.part.replicas.values()] == [0, 0]
    assert ann.training.works[0].frozen is not None


def test_when_the_run_goes_back_to_another_state_of_that_number_it_is_fetched() -> None:
    ann = Ann()
    ann.exchange.go_back(
        (word_of(0, 0, digests=((0, b"x" * 32),)), word_of(1, 0)), "it was lost", Undoing(), 1
    )
    assert [type(replica.held.stand) for replica in ann.part.replicas.values()] == [Empty, Empty]
    assert ann.exchange.go_back(AT_0, "", Undoing(), 2) == [], (
        "to somebody that holds nothing this is no news"
    )


def test_P7_no_lease_from_before_counts_in_a_new_era_nor_does_work_on_its_samples() -> None:
    """Also of a fragment that stays: its samples are lent again, to anybody."""
    ann = Ann()
    ann.training.leases.on_told(LEASES)
    ann.freezes(0, used=(Used(1, 4),))
    words = tuple(word_of(number, 0, digests=((0, digest_of(number, 0)),)) for number in (0, 1))
    effects = ann.exchange.go_back(words, "it was lost", Undoing(), 1)
    assert [replica.held.version for replica in ann.part.replicas.values()] == [0, 0]
    assert ann.training.works[0].frozen is None and not ann.training.leases.known
    assert loads(effects) == [(0, 0, "drop"), (1, 0, "drop")]


# ---- a trainer that waits ------------------------------------------------------------------------------------


def test_P5_in_a_held_run_a_waiting_trainer_goes_on_alone() -> None:
    ann = Ann()
    ann.freezes(0)
    assert told(ann.tick(*AT_0)) == []
    assert told(ann.tick(*AT_0, goal=Goal.ALONE)) == [ResumeSteps(spare=0, fragment=0)]
    assert ann.tick(*AT_0, goal=Goal.ALONE) == [], "it does not wait any more"


def test_a_held_run_is_waited_for_while_a_version_is_on_its_way() -> None:
    ann = Ann()
    ann.freezes(0)
    ann.applies(commit_of(1))
    assert told(ann.tick(word_of(0, 0), word_of(1, 1), goal=Goal.ALONE)) == []
    ann.freezes(1)
    assert ann.exchange.go_on_alone(), "without the coordinator it goes on nevertheless"


def test_a_trainer_that_has_loaded_nothing_since_its_freeze_waits_for_a_round() -> None:
    ann = Ann()
    ann.freezes(0)
    ann.freezes(1)
    assert ann.exchange.go_on() == []


def test_a_trainer_that_got_one_version_goes_on_when_no_other_round_is_on() -> None:
    ann = Ann()
    ann.freezes(0)
    ann.freezes(1)
    ann.opens(1)
    ann.applies(commit_of(0))
    ann.exchange.on_sealed(0, 1, digest_of(0, 1))
    ann.training.on_loaded(0)
    assert ann.exchange.go_on() == [], "the round of fragment 1 is waited for"
    ann.part.on_aborted(1)
    assert told(ann.exchange.go_on()) == [ResumeSteps(spare=0, fragment=1)]
    assert isinstance(ann.replica(1).rounds.role, Idle) and ann.training.works[1].frozen is not None


def test_where_training_goes_on_during_rounds_only_the_fragment_in_a_round_is_waited_for() -> None:
    ann = Ann("streaming")
    ann.freezes(0)
    ann.freezes(1)
    ann.opens(1)
    assert told(ann.exchange.go_on()) == [ResumeSteps(spare=0, fragment=0)]
    ann.part.on_aborted(1)
    assert told(ann.exchange.go_on()) == [ResumeSteps(spare=0, fragment=1)]
