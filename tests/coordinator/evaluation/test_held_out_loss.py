"""What several members' losses of the same windows make: the median, and who is left out."""

from __future__ import annotations

import random
import struct

import pytest

from farflung.coordinator.evaluation.evaluation import COPIES, LEAST_WINDOWS, dealt, figures_of
from farflung.coordinator.evaluation.held_out_loss import MemberLosses, agreed_text, judged
from farflung.coordinator.modes.registry import Dice
from farflung.protocol.digests import bits
from farflung.protocol.limits import NATS_MOST
from farflung.protocol.mode_words import losses_of

TRUE = {window: 3.0 + 0.1 * window for window in range(16)}
MEAN = sum(TRUE.values()) / len(TRUE)


def dice_of(seed: int) -> Dice:
    return Dice(random.Random(seed).randbytes)


def said(windows: object = range(16), off: float = 0.0, data: bytes = b"text") -> MemberLosses:
    return MemberLosses(data, {window: TRUE[window] + off for window in windows})  # type: ignore[attr-defined]


def test_nobody_has_said_anything() -> None:
    assert judged({}) is None
    assert judged({"ann": MemberLosses()}) is None


def test_one_is_believed_and_named_alone() -> None:
    found = judged({"ann": said()})
    assert found is not None and found.loss == pytest.approx(MEAN) and found.peers == ("ann",)


def test_small_differences_of_arithmetic_are_no_lies() -> None:
    found = judged({"ann": said(), "bob": said(off=0.002), "cyd": said(off=-0.001)})
    assert found is not None and not found.outvoted and found.loss == pytest.approx(MEAN, abs=1e-3)


@pytest.mark.parametrize("off", [-2.9, -0.5, 0.5, 5000.0])
def test_one_of_three_that_is_far_off_is_left_out_and_does_not_move_the_figure(off: float) -> None:
    found = judged({"ann": said(), "bob": said(), "liar": said(off=off)})
    assert found is not None and found.loss == pytest.approx(MEAN)
    assert list(found.outvoted) == ["liar"] and found.peers == ("ann", "bob") and "liar" not in found.means


def test_two_that_contradict_each_other_make_no_figure_and_both_are_told() -> None:
    found = judged({"ann": said(), "bob": said(off=1.0)})
    assert found is not None and found.loss is None and not found.outvoted
    assert found.means == {"ann": pytest.approx(MEAN), "bob": pytest.approx(MEAN + 1.0)}


def test_one_that_is_contradicted_by_the_only_one_it_met_is_not_left_out() -> None:
    """Some of those that shared its windows went away: either of the two may be the liar."""
    found = judged({"ann": said(), "bob": said(range(8, 16), off=1.0), "cyd": said(range(8))})
    assert found is not None and found.loss is None and not found.outvoted


@pytest.mark.parametrize("lie", [0.0, 9.0, 1e4])
def test_of_windows_that_are_in_doubt_nothing_is_in_the_figure(lie: float) -> None:
    odd = MemberLosses(b"text", {**said().nats, 3: lie, 7: lie})
    found = judged({"ann": said(), "liar": odd})
    due = [nats for window, nats in TRUE.items() if window not in (3, 7)]
    assert found is not None and found.loss == pytest.approx(sum(due) / 14) and found.windows == 14


def test_another_text_is_left_out_by_the_many_and_contested_by_one_of_two() -> None:
    found = judged({"ann": said(), "bob": said(), "cyd": said(off=0.5, data=b"other")})
    assert found is not None and list(found.outvoted) == ["cyd"] and found.loss == pytest.approx(MEAN)
    two = judged({"ann": said(), "cyd": said(data=b"other")})
    assert two is not None and two.loss is None, "they have not computed the same"


@pytest.mark.parametrize(("windows", "named_at_least"), [(16, 0.95), (64, 1.0), (256, 1.0)])
def test_two_liars_in_league_of_eight_never_move_the_figure_and_are_nearly_always_named(
    windows: int, named_at_least: float
) -> None:
    """Who shares its windows with two of them is not taken for a liar."""
    named = 0
    for seed in range(300):
        shares = dealt([f"p{number}" for number in range(8)], range(windows), dice_of(seed))
        answers = {
            peer: MemberLosses(b"", {w: 3.0 * (1.5 if peer in ("p6", "p7") else 1.0) for w in bits(mask)})
            for peer, mask in shares.items()
        }
        found = judged(answers)
        assert found is not None and found.loss in (None, pytest.approx(3.0)), seed
        named += set(found.outvoted) == {"p6", "p7"}
    assert named >= 300 * named_at_least


@pytest.mark.parametrize(("peers", "liars"), [(4, 2), (6, 3)])
def test_where_half_are_in_league_there_is_no_figure(peers: int, liars: int) -> None:
    for seed in range(50):
        shares = dealt([f"p{number}" for number in range(peers)], range(64), dice_of(seed))
        answers = {
            peer: MemberLosses(b"", {w: 1.5 if int(peer[1:]) < liars else 3.0 for w in bits(mask)})
            for peer, mask in shares.items()
        }
        found = judged(answers)
        assert found is not None and found.loss is None, (seed, found)


def test_who_lies_now_and_then_moves_nothing() -> None:
    lies = MemberLosses(b"text", {**said().nats, 3: 900.0, 7: 0.0})
    found = judged({"ann": said(), "bob": said(), "liar": lies})
    assert (
        found is not None and found.loss == pytest.approx(MEAN) and found.windows == 16 and not found.outvoted
    )


# ---- who computes what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 100, 2000])
def test_each_window_goes_to_three_and_all_have_about_as_many(count: int) -> None:
    peers = [f"p{number}" for number in range(count)]
    shares = dealt(peers, range(256), dice_of(1))
    for window in range(256):
        assert sum(mask >> window & 1 for mask in shares.values()) == min(COPIES, count)
    sizes = [mask.bit_count() for mask in shares.values()]
    assert max(sizes) - min(sizes) <= 1
    assert len(shares) == min(count, 256 * COPIES // LEAST_WINDOWS), (
        "in a crowd some compute, and the others train"
    )


def test_the_same_peers_do_not_always_meet() -> None:
    one, other = (dealt([*"abcdef"], range(64), dice_of(seed)) for seed in (1, 2))
    assert one != other


def test_of_what_comes_only_so_many_finite_losses_are_taken() -> None:
    def packed(*values: float) -> bytes:
        return struct.pack(f"<{len(values)}f", *values)

    assert losses_of(packed(1.0, 2.0), 2) == (1.0, 2.0)
    assert losses_of(packed(1.0), 2) is None and losses_of(packed(1.0) + b"x", 1) is None
    for odd in (float("nan"), float("inf"), -0.5, 2 * NATS_MOST):
        assert losses_of(packed(1.0, odd), 2) is None, odd


def test_what_follows_from_a_loss() -> None:
    assert figures_of(2.0, 4.0) == {"loss": 2.0, "perplexity": 7.38906, "bits_per_byte": 0.72135}
    assert figures_of(2.0, 0.0)["bits_per_byte"] is None
    assert figures_of(5000.0, 1.0)["perplexity"] is None
    assert set(figures_of(None, 1.0).values()) == {None}


# ---- a text ------------------------------------------------------------------------------------------------------

A, B = (1, 2, 3, 4), (1, 2, 9, 9)


@pytest.mark.parametrize(
    ("said", "asked", "due"),
    [
        ([A], 1, (A, 1)),
        ([A, A], 2, (A, 2)),
        ([A, B], 2, (A[:2], 2)),
        ([A, B, A], 3, (A, 2)),
        ([B, (1, 2, 3), A], 3, ((1, 2, 3), 2)),
        ([A], 2, ((), 0)),
        ([A, B], 3, (A[:2], 2)),
        ([A], 3, ((), 0)),
        ([], 3, ((), 0)),
        ([(5, 6), (6, 5), A], 3, ((), 0)),
        ([A, (1, 9, 3, 4), (1, 2, 5, 4)], 3, (A[:2], 2)),
    ],
    ids=[
        "one is alone", "two agree", "of two both count", "one of three is outvoted", "as far as they come",
        "one of two is silent", "one of three is silent", "two of three are silent", "nobody", "all differ",
        "one that differed before",
    ],
)  # fmt: skip
def test_a_text_is_what_more_than_half_of_those_who_were_asked_say(
    said: list[tuple[int, ...]], asked: int, due: tuple[tuple[int, ...], int]
) -> None:
    assert agreed_text(said, asked) == due
