"""A run and its host, who gives orders, with the modes that are there.  Virtual time, no door."""

from __future__ import annotations

from farflung.coordinator.modes import registry
from farflung.coordinator.modes.registry import ModeTools
from farflung.coordinator.run.operator_orders import AmendmentOrders, Operating
from farflung.protocol.errors import DepartureCause
from farflung.protocol.messages import Gone, Order
from farflung.protocol.states import OF_DEPARTURE
from rig.made_run import MadeRun


class Office(MadeRun):
    """A run and its host; `lost` is who had to go, how, and why."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lost: list[tuple[str, str, str]] = []
        tools = ModeTools(
            lambda count: bytes(count), self.sends_away, lambda: None, lambda: None, lambda peer: True
        )
        modes = [made(self.core, self.drivers, tools) for made in registry.having("made").values()]
        self.core.modes = tuple(mode for mode in modes if mode is not None)
        self.operating = Operating(self.core, self.sends_away, AmendmentOrders(self.core, self.drivers))

    def sends_away(self, peer: str, cause: DepartureCause, told: str, why: str) -> None:
        member = self.core.members.alive[peer]
        self.core.tell(member, Gone, reason=told, final=True)
        self.lost.append((member.contact.name, cause, why))
        self.core.members.lose(member, OF_DEPARTURE[cause])

    def obeys(self, order: Order) -> str:
        reply = self.operating.obey(order)
        assert reply.ok, reply.text
        return reply.text

    def refuses(self, order: Order) -> str:
        """A sentence for the host; nothing is changed by it."""
        self.effects()
        reply = self.operating.obey(order)
        assert not reply.ok and reply.found == {}, reply
        assert self.effects() == [], "nothing was written, and nobody was told"
        return reply.text
