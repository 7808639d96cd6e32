"""Reach, the mode, in the run machine: whoever nobody can dial meets others past their routers, or at a relay.  Pure.

Made by the machine (coordinator/modes/registry.py).  The ways themselves are those of routes.py, which the membership
asks; what the shell hears of relays comes in here (coordinator/relay/relay_hand.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farflung.coordinator.modes.mode import CoordinatorMode, ModeTools
from farflung.coordinator.reach.routes import Routes
from farflung.coordinator.reach.tickets import TicketScope
from farflung.coordinator.roster.ways import RelayNow, Trial, Usage
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import Effect, RelayPairs, TryRelay
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.causes import NoteCause


class Reach(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self.core = core
        self._tools = tools
        self.routes = core.members.ways = Routes()

    # ---- what the shell hears ----------------------------------------------------------------------------------

    def on_relay(self, relay: RelayNow | None, why_not: str, usage: Usage, now: float) -> list[Effect]:
        """Said again and again: what the coordinator's relay is, and what it did.  `why_not`: where there is none."""
        core, routes = self.core, self.routes
        core.now = now
        routes.usage, routes.why_no_relay = usage, why_not
        if relay != routes.relays.own:
            core.note(f"relay: on port {relay.port}" if relay is not None else f"relay: none, {why_not}")
            routes.relays.own = relay
            self._tools.follow_ways()
            self._tools.settle()
        return core.take_effects()

    def on_relay_tried(self, trial: Trial, why_not: str, now: float) -> list[Effect]:
        """What came of a TryRelay; empty: its bytes came through."""
        core, where = self.core, (trial.host, trial.port)
        core.now = now
        news = self.routes.relays.tried(trial.peer, trial.key, why_not, where, now)
        if news:
            core.note(f"{core.name(trial.peer)}: {news}")
            self._tools.follow_ways()
        return core.take_effects()

    # ---- what follows ------------------------------------------------------------------------------------------

    def find_ways(self, together: Callable[[str, str], bool]) -> bool:
        """The relay hears of them first."""
        core, routes, members = self.core, self.routes, self.core.members
        run = TicketScope(core.run_id, core.ledger.incarnation)
        routes.relays.see(members.alive, core.now)
        changed = routes.refresh(members.hardly_reached(core.now), core.now, run, core.prove, together)
        if changed:
            members.everybody.number += 1  # ways are told with it
            core.do(RelayPairs(routes.pairs))
        for trial in routes.trials(members.alive, core.now, run, core.prove):
            core.do(TryRelay(trial))
        for news in routes.meetings.take_news():
            core.log(
                f"{core.name(news.one)} and {core.name(news.other)} "
                + (
                    f"met past their routers, after {news.after_s:.2f} s"
                    if news.stands
                    else "lost each other"
                ),
                NoteCause.PUNCHED if news.stands else NoteCause.PARTED,
            )
        return changed


made = Reach
