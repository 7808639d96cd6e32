"""A data set's fingerprint: equal data has equal ones, other data others, and random items have none."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from farflung.peer.data.sample_source import ITEMS, places, source_of
from farflung.peer.data.text_lines import TextLines

RUN = b"r" * 32


def of(dataset: Any, run: bytes = RUN) -> tuple[bytes, str]:
    found = source_of(dataset, seed=1).fingerprint(run)
    return found.data, found.why_none


ITEMS_OF = {
    "numbers": [1, 2.5, True, None],
    "texts": ["one", "zwei", "\ud800"],
    "bytes": [b"one", bytearray(b"two")],
    "tensors": [torch.arange(6).reshape(2, 3), torch.ones(3, dtype=torch.bfloat16)],
    "arrays": [np.arange(6.0), np.float32(1.5)],
    "dicts": [{"ids": [1, 2], "mask": (0, 1)}, {"mask": (), "ids": []}],
}


@pytest.mark.parametrize("kind", ITEMS_OF)
def test_equal_data_has_equal_fingerprints_and_one_other_item_another(kind: str) -> None:
    items = ITEMS_OF[kind]
    mark, why_none = of(items)
    assert len(mark) == 16 and not why_none
    assert of(list(items)) == (mark, "")
    assert of([*items[:-1], "other"])[0] not in (mark, b"")
    assert of([*items, items[0]])[0] not in (mark, b""), "another length"


def test_like_items_of_different_kinds_are_different_data() -> None:
    alike = [
        ["1"],
        [1],
        [b"1"],
        [1.0],
        [[1]],
        [torch.tensor(1)],
        [torch.tensor([1])],
        [np.array(1)],
        [{1: 1}],
    ]
    assert len({of(items)[0] for items in alike}) == len(alike)
    assert of([{"a": 1, "b": 2}]) == of([{"b": 2, "a": 1}])


def test_of_large_data_the_same_few_items_are_looked_at_by_every_peer_of_a_run() -> None:
    looked_at = places(10**9, RUN)
    assert len(looked_at) == ITEMS and looked_at == places(10**9, RUN) == sorted(set(looked_at))
    assert looked_at != places(10**9, b"another run") and looked_at != places(10**9 + 1, RUN)
    assert places(5, RUN) == [0, 1, 2, 3, 4]


class Counted(list[str]):
    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


def test_it_costs_little() -> None:
    dataset = Counted(f"line {number}" * 100 for number in range(100_000))
    begun = time.perf_counter()
    assert of(dataset)[0]
    assert dataset.reads < 2 * ITEMS
    assert time.perf_counter() - begun < 5.0, "some milliseconds on a machine that has nothing else to do"


class Augmented:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + random.random() + np.random.rand()


def test_random_items_have_none_and_the_scripts_chance_is_left_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = Augmented()[0]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert of(Augmented()) == (b"", "its items differ when they are read again, as with random augmentation")
    assert torch.equal(Augmented()[0], expected)


def test_items_of_a_kind_without_fixed_bytes_have_none() -> None:
    for odd in (object(), {1, 2}, [object()], {"a": object()}, np.array([object()])):
        assert of([odd])[0] == b""
    assert of([object()])[1] == "its items are of a kind that has no fixed bytes (object)"


class Endless:
    """A stream; `begins` counts how often it was opened."""

    def __init__(self, word: str) -> None:
        self.word, self.begins, self.epochs = word, 0, []  # type: ignore[var-annotated]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[str]:
        self.begins += 1
        number = 0
        while True:
            yield f"{self.word} {number} of {self.epochs[-1:]}"
            number += 1


def test_a_stream_has_that_of_its_first_items_in_its_first_epoch() -> None:
    stream = Endless("a")
    mark, why_none = of(stream)
    assert mark and not why_none and stream.begins == 2
    stream.set_epoch(7)
    assert of(stream) == (mark, "") == of(Endless("a"))
    assert of(Endless("b"))[0] not in (mark, b"")
    assert of([f"a {number} of [0]" for number in range(4)])[0] != mark, "a stream is read in another order"


def test_text_files_are_compared_by_their_lines(tmp_path: Any) -> None:
    texts = {"one": "a\nb\nc\n", "same": "a\nb\nc\n", "other": "a\nb\nd\n"}
    marks = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        marks[name] = of(TextLines(tmp_path / name))[0]
    assert marks["one"] == marks["same"] != marks["other"]
