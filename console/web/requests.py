"""What a browser asks for, and the answers as bytes: paths, heads and the policy that goes with every page.  Pure.

Called by server.py with a request's head, when it is whole.  A request has no body here, and no answer depends on
anything in it but its path, the newest update that the viewer has, and whether it takes gzip.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from farflung.protocol.limits import WEB_REQUEST_BYTES

# Nothing but our own style sheet, script and events; in nobody's frame; no form; nobody hears where a reader came from.
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_SAFE = (
    f"Content-Security-Policy: {POLICY}\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    "X-Frame-Options: DENY\r\nCross-Origin-Opener-Policy: same-origin\r\nCross-Origin-Resource-Policy: same-origin\r\n"
    "Connection: close\r\n"
)
FOREVER = "public, max-age=31536000, immutable"  # the name of the file changes with it
FRESH = "no-cache"
_NUMBER_CHARS = 64  # of an update

HTML, CSS, SCRIPT, ICON, TEXT, EVENTS = (
    "text/html; charset=utf-8",
    "text/css; charset=utf-8",
    "text/javascript; charset=utf-8",
    "image/svg+xml",
    "text/plain; charset=utf-8",
    "text/event-stream",
)


@dataclass(frozen=True)
class Request:
    path: str
    has: str = ""  # the newest update that the viewer has
    with_body: bool = True
    takes_gzip: bool = False


@dataclass(frozen=True)
class Wrong:
    """No request that is answered."""

    status: str
    why: str


def is_whole(came: bytes) -> bool:
    """The head has ended, or is too long to be read on."""
    return b"\r\n\r\n" in came or b"\n\n" in came or len(came) > WEB_REQUEST_BYTES


def request_of(came: bytes) -> Request | Wrong:
    if len(came) > WEB_REQUEST_BYTES:
        return Wrong("431 Request Header Fields Too Large", "the request is too long")
    first, *fields = came.split(b"\n")
    words = first.decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return Wrong("400 Bad Request", "not an HTTP request")
    if words[0] not in ("GET", "HEAD"):
        return Wrong("405 Method Not Allowed", "only GET and HEAD")
    told: dict[str, str] = {}
    for field in fields:
        name, colon, value = field.decode("latin-1").partition(":")
        if colon:
            told.setdefault(name.strip().lower(), value.strip())
    path, _, query = words[1].partition("?")
    coded = [each.strip().lower() for each in told.get("accept-encoding", "").split(",")]
    has = told.get("last-event-id") or query
    return Request(path, has[:_NUMBER_CHARS], words[0] == "GET", "gzip" in coded)


def answer(
    status: str, kind: str, body: bytes, keep: str = FRESH, *, head_only: bool = False, gzip: bool = False
) -> bytes:
    """The whole of it; the connection ends after it.  `gzip`: that is what the body is."""
    coded = "Content-Encoding: gzip\r\n" if gzip else ""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{coded}Vary: Accept-Encoding\r\n"
        f"Cache-Control: {keep}\r\n{_SAFE}\r\n"
    )
    return head.encode("ascii") + (b"" if head_only else body)


def refusal(wrong: Wrong) -> bytes:
    return answer(wrong.status, TEXT, wrong.why.encode() + b"\n")


def live_head(gzip: bool) -> bytes:
    """What goes before the events of a viewer.  A proxy that would hold them back is asked not to."""
    coded = "Content-Encoding: gzip\r\n" if gzip else ""
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: {EVENTS}\r\n{coded}Cache-Control: no-store\r\nX-Accel-Buffering: no\r\n"
        f"{_SAFE}\r\n"
    )
    return head.encode("ascii") + (_GZIP_HEAD if gzip else b"") + said(b"retry: 4000\n\n").coded(gzip)


# ---- one text, packed once for all viewers -----------------------------------------------------------------------

_GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LEVEL = 5


@dataclass(frozen=True)
class StreamPiece:
    """A piece of an event stream, as it is and packed.  A packed piece begins afresh and ends on a whole byte, so that
    it may follow any other: viewers that came at different times are handed the same bytes."""

    plain: bytes
    packed: bytes

    def coded(self, gzip: bool) -> bytes:
        return self.packed if gzip else self.plain


def said(plain: bytes) -> StreamPiece:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return StreamPiece(plain, packer.compress(plain) + packer.flush(zlib.Z_FULL_FLUSH))


def gzipped(body: bytes) -> bytes:
    """A whole body; without a time in it, so that equal bodies are equal bytes."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()
