"""A coordinator whose etcd is an older state of itself, or empty, asks the peers before it goes on, as its leader."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from farflung.coordinator.door.keys import FILE_NAME, CoordinatorKeys, load_or_create
from farflung.coordinator.door.listener import ListenOn
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import Record
from farflung.coordinator.restoring import restoration, restoring_door
from farflung.coordinator.restoring.kept_books import KeptSteps, Restored
from farflung.coordinator.run.machine import RunMachine
from farflung.coordinator.run_lead import BELONGS_NAME, RunLead, StoreOptions, held
from farflung.coordinator.standby.etcd_store import EtcdStore
from farflung.coordinator.standby.etcd_url import StoreUrl
from farflung.peer.line.control import ControlLink
from farflung.protocol.errors import Counters, Deposed, UserError
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.messages import Knock, Refuse
from farflung.protocol.mode_words import AskKept
from rig.etcd_cluster import EtcdCluster, needs_etcd
from rig.lost_run import MANIFEST, RUN_ID, Host, keeper, key_of
from rig.ports import free_ports
from rig.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("etcd"), needs_etcd]
LEASE_S, PATIENCE_S = 2, 3.0  # it asks for longer than its lease lasts unless that is renewed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


class Place:
    """A data folder with a key, a prefix in etcd, and a run of five commits that peers have heard of."""

    def __init__(self, folder: Path, cluster: EtcdCluster) -> None:
        self.folder, self._url = folder, cluster.url(folder.name, lease_s=LEASE_S)
        self.keys: CoordinatorKeys = load_or_create(folder)
        assert self.keys.signing is not None
        self.port = next(free_ports())
        self.host = Host(key=self.keys.signing)
        self.snapshot: list[Record] = []
        for _ in range(5):
            self.snapshot = list(self.host.records)
            self.host.commit()

    def store(self) -> EtcdStore:
        return EtcdStore(StoreUrl.parse(self._url, "lost"))

    def kept(self) -> list[Record]:
        with contextlib.closing(self.store()) as store:
            return store.records()

    def keep(self, records: list[Record]) -> None:
        """As etcd has them once its snapshot was restored."""
        with contextlib.closing(self.store()) as store:
            assert store.try_to_lead("somebody before")
            store.begin(MANIFEST, self.keys.public_raw, lambda: RUN_ID)
            store.records()
            store.append(records)

    @contextlib.contextmanager
    def restored(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[RunLead | None]:
        listen = ListenOn("127.0.0.1", self.port)
        with held(
            StoreOptions(self.folder, MANIFEST, listen, self._url, True, lambda port: ()), stopped
        ) as found:
            yield found

    @contextlib.contextmanager
    def ann(self) -> Iterator[None]:
        """A peer that knocks until it is asked, and shows all that it keeps."""
        url = JoinUrl.at((Address("127.0.0.1", self.port),), "lost", self.keys.public_raw)
        ended = threading.Event()
        thread = threading.Thread(target=_shows, args=(url, self.host, ended))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _shows(url: JoinUrl, host: Host, ended: threading.Event) -> None:
    kept, knock = keeper(1, host), Knock(protocol=PROTOCOL_VERSION, run="lost")
    with zmq.Context() as context, contextlib.closing(_link(context, url)) as link:
        again_at = 0.0
        while not ended.wait(0.02):
            if time.monotonic() >= again_at:
                link.to_door(knock)
                again_at = time.monotonic() + 1.0
            link.on_tick()
            for message in link.receive():
                if isinstance(message, AskKept):
                    link.to_door(kept.answer(message, key_of(1).sign))
                elif isinstance(message, Refuse):
                    again_at = time.monotonic() + 1.0


def _link(context: zmq.Context[zmq.Socket[bytes]], url: JoinUrl) -> ControlLink:
    return ControlLink(context, url, zmq.curve_keypair(), Counters())


@pytest.fixture
def place(tmp_path: Path, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(restoration, "PATIENCE_S", PATIENCE_S)
    return Place(tmp_path, cluster)


def ledger_of(records: list[Record]) -> Ledger:
    ledger = Ledger(LedgerRules(8, 4))
    for each in records:
        ledger.apply(each)
    return ledger


def test_what_came_after_the_snapshot_is_there_before_the_run_goes_on(place: Place) -> None:
    place.keep(place.snapshot)
    assert ledger_of(place.kept()).version == 4
    with place.ann(), place.restored() as found:
        assert found is not None
        records = found.store.records()
        assert records[:-1] == place.snapshot and isinstance(records[-1], Restored)
        run = RunMachine(found.store.manifest, found.store.run_id, records, bytes)
        run.core.prove = found.keys.prove
        newest = place.host.told[-1].kept
        assert newest is not None
        run.modes["restoring"].hear_of(newest.head)
        assert run.core.ledger.version == 5 and not run.core.held, "its peers know of nothing newer"
        found.store.append([Restored(kept=None, reason="it leads still", given_up=(0, 0))])


def test_an_etcd_that_is_empty_gets_the_run_from_its_peers(place: Place) -> None:
    """The folder may have been of that run before, and says so."""
    (place.folder / BELONGS_NAME).write_text(f"{RUN_ID.hex()} etcd://gone")
    with place.ann(), place.restored() as found:
        assert found is not None and found.store.run_id == RUN_ID
        ledger = ledger_of(found.store.records())
        assert ledger.version == 5 and KeptSteps.of(ledger).link == KeptSteps.of(place.host.ledger).link
        assert (place.folder / BELONGS_NAME).read_text() == f"{RUN_ID.hex()} {found.store.where}\n"


def test_the_run_of_another_folder_is_not_put_into_this_ones_store(place: Place) -> None:
    (place.folder / BELONGS_NAME).write_text(f"{'07' * 16} etcd://gone")
    why = f"folder of run {'07' * 16}, and peers give back run {RUN_ID.hex()}"
    with pytest.raises(UserError, match=why), place.ann(), place.restored():
        pytest.fail("it leads")
    assert place.kept() == []
    with contextlib.closing(place.store()) as store:
        assert store.look().kept is None


def test_an_empty_etcd_and_no_key_is_one_line(place: Place) -> None:
    (place.folder / FILE_NAME).unlink()
    why = "--restored: .* has no coordinator.key; put a copy of it"
    until = time.monotonic() + PATIENCE_S
    with pytest.raises(UserError, match=why), place.restored(lambda: time.monotonic() > until):
        pytest.fail("it waits for peers that can't believe it")
    assert not (place.folder / FILE_NAME).exists(), "a new key would be another URL"


def test_nobody_writes_what_was_found_once_the_lease_is_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.keep(place.snapshot)
    monkeypatch.setattr(restoration, "PATIENCE_S", 30.0)
    monkeypatch.setattr("farflung.coordinator.standby.etcd_store.LeaseKeeper._renew", lambda keeper: None)
    began = time.monotonic()
    why = "did not renew its lease of 2 s in time"
    with pytest.raises(Deposed, match=why), place.ann(), place.restored():
        pytest.fail("it leads")
    assert time.monotonic() - began < 25.0, "it ends with its lease, and not with its patience"
    assert place.kept() == place.snapshot


def test_who_is_stopped_while_it_asks_writes_nothing_and_keeps_nobody_waiting(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.keep(place.snapshot)
    asks = threading.Event()
    ask_peers = restoring_door.ask_peers

    def noting(*words: object) -> object:
        asks.set()
        return ask_peers(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(restoring_door, "ask_peers", noting)
    with place.restored(asks.is_set) as found:
        assert found is None
    with contextlib.closing(place.store()) as store:
        assert store.look().leading is None and store.records() == place.snapshot


def test_nobody_else_leads_while_it_asks(place: Place) -> None:
    place.keep(place.snapshot)
    stopped, led = threading.Event(), list[bool]()

    def asking() -> None:
        with place.restored(stopped.is_set) as found:
            led.append(found is not None)

    thread = threading.Thread(target=asking)
    thread.start()
    try:
        with contextlib.closing(place.store()) as other:
            eventually(lambda: other.look().leading is not None, "it leads")
            until = time.monotonic() + 2 * LEASE_S
            while time.monotonic() < until:
                assert other.look().leading is not None and not other.try_to_lead("another one")
                time.sleep(0.2)
    finally:
        stopped.set()
        thread.join()
    assert led == [False]
