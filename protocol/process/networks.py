"""Networks: everybody in an IPv4 /24 or an IPv6 /48 counts as one, and has only so many connections.  Pure.

Used at every port and by the admission: somebody with one address usually has its neighbours as well.  This machine
itself is no network: behind a local proxy every stranger would seem to come from here.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from functools import lru_cache

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
