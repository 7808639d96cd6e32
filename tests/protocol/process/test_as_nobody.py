"""Places that a stranger named: with whom this machine speaks there, what it says, and how much it reads."""

from __future__ import annotations

import gzip
import importlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from farflung.checkpoints.files import Folder
from farflung.peer.data.data_files import DataFiles
from farflung.protocol.errors import StoreError, UserError
from farflung.protocol.process import as_nobody
from rig.web import Web

OURS = (
    "127.0.0.1", "10.1.2.3", "192.168.0.7", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:192.168.0.7", "::ffff:127.0.0.1",
    "2002:c0a8:0007::1", "64:ff9b::c0a8:7", "64:ff9b::7f00:1",
)  # fmt: skip


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as made:
        yield made


@pytest.fixture
def session() -> dict[str, Any]:
    """For file systems of fsspec that ask a test's server, which has no TLS."""
    return {"get_client": as_nobody.guarded_session, "skip_instance_cache": True}


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine counts as the internet."""
    monkeypatch.setattr(as_nobody, "is_public", lambda address: True)


@pytest.mark.parametrize("address", OURS)
def test_no_address_of_this_machine_or_its_networks_is_spoken_with(address: str) -> None:
    assert not as_nobody.is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "52.216.0.1", "2600:1f18::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_what_is_of_the_internet_is(address: str) -> None:
    assert as_nobody.is_public(address)


@pytest.mark.parametrize("place", ["https://localhost:PORT/a.bin", "https://127.0.0.1:PORT/a.bin"])
def test_whoever_is_named_no_connection_is_made_into_networks_of_this_machine(place: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.2)
        named = place.replace("PORT", str(door.getsockname()[1]))
        with pytest.raises(UserError, match=r"127\.0\.0\.1 is an address of this machine|no such file"):
            DataFiles(None).find(named)
        with pytest.raises(StoreError):
            Folder(named.rpartition("/")[0], as_nobody=True).read("", "a.bin", 10)
        with pytest.raises(TimeoutError):
            door.accept()


def test_nobody_is_sent_on_into_a_network_of_this_machine(web: Web, session: Any, monkeypatch: Any) -> None:
    """The first server is anywhere; it sends on to an address that is not."""
    monkeypatch.setattr(as_nobody, "is_public", lambda address: address == "127.0.0.1")
    with socket.create_server(("127.0.0.2", 0)) as door:
        door.settimeout(0.2)
        web.sent_on["/a.bin"] = f"https://127.0.0.2:{door.getsockname()[1]}/private"
        with pytest.raises(Exception, match=r"127\.0\.0\.2"):
            DataFiles(session).find(web.url("/a.bin"))
        with pytest.raises(TimeoutError):
            door.accept()


def test_nobody_is_sent_on_to_where_there_is_no_tls(web: Web, session: Any, anywhere: None) -> None:
    web.sent_on["/a.bin"] = web.url("/private.bin")
    web.files["/private.bin"] = bytes(100)
    with pytest.raises(UserError, match="and a run's data are read over https alone"):
        DataFiles(session).find(web.url("/a.bin"))
    assert not any("private" in each for each in web.asked)
    assert DataFiles({}).find(web.url("/a.bin")), "whoever names a place himself may be sent on"


def test_an_answer_that_is_longer_than_what_was_asked_for_is_not_read(
    web: Web, session: Any, anywhere: None
) -> None:
    web.files["/a.bin"] = bytes(100_000)
    files = DataFiles(session, lambda pause: None)
    (file,) = files.find(web.url("/a.bin"))
    assert files.read([(file, 10, 20)]) == [bytes(10)]
    web.knows_ranges = False
    with pytest.raises(StoreError, match="asked for 10 bytes of it, its server sends 100000"):
        files.read([(file, 10, 20)])


def test_a_list_of_files_has_a_length_too(
    web: Web, session: Any, anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.files["/many/"] = b"<a href='a.bin'>a</a>" * 1000
    monkeypatch.setattr(as_nobody, "PAGE_BYTES_MOST", 1000)
    with pytest.raises(UserError, match="a list of files there has more than 1000 bytes"):
        DataFiles(session).find(web.url("/many/*.bin"))


def test_nothing_is_unpacked(web: Web, session: Any, anywhere: None) -> None:
    """A megabyte of zeros in a kilobyte: it stays a kilobyte."""
    web.files["/a.bin"] = gzip.compress(bytes(1 << 20))
    files = DataFiles(session, lambda pause: None)
    (file,) = files.find(web.url("/a.bin"))
    web.more_headers = {"Content-Encoding": "gzip"}
    assert files.read([(file, 0, 100)])[0] == web.files["/a.bin"][:100]


def test_a_run_s_data_are_read_without_this_machine_s_keys(buckets: Any) -> None:
    private = buckets.new()
    buckets.client.put_object(Bucket=private[5:], Key="a.bin", Body=bytes(4))
    assert DataFiles({}).find(f"{private}/a.bin"), "whoever has the keys may read it"
    with pytest.raises(UserError, match=r"a\.bin: Forbidden"):
        DataFiles(None).find(f"{private}/a.bin")
    with pytest.raises(StoreError, match="Forbidden"):
        Folder(private, as_nobody=True).read("", "a.bin", 4)
    assert Folder(private).read("", "a.bin", 4) == bytes(4)


def test_no_setting_of_this_machine_is_said_or_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buckets: Any
) -> None:
    """Neither fsspec's own, nor those of Amazon's tools, whose files are not even opened; nor a proxy."""
    keys = tmp_path / "credentials"
    keys.write_text("[work]\naws_access_key_id = mine\naws_secret_access_key = secret\n")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(keys))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")
    mine = {"headers": {"Authorization": "secret"}, "client_kwargs": {"headers": {"Authorization": "secret"}}}
    monkeypatch.setitem(fsspec.config.conf, "https", mine)
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"key": "mine", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    )
    for module in (
        "netrc",
        "aiobotocore.credentials",
    ):  # else their own files are opened when they are first needed
        importlib.import_module(module)
    found: list[str] = []
    listening = True

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "open":
            found.append(str(arguments[0]))

    sys.addaudithook(listen)
    place = buckets.publish({"a.bin": bytes(4)})
    fs, path = as_nobody.opened(f"{place}/a.bin")
    assert fs.cat_file(path) == bytes(4), "neither the proxy nor the other endpoint was asked"
    listening = False
    assert not [each for each in found if "credentials" in each or ".aws" in each or "netrc" in each]
    assert (fs.anon, fs.key, fs.secret) == (True, None, None)
    fs, _ = as_nobody.opened("https://a.example/a.bin")
    assert "secret" not in json.dumps(str((fs.kwargs, fs.client_kwargs)))


def test_s3_is_amazons_wherever_this_machine_s_own_tools_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    fs, _ = as_nobody.opened("s3://bucket/a.bin")
    fs.connect()
    assert fs._s3.meta.endpoint_url.endswith(".amazonaws.com")


@pytest.mark.parametrize(
    "place",
    [
        "/etc/passwd",
        "etc/passwd",
        "file:///etc/passwd",
        "http://192.168.1.1/a.bin",
        "memory://a",
        "https://a.example/x::file:///etc",
        "s3a://bucket/a",
        "simplecache::s3://bucket/a",
    ],
)
def test_nothing_else_is_opened_on_a_runs_word(place: str) -> None:
    with pytest.raises(UserError, match="nothing else is opened on a run's word"):
        as_nobody.opened(place)
    with pytest.raises(UserError, match="nothing else is opened on a run's word"):
        DataFiles(None).find(place)
    with pytest.raises(UserError, match="nothing else is opened on a run's word"):
        Folder(place, as_nobody=True)
