"""When which fragment is frozen, counted in inner steps.  Pure.

Called by the trainer's inner loop after every step.  Must not know tensors, the network, or what becomes of a frozen
fragment.  A schedule that freezes fragments at different steps, and lets training go on meanwhile, is another class
with the same three names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocking:
    """All fragments at once, every `period` steps; training then waits until it hears of each of them."""

    period: int
    fragments: int
    waits: bool = True

    def due(self, step: int) -> range:
        """The fragments to freeze after this step, the first of a period being 1."""
        return range(self.fragments if step >= self.period else 0)
