"""What a sparse result leaves out is back in the residual of whoever sent it, and in nobody else's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from farflung.collectives.round.effects import Install, Merge, Roll
from farflung.compression.codec import codec_named
from farflung.optim.recipes import outer_of
from farflung.peer.machine.effects import Encode
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema

ELEMENTS, CHUNKS, FRAGMENTS, MEMBERS = 4096, 4, 2, 6
MODEL = ModelSchema((), ELEMENTS, CHUNKS, CHUNKS, bytes(32))
SPARSE = Manifest.from_toml('[outer]\nstep = "sparse"\n[round]\nfragments = 2\n', "run.toml")
DENSE = Manifest.from_toml(
    '[outer]\nstep = "sparse"\n[round]\nfragments = 2\ngather_codec = "int8"\n', "run.toml"
)
TOPK = codec_named("topk")


class Peer:
    def __init__(self, number: int, manifest: Manifest) -> None:
        self.number, self.slot = number, torch.zeros(CHUNKS * ELEMENTS)
        self.anchor = torch.zeros(CHUNKS * ELEMENTS)
        self.state = OuterState(self.anchor, MODEL, manifest.round, outer_of(manifest))

    def sends(self, fragment: int, round_no: int) -> list[bytes]:
        generator = torch.Generator().manual_seed(1000 * round_no + 10 * self.number + fragment)
        part_n = self.state.part(self.slot, fragment)
        part_n.copy_(torch.randn(part_n.shape, generator=generator))
        order = tuple(range(CHUNKS // FRAGMENTS))
        payloads: dict[int, bytes] = {}
        for made, problem in self.state.encode(self.slot, Encode(round_no, 0, "topk", order, fragment)):
            assert not problem
            payloads |= {index: bytes(payload) for index, payload in made.items()}
        return [payloads[index] for index in order]

    def residual(self, fragment: int) -> torch.Tensor:
        feedback = self.state._feedbacks[fragment]
        assert feedback is not None and feedback.residual is not None
        return feedback.residual.clone()


def peers(manifest: Manifest = SPARSE) -> list[Peer]:
    return [Peer(number, manifest) for number in range(MEMBERS)]


def merged(state: OuterState, fragment: int, sent: Sequence[Sequence[bytes]]) -> list[Roll]:
    """The results of a round of these, as its owners make them."""
    weights = (1 / len(sent),) * len(sent)
    first = fragment * CHUNKS // FRAGMENTS
    merges = [
        Merge(1, 1, first + at, tuple(each[at] for each in sent), weights)
        for at in range(CHUNKS // FRAGMENTS)
    ]
    return [Roll(merge.chunk, 1, state.merge(merge)) for merge in merges]


def refunds(before: torch.Tensor, sent: list[bytes], rolls: list[Roll]) -> torch.Tensor:
    for at, (payload, roll) in enumerate(zip(sent, rolls, strict=True)):
        left_out = codec_named("sparse").decode(roll.payload, ELEMENTS) == 0
        before[at * ELEMENTS : (at + 1) * ELEMENTS] += TOPK.decode(payload, ELEMENTS) * left_out
    return before


@pytest.mark.parametrize("fragment", range(FRAGMENTS))
def test_each_member_has_back_what_of_its_own_was_left_out(fragment: int) -> None:
    members = peers()
    other = 1 - fragment
    for member in members:
        member.sends(other, 1)
    sent = [member.sends(fragment, 2) for member in members]
    rolls = merged(members[0].state, fragment, sent)
    for member, own in zip(members, sent, strict=True):
        member.state.resolve(member.slot, used=True, fragment=fragment)
        before, untouched = member.residual(fragment), member.residual(other)
        for roll in reversed(rolls):
            member.state.roll(roll)
        assert torch.equal(member.residual(fragment), refunds(before.clone(), own, rolls))
        assert not torch.equal(member.residual(fragment), before), "384 places at most, and 256 are kept"
        assert torch.equal(member.residual(other), untouched)
    assert len({member.state.seal(fragment) for member in members}) == 1


def test_whose_work_was_not_used_has_nothing_back() -> None:
    left, *members = peers()
    sent = [member.sends(0, 1) for member in members]
    before_delta = left.slot.clone()
    left.sends(0, 1)
    rolls = merged(members[0].state, 0, sent)
    left.state.resolve(left.slot, used=False)
    before = left.residual(0)
    assert not before.any() and not before_delta.any()
    for roll in rolls:
        left.state.roll(roll)
    assert torch.equal(left.residual(0), before)


def test_who_takes_the_state_from_another_peer_has_nothing_back() -> None:
    """It has seen no result of that chunk, and the next one is of other contributions."""
    member, other = peers()[:2]
    sent = member.sends(0, 1)
    member.state.resolve(member.slot, used=True)
    before = member.residual(0)
    member.state.install(Install(0, 1, other.state.chunk_bytes(0)))
    nothing = codec_named("sparse").encode(torch.zeros(ELEMENTS))
    member.state.roll(Roll(0, 2, nothing))
    assert torch.equal(member.residual(0), before)
    member.state.roll(Roll(1, 1, nothing))
    assert torch.equal(member.residual(0)[ELEMENTS:], before[ELEMENTS:] + TOPK.decode(sent[1], ELEMENTS))


def test_where_results_are_dense_there_is_nothing_to_give_back() -> None:
    """A zero was rounded, or the sum is none: nothing was left out."""
    member = peers(DENSE)[0]
    member.sends(0, 1)
    member.state.resolve(member.slot, used=True)
    before = member.residual(0)
    member.state.roll(Roll(0, 1, codec_named("int8").encode(torch.zeros(ELEMENTS))))
    assert torch.equal(member.residual(0), before)
