"""Why does the peer of this screen wait, since when, and what ends it?  One sentence, from second 0.  Pure.

Called by embedded.py, which reads what the peer itself says (peer/agent/waits.py) and what the coordinator's status
says.  The peer knows best what comes before it is in, the coordinator what holds up a round; nothing is guessed from
the row of a member with the same id, which may be another process.  The words are those of the log.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from farflung.console.screen.health import takes_part, why_not
from farflung.console.screen.text import Record, clean, count, known, number, records
from farflung.protocol.process.units import duration
from farflung.protocol.states import PeerState, RunPhase

INSIDE = ("", "round", "data", "told", "fetching", "reading", "founding")  # causes of a peer that was let in
TEXT_MOST = 400
_ENDS = {
    "loading": "then it asks to be let in",
    "trainer": "then it asks to be let in",
    "refused": "it asks again by itself",
    "founding": "then the first round begins",
    "fetching": "then it trains",
}
_STARTING = "starting Python"
_NUMBERS = re.compile(r"[0-9.]+")


class Waited(NamedTuple):
    text: str  # empty: it trains
    ends: str = ""  # what ends it, where the text does not say so

    @property
    def key(self) -> str:
        """Other numbers in it are the same wait."""
        return _NUMBERS.sub("", self.text)


def own_member(status: Record, own: Record) -> Record:
    """This peer, as the coordinator sees it: not before it was let in, or it might be another process."""
    if own.get("wait") not in INSIDE:
        return {}
    return next((each for each in records(status, "members") if each.get("id") == own.get("me")), {})


def waited(status: Record, own: Record) -> Waited:
    """`own`: what the peer said last, with `wait`, its cause, and `why`, the sentence."""
    cause = own.get("wait")
    if not isinstance(cause, str):
        return Waited(_STARTING)
    if cause and cause != "round":
        return Waited(clean(own.get("why"), TEXT_MOST), _ENDS.get(cause, ""))
    if known(status, "unanswered_s") is not None:
        return Waited("")  # the status is old, and the line below says so
    member = own_member(status, own)
    if not member:
        return Waited("")
    least, here = number(status, "least_peers"), sum(map(_counts, records(status, "members")))
    if status.get("phase") == RunPhase.WAITING and here < least:
        return Waited(
            f"waiting for min_peers ({here} of {least:.0f} here)", "another peer that joins ends it"
        )
    if member.get("alive") is True and not takes_part(member):
        return Waited(f"not in the rounds: {why_not(member)}")
    if member.get("state") == PeerState.READY:
        reason = clean(status.get("reason"), TEXT_MOST) or "the others are not ready"
        return Waited(f"step {count(member, 'step')}, waiting for the next round: {reason}")
    return Waited("")


def _counts(member: Record) -> bool:
    return takes_part(member) and member.get("helps") is not True


def why_waiting(status: Record, own: Record, now: float) -> str:
    """The line; empty while it trains.  `now`: on the clock of `since`, which stands in `own` with the sentence."""
    found = waited(status, own)
    if not found.text:
        return ""
    since = known(own, "since")
    seconds = f", for {duration(max(0.0, now - since))}" if since is not None else ""
    return f"{found.text}{seconds}" + (f"; {found.ends}" if found.ends else "")
