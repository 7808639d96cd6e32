"""Encoded contributions lie in a file as long as anybody holds a part of them; a full disk costs memory, no round."""

from __future__ import annotations

import errno
import gc
import logging
import os
from pathlib import Path

import pytest
import torch

from farflung.compression.codec import codec_named
from farflung.optim.outer import Nesterov
from farflung.peer.machine.effects import Encode
from farflung.peer.state import delta_encoder
from farflung.peer.state.delta_encoder import SentFile
from farflung.peer.state.outer_state import Files, OuterState, unnamed_file
from farflung.protocol.frames import Payload
from farflung.protocol.manifest import RoundSection
from farflung.protocol.model_schema import ModelSchema
from rig.residuals import residual_of

CHUNK, CHUNKS = 3000, 5


def sent(file: SentFile, round_no: int, chunks: int = CHUNKS) -> list[Payload]:
    file.begin(chunks * CHUNK)
    return [file.put(bytes([round_no, chunk]) * (CHUNK // 2)) for chunk in range(chunks)]


def holds(payloads: list[Payload], round_no: int) -> bool:
    return all(bytes(each) == bytes([round_no, chunk]) * (CHUNK // 2) for chunk, each in enumerate(payloads))


def test_what_somebody_holds_stays_and_the_place_of_others_is_used_again(tmp_path: Path) -> None:
    with unnamed_file(tmp_path) as raw:
        file, kept = SentFile(raw), dict[int, list[Payload]]()
        for round_no in range(20):
            kept[round_no] = sent(file, round_no)
            assert all(isinstance(each, memoryview) for each in kept[round_no]), "none is in memory"
            kept.pop(round_no - 2, None)
            file.rest()
            assert all(holds(payloads, number) for number, payloads in kept.items())
        size = os.fstat(raw.fileno()).st_size
        assert 3 * CHUNKS * CHUNK <= size <= 4 * 4 * 4096 + 4 * CHUNKS * CHUNK, (
            "for as many as are held, and no more"
        )
        assert list(tmp_path.iterdir()) == []


def test_a_part_that_a_slow_line_still_holds_is_not_written_over(tmp_path: Path) -> None:
    with unnamed_file(tmp_path) as raw:
        file = SentFile(raw)
        part = memoryview(sent(file, 1)[3])[10:20]
        for round_no in range(2, 6):
            sent(file, round_no)
        gc.collect()
        assert bytes(part) == bytes([1, 3]) * 5


def test_contributions_of_other_sizes_find_their_places(tmp_path: Path) -> None:
    with unnamed_file(tmp_path) as raw:
        file = SentFile(raw)
        for round_no, chunks in enumerate((5, 1, 9, 2, 40, 3)):
            assert holds(sent(file, round_no, chunks), round_no)


def test_more_than_was_said_stays_in_memory_and_is_right(tmp_path: Path) -> None:
    with unnamed_file(tmp_path) as raw:
        file = SentFile(raw)
        file.begin(CHUNK)
        found = [file.put(bytes([9, chunk]) * (CHUNK // 2)) for chunk in range(5)]
        assert holds(found, 9) and isinstance(found[0], memoryview) and isinstance(found[-1], bytes)


def test_a_disk_that_is_full_costs_memory_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = []

    def full(number: int, payload: bytes, at: int) -> int:
        written.append(at)
        if len(written) == 3:
            return len(payload) - 1
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "no space left")
        return pwrite(number, payload, at)

    pwrite = os.pwrite
    monkeypatch.setattr(delta_encoder.os, "pwrite", full)
    with unnamed_file(tmp_path) as raw, caplog.at_level(logging.WARNING):
        file = SentFile(raw)
        assert holds(sent(file, 1), 1) and holds(sent(file, 2), 2)
    assert len(written) == 3 and len(caplog.records) == 1, "it is not tried again"


def test_without_a_file_or_with_too_many_places_everything_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(isinstance(each, bytes) for each in sent(SentFile(None), 1))
    monkeypatch.setattr(delta_encoder, "PLACES_MOST", 1)
    with unnamed_file(tmp_path) as raw:
        file = SentFile(raw)
        first, second = sent(file, 1), sent(file, 2)
        assert isinstance(first[0], memoryview) and isinstance(second[0], bytes)
        assert holds(first, 1) and holds(second, 2)


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4", "topk"])
def test_the_bytes_of_a_contribution_are_those_that_were_encoded(tmp_path: Path, codec: str) -> None:
    model = ModelSchema((), 64, 4, 4, bytes(32))
    rules, delta = (
        RoundSection(codec=codec, gather_codec="int8"),
        torch.randn(4 * 64, generator=torch.Generator().manual_seed(3)),
    )
    with unnamed_file(tmp_path) as raw:
        states = [
            OuterState(torch.zeros(4 * 64), model, rules, Nesterov(), files=Files(sent=file))
            for file in (None, raw)
        ]
        effect = Encode(1, 0, codec, (2, 0, 3, 1), 0)
        in_memory, in_file = (
            {index: payload for made, _ in state.encode(delta, effect) for index, payload in made.items()}
            for state in states
        )
        assert {index: bytes(each) for index, each in in_file.items()} == in_memory
        assert all(isinstance(each, memoryview) for each in in_file.values())
        for state in states:
            state.resolve(delta, used=False)
        first, second = (residual_of(state) for state in states)
        assert (first is None and second is None) or (first is not None and torch.equal(first, second))
        assert len(in_file[0]) == codec_named(codec).payload_bytes(64)
