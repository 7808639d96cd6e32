"""Live tracking: a process beside the coordinator or the peer that follows its event journal and feeds trackers.

Used by `farflung coordinate` and `farflung join` with --tensorboard, --wandb or --mlflow.  A process, and no thread:
importing what trackers need takes seconds in which no other thread of a process turns, and a tracker that hangs or dies
takes nothing with it.  The journal on the disk is the queue between the two, and it is bounded: a tracker that is slow
is behind, and one that fails is told in one line.  Whoever is tracked knows nothing of it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from farflung.console.history.history import History
from farflung.console.history.trackers import LOOK_EVERY_S, About, Chosen, PlotRow, RunRows, Tracker
from farflung.protocol.errors import FarflungError, UserError
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.protocol.process import exit_codes
from farflung.protocol.process.journal import JOURNAL_VARIABLE, Event, Follower
from farflung.protocol.process.log_lines import LineWriter, Teller, text_of

# ---- peer rows ---------------------------------------------------------------------------------------------
# One peer's own training as numbers, a row whenever it tells how far it is: what its owner's tracker wants.
#
# Pure: it is handed what the peer's event journal says. A journal may hold earlier lives of
# the peer, and runs that it took part in before; each life of its process is told by itself, as trackers do
# with a training script that is started again.


class PeerRows:
    """The fold over the events of one process, named by its pid; `name` and `run_id` are known once it has begun."""

    key = "peer/step"  # in every row

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.name = self.run_id = self.group = ""
        self.rules: dict[str, Any] = {}
        self.finished = False
        self._last: tuple[float, float] | None = None  # (wall, tokens)
        self._rounds = 0
        self._version: float | None = None
        self._own: dict[str, float] = {}  # the script's figures

    def take(self, events: Iterable[Event]) -> list[PlotRow]:
        return [
            row
            for event in events
            if event.get("pid") == self._pid and (row := self._tell(event)) is not None
        ]

    def _tell(self, event: Event) -> PlotRow | None:
        match event.get("event"):
            case "start" if not event.get("again"):
                self._begin(event)
            case "committed":
                self._rounds += 1
                if int(event.get("fragment") or 0) == BOOKS_FRAGMENT:
                    self._version = float(event.get("version") or 0)
            case "logged":
                self._own = {
                    f"script/{name}": float(value) for name, value in (event.get("figures") or {}).items()
                }
            case "trained":
                return self._row(event)
            case "end":
                self.finished = True
        return None

    def _begin(self, event: Event) -> None:
        """A process may have had the same number in an earlier life: what counts is the newest one."""
        peer, process = str(event.get("peer") or ""), str(event.get("process") or "")
        self.group = str(event.get("run") or "")
        self.name = f"{event.get('name') or peer}-{process[:6]}"
        self.run_id = f"{self.group}-{peer}-{process[:12]}"
        self.rules = {"run": self.group, "peer": peer, "software": event.get("software")}
        self.finished, self._last, self._rounds, self._version, self._own = False, None, 0, None, {}

    def _row(self, event: Event) -> PlotRow:
        step, wall, tokens = (float(event.get(key) or 0.0) for key in ("step", "wall", "tokens"))
        values = {self.key: step, "peer/tokens": tokens, "peer/rounds": float(self._rounds)}
        values |= {
            f"peer/{key}": float(event[key]) for key in ("loss", "grad_norm") if event.get(key) is not None
        }
        values |= self._own
        if self._version is not None:
            values["run/version"] = self._version
        if self._last is not None and wall > self._last[0] and tokens >= self._last[1]:
            values["peer/tokens_per_s"] = (tokens - self._last[1]) / (wall - self._last[0])
        self._last = (wall, tokens)
        return PlotRow(int(step), wall, values)


# ---- live tracker ------------------------------------------------------------------------------------------

ENDS_WITHIN_S = 20.0  # to hand over the last rows, and say good-bye to a server


class TrackingOptions(msgspec.Struct, frozen=True):
    """The one line on the input of the process."""

    source: str  # a run's folder, or a peer's journal
    pid: int = 0  # of the peer; 0: it is a run
    offset: int = 0  # of the journal: what stands before it is of earlier lives
    tensorboard: str | None = None
    wandb: str | None = None
    mlflow: str | None = None


class Tracking:
    """Use as a context manager around what is tracked.  Nothing is done where no tracker is chosen."""

    def __init__(self, chosen: Chosen, who: str, say: LineWriter | None = None) -> None:
        """`who`: is not affected, for the one line that says that tracking has ended."""
        chosen.check()
        self._say: LineWriter = say if say is not None else Teller.from_environment("tracking")
        self._chosen = chosen
        self._who = who
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()
        self._words: Path | None = None  # what the process says
        self._thread: threading.Thread | None = None
        self._killed = False

    def __enter__(self) -> Tracking:
        return self

    def of_run(self, folder: Path) -> None:
        self._start(str(folder))

    def of_this_process(self, journal: Path | None) -> None:
        """From here on.  It is the peer's own process that asks."""
        if journal is None:
            if self._chosen.options:
                raise UserError(
                    f"{self._chosen.options[0]} reads the event journal, and {JOURNAL_VARIABLE}=off goes without one"
                )
            return
        offset = journal.stat().st_size if journal.exists() else 0
        self._start(str(journal), os.getpid(), offset)

    def _start(self, source: str, pid: int = 0, offset: int = 0) -> None:
        chosen = self._chosen
        if not chosen.options:
            return
        folder = str(chosen.tensorboard.absolute()) if chosen.tensorboard is not None else None
        begin = TrackingOptions(source, pid, offset, folder, chosen.wandb, chosen.mlflow)
        self._words = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "words"
        with self._words.open("wb") as words:  # trackers talk much
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "farflung.console.history.live_tracker"],
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
            )
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(begin) + b"\n")
            process.stdin.flush()  # it stays open: its end is what the process waits for
        except OSError:
            pass  # it is dead already, which is found out below
        self._thread = threading.Thread(target=self._watch, args=(process,), name="tracking", daemon=True)
        self._thread.start()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        why = f"did not end within {ENDS_WITHIN_S:g} s" if self._killed else f"failed: {self._last_words()}"
        if code:
            self._say(f"{', '.join(self._chosen.options)} {why}; {self._who} is not affected")

    def _last_words(self) -> str:
        lines = self._words.read_text("utf-8", "replace").strip().splitlines() if self._words else []
        return text_of(lines[-1]).removeprefix("farflung: ")[:300] if lines else "it said nothing"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        process, thread = self._process, self._thread
        if process is None or process.stdin is None or thread is None:
            return
        try:
            process.stdin.close()
        except OSError:
            pass
        thread.join(ENDS_WITHIN_S)
        if thread.is_alive():
            self._killed = True
            process.kill()
            thread.join()
        self._stack.close()


# ---- the process -------------------------------------------------------------------------------------------------


def _reader(begin: TrackingOptions) -> tuple[About, Callable[[], list[PlotRow]], Callable[[], bool]]:
    """Whose rows, the new ones, and whether it is known yet whose they are."""
    if begin.pid:
        follower, peer = Follower(Path(begin.source), begin.offset), PeerRows(begin.pid)
        return peer, lambda: peer.take(follower.new_events()), lambda: bool(peer.run_id)
    history, run = History(Path(begin.source), keep=False), RunRows()
    return run, lambda: run.take(history.new_events()), lambda: bool(run.run_id)


def track(begin: TrackingOptions, over: Callable[[float], bool]) -> None:
    """Until `over(seconds)`, which waits for so long, says so; what is there by then is handed on, too."""
    folder = Path(begin.tensorboard) if begin.tensorboard is not None else None
    chosen = Chosen(tensorboard=folder, wandb=begin.wandb, mlflow=begin.mlflow)
    about, news, begun = _reader(begin)
    trackers: list[Tracker] = []
    waiting: list[PlotRow] = []
    with ExitStack() as stack:
        ends = False
        while True:
            waiting += news()
            if begun() and not trackers:
                trackers = [stack.enter_context(closing(each)) for each in chosen.open(about)]
            if trackers:
                for row in waiting:
                    for tracker in trackers:
                        tracker.write(row)
                waiting.clear()
            if ends:
                return
            ends = over(LOOK_EVERY_S)


def main() -> int:
    """`python -m farflung.console.history.live_tracker`, by the commands alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever is tracked, which then hangs up
    os.nice(10)
    begin = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrackingOptions)
    try:
        track(begin, lambda wait_s: bool(select.select([sys.stdin], [], [], wait_s)[0]))
    except FarflungError as error:
        Teller.from_environment("tracking").failed(str(error))
        return exit_codes.code_for(error)
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
