"""A real etcd, of one or three, on loopback ports; and a line to it that can be cut.

    with EtcdCluster(folder, 3) as cluster:
        cluster.url("runs/demo")
        cluster.kill(cluster.leader)     # SIGKILL; cluster.start(0) starts it again

Used by tests/coordinator/standby/, tests/chaos/test_standby.py and benchmarks/standby.py.  In Debian it is etcd-server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rig.ports import free_ports
from rig.waiting import eventually

MISSING = "NOT RUN: etcd is not installed (Debian: etcd-server)"
MEMORY, MEMORY_LEAST = Path("/dev/shm"), 2 << 30  # each of them takes 64 MB before it has a record
needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason=MISSING)


class EtcdCluster:
    def __init__(
        self,
        folder: Path,
        count: int = 1,
        options: Sequence[str] = (),
        ports: Sequence[int] = (),
        on_disk: bool = False,
    ) -> None:
        """`ports`: of clients, each with the next one for the others; else any that are free.  `on_disk`: its data is
        in the folder as well; else in memory, which outlives each process of it: a busy disk holds up an answer for
        longer than the two seconds in which it has to come."""
        self.folder, self._data, self._memory = folder, folder, None
        if not on_disk and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_LEAST:
            self._memory = tempfile.TemporaryDirectory(prefix="etcd-", dir=MEMORY)
            self._data = Path(self._memory.name)
        self._options = list(options)
        self._ports = list(ports) or [next(free_ports(2)) for _ in range(count)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count

    def __enter__(self) -> EtcdCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for number in range(len(self._ports)):
                self.start(number)
            eventually(lambda: all(self.status(n) for n in range(len(self._ports))), "etcd has elected one")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self._ports)):
            self.kill(number)
        if self._memory is not None:
            self._memory.cleanup()

    @property
    def hosts(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports]

    def url(self, prefix: str = "", hosts: Sequence[str] = (), lease_s: int = 0) -> str:
        query = f"?lease_s={lease_s}" if lease_s else ""
        return f"etcd://{','.join(hosts or self.hosts)}{f'/{prefix}' if prefix else ''}{query}"

    def data(self, number: int) -> Path:
        """Where that one keeps all that it has."""
        return self._data / f"n{number}"

    def start(self, number: int) -> None:
        port, name = self._ports[number], f"n{number}"
        mine, others = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        all_of_them = ",".join(f"n{n}=http://127.0.0.1:{each + 1}" for n, each in enumerate(self._ports))
        words = ["etcd", "--name", name, "--data-dir", str(self.data(number)), "--log-level", "warn"]
        words += ["--listen-client-urls", mine, "--advertise-client-urls", mine]
        words += ["--listen-peer-urls", others, "--initial-advertise-peer-urls", others]
        words += ["--initial-cluster", all_of_them, "--initial-cluster-state", "new", *self._options]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self, number: int) -> None:
        process = self._processes[number]
        if process is not None:
            process.kill()
            process.wait()
            self._processes[number] = None

    def status(self, number: int) -> dict[str, Any]:
        """Empty where it does not answer, or knows no leader."""
        line = http.client.HTTPConnection("127.0.0.1", self._ports[number], timeout=2.0)
        try:
            line.request("POST", "/v3/maintenance/status", "{}")
            told: dict[str, Any] = json.loads(line.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            line.close()
        return told if told.get("leader", "0") != "0" else {}

    @property
    def leader(self) -> int:
        """Which of them leads the others."""

        def look() -> list[int]:
            told = [self.status(number) for number in range(len(self._ports))]
            return [n for n, one in enumerate(told) if one and one["leader"] == one["header"]["member_id"]]

        return int(eventually(look, "one of etcd leads")[0])


class Wire:
    """A port of this machine through which another one is reached, until it is cut: then what is said is lost."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_cut = threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut.set()

    def mend(self) -> None:
        """For connections that are made from now on."""
        self._is_cut.clear()

    def close(self) -> None:
        self._is_cut.set()
        for each in [self._listener, *self._ends]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._ends.append(far)
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while raw := one.recv(1 << 16):
                if self._is_cut.is_set():
                    return  # neither end hears of it
                other.sendall(raw)
            other.shutdown(socket.SHUT_WR)
