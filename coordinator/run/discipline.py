"""Strikes, bans and kicks: who has to go, and why.  Pure.

Part of the run machine.  A strike rests on what the coordinator saw itself, over a connection that proved its key, or
on the word of most members of a round: one liar can't have somebody else banned.  What anybody says before it has
proved who it is counts against nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from farflung.coordinator.ledger.records import Banned, Unbanned
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.protocol.causes import DepartureCause
from farflung.protocol.messages import Gone

LEAST_ACCUSERS = 2


def found_useless(flight: Round) -> list[str]:
    """Members from whom most of the others, and at least two, got bytes that are of no use."""
    others = len(flight.plan.members) - 1
    accusers = {peer: flight.accusers_of(peer) for peer in flight.plan.members}
    return [peer for peer, by in accusers.items() if len(by) >= LEAST_ACCUSERS and 2 * len(by) > others]


class Discipline:
    """`lose(member, cause, why)` ends a membership."""

    def __init__(self, core: Core, lose: Callable[[Member, DepartureCause, str], None]) -> None:
        self._core = core
        self._lose = lose

    def follow_up_strikes(self) -> None:
        """After every event: who was proven to lie, and who was struck once too often?"""
        core, rules = self._core, self._core.manifest.admission
        for peer, why in core.take_convicted():
            self.ban(peer, why, rules.ban_hours * 3600.0)
        for peer in core.take_struck():
            strikes = core.ledger.register.strikes_of(peer, core.clock_s)
            banned = core.ledger.register.ban_of(peer, "", core.clock_s)
            if rules.ban_strikes and len(strikes) >= rules.ban_strikes and banned is None:
                why = f"{len(strikes)} strikes, the last one: {strikes[-1].reason}"
                self.ban(peer, why, rules.ban_hours * 3600.0)

    def kick(self, member: Member, why: str) -> None:
        self._core.tell(member, Gone, reason=f"the host of the run sent it away: {why}", final=True)
        self._lose(member, DepartureCause.KICKED, why)

    def ban(self, peer: str, why: str, lasts_s: float, network: str = "") -> None:
        core = self._core
        at_s = core.clock_s
        core.write(Banned(peer=peer, reason=why, at_s=at_s, until_s=at_s + lasts_s, network=network))
        core.note(f"{core.name(peer)} is banned{f' with its network {network}' if network else ''}: {why}")
        for member in list(core.members.alive.values()):
            if core.ledger.register.ban_of(member.peer, member.network, at_s) is not None:
                core.tell(member, Gone, reason=f"banned from the run: {why}"[:1000], final=True)
                self._lose(member, DepartureCause.BANNED, why)

    def unban(self, peer: str) -> None:
        self._core.write(Unbanned(peer=peer))
        self._core.note(f"{self._core.name(peer)} is not banned any more")
