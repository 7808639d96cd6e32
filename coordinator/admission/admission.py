"""The admission: whom the host wants in its run, who has to wait, and who is kept out.  Pure.

Where the mode begins.  The core has found that a hello fits the run and that there is room; this says who may come in:
nobody who is banned, whoever has an invitation or stands on the host's list where the host wants one, and newcomers of
an open run as many at once as it says.  Without this folder everybody comes in whose hello fits, at once, and nobody is
banned: strikes are only written to the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farflung.coordinator.admission.bans import BAN_S, BanDesk
from farflung.coordinator.admission.invitations import Invitations, token_digest
from farflung.coordinator.admission.newcomers import NewcomerQueue
from farflung.coordinator.admission.register import OF_ADMISSION, CameByInvitation, Register
from farflung.coordinator.door.hello_check import HelloPassed, refuse
from farflung.coordinator.modes.mode import CoordinatorMode, ModeTools
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Looks
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol import orders
from farflung.protocol.manifest_sections import AdmissionSection
from farflung.protocol.messages import Refuse
from farflung.protocol.orders import Order, Reply
from farflung.protocol.process.networks import network_of
from farflung.protocol.signing import name_of

NAME = "admission"
LedgerPart = Register
RECORDS = OF_ADMISSION


class Admission(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self._core = core
        self.allowed: frozenset[str] = frozenset()  # ids of the allowlist
        self._newcomers, self._looks = NewcomerQueue(), Looks()
        self.register: Register = core.ledger.parts[NAME]
        self.bans = BanDesk(core, self.register, tools.send_away)
        self.invitations = Invitations(core, self.register, tools)

    @property
    def rules(self) -> AdmissionSection:
        return self._core.manifest.admission

    # ---- who comes in ----------------------------------------------------------------------------------

    def refuses(self, passed: HelloPassed, peer: str) -> Refuse | None:
        network = network_of(passed.came_from)
        return self.bans.refuse(peer, network) or self._uninvited(passed, peer) or self._rushed(peer, network)

    def _uninvited(self, passed: HelloPassed, peer: str) -> Refuse | None:
        if self.rules.mode == "allowlist" and peer not in self.allowed:
            me = f"this peer is {name_of(passed.hello.identity)}, {peer}"
            why = "this run lets in only peers whose id is on its host's list; tell the host your id"
            return refuse("not-listed", f"{why}: {me}")
        if not self._needs_invitation(peer):
            return None
        return self.invitations.refuse(passed.hello.token)

    def _needs_invitation(self, peer: str) -> bool:
        return self.rules.mode == "token" and peer not in self.register.guests

    def _rushed(self, peer: str, network: str) -> Refuse | None:
        """Newcomers only: after a restart of the coordinator all its peers come back at once, and may."""
        if self.rules.mode != "open" or peer in self._core.ledger.names:
            return None
        core, alive = self._core, self._core.members.alive
        if self._looks.is_due(len(alive), core.now):
            self._newcomers.look(alive.values(), core.now)
        wait = self._newcomers.ask(peer, network, self.rules, core.ledger.learned, core.now)
        return refuse(wait.code, wait.told, wait.retry_s) if wait is not None else None

    def on_admitted(self, passed: HelloPassed, peer: str) -> None:
        if self._needs_invitation(peer):
            self._core.write(CameByInvitation(peer=peer, digest=token_digest(passed.hello.token)))

    # ---- who has to go ---------------------------------------------------------------------------------

    def after(self, struck: Sequence[str], convicted: Sequence[tuple[str, str]]) -> None:
        for peer, reason in convicted:
            self.bans.ban(peer, reason, BAN_S)
        for peer in struck:
            self.bans.follow_up_strike(peer)

    def keeps_out(self, peer: str) -> bool:
        return self.register.ban_of(peer, "", self._core.clock_s) is not None

    # ---- for people ------------------------------------------------------------------------------------

    def obey(self, order: Order) -> Reply | None:
        match order:
            case orders.Invite():
                return self.invitations.invite(order)
            case orders.Invites():
                return self.invitations.list()
            case orders.Revoke():
                return self.invitations.revoke(order)
            case orders.Ban():
                return self.bans.obey(order)
            case orders.Unban(who=who):
                return self.bans.lift(who)
            case orders.Bans():
                return self.bans.list()
        return None

    def status_of(self, peer: str) -> Mapping[str, Any]:
        return {"strikes": len(self.register.strikes_of(peer, self._core.clock_s))}


made = Admission
