"""Where the coordinator of a run is: the join URL, and the signed list of its addresses that outlives one.

The URL is `farflung://HOST:PORT/RUN?k=KEY`, with up to four HOST:PORT between commas and, for runs that ask for one,
`&t=TOKEN`.  Printed by the coordinator; read by the CLI, `farflung.join` and the status client.  It pins the
coordinator's CURVE key, so nobody is trusted on first use.

The list (`Whereabouts`) is signed with the key that the URL pins, so whoever has it from anybody can check it: a peer
hears it when it is let in, from fellow peers, or out of a phone book.  Must not know the network: a host is never
looked up here.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from farflung.protocol.errors import UserError
from farflung.protocol.limits import ADDRESSES_MOST, WHEREABOUTS_BYTES
from farflung.protocol.signing import PROOF_BYTES, curve_key_of, proves

SCHEME = "farflung"
SHAPE = "farflung://HOST:PORT/RUN?k=KEY"
_COPY_AGAIN = "copy the whole URL again from where `farflung coordinate` printed it"
_MAX_URL_CHARS = 4096
_KEY_BYTES = 32
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})")
_RUN_PATTERN = r"^[a-z0-9-]{1,64}\Z"
_RUN = re.compile(_RUN_PATTERN)
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{1,2048}")
_PARTS = re.compile(r"(?P<addresses>[^/?#]*)(?:/(?P<run>[^?#]*))?(?:\?(?P<query>.*))?", re.DOTALL)
_HOST_PORT = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>[^:]*))?", re.DOTALL)


class Address(NamedTuple):
    """Where a coordinator listens.  An IPv6 host has no brackets here."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, what: str = "join URL", port: int | None = None) -> Address:
        """HOST:PORT, IPv6 in [brackets].  `port`: where none is said; `what`: where it stands, for errors."""
        parts = _HOST_PORT.fullmatch(text)
        if parts is None:
            raise UserError(f"{what}: cannot read {_shown(text)}; expected HOST:PORT, IPv6 in [brackets]")
        host = parts["host"]
        if host.startswith("[") and ":" not in host:
            raise UserError(f"{what}: only IPv6 hosts stand in brackets, found {_shown(host)}")
        number = port if parts["port"] is None and port is not None else _port(parts["port"], what)
        return cls(host.strip("[]"), number).checked(what)

    def checked(self, what: str = "join URL") -> Address:
        _check_host(self.host, what)
        if not 1 <= self.port <= 65535:
            raise UserError(f"{what}: port {self.port} is out of range, expected 1 to 65535")
        return self


@dataclass(frozen=True)
class JoinUrl:
    """A checked join URL; `str()` gives the text that people pass on.  An IPv6 host has no brackets here."""

    host: str
    port: int
    run: str
    key: bytes
    token: str | None = field(default=None, repr=False)  # a credential: kept out of logs
    others: tuple[Address, ...] = ()  # where the same coordinator is to be found as well

    def __post_init__(self) -> None:
        for each in self.addresses:
            each.checked()
        if len(self.addresses) > ADDRESSES_MOST:
            raise UserError(
                f"join URL: {len(self.addresses)} addresses, at most {ADDRESSES_MOST} are allowed"
            )
        if len(set(self.addresses)) < len(self.addresses):
            raise UserError(f"join URL: an address is there twice; {_COPY_AGAIN}")
        if not _RUN.fullmatch(self.run):
            raise UserError(f"join URL: run name {_shown(self.run)}: expected 1 to 64 of a-z, 0-9 and -")
        if len(self.key) != _KEY_BYTES:
            raise UserError(f"join URL: the key has {len(self.key)} bytes, expected {_KEY_BYTES}")
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise UserError(f"join URL: damaged token (t=); {_COPY_AGAIN}")

    def __str__(self) -> str:
        token = "" if self.token is None else f"&t={self.token}"
        where = ",".join(map(str, self.addresses))
        return f"{SCHEME}://{where}/{self.run}?k={_encode(self.key)}{token}"

    @property
    def address(self) -> str:
        """The first HOST:PORT, with brackets around an IPv6 host."""
        return str(Address(self.host, self.port))

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (Address(self.host, self.port), *self.others)

    @classmethod
    def at(cls, addresses: tuple[Address, ...], run: str, key: bytes, token: str | None = None) -> JoinUrl:
        (host, port), *others = addresses
        return cls(host, port, run, key, token, tuple(others))

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
        if parts is None or parts["addresses"].count(",") >= ADDRESSES_MOST:
            raise UserError(
                f"join URL: cannot read {_shown(text)}; expected {SHAPE}, of HOST:PORT at most {ADDRESSES_MOST}"
            )
        addresses = tuple(Address.parse(each) for each in parts["addresses"].split(","))
        if not parts["run"]:
            raise UserError(f"join URL: no run name after the port; expected {SHAPE}")
        query = _query(parts["query"] or "")
        if not query.get("k"):
            raise UserError("join URL: no key (?k=...); put the whole URL in quotes, the shell eats ? and &")
        return cls.at(addresses, parts["run"], _decode_key(query["k"]), query.get("t"))


# ---- the signed list --------------------------------------------------------------------------------------------


HostPort = Annotated[str, Meta(max_length=261)]


class Whereabouts(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where a run's coordinator is, by its own word.

    Who may lie: whoever passes it on may pass on an old one, and nothing else: only the run's key makes one, and of two
    the one with the higher `order` is the newer.  An address is a hint and no more: whoever answers there must show
    the key that the URL pins.
    """

    run: Annotated[str, Meta(pattern=_RUN_PATTERN)]
    incarnation: Annotated[int, Meta(ge=0, lt=1 << 31)]  # of the coordinator: it grows with each start
    number: Annotated[int, Meta(ge=0, lt=1 << 31)]  # of the list, since that start
    addresses: Annotated[tuple[HostPort, ...], Meta(min_length=1, max_length=ADDRESSES_MOST)]
    # Seconds since 1970; 0: it says nothing of time, as among members.  A phone book takes none of these.
    expires_s: Annotated[int, Meta(ge=0, lt=1 << 40)]
    proof: Annotated[
        bytes, Meta(max_length=PROOF_BYTES)
    ]  # the run's ed25519 key, and its signature of all the rest

    @property
    def order(self) -> int:
        return (self.incarnation << 31) + self.number

    @property
    def places(self) -> tuple[Address, ...]:
        return tuple(Address.parse(each) for each in self.addresses)

    @property
    def key(self) -> bytes:
        """The CURVE key that join URLs pin."""
        return curve_key_of(self.proof[:32])

    @property
    def raw(self) -> bytes:
        return _list_encoder.encode(self)

    @property
    def statement(self) -> bytes:
        """What the signature covers."""
        return b"farflung/whereabouts/1\0" + msgspec.structs.replace(self, proof=b"").raw

    def url(self, token: str | None = None) -> JoinUrl:
        """UserError where it makes none."""
        return JoinUrl.at(self.places, self.run, self.key, token)

    def signed(self, sign: Callable[[bytes], bytes]) -> Whereabouts:
        """`sign` gives the run's ed25519 key and its signature, or nothing."""
        return msgspec.structs.replace(self, proof=sign(self.statement))


_list_encoder = msgspec.msgpack.Encoder()
_list_decoder = msgspec.msgpack.Decoder(Whereabouts)


def whereabouts_of(raw: bytes, pinned: bytes, run: str = "") -> Whereabouts | None:
    """The list, if the holder of the pinned key signed exactly that; None for anything else, however hostile.

    `pinned`: as the join URL has it; empty: whoever it names, which tells nothing about who that is.
    """
    if len(raw) > WHEREABOUTS_BYTES:
        return None
    try:
        said = _list_decoder.decode(raw)
        url = said.url()
    except (msgspec.MsgspecError, UnicodeDecodeError, UserError):
        return None
    if (run and url.run != run) or (pinned and url.key != pinned):
        return None
    return said if proves(said.proof, said.statement) else None


# ---- reading -----------------------------------------------------------------------------------------------------


def _check_host(host: str, what: str) -> None:
    if ":" in host:
        try:
            if "%" in host:  # zone names mean something on one machine only
                raise ValueError
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UserError(f"{what}: {_shown(host)} is not an IPv6 address") from None
    elif not host:
        raise UserError(f"{what}: no host; expected {SHAPE}")
    elif not _HOST.fullmatch(host):
        raise UserError(f"{what}: {_shown(host)} is not a host name or address")


def _port(text: str | None, what: str) -> int:
    if not text:
        raise UserError(f"{what}: no port after the host; expected {SHAPE}")
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise UserError(f"{what}: port {_shown(text)}: expected a number from 1 to 65535")
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
