"""What is kept of microbatches: what a dict would hold, in memory and on disk, until the version is forgotten."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.collectives.pipeline.effects import KeptPiece
from farflung.peer.crossings import crossing_hand
from farflung.peer.crossings.crossing_hand import KeptCrossings
from farflung.peer.state.outer_state import unnamed_file
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Payload

_keys = st.tuples(st.integers(0, 1), st.integers(0, 1), st.sampled_from([KeptPiece.INPUT, KeptPiece.GIVEN]))
_keeps = st.tuples(_keys, st.binary(max_size=40), st.sampled_from([bytes, bytearray, memoryview]))
_steps = st.lists(st.one_of(_keeps, _keeps, _keys, st.integers(-1, 2)), min_size=1, max_size=40)


@settings(max_examples=150)
@given(limit=st.sampled_from([0, 20, 50, 10_000]), steps=_steps)
def test_P16_it_gives_back_what_a_dict_would(tmp_path_factory: pytest.TempPathFactory, limit, steps) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.getbasetemp() / "crossings"
    kept, model = KeptCrossings(folder, limit), dict[tuple[int, int, KeptPiece], bytes]()
    for step in steps:
        if isinstance(step, int):
            kept.forget(step)
            model = {key: payload for key, payload in model.items() if key[0] > step}
        elif isinstance(step[0], tuple):
            key, payload, kind = step
            kept.keep(*key, kind(payload))
            model[key] = payload
        else:
            assert _of(kept, step) == model.get(step)
        assert {key: _of(kept, key) for key in model} == model
        whole = sum(map(len, model.values()))
        assert kept.memory_bytes <= limit and kept.memory_bytes + kept.disk_bytes >= whole
        if whole <= limit and not kept.disk_bytes:
            assert kept.memory_bytes == whole
        assert not folder.exists() or not list(folder.iterdir()), "a file has no name, at any moment"
    kept.close()
    kept.close()
    assert (kept.memory_bytes, kept.disk_bytes) == (0, 0)
    assert all(kept.get(*key) is None for key in model)


def _of(kept: KeptCrossings, key: tuple[int, int, KeptPiece]) -> bytes | None:
    found = kept.get(*key)
    return None if found is None else bytes(found)


def test_what_is_forgotten_gives_its_room_back(tmp_path: Path) -> None:
    kept = KeptCrossings(tmp_path, limit_bytes=100)
    for micro in range(5):
        kept.keep(7, micro, KeptPiece.INPUT, bytes(60))
        kept.keep(8, micro, KeptPiece.INPUT, bytes(60))
    assert (kept.memory_bytes, kept.disk_bytes) == (60, 540)
    descriptors = len(os.listdir("/proc/self/fd"))
    kept.forget(7)
    assert (kept.memory_bytes, kept.disk_bytes) == (0, 300)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1, "the file of version 7 is closed"
    kept.keep(8, 0, KeptPiece.INPUT, b"1" * 50)
    assert (kept.memory_bytes, kept.disk_bytes) == (50, 300), "in memory again, where there is room"
    assert kept.get(8, 0, KeptPiece.INPUT) == b"1" * 50, "and not the older one of the disk"
    kept.keep(8, 0, KeptPiece.INPUT, bytes(100))
    assert kept.memory_bytes == 100, "what it replaces makes room for it"
    kept.keep(8, 0, KeptPiece.INPUT, bytes(101))
    assert (kept.memory_bytes, kept.disk_bytes) == (0, 401)
    kept.forget(8)
    assert (kept.memory_bytes, kept.disk_bytes) == (0, 0)


@dataclass
class _Disk:
    """A file that takes so many bytes."""

    file: BinaryIO
    room: list[int] = field(default_factory=lambda: [130])
    damage: bool = False

    def seek(self, at: int) -> None:
        self.file.seek(at)

    def write(self, data: Payload) -> int:
        if not self.room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), self.room[0])
        self.room[0] -= taken
        return self.file.write(data[:taken])

    def read(self, length: int) -> bytes:
        found = self.file.read(length)
        return b"?" + found[1:] if self.damage else found

    def close(self) -> None:
        self.file.close()


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _Disk(unnamed_file(tmp_path))
    monkeypatch.setattr(crossing_hand, "unnamed_file", lambda folder: disk)
    kept = KeptCrossings(tmp_path, limit_bytes=10)
    kept.keep(1, 0, KeptPiece.OUTPUT, b"first")
    kept.keep(1, 1, KeptPiece.OUTPUT, b"a" * 100)
    with pytest.raises(StoreError, match=r"No space left.*Make room"):
        kept.keep(1, 0, KeptPiece.OUTPUT, b"b" * 100)
    assert kept.get(1, 0, KeptPiece.OUTPUT) == b"first" and kept.get(1, 1, KeptPiece.OUTPUT) == b"a" * 100
    disk.room[0] = 200
    kept.keep(1, 2, KeptPiece.OUTPUT, b"c" * 100)
    assert kept.get(1, 2, KeptPiece.OUTPUT) == b"c" * 100 and kept.disk_bytes == 200, (
        "the torn one is written over"
    )
    disk.damage = True
    with pytest.raises(StoreError, match="came back damaged: the output of microbatch 2 at version 1"):
        kept.get(1, 2, KeptPiece.OUTPUT)
    kept.close()
    with pytest.raises(StoreError, match="about to end"):
        kept.keep(2, 0, KeptPiece.OUTPUT, b"")
