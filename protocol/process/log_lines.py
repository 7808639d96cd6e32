"""How every process of farflung talks to people: few lines, or all of them, as text or as JSON.

Called by the command line, the agent and `join`; children find the choice in FARFLUNG_LOG, a list of `verbose` and
`json`.  The coordinator's words come through Python's logging, whose root is set up here and only by the command line:
a script that imports farflung keeps its own.

Quiet, the default, tells what a person wants to know: who came and went, what went wrong and what that means, the end.
What happens in every round is told twice a minute at most; `verbose` tells all of it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, TextIO

from farflung.protocol.errors import FarflungError
from farflung.protocol.process import exit_codes

LOG_VARIABLE = "FARFLUNG_LOG"
VERBOSE, JSON = "verbose", "json"
ROUTINE_EVERY_S = 30.0
COORDINATOR, CLOCK = "coordinator", "%H:%M:%S"


class LineWriter(Protocol):
    def __call__(self, text: str, routine: bool = False, **facts: str) -> None:
        """`facts`: what the text says, for programs; in JSON lines alone."""


class Teller:
    """`who` names the process in JSON lines; text lines begin with `farflung:`."""

    def __init__(
        self,
        who: str,
        choice: str = "",
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._who = who
        self._verbose, self._json = VERBOSE in choice.split(","), JSON in choice.split(",")
        self._out = out
        self._clock = clock
        self._routine_at = -ROUTINE_EVERY_S

    @classmethod
    def from_environment(cls, who: str, environ: Mapping[str, str] = os.environ) -> Teller:
        return cls(who, environ.get(LOG_VARIABLE, ""))

    def __call__(self, text: str, routine: bool = False, **facts: str) -> None:
        if routine and not self._verbose:
            now = self._clock()
            if now - self._routine_at < ROUTINE_EVERY_S:
                return
            self._routine_at = now
        line = json_line(self._who, "info", text, **facts) if self._json else f"farflung: {text}"
        print(line, file=self._out if self._out is not None else sys.stderr, flush=True)

    def failed(self, text: str) -> None:
        """What ended the process."""
        line = json_line(self._who, "error", text) if self._json else f"farflung: {text}"
        print(line, file=self._out if self._out is not None else sys.stderr, flush=True)


def json_line(who: str, level: str, text: str, **facts: str) -> str:
    told = {"wall": round(time.time(), 3), "level": level, "who": who, "pid": os.getpid(), "text": text}
    return json.dumps(told | facts, ensure_ascii=False)


def facts_of(line: str) -> dict[str, Any]:
    """A JSON line of ours; nothing where it is another program's, as a training script's."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    ours = isinstance(told, dict) and all(isinstance(told.get(key), str) for key in ("who", "text"))
    return told if ours and isinstance(told.get("wall"), float | int) else {}


def text_of(line: str) -> str:
    """A JSON line as the text line that it would have been; any other one as it is."""
    told = facts_of(line)
    if not told:
        return line
    if told["who"] != COORDINATOR:
        return f"farflung: {told['text']}"
    return f"{time.strftime(CLOCK, time.localtime(told['wall']))} {told['text']}"


def choose(verbose: bool, as_json: bool) -> None:
    """What the command line said, for this process and its children; without a word what was there stays."""
    said = [word for word, wanted in ((VERBOSE, verbose), (JSON, as_json)) if wanted]
    if said:
        os.environ[LOG_VARIABLE] = ",".join(said)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json_line(COORDINATOR, record.levelname.lower(), record.getMessage())


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def mistakes_in_one_line() -> None:
    """Of a user's script: a mistake that nobody there catches is told as everywhere else, in one line and by the exit
    code, instead of a traceback through farflung.  With `verbose` the traceback comes first."""
    before = sys.excepthook
    # Somebody's own stays.  That of torch.distributed only says which rank it is, and would hide the exit code.
    if before is sys.__excepthook__ or before.__module__ == "torch.distributed.distributed_c10d":
        sys.excepthook = functools.partial(_tell_mistake, before)


def _tell_mistake(
    before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, FarflungError) or VERBOSE in os.environ.get(LOG_VARIABLE, "").split(","):
        before(kind, error, trace)
    if isinstance(error, FarflungError):
        if not getattr(error, "said", False):
            Teller.from_environment("script").failed(str(error))
        raise SystemExit(exit_codes.code_for(error))  # what an exception in this place is for


def set_up_logging() -> None:
    """Of a coordinator's process."""
    words = os.environ.get(LOG_VARIABLE, "").split(",")
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(message)s", datefmt=CLOCK)
    handler.setFormatter(_JsonFormatter() if JSON in words else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("farflung").setLevel(logging.DEBUG if VERBOSE in words else logging.INFO)
