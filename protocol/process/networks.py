"""Networks: everybody in an IPv4 /24 or an IPv6 /48 counts as one, and has only so many connections.  Pure.

Used at every port and by the admission: somebody with one address usually has its neighbours as well.  This machine
itself is no network: behind a local proxy every stranger would seem to come from here.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

_PREFIXES = {4: 24, 6: 48}


@lru_cache(4096)  # of strangers it is asked for with every frame
def network_of(address: str) -> str:
    """Such as 192.0.2.0/24; empty for this machine and for what is no address: no limit for networks applies."""
    try:
        ip = ipaddress.ip_address(address.removeprefix("::ffff:").partition("%")[0])
    except ValueError:
        return ""
    if ip.is_loopback:
        return ""
    return str(ipaddress.ip_network((ip, _PREFIXES[ip.version]), strict=False))


class StrangerCounts:
    """The open connections of strangers: so many in all, and so many from one network."""

    def __init__(self, most: int, most_of_network: int, patience_s: float) -> None:
        self._most = most
        self._most_of_network = most_of_network
        self._patience_s = patience_s  # a network that says nothing for so long makes room for others
        self._lines: OrderedDict[int, tuple[str, float]] = OrderedDict()  # the longest silent one first
        self._by_network: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def comes(self, line: int, network: str, now: float) -> list[int]:
        """Which lines are to be cut: none; the longest silent one, to make room; or this very one."""
        cut: list[int] = []
        if network and self._by_network.get(network, 0) >= self._most_of_network:
            return [line]
        if len(self._lines) >= self._most:
            oldest, (_, heard_at) = next(iter(self._lines.items()))
            if now - heard_at < self._patience_s:
                return [line]
            self.ends(oldest)
            cut = [oldest]
        self.ends(line)  # its number was that of a line whose end was never told
        self._lines[line] = (network, now)
        self._by_network[network] = self._by_network.get(network, 0) + 1
        return cut

    def heard(self, line: int, now: float) -> None:
        if line in self._lines:
            self._lines[line] = (self._lines[line][0], now)
            self._lines.move_to_end(line)

    def ends(self, line: int) -> None:
        if line in self._lines:
            network, _ = self._lines.pop(line)
            left = self._by_network[network] - 1
            if left:
                self._by_network[network] = left
            else:
                del self._by_network[network]


# ---- lines -------------------------------------------------------------------------------------------------
# Others' connections at one socket: how many there may be, and whose they are once they have spoken. Pure.
#
# Held by the server for its members' socket, by each gateway, and by each peer for its own port. libzmq tells
# whose a connection is with its first frame, and not before; until then it is one of the silent ones, which
# are bounded as a whole. So no key takes what all need, whether it was let in or not. Where there is no room
# an older connection makes it: whoever dials again after its line broke comes in.

LINES_OF_KEY = 4  # its beats, its look, and as many that have died without a word
# Connections over which nothing was said yet, in all and of one network.
HALF_OPEN, HALF_OPEN_OF_NETWORK = 4096, 512
LEFT_OPEN_S = 60.0  # for a key that may not come in any more: if it wakes within that, it is told so

Name = TypeVar("Name", str, bytes)


class Bounds(NamedTuple):
    of_key: int
    silent: int  # over which nothing was said yet, in all
    silent_of_network: int


class Lines:
    """A line is a connection, by its descriptor.  `room`: so many may be open."""

    def __init__(self, room: int, bounds: Bounds | None = None) -> None:
        """`bounds`: None for those of a coordinator's members."""
        self._room = room
        self._bounds = bounds or Bounds(LINES_OF_KEY, HALF_OPEN, HALF_OPEN_OF_NETWORK)
        self._open: dict[int, tuple[bytes, bytes]] = {}  # (its name, its key); empty: it has said nothing
        self._silent: OrderedDict[int, str] = OrderedDict()  # each with its network, the oldest first
        self._of_network: dict[str, OrderedDict[int, None]] = {}  # the silent ones of each
        self._of_key: dict[bytes, OrderedDict[int, None]] = {}  # that spoke, the longest silent first
        self._going: set[int] = set()  # that were to be cut, and have not ended yet
        self._leave_at: dict[bytes, float] = {}  # keys whose lines are to end then

    def __len__(self) -> int:
        """Those that are to stay."""
        return len(self._open) - len(self._going)

    def comes(self, line: int, network: str) -> list[int]:
        """Before its handshake.  Which lines are to be cut for it: none, or a silent one."""
        self.ends(line)  # its number was that of a line whose end was never told
        neighbours = self._of_network.get(network, OrderedDict())
        cut: list[int] = []
        if network and len(neighbours) >= self._bounds.silent_of_network:
            cut = [next(iter(neighbours))]
        elif self._silent and (len(self._silent) >= self._bounds.silent or len(self) >= self._room):
            cut = [next(iter(self._silent))]
        for each in cut:
            self._let_go(each)
        self._open[line] = b"", b""
        self._silent[line] = network
        self._of_network.setdefault(network, OrderedDict())[line] = None
        return cut

    def heard(self, line: int, name: bytes, key: bytes) -> list[int]:
        """A frame came.  Which lines are to be cut: none; or the longest silent one of this key, which is this very one
        where others have taken all the room."""
        if line not in self._open:
            return []  # these are last words
        _, known = self._open[line]
        if known != key and line not in self._going:
            self._unrank(line)
        self._open[line] = name, key
        if line in self._going:
            return []
        mine = self._of_key.setdefault(key, OrderedDict())
        mine[line] = None
        mine.move_to_end(line)
        if known == key or (len(mine) <= self._bounds.of_key and len(self) <= self._room):
            return []
        oldest = next(iter(mine))
        self._let_go(oldest)
        return [oldest]

    def is_silent(self, line: int) -> bool:
        """It is open, and nothing was said over it yet."""
        return line in self._silent

    def ends(self, line: int) -> bytes:
        """Its name; empty if it never spoke."""
        self._unrank(line)
        self._going.discard(line)
        return self._open.pop(line, (b"", b""))[0]

    def silent(self) -> list[int]:
        """Of a key that must go some may be among them; those of others dial again."""
        return list(self._silent)

    def send_away(self, key: bytes, at: float) -> None:
        """Its lines are to end then, if it is not let in again."""
        self._leave_at[key] = min(at, self._leave_at.get(key, at))

    def due(self, now: float, stays: Callable[[bytes], bool]) -> list[int]:
        """Which lines are to be cut now."""
        keys = {key for key, at in self._leave_at.items() if now >= at}
        for key in keys:
            del self._leave_at[key]
        leave = {key for key in keys if not stays(key)}
        return [line for line, (_, key) in self._open.items() if key in leave] if leave else []

    def _let_go(self, line: int) -> None:
        self._unrank(line)
        self._going.add(line)

    def _unrank(self, line: int) -> None:
        network = self._silent.pop(line, None)
        if network is not None:
            _drop(self._of_network, network, line)
        elif line in self._open:
            _drop(self._of_key, self._open[line][1], line)


def _drop(ranks: dict[Name, OrderedDict[int, None]], name: Name, line: int) -> None:
    rank = ranks.get(name, OrderedDict())
    rank.pop(line, None)
    if not rank:
        ranks.pop(name, None)
