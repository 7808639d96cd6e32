"""Owns the join URL: `farflung://HOST:PORT/RUN?k=KEY` and, for runs that ask for one, `&t=TOKEN`.

Printed by the coordinator; read by the CLI, `farflung.join` and the status client.  The URL pins the
coordinator's CURVE key, so nobody is trusted on first use.  Must not know the network: a host is never
looked up here.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import re
from dataclasses import dataclass, field

from farflung.protocol.errors import UserError

SCHEME = "farflung"
SHAPE = "farflung://HOST:PORT/RUN?k=KEY"
_COPY_AGAIN = "copy the whole URL again from where `farflung coordinate` printed it"
_MAX_URL_CHARS = 4096
_KEY_BYTES = 32
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})")
_RUN = re.compile(r"[a-z0-9-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{1,2048}")
_PARTS = re.compile(
    r"(?P<host>\[[^\]/?#]*\]|[^:/?#\[\]]*)(?::(?P<port>[^:/?#]*))?(?:/(?P<run>[^?#]*))?(?:\?(?P<query>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class JoinUrl:
    """A checked join URL; `str()` gives the text that people pass on.  An IPv6 host has no brackets here."""

    host: str
    port: int
    run: str
    key: bytes
    token: str | None = field(default=None, repr=False)  # a credential: kept out of logs

    def __post_init__(self) -> None:
        _check_host(self.host)
        if not 1 <= self.port <= 65535:
            raise UserError(f"join URL: port {self.port} is out of range, expected 1 to 65535")
        if not _RUN.fullmatch(self.run):
            raise UserError(f"join URL: run name {_shown(self.run)}: expected 1 to 64 of a-z, 0-9 and -")
        if len(self.key) != _KEY_BYTES:
            raise UserError(f"join URL: the key has {len(self.key)} bytes, expected {_KEY_BYTES}")
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise UserError(f"join URL: damaged token (t=); {_COPY_AGAIN}")

    def __str__(self) -> str:
        token = "" if self.token is None else f"&t={self.token}"
        return f"{SCHEME}://{self.address}/{self.run}?k={_encode(self.key)}{token}"

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> JoinUrl:
        """Read what somebody pasted; UserError says what is wrong with it and what to do."""
        text = text.strip()
        if len(text) > _MAX_URL_CHARS:
            raise UserError(f"join URL: {len(text)} characters, at most {_MAX_URL_CHARS} are allowed")
        scheme, separator, rest = text.partition("://")
        if not separator or scheme != SCHEME:
            raise UserError(f"join URL: {_shown(text)} does not start with {SCHEME}://; expected {SHAPE}")
        parts = _PARTS.fullmatch(rest)
        if parts is None:
            raise UserError(f"join URL: cannot read {_shown(text)}; expected {SHAPE}, IPv6 in [brackets]")
        host = parts["host"]
        if host.startswith("[") and ":" not in host:
            raise UserError(f"join URL: only IPv6 hosts stand in brackets, found {_shown(host)}")
        port = _port(parts["port"])
        if not parts["run"]:
            raise UserError(f"join URL: no run name after the port; expected {SHAPE}")
        query = _query(parts["query"] or "")
        if not query.get("k"):
            raise UserError("join URL: no key (?k=...); put the whole URL in quotes, the shell eats ? and &")
        return cls(host.strip("[]"), port, parts["run"], _decode_key(query["k"]), query.get("t"))


def _check_host(host: str) -> None:
    if ":" in host:
        try:
            if "%" in host:  # zone names mean something on one machine only
                raise ValueError
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UserError(f"join URL: {_shown(host)} is not an IPv6 address") from None
    elif not host:
        raise UserError(f"join URL: no host; expected {SHAPE}")
    elif not _HOST.fullmatch(host):
        raise UserError(f"join URL: {_shown(host)} is not a host name or address")


def _port(text: str | None) -> int:
    if not text:
        raise UserError(f"join URL: no port after the host; expected {SHAPE}")
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise UserError(f"join URL: port {_shown(text)}: expected a number from 1 to 65535")
    return int(text)


def _query(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split("&") if text else []:
        name, _, value = part.partition("=")
        if name not in ("k", "t"):
            raise UserError(
                f"join URL: unknown parameter {_shown(name)}; it may need a newer farflung, or {_COPY_AGAIN}"
            )
        if name in values:
            raise UserError(f"join URL: {name}= is there twice; {_COPY_AGAIN}")
        values[name] = value
    return values


def _encode(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).decode("ascii").rstrip("=")


def _decode_key(text: str) -> bytes:
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise UserError(f"join URL: damaged key (k=); {_COPY_AGAIN}") from None
    # The last letter carries spare bits: only one spelling of a key is the key.
    if len(key) != _KEY_BYTES or _encode(key) != text:
        raise UserError(f"join URL: damaged key (k=), {len(text)} characters of 43; {_COPY_AGAIN}")
    return key


def _shown(text: str) -> str:
    """The text on one line, quoted, control characters escaped, cut before any key or token in it."""
    text = text.split("?", 1)[0]
    return json.dumps(text if len(text) <= 60 else text[:57] + "...")
