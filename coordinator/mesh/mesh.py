"""The mesh: rounds of more members than can all talk with each other, in groups.  Where the mode begins.  Pure.

The core knows a round as groups, of which a flat round has one; this says who is in which, what each hears of it, and
what becomes of the groups' sums.  Without this folder a run with `[round] group` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from farflung.coordinator.modes.registry import CoordinatorMode, ModeTools
from farflung.coordinator.rounds.reported import Comparing, MadeResult, Reported
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import (
    Failed,
    FlatSums,
    MadeSum,
    Place,
    RoundPolicy,
    RoundWaits,
    Step,
)
from farflung.coordinator.rounds.round_rules import Groups
from farflung.coordinator.rounds.weights import Compared, captured, guarded
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.digests import bits, hash_bytes, mask_from_bytes, mask_of, mask_to_bytes, split_hashes
from farflung.protocol.errors import AbortCause
from farflung.protocol.limits import GROUPS_MOST, MEMBERS_PER_MESH, MEMBERS_PER_ROUND
from farflung.protocol.messages import ProgressReport
from farflung.protocol.mode_words import EncodeTick, MeshReport
from farflung.protocol.round_words import (
    SUM_TAG_BYTES,
    Decision,
    DotProducts,
    GroupSums,
    MeshColumn,
    Plan,
    section,
)
from farflung.protocol.signed_words import inputs_of

# ---- mesh sums ---------------------------------------------------------------------------------------------
# The sums of groups in one round: signed, named by roots, and compared before anything is encoded. Pure.
#
# Asked by the round in flight (coordinator/rounds/round.py) wherever a round of several groups is another one
# than a flat one. Who of an owner and a root lies that name different sums nobody else can see: they are at
# odds.

# ---- signed sums -------------------------------------------------------------------------------------------
# What owners of a mesh signed to have added up of their groups, and which of it a root says to have used.
# Pure.
#
# Part of the mesh's sums. A root signs for its results by the hashes of the sums that it got,
# and each of these has to be one that an owner of that group signed for this decision: so of whatever is
# committed it is known who made it, out of what. Reports overtake each other: a root's results wait until
# there is a word of each sum.
#
# An owner may send the root another sum than it signed, and a root may say so of an owner that did not: who
# of the two lies, nobody else can see. They are at odds, and what follows is the round's business. Must not
# know signatures: what comes here was checked (coordinator/run/digest_agreement.py).


@dataclass(frozen=True)
class Named:
    """What a root's results are made of."""

    # By chunk, of each group that counts.  Empty: somebody's word of them is missing, or is another one.
    hashes: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    at_odds: frozenset[str] = frozenset()  # owners that signed others


@dataclass
class SignedSums:
    _said: dict[Place, dict[str, bytes]] = field(default_factory=dict)  # by owner, the hash that it named
    _made: dict[tuple[Place, bytes], MadeSum] = field(default_factory=dict)
    _waiting: dict[Place, str] = field(default_factory=dict)  # the root whose results wait for a word of it

    def begin(self) -> None:
        """A new decision makes all sums void."""
        self._said.clear()
        self._made.clear()
        self._waiting.clear()

    def on_word(self, owner: str, group: int, word: GroupSums) -> set[str]:
        """Returns roots whose results waited for it."""
        mask, hashes = mask_from_bytes(word.chunks), split_hashes(word.hashes)
        if len(hashes) != mask.bit_count():
            return set()  # a word that contradicts itself says nothing
        roots: set[str] = set()
        for chunk, digest in zip(bits(mask), hashes, strict=True):
            place = chunk, group
            said = self._said.setdefault(place, {})
            if owner in said:
                continue  # nobody honest says two things of one sum
            said[owner] = digest
            self._made.setdefault((place, digest), MadeSum(owner, word))
            if (root := self._waiting.pop(place, None)) is not None:
                roots.add(root)
        return roots

    def has(self, chunk: int, group: int) -> bool:
        return (chunk, group) in self._said

    def made(self, chunk: int, group: int, digest: bytes) -> MadeSum:
        return self._made[(chunk, group), digest]

    def named_by(
        self, root: str, report: ProgressReport, counted: Sequence[int], owner: Callable[[int, int], str]
    ) -> Named:
        """What its results are made of, by the words that are here.  `owner`: of a group, of a chunk."""
        of_mesh = section(MeshReport, report.sections) or MeshReport()
        chunks, tags = list(bits(mask_from_bytes(report.merged))), of_mesh.tags
        if len(tags) != SUM_TAG_BYTES * len(chunks) * len(counted):
            return Named()
        found: dict[int, tuple[bytes, ...]] = {}
        at_odds: set[str] = set()
        for at, chunk in enumerate(chunks):
            of_chunk: list[bytes] = []
            for turn, group in enumerate(counted, at * len(counted)):
                tag = tags[turn * SUM_TAG_BYTES : (turn + 1) * SUM_TAG_BYTES]
                said, makes = self._said.get((chunk, group), {}), owner(group, chunk)
                digest = next((each for each in said.values() if each.startswith(tag)), b"")
                of_chunk += [digest] if digest else []
                if not digest and makes in said:
                    at_odds.add(makes)
                elif not digest:
                    self._waiting[chunk, group] = root
            found[chunk] = tuple(of_chunk)
        whole = all(len(of_chunk) == len(counted) for of_chunk in found.values())
        if whole and inputs_of(each for of_chunk in found.values() for each in of_chunk) == report.inputs:
            return Named(found)
        return Named(at_odds=frozenset(at_odds))


# ---- group views -------------------------------------------------------------------------------------------
# Which groups a round is drawn into, and what of it a member hears. Pure.
#
# Asked for the driver by the mode, and by the sums for the round in flight. Must not know what anybody
# reports.

OWNERS_LEAST = 2  # of a group: an heir has to be there


def drawn(peers: Sequence[str], able: Set[str], size: int, seed: bytes) -> tuple[int, ...]:
    """The group of each of them, about `size` in each; () if they are one group.

    Nobody chooses its group: the order is by a hash that nobody knew when it came.  Those who can own chunks are dealt
    first, so that every group has some.
    """
    owners = sum(peer in able for peer in peers)
    wanted = -(-len(peers) // size) if size else 1
    count = min(wanted, GROUPS_MOST, owners // OWNERS_LEAST)
    if count < 2:
        return ()
    order = sorted(
        range(len(peers)), key=lambda at: (peers[at] not in able, hash_bytes(seed, peers[at].encode()))
    )
    places = {at: turn % count for turn, at in enumerate(order)}
    return tuple(places[at] for at in range(len(peers)))


def most_of_round(size: int, able: int) -> int:
    """Members of one round, so many of which can own chunks."""
    groups = min(GROUPS_MOST, able // OWNERS_LEAST) if size else 1
    return min(max(1, groups) * MEMBERS_PER_ROUND, MEMBERS_PER_MESH)


# ---- what one member hears -----------------------------------------------------------------------------


def view(groups: Groups, member: str, epoch: int) -> Plan:
    """Its group, as if that were all; and where the sums of its chunks go and come from."""
    plan = groups.plan
    if not plan.roots:
        return plan
    mine = groups.of[member]
    group = groups.members[mine]
    index = {peer: at for at, peer in enumerate(group)}
    codecs = dict(zip(plan.members, plan.codecs, strict=True))
    columns = [groups.column(chunk) for chunk in bits(groups.shares.get(member, 0))]
    peers = sorted({peer for column in columns for peer in column})
    places = {peer: at for at, peer in enumerate(peers)}
    return replace(
        plan,
        epoch=epoch,
        members=group,
        owners=tuple(index[groups.owner(mine, chunk)] for chunk in range(plan.count)),
        codecs=tuple(codecs[peer] for peer in group),
        groups=UNSET,
        roots=UNSET,
        column=MeshColumn(
            mine,
            len(groups.members),
            tuple(peers),
            tuple(places[peer] for column in columns for peer in column),
            tuple(plan.roots[chunk] for chunk in bits(groups.shares.get(member, 0))),
        ),
    )


def decision_view(groups: Groups, decision: Decision, member: str) -> Decision:
    """The weights of its group, and which groups count."""
    if not groups.plan.roots:
        return decision
    weights = dict(zip(groups.plan.members, decision.weights, strict=True))
    group = groups.members[groups.of[member]]
    reasons = {peer: why for peer, why in decision.reasons.items() if peer in group}
    return replace(decision, weights=tuple(weights[peer] for peer in group), reasons=reasons)


def summed(groups: Groups, weights: Mapping[str, float]) -> bytes:
    """The mask of groups of which somebody is included."""
    return mask_to_bytes(mask_of({groups.of[peer] for peer, weight in weights.items() if weight > 0.0}))


def touched(before: Plan, after: Plan) -> set[str]:
    """Who has to hear that ownership moved: a group in which it did, and the owners of these chunks in all others."""
    if not after.roots or not before.roots:
        return set(after.members)
    groups, count = Groups(after), after.count
    moved = [
        place for place, pair in enumerate(zip(before.owners, after.owners, strict=True)) if len({*pair}) > 1
    ]
    chunks = {place % count for place in moved}
    chunks |= {chunk for chunk in range(count) if before.roots[chunk] != after.roots[chunk]}
    chunks |= set(bits(mask_from_bytes(before.kept) ^ mask_from_bytes(after.kept)))
    found = {peer for group in {place // count for place in moved} for peer in groups.members[group]}
    return found.union(*(groups.column(chunk) for chunk in chunks))


# ---- mesh sums ---------------------------------------------------------------------------------------------


class ComparingSums:
    """What roots say of the sums of groups, decision by decision; before the coordinator has seen it, nothing may be
    encoded."""

    def __init__(self) -> None:
        self._decision: Decision | None = None
        self._of: tuple[str, ...] = ()  # groups, by their number
        self._comparing = Comparing(())
        self._free = False
        self.impossible: dict[str, str] = {}  # root -> what is wrong with its numbers
        self.news = False  # somebody has to be told what may be encoded

    def begin(self, decision: Decision, groups: int) -> None:
        self._decision, self._of = decision, tuple(map(str, range(groups)))
        self._comparing, self._free = Comparing(self._of), not decision.weigh_sums

    @property
    def held_back(self) -> bool:
        """Sums that stand are not compared yet."""
        return not self._free and self._decision is not None

    @property
    def may_encode(self) -> int:
        """The decision whose results may be encoded; 0: none that anybody waits for."""
        waited = self._decision is not None and self._decision.weigh_sums is True
        return self._decision.decision_no if waited and self._free and self._decision is not None else 0

    def free(self) -> None:
        self._free = self.news = True

    def on_report(self, root: str, decision_no: int, said: DotProducts) -> None:
        if self._decision is None or decision_no != self._decision.decision_no or self._free:
            return
        self._comparing.on_report(root, said)
        self.impossible |= self._comparing.impossible

    def lacking(self, roots: Mapping[str, int]) -> list[str]:
        """`roots`: each with the mask of the chunks whose results it encodes."""
        return self._comparing.lacking(self._names, roots)

    def compared(self, roots: Mapping[str, int]) -> Compared:
        return Compared(self._names, self._comparing.shares_of(self._names, roots))

    @property
    def _names(self) -> list[str]:
        summed = (self._decision.summed or b"") if self._decision is not None else b""
        return [self._of[group] for group in bits(mask_from_bytes(summed))]


class MeshSums(FlatSums):
    def __init__(self) -> None:
        self.comparing = ComparingSums()
        self.signed = SignedSums()
        self.at_odds: dict[str, str] = {}
        self.captured: dict[int, str] = {}

    @property
    def held_back(self) -> bool:
        return self.comparing.held_back

    @property
    def sections(self) -> tuple[EncodeTick, ...]:
        may_encode = self.comparing.may_encode
        return (EncodeTick(may_encode),) if may_encode else ()

    @property
    def impossible(self) -> Mapping[str, str]:
        return self.comparing.impossible

    # ---- what members hear ----------------------------------------------------------------------------

    def plan_for(self, groups: Groups, member: str, epoch: int) -> Plan:
        return view(groups, member, epoch)

    def decision_for(self, groups: Groups, decision: Decision, member: str) -> Decision:
        return decision_view(groups, decision, member)

    def touched(self, before: Plan, after: Plan) -> set[str]:
        return touched(before, after)

    def take_news(self) -> bool:
        news, self.comparing.news = self.comparing.news, False
        return news

    # ---- what members say -----------------------------------------------------------------------------

    def hear(self, peer: str, report: ProgressReport, groups: Groups) -> set[str]:
        said = section(MeshReport, report.sections) or MeshReport()
        if said.dots is not None:
            self.comparing.on_report(peer, report.decision_no, said.dots)
        if said.sums is None or peer not in groups.of:
            return set()
        return self.signed.on_word(peer, groups.of[peer], said.sums)

    def named(
        self, flight: Reported, peer: str, report: ProgressReport, decision: Decision
    ) -> Mapping[int, tuple[bytes, ...]] | None:
        """What a root's results are made of, as far as owners signed for it."""
        groups = flight.groups
        if not groups.plan.roots:
            return None  # few members: they are one group
        if mask_from_bytes(report.merged) & ~groups.roots.get(peer, 0):
            return {}  # who is no root got no sums of others, and has nothing to say of them
        counted = list(bits(mask_from_bytes(decision.summed or b"")))
        named = self.signed.named_by(peer, report, counted, groups.owner)
        if named.at_odds:
            self._are_at_odds(flight, peer, set(named.at_odds), counted)
        return named.hashes

    def _are_at_odds(self, flight: Reported, root: str, owners: set[str], counted: Sequence[int]) -> None:
        """They name different sums of a group, and one of each two lies.  Neither owns anything for a while, but if a
        root says it of most of those that it gets sums from, it alone."""
        groups, name = flight.groups, flight.name
        rooted = bits(groups.roots.get(root, 0))
        others = {groups.owner(group, chunk) for chunk in rooted for group in counted} - {root}
        believed = 2 * len(owners) <= len(others) or len(others) < 2
        out = {root} | (owners if believed else set())
        names = ", ".join(map(name, sorted(owners)))
        told = f"{name(root)} says that sums which it got are others than {names} signed"
        flight.void = flight.void or not out <= self.at_odds.keys()
        self.at_odds |= dict.fromkeys(out, told)

    # ---- what follows ---------------------------------------------------------------------------------

    def marks(self, groups: Groups, weights: Mapping[str, float], screened: bool) -> Mapping[str, Any]:
        if not groups.plan.roots:
            return {}
        return {"summed": summed(groups, weights)} | ({"weigh_sums": True} if screened else {})

    def begin(self, decision: Decision, groups: Groups) -> None:
        self.comparing.begin(decision, len(groups.members))
        self.signed.begin()

    def step(self, flight: Round, alive: set[str], decision: Decision) -> Step | None:
        """None: they may be encoded as they are."""
        if not self.held_back:
            return None
        groups, members = flight.groups, flight.plan.members
        if lacking := self.comparing.lacking(groups.roots):
            names = flight.names(sorted(lacking))
            return RoundWaits(f"decide: waiting for the dot products of sums of {names}")
        included, weights = decision.included(members), dict(zip(members, decision.weights, strict=True))
        sums = self.comparing.compared(groups.roots)
        found, norm = captured(sums, _claimed(flight, sums.names, weights))
        if found:
            self.captured |= {int(group): why for group, why in found.items()}
            # Whoever is out counts towards the quorum, as before.
            ready = [m for m in members if m in included or m in flight.out()]
            return flight.settle(ready, alive, f"{len(found)} groups are out as a whole")
        tokens = {m: flight.believed.tokens[m] for m in included}
        made = guarded({m: weights[m] for m in included}, norm, tokens, flight.rules.merge)
        if made.refusal:
            return Failed(made.refusal, AbortCause.GUARD, dropped=True)
        flight.norm = made.norm
        if not made.told:
            self.comparing.free()
            return None
        # Shorter by one number for all: nothing else can come of comparing them again.
        step = flight.decide_on(made.weights, tokens, alive, "the sum was too long", made.told)
        self.comparing.free()
        return step

    def beside(self, groups: Groups, owner: str) -> set[str]:
        share = groups.shares.get(owner, 0) if groups.plan.roots else 0
        return {peer for chunk in bits(share) for peer in groups.column(chunk)} - {owner}

    def keeping(self, groups: Groups, chunk: int, got: Mapping[str, int]) -> list[str]:
        """Its root, to owners in other groups; each of these that has it, to the group."""
        root = groups.plan.root_of(chunk)
        others = (peer for peer in groups.column(chunk) if groups.plan.roots and got[peer] >> chunk & 1)
        return [root, *(peer for peer in others if peer != root)]

    def owing(self, groups: Groups, chunk: int, decision: Decision | None) -> list[str]:
        """Those without their group's sum, or else the root."""
        counted = mask_from_bytes(decision.summed or b"") if decision is not None else 0
        late = [groups.owner(group, chunk) for group in bits(counted)]
        late = [peer for peer in late if not self.signed.has(chunk, groups.of[peer])]
        return late or [groups.plan.root_of(chunk)]

    def lacking(self, groups: Groups) -> Sequence[str]:
        return self.comparing.lacking(groups.roots)

    def used(self, makers: Mapping[int, MadeResult], decision: Decision | None) -> Mapping[Place, MadeSum]:
        if decision is None or not decision.summed:
            return {}  # one group
        counted = list(bits(mask_from_bytes(decision.summed)))
        return {
            (chunk, group): self.signed.made(chunk, group, digest)
            for chunk, made in makers.items()
            for group, digest in zip(counted, made.named[chunk], strict=True)
        }


def _claimed(flight: Round, groups: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """How long the sum of each can be, by what its owners said of its members."""
    lengths = flight.screening.lengths() if flight.screening is not None else {}
    claimed = dict.fromkeys(groups, 0.0)
    for member, length in lengths.items():
        if weights[member] > 0.0:
            claimed[str(flight.groups.of[member])] += weights[member] * length
    return list(claimed.values())


# ---- mesh --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshPolicy(RoundPolicy):
    core: Core

    @property
    def _size(self) -> int:
        return self.core.manifest.round.group

    def most(self, able: int) -> int:
        return most_of_round(self._size, able)

    def drawn(self, peers: Sequence[str], able: Set[str], seed: bytes) -> tuple[int, ...]:
        return drawn(peers, able, self._size, seed)

    def sums(self) -> MeshSums:
        return MeshSums()


class Mesh(CoordinatorMode):
    def __init__(self, core: Core) -> None:
        self._core = core

    def policy(self, fragment: int) -> RoundPolicy:
        return MeshPolicy(self._core)


def made(core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> Mesh | None:
    return Mesh(core) if core.manifest.round.group else None
