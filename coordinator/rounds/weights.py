"""From tokens, trust and norms to the weights of a round, and the guard on what they make.  Pure.

Called by the round at the coordinator (round.py), which knows who is in.  Weights are the coordinator's alone (P9):
proportional to tokens, but at most `weight_cap` times the median; less for who is new; less for who was shortened.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farflung.coordinator.rounds.outliers import Screening

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


def weighted(
    tokens: Mapping[str, int], cap: float, rules: MergeRules, screening: Screening | None
) -> Weighted:
    """Of the members in `tokens`, in their order.  A member that is out has no place there."""
    names = list(tokens)
    trust = [rules.trust.get(name, 1.0) for name in names]
    weights = token_weights([tokens[name] for name in names], cap, trust)
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
