"""The dashboard inside `farflung join` and `farflung coordinate`: the same picture, with this process on top.

Called by the command line where there is a terminal.  The real command runs as a child with `--plain`, its words go
into a log as JSON lines, and this process only looks: a screen that breaks or hangs costs no training.  Ctrl-C is
handed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from farflung.console.screen.gpu import Gpu, read_gpus
from farflung.console.screen.health import own_member, place_in_period, waited, why_waiting
from farflung.console.screen.live import Feed, Status, has_terminal, interact
from farflung.console.screen.text import Record, clean, count, number
from farflung.protocol.caps import si
from farflung.protocol.errors import FarflungError, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process.log_lines import LOG_VARIABLE, VERBOSE, facts_of, text_of
from farflung.protocol.states import PeerState

GPU_EVERY_S = 2.0
LOG_LINES = 200
LOG_BYTES = 64 * 1024  # read of a log that may be long
FORGET = 0.99  # of the time per second: the shares are those of the last minutes
SAID_AT_END = 5
_ON_THE_LINE = (PeerState.SCATTER, PeerState.GATHER, PeerState.APPLY, PeerState.SYNCING)
_KINDS = {str(PeerState.INNER): "computes"} | dict.fromkeys(map(str, _ON_THE_LINE), "network")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_URL = re.compile(r"^(farflung://\S+)$", re.M)


def wanted(plain: bool) -> bool:
    """A person sits here, and did not ask for plain lines."""
    return not plain and has_terminal(sys.stdin, sys.stdout, sys.stderr)


class TimeShares:
    """What a peer's time goes into, from looks at it: where its step did not grow, its state says it."""

    def __init__(self) -> None:
        self._spent = {"computes": 0.0, "waits": 0.0, "network": 0.0}
        self._last: tuple[float, float] | None = None  # (when, step)

    def count(self, member: Record, now: float) -> None:
        step = number(member, "step")
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            # A long step is work, too, although the count stands still meanwhile.
            kind = "computes" if step > self._last[1] else _KINDS.get(str(member.get("state")), "waits")
            self._spent = {name: spent * FORGET**seconds for name, spent in self._spent.items()}
            self._spent[kind] += seconds
        self._last = (now, step)

    def shares(self) -> dict[str, float]:
        total = sum(self._spent.values())
        return {name: spent / total for name, spent in self._spent.items()} if total > 0 else {}


@dataclass
class Log:
    path: Path
    _read: int = 0

    def lines(self) -> list[str]:
        """The last ones, as people read them."""
        with self.path.open("rb") as file:
            before = max(0, self.path.stat().st_size - LOG_BYTES)
            file.seek(before)
            lines = file.read().decode("utf-8", "replace").splitlines()
        return [text_of(line) for line in lines[1 if before else 0 :][-LOG_LINES:]]

    def news(self) -> list[str]:
        """Whole lines that came since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            raw = file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode("utf-8", "replace").splitlines()

    def head(self) -> str:
        with self.path.open("rb") as file:
            return file.read(LOG_BYTES).decode("utf-8", "replace")


class OwnProcess:
    """A source for the screen: the child, what its run says, and what this machine does."""

    holds = False

    def __init__(self, child: subprocess.Popen[bytes], log: Log, url: JoinUrl | None) -> None:
        self._child = child
        self._log = log
        self._url = url
        self._hosts = url is None
        self._feed: Feed | None = None
        self._told: dict[str, object] = {"since": time.time()}  # by the child, of itself
        self._shares = TimeShares()
        self._status: Status = {}
        self._waits_for = ""
        self._gpus: list[Gpu] = []
        self._stop = threading.Event()
        threading.Thread(target=self._watch_gpus, daemon=True, name="gpu").start()

    @property
    def is_over(self) -> bool:
        return self._child.poll() is not None

    def on_key(self, key: str) -> None:
        pass

    def close(self) -> None:
        self._stop.set()
        if self._feed is not None:
            self._feed.close()

    def status(self) -> Status | None:
        self._find_out()
        before = self._status
        if self._feed is not None:
            with contextlib.suppress(FarflungError):  # the child says it in the log, and decides what follows
                self._status = self._feed.status() or self._status
        member = own_member(self._status, self._told)
        if member and self._status is not before:
            self._shares.count(member, time.monotonic())
        if (key := waited(self._status, self._told).key) != self._waits_for:
            # Of its own waits the child says since when; of those that the status tells the screen sees it.
            self._waits_for = key
            self._told["since"] = self._told.get("wall") if self._told.get("wait") else time.time()
        return self._status or None

    def _find_out(self) -> None:
        """Who I am, or which URL my run has: the child tells it at its start."""
        if self._hosts and self._url is None and (told := _URL.search(self._log.head())):
            self._url = JoinUrl.parse(told[1])
        for facts in map(facts_of, self._log.news() if not self._hosts else ()):
            if isinstance(facts.get("peer"), str):
                self._told |= {"me": facts["peer"], "name": facts.get("name")}
            if isinstance(facts.get("wait"), str):
                self._told |= {key: facts.get(key) for key in ("wait", "why", "wall")}
        if self._feed is None and self._url is not None:
            self._feed = Feed(self._url)

    def own(self) -> Record:
        log = self._log.lines()
        if self._hosts:
            return {"url": str(self._url or ""), "log": log, "title": "you host this run"}
        name = clean(self._told.get("name"), 40)
        waits = why_waiting(self._status, self._told, time.time())
        text = self._text(own_member(self._status, self._told), log)
        title = f"you: {name}" if name else "you"
        return {"title": title, "waiting": waits, "text": text, "log": log, **self._shares.shares()}

    def _text(self, member: Record, log: list[str]) -> str:
        if not member or "unanswered_s" in self._status:  # what the coordinator told last is old
            return clean(log[-1]) if log else ""
        step, every = place_in_period(self._status, member)
        inner = f"step {count(member, 'step')} ({step:.0f} of {every:.0f})"
        gpu = self._gpus[0] if self._gpus else None
        told = [inner, f"{si(number(member, 'tokens_per_s'))} tokens/s"]
        if gpu is not None:
            share = f"{gpu.used:.0%}, " if gpu.used is not None else ""
            used, whole = si(gpu.memory_used_bytes, "B"), si(gpu.memory_bytes, "B")
            told.append(f"{clean(gpu.name, 24)}: {share}{used} of {whole}")
        return "   ".join(told)

    def _watch_gpus(self) -> None:
        while not self._stop.wait(GPU_EVERY_S):
            self._gpus = read_gpus()
            if not self._gpus:
                return


def run_with_screen(words: list[str], url: JoinUrl | None) -> int:
    """Run `farflung WORDS` below the dashboard; its exit code.  `url` is None where the child makes the run."""
    with _log_file() as log, log.path.open("wb") as file:
        options = ["--plain", "--log-json"]
        if VERBOSE in os.environ.get(LOG_VARIABLE, "").split(","):
            options.append("--verbose")
        command = [sys.executable, "-m", "farflung", words[0], *options, *words[1:]]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C comes here, and is handed on below
            preexec_fn=_die_with_parent,
        )
        before = {
            n: signal.signal(n, _handing_on(child)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        source = OwnProcess(child, log, url)
        try:
            interact(source)
            source.close()
            code = _follow(child, log)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            for number_, handler in before.items():
                signal.signal(number_, handler)
    return code if code >= 0 else 128 - code


def _follow(child: subprocess.Popen[bytes], log: Log) -> int:
    """The screen is gone: the log goes on where the person can see it, until the child has ended."""
    for line in log.lines()[-SAID_AT_END:]:
        print(line, file=sys.stderr, flush=True)
    seen = log.path.stat().st_size
    while True:
        code = child.poll()
        with log.path.open("rb") as file:
            file.seek(seen)
            news = file.read()
        whole = len(news) if code is not None else news.rfind(b"\n") + 1
        seen += whole
        for line in news[:whole].decode("utf-8", "replace").splitlines():
            print(text_of(line), file=sys.stderr, flush=True)
        if code is not None:
            return code
        time.sleep(0.2)


@contextlib.contextmanager
def _log_file() -> Iterator[Log]:
    with tempfile.TemporaryDirectory(prefix="farflung-log-") as folder:
        path = Path(folder) / "log"
        path.touch()
        yield Log(path)


def _handing_on(child: subprocess.Popen[bytes]) -> Callable[[int, object], None]:
    """The first two ask it to leave; a third one means it."""
    asked = []

    def handler(number_: int, _: object) -> None:
        asked.append(number_)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number_ if len(asked) < 3 else signal.SIGKILL)

    return handler


def _die_with_parent() -> None:
    """Runs in the child before the command: without its screen's process it leaves the run in good order."""
    if ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, signal.SIGTERM) != 0:
        raise UserError("cannot tie the command to its screen; use --plain")
