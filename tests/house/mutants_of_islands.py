"""Mutants of several ranks as one peer: when they look at their agent, and what is due.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

LOOKS = ("tests/peer/island/test_island.py",)
LATE_WORDS = ("tests/peer/trainer/test_late_words.py",)
GROUP = ("tests/peer/island/test_scripts_of_ranks.py",)

ISLANDS = (
    Mutant(
        "no thread of the ranks' own group is left when Python ends",
        "peer/island/group.py",
        "        atexit.register(self._end)",
        "        self._end_at_exit = atexit",
        GROUP,
    ),
    Mutant(
        "a script that destroyed all groups, and made new ones, ends without a word of ours",
        "peer/island/group.py",
        "with suppress(ValueError):",
        "with suppress(KeyError):",
        GROUP,
    ),
    Mutant(
        "ranks look at their agent where a step is due, whatever the pace",
        "peer/island/island.py",
        "if outlook.is_due or self._steps_to_look <= 0:",
        "if self._steps_to_look <= 0:",
        LOOKS,
    ),
    Mutant(
        "rank 0 says for all when they look again",
        "peer/island/island.py",
        "self._steps_to_look = self._look(RankPlace.STEP, 0.0)",
        "self._look(RankPlace.STEP, 0.0)",
        LOOKS,
    ),
    Mutant(
        "no word waits longer for a look than it may",
        "peer/island/parts.py",
        "return max(1, min(wanted, int(room_s / step_s), outlook.steps, MOST_STEPS))",
        "return max(1, min(wanted, outlook.steps, MOST_STEPS))",
        LOOKS,
    ),
    Mutant(
        "a step at which a fragment is to be frozen is due",
        "peer/trainer/machine.py",
        "is_due = self._schedule.may_end(now) or self.leases.unread < wanted",
        "is_due = self.leases.unread < wanted",
        LATE_WORDS,
    ),
    Mutant(
        "a step is due where leases run short",
        "peer/trainer/machine.py",
        "wanted = 2 * max(self._samples_out, self._samples_of_step)",
        "wanted = 0",
        LATE_WORDS,
    ),
    Mutant(
        "several steps told with one time took it together",
        "optim/schedule.py",
        "return (now - self._last_step_at) / steps if now > self._last_step_at else self._step_s",
        "return now - self._last_step_at if now > self._last_step_at else self._step_s",
        LATE_WORDS,
    ),
)
