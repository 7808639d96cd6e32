"""Who reduces which chunk.  Pure; called by the coordinator's rounds.

Shares are even for now; they take the members in a given order so that a later measure of bandwidth
changes only this file.  A peer that can't be dialled owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign(chunk_count: int, members: Sequence[str], dialable: set[str]) -> tuple[int, ...]:
    """chunk -> index in `members`.  Contiguous runs, sizes differing by at most one."""
    hosts = [index for index, member in enumerate(members) if member in dialable]
    if not hosts:
        return ()
    return tuple(hosts[chunk * len(hosts) // chunk_count] for chunk in range(chunk_count))


def reassign(owners: Sequence[int], lost: set[int], heirs: Sequence[int]) -> tuple[int, ...]:
    """Give the chunks of the lost owners to the heirs, least loaded first; all others stay put."""
    load = {heir: sum(1 for owner in owners if owner == heir) for heir in heirs}
    moved = list(owners)
    for chunk, owner in enumerate(owners):
        if owner in lost:
            heir = min(load, key=lambda index: (load[index], index))
            moved[chunk] = heir
            load[heir] += 1
    return tuple(moved)
