"""Of the audit by replay: the factor of a batch's commits computed anew, from the results of all stages that were kept.

Called by audit_replay.py with each version of each stage whose state it has computed.  `[pipeline] clip` bounds the
gradient of the whole model, so no stage alone tells by what its result is multiplied: a version is checked when each of
its stages was replayed.  Until then it must be the same number in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from farflung.compression.payload import Bytes
from farflung.coordinator.court.plain_steps import ChunkRules, square_length
from farflung.protocol.manifest import Manifest
from farflung.protocol.outer_numbers import factor_of, total
from farflung.protocol.round_words import Commit


class OtherFactor(Exception):
    """A commit multiplies its results by another number than follows from them."""


@dataclass
class _Version:
    factor: float  # of the first commit of it that was heard
    by: int  # the stage of that one
    squares: dict[int, float] = field(default_factory=dict)  # by stage: of all its results, without buffers


class Factors:
    """Of one run.  One that clips no gradient of a batch has a factor of 1 in each commit."""

    def __init__(self, manifest: Manifest) -> None:
        self._clip, self._stages = manifest.batch_clip, manifest.fragments
        self._versions: dict[tuple[int, int], _Version] = {}  # by era and version
        self._checked = 0

    @property
    def told(self) -> str:
        """How much was checked, in words; empty where there is nothing to be checked."""
        if math.isinf(self._clip) or not self._versions:
            return ""
        due = len(self._versions)
        why = "" if self._checked == due else " (the others need all stages)"
        return f"; {self._checked} of {due} factors of [pipeline] clip made again{why}"

    def square_of(self, rules: ChunkRules, chunk: int, payload: Bytes) -> float:
        """Of a chunk's result, as its holders have proven it: buffers are no gradient."""
        if math.isinf(self._clip) or rules.is_plain(chunk):
            return 0.0
        return square_length(rules.gather_codec, rules.form.elements, payload)

    def hear(self, era: int, commit: Commit, squares: Sequence[float]) -> None:
        """`squares`: of the chunks of the stage that this commit is of.  OtherFactor if it does not fit."""
        if math.isinf(self._clip):
            if commit.factor != 1.0:
                raise OtherFactor(f"its commit multiplies by {commit.factor}, and this run clips no batch")
            return
        first = _Version(commit.factor, commit.fragment)
        version = self._versions.setdefault((era, commit.version), first)
        if commit.factor != version.factor:
            raise OtherFactor(
                f"its commit multiplies by {commit.factor}, that of stage {version.by} by {version.factor}"
            )
        version.squares[commit.fragment] = total(squares)
        if len(version.squares) < self._stages:
            return
        due = factor_of(list(version.squares.values()), self._clip)
        if due != commit.factor:
            raise OtherFactor(f"its commit multiplies by {commit.factor}, its results make that {due}")
        self._checked += 1
