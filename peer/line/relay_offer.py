"""The relay that this peer offers to others: what the coordinator orders of it, and what it says of itself.

Owned by the agent, which passes on each tick and puts what comes back into its beats.  The relay is a process of its
own, kept by whoever started this agent: a peer knows nothing of a relay's code.  It is for pairs that the coordinator
names, and for nobody else.  Decides nothing; must not know who meets there.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from farflung.protocol.messages import Tick
from farflung.protocol.process.log_lines import LineWriter
from farflung.protocol.round_words import RelayOffer


class RelayTerms(NamedTuple):
    """Whose tickets are good."""

    run_id: bytes
    incarnation: int
    public: bytes
    peer: str  # who offers it


class RelayHere(Protocol):
    def follow(self, terms: RelayTerms, pairs: tuple[bytes, ...], clock_ahead_s: float) -> None:
        """These pairs may meet there from now on.  It begins to listen with the first terms that it hears."""
        ...

    def turn(self, now: float) -> RelayOffer:
        """What it is just now; to be asked often, since it is started again here when it died."""
        ...

    def close(self) -> None: ...


class Offering:
    def __init__(self, relay: RelayHere | None, me: str, say: LineWriter) -> None:
        self._relay, self._me, self._say = relay, me, say
        self._number = 0  # of the newest order
        self._told = ""

    def on_tick(self, tick: Tick, run_id: bytes, now: float) -> None:
        order = tick.relay
        if self._relay is None or order is None or order.number == self._number:
            return
        self._number = order.number
        terms = RelayTerms(run_id, order.incarnation, order.public, self._me)
        # Its answer took a moment to come: tickets last an hour.
        self._relay.follow(terms, order.pairs, tick.heard_s - now)
        if order.why_not != self._told:
            self._told = order.why_not
            self._say(
                f"the relay that I offer is not used: {self._told}"
                if self._told
                else "others can use my relay"
            )

    def leave(self) -> None:
        """The session is over: the next coordinator numbers its orders anew.  Who meets there stays."""
        self._number = 0

    def turn(self, now: float) -> RelayOffer | None:
        if self._relay is None:
            return None
        said = self._relay.turn(now)
        return RelayOffer(said.port, said.bytes_per_s, self._number, *_after_number(said))

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()


def _after_number(said: RelayOffer) -> tuple[int, int, int, int, str]:
    return said.pairs, said.waiting, said.moved_bytes, said.refused, said.why_not
