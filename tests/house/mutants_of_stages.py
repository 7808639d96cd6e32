"""Mutants of pipelines: when a stage is complete, and one record for all stages.  Read by mutant_list.py.

Those of the rules R1 to R5 inside a stage's machine are in mutants_of_rounds.py, whose tests are of the flow alone: its
world is far worse than that of whole runs.
"""

from __future__ import annotations

from mutant import Mutant

WHOLE = ("tests/whole/test_stages.py",)
AT_COORDINATOR = ("tests/coordinator/run/test_stages.py", *WHOLE)
AT_FLOW = ("tests/collectives/flow/test_flow_world.py", *WHOLE)

PIPELINES = (
    Mutant(
        "R2 what came back from a seat that is gone now is sent again",
        "collectives/flow/flow.py",
        "            if record.next and not table.lives(record.next):\n                record.next, record.again",
        "            if record.next and not record.grad and not table.lives(record.next):\n"
        "                record.next, record.again",
        AT_FLOW,
    ),
    Mutant(
        "R4 a source hears what another seat had been granted before",
        "coordinator/ledger/batch_book.py",
        "        return seat.mask & mask_of_spans(self.released)\n",
        "        return 0\n",
        WHOLE,
    ),
    Mutant(
        "P13 no stage commits before all of them are at their end",
        "coordinator/run/conductor.py",
        "                case Done() if self._of_several_stages:\n",
        "                case Done() if False:\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "P11 no sums are frozen before the batch is complete in every stage",
        "coordinator/batches/batches.py",
        "        return batch is not None and not batch.whole & ~self.counted\n",
        "        return batch is not None and not batch.whole & ~self.counted_in(0)\n",
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
        "coordinator/run/conductor.py",
        "        alone = self._of_several_stages and len(members) == 1\n",
        "        alone = False\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "P15 after a restart a newcomer leaves those with seats their stages",
        "coordinator/run/machine.py",
        "            here = {seat.peer: seat.stage for seat in self.batches.book.seats.values()} | here\n",
        "            pass\n",
        AT_COORDINATOR,
    ),
    Mutant(
        "P11 what is left when a batch ends is stepped on, too",
        "peer/trainer/stage_machine.py",
        "[*self._local.rest(), WriteLearned(slot)]",
        "[WriteLearned(slot)]",
        ("tests/peer/trainer/test_local_steps.py", *WHOLE),
    ),
    Mutant(
        "P11 a load takes what was counted out of the next local step",
        "peer/trainer/stage_machine.py",
        "            self._local.on_load(load.version)\n",
        "            pass\n",
        ("tests/peer/trainer/test_local_steps.py", *WHOLE),
    ),
)
