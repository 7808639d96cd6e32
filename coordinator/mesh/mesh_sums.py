"""The sums of groups in one round: signed, named by roots, and compared before anything is encoded.  Pure.

Asked by the round in flight (coordinator/rounds/round.py) wherever a round of several groups is another one than a flat
one.  Who of an owner and a root lies that name different sums nobody else can see: they are at odds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farflung.coordinator.mesh.group_views import decision_view, summed, touched, view
from farflung.coordinator.mesh.signed_sums import SignedSums
from farflung.coordinator.rounds.gram_collection import Comparing
from farflung.coordinator.rounds.groups import Groups
from farflung.coordinator.rounds.outliers import Compared, captured
from farflung.coordinator.rounds.reported import MadeResult, Reported
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import FlatSums, MadeSum, Place
from farflung.coordinator.rounds.steps import Failed, RoundWaits, Step
from farflung.coordinator.rounds.weights import guarded
from farflung.protocol.causes import AbortCause
from farflung.protocol.digests import bits, mask_from_bytes
from farflung.protocol.messages import DotProducts, ProgressReport
from farflung.protocol.round_words import Decision, Plan


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
    def may_encode(self) -> int:
        return self.comparing.may_encode

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
        if report.sum_dots:
            self.comparing.on_report(peer, report.decision_no, report.sum_dots)
        if not report.sums or peer not in groups.of:
            return set()
        return self.signed.on_word(peer, groups.of[peer], report.sums)

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
