"""What chunks were before they changed: kept once, by fragment, and never at the cost of a round."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import numpy as np
import pytest
import torch

from farflung.collectives.round.effects import Install, Roll
from farflung.compression.plain_codecs import encode
from farflung.optim.recipes import outer_of
from farflung.peer.state.outer_state import BeforeImages, OuterState, unnamed_file
from farflung.protocol.digests import drawn_chunk, hash_bytes, keyed_hash, root_of, split_hashes
from farflung.protocol.manifest import Manifest, RoundSection
from farflung.protocol.messages import Show, What
from farflung.protocol.model_schema import ModelSchema, fragments_of

ELEMENTS, CHUNKS = 4, 6
MODEL = ModelSchema((), ELEMENTS, CHUNKS, CHUNKS, bytes(32))
FRAGMENTS = fragments_of(CHUNKS, 2)
MANIFEST = Manifest(round=RoundSection(fragments=2))
NONCE = hash_bytes(b"nonce")


class Full(io.BytesIO):
    """A disk with room for so many bytes."""

    room = 0

    def write(self, raw: object) -> int:
        size = len(memoryview(raw))  # type: ignore[arg-type]
        if self.room < size:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size
        return super().write(raw)  # type: ignore[arg-type]


def state(chunk: int, version: int) -> bytes:
    return bytes([16 * chunk + version]) * (8 * ELEMENTS)


def keep(images: BeforeImages, chunk: int, version: int) -> None:
    raw = memoryview(state(chunk, version))
    images.keep(chunk, (raw[: 4 * ELEMENTS], raw[4 * ELEMENTS :]))


def made(file: io.BytesIO | None = None) -> BeforeImages:
    return BeforeImages(io.BytesIO() if file is None else file, 8 * ELEMENTS, FRAGMENTS)


def test_P18_a_chunk_is_kept_as_it_was_before_its_first_change() -> None:
    images = made()
    images.begin(0, 7, b"list")
    for version in (7, 8, 9):
        keep(images, 1, version)
    assert images.shown(0, 1) == (7).to_bytes(8, "little") + state(1, 7)
    assert images.shown(0, 0) is None, "it has not changed: it is what it was"
    assert images.hashes_at(0, 7) == b"list" and images.hashes_at(0, 8) is None


def test_nothing_is_kept_before_it_is_asked_for() -> None:
    images = made()
    keep(images, 1, 7)
    assert images.shown(0, 1) is None


def test_P18_each_fragment_is_kept_by_itself() -> None:
    images = made()
    for fragment, version in ((0, 3), (1, 5)):
        images.begin(fragment, version, b"list")
        for chunk in FRAGMENTS[fragment].chunks:
            keep(images, chunk, version)
    images.begin(0, 4, b"list")
    assert images.shown(0, 0) is None and images.hashes_at(0, 3) is None
    for chunk in FRAGMENTS[1].chunks:
        assert images.shown(1, chunk) == (5).to_bytes(8, "little") + state(chunk, 5)
    images.begin(1, 6, b"list")
    assert images.shown(1, FRAGMENTS[1].chunks.start) is None, (
        "what the file still holds is of an older version"
    )


def test_P18_a_new_confirmed_version_takes_the_place_of_the_older_one() -> None:
    images = made()
    images.begin(0, 3, b"old list")
    keep(images, 0, 3)
    keep(images, 1, 3)
    images.begin(0, 4, b"list")
    keep(images, 1, 4)
    assert images.shown(0, 0) is None, (
        "what it was at version 3 does not lead to what is held from version 4 on"
    )
    assert images.shown(0, 1) == (4).to_bytes(8, "little") + state(1, 4)


def test_a_full_disk_costs_the_proof_of_that_fragment_and_nothing_else() -> None:
    file = Full()
    file.room = 8 * ELEMENTS + 4 * ELEMENTS
    images = made(file)
    images.begin(0, 3, b"list")
    images.begin(1, 5, b"list")
    keep(images, 3, 5)
    keep(images, 0, 3)
    assert images.shown(0, 0) is None and images.hashes_at(0, 3) is None, "half a chunk is no proof"
    assert images.shown(1, 3) is not None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_disk_that_is_full_only_when_the_bytes_leave_the_buffer_costs_the_proof_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was written into a buffer may fail whenever that is emptied: when others are asked."""

    def full(dir: Path, buffering: int = -1) -> object:
        return open("/dev/full", "r+b", buffering=buffering)

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with unnamed_file(tmp_path) as file:
        images = BeforeImages(file, 8 * ELEMENTS, FRAGMENTS)
        images.begin(0, 3, b"list")
        keep(images, 0, 3)
        keep(images, 1, 3)
        assert images.shown(0, 0) is None


# ---- what the outer state shows ------------------------------------------------------------------------------------


def outer_state() -> OuterState:
    chance = torch.Generator().manual_seed(1)
    anchor = torch.randn(CHUNKS * ELEMENTS, generator=chance)
    made_state = OuterState(anchor, MODEL, MANIFEST.round, outer_of(MANIFEST))
    made_state.restart_moments()
    for fragment in range(2):
        made_state.seal(fragment)
    return made_state


def roll(made_state: OuterState, chunk: int, version: int) -> None:
    delta = np.full(ELEMENTS, 0.5 + chunk, np.float32)
    made_state.roll(Roll(chunk, version, encode(MANIFEST.round.gather_codec, delta)))


def show(what: What, version: int, chunk: int = 3, fragment: int = 1) -> Show:
    return Show(
        session=bytes(16), seq=1, question=1, what=what, fragment=fragment, version=version, chunk=chunk, start=0,
        round_no=0, peer="",
    )  # fmt: skip


def test_P18_what_is_held_is_shown_by_the_bytes_of_the_chunk_that_the_nonce_names() -> None:
    made_state = outer_state()
    for fragment in FRAGMENTS:
        chunk = fragment.first + drawn_chunk(NONCE, fragment.count)
        wanted = keyed_hash(NONCE, made_state.chunk_bytes(chunk))
        assert made_state.prove_holding(fragment.number, NONCE) == wanted


def test_P18_before_and_after_a_version_its_lists_and_chunks_are_shown() -> None:
    made_state = outer_state()
    old_list, old_chunk = made_state.manifest_bytes(1), made_state.chunk_bytes(3)
    made_state.keep_before(1, 4)
    for chunk in FRAGMENTS[1].chunks:
        roll(made_state, chunk, 5)
    assert made_state.shown(show(What.STATE, 5)) is None, "it is no version yet"
    assert made_state.shown(show(What.HASHES, 5)) is None
    assert made_state.shown(show(What.HASHES, 4)) == old_list
    digest = made_state.seal(1)
    new_list = made_state.shown(show(What.HASHES, 5))
    assert new_list is not None and new_list != old_list and root_of(split_hashes(new_list)) == digest
    assert made_state.shown(show(What.HASHES, 4)) == old_list
    assert made_state.shown(show(What.BEFORE, 5)) == (4).to_bytes(8, "little") + old_chunk
    shown = made_state.shown(show(What.STATE, 5))
    assert shown == made_state.chunk_bytes(3) and shown != old_chunk
    assert hash_bytes(shown) == split_hashes(new_list)[0]


@pytest.mark.parametrize("chunk", [0, 2, 6, 1 << 40])
def test_P8_a_chunk_of_another_fragment_is_not_shown(chunk: int) -> None:
    made_state = outer_state()
    made_state.keep_before(1, 4)
    for what in (What.STATE, What.BEFORE):
        assert made_state.shown(show(what, 5, chunk)) is None


def test_what_is_not_the_outer_states_to_show_is_not_shown() -> None:
    for what in (What.RESULT, What.CONTRIBUTION):
        assert outer_state().shown(show(what, 0)) is None


def test_P18_the_other_fragment_goes_on_being_shown_while_one_is_torn() -> None:
    made_state = outer_state()
    made_state.install(Install(0, 1, made_state.chunk_bytes(0)))
    assert made_state.shown(show(What.HASHES, 0, 0, 0)) is None
    assert made_state.shown(show(What.STATE, 0)) == made_state.chunk_bytes(3)


# ---- going back by one version ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [0, 1, 3])
def test_what_rolled_on_becomes_what_it_was_bit_by_bit_however_far_that_went(moved: int) -> None:
    mine, chunks = outer_state(), FRAGMENTS[0].chunks
    was, digest = [mine.chunk_bytes(chunk) for chunk in chunks], mine.digests[0]
    mine.keep_before(0, 0)
    for chunk in list(chunks)[:moved]:
        roll(mine, chunk, 1)
    if moved == len(chunks):
        assert mine.seal(0) != digest
    assert all([mine.undo(0, chunk, 0) for chunk in chunks])
    assert [mine.chunk_bytes(chunk) for chunk in chunks] == was and mine.seal(0) == digest


def test_what_was_never_kept_or_came_from_somewhere_else_can_not_be_undone() -> None:
    mine, chunks = outer_state(), FRAGMENTS[0].chunks
    assert not mine.undo(0, chunks.start, 0), "nothing was kept"
    mine.keep_before(0, 0)
    mine.install(Install(chunks.start, 1, bytes(8 * ELEMENTS)))  # a chunk that was fetched: it is not kept
    assert not mine.undo(0, chunks.start, 0) and mine.undo(0, chunks.start + 1, 0)
    assert not mine.undo(0, chunks.start + 1, 7), "another version"
