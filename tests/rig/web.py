"""A web server on loopback that knows ranges, and can be told what to do wrong.

with Web() as web:
    web.files["/a.bin"] = b"..."
    web.url("/a.bin")           # http://127.0.0.1:.../a.bin
    web.asked                   # "GET /a.bin bytes=0-3", in order
"""

from __future__ import annotations

import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Web:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sent_on: dict[str, str] = {}  # from a path to a URL
        self.failures = 0  # so many of the next answers to GET are an error
        self.cut_bytes = 0  # every answer to GET lacks so many at its end
        self.knows_ranges = True
        self.more_headers: dict[str, str] = {}  # of every answer
        self.asked: list[str] = []

    def __enter__(self) -> Web:
        web = self

        class Handler(_Handler):
            of = web

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}{path}"


class _Handler(BaseHTTPRequestHandler):
    of: Web
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.of.asked.append(f"GET {self.path} {wanted}".strip())
        if self.of.failures:
            self.of.failures -= 1
            self._head(503, 0)
            return
        self._answer(with_body=True, wanted=wanted)

    def _answer(self, with_body: bool, wanted: str = "") -> None:
        web = self.of
        if self.path in web.sent_on:
            self._head(302, 0, Location=web.sent_on[self.path])
            return
        if self.path not in web.files:
            self._head(404, 0)
            return
        body = web.files[self.path]
        tag = f'"{sha256(body).hexdigest()[:16]}"'
        if wanted and web.knows_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            piece = body[int(first) : int(last) + 1]
            piece = piece[: len(piece) - web.cut_bytes]
            self._head(206, len(piece), ETag=tag, **{"Content-Range": f"bytes {first}-{last}/{len(body)}"})
            self.wfile.write(piece)
            return
        self._head(200, len(body), ETag=tag)
        if with_body:
            self.wfile.write(body)

    def _head(self, status: int, length: int, **fields: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in {**self.of.more_headers, **fields}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""
