"""Mutants of rounds in groups: who inherits what, which sums are added up.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

MESH = ("tests/whole/test_mesh.py",)

MESHES = (
    Mutant(
        "in a mesh a sum of a decision before is worth nothing",
        "collectives/round/member.py",
        "self._sums.clear()",
        "pass",
        MESH,
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
)
