"""How a round begins: by which rules, with whom, who owns which chunk, and in which codec contributions travel.  Pure.

Called by the driver, which knows who is ready.  Must not know members, sessions or what was said of a round in
flight: it is given the peers, their last beats, and what the books know of the fragment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from farflung.coordinator.rounds import shares
from farflung.coordinator.rounds.shares import codecs_by_member
from farflung.coordinator.rounds.weights import NORMS_LEAST, MergeRules
from farflung.protocol.digests import full_mask
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Beat
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import AUTO, LADDER, Commit, Plan, bits_per_value

OWNERS_LEAST = 8  # of a round that not all fit into, where there are so many
# Of the robust policy: no contribution is longer than so many times the median; an update over so many times the usual
# size is not taken.
CLIP, GUARD = 2.0, 10.0
RAMP_ROUNDS = 3  # in which newcomers, and peers that were suspect, count for less
NEW_ROUNDS = 3  # that a member may have trained before its work goes in for the first time

Beats = Mapping[str, Beat | None]  # of each peer that takes part, in order


@dataclass(frozen=True)
class RoundRules:
    min_peers: int
    scatter_grace_s: float
    round_timeout_s: float
    gather_codec: str
    merge: MergeRules = field(default_factory=MergeRules)
    # Of a synchronous batch: those who must all be in the commit, by their tokens exactly; each has counted a share.
    whole: frozenset[str] = frozenset()
    # Holders of a result that are enough when others have been waited for; None: as many as the round needs.
    most_of_run: int | None = None
    # Their lines are slow, and their work was sent ahead: nobody waits for what is still missing of it.
    unawaited: frozenset[str] = frozenset()
    helpers: frozenset[str] = frozenset()  # they own chunks, and have no part in the sum or in any quorum
    measures: bool = False  # how long the results are decides by what they are multiplied
    # Of the plan's members: who inherits carries what its line can carry.
    lines: tuple[shares.MemberRates, ...] = ()

    @property
    def chunk_patience_s(self) -> float:
        """So long nobody is blamed, or left behind, for a result that does not come: a chunk may take its time."""
        return max(self.scatter_grace_s, self.round_timeout_s / 4)


class PastFigures(Protocol):
    """By version, of the last commits."""

    @property
    def norms(self) -> Mapping[int, tuple[float, float]]: ...
    @property
    def work(self) -> Mapping[int, tuple[float, Mapping[str, int]]]: ...
    @property
    def rates(self) -> Mapping[int, float]: ...


class Book(Protocol):
    """What is known of the fragment from the rounds before."""

    @property
    def version(self) -> int: ...
    @property
    def trust(self) -> Mapping[str, int]: ...
    @property
    def figures(self) -> PastFigures: ...
    @property
    def last_in(self) -> Mapping[str, int]: ...
    @property
    def dropped_at(self) -> int: ...


def rules_for(
    manifest: Manifest, book: Book, peers: Sequence[str], books: Iterable[Book] = (), clock_s: float = 0.0
) -> RoundRules:
    """`books`: of all fragments.  `clock_s`: the run's, now."""
    spans = {peer: _span(book, peer, clock_s) for peer in peers}
    merge = MergeRules(
        robust=manifest.merge.policy == "robust",
        clip=CLIP,
        guard=GUARD,
        trust={peer: _trust(book.trust.get(peer, 0)) for peer in peers},
        norms=tuple(norm for norm, _ in book.figures.norms.values()),
        trusted=frozenset(manifest.admission.trusted),
        usual_rate=_usual_rate(book, books),
        rounds={
            peer: max(span, 1.0 + NEW_ROUNDS if peer not in book.last_in else 1.0)
            for peer, span in spans.items()
        },
        spans=spans,
        usual_of={peer: median(own) for peer in peers if (own := _tokens_of(book, peer))},
        usual_tokens=median([tokens for _, tokens in book.figures.norms.values()] or [0.0]),
        refused=book.dropped_at == book.version,
    )
    return RoundRules(
        manifest.run.min_peers,
        manifest.round.scatter_grace_s,
        manifest.round.round_timeout_s,
        manifest.round.gather_codec,
        merge,
        measures=manifest.batch_clip < math.inf,
    )


def _span(book: Book, peer: str, clock_s: float) -> float:
    """Since its work went in last, in usual rounds: those that were made without it, or the time, where none were made.

    Of somebody whose work never did, since the newest commit: what it did before that began from another version.
    """
    since = book.last_in.get(peer, book.version)
    times = [at_s for _, (at_s, _) in sorted(book.figures.work.items())]
    apart = [after - before for before, after in pairwise(times)]
    usual_s = median(apart) if len(apart) + 1 >= NORMS_LEAST else 0.0
    at_s, _ = book.figures.work.get(since, (times[0] if times else 0.0, {}))
    return max(1.0, book.version + 1 - since, (clock_s - at_s) / usual_s if usual_s > 0.0 else 0.0)


def _tokens_of(book: Book, peer: str) -> list[int]:
    return [tokens[peer] for _, tokens in book.figures.work.values() if tokens.get(peer)]


def _usual_rate(book: Book, books: Iterable[Book]) -> float:
    """Tokens for each leased sample, as this fragment's rounds had them; those of all fragments while it has had few:
    they are of the same data, and most of its members may lie before it has a past of its own.  0.0: not known."""
    own = [*book.figures.rates.values()]
    rates = (
        own if len(own) >= NORMS_LEAST else [rate for each in books for rate in each.figures.rates.values()]
    )
    return median(rates) if len(rates) >= NORMS_LEAST else 0.0


def _trust(commits: int) -> float:
    """The share of its full weight, after so many commits since it came or was suspect last."""
    return min(1.0, (commits + 1) / (RAMP_ROUNDS + 1))


def chosen(ready: Sequence[str], can_own: Set[str], most: int) -> list[str]:
    """Who takes part where not all fit into one round: the first ones, and at least a few that can own chunks."""
    taken, rest = list(ready[:most]), list(ready[most:])
    owners = sum(peer in can_own for peer in taken)
    for peer in [peer for peer in rest if peer in can_own][: max(0, OWNERS_LEAST - owners)]:
        last = next((at for at in reversed(range(len(taken))) if taken[at] not in can_own), None)
        if last is not None:
            taken[last] = peer
    return taken


def codecs_for(
    beats: Beats,
    fragment: int,
    manifest: Manifest,
    model: ModelSchema,
    given_last: Mapping[str, str],
    time_s: float | None = None,
) -> dict[str, str]:
    """The codec of each one's contribution: the run's, or what its line can carry in time (`time_s`, if others have not
    to wait for it)."""
    rules = manifest.round
    if rules.codec != AUTO:
        return dict.fromkeys(beats, rules.codec)
    # All fragments of a peer may be on their way at once: what counts is all that it holds.
    chunks = model.stages[fragment].chunk_count if model.stages else model.chunk_count
    values = chunks * model.chunk_elements
    sizes = {name: int(values * bits_per_value(name) / 8) for name in LADDER}
    up = {peer: line.up_bytes_per_s for peer, line in zip(beats, lines_of(beats), strict=True)}
    return codecs_by_member(sizes, up, rules.scatter_grace_s if time_s is None else time_s, given_last)


def within(beats: Beats, most_bytes_per_s: float | None) -> Beats:
    """The same, as of members that carry no more than that: all their lines lead over one relay."""
    if most_bytes_per_s is None:
        return beats
    most = round(most_bytes_per_s)
    return {peer: beat and _slowed(beat, most) for peer, beat in beats.items()}


def _slowed(beat: Beat, most: int) -> Beat:
    up, down = beat.up_bytes_per_s or most, beat.down_bytes_per_s or most
    return replace(beat, up_bytes_per_s=min(up, most), down_bytes_per_s=min(down, most))


def owners_for(
    beats: Beats,
    codecs: Mapping[str, str],
    can_own: Set[str],
    fragment: int,
    manifest: Manifest,
    model: ModelSchema,
    wider: Sequence[Mapping[str, float]] = (),
) -> tuple[int, ...]:
    """Each fragment begins with another peer: small fragments must not all end up with the first one.

    `wider`: who could own, too, if bytes of the round passed relays (shares.py)."""
    peers, turn = list(beats), fragment % len(beats)
    rates = shares.smoothed([_rates(beat, codecs[peer]) for peer, beat in beats.items()])
    owners = shares.best_assigned(
        model.fragments(manifest.fragments)[fragment].count,
        peers[turn:] + peers[:turn],
        set(can_own),
        rates[turn:] + rates[:turn],
        bits_per_value(manifest.round.gather_codec),
        wider,
    )
    return tuple((owner + turn) % len(peers) for owner in owners)


def up_rates(beats: Beats) -> dict[str, float]:
    """Bytes per second that each one's line carries up, those that may be alike taken for alike; 0: nobody knows."""
    known = {peer: (beat.up_bytes_per_s, beat.rough) for peer, beat in beats.items() if beat is not None}
    usual = median([up for up, _ in known.values() if up] or [0])
    alike = {peer: shares.near(up, usual, rough) for peer, (up, rough) in known.items() if up}
    return {peer: alike.get(peer) or 0.0 for peer in beats}


def lines_of(beats: Beats) -> tuple[shares.MemberRates, ...]:
    """As if all sent in one codec."""
    return tuple(shares.smoothed([_rates(beat, LADDER[0]) for beat in beats.values()]))


def _rates(beat: Beat | None, codec: str) -> shares.MemberRates:
    if beat is None:
        return shares.MemberRates(None, None, bits_per_value(codec), True)
    up, down = beat.up_bytes_per_s or None, beat.down_bytes_per_s or None
    return shares.MemberRates(up, down, bits_per_value(codec), beat.rough)


# ---- groups ------------------------------------------------------------------------------------------------
# A round as groups: who is in which, and who owns what there. Pure.
#
# A flat round has one group. Of several, each chunk has an owner in every one, who adds up what the group
# contributes; one of these owners, the root, adds up the sums of all groups and encodes the result. So a
# member talks with its group, and an owner besides with the owners of its chunks in the other groups. How
# groups come to be, and what becomes of their sums, is the mesh's (coordinator/mesh).
#
# Called by the driver and by the round in flight. Must not know what anybody reports: that is the round's.


def planned(
    numbers: tuple[int, int, int],
    peers: Sequence[str],
    groups: tuple[int, ...],
    owners: tuple[int, ...],
    codecs: tuple[str, ...],
) -> Plan:
    """The first epoch of a round.  `numbers`: of the round, of the version that it starts from, of the fragment."""
    round_no, version, fragment = numbers
    roots = roots_of(groups, owners)
    return Plan(
        round_no,
        1,
        version,
        tuple(peers),
        owners,
        codecs,
        fragment,
        groups=groups or UNSET,
        roots=roots or UNSET,
    )


def roots_of(groups: Sequence[int], owners: Sequence[int]) -> tuple[int, ...]:
    """For each chunk the group of its root, in turn; () where all are one group."""
    count = max(groups, default=0) + 1
    return tuple(chunk % count for chunk in range(len(owners) // count)) if groups else ()


@dataclass(frozen=True)
class Groups:
    """The same plan, asked about its groups."""

    plan: Plan

    @cached_property
    def of(self) -> Mapping[str, int]:
        """Member -> its group."""
        return dict(zip(self.plan.members, self.plan.groups or [0] * len(self.plan.members), strict=True))

    def group_of(self, peer: str) -> set[str]:
        """Its members; nobody, if it is not in the plan."""
        return set(self.members[self.of[peer]]) if peer in self.of else set()

    @cached_property
    def every_chunk(self) -> int:
        """Mask."""
        return full_mask(self.plan.count)

    @cached_property
    def members(self) -> tuple[tuple[str, ...], ...]:
        """Of each group, in the order of its sum."""
        found: list[list[str]] = [[] for _ in range(len(self.plan.owners) // max(1, self.plan.count))]
        for member in self.plan.members:
            found[self.of[member]].append(member)
        return tuple(map(tuple, found))

    @cached_property
    def shares(self) -> Mapping[str, int]:
        """Owner -> mask of its chunks."""
        masks: dict[str, int] = {}
        for place, owner in enumerate(self.plan.owners):
            peer = self.plan.members[owner]
            masks[peer] = masks.get(peer, 0) | 1 << place % self.plan.count
        return masks

    @cached_property
    def shares_in(self) -> tuple[Mapping[str, int], ...]:
        """The same, group by group."""
        found: list[dict[str, int]] = [{} for _ in self.members]
        for owner, share in self.shares.items():
            found[self.of[owner]][owner] = share
        return tuple(found)

    @cached_property
    def roots(self) -> Mapping[str, int]:
        """Who encodes results -> mask of the chunks."""
        masks: dict[str, int] = {}
        for chunk in range(self.plan.count):
            root = self.plan.root_of(chunk)
            masks[root] = masks.get(root, 0) | 1 << chunk
        return masks

    def shares_around(self, member: str) -> Mapping[str, int]:
        """Owners of the member's group: those that have to get its contribution."""
        return self.shares_in[self.of[member]]

    def owner(self, group: int, chunk: int) -> str:
        return self.plan.members[self.plan.owners[group * self.plan.count + chunk]]

    def column(self, chunk: int) -> tuple[str, ...]:
        """Its owners in all groups."""
        return self._columns[chunk]

    @cached_property
    def _columns(self) -> tuple[tuple[str, ...], ...]:
        plan, groups = self.plan, range(len(self.members))
        return tuple(tuple(self.owner(group, chunk) for group in groups) for chunk in range(plan.count))

    @cached_property
    def circles(self) -> tuple[frozenset[str], ...]:
        """Each of one exchanges frames with all others there: a group, or the owners of one chunk in all groups."""
        columns = {
            frozenset(self.column(chunk)) for chunk in range(self.plan.count if self.plan.roots else 0)
        }
        return (*map(frozenset, self.members), *columns)

    def near(self, member: str) -> set[str]:
        return {peer for circle in self.circles if member in circle for peer in circle}


def own_part(commit: Commit, member: str) -> Commit:
    """What it needs to know of it: whether its work is in, and what the results are."""
    own = [
        (peer, weight) for peer, weight in zip(commit.members, commit.weights, strict=True) if peer == member
    ]
    return replace(commit, members=tuple(p for p, _ in own), weights=tuple(w for _, w in own))
