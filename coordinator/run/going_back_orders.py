"""What the host says of older states: `farflung go-back` and `farflung rewind`.  Pure.

Called by operator_orders.py.  To go back is for a run that lost its newest state: it goes to the newest version that
somebody who is here holds or has a checkpoint of, without waiting for those who are away; whoever comes back with newer
state wins it back.  To rewind is to undo rounds that somebody may well hold, because they were found to be spoiled:
nobody wins those back.  Neither is done before the host has read what is lost by it, and has said so again.
"""

from __future__ import annotations

from collections.abc import Sequence

from farflung.coordinator.run.conductor import Conductor
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.going_back import GoingBack
from farflung.protocol.errors import UserError
from farflung.protocol.orders import GoBack, Reply, Rewind


class GoingBackByOrder:
    def __init__(self, core: Core, conductors: list[Conductor], going_back: GoingBack) -> None:
        self._core = core
        self._conductors = conductors
        self._going_back = going_back

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
                f"somebody here holds version {_listed(now)}, the run's newest: there is nothing to go back from "
                "(to undo rounds: farflung rewind)"
            )
        if order.to == 0:
            if max(there) > 0:
                raise UserError(
                    f"version {_listed(there)} is here: farflung go-back goes to that; the run is founded anew only "
                    "when nothing is left of it"
                )
            return self._done(order, [0] * len(now), self._lost_by_founding())
        if min(there) < 0:
            raise UserError(
                f"nobody here holds any version of the run, or has a checkpoint of one: {self._awaited(there)}start a "
                "peer that has one (join --checkpoints), or found the run anew: farflung go-back --to 0"
            )
        versions = there if order.to is None else self._at_most(order.to)
        if order.to is not None and versions != there:
            raise UserError(
                f"the newest that is here is version {_listed(there)}: farflung go-back goes to that, and "
                f"farflung rewind {order.to} undoes more rounds"
            )
        awaited = self._awaited(versions)
        told = (
            f"nobody here holds version {_listed(now)}. Going back to version {_listed(versions)} voids "
            f"{self._rounds(versions)}; their samples are trained again. {awaited}Whoever comes back with them before "
            "the run has gone as far again wins them back"
        )
        return self._done(order, versions, told)

    def _lost_by_founding(self) -> str:
        nothing = [0] * len(self._now)
        lost = f"{self._rounds(nothing)}, {self._core.ledger.tokens:,} tokens, up to version {_listed(self._now)}"
        return (
            "nobody here holds anything of the run. Founding it anew, from the values that the oldest peer's model "
            f"has, voids all it has learned: {lost}. {self._awaited(nothing)}Whoever comes back with them before the "
            "run has gone as far again wins them back; checkpoints of them are not read any more"
        )

    # ---- undoing rounds ------------------------------------------------------------------------------------

    def _rewind(self, order: Rewind) -> Reply:
        versions, now = self._at_most(order.to), self._now
        if versions == now:
            raise UserError(
                f"the run is at version {_listed(now)}: there is nothing to undo after {order.to}"
            )
        if not self._is_there(versions):
            raise UserError(
                f"nobody here is known to hold version {order.to}, or to have a checkpoint of it; {self._offers()}"
            )
        told = (
            f"Rewinding to version {_listed(versions)} undoes {self._rounds(versions)} for good: every peer drops "
            "them, nobody wins them back, and their samples are trained again"
        )
        return self._done(order, versions, told)

    def _is_there(self, versions: Sequence[int]) -> bool:
        """The digest of each is kept, and somebody has it whole."""
        held, saved = self._going_back.settled_held(), self._going_back.saved
        return all(
            (version in conductor.book.digests) and version in (saved | {held[conductor.fragment]})
            for conductor, version in zip(self._conductors, versions, strict=True)
        )

    def _offers(self) -> str:
        known = {v for v in self._going_back.saved if self._is_there(self._at_most(v)) and v < max(self._now)}
        held = _listed(self._going_back.settled_held())
        saved = (
            f"checkpoints of {_listed(sorted(known))} are here"
            if known
            else "no checkpoint is known to be here"
        )
        return f"{saved}, and version {held} is held"

    # ---- what both need ------------------------------------------------------------------------------------

    def _done(self, order: GoBack | Rewind, versions: list[int], told: str) -> Reply:
        found = {"from": self._now, "to": versions, "done": order.sure}
        if not order.sure:
            return Reply(text=told, found=found)
        why = f" ({order.reason})" if order.reason else ""
        final = isinstance(order, Rewind)
        what = f"the host undid the rounds after version {_listed(versions)}" if final else "the host said so"
        self._going_back.go_back(versions, f"{what}{why}; what was learned after it is void", final)
        return Reply(
            text=f"the run is at version {_listed(versions)}, era {self._core.ledger.era}", found=found
        )

    @property
    def _now(self) -> list[int]:
        return [conductor.book.version for conductor in self._conductors]

    @property
    def _there(self) -> list[int]:
        """Of each fragment the newest settled version that somebody here holds, or else has a checkpoint of; -1 if
        there is none."""
        held, saved = self._going_back.settled_held(), self._going_back.saved
        return [
            max([held[conductor.fragment], *(v for v in saved if v in conductor.book.digests)])
            for conductor in self._conductors
        ]

    def _at_most(self, version: int) -> list[int]:
        return [min(version, now) for now in self._now]

    def _rounds(self, versions: Sequence[int]) -> str:
        count = sum(now - version for now, version in zip(self._now, versions, strict=True))
        return "1 round" if count == 1 else f"{count} rounds"

    def _awaited(self, versions: Sequence[int]) -> str:
        """Who may have more than this, as a sentence or nothing."""
        pairs = zip(self._conductors, versions, strict=True)
        away = {
            peer: None for each, version in pairs for peer in self._going_back.may_hold_more(each, version)
        }
        if not away:
            return ""
        return f"{self._going_back.named(list(away))} may hold them and did not say good-bye. "


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(str(version) for version in versions)
