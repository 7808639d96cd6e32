"""Recovery: the run goes back to an older state where nobody has the newest any more, by itself or by the host's word.

Where the mode begins.  Pure.  The core knows what it means that a run went back (the record `RolledBack`, eras); this
says whether, when and how far.  Without this folder a run that lost its newest state waits for a peer that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from farflung.coordinator.modes.mode import CoordinatorMode, ModeTools
from farflung.coordinator.recovery.rollback import Rollback
from farflung.coordinator.recovery.rollback_orders import RollbackOrders
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.messages import Beat
from farflung.protocol.orders import GoBack, Order, Reply, Rewind


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
