"""How much memory of this machine a process may still take: what is free, and what its container allows.

Called by the doctor and by trainers before they join.  What a container has read from files is counted as its own, but
the kernel gives that back as soon as memory is wanted: it is free.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (  # the limit, what is used of it and of what that consists, in version 2 and in version 1
    (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory.current"),
        Path("/sys/fs/cgroup/memory.stat"),
    ),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.stat"),
    ),
)
_CACHE = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")


def available_bytes() -> int:
    """0 where this system does not say."""
    free = _free_bytes()
    for limit, used, stat in _CGROUPS:
        left = _number(limit)
        if left is not None and (taken := _number(used)) is not None:
            free = min(free, max(0, left - max(0, taken - _cache_bytes(stat))))
    return free


def _cache_bytes(stat: Path) -> int:
    """Of files that can be read again; shared memory is none of them.  Version 1 has the totals of its children too."""
    try:
        rows = dict(
            line.split(" ", 1) for line in stat.read_text(encoding="ascii").splitlines() if " " in line
        )
    except OSError:
        return 0
    own, whole = (sum(int(rows.get(name, 0)) for name in names) for names in (_CACHE[:2], _CACHE[2:]))
    return max(own, whole)


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
