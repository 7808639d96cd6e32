"""Mutants of results that leave before the decision that they most likely follow from.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import MEMBER, ROUND, WITNESS, Mutant

FORESEEING = "coordinator/rounds/round.py"
RULES = ("tests/coordinator/rounds/test_foreseeing.py", *ROUND)
LEAVING = ("tests/collectives/test_priorities.py",)
DECIDING = ("tests/collectives/test_deciding.py", *MEMBER)
WHOLE = ("tests/whole/test_early_results.py",)

FORESIGHT = (
    Mutant(
        "nothing is foreseen of one that went after it said what it sends",
        FORESEEING,
        "if any(m not in sent or m not in alive for m in awaited):",
        "if any(m not in sent for m in awaited):",
        RULES,
    ),
    Mutant(
        "nothing is foreseen before everybody said what it sends",
        FORESEEING,
        "if m not in barred and (m in alive or m in sent)]",
        "if m not in barred and m in sent]",
        RULES,
    ),
    Mutant(
        "P9 who can't count is not foreseen to count",
        FORESEEING,
        "[m for m in members if m not in barred and",
        "[m for m in members if",
        RULES,
    ),
    Mutant(
        "P9 after a mistake rounds have to go as foreseen for a while",
        FORESEEING,
        "self._needed, self._pause = self._pause, min(ROUNDS_MOST, 2 * self._pause)",
        "pass",
        RULES,
    ),
    Mutant(
        "P9 it takes twice as long after each mistake",
        FORESEEING,
        "min(ROUNDS_MOST, 2 * self._pause)",
        "self._pause",
        RULES,
    ),
    Mutant(
        "rounds are foreseen where the last ones went so",
        FORESEEING,
        "self._right = self._right + 1 if right else 0",
        "self._right += 1",
        RULES,
    ),
    Mutant(
        "P2 what was made by other weights is taken back",
        "coordinator/rounds/round.py",
        "if not stands:\n            self.gather.take_back([*self.gather.merged])",
        "if before is None:\n            self.gather.take_back([*self.gather.merged])",
        RULES,
    ),
    Mutant(
        "what did not come as foreseen has another number",
        "coordinator/rounds/round.py",
        "before.decision_no + (not stands)",
        "before.decision_no + (self.decision is not None)",
        RULES,
    ),
    Mutant(
        "what came as foreseen keeps its number and its results",
        "coordinator/rounds/round.py",
        "stands = self.decision is None and before is not None and before.weights == told",
        "stands = False",
        RULES,
    ),
    Mutant(
        "a round is foreseen once",
        "coordinator/rounds/round.py",
        "if not self.foresees or self.foreseen is not None:",
        "if not self.foresees:",
        RULES,
    ),
    Mutant(
        "P19 results made by what is foreseen are signed like others",
        "coordinator/run/digest_agreement.py",
        "decision = flight.merged_by\n",
        "decision = flight.decision\n",
        WITNESS,
    ),
    Mutant(
        "an aborted round was a mistake, if it was foreseen",
        "coordinator/run/round_driver.py",
        "self._foresight.on_end(flight.foreseen is not None, flight.as_foreseen)\n        self.core",
        "self._foresight.on_end(False, flight.as_foreseen)\n        self.core",
        ROUND,
    ),
    Mutant(
        "an owner goes on comparing while it is only foreseen",
        "collectives/round/member.py",
        "self.owner.weighing.active = self.owner.weighing.active and not self.deciding.is_made",
        "self.owner.weighing.active = False",
        DECIDING,
    ),
    Mutant(
        "what was made by what was foreseen stands when it comes",
        "collectives/round/member.py",
        "if news is DecisionNews.STANDS:\n            return []",
        "if news is None:\n            return []",
        DECIDING,
    ),
    Mutant(
        "P3 nobody is asked for a result before it is decided",
        "collectives/round/member.py",
        "        if self.deciding.is_made:\n            for chunk in self.plan.chunks_of(member):",
        "        if self.deciding.newest is not None:\n            for chunk in self.plan.chunks_of(member):",
        DECIDING,
    ),
    Mutant(
        "P9 whoever is foreseen to be out is asked for its contribution all the same",
        "collectives/round/member.py",
        "if self.newest is None or not self.is_made:",
        "if self.newest is None:",
        DECIDING,
    ),
    Mutant(
        "an owner that has the result still lacks a contribution",
        "collectives/round/member.py",
        " and self.deciding.is_made\n                if member not in",
        "\n                if member not in",
        DECIDING,
    ),
    Mutant(
        "what is foreseen comes too late after the decision",
        "collectives/round/member.py",
        " or decision.foreseen or not known.foreseen:",
        " or not known.foreseen:",
        DECIDING,
    ),
    Mutant(
        "the same number with other weights makes nothing stand",
        "collectives/round/member.py",
        "return DecisionNews.STANDS if decision.weights == known.weights else DecisionNews.OTHER",
        "return DecisionNews.STANDS",
        DECIDING,
    ),
    Mutant(
        "a beat tells the decision that stands",
        "collectives/round/member.py",
        "return self.number if self.is_made else 0",
        "return self.number",
        ("tests/collectives/test_deciding.py", "tests/peer/machine/test_replicas.py"),
    ),
    Mutant(
        "a large round is looked at when the last one has said what it sends",
        "coordinator/rounds/reported.py",
        "return self.foresees and self.merged_by is None",
        "return False",
        ROUND,
    ),
    Mutant(
        "results wait while contributions leave",
        "collectives/link/zmq_link.py",
        "bulk = [line for line in bulk if not line.leaves_next(Kind.RESULT)]",
        "bulk = [*bulk]",
        LEAVING,
    ),
    Mutant(
        "where no contribution leaves results fill the line",
        "collectives/link/zmq_link.py",
        "if results and self._contributions_leave(now) and not self._has_room(results[0], Rank.BULK, now):",
        "if results and not self._has_room(results[0], Rank.BULK, now):",
        LEAVING,
    ),
    Mutant(
        "P3 what stands on its way holds up no results",
        "collectives/link/peer_connections.py",
        "moves = self.up and now - self._moved_at <= STANDS_AFTER_S and self._crossed != NOTHING",
        "moves = self.up and self._crossed != NOTHING",
        LEAVING,
    ),
    Mutant(
        "F1 no microbatch overtakes another one over a second connection",
        "collectives/link/peer_connections.py",
        "        if item.crossing:\n",
        "        if False:\n",
        ("tests/collectives/test_priorities.py",),
    ),
)
