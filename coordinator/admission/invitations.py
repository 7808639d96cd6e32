"""Invitations: made, listed, revoked, and used.  Pure.

Part of the admission.  The journal keeps the digest of a token, never the token: an invitation is known here by the
first letters of its digest, which are no secret.
"""

from __future__ import annotations

import base64
from typing import Any

from farflung.coordinator.admission.register import Invitation, Invited, Register, Revoked
from farflung.coordinator.door.hello_check import refuse
from farflung.coordinator.modes.mode import ModeTools
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.operator_orders import SENT_AWAY
from farflung.protocol.causes import DepartureCause
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.messages import Refuse
from farflung.protocol.orders import Invite, Reply, Revoke
from farflung.protocol.process.units import duration

TOKEN_BYTES = 16  # of an invitation
ID_CHARS = 8


def token_digest(token: str) -> bytes:
    """What the journal keeps of a token: a reader of the journal can't come in with it."""
    return hash_bytes(b"farflung/token/1\0", token.encode())


class Invitations:
    def __init__(self, core: Core, register: Register, tools: ModeTools) -> None:
        self._core = core
        self._register = register
        self._tools = tools

    # ---- used ------------------------------------------------------------------------------------------

    def refuse(self, token: str) -> Refuse | None:
        """Whoever was not invited is."""
        found = self._register.invitations.get(token_digest(token)) if token else None
        if found is not None and found.revoked is not None:
            why = f"this invitation was revoked by the host of the run: {found.revoked}"
            return refuse("revoked", f"{why}; ask it for another one")
        if problem := self._problem(token, found):
            return refuse("token", f"{problem}; ask the host of the run for a join URL with a new invitation")
        return None

    def _problem(self, token: str, found: Invitation | None) -> str:
        if not token:
            return "this run lets in only invited peers, and this join URL has no invitation (&t=...)"
        if found is None:
            return "nobody was invited with this invitation (t= in the join URL)"
        if len(found.guests) >= found.uses:
            return f"this invitation is used up: it was for {found.uses}"
        # Judged by the coordinator's own clock alone: no peer is asked for the time, nor told it.
        return "this invitation has expired" if self._core.clock_s >= found.until_s else ""

    # ---- made, listed, revoked ---------------------------------------------------------------------------

    def invite(self, order: Invite) -> Reply:
        core = self._core
        token = base64.urlsafe_b64encode(self._tools.random(TOKEN_BYTES)).decode("ascii").rstrip("=")
        digest = token_digest(token)
        until_s = core.clock_s + order.lasts_s
        core.write(
            Invited(digest=digest, uses=order.uses, at_s=core.clock_s, until_s=until_s, note=order.note)
        )
        name = _named(digest, order.note)
        core.note(f"invitation {name} for {order.uses} was made")
        mode = core.manifest.admission.mode
        uses = "1 use" if order.uses == 1 else f"{order.uses} uses"
        told = f"invitation {name}: {uses}, valid for {duration(order.lasts_s)}"
        if mode != "token":
            told += f'; note: [admission] mode is "{mode}", so peers need no invitation'
        return Reply(text=told, found={"token": token, "id": _id_of(digest)})

    def list(self) -> Reply:
        known = self._register.invitations
        lines = [f"{_named(digest, each.note)}: {self._told(each)}" for digest, each in known.items()]
        found = [self._found(digest, each) for digest, each in known.items()]
        return Reply(text="\n".join(lines) or "nobody was invited", found={"invitations": found})

    def revoke(self, order: Revoke) -> Reply:
        core = self._core
        digest = self._one(order.which)
        invitation = self._register.invitations[digest]
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
        why = f"its invitation was revoked: {order.reason}"
        for member in here:
            self._tools.send_away(member.peer, DepartureCause.KICKED, f"{SENT_AWAY}: {why}", why)
        return Reply(text=f"{told}; sent {len(here)} away, who need another invitation to come again")

    def _one(self, which: str) -> bytes:
        known = self._register.invitations
        token = (JoinUrl.parse(which).token or "") if which.startswith("farflung:") else which
        if token_digest(token) in known:
            return token_digest(token)
        found = [
            d for d, each in known.items() if which and (d.hex().startswith(which) or each.note == which)
        ]
        usable = [digest for digest in found if known[digest].revoked is None]
        found = usable if len(usable) == 1 else found  # of two with one note, the one that is left
        if not found:
            raise UserError("there is no such invitation: farflung invite --list shows them")
        if len(found) > 1:
            names = ", ".join(_named(digest, known[digest].note) for digest in found[:5])
            raise UserError(f"{which!r} may be {names}; name one of them by its id")
        return found[0]

    def _told(self, each: Invitation) -> str:
        used = f"{len(each.guests)} of {each.uses} used"
        if each.revoked is not None:
            return f"{used}; revoked: {each.revoked}"
        left_s = each.until_s - self._core.clock_s
        ends = f"{duration(left_s)} more" if left_s > 0 else "expired"
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
