"""farflung's own wide-area network on one machine: hosts that are far apart, for tests and benchmarks.

    with Lab([HostSpec("a", up_mbit=200, down_mbit=200, delay_ms=25), HostSpec("b")], seed=1) as lab:
        server = lab.hosts["a"].popen([sys.executable, "server.py"])
        lab.cut("a", "b")

Each host is a network namespace; router.py is the only way between them. What runs in a host is an ordinary process
that sees an ordinary device, so nothing in the program under test knows that it is in a lab. This module starts the
router, gives it orders and clears up; it never touches a packet. docs/lab.md has the rest.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from farflung.compression.native import SWITCH, NoLibrary, library
from farflung.protocol.errors import UserError
from rig.lab.shaping import Counters, LineSpec

MESSAGE_BYTES = 1 << 17
MAX_HOSTS = 100
DEFAULT_QUEUE_S, LEAST_QUEUE_KB = 0.1, 64
TCP_BUFFER_BYTES = 64 << 20  # so that one stream can fill 1 Gbit/s at 500 ms
END_WITHIN_S = 20.0


@dataclass(frozen=True)
class HostSpec:
    """A host's line. Delay, jitter and loss apply to each direction: a round trip between two hosts takes twice the
    sum of their delays, and a packet survives with (1 - loss of one) * (1 - loss of the other).

    `queue_kb` is the modem's queue in each direction; None is 100 ms of the direction's rate, at least 64 kB.
    """

    name: str
    up_mbit: float = 1000.0
    down_mbit: float = 1000.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_kb: float | None = None

    def check(self) -> None:
        if not (0 < self.up_mbit < math.inf and 0 < self.down_mbit < math.inf):
            raise UserError(f"host {self.name}: rates must be above 0; use lab.cut to stop a line")
        if self.delay_ms < 0 or self.jitter_ms < 0 or not 0 <= self.loss <= 1:
            raise UserError(
                f"host {self.name}: delay and jitter must not be below 0, and loss is from 0 to 1"
            )
        if self.queue_kb is not None and self.queue_kb < 2:
            raise UserError(f"host {self.name}: a queue holds at least one packet, so 2 kB or more")

    def line(self, mbit: float) -> LineSpec:
        rate_bit_s = mbit * 1e6
        kb = self.queue_kb
        if kb is None:
            kb = max(LEAST_QUEUE_KB, rate_bit_s / 8 * DEFAULT_QUEUE_S / 1000)
        return LineSpec(rate_bit_s, int(kb * 1000), self.delay_ms / 1e3, self.jitter_ms / 1e3, self.loss)

    def lines(self) -> tuple[LineSpec, LineSpec]:
        return self.line(self.up_mbit), self.line(self.down_mbit)


@dataclass(frozen=True)
class Effort:
    """What the router needed: figures are only worth something if it was rarely late."""

    cpu_s: float
    worst_late_s: float  # since last asked


class Host:
    def __init__(self, spec: HostSpec, address: str) -> None:
        self.spec, self.name, self.address = spec, spec.name, address
        self._enter: list[str] = []
        self.namespaces: list[int] = []  # open files, in the order in which they are entered
        self._started: list[subprocess.Popen[Any]] = []

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs `argv` inside this host, under the same user and the same process id."""
        if not self._enter:
            raise RuntimeError(f"host {self.name} is not up; use it inside `with Lab(...)`")
        return [*self._enter, "--", *map(str, argv)]

    def popen(self, argv: Sequence[str | Path], **kwargs: Any) -> subprocess.Popen[Any]:
        """Like subprocess.Popen, inside this host. It is killed when the lab ends."""
        process = subprocess.Popen(self.command(argv), **kwargs)
        self._started.append(process)
        return process

    def _come_up(self, enter: list[str], namespaces: list[int]) -> None:
        self._enter, self.namespaces = enter, namespaces

    def _go_down(self) -> None:
        self._enter, self.namespaces = [], []
        for process in self._started:
            process.kill()  # the router has done so, with all children; this is for a router that was killed itself
            process.wait()


@functools.cache
def compiled() -> str:
    """The router's inner part as a library, or "" where there is no compiler: then the same goes on in Python."""
    if os.environ.get(SWITCH) == "0":
        return ""
    try:
        return str(library(os.environ, Path(__file__).with_name("fast.c")))
    except NoLibrary:
        return ""


class Lab:
    def __init__(
        self, hosts: Sequence[HostSpec], seed: int = 0, tcp_buffer_bytes: int | None = TCP_BUFFER_BYTES
    ) -> None:
        """`tcp_buffer_bytes` bounds what one TCP connection may buffer in a host; None keeps the kernel's default."""
        for spec in hosts:
            spec.check()
        if len({spec.name for spec in hosts}) != len(hosts) or not 1 <= len(hosts) <= MAX_HOSTS:
            raise UserError(f"a lab has from 1 to {MAX_HOSTS} hosts, each with a name of its own")
        self.hosts = {spec.name: Host(spec, f"10.77.0.{number}") for number, spec in enumerate(hosts, 1)}
        self._numbers = {spec.name: number for number, spec in enumerate(hosts)}
        self._seed, self._tcp_buffer_bytes = seed, tcp_buffer_bytes
        self._router: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._namespace_fds: list[int] = []
        self._asking = threading.Lock()  # faults may come from a thread of their own

    @staticmethod
    @functools.cache
    def unavailable() -> str | None:
        """Why a lab cannot run on this machine; None if it can. It builds one host to find out."""
        try:
            with Lab([HostSpec("probe")]):
                return None
        except UserError as error:
            return str(error)

    def __enter__(self) -> Lab:
        if sys.platform != "linux" or shutil.which("nsenter") is None:
            raise UserError("the lab needs Linux, and nsenter (of util-linux) on the PATH")
        self._start_router()
        try:
            self._build_hosts()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the router, which kills all that runs in the hosts; the kernel removes devices and namespaces."""
        if self._router is None or self._control is None:
            return
        self._control.close()
        for fd in self._namespace_fds:
            os.close(fd)
        self._router.wait(END_WITHIN_S)
        for host in self.hosts.values():
            host._go_down()
        self._router, self._control, self._namespace_fds = None, None, []

    # ---- orders --------------------------------------------------------------------------------------------------

    def cut(self, host: str, other: str | None = None, *, one_way: bool = False) -> None:
        """Cuts a host off from all, or from one other. With `one_way` only what `host` sends is lost."""
        self._ask({"do": "cut", **self._pair(host, other), "one_way": one_way})

    def heal(self, host: str, other: str | None = None) -> None:
        """Undoes the cuts that were made with the same names, in both directions."""
        self._ask({"do": "heal", **self._pair(host, other)})

    def set_rate(self, host: str, *, up_mbit: float | None = None, down_mbit: float | None = None) -> None:
        """What is not given stays. What is queued goes on at the new rate."""
        old = self.hosts[host].spec
        spec = replace(old, up_mbit=up_mbit or old.up_mbit, down_mbit=down_mbit or old.down_mbit)
        spec.check()
        up, down = spec.lines()
        self._ask({"do": "set_rate", "host": self._numbers[host], "up": asdict(up), "down": asdict(down)})
        self.hosts[host].spec = spec

    def counters(self) -> dict[str, tuple[Counters, Counters]]:
        """(up, down) of each host, since the lab began."""
        answer = self._ask({"do": "counters"})
        each = [(Counters(**up), Counters(**down)) for up, down in answer["hosts"]]
        return dict(zip(self.hosts, each, strict=True))

    def effort(self) -> Effort:
        return Effort(**self._ask({"do": "effort"}))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _start_router(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent_fd = os.pidfd_open(os.getpid())
        folder = str(Path(__file__).resolve().parents[2])
        try:
            self._router = subprocess.Popen(
                # It needs nothing but the standard library, so it starts at once. A session of its own, so that
                # Ctrl-C reaches the hosts' processes through their owner and not the network under them.
                [sys.executable, "-S", "-P", "-m", "rig.lab.router", str(theirs.fileno()), str(parent_fd)],
                pass_fds=[theirs.fileno(), parent_fd],
                env={**os.environ, "PYTHONPATH": folder},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(parent_fd)
        self._control = ours

    def _build_hosts(self) -> None:
        lines = [[asdict(line) for line in host.spec.lines()] for host in self.hosts.values()]
        order = {
            "addresses": [host.address for host in self.hosts.values()],
            "lines": lines,
            "seed": self._seed,
            "tcp_buffer_bytes": self._tcp_buffer_bytes,
            "library": compiled(),
        }
        answer = self._ask(order)
        files = list(self._namespace_fds)
        users = [files.pop()] if answer["user_namespace"] else []
        path = f"/proc/{os.getpid()}/fd"
        enter = ["nsenter", "--preserve-credentials", *(f"--user={path}/{fd}" for fd in users)]
        for host, file in zip(self.hosts.values(), files, strict=True):
            host._come_up([*enter, f"--net={path}/{file}"], [*users, file])

    def _pair(self, host: str, other: str | None) -> dict[str, int | None]:
        return {"source": self._numbers[host], "target": None if other is None else self._numbers[other]}

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._control is None:
            raise RuntimeError("the lab is not up; use it inside `with Lab(...)`")
        with self._asking:
            self._control.send(json.dumps(order).encode())
            message, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, MAX_HOSTS + 1)
        self._namespace_fds += fds
        if not message:
            raise RuntimeError("the lab's router ended by itself; its error stands above")
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise UserError(f"the lab cannot run here: {answer['error']}")
        return answer
