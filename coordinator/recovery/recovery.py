"""Recovery: the run goes back to an older state where nobody has the newest any more, by itself or by the host's word.

Where the mode begins.  Pure.  The core knows what it means that a run went back (the record `RolledBack`, eras); this
says whether, when and how far.  Without this folder a run that lost its newest state waits for a peer that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from farflung.coordinator.modes.registry import CoordinatorMode, ModeTools
from farflung.coordinator.recovery.rollback import Rollback
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.errors import UserError
from farflung.protocol.messages import Beat
from farflung.protocol.orders import GoBack, Order, Reply, Rewind

# ---- rollback orders ---------------------------------------------------------------------------------------
# The host's orders about older states, both by `farflung rewind`. Pure.
#
# To go back is for a run that lost its newest state: it goes to the newest version that somebody here holds
# or has a checkpoint of, without waiting for those who are away; what they hold is given up. To rewind is to
# undo rounds that somebody may well hold, because they were found to be spoiled. Neither is done before the
# host has read what is lost by it, and has said so again.


class RollbackOrders:
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], rollback: Rollback) -> None:
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
                "(to undo rounds: farflung rewind run.toml VERSION)"
            )
        if order.to == 0:
            if min(there) >= 0 and max(there) > 0:
                raise UserError(
                    f"version {self._listed(there)} is here: farflung rewind run.toml goes to that; the run restarts "
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
                f"the newest that is here is version {self._listed(there)}: farflung rewind run.toml goes to that, "
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
            "farflung rewind --from-scratch run.toml"
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


# ---- recovery ----------------------------------------------------------------------------------------------


class Recovery(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self._drivers = drivers
        self.rollback = Rollback(core, drivers)
        self._orders = RollbackOrders(core, drivers, self.rollback)

    def hear(self, peer: str, beat: Beat) -> None:
        self.rollback.shelves.hear(peer, beat)

    def on_timer(self) -> bool:
        return self.rollback.check_what_is_held()

    def why_wait(self, fragment: int, is_given: bool) -> str:
        driver = self._drivers[fragment]
        return "" if is_given and not self.rollback.is_lost(driver) else self.rollback.reason(driver)

    def lost(self) -> Mapping[int, str]:
        return self.rollback.lost()

    def saved_by(self, fragment: int) -> AbstractSet[str]:
        return self.rollback.shelves.peers_with(self._drivers[fragment])

    def obey(self, order: Order) -> Reply | None:
        return self._orders.obey(order) if isinstance(order, GoBack | Rewind) else None


made = Recovery
