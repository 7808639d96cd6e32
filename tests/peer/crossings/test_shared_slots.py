"""The belt: what one process writes into a slot, the other one reads, and nothing else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.peer.crossings.shared_slots import GIVEN, MADE, PLACES, RETURNED, SharedSlots, slot_of
from farflung.protocol.errors import UserError

SLOT_BYTES = 100  # no multiple of a cache line


def test_every_slot_keeps_its_own_bytes(tmp_path: Path) -> None:
    belt = SharedSlots.create(tmp_path / "belt", PLACES, SLOT_BYTES)
    full = [bytes([slot + 1]) * SLOT_BYTES for slot in range(belt.slots)]
    for slot, payload in enumerate(full):
        assert belt.write(slot, payload) == SLOT_BYTES
    assert [belt.read(slot, SLOT_BYTES) for slot in range(belt.slots)] == full
    assert belt.slots == 3 * PLACES


def test_the_slots_of_a_place_are_those_of_the_word(tmp_path: Path) -> None:
    assert [slot_of(2, which) for which in (GIVEN, RETURNED, MADE)] == [6, 7, 8]


def test_another_process_sees_what_is_written_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "belt"
    belt = SharedSlots.create(path, PLACES, SLOT_BYTES)
    size = belt.write(slot_of(1, GIVEN), b"there")
    script = (
        "from farflung.peer.crossings.shared_slots import *\n"
        f"belt = SharedSlots.open({str(path)!r}, {PLACES}, {SLOT_BYTES})\n"
        f"belt.write(slot_of(1, MADE), belt.read(slot_of(1, GIVEN), {size}) + b' and back')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert belt.read(slot_of(1, MADE), 14) == b"there and back"


def test_a_view_is_the_slot_and_no_copy(tmp_path: Path) -> None:
    belt = SharedSlots.create(tmp_path / "belt", 1, SLOT_BYTES)
    belt.view(1)[:3] = b"abc"
    assert belt.read(1, 3) == b"abc" and len(belt.view(1)) == SLOT_BYTES


@pytest.mark.parametrize("slot", [-1, 6])
def test_there_is_no_slot_beyond_the_belt(tmp_path: Path, slot: int) -> None:
    belt = SharedSlots.create(tmp_path / "belt", PLACES, SLOT_BYTES)
    with pytest.raises(ValueError, match=f"slot {slot} of a belt with 6"):
        belt.view(slot)


def test_what_is_too_long_is_refused_and_reaches_no_neighbour(tmp_path: Path) -> None:
    belt = SharedSlots.create(tmp_path / "belt", PLACES, SLOT_BYTES)
    with pytest.raises(ValueError, match="101 bytes, and a slot has 100"):
        belt.write(0, b"x" * (SLOT_BYTES + 1))
    with pytest.raises(ValueError, match="101 bytes of a slot"):
        belt.read(0, SLOT_BYTES + 1)
    assert belt.read(0, SLOT_BYTES) == belt.read(1, SLOT_BYTES) == bytes(SLOT_BYTES)


def test_a_belt_of_other_numbers_is_not_opened(tmp_path: Path) -> None:
    SharedSlots.create(tmp_path / "belt", PLACES, SLOT_BYTES)
    with pytest.raises(ValueError, match="1 places with slots of 100"):
        SharedSlots.open(tmp_path / "belt", 1, SLOT_BYTES)


def test_a_belt_is_made_anew_for_a_trainer_that_wants_longer_slots(tmp_path: Path) -> None:
    SharedSlots.create(tmp_path / "belt", PLACES, SLOT_BYTES).write(0, b"old")
    longer = SharedSlots.create(tmp_path / "belt", PLACES, 2 * SLOT_BYTES)
    assert (
        longer.read(0, 3) == bytes(3)
        and SharedSlots.open(tmp_path / "belt", PLACES, 2 * SLOT_BYTES).slots == 6
    )


def test_only_this_user_may_read_it(tmp_path: Path) -> None:
    SharedSlots.create(tmp_path / "belt", PLACES, SLOT_BYTES)
    assert stat.S_IMODE((tmp_path / "belt").stat().st_mode) == 0o600


def test_without_room_it_says_what_to_do_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"no room for the 6 MiB .*No space left.*make /dev/shm larger"):
        SharedSlots.create(tmp_path / "belt", PLACES, 1 << 20)
    assert not (tmp_path / "belt").exists()


def test_its_room_is_taken_when_it_is_made(tmp_path: Path) -> None:
    """A sparse file that grows on a full /dev/shm would kill whoever writes."""
    SharedSlots.create(tmp_path / "belt", PLACES, 1 << 20)
    assert (tmp_path / "belt").stat().st_blocks * 512 >= 6 << 20
