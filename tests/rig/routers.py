"""Homes behind routers, on one machine: network namespaces, each host behind a NAT of its own made by nftables.

    with Homes(["ann", "bob"], Router(hard=True)) as homes:
        homes.popen("host", [...])     # the one with a public address
        homes.popen("ann", [...])

Needs root, iproute2 and nftables; `Homes.unavailable()` says what is missing.  The lab (rig/lab/) has lines of all
sorts and no routers; here lines are as the kernel makes them, or a little longer, and routers let nobody in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PUBLIC = "10.99.0"
HOST = "host"
_SWITCH = (sys.executable, Path(__file__).with_name("slow_switch.py"))
_RULES = """
table ip nat {{
 chain pre {{
  type nat hook prerouting priority -100;
  {forward}
 }}
 chain post {{
  type nat hook postrouting priority 100;
  oifname "wan" masquerade {random}
 }}
}}
table ip filter {{
 chain forward {{
  type filter hook forward priority 0; policy drop;
  ct state established,related accept
  ct status dnat accept
  iifname "lan" accept
 }}
 chain input {{
  type filter hook input priority 0; policy {closed};
  ct state established,related accept
  iifname "lan" accept
 }}
}}
"""


@dataclass(frozen=True)
class Router:
    hard: bool = False  # another port for each connection, by chance: nobody can guess it
    opens: int = 0  # this port of it leads to the same port of the home; 0: none does
    resets: bool = False  # who knocks at a closed port is told so; else the packet is dropped
    mbit: float = 0.0  # of the home's line, both ways; 0: as fast as it goes
    # From one router to another.  Without any, two first packets never cross: whoever is later finds that the other
    # router has said no.
    delay_s: float = 0.0


@dataclass
class Homes:
    names: Sequence[str]
    router: Router = field(default_factory=Router)
    others: Mapping[str, Router] = field(default_factory=dict)  # homes whose router is another one
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @staticmethod
    def unavailable() -> str:
        """Why there can be no homes here; empty if there can."""
        missing = [name for name in ("ip", "nft", "sysctl") if shutil.which(name) is None]
        if os.geteuid() != 0:
            return "NOT RUN: namespaces with routers need root"
        if missing:
            return f"NOT RUN: {', '.join(missing)} is not installed (Debian: iproute2, nftables, procps)"
        made = subprocess.run(["ip", "netns", "add", f"ffprobe{os.getpid()}"], capture_output=True, text=True)
        if made.returncode:
            return f"NOT RUN: no network namespace can be made here: {made.stderr.strip()}"
        rules = _RULES.format(random="", closed="drop", forward="")
        command = ["ip", "netns", "exec", f"ffprobe{os.getpid()}", "nft", "-f", "-"]
        done = subprocess.run(command, input=rules, capture_output=True, text=True)
        _ip("netns", "del", f"ffprobe{os.getpid()}")
        return f"NOT RUN: nftables: {done.stderr.strip()[:200]}" if done.returncode else ""

    @property
    def _prefix(self) -> str:
        return f"ff{os.getpid()}"

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}{name}"

    @property
    def host_address(self) -> str:
        return f"{PUBLIC}.1"

    def __enter__(self) -> Homes:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._started:
            each.kill()
            each.wait()
        for name in self._all():
            subprocess.run(["ip", "netns", "del", self._namespace(name)], capture_output=True)

    def _all(self) -> list[str]:
        return ["net", HOST, *self.names, *(f"r{name}" for name in self.names)]

    def _build(self) -> None:
        for name in self._all():
            _ip("netns", "add", self._namespace(name))
            _ip("-n", self._namespace(name), "link", "set", "lo", "up")
        net = self._namespace("net")
        _ip("-n", net, "link", "add", "br0", "type", "bridge")
        _ip("-n", net, "link", "set", "br0", "up")
        for number, name in enumerate([HOST, *(f"r{name}" for name in self.names)], 1):
            self._join(name, "wan", "net", f"p{number}")
            if self.router.delay_s:
                _ip("-n", net, "link", "set", f"p{number}", "promisc", "on")
            else:
                _ip("-n", net, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", self._namespace(name), "addr", "add", f"{PUBLIC}.{number}/24", "dev", "wan")
        for number, name in enumerate(self.names, 1):
            router, home = self._namespace(f"r{name}"), self._namespace(name)
            self._join(f"r{name}", "lan", name, "eth0")
            _ip("-n", router, "addr", "add", f"192.168.{number}.1/24", "dev", "lan")
            _ip("-n", home, "addr", "add", f"192.168.{number}.2/24", "dev", "eth0")
            _ip("-n", home, "route", "add", "default", "via", f"192.168.{number}.1")
            _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            kind = self.others.get(name, self.router)
            to = f"tcp dport {kind.opens} dnat to 192.168.{number}.2:{kind.opens}"
            rules = _RULES.format(
                random="random,fully-random" if kind.hard else "",
                closed="accept" if kind.resets else "drop",
                forward=f'iifname "wan" {to}' if kind.opens else "",
            )
            _run("ip", "netns", "exec", router, "nft", "-f", "-", input=rules)
        if self.router.delay_s:
            self._slow_down()

    def _slow_down(self) -> None:
        for name in self._all():
            found = json.loads(_ip("-j", "-n", self._namespace(name), "link", "show"))
            self._run_here(name, [*_SWITCH, "plain", *(str(each["ifname"]) for each in found)])
        ports = [f"p{number}" for number in range(1, 2 + len(self.names))]
        self.popen("net", [*_SWITCH, str(self.router.delay_s), *ports])

    def public_address(self, name: str) -> str:
        """Of that home's router."""
        return f"{PUBLIC}.{2 + self.names.index(name)}"

    def open_ports(self, name: str) -> None:
        """That home's router opens ports from now on, for whoever asks it to (fake_router.py)."""
        inside, outside = self.names.index(name) + 1, 2 + self.names.index(name)
        env = os.environ | {"PYTHONPATH": rig_path()}
        command = [sys.executable, "-m", "rig.fake_router", f"192.168.{inside}.1", f"{PUBLIC}.{outside}"]
        self.popen(f"r{name}", command, env=env)

    def rules(self, name: str) -> str:
        """Of that home's router."""
        return _run(*self.command(f"r{name}", ["nft", "list", "ruleset"]))

    def _run_here(self, name: str, argv: Sequence[str | Path]) -> None:
        _run(*self.command(name, argv))

    def _join(self, one: str, device: str, other: str, there: str) -> None:
        """A wire between two namespaces."""
        names = self._namespace(one), self._namespace(other)
        _ip(
            "link", "add", device, "netns", names[0], "type", "veth", "peer", "name", there, "netns", names[1]
        )
        for namespace, each in zip(names, (device, there), strict=True):
            _ip("-n", namespace, "link", "set", each, "up")
            if self.router.mbit and device == "wan":  # out of both ends: up and down
                rate = f"{self.router.mbit:g}mbit"
                _ip_netns(namespace, "tc", "qdisc", "add", "dev", each, "root", "tbf", "rate", rate,
                          "burst", "64kb", "latency", "100ms")  # fmt: skip

    def command(self, name: str, argv: Sequence[str | Path]) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(name), *map(str, argv)]

    def popen(self, name: str, argv: Sequence[str | Path], **more: Any) -> subprocess.Popen[Any]:
        """In that home, or at the host.  It is killed when the homes are taken down."""
        process = subprocess.Popen(self.command(name, argv), **more)
        self._started.append(process)
        return process


def rig_path() -> str:
    """PYTHONPATH of a program of rig/."""
    return os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _ip_netns(namespace: str, *words: str) -> None:
    _run("ip", "netns", "exec", namespace, *words)


def _run(*words: str, input: str | None = None) -> str:
    done = subprocess.run(words, input=input, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
