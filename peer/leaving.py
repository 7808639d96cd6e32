"""Taking one's leave: a peer that is asked to go stays for the rounds that it is in, a short while.  Pure.

Part of the peer machine.  To stay costs the others nothing: what it contributed is used, and what it owns is merged
where it is.  It says in its beats that it is leaving, so nobody counts on it for another round or waits for it.  Who
is asked twice, or whose round takes too long, goes at once: the coordinator then moves its chunks to others.
"""

from __future__ import annotations

from farflung.peer.participation import Participation

STAY_S = 8.0  # less than a script waits for its agent, and than containers get between SIGTERM and SIGKILL


class Leaving:
    def __init__(self) -> None:
        self.reason = self.code = ""
        self._until = 0.0

    @property
    def asked(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str, code: str, now: float) -> None:
        self.reason, self.code = reason or "it left", code
        self._until = now + STAY_S

    def may_go(self, part: Participation | None, inside: bool, now: float) -> bool:
        """Nothing is left to stay for."""
        return self.asked and (part is None or not part.in_round or not inside or now >= self._until)
