"""Who else has what an owner of a mesh contributes to its own chunks.  Pure.

Everybody sends its contribution to owners; what an owner itself adds to its own chunks would be nowhere else.  When
it died after the decision, one contribution could not be had any more, all weights changed, and a thousand members
made all sums and results anew.  So each of these pieces goes to another owner of the group, too, after everything
else; that one shows the coordinator that it has it, and is the heir (coordinator/rounds/reassignment.py).  It costs
the line of an owner its share of one contribution, where groups have many members a few percent; in a flat round of
four it would be a third, so there nobody does it.

Used by the round at a member (mesh_round.py).  Must not know frames.  Only the sender asks who it is: whoever gets such
a piece takes it for what it is, one piece of each chunk that others own at most.
"""

from __future__ import annotations

import math
from collections import Counter

from farflung.protocol.digests import hash_bytes
from farflung.protocol.round_words import Plan


def spare_of(plan: Plan, chunk: int) -> str | None:
    """Who should have what the owner of this chunk adds to it; None: nobody.

    Drawn for each chunk by how much a peer owns, since that says what its line carries.  When one of the others dies,
    only what it was to keep goes to somebody else.
    """
    counts = Counter(plan.owners)
    del counts[plan.owners[chunk]]
    return min((plan.members[at] for at in counts), key=lambda peer: _turn(plan, peer, chunk), default=None)


def keeps(plan: Plan, sender: str, chunk: int) -> bool:
    """What it sends is its own part of a chunk that it owns."""
    return plan.owner_of(chunk) == sender


def moved(before: Plan, after: Plan, chunks: list[int]) -> list[int]:
    """Of these, which their owner had before: those that somebody else keeps from now on."""
    stay = [chunk for chunk in chunks if before.owner_of(chunk) == after.owner_of(chunk)]
    return [chunk for chunk in stay if spare_of(before, chunk) != spare_of(after, chunk)]


def _turn(plan: Plan, peer: str, chunk: int) -> float:
    drawn = int.from_bytes(hash_bytes(chunk.to_bytes(4, "little"), peer.encode())[:8], "little")
    return -math.log((drawn + 1) / (2**64 + 1)) / len(plan.chunks_of(peer))
