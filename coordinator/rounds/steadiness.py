"""Whose process stays for as long as it owes something, and who is not counted on for a while.  Pure.

A member owes the others its part in a round that is in flight, and for two commits the bytes that it contributed:
nobody can audit a sum without them.  Whoever comes back as another process has neither.  Machines crash, and that is
nobody's fault; but an accomplice could restart after every round, so that what its owner sums is never looked at, or
in the middle of each, so that chunks move again and again.  So the first restarts cost nothing, and with each further
one of the last so many commits a member stays out of twice as many rounds, and nobody waits for it.  Where too few
others are there, it takes part all the same.

Owned by the driver of a fragment.  Not durable: a coordinator that restarts forgives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from farflung.protocol.limits import ROUNDS_KEPT

FORGIVEN = 2  # restarts that owed something, among so many commits
WINDOW = 64


class Steadiness:
    def __init__(self) -> None:
        self._commits = 0
        self._owes: dict[str, tuple[bytes, int]] = {}  # member -> the process that contributed last, and when
        self._broken: dict[str, deque[int]] = {}  # member -> when it came back without what it owed
        self._gone: dict[str, bytes] = {}  # member -> its process that is known to be gone

    def on_commit(self, processes: Mapping[str, bytes]) -> None:
        """`processes`: of the members whose contributions are in it."""
        self._commits += 1
        self._owes = {peer: owed for peer, owed in self._owes.items() if self._is_kept(owed[1])}
        self._owes |= {peer: (process, self._commits) for peer, process in processes.items()}
        for peer, when in list(self._broken.items()):
            while when and self._commits - when[0] >= WINDOW:
                when.popleft()
            if not when:
                del self._broken[peer], self._gone[peer]

    def comes(self, peer: str, process: bytes, was_in_round: bytes) -> None:
        """A session begins.  `was_in_round`: its process that the round in flight counts on; empty: none."""
        before, at = self._owes.get(peer, (process, 0))
        owed = {before} if self._is_kept(at) else set()
        gone = (owed | {was_in_round}) - {b"", process, self._gone.get(peer)}
        if gone:  # of both it is the same process that is gone
            self.breaks(peer, gone.pop())

    def breaks(self, peer: str, process: bytes) -> None:
        """Of this process nothing that was owed is here any more: it is gone, or has lost its state in a round."""
        self._gone[peer] = process
        self._broken.setdefault(peer, deque(maxlen=WINDOW)).append(self._commits)

    def rounds_out(self, peer: str) -> int:
        """So many more commits are made without it, if there are others to make them."""
        when = self._broken.get(peer)
        if not when or len(when) <= FORGIVEN:
            return 0
        stays = min(WINDOW, 1 << (len(when) - FORGIVEN))
        return max(0, when[-1] + stays - self._commits)

    def counted_on(self, peers: Iterable[str]) -> set[str]:
        return {peer for peer in peers if not self.rounds_out(peer)}

    def _is_kept(self, at: int) -> bool:
        return self._commits - at < ROUNDS_KEPT
