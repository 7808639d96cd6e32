"""What a round will most likely come to, before it is decided: then results can leave while contributions still come.

Between the scatter and the gather of a round lines idle: for the last contribution, for the dot products, for the way
of a decision and back.  But as soon as everybody has said what it sends, all that weights depend on is known, unless
somebody is late, is lost, or has to be shortened.  So the round foresees the weights (`weights_foreseen`), tells them,
and owners merge by them at once.  The decision itself is made as ever, by contributions that are whole and compared.
If it has the same weights it takes the same number, and all that was made stands; else it takes the next one, and
nothing made before is worth anything.  Before it nothing commits, and nobody is blamed for a result that is missing.

What was foreseen wrongly costs the bytes of results, a second time.  Whoever lies or is slow must not cost that in each
round: after a mistake as many rounds as `Foresight` says have to go as they would have been foreseen, twice as many
after each further one.  `Foresight` is owned by the driver of a fragment, for all of its rounds; not durable.

Pure.  Called by the round at the coordinator (round.py) and by the driver.  Must not know members' sessions or
reports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from farflung.coordinator.rounds.round_rules import RoundRules
from farflung.coordinator.rounds.weights import WorkClaim, believed, weighted
from farflung.protocol.messages import Sent
from farflung.protocol.round_words import Plan

FIRST_ROUNDS = 1  # that have to go so, after a start of the coordinator
MISTAKE_ROUNDS, ROUNDS_MOST = 4, 32  # after a mistake, and after many of them


@dataclass
class Foresight:
    """Whether rounds are foreseen, by how the last ones went."""

    _needed: int = FIRST_ROUNDS
    _right: int = 0  # rounds in a row that came as they would have been foreseen
    _pause: int = MISTAKE_ROUNDS  # after the next mistake

    @property
    def is_on(self) -> bool:
        return self._right >= self._needed

    def on_end(self, foreseen: bool, right: bool) -> None:
        """Of a round, committed or not.  `right`: it came to what was foreseen, or what would have been."""
        self._right = self._right + 1 if right else 0
        if foreseen and right:
            self._needed = FIRST_ROUNDS
            self._pause = max(MISTAKE_ROUNDS, self._pause // 2)
        elif foreseen:
            self._needed, self._pause = self._pause, min(ROUNDS_MOST, 2 * self._pause)


def can_be_foreseen(plan: Plan, rules: RoundRules) -> bool:
    """In a mesh sums of groups are compared after the decision; a batch has everybody in it or fails; and where a
    gradient is clipped results are measured."""
    return not (plan.groups or rules.whole or rules.measures or len(plan.members) < 2)


def weights_foreseen(
    members: Sequence[str],
    alive: Set[str],
    sent: Mapping[str, Sent],
    samples: Mapping[str, int],
    barred: Collection[str],
    rules: RoundRules,
) -> dict[str, float] | None:
    """The weights, if nobody is shortened and nobody who has said what it sends is left out.  None: not yet, or nobody
    can know: somebody has not said it, or went after it had."""
    awaited = [m for m in members if m not in barred and (m in alive or m in sent)]
    if any(m not in sent or m not in alive for m in awaited):
        return None
    claims = {m: WorkClaim(sent[m].tokens, samples.get(m, 0)) for m in awaited if sent[m].tokens > 0}
    if len(claims) < max(1, rules.min_peers):
        return None
    tokens = believed(claims, rules.merge).tokens
    return weighted(tokens, rules.weight_cap, rules.merge, None).weights
