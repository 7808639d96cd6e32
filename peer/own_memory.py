"""What an agent's process does not keep of its memory: program text that it is done with.

Called by the agent once the model is known.  Nothing depends on it: where the system cannot do it, all goes on.
Must not know what the memory is for.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

_MADV_DONTNEED = 4
# Of a shared library, which stays where it is: what lies at the place of a file that another thread closes meanwhile
# would be lost.
_TEXT = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ [1-9]\d* .*\.so\b")

_madvise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def let_go_of_text() -> None:
    """Importing torch runs through 90 MB of program text and constants, of which hardly any is needed again.

    What is comes back from the page cache, 64 KB at a time.
    """
    if _madvise is not None:
        for first, end in _unchanged_text():
            _madvise(first, end - first, _MADV_DONTNEED)


def _unchanged_text() -> list[tuple[int, int]]:
    """Only what is still as the file has it: pages that a loader or a debugger has changed exist nowhere else."""
    found: list[tuple[int, int]] = []
    mapping: re.Match[str] | None = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "-" in line.partition(" ")[0]:
            mapping = _TEXT.match(line)
        elif mapping is not None and line.split() == ["Anonymous:", "0", "kB"]:
            found.append((int(mapping[1], 16), int(mapping[2], 16)))
    return found
