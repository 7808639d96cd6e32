"""The port of the page: what is answered, who is cut off, and that viewers are handed the same bytes."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from farflung.console.web import server as server_module
from farflung.console.web.page_process import Press, assets
from farflung.console.web.requests import POLICY, Request, Wrong, request_of, said
from farflung.console.web.server import Asset, PageLimits, PageServer
from farflung.protocol.limits import WEB_REQUEST_BYTES
from rig.public_run import public_status
from rig.waiting import PATIENCE_S, eventually

URL = "farflung://train.example.org:29800/tiny-stories-1b?k=" + 43 * "A"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW = PageLimits(request_s=0.4, answer_s=1.0, slow_s=0.6, keep_alive_s=0.3)


@dataclass
class Port:
    server: PageServer
    press: Press
    address: tuple[str, int]

    def dial(self) -> socket.socket:
        line = socket.create_connection(self.address, PATIENCE_S)
        line.settimeout(PATIENCE_S)
        return line

    def ask(self, request: bytes) -> bytes:
        with self.dial() as line:
            line.sendall(request)
            return rest_of(line)

    def tell(self, status: dict[str, Any]) -> None:
        self.server.publish(self.press.edition(status))


def rest_of(line: socket.socket) -> bytes:
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := line.recv(1 << 16):
            came += piece
    return came


@contextlib.contextmanager
def served(limits: PageLimits | None = None, published: bool = True) -> Iterator[Port]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        found, version = assets()
        port = Port(PageServer(listener, found, limits), Press(URL, version), listener.getsockname())
        if published:
            port.tell(public_status())
        thread = threading.Thread(target=port.server.serve)
        thread.start()
        try:
            yield port
        finally:
            port.server.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def parted(answer: bytes) -> tuple[str, dict[str, str], bytes]:
    """(status, fields, body)"""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *fields = head.decode("ascii").split("\r\n")
    named = dict(field.split(": ", 1) for field in fields)
    assert len(named) == len(fields)
    return first.removeprefix("HTTP/1.1 "), named, body


def read_until(line: socket.socket, end: bytes, came: bytes = b"") -> bytes:
    while end not in came:
        piece = line.recv(1 << 16)
        assert piece, f"hung up after {came[-200:]!r}"
        came += piece
    return came


def events_in(came: bytes) -> list[dict[str, Any]]:
    return [json.loads(each) for each in re.findall(rb"^data: (.*)$", came, re.M)]


def event_in(came: bytes) -> dict[str, Any]:
    """The last one."""
    return events_in(came)[-1]


# ---- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/icon.svg"])
@pytest.mark.parametrize("gzip", [False, True])
def test_each_file_comes_with_its_length_and_the_policy_and_packed_on_request(path: str, gzip: bool) -> None:
    wish = "Accept-Encoding: br, gzip\r\n" if gzip else ""
    with served() as port:
        status, fields, body = parted(port.ask(f"GET {path} HTTP/1.1\r\n{wish}\r\n".encode()))
        plain = parted(port.ask(f"GET {path} HTTP/1.1\r\n\r\n".encode()))[2]
        assert parted(port.ask(f"HEAD {path} HTTP/1.1\r\n{wish}\r\n".encode())) == (status, fields, b"")
    assert status == "200 OK" and int(fields["Content-Length"]) == len(body)
    assert (fields.get("Content-Encoding") == "gzip") == gzip
    assert (zlib.decompress(body, 31) if gzip else body) == plain and len(plain) > 200
    assert fields["Content-Security-Policy"] == POLICY and fields["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in fields and "Set-Cookie" not in fields


def test_the_policy_lets_nothing_in_but_our_own_files() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in POLICY.split(";"))
    assert (
        rules["default-src"]
        == "'none'"
        == rules["frame-ancestors"]
        == rules["form-action"]
        == rules["base-uri"]
    )
    assert {rules[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert "unsafe" not in POLICY


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", "404"),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", "404"),
        (b"GET /page.css/../page.js HTTP/1.1\r\n\r\n", "404"),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "405"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", "400"),
        (b"GET /\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\n\n", "400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * WEB_REQUEST_BYTES, "431"),
        (b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", "200"),
    ],
)
def test_what_is_no_request_is_told_so(request_: bytes, status: str) -> None:
    with served() as port:
        assert parted(port.ask(request_))[0].startswith(status)
        assert parted(port.ask(GET))[0] == "200 OK"


def test_before_the_first_edition_it_says_that_it_starts() -> None:
    with served(published=False) as port:
        assert parted(port.ask(GET))[0].startswith("503")
        assert parted(port.ask(LIVE))[0].startswith("503")
        assert parted(port.ask(b"GET /page.css HTTP/1.1\r\n\r\n"))[0] == "200 OK"


def test_a_request_is_read_as_browsers_write_it() -> None:
    asked = request_of(
        b"GET /live?abc-7 HTTP/1.1\r\nAccept-Encoding: gzip, deflate\r\nLast-Event-ID: abc-9\r\n\r\n"
    )
    assert asked == Request("/live", "abc-9", True, True)
    assert request_of(b"HEAD /live?abc-7 HTTP/1.0\n\n") == Request("/live", "abc-7", False, False)
    assert isinstance(request_of(b"get / HTTP/1.1\n\n"), Wrong)


# ---- news ------------------------------------------------------------------------------------------------------


def test_viewers_hear_what_changes_and_nothing_twice() -> None:
    with served() as port, port.dial() as one, port.dial() as other:
        page = parted(port.ask(GET))[2].decode()
        seen = re.findall('data-seen="([^"]+)"', page)[0]
        one.sendall(f"GET /live?{seen} HTTP/1.1\r\n\r\n".encode())
        other.sendall(LIVE)
        head = read_until(one, b"retry: 4000\n\n")
        assert b"text/event-stream" in head and b"\ndata:" not in head, "it has all there is"
        whole = event_in(read_until(other, b"\n\n", read_until(other, b"data: ")))
        assert {"people", "leaders", "curve", "tiles"} <= whole["parts"].keys()
        eventually(lambda: port.server.viewers == 2, "both look on")
        status = public_status()
        status["members"][2]["state"] = "gather"
        port.tell(status)
        events = [event_in(read_until(each, b"</tr>")) for each in (one, other)]
        assert events[0] == events[1] and list(events[0]["parts"]) == ["p2"]
        assert "receiving" in events[0]["parts"]["p2"]
        port.tell(status)
        port.tell(public_status())
        came = read_until(one, b"</tr>")
        assert came.count(b"data:") == 1 and "training" in event_in(came)["parts"]["p2"]


def test_packed_news_can_be_joined_at_any_time() -> None:
    """Each viewer's stream is one gzip file that goes on, and the pieces are the same bytes for all."""
    with served() as port, port.dial() as early, port.dial() as late:
        request = b"GET /live HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n"
        streams = []
        for line in (early, late):
            line.sendall(request)
            came = read_until(line, b"\r\n\r\n").partition(b"\r\n\r\n")[2]
            unpack = zlib.decompressobj(31)
            text = b""
            while b"</tbody>" not in text:
                text += unpack.decompress(came)
                came = line.recv(1 << 16) if b"</tbody>" not in text else b""
            streams.append((line, unpack))
            port.tell(public_status() | {"tokens_per_s": 7e6 + len(streams) * 1e6})
        for line, unpack in streams:
            text = b""
            while b"9.0M" not in text:
                text += unpack.decompress(line.recv(1 << 16))


def test_who_missed_an_edition_gets_the_whole() -> None:
    """Two editions between two turns of the loop: the second one's news alone would leave a gap."""
    with served() as port, port.dial() as line:
        line.sendall(LIVE)
        read_until(line, b"</tbody>")
        eventually(lambda: port.server.viewers == 1, "it looks on")
        skipped = port.press.edition(public_status() | {"loss": 1.0})
        last = port.press.edition(public_status() | {"loss": 1.0, "run": "tiny-stories-1b", "eta_s": 60.0})
        assert last.before == skipped.number
        port.server.publish(last)
        assert {"tiles", "people"} <= event_in(read_until(line, b"</tbody>"))["parts"].keys()


def test_who_hears_nothing_for_long_hears_that_the_line_is_there() -> None:
    with served(SLOW) as port, port.dial() as line:
        line.sendall(LIVE)
        read_until(line, b": \n\n: \n\n")


# ---- who is cut off --------------------------------------------------------------------------------------------


def test_who_asks_slowly_is_cut_off_and_nobody_waits_for_it() -> None:
    """A byte now and then does not help: the time is for the whole request."""
    with served(SLOW) as port:
        slow = [port.dial() for _ in range(50)]
        with contextlib.ExitStack() as stack:
            for line in slow:
                stack.enter_context(line)
                line.sendall(b"GET / HTTP/1.1\r\nX: ")
            begun = time.monotonic()
            assert parted(port.ask(GET))[0] == "200 OK"

            def drip() -> bool:
                for line in slow:
                    with contextlib.suppress(OSError):
                        line.sendall(b"x")
                return port.server.cut_off >= len(slow)

            eventually(drip, "all of them are cut off")
            assert time.monotonic() - begun >= SLOW.request_s / 2


def test_a_viewer_that_does_not_read_is_cut_off_and_the_others_hear_on() -> None:
    with served(SLOW) as port, contextlib.ExitStack() as stack:
        deaf = socket.socket()
        stack.enter_context(deaf)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(port.address)
        deaf.sendall(LIVE)
        good = stack.enter_context(port.dial())
        good.sendall(LIVE)
        read_until(good, b"</tbody>")
        eventually(lambda: port.server.viewers == 2, "both look on")
        tick = 0

        def goes_on() -> bool:
            nonlocal tick
            tick += 1
            port.tell(public_status(tick=tick % 2) | {"loss": float(tick)})
            read_until(good, b'"tiles"')
            return port.server.viewers == 1

        eventually(goes_on, "the one that does not read is gone")
        assert port.server.cut_off == 1


def test_who_takes_an_answer_slowly_is_cut_off() -> None:
    """It asks for more than fits into the buffers between, and reads a little now and then."""
    with served(SLOW) as port, socket.socket() as line:
        port.server._assets["/large"] = Asset("text/plain", bytes(8 << 20))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(PATIENCE_S)
        line.connect(port.address)
        line.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        eventually(lambda: line.recv(16) and port.server.cut_off == 1, "it is cut off, though it reads")


def test_one_that_was_behind_gets_the_whole_when_it_reads_again() -> None:
    with served(PageLimits(slow_s=PATIENCE_S)) as port, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(PATIENCE_S)
        line.connect(port.address)
        line.sendall(LIVE)
        eventually(lambda: port.server.viewers == 1, "it looks on")
        tick = 0
        while not any(each.behind for each in list(port.server._lines.values())):
            for each in range(20):  # until no more goes into the buffers between
                port.tell(public_status() | {"loss": float(tick + each)})
            tick += 20
            time.sleep(0.02)
        port.tell(public_status() | {"loss": 77.125})
        came = b""
        while b"77.125" not in came or not came.endswith(b"\n\n"):
            came += line.recv(1 << 16)
        # Not always with the last one: a buffer may have had room again before that was told.
        whole = [each for each in events_in(came) if {"people", "tiles", "curve"} <= each["parts"].keys()]
        assert len(whole) > 1, "the first one, and one for what it had missed"
        assert came.count(b"data: ") < tick, "it was not kept for it what it could not take"


def test_a_viewer_that_talks_is_cut_off() -> None:
    with served() as port, port.dial() as line:
        line.sendall(LIVE)
        read_until(line, b"</tbody>")
        line.sendall(GET)
        rest_of(line)
        eventually(lambda: port.server.viewers == 0, "it is gone")


def test_so_many_from_one_network_and_so_many_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own machine counts as no network, so it is told that it is one."""
    monkeypatch.setattr(server_module, "network_of", lambda address: "192.0.2.0/24")
    with served(PageLimits(connections_of_network=3)) as port, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(port.dial()) for _ in range(3)]
        for line in lines:
            line.sendall(LIVE)
            read_until(line, b"</tbody>")
        assert port.ask(GET) == b"", "a fourth one is turned away"
        lines[0].close()
        eventually(lambda: port.server.viewers == 2, "one has left")
        assert parted(port.ask(GET))[0] == "200 OK"
    with served(PageLimits(connections=2, connections_of_network=9)) as port, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(port.dial()).sendall(b"G")
        eventually(lambda: port.ask(GET) == b"", "a third one is turned away")


def test_so_many_requests_of_one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "network_of", lambda address: "192.0.2.0/24")
    with served(PageLimits(requests_per_s=1e-3, requests_burst=3)) as port:
        statuses = [parted(port.ask(GET))[0][:3] for _ in range(5)]
    assert statuses == ["200"] * 3 + ["429"] * 2


def test_garbage_after_a_request_is_not_kept() -> None:
    with served() as port, port.dial() as line:
        line.sendall(GET)
        with contextlib.suppress(OSError):
            for _ in range(200):
                line.sendall(b"x" * 65536)
                time.sleep(0.001)
        assert parted(port.ask(GET))[0] == "200 OK"
        eventually(lambda: not port.server._lines, "nobody is left")


def test_two_hundred_viewers_share_one_copy() -> None:
    with served() as port, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(port.dial()) for _ in range(200)]
        for line in lines:
            line.sendall(LIVE)
        for line in lines:
            read_until(line, b"</tbody>")
        eventually(lambda: port.server.viewers == 200, "all look on")
        port.tell(public_status() | {"loss": 1.25})
        for line in lines:
            assert b"1.250" in read_until(line, b"\n\n")
        eventually(
            lambda: not any(line.out for line in port.server._lines.values()), "nothing is kept for any"
        )


def test_a_piece_of_a_stream_is_packed_so_that_it_follows_any_other() -> None:
    one, other = said(b"one " * 50), said(b"other " * 50)
    for pieces in ([one, other], [other, one, one]):
        unpack = zlib.decompressobj(-15)
        assert unpack.decompress(b"".join(each.packed for each in pieces)) == b"".join(
            p.plain for p in pieces
        )
