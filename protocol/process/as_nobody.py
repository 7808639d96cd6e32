"""Places that a stranger named, read as nobody: what a run's manifest says that its data or its beginning lie at.

Called by whoever reads such a place (peer/data/data_files.py, checkpoints/files.py); there is no other way to one.
What is read there goes into state and gradients that others see.  So:

    no path of this machine, and nothing but https:// and s3:// (Amazon's own) is opened;
    nothing of this machine is said there: no keys, no cookies, no settings of fsspec, of aiohttp or of Amazon's tools,
    whose files are not even opened, and no proxy, whose name or password would be its owner's;
    nobody in this machine's own networks is spoken with, wherever a name leads or an answer sends on to: each
    connection is judged by the address that it is made to, so that no trick with names helps;
    no answer is longer than what was asked for, as it comes and unpacked.

Who may lie: the run's host, the server, and whoever answers for names.  Must not know what is read.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import socket
from ipaddress import IPv6Address, ip_address
from types import SimpleNamespace
from typing import Any

import fsspec

from farflung.protocol.errors import UserError

PAGE_BYTES_MOST = 16 << 20  # of an answer whose length nobody asked for: a list of files
NAT64 = bytes.fromhex("0064ff9b") + bytes(8)  # before an address of version 4
S3_ENDPOINT: str | None = None  # Amazon's own; a test's is its own
# Amazon's tools would take these from files and variables of this machine: (in a file, in a variable, else, made by).
_NO_SETTINGS = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}


def opened(url: str) -> tuple[Any, str]:
    """A file system of fsspec, and the place in it.  UserError for all that is not opened on a stranger's word."""
    kind = url.partition("://")[0] if "::" not in url else ""
    if kind == "https":
        # What is kept of an older file system is not taken: it would have whatever settings were there then.
        fs, path = fsspec.core.url_to_fs(url, get_client=guarded_session, client_kwargs={})
        fs.kwargs = {}  # of each request: fsspec's own settings may say some
        return fs, str(path)
    if kind == "s3":
        fs, path = fsspec.core.url_to_fs(url, **_s3_options(S3_ENDPOINT))
        return fs, str(path)
    raise UserError(f"{url}: not at https:// or s3://, and nothing else is opened on a run's word")


@functools.lru_cache(maxsize=1)
def _s3_options(endpoint: str | None) -> dict[str, Any]:
    """Kept: a session that is made again would have connections of its own."""
    session = importlib.import_module("aiobotocore.session").AioSession(session_vars=_NO_SETTINGS)
    return {
        "anon": True,
        "key": None,
        "secret": None,
        "token": None,
        "endpoint_url": endpoint,
        "client_kwargs": {},
        "config_kwargs": {"ignore_configured_endpoint_urls": True, "proxies": {}},
        "session": session,
    }


def is_public(address: str) -> bool:
    """Of the internet, and not of this machine or of a network that it is in."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if ip.packed[:12] == NAT64:
            return is_public(str(ip_address(ip.packed[12:])))
    return ip.is_global and not ip.is_multicast


def public_socket(where: Any) -> socket.socket:
    """For a connection to where a name has led: the one place in which all of them are made."""
    family, kind, protocol, _, address = where
    if not is_public(address[0]):
        told = f"{address[0]} is an address of this machine or of a network of its own"
        raise OSError(errno.EACCES, told)
    return socket.socket(family, kind, protocol)


async def guarded_session(**options: Any) -> Any:
    """A session of aiohttp that follows to TLS only, speaks with nobody in a network of this machine's own, and reads
    no answer that is longer than what was asked for.  `options`: but for the loop they may be of fsspec's settings."""
    aiohttp = importlib.import_module("aiohttp")
    trace = aiohttp.TraceConfig()

    async def on_redirect(_session: Any, _context: SimpleNamespace, asked: Any) -> None:
        to = asked.response.headers.get("Location", "")
        if "://" in to and not to.lower().startswith("https://"):
            raise OSError(f"it is sent on to {to[:100]!r}, and a run's data are read over https alone")

    async def on_answer(_session: Any, _context: SimpleNamespace, asked: Any) -> None:
        wanted = asked.headers.get("Range", "")
        if asked.method != "GET" or not wanted or asked.response.status >= 300:
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        due = int(last) - int(first) + 1 if first.isdecimal() and last.isdecimal() else 0
        length = asked.response.content_length
        if asked.response.status != 206 or length is None or length > due:
            raise OSError(f"asked for {due} bytes of it, its server sends {length or 'any number of them'}")

    class Bounded(aiohttp.ClientResponse):  # type: ignore[misc, name-defined]
        async def read(self) -> bytes:
            if self._body is None and "Range" not in self.request_info.headers:  # type: ignore[has-type]
                page = b""
                async for piece in self.content.iter_any():
                    page += piece
                    if len(page) > PAGE_BYTES_MOST:
                        self.close()
                        raise OSError(f"a list of files there has more than {PAGE_BYTES_MOST} bytes")
                self._body = page
            return bytes(await super().read())

    trace.on_request_redirect.append(on_redirect)
    trace.on_request_end.append(on_answer)
    return aiohttp.ClientSession(
        loop=options.get("loop"),
        connector=aiohttp.TCPConnector(socket_factory=public_socket),
        trace_configs=[trace],
        response_class=Bounded,
        auto_decompress=False,  # a few bytes may unpack to any number of them
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,  # neither proxies nor ~/.netrc
    )
