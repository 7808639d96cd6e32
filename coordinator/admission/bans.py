"""Strikes and bans: who has to go, who stays out, and the host's orders about both.  Pure.

Part of the admission.  A strike rests on what the coordinator saw itself, over a connection that proved its key, or
on the word of most members of a round: one liar can't have somebody else banned.  What anybody says before it has
proved who it is counts against nobody.
"""

from __future__ import annotations

from farflung.coordinator.admission.register import Banned, Register, Unbanned
from farflung.coordinator.door.hello_check import refuse
from farflung.coordinator.modes.mode import SendAway
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.operator_orders import is_meant, named, one_peer, which
from farflung.protocol.causes import DepartureCause
from farflung.protocol.errors import UserError
from farflung.protocol.messages import Refuse
from farflung.protocol.orders import Ban, Reply
from farflung.protocol.process.units import duration

BAN_S = 86_400.0  # for strikes, or what convicts a peer


class BanDesk:
    def __init__(self, core: Core, register: Register, send_away: SendAway) -> None:
        self._core = core
        self._register = register
        self._send_away = send_away

    def follow_up_strike(self, peer: str) -> None:
        """Was that once too often?"""
        core, rules = self._core, self._core.manifest.admission
        strikes = self._register.strikes_of(peer, core.clock_s)
        banned = self._register.ban_of(peer, "", core.clock_s)
        if rules.ban_strikes and len(strikes) >= rules.ban_strikes and banned is None:
            why = f"{len(strikes)} strikes, the last one: {strikes[-1].reason}"
            self.ban(peer, why, BAN_S)

    def refuse(self, peer: str, network: str) -> Refuse | None:
        ban = self._register.ban_of(peer, network, self._core.clock_s)
        if ban is None:
            return None
        whom = "this peer" if ban.peer == peer else f"the network {network}"
        left = duration(ban.until_s - self._core.clock_s)
        return refuse("banned", f"{whom} is banned from the run for {left} more: {ban.reason}"[:1000])

    def ban(self, peer: str, why: str, lasts_s: float, network: str = "") -> None:
        core = self._core
        at_s = core.clock_s
        core.write(Banned(peer=peer, reason=why, at_s=at_s, until_s=at_s + lasts_s, network=network))
        core.note(f"{core.name(peer)} is banned{f' with its network {network}' if network else ''}: {why}")
        for member in list(core.members.alive.values()):
            if self._register.ban_of(member.peer, member.network, at_s) is not None:
                told = f"banned from the run: {why}"[:1000]
                self._send_away(member.peer, DepartureCause.BANNED, told, why)

    # ---- the host's orders -------------------------------------------------------------------------------

    def obey(self, order: Ban) -> Reply:
        peer = one_peer(self._core, order.who)
        member = self._core.members.members.get(peer)
        network = member.network if member is not None and order.network else ""
        if order.network and not network:
            raise UserError(
                f"the network of {named(self._core, peer)} is not known; ban it without --network"
            )
        self.ban(peer, order.reason, order.lasts_s, network)
        also = f" and everybody from {network}" if network else ""
        return Reply(text=f"banned {named(self._core, peer)}{also} for {duration(order.lasts_s)}")

    def lift(self, who: str) -> Reply:
        register = self._register
        known = [peer for peer in {**register.bans, **register.strikes} if is_meant(self._core, peer, who)]
        if len(known) != 1:
            raise UserError(
                which(who, [named(self._core, peer) for peer in known], "is banned or has strikes")
            )
        self._core.write(Unbanned(peer=known[0]))
        self._core.note(f"{self._core.name(known[0])} is not banned any more")
        return Reply(text=f"{named(self._core, known[0])} may come in again, without strikes")

    def list(self) -> Reply:
        register, clock_s = self._register, self._core.clock_s
        bans = [each for each in register.bans.values() if each.until_s > clock_s]
        struck = {peer: register.strikes_of(peer, clock_s) for peer in register.strikes}
        lines = [
            f"{named(self._core, each.peer)}{f' with {each.network}' if each.network else ''}: "
            f"{duration(each.until_s - clock_s)} more: {each.reason}"
            for each in bans
        ]
        lines += [
            f"{named(self._core, peer)}: {len(those)} strikes, the last one: {those[-1].reason}"
            for peer, those in struck.items()
            if those and peer not in {each.peer for each in bans}
        ]
        found = {
            "bans": [
                {
                    "id": each.peer,
                    "name": self._core.name(each.peer),
                    "network": each.network,
                    "left_s": round(each.until_s - clock_s, 1),
                    "reason": each.reason,
                }
                for each in bans
            ],
            "strikes": {peer: [each.reason for each in those] for peer, those in struck.items() if those},
        }
        return Reply(text="\n".join(lines) or "nobody is banned, and nobody has strikes", found=found)
