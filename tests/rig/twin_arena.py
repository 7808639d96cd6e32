"""An arena with two coordinators, anna and berta, whose records are in etcd: one leads, the other stands by.

Used by tests/chaos/test_standby.py and benchmarks/standby.py.  Each may have wires of its own to the cluster, which can
be cut.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from farflung.coordinator.door.keys import FILE_NAME, load_or_create
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.process.journal import Event
from rig.arena import Arena, Party, included
from rig.etcd_cluster import EtcdCluster, Wire
from rig.nursery import Nursery
from rig.ports import free_ports

HOSTS = ("anna", "berta")


class TwinArena(Arena):
    def __init__(
        self, folder: Path, nursery: Nursery, cluster: EtcdCluster, lease_s: int = 0, **rules: object
    ) -> None:
        super().__init__(folder, nursery, **rules)
        self.cluster, self._lease_s = cluster, lease_s
        self.leads = HOSTS[0]
        self.ports = {name: next(free_ports()) for name in HOSTS}
        self.wires: dict[str, list[Wire]] = {}
        self._begins: dict[str, int] = {}  # where the log of its newest life does
        for name in HOSTS:
            self.data(name).mkdir()
        load_or_create(self.data(HOSTS[0]))
        shutil.copy(self.data(HOSTS[0]) / FILE_NAME, self.data(HOSTS[1]) / FILE_NAME)
        key = load_or_create(self.data(HOSTS[0])).public_raw
        places = tuple(Address("127.0.0.1", self.ports[name]) for name in HOSTS)
        self.url = str(JoinUrl.at(places, "arena", key))

    def data(self, name: str) -> Path:
        return self.folder / f"{name}.data"

    @property
    def coordinator(self) -> Party:
        """Whoever leads, by the test's own book."""
        return self.parties[self.leads]

    def words_of(self, name: str, hosts: Sequence[str] = ()) -> list[str]:
        words = ["coordinate", str(self.folder / "run.toml"), "--data", str(self.data(name))]
        words += ["--listen", f"127.0.0.1:{self.ports[name]}", "--plain"]
        for each in sorted(HOSTS, key=lambda host: host != name):
            words += ["--public", f"127.0.0.1:{self.ports[each]}"]
        return [*words, "--store", self.cluster.url("arena", hosts, self._lease_s)]

    def host(self, name: str, wired: bool = False, failpoints: str = "") -> Party:
        """Start one of them; `wired`: by lines that `cut` cuts."""
        if wired and name not in self.wires:
            self.wires[name] = [Wire(each) for each in self.cluster.hosts]
        party = self._party(name, self.data(name) / "events.jsonl")
        party.look()
        self._begins[name] = party.log.stat().st_size if party.log.exists() else 0
        hosts = [each.host for each in self.wires.get(name, [])]
        party.process = self._start(party, self.words_of(name, hosts), failpoints, {})
        return party

    def host_both(self, wired: bool = False) -> None:
        """The one that the book says leads; the other stands by."""
        first, second = self.leads, self.other
        self.host(first, wired)
        self.until(lambda: self._said_last(first) == "peers join with", f"{first} leads")
        self.host(second)
        self.stands_by(second)

    @property
    def other(self) -> str:
        return next(name for name in HOSTS if name != self.leads)

    def stands_by(self, name: str) -> None:
        self.until(lambda: self._said_last(name) == "stands by", f"{name} stands by")

    def _said_last(self, name: str) -> str:
        """Which of the two it told last that it does, in this life."""
        told = self.parties[name].log.read_bytes()[self._begins[name] :].decode(errors="replace")
        found = re.findall(r"stands by(?=:)|peers join with", told)
        return found[-1] if found else ""

    def led_by(self, name: str, since: float) -> float:
        """When it began to lead, by its journal."""
        self.leads = name
        party = self.parties[name]
        start = self.event(party, lambda e: e["event"] == "start", f"{name} leads", since)
        return float(start["at"])

    def commit(self, since: float, what: str = "the next commit", of: str = "") -> Event:
        """Made by whoever leads: not one that it found, and wrote down when it began."""

        def wanted(each: Event) -> bool:
            made = each["event"] == "committed" and "late" not in each
            return made and (not of or of in included(each))

        return self.event(self.coordinator, wanted, what, since)

    def cut(self, name: str) -> None:
        for each in self.wires[name]:
            each.cut()

    def close(self) -> None:
        super().close()
        for name in HOSTS:
            self._end(name)
        for wires in self.wires.values():
            for each in wires:
                each.close()
