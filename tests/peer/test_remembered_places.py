"""The file with a coordinator's addresses: one for each run, whole or as it was, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

from farflung.peer.first_contact import RememberedPlaces
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import WHEREABOUTS_BYTES
from farflung.protocol.process.log_lines import Teller

URL = JoinUrl("h", 1, "demo", bytes(range(32)))
SAY = Teller("test")


def test_what_was_kept_is_there_in_the_next_life_and_for_this_run_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert RememberedPlaces(folder, URL, SAY).load() == b""
    RememberedPlaces(folder, URL, SAY).save(b"one")
    RememberedPlaces(folder, URL, SAY).save(b"two")
    assert RememberedPlaces(folder, URL, SAY).load() == b"two"
    assert RememberedPlaces(folder, JoinUrl("other", 7, "demo", URL.key), SAY).load() == b"two"
    for other in (JoinUrl("h", 1, "demo", bytes(32)), JoinUrl("h", 1, "demo-2", URL.key)):
        assert RememberedPlaces(folder, other, SAY).load() == b""
    [path] = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_can_not_be_a_list_is_not_read(tmp_path: Path) -> None:
    places = RememberedPlaces(tmp_path, URL, SAY)
    places.path.write_bytes(bytes(WHEREABOUTS_BYTES + 1))
    assert places.load() == b""
    places.path.unlink()
    os.mkfifo(places.path)
    assert places.load() == b"", "nobody waits for a pipe's writer"


def test_a_disk_that_can_not_be_written_is_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "state").write_text("no folder")

    def hear(text: str, routine: bool = False, **facts: str) -> None:
        said.append(text)

    places = RememberedPlaces(tmp_path / "state", URL, hear)
    places.save(b"one")
    places.save(b"two")
    assert len(said) == 1 and "can't be kept here" in said[0]
