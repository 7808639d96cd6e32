"""Mutants of pipelines: when a stage is complete, and one record for all stages.  Read by mutant_list.py.

Those of the rules R1 to R5 inside a stage's machine are in mutants_of_rounds.py, whose tests are of the flow alone: its
world is far worse than that of whole runs.
"""

from __future__ import annotations

from mutant import Mutant

WHOLE = ("tests/whole/test_stages.py",)
AT_COORDINATOR = ("tests/coordinator/batches/test_stages.py", *WHOLE)
AT_MOVES = ("tests/coordinator/batches/test_rebalancing.py", *WHOLE)
AT_FLOW = ("tests/collectives/pipeline/test_flow_world.py", *WHOLE)
AT_TAKING_BACK = ("tests/collectives/pipeline/test_work_stealing.py", *AT_FLOW)
OF_NEIGHBOURS = (
    "tests/coordinator/batches/test_complaints.py",
    "tests/coordinator/batches/test_stages_of_batches.py",
    "tests/collectives/pipeline/test_stage_scheduler.py",
)

PIPELINES = (
    Mutant(
        "P17 nobody moves for three looks after a move",
        "coordinator/batches/rebalancing.py",
        "        if desk.now < self._look_at or rested_s < QUIET_LOOKS * self._every_s or desk.held:\n",
        "        if desk.now < self._look_at or desk.held:\n",
        AT_MOVES,
    ),
    Mutant(
        "P17 a stage that gives somebody away for a gain keeps two seats",
        "coordinator/batches/rebalancing.py",
        "        return max(KEEPS_LEAST, self._desk.manifest.pipeline.min_per_stage)\n",
        "        return self._desk.manifest.pipeline.min_per_stage\n",
        AT_MOVES,
    ),
    Mutant(
        "P17 the last one of a stage does not leave it for an empty one",
        "coordinator/batches/rebalancing.py",
        "            if held[worker.stage] > least and self._may(",
        "            if held[worker.stage] >= least and self._may(",
        AT_MOVES,
    ),
    Mutant(
        "P14 who moves has counted nothing that is computed again",
        "coordinator/batches/rebalancing.py",
        "        return self._is_stuck(move) or batch is None or batch.version > move.version\n",
        "        return True\n",
        AT_MOVES,
    ),
    Mutant(
        "P16 who moves goes when others of its stage hold what was committed",
        "coordinator/batches/rebalancing.py",
        "        if len(others) < move.keeps and desk.ledger.learned:\n",
        "        if False:\n",
        AT_MOVES,
    ),
    Mutant(
        "P17 who is on its way out of a stage gets no seat there",
        "coordinator/batches/batches.py",
        "        able = able and not self.moves.is_due(worker.peer)\n",
        "        able = able and True\n",
        AT_MOVES,
    ),
    Mutant(
        "a stage with too few peers is filled when two looks have found it so",
        "coordinator/batches/rebalancing.py",
        "        if wish is not None and (wish.now or before == self._wished):\n",
        "        if wish is not None:\n",
        AT_MOVES,
    ),
    Mutant(
        "a liar counts for four of the usual at most",
        "coordinator/batches/batch_book.py",
        "        unit_s = max(unit_s, here / BELIEVED, UNIT_LEAST_S)",
        "        unit_s = max(unit_s, UNIT_LEAST_S)",
        AT_MOVES,
    ),
    Mutant(
        "P17 nobody goes at once to a stage whose members are still coming back after a restart",
        "coordinator/batches/rebalancing.py",
        "        if are_coming_back(self._desk):\n",
        "        if False:\n",
        AT_MOVES,
    ),
    Mutant(
        "P19 who was moved to another stage owes nothing of the one that it left",
        "coordinator/audits/audits.py",
        "        return audited.of.plan.fragment in member.standings\n",
        "        return True\n",
        ("tests/coordinator/audits/test_auditing.py",),
    ),
    Mutant(
        "P11 the run goes back to where the batches were at that version",
        "coordinator/batches/batch_book.py",
        "        self.start_at(self.cursor if stays else self.cursors.get(version, (0, 0)))\n",
        "        self.start_at(self.cursor)\n",
        ("tests/coordinator/batches/test_batch_book.py",),
    ),
    Mutant(
        "a peer that moves gets the stage that it was promised",
        "coordinator/batches/batch_mode.py",
        "        if due is not None and due in hello.fragments:\n",
        "        if False:\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "what a peer says it can bring counts with the run's own digest alone",
        "coordinator/recovery/recovery.py",
        '            if each.version > 0 and each.is_of(number, known.get(each.version, b""))\n',
        "            if each.first == number\n",
        ("tests/coordinator/recovery/test_stages_go_back.py",),
    ),
    Mutant(
        "R2 what came back from a seat that is gone now is sent again",
        "collectives/pipeline/stage_scheduler.py",
        "            if record.next and not table.lives(record.next):\n                record.next, record.again",
        "            if record.next and not record.grad and not table.lives(record.next):\n"
        "                record.next, record.again",
        AT_FLOW,
    ),
    Mutant(
        "R6 nothing goes elsewhere before the word of who has it",
        "collectives/pipeline/work_stealing.py",
        "                self._asked_for[idle] = micro\n",
        "                self._asked_for[idle], record.next, record.sent = micro, 0, False\n",
        AT_TAKING_BACK,
    ),
    Mutant(
        "R6 what is begun is not given back",
        "collectives/pipeline/microbatches.py",
        "        if micro not in self._forward:\n            return None\n",
        "        if micro not in self._forward:\n            return 0\n",
        AT_TAKING_BACK,
    ),
    Mutant(
        "R6 a late copy of what was given back is not taken",
        "collectives/pipeline/stage_scheduler.py",
        "        if not mark & FOR_GOOD and record is not None and record.is_back_at(seat):\n"
        "            return Verdict.STALE",
        "        if False:\n            return Verdict.STALE",
        AT_TAKING_BACK,
    ),
    Mutant(
        "R6 what HELD has named is not given back",
        "collectives/pipeline/work_stealing.py",
        "    known = record.in_for_good or record.named or record.next\n",
        "    known = record.in_for_good or record.next\n",
        AT_TAKING_BACK,
    ),
    Mutant(
        "R4 a source hears what another seat had been granted before",
        "coordinator/batches/batch_book.py",
        "        return seat.mask & mask_of_spans(self.released)\n",
        "        return 0\n",
        WHOLE,
    ),
    Mutant(
        "P13 no stage commits before all of them are at their end",
        "coordinator/run/round_driver.py",
        "                case Done() if self._of_several_stages:\n",
        "                case Done() if False:\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "P11 no sums are frozen before the batch is complete in every stage",
        "coordinator/batches/batches.py",
        "        return self.counted_in(self.stages - 1) if held_out else self.counted\n",
        "        return self.counted_in(0)\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "P15 whoever is gone does not stay in a round that waits, where another stage needs it",
        "coordinator/batches/batches.py",
        "            safe = in_round and (self.stages == 1 or self.complete)\n",
        "            safe = in_round\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "P15 who is alone in its stage need not be dialled",
        "coordinator/run/round_driver.py",
        "        alone = self._of_several_stages and len(members) == 1\n",
        "        alone = False\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "P15 after a restart a newcomer leaves those with seats their stages",
        "coordinator/batches/batch_mode.py",
        "        here = {seat.peer: seat.stage for seat in self.batches.book.seats.values()} | here\n",
        "        pass\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "P11 what is left when a batch ends is stepped on, too",
        "peer/pipeline/machines/stage_machine.py",
        "[*self._local.rest(), WriteLearned(slot)]",
        "[WriteLearned(slot)]",
        ("tests/peer/pipeline/test_steps_of_a_stage.py", *WHOLE),
    ),
    Mutant(
        "P11 a load takes what was counted out of the next local step",
        "peer/pipeline/machines/stage_machine.py",
        "            self._local.on_load(load.version)\n",
        "            pass\n",
        ("tests/peer/pipeline/test_steps_of_a_stage.py", *WHOLE),
    ),
    Mutant(
        "P9 neighbours: one word does not unseat whom others get on with",
        "coordinator/batches/seat_choice.py",
        "            return GivesUp(who, about, 0, False)\n        return GivesUp(about, who, 1, False) if",
        "            return GivesUp(about, who, 1, False)\n        return GivesUp(about, who, 1, False) if",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P9 neighbours: whoever complains of most is not believed",
        "coordinator/batches/seat_choice.py",
        "        if settled and len(complains) >= 2 and 2 * len(complains) > _count(its, seats):\n",
        "        if False:\n",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P9 neighbours: one word of damage is no strike",
        "coordinator/batches/seat_choice.py",
        "damaged >= 2 and 2 * damaged > _count(mine, seats))",
        "damaged >= 1)",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P15 neighbours: who answers nothing is complained of",
        "collectives/pipeline/microbatches.py",
        "        return nothing | {seat for",
        "        return {seat for",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P15 neighbours: so is who keeps one thing to itself",
        "collectives/pipeline/microbatches.py",
        "if ask.in_vain >= ONE_IN_VAIN}",
        "if False}",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P15 neighbours: that there is room answers nothing",
        "collectives/pipeline/stage_scheduler.py",
        "        if header.kind in _ANSWERS:\n",
        "        if True:\n",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P9 neighbours: damage that is over is no complaint",
        "collectives/pipeline/neighbours.py",
        "        self._damaged.pop(seat, None)\n",
        "        pass\n",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P15 neighbours: a stage that lost a round's member to a complaint begins it again",
        "coordinator/batches/batches.py",
        "            if self.house.flying(seat.stage):\n                self.house.abort(seat.stage, why)\n",
        "            if False:\n                self.house.abort(seat.stage, why)\n",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P9 neighbours: who gives seats up again and again sits out",
        "coordinator/batches/batches.py",
        "        if served and self._complaints.bars(worker.peer):\n",
        "        if False:\n",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P15 neighbours: whoever is of no use gets nothing new",
        "collectives/pipeline/neighbours.py",
        " if self._peers[number] not in self._shunned} or here",
        "} or here",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P15 where nobody of a stage can be dialled one seat has it for itself",
        "coordinator/batches/seat_choice.py",
        "            if now - since >= patience_s\n",
        "            if False\n",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P15 and no second one sits down there",
        "coordinator/batches/seat_choice.py",
        "            not mates\n",
        "            True\n",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "P15 whoever can be dialled goes to those who can't",
        "coordinator/batches/seat_choice.py",
        "    if dialable and alone:\n",
        "    if False:\n",
        OF_NEIGHBOURS,
    ),
    Mutant(
        "R3 newcomers are told what is held, even before they have heard of their seat",
        "peer/batches/stage_transfers.py",
        " if self._may_sit_soon(frame.header) else 1\n",
        " if False else 1\n",
        ("tests/peer/batches/test_stage_transfers.py",),
    ),
)
