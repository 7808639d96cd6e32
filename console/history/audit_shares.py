"""Of the audit by replay: of a synchronous batch every microbatch once in each stage, by what the members signed.

Called by audit_merges.py with the signed lists of each round whose contributions are kept.  A member signs with its
hashes which microbatches are in its sums, and of how many tokens they are.  So whoever has the contributions of a round
can say without the run whether one counted twice, and whether the committed weights are those of the tokens; and of all
stages of a version, whether they learned from the same samples.  Nobody's sums are believed here: what the tokens of a
microbatch are, a member alone knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.coordinator.rounds.weighting import token_weights
from farflung.protocol.digests import bits, mask_from_bytes
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Sent
from farflung.protocol.round_words import Commit


class OtherShare(Exception):
    """What the members of a round signed is not what a batch is."""


@dataclass(frozen=True)
class _Batch:
    """As the first stage of a version that was heard has it."""

    stage: int
    counted: int  # mask


class Shares:
    """Of one run.  Steps of each peer's own have no shares: nothing is checked there."""

    def __init__(self, manifest: Manifest) -> None:
        self._on = manifest.pipeline.batch > 0
        self._batches: dict[tuple[int, int], _Batch] = {}  # by era and version
        self._checked = self._due = 0

    @property
    def told(self) -> str:
        """How much was checked, in words; empty where there is nothing to be checked."""
        if not self._due:
            return ""
        return f"; {self._checked} of {self._due} rounds with every microbatch once, by what members signed"

    def hear(self, era: int, commit: Commit, signed: Sequence[Sent | None]) -> None:
        """`signed`: of each included member, in their order; None: it is not kept.  OtherShare if it does not fit."""
        if not self._on:
            return
        self._due += 1
        counted = 0
        for author, sent in zip(commit.included, signed, strict=True):
            mine = mask_from_bytes(sent.counted) if sent is not None else 0
            if twice := mine & counted:
                told = f"microbatch {next(bits(twice))} is in the sums of {author}, and in another member's"
                raise OtherShare(told)
            counted |= mine
        there = [sent for sent in signed if sent is not None]
        if len(there) < len(signed):
            return
        due = [weight for weight in commit.weights if weight > 0.0]
        if token_weights([sent.tokens for sent in there], math.inf) != due:
            raise OtherShare("the committed weights are not those of the tokens that its members signed")
        self._compare(era, commit, counted)
        self._checked += 1

    def _compare(self, era: int, commit: Commit, counted: int) -> None:
        first = self._batches.setdefault((era, commit.version), _Batch(commit.fragment, counted))
        if counted != first.counted:
            other = next(bits(counted ^ first.counted))
            told = f"microbatch {other} is not in the sums of this stage and of stage {first.stage} alike"
            raise OtherShare(told)
