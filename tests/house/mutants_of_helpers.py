"""Mutants of what peers without a trainer may do, and must not.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

WHOLE = ("tests/whole/test_helpers.py",)
ALIKE = ("tests/coordinator/run/test_alike.py",)
MOVING = ("tests/coordinator/batches/test_rebalancing.py",)
MEMBERS = ("tests/coordinator/run/test_helping_members.py",)

HELPERS = (
    Mutant(
        "who helps counts for no quorum",
        "coordinator/run/round_driver.py",
        "if self.standing(m).verified and not m.helps]",
        "if self.standing(m).verified]",
        MEMBERS,
    ),
    Mutant(
        "who helps contributes nothing",
        "coordinator/rounds/reported.py",
        "self.barred |= dict.fromkeys(self.rules.helpers, HELPS)",
        "pass",
        MEMBERS + WHOLE,
    ),
    Mutant(
        "no commit counts what those hold who help",
        "coordinator/rounds/round.py",
        "if m in alive and m not in self.rules.helpers and m not in out]",
        "if m in alive]",
        MEMBERS,
    ),
    Mutant(
        "nothing is leased to who helps",
        "coordinator/run/lease_desk.py",
        "self.words.fits(member) and not member.helps",
        "self.words.fits(member)",
        MEMBERS,
    ),
    Mutant(
        "who helps says nothing of the run's data",
        "coordinator/run/lease_desk.py",
        "if not beat.samples or member.helps:",
        "if not beat.samples:",
        MEMBERS,
    ),
    Mutant(
        "who helps founds no run",
        "coordinator/run/membership.py",
        "return not self.helps and (self.beat is None or not self.beat.lacks_start)",
        "return self.beat is None or not self.beat.lacks_start",
        MEMBERS,
    ),
    Mutant(
        "who helps brings no model",
        "coordinator/run/machine.py",
        "if hello.helps and (too_early := self._nothing_to_help(hello)) is not None:",
        "if False and (too_early := self._nothing_to_help(hello)) is not None:",
        MEMBERS,
    ),
    Mutant(
        "the only door of a stage goes where nobody needs it",
        "coordinator/batches/rebalancing.py",
        "!= [worker.peer] or self._is_no_door(worker)",
        "!= [worker.peer]",
        MOVING,
    ),
    Mutant(
        "those who stay have a way to each other without it",
        "coordinator/batches/rebalancing.py",
        "for b in [*mates, *beside] if a.peer != b.peer]",
        "for b in beside if a.peer != b.peer]",
        MOVING,
    ),
    Mutant(
        "results are compared with those of the same weights alone",
        "coordinator/court/alike.py",
        "if (f.version, f.form) == (said.version, said.form)",
        "if f.form == said.form",
        ALIKE,
    ),
    Mutant(
        "of two groups as large the one that was named stays named",
        "coordinator/court/alike.py",
        "key=lambda peer: (peer in self._odd, met[peer]))",
        "key=lambda peer: met[peer])",
        ALIKE,
    ),
    Mutant(
        "of two, the one from which others differ, too, is named",
        "coordinator/court/alike.py",
        "met = Counter(self._from.values())",
        "met = Counter[str]()",
        ALIKE,
    ),
    Mutant(
        "numbers that are none differ from all others",
        "coordinator/court/alike.py",
        "if not math.isfinite(away + sum(sizes)):",
        "if False:",
        ALIKE,
    ),
)
