"""Whether all peers' models compute the same: finds peers whose code differs from the others'.  Pure.

Part of the guidance.  Each peer says in its beats what its model computed from made-up input at a version, which is one
state of the weights: see peer/checks/forward_check.py.  It is its word alone, so that nothing follows but words: for
its owner, for the host and in the record.  The smaller group is named; of two as large, the one that was named before,
then the one from which more differed when they were named, then the one without the oldest member.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping

from farflung.protocol.round_words import Forward

# Rounding: of fp32, and of TF32 in its place; of bf16 through dozens of layers.  Another activation is 0.2 and more.
WITHIN, WITHIN_COARSE = 0.005, 0.06
COMPARED = 32  # of the oldest members


class Alike:
    def __init__(
        self, joined_no: Callable[[str], int | None], name: Callable[[str], str], note: Callable[[str], None]
    ) -> None:
        """`joined_no`: in which order members came; None of one that is gone."""
        self._joined_no, self._name, self._note = joined_no, name, note
        self._era = 0
        self._said: dict[str, tuple[bytes, Forward]] = {}  # peer -> its process, and what that said last
        self._odd: dict[str, str] = {}  # peer -> how it differs
        self._from: dict[str, str] = {}  # peer -> from whom it differed when it was named last

    def hear(self, peer: str, process: bytes, said: Forward | None, era: int) -> None:
        """`era`: of the run, in which the peer said so."""
        if era != self._era:  # the same version has other weights
            self._era, self._said, self._odd, self._from = era, {}, {}, {}
        if said is None or self._said.get(peer) == (process, said):
            return
        for kept in (self._said, self._odd, self._from):
            for gone in [each for each in kept if self._joined_no(each) is None]:
                del kept[gone]
        if process != self._said.get(peer, (b"", said))[0]:
            self._odd.pop(peer, None)
            self._from = {each: other for each, other in self._from.items() if peer not in (each, other)}
        self._said[peer] = process, said
        self._compare(peer, said)

    def told(self, peer: str, process: bytes) -> str:
        """What its owner should know; empty: nothing."""
        return self._odd.get(peer, "") if self._said.get(peer, (b"",))[0] == process else ""

    def _compare(self, said_by: str, said: Forward) -> None:
        alike = {p: f for p, (_, f) in self._said.items() if (f.version, f.form) == (said.version, said.form)}
        oldest = heapq.nsmallest(COMPARED, alike, key=lambda peer: self._joined_no(peer) or 0)
        # Of two groups as large, those that were not named before, and from whom fewer differed: not everybody speaks
        # of each version, so that the one that differs from all is met by each of them alone.
        met = Counter(self._from.values())
        order = sorted(dict.fromkeys([*oldest, said_by]), key=lambda peer: (peer in self._odd, met[peer]))
        first = _first_of_most(alike, order)
        away_by = {peer: distance(alike[first], alike[peer]) for peer in order}
        if first in self._odd and not any(away_by.values()):
            return  # those that were named agree with each other
        for peer, away in away_by.items():
            if away is None:
                self._odd.pop(peer, None)
            elif peer not in self._odd:
                self._from[peer] = first
                self._odd[peer] = (
                    f"its model computes something else than that of {self._name(first)}: with the weights of version "
                    f"{said.version} the same input gives results that differ by {min(away, 9.99):.0%}; compare the "
                    "code of the two models, their options and the versions of their libraries"
                )
                self._note(f"{self._name(peer)}: {self._odd[peer]}")


def distance(mine: Forward, other: Forward) -> float | None:
    """How much they differ, as a part of the larger; None: no more than by rounding."""
    sizes = [math.hypot(*each.numbers) for each in (mine, other)]
    away = math.dist(mine.numbers, other.numbers)
    if not math.isfinite(away + sum(sizes)):
        return 1.0
    bound = WITHIN_COARSE if mine.coarse or other.coarse else WITHIN
    return away / max(sizes) if away > bound * max(sizes) else None


def _first_of_most(alike: Mapping[str, Forward], order: list[str]) -> str:
    """The first of those whose results the most share."""
    shared: dict[str, int] = {}
    for peer in order:
        same = next((each for each in shared if distance(alike[each], alike[peer]) is None), peer)
        shared[same] = shared.get(same, 0) + 1
    return max(shared, key=lambda each: shared[each])
