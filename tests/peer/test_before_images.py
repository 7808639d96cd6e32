"""What chunks were before: the file for it on a machine where this peer has never run."""

from __future__ import annotations

from pathlib import Path

from farflung.peer.state.outer_state import unnamed_file


def test_a_peer_s_first_start_makes_the_folder_and_leaves_no_name_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    with unnamed_file(folder) as file:
        file.write(b"before")
        assert list(folder.iterdir()) == []
