"""Where a peer trains on while the round of its frozen work is in flight.  Pure, and each peer's own affair: no shared
bits depend on it, and neither does what the peer owes.

Called by the trainer (and the simulator's) right after a freeze, with `schedule = "overlap"`.  Must not know rounds,
slots or what becomes of the work.

With a momentum of 0.9 the anchor goes several times as far as one round's pseudo-gradient, and what the momentum will
do is known before the round ends.  A peer that stayed where it stands would learn for a whole period at a place that
the run is about to leave, and once more to go that way.  So it goes ahead by what the momentum alone will do.

The steps of AdamW and Muon have a bounded length, whatever the round will bring, and plain averaging has no momentum:
there a peer stays.
"""

from __future__ import annotations

from torch import Tensor

from farflung.optim.outer import Nesterov, OuterStep


def ahead(outer: OuterStep, anchor_n: Tensor, momentum_n: Tensor, owed_n: Tensor, learned: int) -> Tensor:
    """Of one fragment, fp32 [n].  `learned`: so many values at its beginning are parameters, the rest are buffers.

    anchor - owed is where the peer stands; buffers know no momentum and stay there.
    """
    ahead_n = anchor_n - owed_n
    if isinstance(outer, Nesterov):
        ahead_n[:learned].sub_(momentum_n[:learned], alpha=outer.lr * outer.momentum**2)
    return ahead_n
