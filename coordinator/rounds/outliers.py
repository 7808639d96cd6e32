"""Who counts for how much, judged by the norms and directions of all contributions of a round (P9).  Pure.

Called by the round at the coordinator with what owners say of their shares: each a matrix of dot products.  Added up
they give the norms and cosines of whole contributions.  Two rules, in this order:

    direction   a member's figure is the median of its cosines to all others; out is who has less than a quarter of
                the members' median figure.  Relative, since honest cosines fall from 0.9 to 0.1 during a training.
    length      contributions longer than `clip` times the median are shortened to that; of who had longer than usual to
                train, its length is that of its usual work (`longer`), and so is its limit.

Members that the host trusts are never out for their direction.  Where there are too few to judge each other, those
that are trusted judge the rest: by their length, and if they are two by their direction as well.

In a round of groups directions are compared within each group, and lengths with those of all.  What most of one group
agree on need not be what the others do: so the sums of groups are compared in their turn, by the first rule, and a
group whose sum points elsewhere, or is longer than owners there said it could be, is out as a whole (`captured`).

An owner may lie about its share, and then it may also be a member whom the rules should stop.  So no owner has more
say than its share: see `_added` and `_evened`.  An owner that exaggerates the length of one member alone can still
make that member count for little in this round, and a root so of one group's sum that the group is out of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

LEAST_MEMBERS = 4  # with fewer there is no majority to compare with
LEAST_OF_MEDIAN = 0.25
COMMON_LEAST = 0.02  # below this median cosine the members have no direction in common that one could miss
WORTH_TELLING = 0.9  # about half of all honest contributions are a little longer than the median
# Median energy a chunk, between honest owners' shares; a louder owner's word is scaled down.
OWNERS_ALIKE = 100.0
# A sum that is this much longer than the lengths that it is made of allow, and so many times more than other sums are:
# then who told these lengths lied.  By rounding, and by the rule above, all may be a little longer.
SUM_LONGER, SUM_UNLIKE = 1.1, 4.0

Matrix: TypeAlias = NDArray[np.float64]  # symmetric


@dataclass(frozen=True)
class OwnerShare:
    """What one owner says of the chunks it owns."""

    chunks: int
    products: Matrix


@dataclass(frozen=True)
class Compared:
    """Those of one group, and what its owners say of them: `names` are those of the rows of each matrix."""

    names: Sequence[str]
    shares: Sequence[OwnerShare]  # at least one


@dataclass(frozen=True)
class Screening:
    told: str  # how the round was merged, for people
    products: Matrix  # of whole contributions; with several groups 0 for two of different ones
    names: tuple[str, ...]  # of its rows
    factors: dict[str, float] = field(default_factory=dict)  # to multiply each weight with; 1.0 if not named
    clipped: dict[str, str] = field(default_factory=dict)  # who was shortened by much -> by which figure
    out: dict[str, str] = field(default_factory=dict)
    groups: tuple[int, ...] = ()  # of its rows; empty: all are one

    def suspects(self, far_too_long: float) -> tuple[str, ...]:
        """Members that are out, or were shortened to this or less."""
        long = {name for name, factor in self.factors.items() if factor <= far_too_long}
        return tuple(sorted(long | self.out.keys()))

    def norm_of(self, weights: dict[str, float]) -> float | None:
        """Of the weighted sum, before it is encoded.  None: nobody compared members of different groups."""
        if len(set(self.groups)) > 1:
            return None
        row = np.array([weights.get(name, 0.0) for name in self.names])
        return sqrt(max(0.0, float(row @ self.products @ row)))

    def lengths(self) -> dict[str, float]:
        return dict(zip(self.names, np.sqrt(self.products.diagonal()).tolist(), strict=True))

    def cosine(self, counted: Collection[str]) -> float | None:
        """The mean product of two of those that counted, in parts of the mean square of one; None: there is none."""
        rows = [row for row, name in enumerate(self.names) if name in counted]
        among = self.products[np.ix_(rows, rows)]
        squares = float(among.trace())
        groups = np.array([self.groups[row] if self.groups else 0 for row in rows])
        pairs = int(np.equal.outer(groups, groups).sum()) - len(rows)
        if not pairs or not squares > 0.0:
            return None
        cosine = (float(among.sum()) / squares - 1.0) * len(rows) / pairs
        return cosine if isfinite(cosine) else None


def screened(
    names: Sequence[str],
    shares: Sequence[OwnerShare],
    clip: float,
    trusted: Set[str] = frozenset(),
    longer: Mapping[str, float] = {},
) -> Screening:
    """Of a flat round."""
    return screened_in_groups([Compared(names, shares)], clip, trusted, longer)


def screened_in_groups(
    groups: Sequence[Compared],
    clip: float,
    trusted: Set[str] = frozenset(),
    longer: Mapping[str, float] = {},
) -> Screening:
    """Directions within each group; lengths among all.  `longer`: how many times its usual work each one's is; 1."""
    total = _side_by_side([_added(group.shares, OWNERS_ALIKE) for group in groups])
    names = [name for group in groups for name in group.names]
    rows = tuple(number for number, group in enumerate(groups) for _ in group.names)
    judges = _judges(names, trusted)
    if not judges:
        told = f"plain mean: {len(names)} of at least {LEAST_MEMBERS} contributions to compare"
        return Screening(told, total, tuple(names), groups=rows)
    out: dict[str, str] = {}
    for group in groups:
        out |= _without_common_direction(group.names, group.shares, _judges(group.names, trusted))
    out = {name: why for name, why in out.items() if name not in trusted}
    norms = Screening("", total, tuple(names)).lengths()
    times = {name: longer.get(name, 1.0) for name in names}
    usual = median(norms[name] / times[name] for name in judges if name not in out)
    few, factors, clipped = len(names) < LEAST_MEMBERS, {}, {}
    for name, norm in norms.items():
        if few and name in judges:
            continue
        most = clip * usual * times[name]
        if name not in out and norm > most > 0.0:
            factors[name] = most / norm
            if factors[name] < WORTH_TELLING:
                why = f"shortened to {factors[name]:.3g} of its length: norm {norm:.3g}, median {usual:.3g}"
                clipped[name] = why
    by = f", judged by {len(judges)} that the host trusts" if few else ""
    told = f"robust mean of {len(names) - len(out)}: {len(out)} out, {len(factors)} shortened{by}"
    return Screening(told, total, tuple(names), factors, clipped, out, rows)


def captured(sums: Compared, claimed: Sequence[float]) -> tuple[dict[str, str], float]:
    """(groups whose sum is not like most groups', and why; how long the sum of all is).

    `claimed`: how long each sum would be at most, by what owners of that group said of its members' lengths.  If most
    of them lie, they may say that their own are short.
    """
    total, names = _added(sums.shares, OWNERS_ALIKE), sums.names
    norm = sqrt(max(0.0, float(total.sum())))
    if len(names) < LEAST_MEMBERS:
        return {}, norm
    out = _without_common_direction(names, sums.shares, names)
    longer = [
        length / most if most > 0.0 else (inf if length else 0.0)
        for length, most in zip(np.sqrt(total.diagonal()).tolist(), claimed, strict=True)
    ]
    usual = median(longer)
    for name, times in zip(names, longer, strict=True):
        if times > SUM_LONGER and times > SUM_UNLIKE * usual:
            out[name] = (
                f"its sum is {times:.3g} times as long as its members' lengths allow, that of others {usual:.3g}"
            )
    return out, norm


def _judges(names: Sequence[str], trusted: Set[str]) -> list[str]:
    return list(names) if len(names) >= LEAST_MEMBERS else [name for name in names if name in trusted]


def _without_common_direction(
    names: Sequence[str], shares: Sequence[OwnerShare], judges: Sequence[str]
) -> dict[str, str]:
    """Who is out, as seen by the `judges`: all, or a few that are trusted; two at least, to agree on a direction."""
    if len(judges) < 2:
        return {}
    cosines = _cosines(_added([_evened(share) for share in shares], 1.0))
    rows = {name: i for i, name in enumerate(names)}
    judged_by = np.array([rows[name] for name in judges])
    agreement = [float(np.median(cosines[row, judged_by[judged_by != row]])) for row in range(len(names))]
    usual = median(agreement[rows[name]] for name in judges)
    if usual < COMMON_LEAST:
        return {}
    least = LEAST_OF_MEDIAN * usual
    return {
        name: f"its direction is not that of the others: median cosine {own:.3f}, theirs {usual:.3f}, "
        f"at least {least:.3f} is needed"
        for name, own in zip(names, agreement, strict=True)
        if own < least
    }


def _added(shares: Sequence[OwnerShare], most: float) -> Matrix:
    """The sum; an owner in whose share the contributions have over `most` times the usual energy is scaled down."""
    energies = [float(np.median(share.products.diagonal())) / share.chunks for share in shares]
    # Of two owners nobody knows which one exaggerates.
    usual = median(energies) if len(shares) > 2 else 0.0
    total: Matrix = np.zeros_like(shares[0].products)
    for share, energy in zip(shares, energies, strict=True):
        scale = most * usual / energy if 0.0 < most * usual < energy else 1.0
        total += scale * share.products
    return total


def _side_by_side(parts: Sequence[Matrix]) -> Matrix:
    total: Matrix = np.zeros((sum(map(len, parts)),) * 2)
    at = 0
    for part in parts:
        upto = at + len(part)
        total[at:upto, at:upto] = part
        at = upto
    return total


def _evened(share: OwnerShare) -> OwnerShare:
    """As if each member's part were no longer than the median one: length must not buy a say in directions."""
    norms = np.sqrt(share.products.diagonal())
    scales = np.minimum(1.0, _ratios(np.full_like(norms, np.median(norms)), norms))
    return OwnerShare(share.chunks, np.outer(scales, scales) * share.products)


def _cosines(total: Matrix) -> Matrix:
    norms = np.sqrt(total.diagonal())
    return _ratios(total, np.outer(norms, norms))


def _ratios(above: Matrix, below: Matrix) -> Matrix:
    """0 where there is nothing to divide by."""
    found: Matrix = np.divide(above, below, out=np.zeros_like(below), where=below > 0.0)
    return found
