"""Which class of a round a plan asks for: a flat one, or one in groups, which is a mode.  Pure."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from farflung.collectives.round.member import MemberRound
from farflung.protocol.round_words import Plan

IN_GROUPS = "farflung.collectives.mesh.mesh_round"


@functools.cache
def module_of(name: str) -> ModuleType | None:
    """Where a mode at a peer begins.  None: its folder was taken out.  What fails within the folder fails here."""
    folder = name.rpartition(".")[0]
    return importlib.import_module(name) if importlib.util.find_spec(folder) is not None else None


def class_of(plan: Plan, me: str, chunks: int) -> type[MemberRound] | None:
    """None: it is no plan of so many chunks in which I have a part, or I can't take part in it."""
    found: type[MemberRound] | None = MemberRound
    if plan.column:
        module = module_of(IN_GROUPS)
        found = module.MeshRound if module is not None else None
    return found if found is not None and found.roles_of(me, plan).fits(chunks) else None
