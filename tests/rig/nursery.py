"""Starts farflung processes quickly: one process has imported everything, and each new one is forked from it.

    with Nursery(folder) as nursery:
        child = nursery.start(["join", ...], environ, log)   # as `python -m farflung join ...` would
        found = nursery.call(["status", ...], environ)       # as subprocess.run would

Importing torch costs seconds of CPU, twice for each peer; where sixteen of them come and go on two cores, nothing
else would be measured.  What is started here starts its own processes here too: agents their trainers, a bench its
coordinator and trainers; a trainer forks its agent itself, which looks whose child it is.  Everything else is as it is
in real life: processes, sockets, signals, exit codes.  Used by arena.py, lab_run.py and many tests.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

VARIABLE = "FARFLUNG_NURSERY"
CLOCK_VARIABLE = "FARFLUNG_CLOCK_OFF_S"  # by how much a process's clock is wrong
READY_S = 300.0
LOOK_S = 0.01
MODULES = (
    "farflung.peer.agent.agent",
    "farflung.peer.agent.main",
    "farflung.peer.trainer.api",
    "farflung.peer.agent.join",
    "farflung.coordinator.hosting",
    "farflung.console.bench.bench",
    # What a command imports as late as it can.
    "farflung.console.screen.embedded",
    "farflung.console.history.live_tracker",
    "farflung.console.phonebook.announcer",
    "farflung.console.web.page_keeper",
    "farflung.console.run_toml",
)
NAMESPACES = 2  # of a host of the lab: its network's, and the one of its users if that is not this machine's

Output = int | IO[str]  # as for a subprocess: PIPE, DEVNULL, a number or a file


class Child:
    """A process that the nursery forked; to be used like a subprocess.Popen."""

    def __init__(self, connection: socket.socket, pipes: Sequence[IO[str] | None] = (None, None)) -> None:
        self._connection = connection
        self._told = connection.makefile("r")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None
        self.stdout, self.stderr = pipes

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

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it said, once it has ended: as little as a pipe holds."""
        self.wait(timeout)
        said = ["", ""]
        for number, pipe in enumerate((self.stdout, self.stderr)):
            if pipe is not None:
                said[number] = pipe.read()
                pipe.close()
        return said[0], said[1]

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


def ask(
    place: str,
    words: Sequence[str],
    environ: Mapping[str, str],
    stdout: Output,
    stderr: Output,
    namespaces: Sequence[int] = (),
) -> Child:
    with contextlib.ExitStack() as here:
        pipes: list[IO[str] | None] = []
        ends: list[int] = []
        for wanted in (stdout, stderr):
            pipe, end = end_of(wanted, here)
            pipes.append(pipe)
            ends.append(end)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(place)
        socket.send_fds(connection, [b" "], [*ends, *namespaces])
        connection.sendall(json.dumps({"words": list(words), "environ": dict(environ)}).encode() + b"\n")
        return Child(connection, pipes)


def end_of(wanted: Output, here: contextlib.ExitStack) -> tuple[IO[str] | None, int]:
    """What is read by whoever asked, and the file that the new process writes into."""
    if wanted == subprocess.PIPE:
        mine, its = os.pipe()
        here.callback(os.close, its)
        return open(mine, encoding="utf-8"), its
    if wanted == subprocess.DEVNULL:
        its = os.open(os.devnull, os.O_WRONLY)
        here.callback(os.close, its)
        return None, its
    return None, wanted if isinstance(wanted, int) else wanted.fileno()


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
        with log.open("a") as file:
            return self.popen(words, environ, file, file)

    def popen(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        stdout: Output,
        stderr: Output,
        namespaces: Sequence[int] = (),
    ) -> Child:
        """`namespaces`: of the lab's host in which it is to be (Host.namespaces)."""
        whole = {**os.environ, **environ, VARIABLE: self.place}
        return ask(self.place, words, whole, stdout, stderr, namespaces)

    def call(
        self, words: Sequence[str], environ: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself; it is asked to where it does not in time."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = self.popen(words, environ, out, err)
            try:
                child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                child.terminate()  # it ends what it has started
                child.wait()
                err.write(f"\nit did not end within {timeout_s:g} s\n")
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(list(words), child.wait(), out.read(), err.read())


def end_in_turn(children: Iterable[Child], patience_s: float) -> None:
    """Whoever came first goes last: a peer says good-bye to its coordinator."""
    for child in reversed(list(children)):
        child.terminate()
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


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
    _, files, _, _ = socket.recv_fds(connection, 1, 2 + NAMESPACES)
    request = json.loads(connection.makefile("r").readline())
    pid = os.fork()
    if pid == 0:
        for each in [*mine, connection]:
            each.close()
        become(request["words"], request["environ"], files)
    for file in files:
        os.close(file)
    connection.sendall(f"{pid}\n".encode())
    return pid


def become(words: list[str], environ: Mapping[str, str], files: list[int]) -> None:
    """Never returns: the rest of this process's life is farflung's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, file in enumerate(files[:2], start=1):
        os.dup2(file, number)
    for file in files[2:]:
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            raise OSError(ctypes.get_errno(), "the host of the lab cannot be entered")
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    random.seed()
    atexit._clear()
    from farflung.protocol.process import as_nobody

    as_nobody.S3_ENDPOINT = os.environ.get(
        "AWS_ENDPOINT_URL"
    )  # what a run names is looked for in the test's S3
    if off_s := float(os.environ.get(CLOCK_VARIABLE, "0")):
        right = time.time
        time.time = lambda: right() + off_s
    code = 1
    try:
        code = run(words)
    except SystemExit as end:
        code = code_of(end)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as an interpreter does
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:  # a hook may say with which code the process ends
            code = code_of(end)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def code_of(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def run(words: list[str]) -> int:
    from farflung.console import main
    from farflung.console.bench import bench
    from farflung.peer.agent import supervisor
    from farflung.peer.trainer import agent_process

    for module in (supervisor, bench):
        module.subprocess = FromTheNursery  # type: ignore[assignment, attr-defined]
    agent_process.subprocess = ForkedHere  # type: ignore[assignment, attr-defined]
    if words[0] in ("-m", "-c") or words[0].endswith(".py"):
        sys.argv = words[1:] if words[0] == "-m" else words
        if words[0] == "-c":
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(words[1], sys.modules["__main__"].__dict__)
        else:
            (runpy.run_module if words[0] == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
        return 0
    sys.argv = ["farflung", *words]
    return main.main()


class FromTheNursery:
    """Stands in for `subprocess` where farflung starts processes of its own that need not be its children."""

    DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE
    TimeoutExpired = subprocess.TimeoutExpired

    class Popen:
        def __new__(  # type: ignore[misc]
            cls,
            command: Sequence[str],
            env: Mapping[str, str],
            stdout: Output = 1,
            stderr: Output = 2,
            **_: object,
        ) -> Child:
            return ask(env[VARIABLE], command[1:], env, stdout, stderr)


class ForkedHere:
    """Stands in for `subprocess` where a trainer starts its agent: before it has any thread or socket."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    class Popen:
        def __init__(self, command: Sequence[str], **_: object) -> None:
            self.returncode: int | None = None
            self.pid = os.fork()
            if self.pid == 0:
                become(list(command[1:]), dict(os.environ), [os.open(os.devnull, os.O_WRONLY), os.dup(2)])

        def poll(self) -> int | None:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

        def wait(self, timeout: float = READY_S) -> int:
            end = time.monotonic() + timeout
            while (code := self.poll()) is None:
                if time.monotonic() >= end:
                    raise subprocess.TimeoutExpired("a forked agent", timeout)
                time.sleep(LOOK_S)
            return code

        def terminate(self) -> None:
            os.kill(self.pid, signal.SIGTERM)

        def kill(self) -> None:
            os.kill(self.pid, signal.SIGKILL)


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
