"""Which version members hold, by what they say and show.  Pure."""

from __future__ import annotations

import msgspec

from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.messages import Beat, FragmentBeat


def newest_held(driver: RoundDriver, settled: bool = False, heard_since: float = float("-inf")) -> int:
    """`settled`: that the run has agreed on the digest of.  `heard_since`: by somebody who spoke since then."""
    book, newest = driver.book, -1
    for member in driver.holders:
        said = driver.beat_of(member)
        if newest >= book.version:
            break  # in a crowd it is nearly always the first one
        if said is None or said.version <= newest or member.heard_at < heard_since:
            continue
        # A version whose digest is not settled yet is held; so is one that this journal does not know.
        known = book.digests.get(said.version)
        unknown = known is None and said.version >= book.version and not settled
        due = book.shown.get(said.version)
        # An echo of the digest holds nothing.
        shows = due is None or driver.agreement.has_shown(said) == due
        if (said.digest == known and shows) or unknown:
            newest = said.version
    return min(newest, book.version)


def in_this_era(beat: Beat, era: int) -> Beat:
    """A member that has not heard yet that the run went back holds nothing of it, whatever its numbers say."""
    if beat.era >= era:
        return beat
    return msgspec.structs.replace(beat, fragments=tuple(map(_nothing_of, beat.fragments)))


def _nothing_of(said: FragmentBeat) -> FragmentBeat:
    return FragmentBeat(said.fragment, -1, b"", 0, 0, 0, False, ())
