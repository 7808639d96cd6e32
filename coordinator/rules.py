"""The rules of one round: what run.toml says, and what the ledger knows of the members when it is opened.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from farflung.coordinator.ledger import FragmentBook
from farflung.coordinator.manifest import Manifest
from farflung.coordinator.rounds import RoundRules
from farflung.coordinator.weighting import MergeRules


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
