"""Which class of a round a plan asks for: a flat one, or one in groups, which is a mode.  Pure."""

from __future__ import annotations

from farflung.collectives.round.member import MemberRound
from farflung.protocol.process.mode_folders import module_of
from farflung.protocol.round_words import Plan

IN_GROUPS = "farflung.collectives.mesh.mesh_round"


def class_of(plan: Plan, me: str, chunks: int) -> type[MemberRound] | None:
    """None: it is no plan of so many chunks in which I have a part, or I can't take part in it."""
    found: type[MemberRound] | None = MemberRound
    if plan.column:
        module = module_of(IN_GROUPS)
        found = module.MeshRound if module is not None else None
    return found if found is not None and found.roles_of(me, plan).fits(chunks) else None
