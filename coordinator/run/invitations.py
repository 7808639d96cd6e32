"""Invitations: made, listed, and taken back.  Pure.

Part of the operator's business (operator_orders.py).  The journal keeps the digest of a token, never the token: an
invitation is known here by the first letters of its digest, which are no secret.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from farflung.coordinator.ledger.records import Invited, Revoked
from farflung.coordinator.ledger.register import Invitation
from farflung.coordinator.run.admission import token_digest
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.orders import Invite, Reply, Revoke

TOKEN_BYTES = 16
ID_CHARS = 8


class Inviting:
    """`kick(member, why)` ends a membership."""

    def __init__(
        self, core: Core, random: Callable[[int], bytes], kick: Callable[[Member, str], None]
    ) -> None:
        self._core = core
        self._random = random
        self._kick = kick

    def invite(self, order: Invite) -> Reply:
        core = self._core
        token = base64.urlsafe_b64encode(self._random(TOKEN_BYTES)).decode("ascii").rstrip("=")
        digest = token_digest(token)
        until_s = core.clock_s + order.lasts_s
        core.write(
            Invited(digest=digest, uses=order.uses, at_s=core.clock_s, until_s=until_s, note=order.note)
        )
        name = _named(digest, order.note)
        core.note(f"invitation {name} for {order.uses} was made")
        mode = core.manifest.admission.mode
        asked = (
            "" if mode == "token" else f'; but [admission] mode is "{mode}": nobody is asked for invitations'
        )
        found = {"token": token, "id": _id_of(digest)}
        return Reply(text=f"invitation {name} for {order.uses}{asked}", found=found)

    def invites(self) -> Reply:
        known = self._core.ledger.register.invitations
        lines = [f"{_named(digest, each.note)}: {self._told(each)}" for digest, each in known.items()]
        found = [self._found(digest, each) for digest, each in known.items()]
        return Reply(text="\n".join(lines) or "nobody was invited", found={"invitations": found})

    def revoke(self, order: Revoke) -> Reply:
        core = self._core
        digest = self._one(order.which)
        invitation = core.ledger.register.invitations[digest]
        if invitation.revoked is not None and not order.guests:
            raise UserError(f"invitation {_named(digest, invitation.note)} was revoked already")
        core.write(Revoked(digest=digest, reason=order.reason, at_s=core.clock_s, guests=order.guests))
        name = _named(digest, invitation.note)
        core.note(f"invitation {name} was revoked: {order.reason}")
        told = f"revoked {name}: nobody comes in with it any more"
        if not order.guests:
            stay = f"; the {len(invitation.guests)} that came in by it stay: --guests sends them away, too"
            return Reply(text=told + (stay if invitation.guests else ""))
        here = [core.members.alive[peer] for peer in sorted(invitation.guests) if peer in core.members.alive]
        for member in here:
            self._kick(member, f"its invitation was revoked: {order.reason}")
        return Reply(text=f"{told}; sent {len(here)} away, who need another invitation to come again")

    def _one(self, which: str) -> bytes:
        known = self._core.ledger.register.invitations
        token = (JoinUrl.parse(which).token or "") if which.startswith("farflung:") else which
        if token_digest(token) in known:
            return token_digest(token)
        found = [
            d for d, each in known.items() if which and (d.hex().startswith(which) or each.note == which)
        ]
        usable = [digest for digest in found if known[digest].revoked is None]
        found = usable if len(usable) == 1 else found  # of two with one note, the one that is left
        if not found:
            raise UserError("there is no such invitation: farflung invites lists them")
        if len(found) > 1:
            names = ", ".join(_named(digest, known[digest].note) for digest in found[:5])
            raise UserError(f"{which!r} may be {names}; name one of them by its id")
        return found[0]

    def _told(self, each: Invitation) -> str:
        used = f"{len(each.guests)} of {each.uses} used"
        if each.revoked is not None:
            return f"{used}; revoked: {each.revoked}"
        left_s = each.until_s - self._core.clock_s
        ends = f"{left_s / 3600:.1f} h more" if left_s > 0 else "expired"
        names = ", ".join(sorted(self._core.name(peer) for peer in each.guests))
        return f"{used}{f' ({names})' if names else ''}; {ends}"

    def _found(self, digest: bytes, each: Invitation) -> dict[str, Any]:
        return {
            "id": _id_of(digest),
            "note": each.note,
            "uses": each.uses,
            "guests": sorted(each.guests),
            "left_s": round(max(0.0, each.until_s - self._core.clock_s), 1),
            "revoked": each.revoked,
        }


def _id_of(digest: bytes) -> str:
    return digest.hex()[:ID_CHARS]


def _named(digest: bytes, note: str) -> str:
    return f"{_id_of(digest)}{f' ({note})' if note else ''}"
