"""Tells a person how far the run's state has come, and from whom: a joiner may wait minutes for it.

Called by the agent with every piece that arrives and that is taken.  Must not know how pieces are asked for or checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from farflung.peer.agent.waits import WaitCause, fetching
from farflung.protocol.caps import duration, si
from farflung.protocol.process.log_lines import LineWriter
from farflung.protocol.round_words import Contact

TELL_EVERY_S = 2.0  # what takes less is not worth a line
SURE_S = 5.0  # so long at least it comes before what is left of it is foreseen


class Fetching:
    def __init__(self, say: LineWriter) -> None:
        self._say = say
        self._names: dict[str, str] = {}
        self._pieces = 0  # of the whole state
        self._sender: dict[int, tuple[str, int]] = {}  # chunk -> who sent it last, and how many bytes
        self._taken: dict[int, tuple[str, int]] = {}
        self._began_at: float | None = None
        self._told_at = 0.0
        self._told = False

    def meet(self, roster: Iterable[Contact]) -> None:
        self._names |= {contact.peer: contact.name for contact in roster}

    def expect(self, pieces: int) -> None:
        self._pieces = pieces

    def came(self, sender: str, chunk: int, size: int) -> None:
        """A piece of state, not checked yet."""
        if 0 <= chunk < self._pieces:
            self._sender[chunk] = sender, size

    def taken(self, chunk: int, now: float) -> None:
        """It is the run's, and is being installed."""
        if chunk not in self._sender:
            return
        if self._began_at is None:
            self._began_at = self._told_at = now
        self._taken[chunk] = self._sender.pop(chunk)
        if now - self._told_at >= TELL_EVERY_S:
            self._told_at, self._told = now, True
            took_s, here = now - self._began_at, len(self._taken)
            left_s = took_s * (self._pieces - here) / max(1, here - 1) if took_s >= SURE_S else 0.0
            told = fetching(self.share) + (f", about {duration(left_s)} left" if left_s else "")
            self._say(f"{told}, {self._from_whom()}", wait=WaitCause.FETCHING.value, why=told)

    @property
    def share(self) -> float:
        return len(self._taken) / self._pieces if self._pieces else 0.0

    def sealed(self, now: float) -> None:
        """A version is whole; that is told where it was waited for."""
        if self._told and self._began_at is not None:
            self._say(f"the model is here after {duration(now - self._began_at)}: {self._from_whom()}")
        self._taken.clear()
        self._began_at, self._told = None, False

    def _from_whom(self) -> str:
        sizes: Counter[str] = Counter()
        for sender, size in self._taken.values():
            sizes[self._names.get(sender, sender)] += size
        return ", ".join(f"{si(size, 'B')} from {name}" for name, size in sizes.most_common())
