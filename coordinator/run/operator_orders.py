"""What the operator of a run may ask of it, and the answers, from `invite` to `drain`.  Pure.

Called by the run machine with what came over the operator's socket (coordinator/operator_socket.py), which only the
user that runs the coordinator can open.  A name, an id or the beginning of one must mean one peer
alone.
"""

from __future__ import annotations

from collections.abc import Callable

from farflung.coordinator.ledger.records import Paused, Resumed
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.discipline import Discipline
from farflung.coordinator.run.going_back_orders import GoingBackByOrder
from farflung.coordinator.run.invitations import Inviting
from farflung.protocol.errors import UserError
from farflung.protocol.orders import (
    Ban,
    Bans,
    Drain,
    GoBack,
    Invite,
    Invites,
    Kick,
    Order,
    Pause,
    Reply,
    Resume,
    Revoke,
    Rewind,
    Unban,
)


class Operating:
    def __init__(
        self,
        core: Core,
        discipline: Discipline,
        going_back: GoingBackByOrder,
        random: Callable[[int], bytes],
    ) -> None:
        self._core = core
        self._going_back = going_back
        self._discipline = discipline
        self._inviting = Inviting(core, random, discipline.kick)

    def obey(self, order: Order) -> Reply:
        try:
            return self._obey(order)
        except UserError as error:
            return Reply(ok=False, text=str(error))

    def _obey(self, order: Order) -> Reply:
        match order:
            case Invite():
                return self._inviting.invite(order)
            case Invites():
                return self._inviting.invites()
            case Revoke():
                return self._inviting.revoke(order)
            case Kick(who=who, reason=reason):
                peer = self._one(who)
                member = self._core.members.alive.get(peer)
                if member is None:
                    raise UserError(f"{self._named(peer)} is not here now; to keep it out: farflung ban")
                self._discipline.kick(member, reason)
                return Reply(
                    text=f"sent {self._named(peer)} away; it may come again: farflung ban keeps it out"
                )
            case Ban():
                return self._ban(order)
            case Unban(who=who):
                return self._unban(who)
            case Bans():
                return self._bans()
            case Pause() | Resume() | Drain():
                return self._hold(order)
            case GoBack() | Rewind():
                return self._going_back.obey(order)

    # ---- keeping out ---------------------------------------------------------------------------------------

    def _ban(self, order: Ban) -> Reply:
        peer = self._one(order.who)
        member = self._core.members.members.get(peer)
        network = member.network if member is not None and order.network else ""
        if order.network and not network:
            raise UserError(f"the network of {self._named(peer)} is not known; ban it without --network")
        self._discipline.ban(peer, order.reason, order.lasts_s, network)
        also = f" and everybody from {network}" if network else ""
        return Reply(text=f"banned {self._named(peer)}{also} for {order.lasts_s / 3600:.1f} h")

    def _unban(self, who: str) -> Reply:
        register = self._core.ledger.register
        known = [peer for peer in {**register.bans, **register.strikes} if self._is(peer, who)]
        if len(known) != 1:
            raise UserError(_which(who, [self._named(peer) for peer in known], "is banned or has strikes"))
        self._discipline.unban(known[0])
        return Reply(text=f"{self._named(known[0])} may come in again, without strikes")

    def _bans(self) -> Reply:
        register, clock_s = self._core.ledger.register, self._core.clock_s
        bans = [each for each in register.bans.values() if each.until_s > clock_s]
        struck = {peer: register.strikes_of(peer, clock_s) for peer in register.strikes}
        lines = [
            f"{self._named(each.peer)}{f' with {each.network}' if each.network else ''}: "
            f"{(each.until_s - clock_s) / 3600:.1f} h more: {each.reason}"
            for each in bans
        ]
        lines += [
            f"{self._named(peer)}: {len(those)} strikes, the last one: {those[-1].reason}"
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

    # ---- holding the run ---------------------------------------------------------------------------------

    def _hold(self, order: Pause | Resume | Drain) -> Reply:
        core = self._core
        if isinstance(order, Pause):
            core.write(Paused(reason=order.reason))
            core.note(f"paused by the host: {order.reason}" if order.reason else "paused by the host")
            return Reply(
                text="no round opens until: farflung resume; peers go on alone, their work counts later"
            )
        if isinstance(order, Resume):
            if core.ledger.register.paused is None:
                raise UserError("the run is not paused")
            core.write(Resumed())
            core.note("the host lets the run go on")
            return Reply(text="rounds open again")
        core.draining = True
        core.note("the coordinator is to end: it finishes the rounds in flight, and takes nobody in any more")
        return Reply(
            text="the coordinator ends when no round is in flight; peers go on alone until it is back"
        )

    # ---- who is meant ------------------------------------------------------------------------------------

    def _one(self, who: str) -> str:
        known = {**self._core.ledger.names, **self._core.members.members}
        found = [peer for peer in known if self._is(peer, who)]
        here = [peer for peer in found if peer in self._core.members.alive]
        found = here if len(here) == 1 else found  # of two with one name, the one that is here
        if len(found) != 1:
            raise UserError(_which(who, [self._named(peer) for peer in found], "was ever here"))
        return found[0]

    def _is(self, peer: str, who: str) -> bool:
        return bool(who) and (peer == who or self._core.name(peer) == who or peer.startswith(who))

    def _named(self, peer: str) -> str:
        name = self._core.name(peer)
        return f"{name} ({peer})" if name != peer else peer


def _which(who: str, found: list[str], what: str) -> str:
    if not found:
        return f"nobody called {who!r} {what}; name a peer by its name, its id or the beginning of its id"
    return f"{who!r} may be {', '.join(found[:5])}; name one of them by its id"
