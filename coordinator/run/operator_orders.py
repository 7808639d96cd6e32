"""What the operator of a run may ask of it, and the answers, from `invite` to `rewind`.  Pure.

Called by the run machine with what came over the operator's socket (coordinator/operator_socket.py), which only the
user that runs the coordinator can open.  A name, an id or the beginning of one must mean one peer
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from farflung.coordinator.ledger.records import Amended, Paused, Resumed
from farflung.coordinator.modes import registry
from farflung.coordinator.modes.registry import SendAway
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.errors import DepartureCause, UserError
from farflung.protocol.limits import AMENDMENTS_MOST
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import (
    Amend,
    Drain,
    Kick,
    Order,
    Pause,
    Reply,
    Resume,
)
from farflung.protocol.run_terms import changes_of, encoded
from farflung.protocol.signing import Amendment

SENT_AWAY = "the host of the run sent it away"


class Operating:
    def __init__(
        self,
        core: Core,
        send_away: SendAway,
        amending: AmendmentOrders,
    ) -> None:
        self._core = core
        self._amending = amending
        self._send_away = send_away

    def obey(self, order: Order) -> Reply:
        try:
            return self._obey(order)
        except UserError as error:
            return Reply(ok=False, text=str(error))

    def _obey(self, order: Order) -> Reply:
        match order:
            case Kick(who=who, reason=reason):
                return self._kick(who, reason)
            case Amend():
                return self._amending.obey(order)
            case Pause() | Resume() | Drain():
                return self._hold(order)
        for mode in self._core.modes:
            if (reply := mode.obey(order)) is not None:
                return reply
        raise UserError(
            "this coordinator was installed without what that order needs (docs/architecture.md, modes)"
        )

    def _kick(self, who: str, reason: str) -> Reply:
        peer = one_peer(self._core, who)
        name = named(self._core, peer)
        if peer not in self._core.members.alive:
            raise UserError(f"{name} is not here now; to keep it out: farflung ban")
        self._send_away(peer, DepartureCause.KICKED, f"{SENT_AWAY}: {reason}", reason)
        return Reply(text=f"sent {name} away; it may come again: farflung ban keeps it out")

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
            if core.ledger.paused is None:
                raise UserError("the run is not paused")
            core.write(Resumed())
            core.note("the host lets the run go on")
            return Reply(text="rounds open again")
        core.draining = True
        core.note("the coordinator is to end: it finishes the rounds in flight, and takes nobody in any more")
        return Reply(
            text="the coordinator ends when no round is in flight; peers go on alone until it is back"
        )


# ---- who is meant ---------------------------------------------------------------------------------------


def one_peer(core: Core, who: str) -> str:
    """By its name, its id or the beginning of its id.  UserError: it is not one peer alone."""
    known = {**core.ledger.peers.names, **core.members.members}
    found = [peer for peer in known if is_meant(core, peer, who)]
    here = [peer for peer in found if peer in core.members.alive]
    found = here if len(here) == 1 else found  # of two with one name, the one that is here
    if len(found) != 1:
        raise UserError(which(who, [named(core, peer) for peer in found], "was ever here"))
    return found[0]


def is_meant(core: Core, peer: str, who: str) -> bool:
    return bool(who) and (peer == who or core.name(peer) == who or peer.startswith(who))


def named(core: Core, peer: str) -> str:
    name = core.name(peer)
    return f"{name} ({peer})" if name != peer else peer


def which(who: str, found: list[str], what: str) -> str:
    if not found:
        return f"nobody called {who!r} {what}; name a peer by its name, its id or the beginning of its id"
    return f"{who!r} may be {', '.join(found[:5])}; name one of them by its id"


class AmendmentOrders:
    """The host's amendments of what holds: checked against what may change, numbered, signed."""

    def __init__(self, core: Core, drivers: Sequence[RoundDriver]) -> None:
        self._core, self._drivers = core, drivers

    def obey(self, order: Amend) -> Reply:
        core, wanted = self._core, Manifest.from_json(order.manifest)
        registry.check(wanted)
        changes = changes_of(core.terms.newest, wanted)
        admits = wanted.admission != core.manifest.admission
        if not changes and not admits:
            raise UserError("nothing in it is otherwise than the run has it already")
        amendment = self._signed(changes, wanted, order.at) if changes else None
        told: list[str] = []
        if amendment is not None:
            core.write(Amended(amendment=amendment, at_s=core.clock_s))
            told.append(f"amendment {amendment.number}, from version {amendment.version} on: {amendment}")
        if admits:
            core.terms = core.terms.with_own(wanted)
            told.append("[admission] is as the file says, from now on")
        for each in told:
            core.note(f"changed by the host: {each}")
        number = core.terms.count
        version = amendment.version if amendment is not None else None
        return Reply(text="\n".join(told), found={"amendment": number, "version": version})

    def _signed(self, changes: dict[str, dict[str, Any]], wanted: Manifest, at: int | None) -> Amendment:
        core = self._core
        if core.finished:
            raise UserError("the run is complete: begin a new one, with [start] from its last checkpoint")
        if core.terms.count >= AMENDMENTS_MOST:
            raise UserError(f"a run has at most {AMENDMENTS_MOST} amendments")
        version = self._version(changes, wanted, at)
        asked_for = Amendment(
            core.terms.count + 1, version, core.ledger.eras.number, encoded(changes), core.terms.newest.digest
        )
        return msgspec.structs.replace(asked_for, proof=core.prove(asked_for.statement(core.run_id)))

    def _version(self, changes: dict[str, dict[str, Any]], wanted: Manifest, at: int | None) -> int:
        """From which on it may hold.  UserError where that is not what was asked for."""
        core = self._core
        newest = max(each.book.version for each in self._drivers)
        # What is in flight ends as it was begun.
        flies = any(each.round is not None and each.book.version == newest for each in self._drivers)
        least = newest + 1 if flies else newest
        version = least if at is None else at
        rounds = min(core.terms.newest.run.rounds, wanted.run.rounds)
        self._check_pending(changes, wanted, max(version, least), at)
        if version < least:
            raise UserError(
                f"--at {version}: expected {least} or more, since the rounds before that are made or begun"
            )
        if version > rounds or (version == rounds and "rounds" not in changes.get("run", {})):
            raise UserError(f"no round follows on version {version}: the run ends at version {rounds}")
        return version

    def _check_pending(
        self, changes: dict[str, dict[str, Any]], wanted: Manifest, version: int, at: int | None
    ) -> None:
        """Each follows on the one before, so it would carry a pending one's terms into rounds that have older ones yet.
        Who puts back what a pending one changes takes it back.

        One of an era before was made for versions that may be far away now: whoever amends a run that went back need
        not wait for them.
        """
        terms, era = self._core.terms, self._core.ledger.eras.number
        pending = [each for each in terms.amendments if each.era == era and each.version > version]
        then, told = terms.at(version).model_dump(), wanted.model_dump()
        early = [
            f"[{section}] {key}"
            for each in pending
            for section, keys in each.changed.items()
            for key in keys
            if key not in changes.get(section, {}) and told[section][key] != then[section][key]
        ]
        if not early:
            return
        asked = "no --at was given, so this would hold from the next round on" if at is None else f"--at {at}"
        last = pending[-1]
        raise UserError(
            f"{asked}: amendment {last.number} holds only from version {last.version} on ({last}), and would hold as "
            f"soon; give --at {last.version} or a later version, or put back {', '.join(early)} to take it back"
        )
