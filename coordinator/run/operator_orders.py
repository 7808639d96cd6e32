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
from farflung.coordinator.modes.mode import SendAway
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.rollback import Rollback
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.causes import DepartureCause
from farflung.protocol.errors import UserError
from farflung.protocol.limits import AMENDMENTS_MOST
from farflung.protocol.manifest import Manifest
from farflung.protocol.orders import (
    Amend,
    Drain,
    GoBack,
    Kick,
    Order,
    Pause,
    Reply,
    Resume,
    Rewind,
)
from farflung.protocol.run_terms import changes_of, encoded
from farflung.protocol.signing import Amendment

SENT_AWAY = "the host of the run sent it away"


class Operating:
    def __init__(
        self,
        core: Core,
        send_away: SendAway,
        rollback: GoingBackByOrder,
        amending: AmendmentOrders,
    ) -> None:
        self._core = core
        self._rollback = rollback
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
            case GoBack() | Rewind():
                return self._rollback.obey(order)
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
    known = {**core.ledger.names, **core.members.members}
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


# ---- older states: go-back and rewind -------------------------------------------------------------------
#
# To go back is for a run that lost its newest state: it goes to the newest version that somebody who is here holds or
# has a checkpoint of, without waiting for those who are away; what they hold is given up.  To rewind is to undo rounds
# that somebody may well hold, because they were found to be spoiled.
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
            core.terms.count + 1, version, core.ledger.era, encoded(changes), core.terms.newest.digest
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
        terms, era = self._core.terms, self._core.ledger.era
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


# Neither is done before the host has read what is lost by it, and has said so again.


class GoingBackByOrder:
    def __init__(self, core: Core, drivers: list[RoundDriver], rollback: Rollback) -> None:
        self._core = core
        self._drivers = drivers
        self._rollback = rollback

    def obey(self, order: GoBack | Rewind) -> Reply:
        if not self._core.ledger.learned:
            raise UserError("the run has not learned anything yet: there is nothing to go back from")
        if isinstance(order, Rewind):
            return self._rewind(order)
        return self._go_back(order)

    # ---- going back to what is left ------------------------------------------------------------------------

    def _go_back(self, order: GoBack) -> Reply:
        now, there = self._now, self._there
        if there == now:
            raise UserError(
                f"somebody here holds version {self._listed(now)}, the run's newest: there is nothing to go back from "
                "(to undo rounds: farflung rewind)"
            )
        if order.to == 0:
            if min(there) >= 0 and max(there) > 0:
                raise UserError(
                    f"version {self._listed(there)} is here: farflung go-back run.toml goes to that; the run restarts "
                    "from scratch only when nothing is left of it, or of a fragment"
                )
            return self._done(order, [0] * len(now), self._lost_by_founding(there))
        if min(there) < 0:
            raise UserError(
                f"nobody online has any version of {self._what_is_lost(there)}, or a checkpoint of one"
                f"{self._where_it_may_be(there)}"
            )
        versions = there if order.to is None else self._at_most(order.to)
        if order.to is not None and versions != there:
            raise UserError(
                f"the newest that is here is version {self._listed(there)}: farflung go-back run.toml goes to that, "
                f"and farflung rewind run.toml {order.to} undoes more rounds"
            )
        awaited = self._awaited(versions)
        told = (
            f"nobody online has version {self._listed(now)}. Going back to version {self._listed(versions)} discards "
            f"{self._rounds(versions)} for good; their samples are trained again. {awaited}Whoever comes back with them"
            " drops them, and takes the run's state"
        )
        return self._done(order, versions, told)

    def _what_is_lost(self, there: Sequence[int]) -> str:
        """The run, or the fragments of which nothing is left: what is here of others makes no model without them."""
        if self._in_stages:
            return "the run that all stages have in common"
        gone = [str(number) for number, version in enumerate(there) if version < 0]
        if max(there) <= 0 or not gone:
            return "the run"
        return f"fragment{'s' if len(gone) > 1 else ''} {', '.join(gone)}"

    def _lost_by_founding(self, there: Sequence[int]) -> str:
        nothing = [0] * len(self._now)
        lost = f"{self._rounds(nothing)}, {self._core.ledger.tokens:,} tokens, up to version {self._listed(self._now)}"
        what = self._what_is_lost(there)
        useless = "" if self._in_stages or what == "the run" else ", and a model without it is none"
        away = self._may_bring(there)
        wait = f"{away} may still have it on disk: wait for them if you can. " if away else ""
        return (
            f"nobody online has any version of {what}{useless}. This restarts training from the oldest peer's initial "
            f"weights and discards all that was learned: {lost}. {wait}{self._awaited(nothing)}Whoever comes back with "
            "them drops them, and checkpoints of them are not read any more"
        )

    def _may_bring(self, there: Sequence[int]) -> str:
        """Who is away, and may have some version of what is not here; empty: nobody."""
        short = [each for each, version in zip(self._drivers, there, strict=True) if version < 0]
        away = {peer: None for each in short or self._drivers for peer in self._rollback.may_bring(each)}
        return self._rollback.named(list(away))

    def _where_it_may_be(self, there: Sequence[int]) -> str:
        """To restart from scratch is named only where no disk is left that the run knows of."""
        found = f" ({self._of_each_stage()})" if self._in_stages else ""
        if away := self._may_bring(there):
            return (
                f"{found}. {away} may have one in memory or on disk: wait for them, or start a peer that has a "
                "checkpoint (join --checkpoints)"
            )
        return (
            f"{found}. Start a peer that has one (join --checkpoints), or restart from scratch: "
            "farflung go-back --to 0 run.toml"
        )

    def _of_each_stage(self) -> str:
        held = self._rollback.settled_held()
        told = []
        for driver in self._drivers:
            has = self._rollback.shelves.brought(driver) | {held[driver.fragment]} - {-1}
            told.append(f"stage {driver.fragment} has {_listed(sorted(has)) if has else 'none'}")
        return ", ".join(told)

    # ---- undoing rounds ------------------------------------------------------------------------------------

    def _rewind(self, order: Rewind) -> Reply:
        versions, now = self._at_most(order.to), self._now
        if versions == now:
            raise UserError(
                f"the run is at version {self._listed(now)}: there is nothing to undo after {order.to}"
            )
        if not self._is_there(versions):
            raise UserError(f"nobody online has version {order.to}, or a checkpoint of it; {self._offers()}")
        told = (
            f"Rewinding to version {self._listed(versions)} undoes {self._rounds(versions)} for good: every peer drops "
            "them, and their samples are trained again"
        )
        return self._done(order, versions, told)

    def _is_there(self, versions: Sequence[int]) -> bool:
        """The digest of each is kept, and somebody has it whole."""
        held, brought = self._rollback.settled_held(), self._rollback.shelves.brought
        return all(
            version in driver.book.digests and version in (brought(driver) | {held[driver.fragment]})
            for driver, version in zip(self._drivers, versions, strict=True)
        )

    def _offers(self) -> str:
        brought, now = self._rollback.shelves.brought, max(self._now)
        versions = {v for driver in self._drivers for v in brought(driver) if v < now}
        known = sorted(version for version in versions if self._is_there(self._at_most(version)))
        if not known:
            return "no older version is online, or in a checkpoint of a peer that is"
        return f"rewind can go to {_listed(known)}"

    # ---- what both need ------------------------------------------------------------------------------------

    def _done(self, order: GoBack | Rewind, versions: list[int], told: str) -> Reply:
        found = {"from": self._now, "to": versions, "done": order.sure}
        if not order.sure:
            return Reply(text=told, found=found)
        why = f" ({order.reason})" if order.reason else ""
        undone = isinstance(order, Rewind)
        what = (
            f"the host undid the rounds after version {self._listed(versions)}"
            if undone
            else "the host said so"
        )
        self._rollback.go_back(versions, f"{what}{why}; what was learned after it is void", undone)
        return Reply(
            text=f"the run is at version {self._listed(versions)}, era {self._core.ledger.era}", found=found
        )

    @property
    def _now(self) -> list[int]:
        return [driver.book.version for driver in self._drivers]

    @property
    def _in_stages(self) -> bool:
        return self._core.manifest.pipeline.stages > 1

    def _listed(self, versions: Sequence[int]) -> str:
        """Stages of a model have one version; fragments have one each."""
        return _listed(versions[:1] if self._in_stages else versions)

    @property
    def _there(self) -> list[int]:
        """Of each fragment the newest settled version that somebody here holds, or else has a checkpoint of; -1 if
        there is none."""
        held, brought = self._rollback.settled_held(), self._rollback.shelves.brought
        if self._in_stages:
            return self._rollback.together(held)
        return [max([held[driver.fragment], *brought(driver)]) for driver in self._drivers]

    def _at_most(self, version: int) -> list[int]:
        return [min(version, now) for now in self._now]

    def _rounds(self, versions: Sequence[int]) -> str:
        lost = [now - version for now, version in zip(self._now, versions, strict=True)]
        # One round moves all stages of a model; fragments have rounds of their own.
        count = max(lost) if self._in_stages else sum(lost)
        return "1 round" if count == 1 else f"{count} rounds"

    def _awaited(self, versions: Sequence[int]) -> str:
        """Who may have more than this, as a sentence or nothing."""
        pairs = zip(self._drivers, versions, strict=True)
        away = {peer: None for each, version in pairs for peer in self._rollback.may_hold_more(each, version)}
        if not away:
            return ""
        return f"{self._rollback.named(list(away))} may hold them and did not say good-bye. "


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(str(version) for version in versions)
