"""The fence: who was deposed writes nothing any more, whatever it believes; and who leads knows when that is over."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farflung.coordinator.ledger.records import Folded, Paused, Record
from farflung.coordinator.standby import etcd_store
from farflung.coordinator.standby.etcd_store import EtcdStore
from farflung.coordinator.standby.etcd_url import StoreUrl
from farflung.coordinator.standby.gateway import EtcdGateway, Json, StoreOutcome, put
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Deposed, FarflungError, Unreachable, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import exit_codes
from rig.etcd_cluster import EtcdCluster, Wire, needs_etcd
from rig.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("etcd"), needs_etcd]
KEY, LONG_S, SHORT_S = bytes(range(32)), 600, 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture
def open_all() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def record(number: int) -> Record:
    return Paused(reason=str(number))


def at(cluster: EtcdCluster, prefix: str, stack: contextlib.ExitStack, **more: object) -> EtcdStore:
    url = StoreUrl.parse(cluster.url(prefix, **more), "demo")  # type: ignore[arg-type]
    store = EtcdStore(url)
    stack.callback(store.close)
    return store


def led(store: EtcdStore) -> EtcdStore:
    assert eventually(lambda: store.try_to_lead("me"), "it leads")
    store.begin(Manifest(), KEY, lambda: bytes(range(16)))
    store.records()
    return store


def stopped(store: EtcdStore) -> None:
    """It lives on and renews nothing, as a machine that stands still."""
    assert store._keeper is not None
    store._keeper.close()


def test_a_write_of_the_old_leader_after_the_takeover_is_refused(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = led(at(cluster, tmp_path.name, open_all, lease_s=SHORT_S))
    old.append([record(1)])
    stopped(old)
    new = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    assert new.records() == [record(1)]
    # Its clock stood still as well: it believes that it leads.
    monkeypatch.setattr(old, "check", lambda: None)
    assert old._lease is not None
    monkeypatch.setattr(old._lease, "left_s", lambda now: 10.0)
    with pytest.raises(Deposed, match="its key was taken away: me leads") as told:
        old.append([record(2)])
    assert exit_codes.code_for(told.value) == exit_codes.DEPOSED == 40
    with pytest.raises(Deposed):
        old.fold(lambda position: etcd_store.Folded(position=position, ledger=b"", digest=b""))
    with pytest.raises(Deposed):
        old.announce(b"me")
    new.append([record(3)])
    assert new.records() == [record(1), record(3)]


def test_nobody_leads_beside_another_one(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    first = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    second = at(cluster, tmp_path.name, open_all, lease_s=LONG_S)
    first.announce(b"a list")
    sight = second.look()
    assert sight.leading is not None and sight.leading.whereabouts == b"a list" and sight.leading.who == "me"
    assert sight.kept is not None and sight.kept.run_id == first.run_id
    assert not second.try_to_lead("second")
    first.close()  # in good order: nobody has to wait for its lease
    assert second.try_to_lead("second")


def test_a_leader_that_is_no_farflung_is_named_as_such(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    store = at(cluster, tmp_path.name, open_all)
    gateway = EtcdGateway(StoreUrl.parse(cluster.url(tmp_path.name), "demo"))
    long = base64.b64encode(bytes(2000)).decode()
    for stranger in (b"\xff", b"[]", json.dumps({"who": "me", "where": long}).encode()):
        gateway.transact([], [put(f"{tmp_path.name}/leader", stranger)], [], 10)
        sight = store.look(10)
        assert sight.leading is not None and sight.leading.who == "somebody who is no farflung"
        assert sight.leading.whereabouts == b"" and not store.try_to_lead("me")
    gateway.close()


def test_many_who_claim_at_once_make_one_leader(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    stores = [at(cluster, tmp_path.name, open_all, lease_s=LONG_S) for _ in range(8)]
    won: list[bool] = []
    threads = [threading.Thread(target=lambda s=each: won.append(s.try_to_lead("x"))) for each in stores]  # type: ignore[misc]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(won) == [False] * 7 + [True]


def answers_lost(monkeypatch: pytest.MonkeyPatch, count: float) -> list[str]:
    """From now on of the first transaction, or of so many, which are carried out.  Those that were, so far."""
    say, lost = EtcdGateway._say, list[str]()

    def losing(self: EtcdGateway, path: str, question: Json, attempt_s: float) -> Json:
        told = say(self, path, question, attempt_s)
        if path.endswith("txn") and len(lost) < count:
            lost.append(path)
            raise TimeoutError("the answer was lost")
        return told

    monkeypatch.setattr(EtcdGateway, "_say", losing)
    return lost


def test_a_write_whose_answer_was_lost_is_written_once(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    lost = answers_lost(monkeypatch, 1)
    store.append([record(1)])
    store.append([record(2)])
    assert lost and store.records() == [record(1), record(2)]


class Delayed:
    """Holds the first transaction, or so many, up in the network; what is sent again comes through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: float = 1) -> None:
        self._say, self._held, self.count = EtcdGateway._say, list[Json](), count
        monkeypatch.setattr(EtcdGateway, "_say", self._delaying())

    def _delaying(self) -> Callable[[EtcdGateway, str, Json, float], Json]:
        def delaying(gateway: EtcdGateway, path: str, question: Json, attempt_s: float) -> Json:
            if path.endswith("txn") and len(self._held) < self.count:
                self._held.append(question)
                raise TimeoutError("held up")
            return self._say(gateway, path, question, attempt_s)

        return delaying

    def arrives(self, store: EtcdStore) -> bool:
        """Late; whether it was carried out."""
        told = self._say(store._gateway, "/v3/kv/txn", self._held[0], 5.0)
        return bool(told.get("succeeded"))


def folded(text: bytes) -> Callable[[int], Folded]:
    return lambda position: Folded(position=position, ledger=text, digest=hash_bytes(text))


def test_an_append_that_arrives_after_a_fold_is_refused(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fold took its key away, so that nothing stands where it would be written a second time."""
    store = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    store.append([record(1)])
    late = Delayed(monkeypatch)
    store.append([record(2)])
    store.fold(folded(b"both"))
    store.append([record(3)])
    assert not late.arrives(store)
    assert store.records() == [folded(b"both")(2), record(3)]


def test_a_fold_that_arrives_after_a_newer_one_is_refused(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    store.append([record(1)])
    late = Delayed(monkeypatch)
    store.fold(folded(b"one"))
    store.append([record(2)])
    store.fold(folded(b"two"))
    assert not late.arrives(store)
    store.append([record(3)])
    assert store.records() == [folded(b"two")(2), record(3)]


def test_a_fold_whose_answer_was_lost_is_known_to_what_is_written_after_it(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    store.append([record(1)])
    lost = answers_lost(monkeypatch, 1)
    store.fold(folded(b"one"))
    store.append([record(2)])
    store.fold(folded(b"two"))
    store.append([record(3)])
    assert lost and store.records() == [folded(b"two")(2), record(3)]
    store.append([record(4)])


def test_records_that_a_fold_has_taken_up_are_not_read_again(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    """Some may have arrived late; parts that they name are gone."""
    store = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    store.append([record(1), record(2)])
    store.fold(folded(b"both"))
    gateway = EtcdGateway(StoreUrl.parse(cluster.url(tmp_path.name), "demo"))
    for number in (1, 2):
        key = f"{tmp_path.name}/j/{number:016x}"
        gateway.transact([], [put(key, f"pj/{number:016x} 2".encode())], [], 10)
    gateway.close()
    store.append([record(3)])
    assert store.records() == [folded(b"both")(2), record(3)]


# ---- a claim whose answer was lost ----------------------------------------------------------------------------


def test_a_claim_whose_answers_were_lost_keeps_nobody_waiting(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease would last for ten minutes, and nobody renews it."""
    store, other = (at(cluster, tmp_path.name, open_all, lease_s=LONG_S) for _ in range(2))
    with monkeypatch.context() as while_it_claims:
        answers_lost(while_it_claims, math.inf)
        with pytest.raises(Unreachable):
            store.try_to_lead("me")
    assert other.look().leading is not None, "it was carried out"
    assert store.look().leading is None
    assert store.try_to_lead("me")
    assert other.look().leading is not None


def test_a_claim_whose_answers_were_lost_is_taken_back_by_who_is_stopped(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (at(cluster, tmp_path.name, open_all, lease_s=LONG_S) for _ in range(2))
    late = Delayed(monkeypatch, math.inf)
    with pytest.raises(Unreachable):
        store.try_to_lead("me")
    store.close()
    late.count = 0
    with pytest.raises(UserError, match="lease not found"):
        late.arrives(other)
    assert other.look(10).leading is None


def test_a_leader_that_looks_leads_on(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    store = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    for _ in range(2):
        sight = store.look()
        assert sight.leading is not None and sight.leading.who == "me"


def test_a_leader_that_is_cut_from_its_store_ends_within_its_lease(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    wire = Wire(cluster.hosts[0])
    open_all.callback(wire.close)
    store = led(at(cluster, tmp_path.name, open_all, hosts=[wire.host], lease_s=SHORT_S))
    store.append([record(1)])
    wire.cut()
    with pytest.raises(Deposed, match="leads no longer: (it could not write within|the store did not renew)"):
        store.append([record(2)])
    eventually(lambda: not_leading(store), "it knows that its lease is over")
    assert led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S)).records() == [record(1)]


def not_leading(store: EtcdStore) -> bool:
    try:
        store.check()
    except Deposed:
        return True
    return False


def test_a_lease_that_is_gone_at_the_store_is_over_at_once(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    store = led(at(cluster, tmp_path.name, open_all, lease_s=4))
    store._revoke()
    eventually(lambda: not_leading(store), "it knows")
    with pytest.raises(Deposed, match="its lease ran out at the store|did not renew"):
        store.append([record(1)])


def test_a_lease_is_kept_alive_as_long_as_it_is_wanted(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    store = led(at(cluster, tmp_path.name, open_all, lease_s=20))
    lease = store._lease
    assert lease is not None
    first = lease._until
    eventually(lambda: lease._until > first + 5, "it was renewed")
    store.append([record(1)])


# ---- what a host may get wrong --------------------------------------------------------------------------------


def test_a_store_that_nobody_answers_at_is_one_line() -> None:
    store = EtcdStore(StoreUrl.parse("etcd://127.0.0.1:9", "demo"))
    with pytest.raises(Unreachable, match=r"etcd://127.0.0.1:9/farflung/demo: no answer within 0.3 s \(127"):
        store.look(0.3)


@pytest.mark.parametrize("host", ["foo..bar", "a" * 64 + ".example", "foo..bar,127.0.0.1:9"])
def test_a_host_that_no_name_server_knows_is_as_one_that_does_not_answer(host: str) -> None:
    store = EtcdStore(StoreUrl.parse(f"etcd://{host}/r", "demo"))
    with pytest.raises(Unreachable, match="no answer within 0.3 s") as told:
        store.look(0.3)
    assert "\n" not in str(told.value)


def test_a_host_that_no_name_server_knows_is_passed_over(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    store = at(cluster, tmp_path.name, open_all, hosts=["foo..bar", *cluster.hosts])
    assert store.look(10).leading is None and store.try_to_lead("me")


@contextlib.contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A service on this machine that says the same whatever it is asked; its HOST:PORT."""

    class Service(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def refused_as_no_etcd(body: bytes, ask: Callable[[EtcdStore], object]) -> None:
    with answering(body) as host, contextlib.ExitStack() as stack:
        store = EtcdStore(StoreUrl.parse(f"etcd://{host}/r", "demo"))
        stack.callback(store.close)
        with pytest.raises(UserError, match=f"no etcd answers at {host}") as told:
            ask(store)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("ask", [EtcdStore.look, EtcdStore.records, lambda store: store.try_to_lead("me")])
@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b'"hello"', b'{"header": 7}', b'{"result": 7}'])
def test_a_service_that_is_no_etcd_is_one_line(body: bytes, ask: Callable[[EtcdStore], object]) -> None:
    refused_as_no_etcd(body, ask)


HEADER = b'{"header": {"revision": "1"}, "succeeded": true, '


@pytest.mark.parametrize(
    "rest, ask",
    [
        (b'"responses": 7}', EtcdStore.look),
        (b'"responses": [{}]}', EtcdStore.look),
        (b'"responses": [7, 7]}', EtcdStore.look),
        (b'"responses": [{"response_range": {"kvs": [{"key": 7}]}}, {}]}', EtcdStore.look),
        (b'"kvs": 7}', EtcdStore.records),
        (b'"kvs": [], "more": true}', EtcdStore.records),
        (b'"kvs": [{"key": "AAA"}]}', EtcdStore.records),
        (b'"ID": "7"}', lambda store: store.try_to_lead("me")),
    ],
)
def test_what_looks_like_an_answer_of_etcd_and_is_none_is_one_line(
    rest: bytes, ask: Callable[[EtcdStore], object]
) -> None:
    refused_as_no_etcd(HEADER + rest, ask)


def test_an_etcd_that_says_why_it_cannot_answer_is_asked_again() -> None:
    """The gateway says so within an answer that has begun well."""
    with answering(b'{"error": {"grpc_code": 14, "message": "etcdserver: no leader"}}') as host:
        gateway = EtcdGateway(StoreUrl.parse(f"etcd://{host}/r", "demo"))
        with pytest.raises(OSError, match="it says: etcdserver: no leader"):
            gateway._say("/v3/lease/keepalive", {"ID": "7"}, 20.0)
        gateway.close()


def test_what_is_no_run_is_refused_and_left_alone(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path
) -> None:
    store = at(cluster, tmp_path.name, open_all)
    gateway = EtcdGateway(StoreUrl.parse(cluster.url(tmp_path.name), "demo"))
    for stranger in (
        b"hello",
        b"{}",
        json.dumps({"format": 4, "run_id": "77", "key": "", "manifest": ""}).encode(),
    ):
        gateway.transact([], [put(f"{tmp_path.name}/run", stranger)], [], 10)
        with pytest.raises(UserError, match="no run of farflung's; choose another prefix"):
            store.look(10)
    newer = {"format": 99, "run_id": "77", "key": "", "manifest": "{}"}
    gateway.transact(
        [], [put(f"{tmp_path.name}/run", json.dumps(newer | {"run_id": "00" * 16}).encode())], [], 10
    )
    with pytest.raises(UserError, match="begun by another farflung, in format 99"):
        store.look(10)
    gateway.close()


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("j/0000000000000009", b"w\x93\x04\xc4\x0212\x90", "record 2 is missing"),
        ("j/0000000000000002", b"?", "record 2 cannot be read"),
        ("j/0000000000000002", b"pj/7 2", "record 2 cannot be read"),
        ("j/0000000000000002", b"w\x92\x63\x91\xc4\x00", "written in format 99"),
        (
            "j/0000000000000002",
            b"w\x92\x03\x91\xc4\x01\xff",
            "written in format 3, this farflung reads format 4",
        ),
        (
            "j/0000000000000002",
            b"w\x93\x04\xc4\x0212\x91\xc4\x01\xff",
            "records 2 to 2 do not match their checksum",
        ),
    ],
)
def test_damaged_records_are_refused_in_words(
    cluster: EtcdCluster, open_all: contextlib.ExitStack, tmp_path: Path, key: str, value: bytes, told: str
) -> None:
    store = led(at(cluster, tmp_path.name, open_all, lease_s=LONG_S))
    store.append([record(1)])
    gateway = EtcdGateway(StoreUrl.parse(cluster.url(tmp_path.name), "demo"))
    gateway.transact([], [put(f"{tmp_path.name}/{key}", value)], [], 10)
    gateway.close()
    with pytest.raises(UserError, match=told):
        store.records()


def test_passwords_are_asked_for_and_never_told(open_all: contextlib.ExitStack, tmp_path: Path) -> None:
    cluster = open_all.enter_context(EtcdCluster(tmp_path / "locked"))
    gateway = EtcdGateway(StoreUrl.parse(cluster.url(), "demo"))
    for path, question in (
        ("user/add", {"name": "root", "password": "se:cret@"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        try:
            gateway.ask(f"/v3/auth/{path}", question, 20)
        except (
            FarflungError
        ) as error:  # asked once more, since the answer was late: it was done the first time
            assert re.search("already exists|user name is empty", str(error)), error
    gateway.close()
    bare = cluster.url().removeprefix("etcd://")
    store = EtcdStore(StoreUrl.parse(f"etcd://root:se%3Acret%40@{bare}", "demo"))
    open_all.callback(store.close)
    led(store).append([record(1)])
    assert store.records() == [record(1)] and "cret" not in store.where + repr(store._url)
    store._gateway._token = "etcd has forgotten this one"
    store.append([record(2)])
    for who, why in (("", "user name is empty"), ("root:wrong@", "invalid user ID or password")):
        other = EtcdStore(StoreUrl.parse(f"etcd://{who}{bare}", "demo"))
        open_all.callback(other.close)
        with pytest.raises(FarflungError, match=why) as told:
            other.look(10)
        assert "wrong" not in str(told.value)


def test_an_answer_that_is_no_etcd_is_one_line() -> None:
    gateway = EtcdGateway(StoreUrl.parse("etcd://127.0.0.1:9", "demo"))
    assert "is this etcd 3.4 or newer?" in str(gateway._refusal(404, b"<html>"))
    assert isinstance(gateway._refusal(503, b"busy"), OSError)
    assert "database space exceeded" in str(
        gateway._refusal(429, b'{"code": 8, "message": "etcdserver: mvcc: database space exceeded"}')
    )
    assert StoreOutcome(False, ()).answers == ()
