"""A port of this machine's router that leads here, for as long as the peer lives: the socket around port_request.py.

Opened by peer/line/data_line.py, before it tells others its address.  A thread asks the router on the way to the
coordinator, keeps the port open, and closes it at the end; where the router knows neither PCP nor NAT-PMP, and the
extra `upnp` is installed, UPnP is tried (miniupnpc).  What the router says is no promise: the coordinator dials back
before anybody hears of the address.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import select
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflung.peer.router.port_request import NONCE_BYTES, PORT, PortRequest

ROUTES = Path("/proc/net/route")
LONGEST_BYTES = 1100  # of PCP
CLOSING_S = 0.2
_LOOK_S = 60.0
_HAS_GATEWAY = 2
UPNP_DISCOVERY_MS = 500


def router_towards(host: str, routes: Path = ROUTES) -> str:
    """The router through which this machine reaches that IPv4 address; empty where there is none between, or nobody
    can tell."""
    try:
        there = int(ipaddress.IPv4Address(host))
        lines = routes.read_text().splitlines()[1:]
    except (ValueError, OSError):
        return ""
    best, found = -1, ""
    for line in lines:
        words = line.split()
        if len(words) < 8:
            continue
        network, gateway, mask = (int.from_bytes(bytes.fromhex(words[at]), "little") for at in (1, 2, 7))
        if there & mask == network and mask > best:
            has_gateway = int(words[3], 16) & _HAS_GATEWAY
            best, found = mask, str(ipaddress.IPv4Address(gateway)) if has_gateway else ""
    return found


def may_be_behind_one(here: str) -> bool:
    """This machine's address is one of a home's network."""
    try:
        ip = ipaddress.IPv4Address(here)
    except ValueError:
        return False  # IPv6 has no need of it, or of another way
    return not ip.is_global and not ip.is_loopback


class OpenedPort:
    def __init__(self, router: str, port: int, router_port: int = PORT) -> None:
        """Begins to ask at once.  `port`: of this machine."""
        self._line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._line.connect((router, router_port))
        self._asking = PortRequest(str(self._line.getsockname()[0]), port, os.urandom(NONCE_BYTES))
        self._settled = threading.Event()
        self._stop, self._wake = socket.socketpair()
        self._upnp: ByUPnP | None = None
        self._address = self._why_not = ""
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()

    def address(self, patience_s: float) -> str:
        """HOST:PORT outside, once the router has said so; empty where it says no, or nothing within the time."""
        self._settled.wait(patience_s)
        return self._address

    @property
    def why_not(self) -> str:
        return self._why_not

    def close(self) -> None:
        """The port is closed again; a router that does not answer is not waited for."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(5.0)
        for each in (self._line, self._stop, self._wake):
            each.close()

    def _run(self) -> None:
        while not self._turn():
            pass
        for each in self._asking.closing():
            self._say(each)
        if self._asking.closing():
            select.select([self._line], [], [], CLOSING_S)  # or our own end might overtake it
        if self._upnp is not None:
            self._upnp.close()

    def _turn(self) -> bool:
        """True at the end."""
        now = time.monotonic()
        for each in self._asking.due(now):
            self._say(each)
        self._look()  # it may just have been given up
        wait_s = min(_LOOK_S, self._asking.wait_s(time.monotonic()))
        readable, _, _ = select.select([self._line, self._stop], [], [], wait_s)
        if self._stop in readable:
            return True
        if self._line in readable:
            try:
                self._asking.hear(self._line.recv(LONGEST_BYTES), time.monotonic())
            except ConnectionRefusedError:
                self._asking.nobody_listens()
            except OSError as error:
                self._why_not = error.strerror or str(error)
        self._look()
        return False

    def _look(self) -> None:
        asking = self._asking
        if asking.why_not and self._upnp is None and not self._why_not:
            self._upnp, self._why_not = open_by_upnp(asking.port, asking.why_not)
        self._address = asking.address or (self._upnp.address if self._upnp is not None else "")
        if self._address or self._why_not:
            self._settled.set()

    def _say(self, raw: bytes) -> None:
        try:
            self._line.send(raw)
        except ConnectionRefusedError:
            self._asking.nobody_listens()  # the answer to what was sent before
        except OSError as error:
            self._why_not = self._why_not or error.strerror or str(error)


# ---- UPnP ------------------------------------------------------------------------------------------------------------


@dataclass
class ByUPnP:
    """A lease of UPnP has no end: it is taken back when the peer ends; one that was killed leaves it to the router."""

    router: Any
    port: int
    address: str

    def close(self) -> None:
        try:
            self.router.deleteportmapping(self.port, "TCP")
        except Exception:  # the outermost call of miniupnpc, which raises nothing narrower
            return


def open_by_upnp(port: int, why_not: str) -> tuple[ByUPnP | None, str]:
    """(what is open, or why nothing is); it takes a second.  `why_not`: what came of the other protocols."""
    try:
        library = importlib.import_module("miniupnpc")
    except ImportError:
        return None, why_not
    try:
        router = library.UPnP()
        router.discoverdelay = UPNP_DISCOVERY_MS
        if not router.discover() or not router.selectigd():
            return None, f"{why_not}; nor does one answer to UPnP"
        if not router.addportmapping(port, "TCP", router.lanaddr, port, "farflung", ""):
            return None, f"{why_not}; by UPnP it opens no port"
        return ByUPnP(router, port, f"{router.externalipaddress()}:{port}"), ""
    except Exception as error:  # the outermost call of miniupnpc, which raises nothing narrower
        return None, f"{why_not}; UPnP: {error}"
