"""From tokens, trust and norms to the weights of a round, and the guard on what they make.  Pure.

Called by the round at the coordinator (round.py), which knows who is in.  Weights are the coordinator's alone (P9):
proportional to tokens, but at most WEIGHT_CAP times the median; less for who is new; less for who was shortened.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from farflung.protocol.round_words import WEIGHT_CAP

# ---- outliers ----------------------------------------------------------------------------------------------
# Who counts for how much, judged by the norms and directions of all contributions of a round (P9). Pure.
#
# Called by the round at the coordinator with what owners say of their shares: each a matrix of dot products.
# Added up they give the norms and cosines of whole contributions. Two rules, in this order:
#
#     direction   a member's figure is the median of its cosines to all others; out is who has less than a quarter of
#                 the members' median figure.  Relative, since honest cosines fall from 0.9 to 0.1 during a training.
#     length      contributions longer than `clip` times the median are shortened to that; who had longer than usual to
#                 train, its length is that of its usual work (`longer`), and so is its limit.
#
# Members that the host trusts are never out for their direction. Where there are too few to judge each other,
# those that are trusted judge the rest: by their length, and if they are two by their direction as well.
#
# In a round of groups directions are compared within each group, and lengths with those of all. What most of
# one group agree on need not be what the others do: so the sums of groups are compared in their turn, by the
# first rule, and a group whose sum points elsewhere, or is longer than owners there said it could be, is out
# as a whole (`captured`).
#
# An owner may lie about its share, and then it may also be a member whom the rules should stop. So no owner
# has more say than its share: see `_added` and `_evened`. An owner that exaggerates the length of one member
# alone can still make that member count for little in this round, and a root so of one group's sum that the
# group is out of it.

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


# ---- weights -----------------------------------------------------------------------------------------------

NORMS_LEAST = 4  # before so many commits nobody knows what size is usual
# What is believed of a member's tokens: for each leased sample so many times what is usual in the run,
RATE_MOST = 4.0
# of which the run remembers so much of a rise: else a league that is among itself for a few rounds would set the usual.
RATE_RISE = 1.25
# and for each round since its work went in last so many times what the member in the middle has.  Honest peers differ
# by ten times and more in speed: this is no measure of it, but keeps absurd claims out of the run's figures.
PACE_MOST = 32.0
# Who was away, or whose coordinator was, for more than SPAN_USUAL usual rounds may bring the work of all of them: twice
# the usual of each, since a round is not training alone, and of no more rounds than SPAN_MOST.
SPAN_USUAL, SPAN_TIMES, SPAN_MOST = 2.0, 2.0, 32.0


@dataclass(frozen=True)
class MergeRules:
    """How contributions become one.  `trust` and `norms` are facts of the run when the round was opened."""

    robust: bool = False
    clip: float = 1.0
    guard: float = 0.0  # times the median of `norms`; 0: no guard
    trust: Mapping[str, float] = field(default_factory=dict)  # share of the full weight; 1.0 if not named
    norms: Sequence[float] = ()  # of the last merged updates
    usual_tokens: float = 0.0  # of a member in those; 0: not known
    usual_rate: float = 0.0  # tokens for each leased sample, in the newest commits; 0: not known
    # Since its work went in last, in usual rounds; 1 if not named.  `spans`: of a newcomer since the newest commit.
    rounds: Mapping[str, float] = field(default_factory=dict)
    spans: Mapping[str, float] = field(default_factory=dict)
    # Tokens of its usual commit, where it has one.
    usual_of: Mapping[str, float] = field(default_factory=dict)
    trusted: frozenset[str] = frozenset()  # members that the host answers for
    refused: bool = False  # the guard threw away the work of a round from this very version


@dataclass(frozen=True)
class WorkClaim:
    """What a member says of the work that it contributes."""

    tokens: int
    samples: int = 0  # that are leased to it, and that it says it learned from: the books agree


@dataclass(frozen=True)
class Believed:
    tokens: dict[str, int]
    why: dict[str, str]  # of those that are not believed in full
    rate: float | None  # tokens for each leased sample, of the member in the middle


def believed(claims: Mapping[str, WorkClaim], rules: MergeRules) -> Believed:
    """Tokens count only as far as leases and the other members make them likely.

    Samples are leased, so nobody can name more than it was given; tokens are its word.  Among few members the lower
    word counts, and a member that is alone is compared with the run's own past.
    """
    tokens = {name: claim.tokens for name, claim in claims.items()}
    why: dict[str, str] = {}

    def bound(name: str, most: float, told: str) -> None:
        if tokens[name] > most > 0.0:
            tokens[name] = max(1, int(most))
            why[name] = f"{tokens[name]} of the {claims[name].tokens} tokens that it claims count: {told}"

    with_samples = {name: claim for name, claim in claims.items() if claim.samples and claim.tokens}
    rates = {name: claim.tokens / claim.samples for name, claim in with_samples.items()}
    usual = rules.usual_rate or (statistics.median_low(rates.values()) if rates else 0.0)
    for name, claim in with_samples.items():
        told = f"for each of its {claim.samples} samples {RATE_MOST:g} times the usual {usual:.3g}"
        bound(name, RATE_MOST * usual * claim.samples, told)
    if 2 * len(with_samples) > len(claims):
        middle = statistics.median_low(tokens[name] for name in with_samples)
        for name in claims.keys() - with_samples.keys():
            told = f"it names no samples, and the member in the middle has {middle}"
            bound(name, middle * rules.rounds.get(name, 1), told)
    if len(claims) > 1:
        middle = statistics.median_low(tokens.values())
        for name in claims:
            told = f"more than {PACE_MOST:g} times as many as the member in the middle, which has {middle}"
            bound(name, PACE_MOST * middle * rules.rounds.get(name, 1), told)
    counted = [tokens[name] / claim.samples for name, claim in with_samples.items()]
    rate = statistics.median_low(counted) if counted else None
    if rate is not None and rules.usual_rate:
        rate = min(rate, RATE_RISE * rules.usual_rate)
    return Believed(tokens, why, rate)


@dataclass(frozen=True)
class Weighted:
    weights: dict[str, float]  # exactly representable in fp32
    norm: float | None = None  # of the weighted sum, where it is known
    refusal: str = ""  # the guard: this must not become a version
    told: str = ""  # what the guard did


def weighted(tokens: Mapping[str, int], rules: MergeRules, screening: Screening | None) -> Weighted:
    """Of the members in `tokens`, in their order.  A member that is out has no place there."""
    names = list(tokens)
    trust = [rules.trust.get(name, 1.0) for name in names]
    weights = token_weights([tokens[name] for name in names], WEIGHT_CAP, trust)
    if screening is None:
        return Weighted(dict(zip(names, weights, strict=True)))
    # Not scaled up again: what is cut from one member's length is not given to the others.
    by_name = {
        name: _fp32(weight * screening.factors.get(name, 1.0))
        for name, weight in zip(names, weights, strict=True)
    }
    norm = screening.norm_of(by_name)
    return Weighted(by_name) if norm is None else guarded(by_name, norm, tokens, rules)


def guarded(by_name: dict[str, float], norm: float, tokens: Mapping[str, int], rules: MergeRules) -> Weighted:
    """Whether these weights may make a version, since they make a sum of this norm."""
    known = len(rules.norms) >= NORMS_LEAST
    limit = rules.guard * statistics.median(rules.norms) * _longer(by_name, tokens, rules) if known else 0.0
    if not 0.0 < limit < norm:
        return Weighted(by_name, norm)
    usual = f"over {rules.guard:g} times the usual {limit / rules.guard:.3g} for so much work"
    figures = f"the merged update has norm {norm:.3g}, {usual}"
    if not rules.refused:
        return Weighted(by_name, norm, refusal=figures)
    # The second time in a row it is what the peers really learn: it is taken, but no longer than the guard allows.
    scaled = {name: _fp32(weight * limit / norm) for name, weight in by_name.items()}
    return Weighted(scaled, limit, told=f"{figures}, again: shortened to {limit:.3g}")


def shortened(screening: Screening | None, made: Believed, included: Sequence[str]) -> dict[str, str]:
    """Who counts for less than it says, by its length or by its tokens."""
    by_length = screening.clipped if screening is not None else {}
    by_tokens = {peer: why for peer, why in made.why.items() if peer in included}
    both = by_length.keys() & by_tokens.keys()
    return by_length | by_tokens | {peer: f"{by_length[peer]}; {by_tokens[peer]}" for peer in both}


def likeness(screening: Screening | None, included: Sequence[str]) -> float | None:
    """What contributions have in common, for people; None: nobody compared them."""
    return screening.cosine(included) if screening is not None else None


def longer(name: str, tokens: int, rules: MergeRules) -> float:
    """How many times its usual work this is: while the coordinator or the member was away, steps went on (P5), and all
    of it counts (P6).  Never less than 1.

    Its tokens are its own word, and so is what was usual of it: but nobody brings more than time went by for, and that
    the run's clock and the commits tell.  Who stays away to be longer once has as much say as who is in each time.
    """
    span, usual = rules.spans.get(name, 1.0), rules.usual_of.get(name, rules.usual_tokens)
    if span <= SPAN_USUAL or not usual:
        return 1.0
    return max(1.0, min(tokens / usual, SPAN_TIMES * min(span, SPAN_MOST)))


def _longer(weights: Mapping[str, float], tokens: Mapping[str, int], rules: MergeRules) -> float:
    """Of the sum: each by its own work.  Weights are capped, so one that is longer lifts it by its part alone."""
    whole = sum(weights.values())
    if not whole > 0.0:
        return 1.0
    return sum(weight * longer(name, tokens[name], rules) for name, weight in weights.items()) / whole


def token_weights(tokens: Sequence[int], cap: float, trust: Sequence[float] = ()) -> list[float]:
    """Weights that sum to about 1, proportional to tokens but at most `cap` times the median; exact in fp32.

    `trust`: what each counts of that; only the ratios matter, so that a run of newcomers is like any other.
    Rounded to fp32 here, once, so that what is written down is what every owner multiplies by.
    """
    bound = cap * statistics.median_low(tokens)  # of two: the lower, or one could lift its own bound
    capped = [min(float(t), bound) if bound > 0 else 1.0 for t in tokens]
    most = max(trust, default=1.0)
    shares = [c * t / most for c, t in zip(capped, trust, strict=True)] if trust else capped
    total = sum(shares)
    return [_fp32(share / total) for share in shares]


def _fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
