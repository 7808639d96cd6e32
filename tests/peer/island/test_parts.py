"""Which samples of a batch are whose: every one is read once, and a short end leaves no rank without a batch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.peer.data.leased_data import Span
from farflung.peer.island.parts import WHOLE, BatchPart, agreed_part, data_ranks, part_of
from farflung.protocol.errors import UserError


def places(spans: Sequence[Span]) -> list[tuple[int, int]]:
    return [(span.lease, at) for span in spans for at in range(span.start, span.stop)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5))
def test_every_sample_of_a_batch_is_read_by_one_rank_and_none_is_without(sizes: list[int], of: int) -> None:
    spans = [Span(lease, 0, 100 * lease, 100 * lease + size) for lease, size in enumerate(sizes)]
    parts = [BatchPart(number, of) for number in range(of)]
    own = [places(part.spans(spans)) for part in parts if part.bounds(sum(sizes))[2]]
    assert [place for each in own for place in each] == places(spans)
    assert all(part.spans(spans) for part in parts)
    # The mean of the ranks' means, so weighed, is the mean over the samples.
    for part in parts:
        counts = part.weight(sum(sizes)) / of
        read = places(part.spans(spans))
        assert counts == pytest.approx(len(read) / sum(sizes) if part.bounds(sum(sizes))[2] else 0.0)
        assert read == places(spans)[slice(*part.bounds(sum(sizes))[:2])]


def test_a_rank_for_which_nothing_is_left_reads_one_of_the_others() -> None:
    spans = [Span(4, 0, 10, 12)]
    assert [BatchPart(n, 3).spans(spans) for n in range(3)] == [
        (Span(4, 0, 10, 11),),
        (Span(4, 0, 10, 11),),
        (Span(4, 0, 11, 12),),
    ]
    assert [BatchPart(n, 3).weight(2) for n in range(3)] == [0.0, 1.5, 1.5]
    assert WHOLE.spans(spans) == tuple(spans) and WHOLE.weight(2) == 1.0


def test_ranks_that_see_one_batch_are_one_data_rank() -> None:
    tensor_parallel = [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [data_ranks(tensor_parallel, rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    said = [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [part_of(said, rank) for rank in range(4)] == [
        BatchPart(0, 2),
        BatchPart(0, 2, counts=False),
        BatchPart(1, 2),
        BatchPart(1, 2, counts=False),
    ]
    with pytest.raises(UserError, match=r"do not say which ranks work on one batch .*data_rank"):
        data_ranks([(0, 1), (1,)], 0)


@pytest.mark.parametrize("said", [[(0, 2), (0, 2)], [(0, 2), (1, 3)], [(0, 2), (2, 2)], [(-1, 1), (0, 1)]])
def test_parts_that_do_not_fit_together_are_refused(said: list[tuple[int, int]]) -> None:
    with pytest.raises(UserError, match="data_rank: every rank must say"):
        part_of(said, 0)


def test_all_ranks_say_their_part_or_none_does() -> None:
    def told(*each: tuple[tuple[int, int] | None, tuple[int, ...]]) -> list[bytes]:
        return [msgspec.msgpack.encode(one) for one in each]

    meshes = told((None, (0,)), (None, (1,)))
    assert agreed_part(lambda _: meshes, 1, None, (1,)) == BatchPart(1, 2)
    script = told(((0, 1), (0,)), ((0, 1), (1,)))
    assert agreed_part(lambda _: script, 1, (0, 1), (1,)) == BatchPart(0, 1, counts=False)
    mixed = told(((0, 1), (0,)), (None, (1,)))
    with pytest.raises(UserError, match="say it on every rank or on none"):
        agreed_part(lambda _: mixed, 0, (0, 1), (0,))
