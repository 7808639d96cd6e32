"""What a phone book is to us, and what of it is believed: the face of one, and the check of every record.  Pure.

A phone book tells where the coordinator of a public run is: to somebody new whose join URL leads to a place that is
dead, and to whoever looks for a run by its name.  It is optional, and lives in processes of its own: no peer and no
coordinator needs one, and no frame passes it.  hivemind_book.py is the real one.

Who may lie: everybody in it.  A record counts only under the run's own key, until it expires, and of several the one
with the highest number.  So strangers can keep a record back, or give an older one that has not expired, and nothing
else. A name proves nothing: several runs may have it, and whoever looks for one has to know its key.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl, Whereabouts, whereabouts_of

LIFE_S = 3600  # of a record
RENEWED_S = 600.0
CLOCKS_APART_S = 300  # at most, of two machines
LIFE_MOST_S = LIFE_S + CLOCKS_APART_S
PLACE_CHARS = 300
NAMES_SHOWN = 32  # anybody may announce a run of any name


class PhoneBook(Protocol):
    def put(self, said: Whereabouts) -> int:
        """At how many places it is now; 0: nobody took it."""
        ...

    def find(self, key: bytes) -> list[bytes]:
        """Whatever is said to be a record of the run with this CURVE key: believed nothing yet."""
        ...

    def named(self, name: str) -> list[bytes]:
        """The same of all runs of that name."""
        ...

    def close(self) -> None: ...


def believed(raw: bytes, wall_s: float, key: bytes = b"", name: str = "") -> Whereabouts | None:
    """The record, if it is that run's own word and still holds; `key`: empty for any run of that name."""
    said = whereabouts_of(raw, key, name)
    if said is None or not wall_s < said.expires_s <= wall_s + LIFE_MOST_S:
        return None
    return said


def newest(found: Iterable[bytes], wall_s: float, key: bytes, name: str = "") -> Whereabouts | None:
    records = [believed(raw, wall_s, key, name) for raw in found]
    return max((each for each in records if each is not None), key=lambda each: each.order, default=None)


def by_name(found: Iterable[bytes], wall_s: float, name: str) -> list[Whereabouts]:
    """The newest of each run."""
    runs: dict[bytes, Whereabouts] = {}
    for raw in found:
        said = believed(raw, wall_s, name=name)
        if said is not None and (said.key not in runs or said.order > runs[said.key].order):
            runs[said.key] = said
    return sorted(runs.values(), key=lambda each: (-each.expires_s, each.key))[:NAMES_SHOWN]


# ---- words that people type ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunQuery:
    """A run by its key, or all runs of a name."""

    key: bytes = b""
    name: str = ""
    token: str | None = None  # of the URL that was given


def wanted(text: str) -> RunQuery:
    """NAME, KEY (what stands behind k= in a join URL), or a join URL that leads nowhere any more."""
    if text.startswith("farflung:"):
        url = JoinUrl.parse(text)
        return RunQuery(url.key, url.run, url.token)
    try:
        key = base64.b64decode(text + "=", altchars=b"-_", validate=True) if len(text) == 43 else b""
    except (binascii.Error, ValueError):
        key = b""
    if len(key) == 32:
        return RunQuery(key)
    if not 1 <= len(text) <= 64 or set(text) - set("abcdefghijklmnopqrstuvwxyz0123456789-"):
        raise UserError(f"{text[:60]!r}: expected a run's name, its key (k= in its join URL), or a join URL")
    return RunQuery(name=text)


def place_of(text: str) -> str:
    """One book, as it is named on a command line: a multiaddress of hivemind's; UserError for anything else."""
    is_one = text.startswith("/") and "/p2p/" in text and len(text) <= PLACE_CHARS
    if not is_one or any(each.isspace() for each in text):
        raise UserError(
            f"phone book {text[:60]!r}: expected /ip4/.../tcp/.../p2p/..., as `farflung phonebook` says"
        )
    return text
