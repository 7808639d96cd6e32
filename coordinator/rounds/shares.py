"""What follows from the members' lines: who reduces how many chunks, and which codec a contribution travels in.  Pure.

Owns: the model of a round's time, the search for the shares that make it least, and the ladder of `codec = "auto"`.
Called by the coordinator's rounds.  Must not know: sockets, clocks, how the rates were measured.

The model.  Of n members, member j owns the share w of all chunks, its contribution has the size b_j (all of them
together: B), the result has the size r.  A member that cannot be dialled owns nothing.  Then member j

    in SCATTER  sends (1 - w) * b_j        and receives  w * (B - b_j)
    in GATHER   sends (n - 1) * w * r      and receives  (1 - w) * r

A decision lies between the phases, so nobody's GATHER begins before everybody's SCATTER has ended, and the time of a
round is  max_j scatter_j + max_j gather_j,  each being the slower of its two directions.  This sum is minimised
itself.  Where more members could own if bytes of the round passed relays, a pair of them is given so much there and
carries  w * b_i  and  w * r;  such owners have to make the round much shorter, or there are none (`best_assigned`).

For a given scatter time every share has a least and a greatest value, linear in the gather time; so the
least gather time is found by bisection, and since it is a convex function of the scatter time, the best scatter
time by a golden section search.  Whole chunks need only whole bounds in place of the fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from types import MappingProxyType

from farflung.protocol.round_words import LADDER

# Bytes/s; keeps nonsense from a peer inside the range of the arithmetic.
LEAST_RATE, GREATEST_RATE = 1.0, 1e12
RELAY_GAIN = 1.25  # a round must be so much shorter, or its bytes pass no relay that it could do without
ALIKE = 1.6  # rates that differ from the median by less than this factor may be the same
ALIKE_ROUGHLY = 5.0  # those that no round has shown; and above the median such a rate tells nothing
# Of so many members two own something, whatever their lines are said to be: what an owner says of the others' work is
# measured by other owners (owners.py), and whoever owned everything would be believed.
JUDGED = 3
FINE = 1 << 40  # so many chunks are as good as fractions
SLACK = 1e-9  # of a chunk: rounding must not take a chunk from somebody whose share is whole
TINY = 1e-9  # no phase can be this much shorter than with even shares and matter
BISECTIONS = 28
SECTIONS = 24
# Whole chunks often need a little more time than fractions; these scatter times are tried.
STRETCHES = (1.0, 1.005, 1.01, 1.02, 1.04, 1.07, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
FEW = 100  # chunks times members; with so few, every scatter time that can be the best is tried
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class MemberRates:
    """What one member can carry.  None, 0 and nonsense mean: not known."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    scatter_bits: float = 8.0  # per value, of this member's contribution
    # The way up, which no round has shown: from a probe, or at least so much; wrong by a factor.
    rough: bool = False
    # As an owner, of each member that it meets at a relay only; None: there is none.
    pair_bytes_per_s: float | None = None


def smoothed(rates: Sequence[MemberRates]) -> list[MemberRates]:
    """Measured rates with those that are near the median set to it.

    What was measured is uncertain by tens of percent, and depends on the shares themselves: a member that is given
    less to carry is measured lower.  Among lines that are about equal, even shares are better than chasing that noise.
    """
    usual_up = _median(_known(line.up_bytes_per_s) for line in rates)
    usual_down = _median(_known(line.down_bytes_per_s) for line in rates)
    return [
        replace(
            line,
            up_bytes_per_s=near(_known(line.up_bytes_per_s), usual_up, line.rough),
            down_bytes_per_s=near(_known(line.down_bytes_per_s), usual_down),
        )
        for line in rates
    ]


def near(rate: float | None, usual: float | None, rough: bool = False) -> float | None:
    if rate is None or usual is None:
        return rate
    if rough:
        return rate if rate * ALIKE_ROUGHLY < usual else usual
    return usual if 1 / ALIKE <= rate / usual <= ALIKE else rate


def assign(
    chunk_count: int,
    members: Sequence[str],
    dialable: set[str],
    rates: Sequence[MemberRates] = (),
    gather_bits: float = 8.0,
) -> tuple[int, ...]:
    """chunk -> index in `members`, in contiguous runs; () if nobody can be dialled.

    `rates` holds one entry for each member, in their order; without it, or if it knows no rate, shares are even.
    """
    assert not rates or len(rates) == len(members)
    hosts = tuple(index for index, member in enumerate(members) if member in dialable)
    return _assigned(chunk_count, len(members), hosts, tuple(rates), gather_bits) if hosts else ()


def best_assigned(
    chunk_count: int,
    members: Sequence[str],
    dialable: set[str],
    rates: Sequence[MemberRates],
    gather_bits: float,
    wider: Sequence[Mapping[str, float]],
) -> tuple[int, ...]:
    """As `assign`, but who `wider` names may own, too, where that makes the round much shorter.

    `wider`: more and more members, each with what a pair of its is given at a relay.  Where no rate is known, they own
    nothing: what passes a relay somebody gives.
    """
    best = assign(chunk_count, members, dialable, rates, gather_bits)
    least_s = _round_s(best, rates, gather_bits) / RELAY_GAIN
    for pairs in wider if best and least_s else ():
        lines = [
            replace(line, pair_bytes_per_s=pairs.get(it)) for it, line in zip(members, rates, strict=True)
        ]
        found = assign(chunk_count, members, dialable | pairs.keys(), lines, gather_bits)
        found_s = _round_s(found, lines, gather_bits)
        if found_s <= least_s:
            best, least_s = found, found_s
    return best


def _round_s(owners: Sequence[int], rates: Sequence[MemberRates], gather_bits: float) -> float:
    """By the model; 0: no rate is known."""
    loads = _loads(rates, gather_bits)
    counts = [owners.count(index) / max(1, len(owners)) for index in range(len(loads))]
    return sum(_phases(loads, counts)) if loads else 0.0


@lru_cache(maxsize=256)  # rounds of the same members over lines that are taken for the same ones are many
def _assigned(
    chunk_count: int, members: int, hosts: tuple[int, ...], rates: tuple[MemberRates, ...], gather_bits: float
) -> tuple[int, ...]:
    even = tuple(hosts[chunk * len(hosts) // chunk_count] for chunk in range(chunk_count))
    loads = _loads(rates, gather_bits)
    if len(hosts) == 1 or not loads or chunk_count == 0:
        return even
    model = _Model(loads, frozenset(hosts))
    counts = model.best_counts(chunk_count, [even.count(index) for index in range(members)])
    if members >= JUDGED and max(counts) == chunk_count > 1:
        counts = model.with_a_second(counts)
    return tuple(index for index, count in enumerate(counts) for _ in range(count))


def reassign(
    owners: Sequence[int],
    lost: set[int],
    heirs: Sequence[int],
    rates: Sequence[MemberRates] = (),
    gather_bits: float = 8.0,
    first: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Give the chunks of the lost owners to the heirs, the least loaded for its line first; all others stay put.

    `first`: chunk -> heirs that go before all others."""
    loads = _loads(rates, gather_bits)
    pull = {heir: loads[heir].pull if loads else 1.0 for heir in heirs}
    owned = {heir: sum(1 for owner in owners if owner == heir) for heir in heirs}
    moved = list(owners)
    for chunk, owner in enumerate(owners):
        if owner in lost:
            heir = min(first.get(chunk) or owned, key=lambda index: ((owned[index] + 1) / pull[index], index))
            moved[chunk] = heir
            owned[heir] += 1
    return tuple(moved)


# ---- the model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """Seconds that one member needs for its share w: (1-w) of `scatter_up` and `gather_down`, w of the others."""

    scatter_up: float
    scatter_down: float
    gather_up: float
    gather_down: float

    @property
    def pull(self) -> float:
        """How much of owning this line carries in a second."""
        return 1 / (self.scatter_down + self.gather_up)

    def scatter(self, w: float) -> float:
        return max((1 - w) * self.scatter_up, w * self.scatter_down)

    def gather(self, w: float) -> float:
        return max((1 - w) * self.gather_down, w * self.gather_up)


def _loads(rates: Sequence[MemberRates], gather_bits: float) -> list[_Load]:
    """One for each member; none if no rate is known or nothing has to travel."""
    ups = [_known(line.up_bytes_per_s) for line in rates]
    downs = [_known(line.down_bytes_per_s) for line in rates]
    usual_up, usual_down = _median(ups) or _median(downs), _median(downs) or _median(ups)
    if len(rates) < 2 or usual_up is None or usual_down is None:
        return []
    assert gather_bits > 0 and all(line.scatter_bits > 0 for line in rates)
    all_bits, others = sum(line.scatter_bits for line in rates), len(rates) - 1
    most_bits = max(line.scatter_bits for line in rates)
    loads = []
    for line, known_up, known_down in zip(rates, ups, downs, strict=True):
        up, down = known_up or usual_up, known_down or usual_down
        from_others, pair = all_bits - line.scatter_bits, _known(line.pair_bytes_per_s) or math.inf
        loads.append(
            _Load(
                line.scatter_bits / up,
                max(from_others / down, most_bits / pair),
                max(others * gather_bits / up, gather_bits / pair),
                gather_bits / down,
            )
        )
    return loads


def _known(rate: float | None) -> float | None:
    if rate is None or not math.isfinite(rate) or rate <= 0:
        return None
    return min(max(rate, LEAST_RATE), GREATEST_RATE)


def _median(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def _phases(loads: Sequence[_Load], shares: Sequence[float]) -> tuple[float, float]:
    pairs = list(zip(loads, shares, strict=True))
    return max(load.scatter(w) for load, w in pairs), max(load.gather(w) for load, w in pairs)


@dataclass(frozen=True)
class _Model:
    loads: list[_Load]
    hosts: frozenset[int]  # indices of those that may own

    def best_counts(self, chunk_count: int, even: list[int]) -> list[int]:
        """Chunks per member for the least round time; never worse than `even`."""
        even_s = _phases(self.loads, [count / chunk_count for count in even])
        most_s = sum(even_s)  # no phase of the best shares takes longer
        fine_s = self._best_scatter_s(most_s)
        least_s = self._least_scatter_s(most_s, chunk_count)
        tried = [base * stretch for base in (fine_s, least_s) for stretch in STRETCHES] + [even_s[0]]
        if chunk_count * len(self.loads) <= FEW:
            tried += self._steps(chunk_count)
        best, best_s = even, most_s
        for scatter_s in sorted(tried):
            if scatter_s >= best_s or not self._fits(scatter_s, best_s - scatter_s, chunk_count):
                continue  # cannot do better than what is known already
            gather_s = self._least_gather_s(scatter_s, best_s - scatter_s, chunk_count)
            counts = self._fill(scatter_s, gather_s, chunk_count)
            total_s = sum(_phases(self.loads, [count / chunk_count for count in counts]))
            if total_s < best_s:
                best, best_s = counts, total_s
        return best

    def with_a_second(self, counts: list[int]) -> list[int]:
        """Where one owns all, another one gets a chunk: who makes the round last least longer by it."""
        first, count = max(enumerate(counts), key=lambda each: each[1])

        def shared(second: int) -> list[int]:
            return [(index == first) * (count - 1) + (index == second) for index in range(len(counts))]

        def round_s(second: int) -> float:
            return sum(_phases(self.loads, [each / count for each in shared(second)]))

        return shared(min(sorted(self.hosts - {first}), key=round_s))

    def _steps(self, chunk_count: int) -> list[float]:
        """Every scatter time at which a member may own a chunk more or less: the best one is among them."""
        up = [load.scatter_up * (1 - n / chunk_count) for load in self.loads for n in range(chunk_count)]
        return up + [
            load.scatter_down * n / chunk_count for load in self.loads for n in range(1, chunk_count + 1)
        ]

    def _best_scatter_s(self, most_s: float) -> float:
        """The scatter time of the best fractions.  Searched on a logarithmic scale: rates differ by thousands."""
        least_s = self._least_scatter_s(most_s, FINE)

        def total_s(log_s: float) -> float:
            scatter_s = math.exp(log_s)
            return scatter_s + self._least_gather_s(scatter_s, most_s, FINE)

        low, high = math.log(least_s), math.log(most_s)
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        left_s, right_s = total_s(left), total_s(right)
        for _ in range(SECTIONS):
            if left_s <= right_s:
                high, right, right_s = right, left, left_s
                left = high - GOLDEN * (high - low)
                left_s = total_s(left)
            else:
                low, left, left_s = left, right, right_s
                right = low + GOLDEN * (high - low)
                right_s = total_s(right)
        return math.exp(high)

    def _least_gather_s(self, scatter_s: float, most_s: float, chunk_count: int) -> float:
        return _least(lambda gather_s: self._fits(scatter_s, gather_s, chunk_count), most_s * TINY, most_s)

    def _least_scatter_s(self, most_s: float, chunk_count: int) -> float:
        return _least(lambda scatter_s: self._fits(scatter_s, most_s, chunk_count), most_s * TINY, most_s)

    def _bounds(self, scatter_s: float, gather_s: float, chunk_count: int) -> list[tuple[int, int]] | None:
        """The fewest and the most chunks that each member may own to keep both times; None if it cannot."""
        bounds = []
        for index, load in enumerate(self.loads):
            w_least = max(0.0, 1 - scatter_s / load.scatter_up, 1 - gather_s / load.gather_down)
            w_most = min(1.0, scatter_s / load.scatter_down, gather_s / load.gather_up)
            least = math.ceil(w_least * chunk_count - SLACK)
            most = math.floor(w_most * chunk_count + SLACK) if index in self.hosts else 0
            if least > most:
                return None
            bounds.append((least, most))
        return bounds

    def _fits(self, scatter_s: float, gather_s: float, chunk_count: int) -> bool:
        bounds = self._bounds(scatter_s, gather_s, chunk_count)
        if bounds is None:
            return False
        return sum(least for least, _ in bounds) <= chunk_count <= sum(most for _, most in bounds)

    def _fill(self, scatter_s: float, gather_s: float, chunk_count: int) -> list[int]:
        """Whole chunks within the bounds, as near as they allow to what each line carries; largest remainder."""
        bounds = self._bounds(scatter_s, gather_s, chunk_count)
        assert bounds is not None
        pulls = [load.pull for load in self.loads]

        def wanted(level: float) -> list[float]:
            """Chunks per member when everybody is filled up to the same time of owning."""
            return [
                min(max(level * pull, least), most) for pull, (least, most) in zip(pulls, bounds, strict=True)
            ]

        # At the lowest level nobody is lifted by a whole chunk, at the highest everybody is at the upper bound.
        lowest, highest = 0.01 / len(pulls) / max(pulls), (chunk_count + 1) / min(pulls)
        level = _least(lambda level: sum(wanted(level)) > chunk_count, lowest, highest)
        shares = wanted(level * (1 - SLACK))
        counts = [math.floor(share) for share in shares]
        order = sorted(range(len(counts)), key=lambda index: (counts[index] - shares[index], index))
        while sum(counts) < chunk_count:
            for index in order:
                if sum(counts) < chunk_count and counts[index] < bounds[index][1]:
                    counts[index] += 1
        return counts


def _least(enough: Callable[[float], bool], low: float, high: float) -> float:
    """The least number from `low` to `high` that is enough, to a hair above; `high` itself is taken for enough.

    Halved on a logarithmic scale, because rates and so times differ by factors of thousands.
    """
    low, high = math.log(low), math.log(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if enough(math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(high)


# ---- codec = "auto" -----------------------------------------------------------------------------------
#
# A member's contribution leaves through its own uplink, so only that decides: it gets the finest codec that
# is sent in time. Near the border a noisy rate would change the codec each round, and error feedback
# settles better when it stays: a member moves to a finer codec only if that one leaves room to spare, and
# to a coarser one only when its own no longer fits.


ROOM = 1.2  # a finer codec must fit even if sending took so many times as long


def codecs_by_member(
    bytes_by_codec: Mapping[str, int],
    up_bytes_per_s: Mapping[str, float | None],
    target_s: float,
    last: Mapping[str, str],
) -> dict[str, str]:
    """member -> codec, for every member in `up_bytes_per_s`.

    bytes_by_codec  size of a whole contribution; codecs of the ladder that are missing here are not used
    up_bytes_per_s  None or 0: not known
    target_s        how long sending a contribution may take
    last            member -> what it was given for the round before
    """
    steps = [name for name in LADDER if name in bytes_by_codec]
    assert steps and target_s > 0
    sent_bytes = {name: bytes_by_codec[name] for name in steps}
    return {
        member: _codec(sent_bytes, rate, target_s, last.get(member))
        for member, rate in up_bytes_per_s.items()
    }


def _codec(sent_bytes: Mapping[str, int], rate: float | None, target_s: float, last: str | None) -> str:
    """`sent_bytes` runs from fine to coarse."""
    steps = list(sent_bytes)
    at = steps.index(last) if last in steps else 0
    if not rate:
        return steps[at]  # a rate that got lost says nothing new
    seconds = {name: size / rate for name, size in sent_bytes.items()}
    for name in steps[:at]:
        if seconds[name] * ROOM <= target_s:
            return name
    for name in steps[at:]:
        if seconds[name] <= target_s:
            return name
    return steps[-1]
