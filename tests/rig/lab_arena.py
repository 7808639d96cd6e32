"""An arena (arena.py) whose parties stand in hosts of the lab: the network between them can be cut, in any way.

    with Lab([HostSpec("coordinator"), HostSpec("ann"), ...]) as lab, LabArena(folder, lab) as arena: ...

Used by tests/chaos/test_partitions.py.  Each host has a nursery of its own, since a process stays in the host in which
it was started.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rig.arena import Arena
from rig.lab.emulator import Lab
from rig.nursery import Nursery


class LabArena(Arena):
    def __init__(self, folder: Path, lab: Lab, **rules: object) -> None:
        self._stack = ExitStack()
        self._nurseries: dict[str, Nursery] = {}
        for name, host in lab.hosts.items():
            place = folder / f"{name}.nursery"
            place.mkdir(parents=True)
            self._nurseries[name] = self._stack.enter_context(Nursery(place, host.command))
        super().__init__(folder / "run", self._nurseries["coordinator"], **rules)
        self.address = lab.hosts["coordinator"].address

    def nursery_of(self, name: str) -> Nursery:
        return self._nurseries[name]

    def __enter__(self) -> LabArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._stack.close()
