"""The mesh: rounds of more members than can all talk with each other, in groups.  Where the mode begins.  Pure.

The core knows a round as groups, of which a flat round has one; this says who is in which, what each hears of it, and
what becomes of the groups' sums.  Without this folder a run with `[round] group` is refused.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from farflung.coordinator.mesh.mesh_sums import MeshSums, drawn, most_of_round
from farflung.coordinator.modes.registry import CoordinatorMode, ModeTools
from farflung.coordinator.rounds.round_policy import RoundPolicy
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver


@dataclass(frozen=True)
class MeshPolicy(RoundPolicy):
    core: Core

    @property
    def _size(self) -> int:
        return self.core.manifest.round.group

    def most(self, able: int) -> int:
        return most_of_round(self._size, able)

    def drawn(self, peers: Sequence[str], able: Set[str], seed: bytes) -> tuple[int, ...]:
        return drawn(peers, able, self._size, seed)

    def sums(self) -> MeshSums:
        return MeshSums()


class Mesh(CoordinatorMode):
    def __init__(self, core: Core) -> None:
        self._core = core

    def policy(self, fragment: int) -> RoundPolicy:
        return MeshPolicy(self._core)


def made(core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> Mesh | None:
    return Mesh(core) if core.manifest.round.group else None
