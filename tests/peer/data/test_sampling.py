"""The visiting order: a permutation for every size, another one each epoch, the same on every machine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.peer.data.sample_source import permuted_index, permuted_range

seeds = st.integers(min_value=-(2**70), max_value=2**70)
epochs = st.integers(min_value=0, max_value=2**40)


@settings(max_examples=60)
@given(seed=seeds, epoch=epochs, size=st.integers(min_value=1, max_value=2000))
def test_every_sample_comes_exactly_once(seed: int, epoch: int, size: int) -> None:
    assert sorted(permuted_range(seed, epoch, size, 0, size)) == list(range(size))


def test_small_sizes_and_the_borders_of_the_domain() -> None:
    for size in [*range(1, 70), 255, 256, 257, 1023, 1024, 1025]:
        assert sorted(permuted_range(1, 0, size, 0, size)) == list(range(size))


@settings(max_examples=100)
@given(seed=seeds, epoch=epochs, size=st.integers(1, 2**64), data=st.data())
def test_any_position_of_any_size_gives_a_sample_and_a_range_is_its_positions(
    seed: int, epoch: int, size: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start, min(size, start + 5)))
    indices = permuted_range(seed, epoch, size, start, stop)
    assert indices == [permuted_index(seed, epoch, size, position) for position in range(start, stop)]
    assert all(0 <= index < size for index in indices)


@settings(max_examples=50)
@given(seed=seeds, epoch=epochs, size=st.integers(min_value=20, max_value=2000))
def test_epochs_and_seeds_give_other_orders(seed: int, epoch: int, size: int) -> None:
    order = permuted_range(seed, epoch, size, 0, 20)
    assert order != permuted_range(seed, epoch + 1, size, 0, 20)
    assert order != permuted_range(seed + 1, epoch, size, 0, 20)


def test_all_orders_of_a_small_set_are_about_equally_likely() -> None:
    orders = Counter(tuple(permuted_range(9, epoch, 4, 0, 4)) for epoch in range(4800))
    assert len(orders) == 24
    assert all(120 < count < 280 for count in orders.values())  # 200 expected, deviation 14


def test_the_order_is_the_same_in_every_release() -> None:
    assert permuted_range(0, 0, 1, 0, 1) == [0]
    assert permuted_range(1, 2, 10, 0, 10) == [9, 8, 7, 4, 0, 3, 6, 5, 1, 2]
    assert permuted_range(0, 0, 2000, 0, 8) == [1258, 577, 1342, 459, 1815, 212, 82, 1151]
    assert permuted_range(123, 4, 10**12, 999, 1002) == [543267295954, 146405269204, 881848612455]
    assert permuted_index(0, 0, 2**64, 2**64 - 1) == 15506374429032005170


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        permuted_index(0, 0, 10, position)
    with pytest.raises(ValueError, match="outside"):
        permuted_range(0, 0, 10, position, position + 1)


def test_a_size_without_positions_or_beyond_the_domain_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        permuted_index(0, 0, 0, 0)
    with pytest.raises(ValueError, match="more than"):
        permuted_index(0, 0, 2**64 + 1, 0)
    assert permuted_range(0, 0, 0, 0, 0) == []
