"""Where a run's records are kept, if not in its folder: `etcd://HOST:PORT,HOST:PORT[/PREFIX]`, as the host writes it.

Read by hosting.py from `--store`.  `etcds://` speaks TLS, `USER:PASSWORD@` stands before the first host, and
`?lease_s=N` says how long a leader that says nothing is waited for.  Whatever is printed of it is without the password.
Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from farflung.protocol.errors import UserError
from farflung.protocol.join_url import Address

PORT = 2379
MEMBERS_MOST = 9
LEASE_S = 3
LEASE_LEAST_S, LEASE_MOST_S = 2, 600
SHAPE = "etcd://HOST:PORT,HOST:PORT,HOST:PORT[/PREFIX]"
_PARTS = re.compile(r"(?P<hosts>[^/?#]*)(?:/(?P<prefix>[^?#]*))?(?:\?(?P<query>.*))?", re.DOTALL)
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,100}(/[A-Za-z0-9._-]{1,100}){0,7}")
_LEASE = re.compile(r"lease_s=([0-9]{1,4})")


@dataclass(frozen=True)
class StoreUrl:
    members: tuple[Address, ...]  # of the cluster; any of them answers
    prefix: str  # of all keys of this run, without a slash at its end
    tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)
    lease_s: int = LEASE_S

    def __str__(self) -> str:
        """For people, and without the password."""
        scheme, user = "etcds" if self.tls else "etcd", f"{self.user}@" if self.user else ""
        lease = f"?lease_s={self.lease_s}" if self.lease_s != LEASE_S else ""
        return f"{scheme}://{user}{','.join(map(str, self.members))}/{self.prefix}{lease}"

    @classmethod
    def parse(cls, text: str, run: str) -> StoreUrl:
        """`run`: the name of the run, whose prefix it has unless another one is said."""
        scheme, separator, rest = text.strip().partition("://")
        if not separator or scheme not in ("etcd", "etcds"):
            raise UserError(f"--store: expected {SHAPE}, or etcds:// for TLS")
        who, at, rest = rest.rpartition("@")
        user, _, password = who.partition(":")
        if at and not (user and password):
            raise UserError("--store: before the @ stand USER:PASSWORD, with %40 for an @ in them")
        parts = _PARTS.fullmatch(rest)
        if parts is None or not parts["hosts"]:
            raise UserError(f"--store: no host; expected {SHAPE}")
        hosts = parts["hosts"].split(",")
        if len(hosts) > MEMBERS_MOST:
            raise UserError(f"--store: {len(hosts)} hosts, at most {MEMBERS_MOST} are allowed")
        members = tuple(dict.fromkeys(Address.parse(each, "--store", PORT) for each in hosts))
        prefix = (parts["prefix"] or f"farflung/{run}").strip("/")
        if not _PREFIX.fullmatch(prefix):
            raise UserError(
                "--store: a prefix is made of a-z, A-Z, 0-9 and . _ - with / between, such as runs/demo"
            )
        lease_s = _lease_in(parts["query"])
        return cls(members, prefix, scheme == "etcds", unquote(user), unquote(password), lease_s)


def _lease_in(query: str | None) -> int:
    if not query:
        return LEASE_S
    found = _LEASE.fullmatch(query)
    if found is None or not LEASE_LEAST_S <= int(found[1]) <= LEASE_MOST_S:
        raise UserError(
            f"--store: after the ? stands lease_s=N alone, with N from {LEASE_LEAST_S} to {LEASE_MOST_S} seconds"
        )
    return int(found[1])
