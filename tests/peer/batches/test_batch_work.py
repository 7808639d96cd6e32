"""The agent's view of a synchronous batch: what the trainer is told, what is said of it, and when its sums are void."""

from __future__ import annotations

from msgspec.structs import replace

from farflung.peer.batches.batch_work import BatchWork
from farflung.peer.local.words import FreezeSums, Frozen, Grants, MicrobatchCounted, Unusable
from farflung.peer.machine.effects import TellTrainer
from farflung.protocol.digests import mask_from_bytes, mask_of, mask_to_bytes
from farflung.protocol.mode_words import BatchTick, losses_of

DUE = BatchTick(3, 0, 0, 16, 8, 5, ((0, 2),), False)


def due(*granted: tuple[int, int], seat: int = 5, version: int = 3, freeze: bool = False) -> BatchTick:
    return BatchTick(version, 0, 0, 16, 8, seat, granted, freeze)


def seated() -> BatchWork:
    work = BatchWork()
    work.on_load(3)
    assert not work.on_tick(DUE)
    return work


def told(work: BatchWork, frozen: Frozen | None = None) -> list[object]:
    return [effect.message for effect in work.words(frozen, 1, 10.0) if isinstance(effect, TellTrainer)]


def counted(micro: int, version: int = 3) -> MicrobatchCounted:
    return MicrobatchCounted(version=version, micro=micro, tokens=4, loss=1.0)


def frozen_of(work: BatchWork) -> Frozen:
    mask = mask_to_bytes(work.counted)
    return Frozen(slot=1, tokens=8, steps=2, used=(), loss=1.0, counted=mask)


def test_the_trainer_is_told_what_is_granted_once_and_anew_when_it_changes() -> None:
    work = seated()
    [grants] = told(work)
    assert isinstance(grants, Grants) and grants.ranges == ((0, 2),)
    assert told(work) == []
    work.on_tick(due((0, 2), (4, 6)))
    [grants] = told(work)
    assert isinstance(grants, Grants) and grants.ranges == ((0, 2), (4, 6))


def test_what_is_counted_is_said_and_how_long_one_takes() -> None:
    work = seated()
    told(work)
    assert not work.on_counted(counted(0), 12.0)
    assert work.on_counted(counted(1), 14.0), "it has nothing more to do"
    said = work.beat(True)
    assert (said.seat, said.version, mask_from_bytes(said.counted), said.unit_s) == (5, 3, 0b11, 2.0)


def test_P11_what_was_not_granted_or_is_of_another_version_is_not_counted() -> None:
    work = seated()
    told(work)
    work.on_counted(counted(2), 12.0)
    work.on_counted(counted(0, version=2), 12.0)
    assert work.counted == 0


def test_P11_with_another_seat_the_sums_are_void() -> None:
    work = seated()
    told(work)
    work.on_counted(counted(0), 12.0)
    assert work.on_tick(due((0, 2), seat=6)), "the coordinator gave the old one up"
    work.forget()
    assert work.counted == 0 and told(work) == [], "the trainer has not loaded yet"
    work.on_load(3)
    [grants] = told(work)
    assert isinstance(grants, Grants) and work.beat(True).seat == 6


def test_the_losses_of_a_held_out_batch_are_told_in_the_order_of_the_mask() -> None:
    work = BatchWork()
    work.on_load(3)
    work.on_tick(replace(DUE, granted=((0, 3),), held_out=True))
    [grants] = told(work)
    assert isinstance(grants, Grants) and grants.held_out
    for micro, loss in ((2, 2.5), (0, 0.5)):
        work.on_counted(MicrobatchCounted(version=3, micro=micro, tokens=4, loss=loss), 12.0)
    said = work.beat(True)
    assert mask_from_bytes(said.counted) == 0b101 and losses_of(said.losses, 2) == (0.5, 2.5)
    work.on_load(3)
    told(work)
    work.on_counted(MicrobatchCounted(version=3, micro=1, tokens=4, loss=1.5), 13.0)
    assert losses_of(work.beat(True).losses, 1) == (1.5,), "sums and losses end together"


def test_a_seat_ends_with_a_held_out_batch_though_no_other_begins() -> None:
    work = BatchWork()
    work.on_load(3)
    work.on_tick(replace(DUE, held_out=True))
    assert work.on_tick(None) and work.seat == 0, "its sums are of no use"
    assert not work.on_tick(None)
    other = seated()
    assert not other.on_tick(None) and other.seat == 5


def test_of_other_batches_no_losses_are_told() -> None:
    work = seated()
    told(work)
    work.on_counted(counted(0), 12.0)
    assert work.beat(True).losses == b""


def test_a_dead_trainer_is_told_of_at_once() -> None:
    work = seated()
    told(work)
    work.on_counted(counted(0), 12.0)
    work.lose_sums()
    said = work.beat(False)
    assert (said.trainer, said.counted, said.want) == (1, b"", False)


def test_sums_are_asked_for_once_for_each_set_of_microbatches() -> None:
    work = seated()
    told(work)
    for micro in (0, 1):
        work.on_counted(counted(micro), 12.0)
    work.on_tick(due((0, 2), freeze=True))
    assert told(work) == [FreezeSums(version=3, slot=1)] and told(work) == []
    frozen = frozen_of(work)
    assert work.is_mine(frozen) and told(work, frozen) == []
    work.on_tick(due((0, 2), (6, 7)))  # somebody's share was lost
    assert [type(word) for word in told(work, frozen)] == [Grants]
    work.on_counted(counted(6), 13.0)
    assert not work.is_mine(frozen), "what stands there lacks the new one"
    work.on_tick(due((0, 2), (6, 7), freeze=True))
    assert told(work, frozen) == [FreezeSums(version=3, slot=1)]


def test_nothing_is_told_of_a_batch_of_a_version_that_the_trainer_has_not_loaded() -> None:
    work = seated()
    work.on_tick(due((0, 2), version=4))
    assert told(work) == []
    work.on_load(4)
    assert [type(word) for word in told(work)] == [Grants]


def test_what_gives_no_gradient_is_said_and_not_asked_for_again() -> None:
    work = seated()
    told(work)
    word = Unusable(version=3, micro=1, problem="its loss is nan")
    assert work.on_unusable(word, 12.0) and not work.on_unusable(word, 13.0)
    assert mask_from_bytes(work.beat(True).unusable) == mask_of([1])
    assert work.on_counted(counted(0), 14.0)
