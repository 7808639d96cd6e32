"""Of the pace of a run with machines of several speeds, and of a start with short periods: each line is needed."""

from __future__ import annotations

from mutant import Mutant

MODE, PEER, SCHEDULE = "coordinator/pace/pace.py", "peer/pace/pace.py", "optim/schedule.py"
OF_MODE, OF_PEER = ("tests/coordinator/pace/test_pace.py",), ("tests/peer/pace/test_pace.py",)
OF_SCHEDULE, WHOLE = ("tests/optim/test_schedule.py",), ("tests/whole/test_pace.py",)

PACE = (
    Mutant("fewer than a third call nobody", MODE, "ONE_OF = 3 ", "ONE_OF = 5 ", OF_MODE),
    Mutant(
        "a third is rounded up", MODE, "due = -(-len(able) // ONE_OF)", "due = len(able) // ONE_OF", OF_MODE
    ),
    Mutant(
        "who was early sets nobody the pace",
        MODE,
        "if driver.is_ready(m) and not _is_early(driver, m)]",
        "if driver.is_ready(m)]",
        (*OF_MODE, *WHOLE),
    ),
    Mutant(
        "who is ready is not called",
        MODE,
        "said.version == driver.book.version and not said.ready",
        "said.version == driver.book.version",
        OF_MODE,
    ),
    Mutant(
        "a round that is open waits for nobody more",
        MODE,
        "return here and driver.round is None and member.peer",
        "return here and member.peer",
        OF_MODE,
    ),
    Mutant(
        "by the clock nobody is called",
        MODE,
        "if member is None or core.manifest.round.period_s or core.held",
        "if member is None or core.held",
        OF_MODE,
    ),
    Mutant("it waits since the last of the third was ready", MODE, "ready[due - 1]", "ready[0]", OF_MODE),
    Mutant(
        "a trainer that has frozen is not called",
        PEER,
        "if held.get(fragment) == version and self._proxy.works[fragment].running",
        "if held.get(fragment) == version",
        OF_PEER,
    ),
    Mutant(
        "beats say what is early",
        PEER,
        "work.frozen is not None and work.frozen.early]",
        "work.frozen is not None]",
        OF_PEER,
    ),
    Mutant(
        "where training waits a call for one fragment is one for all",
        SCHEDULE,
        "self._called |= set(self._left()) if self.rules.waits else {fragment}",
        "self._called |= {fragment}",
        OF_SCHEDULE,
    ),
    Mutant(
        "the pace is what the others needed, not when the call came",
        SCHEDULE,
        "now - waited_s - self._first_at",
        "now - self._first_at",
        (*OF_SCHEDULE, *WHOLE),
    ),
    Mutant(
        "periods grow again",
        SCHEDULE,
        "self._pace_s *= 1.0 + self._slack  #",
        "pass  #",
        OF_SCHEDULE,
    ),
    Mutant(
        "a call at the last step is no news",
        SCHEDULE,
        "if fragment or not 0 < self._steps < self._steps_of(fragment) - 1:",
        "if fragment or not 0 < self._steps:",
        OF_SCHEDULE,
    ),
    Mutant(
        "a longer period has a longer pace",
        SCHEDULE,
        "self._pace_s *= self.period / before",
        "pass",
        OF_SCHEDULE,
    ),
    Mutant(
        "a load ends a call",
        SCHEDULE,
        "self._called -= set(self._called) if self.rules.waits else {fragment}",
        "pass",
        OF_SCHEDULE,
    ),
    Mutant(
        "a load begins what the pace is measured by",
        SCHEDULE,
        "        if not fragment:\n            self._first_at = now",
        "        if not fragment:\n            pass",
        OF_SCHEDULE,
    ),
    Mutant(
        "who joins in the middle of a period learns no pace from its call",
        SCHEDULE,
        "if self._began_with_others and pace_s > 0.0:",
        "if pace_s > 0.0:",
        OF_SCHEDULE,
    ),
    Mutant(
        "who begins when others wait already learns no pace",
        SCHEDULE,
        "and pace_s > 0.0:",
        "and pace_s > -99.0:",
        OF_SCHEDULE,
    ),
    Mutant(
        "the first versions have little momentum",
        "optim/outer.py",
        "if version <= self.start else self.momentum",
        "if version < self.start else self.momentum",
        ("tests/optim/test_outer.py", "tests/whole/test_diloco_reference.py"),
    ),
    Mutant(
        "where the momentum was chosen, it holds from the start",
        "protocol/outer_numbers.py",
        "0 if chosen else start)",
        "start)",
        ("tests/optim/test_outer.py",),
    ),
    Mutant(
        "periods of a start double",
        "protocol/manifest.py",
        "START_SHARES[version * len(START_SHARES) // self.start]",
        "START_SHARES[0]",
        ("tests/protocol/test_manifest.py",),
    ),
    Mutant(
        "a trainer takes the period of its version",
        "peer/trainer/machine.py",
        "self._schedule.follow(self.rules, version)",
        "pass",
        ("tests/whole/test_diloco_reference.py",),
    ),
)
