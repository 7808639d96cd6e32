"""Starts farflung processes quickly: one process has imported everything, and each new one is forked from it.

    with Nursery(folder) as nursery:
        child = nursery.start(["join", ...], environ, log)   # as `python -m farflung join ...` would

Importing torch costs seconds of CPU, twice for each peer; where sixteen of them come and go on two cores, nothing
else would be measured.  Agents started here have their trainers started here too.  Everything else is as it is in
real life: processes, sockets, signals, exit codes.  Used by arena.py.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

VARIABLE = "FARFLUNG_NURSERY"
CLOCK_VARIABLE = "FARFLUNG_CLOCK_OFF_S"  # by how much a process's clock is wrong
READY_S = 300.0
MODULES = (
    "farflung.peer.agent.agent",
    "farflung.peer.trainer.api",
    "farflung.peer.agent.join",
    "farflung.coordinator.hosting",
)


class Child:
    """A process that the nursery forked; to be used like a subprocess.Popen."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._told = connection.makefile("r")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.wait(0.0)
            except subprocess.TimeoutExpired:
                pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("a child of the nursery", timeout or 0.0)
            line = self._told.readline()
            self.returncode = int(line) if line else -signal.SIGKILL  # the nursery itself is gone
            self._told.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it ended just now, and the nursery is about to say so
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def ask(place: str, words: Sequence[str], environ: Mapping[str, str], log: str) -> Child:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    request = {"words": list(words), "environ": dict(environ), "log": log}
    connection.sendall(json.dumps(request).encode() + b"\n")
    return Child(connection)


class Nursery:
    def __init__(self, folder: Path, inside: Callable[[list[str]], list[str]] = list) -> None:
        """`inside`: the command line that runs another one elsewhere, such as in a host of the lab."""
        self.place = str(folder / "nursery.sock")
        self._log = folder / "nursery.log"
        self._inside = inside

    def __enter__(self) -> Nursery:
        with self._log.open("w") as log:
            command = self._inside([sys.executable, str(Path(__file__).resolve()), self.place])
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env=environ)
        end = time.monotonic() + READY_S
        while not Path(self.place).exists():
            alive = self._process.poll() is None and time.monotonic() < end
            assert alive, self._log.read_text()
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def children(self) -> list[int]:
        """All that it started and that still runs."""
        told = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in told.split()]

    def start(self, words: Sequence[str], environ: Mapping[str, str], log: Path) -> Child:
        return ask(self.place, words, {**os.environ, **environ, VARIABLE: self.place}, str(log))


# ---- the nursery's own process -----------------------------------------------------------------------------


def serve(place: str) -> None:
    import_everything()
    sys.addaudithook(refuse_pickles)
    waker, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    door = socket.socket(socket.AF_UNIX)
    aside = f"{place}.new"
    door.bind(aside)
    door.listen(64)
    os.rename(aside, place)  # whoever sees the name can connect
    waiting: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)
        selector.register(waker, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is waker:
                    waker.recv(4096)
                    tell_ends(waiting)
                else:
                    connection, _ = door.accept()
                    waiting[fork(connection, [door, waker, wake, *waiting.values()])] = connection


def refuse_pickles(event: str, _: object) -> None:
    """In everything that is forked from here: whatever unpickles is shown up by its end."""
    if event == "pickle.find_class":
        raise RuntimeError("a process of farflung unpickled something")


def tell_ends(waiting: dict[int, socket.socket]) -> None:
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = waiting.pop(pid)
        with contextlib.suppress(OSError):  # whoever asked is gone
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        connection.close()


def fork(connection: socket.socket, mine: list[socket.socket]) -> int:
    request = json.loads(connection.makefile("r").readline())
    pid = os.fork()
    if pid == 0:
        for each in [*mine, connection]:
            each.close()
        become(request)
    connection.sendall(f"{pid}\n".encode())
    return pid


def become(request: dict[str, object]) -> None:
    """Never returns: the rest of this process's life is farflung's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[call-overload]
    random.seed()
    if off_s := float(os.environ.get(CLOCK_VARIABLE, "0")):
        right = time.time
        time.time = lambda: right() + off_s
    words = [str(word) for word in request["words"]]  # type: ignore[attr-defined]
    code = 1
    try:
        code = run(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(words: list[str]) -> int:
    import atexit

    from farflung.console import main
    from farflung.peer.agent import supervisor

    supervisor.subprocess = TrainersFromHere  # type: ignore[assignment, attr-defined]
    if words[0] == "-m" or words[0].endswith(".py"):
        sys.argv = words[1:] if words[0] == "-m" else words
        try:
            (runpy.run_module if words[0] == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
        finally:
            atexit._run_exitfuncs()
        return 0
    sys.argv = ["farflung", *words]
    return main.main()


class TrainersFromHere:
    """Stands in for `subprocess` in farflung.peer.agent.supervisor."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    class Popen:
        def __new__(cls, command: Sequence[str], env: Mapping[str, str], **_: object) -> Child:  # type: ignore[misc]
            return ask(env[VARIABLE], command[1:], env, os.readlink("/proc/self/fd/2"))


def import_everything() -> None:
    for name in MODULES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()  # the first optimizer of a process imports a compiler


if __name__ == "__main__":
    serve(sys.argv[1])
