"""Mutants of gradients one version late: whose sums a round gets, who may sit down, and when two batches are void.

Read by mutant_list.py.
"""

from __future__ import annotations

from mutant import Mutant

WHOLE = ("tests/whole/test_delay.py",)
AT_MERGING = ("tests/coordinator/batches/test_merging.py", *WHOLE)
AT_BOOK = ("tests/coordinator/ledger/test_batch_book.py", *AT_MERGING)
AT_TRAINER = ("tests/peer/machine/test_trainer_view.py", *WHOLE)

DELAY = (
    Mutant(
        "P11 delay: sums that are lost void the batch that they are of",
        "coordinator/batches/merging.py",
        "            if why := self._why_gone(peer, stage, self.book.owed[stage][peer]):\n",
        "            if False and (why := self._why_gone(peer, stage, self.book.owed[stage][peer])):\n",
        AT_MERGING,
    ),
    Mutant(
        "P11 delay: what another process has is not what was counted",
        "coordinator/batches/merging.py",
        "        if worker.process != sums.process:\n",
        "        if False:\n",
        AT_MERGING,
    ),
    Mutant(
        "P12 delay: nobody sits down who has other values than the batch",
        "coordinator/batches/merging.py",
        "        return not self.desk.manifest.pipeline.delay or batch is None or holds_weights(worker, batch)\n",
        "        return True\n",
        AT_MERGING,
    ),
    Mutant(
        "P12 delay: what is said at other values than the batch's is not counted",
        "coordinator/batches/batches.py",
        "        if batch is None or said.seat != seat.number or not holds_weights(worker, batch):\n",
        "        if batch is None or (said.version, said.seat) != (batch.version, seat.number):\n",
        AT_MERGING,
    ),
    Mutant(
        "P15 delay: a seat whose trainer can have the values no more is given up",
        "coordinator/batches/merging.py",
        "    return not holds_weights(worker, batch) and any(",
        "    return False and any(",
        AT_MERGING,
    ),
    Mutant(
        "P15 delay: a stage in which nobody has the values begins the batch again",
        "coordinator/batches/merging.py",
        "        if batch is None or self.batch is not None or batch.taken_at >= self.desk.ledger.version:\n",
        "        if True:\n",
        AT_MERGING,
    ),
    Mutant(
        "P11 delay: a round of the batch before takes nothing of this one",
        "coordinator/batches/batches.py",
        "        return self.book.merging is None and self.house.in_round(peer)\n",
        "        return self.house.in_round(peer)\n",
        AT_MERGING,
    ),
    Mutant(
        "P7 delay: a batch is not passed over before the one before it is learned",
        "coordinator/batches/batches.py",
        "            last = self.book.merging is not None and batch.whole == 1 << micro\n",
        "            last = False\n",
        AT_MERGING,
    ),
    Mutant(
        "P11 delay: a commit is of the batch that was merged",
        "coordinator/ledger/batch_book.py",
        "        due = self.merging or self.batch\n",
        "        due = self.batch\n",
        AT_BOOK,
    ),
    Mutant(
        "P11 delay: nothing that was said of a void batch is taken for the next one",
        "coordinator/ledger/batch_book.py",
        "        self._clear_seats()\n        self._end()\n\n    @staticmethod\n",
        "        self.released = []\n        self._end()\n\n    @staticmethod\n",
        AT_BOOK,
    ),
    Mutant(
        "P14 delay: who moves is chosen in a batch, and the version may be that of the one before",
        "coordinator/batches/moving.py",
        "        version = batch.version if batch is not None else self._desk.ledger.version\n",
        "        version = self._desk.ledger.version\n",
        WHOLE,
    ),
    Mutant(
        "P11 delay: a round gets the sums of its own batch",
        "peer/machine/trainer_view.py",
        "if each and each.batch in (-1, version)), None\n",
        "if each), None\n",
        AT_TRAINER,
    ),
    Mutant(
        "P11 delay: no slot is written that a round is to read",
        "peer/machine/trainer_view.py",
        "for each in (self.frozen, self.given) if each is not None)}",
        "for each in (self.frozen,) if each is not None)}",
        AT_TRAINER,
    ),
    Mutant(
        "P11 delay: what stands frozen is the round's, though the seat is gone when the next batch begins",
        "peer/machine/trainer_view.py",
        "            if work.frozen is not None and weights <= work.frozen.batch < version:\n",
        "            if False:\n",
        AT_TRAINER,
    ),
    Mutant(
        "delay: the trainer works on while the agent makes the next version",
        "peer/machine/trainer_view.py",
        "        if self.attached and not work.fresh and label == version and weights < version:\n",
        "        if False:\n",
        AT_TRAINER,
    ),
)
