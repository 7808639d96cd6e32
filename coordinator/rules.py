"""The rules of one round: what run.toml says, and what the ledger knows of the members when it is opened.  Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from statistics import median

from farflung.coordinator.ledger import FragmentBook
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.rounds import RoundRules
from farflung.coordinator.weighting import MergeRules

OWNERS_LEAST = 8  # of a round that not all fit into, where there are so many


def rules_for(manifest: Manifest, book: FragmentBook, peers: Sequence[str]) -> RoundRules:
    full = manifest.round.ramp_rounds + 1
    merge = MergeRules(
        robust=manifest.merge.policy == "robust",
        clip=manifest.merge.clip,
        guard=manifest.merge.guard,
        trust={peer: min(1.0, (book.trust[peer] + 1) / full) for peer in peers},
        norms=tuple(norm for norm, _ in book.norms.values()),
        usual_tokens=median([tokens for _, tokens in book.norms.values()] or [0.0]),
        refused=book.dropped_at == book.version,
    )
    return RoundRules(
        manifest.run.min_peers,
        manifest.round.scatter_grace_s,
        manifest.round.round_timeout_s,
        manifest.round.weight_cap,
        manifest.round.gather_codec,
        merge,
    )


def chosen(ready: Sequence[str], can_own: Set[str], most: int) -> list[str]:
    """Who takes part where not all fit into one round: the first ones, and at least a few that can own chunks."""
    taken, rest = list(ready[:most]), list(ready[most:])
    owners = sum(peer in can_own for peer in taken)
    for peer in [peer for peer in rest if peer in can_own][: max(0, OWNERS_LEAST - owners)]:
        last = next((at for at in reversed(range(len(taken))) if taken[at] not in can_own), None)
        if last is not None:
            taken[last] = peer
    return taken
