"""Leases as a run of many members has them: for tests of the books that peers keep."""

from __future__ import annotations

import random

from farflung.coordinator.ledger.leases import Leases
from farflung.protocol.messages import Lease
from farflung.protocol.round_words import Used


def peer_names(count: int) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz234567", k=16)) for _ in range(count)]


def lent(seed: int, members: int, fragments: int = 1, samples: int = 1 << 40) -> Leases:
    """Two leases each; half of them are used in part, some are handed back, some used up."""
    draw = random.Random(seed)
    leases = Leases(64, samples, fragments)
    for peer in peer_names(members) * 2:
        found = leases.next_range(draw.choice((1, 64, 100)))
        assert found is not None
        leases.grant(
            peer,
            Lease.at(
                leases.next_id + draw.choice((0, 0, 3)), found.epoch, found.start, found.stop, found.uptos
            ),
        )
    for lease_id, held in list(leases.held.items()):
        what = draw.random()
        for fragment in range(fragments):
            if what < 0.5:
                upto = draw.randint(held.uptos[fragment], held.stop)
                leases.acknowledge([Used(lease_id, upto)], fragment)
        if what > 0.9:
            leases.release([lease_id])
    return leases
