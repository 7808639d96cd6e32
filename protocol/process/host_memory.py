"""How much memory of this machine a process may still take: what is free, and what its container allows.

Called by the doctor, and by the trainer of a pipeline, which offers the stages that fit.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (  # the limit and what is used of it, in version 2 and in version 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes() -> int:
    """0 where this system does not say."""
    free = _free_bytes()
    for limit, used in _CGROUPS:
        left = _number(limit)
        if left is not None and (taken := _number(used)) is not None:
            free = min(free, max(0, left - taken))
    return free


def _free_bytes() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _number(file: Path) -> int | None:
    """None: there is no such file, or no limit ("max")."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
