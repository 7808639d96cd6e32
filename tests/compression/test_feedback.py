"""Error feedback: nothing is lost but for a while, and what was not used counts once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from farflung.compression.codec import ErrorFeedback, NonFinite, codec_named

SIZE, CHUNK = 1000, 256


def noise(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 1e-3


def send(feedback: ErrorFeedback, name: str = "int2") -> Tensor:
    """Encode chunk by chunk; what the others will decode."""
    codec = codec_named(name)
    sent = []
    for start in range(0, SIZE, CHUNK):
        count = min(CHUNK, SIZE - start)
        sent.append(codec.decode(feedback.encode(codec, start, count), count))
    return torch.cat(sent)


def test_residual_is_what_was_not_sent() -> None:
    feedback = ErrorFeedback(0.9)
    assert feedback.residual is None
    expected = torch.zeros(SIZE)
    for round_no in range(4):
        expected.mul_(0.9).add_(noise(round_no))
        feedback.open(noise(round_no))
        expected -= send(feedback)
        feedback.settle()
        assert feedback.residual is not None
        torch.testing.assert_close(feedback.residual, expected, rtol=0, atol=1e-9)


def test_with_beta_1_everything_arrives_in_the_end() -> None:
    feedback = ErrorFeedback(1.0)
    arrived, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
    for _ in range(60):
        wanted += noise(1)
        feedback.open(noise(1))
        arrived += send(feedback)
        feedback.settle()
    without = 60 * codec_named("int2").decode(codec_named("int2").encode(noise(1)), SIZE)
    assert float((arrived - wanted).norm() / wanted.norm()) < 0.05
    assert float((without - wanted).norm() / wanted.norm()) > 0.3


def test_given_back_the_residual_holds_delta_and_all() -> None:
    feedback = ErrorFeedback(0.9)
    feedback.open(noise(0))
    send(feedback)
    feedback.settle()
    assert feedback.residual is not None
    wanted = feedback.residual * 0.9 + noise(1)
    feedback.open(noise(1))
    send(feedback)
    feedback.give_back()
    torch.testing.assert_close(feedback.residual, wanted, rtol=0, atol=1e-9)


def test_withdrawn_the_residual_is_that_of_before() -> None:
    feedback = ErrorFeedback(0.9)
    feedback.open(noise(0))
    send(feedback)
    feedback.settle()
    assert feedback.residual is not None
    before = feedback.residual.clone()
    feedback.open(noise(1))
    send(feedback)
    feedback.withdraw(noise(1))
    torch.testing.assert_close(feedback.residual, before, rtol=0, atol=1e-9)
    feedback.open(noise(2))  # a round may begin again


def test_a_round_that_was_cut_short_gives_back_what_it_sent() -> None:
    feedback = ErrorFeedback(1.0)
    feedback.open(noise(0))
    feedback.encode(codec_named("int4"), 0, CHUNK)
    feedback.give_back()
    assert feedback.residual is not None
    torch.testing.assert_close(feedback.residual, noise(0), rtol=0, atol=1e-9)


# ---- sparse results
# -----------------------------------------------------------------------------------------------


def test_what_a_result_leaves_out_comes_back_and_is_sent_again() -> None:
    """Six peers and the owner's merge: what arrived and what peers keep back are together all that was learned."""
    members, count = 6, 4096
    peers = [ErrorFeedback(1.0) for _ in range(members)]
    topk, sparse = codec_named("topk"), codec_named("sparse")
    learned, arrived = torch.zeros(count), torch.zeros(count)
    left_out = 0
    for round_no in range(30):
        merged = torch.zeros(count)
        for number, peer in enumerate(peers):
            delta = torch.randn(count, generator=torch.Generator().manual_seed(100 * round_no + number))
            learned += delta / members
            peer.open(delta)
            topk.decode_add(peer.encode(topk, 0, count), 1 / members, merged)
            peer.settle(owed=True)
        result = sparse.decode(sparse.encode(merged), count)
        left_out += int(((result == 0) & (merged != 0)).sum())
        arrived += result
        for peer in peers:
            peer.refund(0, result)
    kept = sum((peer.residual for peer in peers if peer.residual is not None), torch.zeros(count)) / members
    assert left_out > 1000
    rest = learned - arrived - kept
    assert float(rest.norm() / learned.norm()) < 0.01, "but for the rounding of results"


def test_what_a_result_has_is_not_refunded_and_nothing_is_refunded_twice() -> None:
    feedback = ErrorFeedback(1.0)
    feedback.open(noise(0))
    sent = send(feedback, "int4")[:CHUNK]
    feedback.settle(owed=True)
    assert feedback.residual is not None
    before, result = feedback.residual.clone(), torch.zeros(CHUNK)
    result[::2] = 1e-9
    feedback.refund(0, result)
    gained = feedback.residual[:CHUNK] - before[:CHUNK]
    assert not gained[::2].any()
    torch.testing.assert_close(gained[1::2], sent[1::2], rtol=0, atol=1e-9)
    assert torch.equal(feedback.residual[CHUNK:], before[CHUNK:]), "the result of that chunk has not come"
    after = feedback.residual.clone()
    feedback.refund(0, result)
    assert torch.equal(feedback.residual, after)


@pytest.mark.parametrize(
    "why", ["not asked for", "installed", "not decided", "not used", "of the round before"]
)
def test_only_what_was_used_and_whose_result_is_applied_is_refunded(why: str) -> None:
    feedback = ErrorFeedback(1.0)
    feedback.open(noise(0))
    send(feedback, "int4")
    if why == "not used":
        feedback.withdraw(noise(0))
    elif why != "not decided":
        feedback.settle(owed=why != "not asked for")
    if why == "installed":
        feedback.forget(0)
    if why == "of the round before":
        feedback.open(torch.zeros(SIZE))
    assert feedback.residual is not None
    before = feedback.residual.clone()
    feedback.refund(0, torch.zeros(CHUNK))
    assert torch.equal(feedback.residual, before)


def test_reset_forgets() -> None:
    feedback = ErrorFeedback(0.9)
    feedback.open(noise(0))
    send(feedback)
    feedback.reset()
    assert feedback.residual is None
    feedback.open(torch.zeros(SIZE // 2))  # another length: another fragment layout after the rejoin
    assert feedback.residual is not None and not feedback.residual.any()


def test_refusals() -> None:
    for beta in (0.0, -1.0, 1.1):
        with pytest.raises(ValueError, match="beta"):
            ErrorFeedback(beta)
    feedback = ErrorFeedback(1.0)
    feedback.open(noise(0))
    with pytest.raises(AssertionError, match="neither settled nor given back"):
        feedback.open(noise(1))
    feedback.settle()
    with pytest.raises(ValueError, match="pseudo-gradient of"):
        feedback.open(torch.zeros(3))
    feedback.open(torch.full((SIZE,), float("nan")))
    with pytest.raises(NonFinite):
        feedback.encode(codec_named("int8"), 0, SIZE)


def test_the_residual_is_lazy_and_never_aliases_delta() -> None:
    delta = noise(0)
    feedback = ErrorFeedback(1.0)
    feedback.open(delta)
    send(feedback, "fp32")
    assert torch.equal(delta, noise(0))
    assert feedback.residual is not None and not feedback.residual.any()
