"""`farflung coordinate --announce`: keeps the run's record in phone books for as long as its coordinator runs.

Used by the command.  Every ten minutes a new record is signed here, in the coordinator's process, and handed to
another one (feeder.py), which speaks with the books: whoever takes that one over has no key, and the run goes on.
It is started again when it dies.  Must not know what a book is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from farflung.console.phonebook.book import LIFE_S, RENEWED_S, place_of
from farflung.console.phonebook.feeder import LINE_BYTES, Became
from farflung.protocol.join_url import JoinUrl, Whereabouts

AGAIN_S = 30.0  # after a record that no book took
ENDS_WITHIN_S = 3.0

log = logging.getLogger("farflung.coordinator")


def record_of(
    url: JoinUrl, incarnation: int, number: int, expires_s: int, prove: Callable[[bytes], bytes]
) -> Whereabouts:
    """`prove`: the run's ed25519 key and its signature."""
    addresses = tuple(map(str, url.addresses))
    return Whereabouts(url.run, incarnation, number, addresses, expires_s, b"").signed(prove)


class Announcer:
    """Use as a context manager around the coordinator; `begin` once its URL is known."""

    def __init__(self, books: Sequence[str], words: Sequence[str] = ()) -> None:
        """`books`: as people name them; UserError for what is none.  `words`: what is run, in tests."""
        places = [*dict.fromkeys(map(place_of, books))]
        module = [sys.executable, "-m", "farflung.console.phonebook.feeder"]
        self._words = [*(words or module), *places]
        self._process: subprocess.Popen[str] | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._taken = False  # by some book, of the newest record
        self._told: dict[str, str] = {}  # by book, what people were told last

    def __enter__(self) -> Announcer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        self._end()
        for each in self._threads:
            each.join(ENDS_WITHIN_S)

    def begin(self, url: JoinUrl, incarnation: int, prove: Callable[[bytes], bytes]) -> None:
        def new_record(number: int) -> Whereabouts:
            return record_of(url, incarnation, number, round(time.time()) + LIFE_S, prove)

        thread = threading.Thread(target=self._keep, args=(new_record,), name="announcer", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- the thread --------------------------------------------------------------------------------------------

    def _keep(self, new_record: Callable[[int], Whereabouts]) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            self._taken = False
            self._hand_over(new_record(number))
            # The first wait is short: whether a book took it shows in a moment.
            self._stop.wait(AGAIN_S)
            if self._taken and not self._stop.is_set():
                self._stop.wait(RENEWED_S - AGAIN_S)

    def _hand_over(self, record: Whereabouts) -> None:
        line = msgspec.json.encode(record.raw).decode() + "\n"
        process = self._process
        if process is None or process.poll() is not None:
            if process is not None:
                log.warning(
                    "phone book: its process ended with exit code %s and is started again", process.poll()
                )
            process = self._start()
        if process.stdin is None:
            return
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except (OSError, ValueError):
            pass  # it has just died: the next record finds another one

    def _start(self) -> subprocess.Popen[str]:
        # A book has processes of its own, which must end with it.
        process = subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._process = process
        listening = threading.Thread(target=self._listen, args=(process,), name="phone book", daemon=True)
        self._threads.append(listening)
        listening.start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        while process.stdout is not None and (line := process.stdout.readline(LINE_BYTES)):
            try:
                became = msgspec.json.decode(line, type=Became)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if became.places:
                self._taken = True
                told = f"phone book {became.book}: the run stands in it, at {became.places} places"
            else:
                told = f"phone book {became.book}: not there yet: {became.problem or 'no node took it'}"
            if self._told.get(became.book) != told:
                self._told[became.book] = told
                log.info("%s", told)

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
