"""The admission: may somebody who proved who it is come in now?  And invitations: made, listed, taken back.  Pure.

`Admission` is called by the run machine with each hello that the doorkeeper passed on.  It does not take the
doorkeeper's word for the signature: that process talks to strangers.  The words of a refusal say what to do; its code
is for programs.

`Inviting` is part of the operator's business (operator_orders.py).  The journal keeps the digest of a token, never the
token: an invitation is known here by the first letters of its digest, which are no secret.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farflung.coordinator.door.allowance import Quota
from farflung.coordinator.door.arriving import NewcomerQueue
from farflung.coordinator.door.hello_check import HelloPassed, is_signed, refuse
from farflung.coordinator.ledger.records import Invited, Revoked
from farflung.coordinator.ledger.register import Invitation
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Looks, Member
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest_sections import AdmissionSection
from farflung.protocol.messages import Hello, Refuse
from farflung.protocol.model_schema import first_difference
from farflung.protocol.orders import Invite, Reply, Revoke
from farflung.protocol.process.networks import network_of
from farflung.protocol.process.units import duration
from farflung.protocol.signing import name_of, peer_id_of

DRAINING_RETRY_S = 5.0
FULL_RETRY_S = 30.0
EARLY_RETRY_S = 2.0
TOKEN_BYTES = 16  # of an invitation
ID_CHARS = 8
COMES_PER_MINUTE = 30.0  # one identity: each time is a line in the journal, and news for all members


@dataclass(frozen=True)
class LetIn:
    """It may come in."""

    invitation: bytes = b""  # the digest of the token that is used up by that, if one is


def token_digest(token: str) -> bytes:
    """What the journal keeps of a token: a reader of the journal can't come in with it."""
    return hash_bytes(b"farflung/token/1\0", token.encode())


class Admission:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.allowed: frozenset[str] = frozenset()  # ids of the allowlist
        self._arrivals, self._looks = NewcomerQueue(), Looks()
        self._comes: Quota[str] = Quota(COMES_PER_MINUTE / 60.0, COMES_PER_MINUTE)

    @property
    def rules(self) -> AdmissionSection:
        return self._core.manifest.admission

    def examine(self, passed: HelloPassed) -> Refuse | LetIn:
        core, hello = self._core, passed.hello
        if not is_signed(hello, passed.nonce):
            return refuse("signature", "the hello is not signed by the identity it names")
        peer = peer_id_of(hello.identity)
        if (banned := self._banned(peer, network_of(passed.came_from))) is not None:
            return banned
        if core.draining:
            why = "the coordinator is about to end, and takes nobody in any more; it may be back soon"
            return refuse("draining", why, DRAINING_RETRY_S)
        if (unfit := self._unfit(hello)) is not None:
            return unfit
        let = self._invited(hello, peer)
        if isinstance(let, Refuse):
            return let
        network = network_of(passed.came_from)
        return self._crowded(hello, peer) or self._rushed(peer, network) or self._restless(peer) or let

    def _banned(self, peer: str, network: str) -> Refuse | None:
        ban = self._core.ledger.register.ban_of(peer, network, self._core.clock_s)
        if ban is None:
            return None
        whom = "this peer" if ban.peer == peer else f"the network {network}"
        left = duration(ban.until_s - self._core.clock_s)
        return refuse("banned", f"{whom} is banned from the run for {left} more: {ban.reason}"[:1000])

    def _unfit(self, hello: Hello) -> Refuse | None:
        core = self._core
        if hello.helps and (too_early := self._nothing_to_help(hello)) is not None:
            return too_early
        if core.ledger.model is not None and not self._may_still_change():
            difference = first_difference(hello.model, core.ledger.model)
            if difference:
                return refuse("model", f"the model differs from the run's: {difference}")
        try:
            hello.model.fragments(core.ledger.fragments)
        except UserError as error:
            return refuse("model", str(error))
        if core.manifest.pipeline.stages > 1:
            return self._no_stage(hello.fragments)
        if hello.fragments != tuple(range(core.ledger.fragments)):
            held, all_of_them = ", ".join(map(str, hello.fragments)), core.ledger.fragments
            return refuse(
                "model",
                f"this run is no pipeline: each peer holds all of its {all_of_them} fragments, not {held}",
            )
        return None

    def _no_stage(self, offered: tuple[int, ...]) -> Refuse | None:
        """It offers stages that there are, each once."""
        stages = self._core.manifest.pipeline.stages
        if len(set(offered)) == len(offered) and max(offered) < stages:
            return None
        told = ", ".join(map(str, offered))
        return refuse("model", f"this run's model has stages 0 to {stages - 1}; offered were stages {told}")

    def _may_still_change(self) -> bool:
        """Nothing was learned and nobody who trains is here: a first peer that came with another model binds nobody."""
        alive = self._core.members.alive.values()
        return not self._core.ledger.learned and all(member.helps for member in alive)

    def _nothing_to_help(self, hello: Hello) -> Refuse | None:
        """Who comes without a trainer brings no model: it takes that of those who train."""
        if self._core.manifest.pipeline.stages > 1:
            why = "this run's model is cut into stages, and each of them is held by peers that compute it"
            return refuse("no-helpers", f"{why}: nobody helps here without a trainer")
        if self._core.ledger.model is None or self._may_still_change():
            why = "no peer that trains is here yet: who helps waits for one, which brings the model"
            return refuse("too-early", why, EARLY_RETRY_S)
        return None

    # ---- by invitation, by list --------------------------------------------------------------------------

    def _invited(self, hello: Hello, peer: str) -> Refuse | LetIn:
        me = f"this peer is {name_of(hello.identity)}, {peer}"
        if self.rules.mode == "allowlist" and peer not in self.allowed:
            why = "this run lets in only peers whose id is on its host's list; tell the host your id"
            return refuse("not-listed", f"{why}: {me}")
        if self.rules.mode != "token" or peer in self._core.ledger.register.guests:
            return LetIn()
        digest = token_digest(hello.token)
        found = self._core.ledger.register.invitations.get(digest) if hello.token else None
        if found is not None and found.revoked is not None:
            why = f"this invitation was revoked by the host of the run: {found.revoked}"
            return refuse("revoked", f"{why}; ask it for another one")
        problem = self._problem(hello.token, found)
        if problem:
            return refuse("token", f"{problem}; ask the host of the run for a join URL with a new invitation")
        return LetIn(digest)

    def _problem(self, token: str, found: Invitation | None) -> str:
        if not token:
            return "this run lets in only invited peers, and this join URL has no invitation (&t=...)"
        if found is None:
            return "nobody was invited with this invitation (t= in the join URL)"
        if len(found.guests) >= found.uses:
            return f"this invitation is used up: it was for {found.uses}"
        # Judged by the coordinator's own clock alone: no peer is asked for the time, nor told it.
        return "this invitation has expired" if self._core.clock_s >= found.until_s else ""

    # ---- how many ----------------------------------------------------------------------------------------

    def _crowded(self, hello: Hello, peer: str) -> Refuse | None:
        core = self._core
        old = core.members.members.get(peer)
        if old is not None and old.alive and old.process != hello.process and old.closed_at is None:
            return refuse(
                "already-here",
                "this identity is already in the run as another process; stop that one, or use another identity file",
                retry_after_s=core.manifest.net.dead_after_s / 2,
            )
        if old is None and len(core.members.alive) >= core.manifest.run.max_peers:
            return refuse("full", f"the run is full: {core.manifest.run.max_peers} peers", FULL_RETRY_S)
        return None

    def _rushed(self, peer: str, network: str) -> Refuse | None:
        """Newcomers only: after a restart of the coordinator all its peers come back at once, and may."""
        if self.rules.mode != "open" or peer in self._core.ledger.names:
            return None
        core, alive = self._core, self._core.members.alive
        if self._looks.is_due(len(alive), core.now):
            self._arrivals.look(alive.values(), core.now)
        wait = self._arrivals.ask(peer, network, self.rules, core.ledger.learned, core.now)
        return refuse(wait.code, wait.told, wait.retry_s) if wait is not None else None

    def _restless(self, peer: str) -> Refuse | None:
        """An identity that is let in, is thrown out or goes, and comes again without end."""
        if self._comes.take(peer, self._core.now):
            return None
        told = f"this identity came in more than {COMES_PER_MINUTE:g} times in a minute; waiting"
        return refuse("rate", told, max(1.0, self._comes.wait_s(peer, self._core.now)))


# ---- invitations ----------------------------------------------------------------------------------


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
        uses = "1 use" if order.uses == 1 else f"{order.uses} uses"
        told = f"invitation {name}: {uses}, valid for {duration(order.lasts_s)}"
        if mode != "token":
            told += f'; note: [admission] mode is "{mode}", so peers need no invitation'
        return Reply(text=told, found={"token": token, "id": _id_of(digest)})

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
