"""Mutants of rounds in groups: who inherits what, which sums are added up.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

MESH = ("tests/whole/test_mesh.py",)

LIARS = ("tests/whole/test_mesh_of_liars.py",)
JUDGED = ("tests/coordinator/rounds/test_screening_in_groups.py",)

MESHES = (
    Mutant(
        "in a mesh a sum of a decision before is worth nothing",
        "collectives/round/columns.py",
        "self._of.clear()",
        "pass",
        ("tests/collectives/test_columns.py", *MESH),
    ),
    Mutant(
        "in a mesh groups are added up in their order",
        "collectives/round/columns.py",
        "return [self._of[chunk][group] for group in groups_in(decision)]",
        "return [self._of[chunk][group] for group in reversed(groups_in(decision))]",
        ("tests/collectives/test_columns.py", *MESH),
    ),
    Mutant(
        "an heir is of the group of the owner that is lost",
        "coordinator/rounds/heirs.py",
        "here = [plan.members.index(member) for member in members if member in able]",
        "here = [at for at, member in enumerate(plan.members) if member in able]",
        ("tests/coordinator/rounds/test_groups.py",),
    ),
    Mutant(
        "of a thousand members no message names all",
        "coordinator/rounds/in_flight.py",
        'return ", ".join(names[:NAMES_TOLD]) + others',
        'return ", ".join(names) + others',
        ("tests/coordinator/rounds/test_groups.py",),
    ),
    Mutant(
        "who inherits carries what its line can carry",
        "coordinator/rounds/heirs.py",
        "shares.reassign(row, lost, heirs, lines)",
        "shares.reassign(row, lost, heirs)",
        ("tests/coordinator/rounds/test_groups.py",),
    ),
    Mutant(
        "a round knows the lines of its members when an owner is lost",
        "coordinator/run/conductor.py",
        "lines=lines_of(beats),",
        "",
        ("tests/coordinator/run/test_conductor.py",),
    ),
    Mutant(
        "who has a thin line is not asked where others have it too",
        "coordinator/reach/acquaintances.py",
        "quick, near = thicker_half([*found], found), thicker_half(dialable, found)",
        "quick, near = [*found], list(dialable)",
        ("tests/coordinator/run/test_guidance.py",),
    ),
    Mutant(
        "half of those who may be asked are, whatever others say of their lines",
        "coordinator/reach/acquaintances.py",
        "stay = max(THICK_LEAST, -(-len(peers) // 2))",
        "stay = THICK_LEAST",
        ("tests/coordinator/reach/test_acquaintances.py",),
    ),
    Mutant(
        "in a mesh a sum whose root is lost goes to the heir",
        "collectives/round/member.py",
        "effects += self._pass_sum_on(chunk)",
        "pass",
        MESH,
    ),
    Mutant(
        "a result that stands at another owner moves its root there",
        "coordinator/rounds/heirs.py",
        "made.roots[chunk] = holding[0]",
        "pass",
        ("tests/coordinator/rounds/test_groups.py",),
    ),
    Mutant(
        "who owns the same chunk elsewhere hears of the heir",
        "coordinator/rounds/groups.py",
        "return found.union(*(groups.column(chunk) for chunk in chunks))",
        "return found",
        ("tests/coordinator/rounds/test_groups.py",),
    ),
    Mutant(
        "nothing is encoded before the sums of groups are compared",
        "collectives/round/member.py",
        "if self.sums.held_back:",
        "if False:",
        LIARS,
    ),
    Mutant(
        "dot products of sums are those of the decision that stands",
        "collectives/round/columns.py",
        "if decision_no == self._decision_no:",
        "if True:",
        ("tests/collectives/test_columns.py",),
    ),
    Mutant(
        "what a root says of another decision's sums is not heard",
        "coordinator/rounds/comparing.py",
        "if self._decision is None or decision_no != self._decision.decision_no or self._free:",
        "if self._decision is None or self._free:",
        JUDGED,
    ),
    Mutant(
        "a captured group is out as a whole",
        "coordinator/rounds/in_flight.py",
        "return own | {m: why for group, why in self.captured.items() for m in self.groups.members[group]}",
        "return own",
        LIARS,
    ),
    Mutant(
        "in a captured group nobody is suspected",
        "coordinator/rounds/in_flight.py",
        "if self.groups.of[member] not in self.captured",
        "",
        LIARS,
    ),
    Mutant(
        "a sum longer than its members' lengths allow has its group out",
        "coordinator/rounds/screening.py",
        "if times > SUM_LONGER and times > SUM_UNLIKE * usual:",
        "if False:",
        JUDGED,
    ),
    Mutant(
        "in a mesh the guard sees the norm of the whole sum",
        "coordinator/rounds/in_flight.py",
        "made = guarded({m: weights[m] for m in included}, norm, tokens, self.rules.merge)",
        "made = guarded({m: weights[m] for m in included}, 0.0, tokens, self.rules.merge)",
        LIARS,
    ),
    Mutant(
        "in a mesh a commit is told whole to a few alone",
        "coordinator/run/settling.py",
        "return commit if self._core.is_keeper(member.peer) else own_part(commit, member.peer)",
        "return commit",
        ("tests/whole/test_large_runs.py",),
    ),
    Mutant(
        "in a mesh a member is told of those alone that it exchanges frames with",
        "coordinator/run/conductor.py",
        "core.acquaint(Groups(plan).circles)",
        "core.acquaint([peers])",
        ("tests/whole/test_large_runs.py",),
    ),
)
