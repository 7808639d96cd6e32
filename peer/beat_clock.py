"""How long the coordinator takes to answer: from each beat to the tick that answers it, and on the way there.

Owned by the agent, which shows it what is said and heard.  Must not know: why anybody wants to know.
"""

from __future__ import annotations

from typing import NamedTuple

from farflung.coordinator.messages import Beat, Tick

ON_WAY_MOST = 64  # beats without an answer; the oldest are forgotten


class Took(NamedTuple):
    both_ways_s: float
    there: float  # seconds, on two clocks that began at different times: only differences between these mean anything


class BeatClock:
    def __init__(self) -> None:
        self._said_at: dict[int, float] = {}  # seq -> when it was handed to the socket

    def on_said(self, message: object, now: float) -> None:
        if isinstance(message, Beat):
            self._said_at[message.seq] = now
            for seq in list(self._said_at)[:-ON_WAY_MOST]:
                del self._said_at[seq]

    def on_heard(self, message: object, now: float) -> Took | None:
        """What this answer took, if it answers a beat."""
        if not isinstance(message, Tick) or message.answers not in self._said_at:
            return None
        said_at = self._said_at[message.answers]
        self._said_at = {seq: at for seq, at in self._said_at.items() if seq > message.answers}
        return Took(now - said_at, message.heard_s - said_at)

    def forget(self) -> None:
        """The connection was made anew: what is under way is lost."""
        self._said_at.clear()
