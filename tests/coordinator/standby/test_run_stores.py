"""One suite for all that keep a run's records: what was acknowledged is there, in order, for whoever leads next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farflung.coordinator.ledger import journal as journal_module
from farflung.coordinator.ledger.journal import Journal
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import Amended, Folded, Paused, Record, Started
from farflung.coordinator.ledger.run_store import RunStore
from farflung.coordinator.standby import etcd_store
from farflung.coordinator.standby.etcd_store import EtcdStore
from farflung.coordinator.standby.etcd_url import StoreUrl
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest, RoundSection
from rig.amended import PERIOD_10, PERIOD_20, terms_of
from rig.etcd_cluster import MISSING, EtcdCluster, needs_etcd

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("etcd")]
KEY = bytes(range(32))
LEASE_S = 600  # what is asked here is not how long it lasts
Opening = Callable[..., RunStore]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture(params=["folder", pytest.param("etcd", marks=needs_etcd)])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Opening:
    """Each call is what another process would open in the same place, once the one before is closed."""
    if request.param == "folder":
        return lambda manifest=None: Journal.open_or_create(
            tmp_path / "j", manifest or Manifest(), lambda: bytes(range(16))
        )
    hosts: EtcdCluster = request.getfixturevalue("cluster")

    def open_it(manifest: Manifest | None = None) -> RunStore:
        return led(hosts, tmp_path.name, manifest)

    return open_it


def led(cluster: EtcdCluster, prefix: str, manifest: Manifest | None = None) -> EtcdStore:
    store = EtcdStore(StoreUrl.parse(cluster.url(prefix, lease_s=LEASE_S), "demo"))
    try:
        assert store.try_to_lead("me"), "nobody else leads"
        store.begin(manifest or Manifest(), KEY, lambda: bytes(range(16)))
    except UserError:
        store.close()
        raise
    return store


@contextmanager
def closing(store: RunStore) -> Iterator[RunStore]:
    try:
        yield store
    finally:
        store.close()


def record(number: int, size: int = 10) -> Record:
    return Paused(reason=f"{number} " + "x" * size)


def fold(store: RunStore) -> list[Folded]:
    ledger = Ledger(LedgerRules(256, 8))
    made: list[Folded] = []

    def folded(position: int) -> Folded:
        made.append(ledger.folded(position))
        return made[-1]

    store.fold(folded)
    return made


def test_what_was_appended_is_there_in_order(opening: Opening) -> None:
    with closing(opening()) as store:
        assert store.records() == []
        store.append([Started(incarnation=1), record(1)])
        store.append([record(2)])
        run_id = store.run_id
    with closing(opening()) as store:
        assert store.records() == [Started(incarnation=1), record(1), record(2)]
        assert store.run_id == run_id
        store.append([record(3)])
        assert store.records()[-1] == record(3)


def test_a_turn_with_megabytes_of_records_is_there_as_a_whole(opening: Opening) -> None:
    many = [record(number, 100_000) for number in range(40)]
    with closing(opening()) as store:
        store.records()
        store.append([record(0)])
        store.append(many)
        store.append([record(41)])
    with closing(opening()) as store:
        assert store.records() == [record(0), *many, record(41)]


@pytest.mark.parametrize("part_bytes", [1 << 20, 100])
def test_a_fold_takes_the_place_of_what_was_before_it(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(etcd_store, "PART_BYTES", part_bytes)
    with closing(opening()) as store:
        store.records()
        store.append([record(1), record(2)])
        store.append([record(3)])
        [first] = fold(store)
        assert first.position == 3
        store.append([record(4)])
        assert store.records() == [first, record(4)]
        [second] = fold(store)
        assert second.position == 4
    with closing(opening()) as store:
        assert store.records() == [second]
        store.append([record(5)])
        assert store.records() == [second, record(5)]


def test_a_long_store_says_that_it_is(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (journal_module, etcd_store):
        monkeypatch.setattr(module, "FOLD_AFTER_BYTES", 5000)
    with closing(opening()) as store:
        store.records()
        store.append([record(1)])
        assert not store.is_long
        store.append([record(2, 5000)])
        assert store.is_long
        fold(store)
        assert not store.is_long


def test_more_records_than_one_answer_of_a_store_holds(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.coordinator.standby.gateway.PAGE", 3)
    with closing(opening()) as store:
        store.records()
        for number in range(10):
            store.append([record(number)])
        assert store.records() == [record(number) for number in range(10)]


def test_other_rules_are_refused_and_nothing_is_lost(opening: Opening) -> None:
    with closing(opening()) as store:
        store.records()
        store.append([record(1)])
    with pytest.raises(UserError, match=r"other rules: \[round\] sync_every is 77"):
        opening(Manifest(round=RoundSection(sync_every=77)))
    with closing(opening()) as store:
        assert store.records() == [record(1)]


def test_the_file_of_any_of_its_amendments_is_the_runs(opening: Opening) -> None:
    """Who stands by may have begun with it before the host amended the run once more."""
    terms = terms_of((0, PERIOD_10), (0, PERIOD_20))
    with closing(opening()) as store:
        store.records()
        store.append([Amended(amendment=each, at_s=0.0) for each in terms.amendments])
    for sync_every in (50, 10, 20):
        with closing(opening(Manifest(round=RoundSection(sync_every=sync_every)))) as store:
            assert store.manifest.digest == Manifest().digest, (
                "the run is the same, with all that was amended"
            )
    with pytest.raises(
        UserError, match=r"with 2 amendments: \[round\] sync_every is 30 in the file given, 20 in"
    ):
        opening(Manifest(round=RoundSection(sync_every=30)))


def test_who_may_act_is_not_stopped(opening: Opening) -> None:
    with closing(opening()) as store:
        store.records()
        store.check()
        store.announce(b"signed")
        store.check()
        assert store.where and not store.restored


def test_the_reason_is_told_where_there_is_no_etcd() -> None:
    assert MISSING.startswith("NOT RUN: etcd is not installed")
