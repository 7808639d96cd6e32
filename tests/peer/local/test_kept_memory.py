"""What a process lets go of its memory: it weighs less, and everything still works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from farflung.peer.local import memory
from farflung.peer.local.memory import let_go_of_text

linux = pytest.mark.skipif(sys.platform != "linux", reason="smaps and madvise are Linux's")


def resident_of_files_kb() -> int:
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


@linux
def test_program_text_that_is_let_go_comes_back_when_it_is_needed() -> None:
    values = torch.arange(4096.0)
    before, wanted = resident_of_files_kb(), torch.fft.fft(values)
    let_go_of_text()
    assert resident_of_files_kb() < before / 2  # with torch it is 80 MB, of which a few are needed at once
    assert torch.equal(torch.fft.fft(values), wanted)


@linux
def test_pages_that_the_file_does_not_have_are_kept() -> None:
    """A library's table of addresses is read-only once it is made, and exists in memory alone."""
    kept = {first for first, _ in memory._unchanged_text()}
    changed = re.findall(
        r"^([0-9a-f]+)-\S+ r-[x-]p \S+ \S+ [1-9]\d* (?:.*\n)(?:[A-Z].*\n)*?Anonymous: +[1-9]",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    assert changed and not kept & {int(first, 16) for first in changed}


def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", None)
    let_go_of_text()
