"""From leased positions to samples: map-style data sets, streams with and without a length, text files (P7)."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from farflung.coordinator.ledger.leases import Leases
from farflung.peer.data.leased_data import LeaseBook, Span
from farflung.peer.data.sample_source import (
    MapStyle,
    SampleSource,
    Stream,
    pinned,
    refuse_lists,
    source_of,
    tokens_in,
)
from farflung.peer.data.text_lines import TextLines
from farflung.protocol.errors import UserError
from farflung.protocol.messages import UNKNOWN_LENGTH, Lease


class Numbers(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.begun = self.given = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        for number in range(self.size):
            self.given += 1
            yield number


class Skippable(Numbers):
    """What a streaming data set of Hugging Face `datasets` offers of use here."""

    def __init__(self, size: int, start: int = 0) -> None:
        super().__init__(size)
        self.start = start
        self.told: list[object] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(("epoch", epoch))

    def skip(self, count: int) -> Skippable:
        self.told.append(("skip", count))
        return Skippable(self.size, self.start + count)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.size))


def span(start: int, stop: int, epoch: int = 0) -> Span:
    return Span(1, epoch, start, stop)


# ---- one reader -----------------------------------------------------------------------------------------------


def test_a_map_style_data_set_is_visited_once_in_an_order_of_the_runs_own() -> None:
    source = source_of(list(range(10)), seed=1)
    assert isinstance(source, MapStyle) and source.samples == 10
    seen = source.read(span(0, 4)) + source.read(span(4, 10))
    assert sorted(seen) == list(range(10)) != seen
    assert source.read(span(0, 10, epoch=1)) != seen


def test_a_stream_is_read_by_position_and_what_others_have_is_passed_over() -> None:
    data = Numbers(20)
    source = source_of(data, seed=1)
    assert isinstance(source, Stream) and source.samples == UNKNOWN_LENGTH
    assert source.read(span(3, 5)) == [3, 4]
    assert source.read(span(5, 6)) == [5] and source.read(span(10, 12)) == [10, 11]
    assert (data.begun, data.given) == (1, 12), "nothing is read twice on the way forward"


def test_a_position_before_the_last_one_or_a_new_epoch_begins_the_stream_anew() -> None:
    data = Numbers(20)
    source = source_of(data, seed=1)
    assert [source.read(s) for s in (span(8, 10), span(2, 4), span(0, 2, epoch=1))] == [
        [8, 9],
        [2, 3],
        [0, 1],
    ]
    assert data.begun == 3


def test_a_stream_that_can_skip_is_asked_to_and_is_told_the_epoch() -> None:
    data = Skippable(1000)
    source = source_of(data, seed=1)
    assert source.read(span(900, 902)) == [900, 901] and source.read(span(902, 903)) == [902]
    assert source.read(span(0, 1, epoch=1)) == [0]
    assert data.told == [("epoch", 0), ("skip", 900), ("epoch", 1)]


def test_the_end_of_a_stream_without_a_length_is_its_length() -> None:
    source = source_of(Numbers(7), seed=1)
    assert source.read(span(4, 8)) == [4, 5, 6] and source.samples == 7
    assert source.read(span(8, 12)) == [], "a lease beyond the end is empty"
    assert source.read(span(0, 2, epoch=1)) == [0, 1]
    beyond = source_of(Numbers(7), seed=1)
    assert beyond.read(span(12, 14)) == [] and beyond.samples == 7


def test_a_stream_that_ends_before_the_length_it_tells_is_refused() -> None:
    class Liar(Numbers):
        def __len__(self) -> int:
            return 9

    source = source_of(Liar(7), seed=1)
    assert source.samples == 9
    with pytest.raises(UserError, match="says it has 9 samples, and ends after 7"):
        source.read(span(6, 9))


def test_what_cannot_be_read_anew_is_refused() -> None:
    for data, what in ((iter([1]), "only once"), ([], "empty"), (3, "no data set")):
        with pytest.raises(UserError, match=what):
            source_of(data, seed=1)
    with pytest.raises(UserError, match="empty"):
        source_of(Numbers(0), seed=1).read(span(0, 1))


# ---- text -----------------------------------------------------------------------------------------------------


def test_the_lines_of_text_files_are_samples(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    lines = [f"line {number} \u00e4" for number in range(150)]
    one.write_text("\n\n".join(lines[:70]), encoding="utf-8")
    two.write_bytes("\r\n".join(lines[70:]).encode() + b"\r\n  \r\n")
    text = TextLines([one, two])
    assert len(text) == 150 and [text[i] for i in range(150)] == lines
    draw = random.Random(0)
    assert all(text[i] == lines[i] for i in (draw.randrange(150) for _ in range(40)))
    with pytest.raises(IndexError):
        text[150]
    assert source_of(str(one), seed=1).samples == 70


def test_a_text_file_that_is_not_there_or_empty_is_told_plainly(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.txt: cannot read: No such file"):
        TextLines(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match=r"no line of text in .*empty\.txt"):
        TextLines(tmp_path / "empty.txt")


# ---- several peers, epoch after epoch ----------------------------------------------------------------------------


class Reader:
    """A peer's trainer, as far as data goes: what `run.batches` does, without a network."""

    def __init__(self, name: str, source: SampleSource) -> None:
        self.name, self.source, self.book = name, source, LeaseBook()
        self.read: list[tuple[int, object]] = []  # since the last commit

    def step(self) -> bool:
        spans = self.book.next_batch(3)
        got = []
        for span in spans:
            samples = self.source.read(span)
            self.book.on_end(self.source.samples)
            if samples:
                self.read += [(span.epoch, sample) for sample in samples]
                got.append(replace(span, stop=span.start + len(samples)))
        if got:
            self.book.hand_out(tuple(got))
            self.book.on_step()
        return bool(spans)


@pytest.mark.parametrize("size", [1, 7, 24, 25])
@pytest.mark.parametrize("kind", [Numbers, Skippable, list])
def test_P7_whatever_the_data_every_sample_of_an_epoch_is_committed_once(size: int, kind: type) -> None:
    """Readers use a part of their leases, or are lost with all of it; the length of a stream is found on the way."""
    draw = random.Random(size)
    make = (lambda: list(range(size))) if kind is list else (lambda: kind(size))
    source_size = source_of(make(), seed=1).samples
    leases = Leases(lease_samples=4, samples=source_size)
    readers = [Reader(str(number), source_of(make(), seed=1)) for number in range(3)]
    committed: list[tuple[int, object]] = []
    while leases.epoch < 3:
        at = draw.randrange(3)
        reader = readers[at]
        ends = reader.source.samples
        leases.cut_short(leases.reaching_beyond(reader.name, ends), ends)
        found = leases.next_range(4, ends)
        if len(leases.of(reader.name)) < 2 and found is not None:
            lease = Lease.at(leases.next_id, found.epoch, found.start, found.stop, found.uptos)
            leases.grant(reader.name, lease)
        told = [held.as_lease(i) for i, held in sorted(leases.of(reader.name).items())]
        reader.book.on_leases(tuple(told))
        while reader.step() and draw.random() < 0.8:
            pass
        if leases.samples == UNKNOWN_LENGTH and reader.source.samples != UNKNOWN_LENGTH:
            leases.end_stream(reader.source.samples)
        if draw.random() < 0.2:
            leases.release(leases.of(reader.name))
            readers[at] = Reader(reader.name, source_of(make(), seed=1))
            continue
        used = [u for u in reader.book.used() if u.lease in leases.held]
        assert leases.problem(reader.name, used) is None
        leases.acknowledge(used)
        committed += reader.read
        reader.read = []
        assert leases.leased_samples == (
            leases.committed_samples + leases.held_samples + leases.returned_samples
        )
        if leases.samples != UNKNOWN_LENGTH:
            assert leases.committed_samples == len(committed)
    assert len(set(committed)) == len(committed), "a sample was committed twice"
    open_epochs = (
        {held.epoch for held in leases.held.values()} | {each.epoch for each in leases.returned} | {3}
    )
    whole = [each for each in committed if each[0] < min(open_epochs)]
    assert len(whole) == size * min(open_epochs) and leases.samples == size


def test_text_goes_into_batches(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a\nb\nc\n")
    from torch.utils.data import default_collate

    made = default_collate(source_of(path, seed=1).read(span(0, 3)))
    assert sorted(made) == ["a", "b", "c"] and not isinstance(made, torch.Tensor)


def test_a_data_loader_with_workers_is_a_stream_of_whole_batches() -> None:
    """What docs/data.md says of workers: they read below `run.batches`."""
    loader = DataLoader(list(range(24)), batch_size=4, num_workers=1)  # type: ignore[arg-type]
    source = source_of(loader, seed=1)
    assert source.samples == 6
    assert [batch.tolist() for batch in source.read(span(2, 4))] == [[8, 9, 10, 11], [12, 13, 14, 15]]


class AtOnce(list[int]):
    """As a `Dataset` of Hugging Face: row by row is slow."""

    def __getitem__(self, index: object) -> int:
        raise AssertionError("read one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


def test_a_data_set_that_reads_many_at_once_is_asked_to() -> None:
    places = MapStyle(list(range(100)), 5).read(span(4, 8))
    assert MapStyle(AtOnce(range(100)), 5).read(span(4, 8)) == [10 * place for place in places]


def test_samples_of_plain_lists_are_refused_with_both_ways_out() -> None:
    with pytest.raises(UserError, match=r"'input_ids'.*with_format\(\"torch\"\), or collate="):
        refuse_lists({"text": "a", "input_ids": [1, 2]})
    for good in ({"x": torch.ones(2), "names": ["a"], "none": []}, (1.0, 2.0), [1, 2], {"label": 3}):
        refuse_lists(good)


def test_pixels_are_no_tokens() -> None:
    assert (
        tokens_in(
            {"image": torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "label": torch.zeros(4, dtype=torch.long)},
            4,
        )
        == 4
    )
    assert tokens_in(torch.zeros(4, 9, dtype=torch.uint8), 4) == 36, "bytes of text are tokens"


class Pair(NamedTuple):
    ids: Tensor
    name: str


class Own:
    """As a batch class of somebody's own."""

    def pin_memory(self) -> str:
        return "pinned by itself"


def test_every_tensor_of_a_batch_is_pinned_and_nothing_else_is_changed() -> None:
    def pin(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor + 1

    seen: list[Tensor] = []
    zero = torch.zeros(2)
    batch = {"a": zero, "b": [zero, "text", 3], "c": Pair(zero, "it"), "d": (zero, None), "e": Own()}
    found = pinned(batch, pin)
    assert len(seen) == 4 and torch.equal(batch["a"], torch.zeros(2)), "the script's own is left alone"
    assert list(found) == list(batch) and type(found["c"]) is Pair and found["c"].name == "it"
    assert found["b"][1:] == ["text", 3] and found["d"][1] is None and found["e"] == "pinned by itself"
    for each in (found["a"], found["b"][0], found["c"].ids, found["d"][0]):
        assert torch.equal(each, torch.ones(2))
    assert type(pinned(UserDict(batch), pin)) is UserDict, "as the encodings of tokenizers are"
    assert torch.equal(pinned(zero, pin), torch.ones(2)) and pinned(b"raw", pin) == b"raw"
    elsewhere = torch.zeros(2, device="meta")
    assert pinned(elsewhere, pin) is elsewhere, "only what is in host memory"
