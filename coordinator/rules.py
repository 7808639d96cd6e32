"""The rules of one round: what run.toml says, and what the ledger knows of the members when it is opened.  Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from statistics import median

from farflung.coordinator.ledger import FragmentBook
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.rounds import RoundRules
from farflung.coordinator.weighting import MergeRules

OWNERS_LEAST = 8  # of a round that not all fit into, where there are so many
PROBATION_WEIGHT = 0.1


def rules_for(manifest: Manifest, book: FragmentBook, peers: Sequence[str]) -> RoundRules:
    merge = MergeRules(
        robust=manifest.merge.policy == "robust",
        clip=manifest.merge.clip,
        guard=manifest.merge.guard,
        trust={peer: _trust(manifest, book.trust[peer]) for peer in peers},
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


def _trust(manifest: Manifest, commits: int) -> float:
    """The share of its full weight, after so many commits since it came or was suspect last: first the probation, then
    the ramp."""
    served = commits - manifest.admission.probation_rounds
    ramp = min(1.0, (max(served, 0) + 1) / (manifest.round.ramp_rounds + 1))
    return min(ramp, PROBATION_WEIGHT) if served < 0 else ramp
