"""The rules of one round: what run.toml says, and what the ledger knows of the members when it is opened.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from farflung.coordinator.ledger import FragmentBook
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.rounds import RoundRules
from farflung.coordinator.weighting import MergeRules

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


def _trust(manifest: Manifest, commits: int) -> float:
    """The share of its full weight, after so many commits since it came or was suspect last: first the probation, then
    the ramp."""
    served = commits - manifest.admission.probation_rounds
    ramp = min(1.0, (max(served, 0) + 1) / (manifest.round.ramp_rounds + 1))
    return min(ramp, PROBATION_WEIGHT) if served < 0 else ramp
