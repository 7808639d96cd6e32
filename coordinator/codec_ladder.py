"""codec = "auto": which codec each member's own contribution travels in.  Pure.

Owns: when a member moves along the ladder of codecs.  Called by the conductor when it opens a round.
Must not know: tensors, sockets, how a rate was measured.

A member's contribution leaves through its own uplink, so only that decides: it gets the finest codec that is sent
in time.  Near the border a noisy rate would change the codec each round, and error feedback settles better when it
stays: a member moves to a finer codec only if that one leaves room to spare, and to a coarser one only when its own
no longer fits.
"""

from __future__ import annotations

from collections.abc import Mapping

from farflung.collectives.ladder import LADDER

ROOM = 1.2  # a finer codec must fit even if sending took so many times as long


def codecs_by_member(
    bytes_by_codec: Mapping[str, int],
    up_bytes_per_s: Mapping[str, float | None],
    target_s: float,
    last: Mapping[str, str],
) -> dict[str, str]:
    """member -> codec, for every member in `up_bytes_per_s`.

    bytes_by_codec  size of a whole contribution; codecs of the ladder that are missing here are not used
    up_bytes_per_s  None or 0: not known
    target_s        how long sending a contribution may take
    last            member -> what it was given for the round before
    """
    steps = [name for name in LADDER if name in bytes_by_codec]
    assert steps and target_s > 0
    sent_bytes = {name: bytes_by_codec[name] for name in steps}
    return {
        member: _codec(sent_bytes, rate, target_s, last.get(member))
        for member, rate in up_bytes_per_s.items()
    }


def _codec(sent_bytes: Mapping[str, int], rate: float | None, target_s: float, last: str | None) -> str:
    """`sent_bytes` runs from fine to coarse."""
    steps = list(sent_bytes)
    at = steps.index(last) if last in steps else 0
    if not rate:
        return steps[at]  # a rate that got lost says nothing new
    seconds = {name: size / rate for name, size in sent_bytes.items()}
    for name in steps[:at]:
        if seconds[name] * ROOM <= target_s:
            return name
    for name in steps[at:]:
        if seconds[name] <= target_s:
            return name
    return steps[-1]
