"""Two coordinators of one run: the second stands by, names the first to who asks, and leads when that one is gone."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farflung.console.doctor.facts import ask_each
from farflung.console.screen.status_client import StatusClient
from farflung.coordinator.door.keys import FILE_NAME, load_or_create
from farflung.coordinator.hosting import Hosting, serve
from farflung.coordinator.ledger.records import Started
from farflung.coordinator.run_files import read_manifest
from farflung.coordinator.standby import standby
from farflung.coordinator.standby.etcd_store import EtcdStore
from farflung.coordinator.standby.etcd_url import StoreUrl
from farflung.protocol.errors import Refused, Unreachable, UserError
from farflung.protocol.join_url import Address, JoinUrl
from rig.etcd_cluster import EtcdCluster, needs_etcd
from rig.ports import free_ports
from rig.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("etcd"), needs_etcd]
LONG_S, SHORT_S = 600, 2

SERVE = """
import sys
from pathlib import Path
from farflung.console import main
sys.argv = ["farflung", "coordinate", *sys.argv[1:]]
sys.exit(main.main())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


class Two:
    """The processes a and b, each with a folder, and with one key."""

    def __init__(self, folder: Path, cluster: EtcdCluster) -> None:
        self.folder, self._cluster = folder, cluster
        (folder / "run.toml").write_text('run.name = "demo"')
        self.ports = {name: next(free_ports()) for name in "ab"}
        self.running: dict[str, subprocess.Popen[str]] = {}
        for name in "ab":
            (folder / name).mkdir()
        self.key = load_or_create(folder / "a").public_raw
        shutil.copy(folder / "a" / FILE_NAME, folder / "b" / FILE_NAME)

    def start(self, name: str, lease_s: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", SERVE, str(self.folder / "run.toml"), "--plain", "--json"]
        words += ["--data", str(self.folder / name), "--listen", f"127.0.0.1:{self.ports[name]}"]
        words += ["--store", self._cluster.url(self.folder.name, lease_s=lease_s)]
        with self.log(name).open("a") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.running[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def leads(self, name: str) -> JoinUrl:
        out = self.running[name].stdout
        assert out is not None
        line = out.readline()
        assert '"url"' in line, self.log(name).read_text()
        return self.url(name)

    def stands_by(self, name: str) -> None:
        eventually(lambda: "stands by: " in self.log(name).read_text(), f"{name} stands by")

    def url(self, name: str) -> JoinUrl:
        """By which this one is asked, and no other."""
        return JoinUrl.at((Address("127.0.0.1", self.ports[name]),), "demo", self.key)

    def status(self, name: str) -> dict[str, Any]:
        with StatusClient(self.url(name)) as client:
            return client.fetch(PATIENCE_S)

    def started(self) -> list[int]:
        store = EtcdStore(StoreUrl.parse(self._cluster.url(self.folder.name), "demo"))
        try:
            return [each.incarnation for each in store.records() if isinstance(each, Started)]
        finally:
            store.close()


@pytest.fixture
def two(tmp_path: Path, cluster: EtcdCluster) -> Iterator[Two]:
    made = Two(tmp_path, cluster)
    try:
        yield made
    finally:
        for process in made.running.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_standby_names_the_leader_and_takes_over_when_it_is_killed(two: Two) -> None:
    two.start("a", SHORT_S)
    two.leads("a")
    two.start("b", SHORT_S)
    two.stands_by("b")
    by_a = two.status("a")
    by_b = two.status("b")  # it is a's: the standby said where to ask
    assert not ask_each(two.url("b"), PATIENCE_S)[0].problem, (
        "the doctor takes it for an address that is good"
    )
    assert by_b["run_id"] == by_a["run_id"]
    two.running["a"].send_signal(signal.SIGKILL)
    two.running["a"].wait()
    two.leads("b")
    assert two.status("b")["run_id"] == by_a["run_id"] and two.started() == [1, 2]
    two.start("a", SHORT_S)
    two.stands_by("a")


def test_a_leader_that_is_stopped_hands_over_at_once(two: Two) -> None:
    """Its lease would last for ten minutes."""
    two.start("a", LONG_S)
    two.leads("a")
    two.start("b", LONG_S)
    two.stands_by("b")
    two.running["a"].send_signal(signal.SIGTERM)
    assert two.running["a"].wait(PATIENCE_S) == 0
    two.leads("b")
    assert two.started() == [1, 2]


def test_a_standby_ends_when_it_is_asked_to(two: Two) -> None:
    two.start("a", LONG_S)
    two.leads("a")
    standing_by = two.start("b", LONG_S)
    two.stands_by("b")
    standing_by.send_signal(signal.SIGINT)
    assert standing_by.wait(PATIENCE_S) == 0
    assert two.status("a")["run"] == "demo"


def test_who_asks_a_standby_while_nobody_leads_is_told_so(two: Two, cluster: EtcdCluster) -> None:
    """Of a leader that never said where it is."""
    store = EtcdStore(StoreUrl.parse(cluster.url(two.folder.name, lease_s=LONG_S), "demo"))
    try:
        assert store.try_to_lead("somebody")
        store.begin(read_manifest(two.folder / "run.toml", ()), two.key, lambda: b"r" * 16)
        two.start("b", LONG_S)
        two.stands_by("b")
        with pytest.raises(Refused, match="nobody leads the run at this moment") as told:
            two.status("b")
        assert told.value.retry_after_s > 0
    finally:
        store.close()
    two.leads("b")


# ---- what a host may get wrong --------------------------------------------------------------------------------


def host(two: Two, data: str, store: str | None) -> None:
    asked = Hosting(
        two.folder / "run.toml", two.folder / data, "127.0.0.1:0", exit_when_done=True, store=store
    )
    serve(asked, lambda url: pytest.fail("it began to lead"))


def test_mistakes_are_one_line_each_and_nothing_is_lost(
    two: Two, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = cluster.url(two.folder.name, lease_s=LONG_S)
    two.start("a", LONG_S)
    two.leads("a")
    (two.folder / "empty").mkdir()
    (two.folder / "old").mkdir()
    (two.folder / "old" / "journal.sqlite").touch()
    load_or_create(two.folder / "old")
    (two.folder / "other").mkdir()
    load_or_create(two.folder / "other")
    with pytest.raises(UserError, match="empty has no coordinator.key; copy that file"):
        host(two, "empty", here)
    assert not (two.folder / "empty" / FILE_NAME).exists(), "a new key would be another URL"
    with pytest.raises(UserError, match="began with another coordinator.key"):
        host(two, "other", here)
    with pytest.raises(UserError, match="here lies the journal of a run, which is not moved into a store"):
        host(two, "old", here)
    with pytest.raises(UserError, match="another coordinator .* has this journal open"):
        host(two, "a", here)
    (two.folder / "run.toml").write_text('run.name = "demo"\nround.sync_every = 7')
    with pytest.raises(UserError, match="other rules: .*sync_every is 7"):
        host(two, "b", here)
    (two.folder / "run.toml").write_text('run.name = "demo"')
    two.running["a"].send_signal(signal.SIGTERM)
    assert two.running["a"].wait(PATIENCE_S) == 0
    with pytest.raises(UserError, match="run .*, whose folder this is, is not kept there"):
        host(two, "a", cluster.url(two.folder.name + "-mistyped"))
    with pytest.raises(UserError, match="this run is kept elsewhere .*: name that with --store"):
        host(two, "a", None)
    monkeypatch.setattr(standby, "START_PATIENCE_S", 0.0)
    with pytest.raises(Unreachable, match="is etcd running there, and does a firewall let it through"):
        host(two, "a", "etcd://127.0.0.1:9")
    with pytest.raises(UserError, match="--store: expected etcd://"):
        host(two, "a", "postgres://h")
    assert two.started() == [1]
