"""What members have reported of one round, as far as it is proven.  Pure.

The lower half of the round in flight (round.py), which decides on it.  `Scatter` has the signed lists of what was
sent, and which owner holds which of it; `Gather` has what was merged, and who proves to hold that.  Nothing here
makes a step; who is alive, and the time, are passed in.  Chunks are counted within the round's fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from msgspec.structs import replace

from farflung.coordinator.rounds.owners import are_most, deaf, lacking_alone
from farflung.coordinator.rounds.round_policy import FlatSums, MadeSum, Place
from farflung.coordinator.rounds.round_rules import Groups, RoundRules
from farflung.coordinator.rounds.weights import Compared, Matrix, OwnerShare
from farflung.protocol.digests import (
    bits,
    combined,
    hash_at,
    length_to_bytes,
    mask_from_bytes,
    mask_of,
    mask_to_bytes,
    split_hashes,
    split_lengths,
)
from farflung.protocol.errors import Excluded, ExclusionCause, Verdict
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.round_words import Commit, Decision, DotProducts, Plan
from farflung.protocol.signed_words import SignedList

# ---- gram collection ---------------------------------------------------------------------------------------
# What owners say of the contributions' dot products in one round: collected, checked, asked for. Pure.
#
# Part of the round at the coordinator. A share's matrix counts when it covers exactly the chunks that its
# owner owns now, and all members that are to be compared. Numbers that no vectors can have are a lie or a
# fault of the owner. In a round of groups an owner compares the members of its group.

ROUNDING = 1e-3  # products are summed in fp32 by tiles: so much over what vectors can have is forgiven
PRODUCT_MOST = 1e100  # more than any model's values of fp32 have; sums of them are finite


class Comparing:
    def __init__(self, members: Sequence[str]) -> None:
        self._members = list(members)
        self._said: dict[str, DotProducts] = {}  # by owner
        # The same as a matrix, with a row for each of the run's members.
        self._products: dict[str, Matrix] = {}
        self._asked: tuple[str, ...] = ()
        self.impossible: dict[str, str] = {}  # owner -> what is wrong with its numbers
        self.asks_anew = False  # somebody has to be told whom to compare

    def on_report(self, owner: str, said: DotProducts | None) -> None:
        if said is None or said == self._said.get(owner):
            return
        products = _matrix(said, len(self._members))
        problem = products if isinstance(products, str) else _problem(products)
        if problem:
            self.impossible[owner] = problem
        elif not isinstance(products, str):
            self._said[owner], self._products[owner] = said, products

    def lacking(self, ready: Sequence[str], shares: Mapping[str, int]) -> list[str]:
        """Owners whose word is missing before these members can be compared.  `shares`: owner -> mask of its chunks."""
        wanted = self._mask(ready)
        lacking = [owner for owner, share in shares.items() if not self._covers(owner, share, wanted)]
        if lacking and tuple(ready) != self._asked:
            self._asked, self.asks_anew = tuple(ready), True
        return lacking

    @property
    def asked(self) -> bytes:
        """The mask of members that owners are to compare; empty: not asked for, they compare whom they have."""
        return mask_to_bytes(self._mask(self._asked))

    def shares_of(self, ready: Sequence[str], shares: Mapping[str, int]) -> list[OwnerShare]:
        """By owner; call it when nothing is lacking."""
        rows = [self._members.index(member) for member in ready]
        return [
            OwnerShare(share.bit_count(), self._products[owner][np.ix_(rows, rows)])
            for owner, share in sorted(shares.items())
        ]

    def _covers(self, owner: str, share: int, wanted: int) -> bool:
        said = self._said.get(owner)
        return (
            said is not None
            and mask_from_bytes(said.chunks) == share
            and not wanted & ~mask_from_bytes(said.members)
        )

    def _mask(self, members: Sequence[str]) -> int:
        return mask_of(self._members.index(member) for member in members)


class ComparingMembers:
    """Those of each group among themselves; a flat round is one group."""

    def __init__(self, groups: Groups) -> None:
        self._by_group = tuple(map(Comparing, groups.members))
        self._of = groups.of

    def on_report(self, owner: str, said: DotProducts | None) -> None:
        self._by_group[self._of[owner]].on_report(owner, said)

    def lacking(self, ready: Sequence[str], groups: Groups) -> list[str]:
        """Owners whose word is missing before these members can be compared."""
        found: list[str] = []
        for group, among in self._ready_in(ready):
            found += self._by_group[group].lacking(among, groups.shares_in[group])
        return found

    def compared(self, ready: Sequence[str], groups: Groups) -> list[Compared]:
        """Group by group; call it when nothing is lacking."""
        return [
            Compared(among, self._by_group[group].shares_of(among, groups.shares_in[group]))
            for group, among in self._ready_in(ready)
        ]

    def asked_of(self, member: str) -> bytes:
        """The mask of those of its group that owners there are to compare."""
        return self._by_group[self._of[member]].asked if member in self._of else b""

    def asks_anew(self) -> bool:
        """True once after each change of whom somebody is to compare."""
        asks = any(each.asks_anew for each in self._by_group)
        for each in self._by_group:
            each.asks_anew = False
        return asks

    @property
    def impossible(self) -> dict[str, str]:
        return {owner: why for each in self._by_group for owner, why in each.impossible.items()}

    def _ready_in(self, ready: Sequence[str]) -> list[tuple[int, list[str]]]:
        among: dict[int, list[str]] = {}
        for member in ready:
            among.setdefault(self._of[member], []).append(member)
        return sorted(among.items())


def _matrix(said: DotProducts, members: int) -> Matrix | str:
    """With zeros for whom it says nothing about; words if it is none."""
    mask = mask_from_bytes(said.members)
    count = mask.bit_count()
    if mask >> members or len(said.products) != count * (count + 1) // 2:
        return f"{len(said.products)} dot products of {count} members"
    above, found = np.triu_indices(count), np.zeros((count, count))
    found[above] = found.T[above] = said.products
    rows = list(bits(mask))
    whole: Matrix = np.zeros((members, members))
    whole[np.ix_(rows, rows)] = found
    return whole


def _problem(products: Matrix) -> str:
    """Why no vectors have these dot products, or empty."""
    if not np.isfinite(products).all():
        return "dot products that are not finite"
    if (np.abs(products) > PRODUCT_MOST).any():
        return "dot products beyond what values of fp32 have"
    squares = products.diagonal()
    if (squares < 0.0).any():
        return "a negative square"
    norms = np.sqrt(squares)
    if (np.abs(products) > (1.0 + ROUNDING) * np.outer(norms, norms)).any():
        return "a dot product above the product of the norms"
    return ""


# ---- scatter -----------------------------------------------------------------------------------------------

NOTHING = "it has nothing to contribute: its work was not finite, or is lost"
HELPS = Excluded(ExclusionCause.EMPTY, "it helps, and contributes nothing")
# How long it is waited for who sent its work ahead, when all others' is here; a share of the scatter so far: for words
# that pass no slow line but their own.
NAMED_IN_S, NAMED_SHARE = 0.5, 0.2


@dataclass
class Scatter:
    """The contributions of a round: what members say they sent, and which owner shows that it holds which of it."""

    groups: Groups
    rules: RoundRules
    opened_at: float
    since: float = field(init=False)  # when owners changed last: who sends has as long again
    name: Callable[[str], str] = str  # of a peer: what is told of it is for people
    sent: dict[str, Sent] = field(default_factory=dict)
    # Member -> leased samples that its work has learned from.
    samples: dict[str, int] = field(default_factory=dict)
    barred: dict[str, Excluded] = field(default_factory=dict)  # member -> why its contribution can't count
    accused: dict[str, str] = field(default_factory=dict)  # member -> what somebody says is of no use
    held: dict[str, dict[str, int]] = field(default_factory=dict)  # owner -> member -> proven mask
    # Member -> owners that hold other bytes of it than it says it sent.
    _contradicted: dict[str, set[str]] = field(default_factory=dict)
    _whole: set[str] = field(default_factory=set)  # members of whom every owner has shown its share
    _named_by: float | None = None  # until then whoever sent its work ahead may say so

    def __post_init__(self) -> None:
        self.since = self.opened_at
        self.barred |= dict.fromkeys(self.rules.helpers, HELPS)

    def slept(self, seconds: float) -> None:
        self.since += seconds
        self._named_by = None if self._named_by is None else self._named_by + seconds

    def go_by(self, groups: Groups) -> None:
        self.groups = groups
        self._whole.clear()  # of other owners they may be not

    # ---- what is said of it --------------------------------------------------------------------------

    def take(self, peer: str, sent: Sent, samples: int) -> None:
        """The first list of somebody who is to contribute.  It says itself whether it counts at all."""
        if not sent.hashes:
            self.barred[peer] = Excluded(ExclusionCause.EMPTY, NOTHING)
        elif len(sent.hashes) != 32 * self.groups.plan.count:
            told = f"its hash list names {len(sent.hashes) // 32} of {self.groups.plan.count} chunks"
            self.barred[peer] = Excluded(ExclusionCause.SHORT_LIST, told)
        elif sent.tokens == 0 and sent.steps == 0:
            self.barred[peer] = Excluded(ExclusionCause.EMPTY, "it has nothing to contribute")
        self.sent[peer], self.samples[peer] = sent, samples

    def accuse(self, member: str, told: str, accusers: set[str]) -> None:
        """Of bytes that are of no use.  What most of its owners say keeps it out."""
        self.accused.setdefault(member, told)
        if self._are_most_owners(accusers, member):
            self.barred.setdefault(member, Excluded(ExclusionCause.UNUSABLE, self.accused[member]))

    def prove_held(self, owner: str, report: ProgressReport, only: str = "") -> None:
        """Count only chunks that hash to what their sender says it sent."""
        proven = self.held.setdefault(owner, {})
        near = report.held.keys() & self.groups.group_of(owner)
        for member in near if not only else near & {only}:
            raw, digest = report.held[member]
            mask = mask_from_bytes(raw) & self.groups.every_chunk
            sent = self.sent.get(member)
            if sent is None or member in self.barred:
                continue
            if combined((chunk, hash_at(sent.hashes, chunk)) for chunk in bits(mask)) == digest:
                if proven.get(member, 0) & ~mask:
                    self._whole.discard(member)
                proven[member] = mask
                continue
            proven.pop(member, None)
            self._whole.discard(member)
            contradicting = self._contradicted.setdefault(member, set())
            contradicting.add(owner)
            if self._are_most_owners(contradicting, member):
                told = f"the bytes that {self.name(owner)} holds are not the bytes it says it sent"
                self.barred[member] = Excluded(ExclusionCause.OTHER_BYTES, told)

    def _are_most_owners(self, accusers: set[str], member: str) -> bool:
        owners = self.groups.shares_around(member).keys() - {member}
        return are_most(accusers, owners, len(self.groups.group_of(member)))

    # ---- questions -----------------------------------------------------------------------------------

    def held_by(self, owner: str, member: str) -> int:
        """Mask of the chunks of a member's contribution that the owner has shown."""
        return self.held.get(owner, {}).get(member, 0)

    def is_whole(self, member: str) -> bool:
        """Every owner holds its share of the member's contribution."""
        if member not in self.sent or member in self.barred:
            return False
        around = self.groups.shares_around(member).items()
        if member not in self._whole and not any(share & ~self.held_by(o, member) for o, share in around):
            self._whole.add(member)
        return member in self._whole

    @property
    def least(self) -> int:
        """Contributions that it takes.  Members that took part and say that they have nothing are here, as the run's
        host wants it: others must not wait until they have.  Saying so gains nobody anything: it weighs nothing."""
        without = sum(not said.hashes and peer not in self.rules.helpers for peer, said in self.sent.items())
        return max(1, self.rules.min_peers - without)

    @property
    def grace_ends_at(self) -> float:
        return self.since + self.rules.scatter_grace_s

    def grace_is_over(self, now: float) -> bool:
        return now >= self.grace_ends_at

    def late(self, ready: Sequence[str], alive: set[str], now: float) -> list[str]:
        """The living whose contributions are not whole and waited for.  `ready`: whose are whole."""
        members = self.groups.plan.members
        late = [m for m in members if m in alive and m not in ready and m not in self.barred]
        if late and self.rules.unawaited.issuperset(late) and len(ready) >= self.least:
            # What they sent ahead is only to be named: nobody waits for more than that.
            if self._named_by is None:
                self._named_by = now + max(NAMED_IN_S, NAMED_SHARE * (now - self.opened_at))
            late = late if now < self._named_by else []
        return late

    def senders(self, alive: set[str], awaited: bool = True) -> set[str]:
        """Of those that nobody waits for something may be missing everywhere."""
        found = {m for m in self.sent.keys() & alive if m not in self.barred}
        return found - self.rules.unawaited if awaited else found

    def lacking_alone(self, alive: set[str], senders: set[str]) -> dict[str, set[str]]:
        """Owner -> those of the senders whose contribution it alone says it lacks."""
        return {o: its for each in self._lacks(alive, senders) for o, its in lacking_alone(*each).items()}

    def deaf(self, alive: set[str]) -> set[str]:
        """Living owners that say they lack what most others sent."""
        return {owner for each in self._lacks(alive, self.senders(alive)) for owner in deaf(*each)}

    def _lacks(
        self, alive: set[str], all_senders: set[str]
    ) -> Iterator[tuple[dict[str, set[str]], set[str]]]:
        """Of each group: living owner -> senders whose contribution it says it does not have whole; and all senders."""
        for owners, group in zip(self.groups.shares_in, self.groups.members, strict=True):
            senders = all_senders & set(group)
            lacks = {
                owner: {m for m in senders - {owner} if share & ~self.held_by(owner, m)}
                for owner, share in owners.items()
                if owner in alive
            }
            yield lacks, senders

    def unobtainable(self, included: Iterable[str], alive: set[str], unmerged: int) -> set[str]:
        """Of these, whoever can't send any more and whose bytes for a chunk still to be merged nobody holds."""
        return {
            member
            for member in included
            if (member not in alive or member in self.barred)
            and any(
                share & unmerged & ~self.held_by(owner, member)
                for owner, share in self.groups.shares_around(member).items()
            )
        }


# ---- gather ------------------------------------------------------------------------------------------------


# Of a mesh: of each chunk in a report the sums that its result is made of, by their hashes in order.
Named = Mapping[int, tuple[bytes, ...]]


@dataclass(frozen=True)
class MadeResult:
    """The first word for a chunk's result.  An heir that holds the bytes passes them on, and this stays."""

    peer: str
    report: ProgressReport
    named: Named = field(default_factory=dict)


@dataclass(frozen=True)
class _Proven:
    """By one report, under the results that were answered for then."""

    report: ProgressReport
    mask: int
    # More results can prove more, unless all of it is proven; one that was taken back can prove less.
    of: tuple[int, int, int]

    def stands(self, report: ProgressReport, of: tuple[int, int, int]) -> bool:
        return self.report is report and self.of[0] == of[0] and (self.of[1:] == of[1:] or self.whole)

    @property
    def whole(self) -> bool:
        return self.mask == mask_from_bytes(self.report.got)


@dataclass
class Gather:
    """The results of a round: which chunk is merged, by whom, and who proves to hold which result."""

    measures: bool  # how long the results are, too
    merged: dict[int, bytes] = field(default_factory=dict)  # chunk -> result hash
    # Chunk -> how long its result is, where the gradient of a batch is clipped: as its maker says, and as all prove it.
    lengths: dict[int, float] = field(default_factory=dict)
    makers: dict[int, MadeResult] = field(default_factory=dict)  # chunk -> who merged it, and its signed word
    # Member -> what its last report proves: asked for after each report of each of a thousand others.
    _proven: dict[str, _Proven] = field(default_factory=dict)
    _taken_back: int = 0  # how often results were

    def take(
        self, peer: str, report: ProgressReport, plan: Plan, named_by: Callable[[], Named | None]
    ) -> None:
        """What a root says it merged.  `named_by`: asked where that is new, as `FlatSums.named`."""
        mask, hashes = mask_from_bytes(report.merged), split_hashes(report.merged_hashes)
        squares = split_lengths(report.lengths) if self.measures else [0.0] * len(hashes)
        if len(report.merged_hashes) != 32 * mask.bit_count() or len(squares) != len(hashes):
            return  # a report that contradicts itself says nothing
        if all(chunk in self.merged for chunk in bits(mask)):
            return  # as of nearly all that are told
        named = named_by()
        made = MadeResult(peer, report, named or {})
        for chunk, digest, square in zip(bits(mask), hashes, squares, strict=True):
            if named is not None and chunk not in named:
                continue  # nobody signed for what it is made of, or not yet
            if chunk < plan.count and plan.root_of(chunk) == peer and chunk not in self.merged:
                self.merged[chunk], self.makers[chunk] = digest, made
                self.lengths[chunk] = square

    def take_back(self, chunks: Iterable[int]) -> None:
        """Results that are made again."""
        self._taken_back += 1
        for chunk in chunks:
            self.makers.pop(chunk, None)
            self.merged.pop(chunk, None)

    def shown_by(self, member: str, report: ProgressReport, groups: Groups) -> int:
        """Mask of the results that the report proves, under the hashes that owners answer for."""
        of = self._taken_back, len(self.merged), groups.plan.epoch
        known = self._proven.get(member)
        if known is None or not known.stands(report, of):
            mask = self._proven_part(mask_from_bytes(report.got) & groups.every_chunk, member, report, groups)
            known = self._proven[member] = _Proven(report, mask, of)
        return known.mask

    def _proven_part(self, mask: int, member: str, report: ProgressReport, groups: Groups) -> int:
        if self._is_proven(mask, report.got_hash):
            return mask
        if not report.got_by:
            return 0
        # Of some owner it has other bytes than that one answers for: the others' results are here all the same.
        around = groups.shares_around(member).items()
        parts = {owner: mask & share for owner, share in around if owner in report.got_by}
        proven = [part for owner, part in parts.items() if self._is_proven(part, report.got_by[owner])]
        return sum(proven)  # no two owners have a chunk

    def _is_proven(self, mask: int, digest: bytes) -> bool:
        if mask & ~mask_of(self.merged):
            return False  # the proof speaks of chunks that nobody answers for yet
        return combined((c, self.merged[c] + self._length_of(c)) for c in bits(mask)) == digest

    def _length_of(self, chunk: int) -> bytes:
        return length_to_bytes(self.lengths[chunk]) if self.measures else b""


# ---- reported ----------------------------------------------------------------------------------------------

UNUSABLE = {
    Verdict.BAD_HASH: "frames whose bytes do not match their hash",
    Verdict.OVERSIZE: "frames that are longer than any of this run",
    Verdict.UNAUTHORISED: "frames of another run",
    Verdict.MALFORMED: "frames that are cut short or no frames at all, bytes in another codec, or values not finite",
}


@dataclass
class Reported:
    """Volatile, as the round is."""

    plan: Plan
    rules: RoundRules
    opened_at: float
    name: Callable[[str], str] = str  # of a peer: what is told of it is for people
    decision: Decision | None = None
    foresees: bool = False  # it tells what it will most likely come to, as soon as that can be known
    foreseen: Decision | None = None  # until there is a decision: what members merge by meanwhile
    sums: FlatSums = field(default_factory=FlatSums)
    reports: dict[str, ProgressReport] = field(default_factory=dict)
    void: bool = False  # who is out has a part in what is decided: it is decided anew
    groups: Groups = field(init=False)
    comparing: ComparingMembers = field(init=False)
    scatter: Scatter = field(init=False)
    gather: Gather = field(init=False)
    timed_from: float = field(init=False)  # later than it opened, where it has its time again

    def __post_init__(self) -> None:
        self.timed_from = self.opened_at
        self.groups = Groups(self.plan)
        self.comparing = ComparingMembers(self.groups)
        self.scatter = Scatter(self.groups, self.rules, self.opened_at, self.name)
        self.gather = Gather(self.rules.measures)

    @property
    def ends_at(self) -> float:
        """By then it is committed or aborted."""
        return self.timed_from + self.rules.round_timeout_s

    def go_by(self, plan: Plan) -> None:
        """Owners are others."""
        self.plan, self.groups = plan, Groups(plan)
        self.scatter.go_by(self.groups)

    @property
    def merged_by(self) -> Decision | None:
        """By which weights members merge now, whether or not it is decided.  None: they wait."""
        return self.foreseen if self.decision is None else self.decision

    # ---- what members report -------------------------------------------------------------------------

    def on_sent(self, peer: str, sent: Sent, samples: int = 0) -> str | None:
        """Returns why the contribution is barred, if it is.  `samples`: that are leased to it and named in it."""
        if peer in self.scatter.sent:
            return None
        if peer in self.rules.helpers:
            self.scatter.sent[peer] = sent  # seen, so that it is not said again
            return None
        self.scatter.take(peer, sent, samples)
        for owner, report in self.reports.items():
            self.scatter.prove_held(owner, report, peer)  # an owner's report may have overtaken the hash list
        return self.scatter.barred[peer].text if peer in self.scatter.barred else None

    def on_progress(self, peer: str, said: ProgressReport) -> bool:
        """False: it says what is new since a report that never came.  The member says all of it again."""
        report = self._whole_report(peer, said)
        if report is None:
            return False  # nothing of it was seen
        self.reports[peer] = report
        for member, verdict in self._refused_by(peer, report).items():
            what = UNUSABLE.get(verdict, "frames of no use")
            told = f"what {self.name(peer)} got from it was unusable: {what}"
            self.scatter.accuse(member, told, self.accusers_of(member))
        self.scatter.prove_held(peer, said if peer in self.scatter.held else report)
        if self.decision is None and self.rules.merge.robust:
            self.comparing.on_report(peer, report.dots)
        if (by := self.merged_by) is not None and report.decision_no == by.decision_no:
            self._hear_of_results(peer, report, by)
        return True

    def _whole_report(self, peer: str, said: ProgressReport) -> ProgressReport | None:
        """What it holds is all that it said so far."""
        before = self.reports.get(peer)
        if not said.held_since:
            return said
        if before is None or before.session != said.session or before.seq < said.held_since:
            return None
        return replace(said, held=before.held | said.held, held_since=0)

    def _hear_of_results(self, peer: str, report: ProgressReport, decision: Decision) -> None:
        roots = self.sums.hear(peer, report, self.groups)
        if self.sums.held_back:
            return  # of what may not be encoded yet there are no results
        for root in [peer, *sorted(roots - {peer})]:
            said = self.reports[root]
            self.gather.take(root, said, self.plan, partial(self.sums.named, self, root, said, decision))

    def accusers_of(self, peer: str) -> set[str]:
        return {who for who, said in self.reports.items() if peer in self._refused_by(who, said)}

    def _refused_by(self, peer: str, report: ProgressReport) -> dict[str, Verdict]:
        """Members that the report refuses.  A member that refuses most of the others is not believed (P9)."""
        others = self.groups.group_of(peer) - {peer}
        about = {member: why for member, why in report.refused.items() if member in others}
        return about if 2 * len(about) <= len(others) or len(others) < 2 else {}

    @property
    def impossible(self) -> dict[str, str]:
        """Whose dot products no vectors have, and why."""
        return {**self.comparing.impossible, **self.sums.impossible}

    # ---- questions -------------------------------------------------------------------------------------

    @property
    def phase(self) -> tuple[int, int, bool, bool]:
        """As long as this is the same, the round waits for words of the same kind."""
        number = self.decision.decision_no if self.decision is not None else 0
        return self.plan.epoch, number, self._waits_for_lists, self.is_ending

    @property
    def _waits_for_lists(self) -> bool:
        """With all of them it can be foreseen what it comes to."""
        return self.foresees and self.merged_by is None

    @property
    def is_ending(self) -> bool:
        """All is merged, and on its way to those who lack it."""
        return self.decision is not None and len(self.gather.merged) == self.plan.count

    @property
    def is_brief(self) -> bool:
        return self.is_ending or self.sums.held_back

    def awaits(self, member: str) -> bool:
        """In this phase it waits for a word of this member, or about it."""
        if self._waits_for_lists:
            return member not in self.scatter.barred and member not in self.scatter.sent
        if self.decision is None:
            return member not in self.scatter.barred and not self.scatter.is_whole(member)
        return not self.is_ending or bool(self.groups.every_chunk & ~self._got(member))

    def _got(self, member: str) -> int:
        """Mask of the results that a member proved to hold, of those that are merged now."""
        report, by = self.reports.get(member), self.merged_by
        if report is None or by is None or report.decision_no != by.decision_no:
            return 0
        return self.gather.shown_by(member, report, self.groups)

    @property
    def _unmerged(self) -> int:
        """Mask of the chunks that have no result."""
        return self.groups.every_chunk & ~mask_of(self.gather.merged)

    def done_by(self, member: str) -> tuple[float, float]:
        """(how much of its contribution owners hold, how many of the results it holds) for the status."""
        around, chunks = self.groups.shares_around(member).items(), self.plan.count
        kept = sum((share & self.scatter.held_by(owner, member)).bit_count() for owner, share in around)
        return kept / chunks, self._got(member).bit_count() / chunks

    def fractions(self) -> tuple[int, float, float, float]:
        """(members whose contribution is whole, held, merged, got) for the status."""
        chunks, members = self.plan.count, self.plan.members
        held = sum(
            (mask & self.groups.shares.get(owner, 0)).bit_count()
            for owner, by in self.scatter.held.items()
            for mask in by.values()
        )
        got = sum(self._got(m).bit_count() for m in members)
        whole = sum(1 for m in members if self.scatter.is_whole(m))
        merged = len(self.gather.merged)
        return whole, held / (chunks * len(members)), merged / chunks, got / (chunks * len(members))


# ---- committed sums ----------------------------------------------------------------------------------------
# What a commit is made of, and who signed for it. Pure.


@dataclass(frozen=True)
class CommittedSums:
    """A commit, and who signed for what it is made of."""

    plan: Plan
    decision: Decision
    commit: Commit
    said: Mapping[str, SignedList]
    makers: Mapping[int, MadeResult]  # by chunk of the fragment
    identities: Mapping[str, bytes]  # of the makers
    processes: Mapping[str, bytes]  # of all members: another one has not got what it sent any more
    # Of a mesh: by (chunk, group), who made the sums that the results are made of.
    sums: Mapping[Place, MadeSum] = field(default_factory=dict)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.plan)

    @cached_property
    def weights(self) -> Mapping[str, float]:
        return dict(zip(self.commit.members, self.commit.weights, strict=True))
