"""The agent's view of its trainer (P6, P7).  Several of these were bugs that the simulator found."""

from __future__ import annotations

from msgspec.structs import replace

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.optim.schedule import ScheduleRules
from farflung.peer.local.words import Frozen, LeasesNow, LoadState
from farflung.peer.machine.effects import Effect, TellTrainer
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.protocol.messages import Lease
from farflung.protocol.round_words import Used


def frozen(slot: int = 0, steps: int = 4, *used: Used) -> Frozen:
    return Frozen(slot=slot, tokens=10 * steps, steps=steps, used=used, loss=1.0)


def told(effects: list[Effect], kind: type) -> list:
    return [e.message for e in effects if isinstance(e, TellTrainer) and isinstance(e.message, kind)]


def attached(fragments: int = 1) -> TrainerProxy:
    training = TrainerProxy(ScheduleRules("blocking", period_steps=1, fragments=fragments))
    training.on_attach()
    for fragment in range(fragments):
        training.load(fragment, 0, None)
        training.on_loaded(fragment)
    return training


def test_a_fresh_trainer_without_frozen_work_starts_from_the_anchor() -> None:
    training = TrainerProxy()
    training.on_attach()
    assert [load.keep for load in told(training.load(0, 3, None), LoadState)] == ["drop"]


def test_P6_work_that_no_commit_used_is_kept() -> None:
    training = attached()
    training.on_frozen(frozen())
    [load] = told(training.load(0, 1, None), LoadState)
    assert load.keep == "all" and training.works[0].frozen is not None


def test_a_commit_takes_exactly_what_it_used() -> None:
    training = attached()
    used = frozen(slot=2, steps=7)
    training.on_frozen(used)
    [load] = told(training.load(0, 1, used), LoadState)
    assert (load.keep, load.slot, load.steps, load.tokens) == ("rest", 2, 7, 70)
    assert training.works[0].frozen is None


def test_P7_what_a_trainer_freezes_after_its_work_was_forgotten_is_no_work() -> None:
    """Its leases were voided while no state was here to load in place of it: it learned on until that came."""
    training = attached(fragments=2)
    training.leases.on_told((Lease(1, 0, 0, 8, 0),))
    drops = told(training.on_void((1,), versions={0: 5, 1: NO_VERSION}), LoadState)
    assert [(load.fragment, load.keep) for load in drops] == [(0, "drop")]
    training.on_loaded(0)
    training.on_frozen(replace(frozen(1, 8), fragment=1))
    assert training.works[1].frozen is None and not training.works[1].waiting
    [load] = told(training.load(1, 6, None), LoadState)
    assert (load.keep, load.steps) == ("drop", 0)


def test_P6_a_restarted_trainer_takes_over_what_stands_frozen() -> None:
    training = attached()
    training.on_frozen(frozen(slot=1, steps=5))
    training.on_gone()
    training.on_attach()
    [load] = told(training.load(0, 0, None), LoadState)
    assert (load.keep, load.slot, load.steps) == ("restore", 1, 5)


def test_the_trainer_is_never_sent_to_a_slot_that_is_in_use() -> None:
    for sent in (None, 0, 1, 2):
        for newest in (None, 0, 1, 2):
            training = attached()
            training.works[0].on_slot_sent(sent)
            if newest is not None:
                training.on_frozen(frozen(slot=newest))
            resume = training.works[0].resume()
            assert resume.spare not in (sent, newest)


def test_P7_a_freeze_that_crossed_a_load_is_not_taken_for_new_work() -> None:
    """The trainer froze, the agent dropped or merged its work, then the word of the freeze arrived."""
    training = attached()
    work = frozen(0, 4, Used(1, 8))
    training.on_frozen(work)
    training.load(0, 1, work)  # keep = rest
    training.on_frozen(frozen(1, 8, Used(1, 8)))
    assert training.works[0].frozen is None
    training.on_loaded(0)
    training.on_frozen(frozen(1, 4))
    assert training.works[0].frozen is not None


def test_a_freeze_that_crossed_any_load_waits_for_the_next() -> None:
    """Its slot may be the one that the load named as spare: the trainer may be writing it again."""
    training = attached()
    training.load(0, 1, None)  # keep = all
    training.on_frozen(frozen(0, 4))
    assert training.works[0].frozen is None and training.works[0].running


def test_P7_a_lease_is_not_forgotten_before_it_is_acknowledged_or_void() -> None:
    """Dropping it silently would hide from the coordinator that work behind it is unmerged."""
    training = attached()
    training.leases.on_told((Lease(1, 0, 0, 8, 0),))
    training.leases.on_told((Lease(2, 0, 8, 16, 8),))
    assert training.leases.known == {1, 2}


def test_P7_work_behind_a_void_lease_goes() -> None:
    training = attached()
    training.leases.on_told((Lease(1, 0, 0, 8, 0), Lease(2, 0, 8, 16, 8)))
    training.on_frozen(frozen(0, 4, Used(1, 8)))
    effects = training.on_void((1,), versions={0: 5})
    assert [load.keep for load in told(effects, LoadState)] == ["drop"]
    assert training.works[0].frozen is None and training.leases.known == {2}
    assert training.on_void((99,), versions={0: 5}) == []


def test_P7_frozen_work_names_its_leases_even_when_the_list_has_lost_them() -> None:
    training = attached()
    training.on_frozen(frozen(0, 4, Used(7, 8)))
    assert training.leases.known == {7}
    assert told(training.on_void((7,), versions={0: 0}), LoadState)


def test_P7_acknowledged_samples_are_not_named_again() -> None:
    training = attached()
    training.leases.on_told((Lease(1, 0, 0, 8, 0), Lease(2, 0, 8, 16, 8)))
    effects = training.leases.on_commit(0, {1: 8, 2: 12})
    [now] = told(effects, LeasesNow)
    assert now.leases == (Lease(2, 0, 8, 16, 12),)


def test_a_restarted_trainer_reads_on_behind_what_is_frozen() -> None:
    training = attached()
    training.leases.on_told((Lease(1, 0, 0, 8, 2),))
    training.on_frozen(frozen(0, 4, Used(1, 6)))
    training.on_gone()
    training.on_attach()
    [now] = told(training.load(0, 0, None), LeasesNow)
    assert now.leases == (Lease(1, 0, 0, 8, 6),)


def test_P7_with_several_fragments_a_lease_is_done_when_the_last_one_learned_from_it() -> None:
    training = attached(fragments=2)
    training.leases.on_told((Lease(1, 0, 0, 8, 0),))
    [now] = told(training.leases.on_commit(0, {1: 8}), LeasesNow)
    assert now.leases == (Lease.at(1, 0, 0, 8, (8, 0)),)
    [now] = told(training.leases.on_commit(1, {1: 8}), LeasesNow)
    assert now.leases == ()


def test_P7_a_restarted_trainer_reads_again_what_only_some_fragments_have() -> None:
    """Fragment 1's newest freeze crossed a load and was not taken: that work died with the trainer."""
    training = attached(fragments=2)
    training.leases.on_told((Lease(1, 0, 0, 8, 0),))
    training.on_frozen(replace(frozen(0, 4, Used(1, 6)), more=True))
    training.on_frozen(replace(frozen(0, 2, Used(1, 4)), fragment=1))
    training.on_gone()
    training.on_attach()
    [now] = told(training.load(0, 0, None), LeasesNow)
    assert now.leases == (Lease.at(1, 0, 0, 8, (6, 4)),)


def test_P7_a_lease_that_one_fragment_lost_track_of_is_still_named_for_the_work_of_the_others() -> None:
    """The coordinator says which are void: the other fragment owes work on their samples, though nothing is frozen."""
    training = attached(fragments=2)
    training.leases.on_told((Lease(1, 0, 0, 8, 0), Lease(2, 0, 8, 16, 8)))
    training.leases.forget()
    assert training.leases.known == {1, 2} and not training.leases.held
    training.leases.on_told((Lease(2, 0, 8, 16, 8),))
    assert training.leases.known == {1, 2}
    drops = told(training.on_void((1,), versions={0: 5, 1: 4}), LoadState)
    assert [(load.fragment, load.keep) for load in drops] == [(0, "drop"), (1, "drop")]
    assert training.leases.known == {2} and not training.on_void((1,), versions={0: 5, 1: 4})


def test_of_a_single_fragment_all_work_is_dropped_with_its_leases() -> None:
    training = attached()
    training.leases.on_told((Lease(1, 0, 0, 8, 0),))
    training.leases.forget()
    assert not training.leases.known
